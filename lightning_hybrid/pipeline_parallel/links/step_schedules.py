"""The schedule of each training step; where links have delays, another one once these are known."""

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
from lightning_hybrid.pipeline_parallel.links.delays import Delay, Link, far_links, measure_delays
from lightning_hybrid.pipeline_parallel.links.in_flight import choose_extra
from lightning_hybrid.pipeline_parallel.links.link import StepTimes
from lightning_hybrid.pipeline_parallel.recorder import Range, Recorder
from lightning_hybrid.pipeline_parallel.schedules import COMPUTATIONS, Placement, Schedule, build, placement_of
from lightning_hybrid.pipeline_parallel.timeline import simulate

_log = logging.getLogger("lightning.pytorch")

_WARM_UP, _MEASURED = 1, 2  # steps: the first one is slower than later ones
_PATIENCE = 3.0  # seconds of training that the choice may take, and what a single simulation takes
_KEPT_FREE = 0.05  # of a device's memory, for fragments and what single operations need


class Records(Protocol):
    """What is told when the actions of a step begin and end, if anything is."""

    @property
    def recorder(self) -> Recorder | None:
        """Notes the present step for somebody else."""

    @property
    def profile(self) -> Profile | None:
        """Makes the ranges of a step."""


def find_placement(config: Settings, num_ranks: int) -> Placement:
    """Return the rank of each stage; several chunks on a single rank would be neighbors, and are one stage.

    Args:
        config: The arguments of the strategy.
        num_ranks: Pipeline ranks.
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
        num_ranks: Pipeline ranks.
        num_microbatches: Of the step.
        extra_in_flight: For each link; those of the arguments by default.
        posts_early: As of :func:`~..schedules.build`.
    """
    num_chunks = find_placement(config, num_ranks).num_chunks
    extra = config.extra_of_links(num_ranks) if extra_in_flight is None else extra_in_flight
    return build(config.schedule, num_ranks, num_microbatches, num_chunks, extra, posts_early=posts_early)


@dataclass(frozen=True)
class Measured:
    """What a rank has found out in the first steps.

    Attributes:
        rank: Its pipeline rank.
        num_microbatches: Of a step, at most.
        seconds: Of one microbatch, by stage and kind of computation, such as ``"F"``: the median.
        delays: Of the links on which it sends activations.
        most: How many microbatches more than now it has memory for.
    """

    rank: int
    num_microbatches: int
    seconds: Mapping[tuple[int, str], float]
    delays: Mapping[Link, Delay] = field(default_factory=dict)
    most: float = math.inf


class StepSchedules(dict[int, Schedule]):
    """The schedule of a training step, by its number of microbatches; made when it is first asked for.

    With ``Tuning(extra_in_flight="auto")``, and pipeline ranks on several machines, the first steps run with no more in
    flight than the schedule's own. The second and the third one are timed. Before the fourth one messages are sent over
    the links between machines, all ranks tell each other what they have found, the first one chooses
    (:func:`~.in_flight.choose_extra`), and later steps have as many more in flight. Nothing but time and memory
    depends on the choice: no number does, and no checkpoint. The Trainer's profiler does not hear of the actions of
    steps that are timed.

    Args:
        config: The arguments of the strategy.
        mesh: The ranks.
        engine: Runs the schedules.
        device: Where this rank computes.

    Attributes:
        extra_in_flight: For each link between neighbouring pipeline ranks, what is used now.
        is_choosing: Whether steps are timed now, or will be.
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
        size = self._mesh.sizes.pipeline
        schedule = self[num_microbatches] = find_schedule(self._config, size, num_microbatches, self.extra_in_flight)
        return schedule

    def without_early_receives(self, num_microbatches: int) -> Schedule:
        """The same with each receive where its message is sent, in unit time: no number depends on it."""
        size = self._mesh.sizes.pipeline
        return find_schedule(self._config, size, num_microbatches, self.extra_in_flight, posts_early=False)

    def begin_step(self) -> None:
        """A step with backward is about to begin, on every rank; where enough of them have been timed, choose.

        To be called while it :attr:`is_choosing`.
        """
        if self._num_timed < _MEASURED:
            self._num_steps += 1
            return
        assert self._recorder is not None
        seconds, self._recorder = medians(self._recorder.ranges), None
        found = self._gather(self._measure(seconds))
        chosen: tuple[int, ...] = ()
        size = self._mesh.sizes.pipeline
        if self._mesh.is_first:  # alone: how far it comes in the time that it has is not the same everywhere
            chosen = choose(self._config.schedule, size, found, patience=_PATIENCE)
        self.extra_in_flight = broadcast_object(chosen, self._mesh.rank(0, 0, 0), self._mesh.decision_group)
        self.is_choosing = False
        self.clear()
        if self._mesh.is_first:
            _log.info(choice_text(self.extra_in_flight, found))

    def profile(self, records: Records) -> Profile | None:
        """What is told of the actions of this step: it is timed if it is one of the first, and nobody records it.

        To be called while it :attr:`is_choosing`.

        Args:
            records: Who is told otherwise.
        """
        if self._num_steps <= _WARM_UP or records.recorder is not None:
            return records.profile
        self._num_timed += 1
        self._recorder = Recorder(self._engine, self._device) if self._recorder is None else self._recorder
        return self._recorder.range

    def _measure(self, seconds: Mapping[tuple[int, str], float]) -> Measured:
        """Between two steps, on every rank."""
        rank, number = self._mesh.pipeline_rank, max(self)  # the last batch of an epoch may have fewer
        self._engine.retire()
        delays = measure_delays(self._engine.channels, rank, self._links, self._device)
        most = self._spare(simulate(self[number]).peak_in_flight[rank])
        return Measured(rank, number, seconds, delays, most)

    def _spare(self, in_flight: float) -> float:
        if self._device.type != "cuda":
            return math.inf
        free, total = torch.cuda.mem_get_info(self._device)
        peak = torch.cuda.max_memory_allocated(self._device)
        room = free + torch.cuda.memory_reserved(self._device) - peak - _KEPT_FREE * total
        return spare_microbatches(room, peak - torch.cuda.memory_allocated(self._device), in_flight)

    def _gather(self, own: Measured) -> list[Measured]:
        return all_gather_values(own, self._mesh.decision_group)


def medians(ranges: Sequence[Range]) -> dict[tuple[int, str], float]:
    """Return the median seconds of each kind of computation that was recorded, by stage."""
    times: dict[tuple[int, str], list[float]] = {}
    for each in ranges:
        if each.action is not None and each.action.kind.is_compute and each.name == each.action.kind.label:
            times.setdefault((each.action.stage, each.action.kind.value), []).append((each.end - each.start) / 1e3)
    return {key: median(of_key) for key, of_key in times.items()}


def spare_microbatches(room: float, taken: float, in_flight: float) -> float:
    """How many microbatches more a device has memory for.

    Args:
        room: Bytes that are free at the peak of a step.
        taken: Bytes that a step has taken beside what stays between steps: activations, and gradients too, so that
            rather fewer microbatches are allowed than fit.
        in_flight: How many microbatches the activations are of.
    """
    each = taken / in_flight if in_flight else 0.0
    return max(0.0, room // each) if each > 0 else math.inf


def step_times(schedule: str, num_ranks: int, found: Sequence[Measured]) -> StepTimes:
    """Return the seconds of computations and messages, the most of all replicas and tensor-parallel ranks.

    Args:
        schedule: Its name.
        num_ranks: Pipeline ranks.
        found: The measurements of each rank.
    """
    seconds: dict[tuple[int, str], float] = {}
    delays: dict[Link, Delay] = {}
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
    """How many more are to be on their way over each link.

    Args:
        schedule: Its name.
        num_ranks: Pipeline ranks.
        found: What each rank has measured.
        patience: As of :func:`~.in_flight.choose_extra`.
    """
    most = [min(each.most for each in found if each.rank == rank) for rank in range(num_ranks)]
    number = max(each.num_microbatches for each in found)
    return choose_extra(schedule, step_times(schedule, num_ranks, found), num_ranks, number, most, patience=patience)


def choice_text(extra_in_flight: Sequence[int], found: Sequence[Measured]) -> str:
    """What has been chosen, and of what, for a log."""
    slowest = max((delay.latency + delay.occupied for each in found for delay in each.delays.values()), default=0.0)
    of_ranks = [sum(each.seconds.values()) for each in found]
    least = min(each.most for each in found)
    memory = "" if math.isinf(least) else f" There is enough memory for {least:.0f} extra microbatches."
    return (
        f"tuning.extra_in_flight='auto' chose {list(extra_in_flight)} extra microbatches in flight for the links"
        f" between pipeline ranks. A message between nodes takes up to {1e3 * slowest:.2f} ms, and a microbatch takes"
        f" {1e3 * max(of_ranks):.2f} ms on the slowest rank.{memory}"
    )
