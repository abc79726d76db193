"""A run that goes on with more or fewer replicas trains with each sample once an epoch, and with the same steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler, Subset

from tests.pool import Pools
from tests.training_jobs import Regression, assert_same, dataset, loader, make_trainer

NUM_SAMPLES, GLOBAL_BATCH = 48, 16
Layout = Mapping[str, Any]


class OfSeveral(Regression):
    """Takes the first of several loaders' batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch[0])


class OwnSampler(Regression):
    """Has a sampler for the replicas itself."""

    def train_dataloader(self) -> Any:
        data = dataset(NUM_SAMPLES)
        sampler: Any = DistributedSampler(data, **self.trainer.distributed_sampler_kwargs, seed=3)
        return DataLoader(data, 4, sampler=sampler)


class Seen(Checkpoint):
    """Writes down which samples each batch has, and saves at one place."""

    def __init__(self, save: str | None = None, path: str = "") -> None:
        self.save, self.path = save, path
        self.first_of = {float(x[0]): number for number, (x, _) in enumerate(dataset(NUM_SAMPLES))}
        self.batches: list[tuple[int, int, int, list[int]]] = []  # epoch, batch, step, samples

    def note(self, trainer: Trainer, hook: str) -> None:
        place = f"{hook} {trainer.current_epoch}.{trainer.fit_loop.epoch_loop.batch_idx}"
        if place == self.save:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        inputs = batch[0] if isinstance(batch[0], Tensor) else batch[0][0]
        samples = [self.first_of[float(x[0])] for x in inputs]
        self.note(trainer, "start")
        self.batches.append((trainer.current_epoch, batch_idx, trainer.global_step, samples))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note(trainer, "end")

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            self.note(trainer, "validation")


def fit(
    layout: Layout | None,
    batch_size: int,
    save: str | None,
    path: str,
    resume: str | None = None,
    kind: str = "shuffled",
    **arguments: Any,
) -> tuple[list[Any], int]:
    """Train for two epochs, or up to a checkpoint; the weights are left beside it."""
    torch.manual_seed(3 if resume is None else 4)
    seen = Seen(save, path)
    trainer = make_trainer(
        layout,
        **{"max_epochs": 2, "callbacks": [seen], "enable_checkpointing": True, "num_sanity_val_steps": 0, **arguments},
    )
    module = {"several": OfSeveral, "own sampler": OwnSampler}.get(kind, Regression)()
    data = None if kind == "own sampler" else make_loader(kind, batch_size)
    trainer.fit(module, data, loader(4, 12), ckpt_path=resume)
    if save is None:
        trainer.save_checkpoint(path)
    return seen.batches, trainer.global_step


class Stream(IterableDataset[Any]):
    """The samples, without a length."""

    def __iter__(self) -> Any:
        return iter(dataset(NUM_SAMPLES))


def make_loader(kind: str, batch_size: int) -> Any:
    data = dataset(NUM_SAMPLES)
    if kind == "own batches":
        return DataLoader(data, batch_sampler=Chosen(SequentialSampler(data), batch_size, drop_last=False))
    if kind == "stream":
        return DataLoader(Stream(), batch_size)
    if kind == "several":
        return [DataLoader(data, batch_size), DataLoader(data, batch_size)]
    if kind == "the rest dropped":
        return DataLoader(Subset(data, range(22)), batch_size, drop_last=True)
    return DataLoader(data, batch_size, shuffle=kind == "shuffled", num_workers=2 if kind == "workers" else 0)


class Chosen(BatchSampler):
    """Batches of a user's own."""


REPLICAS: dict[str, tuple[int, Layout]] = {
    "dp1": (1, {}),
    "dp2": (2, {}),
    "pp2": (2, {"pipeline_parallel_size": 2, "num_microbatches": 2}),
    "dp2 x pp2": (4, {"pipeline_parallel_size": 2, "num_microbatches": 2, "zero_stage": 1}),
}
KEPT = {"global_batch_size": GLOBAL_BATCH}
#: Batches of 4: 12 of them in an epoch with one replica, 6 with two.
CASES = [
    ("dp2", "dp1", "end 0.1"),  # at a step
    ("dp2", "dp1", "start 1.3"),  # before the second batch of a step
    ("dp2", "dp1", "end 0.2"),  # after its first batch
    ("dp2", "dp1", "end 0.0"),  # before the first step
    ("dp2", "dp1", "validation 0.5"),  # after the last batch
    ("dp1", "dp2", "end 0.3"),
    ("dp1", "dp2", "end 1.6"),
    ("dp1", "dp2", "validation 0.11"),
    ("dp1", "dp2", "start 1.0"),
    ("dp2 x pp2", "pp2", "end 0.1"),
    ("pp2", "dp2 x pp2", "end 1.4"),
]


@pytest.mark.parametrize(("before", "after", "place"), CASES)
def test_each_sample_is_used_once_and_steps_stay_the_same(
    ranks: Pools, tmp_path: Path, before: str, after: str, place: str
) -> None:
    """As one process with batches of all samples of a step, which is never interrupted."""
    straight, saved, ended = (str(tmp_path / name) for name in ("straight", "saved", "ended"))
    pool = ranks(1, lightning=True)
    ((expected_batches, expected_steps),) = pool.run(fit, None, GLOBAL_BATCH, None, straight)
    size, layout = REPLICAS[before]
    first = ranks(size, lightning=True).run(fit, {**layout, **KEPT}, 4, place, saved)
    other_size, other = REPLICAS[after]
    second = ranks(other_size, lightning=True).run(fit, {**other, **KEPT}, 4, None, ended, saved)
    expected, found = (torch.load(path, weights_only=False) for path in (straight, ended))
    for key in ("state_dict", "optimizer_states", "epoch", "global_step"):
        assert_same(found[key], expected[key], where=key)
    assert {steps for _, steps in second} == {expected_steps} == {6}
    used = torch.load(saved, weights_only=False)["global_step"]
    for step, (_, _, _, samples) in enumerate(expected_batches):
        of_step = [batch[3] for run in (first if step < used else second) for batch in run[0] if batch[2] == step]
        # All ranks of a model group see the same batch, and one that is interrupted was seen before it was repeated.
        assert sorted({sample for batch in of_step for sample in batch}) == sorted(samples), step


def test_batches_are_counted_in_those_of_the_present_run(ranks: Pools, tmp_path: Path) -> None:
    saved, ended = str(tmp_path / "saved"), str(tmp_path / "ended")
    ranks(2, lightning=True).run(fit, KEPT, 4, "end 0.1", saved)
    ((batches, _),) = ranks(1, lightning=True).run(fit, KEPT, 4, None, ended, saved)
    assert [batch[:3] for batch in batches[:9]] == [(0, 4 + n, 1 + n // 4) for n in range(8)] + [(1, 0, 3)]
    progress = torch.load(ended, weights_only=False)["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    assert progress["current"]["completed"] == 12
    assert progress["total"]["completed"] == 24


def test_without_a_global_batch_size_steps_are_smaller(ranks: Pools, tmp_path: Path) -> None:
    """Two replicas and then one, with batches of 4: steps have 8 samples, then 4."""
    saved, ended = str(tmp_path / "saved"), str(tmp_path / "ended")
    first = ranks(2, lightning=True).run(fit, {}, 4, "end 0.2", saved)
    ((second, steps),) = ranks(1, lightning=True).run(fit, {}, 4, None, ended, saved)
    assert [len(run) for run, _ in first] == [3, 3]
    assert steps == 3 + 6 + 12
    in_epoch = [
        sample for run in (first[0][0], first[1][0], second) for batch in run if batch[0] == 0 for sample in batch[3]
    ]
    assert sorted(in_epoch) == list(range(NUM_SAMPLES))


def test_other_batches_of_as_many_replicas_go_on_behind_the_samples(ranks: Pools, tmp_path: Path) -> None:
    saved, ended = str(tmp_path / "saved"), str(tmp_path / "ended")
    ((first, _),) = ranks(1, lightning=True).run(fit, {}, 8, "end 0.2", saved, None, "workers")
    ((second, _),) = ranks(1, lightning=True).run(fit, {}, 4, None, ended, saved, "workers")
    used = [sample for batch in [*first, *second] if batch[0] == 0 for sample in batch[3]]
    assert used == list(range(NUM_SAMPLES))


def test_the_order_of_a_sampler_for_replicas_goes_on(ranks: Pools, tmp_path: Path) -> None:
    saved, ended = str(tmp_path / "saved"), str(tmp_path / "ended")
    first = ranks(2, lightning=True).run(fit, {}, 4, "end 0.2", saved, None, "own sampler")
    ((second, _),) = ranks(1, lightning=True).run(fit, {}, 4, None, ended, saved, "own sampler")
    batches = [batch for run in (first[0][0], first[1][0], second) for batch in run]
    assert sorted(sample for batch in batches if batch[0] == 0 for sample in batch[3]) == list(range(NUM_SAMPLES))


def test_an_epoch_that_has_no_batch_left_for_more_replicas_is_over(ranks: Pools, tmp_path: Path) -> None:
    """Of 22 samples one replica has five batches of 4, and two have two, after which the rest is dropped."""
    saved, ended = str(tmp_path / "saved"), str(tmp_path / "ended")
    ranks(1, lightning=True).run(fit, {}, 4, "end 0.3", saved, None, "the rest dropped")
    for batches, steps in ranks(2, lightning=True).run(fit, {}, 4, None, ended, saved, "the rest dropped"):
        assert [batch[:3] for batch in batches] == [(1, 0, 4), (1, 1, 5)]
        assert steps == 6


@pytest.mark.parametrize(
    ("kind", "place", "texts"),
    [
        ("plain", "end 0.2", ["after 12 samples", "uses 8", "12 is not a multiple of 8", "global_batch_size"]),
        ("own batches", "end 0.1", ["it is not known which samples", "no custom batch sampler"]),
        ("stream", "end 0.1", ["it is not known which samples", "a dataset with a length"]),
        ("several", "end 0.1", ["it is not known which samples", "only for a single `DataLoader`"]),
    ],
)
def test_what_cannot_go_on_is_refused_on_every_rank(
    ranks: Pools, tmp_path: Path, kind: str, place: str, texts: list[str]
) -> None:
    saved = str(tmp_path / "saved")
    ranks(1, lightning=True).run(save_only, kind, place, saved)
    found = ranks(2, lightning=True).run(refused, kind, saved)
    for text in found:
        assert all(part in text for part in [*texts, "end of an epoch"]), text


def save_only(kind: str, place: str, path: str) -> None:
    fit({}, 4, place, path, None, kind)


def refused(kind: str, path: str) -> str:
    with pytest.raises(ValueError, match=r"in the middle of an epoch|after .* samples of an epoch") as caught:
        fit({}, 4, None, "", path, kind)
    return str(caught.value)
