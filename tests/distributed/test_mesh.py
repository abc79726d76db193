from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_hybrid.config import resolve_sizes
from lightning_hybrid.distributed.mesh import Mesh
from tests.pool import Pools

# -- sizes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "sizes", "expected"),
    [
        (8, ("auto", 2, 2), (2, 2, 2)),
        (8, ("auto", 1, 1), (8, 1, 1)),
        (8, (2, 1, 4), (2, 1, 4)),
        (1, ("auto", 1, 1), (1, 1, 1)),
        (6, ("auto", 1, 3), (2, 1, 3)),
    ],
)
def test_sizes(world: int, sizes: Any, expected: tuple[int, int, int]) -> None:
    assert resolve_sizes(world, *sizes) == expected


def test_processes_that_do_not_make_whole_model_groups() -> None:
    with pytest.raises(
        ValueError, match=r"6 processes .* tensor_parallel_size \(2\) x pipeline_parallel_size \(2\) = 4"
    ):
        resolve_sizes(6, "auto", 2, 2)


def test_sizes_whose_product_is_not_the_number_of_processes() -> None:
    with pytest.raises(
        ValueError, match=r"data_parallel_size \(4\) x .* = 16, but there are 8 .* data_parallel_size=2"
    ):
        resolve_sizes(8, 4, 2, 2)


# -- groups of eight ranks, each rank's in one process -----------------------------------------------------------------


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def seen_by(rank: int, sizes: tuple[int, int, int], order: str, look: Callable[[Mesh], Any]) -> Any:
    data, tensor, pipeline = sizes
    with fake_world(rank, data * tensor * pipeline):
        # The control group is over gloo, which the fake world has not.
        new_group = dist.new_group
        dist.new_group = lambda ranks, backend=None, **kwargs: new_group(ranks, backend="fake", **kwargs)
        try:
            return look(Mesh(data, tensor, pipeline, rank_order=order))
        finally:
            dist.new_group = new_group


def groups_of(mesh: Mesh) -> dict[str, list[int]]:
    groups = {"data": mesh.data_group, "model": mesh.model_group, "control": mesh.control_group}
    for name in ("tensor", "data", "pipeline"):  # torch's own, for users of `device_mesh`
        groups[f"torch's {name}"] = mesh.device_mesh.get_group(f"{name}_parallel")
    return {name: dist.get_process_group_ranks(group) for name, group in groups.items()}


#: The groups of LiBai for 2 x 2 x 2 ranks, pipeline outermost, and those of Colossal-AI, where model groups are
#: contiguous.
TABLES = {
    "pp-dp-tp": {
        "torch's tensor": [[0, 1], [2, 3], [4, 5], [6, 7]],
        "data": [[0, 2], [1, 3], [4, 6], [5, 7]],
        "torch's pipeline": [[0, 4], [1, 5], [2, 6], [3, 7]],
        "model": [[0, 1, 4, 5], [2, 3, 6, 7]],
    },
    "dp-pp-tp": {
        "torch's tensor": [[0, 1], [2, 3], [4, 5], [6, 7]],
        "data": [[0, 4], [1, 5], [2, 6], [3, 7]],
        "torch's pipeline": [[0, 2], [1, 3], [4, 6], [5, 7]],
        "model": [[0, 1, 2, 3], [4, 5, 6, 7]],
    },
}


@pytest.mark.parametrize("order", TABLES)
def test_groups_of_two_by_two_by_two_ranks(order: str) -> None:
    for rank in range(8):
        found = seen_by(rank, (2, 2, 2), order, groups_of)
        for name, table in TABLES[order].items():
            assert found[name] == next(ranks for ranks in table if rank in ranks)
        assert found["control"] == found["model"]
        assert found["torch's data"] == found["data"]


@pytest.mark.parametrize("order", ["-".join(order) for order in itertools.permutations(["pp", "dp", "tp"])])
def test_a_rank_knows_its_place_in_every_order(order: str) -> None:
    sizes = {"dp": 2, "tp": 3, "pp": 4}
    axes = order.split("-")
    places = itertools.product(*(range(sizes[axis]) for axis in axes))
    for rank, place in enumerate(places):
        if rank % 5:  # a sample of the 24
            continue
        expected = dict(zip(axes, place, strict=True))
        found = seen_by(rank, (2, 3, 4), order, lambda mesh: (mesh.pipeline_rank, mesh.data_rank, mesh.tensor_rank))
        assert found == (expected["pp"], expected["dp"], expected["tp"])


def test_names_of_the_axes_are_lightnings() -> None:
    def look(mesh: Mesh) -> Any:
        return mesh.device_mesh.mesh_dim_names, mesh.device_mesh["pipeline_parallel"].size()

    names, size = seen_by(0, (1, 2, 4), "dp-tp-pp", look)
    assert names == ("data_parallel", "tensor_parallel", "pipeline_parallel")
    assert size == 4


def test_holders_of_shared_tensors() -> None:
    def look(mesh: Mesh) -> Any:
        made = mesh.shared_parameter_group((3, 0))
        assert mesh.shared_parameter_group({0, 3}) is made  # made once
        return None if made is None else dist.get_process_group_ranks(made)

    # pp 4 x dp 2, pipeline outermost: stages 0 and 3 are the ranks 0, 1 and 6, 7; by pipeline rank, then data rank.
    found = [seen_by(rank, (2, 1, 4), "pp-dp-tp", look) for rank in range(8)]
    assert found == [[0, 1, 6, 7]] * 2 + [None] * 4 + [[0, 1, 6, 7]] * 2


def test_a_pair_is_of_one_replica_and_every_call_makes_another() -> None:
    def look(mesh: Mesh) -> Any:
        first, second = mesh.new_p2p_group(1, 0), mesh.new_p2p_group(0, 1)
        if first is None or second is None:
            return first, second
        assert first is not second
        ranks = dist.get_process_group_ranks(first)
        assert ranks == dist.get_process_group_ranks(second)
        return ranks

    found = [seen_by(rank, (2, 1, 3), "dp-pp-tp", look) for rank in range(6)]
    nothing = (None, None)
    assert found == [[0, 1], [0, 1], nothing, [3, 4], [3, 4], nothing]


# -- real groups -------------------------------------------------------------------------------------------------------


def rank_in_group_and_sum() -> tuple[list[int], float]:
    mesh = Mesh(2, 1, 2, rank_order="dp-pp-tp")
    pipeline = mesh.device_mesh["pipeline_parallel"].get_group()
    total = torch.tensor(float(10 ** dist.get_rank()))
    dist.all_reduce(total, group=mesh.shared_parameter_group((0, 1)))
    places = [dist.get_rank(group) for group in (mesh.data_group, pipeline, mesh.control_group)]
    return places, total.item()


def test_ranks_inside_groups(ranks: Pools) -> None:
    found = ranks(4).run(rank_in_group_and_sum)
    assert [places for places, _ in found] == [[0, 0, 0], [0, 1, 1], [1, 0, 0], [1, 1, 1]]
    assert {total for _, total in found} == {1111.0}


def timeouts() -> list[timedelta]:
    mesh = Mesh(1, 1, 2, timeout=timedelta(seconds=77))
    groups = (
        mesh.data_group,
        mesh.model_group,
        mesh.control_group,
        mesh.new_p2p_group(0, 1),
        mesh.shared_parameter_group((0, 1)),
    )
    cpu = torch.device("cpu")
    return [group._get_backend(cpu).options._timeout for group in groups]  # type: ignore[attr-defined]


def test_the_timeout_is_that_of_every_group(ranks: Pools) -> None:
    assert ranks(2).run(timeouts)[0] == [timedelta(seconds=77)] * 5


def groups_made_later() -> list[str]:
    made: list[str] = []
    mesh = Mesh(2, 1, 1)
    with mock.patch.object(dist, "new_group", side_effect=lambda *_, **__: made.append("a group")):
        assert mesh.world_group.size() == mesh.decision_group.size() == 2
        assert mesh.data_parallel_min(3 + dist.get_rank()) == 3
    return made


def test_groups_of_all_ranks_are_made_at_once(ranks: Pools) -> None:
    """Who makes a group waits for all of its ranks, and nothing wakes it if one has failed before."""
    assert ranks(2).run(groups_made_later) == [[], []]


def groups_survive() -> bool:
    """The mesh holds its groups by weak references, so that destroying them closes their connections."""
    mesh = Mesh(1, 1, 2)
    group = weakref.ref(mesh.model_group)
    assert dist.get_rank(mesh.model_group) == dist.get_rank()
    dist.destroy_process_group(mesh.model_group)
    gc.collect()
    return group() is not None


def test_destroyed_groups_are_gone(ranks: Pools) -> None:
    assert ranks(2).run(groups_survive) == [False, False]


def doubled(num_groups: int) -> list[float]:
    for _ in range(num_groups):
        dist.new_group()
    axis = Mesh(2, 2, 1).device_mesh["data_parallel"]
    divided = DTensor.from_local(torch.ones(1), axis, [Shard(0)])
    return (2 * divided).full_tensor().tolist()


@pytest.mark.distributed
def test_results_of_divided_tensors_belong_to_the_world_of_now(ranks: Pools) -> None:
    """torch took the mesh of a result from an equal one that it had seen, with the groups of a world that was gone."""
    for num_groups in (7, 0, 3):
        assert ranks(4).run(doubled, num_groups) == [[2.0, 2.0]] * 4
