"""Tensors of a batch go to the ranks that read them; the numbers are those of one process, whatever is read when."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_hybrid.distributed.messages import leaf_readers, tree_broadcast
from lightning_hybrid.distributed.messages.posted_broadcast import PostedBroadcast
from tests.pool import Pools
from tests.training_jobs import assert_same, make_trainer, weights

PIXELS, SAMPLES, BATCH = 3 * 32 * 32, 40, 8
BYTES = BATCH * PIXELS * 8  # of the pictures of a batch


class Pictures(Dataset[Any]):
    """Pictures with their labels and weights; float64."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        pictures = torch.randn(3, 32, 32, generator=generator, dtype=torch.float64)
        return {"picture": pictures, "label": pictures.mean().reshape(1), "map": 2 * pictures[0]}


class Chain(LightningModule):
    """A chain behind a layer that looks at the pictures."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.look = nn.Linear(PIXELS, 16)
        self.body: nn.Module = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)])
        self.head = nn.Linear(16, 1)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(self.look(x.flatten(1))))
        return out

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = F.mse_loss(self(batch["picture"]), batch["label"])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Layers(Chain):
    """Units that the step calls in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(self.body)

    def forward(self, x: Tensor) -> Tensor:
        x = self.look(x.flatten(1))
        assert isinstance(self.body, nn.ModuleList)
        for layer in self.body:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


class ReadsAtTheEnd(Chain):
    """The last stage reads maps, which are large, in each step."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch["picture"]), batch["label"]) + (batch["map"] ** 2).mean() * self.head.bias.sum()


class ReadsLater(Chain):
    """From the fourth batch on the last stage reads the pictures too."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = F.mse_loss(self(batch["picture"]), batch["label"])
        return loss if batch_idx < 3 else loss + batch["picture"].square().mean() * self.head.bias.sum()


class Keeps(Chain):
    """Keeps a batch, and reads it in a hook that gets none."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.last = batch
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.mean = float(self.last["picture"].mean())


class ReadsOld(Chain):
    """In the second epoch the last stage reads pictures of a batch of long ago."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if self.current_epoch == 1 and batch_idx == 0:
            self.old = batch["picture"]
        loss = super().training_step(batch, batch_idx)
        is_late = self.current_epoch == 1 and batch_idx == 4
        return loss + self.old.isfinite().all() * self.head.bias.sum() if is_late else loss


class ChangesAndKeeps(Chain):
    """The first stage writes into pictures that the last one has not read yet, and only keeps."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.last = SimpleNamespace(pictures=batch["picture"])  # no attribute that all ranks get
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.global_rank == 0:
            self.last.pictures.add_(1)


class Changes(ChangesAndKeeps):
    """The last stage reads them after all."""

    def on_train_epoch_end(self) -> None:
        self.mean = float(self.last.pictures.mean())


@contextmanager
def counting() -> Iterator[list[int]]:
    """The bytes of the messages that this rank sends with batches and results."""
    send, sent = PostedBroadcast.send, list[int]()

    def counted(self: PostedBroadcast, data: Tensor, readers: Any = None) -> None:
        before = sum(self._num_sent.values())
        send(self, data, readers)
        sent.append(data.nbytes * (sum(self._num_sent.values()) - before))

    PostedBroadcast.send = counted  # type: ignore[method-assign]
    try:
        yield sent
    finally:
        PostedBroadcast.send = send  # type: ignore[method-assign]


def trained(kind: type[Chain], layout: dict[str, Any] | None, epochs: int = 2) -> tuple[dict[str, Tensor], int, Any]:
    module = kind()
    loader = DataLoader(Pictures(), BATCH)
    with counting() as sent:
        trainer = make_trainer(layout, max_epochs=epochs)
        trainer.fit(module, loader)
    if layout is not None:
        trainer.strategy.gather_module()  # type: ignore[attr-defined]
    return weights(module), sum(sent), getattr(module, "mean", None)


BATCHES = 2 * SAMPLES // BATCH
LAYOUT = {"pipeline_parallel_size": 2, "num_microbatches": 4}


@pytest.mark.parametrize("kind", [Chain, Layers, ReadsAtTheEnd, ReadsLater, ReadsOld, Keeps])
def test_numbers_are_those_of_one_process(ranks: Pools, kind: type[Chain]) -> None:
    (found, sent, mean), (also, _, other_mean) = ranks(2, lightning=True).run(trained, kind, LAYOUT)
    expected, _, _ = trained(kind, None)
    assert_same(found, expected)
    assert_same(also, expected)
    if kind is Keeps:  # the last microbatch
        last = float(torch.stack([Pictures()[each]["picture"] for each in (38, 39)]).mean())
        assert_same([mean, other_mean], [last, last])
    # The first two batches go to all, and the packet of the third is as long as theirs.
    at_end = dict.fromkeys((ReadsLater, ReadsOld, Keeps), (BATCHES, 3))
    pictures, maps = {ReadsAtTheEnd: (3, BATCHES), **at_end}.get(kind, (3, 3))
    assert sent < (pictures + maps / 3 + 0.5) * BYTES


def trained_with_large_tensors(kind: type[Chain], layout: dict[str, Any]) -> tuple[dict[str, Tensor], int]:
    """As :func:`trained`, where every picture is so large that it takes a message of its own."""
    with mock.patch.object(tree_broadcast, "SMALL", 1 << 14), mock.patch.object(leaf_readers, "SMALL", 1 << 14):
        return trained(kind, layout)[:2]


def test_a_tensor_goes_to_the_tensor_parallel_ranks_of_its_stage(ranks: Pools) -> None:
    layout = {**LAYOUT, "tensor_parallel_size": 2, "tensor_parallel_plan": {"look": "colwise_gather_output"}}
    results = ranks(4, lightning=True).run(trained_with_large_tensors, Chain, layout)
    expected, _, _ = trained(Chain, None)
    for found, _ in results:
        assert_same(found, expected)
    # Rank 0 sends two batches to 1, which has the same stage, and to 2, which hands on to 3; pictures of eight to 1.
    assert [sent // BYTES for _, sent in results] == [13, 0, 2, 0]


def refused(kind: type[Chain]) -> str:
    try:
        trained(kind, LAYOUT)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def test_what_has_been_changed_is_refused_on_every_rank(ranks: Pools) -> None:
    for text in ranks(2, lightning=True).run(refused, Changes):
        assert "This rank reads a batch tensor of shape (8, 3, 32, 32) that it did not read in earlier steps." in text
        assert "HybridStrategy(broadcast_batches=False)" in text


KEPT: list[Any] = []


class KeepsForGood(Chain):
    """Keeps batches where nobody looks for them, eight more while the step is followed and compared."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        KEPT.append(batch)
        return super().training_step(batch, batch_idx)


class Example(Chain):
    """Keeps a batch of the second epoch as an example, in an attribute that nobody reads."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if self.current_epoch == 1 and batch_idx == 0:
            self.example = batch
        return super().training_step(batch, batch_idx)


def means_afterwards(kind: type[Chain]) -> list[float]:
    KEPT.clear()
    module = kind()
    make_trainer(LAYOUT, max_epochs=2).fit(module, DataLoader(Pictures(), BATCH))
    return [float(batch["picture"].mean()) for batch in [*KEPT, *filter(None, [getattr(module, "example", None)])]]


def test_what_has_been_changed_may_be_kept(ranks: Pools) -> None:
    assert ranks(2, lightning=True).run(refused, ChangesAndKeeps) == ["", ""]


@pytest.mark.parametrize(("kind", "number"), [(KeepsForGood, 4 * BATCHES + 8), (Example, 1)])
def test_what_is_kept_is_there_when_the_run_is_over(ranks: Pools, kind: type[Chain], number: int) -> None:
    first, last = ranks(2, lightning=True).run(means_afterwards, kind)
    assert first == last
    assert len(first) == number


def loaders_at_the_end() -> int:
    trainer = make_trainer(LAYOUT, max_epochs=5, reload_dataloaders_every_n_epochs=1)
    trainer.fit(Chain(), DataLoader(Pictures(), BATCH))
    gc.collect()
    return sum(isinstance(each, leaf_readers.LeafReaders) for each in gc.get_objects())


def test_loaders_that_are_gone_keep_nothing(ranks: Pools) -> None:
    assert max(ranks(2, lightning=True).run(loaders_at_the_end)) <= 2


def test_forms_beyond_some_go_to_all(ranks: Pools) -> None:
    (found, sent), _ = ranks(2, lightning=True).run(trained_without_forms, ReadsLater)
    assert_same(found, trained(ReadsLater, None)[0])
    assert sent > BATCHES * BYTES


def trained_without_forms(kind: type[Chain]) -> tuple[dict[str, Tensor], int]:
    with mock.patch.object(leaf_readers, "_MOST_FORMS", 0):
        return trained(kind, LAYOUT)[:2]
