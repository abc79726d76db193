"""What crosses the links between machines, by formulas, and as a run finds it out and says it."""

from __future__ import annotations

import itertools
import os
import random
import socket
import warnings
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid import HybridStrategy, Launch
from lightning_hybrid.axes import Sizes
from lightning_hybrid.cli.suggest.planned import planned_traffic
from lightning_hybrid.distributed.watch import flight_recorder
from lightning_hybrid.distributed.watch.flight_recorder import read_bytes
from lightning_hybrid.pipeline_parallel.links import traffic
from lightning_hybrid.pipeline_parallel.links.traffic import (
    Traffic,
    bytes_between_nodes,
    least_bytes,
    most_traffic,
    traffic_text,
)
from tests.pool import Pools
from tests.training_jobs import Regression, loader, make_trainer
from tests.tuning.test_module_profile import Blocks

SIZES = Sizes(2, 2, 2)
TWO_NODES = [0] * 4 + [1] * 4
SENT = Traffic(data=100.0, tensor=7.0, pipeline={0: 10.0})


@pytest.mark.parametrize(
    ("rank_order", "expected", "of_sums"),
    [
        ("pp-dp-tp", 4 * 10, 0),  # four pairs of stages
        ("dp-pp-tp", 8 * 100, 0),  # all ranks send to their only replica
        ("tp-dp-pp", 8 * 7, 8 * 7),
    ],
)
def test_the_outermost_axis_is_the_one_that_crosses_two_nodes(rank_order: str, expected: int, of_sums: int) -> None:
    assert bytes_between_nodes(SIZES, rank_order, TWO_NODES, SENT) == (expected, of_sums)


def test_in_a_ring_only_the_ranks_at_the_ends_of_nodes_send_to_another_one() -> None:
    sizes = Sizes(data=8)
    assert bytes_between_nodes(sizes, "pp-dp-tp", TWO_NODES, Traffic(data=3.0)) == (2 * 3, 0)
    back = Traffic(pipeline={3: 5.0, 7: 1.0})  # with chunks the last rank sends to the first one
    assert bytes_between_nodes(Sizes(pipeline=8), "pp-dp-tp", TWO_NODES, back) == (5 + 1, 0)


def naive(sizes: Sizes, order: str, nodes: list[int], sent: Traffic) -> float:
    """From the coordinates of every two ranks."""
    axes, numbers = order.split("-"), sizes.by_key
    coordinates = [
        dict(zip(axes, at, strict=True)) for at in itertools.product(*(range(numbers[axis]) for axis in axes))
    ]
    total = 0.0
    for (here, mine), (there, its) in itertools.permutations(enumerate(coordinates), 2):
        differing = [axis for axis in axes if mine[axis] != its[axis]]
        if len(differing) != 1 or nodes[here] == nodes[there]:
            continue
        axis = differing[0]
        if axis == "dp":
            size = sent.zero_size or numbers["dp"]
            (group, at), (other, after) = divmod(mine["dp"], size), divmod(its["dp"], size)
            if group == other and after == (at + 1) % size:
                total += sent.data
            if at == after and other == (group + 1) % (numbers["dp"] // size):
                total += sent.rows
        elif its[axis] == (mine[axis] + 1) % numbers[axis]:
            total += {"tp": sent.tensor, "pp": sent.pipeline.get(mine[axis], 0.0)}[axis]
    return total


@pytest.mark.parametrize("seed", range(20))
def test_bytes_are_those_of_every_two_ranks(seed: int) -> None:
    draw = random.Random(seed)
    data, zero_size = draw.choice([(1, None), (2, None), (3, None), (4, 2), (6, 3)])
    sizes = Sizes(data, draw.choice([1, 2, 3]), draw.choice([1, 2, 3]))
    world = sizes.num_ranks
    nodes = [rank // draw.choice([1, 2, 3, 4]) for rank in range(world)]
    sent = Traffic(draw.random(), draw.random(), {link: draw.random() for link in range(sizes.pipeline)})
    if zero_size is not None:
        sent = replace(sent, rows=draw.random(), zero_size=zero_size)
    orders = ["-".join(order) for order in itertools.permutations(("pp", "dp", "tp"))]
    all_bytes = {order: naive(sizes, order, nodes, sent) for order in orders}
    for order in orders:
        assert bytes_between_nodes(sizes, order, nodes, sent)[0] == pytest.approx(all_bytes[order])
    assert least_bytes(sizes, "dp-tp-pp", nodes, sent)[1] == pytest.approx(min(all_bytes.values()))


def test_the_warning_has_both_byte_counts() -> None:
    text = traffic_text(SIZES, "dp-pp-tp", TWO_NODES, SENT)
    assert text == (
        "With launch.rank_order='dp-pp-tp', a step sends 800 bytes between nodes. Set launch.rank_order='pp-dp-tp',"
        " which sends 40 bytes."
    )
    assert traffic_text(SIZES, "pp-dp-tp", TWO_NODES, SENT) is None
    assert traffic_text(SIZES, "dp-pp-tp", [0] * 8, SENT) is None


def test_a_tensor_group_that_no_order_keeps_on_a_node_is_said_too() -> None:
    text = traffic_text(Sizes(tensor=8), "pp-dp-tp", TWO_NODES, SENT)
    assert text is not None
    assert "a step sends 14 bytes between nodes (including 14 bytes for sums over tensor-parallel groups)" in text
    assert "With the best order, a step sends 14 bytes. To send less, set tensor_parallel_size to a divisor of" in text


def test_of_replicas_the_most_counts_and_two_ranks_of_a_link_are_added_up() -> None:
    found = [(0, Traffic(1, 5, {0: 3})), (1, Traffic(2, 4, {0: 4})), (0, Traffic(1, 1, {0: 9})), (1, Traffic(0, 0))]
    assert most_traffic(found) == Traffic(2, 5, {0: 9 + 4})


# -- in a run ----------------------------------------------------------------------------------------------------------


def noted(layout: Any, module: Any = None) -> tuple[list[Any], list[str]]:
    """What each of four ranks, two on a machine, has found out, and the warnings."""
    module, loaders = (Regression(), [loader()]) if module is None else (module(), [])
    seen: list[Any] = []

    def text(*given: Any) -> str | None:
        seen.append(given[-1])
        return traffic_text(*given)

    host = f"node{int(os.environ['RANK']) // 2}"
    trainer = make_trainer(layout, max_epochs=2)
    with ExitStack() as stack:
        stack.enter_context(patch.object(socket, "gethostname", return_value=host))
        stack.enter_context(patch.object(traffic, "traffic_text", text))
        caught = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        trainer.fit(module, *loaders)
    return seen, [str(each.message) for each in caught if "between nodes" in str(each.message)]


def test_a_run_counts_what_it_sends_and_names_the_better_order(ranks: Pools) -> None:
    pool = ranks(4, lightning=True)
    layout = {
        "pipeline_parallel_size": 2,
        "num_microbatches": 2,
        "launch": Launch(rank_order="dp-pp-tp"),
        "partition": [3, 3],
    }
    (seen, texts), *others = pool.run(noted, layout)
    (found,) = seen
    whole = sum(parameter.numel() for parameter in Regression().parameters())
    assert all(each[0] == [found] for each in others)
    assert found.pipeline == {0: 2 * 8 * 8 * 8}  # activations and gradients of 8 samples, width 8, float64
    assert 0 < found.data <= whole * 8
    assert found.tensor == 0
    assert len(texts) == 1
    assert "Set launch.rank_order='pp-dp-tp', which sends" in texts[0]


def noted_with_nccl(layout: Any) -> tuple[list[Any], list[str]]:
    with patch.object(traffic, "has_nccl", lambda group: True):
        return noted(layout)


def test_with_nccl_whose_bytes_are_not_known_nothing_is_said(ranks: Pools) -> None:
    layout = {
        "pipeline_parallel_size": 2,
        "num_microbatches": 2,
        "launch": Launch(rank_order="dp-pp-tp"),
        "partition": [3, 3],
    }
    assert ranks(4, lightning=True).run(noted_with_nccl, layout) == [([], [])] * 4


class MoreBatches(Blocks):
    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.randn(128, 6, 8), torch.randint(0, 3, (128,))), 16)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "layout",
    [
        {
            "pipeline_parallel_size": 2,
            "tensor_parallel_size": 2,
            "num_microbatches": 4,
            "launch": Launch(rank_order="tp-dp-pp"),
        },
        {"pipeline_parallel_size": 2, "num_microbatches": 4, "launch": Launch(rank_order="dp-pp-tp")},
        {"tensor_parallel_size": 2, "launch": Launch(rank_order="dp-pp-tp")},
    ],
    ids=["pp2-tp2", "pp2-dp2", "tp2-dp2"],
)
def test_what_is_planned_is_what_a_run_sends(ranks: Pools, layout: dict[str, Any]) -> None:
    seen = ranks(4, lightning=True).run(noted, layout, MoreBatches)
    (found,) = seen[0][0]
    strategy = HybridStrategy(**layout)
    pipeline, tensor = layout.get("pipeline_parallel_size", 1), layout.get("tensor_parallel_size", 1)
    strategy.sizes, strategy.num_nodes = Sizes(4 // pipeline // tensor, tensor, pipeline), 2
    trainer = {"max_epochs": 1, "max_steps": -1, "accumulate_grad_batches": 1, "limit_train_batches": 1.0}
    planned = planned_traffic(lambda: (MoreBatches(), None), strategy, **trainer)
    assert found.pipeline == planned.pipeline
    assert found.data == pytest.approx(planned.data, rel=0.05)
    assert found.tensor == pytest.approx(planned.tensor, rel=0.05)


def entry(number: int, group: str, kind: str, sides: tuple[Any, Any], dtype: str = "Float") -> dict[str, Any]:
    sizes = dict(zip(("input_sizes", "output_sizes"), sides, strict=True))
    dtypes = {f"{side}_dtypes": [dtype] * len(sizes[f"{side}_sizes"]) for side in ("input", "output")}
    return {"record_id": number, "process_group": [group, ""], "profiling_name": f"gloo:{kind}", **sizes, **dtypes}


def test_bytes_of_collectives_are_those_of_the_whole_tensor_as_often_as_it_goes_around() -> None:
    entries = [
        entry(3, "a", "all_reduce", ([[10, 4]], [[10, 4]])),
        entry(4, "a", "all_gather", ([[4]], [[2, 4]]), "BFloat16"),
        entry(5, "b", "reduce_scatter", ([[8]], [[4]]), "Double"),
        entry(6, "b", "broadcast", ([[3], [2]], [[3], [2]]), "Byte"),
    ]
    with patch.object(flight_recorder, "_entries", lambda: entries):
        assert read_bytes(since=2) == ({"a": 2 * 160 + 8 * 2, "b": 8 * 8 + 5}, 6)
        assert read_bytes(since=4)[0] == {"b": 8 * 8 + 5}
        assert read_bytes(since=6) == ({}, 6)
    # Four are listed of the eight that have been started since.
    lost = [{**each, "record_id": each["record_id"] + 4} for each in entries]
    with patch.object(flight_recorder, "_entries", lambda: lost):
        assert read_bytes(since=2) == ({"a": 2 * (2 * 160 + 8 * 2), "b": 2 * (8 * 8 + 5)}, 10)
