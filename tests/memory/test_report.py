"""What a run says of its memory."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.memory.account import MemoryUsage
from lightning_hybrid.memory.report import MemoryReport
from tests.pool import Pools


def report(device: str, level: int, fails: bool = False) -> list[str]:
    """What is logged in two steps, of which the second one steps the optimizer."""
    mesh = Mesh(1, 2, 2)
    rank = mesh.pipeline_rank * 2 + mesh.tensor_rank
    messages: list[str] = []

    def estimate() -> MemoryUsage:
        messages.append("estimated")
        if fails and rank == 3:
            raise RuntimeError
        return MemoryUsage(100 + rank, 0, None, None, 0)

    def table(usages: Any, peaks: Any) -> str:
        return f"{[usage.parameters for usage in usages]} {peaks}"

    trainer: Any = SimpleNamespace(global_step=5, strategy=SimpleNamespace(root_device=torch.device(device)))
    callback = MemoryReport(estimate, table, mesh)
    logger = logging.getLogger("lightning.pytorch")
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level if mesh.is_first else logging.ERROR)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1000 - rank)
            callback.on_train_start(trainer, cast(Any, None))
            callback.on_train_batch_end(trainer, cast(Any, None))
            assert not any("peak" in message for message in messages)
            for trainer.global_step in (6, 7):
                callback.on_train_batch_end(trainer, cast(Any, None))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    return messages


ESTIMATED = "Memory of a rank, estimated:\n[101, 103] []"
PEAKS = (
    "Memory of a rank, estimated, and the peak of the CUDA allocator up to the first optimizer step:\n"
    "[101, 103] [1000, 998]"
)


@pytest.mark.distributed
def test_the_estimate_is_logged_and_on_cuda_the_peak_of_the_allocator(ranks: Pools) -> None:
    assert ranks(4).run(report, "cpu", logging.INFO) == [["estimated", ESTIMATED], *[["estimated"]] * 3]
    assert ranks(4).run(report, "cuda", logging.INFO) == [["estimated", ESTIMATED, PEAKS], *[["estimated"]] * 3]


@pytest.mark.distributed
def test_nothing_is_estimated_that_nobody_reads(ranks: Pools) -> None:
    assert ranks(4).run(report, "cuda", logging.WARNING) == [[]] * 4


@pytest.mark.distributed
def test_an_estimate_that_fails_ends_nothing(ranks: Pools) -> None:
    assert ranks(4).run(report, "cuda", logging.INFO, True) == [["estimated"]] * 4
