"""The public callback `HybridTimeline`, which draws steps after they have run: the actions of each rank over time.

Users add it to `Trainer(callbacks=...)`. Before a selected batch, it starts the recorder of the `Run`. After the batch,
it gathers the times of all ranks, because only the times of all ranks together show why a rank waits.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer
from typing_extensions import override

from lightning_hybrid.distributed.agreement import all_gather_values
from lightning_hybrid.pipeline_parallel.recorder import Range, Recorder, measured, simulated
from lightning_hybrid.pipeline_parallel.timeline import Timeline

_SHARES = {"wait": ("wait",), "messages": ("send", "receive"), "reduce": ("reduce",), "optimizer": ("optimizer",)}


class HybridTimeline(Callback):
    """Callback that records when each rank computes, sends and waits during selected training batches.

    For each recorded batch, rank 0 writes two files. You can open the trace ``batch-N.json`` in https://ui.perfetto.dev
    or ``chrome://tracing``. The picture ``batch-N.svg`` shows the measured step of the first replica below a simulated
    step. In the simulated step, each forward or backward pass takes its median measured time, and messages take no
    time.

    The callback also logs which fraction of the time is spent on each activity, averaged over the pipeline ranks of the
    first replica: ``timeline/bubble`` (neither forward nor backward), ``timeline/wait`` (waiting for messages),
    ``timeline/messages`` (sending and receiving), ``timeline/reduce`` (reducing gradients without overlap with
    backward) and ``timeline/optimizer`` (optimizer step). ``timeline/bubble`` is a fraction of the time from the first
    computation or message to the last forward or backward pass. The other four values are fractions of the time from
    the first computation or message to the end of the batch.

    All ranks synchronize before each recorded batch, so that they start recording at the same time. Other batches are
    not affected. During recorded batches, the Trainer's profiler does not record forward passes, backward passes or
    messages.

    Args:
        batches: Indices of the training batches to record, starting at 0. Avoid the first batches of a run, because
            they are slower than later batches.
        dirpath: Folder for the files. Default: ``timeline`` in the Trainer's ``default_root_dir``.

    Raises:
        ValueError: If a batch index is negative.

    Example:
        >>> callback = HybridTimeline(batches=[10, 20])
    """

    def __init__(self, batches: Sequence[int] = (10,), dirpath: str | Path | None = None) -> None:
        if any(number < 0 for number in batches):
            raise ValueError(f"HybridTimeline(batches={list(batches)}): batch numbers must be at least 0. [LH103]")
        self.batches, self.dirpath = frozenset(batches), dirpath
        self._recorder: Recorder | None = None
        self._optimizer_begins: Any = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that the strategy runs a schedule that can be recorded.

        Raises:
            ValueError: If the strategy runs no schedule.
        """
        if not getattr(getattr(trainer.strategy, "run", None), "has_actions", False):
            raise ValueError(
                "HybridTimeline records how the schedule of a step runs, but this run has no schedule. Set"
                " HybridStrategy(pipeline_parallel_size=...) or HybridStrategy(num_microbatches=...). [LH139]"
            )

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start recording."""
        if trainer.fit_loop.total_batch_idx in self.batches:
            trainer.strategy.barrier()
            self._recorder = _run(trainer).record()

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Record the start of the optimizer step."""
        if self._recorder is not None:
            self._optimizer_begins = self._recorder.now()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Gather the recorded times of all ranks, and write and log them."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        if self._optimizer_begins is not None:
            recorder.note("optimizer", self._optimizer_begins)
            self._optimizer_begins = None
        _run(trainer).stop_recording()
        strategy: Any = trainer.strategy
        mesh = strategy.mesh
        record = (mesh.pipeline_rank, mesh.data_rank, mesh.tensor_rank), recorder.ranges
        # The schedule of the first replica, because other replicas may have fewer microbatches in this step.
        schedule = recorder.schedule if mesh.is_first else None
        is_shown = mesh.data_rank == mesh.tensor_rank == mesh.context_rank == 0
        told = all_gather_values((record, is_shown, schedule), mesh.decision_group)
        records = [of_rank for of_rank, _, _ in told]
        shown = sorted((of_rank for of_rank, is_shown, _ in told if is_shown), key=lambda each: each[0])
        first = [ranges for _, ranges in shown]
        timeline = measured(next(of_first for _, _, of_first in told if of_first is not None), first)
        pl_module.log_dict(_shares(timeline, first), rank_zero_only=True)
        if trainer.is_global_zero:
            self._write(trainer, timeline, records)

    def _write(self, trainer: Trainer, timeline: Timeline, records: Sequence[Any]) -> None:
        folder = Path(trainer.default_root_dir, "timeline") if self.dirpath is None else Path(self.dirpath)
        folder.mkdir(parents=True, exist_ok=True)
        name = f"batch-{trainer.fit_loop.total_batch_idx}"
        picture = simulated(timeline).to_svg_with(
            timeline, title=f"{timeline.schedule.name}, simulated", title_of_other="measured"
        )
        (folder / f"{name}.svg").write_text(picture)
        with (folder / f"{name}.json").open("w") as file:
            json.dump(_trace(records), file)


class _Records(Protocol):
    """The recording methods of a run of `HybridStrategy`."""

    def record(self) -> Recorder | None:
        """Start recording."""

    def stop_recording(self) -> None:
        """Stop recording."""


def _run(trainer: Trainer) -> _Records:
    strategy: Any = trainer.strategy
    run: _Records = strategy.run
    return run


def _shares(timeline: Timeline, ranges: list[list[Range]]) -> dict[str, float]:
    """Return fractions of the time of an average rank, by their logged names."""
    begin = min(each.start for of_rank in ranges for each in of_rank if each.action is not None)
    whole = max(each.end for of_rank in ranges for each in of_rank) - begin
    shares = {"timeline/bubble": timeline.bubble}
    for share, names in _SHARES.items():
        times = [each.end - each.start for of_rank in ranges for each in of_rank if each.name in names]
        shares[f"timeline/{share}"] = sum(times) / (len(ranges) * whole)
    return shares


def _trace(records: Sequence[Any]) -> dict[str, Any]:
    """Return records in Chrome's Trace Event Format: complete events in microseconds, one process per rank."""
    events: list[dict[str, Any]] = []
    for rank, ((pipeline, data, tensor), ranges) in enumerate(records):
        label = f"rank {rank} (pipeline {pipeline}, data {data}, tensor {tensor})"
        events.append({"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": label}})
        events.append({"name": "process_sort_index", "ph": "M", "pid": rank, "tid": 0, "args": {"sort_index": rank}})
        events += [_event(rank, each) for each in ranges]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _event(rank: int, noted: Range) -> dict[str, Any]:
    action = noted.action
    event = {"name": noted.name, "cat": noted.name, "ph": "X", "pid": rank, "tid": 0}
    event |= {"ts": 1e3 * noted.start, "dur": 1e3 * (noted.end - noted.start)}
    if action is not None:
        event["name"] = f"wait for {action}" if noted.name == "wait" else str(action)
        event["args"] = {
            "stage": action.stage,
            "microbatch": action.microbatch,
            "direction": "forward" if action.kind.flow > 0 else "backward",
        }
    return event
