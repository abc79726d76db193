"""The first failure of a run, with which every rank ends quickly.

`StartWatch` makes a :class:`Failures` for a rank. `trainer.exceptions` and the step context call :meth:`Failures.leave`
after an exception, and the watcher calls :meth:`Failures.learn`. Without it, a rank that waits for a failed rank would
raise a network error after minutes, and the first cause would be in one of many logs.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from lightning_hybrid.distributed.failure import close_groups, is_transport, notes_of
from lightning_hybrid.distributed.watch.board import Board
from lightning_hybrid.distributed.watch.record import Waiting, name_of
from lightning_hybrid.distributed.watch.verdict.judge import Sight, judge, store_gone_text
from lightning_hybrid.distributed.watch.verdict.wait_graph import MOST

_PATIENCE = 1.5  # seconds for the watchers of other ranks to answer
_LATE = 0.5  # additional seconds for ranks that have not answered by then
_LINGER = 1.5  # seconds for the other ranks to read the first failure, or to raise the same error
_KINDS: dict[str, type[Exception]] = {"ValueError": ValueError, "TypeError": TypeError}


class Failures:
    """The first failure of a run, which one rank writes and every other rank reads.

    ::

        rank 2: exception in 2F1 --> leave(): text to the board, groups closed --> raises its exception
        rank 1: waits for rank 2 --> its receive fails --> leave(): groups closed --> raises the text of rank 2
        rank 0: waits for rank 1 --> its receive fails --> leave(): groups closed --> raises the text of rank 2

    A closed gloo group fails at once on its peers, so the chain takes milliseconds. A rank that waits for a blocked
    rank gets no error from its own groups, see :class:`~lightning_hybrid.distributed.watch.rank_watch.RankWatch`.

    If a peer disappears without writing a failure, the rank calls for answers. The watcher of every living rank answers
    with the functions that its rank is in, even if the rank is blocked.

    Args:
        board: The board, over the store client of the run's thread.

    Attributes:
        failed: If True, this rank failed, or left because another rank failed. It stays True in later runs.
        is_first: If True, this rank or its watcher wrote the first failure, so this rank prints it.
        is_leaving: If True, this rank is leaving after an exception.
        is_interrupted: If True, this rank's groups were closed so that it runs the handler of SIGINT.
        gone: The ranks that are known to have gone: their processes have ended, or they have not answered calls.
        is_over: If True, all ranks have reached the end of this run together, and any of them may exit.
        is_store_silent: If True, the store exists and does not respond, so a request to it would wait forever.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self._known: tuple[str, str] | None = None  # the kind and text of the first failure, even if the store is lost
        self.gone: set[int] = set()
        self.failed = self.is_first = self.is_leaving = self.is_over = False
        self.is_store_silent = self.is_interrupted = False

    @property
    def is_known(self) -> bool:
        """True if this rank knows the first failure, so that :meth:`cause` does not wait."""
        return self._known is not None

    def begin(self) -> None:
        """Begin a run. Entries of former runs are ignored. A known failure remains."""
        self.is_leaving = self.is_over = self.is_interrupted = False
        self.gone.clear()
        self._board.begin()

    def is_first_to(self, say: str) -> bool:
        """Return True on the first rank that calls this in this run, so that only one rank prints a warning.

        Args:
            say: The name of the warning.
        """
        with contextlib.suppress(Exception):  # the store may be lost when the run is over
            return not self.failed and self._board.claim(f"say {say}")
        return False

    def report(self, error: BaseException, where: str, *, verbatim: bool = False) -> None:
        """Write a failure, unless another rank has written one.

        Args:
            error: The exception.
            where: The rank, stage and action, as text.
            verbatim: If True, the other ranks raise the same text, because the error is about code that all ranks run.
        """
        if self.failed:
            return
        self.failed = True
        kind = next((name for name, kind in _KINDS.items() if isinstance(error, kind)), "RuntimeError")
        text = str(error) if verbatim else f"{where} failed: {type(error).__name__}: {error}"
        text += "".join(f" ({note})" for note in notes_of(error))
        with contextlib.suppress(Exception):
            self.is_first = self._board.write_cause(kind, text)
            self._board.note_read()

    def linger(self, board: Board) -> None:
        """Wait until other ranks have read the first failure, because the store often ends with the process of rank 0.

        Args:
            board: The board, over the store client of the calling thread.
        """
        self._wait_until(board, board.have_read)

    def leave_together(self) -> None:
        """End the run of this rank after an error that all ranks raise, without closing groups.

        A rank that raises the error later must not take the exit of this process for a crash.
        """
        self._board.finish(Waiting(finished=True))
        with contextlib.suppress(Exception):  # the store is lost
            self._wait_until(self._board, self._board.finished)

    def _wait_until(self, board: Board, ranks: Callable[[], set[int]]) -> None:
        """On rank 0, wait for a moment until a list on the board contains all other living ranks."""
        deadline = time.monotonic() + _LINGER
        must_stay = board.rank == 0 and not self.is_store_silent
        others = set(range(1, board.size)) - self.gone if must_stay else set()
        while others and not others <= ranks() and time.monotonic() < deadline:
            time.sleep(0.02)

    def learn(self, kind: str, text: str) -> None:
        """Store the first failure. The watcher calls this with a failure that it has read, or found without a store."""
        self._known = kind, text

    def cause(self, patience: float = 2.0) -> Exception | None:
        """Return the first failure as the exception to raise here; ``None`` if no rank has written one.

        Args:
            patience: The seconds to wait for a failure.
        """
        deadline = time.monotonic() + patience
        while True:
            try:
                if self._known is None:
                    self._known = self._board.read_cause()
            except Exception:  # the store has ended with the rank that hosts it
                return None
            if self._known is not None:
                kind, text = self._known
                return _KINDS.get(kind, RuntimeError)(text)
            if time.monotonic() > deadline:
                return None
            time.sleep(0.02)

    def leave(
        self, error: BaseException, where: str, abandon: Callable[[], None], *, verbatim: bool = False
    ) -> BaseException | None:
        """Leave every process group after an exception, without a collective.

        ::

            error --> is there a cause? ----- no --> report the error; for a transport --.
                      (transport errors              error, report the answers to a call +--> abandon --> close groups
                       wait for one)                                                     |
                                    `-- yes ---------------------------------------------'

        Args:
            error: The exception of this rank. A transport error only shows that another rank has left.
            where: The rank, stage and action, as text.
            abandon: Drops all pending work that keeps connections open.
            verbatim: The argument of :meth:`report`.

        Returns:
            The first failure, which the caller raises from ``error``; ``None`` if ``error`` is the first failure.
        """
        self.is_leaving = True
        cause: BaseException | None
        call = None
        if is_transport(error) and not self.is_store_silent and not self.is_known:
            with contextlib.suppress(Exception):
                call = self._board.call()  # other ranks answer while this rank waits for a cause
        if self.is_interrupted and is_transport(error):
            # In a backward, the handler's exception may be lost, as torch runs handlers while it describes this error.
            cause = KeyboardInterrupt()
            self.report(cause, where)
        else:
            cause = self.cause(patience=_PATIENCE if is_transport(error) else 0.0)
        if cause is None and is_transport(error):
            found = RuntimeError(self._hear_answers(call, f"{where} failed: {type(error).__name__}: {error}"))
            self.report(found, where, verbatim=True)
            cause = self.cause(patience=0.0)  # another rank may have written a failure
            if cause is None:  # the store is lost
                self.learn("RuntimeError", str(found))
                cause = found
        elif cause is None:
            self.report(error, where, verbatim=verbatim)
        with contextlib.suppress(Exception):
            self.linger(self._board)
        abandon()
        close_groups(error)
        return cause

    def _hear_answers(self, call: int | None, text: str) -> str:
        """Return the text of a failure that no rank has written: which rank has gone, or where the other ranks are.

        Args:
            call: The number of the call for answers; ``None`` to make the call now, because it failed before.
            text: The error of this rank.
        """
        board = self._board
        others = [rank for rank in range(board.size) if rank != board.rank]
        try:
            deadline = time.monotonic() + _LATE
            if call is None:
                call = board.call()
                deadline += _PATIENCE
            while (absent := board.absent(call)) and time.monotonic() < deadline:
                time.sleep(0.02)
            here, finished = board.here(call), sorted(board.finished() - {board.rank})
            gone = [rank for rank in absent if rank in self.gone] or absent  # a busy node answers late
            records = board.read([*gone, *(rank for rank in others[:MOST] if rank in here)])
        except Exception:
            return f"{store_gone_text(name_of(0, board.hosts))} {text}"
        self.gone.update(gone)  # so that this rank does not wait for them
        ended = {rank: records[rank] for rank in gone}
        sight = Sight(board.size, ended, board.hosts, gone, finished, waits_for_finished=True)
        if (verdict := judge(sight)) is not None:
            return f"{verdict.text} {text}"
        if elsewhere := [name_of(rank, board.hosts) for rank in others if rank not in here]:
            names = ", ".join(elsewhere[:MOST])
            return f"These ranks have already ended this run or are running other code: {names}. {text}"
        places = "; ".join(f"rank {rank} at {records[rank].calls}" for rank in others[:MOST])
        return f"{text} All other ranks are still running: {places}."
