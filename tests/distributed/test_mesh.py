from __future__ import annotations

import gc
import itertools
import math
import os
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from lightning_hybrid import HybridStrategy
from lightning_hybrid.axes import DATA, Sizes
from lightning_hybrid.distributed import mesh as mesh_module
from lightning_hybrid.distributed import process_group
from lightning_hybrid.distributed.arrangement import TENSOR_PARALLEL_MODES, arrange
from lightning_hybrid.distributed.dtensor import EXPERTS, REPLICAS
from lightning_hybrid.distributed.failure import close_groups
from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.distributed.sizes import check_zero_size, resolve_sizes
from lightning_hybrid.pipeline_parallel import p2p
from lightning_hybrid.pipeline_parallel.p2p import make_channels
from lightning_hybrid.pipeline_parallel.schedules import Placement
from tests.pool import Pools

# -- sizes -------------------------------------------------------------------------------------------------------------


def resolved(world: int, data: Any, tensor: Any, pipeline: Any, context: int = 1) -> Sizes:
    return resolve_sizes(world, {"data": data, "tensor": tensor, "pipeline": pipeline, "context": context})


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
    assert resolved(world, *sizes) == Sizes(*expected)


@pytest.mark.parametrize(
    ("world", "sizes", "expected"),
    [
        (8, ("auto", 1, [4, 2]), (2, 1, 4)),
        (6, ("auto", 1, [4, 2]), (3, 1, 2)),
        (2, ("auto", 1, [4, 2]), (1, 1, 2)),
        (8, ("auto", [1, 2], [4, 2]), (2, 1, 4)),
        (8, ("auto", [2, 1], [4, 2]), (1, 2, 4)),
        (4, ("auto", [2, 1], [4, 2]), (1, 1, 4)),  # the pipeline's preference comes first
        (8, (2, [1, 2], [8, 2]), (2, 2, 2)),
        (8, (4, 1, (4, 2)), (4, 1, 2)),
    ],
)
def test_the_first_sizes_that_go_with_the_processes_are_taken(
    world: int, sizes: Any, expected: tuple[int, int, int]
) -> None:
    assert resolved(world, *sizes) == Sizes(*expected)


def test_no_sizes_that_go_with_the_processes() -> None:
    text = r"5 processes .* pipeline_parallel_size \[4, 2\], tensor_parallel_size \[1\], data_parallel_size 'auto'"
    with pytest.raises(ValueError, match=text):
        resolved(5, "auto", 1, [4, 2])
    with pytest.raises(ValueError, match=r"8 processes .* data_parallel_size 3"):
        resolved(8, 3, [2, 1], 2)


def test_processes_that_do_not_make_whole_model_groups() -> None:
    with pytest.raises(
        ValueError, match=r"6 processes .* tensor_parallel_size \(2\) x pipeline_parallel_size \(2\) = 4"
    ):
        resolved(6, "auto", 2, 2)


def test_sizes_whose_product_is_not_the_number_of_processes() -> None:
    with pytest.raises(
        ValueError, match=r"8 processes do not match .* data_parallel_size \(4\) x .* = 16\. .* data_parallel_size=2"
    ):
        resolved(8, 4, 2, 2)


# -- groups of eight ranks, each rank's in one process -----------------------------------------------------------------


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def fake_gloo() -> Iterator[None]:
    """Groups over gloo are fake ones too: the fake world has no store."""
    new_group = dist.new_group
    with mock.patch.object(
        dist, "new_group", lambda ranks, backend=None, **kwargs: new_group(ranks, backend="fake", **kwargs)
    ):
        yield


def seen_by(rank: int, sizes: tuple[int, int, int], order: str, look: Callable[[Mesh], Any]) -> Any:
    data, tensor, pipeline = sizes
    with fake_world(rank, data * tensor * pipeline), fake_gloo():
        return look(Mesh(Sizes(data, tensor, pipeline), rank_order=order))


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


#: The groups of Colossal-AI along the axes of its two and three dimensions, for 4 and for 8 ranks.
GRID_TABLES: dict[tuple[str, int, int], dict[tuple[str, ...], list[list[int]]]] = {
    ("2d", 4, 1): {("row",): [[0, 1], [2, 3]], ("column",): [[0, 2], [1, 3]]},
    ("2d", 9, 1): {
        ("row",): [[0, 1, 2], [3, 4, 5], [6, 7, 8]],
        ("column",): [[0, 3, 6], [1, 4, 7], [2, 5, 8]],
    },
    ("2.5d", 8, 2): {
        ("row",): [[0, 1], [2, 3], [4, 5], [6, 7]],
        ("column",): [[0, 2], [1, 3], [4, 6], [5, 7]],
        ("depth",): [[0, 4], [1, 5], [2, 6], [3, 7]],
        ("depth", "column"): [[0, 2, 4, 6], [1, 3, 5, 7]],  # there "xz"
    },
    ("3d", 8, 1): {
        ("weight",): [[0, 1], [2, 3], [4, 5], [6, 7]],
        ("input",): [[0, 2], [1, 3], [4, 6], [5, 7]],
        ("output",): [[0, 4], [1, 5], [2, 6], [3, 7]],
        ("input", "weight"): [[0, 1, 2, 3], [4, 5, 6, 7]],
        ("output", "weight"): [[0, 1, 4, 5], [2, 3, 6, 7]],
    },
}


@pytest.mark.parametrize("kind", GRID_TABLES, ids=str)
def test_groups_of_a_grid(kind: tuple[str, int, int]) -> None:
    grid = arrange(*kind)
    table, size = GRID_TABLES[kind], kind[1]
    assert list(table) == list(dict.fromkeys([*table, *grid.groups()])), "all that there are"
    for rank in range(2 * size):  # the second replica's are as far behind
        with fake_world(rank, 2 * size), fake_gloo():
            mesh = Mesh(Sizes(2, size, 1), arrangement=grid)
            first = rank - rank % size
            for axes, groups in table.items():
                expected = next(ranks for ranks in groups if rank % size in ranks)
                assert dist.get_process_group_ranks(mesh.arranged_groups[axes]) == [first + each for each in expected]
            for name, axes in grid.mesh_axes.items():  # parameters lie over these
                own = mesh.tensor_mesh.get_group(name)
                assert dist.get_process_group_ranks(own) == dist.get_process_group_ranks(mesh.arranged_groups[axes])
            assert mesh.tensor_mesh.mesh.flatten().tolist() == dist.get_process_group_ranks(mesh.tensor_group)
            assert mesh.shard_mesh(mesh.zero).mesh_dim_names == (*grid.mesh_axes, "data_parallel")
            assert mesh.shard_mesh(mesh.zero)["data_parallel"].mesh.tolist() == dist.get_process_group_ranks(
                mesh.data_group
            )


@pytest.mark.parametrize(
    ("mode", "size", "depth", "form", "nearest"),
    [
        ("2d", 3, 1, "a perfect square", "sizes are 1 and 4"),
        ("2d", 6, 1, "a perfect square", "sizes are 4 and 9"),
        ("2.5d", 6, 2, "tensor_parallel_depth (2) times a perfect square", "sizes are 2 and 8"),
        ("2.5d", 2, 4, "tensor_parallel_depth (4) times a perfect square", "size is 4"),
        ("3d", 4, 1, "a perfect cube", "sizes are 1 and 8"),
        ("3d", 20, 1, "a perfect cube", "sizes are 8 and 27"),
    ],
)
def test_sizes_that_make_no_grid(mode: str, size: int, depth: int, form: str, nearest: str) -> None:
    text = (
        f"tensor_parallel_mode='{mode}' needs a tensor_parallel_size that is {form}, got {size}. The nearest"
        f" possible {nearest}. [LH108]"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        HybridStrategy(
            tensor_parallel_size=[size],
            tensor_parallel_mode=mode,
            tensor_parallel_depth=depth,  # type: ignore[arg-type]
        )


def test_one_rank_is_a_line_in_every_mode() -> None:
    assert all(arrange(mode, 1).is_line for mode in TENSOR_PARALLEL_MODES)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tensor_parallel_mode": "4d"}, "must be one of '1d', '2d', '2.5d', '3d', got '4d'"),
        ({"tensor_parallel_depth": 0}, "tensor_parallel_depth must be at least 1"),
        (
            {"tensor_parallel_depth": 2, "tensor_parallel_mode": "3d"},
            "tensor_parallel_depth=2 needs tensor_parallel_mode='2.5d'",
        ),
        (
            {"tensor_parallel_mode": "2d", "tensor_parallel_size": 4, "sequence_parallel": True},
            "Remove one of the two arguments",
        ),
    ],
)
def test_arguments_of_a_grid_that_do_not_fit(arguments: Any, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        HybridStrategy(**arguments)


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


def test_ranks_that_share_sequences_are_an_axis_of_their_own() -> None:
    """Of 2 x 2 x 2 ranks, without a pipeline: sequences are shared inside of a replica."""

    def look(mesh: Mesh) -> Any:
        groups = mesh.context_group, mesh.data_group, mesh.tensor_group, mesh.model_group, mesh.gradient_group
        names = mesh.device_mesh.mesh_dim_names
        coordinates = mesh.pipeline_rank, mesh.data_rank, mesh.context_rank, mesh.tensor_rank
        assert mesh.rank(*coordinates[:2], mesh.tensor_rank, mesh.context_rank) == dist.get_rank() == mesh.peer(0)
        assert mesh.model_ranks(mesh.data_rank) == dist.get_process_group_ranks(mesh.model_group)
        return names, coordinates, mesh.sizes, *(dist.get_process_group_ranks(group) for group in groups)

    with fake_world(6, 8), fake_gloo():
        names, coordinates, sizes, *groups = look(Mesh(Sizes(2, 2, 1, context=2)))
    assert names == ("pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel")
    assert coordinates == (0, 1, 1, 0)
    assert sizes == Sizes(2, 2, 1, 2)
    assert groups == [[4, 6], [2, 6], [6, 7], [4, 5, 6, 7], [0, 2, 4, 6]]


#: The groups of Colossal-AI for `dict(pipeline=..., tensor=dict(size=..., mode='sequence'))`, of 8 ranks, by the sizes
#: of data, pipeline and sequence: there "SEQUENCE" and "SEQUENCE_DP", over which gradients are averaged.
SEQUENCE_TABLES: dict[tuple[int, int, int], dict[str, list[list[int]]]] = {
    (2, 1, 4): {"sequence": [[0, 1, 2, 3], [4, 5, 6, 7]], "sequence and data": [[0, 1, 2, 3, 4, 5, 6, 7]]},
    (2, 2, 2): {
        "sequence": [[0, 1], [2, 3], [4, 5], [6, 7]],
        "sequence and data": [[0, 1, 2, 3], [4, 5, 6, 7]],
    },
    (1, 2, 4): {"sequence": [[0, 1, 2, 3], [4, 5, 6, 7]], "sequence and data": [[0, 1, 2, 3], [4, 5, 6, 7]]},
    (1, 4, 2): {
        "sequence": [[0, 1], [2, 3], [4, 5], [6, 7]],
        "sequence and data": [[0, 1], [2, 3], [4, 5], [6, 7]],
    },
}


@pytest.mark.parametrize("sizes", SEQUENCE_TABLES, ids=str)
def test_groups_of_shared_sequences(sizes: tuple[int, int, int]) -> None:
    (data, pipeline, context), table = sizes, SEQUENCE_TABLES[sizes]
    for rank in range(8):
        with fake_world(rank, 8), fake_gloo():
            mesh = Mesh(Sizes(data, 1, pipeline, context=context))
            found = {"sequence": mesh.context_group, "sequence and data": mesh.gradient_group}
            for name, group in found.items():
                expected = next(ranks for ranks in table[name] if rank in ranks)
                assert dist.get_process_group_ranks(group) == expected, name


def test_zero_shards_over_consecutive_replicas() -> None:
    """The mesh has 4 x 2 x 2 ranks (data, context, tensor). Two replicas shard, and four ranks have equal shards."""
    expected = {
        0: ([0, 4], [0, 2, 8, 10], 0),
        5: ([1, 5], [5, 7, 13, 15], 1),
        10: ([10, 14], [0, 2, 8, 10], 0),
        15: ([11, 15], [5, 7, 13, 15], 1),
    }
    for rank, (shards, equal, zero_rank) in expected.items():
        with fake_world(rank, 16), fake_gloo():
            mesh = Mesh(Sizes(4, 2, 1, context=2), zero_size=2)
            assert dist.get_process_group_ranks(mesh.zero.group) == shards
            assert dist.get_process_group_ranks(mesh.zero.control_group) == shards
            assert dist.get_process_group_ranks(mesh.zero.rows_group) == equal
            assert (mesh.zero.rank, mesh.zero.rows_group_size) == (zero_rank, 4)
            assert mesh.shard_mesh(mesh.zero).mesh[rank % 2].tolist() == shards
            assert mesh.shard_mesh(mesh.zero).get_local_rank(DATA.name) == zero_rank


def test_zero_shards_experts_over_replicas_with_the_same_experts() -> None:
    """The mesh has 8 x 2 ranks (data, tensor). Two replicas share the experts, and two of four gather them."""
    # The group that gathers, the ranks with other experts, the ranks with equal shards, and the ranks within the first.
    expected = {
        0: ([0, 4], [0, 2], [0, 8], (0, 0)),
        7: ([3, 7], [5, 7], [7, 15], (1, 1)),
        10: ([10, 14], [8, 10], [2, 10], (0, 1)),
    }
    for rank, (shards, others, equal, places) in expected.items():
        with fake_world(rank, 16), fake_gloo():
            mesh = Mesh(Sizes(8, 2, 1), zero_size=4, expert_parallel_size=2, expert_zero_size=2)
            experts = mesh.experts
            assert dist.get_process_group_ranks(experts.group) == shards
            assert dist.get_process_group_ranks(experts.expert_group) == others
            assert dist.get_process_group_ranks(experts.rows_group) == equal
            assert (experts.rank, experts.expert_rank, experts.has_first_copy) == (*places, rank < 8)
            assert (experts.size, experts.num_expert_ranks, experts.num_shards, experts.rows_group_size) == (2, 2, 4, 2)
            sharding = mesh.shard_mesh(experts)
            assert sharding.mesh_dim_names == ("tensor_parallel", EXPERTS, REPLICAS)
            assert sharding[EXPERTS].mesh.tolist() == others
            assert sharding[REPLICAS].mesh.tolist() == shards
            assert mesh.shard_groups == (mesh.zero, experts)


def test_ranks_with_equal_shards_of_a_parameter_of_several_stages() -> None:
    """The mesh has 2 x 4 ranks (pipeline, data). Both stages of both groups of replicas hold each shard."""
    for rank, expected in {0: [0, 2, 4, 6], 7: [1, 3, 5, 7]}.items():
        with fake_world(rank, 8), fake_gloo():
            mesh = Mesh(Sizes(4, 1, 2), zero_size=2)
            group = mesh.shared_parameter_group((0, 1), mesh.zero)
            assert group is not None
            assert dist.get_process_group_ranks(group) == expected


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((3, 1, 4), r"zero_size=3 does not divide .* 4\. Set zero_size to one of \[2, 4\]"),
        ((2, 0, 4), "zero_stage is 0"),
    ],
)
def test_a_zero_size_that_does_not_fit(arguments: tuple[int, int, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check_zero_size(*arguments)


def test_sizes_leave_room_for_ranks_that_share_sequences() -> None:
    assert resolved(8, "auto", 2, 1, 2) == Sizes(2, 2, 1, 2)
    with pytest.raises(ValueError, match=r"6 processes .* groups of 4 ranks, .* x context_parallel_size \(2\) = 4\."):
        resolved(6, "auto", 2, 1, 2)


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
        first, second = mesh.new_p2p_group([(1, 0)]), mesh.new_p2p_group([(0, 1)])
        if first is None or second is None:
            return first, second
        assert first is not second
        ranks = dist.get_process_group_ranks(first)
        assert ranks == dist.get_process_group_ranks(second)
        return ranks

    found = [seen_by(rank, (2, 1, 3), "dp-pp-tp", look) for rank in range(6)]
    nothing = (None, None)
    assert found == [[0, 1], [0, 1], nothing, [3, 4], [3, 4], nothing]


# -- how many calls that takes -----------------------------------------------------------------------------------------


class Calls:
    """What a rank of a world of NCCL that is bound to devices asks torch for, and the groups that it is in."""

    def __init__(self, backends: dict[str, str]) -> None:
        self.backends = backends
        self.asked: list[str | None] = []  # backends of the splits
        self.splits: list[Any] = []  # of the world's communicator: each is a collective of all ranks
        self.lazy: list[list[int]] = []  # NCCL groups that connect when they are used
        self.gloo: list[list[int]] = []
        self.communicators = {dist.group.WORLD}

    @contextmanager
    def counted(self) -> Iterator[None]:
        new_group = dist.new_group

        def split(split_ranks: list[list[int]], pg_options: Any, backend: str | None = None, **_: Any) -> Any:
            self.splits.append(pg_options)
            self.asked.append(backend)
            own = [ranks for ranks in split_ranks if dist.get_rank() in ranks]
            for ranks in own:
                self.communicators.add(new_group(ranks, backend="fake", use_local_synchronization=True))
            return next(reversed(list(self.communicators))) if own else None

        def new(ranks: list[int], *, backend: str | None = None, use_local_synchronization: bool, **_: Any) -> Any:
            assert dist.group.WORLD.bound_device_id is None, "torch would split it off the world, without the others"
            assert use_local_synchronization
            (self.gloo if backend == "gloo" else self.lazy).append(ranks)
            return new_group(ranks, backend="fake", use_local_synchronization=True)

        nccl = SimpleNamespace(Options=lambda: SimpleNamespace(config=SimpleNamespace()))
        with (
            mock.patch.object(process_group, "device_backends", return_value=self.backends),
            mock.patch.object(process_group, "world_device", return_value=torch.device("cpu")),
            mock.patch.object(mesh_module, "device_backends", return_value=self.backends),
            mock.patch.object(p2p, "device_backends", return_value=self.backends),
            mock.patch.object(mesh_module, "set_timeout", return_value=True),
            mock.patch.object(dist, "split_group", split),
            mock.patch.object(dist, "new_group", new),
            mock.patch.object(dist, "ProcessGroupNCCL", nccl, create=True),
        ):
            dist.group.WORLD.bound_device_id = torch.device("cuda:0")
            yield
            assert dist.group.WORLD.bound_device_id == torch.device("cuda:0")


def calls_of(
    rank: int, sizes: tuple[int, int, int], num_chunks: int = 1, backends: dict[str, str] | None = None
) -> Calls:
    with fake_world(rank, math.prod(sizes)):
        calls = Calls(backends or {"cuda": "nccl"})
        with calls.counted():
            make_channels(
                Mesh(Sizes(*sizes), timeout=timedelta(seconds=77)),
                Placement.in_turns(sizes[2], num_chunks),
                torch.device("cuda"),
                dynamic_shapes=False,
            )
        return calls


#: dp x tp x pp, chunks: collectives of the world, communicators of a rank in the middle, groups over gloo.
CALLS = {
    ((512, 1, 1), 1): (0, 1, 2),
    ((1, 8, 1), 1): (0, 1, 2),
    ((1, 1, 8), 1): (4, 5, 2),
    ((1, 1, 8), 2): (4, 5, 2),
    ((1, 1, 7), 2): (6, 5, 2),
    ((64, 1, 8), 1): (6, 7, 3),
    ((64, 8, 1), 1): (2, 3, 3),
    ((1, 8, 8), 1): (5, 6, 2),
    ((2, 2, 2), 1): (5, 6, 3),
    ((64, 8, 8), 1): (7, 8, 3),
    ((256, 8, 8), 1): (7, 8, 3),
}


@pytest.mark.parametrize(("layout", "expected"), CALLS.items(), ids=str)
def test_one_collective_makes_all_groups_of_a_kind(
    layout: tuple[tuple[int, int, int], int], expected: tuple[int, int, int]
) -> None:
    """There was one for each group: 8,328 of them at 64 x 8 x 8, and 1,025 at 512 x 1 x 1."""
    sizes, num_chunks = layout
    world = math.prod(sizes)
    found = [calls_of(rank, sizes, num_chunks) for rank in (0, world // 2 - 1, world - 1)]
    assert len({len(calls.splits) for calls in found}) == 1, "the ranks wait for each other"
    in_the_middle = found[1]
    assert (len(in_the_middle.splits), len(in_the_middle.communicators), len(in_the_middle.gloo)) == expected
    for calls in found:
        assert len(calls.splits) + len(calls.lazy) + len(calls.gloo) <= (13 if sizes[0] < world else 4)
        messages = [options for options in calls.splits if options is not None]
        assert len(messages) == expected[0] - sum(options is None for options in calls.splits)
        assert all(options.is_high_priority_stream and options.config.max_ctas == 8 for options in messages)
        assert all(options._timeout == timedelta(seconds=77) for options in messages)


@pytest.mark.parametrize("rank", [0, 2047, 4095], ids=["first stage", "middle", "last stage"])
def test_with_weights_that_both_ends_hold_a_rank_has_eight_communicators(rank: int) -> None:
    with fake_world(rank, 64 * 8 * 8):
        calls = Calls({"cuda": "nccl"})
        with calls.counted():
            mesh = Mesh(Sizes(64, 8, 8))
            make_channels(mesh, Placement.in_turns(8), torch.device("cuda"), dynamic_shapes=False)
            for backend in (None, "gloo"):
                for shards in (None, mesh.zero):
                    mesh.shared_parameter_group((0, 7), shards, backend=backend)
        assert len(calls.communicators) == 8
        assert len(calls.splits) + len(calls.lazy) + len(calls.gloo) <= 15


def test_torch_does_not_warn_that_messages_of_a_group_wait_for_each_other() -> None:
    name = "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"
    with mock.patch.dict(os.environ):
        os.environ.pop(name, None)
        calls_of(0, (1, 1, 2))
        assert os.environ[name] == "false"


def test_of_a_world_that_takes_host_tensors_messages_need_the_device_alone() -> None:
    calls = calls_of(5, (2, 2, 4), backends={"cpu": "gloo", "cuda": "nccl"})
    assert calls.asked == [None] * 3 + ["cuda:nccl"] * 4
    assert [options is not None for options in calls.splits] == [False] * 3 + [True] * 4


def test_the_axes_of_the_device_mesh_are_the_groups_that_there_are() -> None:
    def look(mesh: Mesh) -> Any:
        axes = mesh.device_mesh
        assert axes.get_group("data_parallel") is mesh.data_group
        assert axes.get_group("tensor_parallel") is mesh.tensor_group
        return axes["pipeline_parallel"].get_group() is mesh.model_group

    assert seen_by(5, (2, 2, 2), "pp-dp-tp", look) is False
    assert seen_by(3, (2, 1, 2), "pp-dp-tp", look) is True


def test_a_torch_that_cannot_split_makes_each_group_with_all_ranks() -> None:
    with fake_world(1, 8), fake_gloo(), mock.patch.object(process_group, "_num_groups", return_value=None):
        mesh = Mesh(Sizes(2, 2, 2))
        assert dist.get_process_group_ranks(mesh.data_group) == [1, 3]
        assert dist.get_process_group_ranks(mesh.model_group) == [0, 1, 4, 5]


# -- real groups -------------------------------------------------------------------------------------------------------


def rank_in_group_and_sum() -> tuple[list[int], float]:
    mesh = Mesh(Sizes(2, 1, 2), rank_order="dp-pp-tp")
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
    mesh = Mesh(Sizes(1, 1, 2), timeout=timedelta(seconds=77))
    groups = (
        mesh.data_group,
        mesh.model_group,
        mesh.control_group,
        mesh.new_p2p_group([(0, 1)]),
        mesh.shared_parameter_group((0, 1)),
    )
    cpu = torch.device("cpu")
    return [group._get_backend(cpu).options._timeout for group in groups]  # type: ignore[attr-defined]


def test_the_timeout_is_that_of_every_group(ranks: Pools) -> None:
    assert ranks(2).run(timeouts)[0] == [timedelta(seconds=77)] * 5


def groups_made_later() -> list[str]:
    made: list[str] = []
    mesh = Mesh(Sizes(2, 1, 1), writes_together=True)
    with mock.patch.object(dist, "new_group", side_effect=lambda *_, **__: made.append("a group")):
        assert mesh.writing_group.size() == mesh.decision_group.size() == 2
        assert mesh.data_parallel_min(3 + dist.get_rank()) == 3
    return made


def test_groups_of_all_ranks_are_made_at_once(ranks: Pools) -> None:
    """Who makes a group waits for all of its ranks, and nothing wakes it if one has failed before."""
    assert ranks(2).run(groups_made_later) == [[], []]


def groups_survive() -> bool:
    """The mesh holds its groups by weak references, so that destroying them closes their connections."""
    mesh = Mesh(Sizes(1, 1, 2))
    group = weakref.ref(mesh.control_group)
    assert dist.get_rank(mesh.control_group) == dist.get_rank()
    dist.barrier()  # the other one may still connect
    dist.destroy_process_group(mesh.control_group)
    gc.collect()
    return group() is not None


def test_destroyed_groups_are_gone(ranks: Pools) -> None:
    assert ranks(2).run(groups_survive) == [False, False]


def uneven() -> float:
    """Somebody made groups that not every rank is in."""
    for ranks in ([0], [0], [0, 2]):
        dist.new_group(ranks)
    group = Mesh(Sizes(1, 1, 3)).shared_parameter_group((1, 2))
    total = torch.tensor(float(dist.get_rank()))
    if group is not None:
        dist.all_reduce(total, group=group)
    return total.item()


def test_members_meet_whatever_groups_they_had_before(ranks: Pools) -> None:
    """Torch names a group by how many the process has: the members waited for each other under different names."""
    assert ranks(3).run(uneven, timeout=20) == [0.0, 3.0, 3.0]


def sockets() -> int:
    files = Path("/proc/self/fd")
    return sum(str(file.readlink()).startswith("socket:") for file in files.iterdir() if file.is_symlink())


def connections(most: int) -> int:
    with mock.patch.object(process_group, "MOST_CONNECTED", most):
        before = sockets()
        group = process_group.make_group([[0, 1, 2, 3]], backend="gloo")
        made = sockets() - before
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    assert total.item() == 4
    assert "TORCH_GLOO_LAZY_INIT" not in os.environ
    return made


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts the files of a process")
def test_a_large_group_over_gloo_does_not_connect_everyone(ranks: Pools) -> None:
    """Above a thousand ranks, a process may not have as many files as that takes."""
    eager, lazy = ranks(4).run(connections, 4), ranks(4).run(connections, 3)
    assert all(few < many for few, many in zip(lazy, eager, strict=True)), (eager, lazy)


def outlive() -> bool:
    dist.init_process_group("gloo")
    mesh = Mesh(Sizes(1, 2, 1))
    group = weakref.ref(mesh.tensor_group)
    sharded = DTensor.from_local(torch.ones(1), mesh.device_mesh["tensor_parallel"], [Shard(0)])
    dist.barrier()  # the other one may still connect
    mesh.abandon()
    close_groups()
    assert sharded.shape == (2,)
    return group() is not None


def test_parameters_do_not_keep_the_groups_of_their_mesh(ranks: Pools) -> None:
    """After a failure peers that wait must notice: the connections of a gloo group close when nothing refers to it."""
    assert ranks(2, lightning=True).run(outlive) == [False, False]


def doubled(num_groups: int) -> list[float]:
    for _ in range(num_groups):
        dist.new_group()
    axis = Mesh(Sizes(2, 2, 1)).device_mesh["data_parallel"]
    divided = DTensor.from_local(torch.ones(1), axis, [Shard(0)])
    return (2 * divided).full_tensor().tolist()


@pytest.mark.distributed
def test_results_of_divided_tensors_belong_to_the_world_of_now(ranks: Pools) -> None:
    """torch took the mesh of a result from an equal one that it had seen, with the groups of a world that was gone."""
    for num_groups in (7, 0, 3):
        assert ranks(4).run(doubled, num_groups) == [[2.0, 2.0]] * 4
