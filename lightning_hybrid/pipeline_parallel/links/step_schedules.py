"""Schedules of training steps, and the automatic choice of extra microbatches in flight.

`TrainingStep` gets the schedule of each step from its :class:`StepSchedules`. The strategy and dry runs call
:func:`find_placement` and :func:`find_schedule` with the same configuration before a run.

With ``Tuning(extra_in_flight="auto")``, the schedule changes once the links between nodes have been measured. An
*extra* microbatch in flight over a link is one more forward that the ranks before the link run before their first
backward: it hides the latency of the link, and needs memory. The latency is measured and not configured, because users
rarely know it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Protocol

import torch

from lightning_hybrid.config import Settings
from lightning_hybrid.distributed.agreement import all_gather_values
from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.distributed.messages.tree_broadcast import broadcast_object
from lightning_hybrid.pipeline_parallel.engine import Engine, Profile
from lightning_hybrid.pipeline_parallel.links.delays import Delay, RankPair, far_links, measure_delays
from lightning_hybrid.pipeline_parallel.links.in_flight import choose_extra
from lightning_hybrid.pipeline_parallel.links.link import StepTimes
from lightning_hybrid.pipeline_parallel.recorder import Range, Recorder
from lightning_hybrid.pipeline_parallel.schedules import COMPUTATIONS, Placement, Schedule, build, placement_of
from lightning_hybrid.pipeline_parallel.timeline import simulate

_log = logging.getLogger("lightning.pytorch")

_WARM_UP, _MEASURED = 1, 2  # number of steps; the first step is slower than later steps
_PATIENCE = 3.0  # time limit of the choice in seconds; a simulation that has begun is completed
_KEPT_FREE = 0.05  # fraction of a device's memory, for fragmentation and temporary memory of operations


class Records(Protocol):
    """Interface of an object that records the actions of a step."""

    @property
    def recorder(self) -> Recorder | None:
        """The recorder of the current step; ``None`` if the caller does not record the step."""

    @property
    def profile(self) -> Profile | None:
        """A function that returns a context for each action of a step; ``None`` for no contexts."""


def find_placement(config: Settings, num_ranks: int) -> Placement:
    """Return the rank of each stage. On a single pipeline rank, there is only one stage, regardless of `num_chunks`.

    Args:
        config: The arguments of the strategy.
        num_ranks: The number of pipeline ranks.
    """
    return placement_of(config.schedule, num_ranks, config.num_chunks if num_ranks > 1 else 1)


def find_schedule(
    config: Settings,
    num_ranks: int,
    num_microbatches: int,
    extra_in_flight: tuple[int, ...] | None = None,
    *,
    posts_early: bool = True,
) -> Schedule:
    """Return the schedule of a training step.

    Args:
        config: The arguments of the strategy.
        num_ranks: The number of pipeline ranks.
        num_microbatches: The number of microbatches in the step.
        extra_in_flight: The number of extra microbatches for each link; by default the numbers in `config`, which are
            zeros for ``"auto"``.
        posts_early: See :func:`~..schedules.build`.
    """
    num_chunks = find_placement(config, num_ranks).num_chunks
    extra = config.extra_of_links(num_ranks) if extra_in_flight is None else extra_in_flight
    return build(config.schedule, num_ranks, num_microbatches, num_chunks, extra, posts_early=posts_early)


@dataclass(frozen=True)
class Measured:
    """Measurements of a rank in the first steps.

    Attributes:
        rank: The pipeline rank.
        num_microbatches: The maximum number of microbatches in a step.
        seconds: The median time of one microbatch in seconds, by stage and kind of computation, such as ``"F"``.
        delays: The delays of the links on which the rank sends activations.
        most: The number of extra microbatches that the rank's memory has room for; infinite on a CPU.
    """

    rank: int
    num_microbatches: int
    seconds: Mapping[tuple[int, str], float]
    delays: Mapping[RankPair, Delay] = field(default_factory=dict)
    most: float = math.inf


class StepSchedules(dict[int, Schedule]):
    """Schedules of training steps by number of microbatches. A schedule is built at its first use.

    With ``Tuning(extra_in_flight="auto")``, a schedule other than GPipe, and pipeline ranks on several nodes, the first
    steps run without extra microbatches in flight. The second and the third step are timed; a step that the caller
    records itself is not. Before the next step:

    1. The ranks send messages over the links between nodes, and measure their delays.
    2. All ranks exchange their measurements.
    3. The first rank chooses the numbers of extra microbatches (:func:`~.in_flight.choose_extra`), and broadcasts them.

    The choice changes only time and memory, not results or checkpoints. The Trainer's profiler does not receive the
    actions of timed steps.

    Args:
        config: The arguments of the strategy.
        mesh: The ranks.
        engine: The engine that runs the schedules.
        device: The device on which this rank computes.

    Attributes:
        extra_in_flight: The current number of extra microbatches for each link between neighboring pipeline ranks.
        is_choosing: True until the numbers have been chosen.
    """

    def __init__(self, config: Settings, mesh: Mesh, engine: Engine, device: torch.device) -> None:
        super().__init__()
        num_ranks = mesh.sizes.pipeline
        self.extra_in_flight = config.extra_of_links(num_ranks)
        self._config, self._mesh, self._engine, self._device = config, mesh, engine, device
        seeks = config.tuning.extra_in_flight == "auto" and config.schedule != "gpipe"
        self._links = far_links(mesh, find_placement(config, num_ranks)) if seeks else []
        self.is_choosing = bool(self._links)
        self._recorder: Recorder | None = None
        self._num_steps = self._num_timed = 0

    def __missing__(self, num_microbatches: int) -> Schedule:
        """Build the schedule for a number of microbatches."""
        size = self._mesh.sizes.pipeline
        schedule = self[num_microbatches] = find_schedule(self._config, size, num_microbatches, self.extra_in_flight)
        return schedule

    def without_early_receives(self, num_microbatches: int) -> Schedule:
        """Return the same schedule with each receive at the time when its message is sent.

        The results of the step are the same. The training step uses it when every host may wait for its device.
        """
        size = self._mesh.sizes.pipeline
        return find_schedule(self._config, size, num_microbatches, self.extra_in_flight, posts_early=False)

    def begin_step(self) -> None:
        """Count a step with backward that is about to begin; choose the numbers once enough steps have been timed.

        Every rank must call this while :attr:`is_choosing` is True. The call with the choice communicates, and empties
        this dictionary.
        """
        if self._num_timed < _MEASURED:
            self._num_steps += 1
            return
        assert self._recorder is not None
        seconds, self._recorder = medians(self._recorder.ranges), None
        found = self._gather(self._measure(seconds))
        chosen: tuple[int, ...] = ()
        size = self._mesh.sizes.pipeline
        if self._mesh.is_first:  # one rank chooses, because the time limit could lead to different choices
            chosen = choose(self._config.schedule, size, found, patience=_PATIENCE)
        self.extra_in_flight = broadcast_object(chosen, self._mesh.rank(0, 0, 0), self._mesh.decision_group)
        self.is_choosing = False
        self.clear()
        if self._mesh.is_first:
            _log.info(choice_text(self.extra_in_flight, found))

    def profile(self, records: Records) -> Profile | None:
        """Return the function that makes a context for each action of the step that is about to begin.

        It times the step if the step is one of the first, and if the caller does not record it. Call this while
        :attr:`is_choosing` is True.

        Args:
            records: The recorder and the profiler of the caller.
        """
        if self._num_steps <= _WARM_UP or records.recorder is not None:
            return records.profile
        self._num_timed += 1
        self._recorder = Recorder(self._engine, self._device) if self._recorder is None else self._recorder
        return self._recorder.range

    def _measure(self, seconds: Mapping[tuple[int, str], float]) -> Measured:
        """Measure the links and the free memory. Every rank must call this between two steps.

        Args:
            seconds: See :attr:`Measured.seconds`.
        """
        rank, number = self._mesh.pipeline_rank, max(self)  # the last batch of an epoch may be smaller
        self._engine.retire()
        delays = measure_delays(self._engine.channels, rank, self._links, self._device)
        most = self._spare(simulate(self[number]).peak_in_flight[rank])
        return Measured(rank, number, seconds, delays, most)

    def _spare(self, in_flight: float) -> float:
        """Return the number of extra microbatches that this rank's memory has room for."""
        if self._device.type != "cuda":
            return math.inf
        free, total = torch.cuda.mem_get_info(self._device)
        peak = torch.cuda.max_memory_allocated(self._device)
        room = free + torch.cuda.memory_reserved(self._device) - peak - _KEPT_FREE * total
        return spare_microbatches(room, peak - torch.cuda.memory_allocated(self._device), in_flight)

    def _gather(self, own: Measured) -> list[Measured]:
        """Return the measurements of all ranks of the world, which must all call this."""
        return all_gather_values(own, self._mesh.decision_group)


def medians(ranges: Sequence[Range]) -> dict[tuple[int, str], float]:
    """Return the median time of the recorded computations in seconds, by stage and kind."""
    times: dict[tuple[int, str], list[float]] = {}
    for each in ranges:
        if each.action is not None and each.action.kind.is_compute and each.name == each.action.kind.label:
            times.setdefault((each.action.stage, each.action.kind.value), []).append((each.end - each.start) / 1e3)
    return {key: median(of_key) for key, of_key in times.items()}


def spare_microbatches(room: float, taken: float, in_flight: float) -> float:
    """Return the number of extra microbatches that a device has memory for.

    Args:
        room: The free memory at the peak of a step, in bytes.
        taken: The memory that a step takes in addition to the memory that is allocated between steps, in bytes. It
            contains gradients as well as activations, so the result is rather too small than too large.
        in_flight: The number of microbatches to which the activations belong.
    """
    each = taken / in_flight if in_flight else 0.0
    return max(0.0, room // each) if each > 0 else math.inf


def step_times(schedule: str, num_ranks: int, found: Sequence[Measured]) -> StepTimes:
    """Return the times of computations and messages in seconds, as the maximum over replicas and tensor-parallel ranks.

    Args:
        schedule: The name of the schedule.
        num_ranks: The number of pipeline ranks.
        found: The measurements of all ranks.
    """
    seconds: dict[tuple[int, str], float] = {}
    delays: dict[RankPair, Delay] = {}
    for of_rank in found:
        for key, time in of_rank.seconds.items():
            seconds[key] = max(time, seconds.get(key, 0.0))
        for link, delay in of_rank.delays.items():
            known = delays.get(link, Delay(0.0, 0.0))
            delays[link] = Delay(max(known.latency, delay.latency), max(known.occupied, delay.occupied))
    num_stages = 1 + max(stage for stage, _ in seconds)
    forwards, backwards = (
        [
            sum(seconds.get((stage, kind.value), 0.0) for kind in COMPUTATIONS if kind.is_forward is is_forward)
            for stage in range(num_stages)
        ]
        for is_forward in (True, False)
    )
    placement = placement_of(schedule, num_ranks, num_stages // num_ranks)
    between = [delays.get(link, Delay(0.0, 0.0)) for link in pairwise(placement.ranks)]
    return StepTimes(forwards, backwards, [each.latency for each in between], [each.occupied for each in between])


def choose(schedule: str, num_ranks: int, found: Sequence[Measured], *, patience: float = math.inf) -> tuple[int, ...]:
    """Return the number of extra microbatches in flight for each link. No communication.

    Args:
        schedule: The name of the schedule.
        num_ranks: The number of pipeline ranks.
        found: The measurements of all ranks.
        patience: See :func:`~.in_flight.choose_extra`.
    """
    most = [min(each.most for each in found if each.rank == rank) for rank in range(num_ranks)]
    number = max(each.num_microbatches for each in found)
    return choose_extra(schedule, step_times(schedule, num_ranks, found), num_ranks, number, most, patience=patience)


def choice_text(extra_in_flight: Sequence[int], found: Sequence[Measured]) -> str:
    """Return the log message about the choice and the measurements."""
    slowest = max((delay.latency + delay.occupied for each in found for delay in each.delays.values()), default=0.0)
    of_ranks = [sum(each.seconds.values()) for each in found]
    least = min(each.most for each in found)
    memory = "" if math.isinf(least) else f" There is enough memory for {least:.0f} extra microbatches."
    return (
        f"tuning.extra_in_flight='auto' chose {list(extra_in_flight)} extra microbatches in flight for the links"
        f" between pipeline ranks. A message between nodes takes up to {1e3 * slowest:.2f} ms, and a microbatch takes"
        f" {1e3 * max(of_ranks):.2f} ms on the slowest rank.{memory}"
    )
