"""Gradients of parameters in half precision, added up in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid import Tuning
from lightning_hybrid.data_parallel.fp32_grads import Float32Gradients
from lightning_hybrid.distributed.dtensor import full_tensor
from tests.pool import Pools
from tests.training_jobs import make_trainer

PARTS = 16  # microbatches
BATCH = 32


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.body = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
            self.head = nn.Linear(8, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self.head(self.body(batch[0])), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    shape = (2 * BATCH, 8)
    return TensorDataset(torch.randn(shape, generator=generator).bfloat16(), torch.ones(2 * BATCH, 1).bfloat16())


class Gradients(Callback):
    """The gradients of the first step, by name."""

    def __init__(self) -> None:
        self.first: dict[str, Tensor] = {}

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        named = pl_module.named_parameters()
        gradients = {name: p.grad for name, p in named if p.grad is not None and not p.is_meta}
        assert all(gradient.dtype == torch.bfloat16 for gradient in gradients.values())
        self.first = self.first or {name: full_tensor(gradient).clone() for name, gradient in gradients.items()}


def train(layout: dict[str, Any], batch_size: int = BATCH, accumulated: int = 1) -> dict[str, Tensor]:
    callback = Gradients()
    trainer = make_trainer(layout, precision="bf16-true", callbacks=[callback], accumulate_grad_batches=accumulated)
    trainer.fit(Net(), DataLoader(dataset(), batch_size))
    return callback.first


def by_hand(batches: list[list[Tensor]], parts: int, share: float) -> dict[str, Tensor]:
    """Gradients of microbatches in bfloat16, their sum over all replicas' batches in float32, rounded once."""
    module = Net().bfloat16()
    sums = {name: torch.zeros(p.shape) for name, p in module.named_parameters()}
    for batch in batches:
        own = {name: torch.zeros(p.shape) for name, p in module.named_parameters()}
        for part in zip(*(each.tensor_split(parts) for each in batch), strict=True):
            module.zero_grad()
            (module.training_step(list(part), 0) * share * (1 / parts)).backward()
            for name, p in module.named_parameters():
                own[name] += p.grad.float()
        for name in sums:
            sums[name] += own[name]
    return {name: total.bfloat16() for name, total in sums.items()}


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {"num_microbatches": PARTS}),
    "pp2": (2, {"pipeline_parallel_size": 2, "num_microbatches": PARTS}),
    "tp2": (2, {"tensor_parallel_size": 2, "num_microbatches": PARTS, "tensor_parallel_plan": None}),
}


@pytest.mark.distributed
@pytest.mark.parametrize("layout", LAYOUTS)
def test_micro_batches_are_added_up_in_float32(ranks: Pools, layout: str) -> None:
    size, arguments = LAYOUTS[layout]
    expected = by_hand([list(dataset()[:BATCH])], PARTS, 1.0)
    for rank in ranks(size, lightning=True).run(train, {**arguments, "tuning": Tuning(float32_gradients=True)}):
        assert rank
        for name, gradient in rank.items():
            assert torch.equal(gradient, expected[name]), name
    narrow = ranks(size, lightning=True).run(train, arguments)[0]
    assert any(not torch.equal(gradient, expected[name]) for name, gradient in narrow.items())


@pytest.mark.distributed
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_replicas_are_averaged_in_float32(ranks: Pools, zero_stage: int) -> None:
    arguments = {"data_parallel_size": 2, "num_microbatches": PARTS // 2, "zero_stage": zero_stage}
    x, y = dataset()[:BATCH]
    expected = by_hand([[x[::2], y[::2]], [x[1::2], y[1::2]]], PARTS // 2, 0.5)
    for rank in ranks(2, lightning=True).run(
        train, {**arguments, "tuning": Tuning(float32_gradients=True)}, BATCH // 2
    ):
        for name, gradient in rank.items():
            torch.testing.assert_close(gradient, expected[name], rtol=2**-8, atol=1e-6)


@pytest.mark.distributed
def test_batches_are_added_up_in_float32(ranks: Pools) -> None:
    arguments = {"num_microbatches": 1, "tuning": Tuning(float32_gradients=True)}
    batches = [list(dataset()[:BATCH]), list(dataset()[BATCH:])]
    (found,) = ranks(1, lightning=True).run(train, arguments, BATCH, 2)
    expected = by_hand(batches, 1, 0.5)
    assert all(torch.equal(gradient, expected[name]) for name, gradient in found.items())


def test_what_is_there_already_is_kept() -> None:
    half, single = nn.Parameter(torch.ones(2).bfloat16()), nn.Parameter(torch.ones(2))
    wide = Float32Gradients([half, half, single])
    half.grad = torch.full((2,), 256.0).bfloat16()
    wide.begin()
    wide.begin()
    for _ in range(4):
        half.sum().backward()
        single.sum().backward()
    assert half.grad.dtype == torch.float32
    assert half.grad.tolist() == [260.0, 260.0]
    wide.end()
    wide.end()
    assert half.grad.dtype == half.grad_dtype == torch.bfloat16
    assert half.grad.tolist() == [260.0, 260.0]
    assert single.grad.tolist() == [4.0, 4.0]
