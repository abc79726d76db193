"""The cause of a difference that microbatches make, found by experiment and named with its remedy."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_hybrid
from tests.pool import Pools
from tests.training_jobs import Result, make_trainer, together, train

SAMPLES, POSITIONS, CLASSES, STEPS = 16, 6, 5, 2


class Tokens(LightningModule):
    """Classifies the tokens of sequences; what its loss is, subclasses say."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.embed = nn.Embedding(9, 8)
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
            self.head = nn.Linear(8, CLASSES)
        self.register_buffer("class_weights", torch.tensor([0.2, 1.0, 3.0, 0.7, 2.0]))
        self.double()

    def logits(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        out: Tensor = self.head(x)
        return out

    def losses(self, batch: Any) -> Tensor:
        """The loss of each token."""
        return F.cross_entropy(self.logits(batch["ids"]).flatten(0, 1), batch["labels"].flatten(), reduction="none")

    def loss(self, batch: Any) -> Tensor:
        return self.losses(batch).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)

    @classmethod
    def batch(cls, number: int) -> Any:
        """The batch of a number."""
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(9, (SAMPLES, POSITIONS), generator=generator)
        lengths = torch.randint(1, POSITIONS + 1, (SAMPLES,), generator=generator)
        mask = torch.arange(POSITIONS) < lengths[:, None]
        labels = torch.randint(CLASSES, ids.shape, generator=generator)
        return {"ids": ids, "labels": labels, "mask": mask, "lengths": lengths}


class MaskedMean(Tokens):
    def loss(self, batch: Any) -> Tensor:
        mask = batch["mask"].flatten()
        return (self.losses(batch) * mask).sum() / mask.sum()


class Padded(Tokens):
    """Its mask is true where nothing counts."""

    def loss(self, batch: Any) -> Tensor:
        padded = batch["mask"].flatten()
        return self.losses(batch)[~padded].mean()

    @classmethod
    def batch(cls, number: int) -> Any:
        found = super().batch(number)
        return {"ids": found["ids"], "labels": found["labels"], "mask": ~found["mask"]}


class PaddedLabels(Tokens):
    """Class 0 does not count, without `ignore_index`."""

    def loss(self, batch: Any) -> Tensor:
        counted = (batch["labels"] != 0).flatten().double()
        return (self.losses(batch) * counted).sum() / counted.sum().clamp(min=1)


class Shifted(Tokens):
    """The next token is predicted, where there is one."""

    def loss(self, batch: Any) -> Tensor:
        logits, mask = self.logits(batch["ids"])[:, :-1], batch["mask"][:, 1:]
        losses = F.cross_entropy(logits.transpose(1, 2), batch["labels"][:, 1:], reduction="none")
        return (losses * mask).sum() / mask.sum()


class Lengths(Tokens):
    def loss(self, batch: Any) -> Tensor:
        losses = self.losses(batch).view(batch["ids"].shape).sum(1)
        return (losses * batch["lengths"]).sum() / batch["lengths"].sum()

    @classmethod
    def batch(cls, number: int) -> Any:
        found = super().batch(number)
        return {"ids": found["ids"], "labels": found["labels"], "lengths": found["lengths"]}


class HeldWeights(Tokens):
    """A mean with class weights, without `cross_entropy`."""

    def loss(self, batch: Any) -> Tensor:
        held = self.class_weights[batch["labels"].flatten()]  # type: ignore[index]
        return (self.losses(batch) * held).sum() / held.sum()


class WeightsOfTheStep(Tokens):
    def loss(self, batch: Any) -> Tensor:
        made = torch.tensor([0.3, 1.0, 5.0, 0.7, 2.5], dtype=torch.float64)[batch["labels"].flatten()]
        return (self.losses(batch) * made).sum() / made.sum()


class Contrastive(Tokens):
    def loss(self, batch: Any) -> Tensor:
        z = F.normalize(self.logits(batch["ids"]).mean(1), dim=1)
        return F.cross_entropy(z @ z.T / 0.3 + z.sum(1), torch.arange(len(z)))


class Deviation(Tokens):
    """Of one sample it is not a number."""

    def loss(self, batch: Any) -> Tensor:
        z = self.logits(batch["ids"]).mean((1, 2))
        return self.losses(batch).mean() + z.std()

    @classmethod
    def batch(cls, number: int) -> Any:
        return {name: leaf[:4] for name, leaf in super().batch(number).items()}


class Neighbors(Tokens):
    """Each row is compared with the next one."""

    def loss(self, batch: Any) -> Tensor:
        z = self.logits(batch["ids"]).mean(1)
        return (z[1:] - z[:-1]).square().mean() + self.losses(batch).mean()


class TimeFirst(Tokens):
    """Its batches have positions first, and a recurrent layer goes along them."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(8, 8).double()

    def loss(self, batch: Any) -> Tensor:
        x, _ = self.recurrent(self.embed(batch["ids"]))
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), batch["labels"].flatten())

    @classmethod
    def batch(cls, number: int) -> Any:
        found = super().batch(number)
        return {"ids": found["ids"], "labels": found["labels"]}  # 16 positions of 6 sequences


class Table(Tokens):
    """A table in the batch has as many rows as there are samples, each of which takes the row of its first token."""

    def loss(self, batch: Any) -> Tensor:
        rows = batch["table"][batch["ids"][:, 0] % len(batch["table"])]
        z = self.logits(batch["ids"]).mean(1)
        return self.losses(batch).mean() + (z[:, 0] * rows[:, 0]).mean()

    @classmethod
    def batch(cls, number: int) -> Any:
        found = super().batch(number)
        steps = torch.linspace(-1, 1, SAMPLES, dtype=torch.float64)[:, None]
        return {"ids": found["ids"], "labels": found["labels"], "table": steps.expand(SAMPLES, 8).clone()}


def trained(module: type[Tokens], layout: dict[str, Any] | None, **attributes: Any) -> tuple[Result, list[str]]:
    """Train; return the result and the message of the comparison."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    kind = type(module.__name__, (module,), attributes)
    data = DataLoader([module.batch(number) for number in range(STEPS)], batch_size=None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = train(kind(), layout, data)
    return result, [str(each.message) for each in caught if "The loss of the same samples is" in str(each.message)]


def assert_equal(found: list[tuple[Result, list[str]]], module: type[Tokens]) -> None:
    """Compare the weights of ranks with those of one process."""
    whole = together([result.weights for result, _ in found])
    for name, value in trained(module, None)[0].weights.items():
        torch.testing.assert_close(whole[name], value, rtol=1e-10, atol=1e-12, msg=name)


COUNT = "microbatch_weight = lightning_hybrid.count_tokens("
CAUSES: dict[type[Tokens], tuple[str, str]] = {
    MaskedMean: ("the number of elements that are not 0 in `batch['mask']`", COUNT + "'mask', ignore_index=0)`"),
    Padded: ("the number of elements that are not 1 in `batch['mask']`", COUNT + "'mask', ignore_index=1)`"),
    PaddedLabels: ("the number of elements that are not 0 in `batch['labels']`", COUNT + "'labels', ignore_index=0)`"),
    Shifted: (
        "the number of elements that are not 0 in `batch['mask']` (without the first position of each sequence)",
        COUNT + "'mask', ignore_index=0, shift=True)`",
    ),
    Lengths: ("the sum of `batch['lengths']`", "returns `batch['lengths'].sum()`"),
    HeldWeights: (
        "the sum of the class weights `class_weights` over `batch['labels']`",
        "returns `self.class_weights[batch['labels']].sum()`",
    ),
    WeightsOfTheStep: (
        "a ratio of two sums over samples",
        "`microbatch_weight(microbatch)` that returns the denominator",
    ),
    Contrastive: (
        "the loss of a sample depends on other samples of the batch, as in a contrastive loss or with statistics"
        " over samples.",
        "split",
    ),
    Deviation: ("the loss of one microbatch alone is not finite", "`split_batch(batch, num_microbatches)`"),
    Neighbors: ("the loss depends on the order of the rows", "`split_batch(batch, num_microbatches)`"),
    TimeFirst: ("the second dimension of the tensors is the batch dimension", "that splits the second dimension"),
    Table: (
        "`batch['table']` was split because its number of rows is the batch size",
        "make this tensor a buffer",
    ),
}


@pytest.mark.parametrize("module", CAUSES, ids=lambda module: module.__name__)
@pytest.mark.parametrize("size", [1, 2])
def test_the_cause_and_its_remedy_are_named(ranks: Pools, module: type[Tokens], size: int) -> None:
    """In one process with microbatches, and with stages."""
    layout: dict[str, Any] = {"num_microbatches": 4} if size == 1 else {"pipeline_parallel_size": 2}
    found = ranks(size, lightning=True).run(trained, module, layout)
    (text,) = found[0][1]
    for part in CAUSES[module]:
        assert part in text
    if size > 1:  # "auto" takes one microbatch
        assert "one microbatch instead of" in text
        assert "As a result, each of the 2 stages is busy for only 1/2 of a step" in text
        assert_equal(found, module)


REMEDIES: dict[type[Tokens], Any] = {
    MaskedMean: lightning_hybrid.count_tokens("mask", ignore_index=0),
    Padded: lightning_hybrid.count_tokens("mask", ignore_index=1),
    PaddedLabels: lightning_hybrid.count_tokens("labels", ignore_index=0),
    Shifted: lightning_hybrid.count_tokens("mask", ignore_index=0, shift=True),
}


@pytest.mark.parametrize("module", REMEDIES, ids=lambda module: module.__name__)
def test_the_remedy_helps(ranks: Pools, module: type[Tokens]) -> None:
    layout = {"pipeline_parallel_size": 2, "num_microbatches": 4}
    found = ranks(2, lightning=True).run(trained_with_remedy, module, layout)
    assert not found[0][1]
    assert_equal(found, module)


def trained_with_remedy(module: type[Tokens], layout: dict[str, Any]) -> tuple[Result, list[str]]:
    return trained(module, layout, microbatch_weight=REMEDIES[module])


class Sometimes(MaskedMean):
    """Some of its batches have a mask, over which the loss is a mean."""

    with_mask: tuple[int, ...] = ()

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) if "mask" in batch else self.losses(batch).mean()


class MaskedLater(Sometimes):
    with_mask = (3,)


class MaskedElsewhere(Sometimes):
    """The second replica begins with a mask, which does not change the loss."""

    with_mask = (1, 2, 3)

    def loss(self, batch: Any) -> Tensor:
        return self.losses(batch).mean()


def fit_by_replicas(module: type[Sometimes], layout: dict[str, Any]) -> list[str]:
    """Train with two batches for each replica, and keep what is said of structures."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    batches = [module.batch(number) for number in range(4)]
    for number in {0, 1, 2, 3}.difference(module.with_mask):
        del batches[number]["mask"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(layout).fit(module(), DataLoader(batches, batch_size=None))
    return [str(each.message) for each in caught if "is not compared" in str(each.message)]


@pytest.mark.parametrize("layout", [{"num_microbatches": 4}, {"pipeline_parallel_size": 2}], ids=str)
def test_a_structure_that_no_replica_has_compared_is_said(ranks: Pools, layout: dict[str, Any]) -> None:
    """The fourth batch, the second one of the second replica, has a mask; nothing in the first step has told of it."""
    size = 2 * layout.get("pipeline_parallel_size", 1)
    found = ranks(size, lightning=True).run(fit_by_replicas, MaskedLater, {"data_parallel_size": 2, **layout})
    assert sum(map(len, found)) == 1
    (text,) = next(texts for texts in found if texts)
    assert "mask: *" in text
    assert "microbatch_weight" in text
    if size == 2:
        assert not found[0]


def test_a_structure_that_another_replica_has_compared_is_not_said(ranks: Pools) -> None:
    layout = {"data_parallel_size": 2, "num_microbatches": 4}
    assert not any(ranks(2, lightning=True).run(fit_by_replicas, MaskedElsewhere, layout))
