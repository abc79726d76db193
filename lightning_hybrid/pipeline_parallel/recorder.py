"""Recorder of the start and end times of the actions in a step.

The callback `HybridTimeline` makes a :class:`Recorder` (through `Run.record`) for each step that it draws, and
:class:`~.links.step_schedules.StepSchedules` makes one to measure the first steps of a run. Each does so on every rank,
and the engine calls :meth:`Recorder.range` as its `profile`. Torch's profiler would record every operation and slow the
step down; here only actions are timed. :func:`measured` and :func:`simulated` turn the times of all ranks into
timelines.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from lightning_hybrid.pipeline_parallel.engine import Engine
from lightning_hybrid.pipeline_parallel.schedules import Action, Kind, Schedule
from lightning_hybrid.pipeline_parallel.timeline import Span, Timeline, simulate


@dataclass(frozen=True)
class Range:
    """Activity of a rank, with its time.

    Attributes:
        name: ``"forward"``, ``"backward"``, ``"send"``, ``"receive"`` (posting it), ``"wait"`` (for a message),
            ``"reduce"`` (gradients) or ``"optimizer"``.
        action: The action of the schedule; for ``"wait"``, the computation that waits for the message; ``None`` outside
            of the schedule.
        start: The start in milliseconds since the recorder was created.
        end: The end in milliseconds since the recorder was created.
    """

    name: str
    action: Action | None
    start: float
    end: float


class Recorder:
    """Recorder of the activities of an engine.

    Times are measured with the clock of the host or, on CUDA, with events on the current stream.

    Args:
        engine: The engine that runs the actions.
        device: The device on which this rank computes.
    """

    def __init__(self, engine: Engine, device: torch.device) -> None:
        self._engine, self._on_cuda = engine, device.type == "cuda"
        self._ranges: list[tuple[str, Action | None, Any, Any]] = []
        self._begin = self.now()

    def now(self) -> Any:
        """Return the current time, as an argument for :meth:`note`: seconds, or on CUDA a recorded event."""
        if not self._on_cuda:
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def range(self, name: str) -> AbstractContextManager[None]:
        """Return a context that is recorded under a name."""
        return _Noted(self, name)

    def note(self, name: str, start: Any) -> None:
        """Record an activity that began at ``start`` and ends now."""
        self._ranges.append((name, self._engine.position, start, self.now()))

    def clear(self) -> None:
        """Forget what was recorded, because a step runs again."""
        self._ranges.clear()

    @property
    def schedule(self) -> Schedule | None:
        """The schedule whose actions were recorded last."""
        return self._engine.schedule

    @property
    def ranges(self) -> list[Range]:
        """The recorded activities, in the order in which they ended. Reading them waits for the device."""
        if self._on_cuda:
            torch.cuda.synchronize()
        return [Range(name, action, self._since(start), self._since(end)) for name, action, start, end in self._ranges]

    def _since(self, moment: Any) -> float:
        """Return the time from the creation of the recorder to a moment, in milliseconds."""
        elapsed = self._begin.elapsed_time(moment) if self._on_cuda else 1e3 * (moment - self._begin)
        return float(elapsed)


class _Noted(AbstractContextManager[None]):
    """Context of one activity."""

    __slots__ = ("_name", "_recorder", "_start")

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder, self._name = recorder, name

    def __enter__(self) -> None:
        self._start = self._recorder.now()

    def __exit__(self, *exception: object) -> None:
        self._recorder.note(self._name, self._start)


def measured(schedule: Schedule, ranges: list[list[Range]]) -> Timeline:
    """Return the timeline of a schedule that has run.

    Args:
        schedule: The schedule.
        ranges: The recorded activities of each pipeline rank in this step. All ranks must have created their recorders
            at the same time.

    Returns:
        The timeline in milliseconds, from the first action of any rank.

    Raises:
        AssertionError: If the recorded actions are not the actions of the schedule.
    """
    begin = min(each.start for of_rank in ranges for each in of_rank if each.action is not None)
    spans = tuple(
        tuple(
            Span(each.action, each.start - begin, each.end - begin)
            for each in of_rank
            if each.action is not None and each.name != "wait"
        )
        for of_rank in ranges
    )
    for done, planned in zip(spans, schedule.actions, strict=True):
        assert [span.action for span in done] == list(planned), "the recorded actions differ from the schedule"
    return Timeline(schedule, spans, unit="ms")


def simulated(timeline: Timeline) -> Timeline:
    """Return the timeline of a measured step in which each action takes its median time and messages take no time."""
    times: dict[tuple[int, Kind], list[float]] = {}
    for spans in timeline.computing:
        for span in spans:
            times.setdefault((span.action.stage, span.action.kind), []).append(span.end - span.start)
    medians = {key: sorted(of_key)[len(of_key) // 2] for key, of_key in times.items()}
    result = simulate(timeline.schedule, duration=lambda action: medians[action.stage, action.kind])
    return Timeline(result.schedule, result.spans, unit="ms")
