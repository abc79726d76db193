"""The trainings that tests of transparency compare, run when they are first asked for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from tests.pool import Pools, RankError
from tests.transparency import MIN_STEPS, Case, OracleKey, Record, oracle_of, train

#: Trainings in one call of the ranks: starting costs more than a training, and a hang should not cost too many.
BATCH = 12
#: Ranks of all of these trainings together: they share the cores.
RANKS = 48


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
            batch = [case, *(other for other in waiting if other != case)][: min(BATCH, RANKS // case.size)]
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
            by_rank = self._ranks(size, lightning=True).run(train, jobs, timeout=60 + max(10, 3 * size) * len(jobs))
            self._done.update({job: [records[i] for records in by_rank] for i, job in enumerate(jobs)})
        except RankError as error:
            if len(jobs) == 1:
                self._done[jobs[0]] = error
            else:  # one by one, to see which it is
                for job in jobs:
                    self._run(size, [job])


def run_alone(ranks: Pools, case: Case) -> list[Record]:
    """What the ranks of a case see, in a call of their own."""
    return [record for (record,) in ranks(case.size, lightning=True).run(train, [case], timeout=90)]


def assert_equal_under(ranks: Pools, subject: str, layouts: Iterable[str]) -> None:
    """Under all of these layouts the same losses, logs, norms and weights: draws too are the same ones."""
    (first, *_), *others = found = [run_alone(ranks, Case(subject, layout, "gpipe")) for layout in layouts]
    weights, *other_weights = [
        {name: value for record in records for name, value in record.parameters.items()} for records in found
    ]
    assert len(first.steps) >= MIN_STEPS
    for (record, *_), parameters in zip(others, other_weights, strict=True):
        for name in ("outputs", "steps", "norms"):
            torch.testing.assert_close(getattr(record, name), getattr(first, name), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(parameters, weights, rtol=1e-10, atol=1e-12)


def listed(differences: list[str], limit: int = 12) -> str:
    """The first differences, as a text."""
    return "\n".join([f"{len(differences)} differences:", *differences[:limit]])
