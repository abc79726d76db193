"""Checkpoints in a directory: every rank writes its shards under the names of the full model.

`Checkpointer` uses a :class:`ShardedCheckpoint` if `save_distributed_checkpoint` is True, and to load any directory.
`Weights` uses one to load initial weights. This file decides which rank writes and reads which value under which name;
:mod:`~.storage.dcp` and :mod:`~.storage.dcp_writer` write and read the files. torch's `get_state_dict` is not used,
because it does not know placeholders, and copies of the model in callbacks.

A *placeholder* replaces a tensor of another stage on this rank. A *table* is a dict of named tensors of the model in a
checkpoint: its state dict, or a copy that a callback saves. Its path is a tuple of keys. A state *by name* has the
names of parameters instead of their numbers, see :class:`~.optimizer_state.OptimizerStates`. An optimizer N is stored
under the *root* ``"optimizer_N"``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_hybrid.axes import AXES
from lightning_hybrid.checkpoint.metadata import METADATA
from lightning_hybrid.checkpoint.optimizer_state import OptimizerStates, check_number
from lightning_hybrid.checkpoint.state_dict_match import check_match, shape_of
from lightning_hybrid.checkpoint.storage.dcp import MODEL, OPTIMIZERS, DistributedCheckpoint
from lightning_hybrid.checkpoint.storage.dcp_writer import write_directory
from lightning_hybrid.checkpoint.storage.remote import Place
from lightning_hybrid.checkpoint.tree_paths import insert, tree_of, value_at, without
from lightning_hybrid.data_parallel.parameter_map import ParameterMap
from lightning_hybrid.distributed.messages.tree_broadcast import broadcast_object
from lightning_hybrid.distributed.pytree import TreePath, flatten_with_path
from lightning_hybrid.pipeline_parallel.placeholders import PlaceholderBuffer, is_placeholder
from lightning_hybrid.torch_internals import layer_metadata, set_layer_metadata

_EXTRA_STATE = "_extra_state"  # the suffix of the names of non-tensor values that a layer saves


class SavedOptimizer:
    """The state of one optimizer in a directory, which has not been read yet.

    Args:
        directory: The directory.
        root: The first key of its paths, such as ``"optimizer_0"``.
    """

    def __init__(self, directory: DistributedCheckpoint, root: str) -> None:
        self._directory = directory
        self._root = root

    def read(self, parameters: Mapping[str, Tensor]) -> dict[str, Any]:
        """Read the state of some parameters, and the groups, as a state by name. This is not a collective.

        Args:
            parameters: The parameters whose state is read, by name. The state has the sharding and the device of its
                parameter if it has the shape of the parameter; otherwise it is a plain tensor on the host.

        Raises:
            ValueError: If a value differs from the value that was written.
        """
        targets = {
            path: _empty_like(entry, parameters[path[2]] if path[1] == "state" else None)
            for path, entry in self._directory.entries.items()
            if path[0] == self._root and (path[1] != "state" or path[2] in parameters)
        }
        values = self._directory.read(targets)
        return {"state": {}, **tree_of({path[1:]: value for path, value in values.items()})}


class ShardedCheckpoint:
    """The writer and reader of this rank's shards.

    Args:
        module: The user's module, with placeholders for tensors of other stages.
        parameters: The places of the module's tensors.
        optimizers: The states of the full optimizers.
    """

    def __init__(self, module: LightningModule, parameters: ParameterMap, optimizers: OptimizerStates) -> None:
        self._module = module
        self._map = parameters
        self._optimizers = optimizers
        self._mesh = parameters.mesh

    def metadata_of(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return information about the module's state dict, because a directory does not contain the state dict itself.

        Returns:
            Under ``"names"``, all names in their order, with the name under which each value is stored. Under
            ``"layers"``, the `_metadata` of the state dict, such as the versions of layers.
        """
        metadata: dict[str, Any] = {"names": self._map.stored_names(state)}
        layers = layer_metadata(state)
        if layers is not None:
            metadata["layers"] = {name: dict(layer) for name, layer in layers.items()}
        return metadata

    def prepare(self, checkpoint: dict[str, Any], path: Place) -> Callable[[], None]:
        """Collect the values that this rank writes. Every rank must call this.

        Args:
            checkpoint: The Trainer's checkpoint, with this rank's part of the module's state dict, and of the
                optimizers' states by name.
            path: The directory. The path of the first rank is used.

        Returns:
            A function that writes the values, which every rank must call.

        Raises:
            ValueError: If tensors of the model have no names; on every rank.
        """
        group = self._mesh.writing_group
        tables = self._tables(checkpoint)
        unnamed = [table for table in tables if not isinstance(value_at(checkpoint, table), dict)]
        path, tables, unnamed = broadcast_object((path, tables, unnamed), 0, group)
        if unnamed:
            raise ValueError(
                f"The checkpoint contains tensors of the model in a list or tuple at {'.'.join(map(str, unnamed[0]))},"
                " but a sharded checkpoint stores tensors by name. Save a dictionary instead of the list or tuple in"
                " the callback, or set save_distributed_checkpoint=False. [LH910]"
            )
        entries = dict(self._entries(checkpoint, tables))
        for number, state in enumerate(checkpoint.get(OPTIMIZERS, [])):
            entries |= dict(self._optimizer_entries(f"optimizer_{number}", state))
        if any(checkpoint.get(OPTIMIZERS, [])):  # otherwise the checkpoint has no optimizers, which a reader can see
            tables.append((OPTIMIZERS,))
        extra = without(checkpoint, tables) if self._mesh.is_first else None
        return lambda: write_directory(path, entries, extra, group)

    @staticmethod
    def _tables(checkpoint: dict[str, Any]) -> list[TreePath]:
        """Return the paths of dicts with tensors of the model: its state dict, and copies that callbacks save."""
        tensors = (path for path, leaf in flatten_with_path(checkpoint) if isinstance(leaf, DTensor) or _is_meta(leaf))
        return list(dict.fromkeys([(MODEL,), *(path[:-1] for path in tensors if path[0] != OPTIMIZERS)]))

    def _entries(self, checkpoint: dict[str, Any], tables: Sequence[TreePath]) -> Iterator[tuple[TreePath, Any]]:
        """Yield the values that this rank offers to write, by path.

        All holders of a parameter offer it, and torch chooses the rank that writes it. A value that is sharded over
        replicas or context-parallel ranks is also offered by all holders. Other values are offered by one rank. If a
        buffer is sharded over the tensor-parallel ranks, only the tensor-parallel ranks of the first replica offer it,
        because other replicas may have other values, which torch would mix.
        """
        first, parameters = self._map.first_names(), self._map.parameter_owners()
        is_first = self._mesh.data_rank == self._mesh.context_rank == 0
        for path in tables:
            table = value_at(checkpoint, path) or {}
            owners = self._map.owners(table)
            for name, value in table.items():
                if _is_meta(value) or (first.get(name, name) != name and first[name] in table):
                    continue
                is_unknown = name not in first and not name.endswith(_EXTRA_STATE)
                counts = is_first and (owners[name] == self._mesh.pipeline_rank or is_unknown)
                has_part = isinstance(value, DTensor) or self._mesh.tensor_rank == 0
                if name in parameters or _lies_over_others(value) or (counts and has_part):
                    yield (*path, name), value

    def _optimizer_entries(self, root: str, state: Mapping[str, Any]) -> Iterator[tuple[TreePath, Any]]:
        for name, values in state.get("state", {}).items():
            for key, value in values.items():
                yield (root, "state", name, key), value
        if dist.get_rank() == dist.get_world_size() - 1:  # the first rank is writing the other values meanwhile
            for key in state:
                if key != "state":
                    yield from (((root, key, *path), value) for path, value in flatten_with_path(state[key], _is_plain))

    def load(
        self,
        path: Place,
        *,
        strict: bool,
        read_extra: Callable[[Path], dict[str, Any]],
        load_value: Callable[[BinaryIO], Any] = torch.load,
    ) -> dict[str, Any]:
        """Read the weights into the module, after all names and shapes were compared.

        This is not a collective. The comparison has the same outcome on all ranks, but a damaged or missing file may
        concern only some ranks, so the callers use :func:`agree`.

        Args:
            path: The directory.
            strict: If True, names that only the module or only the checkpoint has are an error.
            read_extra: Reads a file that `torch.save` has written.
            load_value: Reads a single value that `torch.save` has written.

        Returns:
            The checkpoint. Its state dict contains the module's tensors, and the optimizers' states have not been read
            yet: they are :class:`SavedOptimizer` objects.

        Raises:
            FileNotFoundError, ValueError: If the directory contains no complete checkpoint, or is damaged.
            RuntimeError: If names or shapes do not match.
        """
        directory = DistributedCheckpoint(path, load_value=load_value)
        saved = {entry_path[0]: entry for entry_path, entry in directory.below(directory.module_root).items()}
        state = self._module.state_dict()
        sources = self._sources(state, saved)
        sizes = {name: entry.size if entry else None for name, entry in saved.items()}
        shapes = {name: sizes[source] for name, source in sources.items()}
        unexpected = {name: torch.Size() for name in saved if name not in state}
        own = {name: shape_of(value) for name, value in state.items()}
        check_match(self._module, own, shapes | unexpected, strict=strict)
        directory.check_files()
        checkpoint = directory.read_extra(read_extra)
        self._read_module(directory, state, sources)
        checkpoint[MODEL] = OrderedDict((name, state[name]) for name in sources)
        layers = checkpoint.get(METADATA, {}).get("layers", layer_metadata(state))
        if layers is not None:
            set_layer_metadata(checkpoint[MODEL], layers)
        if directory.optimizer_roots:
            checkpoint[OPTIMIZERS] = [SavedOptimizer(directory, root) for root in directory.optimizer_roots]
        self._read_tables(directory, checkpoint)
        return checkpoint

    def _sources(self, state: Mapping[str, Any], saved: Collection[str]) -> dict[str, str]:
        """Return for each name the name under which its value was saved, which may be any name of a tied tensor."""
        stored = self._map.stored_names(state)
        alias = {stored[name]: name for name in reversed(list(state)) if name in saved}
        return {name: alias[stored[name]] for name in state if stored[name] in alias}

    @staticmethod
    def _read_module(directory: DistributedCheckpoint, state: dict[str, Any], sources: Mapping[str, str]) -> None:
        root = directory.module_root
        targets: dict[TreePath, Tensor | None] = {}
        for name, source in sources.items():
            value = state[name]
            if not isinstance(value, Tensor):
                targets[root, source] = None
            elif not is_placeholder(value) and not value.is_meta:
                targets[root, source] = value
        values = directory.read(targets)
        state.update({name: values[root, source] for name, source in sources.items() if (root, source) in values})

    def _read_tables(self, directory: DistributedCheckpoint, checkpoint: dict[str, Any]) -> None:
        """Read the copies of the model that callbacks save: sharded like the module, with placeholders."""
        tensors = self._map.tensors()
        known = {directory.module_root, *directory.optimizer_roots}
        targets = {
            path: _empty_like(entry, tensors.get(path[-1]))
            for path, entry in directory.entries.items()
            if path[0] not in known
        }
        values = directory.read({path: target for path, target in targets.items() if not _is_meta(target)})
        insert(checkpoint, targets | values, self._map.first_names())

    @staticmethod
    def wrote(states: Sequence[Any]) -> bool:
        """Return True if these states of optimizers come from a directory."""
        return any(isinstance(state, SavedOptimizer) for state in states)

    def load_optimizer_states(self, optimizers: Sequence[Optimizer], states: Sequence[Any]) -> None:
        """Read and load the states of this rank's parameters. This is not a collective.

        Args:
            optimizers: The optimizers of the run.
            states: A :class:`SavedOptimizer` for each of them.

        Raises:
            ValueError: If the optimizers or their groups do not match the checkpoint, or a value is damaged.
        """
        check_number(optimizers, states)
        for optimizer, saved in zip(optimizers, states, strict=True):
            self._optimizers.load(optimizer, saved.read(self._optimizers.local_parameters(optimizer)))


def _lies_over_others(value: Any) -> bool:
    """Return True if a tensor is sharded over an axis whose ranks average gradients, such as the replicas."""
    axes = (value.device_mesh.mesh_dim_names or ()) if isinstance(value, DTensor) else ()
    return any(axis.name in axes for axis in AXES if axis.role.averages_gradients)


def _is_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _empty_like(entry: TensorStorageMetadata | None, tensor: Tensor | None) -> Tensor | None:
    """Return the tensor into which a saved value is read, sharded like the module's tensor if the shapes are equal.

    Args:
        entry: The saved shape and dtype; ``None`` for a value that is not a tensor.
        tensor: The module's tensor; ``None`` if it has none.

    Returns:
        An uninitialized tensor; ``None`` for a value that is not a tensor.
    """
    if entry is None:
        return None
    size, dtype = entry.size, entry.properties.dtype
    if tensor is None or tensor.shape != size:
        return torch.empty(size, dtype=dtype)
    if is_placeholder(tensor):
        return torch.empty(size, dtype=dtype, device="meta").as_subclass(PlaceholderBuffer)
    return torch.empty_like(tensor.detach(), dtype=dtype)


def _is_plain(node: Any) -> bool:
    """Return True if a node is a single value of an optimizer's group: a tuple, or a list of plain values."""
    if isinstance(node, list):
        return not any(isinstance(child, (dict, Tensor)) for child in node)
    return isinstance(node, tuple)
