"""What each rank is estimated to hold, logged when training begins, and on CUDA what the allocator says of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.distributed.tree_broadcast import broadcast_object
from lightning_hybrid.memory.account import MemoryUsage

_log = logging.getLogger("lightning.pytorch")


class MemoryReport(Callback):
    """Logs the estimate of each pipeline rank when training begins; on CUDA once more after the first optimizer step.

    The second time the peak of the CUDA allocator stands beside the estimate. Of ranks that share layers, the one that
    holds the most is shown. Nothing is estimated where this level of logging is switched off.

    Args:
        estimate: What this rank will hold.
        table: Makes a text of the estimates and, if there are any, the allocator's peaks, both by pipeline rank.
        mesh: The ranks.
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
        if not broadcast_object(_log.isEnabledFor(logging.INFO), 0, self._mesh.control_group):
            return
        estimate = None
        try:
            estimate = self._estimate()
        except Exception:  # no reason to end a run
            _log.debug("What this rank holds could not be estimated.", exc_info=True)
        estimates = self._gather(estimate)
        if any(None in of_rank for of_rank in estimates):
            return
        self._estimates = [max(of_rank, key=_known_bytes) for of_rank in estimates]
        self._say("Memory of a rank, estimated", [])
        if trainer.strategy.root_device.type == "cuda":
            self._first_step = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """After the first optimizer step, log the allocator's peaks."""
        if self._first_step in (None, trainer.global_step):
            return
        self._first_step = None
        peaks = self._gather(torch.cuda.max_memory_allocated(trainer.strategy.root_device))
        title = "Memory of a rank, estimated, and the peak of the CUDA allocator up to the first optimizer step"
        self._say(title, [max(of_rank) for of_rank in peaks])

    def _gather(self, value: Any) -> list[list[Any]]:
        """The values of the first replica, by pipeline rank and tensor-parallel rank."""
        group, size = self._mesh.control_group, self._mesh.tensor_parallel_size
        values: list[Any] = [None] * group.size()
        dist.all_gather_object(values, value, group=group)
        return [values[start : start + size] for start in range(0, len(values), size)]

    def _say(self, title: str, peaks: Sequence[int]) -> None:
        if self._mesh.is_first:
            _log.info("%s:\n%s", title, self._table(self._estimates, peaks))


def _known_bytes(usage: MemoryUsage) -> int:
    return sum(part or 0 for part in astuple(usage))
