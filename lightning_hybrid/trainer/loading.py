"""The Trainer's loaders, as they are while this package trains."""

from __future__ import annotations

import torch
from lightning.pytorch import Trainer

from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.trainer.dataloader import prepare_loader
from lightning_hybrid.trainer.resume.replay import ReplayableLoader
from lightning_hybrid.trainer.resume.resume import ResumeCallback

__all__ = ["DataLoaderPreparer"]


class DataLoaderPreparer:
    """Prepares loaders in Lightning's place.

    Lightning's own sampler shuffles training data whether or not the user's loader does; ours keeps its order.

    Args:
        mesh: The ranks.
        device: Of this process.
        continuation: Goes on where a checkpoint was written.
        share: Whether one rank of each model group loads for all.
    """

    def __init__(self, mesh: Mesh, device: torch.device, continuation: ResumeCallback, *, share: bool) -> None:
        self._mesh, self._device, self._continuation = mesh, device, continuation
        self._share = share
        self._divides: bool | None = None  # what the user said

    def attach(self, trainer: Trainer) -> None:
        """Nobody else divides the data."""
        connector = trainer._accelerator_connector
        self._divides, connector.use_distributed_sampler = connector.use_distributed_sampler, False

    def detach(self, trainer: Trainer) -> None:
        """Undo :meth:`attach`."""
        if self._divides is not None:
            trainer._accelerator_connector.use_distributed_sampler = self._divides

    def __call__(self, loader: object, trainer: Trainer) -> object:
        """A loader of this replica's samples that gives the same batches to all ranks of the model group."""
        divide, stage = bool(self._divides), trainer.state.stage
        prepared = prepare_loader(loader, self._mesh, divide=divide, share=self._share, stage=stage)
        if not trainer.training:
            return prepared
        return ReplayableLoader(prepared, self._device, waits=self._continuation.is_loaded)
