"""SIGTERM, SLURM's signal before a requeue, and the time to validate: noted when they come, agreed between batches."""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection
from contextlib import suppress

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_hybrid.distributed.failure import EVENT, Store
from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.distributed.process_group import GroupRef
from lightning_hybrid.trainer import lightning_internals as internals

_TERMINATE, _REQUEUE = 1, 2  # bits: both may have come
_VALIDATE = 4  # no signal, but told in the same message: `Trainer(val_check_interval="00:10:00")`


class SignalAgreement:
    """Signals that any rank got are acted upon by all ranks before the same batch.

    ::

        rank 3   signal --> watcher: a note, into the store
        rank 0              watcher: out of the store, a note --.
        all                              before each batch: rank 0's notes come to all ranks --> act

    The watcher hears of a signal also while the run waits in C++, where no handler of Python is called. What the
    handler does is the same, for the case that there is no watcher that hears.

    Lightning's handlers run collectives, wherever the other ranks are; and only rank 0's SIGTERM ends its loops. This
    is in the place of Lightning's own broadcast. Before the next batch a checkpoint can be saved: all ranks stop
    there with `SIGTERMException`, or requeue the job and go on until SLURM ends it. The time to validate
    (`Trainer(val_check_interval="00:10:00")`), by the clock of rank 0, is told with them.

    In one replica rank 0's notes are messages, for which nobody waits that would not wait for the batch. Where there
    are several, they are a broadcast, which has a second use: replicas that have not equally many batches meet in it,
    by collectives of different kinds, which is found. Of two sums of different sizes gloo makes an end of the process
    (fault 31 of ``tests/faults``).

    Args:
        mesh: The ranks.
        store: What all ranks see, for the watcher alone.
        key: The key of something in the store that belongs to this run.
        wake: Wakes the watcher.
    """

    def __init__(self, mesh: Mesh, store: Store, key: Callable[[str], str], wake: Callable[[], None]) -> None:
        self._group = GroupRef(mesh.decision_group)
        self._messages = mesh.posted_broadcast("signals", 0) if mesh.num_replicas == 1 else None
        self._store, self._key, self._wake = store, key, wake
        self._is_first = dist.get_rank() == 0
        self._noted = 0  # by this rank's handlers; of rank 0 by those of all ranks
        self._told = self._done = 0
        self._requeue_signal = 0
        self._is_timed, self._last_validation = False, 0.0
        self._trainer: Trainer | None = None
        self._exception: Exception | None = None  # to be raised in the handler
        self._is_interrupted = False

    def install(self, trainer: Trainer) -> None:
        """A run begins."""
        self._noted = self._told = self._done = 0
        self._exception, self._is_interrupted = None, False
        self._trainer = trainer
        self._is_timed, self._last_validation = internals.validation_interval(trainer) is not None, 0.0
        internals.replace_signal_handlers(trainer, self._on_terminate, self._on_requeue)
        internals.replace_sigterm_broadcast(trainer, self._agree)

    def remove(self) -> None:
        """A run ends."""
        if self._trainer is not None:
            internals.restore_signal_handlers(self._trainer)
            internals.restore_sigterm_broadcast(self._trainer)
            self._trainer = None

    def interrupt(self, exception: Exception, send: Callable[[], bool]) -> bool:
        """Have the handler raise, in the thread of the run.

        Args:
            exception: What it raises.
            send: Sends SIGTERM there, if there is a handler.
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
        launcher = trainer.strategy.launcher
        if launcher is not None and not self._noted & _TERMINATE:
            launcher.kill(signum)
        self._note(_TERMINATE)
        if trainer.state.fn != TrainerFn.FITTING:  # nothing is to be saved
            internals.set_received_sigterm(trainer)

    def _on_requeue(self, signum: int) -> None:
        self._requeue_signal = signum
        self._note(_REQUEUE)

    def _note(self, signal: int) -> None:
        self._noted |= signal
        self._wake()

    def look(self, signals: Collection[int] = ()) -> None:
        """On the watcher's thread: tell rank 0 what this rank has got, and on rank 0 hear it.

        Args:
            signals: What has come since.
        """
        if signal.SIGTERM in signals and not self._is_interrupted:
            self._note_terminate(signal.SIGTERM)
        with suppress(Exception):  # the store is gone: then the run ends for that reason
            self._exchange()

    def _exchange(self) -> None:
        for number in (_TERMINATE, _REQUEUE):
            key = self._key(f"signal/{number}")
            if self._is_first and not self._noted & number and self._store.check([key]):
                self._noted |= number
            if self._noted & number and not self._told & number:
                self._store.set(key, "1")
                self._told |= number
                if number == _TERMINATE:
                    self._store.set(self._key("terminate"), "1")
                    self._store.set(self._key(EVENT), "")

    def _agree(self) -> None:
        """Before each batch of training, on all ranks."""
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
        """Return the note that the time between validations has passed, by the clock of this rank."""
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
