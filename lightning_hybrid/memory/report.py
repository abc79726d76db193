"""Log of the estimated memory of each rank at the start of training, and warnings about wrong estimates.

`Run.install` adds the callback to the Trainer. The estimate comes before the first batch, so that a user learns the
memory of each part before a run fails with an out-of-memory error. The allocator's peak after the first step shows if
the estimate was right.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from rich import filesize
from torch import Tensor

from lightning_hybrid.distributed.agreement import all_gather_values
from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.memory.account import MemoryUsage, storage_bytes

_log = logging.getLogger("lightning.pytorch")
_TOLERANCE = 1.2  # a larger ratio of actual to estimated bytes is logged as a warning


class MemoryReport(Callback):
    """Callback that logs the estimate of each pipeline rank when training begins.

    On CUDA, it logs again after the first optimizer step, with the peak of the CUDA allocator. Among tensor-parallel
    ranks, the largest estimate is shown. After the first step, each rank of the first replica warns if its parameters
    or optimizer states take more memory than estimated. The hooks do nothing on other replicas, and their gathers are
    collectives of the first replica. If global rank 0 does not log at level INFO, or an estimate fails, there are no
    logs and no warnings.

    Args:
        estimate: Returns the estimate of this rank. It may raise an error, but must not communicate.
        table: Returns a table of the estimates and, if there are any, the allocator's peaks in bytes, both by pipeline
            rank.
        mesh: The device mesh.
    """

    def __init__(
        self,
        estimate: Callable[[], MemoryUsage],
        table: Callable[[Sequence[MemoryUsage], Sequence[int]], str],
        mesh: Mesh,
    ) -> None:
        self._estimate, self._table, self._mesh = estimate, table, mesh
        self._estimates: list[MemoryUsage] = []
        self._first_step: int | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the estimates."""
        if self._mesh.data_rank > 0:
            return
        is_silent = self._mesh.is_first and not _log.isEnabledFor(logging.INFO)
        estimates = self._gather(None if is_silent else self._try_estimate())
        if any(None in of_rank for of_rank in estimates):
            return
        self._estimates = [max(of_rank, key=_known_bytes) for of_rank in estimates]
        self._say("Estimated memory per rank", [])
        self._first_step = trainer.global_step

    def _try_estimate(self) -> MemoryUsage | None:
        try:
            return self._estimate()
        except Exception:  # a failed estimate must not end a run
            _log.debug("The memory of this rank could not be estimated.", exc_info=True)
            return None

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """After the first optimizer step, compare actual memory with the estimate, and log the allocator's peaks."""
        if self._first_step in (None, trainer.global_step):
            return
        self._first_step = None
        # The estimate is repeated, because the first batch has shown the stages of parameters outside the layers.
        own = self._try_estimate()
        if own is not None:
            self._compare(own, trainer, pl_module)
        if trainer.strategy.root_device.type != "cuda":
            return
        peaks = self._gather(torch.cuda.max_memory_allocated(trainer.strategy.root_device))
        title = "Estimated memory per rank, and peak of the CUDA allocator up to the first optimizer step"
        self._say(title, [max(of_rank) for of_rank in peaks])

    def _compare(self, own: MemoryUsage, trainer: Trainer, module: LightningModule) -> None:
        """Warn about tensors that take more memory than estimated, such as views of larger tensors."""
        device = trainer.strategy.root_device
        states = (value for each in trainer.optimizers for state in each.state.values() for value in state.values())
        measured = {
            "parameters": (own.parameters, module.parameters()),
            "optimizer states": (own.optimizer, (each for each in states if isinstance(each, Tensor))),
        }
        for name, (expected, tensors) in measured.items():
            found = storage_bytes(each for each in tensors if each.device.type == device.type)
            if expected is not None and found > _TOLERANCE * expected:
                _log.warning(
                    "The %s of rank %d use %s instead of the estimated %s, probably because some of them are views of"
                    " larger tensors, which stay in memory. If so, clone the views where they are created; otherwise,"
                    " report this as a bug.",
                    name,
                    dist.get_rank(),
                    filesize.decimal(found),
                    filesize.decimal(expected),
                )

    def _gather(self, value: Any) -> list[list[Any]]:
        """Return the values of the first replica, by pipeline rank and tensor-parallel rank.

        All ranks of the first replica must call this. Values of further context-parallel ranks are dropped.
        """
        mesh, group = self._mesh, self._mesh.control_group
        values = all_gather_values(value, group)
        return [
            [values[mesh.model_group_rank(rank, tensor_rank)] for tensor_rank in range(mesh.sizes.tensor)]
            for rank in range(mesh.sizes.pipeline)
        ]

    def _say(self, title: str, peaks: Sequence[int]) -> None:
        if self._mesh.is_first:
            _log.info("%s:\n%s", title, self._table(self._estimates, peaks))


def _known_bytes(usage: MemoryUsage) -> int:
    return sum(part or 0 for part in astuple(usage))
