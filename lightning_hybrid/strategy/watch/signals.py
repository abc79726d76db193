"""Agreement of all ranks on SIGTERM, SLURM's signal before a requeue, and time-based validation, before each batch.

`RunWatch` makes one :class:`SignalAgreement`, installs it at the beginning of a run, and calls
:meth:`SignalAgreement.look` on the watch thread. The Trainer calls :meth:`SignalAgreement._agree` before each training
batch, in place of its own broadcast of SIGTERM.

The *watcher* is the watch thread of a rank. The *board* is the part of the store of all ranks through which watchers
exchange information; a *flag* is an entry of it. A *note* is a number of bits: the signals and the due validation that
rank 0 knows, which all ranks act on before the next batch.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.distributed.process_group import GroupRef
from lightning_hybrid.distributed.watch.board import REQUEUE, TERMINATE, Board
from lightning_hybrid.trainer import lightning_internals as internals

_TERMINATE, _REQUEUE = 1, 2  # bits, because both signals may arrive
_VALIDATE = 4  # not a signal, but sent in the same message: `Trainer(val_check_interval="00:10:00")`


class SignalAgreement:
    """Agreement by which all ranks act on a signal of any rank before the same batch.

    ::

        rank 3   signal --> watcher: a flag on the board
        rank 0              watcher: from the board, a note ----.
        all                              before each batch: all ranks receive rank 0's notes --> act

    The watcher sees a signal even while the run waits in C++, where Python calls no handlers. The handler does the
    same, in case the watcher cannot receive signals.

    Lightning's handlers run collectives even if the other ranks are elsewhere, and only SIGTERM on rank 0 ends its
    loops. This class replaces Lightning's broadcast. A checkpoint can be saved before the next batch. All ranks stop
    there with `SIGTERMException`, or requeue the job and continue until SLURM ends it. Rank 0 also decides by its clock
    when to validate (`Trainer(val_check_interval="00:10:00")`), and sends this with the signals.

    With one replica, rank 0's notes are messages, and a rank that waits for a note would wait for the batch anyway.
    With several replicas, the notes are a broadcast, which has a second use: replicas with different numbers of batches
    call different collectives there, and the watch detects that. Gloo aborts the process if two ranks reduce tensors of
    different sizes (fault 31 of ``tests/faults``).

    Args:
        mesh: The device mesh.
        board: The board, over the store of the watcher.
        wake: Wakes the watcher.

    Attributes:
        is_terminated: If True, this process has received SIGTERM during the last run.
    """

    def __init__(self, mesh: Mesh, board: Board, wake: Callable[[], None]) -> None:
        self._group = GroupRef(mesh.decision_group)
        self._messages = mesh.posted_broadcast("signals", 0) if mesh.num_replicas == 1 else None
        self._board, self._wake = board, wake
        self._is_first = dist.get_rank() == 0
        self._noted = 0  # signals that this rank's handlers have noted; on rank 0, signals of all ranks
        self._told = self._done = 0
        self._requeue_signal = 0
        self._is_timed, self._last_validation = False, 0.0
        self._trainer: Trainer | None = None
        self._replaced = ExitStack()
        self._exception: Exception | None = None  # an exception that the handler raises
        self._is_interrupted = False
        self.is_terminated = False

    def install(self, trainer: Trainer) -> None:
        """Begin a run: replace the Trainer's signal handlers and its broadcast of SIGTERM."""
        self._noted = self._told = self._done = 0
        self._exception, self._is_interrupted = None, False
        self._trainer, self.is_terminated = trainer, False
        self._is_timed, self._last_validation = internals.validation_interval(trainer) is not None, 0.0
        handlers = internals.replace_signal_handlers(trainer, self._on_terminate, self._on_requeue)
        self._replaced.enter_context(handlers)
        self._replaced.enter_context(internals.replace_sigterm_broadcast(trainer, self._agree))

    def remove(self) -> None:
        """End a run: restore the signal handlers and the broadcast."""
        self._replaced.close()
        self._trainer = None

    def interrupt(self, exception: Exception, send: Callable[[], bool]) -> bool:
        """Make the handler raise an exception in the thread of the run. Return True if that is possible.

        Args:
            exception: The exception.
            send: Sends SIGTERM to this thread if it has a handler, and returns True if it has one.
        """
        self._exception, self._is_interrupted = exception, True
        return send()

    def _on_terminate(self, signum: int) -> None:
        exception, self._exception = self._exception, None
        if exception is not None:
            raise exception
        self._note_terminate(signum)

    def _note_terminate(self, signum: int) -> None:
        trainer = self._trainer
        if trainer is None:
            return
        self.is_terminated = True
        launcher = trainer.strategy.launcher
        if launcher is not None and not self._noted & _TERMINATE:
            launcher.kill(signum)
        self._note(_TERMINATE)
        if trainer.state.fn != TrainerFn.FITTING:  # no checkpoint is to be saved
            internals.set_received_sigterm(trainer)

    def _on_requeue(self, signum: int) -> None:
        self._requeue_signal = signum
        self._note(_REQUEUE)

    def _note(self, signal: int) -> None:
        self._noted |= signal
        self._wake()

    def look(self, signals: Collection[int] = ()) -> None:
        """Raise flags for the signals of this rank. Rank 0 also notes the signals of all ranks. Called by the watcher.

        Args:
            signals: The signals since the last call.
        """
        if signal.SIGTERM in signals and not self._is_interrupted:
            self._note_terminate(signal.SIGTERM)
        with suppress(Exception):  # if the store is closed, the run ends for that reason
            self._exchange()

    def _exchange(self) -> None:
        for number, flag in ((_TERMINATE, TERMINATE), (_REQUEUE, REQUEUE)):
            if self._is_first and not self._noted & number and self._board.has_flag(flag):
                self._noted |= number
            if self._noted & number and not self._told & number:
                self._board.raise_flag(flag)
                self._told |= number

    def _agree(self) -> None:
        """Act on the notes of rank 0. All ranks call this before each training batch.

        Raises:
            SIGTERMException: If any rank has received SIGTERM.
        """
        trainer = self._trainer
        assert trainer is not None
        notes = self._notes_of_first(self._noted | self._note_of_time(trainer))
        if self._is_timed:
            internals.set_time_to_validate(trainer, is_due=bool(notes & _VALIDATE))
        signals = notes & ~self._done & ~_VALIDATE
        if not signals:
            return
        self._done |= signals
        if signals & _REQUEUE:
            internals.requeue(trainer, self._requeue_signal)
        if signals & _TERMINATE:
            internals.set_received_sigterm(trainer)
            raise SIGTERMException

    def _note_of_time(self, trainer: Trainer) -> int:
        """Return the note to validate now, if enough time has passed by the clock of this rank; otherwise 0."""
        if not self._is_timed:
            return 0
        is_due, self._last_validation = internals.is_time_to_validate(trainer, self._last_validation)
        return _VALIDATE if is_due else 0

    def _notes_of_first(self, own: int) -> int:
        """Return the notes of rank 0, on all ranks."""
        notes, messages = torch.tensor([own], dtype=torch.uint8), self._messages
        if messages is None:
            dist.broadcast(notes, group_src=0, group=self._group())
        elif messages.is_source:
            messages.send(notes)
        else:
            notes = messages.receive(notes.numel())
            messages.post_ahead(notes.numel())
        return int(notes)
