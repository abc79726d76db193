"""Leaving NCCL's groups after a failure: all are aborted, nothing waits for peers, and the cause is told first."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor

from lightning_hybrid.axes import Sizes
from lightning_hybrid.distributed import failure, process_group
from lightning_hybrid.distributed.failure import close_groups
from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.distributed.process_group import GroupRef
from tests.pool import Pools
from tests.training_jobs import Regression, loader, make_trainer


class Recorded:
    """What is done to groups, and the mesh whose groups they are."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self.mesh: Mesh | None = None


@contextmanager
def nccl_world(rank: int = 1) -> Iterator[Recorded]:
    """Fake groups that are said to be NCCL's."""
    recorded = Recorded()

    def record(name: str, group: dist.ProcessGroup) -> None:
        recorded.calls.append((name, tuple(sorted(distributed_c10d._world.pg_group_ranks[group]))))

    dist.init_process_group("fake", rank=rank, world_size=8)
    new_group = dist.new_group

    def fake(ranks: list[int], *, backend: str | None = None, **kwargs: object) -> object:
        return new_group(ranks, backend="fake", **kwargs)

    try:
        with mock.patch.object(dist, "new_group", fake):
            recorded.mesh = Mesh(Sizes(2, 2, 2), writes_together=True)
            recorded.mesh.new_p2p_group([(0, 1)])
        with (
            mock.patch.object(dist.ProcessGroup, "abort", lambda group: record("abort", group)),
            mock.patch.object(dist.ProcessGroup, "shutdown", lambda group: record("shutdown", group)),
            mock.patch.object(failure, "has_nccl", return_value=True),
        ):
            yield recorded
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


#: The groups of rank 1 of 2 x 2 x 2: everyone (one over gloo), data, tensor, model and control, pipeline, pair.
GROUPS = sorted([(*range(8),)] * 2 + [(1, 3)] * 2 + [(0, 1)] + [(0, 1, 4, 5)] * 2 + [(1, 5)] * 2)


def test_every_group_is_aborted_and_none_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    """One was aborted, and the others were shut down: that waits for kernels which wait for peers that are gone."""
    with nccl_world() as recorded:
        close_groups(ArithmeticError("broken forward"))
        assert sorted(ranks for _, ranks in recorded.calls) == GROUPS
        assert {name for name, _ in recorded.calls} == {"abort"}
        assert not dist.is_initialized()
    assert "[rank 1] ArithmeticError: broken forward" in capsys.readouterr().err


def test_a_torch_that_cannot_abort_all_at_once_aborts_one_after_the_other() -> None:
    with nccl_world() as recorded, mock.patch.object(process_group, "abort_all_groups", None):
        close_groups()
        aborted = [ranks for name, ranks in recorded.calls if name == "abort"]
        assert sorted(aborted) == GROUPS
        assert aborted[0] == (1, 5), "the group that was made last"
        assert aborted[-1] == (*range(8),), "the group of all ranks"
        assert [name for name, _ in recorded.calls[: len(aborted)]] == ["abort"] * len(aborted)
        assert not dist.is_initialized()


def test_the_process_ends_if_an_abort_does_not_come_back(capsys: pytest.CaptureFixture[str]) -> None:
    ended, codes, printed = threading.Event(), [], []

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    def stuck() -> None:
        printed.append(capsys.readouterr().err)
        assert ended.wait(20)

    with (
        nccl_world(),
        mock.patch.object(failure, "_DEADLINE", 0.05),
        mock.patch.object(process_group, "abort_all_groups", stuck),
    ):
        close_groups(ArithmeticError("broken forward"), end=end)
    assert codes == [1]
    assert "broken forward" in printed[0], "the cause is told before anything is closed"


def test_groups_over_gloo_close_with_their_last_reference(capsys: pytest.CaptureFixture[str]) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = GroupRef(dist.new_group([0]))
    with mock.patch.object(process_group, "abort_all_groups", pytest.fail):
        close_groups(ArithmeticError("broken forward"))
    assert not group.is_alive
    assert capsys.readouterr().err == ""


#: Seconds from the first exception to the last one: before a watch ends a process that nobody wakes.
QUICK = 3.0


class Divided(Regression):
    """Its layers are divided over the tensor-parallel ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*[nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2)])
        self.double()


class FailsOn(Callback):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and trainer.global_rank == self.rank:
            raise ArithmeticError("broken batch")


def fail_in_tensor_parallel(rank: int) -> tuple[str, float]:
    layout = {"tensor_parallel_size": 2, "tensor_parallel_plan": {"body.*.0": "colwise", "body.*.2": "rowwise"}}
    module = Divided()
    with pytest.raises(Exception) as error:  # noqa: PT011 - the text is looked at in the test
        make_trainer(layout, callbacks=[FailsOn(rank)]).fit(module, loader())
    assert any(isinstance(parameter, DTensor) for parameter in module.parameters())
    return str(error.value), time.time()


def test_a_rank_that_waits_in_a_tensor_group_notices(ranks: Pools) -> None:
    """Parameters are sharded over a mesh, which holds the group that the layers use: its connections must close."""
    (waited, at), (failed, since) = ranks(2, lightning=True).run(fail_in_tensor_parallel, 1, timeout=30)
    assert failed == "broken batch"
    assert "Rank 1 (pipeline rank 0, data rank 0), train batch 1, failed: ArithmeticError: broken batch" in waited
    assert at - since < QUICK
