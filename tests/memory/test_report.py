"""What a run says of its memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_hybrid.axes import Sizes
from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.memory.account import MemoryUsage
from lightning_hybrid.memory.report import MemoryReport
from tests.pool import Pools
from tests.training_jobs import Regression, loader, make_trainer


@contextmanager
def said(messages: list[str], level: int) -> Iterator[None]:
    """Inside, what Lightning logs from a level on is added to messages."""
    logger, handler = logging.getLogger("lightning.pytorch"), logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def report(device: str, level: int, fails: bool = False, optimizer: int | None = None) -> list[str]:
    """What is logged in two steps, of which the second one steps the optimizer.

    Args:
        device: Of training.
        level: Of logging, on the first rank.
        fails: Whether a rank cannot estimate.
        optimizer: The estimate of the optimizer's states, of which each rank has 40 bytes in a tensor of 400.
    """
    mesh = Mesh(Sizes(1, 2, 2))
    rank = mesh.pipeline_rank * 2 + mesh.tensor_rank
    messages: list[str] = []

    def estimate() -> MemoryUsage:
        messages.append("estimated")
        if fails and rank == 3:
            raise RuntimeError
        return MemoryUsage(100 + rank, 0, optimizer, None, 0)

    def table(usages: Any, peaks: Any) -> str:
        return f"{[usage.parameters for usage in usages]} {peaks}"

    states = SimpleNamespace(state={0: {"step": torch.zeros(100)[:10], "note": "x"}})
    strategy = SimpleNamespace(root_device=torch.device(device))
    trainer: Any = SimpleNamespace(global_step=5, strategy=strategy, optimizers=[states])
    module: Any = torch.nn.Linear(5, 4)  # 96 bytes
    callback = MemoryReport(estimate, table, mesh)
    with said(messages, level if mesh.is_first else logging.ERROR), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1000 - rank)
        callback.on_train_start(trainer, module)
        callback.on_train_batch_end(trainer, module)
        assert not any("peak" in message for message in messages)
        for trainer.global_step in (6, 7):
            callback.on_train_batch_end(trainer, module)
    return messages


ESTIMATED = "Estimated memory per rank:\n[101, 103] []"
PEAKS = (
    "Estimated memory per rank, and peak of the CUDA allocator up to the first optimizer step:\n[101, 103] [1000, 998]"
)


@pytest.mark.distributed
def test_the_estimate_is_logged_and_on_cuda_the_peak_of_the_allocator(ranks: Pools) -> None:
    assert ranks(4).run(report, "cpu", logging.INFO) == [
        ["estimated", ESTIMATED, "estimated"],
        *[2 * ["estimated"]] * 3,
    ]
    assert ranks(4).run(report, "cuda", logging.INFO) == [
        ["estimated", ESTIMATED, "estimated", PEAKS],
        *[2 * ["estimated"]] * 3,
    ]


@pytest.mark.distributed
def test_what_nobody_reads_is_not_logged(ranks: Pools) -> None:
    assert ranks(4).run(report, "cuda", logging.WARNING) == [[], *[["estimated"]] * 3]


@pytest.mark.distributed
def test_an_estimate_that_fails_ends_nothing(ranks: Pools) -> None:
    assert ranks(4).run(report, "cuda", logging.INFO, True) == [["estimated"]] * 4


@pytest.mark.distributed
def test_a_rank_that_holds_more_than_estimated_says_so(ranks: Pools) -> None:
    """After a step, when there are states: they are views, and keep what they are views of."""
    said = ranks(4).run(report, "cpu", logging.WARNING + 1, False, 40)
    assert said == [[], *[["estimated"]] * 3]  # of the first rank nothing, so nothing is compared
    of_first, *others = ranks(4).run(report, "cpu", logging.INFO, False, 40)
    assert of_first[-1].startswith("The optimizer states of rank 0 use 400 bytes instead of the estimated 40 bytes,")
    assert all(not any("use" in message for message in messages) for messages in others)  # they log errors alone
    assert ranks(4).run(report, "cpu", logging.INFO, False, 340)[0] == ["estimated", ESTIMATED, "estimated"]


def warnings_of_a_run() -> list[str]:
    messages: list[str] = []
    with said(messages, logging.INFO):
        make_trainer({"pipeline_parallel_size": 2, "num_microbatches": 4}).fit(Regression(), loader())
    return [message for message in messages if "instead of the estimated" in message]


def test_a_parameter_that_lives_elsewhere_than_the_rule_says_is_nothing_to_warn_of(ranks: Pools) -> None:
    """A residual around the chain: the last stage needs the first layer too."""
    assert ranks(2, lightning=True).run(warnings_of_a_run) == [[], []]
