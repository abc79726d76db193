"""A user's module, data and Trainer, for the tests of what Lightning offers around training."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid import HybridStrategy

#: (world size, data-parallel size, arguments of the strategy); ``None`` as a layout is one process without us.
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "pp2": (2, 1, {"pipeline_parallel_size": 2}),
    "pp2 x dp2": (4, 2, {"pipeline_parallel_size": 2, "num_microbatches": 3}),
    "pp3": (3, 1, {"pipeline_parallel_size": 3, "schedule": "gpipe", "num_microbatches": 5}),
    "chunks 2": (2, 1, {"pipeline_parallel_size": 2, "num_chunks": 2, "schedule": "interleaved_1f1b"}),
}
PP2: dict[str, Any] = {"pipeline_parallel_size": 2, "num_microbatches": 4}


class Regression(LightningModule):
    """An embedding, a body of `num_layers` layers with a residual around it, and a head; in float64."""

    def __init__(self, num_layers: int = 6, learning_rate: float = 1e-2, dropout: float = 0.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        with torch.random.fork_rng():
            torch.manual_seed(7)
            self.embed = nn.Linear(6, 8)
            self.body = nn.Sequential(
                *[nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(dropout)) for _ in range(num_layers)]
            )
            self.head = nn.Linear(8, 1)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        return self.head(self.body(h) + h)

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["learning_rate"])


class Manual(Regression):
    """Steps by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class WithoutOptimizer(Regression):
    """Trains nothing."""

    def configure_optimizers(self) -> None:
        return None


class Losses(Callback):
    """Losses of all batches; NaN if the step returned no loss."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.values.append(float((outputs or {}).get("loss", math.nan)))


def dataset(num_samples: int = 36, seed: int = 1) -> TensorDataset:
    """Features of shape ``(num_samples, 6)`` and targets ``(num_samples, 1)``, float64."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_samples, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def loader(batch_size: int = 8, num_samples: int = 36, seed: int = 1, **arguments: Any) -> DataLoader[Any]:
    """A loader over `dataset`."""
    return DataLoader(dataset(num_samples, seed), batch_size, **arguments)


def make_trainer(layout: Mapping[str, Any] | None, **arguments: Any) -> Trainer:
    """A quiet Trainer on the CPU; ``layout=None`` is one process and Lightning's own strategy.

    The module stays divided after the run, so that tests see what each rank holds.
    """
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1 if layout is None else int(os.environ["WORLD_SIZE"]),
        "strategy": "auto" if layout is None else HybridStrategy(**{"gather_module_on_teardown": False, **layout}),
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(**{**defaults, **arguments})


def users_trainer(layout: Mapping[str, Any] | None, **arguments: Any) -> Trainer:
    """Likewise, and the module is whole after the run, as by default."""
    return make_trainer(None if layout is None else {"gather_module_on_teardown": "auto", **layout}, **arguments)


@dataclass
class Result:
    """Outcome of a training.

    Attributes:
        weights: The full state dict, on every rank.
        losses: The loss of each batch, as `Losses` has it.
        metrics: What was logged, as numbers.
        held: The names of the parameters that this rank held in the run.
        trainer: The Trainer. It is not sent to other processes, which see ``None``.
    """

    weights: dict[str, Any]
    losses: list[float]
    metrics: dict[str, float]
    held: list[str]
    trainer: Any

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "trainer": None}


def train(
    module: LightningModule, layout: Mapping[str, Any] | None, *data: Any, ckpt_path: str | None = None, **trainer: Any
) -> Result:
    """Train a module and return its weights, losses and metrics.

    After the run the module is gathered, and parameters that this rank held must be as they were.

    Args:
        module: The module.
        layout: The arguments of the strategy; ``None`` is one process and Lightning's own strategy.
        data: The loaders, for training and for validation; none if the module has its own.
        ckpt_path: A checkpoint to start from.
        trainer: The arguments of the Trainer.
    """
    losses = Losses()
    run = make_trainer(layout, **{**trainer, "callbacks": [*trainer.get("callbacks", []), losses]})
    run.fit(module, *data, ckpt_path=ckpt_path)
    held = weights(module)
    if isinstance(run.strategy, HybridStrategy):
        run.strategy.gather_module()
    state = copy.deepcopy(dict(module.state_dict()))
    for name, value in held.items():
        if not isinstance(value, DTensor):
            assert_same(state[name], value, rtol=0.0, where=name)
    return Result(state, losses.values, plain(run.callback_metrics), list(held), run)


def weights(module: nn.Module) -> dict[str, Tensor]:
    """The parameters that live on this rank."""
    return {name: p.detach().clone() for name, p in module.named_parameters() if not p.is_meta}


def together(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The parameters of all ranks; ranks that hold the same one must agree exactly."""
    whole: dict[str, Tensor] = {}
    for part in parts:
        for name, value in part.items():
            assert name not in whole or torch.equal(whole[name], value), name
            whole[name] = value
    return whole


def plain(values: Mapping[str, Any]) -> dict[str, float]:
    """Metrics as Python numbers."""
    return {name: float(value) for name, value in values.items()}


def assert_same(actual: Any, expected: Any, rtol: float = 1e-10, where: str = "value") -> None:
    """Trees of numbers, tensors and anything else are equal: numbers up to a relative tolerance.

    Results are equal if their weights, losses and metrics are.
    """
    if isinstance(expected, Mapping):
        assert isinstance(actual, Mapping), where
        assert list(actual) == list(expected) or sorted(map(str, actual)) == sorted(map(str, expected)), (
            f"{where}: keys {list(actual)}, expected {list(expected)}"
        )
        for key in expected:
            assert_same(actual[key], expected[key], rtol, f"{where}[{key!r}]")
    elif isinstance(expected, Result):
        for name in ("weights", "losses", "metrics"):
            assert_same(getattr(actual, name), getattr(expected, name), rtol, f"{where}.{name}")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), f"{where}: {actual}, expected {expected}"
        for index, (mine, other) in enumerate(zip(actual, expected, strict=True)):
            assert_same(mine, other, rtol, f"{where}[{index}]")
    elif isinstance(expected, Tensor):
        assert actual.dtype == expected.dtype, f"{where}: {actual.dtype}, expected {expected.dtype}"
        options: dict[str, Any] = {"rtol": rtol, "atol": rtol, "equal_nan": True}
        torch.testing.assert_close(actual, expected, **options, msg=lambda text: f"{where}: {text}")
    elif isinstance(expected, float):
        assert isinstance(actual, float), f"{where}: {actual!r}, expected {expected!r}"
        close = math.isclose(actual, expected, rel_tol=rtol, abs_tol=rtol)
        assert close or (math.isnan(actual) and math.isnan(expected)), f"{where}: {actual} != {expected}"
    else:
        assert actual == expected, f"{where}: {actual!r}, expected {expected!r}"
