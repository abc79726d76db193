"""What must hold for any sizes: partitions, schedules, splitting of batches, plans, shards. Hypothesis picks them."""

from __future__ import annotations

import os
from contextlib import nullcontext
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_hybrid.data_parallel.zero.param import RowShards
from lightning_hybrid.pipeline_parallel.partition import partition
from lightning_hybrid.pipeline_parallel.schedules import SCHEDULES, Kind, Placement, build, build_forward
from lightning_hybrid.pipeline_parallel.splitting import microbatch
from lightning_hybrid.tensor_parallel.plan import make_plan
from lightning_hybrid.tensor_parallel.shard import shards_of, unshard
from lightning_hybrid.tensor_parallel.styles import ParamSplit
from tests.pipeline_parallel.test_schedules import COMPUTATIONS, played

#: Examples of each property: a few every day, many among the thorough tests, or as many as the variable says.
EXAMPLES = int(os.environ.get("LIGHTNING_HYBRID_EXAMPLES", "40"))
settings.register_profile(
    "ours",
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=EXAMPLES == 40,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ours")


# -- partitions --------------------------------------------------------------------------------------------------------

ROWS = st.lists(st.integers(0, 50), min_size=1, max_size=12)


def every_partition(weights: list[int], num_stages: int) -> list[int]:
    """The heaviest stage of each way to cut a row: tried out one by one."""
    heaviest = []
    for cuts in product(range(1, len(weights)), repeat=num_stages - 1):
        bounds = [0, *cuts, len(weights)]
        if all(first < second for first, second in pairwise(bounds)):
            heaviest.append(max(sum(weights[first:second]) for first, second in pairwise(bounds)))
    return heaviest


@given(weights=ROWS, num_stages=st.integers(1, 4))
def test_partitions_of_any_row_of_layers(weights: list[int], num_stages: int) -> None:
    if len(weights) < num_stages:
        with pytest.raises(ValueError, match="layer"):
            partition("parameters", weights, num_stages)
        return
    for method in ("uniform", "parameters"):
        stages = partition(method, weights, num_stages)
        assert [layer for stage in stages for layer in stage] == list(range(len(weights)))
        assert all(len(stage) > 0 for stage in stages)
        again = partition([len(stage) for stage in stages], weights, num_stages)
        assert again == stages
    lengths = [len(stage) for stage in partition("uniform", weights, num_stages)]
    assert max(lengths) - min(lengths) <= 1
    heaviest = max(sum(weights[layer] for layer in stage) for stage in partition("parameters", weights, num_stages))
    assert heaviest == min(every_partition(weights, num_stages))


# -- schedules ---------------------------------------------------------------------------------------------------------


@given(
    name=st.sampled_from(sorted(SCHEDULES)),
    num_ranks=st.integers(1, 5),
    num_microbatches=st.integers(1, 12),
    num_chunks=st.integers(1, 3),
)
def test_schedules_of_any_size(name: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> None:
    if num_chunks > 1 and not SCHEDULES[name].takes_chunks:
        with pytest.raises(ValueError, match="chunk"):
            build(name, num_ranks, num_microbatches, num_chunks)
        return
    schedule = build(name, num_ranks, num_microbatches, num_chunks)
    stages, numbers = range(num_ranks * num_chunks), range(num_microbatches)
    assert played(schedule) == sorted(product(stages, COMPUTATIONS, numbers))
    forward = build_forward(Placement.in_turns(num_ranks, num_chunks), num_microbatches)
    assert played(forward) == sorted(product(stages, ("F",), numbers))
    if name == "1f1b":  # as the paper promises: rank r keeps no more than p - r microbatches
        for rank, actions in enumerate(schedule.actions):
            kinds = [action.kind for action in actions if action.kind in (Kind.F, Kind.B)]
            alive = [sum(1 if kind is Kind.F else -1 for kind in kinds[: end + 1]) for end in range(len(kinds))]
            assert max(alive) <= min(num_microbatches, num_ranks - rank)


# -- batches -----------------------------------------------------------------------------------------------------------


def tensors(num_samples: int) -> st.SearchStrategy[Tensor]:
    shapes = st.lists(st.integers(1, 3), max_size=2)
    return shapes.map(lambda shape: torch.arange(num_samples * torch.Size(shape).numel()).view(num_samples, *shape))


def trees(num_samples: int) -> st.SearchStrategy[Any]:
    """Batches in which everything that has samples has all of them."""
    leaves = tensors(num_samples) | st.none() | st.booleans() | st.floats(allow_nan=False) | st.just("a word")
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, min_size=2, max_size=3).map(tuple)
            | st.dictionaries(st.sampled_from("abcd"), inner, min_size=1, max_size=3)
        ),
        max_leaves=6,
    )


def leaves_of(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [leaf for value in tree.values() for leaf in leaves_of(value)]
    if isinstance(tree, (list, tuple)):
        return [leaf for value in tree for leaf in leaves_of(value)]
    return [tree]


@given(data=st.data(), num_samples=st.integers(4, 17), num_microbatches=st.integers(1, 20))
def test_batches_of_any_form_are_split_and_joined(data: st.DataObject, num_samples: int, num_microbatches: int) -> None:
    batch = data.draw(trees(num_samples))
    parts, counts = microbatch.split_batch(batch, num_microbatches)
    assert len(parts) == len(counts)
    columns = list(zip(*map(leaves_of, parts), strict=True))
    has_tensors = any(isinstance(leaf, Tensor) for leaf in leaves_of(batch))
    if has_tensors:
        assert sum(counts) == num_samples
        assert len(counts) == min(num_samples, num_microbatches)
        assert max(counts) - min(counts) <= 1
    for leaf, column in zip(leaves_of(batch), columns, strict=True):
        if isinstance(leaf, Tensor):
            assert torch.equal(torch.cat(column) if has_tensors else column[0], leaf)
        else:
            assert all(each is leaf or each == leaf for each in column)
    assert all(type(part) is type(batch) for part in parts)


# -- plans and shards --------------------------------------------------------------------------------------------------


@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    size=st.integers(1, 4),
    blocks=st.integers(1, 3),
    num_replicas=st.integers(2, 5),
    data=st.data(),
)
def test_shards_of_any_parameter(
    shape: list[int], size: int, blocks: int, num_replicas: int, data: st.DataObject
) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    shape[dim] = shape[dim] * size * blocks
    full = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)
    split = ParamSplit("weight", dim, blocks)
    shards = shards_of(full, split, size)
    assert len(shards) == size
    assert torch.equal(unshard(shards, split), full)
    for shard in shards:  # each of which replicas divide again
        rows = RowShards.of(shard.shape, num_replicas)
        if rows is None:
            assert max(shard.shape) == 1
            continue
        flat = torch.zeros(num_replicas * rows.padded_numel, dtype=torch.float64)
        rows.unsharded(flat).copy_(shard)
        parts = [rows.shard(flat, rank) for rank in range(num_replicas)]
        assert torch.equal(torch.cat(parts, rows.dim), shard)
        assert [part.shape for part in parts] == [rows.shard_shape(rank) for rank in range(num_replicas)]


@given(features=st.lists(st.integers(1, 24), min_size=2, max_size=5), size=st.integers(1, 4))
def test_plans_of_any_row_of_linears(features: list[int], size: int) -> None:
    """The automatic plan divides what can be divided, without remainder, and says why the rest stays whole."""
    layers: list[nn.Module] = []
    for first, second in pairwise(features):
        layers += [nn.Linear(first, second), nn.ReLU()]
    module = nn.Sequential(*layers)
    plan = make_plan(module, "auto", size, sequence_parallel=False)
    for name, split in plan.param_splits().items():
        assert module.get_parameter(name).shape[split.dim] % (size * split.blocks) == 0
    styles = {row.name: row.style for row in plan.rows}
    linears = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    for name, following in zip(linears, [*linears[1:], None], strict=True):
        if styles.get(name) == "colwise":  # whose output is a part, so the next one takes a part
            assert following is not None
            assert styles.get(following) == "rowwise"
    for name in linears:  # by hand: each column of one has its row in the other
        for style, dim in (("colwise", 0), ("rowwise", 1)):
            with (
                pytest.raises(ValueError, match="cannot be split")
                if module.get_submodule(name).weight.shape[dim] % size
                else nullcontext()
            ):
                make_plan(module, {name: style}, size, sequence_parallel=False)
