"""The thread beside a run, and all that it looks at: signals, failures, ranks that wait for each other."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_hybrid.distributed.debug.desync import Desync
from lightning_hybrid.distributed.debug.stall import Position, StallWatch
from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.distributed.messages.leaf_readers import LeafFetch
from lightning_hybrid.distributed.wait_watch import Messages, WaitWatch
from lightning_hybrid.pipeline_parallel.engine import Engine
from lightning_hybrid.strategy.watch.signals import SignalAgreement
from lightning_hybrid.strategy.watch.start_watch import StartWatch


class RunWatch:
    """Watches this rank's runs, while process groups exist.

    Args:
        mesh: The ranks.
        engine: Whose messages are looked at.
        start: What has watched this rank until now.
        stall: Seconds in which nothing may finish; ``None`` if it may.
        since: The last collective of before the groups were made.
        desync: Compares what ranks do.
        fetch: Answers what other ranks ask for.
        position: Returns where the rank is, as for `StallWatch`.

    Attributes:
        trainer: Whose run is watched; ``None`` outside of one.
    """

    def __init__(
        self,
        mesh: Mesh,
        engine: Engine,
        start: StartWatch,
        *,
        stall: float | None,
        since: int,
        desync: Desync,
        fetch: LeafFetch,
        position: Callable[[], Position],
    ) -> None:
        self._mesh, self._engine, self._fetch, self._start = mesh, engine, fetch, start
        self._failures = failures = start.failures
        self._watcher, self._failure_watch, self._thread = start.watcher, start.failure_watch, start.thread
        store = start.watched
        self._others: list[Desync | StallWatch | LeafFetch] = [desync, fetch]
        rank, size = dist.get_rank(), dist.get_world_size()
        if stall is not None:
            watch = StallWatch(failures, store, rank=rank, size=size, timeout=stall, position=position)
            self._others.append(watch)
        self._waits = WaitWatch(
            failures,
            store,
            rank=rank,
            size=size,
            thread=self._thread,
            messages=self._messages,
            state=self._state,
            meetings=desync.meetings,
            since=since,
        )
        self._signals = SignalAgreement(mesh, store, failures.key, self._watcher.wake)
        self.trainer: Trainer | None = None

    def open(self, trainer: Trainer) -> None:
        """A run begins."""
        self.trainer = trainer
        if not self._start.is_first_run:  # which has begun with the store
            self._failures.begin()
            self._failure_watch.begin()
        for other in (self._waits, *self._others):
            other.begin()
        self._signals.install(trainer)
        self._failure_watch.waits, self._failure_watch.interrupt = self._waits, self._interrupt
        self._watcher.look = self._look
        self._watcher.start()
        self._watcher.wake()

    def close(self) -> None:
        """The Trainer is given back."""
        self._signals.remove()

    def end_together(self) -> None:
        """Wait for the others at the end of a run without a failure: none has succeeded where another one fails.

        By a collective that is of no use to anybody else: a barrier or the like that a rank has called alone before
        would be taken for this one.
        """
        is_in_run = self.trainer is not None and dist.is_initialized()
        if is_in_run and not self._failures.failed and not self._failures.is_leaving:
            self._fetch.end()
            group = self._mesh.decision_group
            ends = torch.zeros(group.size(), dtype=torch.uint8)
            dist.all_to_all_single(torch.empty_like(ends), ends, group=group)
            self._failures.is_over = True

    def finish(self) -> None:
        """The last collectives of a run are behind this rank."""
        if self.trainer is not None and not self._failures.failed:
            self._failures.finish(self._waits.final_note())
        self.trainer, self._start.is_first_run = None, False
        self._start.close()

    # -- on the watcher's thread ---------------------------------------------------------------------------------------

    def _look(self, signals: Collection[int]) -> None:
        if not self._failures.is_known:  # otherwise there is nothing left to find, and the store may be gone
            self._signals.look(signals)
            for other in self._others:
                other.look()
        self._failure_watch.look(signals)

    def _messages(self) -> Messages:
        """Messages between stages, and those of batches and results."""
        mesh, counts, awaited = self._mesh, self._engine.num_messages(), self._engine.awaited_message()
        name_of = {}
        for key in counts:
            sender, receiver = map(mesh.peer, key[:2])
            name_of[key] = f"{key[2]} from rank {sender} to rank {receiver}", sender
        sent = {name_of[key][0]: count for key, count in counts.items() if key[0] == mesh.pipeline_rank}
        of_others = [None if awaited is None else (*name_of[awaited[0]], awaited[1])]
        for each in mesh.broadcasts:
            sent |= each.progress()
            of_others.append(each.awaited)
        return Messages(next((each for each in of_others if each is not None), None), sent)

    def _state(self) -> str:
        """Where the Trainer is."""
        trainer = self.trainer
        if trainer is None or trainer.state.fn is None:
            return ""
        if trainer.state.fn != TrainerFn.FITTING:
            return str(trainer.state.fn.value)
        stage = "validating" if trainer.validating or trainer.sanity_checking else "training"
        stops = ", should_stop" if trainer.should_stop else ""
        return f"{stage}, epoch {trainer.current_epoch}, global_step {trainer.global_step}{stops}"

    def _interrupt(self, exception: Exception) -> bool:
        """Raise in the thread of the run."""
        return self._signals.interrupt(exception, self._thread.interrupt)
