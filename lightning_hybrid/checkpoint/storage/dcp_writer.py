"""Writing of checkpoints into directories: every rank writes its values, and then the directory becomes visible.

On a disk, the directory is renamed at the end. On other stores, `.metadata`, which lists the valid files, is written
last.

`ShardedCheckpoint` prepares the values of each rank, and `Checkpointer` then calls :func:`write_directory` on every
rank, from a background thread with `async_save`. torch's `save` does the communication and writes the files. Its own
writer and planner are not enough: they write into the final directory, so a kill leaves it incomplete; they do not
notice that nodes have different disks; and they write one rectangle per shard.

The *first rank* is rank 0 of the group. torch calls the methods of a writer in this order: `set_up_storage_writer`,
`prepare_local_plan`, `prepare_global_plan` (first rank), `write_data`, `finish` (first rank).
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
    """Write a directory that becomes visible when it is complete; called by every rank of the group.

    Args:
        path: The path. A file or directory at this path is kept until the new directory is complete.
        entries: The values of this rank, by path. Values of different ranks under one path are equal, or are shards of
            one tensor, and are written once.
        extra: The content of ``meta.pt``; only the first rank's value is used.
        group: The ranks, with a backend for tensors on the host.

    Raises:
        OSError: If a rank could not write; on every rank.
    """
    names = {".".join(map(str, tree_path)): tree_path for tree_path in entries}
    flat = {name: entries[tree_path] for name, tree_path in names.items()}
    writer = _DiskWriter(path, extra) if isinstance(path, Path) else _RemoteWriter(path, extra)
    try:
        # Under a single name, because torch writes a log message for each top-level name.
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
    """Raised if it is unknown whether a store has received the file that makes a checkpoint valid."""


class _Writer(FileSystemWriter):
    """Writer that knows the hosts of ranks, and prepares on the first rank, inside torch's planning phase.

    A failure of the first rank there is raised on every rank.

    Args:
        folder: The folder of the files.
        extra: The content of ``meta.pt``, on the first rank.
    """

    def __init__(self, folder: str | Path, extra: Any) -> None:
        super().__init__(folder)
        self._extra = extra
        self._is_first = False
        self._hosts: list[str] = []  # the host of each rank

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Prepare for writing. No rank writes before the first rank has made its plan."""
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        self._is_first = is_coordinator
        if is_coordinator:
            self._begin()

    def _begin(self) -> None:
        """Prepare on the first rank, before any rank writes."""

    @abstractmethod
    def rollback(self) -> None:
        """Remove incomplete files, as far as possible."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan with the name of this rank's host in ``storage_data``, which the first rank removes again.

        Torch's method is not called, because it makes the directory, which the first rank may be removing.
        """
        return dataclasses.replace(plan, storage_data=socket.gethostname())

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Record the hosts, and call torch's method, which puts the names of files into ``storage_data``."""
        self._hosts = [plan.storage_data for plan in plans]
        return super().prepare_global_plan([dataclasses.replace(plan, storage_data=None) for plan in plans])


class _DiskWriter(_Writer):
    """Writer into a hidden directory, which the first rank creates, and renames when all ranks have written."""

    def __init__(self, path: Path, extra: Any) -> None:
        super().__init__(unfinished(path), extra)
        self._path, self._new = path, unfinished(path)

    def _begin(self) -> None:
        recover(self._path)
        rollback(self._path)
        self._new.mkdir(parents=True, exist_ok=True)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part. Non-tensor values come first, so that they are on the disk before they are synced.

        Raises:
            OSError: If this rank does not see the directory that the first rank has made.
        """
        if not wait_for(self._new.is_dir):
            raise FileNotFoundError(
                f"{socket.gethostname()} does not see the folder {str(self._new)!r} that rank 0 created. {NOT_SHARED}"
            )
        if self._is_first:
            with (self._new / EXTRA).open("wb") as file:  # `open` raises clearer errors than torch's writer
                torch.save(self._extra, file)
        return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: Any) -> None:
        """Complete the directory on the first rank, after all ranks have written.

        Raises:
            OSError: If this rank does not see the files of another rank.
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
        """Remove incomplete files, as far as possible."""
        rollback(self._path)


class _RemoteWriter(_Writer):
    """Writer into a new subfolder next to existing files. At the end, it writes the file that makes new files valid."""

    def __init__(self, path: RemotePath, extra: Any) -> None:
        super().__init__(path.url, extra)
        self.fs, self.path, self.sync_files = _RemoteFiles(), str(path), False
        self._place = path
        self._may_count = False  # True if the file that makes these files valid may have been written

    @property
    def _folder(self) -> RemotePath:
        """Return the folder of the files of the first rank's save."""
        return self._place / self.save_id

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Let all ranks write into the folder of the first rank."""
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
        """Complete the checkpoint on the first rank, after all ranks have written.

        Raises:
            OSError: If files of another rank are missing, or the store does not respond.
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
        # Errors have the store's own class; the checkpoint is complete, and the next save tries again.
        with suppress(Exception):
            self._place.remove()
            self._place.remove_below(keep=(MARK, self.save_id))

    def _write_mark(self, content: bytes) -> None:
        """Write the file that makes this save valid. If the store raises an error, check if it has the file anyway.

        Args:
            content: The content of the file.

        Raises:
            NotAnsweredError: If the store cannot confirm that it has the file.
        """
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
        """Remove incomplete files, unless they may be valid. The next save removes invalid files."""
        with suppress(Exception):
            if not self._may_count:
                self._folder.remove_below()


class _RemoteFiles(FileSystem):
    """The file operations of torch's writer for stores that are not disks."""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        """Open a file."""
        with RemotePath(str(path)).open(mode) as stream:
            yield stream

    def concat_path(self, path: Any, suffix: str) -> str:
        """Return the path of a file in a folder."""
        return f"{path}/{suffix}"


def _check_seen(file: Path, size: int, host: str) -> None:
    """Check that this host can read what another host has written."""
    if not wait_for(lambda: file.is_file() and file.stat().st_size >= size):
        raise FileNotFoundError(_not_seen(file, size, host))


def _not_seen(file: Place, size: int, host: str) -> str:
    return f"{socket.gethostname()} does not see all {size} bytes of {str(file)!r} that {host} wrote. {NOT_SHARED}"


class _SavePlanner(DefaultSavePlanner):
    """A planner that writes the local chunks of every tensor; torch's planner writes only one rectangle per shard."""

    def __init__(self, names: dict[str, TreePath]) -> None:
        super().__init__(flatten_state_dict=True)  # adds the path of each name to the plan
        self.mappings = names

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Store the values to write."""
        self.state_dict, self.is_coordinator = state_dict[""], is_coordinator
        self._chunks: dict[MetadataIndex, Tensor] = {}

    def create_local_plan(self) -> SavePlan:
        """Return a plan with one item for each chunk, and for each value that is not a tensor."""
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
        """Return the chunk or the value of an item."""
        return self._chunks[index] if index in self._chunks else self.state_dict[index.fqn]
