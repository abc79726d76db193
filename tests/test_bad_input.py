"""Odd batches and loaders train as in one process, or are refused; and the page that lists what is wrong is true."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from tests.pool import Pools
from tests.training_jobs import PP2, Regression, assert_same, make_trainer, together, train

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "project" / "bad-input.md"


class Pair(NamedTuple):
    """A batch with names."""

    x: Tensor
    y: Tensor


def samples(count: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    return x, x.sum(1, keepdim=True).sin()


def batch(kind: str, seed: int) -> Any:
    """A batch of 8 samples, or of as many as the kind has."""
    sizes = {"no samples": 0, "one sample": 1, "three samples": 3, "ragged": (8, 1, 5)[seed % 3]}
    x, y = samples(sizes.get(kind, 8), seed)
    if kind == "changing leaves":
        return {"x": x, "y": y} if seed % 2 else (x, y)
    if kind == "changing dtype":
        return (x.float() if seed % 2 else x), y
    if kind == "not a number":
        x[3, 2] = float("nan") if seed == 1 else x[3, 2]
        return x, y
    if kind == "views":
        return x.t().contiguous().t(), y.expand(len(x), 1)
    made: dict[str, Callable[[], Any]] = {
        "list": lambda: [x, y],
        "named": lambda: Pair(x, y),
        "words": lambda: {"x": x, "names": [f"sample {index}" for index in range(len(x))], "y": y},
        "numbers": lambda: {"x": x, "epoch": 3, "scale": 0.5, "flag": True, "y": y},
        "nothing": lambda: {"x": x, "mask": None, "y": y},
        "nested": lambda: {"inputs": {"deep": [{"x": x}]}, "y": y},
        "other lengths": lambda: {"x": x, "table": torch.ones(3, 2, dtype=torch.float64), "y": y},
        "empty containers": lambda: {"x": x, "none": [], "also": {}, "y": y},
        "integers": lambda: {"x": x, "ids": torch.arange(len(x)), "on": torch.ones(len(x), dtype=torch.bool), "y": y},
        "complex": lambda: {"x": x, "phase": torch.ones(len(x), dtype=torch.complex128), "y": y},
    }
    return made.get(kind, lambda: (x, y))()


KINDS = (
    *("no samples", "one sample", "three samples", "ragged", "changing leaves", "changing dtype", "not a number"),
    *("views", "list"),
    *("named", "words", "numbers", "nothing", "nested", "other lengths", "empty containers", "integers", "complex"),
)


class Odd(Regression):
    """Takes its samples out of whatever there is."""

    def loss(self, batch: Any) -> Tensor:
        if isinstance(batch, dict):
            x = batch["inputs"]["deep"][0]["x"] if "inputs" in batch else batch["x"]
            y = batch["y"]
        else:
            x, y = batch
        return super().loss((x.double(), y))


def trained(layout: Any, kinds: tuple[str, ...]) -> list[Any]:
    results = []
    for kind in kinds:
        batches = [batch(kind, seed) for seed in range(3)]
        result = train(Odd(), layout, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
        results.append((result.losses, {name: value.nan_to_num(123.0) for name, value in result.weights.items()}))
    return results


@pytest.mark.parametrize(
    "layout",
    [
        PP2,
        pytest.param({**PP2, "body": ["body"]}, marks=pytest.mark.thorough),
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.thorough),
    ],
    ids=["chain", "units", "tp2"],
)
def test_odd_batches_train_as_in_one_process(ranks: Pools, layout: Any) -> None:
    expected = trained(None, KINDS)
    by_rank = ranks(2, lightning=True).run(trained, layout, KINDS)
    for kind, (losses, values), *found in zip(KINDS, expected, *by_rank, strict=True):
        for losses_of_rank, _ in found:
            assert_same(losses_of_rank, losses, where=kind)
        assert_same(together([values_of_rank for _, values_of_rank in found]), values, where=kind)


class Stream(IterableDataset[Any]):
    """Does not know how long it is."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return (batch("ragged", seed) for seed in range(self.count))


class Batches:
    """What can be iterated over, and knows how long it is."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return (batch("tuple", seed) for seed in range(self.count))

    def __len__(self) -> int:
        return self.count


LOADERS: dict[str, Callable[[], Any]] = {
    "nothing in it": lambda: DataLoader([], batch_size=None),
    "a stream without anything": lambda: DataLoader(Stream(0), batch_size=None),
    "a stream": lambda: DataLoader(Stream(2), batch_size=None),
    "no DataLoader": lambda: Batches(2),
    "one batch": lambda: Batches(1),
    "larger than the data": lambda: DataLoader(list(zip(*samples(3), strict=True)), batch_size=64),  # type: ignore[arg-type]
    "all dropped": lambda: DataLoader(list(zip(*samples(3), strict=True)), batch_size=4, drop_last=True),  # type: ignore[arg-type]
}


def looped(layout: Any) -> list[list[float]]:
    return [train(Odd(), layout, make()).losses for make in LOADERS.values()]


def test_odd_loaders_train_as_in_one_process(ranks: Pools) -> None:
    expected = looped(None)
    assert [len(losses) for losses in expected] == [0, 0, 2, 2, 1, 1, 0]
    for found in ranks(2, lightning=True).run(looped, PP2):
        assert_same(found, expected)


WRONG = {"a number": 3.0, "a word": "batch"}


class TakesAnything(Odd):
    """Fails on a batch that it cannot read, as a user's step does."""

    def loss(self, batch: Any) -> Tensor:
        if not isinstance(batch, (tuple, list)):
            raise LookupError(f"no samples in {type(batch).__name__}")
        return super().loss(batch)


def wrongly(layout: Any) -> list[str]:
    said = []
    for given in WRONG.values():
        with pytest.raises(Exception) as error:  # noqa: PT011 - the test looks at it
            make_trainer(layout).fit(TakesAnything(), DataLoader([given], batch_size=None))  # type: ignore[list-item]
        said.append(str(error.value))
    return said


def test_a_batch_that_the_step_cannot_read_ends_every_rank_with_the_steps_error(ranks: Pools) -> None:
    for texts in ranks(2, lightning=True).run(wrongly, PP2):
        for text, name in zip(texts, ("float", "str"), strict=True):
            assert f"no samples in {name}" in text


# -- the page ----------------------------------------------------------------------------------------------------------


def test_every_row_of_the_page_has_its_test() -> None:
    found = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE.read_text())
    assert len(found) > 25
    for file, name in found:
        defined = {
            node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)
        }
        assert name in defined, (file, name)
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("|") and "---" not in line]
    heads = [line for line in rows if line.startswith("| input")]
    assert all("::" in line for line in rows if line not in heads)
