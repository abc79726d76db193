"""The trainings that tests of transparency compare, run when they are first asked for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.pool import Pools, RankError
from tests.transparency import Case, OracleKey, Record, oracle_of, train

#: Trainings in one call of the ranks: starting costs more than a training, and a hang should not cost too many.
BATCH = 12


class Results:
    """Runs trainings when they are first asked for, several in one call of the ranks.

    Args:
        ranks: The live ranks.
        cases: The cases that will be asked for; what is no case is left out.
    """

    def __init__(self, ranks: Pools, cases: Iterable[Any]) -> None:
        self._ranks = ranks
        self._cases = [case for case in cases if isinstance(case, Case)]
        self._done: dict[Case | OracleKey, list[Record] | RankError] = {}

    def __getitem__(self, case: Case) -> tuple[list[Record], list[Record]]:
        """What the ranks of a case and the processes of its oracle saw."""
        if case not in self._done:
            waiting = [other for other in self._cases if other.size == case.size and other not in self._done]
            batch = [case, *(other for other in waiting if other != case)][:BATCH]
            oracles = {oracle_of(member) for member in batch} - self._done.keys()
            for size in sorted({key.size for key in oracles}):
                self._run(size, [key for key in oracles if key.size == size])
            self._run(case.size, batch)
        outcomes = self._done[case], self._done[oracle_of(case)]
        for outcome in outcomes:
            if isinstance(outcome, RankError):
                raise outcome
        return outcomes

    def _run(self, size: int, jobs: list[Any]) -> None:
        if not jobs:
            return
        try:
            by_rank = self._ranks(size, lightning=True).run(train, jobs, timeout=60 + 10 * len(jobs))
            self._done.update({job: [records[i] for records in by_rank] for i, job in enumerate(jobs)})
        except RankError as error:
            if len(jobs) == 1:
                self._done[jobs[0]] = error
            else:  # one by one, to see which it is
                for job in jobs:
                    self._run(size, [job])


def listed(differences: list[str], limit: int = 12) -> str:
    """The first differences, as a text."""
    return "\n".join([f"{len(differences)} differences:", *differences[:limit]])
