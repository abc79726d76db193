"""Replicas that reduce other logged values than others are told so, wherever they log them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from torch import tensor
from torchmetrics import MeanMetric

from tests.pool import Pools
from tests.training_jobs import Regression, assert_same, loader, make_trainer, plain

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "dp2 with microbatches": (2, {"num_microbatches": 2}),
    "pp2 x dp2": (4, {"pipeline_parallel_size": 2, "num_microbatches": 2}),
}


class Named(Regression):
    """Logs values in one place; which, may depend on the replica.

    Args:
        where: A hook.
        names: What each replica logs there, in order.
        before: The number of times that all replicas log what the first one does.
        arguments: Of `self.log`.
    """

    def __init__(self, where: str, names: Mapping[int, str], before: int = 0, **arguments: Any) -> None:
        super().__init__()
        self.where, self.names, self.before, self.arguments = where, names, before, arguments
        self.metric = MeanMetric()

    def log_names(self, where: str) -> None:
        if where == self.where and not self.trainer.sanity_checking:
            replica = 0 if self.before > 0 else self.trainer.strategy.mesh.data_rank
            self.before -= 1
            for name in self.names[replica]:
                self.log(name, tensor(float(ord(name) + replica)), sync_dist=True, **self.arguments)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log_names("training_step")
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)
        self.log_names("validation_step")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)
        self.log_names("test_step")

    def on_train_batch_end(self, *args: Any) -> None:
        self.log_names("on_train_batch_end")

    def on_validation_epoch_end(self) -> None:
        self.log_names("on_validation_epoch_end")

    def on_train_epoch_end(self) -> None:
        self.log_names("on_train_epoch_end")


def fit(layout: Mapping[str, Any] | None, cases: list[tuple[Any, ...]]) -> list[str | dict[str, float]]:
    """For each case the error, or what was logged."""
    results: list[str | dict[str, float]] = []
    for where, names, before, arguments in cases:
        module = Named(where, names, before, **arguments)
        trainer = make_trainer(layout, max_epochs=2, num_sanity_val_steps=0, enable_progress_bar=True)
        samples = loader(4, num_samples=16)
        try:
            if where == "test_step":
                trainer.test(module, samples, verbose=False)
            else:
                trainer.fit(module, samples, samples)
        except ValueError as error:
            results.append(str(error))
        else:
            results.append(plain(trainer.callback_metrics))
    return results


OTHER, STEP, EPOCH = {0: "ab", 1: "ac"}, {"on_step": True, "on_epoch": False}, {"on_step": False, "on_epoch": True}
#: A case, and the beginning of the error's text.
CASES: dict[str, tuple[tuple[Any, ...], str]] = {
    "training, of a step": (
        ("training_step", OTHER, 0, STEP),
        "`logged keys of training_step` is not the same on every rank: ['a', 'b'] on rank 0; ['a', 'c'] on rank",
    ),
    "training, of an epoch": (
        ("training_step", OTHER, 0, EPOCH),
        "`logged keys of an epoch of train` is not the same on every rank: ['training_step.a', 'training_step.b']",
    ),
    "training, in a hook": (
        ("on_train_batch_end", OTHER, 1, STEP),
        "`key of the log call after 'on_train_batch_end.a'` is not the same on every rank: on_train_batch_end.b on",
    ),
    "training, at the end": (
        ("on_train_epoch_end", OTHER, 0, EPOCH),
        "`key of the log call after 'on_train_epoch_end.a'` is not the same on every rank: on_train_epoch_end.b on",
    ),
    "validation, of a step": (
        ("validation_step", OTHER, 0, STEP),
        "`key of the log call after 'validation_step.a'` is not the same on every rank: validation_step.b on rank 0;",
    ),
    "validation, of an epoch": (
        ("validation_step", OTHER, 0, EPOCH),
        "`logged keys of an epoch of validate` is not the same on every rank: ['validation_step.a',",
    ),
    "validation, in another order": (
        ("validation_step", {0: "ab", 1: "ba"}, 0, EPOCH),
        "`logged keys of an epoch of validate` is not the same on every rank: ['validation_step.a',",
    ),
    "validation, of a later epoch": (
        ("validation_step", {0: "ab", 1: "b"}, 2, EPOCH),
        "`logged keys of an epoch of validate` is not the same on every rank: ['validation_step.a',",
    ),
    "validation, at the end": (
        ("on_validation_epoch_end", OTHER, 0, EPOCH),
        "`key of the log call after 'on_validation_epoch_end.a'` is not the same on every rank: on_validation_epoch",
    ),
    "test": (
        ("test_step", OTHER, 0, EPOCH),
        "`logged keys of an epoch of test` is not the same on every rank: ['test_step.a', 'test_step.b'] on",
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_replicas_that_log_other_names_are_told_so(ranks: Pools, name: str) -> None:
    """Without that, values of one name would be averaged with those of another one."""
    size, layout = LAYOUTS[name]
    results = ranks(size, lightning=True).run(fit, layout, [arguments for arguments, _ in CASES.values()])
    for (case, (_, expected)), texts in zip(CASES.items(), zip(*results, strict=True), strict=True):
        if case == "training, of a step" and not layout:  # what a step that is not cut logs is reduced at once
            expected = "`key of the log call after 'training_step.a'` is not the same on every rank: training_step.b"
        assert all(text == texts[0] for text in texts), case
        assert str(texts[0]).startswith(expected), (case, texts[0])


SAME = {0: "ab", 1: "ab"}
PLACES = [
    *("training_step", "validation_step", "test_step"),
    *("on_train_batch_end", "on_validation_epoch_end", "on_train_epoch_end"),
]


@pytest.mark.parametrize("name", LAYOUTS)
def test_replicas_that_log_the_same_names_get_their_means(ranks: Pools, name: str) -> None:
    """Rank 0 alone has a progress bar, which reads values in the middle of the hooks of an epoch's end."""
    size, layout = LAYOUTS[name]
    kinds = {place: [EPOCH] if "epoch" in place else [STEP, EPOCH] for place in PLACES}
    cases = [(place, SAME, 0, {**kind, "prog_bar": True}) for place, of_place in kinds.items() for kind in of_place]
    means = {name: ord(name) + 0.5 for name in "ab"}
    for results in ranks(size, lightning=True).run(fit, layout, cases):
        for (place, _, _, kind), values in zip(cases, results, strict=True):
            by_step_only = kind["on_step"] and place in ("validation_step", "test_step")
            assert_same(values, {} if by_step_only else means, where=place)
