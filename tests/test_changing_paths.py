"""Steps whose path changes during a run, for reasons that are not in the batch, train as in one process."""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_hybrid import HybridTimeline
from tests.daily import daily
from tests.pool import Pools
from tests.training_jobs import LAYOUTS, Result, assert_same, make_trainer, together, train
from tests.zoo.context import Leaking

WIDTH, CLASSES, STEPS, SAMPLES = 12, 3, 6, 12
FRAME = "lightning_hybrid.pipeline_parallel.frame.frame"


class Block(nn.Module):
    def __init__(self, *, drops: bool = False) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.dropout = nn.Dropout(0.2 if drops else 0.0)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))
        return out


class Blocks(LightningModule):
    """Blocks in a list, which the step calls as it likes, in float64."""

    drops = False

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.embed, self.head = nn.Linear(6, WIDTH), nn.Linear(WIDTH, CLASSES)
            self.blocks = nn.ModuleList(Block(drops=self.drops) for _ in range(6))
        self.double()

    def loss(self, x: Tensor, y: Tensor, name: str = "loss") -> Tensor:
        loss = F.cross_entropy(self.head(x), y)
        self.log(name, loss, on_step=True, on_epoch=True, batch_size=1, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


class AuxiliaryLoss(Blocks):
    """From the third optimizer step on there are losses of layers between."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, losses = self.embed(batch[0]), []
        for depth, block in enumerate(self.blocks):
            x = block(x)
            if self.global_step >= 2 and depth % 2:
                losses.append(self.loss(x, batch[1], f"loss {depth}"))
        return self.loss(x, batch[1]) + sum(losses)


class DroppedLayers(Blocks):
    """Layers are dropped by numbers of Python."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        draw, x = random.Random(batch_idx), self.embed(batch[0])
        for block in self.blocks:
            if draw.random() > 0.3:
                x = block(x)
        return self.loss(x, batch[1])


class GrowingDepth(Blocks):
    """The number of layers depends on the number of the batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.embed(batch[0])
        for block in self.blocks[: 3 + batch_idx % 4]:
            x = block(x)
        return self.loss(x, batch[1])


class Phases(Blocks):
    """Two kinds of steps take turns, after a first phase with one of them."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.embed(batch[0])
        for depth, block in enumerate(self.blocks):
            x = block(x)
            if depth == 2 and batch_idx >= 2 and batch_idx % 2 == 0:
                return self.loss(x, batch[1], "early") + self.loss(self.blocks[5](x), batch[1])
        return self.loss(x, batch[1])


class OwnPaths(Blocks):
    """Each microbatch of each replica has a path of its own, drawn from Python's generator; layers drop numbers."""

    drops = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.embed(batch[0])
        for block in self.blocks:
            if batch_idx < 2 or random.random() > 0.4:
                x = block(x)
        return self.loss(x, batch[1])


class Stateful(Blocks):
    """Steps change attributes, containers, buffers and metrics before their path does, and the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.insert(1, nn.BatchNorm1d(WIDTH, dtype=torch.float64))
        self.register_buffer("moving", torch.zeros(6, dtype=torch.float64))
        self.register_buffer("large", torch.zeros(2, dtype=torch.float64))
        self.calls, self.seen, self.counts, self.metric = 0, [0] * 1001, {"steps": 0}, MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch[0], batch.pop()
        self.calls += 1
        self.seen.append(batch_idx)
        self.counts["steps"] += 1
        self.moving.mul_(0.9).add_(x.mean(0))
        x = self.embed(x + self.moving)
        for depth, block in enumerate(self.blocks):
            x = block(x)
            if depth == 3 and self.global_step >= 3:
                self.large.add_(1.0)
                self.metric(float(batch_idx))
                self.log("metric", self.metric, on_step=True, on_epoch=True)
                return self.loss(x, y, "early") + self.loss(self.blocks[6](x), y)
        return self.loss(x, y)


class OtherOperand(Blocks):
    """The same calls are made with other values from the third step on; of three stages the middle one sees it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, outputs = self.embed(batch[0]), []
        for depth, block in enumerate(self.blocks):
            x = block(x)
            outputs.append(x)
            if depth == 3:
                x = x + outputs[0 if self.global_step >= 2 else 1]
        return self.loss(x, batch[1])


CASES: list[tuple[type[Blocks], str]] = [
    *((AuxiliaryLoss, name) for name in ("pp2", "pp3", "chunks 2", "pp2 x dp2")),
    *((DroppedLayers, name) for name in ("pp2", "chunks 2")),
    *((GrowingDepth, name) for name in ("pp3", "pp2 x dp2")),
    (Phases, "pp2"),
    (OtherOperand, "pp3"),
]
OWN_CASES: list[tuple[type[Blocks], str, int]] = [
    *((OwnPaths, name, accumulated) for name, accumulated in (("pp3", 1), ("chunks 2", 1), ("pp2 x dp2", 2))),
    *((Stateful, name, accumulated) for name, accumulated in (("pp2", 2), ("chunks 2", 1), ("pp2 x dp2", 1))),
]
PP2: dict[str, Any] = {"pipeline_parallel_size": 2, "num_microbatches": 4}


class Follows(logging.Handler):
    """Counts the steps that are followed."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.number = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.number += "was traced" in record.getMessage()


def dataset() -> TensorDataset:
    seed = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS * SAMPLES, 6, generator=seed, dtype=torch.float64)
    return TensorDataset(x, torch.randint(CLASSES, (STEPS * SAMPLES,), generator=seed))


class Buffers(Callback):
    """Copies of the buffers of one rank at the end of a run, before the module is gathered."""

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self.values = {name: buffer.clone() for name, buffer in pl_module.named_buffers() if not buffer.is_meta}


def trained(
    kind: type[Blocks], layout: Mapping[str, Any] | None, **arguments: Any
) -> tuple[Result, dict[str, Tensor], int, list[str]]:
    """Train; return the result, this rank's buffers and attributes, the number of traced steps, and the warnings."""
    buffers, follows, logger = Buffers(), Follows(), logging.getLogger(FRAME)
    module, replicas = kind(), 1
    if layout is not None:
        replicas = arguments.pop("replicas", 1)
    logger.addHandler(follows)
    level = logger.level
    logger.setLevel(logging.DEBUG)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            how = {"callbacks": [buffers], "max_epochs": 2, **arguments}
            result = train(module, layout, DataLoader(dataset(), SAMPLES // replicas), **how)
    finally:
        logger.removeHandler(follows)
        logger.setLevel(level)
    texts = [str(each.message) for each in caught]
    state = {f"own {name}": value for name, value in buffers.values.items()}
    state |= {name: torch.tensor(vars(module)[name]) for name in ("calls", "seen") if name in vars(module)}
    state |= {"counts": torch.tensor(module.counts["steps"])} if isinstance(module, Stateful) else {}
    return result, state, follows.number, texts


def check(ranks: Pools, kind: type[Blocks], name: str, **arguments: Any) -> list[int]:
    """Compare with one process, and return how many steps each rank has followed."""
    size, replicas, layout = LAYOUTS[name]
    expected, expected_state, *_ = trained(kind, None, **arguments)
    found = ranks(size, lightning=True).run(
        _trained, kind, dict(layout), {**arguments, "replicas": replicas}, timeout=120
    )
    if replicas == 1:
        for result, *_ in found:
            assert_same(result.losses, expected.losses, where="losses")
    for result, *_ in found:
        epoch = {key: value for key, value in result.metrics.items() if replicas == 1 or not key.endswith("_step")}
        assert_same(epoch, {key: expected.metrics[key] for key in epoch}, where="metrics")
        assert result.metrics.keys() == expected.metrics.keys()
    whole = together([result.weights | state for result, state, *_ in found])
    assert_same(whole, expected.weights | expected_state, where="weights")
    return [follows for *_, follows, _ in found]


def _trained(kind: type[Blocks], layout: dict[str, Any], arguments: dict[str, Any]) -> Any:
    return trained(kind, layout, **arguments)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kind", "name"),
    daily(
        CASES,
        (AuxiliaryLoss, "chunks 2"),
        (AuxiliaryLoss, "pp2 x dp2"),
        (DroppedLayers, "chunks 2"),
        (GrowingDepth, "pp2 x dp2"),
        (Phases, "pp2"),
        (OtherOperand, "pp3"),
    ),
)
def test_equals_one_process(ranks: Pools, kind: type[Blocks], name: str) -> None:
    check(ranks, kind, name)


@pytest.mark.distributed
@pytest.mark.parametrize(("kind", "name"), [(AuxiliaryLoss, "pp2"), (GrowingDepth, "pp2 x dp2")])
def test_gradients_are_accumulated(ranks: Pools, kind: type[Blocks], name: str) -> None:
    check(ranks, kind, name, accumulate_grad_batches=3)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kind", "name", "accumulated"), daily(OWN_CASES, *(case for case in OWN_CASES if case[1] == "pp2 x dp2"))
)
def test_equals_steps_that_are_followed_each_time(
    ranks: Pools, kind: type[Blocks], name: str, accumulated: int
) -> None:
    """Random numbers, logs, buffers, attributes, containers, metrics and batches are those of one attempt."""
    size, replicas, layout = LAYOUTS[name]
    options = {"replicas": replicas, "accumulate_grad_batches": accumulated}
    pool = ranks(size, lightning=True)
    expected = pool.run(_trained, kind, {**layout, "dynamic_shapes": True}, options, timeout=120)
    found = pool.run(_trained, kind, dict(layout), options, timeout=120)
    for actual, other in zip(found, expected, strict=True):
        assert_same(actual[:2], other[:2])


class SamePath(Blocks):
    """Each step takes one path."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.embed(batch[0])
        for block in self.blocks:
            x = block(x)
        return self.loss(x, batch[1])


@pytest.mark.distributed
def test_a_path_is_followed_once(ranks: Pools) -> None:
    def followed(kind: type[Blocks]) -> tuple[int, list[str]]:
        found = ranks(2, lightning=True).run(_trained, kind, PP2, {}, timeout=120)
        assert len({follows for *_, follows, _ in found}) == 1
        warned = [text for *_, texts in found for text in texts if "dynamic_shapes=True" in text]
        return found[0][2], warned

    same, warned = followed(SamePath)
    assert not warned
    # What comes again is done with the plan that is remembered, over both epochs.
    assert followed(AuxiliaryLoss) == (same + 1, [])
    assert followed(Phases) == (same + 1, [])
    # Where paths are new again and again each microbatch is followed before its step, and a warning says so once.
    follows, warned = followed(DroppedLayers)
    assert follows <= same + 2 * STEPS * PP2["num_microbatches"]
    assert len(warned) == 1
    assert "new paths" in warned[0]


def recorded(folder: str) -> None:
    trainer = make_trainer(PP2, callbacks=[HybridTimeline([2], folder)])
    trainer.fit(AuxiliaryLoss(), DataLoader(dataset(), SAMPLES))


@pytest.mark.distributed
def test_a_timeline_shows_only_the_last_attempt(ranks: Pools, tmp_path: Path) -> None:
    ranks(2, lightning=True).run(recorded, str(tmp_path), timeout=120)  # an assertion compares actions with the plan
    assert (tmp_path / "batch-2.svg").exists()


class MovingTeacher(AuxiliaryLoss):
    """The step moves a teacher, whose numbers are not copied before each step."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(6, WIDTH, dtype=torch.float64).requires_grad_(requires_grad=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.teacher.weight.mul_(0.9).add_(self.embed.weight.detach(), alpha=0.1)
        return super().training_step(batch, batch_idx)


def refused(kind: type[Blocks], layout: dict[str, Any]) -> str:
    with pytest.raises((ValueError, RuntimeError), match="a different path") as caught:
        trained(kind, layout)
    return str(caught.value)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kind", "layout", "words"),
    [
        (MovingTeacher, PP2, "had already changed a tensor of shape [12, 6]"),
        (AuxiliaryLoss, {**PP2, "zero_stage": 2}, "call 3 of AuxiliaryLoss is now `linear`, but was 'blocks.2'"),
    ],
)
def test_what_cannot_be_done_again_is_refused(
    ranks: Pools, kind: type[Blocks], layout: dict[str, Any], words: str
) -> None:
    for text in ranks(4 if "zero_stage" in layout else 2, lightning=True).run(refused, kind, layout, timeout=120):
        assert words in text
        assert "HybridStrategy(dynamic_shapes=True)" in text


class KeepsResults(Leaking):
    """Results of layers, which ranks of a context have in shares, stay in a list of the module."""

    def build(self) -> None:
        super().build()
        self.seen: list[Tensor] = []

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        self.seen.clear()
        for layer in self.body:
            x = layer(x)
            self.seen.append(x.flatten(0, 1))
        products = [(each.softmax(1).mean(0) * each.square().mean(0)).sum() for each in self.seen]
        return F.mse_loss(x, y) + torch.stack(products).sum()


def losses_of_two_batches(layout: dict[str, Any]) -> list[float]:
    return train(KeepsResults().double(), layout, limit_train_batches=2, limit_val_batches=1).losses


@pytest.mark.distributed
def test_what_is_kept_before_a_step_is_read_on_no_rank_alone(ranks: Pools) -> None:
    """What ranks compute together when one reads it is no state that a step writes in place."""
    layout = {"context_parallel_size": 2, "context_parallel": "all_gather", "pipeline_parallel_size": 2}
    first, *others = ranks(4, lightning=True).run(losses_of_two_batches, layout, timeout=120)
    assert len(first) == 2
    assert all(each == first for each in others)
