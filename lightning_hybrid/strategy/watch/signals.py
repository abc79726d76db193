"""SIGTERM, and SLURM's signal before it requeues a job: noted when they come, acted upon between two batches."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection
from contextlib import suppress

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_hybrid.distributed.failure import EVENT, Store
from lightning_hybrid.trainer import lightning_internals as internals

_REQUEUE, _TERMINATE = 1, 2  # both may have come
_KEYS = {_REQUEUE: "requeue", _TERMINATE: "terminate"}
_PAUSE = 0.02  # seconds until a rank asks again which batch it is


class SignalAgreement:
    """Signals that any rank got are acted upon by all ranks before the same batch; a batch without one costs nothing.

    ::

        rank 3   signal --> watcher: into the store
        all                 watcher: out of the store --> answers with the batch b where this rank is --.
        rank 0              watcher: all answers --> into the store: before batch 1 + max(b)  <---------'
        all                 before each batch: has this rank answered? --> waits for rank 0's number --> is it this one?

    A rank that has answered goes no further than the next batch before it knows the number, so nobody can be beyond it.
    Watchers answer whatever their ranks wait for.

    The watcher hears of a signal also while the run waits in C++, where no handler of Python is called. What the
    handler does is the same, for the case that there is no watcher that hears.

    Lightning's handlers run collectives, wherever the other ranks are; and only rank 0's SIGTERM ends its loops, for
    which it is broadcast before each batch. Here, all ranks stop before the same batch with `SIGTERMException`, so that
    a checkpoint can be saved, or requeue the job and go on until SLURM ends it.

    Args:
        store: What all ranks see, for the watcher alone.
        key: The key of something in the store that belongs to this run.
        wake: Wakes the watcher.
        rank: This rank.
        size: The number of ranks.
    """

    def __init__(
        self, store: Store, key: Callable[[str], str], wake: Callable[[], None], *, rank: int, size: int
    ) -> None:
        self._store, self._key, self._wake = store, key, wake
        self._rank, self._size = rank, size
        self._requeue_signal = 0
        self._trainer: Trainer | None = None
        self._forget()

    def _forget(self) -> None:
        """What runs before brought counts no longer."""
        self._batch = 0  # the number of those that have begun
        # Of these sets, the watcher's thread adds to the last two, and the run's reads them.
        self._noted: set[int] = set()  # signals that this rank's handlers, or those of others, have got
        self._told: set[int] = set()  # in the store
        self._answered: set[int] = set()
        self._stops: dict[int, int] = {}  # by signal: the number of the batch before which all act
        self._exception: Exception | None = None  # to be raised in the handler
        self._is_interrupted = False

    def install(self, trainer: Trainer) -> None:
        """A run begins."""
        self._forget()
        self._trainer = trainer
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
        if launcher is not None and _TERMINATE not in self._noted:
            launcher.kill(signum)
        self._note(_TERMINATE)
        if trainer.state.fn != TrainerFn.FITTING:  # nothing is to be saved
            internals.set_received_sigterm(trainer)

    def _on_requeue(self, signum: int) -> None:
        self._requeue_signal = signum
        self._note(_REQUEUE)

    def _note(self, signal: int) -> None:
        self._noted.add(signal)
        self._wake()

    def look(self, signals: Collection[int] = ()) -> None:
        """On the watcher's thread: tell the others what this rank has got, hear what they have, and find the batch.

        Args:
            signals: What has come since.
        """
        if signal.SIGTERM in signals and not self._is_interrupted:
            self._note_terminate(signal.SIGTERM)
        with suppress(Exception):  # the store is gone: then the run ends for that reason
            for number in _KEYS:
                self._exchange(number)

    def _exchange(self, number: int) -> None:
        key, stop = self._key(_KEYS[number]), self._key(f"{_KEYS[number]}/stop")
        if number not in self._noted and self._store.check([key]):
            self._noted.add(number)
        if number not in self._noted or number in self._stops:
            return
        if number not in self._told:
            self._told.add(number)
            self._store.set(key, "")
            self._store.set(self._key(EVENT), "")
        if number not in self._answered:
            self._answered.add(number)  # first: the run looks at it when it has counted its batch
            self._store.set(self._key(f"{_KEYS[number]}/{self._rank}"), str(self._batch))
        if self._rank == 0:
            answers = [self._key(f"{_KEYS[number]}/{rank}") for rank in range(self._size)]
            if self._store.check(answers):
                self._store.set(stop, str(1 + max(int(self._store.get(answer)) for answer in answers)))
        if self._store.check([stop]):
            self._stops[number] = int(self._store.get(stop))

    def _agree(self) -> None:
        """Before each batch of training, on all ranks."""
        self._batch += 1
        for number in sorted(self._answered):
            self._act_or_go_on(number)

    def _act_or_go_on(self, number: int) -> None:
        while number not in self._stops:
            self._wake()
            time.sleep(_PAUSE)
        trainer = self._trainer
        assert trainer is not None
        if self._stops[number] != self._batch:
            return
        if number == _REQUEUE:
            internals.requeue(trainer, self._requeue_signal)
        else:
            internals.set_received_sigterm(trainer)
            raise SIGTERMException
