"""The watch thread of a run, which handles signals, requests for tensors, and the checks of `RankWatch`.

`World` makes one :class:`RunWatch`. `World` and `HybridStrategy` call it at the beginning and end of each run. This
class only joins parts: the thread and the checks that need no mesh come from :class:`~.start_watch.StartWatch`, and the
checks that need the mesh are added here. A separate thread is necessary, because the thread of the run may be blocked
in C++, in a collective or in CUDA.

The *watcher* is the watch thread; a *look* is one pass of its checks. The *board* is the part of the store of all ranks
through which watchers exchange information. A run is *stalled* if nothing finishes on a rank for too long.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.distributed.messages.leaf_readers import LeafFetch
from lightning_hybrid.distributed.watch.desync import Desync
from lightning_hybrid.distributed.watch.verdict.stall import Position, StallWatch
from lightning_hybrid.distributed.watch.verdict.waits import Messages, Waits
from lightning_hybrid.pipeline_parallel.engine import Engine
from lightning_hybrid.strategy.watch.signals import SignalAgreement
from lightning_hybrid.strategy.watch.start_watch import StartWatch


class RunWatch:
    """The watch of this rank's runs, as long as process groups exist; it continues :class:`StartWatch`.

    With a single process, it exists, but no run is opened.

    Args:
        mesh: The device mesh.
        engine: The engine that runs schedules; its messages are watched.
        start: The watch of this rank until now.
        stall: The time in seconds after which a run without progress counts as stalled; ``None`` for no limit.
        since: The number of the last collective before the groups were created, in torch's flight recorder.
        desync: Compares the actions of the ranks.
        fetch: Sends tensors that other ranks request.
        position: Returns the position of this rank, as for `StallWatch`.

    Attributes:
        trainer: The Trainer whose run is watched; ``None`` outside of a run.
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
        self._mesh, self._engine, self._desync, self._fetch, self._start = mesh, engine, desync, fetch, start
        self._failures, self._board, self._thread = start.failures, start.board, start.thread
        self._watcher, self._rank_watch = start.watcher, start.rank_watch
        watched = start.watched_board
        self._stall = None if stall is None else StallWatch(watched, timeout=stall, position=position)
        self._waits = Waits(
            watched,
            thread=self._thread,
            messages=self._messages,
            state=self._state,
            meetings=desync.meetings,
            since=since,
        )
        self._signals = SignalAgreement(mesh, watched, self._watcher.wake)
        self.trainer: Trainer | None = None

    def open(self, trainer: Trainer) -> None:
        """Begin a run: replace the Trainer's signal handlers, and start the watcher."""
        self.trainer = trainer
        if not self._start.is_first_run:  # the watch of the first run began when the store was created
            self._failures.begin()
            self._rank_watch.begin()
        self._desync.begin()
        self._fetch.begin()
        self._signals.install(trainer)
        self._rank_watch.open(self._waits, self._stall, [self._desync])
        self._rank_watch.ladder.interrupt = self._interrupt
        self._watcher.look = self._look
        self._watcher.start()
        self._watcher.wake()

    def close(self) -> None:
        """Restore the Trainer's signal handlers."""
        self._signals.remove()

    def end_together(self) -> None:
        """Wait for all ranks at the end of a run without a failure, so that no rank succeeds if another rank fails.

        `HybridStrategy.teardown` calls this on every rank. No other code calls the collective that is used here. A
        barrier could be matched with an earlier barrier that another rank has called alone.
        """
        is_in_run = self.trainer is not None and dist.is_initialized()
        if is_in_run and not self._failures.failed and not self._failures.is_leaving:
            self._fetch.end()
            group = self._mesh.decision_group
            ends = torch.zeros(group.size(), dtype=torch.uint8)
            dist.all_to_all_single(torch.empty_like(ends), ends, group=group)
            self._failures.is_over = True

    def finish(self) -> None:
        """End a run and stop the watcher, after the last collectives of the run."""
        if self.trainer is not None and not self._failures.failed:
            self._board.finish(self._waits.final())
        self.trainer, self._start.is_first_run = None, False
        self._start.close()

    def is_terminated(self) -> bool:
        """Return True if this process has received SIGTERM during the last run."""
        return self._signals.is_terminated

    # -- on the watcher's thread ---------------------------------------------------------------------------------------

    def _look(self, signals: Collection[int]) -> None:
        if not self._failures.is_known:  # after a failure there is nothing left to find, and the store may be closed
            self._signals.look(signals)
            with suppress(dist.DistError, OSError):  # if the store is closed, the run ends for that reason
                self._fetch.look()
        self._rank_watch.look(signals)

    def _messages(self) -> Messages:
        """Return the messages between stages, and the messages with batches and results."""
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
        """Return the state of the Trainer as text; empty outside of a run."""
        trainer = self.trainer
        if trainer is None or trainer.state.fn is None:
            return ""
        if trainer.state.fn != TrainerFn.FITTING:
            return str(trainer.state.fn.value)
        stage = "validating" if trainer.validating or trainer.sanity_checking else "training"
        stops = ", should_stop" if trainer.should_stop else ""
        return f"{stage}, epoch {trainer.current_epoch}, global_step {trainer.global_step}{stops}"

    def _interrupt(self, exception: Exception) -> bool:
        """Raise an exception in the thread of the run, by SIGTERM. Return True if that is possible."""
        return self._signals.interrupt(exception, self._thread.interrupt)
