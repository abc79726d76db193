"""Batches that are not split by guessing: what is found in them, and what the user is told."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from lightning_hybrid.pipeline_parallel.splitting.microbatch import (
    find_batch_size,
    find_misfits,
    signature,
    split_batch,
)
from lightning_hybrid.pipeline_parallel.splitting.split_watch import SplitWatch


@dataclass
class Graphs:
    x: Tensor
    edges: Tensor
    y: Tensor

    def to(self, *args: Any) -> Graphs:
        return Graphs(self.x.to(*args), self.edges.to(*args), self.y.to(*args))


class Triple(NamedTuple):
    x: Tensor
    y: Tensor
    weights: Tensor


class Closed:
    """Is moved to a device, and is no container that is known."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.inner = x, {"y": y}

    def to(self, *args: Any) -> Closed:
        return self


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: Any) -> None:
        self.x = x

    def to(self, *args: Any) -> Slotted:
        return self


X, Y = torch.zeros(8, 3), torch.zeros(8)


@pytest.mark.parametrize(
    ("batch", "paths"),
    [
        ((X, Y, torch.rand(5)), ["batch[2]"]),
        ({"x": X, "y": Y, "more": {"weights": torch.rand(5)}}, ["batch['more']['weights']"]),
        (Triple(X, Y, torch.rand(3)), ["batch.weights"]),
        (Graphs(torch.zeros(8, 5), torch.zeros(2, 16), torch.zeros(3)), ["batch.edges", "batch.y"]),
        ({"x": X, "y": Y, "graph": torch.eye(8).to_sparse()}, ["batch['graph']"]),
        ({"x": X, "y": Y, "rows": torch.nested.nested_tensor([torch.rand(2, 3)] * 8)}, ["batch['rows']"]),
        (
            {"x": X, "rows": torch.nested.nested_tensor([torch.rand(2, 3)] * 8, layout=torch.jagged)},
            ["batch['rows']"],
        ),
        ((Closed(X, Y), Y), ["batch[0].x", "batch[0].inner['y']"]),
        (Closed(X, Y), ["batch.x", "batch.inner['y']"]),
        (Slotted(X), ["batch.x"]),
        ({"x": X, "words": pack_sequence([torch.rand(4, 2), torch.rand(1, 2)])}, ["batch['words']"]),
        (([torch.rand(3, 4, 5), torch.rand(3, 6, 5)], [{"boxes": torch.rand(1, 4)}] * 2, torch.rand(7)), ["batch[2]"]),
    ],
)
def test_what_does_not_fit_is_named(batch: Any, paths: list[str]) -> None:
    parts, counts = split_batch(batch, 4)
    assert len(parts) == len(counts) == 1
    assert parts[0] is batch
    assert [misfit.path for misfit in find_misfits(batch) or []] == paths
    (text,) = SplitWatch("Model")(batch, counts, 4)
    assert text.startswith("The batch runs as one microbatch instead of 4, because ")
    assert all(path in text for path in paths)
    assert "`Model.split_batch(batch, num_microbatches)`" in text
    assert "as a buffer" in text


def test_it_is_said_once() -> None:
    batch = (X, Y, torch.rand(5))
    watch = SplitWatch("Model")
    assert [len(list(watch(batch, [8], 4))) for _ in range(3)] == [1, 0, 0]
    assert list(SplitWatch("Model")((X, Y), [2] * 4, 4)) == []


@pytest.mark.parametrize(
    "batch",
    [
        (X, Y, torch.rand(1, 3), torch.tensor(0.5), 0.1, None, "train", [1, 2, 3], [0.1] * 8, (480, 640)),
        ([X, X], [Y, Y]),
        {"views": [X] * 6, "names": ["a"] * 8},
        (X, [torch.rand(n) for n in range(8)]),
        (X, [{"boxes": torch.rand(n, 4)} for n in range(8)]),
        (X, [{"boxes": torch.rand(3, 4), "labels": torch.zeros(3), "areas": torch.zeros(3)}] * 8),
        (X, object()),
        {"x": X, "offset": torch.zeros(8, dtype=torch.int64)},
        {"x": X, "labels": torch.arange(8)},
        {"x": X, "mask": torch.rand(1, 3, 7)},
    ],
)
def test_ordinary_batches_are_split(batch: Any) -> None:
    parts, counts = split_batch(batch, 4)
    assert counts == [2] * 4
    assert len(parts) == 4
    assert find_batch_size(batch) == 8
    assert list(SplitWatch("Model")(batch, counts, 4)) == []


def test_records_with_equal_numbers_of_boxes_are_as_many_as_there_are_images() -> None:
    targets = [{"boxes": torch.full((2, 4), float(i)), "labels": torch.full((2,), i)} for i in range(4)]
    parts, counts = split_batch((torch.arange(4.0).view(4, 1), targets), 2)
    assert counts == [2, 2]
    for images, records in parts:
        assert images[:, 0].tolist() == [record["boxes"][0, 0].item() for record in records]


def test_a_container_beside_lists_of_samples_is_split_with_them() -> None:
    images = [torch.rand(3, 4 + i, 5) for i in range(4)]
    batch = {"images": images, "targets": [{"y": torch.rand(i + 1)} for i in range(4)], "meta": {"id": torch.arange(4)}}
    parts, _ = split_batch(batch, 2)
    assert [part["meta"]["id"].tolist() for part in parts] == [[0, 1], [2, 3]]


# -- packed rows -------------------------------------------------------------------------------------------------------


IDS = torch.arange(12)


@pytest.mark.parametrize(
    ("batch", "splitter"),
    [
        ({"ids": IDS, "labels": IDS, "cu_seqlens": torch.tensor([0, 3, 7, 12])}, "split_rows('cu_seqlens')"),
        (
            {"ids": IDS[None], "labels": IDS[None], "cu_seq_lens_q": torch.tensor([0, 7, 12])},
            "split_rows('cu_seq_lens_q')",
        ),
        ({"ids": IDS[None], "ends": torch.tensor([0, 7, 12])}, "split_rows('ends')"),
        ((IDS, IDS, torch.tensor([0, 3, 7, 12])), "split_batch(batch"),
        # As many tokens as there are offsets: the name tells them apart.
        ({"ids": IDS[:3], "labels": IDS[:3], "cu": torch.tensor([0, 1, 3], dtype=torch.int32)}, "split_rows('cu')"),
    ],
)
def test_packed_rows_are_not_split_as_if_tokens_were_samples(batch: Any, splitter: str) -> None:
    parts, counts = split_batch(batch, 4)
    assert len(parts) == 1
    (text,) = SplitWatch("Model")(batch, counts, 4)
    assert splitter in text


@pytest.mark.parametrize(
    "numbers", [[0, 2, 1, 12], [1, 3, 12, 12], [0, 3, 7, 11]], ids=["fall", "no zero", "another end"]
)
def test_numbers_that_are_no_offsets_go_by_samples(numbers: list[int]) -> None:
    batch = {"x": torch.rand(4, 12), "offset": torch.tensor(numbers)}
    assert split_batch(batch, 2)[1] == [2, 2]


# -- lists of samples --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sample",
    [
        {"image": torch.rand(3, 8, 8), "label": 5},
        {"image": torch.rand(3, 8, 8), "label": torch.tensor(5)},
        (torch.rand(3, 8, 8), 5),
    ],
)
def test_a_list_of_samples_is_not_split_into_channels(sample: Any) -> None:
    batch = [copy.deepcopy(sample) for _ in range(6)]
    parts, counts = split_batch(batch, 3)
    assert len(parts) == 1
    (text,) = SplitWatch("Model")(batch, counts, 3)
    assert "split_batch = lightning_hybrid.split_samples()" in text


def test_batches_of_several_loaders_are_containers() -> None:
    batch = [{"x": X, "y": Y, "scale": 0.5}, {"x": X, "y": Y, "scale": 0.1}]
    assert split_batch(batch, 4)[1] == [2] * 4


# -- objects -----------------------------------------------------------------------------------------------------------


def test_shapes_in_objects_are_part_of_a_signature() -> None:
    assert signature(Closed(X, Y)) == signature(Closed(X + 1, Y))
    assert signature(Closed(X, Y)) != signature(Closed(X[:4], Y))
    assert hash(signature(Closed(X, Y))) == hash(signature(Closed(X, Y)))
