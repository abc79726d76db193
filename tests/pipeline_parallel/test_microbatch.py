from __future__ import annotations

import dataclasses
import random
from collections import defaultdict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lightning_hybrid.pipeline_parallel.splitting.microbatch import (
    JoinError,
    find_batch_size,
    join,
    signature,
    sizes,
    slicing,
    split_batch,
)


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Attention:
    queries: Tensor
    keys: Tensor
    values: Tensor


@pytest.mark.parametrize(
    ("total", "number", "expected"),
    [
        (8, 4, [2, 2, 2, 2]),
        (10, 4, [3, 3, 2, 2]),
        (3, 4, [1, 1, 1]),
        (1, 8, [1]),
        (0, 4, [0]),
        (7, 1, [7]),
    ],
)
def test_sizes(total: int, number: int, expected: list[int]) -> None:
    assert sizes(total, number) == expected


def test_sizes_are_those_of_numpys_array_split() -> None:
    for total in range(1, 40):
        for number in range(1, 20):
            expected = [len(chunk) for chunk in torch.arange(total).tensor_split(min(number, total))]
            assert sizes(total, number) == expected


# -- the number of samples ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (torch.zeros(5, 2), 5),
        (torch.zeros(0, 2), 0),
        ((torch.tensor(0.5), torch.zeros(3, 2)), 3),
        ({"scale": torch.tensor(2.0), "x": {"y": torch.zeros(4)}}, 4),
        (["a", "b", "c"], 3),
        (torch.tensor(1.0), None),
        (None, None),
        ("text", None),
        ({}, None),
        ([], None),
    ],
)
def test_find_batch_size(batch: Any, expected: int | None) -> None:
    assert find_batch_size(batch) == expected


# -- splitting a batch -------------------------------------------------------------------------------------------------


def test_tensors_are_split_along_the_samples_without_copies() -> None:
    x, y = torch.arange(20).view(10, 2), torch.arange(10)
    parts, counts = split_batch([x, y], 4)
    assert counts == [3, 3, 2, 2]
    assert torch.equal(torch.cat([part[0] for part in parts]), x)
    assert torch.equal(torch.cat([part[1] for part in parts]), y)
    assert all(isinstance(part, list) for part in parts)
    assert parts[1][0].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_one_microbatch_is_the_batch_itself() -> None:
    batch = {"x": torch.zeros(3), "anything": object()}
    parts, counts = split_batch(batch, 1)
    assert parts[0] is batch
    assert counts == [3]


def test_a_batch_without_samples_is_one_microbatch() -> None:
    batch = {"seed": torch.tensor(3), "text": "abc"}
    parts, counts = split_batch(batch, 4)
    assert parts[0] is batch
    assert counts == [1]


def test_an_empty_batch_is_one_microbatch() -> None:
    parts, counts = split_batch((torch.zeros(0, 3), torch.zeros(0)), 4)
    assert counts == [0]
    assert parts[0][0].shape == (0, 3)


def test_a_batch_of_one_sample_is_one_microbatch() -> None:
    parts, counts = split_batch((torch.zeros(1, 3), ["name"]), 4)
    assert counts == [1]
    assert parts[0][1] == ["name"]


def test_what_has_no_samples_goes_whole_to_every_microbatch() -> None:
    mask = torch.rand(1, 7)
    batch = {"x": torch.zeros(4, 2), "mask": mask, "lam": 0.3, "scale": torch.tensor(2.0), "none": None}
    parts, _ = split_batch(batch, 2)
    assert len(parts) == 2
    for part in parts:
        assert part["mask"] is mask
        assert (part["lam"], part["scale"].item(), part["none"]) == (0.3, 2.0, None)


@pytest.mark.parametrize("kind", [list, tuple])
def test_lists_of_one_string_a_sample_are_split(kind: type) -> None:
    parts, _ = split_batch((torch.zeros(3, 2), kind(["a", "b", "c"])), 2)
    assert [part[1] for part in parts] == [kind(["a", "b"]), kind(["c"])]


def test_a_batch_of_strings_is_split() -> None:
    assert split_batch(["a", "b", "c"], 2) == ([["a", "b"], ["c"]], [2, 1])


def test_a_dictionary_that_starts_with_strings_is_split() -> None:
    parts, counts = split_batch({"text": ["a", "b", "c"], "x": torch.arange(3)}, 2)
    assert counts == [2, 1]
    assert [(part["text"], part["x"].tolist()) for part in parts] == [(["a", "b"], [0, 1]), (["c"], [2])]


def test_two_tensors_of_two_samples_are_a_container_and_not_two_samples() -> None:
    # What `default_collate` makes of two pairs: a list of as many tensors as there are samples.
    x, y = torch.arange(4).view(2, 2), torch.arange(2)
    parts, counts = split_batch([x, y], 2)
    assert counts == [1, 1]
    assert [part[0].tolist() for part in parts] == [[[0, 1]], [[2, 3]]]
    assert [part[1].tolist() for part in parts] == [[0], [1]]


@pytest.mark.parametrize("other", ["text", {"boxes": torch.rand(2, 4)}, torch.rand(1, 7), ("a", "b"), 0.5, None])
def test_what_default_collate_makes_of_two_samples_is_a_container(other: Any) -> None:
    parts, counts = split_batch([torch.arange(4).view(2, 2), other], 2)
    assert counts == [1, 1]
    assert [len(part) for part in parts] == [2, 2]
    assert [part[0].tolist() for part in parts] == [[[0, 1]], [[2, 3]]]


def test_numbers_in_a_tuple_are_a_record() -> None:
    parts, _ = split_batch({"x": torch.zeros(2, 3), "image_size": (480, 640)}, 2)
    assert [part["image_size"] for part in parts] == [(480, 640)] * 2


def test_lists_of_tensors_of_different_lengths_are_split() -> None:
    words = [torch.zeros(5), torch.zeros(3), torch.zeros(4)]
    parts, _ = split_batch((torch.zeros(3, 2), words), 2)
    assert [[len(word) for word in part[1]] for part in parts] == [[5, 3], [4]]


def test_lists_of_one_record_a_sample_are_split_as_in_detection() -> None:
    targets = [{"boxes": torch.full((i + 1, 4), float(i)), "name": str(i)} for i in range(4)]
    parts, counts = split_batch((torch.zeros(4, 3, 8, 8), targets), 2)
    assert counts == [2, 2]
    assert [[target["name"] for target in part[1]] for part in parts] == [["0", "1"], ["2", "3"]]
    assert all(
        a is b for part, i in zip(parts, (0, 2), strict=True) for a, b in zip(part[1], targets[i:], strict=False)
    )


@pytest.mark.parametrize("kind", [tuple, list])
def test_images_of_different_sizes_stay_whole_beside_their_targets(kind: type) -> None:
    images = kind(torch.full((3, 4 + i, 5), float(i)) for i in range(4))
    targets = kind({"boxes": torch.full((i + 1, 4), float(i))} for i in range(4))
    batch = {"images": images, "targets": targets, "ids": torch.arange(4), "mean": torch.zeros(1, 3), "scale": 0.5}
    for whole in (batch, (images, targets)):
        assert find_batch_size(whole) == 4
        parts, counts = split_batch(whole, 3)
        assert counts == [2, 1, 1]
        fields = [list(part.values()) if isinstance(part, dict) else list(part) for part in parts]
        assert [image.shape for part in fields for image in part[0]] == [image.shape for image in images]
        assert [target["boxes"].shape[0] for part in fields for target in part[1]] == [1, 2, 3, 4]
        assert all(type(part[0]) is type(part[1]) is kind for part in fields)
    parts, _ = split_batch(batch, 3)
    assert [part["ids"].tolist() for part in parts] == [[0, 1], [2], [3]]
    assert all(part["mean"] is batch["mean"] and part["scale"] == 0.5 for part in parts)


def test_two_views_beside_two_records_are_containers() -> None:
    batch = [torch.rand(8, 3), torch.rand(8, 3)], [{"y": torch.rand(8)}, {"y": torch.rand(8)}]
    assert find_batch_size(batch) == 8
    parts, _ = split_batch(batch, 2)
    assert [view.shape for view in parts[0][0]] == [(4, 3), (4, 3)]


@pytest.mark.parametrize("record", [Pair("a", 3), torch.Size((64, 32))])
def test_a_record_is_not_split_even_if_it_has_as_many_fields_as_there_are_samples(record: Any) -> None:
    parts, _ = split_batch({"x": torch.zeros(2, 3), "record": record}, 2)
    assert [part["record"] for part in parts] == [record, record]
    assert all(type(part["record"]) is type(record) for part in parts)


def test_containers_keep_their_classes() -> None:
    x = torch.arange(4)
    batch = Pair(x, defaultdict(list, mask=x, meta=(Pair(x, None), "train")))
    first, second = split_batch(batch, 2)[0]
    assert type(first) is Pair
    assert type(first.y) is defaultdict
    assert type(first.y["meta"][0]) is Pair
    assert first.x.tolist() == first.y["mask"].tolist() == first.y["meta"][0].x.tolist() == [0, 1]
    assert second.x.tolist() == [2, 3]
    assert second.y["meta"][0].y is None
    assert second.y["meta"][1] == "train"


def test_a_dataclass_may_have_a_field_called_keys() -> None:
    x = torch.arange(4)
    first, second = split_batch(Attention(x, x + 10, x + 20), 2)[0]
    assert first.keys.tolist() == [10, 11]
    assert second.values.tolist() == [22, 23]


def test_nothing_is_lost_when_batches_are_split() -> None:
    rng = random.Random(0)
    for _ in range(200):
        total, requested = rng.randrange(1, 20), rng.randrange(1, 9)
        width = rng.randrange(20, 30)  # never the number of samples
        batch = {"x": torch.rand(total, width), "y": (torch.rand(total), [str(i) for i in range(total)]), "lam": 0.1}
        parts, counts = split_batch(batch, requested)
        assert counts == sizes(total, requested) or requested == 1
        assert torch.equal(torch.cat([part["x"] for part in parts]), batch["x"])
        assert torch.equal(torch.cat([part["y"][0] for part in parts]), batch["y"][0])
        assert [name for part in parts for name in part["y"][1]] == batch["y"][1]


# -- signatures --------------------------------------------------------------------------------------------------------


def test_numbers_and_texts_do_not_change_a_signature() -> None:
    a, b = {"x": torch.zeros(2, 3), "t": "abc", "n": 1}, {"x": torch.ones(2, 3), "t": "de", "n": 2}
    assert signature(a) == signature(b)
    assert hash(signature(a)) == hash(signature(b))


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.zeros(2, 4), "flag": True, "none": None},
        {"x": torch.zeros(2, 3, dtype=torch.float64), "flag": True, "none": None},
        {"x": torch.zeros(2, 3), "flag": False, "none": None},
        {"x": torch.zeros(2, 3), "flag": 1, "none": None},
        {"x": torch.zeros(2, 3), "flag": True, "none": 0},
        {"x": [torch.zeros(2, 3)], "flag": True, "none": None},
    ],
)
def test_what_decides_shapes_changes_a_signature(other: Any) -> None:
    assert signature({"x": torch.zeros(2, 3), "flag": True, "none": None}) != signature(other)


# -- the input of the body in evaluation -------------------------------------------------------------------------------


def test_the_dimension_that_is_the_batch_is_found_leaf_by_leaf() -> None:
    tree = {"x": torch.rand(5, 7), "time_first": torch.rand(7, 5), "positions": torch.arange(7), "n": 3}
    plan = slicing(tree, 5, 2)
    assert plan.dims == (0, 1, None, None)
    assert plan.counts == (3, 2)
    first, second = plan.apply(tree)
    assert torch.equal(first["x"], tree["x"][:3])
    assert torch.equal(second["time_first"], tree["time_first"][:, 3:])
    assert second["positions"] is tree["positions"]
    assert second["n"] == 3


@pytest.mark.parametrize(
    ("tree", "total"),
    [
        (torch.rand(5, 5), 5),  # two dimensions could be the batch
        ((torch.rand(5, 2), torch.rand(5, 5)), 5),
        (torch.rand(6, 2), 5),  # none is
        (torch.tensor(1.0), 5),
        ("text", 5),
        (torch.rand(5, 2), None),  # the number of samples is unknown
    ],
)
def test_a_tree_that_cannot_be_divided_without_doubt_stays_whole(tree: Any, total: int | None) -> None:
    plan = slicing(tree, total, 4)
    assert len(plan.counts) == 1
    assert plan.apply(tree)[0] is tree


@pytest.mark.parametrize("requested", [1, 2, 3, 8])
def test_slicing_and_joining_are_inverse(requested: int) -> None:
    rng = random.Random(requested)
    for _ in range(50):
        total = rng.randrange(9, 14)
        shape = [15, 16, 17][: rng.randrange(3)]
        shape.insert(rng.randrange(len(shape) + 1), total)
        tree = Pair(torch.rand(shape), {"whole": torch.rand(20), "flag": True, "x": [torch.rand(total)]})
        plan = slicing(tree, total, requested)
        assert plan.counts == tuple(sizes(total, requested))
        again = join(plan.apply(tree), plan.counts)
        assert torch.equal(again.x, tree.x)
        assert torch.equal(again.y["x"][0], tree.y["x"][0])
        assert torch.equal(again.y["whole"], tree.y["whole"])
        assert again.y["flag"] is True


def test_a_single_part_is_the_whole() -> None:
    part = {"anything": object()}
    assert join([part], [3]) is part


def test_leaves_without_samples_are_taken_once_if_they_are_the_same() -> None:
    parts = [{"y": torch.full((n, 2), float(n)), "table": torch.arange(7), "name": "a"} for n in (3, 2)]
    joined = join(parts, [3, 2])
    assert joined["y"][:, 0].tolist() == [3, 3, 3, 2, 2]
    assert joined["table"].tolist() == list(range(7))
    assert joined["name"] == "a"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (torch.zeros(2, 2), torch.zeros(2, 2)),  # two dimensions follow the samples
        (torch.zeros(7), torch.ones(7)),  # none does, and the values differ
        (torch.zeros(()), torch.ones(())),
        (torch.zeros(3, 5), torch.zeros(1, 5)),  # lengths that are not those of the samples
        (torch.zeros(2), torch.zeros(2, 3)),  # different numbers of dimensions
        ("a", "b"),
        (torch.zeros(2, 5), None),
        ([torch.zeros(2, 5)], (torch.zeros(2, 5),)),
    ],
)
def test_doubts_are_errors_when_outputs_are_joined(first: Any, second: Any) -> None:
    with pytest.raises(JoinError):
        join([first, second], [2, 2])


def test_different_scalars_of_single_samples_are_no_batch() -> None:
    with pytest.raises(JoinError):
        join([torch.tensor(1.0), torch.tensor(2.0)], [1, 1])
