"""Saving and loading of one divided module: as one file or as a directory, at once or beside training."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.io import AsyncCheckpointIO, CheckpointIO
from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid.checkpoint.callback_state import check_values, gather_callback_tensors, name_whole_groups
from lightning_hybrid.checkpoint.file_io import OUR_PLUGINS, local_path
from lightning_hybrid.checkpoint.full import FullCheckpoint
from lightning_hybrid.checkpoint.metadata import RECORD, make_metadata
from lightning_hybrid.checkpoint.optimizer_state import OptimizerStates
from lightning_hybrid.checkpoint.ownership import Ownership
from lightning_hybrid.checkpoint.sharded import ShardedCheckpoint
from lightning_hybrid.checkpoint.snapshot import snapshot
from lightning_hybrid.checkpoint.state_dict_match import load_module_state
from lightning_hybrid.checkpoint.storage.background import BackgroundWriter
from lightning_hybrid.checkpoint.storage.dcp import DistributedCheckpoint
from lightning_hybrid.config import HybridConfig
from lightning_hybrid.distributed.agreement import agree
from lightning_hybrid.distributed.dtensor import to_local
from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.pipeline_parallel.stage_map import StageMap

__all__ = ["Checkpointer"]


class TrainingState(Protocol):
    """Where training is, beyond what Lightning's own checkpoint says, so that a resumed run is the rest of the old."""

    def add_to(self, checkpoint: dict[str, Any], name: str, trainer: Trainer) -> dict[str, Any]:
        """The checkpoint with the state added to its entry `name`; on every rank."""

    def load(self, checkpoint: dict[str, Any], record: Mapping[str, Any], path: Any, trainer: Trainer) -> None:
        """Take the state from the entry `record` of a checkpoint that was read at `path`."""


class Checkpointer:
    """What the strategy saves and loads.

    Args:
        module: The user's module, divided.
        stage_map: Which stage holds what.
        mesh: The ranks.
        settings: The settings.
        training_state: Knows where training is.

    Attributes:
        optimizers: The undivided optimizers.
    """

    def __init__(
        self,
        module: LightningModule,
        stage_map: StageMap,
        mesh: Mesh,
        settings: HybridConfig,
        training_state: TrainingState,
    ) -> None:
        self._module = module
        self._mesh = mesh
        self._settings = settings
        self._training_state = training_state
        self._stage_map = stage_map
        self.optimizers = OptimizerStates(module)
        self._ownership = Ownership(module, stage_map, mesh)
        self._whole = FullCheckpoint(module, self._ownership, self.optimizers, mesh)
        self._sharded = ShardedCheckpoint(module, self._ownership, self.optimizers, mesh)
        self._background = BackgroundWriter()
        self._is_in_run = False

    def open(self) -> None:
        """A run begins: until :meth:`close` there is somebody who waits for what is written beside training."""
        self._is_in_run = True

    def module_state(self) -> dict[str, Any]:
        """The undivided module's state on rank 0, or what this rank has of it where directories are written."""
        return self._module.state_dict() if self._settings.save_distributed_checkpoint else self._whole.module_state()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The undivided optimizer's state on rank 0, or by name what this rank has of it."""
        if self._settings.save_distributed_checkpoint:
            return self.optimizers.state(optimizer)
        return self._whole.optimizer_state(optimizer)

    # -- saving --------------------------------------------------------------------------------------------------------

    def save(self, checkpoint: dict[str, Any], path: Any, plugin: CheckpointIO, options: Any) -> None:
        """Write a checkpoint; called on every rank.

        Args:
            checkpoint: As the Trainer made it.
            path: The place.
            plugin: Writes files.
            options: For the plugin.

        Raises:
            ValueError: If the checkpoint has tensors without values; on every rank.
            OSError: If it, or the one before it, could not be written; on every rank.
        """
        self.finish()
        sharded = self._settings.save_distributed_checkpoint
        state = checkpoint["state_dict"]
        names = self._ownership.stored_names(state) if sharded else None
        layers = getattr(state, "_metadata", None) if sharded else None
        checkpoint = {**checkpoint, RECORD: make_metadata(self._mesh, self._settings, self._stage_map, names, layers)}
        if "optimizer_states" in checkpoint and "loops" in checkpoint:  # not the weights only
            checkpoint = self._training_state.add_to(checkpoint, RECORD, self._module.trainer)
        if self._mesh.pipeline_parallel_size > 1:
            checkpoint = name_whole_groups(checkpoint, self._module.trainer, self.optimizers)
        if not sharded:
            checkpoint = gather_callback_tensors(checkpoint, self._ownership, self._whole)
            agree(lambda: check_values(checkpoint) if self._mesh.is_first else None)
        wished = self._settings.async_save or (sharded and isinstance(plugin, AsyncCheckpointIO))
        beside = wished and self._is_in_run
        if beside and (sharded or self._mesh.is_first):
            checkpoint = snapshot(checkpoint, None if sharded or self._whole.is_undivided else self._live())
        write = self._writing(checkpoint, path, plugin, options)
        if beside:
            self._background.submit(write)
        elif sharded:
            write()  # its ranks agree by themselves
        else:
            agree(write)

    def _live(self) -> list[Tensor]:
        states = (state for optimizer in self._module.trainer.optimizers for state in optimizer.state.values())
        values = (value for state in states for value in state.values() if isinstance(value, Tensor))
        tensors = [*self._module.state_dict().values(), *values]
        return [to_local(tensor) for tensor in tensors if isinstance(tensor, Tensor) and not tensor.is_meta]

    def _writing(self, checkpoint: dict[str, Any], path: Any, plugin: CheckpointIO, options: Any) -> Callable[[], None]:
        if self._settings.save_distributed_checkpoint:
            place = local_path(path)
            assert place is not None, "others are refused"
            return self._sharded.writing(checkpoint, place)
        if self._mesh.is_first:
            return lambda: plugin.save_checkpoint(checkpoint, path, storage_options=options)
        return lambda: None

    def remove(self, path: Any, plugin: CheckpointIO) -> None:
        """Remove a checkpoint, after what is being written has been: it may be the only one until then."""
        if not self._mesh.is_first:
            return
        if self._background.is_busy:
            self._background.submit(lambda: plugin.remove_checkpoint(path), if_all_went_well=True)
        else:
            plugin.remove_checkpoint(path)

    def finish(self) -> None:
        """Wait for what is written beside training.

        Raises:
            OSError: If it could not be written; on every rank.
        """
        if not self._background.is_busy:
            return
        error = self._background.wait()

        def check() -> None:
            if error is not None:
                raise error

        agree(check)

    def close(self) -> None:
        """Wait for what is written beside training, without asking the other ranks: they may be gone.

        Raises:
            OSError: If this rank could not write it.
        """
        self._is_in_run = False
        error = self._background.wait()
        if error is not None:
            raise error

    # -- loading -------------------------------------------------------------------------------------------------------

    def load(self, path: Any, plugin: CheckpointIO, weights_only: bool | None) -> dict[str, Any]:
        """Read a checkpoint; the weights of a directory go straight into the module.

        Args:
            path: A file, or a directory.
            plugin: Reads files.
            weights_only: As for `torch.load`.

        Raises:
            FileNotFoundError, ValueError: If there is none, or it is not complete; on every rank.
            RuntimeError: If a directory is one of another model; on every rank.
        """
        self.finish()

        def read() -> dict[str, Any]:
            place = local_path(path)
            if place is not None and DistributedCheckpoint.is_at(place, or_unfinished=type(plugin) in OUR_PLUGINS):
                found = self._sharded.load(
                    place,
                    strict=self._module.strict_loading,
                    read_extra=lambda extra: plugin.load_checkpoint(extra, weights_only=weights_only),
                )
                if "layers" in found.get(RECORD, {}):
                    found["state_dict"]._metadata = OrderedDict(found[RECORD]["layers"])
                return found
            return plugin.load_checkpoint(path, weights_only=weights_only)

        checkpoint = agree(read)
        self._training_state.load(checkpoint, checkpoint.get(RECORD, {}), path, self._module.trainer)
        return checkpoint

    def load_module_state(self, state: Mapping[str, Any], *, strict: bool) -> None:
        """Take this rank's part of the undivided module's state dict.

        Raises:
            RuntimeError: If names or shapes do not fit; on every rank, and nothing is loaded.
        """
        load_module_state(self._module, state, strict=strict)

    def load_optimizer_states(self, optimizers: Sequence[Optimizer], states: Sequence[Any]) -> None:
        """Take this rank's part of the undivided optimizers' states.

        Raises:
            ValueError: If the optimizers, or their groups, are not those of the checkpoint; on every rank.
        """
        if self._sharded.wrote(states):
            agree(lambda: self._sharded.load_optimizer_states(optimizers, states))
        else:
            self._whole.load_optimizer_states(optimizers, states)
