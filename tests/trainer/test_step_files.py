"""How far a training step goes: the files that it enters between the strategy and the user's layers."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

from lightning_hybrid import HybridStrategy
from tests.entries import Chain, counting_entries
from tests.pool import Pools
from tests.training_jobs import loader, make_trainer

_STEP = 6  # one whose shapes, plans and metas are all known, and whose labels nobody counts any more


def entries_of_a_step() -> Counter[str]:
    """How often each file of the package is entered from another one of it, in a step that is like those before it."""
    entries: Counter[str] = Counter()
    numbers = iter(range(100))
    training_step = HybridStrategy.training_step

    def profiled(self: HybridStrategy, *args: Any, **kwargs: Any) -> Any:
        if next(numbers) != _STEP:
            return training_step(self, *args, **kwargs)
        with counting_entries(entries):
            return training_step(self, *args, **kwargs)

    with patch.object(HybridStrategy, "training_step", profiled):
        make_trainer({"pipeline_parallel_size": 2, "num_microbatches": 4}).fit(Chain(), loader(num_samples=64))
    return entries


def test_a_step_enters_at_most_twenty_files(ranks: Pools) -> None:
    """Whoever reads a step must find the way: more files are a reason to look at who calls whom."""
    for entries in ranks(2, lightning=True).run(entries_of_a_step):
        assert 10 < len(entries) <= 20, entries
        assert entries.total() <= 150, entries
