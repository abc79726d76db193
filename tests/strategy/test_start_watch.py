"""What happens to ranks between the store and the first run, when only a part of what is made exists."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from lightning_hybrid import Faults
from lightning_hybrid.strategy import checks, launch
from tests.pool import Pools
from tests.training_jobs import PP2, Regression, loader, make_trainer


def raised(check: Callable[..., None]) -> tuple[str, bool]:
    """What a rank raises that does something else in the place of the first check; whether it has groups then."""
    trainer = make_trainer({**PP2, "faults": Faults(heartbeat_timeout=timedelta(seconds=4))})
    with mock.patch.object(checks, "check_ranks", check), pytest.raises(Exception, match=r".") as error:
        trainer.fit(Regression(), loader())
    return str(error.value), dist.is_initialized()


def fails() -> tuple[str, bool]:
    """Rank 1 fails, and rank 0 waits for it."""

    def check(*_: object) -> None:
        if dist.get_rank() == 1:
            raise ArithmeticError("broken")
        dist.barrier()

    return raised(check)


def test_a_rank_that_fails_in_the_set_up_is_named_by_the_others(ranks: Pools) -> None:
    """Nobody was told: the other one waited for as long as the process lived."""
    results = ranks(2, lightning=True).run(fails, timeout=60)
    assert results == [("Rank 1 failed: ArithmeticError: broken", False), ("broken", False)]


def is_refused() -> list[str]:
    """The ranks are asked for what is not the same on each, and then for something else."""
    texts = []
    for number in (int(os.environ["RANK"]) + 4, 4):
        try:
            make_trainer({**PP2, "num_microbatches": number}).fit(Regression(), loader())
        except ValueError as error:
            texts.append(str(error))
    return texts


def test_ranks_that_are_refused_may_ask_for_something_else(ranks: Pools) -> None:
    for texts in ranks(2, lightning=True).run(is_refused, timeout=60):
        (text,) = texts
        assert text.startswith("`num_microbatches` is not the same on every rank: 4 on rank 0; 5 on rank 1.")


def starts_again_in_vain() -> tuple[bool, bool]:
    """Whether the strategy knows the groups of before, and their watch looks on, when those that follow are made."""
    trainer, seen = make_trainer(PP2), []
    trainer.fit(Regression(), loader())
    strategy = trainer.strategy
    watcher = strategy._start.watcher
    watcher.start()
    dist.destroy_process_group()

    def start(*_: object, **__: object) -> str:
        seen.append((strategy._world is None and strategy._start is None, watcher._thread is not None))
        raise ArithmeticError("broken")

    with mock.patch.object(launch, "start_groups", start), pytest.raises(ArithmeticError):
        trainer.validate(Regression(), loader())
    return seen[0]


def test_what_fails_as_groups_are_made_again_is_not_said_to_those_before(ranks: Pools) -> None:
    assert ranks(2, lightning=True).run(starts_again_in_vain, timeout=60) == [(True, False)] * 2


def stops(folder: str) -> tuple[str, bool]:
    """Rank 0 stops rank 1, and waits for it."""

    def check(*_: object) -> None:
        number = Path(folder, "number")
        if dist.get_rank() == 1:
            number.write_text(str(os.getpid()))
            time.sleep(1)
            raise ArithmeticError("it was let go on")
        while not number.exists() or not number.read_text():
            time.sleep(0.02)
        os.kill(int(number.read_text()), signal.SIGSTOP)
        dist.barrier()

    return raised(check)


def test_a_rank_that_is_stopped_in_the_set_up_is_named(ranks: Pools, tmp_path: Path) -> None:
    """Nobody was silent before all had begun a run: it took the time of a collective."""
    (text, _), _ = ranks(2, lightning=True).run(stops, str(tmp_path), timeout=60)
    assert text.startswith("No heartbeat for 4 s from rank 1 (on ")
