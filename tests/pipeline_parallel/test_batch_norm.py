"""Batch norm sees microbatches: that is said, and none of them has one sample unless the user says so."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_hybrid.pipeline_parallel.batch_norm import batch_norm_text, batch_norms, limit_microbatches
from tests.pool import Pools
from tests.training_jobs import Regression, loader, make_trainer


@pytest.mark.parametrize(
    ("requested", "batch_size", "expected"),
    [(8, 16, 8), (8, 15, 7), (8, 5, 2), (8, 3, 1), (8, 2, 1), (8, 1, 1), (4, 100, 4), (4, None, 4)],
)
def test_each_microbatch_has_two_samples(requested: int, batch_size: int | None, expected: int) -> None:
    layers = batch_norms(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    assert limit_microbatches(requested, batch_size, layers) == expected


def test_batch_norm_that_takes_no_statistics_limits_nothing() -> None:
    assert limit_microbatches(8, 4, batch_norms(nn.Sequential(nn.BatchNorm1d(2)).eval())) == 8
    assert limit_microbatches(8, 4, batch_norms(nn.Sequential(nn.LayerNorm(2), nn.InstanceNorm1d(2)))) == 8


def test_the_text_names_layers_and_sizes() -> None:
    layers = batch_norms(nn.Sequential(nn.BatchNorm1d(2), nn.Sequential(nn.BatchNorm2d(2), nn.BatchNorm3d(2).eval())))
    text = batch_norm_text(layers, [3, 2], 1)
    assert text is not None
    assert text.startswith(
        "2 BatchNorm layers compute statistics over microbatches of 2 samples, not over the full batch of 5"
    )
    assert "num_microbatches=1" in text
    assert "sync_batchnorm" not in text
    assert "Trainer(sync_batchnorm=True)" in str(batch_norm_text(layers, [3, 2], 2))
    synchronized = str(batch_norm_text([nn.SyncBatchNorm(2)], [2, 2], 2))
    assert synchronized.startswith(
        "1 BatchNorm layer computes statistics over microbatches of 2 samples on each of 2 replicas,"
    )
    assert "sync_batchnorm" not in synchronized
    assert batch_norm_text(layers, [5], 2) is None
    assert batch_norm_text([layers[2]], [3, 2], 2) is None
    assert batch_norm_text([], [3, 2], 2) is None


class Normalized(Regression):
    """Batch norm over channels that have several numbers each, so that it can run with one sample too."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.Sequential(nn.Unflatten(1, (2, 4)), nn.BatchNorm1d(2), nn.Flatten())
        self.body[4] = nn.Sequential(nn.Linear(8, 8), norm).double()
        self.sizes: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.sizes.append(len(batch[0]))
        return super().training_step(batch, batch_idx)


class ByReplica(IterableDataset[Any]):
    """Batches of 8 samples on the first of two replicas, of 5 on the second."""

    def __iter__(self) -> Iterator[Any]:
        size = 8 if int(os.environ["RANK"]) % 2 == 0 else 5
        return iter([(torch.ones(size, 6).double().normal_(), torch.ones(size, 1).double())] * 2)


def trained(layout: dict[str, Any], by_replica: bool = False, **arguments: Any) -> tuple[list[int], list[str]]:
    module = Normalized()
    data = DataLoader(ByReplica(), batch_size=None) if by_replica else loader(8, 21)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(layout, limit_val_batches=0, max_epochs=1, **arguments).fit(module, data)
    return module.sizes, [str(entry.message) for entry in caught if "BatchNorm" in str(entry.message)]


def sizes_and_told(results: list[Any]) -> tuple[list[int], list[list[str]]]:
    """The sizes of the microbatches, as the last stage saw them, and what each rank said."""
    return results[-1][0], [told for _, told in results]


def test_auto_makes_no_microbatches_of_one_sample(ranks: Pools) -> None:
    sizes, told = sizes_and_told(ranks(2, lightning=True).run(trained, {"pipeline_parallel_size": 2}))
    assert sizes == [2, 2, 2, 2, 2, 2, 2, 2, 3, 2]
    assert len(told[0]) == 1, "once, on rank 0"
    assert told[0][0].startswith(
        "1 BatchNorm layer computes statistics over microbatches of 2 samples, not over the full batch of 8"
    )
    assert told[1] == []


def test_a_number_that_the_user_gives_is_left_alone(ranks: Pools) -> None:
    layout = {"pipeline_parallel_size": 2, "num_microbatches": 8}
    sizes, told = sizes_and_told(ranks(2, lightning=True).run(trained, layout))
    assert sizes == [1] * 21
    assert "microbatches of 1 sample, " in told[0][0]


def test_whole_batches_are_not_worth_a_word(ranks: Pools) -> None:
    layout = {"pipeline_parallel_size": 2, "num_microbatches": 1}
    sizes, told = sizes_and_told(ranks(2, lightning=True).run(trained, layout))
    assert sizes == [8, 8, 5]
    assert told == [[], []]


def test_replicas_make_equally_many_microbatches(ranks: Pools) -> None:
    layout = {"pipeline_parallel_size": 2, "data_parallel_size": 2}
    results = ranks(4, lightning=True).run(trained, layout, True)
    assert results[2][0] == [4, 4] * 2
    assert results[3][0] == [3, 2] * 2
