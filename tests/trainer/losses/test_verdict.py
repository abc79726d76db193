"""What three losses tell of a loss, and that the forwards which find them leave no trace."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from lightning_hybrid.pipeline_parallel.splitting.microbatch import signatures
from lightning_hybrid.trainer.losses.causes import Cause, warning_text
from lightning_hybrid.trainer.losses.rehearsal import Untouched
from lightning_hybrid.trainer.losses.verdict import (
    Verdict,
    joined_parts,
    joined_verdict,
    judge,
    places_of_first,
    structure_of,
)


@pytest.mark.parametrize(
    ("losses", "weights", "kind"),
    [
        ((2.5, 2.0, 3.0), (0.5, 0.5), "mean"),
        ((2.25, 2.0, 3.0), (0.75, 0.25), "mean"),
        ((5.0, 2.0, 3.0), (0.5, 0.5), "sum"),
        ((2.6, 2.0, 3.0), (0.5, 0.5), "other"),
        ((2.0, 2.0, 2.0), (0.5, 0.5), "unknown"),
        ((0.0, 0.0, 0.0), (0.5, 0.5), "unknown"),
        ((1.0, math.nan, 2.0), (0.5, 0.5), "other"),
        ((math.nan, math.nan, 2.0), (0.5, 0.5), "unknown"),
        ((3.0, math.nan, 3.0), (0.0, 1.0), "mean"),
        ((3.0, 7.0, 3.0), (0.0, 1.0), "mean"),
    ],
)
def test_the_kind_of_a_loss(losses: Any, weights: Any, kind: str) -> None:
    assert judge(losses, weights, torch.float64).kind == kind


@pytest.mark.parametrize(
    ("dtype", "error", "kind"),
    [
        (torch.float64, 1e-12, "mean"),
        (torch.float64, 1e-7, "other"),
        (torch.float32, 1e-6, "mean"),
        (torch.float32, 1e-2, "other"),
        (torch.bfloat16, 1e-3, "mean"),
        (torch.float16, 0.2, "other"),
    ],
)
def test_rounding_is_no_difference(dtype: torch.dtype, error: float, kind: str) -> None:
    assert judge((2.5 + error, 2.0, 3.0), (0.5, 0.5), dtype).kind == kind


def test_the_largest_difference_of_all_ranks_counts() -> None:
    def found(kind: Any, joined: float) -> Verdict:
        return Verdict(kind, joined, (1.0, 3.0), 2.0)

    assert joined_verdict([found("mean", 2.0), found("other", 2.2), found("other", 2.1)]).joined == 2.2
    assert joined_verdict([found("unknown", 2.0), found("mean", 2.0)]).kind == "mean"
    assert joined_verdict([found("sum", 4.0)]).kind == "sum"
    assert joined_verdict([found("sum", 4.0), found("mean", 2.0)]).kind == "other"
    assert joined_verdict([]).kind == "unknown"


def test_two_microbatches_are_joined_by_a_coarser_split() -> None:
    batch = {"x": torch.arange(10), "scale": torch.tensor(2.0)}
    batches, counts = joined_parts(batch, 5, None)
    assert counts == [5, 3, 2, 5, 3, 2, 10, 5, 5]
    joined, first, second, *others = batches
    assert joined["x"].tolist() == [*first["x"].tolist(), *second["x"].tolist()] == list(range(5))
    assert others[0]["x"].tolist() == list(range(5, 10))
    assert others[3]["x"].tolist() == list(range(10))
    joined["x"].zero_()
    assert batch["x"].tolist() == list(range(10))
    assert joined_parts({"x": torch.arange(1)}, 5, None) == ([], [])


@pytest.mark.parametrize(
    ("samples", "microbatches", "joined"),
    [
        (64, 8, [16, 16]),
        (64, 2, [32]),
        (62, 4, [31, 31]),
        (256, 8, [32, 32]),
        (30, 2, [30]),
        (8, 8, [2, 2, 2, 2, 8]),
        (16, 8, [4, 4, 8]),
        (32, 16, [4, 4, 8]),
        (3, 3, [3]),
    ],
)
def test_few_samples_are_compared_in_several_pairs(samples: int, microbatches: int, joined: list[int]) -> None:
    assert joined_parts(torch.arange(samples), microbatches, None)[1][::3] == joined


def test_halves_that_are_pairs_themselves_are_the_same_objects() -> None:
    batches, counts = joined_parts(torch.arange(8), 4, None)
    assert counts == [4, 2, 2, 4, 2, 2, 8, 4, 4]
    assert places_of_first(batches) == [0, 1, 2, 3, 4, 5, 6, 0, 3]
    assert torch.equal(torch.cat(batches[7:]), batches[6])
    uneven, _ = joined_parts(torch.arange(10), 4, None)
    assert torch.equal(torch.cat(uneven[7:]), uneven[6])

    def split(batch: torch.Tensor, number: int) -> list[torch.Tensor]:
        return [batch[first::number] for first in range(number)]

    assert places_of_first(joined_parts(torch.arange(8), 4, split)[0]) == list(range(9))


def test_large_samples_are_compared_in_pairs_alone() -> None:
    assert joined_parts(torch.zeros(8, 5000), 8, None)[1][::3] == [2, 2, 2, 2]


def test_a_structure_has_no_lengths() -> None:
    of_texts, of_others, matrix, vector, integers = map(
        structure_of,
        signatures(
            [
                (torch.zeros(3, 4), "a"),
                (torch.ones(7, 2), "b"),
                (torch.zeros(3, 4),),
                (torch.zeros(3),),
                (torch.zeros(3, dtype=torch.int64),),
            ]
        ),
    )
    assert of_texts == of_others
    assert len({matrix, vector, integers}) == 3


def test_the_warning_tells_the_difference_the_cost_and_the_remedy() -> None:
    verdict = Verdict("other", 2.0, (1.0, 2.0), 1.5)
    cause = Cause("the loss couples samples", "define a method `split_batch(batch, num_microbatches)`")
    text = warning_text(verdict, 8, cause, switches=True, num_stages=2)
    assert all(
        part in text for part in ("25%", "the loss couples samples", "instead of 8", "1/2", "8/9", "`split_batch(")
    )
    text = warning_text(verdict, 8, cause, switches=False, num_stages=2)
    assert all(part in text for part in ("25%", "With the 8 microbatches that you set", "`num_microbatches=1`"))


class Everything(nn.Module):
    """A module that draws and writes in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.teacher = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.teacher.weight.mul_(0.9).add_(self.linear.weight, alpha=0.1)
            self.steps += 1  # type: ignore[operator]
        x = nn.functional.dropout(self.norm(self.linear(x)), 0.5)
        x = x + torch.randn_like(x) + torch.rand(4) + torch.bernoulli(torch.full((4,), 0.7)) * self.steps
        q = x.view(1, 1, *x.shape)
        x = nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5)[0, 0]
        return self.teacher(x)[torch.randperm(len(x))]


def test_a_rehearsal_gives_equal_results_and_writes_nothing() -> None:
    torch.manual_seed(0)
    module, x = Everything(), torch.randn(6, 4)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    mode = Untouched(lambda: [*module.parameters(), *module.buffers()])
    results = []
    for _ in range(2):
        with torch.no_grad(), mode.run():
            results.append(module(x))
    assert torch.equal(*results)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert not mode.has_drawn
    module(x)
    assert all(
        not torch.equal(module.state_dict()[name], before[name])
        for name in ("teacher.weight", "steps", "norm.running_mean", "norm.num_batches_tracked")
    )


def test_batch_norm_does_not_couple_samples_in_a_rehearsal() -> None:
    for layer in (nn.BatchNorm1d(4), nn.BatchNorm1d(4, track_running_stats=False)):
        x = torch.randn(6, 4)
        with torch.no_grad(), Untouched(list).run():
            torch.testing.assert_close(layer(x)[:2], layer(x[:2]))
    norm, x = nn.InstanceNorm1d(3), torch.randn(2, 3, 8)
    with torch.no_grad(), Untouched(list).run():
        found = norm(x)
    torch.testing.assert_close(found, norm(x))


def test_a_number_that_decides_a_path_is_drawn() -> None:
    torch.manual_seed(0)
    expected = torch.rand(())
    torch.manual_seed(0)
    mode = Untouched(list)
    with mode.run():
        assert torch.rand(()) == expected
        assert not mode.has_drawn
        torch.rand(1)  # may be one of a sample
    assert mode.has_drawn
