from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

from lightning_hybrid.axes import Sizes
from lightning_hybrid.memory.account import MemoryUsage
from lightning_hybrid.pipeline_parallel.placeholders import replace_with_placeholders
from lightning_hybrid.pipeline_parallel.schedules import Placement, build
from lightning_hybrid.pipeline_parallel.stage_map import StageMap
from lightning_hybrid.strategy.summary import (
    StageRow,
    batch_text,
    layout_text,
    memory_table,
    plan_table,
    stage_holders,
    stage_rows,
    stage_table,
    text_table,
)
from lightning_hybrid.tensor_parallel.plan import make_plan

STAGES = [range(3), range(3, 4), range(4, 6), range(6, 7)]


class Encoder(nn.Sequential):
    """A Sequential with a constructor of its own, such as torchvision's `MLP`."""

    def __init__(self, width: int) -> None:
        layers = [nn.Linear(width, width, bias=False) for _ in range(6)]
        layers[2].weight = layers[0].weight  # twice on one stage: counts once
        layers[5].weight = layers[3].weight  # on two stages: counts on both
        super().__init__(*layers[:4], nn.ReLU(), *layers[4:])


def rows_of(body: nn.Sequential, stages: list[range], num_ranks: int) -> list[StageRow]:
    placement = Placement.in_turns(num_ranks, len(stages) // num_ranks)
    return stage_rows(body, body, StageMap("", tuple(body._modules), tuple(stages), placement))


def test_stages_as_data() -> None:
    rows = rows_of(Encoder(10), STAGES, 2)
    assert [(row.stage, row.rank, row.layers) for row in rows] == [
        (0, 0, range(3)),
        (1, 1, range(3, 4)),
        (2, 0, range(4, 6)),
        (3, 1, range(6, 7)),
    ]
    assert [row.kinds for row in rows] == ["3 x Linear", "Linear", "ReLU, Linear", "Linear"]
    assert [row.num_parameters for row in rows] == [200, 100, 100, 100]
    assert [row.share for row in rows] == [0.4, 0.2, 0.2, 0.2]


def test_placeholders_count() -> None:
    whole = rows_of(Encoder(10), STAGES, 2)
    body = Encoder(10)
    module = nn.ModuleDict({"body": body})
    replace_with_placeholders(
        module,
        StageMap("body", tuple(f"body.{key}" for key in body._modules), tuple(STAGES), Placement.in_turns(2, 2)),
        0,
    )
    assert rows_of(body, STAGES, 2) == whole


def test_a_body_without_parameters() -> None:
    rows = rows_of(nn.Sequential(nn.ReLU(), nn.Tanh()), [range(1), range(1, 2)], 2)
    assert [(row.num_parameters, row.share) for row in rows] == [(0, 0.0), (0, 0.0)]


def test_many_kinds_are_cut_short() -> None:
    kinds = [nn.Linear(1, 1), nn.ReLU(), nn.Dropout(), nn.Tanh(), nn.Sigmoid(), nn.Identity(), nn.GELU(), nn.Softmax(0)]
    (row,) = rows_of(nn.Sequential(*kinds), [range(8)], 1)
    assert len(row.kinds) == 48
    assert row.kinds.endswith("...")


def test_stages_as_text() -> None:
    text = stage_table(rows_of(Encoder(100), STAGES, 2), "net.body", is_estimate=False)
    assert text == "\n".join(
        [
            "stage  pp rank  layers of 'net.body'                parameters  share",
            "---------------------------------------------------------------------",
            "    0        0  0-2                   3 x Linear        20,000  40.0%",
            "    1        1  3                     Linear            10,000  20.0%",
            "    2        0  4-5                   ReLU, Linear      10,000  20.0%",
            "    3        1  6                     Linear            10,000  20.0%",
            "total                                                   50,000",
        ]
    )


def test_stages_on_several_machines_as_text() -> None:
    hosts = [f"node{rank // 4}" for rank in range(8)]
    holders = stage_holders(Sizes(2, 2, 2), "dp-pp-tp", hosts)
    assert stage_table(rows_of(Encoder(100), STAGES, 2), "", is_estimate=False, holders=holders) == "\n".join(
        [
            "stage     ranks  node          layers of ''                parameters  share",
            "----------------------------------------------------------------------------",
            "    0  0-1, 4-5  node0, node1  0-2           3 x Linear        20,000  40.0%",
            "    1  2-3, 6-7  node0, node1  3             Linear            10,000  20.0%",
            "    2  0-1, 4-5  node0, node1  4-5           ReLU, Linear      10,000  20.0%",
            "    3  2-3, 6-7  node0, node1  6             Linear            10,000  20.0%",
            "total                                                          50,000",
        ]
    )


@pytest.mark.parametrize(
    ("rank_order", "expected"),
    [
        ("pp-dp-tp", [("0-3", "a"), ("4-7", "b")]),
        ("dp-pp-tp", [("0-1, 4-5", "a, b"), ("2-3, 6-7", "a, b")]),
        ("tp-dp-pp", [("0, 2, 4, 6", "a, b"), ("1, 3, 5, 7", "a, b")]),
    ],
)
def test_who_holds_stages(rank_order: str, expected: list[tuple[str, str]]) -> None:
    assert stage_holders(Sizes(2, 2, 2), rank_order, "aaaabbbb") == expected


SIZES = Sizes(data=2)


def test_memory_as_text() -> None:
    usages = [MemoryUsage(2**29, 2**28, 2**30, activations, 0) for activations in (2**31, 2**27)]
    assert memory_table(usages) == "\n".join(
        [
            "GiB              parameters  gradients  optimizer  activations  buffers  total",
            "------------------------------------------------------------------------------",
            "pipeline rank 0        0.50       0.25       1.00         2.00     0.00   3.75",
            "pipeline rank 1        0.50       0.25       1.00         0.12     0.00   1.88",
        ]
    )


def test_little_memory_has_digits_too() -> None:
    (row,) = memory_table([MemoryUsage(2**20, 0, 0, 2**23, 0)]).splitlines()[2:]
    assert row.split()[3:] == ["0.00098", "0.00000", "0.00000", "0.00781", "0.00000", "0.00879"]


def test_a_table_that_is_too_wide_continues_below() -> None:
    text = text_table(
        [("name", "layers of 'a.b'", "number"), ("x" * 90, "1-2", "7"), ("y, " * 40, "3", "12")], left=(0, 1)
    )
    assert max(map(len, text.splitlines())) == 100
    assert [line.split()[-2:] for line in text.splitlines() if line.endswith(("7", "12"))] == [
        ["1-2", "7"],
        ["3", "12"],
    ]
    assert "".join(line[:75] for line in text.splitlines()).count("y,") == 40
    assert "".join(line[:75] for line in text.splitlines()).count("x") == 90


def test_unknown_memory_as_text_with_peaks() -> None:
    usages = [MemoryUsage(2**33, 2**32, 2**34, None, 0), MemoryUsage(2**33, 2**32, None, None, 0)]
    assert memory_table(usages, [2**35, 2**34]) == "\n".join(
        [
            "GiB              parameters  gradients  optimizer  buffers  allocator's peak",
            "----------------------------------------------------------------------------",
            "pipeline rank 0         8.0        4.0       16.0      0.0              32.0",
            "pipeline rank 1         8.0        4.0          ?      0.0              16.0",
        ]
    )


def test_the_layout_in_one_line() -> None:
    text = layout_text(replace(SIZES, pipeline=4), build("1f1b", 4, 8), bubble=3 / 11)
    assert text == (
        "Layout: data 2 x tensor 1 x pipeline 4 = 8 processes; schedule '1f1b', 8 microbatches, bubble 27.3%"
    )


def test_the_layout_with_several_chunks() -> None:
    text = layout_text(replace(SIZES, pipeline=2), build("interleaved_1f1b", 2, 4, 2), bubble=0.1)
    assert text.endswith("; schedule 'interleaved_1f1b', 2 chunks per rank, 4 microbatches, bubble 10.0%")


def test_the_layout_without_a_pipeline() -> None:
    text = layout_text(replace(SIZES, pipeline=1), build("1f1b", 1, 1), bubble=0.0)
    assert text == "Layout: data 2 x tensor 1 x pipeline 1 = 2 processes"


def test_the_effective_batch_in_one_line() -> None:
    expected = "Effective batch: 10 samples x 2 replicas x 3 accumulated batches = 60 per optimizer step"
    assert batch_text(10, 2, 3, num_microbatches=1, requested=1) == expected
    assert batch_text(10, 2, 3, num_microbatches=4, requested=4) == f"{expected}; microbatches of 3"
    fewer = batch_text(10, 2, 3, num_microbatches=16, requested=16)
    assert fewer == f"{expected}; 10 instead of 16 microbatches, 1 sample each", "a batch has no more samples"
    assert "4 instead of 8 microbatches, 3 samples each" in batch_text(10, 2, 3, num_microbatches=4, requested=8)
    assert batch_text(None, 2, 3, num_microbatches=4, requested=4).startswith(
        "Effective batch: the loader's batch x 2 replicas"
    )
    assert "8 samples x 1 replica x 1 accumulated batch = 8 per" in batch_text(8, 1, 1, num_microbatches=1, requested=1)


def pair() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def test_the_plan_as_text() -> None:
    module = nn.Sequential(pair(), pair(), nn.MultiheadAttention(8, 2))
    text = plan_table(make_plan(module, "auto", 2, sequence_parallel=False), module)
    assert [line.split() for line in text.splitlines()] == [
        ["module", "style", "full", "local"],
        [text.splitlines()[1]],
        ["*.0", "(2)", "colwise", "16x8", "16", "8x8", "8"],
        ["*.2", "(2)", "rowwise", "8x16", "8x8"],
        ["2", "attention", "24x8", "24", "8x8", "12x8", "12", "8x4"],
        ["sharded:", "97.2%", "of", "the", "parameters"],  # all but three biases of 8
    ]


def test_layers_of_other_shapes_have_lines_of_their_own() -> None:
    wider = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    text = plan_table(make_plan(both := nn.Sequential(pair(), wider), "auto", 2, sequence_parallel=False), both)
    assert [line.split() for line in text.splitlines()[2:-1]] == [
        ["0.0", "colwise", "16x8", "16", "8x8", "8"],
        ["0.2", "rowwise", "8x16", "8x8"],
        ["1.0", "colwise", "32x8", "32", "16x8", "16"],
        ["1.2", "rowwise", "8x32", "8x16"],
    ]


def test_the_plan_says_what_stays_whole_and_why() -> None:
    assert "not sharded" not in plan_table(make_plan(both := pair(), "auto", 2, sequence_parallel=False), both)
    text = plan_table(make_plan(both := pair(), "auto", 3, sequence_parallel=False), both)
    assert text.splitlines()[2] == "sharded: 0.0% of the parameters"
    assert text.splitlines()[3].startswith("not sharded: 0 has 'weight' of shape (16, 8)")
