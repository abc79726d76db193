"""A checkpoint as a directory: every rank writes its part under the names of the undivided model."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_hybrid.checkpoint.full import check_number
from lightning_hybrid.checkpoint.optimizer_state import OptimizerStates
from lightning_hybrid.checkpoint.ownership import Ownership
from lightning_hybrid.checkpoint.state_dict_match import check_match, with_versions
from lightning_hybrid.checkpoint.storage.dcp import EXTRA, DistributedCheckpoint, write_directory
from lightning_hybrid.checkpoint.tree_paths import TreePath, leaves, tree_of, value_at, without
from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.distributed.tree_broadcast import broadcast_object
from lightning_hybrid.pipeline_parallel.placeholders import PlaceholderBuffer, is_placeholder

__all__ = ["ShardedCheckpoint"]

_MODEL, _OPTIMIZERS = "state_dict", "optimizer_states"
_OF_FSDP = "model"  # what Lightning's FSDP strategy calls the state of the module


class SavedOptimizer:
    """The state of one optimizer in a directory, not read yet.

    Args:
        directory: The directory.
        number: The optimizer's.
    """

    def __init__(self, directory: DistributedCheckpoint, number: int) -> None:
        self._directory = directory
        self._root = f"optimizer_{number}"

    def read(self, like: Mapping[str, Tensor]) -> dict[str, Any]:
        """The state by name.

        Args:
            like: The parameters whose state is wanted; it is divided, and lies on the device, as they do.
        """
        targets: dict[TreePath, Tensor | None] = {}
        for place, entry in self._directory.entries.items():
            if place[0] != self._root or (place[1] == "state" and place[2] not in like):
                continue
            size = getattr(entry, "size", None)
            if size is None:
                targets[place] = None
            elif place[1] == "state":
                targets[place] = _empty_like(entry, like[place[2]])
            else:
                targets[place] = torch.empty(size, dtype=entry.properties.dtype)
        found = targets | self._directory.read(targets)
        return {"state": {}, **tree_of({place[1:]: value for place, value in found.items()})}


class ShardedCheckpoint:
    """Writes and reads the parts of this rank.

    Args:
        module: The user's module, with placeholders for what lives elsewhere.
        ownership: Whose values count.
        optimizers: The undivided optimizers.
        mesh: The ranks.
    """

    def __init__(self, module: LightningModule, ownership: Ownership, optimizers: OptimizerStates, mesh: Mesh) -> None:
        self._module = module
        self._ownership = ownership
        self._optimizers = optimizers
        self._mesh = mesh

    def writing(self, checkpoint: dict[str, Any], path: Path) -> Callable[[], None]:
        """Prepare what this rank writes.

        Args:
            checkpoint: As the Trainer made it, with the state dict of the module and the states by name of the
                optimizers as this rank knows them.
            path: The place; the first rank's counts.

        Returns:
            What writes it, to be called on every rank.

        Raises:
            ValueError: If parts of the model have no names; on every rank.
        """
        group = self._mesh.world_group
        tables = [place for place in self._tables(checkpoint) if place[0] != _OPTIMIZERS]
        odd = [place for place in tables if not isinstance(value_at(checkpoint, place), dict)]
        path, tables, odd = broadcast_object((path, tables, odd), 0, group)
        if odd:
            raise ValueError(
                f"The checkpoint has parts of the model in a list or tuple at {'.'.join(map(str, odd[0]))}. Every rank"
                " adds its part to a directory by name: let the callback keep a dict, or use"
                " save_distributed_checkpoint=False."
            )
        entries = dict(self._entries(checkpoint, tables))
        for number, state in enumerate(checkpoint.get(_OPTIMIZERS, [])):
            entries |= dict(self._optimizer_entries(f"optimizer_{number}", state))
        if any(checkpoint.get(_OPTIMIZERS, [])):  # otherwise nothing is optimized, which is worth knowing too
            tables.append((_OPTIMIZERS,))
        extra = without(checkpoint, tables) if self._mesh.is_first else None
        return lambda: write_directory(path, entries, extra, group)

    @staticmethod
    def _tables(checkpoint: dict[str, Any]) -> list[TreePath]:
        """The dicts that hold parts of the model: its state dict, and copies of it that callbacks keep."""
        divided = (place[:-1] for place, leaf in leaves(checkpoint) if isinstance(leaf, DTensor) or _is_meta(leaf))
        return list(dict.fromkeys([(_MODEL,), *divided]))

    def _entries(self, checkpoint: dict[str, Any], tables: Sequence[TreePath]) -> Iterator[tuple[TreePath, Any]]:
        """What this rank writes: parameters on every holder, as torch chooses who does; the rest on one rank."""
        first, owners = self._ownership.first_names(), self._ownership.owners_of_names()
        is_one = self._mesh.data_rank == 0 and self._mesh.tensor_rank == 0
        for place in tables:
            table = value_at(checkpoint, place) or {}
            others = self._ownership.owners([name for name in table if name not in owners])
            for name, value in table.items():
                if _is_meta(value) or (first.get(name, name) != name and first[name] in table):
                    continue
                is_owner = is_one and (others.get(name) == self._mesh.pipeline_rank or name not in first)
                if name in owners or isinstance(value, DTensor) or is_owner:
                    yield (*place, name), value

    def _optimizer_entries(self, root: str, state: Mapping[str, Any]) -> Iterator[tuple[TreePath, Any]]:
        for name, values in state.get("state", {}).items():
            for key, value in values.items():
                yield (root, "state", name, key), value
        if dist.get_rank() == dist.get_world_size() - 1:  # the first rank writes what is no tensor meanwhile
            for key in state:
                if key != "state":
                    yield from _flat(state[key], (root, key))

    def load(self, path: Path, *, strict: bool, read_extra: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
        """Read the weights into the module, after everything was compared; the same outcome on every rank.

        Args:
            path: The directory.
            strict: Whether names that only one of module and checkpoint has are an error.
            read_extra: Reads a file that `torch.save` has written.

        Returns:
            The checkpoint: its state dict is that of the module, and its optimizers' states are not read yet.

        Raises:
            FileNotFoundError, ValueError: If there is no complete checkpoint.
            RuntimeError: If names or shapes do not fit.
        """
        directory = DistributedCheckpoint(path)
        root = _MODEL if directory.below(_MODEL) else _OF_FSDP
        saved = directory.below(root)
        state = self._module.state_dict()
        sources = self._sources(state, {place[0] for place in saved})
        shapes = {name: _size(saved[(source,)]) for name, source in sources.items()}
        unexpected = {place[0]: torch.Size() for place in saved if place[0] not in state}
        own = {name: _size_of(value) for name, value in state.items()}
        check_match(self._module, own, shapes | unexpected, strict=strict)
        directory.check_files()
        extra = directory.path / EXTRA
        checkpoint = read_extra(extra) if extra.is_file() else {}
        self._read_module(directory, root, state, sources)
        checkpoint[_MODEL] = OrderedDict((name, state[name]) for name in sources)
        with_versions(checkpoint[_MODEL], state)
        numbers = {place[0] for place in directory.entries if re.fullmatch(r"optimizer_\d+", str(place[0]))}
        if numbers:
            checkpoint[_OPTIMIZERS] = [SavedOptimizer(directory, number) for number in range(len(numbers))]
        self._read_tables(directory, {root, *numbers}, checkpoint)
        return checkpoint

    def _sources(self, state: Mapping[str, Any], saved: set[str]) -> dict[str, str]:
        """Under which name the value of each name was saved: tied tensors have several, and any of them will do."""
        first = self._ownership.first_names()
        alias = {first.get(name, name): name for name in reversed(list(state)) if name in saved}
        return {name: alias[first.get(name, name)] for name in state if first.get(name, name) in alias}

    def _read_module(
        self, directory: DistributedCheckpoint, root: str, state: dict[str, Any], sources: Mapping[str, str]
    ) -> None:
        targets: dict[TreePath, Tensor | None] = {}
        for name, source in sources.items():
            if not isinstance(state[name], Tensor):
                targets[root, source] = None
            elif not is_placeholder(state[name]) and not state[name].is_meta:
                targets[root, source] = state[name]
        values = directory.read(targets)
        state.update({name: values[root, source] for name, source in sources.items() if (root, source) in values})

    def _read_tables(self, directory: DistributedCheckpoint, known: set[str], checkpoint: dict[str, Any]) -> None:
        """Copies of the model that callbacks keep: divided as the module is, and without values for other stages."""
        like = self._ownership.tensors()
        tied = [(name, own) for name, own in self._ownership.first_names().items() if name != own]
        targets: dict[TreePath, Tensor | None] = {}
        for place, entry in directory.entries.items():
            if place[0] not in known:
                targets[place] = _empty_like(entry, like.get(place[-1])) if _size(entry) is not None else None
        values = directory.read({place: target for place, target in targets.items() if not _is_meta(target)})
        for place, value in (targets | values).items():
            node = checkpoint
            for key in place[:-1]:
                node = node.setdefault(key, {})
            node[place[-1]] = value
            node.update({name: value for name, own in tied if own == place[-1]})

    @staticmethod
    def wrote(states: Sequence[Any]) -> bool:
        """Whether these states of optimizers come from a directory."""
        return any(isinstance(state, SavedOptimizer) for state in states)

    def load_optimizer_states(self, optimizers: Sequence[Optimizer], states: Sequence[Any]) -> None:
        """Read the states of this rank's parameters.

        Raises:
            ValueError: If the optimizers, or their groups, are not those of the checkpoint.
        """
        check_number(optimizers, states)
        for optimizer, saved in zip(optimizers, states, strict=True):
            self._optimizers.load(optimizer, saved.read(self._optimizers.held(optimizer)))


def _is_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _size(entry: Any) -> torch.Size | None:
    """The shape of a tensor that was written; nothing for another value."""
    return getattr(entry, "size", None)


def _size_of(value: Any) -> torch.Size | None:
    return value.shape if isinstance(value, Tensor) else None


def _empty_like(entry: Any, tensor: Tensor | None) -> Tensor:
    """Where to read what was saved for a tensor: divided as that is, if it has its shape."""
    size, dtype = entry.size, entry.properties.dtype
    if tensor is None or tensor.shape != size:
        return torch.empty(size, dtype=dtype)
    if is_placeholder(tensor):
        return torch.empty(size, dtype=dtype, device="meta").as_subclass(PlaceholderBuffer)
    return torch.empty_like(tensor.detach(), dtype=dtype)


def _flat(tree: Any, place: TreePath) -> Iterator[tuple[TreePath, Any]]:
    """Values with their places; a list of plain values is one value."""
    if isinstance(tree, dict):
        for key, child in tree.items():
            yield from _flat(child, (*place, key))
    elif isinstance(tree, list) and any(isinstance(child, (dict, Tensor)) for child in tree):
        for index, child in enumerate(tree):
            yield from _flat(child, (*place, index))
    else:
        yield place, tree
