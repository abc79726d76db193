"""Writing a checkpoint into a directory: every rank writes what it holds, and it appears when all have written.

On a disk it is renamed then; elsewhere `.metadata`, which names the files that count, is written last.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import socket
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from lightning_hybrid.checkpoint.storage.atomic import MARK, commit, recover, rollback, unfinished, wait_for
from lightning_hybrid.checkpoint.storage.checksums import checksum_of
from lightning_hybrid.checkpoint.storage.chunks import local_chunks
from lightning_hybrid.checkpoint.storage.dcp import EXTRA, sizes_at_least
from lightning_hybrid.checkpoint.storage.disks import NOT_SHARED
from lightning_hybrid.checkpoint.storage.remote import Place, RemotePath
from lightning_hybrid.distributed.pytree import TreePath


def write_directory(path: Place, entries: Mapping[TreePath, Any], extra: Any, group: dist.ProcessGroup) -> None:
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
    writer = _DiskWriter(path, extra) if isinstance(path, Path) else _RemoteWriter(path, extra)
    try:
        # Under one name: of every name at the top torch makes a note in its log.
        save({"": flat}, storage_writer=writer, planner=_SavePlanner(names), process_group=group)
    except CheckpointException as error:
        if dist.get_rank(group) == 0:
            writer.rollback()
        failures = [f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in error.failures.items()]
        text = (
            f"The checkpoint {path} could not be written. If an earlier checkpoint exists at this path, it is"
            " unchanged."
        )
        if any(isinstance(cause, NotAnsweredError) for cause, _ in error.failures.values()):
            text = (
                f"The store did not confirm that the checkpoint {path} was written. The path now contains either this"
                " checkpoint or an earlier one, and both are complete."
            )
        raise OSError(f"{text} Error on {'; '.join(failures[:4])} [LH911]") from error


class NotAnsweredError(OSError):
    """A store may have taken what says that a checkpoint counts, or not."""


class _Writer(FileSystemWriter):
    """Knows the hosts of ranks, and begins on the first one, whose part is done where torch waits for it.

    What fails there fails on every rank.
    """

    def __init__(self, folder: str | Path, extra: Any) -> None:
        super().__init__(folder)
        self._extra = extra
        self._is_first = False
        self._hosts: list[str] = []  # by rank

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin: no rank writes before the first one has made its plan."""
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        self._is_first = is_coordinator
        if is_coordinator:
            self._begin()

    def _begin(self) -> None:
        """On the first rank, before any of them writes."""

    @abstractmethod
    def rollback(self) -> None:
        """Remove what is unfinished, as far as that is possible."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan, with the name of this rank's host in ``storage_data``, which the first rank takes out again.

        Torch's own is not called: it makes the directory, which may be one that the first rank is just removing.
        """
        return dataclasses.replace(plan, storage_data=socket.gethostname())

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Torch's own, which puts the names of files into ``storage_data``; keep the hosts."""
        self._hosts = [plan.storage_data for plan in plans]
        return super().prepare_global_plan([dataclasses.replace(plan, storage_data=None) for plan in plans])


class _DiskWriter(_Writer):
    """Writes into a hidden directory, which the first rank makes and renames when all have written."""

    def __init__(self, path: Path, extra: Any) -> None:
        super().__init__(unfinished(path), extra)
        self._path, self._new = path, unfinished(path)

    def _begin(self) -> None:
        recover(self._path)
        rollback(self._path)
        self._new.mkdir(parents=True, exist_ok=True)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part; what is no tensor before it, so that the disk has it by the time it is asked for.

        Raises:
            OSError: If there is not the directory that the first rank has made.
        """
        if not wait_for(self._new.is_dir):
            raise FileNotFoundError(
                f"{socket.gethostname()} does not see the folder {str(self._new)!r} that rank 0 created. {NOT_SHARED}"
            )
        if self._is_first:
            with (self._new / EXTRA).open("wb") as file:  # whose errors say what is wrong
                torch.save(self._extra, file)
        return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: Any) -> None:
        """End, on the first rank, after all have written.

        Raises:
            OSError: If what another rank has written is not here.
        """
        for host, parts in zip(self._hosts, results, strict=True):
            for name, size in sizes_at_least(part.storage_data for part in parts).items():
                _check_seen(self._new / name, size, host)
        with (self._new / EXTRA).open("rb") as file:
            os.fsync(file.fileno())
        super().finish(metadata, results)
        with (self._new / MARK).open("r+b") as file:
            file.write(checksum_of(file.read()))
            file.flush()
            os.fsync(file.fileno())
        commit(self._path)

    def rollback(self) -> None:
        """Remove what is unfinished, as far as that is possible."""
        rollback(self._path)


class _RemoteWriter(_Writer):
    """Writes beside what is there, under names of its own, and last of all what says that these names count."""

    def __init__(self, path: RemotePath, extra: Any) -> None:
        super().__init__(path.url, extra)
        self.fs, self.path, self.sync_files = _RemoteFiles(), str(path), False
        self._place = path
        self._may_count = False  # whether what says that these files count may have been written

    @property
    def _folder(self) -> RemotePath:
        """Of the first rank's save, the files."""
        return self._place / self.save_id

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Let all ranks write into the folder of the first one."""
        return [
            dataclasses.replace(
                plan,
                storage_data=dataclasses.replace(
                    plan.storage_data, prefix=f"{self.save_id}/{plan.storage_data.prefix}"
                ),
            )
            for plan in super().prepare_global_plan(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part."""
        if self._is_first:
            with (self._folder / EXTRA).open("wb") as file:
                torch.save(self._extra, file)
        return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: Any) -> None:
        """End, on the first rank, after all have written.

        Raises:
            OSError: If what another rank has written is not here, or the store does not answer.
        """
        seen = self._place.sizes()
        for host, parts in zip(self._hosts, results, strict=True):
            for name, size in sizes_at_least(part.storage_data for part in parts).items():
                if seen.get(name, -1) < size:
                    raise FileNotFoundError(_not_seen(self._place / name, size, host))
        metadata.storage_data = {part.index: part.storage_data for parts in results for part in parts}
        metadata.storage_meta = self.storage_meta()
        index = pickle.dumps(metadata)
        self._write_mark(index + checksum_of(index))
        with suppress(Exception):  # of the store's own kind: the checkpoint is complete, and the next save tries again
            self._place.remove()
            self._place.remove_below(keep=(MARK, self.save_id))

    def _write_mark(self, content: bytes) -> None:
        """Let the files of this save be the checkpoint; it is one if the store has taken this and not answered, too."""
        mark, self._may_count = self._place / MARK, True
        try:
            mark.write(content)
        except Exception as error:
            try:
                is_written = mark.read(0, len(content) + 1) == content
            except Exception:
                is_written = False
            if not is_written:
                raise NotAnsweredError(f"{mark}: {type(error).__name__}: {error}") from error

    def rollback(self) -> None:
        """Remove what is unfinished, unless it may count: the next save removes what does not."""
        with suppress(Exception):
            if not self._may_count:
                self._folder.remove_below()


class _RemoteFiles(FileSystem):
    """How torch's writer makes files that are not on a disk."""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        """Open a file."""
        with RemotePath(str(path)).open(mode) as stream:
            yield stream

    def concat_path(self, path: Any, suffix: str) -> str:
        """A place in a folder."""
        return f"{path}/{suffix}"


def _check_seen(file: Path, size: int, host: str) -> None:
    """Make sure that what a host has written can be read here."""
    if not wait_for(lambda: file.is_file() and file.stat().st_size >= size):
        raise FileNotFoundError(_not_seen(file, size, host))


def _not_seen(file: Place, size: int, host: str) -> str:
    return f"{socket.gethostname()} does not see all {size} bytes of {str(file)!r} that {host} wrote. {NOT_SHARED}"


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
