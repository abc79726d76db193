"""The program that every rank runs: a small training, in which one thing goes wrong."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_hybrid import Faults, HybridStrategy
from lightning_hybrid.pipeline_parallel.p2p import Channel
from tests.faults.fault import STALLS, Fault, Layout
from tests.faults.forks import tell

MARK = "fault"  # a file with the moment of the fault
READY = "ready"  # the rank is where it is to be hit from outside
ONWARD_STEPS = 16  # to which at least a run trains on from another one's checkpoint: later than that one could


class Trigger:
    """Goes off at one call of one place on one rank.

    Args:
        fault: What happens.
        directory: Where the moment is noted.
    """

    def __init__(self, fault: Fault, directory: Path) -> None:
        self.fault, self.directory = fault, directory
        self.calls = 0

    @property
    def rank(self) -> int:
        return int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))

    def mark(self) -> None:
        (self.directory / MARK).write_text(str(time.time()))

    def reach(self, place: str, act: Callable[[], Any] | None = None) -> Any:
        """Come to a place; what goes wrong there may be returned."""
        fault = self.fault
        if place != fault.place or self.rank != fault.rank:
            return None
        self.calls += 1
        return self._go_off() if self.calls == fault.time else None

    def _go_off(self) -> Any:
        fault, kind = self.fault, self.fault.kind
        if kind not in ("sigint", "sigterm", "stop") and "+" not in kind:
            self.mark()
        if kind == "raise":
            raise ArithmeticError(f"fault {fault.number}")
        if kind == "exit":
            os._exit(7)
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "sys_exit":
            sys.exit(3)
        if kind == "keyboard_interrupt":
            raise KeyboardInterrupt
        if kind.startswith("sleep") or kind == "stop":
            (self.directory / READY).write_text(str(os.getpid()))
            time.sleep(600)
        if kind in ("sigint", "sigterm"):
            (self.directory / READY).write_text(str(os.getpid()))
            time.sleep(1.0)
        return kind


class Data(Dataset[Any]):
    def __init__(self, trigger: Trigger, length: int) -> None:
        self.trigger, self.length = trigger, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        kind = self.trigger.fault.kind
        if kind.startswith("worker") and index == 20 and self.trigger.rank == self.trigger.fault.rank:
            self.trigger.mark()
            if kind == "worker_killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ArithmeticError(f"fault {self.trigger.fault.number}")
        self.trigger.reach("getitem")
        return torch.full((8,), float(index % 7))


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, trigger: Any) -> Tensor:
        ctx.trigger = trigger
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.trigger.reach("backward")
        return gradient, None


class Experts(nn.Module):
    """Matrices, of which each sample has one. Ranks are forked from this module, so it imports little."""

    def __init__(self, num_experts: int, features: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.weight = nn.Parameter(torch.randn(num_experts, features, features) / features)
        self.bias = nn.Parameter(torch.randn(num_experts, features))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        weight, bias = self.weight[top_k_index[:, 0]], self.bias[top_k_index[:, 0]]
        return (torch.bmm(weight, hidden_states.unsqueeze(2)).squeeze(2) + bias) * top_k_weights


class Routed(nn.Module):
    """A linear layer, then an expert for each sample."""

    def __init__(self, width: int, features: int) -> None:
        super().__init__()
        self.router, self.down = nn.Linear(width, 4), nn.Linear(width, features)
        self.experts = Experts(4, features)

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.router(x).softmax(-1).topk(1)
        return self.experts(self.down(x), index, weights)


class Layer(nn.Module):
    def __init__(self, trigger: Trigger) -> None:
        super().__init__()
        self.trigger = trigger
        self.block = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        if trigger.fault.layout.experts > 1:
            self.block[2] = Routed(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.trigger.reach("forward")
        return Failing.apply(x + self.block(x), self.trigger)  # type: ignore[no-any-return]


class Module(LightningModule):
    """Comes to every place; what one rank does alone is done here."""

    def __init__(self, trigger: Trigger) -> None:
        super().__init__()
        self.trigger = trigger
        self.embed = nn.Linear(8, 8)
        self.body = nn.Sequential(*[Layer(trigger) for _ in range(8)])
        self.head = nn.Linear(8, 1)

    def step(self, batch: Tensor) -> Tensor:
        self.trigger.reach("before_body")
        loss = self.head(self.body(self.embed(batch))).square().mean()
        self._alone("after_body")
        return loss

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.step(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.head(self.body(self.embed(batch))).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        self.trigger.reach("configure_optimizers")
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def _alone(self, place: str) -> Any:
        if self.trigger.fault.kind == "all_reduce_in_step" and place == self.trigger.fault.place:
            if self.trigger.calls == 0:
                self.trigger.mark()
            self.trigger.calls += 1
            return dist.all_reduce(torch.zeros(1))
        what = self.trigger.reach(place)
        trainer: Any = self.trainer
        path = str(self.trigger.directory / "alone.ckpt")
        actions: dict[str, Callable[[], Any]] = {
            "log": lambda: self.log("alone", 1.0),
            "log_sync": lambda: self.log("alone", 1.0, sync_dist=True),
            "should_stop": lambda: setattr(trainer, "should_stop", True),
            "save": lambda: trainer.save_checkpoint(path),
            "state_dict": lambda: trainer.strategy.lightning_module_state_dict(),
            "barrier": lambda: trainer.strategy.barrier(),
            "torch_barrier": lambda: dist.barrier(),
            "skip_epoch": lambda: -1,
        }
        return actions[what]() if what in actions else None


def _hook(name: str) -> Callable[..., Any]:
    def hook(self: Module, *args: Any, **kwargs: Any) -> Any:
        return self._alone(name)

    return hook


for _name in (
    *("on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_optimizer_step"),
    *("on_train_batch_end", "on_validation_start", "on_validation_epoch_end", "on_save_checkpoint"),
    *("on_train_epoch_end", "setup"),
):
    setattr(Module, _name, _hook(_name))


class SavesAtEnd(Callback):
    """Of one rank only, which is what goes wrong; or of all, one of which comes to the end before the others."""

    def __init__(self, trigger: Trigger) -> None:
        self.trigger = trigger

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.trigger.fault.kind == "checkpoint_callback":
            self.trigger.mark()
        trainer.save_checkpoint(Path(trainer.default_root_dir) / "end.ckpt")


class HasFewerBatches(Callback):
    """Of the rank whose loader is short: the others go on after its last batch."""

    def __init__(self, trigger: Trigger) -> None:
        self.trigger = trigger

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx + 1 == trainer.num_training_batches:
            self.trigger.mark()


class FillsDisk(Callback):
    """Files of this process get no larger from the second epoch on."""

    def __init__(self, trigger: Trigger) -> None:
        self.trigger = trigger

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == 1 and trainer.global_rank == self.trigger.fault.rank:
            self.trigger.mark()
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))


def corrupt_messages(trigger: Trigger) -> None:
    """What one rank sends has another shape than it says, at its sixth message."""
    send = Channel.send
    sent = [0]

    def corrupted(self: Channel, key: Any, leaves: list[Any], spec: Any) -> Any:
        if trigger.rank == trigger.fault.rank:
            sent[0] += 1
            if sent[0] == 6:
                trigger.mark()
                leaves = [leaf[..., :-1] if isinstance(leaf, Tensor) and leaf.dim() else leaf for leaf in leaves]
        return send(self, key, leaves, spec)

    Channel.send = corrupted  # type: ignore[method-assign]


def main(fault: Fault, directory: Path, checkpoint: Path | None = None) -> None:
    """Train, with a fault.

    Args:
        fault: What goes wrong.
        directory: Where all files are.
        checkpoint: What an earlier run has left, to train on from.
    """
    torch.set_num_threads(1)
    trigger = Trigger(fault, directory)
    data, tensor, pipeline = fault.layout[:3]
    length = 32
    kind, rank = fault.kind, trigger.rank
    if kind == "corrupt":
        corrupt_messages(trigger)
    callbacks: list[Callback] = [ModelCheckpoint(directory / "checkpoints", every_n_train_steps=2, save_top_k=-1)]
    if kind == "checkpoint_callback" and rank == fault.rank:
        callbacks.append(SavesAtEnd(trigger))
    if kind == "short_loader" and rank == fault.rank:
        callbacks.append(HasFewerBatches(trigger))
    if kind == "short_loader" and fault.number % 2:
        callbacks.append(SavesAtEnd(trigger))
    if kind == "disk_full":
        callbacks.append(FillsDisk(trigger))
    trainer = Trainer(
        accelerator="cpu",
        devices=fault.size,
        max_epochs=2 + (kind == "max_epochs" and rank == fault.rank) if checkpoint is None else ONWARD_STEPS // 4,
        strategy=HybridStrategy(
            data_parallel_size=data,
            tensor_parallel_size=tensor,
            pipeline_parallel_size=pipeline,
            zero_stage=fault.layout.zero,  # type: ignore[arg-type]
            zero_size=fault.layout.zero_size,
            expert_parallel_size=fault.layout.experts,
            num_microbatches=4 if pipeline > 1 else 1,
            faults=Faults(stall_timeout=timedelta(seconds=5) if kind in STALLS else timedelta(minutes=8)),
        ),
        callbacks=callbacks,
        default_root_dir=directory,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=kind != "short_loader",
    )
    if kind == "short_loader":
        short = rank % (data * tensor) < tensor  # the first replica
        length = 24 if short else 32
    workers = int(kind.startswith("worker") or fault.place == "getitem")

    def collate(samples: list[Tensor]) -> Tensor:
        trigger.reach("collate")
        return torch.stack(samples)

    train = DataLoader(
        Data(trigger, length * data), 8, num_workers=0 if fault.place == "collate" else workers, collate_fn=collate
    )
    validation = DataLoader(Data(Trigger(Fault(0, rank=-1), directory), 8 * data), 8)
    if kind in ("max_epochs", "resumes"):
        trigger.mark()
    alone = directory / "checkpoints" / "epoch=1-step=8.ckpt"
    if kind == "resumes":
        trainer.fit(Module(trigger), train, validation)
        trigger.mark()
        trainer.fit_loop.max_epochs = 3
    path = alone if kind == "resumes" and rank == fault.rank else checkpoint
    trainer.fit(Module(trigger), train, validation, ckpt_path=path)
    if trainer.received_sigterm:
        sys.exit(143)
    if checkpoint is not None and trainer.global_step < ONWARD_STEPS:
        raise AssertionError(f"trained on to step {trainer.global_step}")


def run(fault: Fault, directory: Path, checkpoint: Path | None = None) -> None:
    """`main`, whose error is the first line of this rank's story."""
    try:
        main(fault, directory, checkpoint)
    except BaseException as error:
        tell(directory, int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))), error)
        raise


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    arguments["layout"] = Layout(*arguments["layout"])
    run(Fault(**arguments), Path(sys.argv[2]))
