"""The strategy's part in checkpoints: what the Trainer asks for when it saves and loads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from torch.optim import Optimizer

from lightning_hybrid.checkpoint.file_io import FileIO
from lightning_hybrid.checkpoint.weights import Source
from lightning_hybrid.config import HybridConfig
from lightning_hybrid.strategy import checks as refusals
from lightning_hybrid.strategy.collectives import ReplicaCollectives, outside_of_steps
from lightning_hybrid.strategy.run import RunState

__all__ = ["SavingStrategy"]


class SavingStrategy(ReplicaCollectives):
    """Checkpoints of the undivided model, whatever this rank holds of it."""

    settings: HybridConfig
    _assembly: RunState | None

    @property
    def _parts(self) -> RunState:
        if self._assembly is None:
            raise RuntimeError("The device mesh exists only after the processes have been set up.")
        return self._assembly

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Writes and reads checkpoint files."""
        if self._checkpoint_io is None:
            self._checkpoint_io = FileIO()
        elif isinstance(self._checkpoint_io, _WrappingCheckpointIO) and self._checkpoint_io.checkpoint_io is None:
            self._checkpoint_io.checkpoint_io = FileIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        refusals.check_plugin(io, sharded=self.settings.save_distributed_checkpoint, beside=self.settings.async_save)
        self._checkpoint_io = io

    @outside_of_steps
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write a checkpoint: a file on rank 0, or a directory on every rank."""
        sharded = self.settings.save_distributed_checkpoint
        refusals.check_storage(filepath, storage_options, sharded=sharded)
        if self._assembly is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
        else:
            self._parts.archive.save(checkpoint, filepath, self.checkpoint_io, storage_options)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a file or a directory, on rank 0."""
        if self._assembly is None:
            super().remove_checkpoint(filepath)
        else:
            self._parts.archive.remove(filepath, self.checkpoint_io)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a file, or from a directory the weights of this rank's part, straight into the module."""
        return self._parts.archive.load(checkpoint_path, self.checkpoint_io, weights_only)

    @outside_of_steps
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The undivided module's state on rank 0, empty on other ranks of a pipeline; for a directory, this rank's."""
        if self._assembly is None:  # no run has begun, and nothing is divided
            return super().lightning_module_state_dict()
        self._parts.departure.check_saving()  # the Trainer asks for this first
        return self._parts.archive.module_state()

    @outside_of_steps
    def load_weights(self, source: Source) -> None:
        """Take weights from elsewhere, each rank what it holds of them; to be called on every rank.

        In a hook, such as `setup` or `on_fit_start`. If the module is not divided yet, it happens when it is. What was
        made on the meta device gets its values straight from there, and what is not there initialises itself.

        Args:
            source: The state dict of the undivided module; a file of `torch.save` with one, alone or in a checkpoint;
                a ``.safetensors`` file; or a sharded directory. Names have to be the same, unless the module has
                ``strict_loading=False``; of tied parameters one is enough.

        Raises:
            FileNotFoundError, ValueError: If they cannot be read; on every rank.
            RuntimeError: If names or shapes do not fit; on every rank, and nothing is loaded.
        """
        self._parts.load_weights(source)

    @outside_of_steps
    def gather_module(self) -> None:
        """Make the module whole again in place, on every rank: ordinary parameters and layers, all with their values.

        To be called on every rank after a run, or in a hook at its very end (`teardown`). The module is then as if it
        had never been divided: it runs in one process, and another Trainer may divide it in another way. Parameters
        that lived elsewhere or were divided are new objects: optimizers of the run know the old ones, so their states
        must be saved before. What torchmetrics in steps have counted stays on the last stage.

        Raises:
            ValueError: If layers were divided by styles of torch or by the user; on every rank.
            RuntimeError: If the processes are no longer connected.
        """
        if self._assembly is None:
            return
        if self.is_alone:
            raise RuntimeError("`gather_module` needs the process groups of the run, and they were destroyed.")
        self._assembly.gather()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load this rank's part."""
        self._parts.archive.load_module_state(checkpoint["state_dict"], strict=strict)

    @outside_of_steps
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The undivided optimizer's state on rank 0, empty on other ranks; for a directory, this rank's."""
        if self._parts.is_gathered:
            raise RuntimeError(
                "The module was made whole by `gather_module`, and the optimizer has parameters that are no longer in"
                " it. Save before that, or with `trainer.save_checkpoint(path, weights_only=True)`."
            )
        return self._parts.archive.optimizer_state(optimizer)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's part."""
        self._parts.archive.load_optimizer_states(self.optimizers, checkpoint["optimizer_states"])
        _optimizers_to_device(self.optimizers, self.root_device)
