from __future__ import annotations

import os
import signal
import time

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import BoringModel

from tests.pool import Pools, RankError


def report(offset: int) -> tuple[int, int, float]:
    total = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), total.item()


def fail_on(rank: int) -> int:
    if dist.get_rank() == rank:
        raise ValueError(f"planted on {rank}")
    dist.barrier()
    return os.getpid()


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)
    dist.barrier()


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def leave_traces() -> None:
    os.environ["LEAKED"] = "1"
    torch.set_default_dtype(torch.float64)
    dist.new_group([0])


def traces() -> tuple[str | None, torch.dtype, float]:
    return os.environ.get("LEAKED"), torch.get_default_dtype(), torch.rand(()).item()


def load() -> list[torch.Tensor]:
    return list(torch.utils.data.DataLoader(range(4), batch_size=2, num_workers=1))


def fit() -> tuple[int, int, float]:
    assert not dist.is_initialized()
    started = time.perf_counter()
    trainer = pl.Trainer(
        accelerator="cpu", strategy="ddp", devices=int(os.environ["WORLD_SIZE"]), max_steps=2, limit_val_batches=0,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(BoringModel())
    return trainer.global_rank, trainer.world_size, time.perf_counter() - started


def test_results_are_ordered_by_rank(ranks: Pools) -> None:
    assert ranks(3).run(report, 10) == [(0, 3, 33.0), (1, 3, 33.0), (2, 3, 33.0)]


def test_ranks_stay_alive_between_runs(ranks: Pools) -> None:
    assert ranks(2).run(fail_on, -1) == ranks(2).run(fail_on, -1)


def test_no_trace_of_a_run_reaches_the_next(ranks: Pools) -> None:
    ranks(2).run(leave_traces)
    first, again = ranks(2).run(traces), ranks(2).run(traces)
    assert first == again
    assert first[0][:2] == (None, torch.float32)


def test_ranks_may_start_workers(ranks: Pools) -> None:
    assert [batch.tolist() for batch in ranks(2).run(load)[0]] == [[0, 1], [2, 3]]


def test_failing_rank_shows_its_traceback_and_the_pool_recovers(ranks: Pools) -> None:
    with pytest.raises(RankError, match=r"fail_on failed(.|\n)*rank 1 of 2(.|\n)*ValueError: planted on 1") as error:
        ranks(2).run(fail_on, 1)
    assert "raise ValueError" in error.value.failures[1]
    assert len(ranks(2).run(report, 0)) == 2


def test_hang_is_cut_with_the_stacks_of_every_rank(ranks: Pools) -> None:
    with pytest.raises(RankError) as error:
        ranks(2).run(hang_on, 0, timeout=1.0)
    assert "hang_on" in error.value.failures[0]
    assert "barrier" in error.value.failures[1]
    assert len(ranks(2).run(report, 0)) == 2


def test_death_of_a_rank_is_told(ranks: Pools) -> None:
    with pytest.raises(RankError, match="SIGKILL"):
        ranks(2).run(die_on, 1)
    assert len(ranks(2).run(report, 0)) == 2


def test_trainer_initialises_its_own_group(ranks: Pools) -> None:
    for _ in range(2):
        results = ranks(2, lightning=True).run(fit)
        assert [result[:2] for result in results] == [(0, 2), (1, 2)]
