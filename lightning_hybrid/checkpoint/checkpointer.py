"""Saving and loading of a parallelized module: as a file or a directory, synchronously or in the background.

`AttachedModule` makes a :class:`Checkpointer`, and makes another one when the module has been sharded. The methods of
`HybridStrategy` for checkpoints and state dicts call it, and `Run` calls :meth:`Checkpointer.open`. Lightning's own
code is not enough, because no rank has the full model: a file has to be gathered on rank 0 (:mod:`~.full`), and a
directory is written by all ranks (:mod:`~.sharded`). Errors of one rank are raised on all ranks; otherwise the other
ranks would wait in the next collective.

A *plugin* is Lightning's `CheckpointIO`, which reads and writes a file. A checkpoint is *pending* while a background
thread still writes it. Methods are collectives of all ranks unless they say otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.io import AsyncCheckpointIO, CheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid.checkpoint.file_io import FILE_PLUGINS
from lightning_hybrid.checkpoint.full import FullCheckpoint, check_values, part_expected
from lightning_hybrid.checkpoint.metadata import METADATA, check_kind, make_metadata
from lightning_hybrid.checkpoint.optimizer_state import OptimizerStates
from lightning_hybrid.checkpoint.snapshot import snapshot
from lightning_hybrid.checkpoint.state_dict_match import load_module_state
from lightning_hybrid.checkpoint.storage.background import BackgroundWriter
from lightning_hybrid.checkpoint.storage.checksums import verify
from lightning_hybrid.checkpoint.storage.disks import at_hand, check_shared
from lightning_hybrid.checkpoint.storage.remote import Place, is_directory, place_of
from lightning_hybrid.config import Settings
from lightning_hybrid.data_parallel.parameter_map import ParameterMap
from lightning_hybrid.distributed.agreement import agree
from lightning_hybrid.distributed.dtensor import to_local
from lightning_hybrid.distributed.process_group import GroupRef

if TYPE_CHECKING:
    from lightning_hybrid.checkpoint.sharded import ShardedCheckpoint

_T = TypeVar("_T")


class TrainingState(Protocol):
    """The progress of training that is not in Lightning's own checkpoint, needed to resume a run exactly.

    `ResumeCallback` implements it.
    """

    def add_to(self, checkpoint: dict[str, Any], name: str, trainer: Trainer, /) -> dict[str, Any]:
        """Return the checkpoint with the state added to its entry `name`; every rank calls this."""

    def load(self, checkpoint: dict[str, Any], metadata: Mapping[str, Any], path: Any, trainer: Trainer, /) -> None:
        """Keep the state in `metadata`, this package's entry of a checkpoint that was read from `path`.

        This may replace the loop states in `checkpoint`. It does nothing if the run does not resume from `path`.
        """


class Checkpointer:
    """Saves and loads checkpoints of the full module, its optimizers, and the progress of training.

    Args:
        module: The user's module, parallelized.
        parameters: The places of the module's tensors.
        settings: The settings.
        training_state: Saves and loads the progress of training.
        optimizers: The states of the full optimizers.

    Attributes:
        optimizers: The argument `optimizers`. `HybridStrategy` calls it directly to drop placeholders.
    """

    def __init__(
        self,
        module: LightningModule,
        parameters: ParameterMap,
        settings: Settings,
        training_state: TrainingState,
        optimizers: OptimizerStates,
    ) -> None:
        self._module = module
        self._map, self._mesh = parameters, parameters.mesh
        self._settings = settings
        self._training_state = training_state
        self.optimizers = optimizers
        self._full = FullCheckpoint(module, parameters, self.optimizers)
        self._metadata = make_metadata(self._mesh, settings, parameters.stage_map)
        self._group = GroupRef(self._mesh.decision_group)
        self._background = BackgroundWriter()
        self._is_in_run = False
        self._read_from: Any = None  # the path of the checkpoint whose optimizer states are loaded next

    @cached_property
    def _sharded(self) -> ShardedCheckpoint:
        """Return the writer and reader of directories, created late because its torch modules take time to import."""
        from lightning_hybrid.checkpoint.sharded import ShardedCheckpoint

        return ShardedCheckpoint(self._module, self._map, self.optimizers)

    def open(self) -> None:
        """Start a run: until :meth:`close`, checkpoints may be written in the background.

        If a fit will write directories, this creates the folders of the checkpoint callbacks.

        Raises:
            ValueError: If directories will be written to a folder that not all nodes share; on every rank.
            OSError: If a node cannot write to this folder; on every rank.
        """
        self._is_in_run = True
        trainer = self._module.trainer
        saves = trainer.state.fn == TrainerFn.FITTING and not trainer.fast_dev_run  # type: ignore[attr-defined]
        if self._settings.save_distributed_checkpoint and saves:
            places = (getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks)
            folders = (place_of(place) for place in places if place is not None)
            on_disks = [folder for folder in dict.fromkeys(folders) if isinstance(folder, Path)]
            check_shared(on_disks, self._mesh.hosts, self._mesh.decision_group)

    def release_parameters(self) -> None:
        """Wait for pending checkpoints, before parameters move; see :class:`Follower`."""
        self.finish()

    def take_parameters(self, placeholders: Mapping[int, Tensor]) -> None:
        """Keep the optimizer states of parameters that this rank still has; not a collective. See :class:`Follower`."""
        for optimizer in self._module.trainer.strategy.optimizers:
            self.optimizers.replace_with_placeholders(optimizer, placeholders)

    def module_state(self) -> dict[str, Any]:
        """Return the full state dict of the module, or this rank's shards if checkpoints are directories.

        See :meth:`FullCheckpoint.module_state` for the ranks that receive the full state dict. For directories, this is
        not a collective.
        """
        sharded = self._settings.save_distributed_checkpoint
        with part_expected():
            return self._module.state_dict() if sharded else self._full.module_state()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's full state, or this rank's shards by name if checkpoints are directories.

        See :meth:`FullCheckpoint.optimizer_state` for the ranks that receive the full state. For directories, this is
        not a collective.
        """
        if self._settings.save_distributed_checkpoint:
            return self.optimizers.state(optimizer)
        return self._full.optimizer_state(optimizer)

    # -- saving --------------------------------------------------------------------------------------------------------

    def save(self, checkpoint: dict[str, Any], path: Any, plugin: CheckpointIO, options: Any) -> None:
        """Write a checkpoint, after the pending ones.

        With `async_save`, a background thread writes it, and the run waits only for gathering and copying its values.

        Args:
            checkpoint: The Trainer's checkpoint, with the states from :meth:`module_state` and :meth:`optimizer_state`.
            path: The path to write: a text or a path.
            plugin: Writes files.
            options: The storage options for the plugin; not used for directories.

        Raises:
            ValueError: If a file would contain tensors without values, or a directory would contain tensors of the
                model in a list or tuple; on every rank.
            OSError: If this checkpoint or a pending one could not be written; on every rank. If this checkpoint is
                written in the background, the next :meth:`save`, :meth:`load`, :meth:`finish` or :meth:`close` raises
                its error. Other plugins may raise other errors.
        """
        self.finish()
        sharded = self._settings.save_distributed_checkpoint
        names = self._sharded.metadata_of(checkpoint["state_dict"]) if sharded else {}
        checkpoint = {**checkpoint, METADATA: {**self._metadata, **names}}
        if "optimizer_states" in checkpoint and "loops" in checkpoint:  # not only weights
            checkpoint = self._training_state.add_to(checkpoint, METADATA, self._module.trainer)
        if self._mesh.sizes.pipeline > 1:
            checkpoint = self.optimizers.fill_finetuning(checkpoint, self._module.trainer)
        if not sharded:
            checkpoint = self._full.fill(checkpoint)
            self._agree(lambda: check_values(checkpoint) if self._mesh.is_first else None)
        requested = self._settings.async_save or (sharded and isinstance(plugin, AsyncCheckpointIO))
        is_async = requested and self._is_in_run
        wait: Callable[[], None] | None = None
        if is_async and (sharded or self._mesh.is_first):
            checkpoint, wait = snapshot(checkpoint, None if sharded or self._full.is_undivided else self._live())
        write = self._prepare(checkpoint, path, plugin, options)
        if is_async:
            self._background.submit(partial(_write_after, wait, write))
            return
        with part_expected():  # the values were checked above
            if sharded:
                write()  # `write` contains an agreement of its ranks
            else:
                self._agree(write)

    def _agree(self, check: Callable[[], _T]) -> _T:
        """Call :func:`agree` with a process group on the host, where all values to save or load are."""
        group = self._group.weak()
        assert group is not None, "the process groups have been destroyed"
        return agree(check, group)

    def _live(self) -> list[Tensor]:
        """Return the local tensors that training changes: of the module, and of the optimizers' states."""
        states = (state for optimizer in self._module.trainer.optimizers for state in optimizer.state.values())
        values = (value for state in states for value in state.values() if isinstance(value, Tensor))
        tensors = [*self._module.state_dict().values(), *values]
        return [to_local(tensor) for tensor in tensors if isinstance(tensor, Tensor) and not tensor.is_meta]

    def _prepare(self, checkpoint: dict[str, Any], path: Any, plugin: CheckpointIO, options: Any) -> Callable[[], None]:
        """Return a function that writes this rank's part of a checkpoint. For a directory, it is a collective too."""
        if self._settings.save_distributed_checkpoint:
            return self._sharded.prepare(checkpoint, place_of(path))
        if self._mesh.is_first:
            return lambda: plugin.save_checkpoint(checkpoint, path, storage_options=options)
        return lambda: None

    def remove(self, path: Any, plugin: CheckpointIO) -> None:
        """Remove a checkpoint on global rank 0; other ranks do nothing.

        It is removed after the pending writes, and only if all of them succeed, because until then it may be the only
        complete checkpoint.
        """
        if not self._mesh.is_first:
            return
        if self._background.jobs:
            self._background.submit(lambda: plugin.remove_checkpoint(path), if_all_succeeded=True)
        else:
            plugin.remove_checkpoint(path)

    def finish(self) -> None:
        """Wait for pending writes. Without any, this is not a collective.

        Raises:
            OSError: If a checkpoint could not be written; on every rank.
        """
        if not self._background.jobs:
            return
        error = self._background.wait()

        def check() -> None:
            if error is not None:
                raise error

        self._agree(check)

    def close(self) -> None:
        """Wait for this rank's pending writes without communication, because other ranks may have exited.

        Raises:
            OSError: If this rank could not write a checkpoint.
        """
        self._is_in_run = False
        error = self._background.wait()
        if error is not None:
            raise error

    # -- loading -------------------------------------------------------------------------------------------------------

    def load(self, path: Any, plugin: CheckpointIO, weights_only: bool | None) -> dict[str, Any]:
        """Read a checkpoint. The weights of a directory are read directly into the module.

        If the run resumes from this checkpoint, the progress of training is kept, to be restored when training starts.

        Args:
            path: A file or a directory.
            plugin: Reads files.
            weights_only: As for `torch.load`.

        Returns:
            The checkpoint. Tensors of a large file are mapped into memory. For a directory, its state dict contains the
            module's own tensors, and the states of optimizers are not read yet (:class:`~.sharded.SavedOptimizer`).

        Raises:
            FileNotFoundError, ValueError: If the checkpoint does not exist, is incomplete or damaged, or is something
                else; on every rank.
            UnpicklingError: If it contains objects that `weights_only` does not allow; on every rank.
            OSError: If a pending checkpoint could not be written, or a node has no space for a copy of a file that is
                only on other nodes; on every rank.
            RuntimeError: If a directory contains another model; on every rank.
        """
        self.finish()
        place, is_http = place_of(path), str(path).startswith("http")
        is_usual = type(plugin) in FILE_PLUGINS and not is_http  # Lightning downloads such files itself
        hosts, group = self._mesh.hosts, self._mesh.decision_group
        with at_hand(place, hosts, group) if is_usual else nullcontext(place) as found:
            load = partial(plugin.load_checkpoint, weights_only=weights_only)
            read = partial(self._read, found, path, load, is_usual=is_usual, weights_only=weights_only)
            checkpoint = self._agree(read)
        self._read_from = path
        self._training_state.load(checkpoint, checkpoint.get(METADATA, {}), path, self._module.trainer)
        return checkpoint

    def _read(
        self, found: Place, path: Any, load: Callable[[Any], Any], *, is_usual: bool, weights_only: bool | None
    ) -> dict[str, Any]:
        """Read a checkpoint on this rank, without communication.

        Args:
            found: The place where this rank finds it: the requested place, or a copy on this node.
            path: The requested place.
            load: Reads files.
            is_usual: True if `load` reads ordinary files, so that the place can be examined first.
            weights_only: As for `torch.load`.
        """
        if (is_usual or isinstance(found, Path)) and is_directory(found, or_unfinished=is_usual):
            strict, load_value = self._module.strict_loading, partial(torch.load, weights_only=weights_only)
            checkpoint = self._sharded.load(found, strict=strict, read_extra=load, load_value=load_value)
        elif not is_usual:
            checkpoint = load(path)
        elif isinstance(found, Path) and found.exists():
            trainer = self._module.trainer
            verify(found, share=(trainer.local_rank, trainer.num_devices))  # each process of this node verifies a part
            checkpoint = load(found)
        else:
            machines = ", ".join(dict.fromkeys(self._mesh.hosts))
            raise FileNotFoundError(f"Checkpoint file not found: {path} (searched on {machines}). [LH913]")
        check_kind(checkpoint, path)
        return checkpoint

    def load_module_state(self, state: Mapping[str, Any], *, strict: bool) -> None:
        """Load this rank's part of the full state dict of the module. This is not a collective.

        Args:
            state: The full state dict.
            strict: If True, names that only the module or only the state dict has are an error.

        Raises:
            RuntimeError: If names or shapes do not match; on every rank, and nothing is loaded.
        """
        load_module_state(self._module, state, strict=strict)

    def load_optimizer_states(self, optimizers: Sequence[Optimizer], states: Sequence[Any]) -> None:
        """Load this rank's part of the full states of the optimizers.

        Args:
            optimizers: The optimizers of the run.
            states: The entry ``"optimizer_states"`` of a checkpoint from :meth:`load`, or full states.

        Raises:
            ValueError: If the optimizers or their groups do not match the checkpoint; on every rank.
        """
        try:
            if self._sharded.wrote(states):
                self._agree(lambda: self._sharded.load_optimizer_states(optimizers, states))
            else:
                self._full.load_optimizer_states(optimizers, states)
        except ValueError as error:
            raise ValueError(f"{self._read_from or 'A state'}: {error}") from None


def _write_after(wait: Callable[[], None] | None, write: Callable[[], None]) -> None:
    if wait is not None:
        wait()
    write()
