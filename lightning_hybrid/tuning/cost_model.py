"""A cost model: the time of a training step under a layout, and the memory of each rank.

The layout search (:mod:`~.search`) calls :class:`CostModel` for each layout, at the start of a run or for
``lightning-hybrid suggest``; ``plan`` uses it to count the bytes between nodes. It needs no devices: a :class:`Profile`
has the costs of the module, and a `Machine` the speed of devices and links. Runs of each layout would take minutes to
hours, and would need the devices.

A layout has ``d`` replicas, ``t`` tensor-parallel ranks, ``c`` context-parallel ranks and ``p`` pipeline ranks with
``v`` chunks each, and runs ``m`` microbatches. The time of a step is the time of the rank that finishes last::

    step = accumulated batches x pipeline + exposed messages between replicas + optimizer

- *Computing*: a :class:`Profile` has the time of a stage for one microbatch. The backward takes twice the time of the
  forward (two products for each one). A recomputed forward takes the time of a forward again.
- *Pipeline*: :func:`~lightning_hybrid.pipeline_parallel.timeline.simulate` simulates the schedule of the run with the
  time of each stage. For equal stages and free messages, 1F1B has the bubble ``(p - 1) / m`` of the ideal time, and
  interleaved 1F1B has ``(p - 1) / (v m)`` (Narayanan et al., 2021, https://arxiv.org/abs/2104.04473).
- *Messages*: a message takes ``latency`` for each hop, and its bytes divided by the bandwidth. In a ring of ``n``
  ranks, an all-reduce sends ``2 (n - 1) / n`` of a tensor from each rank, in ``2 (n - 1)`` hops. An all-gather or a
  reduce-scatter sends half of that (Patarasuk and Yuan, 2009, https://doi.org/10.1016/j.jpdc.2008.09.002). If the ranks
  of a group are on several nodes, the figures of the network apply. A stage boundary costs one hop in each direction,
  within a node or over the network, depending on its two ranks. The bytes of a message delay the next message on the
  link, but its latency does not. A gradient has the size of its activation. Each tensor-parallel rank sends the part of
  the activation that it holds, in a line without ``sequence_parallel`` all of it, to the same rank of the next stage.
- *Collectives*: a collective takes ``hops x latency + bytes / bandwidth + collective_seconds``. The last term is the
  time that computing ranks need to start a collective together, apart from its messages: the ``l`` of a superstep
  ``w + g h + l`` (Valiant, 1990, https://doi.org/10.1145/79173.79181). It is about 0 if each rank has its own device.
  On a CPU, threads of the backend wait for cores that compute, for as long as the time slices of the scheduler,
  whatever the number of bytes. A stage boundary does not have this term, because the sender does not wait.
- *Microbatches in flight*: at a boundary between nodes, extra microbatches in flight hide the latency, as far as the
  memory allows. ``extra_in_flight`` is chosen as in a run (:mod:`~lightning_hybrid.pipeline_parallel.links.in_flight`).
- *Tensor parallelism*: the all-reduces and all-gathers of the forward, and the same number in the backward (Shoeybi et
  al., 2019, https://arxiv.org/abs/1909.08053). The rank waits for them. If the ranks form a grid with two or three
  dimensions (:mod:`~lightning_hybrid.tensor_parallel.grid.blocks`), with ``q`` ranks on each side of ``n`` squares, or
  ``l`` ranks on each side of a cube, a transformer layer with ``a = e b s h`` bytes of activations and ``w`` bytes of
  weights sends this in the forward and in the backward::

      2d, 2.5d     (q - 1) / q^2 (7 a / n + w)     twice that, and 2 (n - 1) / n of w / q^2
      3d           (l - 1) / l^3 (16 a + w)        (l - 1) / l^3 (23 a + 2 w)

  In addition, the outputs of the last sharded layers are all-gathered, and the statistics of norms and the gradients of
  biases are all-reduced. The link of each axis of a grid is the slowest link of the tensor-parallel group.
- *Context parallelism*: for each attention over ``s`` positions with ``b`` samples, ``h`` features (``k`` of the keys)
  and ``e`` bytes per number, a rank sends this in the forward and in the backward::

      ulysses      4 e s b h (c - 1) / c^2    the same                        four all-to-alls
      all_gather   2 e s b k (c - 1) / c      the same                        two all-gathers, two reduce-scatters
      ring         2 e s b k (c - 1) / c      2 e s b k (2 c - 1) / c         one block after the other

  (Jacobs et al., 2023, https://arxiv.org/abs/2309.14509; Llama Team, 2024, https://arxiv.org/abs/2407.21783; Liu et
  al., 2023, https://arxiv.org/abs/2310.01889). The backward of a ring sends gradients of keys and values in float32 at
  least. The messages of a ring overlap with a share ``overlap`` of the products in attention, which take twice as long
  in the backward. If code around the layers reads their output, the output is all-gathered, and so is the gradient of
  the first layer's input. Gradients of parameters are summed over replicas and context-parallel ranks together. With
  ZeRO, the shards are summed over the ``c`` ranks in a separate all-reduce, after the last backward.
- *Experts over replicas*: for ``r`` rows, each a token for one of its experts, with ``h`` features, ``e`` bytes per
  number, ``w`` bytes per weight, and ``g`` replicas that share the experts, a rank sends this for each module with
  experts. Experts are assumed to receive equally many rows. Nothing hides the messages::

      forward      r (g - 1) / g (2 e h + w + 4)      three all-to-alls
      backward     r (g - 1) / g (2 e h + w)          two all-to-alls

- *Data parallelism and ZeRO* (Rajbhandari et al., 2020, https://arxiv.org/abs/1910.02054), for ``G`` bytes of gradients
  and ``P`` bytes of parameters on a rank, with ``x = (d - 1) / d`` and ``m`` counted over all accumulated batches::

      zero 0   2 x G              gradients all-reduced once
      zero 1   x G + x P          gradients reduce-scattered once, parameters all-gathered once
      zero 2   m x G + x P        gradients of each microbatch
      zero 3   m x G + x P        the same; if a layer is resharded after each use, m x G + 2 m x P

  in 1, 2, ``m + 1``, and ``m + 1`` or ``3 m`` collectives. They overlap with a share ``overlap`` of the last backward
  with ZeRO stages 0 and 1, and of all backwards with stages 2 and 3.
- *Optimizer*: the bytes that it reads and writes (gradients, twice the parameters, twice the states), divided by the
  memory bandwidth.
- *Memory*: parameters, gradients, states and buffers as ``lightning-hybrid memory`` estimates them. Activations are the
  bytes that a stage saves for one microbatch, times the number of microbatches in flight in the schedule.

The model does not include contention between links that are used at the same time, data loading, memory fragmentation,
and the temporary memory of single operations.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf, isfinite, prod
from typing import Protocol

from lightning_hybrid.axes import AXES, CONTEXT, DATA, PIPELINE, TENSOR, Axis, axes_inside, complete_order
from lightning_hybrid.memory.account import MemoryUsage
from lightning_hybrid.pipeline_parallel.links.in_flight import choose_extra
from lightning_hybrid.pipeline_parallel.links.link import Link, StepTimes
from lightning_hybrid.pipeline_parallel.timeline import simulate
from lightning_hybrid.tuning.candidates import Layout, Step
from lightning_hybrid.tuning.machine import Machine
from lightning_hybrid.tuning.messages import NO_EXCHANGE, NO_MESSAGES, Exchange, Messages, in_ring
from lightning_hybrid.tuning.schedule_cache import most_saved, schedule_of

_BACKWARD = 2.0  # forwards that a backward takes


@dataclass(frozen=True)
class StageCost:
    """The cost of a stage, or of a part of a stage, for one microbatch.

    Attributes:
        forward: Seconds of a forward, without messages.
        recomputed: Seconds of the forward that run again in the backward.
        overlappable: Seconds of a forward that can overlap with context-parallel messages.
        tensor: The messages in the tensor-parallel group, in a forward and a backward.
        context: The messages in the context-parallel group, in a forward and a backward.
        tokens: The rows that modules with experts receive and return, see :meth:`.Exchange.between`.
        saved: Bytes that a stage saves for its backward, on one rank.
        output: Bytes that a rank of the stage sends to the next stage in a forward.
    """

    forward: float = 0.0
    recomputed: float = 0.0
    overlappable: float = 0.0
    tensor: Exchange = NO_EXCHANGE
    context: Exchange = NO_EXCHANGE
    tokens: Exchange = NO_EXCHANGE
    saved: float = 0.0
    output: float = 0.0

    def __add__(self, other: StageCost) -> StageCost:
        return StageCost(*(mine + its for mine, its in zip(vars(self).values(), vars(other).values(), strict=True)))

    def __mul__(self, number: int) -> StageCost:
        return StageCost(*(value * number for value in vars(self).values()))

    def with_forward(self, seconds: float) -> StageCost:
        """Return the cost with all seconds scaled, so that a forward takes a given time."""
        factor = seconds / self.forward if self.forward else 0.0
        times = {name: factor * vars(self)[name] for name in ("forward", "recomputed", "overlappable")}
        return replace(self, **times)


class Profile(Protocol):
    """The costs of a module under layouts that the module supports.

    The cost model only needs these methods. `ModuleProfile` implements them with dry runs, and tests with formulas.
    """

    def stages(self, layout: Layout, samples: int) -> Sequence[StageCost]:
        """Return the costs of the stages of all pipeline ranks, in order, for a microbatch with a number of samples."""

    def num_layers(self, layout: Layout) -> Sequence[int]:
        """Return the number of layers of each stage, in order."""

    def held(self, layout: Layout) -> Sequence[MemoryUsage]:
        """Return the memory of each pipeline rank, without activations."""

    def weights(self, layout: Layout) -> Sequence[tuple[int, int]]:
        """Return the bytes of parameters and of gradients of each pipeline rank, before ZeRO shards them."""


@dataclass(frozen=True)
class Cost:
    """The cost of a step under a layout.

    Attributes:
        layout: The layout.
        memory: The memory of each pipeline rank.
        least: A lower bound of the seconds of the step, without time in which a rank waits for other stages.
        parts: Seconds of the rank with the most work, by kind of work, such as ``"computing"``. After a simulation,
            ``"bubble"`` is the time in which this rank waits.
        sent: The most bytes that a rank sends in a step, by axis: ``"tensor"``, ``"context"``, ``"pipeline"``,
            ``"data"`` and ``"tokens"``, to replicas with other experts. The key ``"rows"`` has the part of ``"data"``
            that is sent to ranks with equal ZeRO shards.
        seconds: Seconds of the step; ``None`` if it was not simulated.
        bubble: The share of the pipeline's time that an average rank waits; ``None`` if it was not simulated.
        samples: Samples of the optimizer step, of all replicas.
    """

    layout: Layout
    memory: tuple[MemoryUsage, ...]
    least: float
    parts: dict[str, float]
    sent: dict[str, float]
    seconds: float | None = None
    bubble: float | None = None
    samples: int = 1

    @property
    def least_of_sample(self) -> float:
        """A lower bound of the seconds per sample."""
        return self.least / self.samples

    @property
    def seconds_of_sample(self) -> float:
        """Seconds per sample; the lower bound if the step was not simulated."""
        return (self.least if self.seconds is None else self.seconds) / self.samples

    @property
    def bytes(self) -> float:
        """The memory of the rank that needs the most; unknown parts count as 0."""
        return max(map(_known_bytes, self.memory))


class CostModel:
    """The costs of layouts.

    Results are cached by the fields of a layout that determine them, for as long as the model exists.

    Args:
        profile: The costs of the module.
        machine: The speed of devices and links.
        step: The samples of a step.
    """

    def __init__(self, profile: Profile, machine: Machine, step: Step) -> None:
        self.profile, self.machine, self.step = profile, machine, step
        # The order can include axes with one rank, because they do not change any distance between ranks.
        order = complete_order(step.rank_order, [axis.key for axis in AXES])
        self._inside = {axis: axes_inside(axis, order) for axis in AXES}
        self._links = cache(machine.link)
        self._links_between = cache(machine.link_between)
        self._works_by_key: dict[Hashable, Sequence[_Work]] = {}
        self._played_by_key: dict[Hashable, tuple[list[float], float]] = {}

    def estimate(self, layout: Layout) -> Cost:
        """Return the cost without a simulation: memory, messages, and a lower bound of the time."""
        ranks = list(dict.fromkeys(self._ranks(layout)))
        slowest = max(ranks, key=lambda rank: rank.least)
        sent = {axis: max(rank.sent[axis] for rank in ranks) for axis in ranks[0].sent}
        total = self.step.total(layout)
        return Cost(layout, self._memory(layout), slowest.least, slowest.parts, sent, samples=total)

    def simulate(self, cost: Cost) -> Cost:
        """Return the cost with the time of a step, which a simulation of the schedule finds.

        The layout of the returned cost has extra microbatches in flight if they hide latency.
        """
        times = self._times(cost.layout)
        layout, memory = self._with_more_in_flight(cost, times)
        ends, bubble = self._played(layout, times)
        repeated = (self.step.accumulations(layout.data) - 1) * max(ends)
        alone = zip(ends, self._ranks(layout), strict=True)
        seconds = repeated + max(end + rank.exposed + rank.optimizer for end, rank in alone)
        waiting = max(0.0, seconds - sum(cost.parts.values()))
        parts = {**cost.parts, "bubble": waiting}
        return Cost(layout, memory, cost.least, parts, cost.sent, seconds, bubble, cost.samples)

    def _played(self, layout: Layout, times: StepTimes) -> tuple[list[float], float]:
        """Return the time at which each rank ends its last computation, and the bubble. All ZeRO stages share them."""
        key = layout.schedule_key, self._stages_key(layout)
        if key not in self._played_by_key:
            schedule = schedule_of(*layout.schedule_key)
            timeline = simulate(schedule, send=times.send, duration=times.duration, occupied=times.occupied)
            self._played_by_key[key] = [spans[-1].end for spans in timeline.computing], timeline.bubble
        return self._played_by_key[key]

    def _with_more_in_flight(self, cost: Cost, times: StepTimes) -> tuple[Layout, tuple[MemoryUsage, ...]]:
        """Return the layout with the extra microbatches in flight that hide latency between nodes, and its memory."""
        layout = cost.layout
        groups = self._stride(layout, PIPELINE), layout.pipeline, layout.num_ranks
        boundaries = range(len(times.sends))
        is_far = [self.machine.crosses_nodes(*groups, _ends(layout, stage)) for stage in boundaries]
        if not any(is_far):
            return layout, cost.memory
        kept = [
            [value if far else 0.0 for value, far in zip(values, is_far, strict=True)]
            for values in (times.sends, times.occupations)
        ]
        stages = self.stages(layout)
        most = []
        for rank, usage in enumerate(cost.memory):
            saved = sum(stage.saved for stage in stages[rank :: layout.pipeline])
            room = self.machine.memory - _known_bytes(usage)
            most.append(room // saved if saved and isfinite(room) else inf)
        far = StepTimes(times.forwards, times.backwards, *kept)
        extra = choose_extra(layout.schedule, far, layout.pipeline, layout.num_microbatches, most, build=schedule_of)
        more = replace(layout, extra_in_flight=extra if any(extra) else ())
        memory = self._memory(more)
        if max(map(_known_bytes, memory)) > self.machine.memory:  # interleaved 1F1B adds whole groups of microbatches
            return layout, cost.memory
        return more, memory

    def fewest_recomputed(self, layout: Layout) -> Layout | None:
        """Return the layout with the fewest recomputed layers on each pipeline rank with which it fits.

        Returns:
            The layout, or ``None`` if it does not fit even with all layers recomputed.
        """
        layers, limit = self.profile.num_layers(layout), self.machine.memory

        @cache
        def fitting(number: int) -> tuple[Layout, list[bool]]:
            some = replace(layout, recompute=tuple(min(number, size) for size in layers))
            return some, [_known_bytes(usage) <= limit for usage in self._memory(some)]

        found = []
        for rank in range(layout.pipeline):
            numbers = range(max(layers[rank :: layout.pipeline]) + 1)
            at = bisect_left(numbers, True, key=lambda number, rank=rank: fitting(number)[1][rank])  # type: ignore[misc]
            if at == len(numbers):
                return None
            found.append(at)
        fewest = (min(found[stage % layout.pipeline], size) for stage, size in enumerate(layers))
        return replace(layout, recompute=tuple(fewest))

    def stages(self, layout: Layout) -> Sequence[StageCost]:
        """Return the costs of the stages of a layout for one microbatch."""
        return self.profile.stages(layout, self.step.microbatch(layout))

    def _ranks(self, layout: Layout) -> list[_Rank]:
        """Return the costs of each pipeline rank in a step; ranks with equal costs share one object."""
        parts = self._works(layout), self.profile.weights(layout), self.profile.held(layout)
        alike: dict[Hashable, _Rank] = {}
        found = []
        for work, weights, held in zip(*parts, strict=True):
            key = work, weights, held.optimizer
            if key not in alike:
                alike[key] = _Rank(self, layout, *key)
            found.append(alike[key])
        return found

    def _stages_key(self, layout: Layout) -> Hashable:
        """Return the fields that determine the costs of the stages and their messages."""
        return layout.stages_key, layout.data, layout.experts, self.step.microbatch(layout)

    def _works(self, layout: Layout) -> Sequence[_Work]:
        """Return the work of each pipeline rank for a microbatch; ranks with equal work share one object."""
        key = self._stages_key(layout)
        if key not in self._works_by_key:
            self._works_by_key[key] = self._find_works(layout)
        return self._works_by_key[key]

    def _find_works(self, layout: Layout) -> list[_Work]:
        stages, number = self.stages(layout), layout.pipeline
        boundaries = [stage.output for stage in stages[:-1]]
        passed = [sum(boundaries[rank::number]) for rank in range(number)]
        alike: dict[Hashable, _Work] = {}
        found = []
        for rank in range(number):
            own, sent = stages[rank::number], passed[rank] + passed[rank - 1]  # and gradients
            key = *map(id, own), sent
            if key not in alike:
                alike[key] = _Work.of(self, layout, own, sent)
            found.append(alike[key])
        return found

    def _memory(self, layout: Layout) -> tuple[MemoryUsage, ...]:
        saved = tuple(int(stage.saved) for stage in self.stages(layout))
        ranks = zip(self.profile.held(layout), most_saved(layout.schedule_key, saved), strict=True)
        return tuple(
            MemoryUsage(usage.parameters, usage.gradients, usage.optimizer, activations, usage.buffers)
            for usage, activations in ranks
        )

    def _times(self, layout: Layout) -> StepTimes:
        """Return the times of forwards, backwards and stage boundaries.

        Forwards and backwards include the time in which they wait for tensor-parallel and context-parallel messages.
        """
        stages = self.stages(layout)
        forwards, backwards = [], []
        for stage in stages:
            messages = [self.tensor_seconds(layout, stage), self.context_seconds(layout, stage)]
            messages.append(self.token_seconds(layout, stage))
            forwards.append(stage.forward + sum(there for there, _ in messages))
            backwards.append(_BACKWARD * stage.forward + stage.recomputed + sum(back for _, back in messages))
        if layout.pipeline == 1:
            nothing = [0.0] * (len(stages) - 1)
            return StepTimes(forwards, backwards, nothing, nothing)
        links = [self.boundary(layout, stage) for stage in range(len(stages) - 1)]
        occupations = [stage.output / link.bandwidth for stage, link in zip(stages[:-1], links, strict=True)]
        return StepTimes(forwards, backwards, [link.latency for link in links], occupations)

    def tensor_seconds(self, layout: Layout, stage: StageCost) -> tuple[float, float]:
        """Return the seconds of tensor-parallel messages in a forward and in a backward."""
        if layout.tensor == 1:
            return 0.0, 0.0
        return self._exposed_seconds(self.link(layout, TENSOR), stage.tensor)

    def context_seconds(self, layout: Layout, stage: StageCost) -> tuple[float, float]:
        """Return the seconds of context-parallel messages in a forward and in a backward that nothing hides."""
        if layout.context == 1:
            return 0.0, 0.0
        hidden = self.machine.overlap * stage.overlappable
        return self._exposed_seconds(self.link(layout, CONTEXT), stage.context, hidden)

    def token_seconds(self, layout: Layout, stage: StageCost) -> tuple[float, float]:
        """Return the seconds in which a forward and a backward wait for the tokens of experts."""
        if layout.experts == 1:
            return 0.0, 0.0
        link = self._links(self._stride(layout, DATA), layout.experts, layout.num_ranks)
        return self._exposed_seconds(link, stage.tokens.between(layout.experts))

    def _exposed_seconds(self, link: Link, exchange: Exchange, hidden: float = 0.0) -> tuple[float, float]:
        """Return the seconds that a forward and a backward wait for messages.

        Args:
            link: The link over which they are sent.
            exchange: The messages.
            hidden: The seconds of a forward during which it computes and does not wait.
        """
        forward = max(0.0, self.seconds(link, exchange.forward) - hidden)
        backward = max(0.0, self.seconds(link, exchange.backward) - _BACKWARD * hidden)
        return forward, backward + exchange.repeated_share * forward

    def seconds(self, link: Link, messages: Messages) -> float:
        """Return the seconds of messages over a link, with the fixed overhead of collectives."""
        return link.seconds(messages.sent, messages.hops) + messages.collectives * self.machine.collective_seconds

    def gradient_link(self, layout: Layout) -> Link:
        """Return the link over which replicas and context-parallel ranks sum gradients together."""
        return self._with_context(layout, self.link(layout, DATA))

    def zero_link(self, layout: Layout) -> Link:
        """Return the slowest link between the replicas over which ZeRO shards a parameter."""
        return self._links(self._stride(layout, DATA), layout.num_shards, layout.num_ranks)

    def rows_link(self, layout: Layout) -> Link:
        """Return the slowest link between the ranks with equal ZeRO shards."""
        stride, size = self._stride(layout, DATA) * layout.num_shards, layout.data // layout.num_shards
        return self._with_context(layout, self._links(stride, size, layout.num_ranks))

    def _with_context(self, layout: Layout, link: Link) -> Link:
        """Return the link of a group that includes context-parallel ranks: the network if these are on several nodes.

        Args:
            layout: The layout.
            link: The link between the other ranks of the group.
        """
        size, number = layout.context, layout.num_ranks
        is_far = self.machine.crosses_nodes(self._stride(layout, CONTEXT), size, number, (0, size - 1))
        return self.link(layout, CONTEXT) if is_far else link

    def boundary(self, layout: Layout, stage: int) -> Link:
        """Return the link between a stage and the next one."""
        groups = self._stride(layout, PIPELINE), layout.pipeline, layout.num_ranks
        return self._links_between(*groups, _ends(layout, stage))

    def _stride(self, layout: Layout, axis: Axis) -> int:
        """Return the distance from one rank of an axis to the next."""
        return prod(map(layout.sizes.along, self._inside[axis]))

    def link(self, layout: Layout, axis: Axis) -> Link:
        """Return the slowest link between the ranks of an axis."""
        return self._links(self._stride(layout, axis), layout.sizes.along(axis), layout.num_ranks)


def _ends(layout: Layout, stage: int) -> tuple[int, int]:
    """Return the pipeline ranks of a stage and of the next one."""
    return stage % layout.pipeline, (stage + 1) % layout.pipeline


def _known_bytes(usage: MemoryUsage) -> float:
    """Return the memory of a rank; unknown parts count as 0."""
    return sum(part or 0 for part in vars(usage).values())


@dataclass(frozen=True, eq=False)
class _Work:
    """The work of a pipeline rank for one microbatch, in all of its stages.

    Attributes:
        computing: Seconds of forwards and backwards, without messages and recomputation.
        backward: Seconds of the backwards among them.
        recomputing: Seconds of recomputation.
        tensor: Seconds of messages in the tensor-parallel group.
        context: Seconds of messages in the context-parallel group that no computation hides.
        tokens: Seconds of messages with the tokens of experts.
        sent_tensor: Bytes sent in the tensor-parallel group.
        sent_context: Bytes sent in the context-parallel group.
        sent_tokens: Bytes sent to replicas with other experts.
        passed: Bytes sent to other stages, activations and gradients.
    """

    computing: float
    backward: float
    recomputing: float
    tensor: float
    context: float
    tokens: float
    sent_tensor: float
    sent_context: float
    sent_tokens: float
    passed: float

    @classmethod
    def of(cls, model: CostModel, layout: Layout, stages: Sequence[StageCost], passed: float) -> _Work:
        """Return the work of some stages."""
        return cls(
            computing=sum((1 + _BACKWARD) * stage.forward for stage in stages),
            backward=sum(_BACKWARD * stage.forward for stage in stages),
            recomputing=sum(stage.recomputed for stage in stages),
            tensor=sum(sum(model.tensor_seconds(layout, stage)) for stage in stages),
            context=sum(sum(model.context_seconds(layout, stage)) for stage in stages),
            tokens=sum(sum(model.token_seconds(layout, stage)) for stage in stages),
            sent_tensor=sum(stage.tensor.sent for stage in stages),
            sent_context=sum(stage.context.sent for stage in stages),
            sent_tokens=sum(stage.tokens.between(layout.experts).sent for stage in stages),
            passed=passed,
        )


class _Rank:
    """The work of a pipeline rank in a step, apart from waiting for other stages.

    Args:
        model: The cost model.
        layout: The layout.
        work: The rank's work for one microbatch.
        weights: The bytes of the rank's parameters and gradients, before ZeRO shards them.
        states: The bytes of the rank's optimizer states; ``None`` if unknown.

    Attributes:
        parts: Seconds by kind of work.
        sent: Bytes by axis.
        exposed: Seconds of messages for gradients and parameters that do not overlap with a backward: between replicas
            and, with context parallelism, between ranks with the same shards.
        optimizer: Seconds of the optimizer.
        least: The sum of all seconds.
    """

    def __init__(
        self, model: CostModel, layout: Layout, work: _Work, weights: tuple[int, int], states: int | None
    ) -> None:
        number = layout.num_microbatches * model.step.accumulations(layout.data)
        self.optimizer = self._optimizer_seconds(model, layout, weights, states)
        gradients, shards = self._data_volume(model, layout, weights, number)
        backward = work.backward * (number if layout.zero_stage > 1 else 1)
        # Without ZeRO, one all-reduce sums gradients over replicas and context-parallel ranks.
        link = model.zero_link(layout) if layout.zero_stage else model.gradient_link(layout)
        waiting = max(0.0, model.seconds(link, gradients) - model.machine.overlap * backward)
        self.exposed = waiting + model.seconds(model.rows_link(layout), shards)
        self.parts = {
            "computing": number * work.computing,
            "recomputing": number * work.recomputing,
            "tensor-parallel messages": number * work.tensor,
            "context-parallel messages": number * work.context,
            "messages with tokens of experts": number * work.tokens,
            "data-parallel messages": self.exposed,
            "optimizer": self.optimizer,
        }
        self.least = sum(self.parts.values())
        self.sent = {
            "tensor": number * work.sent_tensor if layout.tensor > 1 else 0.0,
            "context": number * work.sent_context if layout.context > 1 else 0.0,
            "pipeline": number * work.passed if layout.pipeline > 1 else 0.0,
            "tokens": number * work.sent_tokens,
            "data": gradients.sent + shards.sent,
            "rows": shards.sent,
        }

    @staticmethod
    def _data_volume(
        model: CostModel, layout: Layout, weights: tuple[int, int], number: int
    ) -> tuple[Messages, Messages]:
        """Return the messages of a step in the zero group, or between replicas, and the messages for equal shards.

        A rank sums the gradients of its shards with the context-parallel ranks and the other zero groups.
        """
        parameters, grads = weights
        if layout.zero_stage == 0:
            return in_ring(layout.data * layout.context, 2, grads), NO_MESSAGES
        replicas, share = layout.num_shards, (layout.num_shards - 1) / layout.num_shards
        backwards = number if layout.zero_stage > 1 else 1
        gathers = 1
        if layout.zero_stage == 3 and model.step.reshard_after_forward is True:
            gathers = 2 * number
        elif layout.zero_stage == 3 and model.step.reshard_after_forward == "auto" and layout.num_microbatches == 1:
            gathers = 2 * model.step.accumulations(layout.data)
        collectives = backwards + gathers
        sent = share * (backwards * grads + gathers * parameters)
        gathered = Messages(sent, collectives * (replicas - 1), collectives)
        return gathered, in_ring(layout.context * layout.data // replicas, 2, grads / replicas)

    @staticmethod
    def _optimizer_seconds(model: CostModel, layout: Layout, weights: tuple[int, int], states: int | None) -> float:
        parameters, grads = weights
        touched = (2 * parameters + grads) / layout.num_shards + 2 * (states or 0)
        return touched / model.machine.memory_bandwidth
