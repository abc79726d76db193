"""Modules between lists of layers that write buffers of their own in each step: they train as in one process."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.daily import daily
from tests.pool import Pools
from tests.training_jobs import Result, assert_same, train

pytestmark = pytest.mark.distributed

WIDTH, ROWS = 12, 32

PP2: dict[str, Any] = {"pipeline_parallel_size": 2, "num_microbatches": 1}
#: (world size, arguments of the strategy).
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2": (2, PP2),
    "pp3": (3, {**PP2, "pipeline_parallel_size": 3}),
    "chunks 2": (2, {**PP2, "num_chunks": 2, "schedule": "interleaved_1f1b"}),
}


class AveragedCodebook(nn.Module):
    """A vector quantiser whose codes are moving averages of what they stand for (VQ-VAE, appendix A.1)."""

    def __init__(self, decay: float = 0.9) -> None:
        super().__init__()
        self.decay = decay
        codes = torch.randn(7, WIDTH)
        self.register_buffer("codes", codes)
        self.register_buffer("counts", torch.ones(7))
        self.register_buffer("sums", codes.clone())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        nearest = torch.cdist(x.detach(), self.codes).argmin(-1)
        chosen = F.one_hot(nearest, len(self.codes)).to(x)
        quantised = self.codes[nearest]
        if self.training:
            self.counts.mul_(self.decay).add_(chosen.sum(0), alpha=1 - self.decay)
            self.sums.mul_(self.decay).add_(chosen.t() @ x.detach(), alpha=1 - self.decay)
            self.codes.copy_(self.sums / self.counts.clamp(min=1e-5)[:, None])
        return x + (quantised - x).detach(), F.mse_loss(x, quantised), nearest


class AssignedCodebook(AveragedCodebook):
    """Its buffers are other tensors after each step."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        nearest = torch.cdist(x.detach(), self.codes).argmin(-1)
        chosen = F.one_hot(nearest, len(self.codes)).to(x)
        quantised = self.codes[nearest]
        if self.training:
            with torch.no_grad():
                self.counts = self.decay * self.counts + (1 - self.decay) * chosen.sum(0)
                self.sums = self.decay * self.sums + (1 - self.decay) * (chosen.t() @ x)
                self.codes = self.sums / self.counts.clamp(min=1e-5)[:, None]
        return x + (quantised - x).detach(), F.mse_loss(x, quantised), nearest


class RestartedCodebook(AveragedCodebook):
    """The first batch makes its codes, and codes that stand for little are samples of the batch again."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("is_made", torch.tensor(False))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.training and not self.is_made:
            self.codes.copy_(x.detach()[: len(self.codes)])
            self.is_made.fill_(True)
        result = super().forward(x)
        if self.training:
            is_rare = self.counts < 0.8
            if is_rare.any():
                self.codes[is_rare] = x.detach()[: int(is_rare.sum())]
                self.counts[is_rare] = 1.0
        return result


class LearnedCodebook(nn.Module):
    """A vector quantiser whose codes are parameters; gradients go straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(7, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        nearest = torch.cdist(x, self.codes.weight).argmin(-1)
        quantised = self.codes(nearest)
        loss = F.mse_loss(quantised, x.detach()) + 0.25 * F.mse_loss(x, quantised.detach())
        return x + (quantised - x).detach(), loss, nearest


class Standardiser(nn.Module):
    """Subtracts the running mean of its inputs, as those of reinforcement learning do, and counts the batches."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("square", torch.ones(WIDTH))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.2)
                self.square.lerp_(x.pow(2).mean(0), 0.2)
        return (x - self.mean) / (self.square - self.mean.pow(2)).clamp(min=1e-2).sqrt()


class Coder(LightningModule):
    """An encoder and a decoder in lists, with a module between them that keeps something."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(11)
            self.encoder = nn.ModuleList(self.make_layer() for _ in range(3))
            self.between = self.make_between()
            self.decoder = nn.ModuleList(self.make_layer() for _ in range(3))
        self.double()

    @staticmethod
    def make_layer() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def make_between(self) -> nn.Module:
        raise NotImplementedError

    def code(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What the decoder is given, and a loss beside that of the reconstruction."""
        x, loss, nearest = self.between(x)
        self.log("used", nearest.unique().numel() / 7)
        return x, loss

    def loss(self, x: Tensor) -> Tensor:
        given = x
        for layer in self.encoder:
            x = x + layer(x)
        x, loss = self.code(x)
        for layer in self.decoder:
            x = x + layer(x)
        return F.mse_loss(x, given) + loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch[0])
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch[0]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Averaged(Coder):
    def make_between(self) -> nn.Module:
        return AveragedCodebook()

    def code(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, loss, _ = self.between(x)
        return x, 0.25 * loss


class Assigned(Averaged):
    def make_between(self) -> nn.Module:
        return AssignedCodebook()


class Restarted(Averaged):
    def make_between(self) -> nn.Module:
        return RestartedCodebook()


class Learned(Averaged):
    def make_between(self) -> nn.Module:
        return LearnedCodebook()


class Projected(Averaged):
    """The quantiser is a part of a module with a projection before and behind it."""

    def make_between(self) -> nn.Module:
        parts = {"down": nn.Linear(WIDTH, WIDTH), "quantiser": AveragedCodebook(), "up": self.make_layer()}
        return nn.ModuleDict(parts)

    def code(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, loss, _ = self.between["quantiser"](self.between["down"](x))
        return self.between["up"](x), loss


class Residual(Averaged):
    """Two quantisers, one after another: the second one has what the first one leaves."""

    def make_between(self) -> nn.Module:
        return nn.ModuleList([AveragedCodebook(), AveragedCodebook()])

    def code(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, loss, _ = self.between[0](x)
        second, more, _ = self.between[1](x - first)
        return first + second, loss + more


class Standardised(Averaged):
    def make_between(self) -> nn.Module:
        return Standardiser()

    def code(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.between(x), x.new_zeros(())


class Normed(Standardised):
    def make_between(self) -> nn.Module:
        return nn.BatchNorm1d(WIDTH)


MODULES = [Averaged, Assigned, Restarted, Learned, Projected, Residual, Standardised, Normed]


def trained(module: type[Coder], layout: dict[str, Any] | None, batch_size: int = 8, **trainer: Any) -> Result:
    """Train with validation on the same samples."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    if "strategy" in trainer:  # Lightning would shuffle
        x = x[int(os.environ["RANK"]) :: 2]
    data = [DataLoader(TensorDataset(x), batch_size) for _ in range(2)]
    return train(module(), layout, *data, max_epochs=2, log_every_n_steps=1, **trainer)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("name", daily(LAYOUTS, "chunks 2"))
def test_modules_between_lists_may_write_their_buffers(ranks: Pools, module: type[Coder], name: str) -> None:
    size, layout = LAYOUTS[name]
    expected = trained(module, None)
    for result in ranks(size, lightning=True).run(trained, module, layout):
        assert_same(result.weights, expected.weights)
        assert_same(result.losses, expected.losses)
        assert_same(result.metrics, expected.metrics)


def trained_by_replicas(module: type[Coder]) -> Result:
    strategy = DDPStrategy(process_group_backend="gloo")
    return trained(module, None, 4, devices=2, strategy=strategy, use_distributed_sampler=False)


@pytest.mark.parametrize("module", [Averaged, Residual, Standardised])
def test_replicas_have_codes_of_their_own_samples(ranks: Pools, module: type[Coder]) -> None:
    """As with DDP, where the first replica's buffers are those of all in each step, and of the checkpoint."""
    expected = ranks(2, lightning=True).run(trained_by_replicas, module)[0]
    result = ranks(4, lightning=True).run(trained, module, PP2, 4)[0]
    assert_same(result.weights, expected.weights)
    assert_same(result.metrics, expected.metrics)


@pytest.mark.parametrize("module", [Averaged, Assigned, Residual])
def test_each_microbatch_counts(ranks: Pools, module: type[Coder]) -> None:
    """As for batch norm: the codes are those of one process that has the microbatches as batches."""
    expected = trained(module, None, 4, accumulate_grad_batches=2)
    for result in ranks(2, lightning=True).run(trained, module, {**PP2, "num_microbatches": 2}):
        assert_same(result.weights, expected.weights)
