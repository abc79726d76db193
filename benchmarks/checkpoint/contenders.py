"""The ways to save and load that are compared; all of them the same module and the same AdamW."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid import HybridStrategy

RANKS = 2


class Block(nn.Module):
    """A pair of linear layers, ``(batch, width)`` to the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """A feed-forward pair."""
        return self.down(torch.relu(self.up(x)))


class Model(LightningModule):
    """Blocks; with `by_hand`, divided by torch's own styles."""

    def __init__(self, width: int, depth: int, *, by_hand: bool = False) -> None:
        super().__init__()
        self.width, self.by_hand = width, by_hand
        self.body = nn.Sequential(*(Block(width) for _ in range(depth)))

    def tensor_parallel_plan(self) -> dict[str, str]:
        """The plan of this package."""
        return {"body.*.up": "colwise", "body.*.down": "rowwise"}

    def configure_model(self) -> None:
        """The same with torch alone."""
        if self.by_hand:
            styles = {"body.*.up": ColwiseParallel(), "body.*.down": RowwiseParallel()}
            parallelize_module(self, self.device_mesh["tensor_parallel"], styles)  # type: ignore[index,arg-type]
            self.by_hand = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """One step, so that the optimizer has its state."""
        return self.body(batch[0]).pow(2).mean()

    def configure_optimizers(self) -> Any:
        """AdamW: two values for each weight."""
        return torch.optim.AdamW(self.parameters(), foreach=False)


class Contender:
    """Saves and loads a trained module through a strategy of Lightning.

    Args:
        strategy: The strategy.
        model: The module.
    """

    def __init__(self, strategy: Strategy, model: Model) -> None:
        self.model = model
        self.trainer = Trainer(
            accelerator="cpu",
            devices=RANKS,
            strategy=strategy,
            max_steps=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        self.trainer.fit(model, DataLoader(TensorDataset(torch.randn(8, model.width)), 8))
        self.optimizer = self.trainer.optimizers[0]

    def forget(self) -> None:
        """No optimizer's state, no gradients."""
        self.optimizer.state.clear()
        self.model.zero_grad(set_to_none=True)

    def save(self, path: Path) -> None:
        """As a user does."""
        self.trainer.save_checkpoint(path)

    def load(self, path: Path) -> None:
        """As the Trainer does when a run is resumed: there is no state of the optimizer yet, and no gradient."""
        self.forget()
        strategy = self.trainer.strategy
        checkpoint = strategy.load_checkpoint(path)
        strategy.load_model_state_dict(checkpoint)
        strategy.load_optimizer_state_dict(checkpoint)


class Direct(Contender):
    """`torch.distributed.checkpoint` on the tensors of another contender."""

    def __init__(self, other: Contender) -> None:
        self.model, self.optimizer = other.model, other.optimizer
        self.names = {parameter: name for name, parameter in self.model.named_parameters()}

    def _state(self) -> dict[str, Any]:
        held = [(name, each) for name, each in self.model.state_dict().items() if not each.is_meta]
        optimizer = {self.names[each]: dict(values) for each, values in self.optimizer.state.items()}
        return {"state_dict": dict(held), "optimizer_0": {"state": optimizer}}

    def save(self, path: Path) -> None:
        """Nothing but the tensors."""
        dcp.save(self._state(), checkpoint_id=path)

    def load(self, path: Path) -> None:
        """In place: the optimizer's state has to be made first."""
        self.forget()
        for group in self.optimizer.param_groups:
            for each in group["params"]:
                moments = {key: torch.empty_like(each.detach()) for key in ("exp_avg", "exp_avg_sq")}
                self.optimizer.state[each] = {"step": torch.zeros(()), **moments}
        dcp.load(self._state(), checkpoint_id=path)


def make(kind: str, width: int, depth: int, only: str = "") -> dict[str, Contender]:
    """The contenders of one comparison, ours first.

    Args:
        kind: What is compared.
        width: The width of the model.
        depth: The number of its blocks.
        only: The one that is needed; by default all are.
    """
    torch.manual_seed(0)
    contenders: dict[str, Contender] = {}
    if kind == "file":
        if only in ("", "ours"):
            contenders["ours"] = Contender(HybridStrategy(data_parallel_size=RANKS), Model(width, depth))
        if only in ("", "DDPStrategy"):
            contenders["DDPStrategy"] = Contender(DDPStrategy(), Model(width, depth))
        return contenders
    axis = "tensor" if kind == "directory, tensor 2" else "pipeline"
    if only in ("", "ours", "direct"):
        # After the run, the module stays sharded, and the optimizer has the same parameters.
        sizes: dict[str, Any] = {f"{axis}_parallel_size": RANKS, "gather_module_on_teardown": False}
        ours = Contender(HybridStrategy(save_distributed_checkpoint=True, **sizes), Model(width, depth))
        contenders = {"ours": ours, "direct": Direct(ours)}
    if axis == "tensor" and only in ("", "ModelParallelStrategy"):
        lightning = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=RANKS)
        contenders["ModelParallelStrategy"] = Contender(lightning, Model(width, depth, by_hand=True))
    return contenders


KINDS = ("directory, tensor 2", "directory, pipeline 2", "file")


def remove(path: Path) -> None:
    """On the first rank; all wait."""
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    dist.barrier()


def memory() -> tuple[int, int]:
    """Bytes of this process on the host: now, and at the most since the last :func:`forget_peak`."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return tuple(1024 * int(lines[key].split()[0]) for key in ("VmRSS", "VmHWM"))  # type: ignore[return-value]


def forget_peak() -> None:
    """The most bytes are those of now."""
    descriptor = os.open("/proc/self/clear_refs", os.O_WRONLY)
    os.write(descriptor, b"5")
    os.close(descriptor)
