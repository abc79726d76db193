"""How far a checkpoint goes: the files that `trainer.save_checkpoint` enters."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.entries import Chain, counting_entries
from tests.pool import Pools
from tests.training_jobs import loader, users_trainer


def entries_of_a_checkpoint(folder: Path) -> Counter[str]:
    """How often each file of the package is entered from another one of it, in a checkpoint like one before it."""
    entries: Counter[str] = Counter()
    trainer = users_trainer({"pipeline_parallel_size": 2, "num_microbatches": 4})
    trainer.fit(Chain(), loader(num_samples=64))
    trainer.save_checkpoint(folder / "first.ckpt")
    with counting_entries(entries):
        trainer.save_checkpoint(folder / "second.ckpt")
    return entries


def test_a_checkpoint_enters_at_most_fourteen_files(ranks: Pools, tmp_path: Path) -> None:
    """Whoever reads how one is saved must find the way: more files are a reason to look at who calls whom."""
    writes, sends = ranks(2, lightning=True).run(entries_of_a_checkpoint, tmp_path)
    assert "/checkpoint/storage/atomic.py" in writes
    assert 8 < len(writes) <= 14, writes
    assert 8 < len(sends) <= 12, sends
    assert max(writes.total(), sends.total()) <= 70, (writes, sends)
