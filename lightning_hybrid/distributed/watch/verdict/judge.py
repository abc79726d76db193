"""The judge: a pure function that returns the reason why a run cannot continue, from the records of all ranks.

`RankWatch` collects a :class:`Sight` at each look, and ends the run if :func:`judge` returns a verdict that ends it. As
the function reads and writes nothing, tests can cover each failure without processes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_hybrid.distributed.watch.record import WORKS, Answer, Record, Waiting, name_of
from lightning_hybrid.distributed.watch.verdict.stall_table import find_culprits, stall_text, table
from lightning_hybrid.distributed.watch.verdict.wait_graph import MOST, find_deadlock, ranks_text

DEAD, SILENT, DEADLOCKED, STUCK = "dead", "silent", "deadlocked", "stuck"
FINISHED, STALLED, DESYNCHRONIZED = "finished", "stalled", "desynchronized"
SUSPECTED, BUSY = "suspected", "busy"  # with these, the run continues


@dataclass
class Sight:
    """The facts that a rank's watcher knows at one moment.

    Attributes:
        size: The number of ranks.
        records: The records that it has read, by rank; only the records of ranks that it must judge.
        hosts: The known hosts of ranks, by rank.
        gone: The ranks that have gone: their processes have ended, or they have not answered two calls.
        finished: The ranks that have finished the run.
        ages: The seconds since the last heartbeat of each rank that this rank watches.
        heartbeat_timeout: The age in seconds from which a rank is silent.
        suspects: (stamp, renewals) of the records of ranks suspected of a deadlock, from an earlier look, by rank.
        is_terminating: If True, a rank has received SIGTERM.
        waits_for_finished: If True, this rank has waited for long, and it is not known for what.
        answers: The answers of all ranks to a call for positions, in the order of the ranks; empty unless this rank
            judges them.
    """

    size: int
    records: Mapping[int, Record] = field(default_factory=dict)
    hosts: Mapping[int, str] = field(default_factory=dict)
    gone: Collection[int] = ()
    finished: Collection[int] = ()
    ages: Mapping[int, float] = field(default_factory=dict)
    heartbeat_timeout: float = 0.0
    suspects: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    is_terminating: bool = False
    waits_for_finished: bool = False
    answers: Sequence[Answer] = ()

    def names_of(self, ranks: Sequence[int]) -> list[str]:
        """Return ranks and their hosts as texts."""
        return [name_of(rank, self.hosts) for rank in ranks]

    def last_seen(self, rank: int) -> str:
        """Return a sentence with the last place that a rank reported; an empty text if it reported none."""
        record = self.records.get(rank)
        return f" Rank {rank} was last seen at {record.place}." if record is not None and record.place else ""


class Verdict(NamedTuple):
    """The result of a judgment.

    Attributes:
        kind: One of the constants of this module.
        text: The reason why the run cannot continue, for the user.
        details: Additional lines that the judge prints.
        suspects: The value of :attr:`Sight.suspects` for the next look.
        exception: The name of the exception that the ranks raise: ``"RuntimeError"``, ``"ValueError"`` or
            ``"TypeError"``.
    """

    kind: str
    text: str = ""
    details: str = ""
    suspects: Mapping[int, tuple[int, int]] = {}
    exception: str = "RuntimeError"

    @property
    def ends(self) -> bool:
        """True if the run ends."""
        return self.kind not in (SUSPECTED, BUSY)


def judge(sight: Sight) -> Verdict | None:
    """Return why the run cannot continue, as far as this rank knows; ``None`` if it knows no reason.

    ::

        dead           the process of a rank has ended before its run, or its watcher does not answer
        silent         a rank has sent no heartbeat within the timeout
        deadlocked     ranks wait for each other (`find_deadlock`), and all of them still do at a later look
        stuck          after SIGTERM no rank moves, because some ranks are in the user's code
        finished       this rank waits, and another rank has finished the run
        stalled        nothing has finished for long, and the answers of all ranks show which rank is waited for

    `DesyncWatch` makes verdicts of another kind, ``desynchronized``. With two kinds of verdict, the run continues:
    ``suspected`` (ranks may be deadlocked or stuck) and ``busy`` (nothing has finished for long, but the rank that the
    others wait for works).

    Args:
        sight: The facts that this rank knows. A rank reads only the records that it must judge.
    """
    finders = _find_dead, _find_silent, _find_blocked, _find_finished, _find_stalled
    verdicts = [verdict for find in finders if (verdict := find(sight)) is not None]
    for verdict in verdicts:
        if verdict.ends:
            return verdict
    # A suspicion may last forever if a record is never renewed. It must not hide a stall.
    suspects = next((verdict.suspects for verdict in verdicts if verdict.kind == SUSPECTED), {})
    return verdicts[-1]._replace(suspects=suspects) if verdicts else None


def _find_dead(sight: Sight) -> Verdict | None:
    dead = sorted(set(sight.gone) - set(sight.finished))
    return Verdict(DEAD, gone_text(sight.names_of(dead)) + sight.last_seen(dead[0])) if dead else None


def _find_silent(sight: Sight) -> Verdict | None:
    timeout = sight.heartbeat_timeout
    silent = [rank for rank, age in sight.ages.items() if age > timeout and rank not in sight.finished]
    if not silent:
        return None
    return Verdict(SILENT, silent_text(sight.names_of(silent), timeout) + sight.last_seen(silent[0]))


def _find_blocked(sight: Sight) -> Verdict | None:
    """Find ranks that wait for each other, or that are stuck after SIGTERM.

    The records were written at different times. If all suspected ranks renew their records after the suspicion, then
    all of them were waiting at the moment of the suspicion.
    """
    waiting = {rank: each.waiting for rank, each in sight.records.items() if each.waiting is not None}
    kind, found = DEADLOCKED, find_deadlock(waiting)
    if found is None and sight.is_terminating:
        kind, found = STUCK, _find_stuck(waiting, sight.size)
    if found is None:
        return None
    ranks, text = found
    now = {rank: (sight.records[rank].stamp, sight.records[rank].renewals) for rank in ranks}
    before = sight.suspects
    if before.keys() != now.keys() or any(before[rank][0] != stamp for rank, (stamp, _) in now.items()):
        return Verdict(SUSPECTED, suspects=now)
    renewed = all(waiting[rank].finished or renewals > before[rank][1] for rank, (_, renewals) in now.items())
    return Verdict(kind, text) if renewed else Verdict(SUSPECTED, suspects=before)


def _find_stuck(waiting: Mapping[int, Waiting], size: int) -> tuple[set[int], str] | None:
    """Find out if no rank moves after SIGTERM because some ranks are in the user's code."""
    stuck = [
        rank for rank, each in waiting.items() if not (each.finished or each.collectives or each.message is not None)
    ]
    if not stuck or len(waiting) < size:
        return None
    places = "; ".join(f"rank {rank} is stuck at {waiting[rank].place}" for rank in stuck[:MOST])
    others = sorted(set(waiting) - set(stuck))
    waits = f"; {ranks_text(others)} wait{'' if len(others) > 1 else 's'}" if others else ""
    text = f"The batch did not end after SIGTERM: {places}{waits}. All ranks exit without saving a checkpoint."
    return set(waiting), text


def _find_finished(sight: Sight) -> Verdict | None:
    is_found = sight.waits_for_finished and sight.finished
    return Verdict(FINISHED, finished_text(sorted(sight.finished))) if is_found else None


def _find_stalled(sight: Sight) -> Verdict | None:
    if not sight.answers:
        return None
    culprits = find_culprits(sight.answers)
    text = stall_text(sight.answers, culprits)
    if culprits and all(sight.answers[rank].state == WORKS for rank in culprits):
        return Verdict(BUSY, text)
    return Verdict(STALLED, text, table(sight.answers, culprits))


# -- texts -------------------------------------------------------------------------------------------------------------


def gone_text(names: Sequence[str]) -> str:
    """Return the error about ranks whose processes have ended without a message."""
    return f"Killed or crashed without an error message: {', '.join(names)}. [LH221]"


def store_gone_text(name: str) -> str:
    """Return the error about a lost store, which runs in the process of the first rank or of its launcher."""
    return f"The store through which ranks exchange messages is gone. Either {name} or the launcher has exited. [LH222]"


def silent_text(names: Sequence[str], seconds: float) -> str:
    """Return the error about ranks that sent no heartbeat within the timeout."""
    return (
        f"No heartbeat for {seconds:.0f} s from {', '.join(names[:MOST])}. The process may be stopped, or its host may"
        " be disconnected or without power. If a rank can compute that long without releasing Python's GIL, increase"
        " `HybridStrategy(faults=Faults(heartbeat_timeout=...))`. [LH223]"
    )


def finished_text(ranks: Sequence[int]) -> str:
    """Return the error about ranks that have finished a run while others wait for them."""
    names = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:MOST]))}"
    return (
        f"The run has ended on {names}, but other ranks are still waiting. Make sure that all ranks have the same"
        " number of batches, the same arguments and the same callbacks. [LH225]"
    )
