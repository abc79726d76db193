from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lightning_hybrid.trainer.results.outputs import merge_outputs

LOSS = torch.tensor(0.5)


def extras(*outputs: dict[str, Any], counts: list[int]) -> dict[str, Any]:
    merged = merge_outputs([{"loss": torch.rand(()), **output} for output in outputs], counts, LOSS)
    assert merged.pop("loss") is LOSS
    return merged  # type: ignore[no-any-return]


def test_a_loss_is_the_loss() -> None:
    assert merge_outputs([torch.rand(()), torch.rand(())], [1, 2], LOSS) is LOSS


def test_tensors_of_samples_are_concatenated() -> None:
    y = torch.rand(5, 2, requires_grad=True)
    merged = extras({"y": y[:3], "deep": {"y": y[:3]}}, {"y": y[3:], "deep": {"y": y[3:]}}, counts=[3, 2])
    assert torch.equal(merged["y"], y)
    assert torch.equal(merged["deep"]["y"], y)
    assert not merged["y"].requires_grad


def test_averages_are_weighted() -> None:
    merged = extras({"a": 1.0, "b": torch.tensor(1.0)}, {"a": 4.0, "b": torch.tensor(4.0)}, counts=[3, 1])
    assert merged == {"a": 1.75, "b": 1.75}


def test_averages_over_no_samples_are_means() -> None:
    merged = extras({"a": 1.0, "b": np.float64(1.0)}, {"a": 4.0, "b": np.float64(4.0)}, counts=[0, 0])
    assert merged == {"a": 2.5, "b": 2.5}


def test_lists_of_samples_are_joined() -> None:
    merged = extras({"ids": ["a", "b", "c"]}, {"ids": ["d", "e"]}, counts=[3, 2])
    assert merged == {"ids": ["a", "b", "c", "d", "e"]}


def test_whatever_else_is_the_first_microbatches() -> None:
    first = {"name": "a", "none": None, "n": 3, "hard": torch.rand(3, 2), "number": torch.tensor(7)}
    second = {"name": "b", "none": None, "n": 4, "hard": torch.rand(1, 2), "number": torch.tensor(8)}
    merged = extras(first, second, counts=[4, 4])
    assert list(merged) == list(first)
    assert all(merged[key] is value or torch.equal(merged[key], value) for key, value in first.items())


def test_extras_that_differ_between_microbatches_are_no_error() -> None:
    merged = extras({"a": 1.0, "b": [1, 2], "c": None}, {"a": 3.0, "b": [1], "c": torch.rand(2)}, counts=[3, 3])
    assert merged == {"a": 2.0, "b": [1, 2], "c": None}
    assert extras({"a": 1.0, "b": 2}, {"a": 1.0}, counts=[1, 1]) == {"a": 1.0}


def test_nothing_that_is_returned_has_a_graph() -> None:
    x = torch.rand(2, requires_grad=True)
    merged = extras({"list": [x * 2, {"x": x}], "x": x.sum()}, {"list": [x], "x": x.sum()}, counts=[1, 1])
    assert not any(leaf.requires_grad for leaf in (merged["list"][0], merged["list"][1]["x"], merged["x"]))
    assert not extras({"x": x}, counts=[2])["x"].requires_grad


def test_arrays_and_their_numbers_are_treated_like_tensors() -> None:
    y, mean = np.arange(10.0).reshape(5, 2), np.array([1.0, 2.0], dtype=np.float32)
    merged = extras(
        {"y": y[:3], "text": np.array(["a", "b", "c"]), "mean": mean, "float": np.float32(1), "n": np.array([3, 3])},
        {"y": y[3:], "text": np.array(["d", "e"]), "mean": mean * 6, "float": np.float32(6), "n": np.array([4, 4])},
        counts=[3, 2],
    )
    assert merged["y"].tolist() == y.tolist()
    assert merged["text"].tolist() == ["a", "b", "c", "d", "e"]
    assert (merged["mean"].tolist(), merged["mean"].dtype) == ([3.0, 6.0], np.float32)
    assert (merged["float"], type(merged["float"])) == (3.0, np.float32)
    assert merged["n"].tolist() == [3, 3]
