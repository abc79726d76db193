"""A checkpoint in a directory: every rank writes what it holds, and reads what it needs, of whatever was written.

The format is that of `torch.distributed.checkpoint`, arranged as Lightning's own strategies do::

    step=100.ckpt/
        .metadata         names, shapes, and which bytes of which file hold which rectangle; written last
        __0_0.distcp      what rank 0 wrote
        __1_0.distcp      what rank 1 wrote
        meta.pt           everything that is no tensor of the model or an optimizer

So it can be opened with torch alone: `torch.distributed.checkpoint.format_utils.dcp_to_torch_save`.
"""

from __future__ import annotations

import dataclasses
import io
import os
import re
import socket
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from lightning_hybrid.checkpoint.storage.atomic import MARK, commit, recover, resolve, rollback, unfinished, wait_for
from lightning_hybrid.checkpoint.storage.checksums import verify
from lightning_hybrid.checkpoint.storage.chunks import local_chunks
from lightning_hybrid.checkpoint.storage.disks import NOT_SHARED
from lightning_hybrid.checkpoint.storage.unpickle import read_harmless
from lightning_hybrid.distributed.pytree import TreePath

MODEL, OPTIMIZERS = "state_dict", "optimizer_states"  # what Lightning calls them in a checkpoint

_EXTRA = "meta.pt"
_MODEL_OF_FSDP = "model"  # what Lightning's FSDP strategy calls the state of the module in a directory


def write_directory(path: Path, entries: Mapping[TreePath, Any], extra: Any, group: dist.ProcessGroup) -> None:
    """Write a directory that appears under its name when it is complete; called by every rank of the group.

    Args:
        path: Where; what is there, a file or a directory, stays until then.
        entries: What this rank has; values of different ranks under one name are equal, or shards of one tensor, and
            are written once.
        extra: What goes into ``meta.pt``; only the first rank's counts.
        group: The ranks, over a backend that takes tensors of the host.

    Raises:
        OSError: If a rank could not write; on every rank.
    """
    names = {".".join(map(str, tree_path)): tree_path for tree_path in entries}
    flat = {name: entries[tree_path] for name, tree_path in names.items()}
    try:
        # Under one name: of every name at the top torch makes a note in its log.
        save({"": flat}, storage_writer=_Writer(path, extra), planner=_SavePlanner(names), process_group=group)
    except CheckpointException as error:
        if dist.get_rank(group) == 0:
            rollback(path)
        failures = [f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in error.failures.items()]
        raise OSError(
            f"The checkpoint {path} could not be written; what was there before is as it was. {'; '.join(failures[:4])}"
        ) from error


class _Writer(FileSystemWriter):
    """Writes into a hidden directory, which the first rank makes and renames when all have written.

    The first rank's part is done where torch waits for it, and makes it fail on every rank.
    """

    def __init__(self, path: Path, extra: Any) -> None:
        super().__init__(unfinished(path))
        self._path, self._new, self._extra = path, unfinished(path), extra
        self._is_first = False
        self._hosts: list[str] = []  # by rank

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin: no rank writes before the first one has made its plan."""
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        self._is_first = is_coordinator
        if is_coordinator:
            recover(self._path)
            rollback(self._path)
            self._new.mkdir(parents=True, exist_ok=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan, with the name of this rank's host in ``storage_data``, which the first rank takes out again.

        Torch's own is not called: it makes the directory, which may be one that the first rank is just removing.
        """
        return dataclasses.replace(plan, storage_data=socket.gethostname())

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Torch's own, which puts the names of files into ``storage_data``; keep the hosts."""
        self._hosts = [plan.storage_data for plan in plans]
        return super().prepare_global_plan([dataclasses.replace(plan, storage_data=None) for plan in plans])

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part; what is no tensor before it, so that the disk has it by the time it is asked for.

        Raises:
            OSError: If there is not the directory that the first rank has made.
        """
        if not wait_for(self._new.is_dir):
            raise FileNotFoundError(
                f"{socket.gethostname()} does not see the folder {str(self._new)!r} that rank 0 has made. {NOT_SHARED}"
            )
        if self._is_first:
            with (self._new / _EXTRA).open("wb") as file:  # whose errors say what is wrong
                torch.save(self._extra, file)
        return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: Any) -> None:
        """End, on the first rank, after all have written.

        Raises:
            OSError: If what another rank has written is not here.
        """
        for host, parts in zip(self._hosts, results, strict=True):
            for name, size in _file_sizes(part.storage_data for part in parts).items():
                _check_seen(self._new / name, size, host)
        with (self._new / _EXTRA).open("rb") as file:
            os.fsync(file.fileno())
        super().finish(metadata, results)
        commit(self._path)


def _file_sizes(places: Iterable[Any]) -> dict[str, int]:
    """The sizes that files have at least, by name.

    Args:
        places: Where values are, as torch says it: a file, and the first byte and the number of bytes in it.
    """
    sizes: dict[str, int] = {}
    for place in places:
        sizes[place.relative_path] = max(sizes.get(place.relative_path, 0), place.offset + place.length)
    return sizes


def _check_seen(file: Path, size: int, host: str) -> None:
    """Make sure that what a host has written can be read here."""
    if not wait_for(lambda: file.is_file() and file.stat().st_size >= size):
        raise FileNotFoundError(
            f"{socket.gethostname()} does not see {size} bytes of {str(file)!r}, which {host} has written. {NOT_SHARED}"
        )


class _SavePlanner(DefaultSavePlanner):
    """Writes the local chunks of every tensor; torch's own planner writes one rectangle per shard."""

    def __init__(self, names: dict[str, TreePath]) -> None:
        super().__init__(flatten_state_dict=True)  # that is, the plan has the path of each name
        self.mappings = names

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Take what is to be written."""
        self.state_dict, self.is_coordinator = state_dict[""], is_coordinator
        self._chunks: dict[MetadataIndex, Tensor] = {}

    def create_local_plan(self) -> SavePlan:
        """One item for each chunk, and for each value that is no tensor."""
        items = [item for name, value in self.state_dict.items() for item in self._items(name, value)]
        self.plan = SavePlan(items, planner_data=self.mappings)
        return self.plan

    def _items(self, name: str, value: Any) -> list[WriteItem]:
        if not isinstance(value, Tensor):
            return [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)]
        items = []
        for offset, chunk in local_chunks(value):
            index = MetadataIndex(name, offset)
            self._chunks[index] = chunk
            rectangle = ChunkStorageMetadata(offset, chunk.size())
            data = TensorWriteData(rectangle, TensorProperties.create_from_tensor(chunk), value.size())
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return items

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The chunk, or the value."""
        return self._chunks[index] if index in self._chunks else self.state_dict[index.fqn]


class DistributedCheckpoint:
    """A checkpoint that was written by :func:`write_directory`, or by one of Lightning's own strategies.

    Args:
        path: The directory.
        load_value: Reads a value that is no tensor, which `torch.save` has written. By default what no code of the
            checkpoint is run for.

    Attributes:
        entries: For each path of the tree the shape and dtype of a tensor, or nothing for another value.
        module_root: The first key of the paths of the module's state.
        optimizer_roots: Those of the optimizers' states, in their order.

    Raises:
        FileNotFoundError: If there is nothing.
        ValueError: If it is no checkpoint, or not a complete one.
    """

    @staticmethod
    def is_at(path: Path, *, or_unfinished: bool = True) -> bool:
        """Whether there is a directory that was written by :func:`write_directory`.

        Args:
            path: Where.
            or_unfinished: Whether one that is not complete, or is no checkpoint at all, counts too.
        """
        found = resolve(path)
        return found.is_dir() and (or_unfinished or (found / MARK).is_file())

    def __init__(self, path: Path, *, load_value: Callable[[BinaryIO], Any] = torch.load) -> None:
        self.path, self._load_value = resolve(path), load_value
        if not self.path.exists():
            raise FileNotFoundError(f"Checkpoint not found: {path}")
        if not (self.path / MARK).is_file():
            raise ValueError(
                f"{path} is no complete checkpoint: it has no file {MARK!r}, which is written last. A save that was"
                " interrupted may have left it; take another one."
            )
        self._reader = FileSystemReader(self.path)
        try:
            with (self.path / MARK).open("rb") as file:
                metadata = read_harmless(file)
            if not isinstance(metadata, Metadata):
                raise TypeError(f"it holds no index, but a {type(metadata).__qualname__}")
        except Exception as error:  # whatever unpickling raises
            raise ValueError(f"The file {self.path / MARK} cannot be read: {type(error).__name__}: {error}") from error
        self._metadata = metadata
        names = self._metadata.planner_data or {}
        self._names = {tuple(names.get(name, (name,))): name for name in self._metadata.state_dict_metadata}
        known = self._metadata.state_dict_metadata
        self.entries = {
            tree_path: entry if isinstance(entry := known[name], TensorStorageMetadata) else None
            for tree_path, name in self._names.items()
        }
        self.module_root = MODEL if self.below(MODEL) else _MODEL_OF_FSDP
        roots = {str(tree_path[0]) for tree_path in self.entries}
        numbers = sorted(int(root.rpartition("_")[2]) for root in roots if re.fullmatch(r"optimizer_\d+", root))
        self.optimizer_roots = [f"optimizer_{number}" for number in numbers]

    def check_files(self) -> None:
        """Make sure that all is there before anything is read.

        Raises:
            ValueError: If files are missing, or shorter than they were.
        """
        for name, size in sorted(_file_sizes(self._metadata.storage_data.values()).items()):
            file = self.path / name
            if not file.is_file():
                raise ValueError(
                    f"The checkpoint {self.path} lacks the file {name!r}, {size} bytes or more, on"
                    f" {socket.gethostname()}."
                )
            if file.stat().st_size < size:
                raise ValueError(
                    f"The checkpoint {self.path} is damaged: the file {name!r} has {file.stat().st_size} bytes of"
                    f" {size} or more."
                )

    def below(self, root: str) -> dict[TreePath, TensorStorageMetadata | None]:
        """The entries whose paths begin with this key, by the rest of the path."""
        return {path[1:]: entry for path, entry in self.entries.items() if path[0] == root}

    def read_extra(self, read: Callable[[Path], Any]) -> dict[str, Any]:
        """What is no tensor of the model or an optimizer.

        Args:
            read: Reads a file that `torch.save` has written.
        """
        extra = self.path / _EXTRA
        if not extra.is_file():
            return {}
        verify(extra)
        found: dict[str, Any] = read(extra)
        return found

    def read(self, targets: Mapping[TreePath, Tensor | None]) -> dict[TreePath, Any]:
        """Read values; each rank on its own.

        Args:
            targets: For each path the tensor to read into, of the shape that was written and sharded in any way;
                ``None`` for a value that is no tensor.

        Returns:
            The values by path, tensors too.

        Raises:
            ValueError: If something of it is not what was written.
        """
        named = {self._names[path]: target for path, target in targets.items()}
        planner = _LoadPlanner(named, self._metadata, self._load_value)
        plan = planner.create_local_plan()
        for index in {item.storage_index: None for item in plan.items}:
            place = self._metadata.storage_data[index]
            offset = list(index.offset or ())
            what = f"{index.fqn!r}{f' from {offset}' if any(offset) else ''}"
            verify(self.path / place.relative_path, offset=place.offset, length=place.length, holds=what)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=False)
        with torch.no_grad():
            self._reader.read_data(plan, planner).wait()
        return {path: planner.values.get(self._names[path], target) for path, target in targets.items()}


class _LoadPlanner(LoadPlanner):
    """Reads the local chunks of every target, whichever chunks were written."""

    def __init__(
        self, targets: Mapping[str, Tensor | None], metadata: Metadata, load_value: Callable[[BinaryIO], Any]
    ) -> None:
        self._targets, self._metadata, self._load_value = targets, metadata, load_value
        self._chunks: dict[MetadataIndex, Tensor] = {}
        self.values: dict[str, Any] = {}

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Nothing: the targets were given when this was made."""

    def create_local_plan(self) -> LoadPlan:
        """What to read from which file."""
        return LoadPlan([item for name, target in self._targets.items() for item in self._items(name, target)])

    def _items(self, name: str, target: Tensor | None) -> list[ReadItem]:
        if target is None:
            index, nothing = MetadataIndex(name), torch.Size((0,))
            return [ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing)]
        chunks = []
        for offset, chunk in local_chunks(target):
            self._chunks[MetadataIndex(name, offset)] = chunk
            chunks.append(ChunkStorageMetadata(offset, chunk.size()))
        entry: Any = self._metadata.state_dict_metadata[name]
        return create_read_items_for_chunk_list(name, entry, chunks)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """As they are: ranks read on their own."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take a value that is no tensor."""
        self.values[read_item.dest_index.fqn] = self._load_value(value)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The part of a chunk that is read from one file."""
        chunk = self._chunks[read_item.dest_index]
        for dim, (begin, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            chunk = chunk.narrow(dim, begin, length)
        return chunk

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing: it was read in place."""
