"""How long a training step takes under a layout, and what each rank holds: formulas, and a machine's figures.

A layout has ``d`` replicas, ``t`` ranks that share each layer and ``p`` pipeline ranks with ``v`` chunks each, and runs
``m`` microbatches. The time of a step is that of the rank that is finished last::

    step = pipeline + exposed messages of its replicas + optimizer

- *Computing*: what a stage takes for one microbatch comes from a :class:`Profile`. The backward takes twice the forward
  (two products for each one), and the forward once more where it is recomputed.
- *Pipeline*: :func:`~lightning_hybrid.pipeline_parallel.timeline.simulate` plays the schedule that a run would execute,
  with the time of each stage. For equal stages and free messages 1F1B has the bubble ``(p - 1) / m`` of the ideal time,
  interleaved ``(p - 1) / (v m)`` (Narayanan et al., 2021, https://arxiv.org/abs/2104.04473).
- *Messages*: ``latency`` for each hop, and bytes by bandwidth. In a ring of ``n`` ranks a rank sends ``2 (n - 1) / n``
  of a tensor to sum it up, in ``2 (n - 1)`` hops, and half of that to gather or to reduce-scatter it (Patarasuk and
  Yuan, 2009, https://doi.org/10.1016/j.jpdc.2008.09.002). A stage boundary costs one hop in each direction.
- *Tensor parallelism*: the sums and gathers of the forward, and as many in the backward (Shoeybi et al., 2019,
  https://arxiv.org/abs/1909.08053). The rank waits for them.
- *Data parallelism and ZeRO* (Rajbhandari et al., 2020, https://arxiv.org/abs/1910.02054), ``G`` bytes of gradients and
  ``P`` of parameters on a rank, ``x = (d - 1) / d``, ``m`` counted over accumulated batches too::

      zero 0   2 x G              gradients summed once
      zero 1   x G + x P          gradients reduce-scattered once, parameters gathered once
      zero 2   m x G + x P        gradients of each microbatch
      zero 3   m x G + x P        the same; with a layer freed after each use m x G + 2 m x P

  Of these a share ``overlap`` of the backward hides what is sent beside it: of the last backward with ZeRO 0 and 1, of
  all with 2 and 3.
- *Optimizer*: what it reads and writes, gradients, twice parameters and states, by the bandwidth of the memory.
- *Memory*: parameters, gradients, states and buffers of the account of ``lightning-hybrid memory``; of activations,
  what a microbatch saves in a stage, times the microbatches that the schedule has in flight there.

What it leaves out: that many links are used at once, loading of data, fragments of memory, and what single operations
need while they run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Protocol

from lightning_hybrid.cli.suggest.machine import Link, Machine
from lightning_hybrid.memory.account import MemoryUsage, peak_activation_bytes
from lightning_hybrid.pipeline_parallel.schedules import Action, Kind, Schedule, build
from lightning_hybrid.pipeline_parallel.timeline import simulate

#: What is tried: stages on a rank, and what runs again in backward.
MOST_CHUNKS = 4
RECOMPUTE = (False, "selective", True)

_BACKWARD = 2.0  # forwards that a backward takes


@dataclass(frozen=True)
class Layout:
    """What is chosen. The sizes and options are arguments of `HybridStrategy`."""

    data: int
    tensor: int
    pipeline: int
    num_microbatches: int = 1
    schedule: str = "1f1b"
    num_chunks: int = 1
    zero_stage: int = 0
    recompute: bool | str = False

    @property
    def num_ranks(self) -> int:
        """The processes that it needs."""
        return self.data * self.tensor * self.pipeline


@dataclass(frozen=True)
class StageCost:
    """What one stage does with one microbatch.

    Attributes:
        forward: Seconds, without messages.
        recomputed: Seconds of the forward that run again in backward.
        saved: Bytes that it keeps for backward.
        output: Bytes that go to the next stage.
        tensor_sent: Bytes that a rank sends to those that share its layers, in a forward.
        tensor_hops: Messages one after the other of these.
        tensor_repeated: The share of both that backward sends once more, because it is recomputed.
    """

    forward: float
    recomputed: float = 0.0
    saved: float = 0.0
    output: float = 0.0
    tensor_sent: float = 0.0
    tensor_hops: float = 0.0
    tensor_repeated: float = 0.0


class Profile(Protocol):
    """What a module costs; it is asked for layouts that it can be divided by."""

    def stages(self, layout: Layout, samples: int) -> Sequence[StageCost]:
        """What the stages do, in order, with a microbatch of so many samples."""

    def held(self, layout: Layout) -> Sequence[MemoryUsage]:
        """What each pipeline rank holds, apart from activations."""

    def weights(self, layout: Layout) -> Sequence[tuple[int, int]]:
        """The bytes of parameters and of gradients of each pipeline rank, before ZeRO shards them."""


@dataclass(frozen=True)
class Step:
    """The problem: what an optimizer step is to do, wherever.

    Attributes:
        samples: Of all replicas together, in a batch of each.
        accumulated: Batches of an optimizer step.
        rank_order: The axes, outermost first, as in `HybridStrategy`.
        zero_frees: When stage 3 of ZeRO frees, as in `HybridStrategy`.
    """

    samples: int
    accumulated: int = 1
    rank_order: str = "pp-dp-tp"
    zero_frees: str = "auto"

    def microbatch(self, layout: Layout) -> int:
        """The samples of the largest microbatch."""
        return -(-self.samples // (layout.data * layout.num_microbatches))


@dataclass(frozen=True)
class Cost:
    """What a step of a layout takes.

    Attributes:
        layout: The layout.
        memory: What each pipeline rank holds.
        least: Seconds that the step takes at least: without any waiting for other stages.
        parts: Seconds of the rank that has most to do, by what it does.
        sent: Bytes that a rank sends at most in a step, by axis.
        seconds: Of the step; ``None`` if it was not simulated.
        bubble: The share of the pipeline's time that an average rank waits; ``None`` if it was not simulated.
    """

    layout: Layout
    memory: tuple[MemoryUsage, ...]
    least: float
    parts: dict[str, float]
    sent: dict[str, float]
    seconds: float | None = None
    bubble: float | None = None

    @property
    def bytes(self) -> float:
        """What the fullest rank holds; a part that is not known counts nothing."""
        return max(sum(part or 0 for part in vars(usage).values()) for usage in self.memory)


@cache
def schedule_of(name: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """The schedule of a step, made once."""
    return build(name, num_ranks, num_microbatches, num_chunks)


class CostModel:
    """The costs of layouts.

    Args:
        profile: Of the module.
        machine: What it runs on.
        step: What a step does.
    """

    def __init__(self, profile: Profile, machine: Machine, step: Step) -> None:
        self.profile, self.machine, self.step = profile, machine, step

    def estimate(self, layout: Layout) -> Cost:
        """All that can be told without the simulator: memory, messages, and the least that a step takes."""
        ranks = [_Rank(self, layout, rank) for rank in range(layout.pipeline)]
        slowest = max(ranks, key=lambda rank: rank.least)
        sent = {axis: max(rank.sent[axis] for rank in ranks) for axis in ("tensor", "pipeline", "data")}
        return Cost(layout, self._memory(layout), slowest.least, slowest.parts, sent)

    def simulate(self, cost: Cost) -> Cost:
        """The same with the time of a step, for which its schedule is played."""
        layout = cost.layout
        stages = self.stages(layout)
        timeline = simulate(
            self._schedule(layout),
            send=self._send(layout, stages),
            duration=lambda action: self._seconds(layout, stages[action.stage], action),
        )
        repeated = (self.step.accumulated - 1) * timeline.makespan
        ends = [spans[-1].end for spans in timeline.computing]
        alone = [_Rank(self, layout, rank) for rank in range(layout.pipeline)]
        seconds = repeated + max(end + rank.exposed + rank.optimizer for end, rank in zip(ends, alone, strict=True))
        waiting = max(0.0, seconds - sum(cost.parts.values()))
        return Cost(
            layout, cost.memory, cost.least, {**cost.parts, "bubble": waiting}, cost.sent, seconds, timeline.bubble
        )

    def stages(self, layout: Layout) -> Sequence[StageCost]:
        """What its stages do with a microbatch."""
        return self.profile.stages(layout, self.step.microbatch(layout))

    def _schedule(self, layout: Layout) -> Schedule:
        return schedule_of(layout.schedule, layout.pipeline, layout.num_microbatches, layout.num_chunks)

    def _memory(self, layout: Layout) -> tuple[MemoryUsage, ...]:
        saved = {number: int(stage.saved) for number, stage in enumerate(self.stages(layout))}
        schedule = self._schedule(layout)
        return tuple(
            MemoryUsage(
                usage.parameters,
                usage.gradients,
                usage.optimizer,
                peak_activation_bytes(schedule, rank, saved),
                usage.buffers,
            )
            for rank, usage in enumerate(self.profile.held(layout))
        )

    def _seconds(self, layout: Layout, stage: StageCost, action: Action) -> float:
        """Of a forward or a backward, with the messages of tensor parallelism that it waits for."""
        messages = self.tensor_seconds(layout, stage)
        if action.kind is Kind.F:
            return stage.forward + messages
        return _BACKWARD * stage.forward + stage.recomputed + messages * (1 + stage.tensor_repeated)

    def tensor_seconds(self, layout: Layout, stage: StageCost) -> float:
        """Of the messages of tensor parallelism in a forward."""
        return self.link(layout, "tp").seconds(stage.tensor_sent, stage.tensor_hops) if layout.tensor > 1 else 0.0

    def _send(self, layout: Layout, stages: Sequence[StageCost]) -> float:
        """Seconds of a message between stages: of the largest one, over the slowest link."""
        if layout.pipeline == 1:
            return 0.0
        return self.link(layout, "pp").seconds(max(stage.output for stage in stages[:-1]), 1)

    def link(self, layout: Layout, axis: str) -> Link:
        """Between the ranks of an axis, ``"dp"``, ``"tp"`` or ``"pp"``."""
        sizes = {"dp": layout.data, "tp": layout.tensor, "pp": layout.pipeline}
        order = self.step.rank_order.split("-")
        stride = prod(sizes[inner] for inner in order[order.index(axis) + 1 :])
        return self.machine.link(stride, sizes[axis], layout.num_ranks)


class _Rank:
    """What a pipeline rank does in a step by itself.

    Attributes:
        parts: Seconds by what it does.
        sent: Bytes by axis.
        exposed: Seconds of messages between replicas that are not hidden by a backward.
        optimizer: Seconds of the optimizer.
        least: Seconds of all of it.
    """

    def __init__(self, model: CostModel, layout: Layout, rank: int) -> None:
        own = model.stages(layout)[rank :: layout.pipeline]
        number = layout.num_microbatches * model.step.accumulated
        computing = number * sum((1 + _BACKWARD) * stage.forward for stage in own)
        recomputing = number * sum(stage.recomputed for stage in own)
        messages = number * sum((2 + stage.tensor_repeated) * model.tensor_seconds(layout, stage) for stage in own)
        self.optimizer = self._optimizer_seconds(model, layout, rank)
        data_sent, hops = self._data_volume(model, layout, rank, number)
        backward = sum(_BACKWARD * stage.forward for stage in own) * (number if layout.zero_stage > 1 else 1)
        waiting = model.link(layout, "dp").seconds(data_sent, hops) - model.machine.overlap * backward
        self.exposed = max(0.0, waiting) if layout.data > 1 else 0.0
        self.parts = {
            "computing": computing,
            "recomputing": recomputing,
            "tensor-parallel messages": messages,
            "data-parallel messages": self.exposed,
            "optimizer": self.optimizer,
        }
        self.least = sum(self.parts.values())
        last = layout.pipeline * layout.num_chunks - 1
        passed = sum(stage.output for at, stage in enumerate(own) if rank + at * layout.pipeline < last)
        shared = sum((2 + stage.tensor_repeated) * stage.tensor_sent for stage in own) if layout.tensor > 1 else 0.0
        self.sent = {
            "tensor": number * shared,
            "pipeline": number * passed if layout.pipeline > 1 else 0.0,
            "data": data_sent,
        }

    def _data_volume(self, model: CostModel, layout: Layout, rank: int, number: int) -> tuple[float, float]:
        """Bytes that a rank sends to its replicas in a step, and hops one after the other."""
        parameters, grads = model.profile.weights(layout)[rank]
        replicas, share = layout.data, (layout.data - 1) / layout.data
        if layout.zero_stage == 0:
            return 2 * share * grads, 2 * (replicas - 1)
        backwards = number if layout.zero_stage > 1 else 1
        gathers = 1
        if layout.zero_stage == 3 and model.step.zero_frees == "microbatch":
            gathers = 2 * number
        elif layout.zero_stage == 3 and model.step.zero_frees == "auto" and layout.num_microbatches == 1:
            gathers = 2 * model.step.accumulated
        return share * (backwards * grads + gathers * parameters), (backwards + gathers) * (replicas - 1)

    def _optimizer_seconds(self, model: CostModel, layout: Layout, rank: int) -> float:
        parameters, grads = model.profile.weights(layout)[rank]
        shards = layout.data if layout.zero_stage else 1
        states = model.profile.held(layout)[rank].optimizer or 0
        touched = (2 * parameters + grads) / shards + 2 * states
        return touched / model.machine.memory_bandwidth
