"""Whatever gives the batches, every rank of a model group gets the same ones, in the order of one process."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, default_collate

from tests.pool import Pools
from tests.training_jobs import LAYOUTS, PP2, Regression, assert_same, dataset, loader, make_trainer, train

Layout = Mapping[str, Any] | None
PP2_DP2 = LAYOUTS["pp2 x dp2"][2]
# Ranks come from a fork server, and workers of theirs would be started by another one, which takes seconds.
WORKER = {"num_workers": 1, "multiprocessing_context": "fork"}
NOISE: dict[str, Callable[[], float]] = {
    "": float,
    "torch": lambda: torch.randn(()).item(),
    "numpy": np.random.randn,
    "random": random.random,
}


class Numbered(Dataset[Any]):
    """Samples ``(x, y, number)``.

    Args:
        num_samples: How many.
        noise: Where random augmentation comes from: ``torch``, ``numpy``, ``random`` or nothing.
        broken: The sample that cannot be loaded.
        by_rank: Whether a sample depends on the rank that loads it.
    """

    def __init__(self, num_samples: int, noise: str = "", broken: int = -1, by_rank: bool = False) -> None:
        self.tensors = dataset(num_samples).tensors
        self.noise = noise
        self.broken = broken
        self.by_rank = by_rank

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        if index == self.broken:
            raise OSError(f"sample {index} cannot be read")
        x = self.tensors[0][index] + NOISE[self.noise]()
        if self.by_rank and index == 9:
            x = x + int(os.environ.get("RANK", "0"))
        return x, self.tensors[1][index], index


class Stream(IterableDataset[Any]):
    """The same, one after another."""

    def __init__(self, num_samples: int) -> None:
        self.samples = Numbered(num_samples)

    def __iter__(self) -> Iterator[Any]:
        return (self.samples[index] for index in range(len(self.samples)))


class StreamWithLength(Stream):
    def __len__(self) -> int:
        return len(self.samples)


class Batches(BatchSampler):
    """Batches of other sizes in an order of their own."""

    def __init__(self, num_samples: int) -> None:
        numbers = list(reversed(range(num_samples)))
        self.batches = [numbers[:5], numbers[5:14], numbers[14:18], numbers[18:]]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class OwnLoader:
    """Anything that can be iterated."""

    def __init__(self, samples: Dataset[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        for start in (0, 7, 20):
            yield default_collate([self.samples[index] for index in range(start, start + 7)])


def numbered_loader(kind: str, batch_size: int) -> Any:
    """The loaders that users write."""
    samples = Numbered(36, kind.split()[0] if kind.split()[0] in ("torch", "numpy", "random") else "")
    workers = WORKER if "worker" in kind else {}
    if kind.endswith("own generator"):
        return DataLoader(samples, batch_size, shuffle=True, generator=torch.Generator().manual_seed(11))
    if "shuffled" in kind:
        return DataLoader(samples, batch_size, shuffle=True, **workers)
    if kind == "stream":
        return DataLoader(Stream(36), batch_size)
    if kind == "stream with length":
        return DataLoader(StreamWithLength(36), batch_size)
    if kind == "batch sampler":
        return DataLoader(samples, batch_sampler=Batches(36))
    if kind == "torch's batch sampler":
        return DataLoader(samples, batch_sampler=BatchSampler(SequentialSampler(samples), batch_size, drop_last=True))
    if kind == "tiny batches":
        return DataLoader(samples, 3)
    if kind == "drop last":
        return DataLoader(samples, batch_size, drop_last=True)
    if kind == "no DataLoader":
        return OwnLoader(samples)
    return DataLoader(samples, batch_size, **workers)


class Observed(Regression):
    """Keeps the numbers and the sums of all batches as hooks see them."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[list[int]] = []
        self.sums: list[float] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.numbers.append(batch[2].tolist())
        self.sums.append(float(batch[0].sum()))

    def on_validation_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.numbers.append([-1, *batch[2].tolist()])
        self.sums.append(float(batch[0].sum()))

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch[:2])


class Data(LightningDataModule):
    def __init__(self, kind: str, batch_size: int) -> None:
        super().__init__()
        self.kind = kind
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        return numbered_loader(self.kind, self.batch_size)

    def val_dataloader(self) -> Any:
        return DataLoader(Numbered(20), self.batch_size)


def observed(layout: Layout, kind: str, batch_size: int, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
    torch.manual_seed(5)
    np.random.seed(6)
    random.seed(7)
    module = Observed()
    result = train(module, layout, Data(kind, batch_size), max_epochs=2, **(arguments or {}))
    return {"numbers": module.numbers, "sums": module.sums, "losses": result.losses}


KINDS = [
    "in order",
    "shuffled",
    "shuffled, own generator",
    "torch noise",
    "numpy noise",
    "random noise shuffled",
    "torch noise shuffled worker",
    "stream",
    "stream with length",
    "batch sampler",
    "torch's batch sampler",
    "tiny batches",
    "drop last",
    "no DataLoader",
]


def observed_all(layout: Layout, kinds: list[str], batch_size: int) -> dict[str, Any]:
    return {kind: observed(layout, kind, batch_size) for kind in kinds}


@pytest.mark.rows(41, 43)
def test_every_rank_sees_the_batches_of_one_process(ranks: Pools) -> None:
    expected = observed_all(None, KINDS, 8)
    assert expected["shuffled"]["numbers"][3] != expected["in order"]["numbers"][3]
    for kind in KINDS:  # a call each: fourteen trainings take as long as one call may on a busy machine
        for result in ranks(2, lightning=True).run(observed, PP2, kind, 8):
            assert_same(result, expected[kind])


@pytest.mark.rows(44)
def test_batches_smaller_than_the_number_of_stages_train_as_in_one_process(ranks: Pools) -> None:
    expected = observed(None, "tiny batches", 8)
    for result in ranks(3, lightning=True).run(observed, LAYOUTS["pp3"][2], "tiny batches", 8):
        assert_same(result, expected)


@pytest.mark.rows(41)
def test_two_replicas_together_see_the_batches_of_one_process(ranks: Pools) -> None:
    kinds = ["in order", "shuffled", "shuffled, own generator", "torch's batch sampler", "drop last"]
    expected = observed_all(None, kinds, 16)
    results = ranks(4, lightning=True).run(observed_all, PP2_DP2, kinds, 8)
    assert_same(results[0], results[2], 0.0)
    assert_same(results[1], results[3], 0.0)
    for kind in kinds:
        # A sharded loader drops an incomplete batch of its own share, one process one of the whole.
        joined = [_interleaved(a, b) for a, b in zip(*(results[r][kind]["numbers"] for r in (0, 1)), strict=True)]
        assert joined == expected[kind]["numbers"], kind
        losses = [(a + b) / 2 for a, b in zip(*(results[r][kind]["losses"] for r in (0, 1)), strict=True)]
        assert_same(losses, expected[kind]["losses"])


def _interleaved(first: list[int], second: list[int]) -> list[int]:
    if first[0] == second[0] == -1:
        return [-1, *_interleaved(first[1:], second[1:])]
    return [number for pair in zip(first, second, strict=True) for number in pair]


@pytest.mark.rows(42)
def test_random_augmentation_is_the_same_in_a_model_group_and_differs_between_replicas(ranks: Pools) -> None:
    kinds = ["torch noise", "torch noise worker", "numpy noise shuffled", "random noise"]
    results = ranks(4, lightning=True).run(observed_all, PP2_DP2, kinds, 8)
    for kind in kinds:
        assert_same(results[0][kind], results[2][kind], 0.0)
        assert_same(results[1][kind], results[3][kind], 0.0)
        assert results[0][kind]["sums"] != results[1][kind]["sums"]


def test_without_lightnings_sampler_every_replica_sees_everything(ranks: Pools) -> None:
    expected = observed(None, "in order", 8)
    for kind in ("in order", "batch sampler", "stream"):
        expected = observed(None, kind, 8)
        options = {"use_distributed_sampler": False}
        for result in ranks(4, lightning=True).run(observed, PP2_DP2, kind, 8, options):
            assert result["numbers"] == expected["numbers"]


LIMITS: list[dict[str, Any]] = [
    {"limit_train_batches": 2, "limit_val_batches": 1},
    {"overfit_batches": 2},
    {"fast_dev_run": 2},
    {"accumulate_grad_batches": 2},
    {"val_check_interval": 2, "num_sanity_val_steps": 0},
    {"max_steps": 3},
    {"reload_dataloaders_every_n_epochs": 1},
]


def limited(layout: Layout) -> list[Any]:
    return [observed(layout, "shuffled", 8, limits) for limits in LIMITS]


@pytest.mark.rows(66)
def test_limits_of_the_trainer_hold_as_in_one_process(ranks: Pools) -> None:
    expected = limited(None)
    for result in ranks(2, lightning=True).run(limited, PP2):
        for limits, mine, other in zip(LIMITS, result, expected, strict=True):
            assert_same(mine, other, where=str(limits))


# -- comparing instead of sharing -------------------------------------------------------------------------------------


def test_ranks_that_all_load_the_same_train_without_broadcast(ranks: Pools) -> None:
    kinds = ["in order", "shuffled", "shuffled, own generator", "torch noise shuffled", "stream", "no DataLoader"]
    expected = observed_all(None, kinds, 8)
    for result in ranks(2, lightning=True).run(observed_all, {**PP2, "broadcast_batches": False}, kinds, 8):
        assert_same(result, expected)
    expected = observed(None, "shuffled", 16)
    results = ranks(4, lightning=True).run(observed, {**PP2_DP2, "broadcast_batches": False}, "shuffled", 8)
    assert_same(results[0], results[2], 0.0)
    assert [_interleaved(a, b) for a, b in zip(results[0]["numbers"], results[1]["numbers"], strict=True)] == expected[
        "numbers"
    ]


class Short(IterableDataset[Any]):
    """Ends earlier on one rank."""

    def __iter__(self) -> Iterator[Any]:
        samples = Numbered(36)
        return (samples[index] for index in range(36 if os.environ["RANK"] == "0" else 20))


def load_different(layout: Layout, kind: str) -> tuple[str, str]:
    data = DataLoader(Numbered(36, by_rank=True) if kind == "values" else Short(), 8)
    with pytest.raises(Exception) as error:  # noqa: PT011 - the type is looked at below
        make_trainer(layout).fit(Observed(), data)
    return type(error.value).__name__, str(error.value)


@pytest.mark.parametrize(("kind", "numbers"), [("values", (1, 0)), ("length", (2, 2))])
def test_ranks_that_load_different_batches_are_refused_on_every_rank(
    ranks: Pools, kind: str, numbers: tuple[int, int]
) -> None:
    for size, batch in zip((2, 4), numbers, strict=True):
        layout = {**PP2, "broadcast_batches": False}
        results = ranks(size, lightning=True).run(load_different, layout, kind)
        for name, text in results:
            assert name == "ValueError"
            assert f"Batch {batch} differs" in text
            assert "broadcast_batches=True" in text


# -- replicas with different numbers of batches -----------------------------------------------------------------------


class Half(IterableDataset[Any]):
    """Every second sample, for two replicas; the second one has fewer, as a data set that divides itself may.

    Args:
        replica: Which half; ``None`` for both, as in one process.
        numbers: How many samples each replica has.
    """

    def __init__(self, replica: int | None, numbers: tuple[int, int]) -> None:
        self.replica, self.numbers = replica, numbers

    def __iter__(self) -> Iterator[Any]:
        samples, replicas = Numbered(36), (0, 1) if self.replica is None else (self.replica,)
        last = min(self.numbers) if self.replica is None else self.numbers[self.replica]
        return (samples[2 * index + replica] for index in range(last) for replica in replicas)


class HalfWithLength(Half):
    def __len__(self) -> int:
        return self.numbers[self.replica or 0]


class Listed:
    """Anything that can be iterated, of known length."""

    def __init__(self, batches: Any) -> None:
        self.batches = list(batches)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class Halves(LightningDataModule):
    """Gives each replica its half, when the Trainer knows which that is."""

    def __init__(self, kind: str, numbers: tuple[int, int], workers: Mapping[str, Any]) -> None:
        super().__init__()
        self.kind, self.numbers, self.workers = kind, numbers, workers

    def train_dataloader(self) -> Any:
        trainer = self.trainer
        assert trainer is not None
        is_alone = trainer.world_size == 1
        replica = None if is_alone else trainer.distributed_sampler_kwargs["rank"]
        if self.kind == "no DataLoader":
            return Listed(DataLoader(Half(replica, self.numbers), 8 if is_alone else 4))
        data = (HalfWithLength if self.kind == "length" else Half)(replica, self.numbers)
        return DataLoader(data, 8 if is_alone else 4, **self.workers)

    val_dataloader = train_dataloader


def halves(layout: Layout, kind: str, numbers: tuple[int, int], workers: Mapping[str, Any]) -> dict[str, Any]:
    data = Halves(kind, numbers, workers)
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        result = train(Observed(), layout, data, max_epochs=2, num_sanity_val_steps=0)
    said = [str(each.message) for each in raised if "replicas have run out of batches" in str(each.message)]
    steps, value = result.trainer.global_step, result.metrics["val_loss"]
    return {"steps": steps, "losses": result.losses, "val_loss": value, "said": said}


@pytest.mark.parametrize("layout", ["dp2", "zero 2", "pp2 x dp2", "all load"])
@pytest.mark.parametrize("kind", ["no length", "length", "no DataLoader", "worker"])
def test_replicas_with_unequal_numbers_of_batches_end_their_epochs_together(
    ranks: Pools, layout: str, kind: str
) -> None:
    layouts: dict[str, dict[str, Any]] = {
        "dp2": {},
        "zero 2": {"zero_stage": 2},
        "pp2 x dp2": PP2_DP2,
        "all load": {**PP2_DP2, "broadcast_batches": False},
    }
    pool = ranks(2 if layout in ("dp2", "zero 2") else 4, lightning=True)
    arguments = "" if kind == "worker" else kind, (16, 8), WORKER if kind == "worker" else {}
    expected = halves(None, *arguments)
    assert expected["steps"] == 4
    results = pool.run(halves, layouts[layout], *arguments)
    for result in results:
        assert result["steps"] == 4
        assert_same(result["val_loss"], expected["val_loss"])
    by_replica = results if len(results) == 2 else [results[0], results[1]]
    means = [sum(pair) / 2 for pair in zip(*(each["losses"] for each in by_replica), strict=True)]
    assert_same(means, expected["losses"])
    assert len(results[0]["said"]) == (0 if kind in ("length", "no DataLoader") else 2)  # of training and validation


# -- several loaders --------------------------------------------------------------------------------------------------


class Several(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        a, b = (batch["a"], batch["b"]) if isinstance(batch, dict) else batch
        x, y = (torch.cat(pair) for pair in zip(a, b, strict=True))
        return self.loss((x, y))


def combined(layout: Layout) -> list[Any]:
    results = []
    for mode in ("max_size_cycle", "min_size"):
        for kind in (dict, list):
            loaders = {"a": loader(8, 32), "b": loader(8, 16, seed=2)}
            data = CombinedLoader(loaders if kind is dict else list(loaders.values()), mode)
            results.append(train(Several(), layout, data, max_epochs=2).losses)
    return results


def test_several_training_loaders_at_once_train_as_in_one_process(ranks: Pools) -> None:
    expected = combined(None)
    assert [len(losses) for losses in expected] == [8, 8, 4, 4]
    for result in ranks(2, lightning=True).run(combined, PP2):
        assert_same(result, expected)


# -- transfer hooks ---------------------------------------------------------------------------------------------------


class Transfers(Regression):
    """Draws random numbers whenever a batch is transferred."""

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[tuple[float, ...]] = []

    def draw(self) -> None:
        self.draws.append((torch.randn(()).item(), np.random.randn(), random.random()))

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.draw()
        return batch

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        self.draw()
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.draw()
        return batch


def transferred(layout: Layout) -> list[tuple[float, ...]]:
    module = Transfers()
    trainer = make_trainer(layout, max_epochs=2)
    trainer.fit(module, loader(8, 32), loader(4, 16))
    trainer.validate(module, loader(4, 16))
    trainer.validate(module, loader(4, 16))
    return module.draws


def test_random_numbers_in_transfer_hooks_are_the_same_in_a_model_group(ranks: Pools) -> None:
    results = ranks(4, lightning=True).run(transferred, PP2_DP2)
    assert results[0] == results[2]
    assert results[1] == results[3]
    for column in (0, 1, 2):
        numbers = [draw[column] for result in results[:2] for draw in result]
        assert len(set(numbers)) == len(numbers), "each hook, batch and replica has numbers of its own"
    assert ranks(4, lightning=True).run(transferred, PP2_DP2) == results


# -- what cannot be loaded --------------------------------------------------------------------------------------------


def load_broken(layout: Layout, workers: int, phase: str) -> str:
    broken = DataLoader(Numbered(36, broken=20), 8, **(WORKER if workers else {}))
    good = DataLoader(Numbered(36), 8)
    train, val = (broken, good) if phase == "train" else (good, broken)
    with pytest.raises(Exception) as error:  # noqa: PT011 - the text is looked at below
        make_trainer(layout, num_sanity_val_steps=0).fit(Observed(), train, val)
    return str(error.value)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("phase", ["train", "validate"])
def test_a_sample_that_cannot_be_loaded_is_an_error_on_every_rank(ranks: Pools, workers: int, phase: str) -> None:
    for size in (2, 4):
        for text in ranks(size, lightning=True).run(load_broken, PP2, workers, phase):
            assert "sample 20 cannot be read" in text
