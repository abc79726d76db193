"""Reading of checkpoints in directories: each rank reads the values that it needs, whichever ranks wrote them.

The format is `torch.distributed.checkpoint`, arranged as in Lightning's own strategies::

    step=100.ckpt/
        .metadata         names, shapes, and the place of each chunk in the files; written last
        __0_0.distcp      values that rank 0 wrote
        __1_0.distcp      values that rank 1 wrote
        meta.pt           everything except the states of the module, of its copies and of optimizers

So torch alone can open it: `torch.distributed.checkpoint.format_utils.dcp_to_torch_save`. On stores without renames,
all files except `.metadata` are in a subfolder: see :mod:`lightning_hybrid.checkpoint.storage.remote`.

`ShardedCheckpoint` reads checkpoints and initial weights with it; the commands `consolidate`, `export` and `inspect`
read them in one process. torch's own `load` is not used: it is a collective, needs a full plan of all ranks, and cannot
read a shard with several blocks.

The *index* is the content of ``.metadata``. An *entry* is a value in it; its *path* is a tuple of keys. A *target* is
the tensor into which an entry is read. A *planner* and a *plan* are torch's: the list of chunks to read.
"""

from __future__ import annotations

import io
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from lightning_hybrid.checkpoint.storage.atomic import MARK, resolve
from lightning_hybrid.checkpoint.storage.checksums import verify, verify_content, verify_index
from lightning_hybrid.checkpoint.storage.chunks import local_chunks
from lightning_hybrid.checkpoint.storage.remote import Place, RemotePath, fetched
from lightning_hybrid.checkpoint.storage.unpickle import read_harmless
from lightning_hybrid.distributed.pytree import TreePath

# Lightning's keys in a checkpoint. In a directory, the module's state is under the first one too, but the state of the
# optimizer N is under `optimizer_N`.
MODEL, OPTIMIZERS = "state_dict", "optimizer_states"

EXTRA = "meta.pt"
_MODEL_OF_FSDP = "model"  # the key of the module's state in directories of Lightning's FSDP strategy


def sizes_at_least(places: Iterable[Any]) -> dict[str, int]:
    """Return the minimum sizes of files in bytes, by name.

    Args:
        places: The places of values in torch's format: a file, the first byte, and the number of bytes.
    """
    sizes: dict[str, int] = {}
    for place in places:
        sizes[place.relative_path] = max(sizes.get(place.relative_path, 0), place.offset + place.length)
    return sizes


@contextmanager
def _reading(file: Place) -> Iterator[None]:
    """Turn any error of a store or of unpickling inside the context into a `ValueError` that names the file."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"The file {file} cannot be read: {type(error).__name__}: {error} [LH901]") from error


class DistributedCheckpoint:
    """A checkpoint that was written by :func:`~.dcp_writer.write_directory`, or by one of Lightning's own strategies.

    Args:
        path: The directory, on a disk or in a remote store.
        load_value: Reads a non-tensor value that `torch.save` has written. The default runs no code of the checkpoint,
            because `torch.load` has ``weights_only=True`` by default.

    Attributes:
        path: The directory that is read; between the two renames of a commit, its hidden name.
        entries: The shape and dtype of each tensor, and ``None`` for each other value, by its path in the checkpoint,
            such as ``("state_dict", "layer.weight")`` or ``("optimizer_0", "state", "layer.weight", "exp_avg")``.
        module_root: The first key of the paths of the module's state.
        optimizer_roots: The first keys of the paths of the optimizers' states, in the order of the optimizers, such as
            ``"optimizer_0"``; empty if no optimizer was saved.

    Raises:
        FileNotFoundError: If the directory does not exist.
        ValueError: If it is not a checkpoint, is incomplete, or has a damaged index.
    """

    def __init__(self, path: Place, *, load_value: Callable[[BinaryIO], Any] = torch.load) -> None:
        self.path: Place = resolve(path) if isinstance(path, Path) else path
        self._load_value = load_value
        if not self.path.exists():
            raise FileNotFoundError(f"Checkpoint not found: {path} [LH913]")
        if not (self.path / MARK).is_file():
            raise ValueError(
                f"{path} is not a complete checkpoint. The file {MARK!r}, which is written last, is missing, so the"
                " save may have been interrupted. Use another checkpoint. [LH914]"
            )
        mark = self.path / MARK
        with _reading(mark), mark.open("rb") as file:
            content = file.read()
        verify_index(content, mark)
        with _reading(mark):
            metadata = read_harmless(io.BytesIO(content))
            if not isinstance(metadata, Metadata):
                raise TypeError(f"it contains a {type(metadata).__qualname__} instead of an index")
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
        """Check that all files are complete, before anything is read.

        Raises:
            ValueError: If files are missing, or are too short.
        """
        found = self.file_sizes()
        for name, size in sorted(sizes_at_least(self._metadata.storage_data.values()).items()):
            if name not in found:
                raise ValueError(
                    f"The checkpoint {self.path} is incomplete on {socket.gethostname()}: the file {name!r} (at least"
                    f" {size} bytes) is missing. [LH915]"
                )
            if found[name] < size:
                raise ValueError(
                    f"The checkpoint {self.path} is damaged: the file {name!r} has {found[name]} bytes, but it must"
                    f" have at least {size}. [LH901]"
                )

    def file_sizes(self) -> dict[str, int]:
        """Return the sizes of all files in bytes, by their names in the directory."""
        if not isinstance(self.path, Path):
            return self.path.sizes()
        files = (file for file in self.path.rglob("*") if file.is_file())
        return {file.relative_to(self.path).as_posix(): file.stat().st_size for file in files}

    def below(self, root: str) -> dict[TreePath, TensorStorageMetadata | None]:
        """Return the entries whose paths start with a key, by the rest of the path."""
        return {path[1:]: entry for path, entry in self.entries.items() if path[0] == root}

    def read_extra(self, read: Callable[[Path], Any]) -> dict[str, Any]:
        """Return everything except the states of the module, of its copies in callbacks, and of the optimizers.

        Values in these states that are not tensors, such as learning rates, are stored next to the tensors.

        Args:
            read: Reads a file that `torch.save` has written.

        Returns:
            The values; empty if the directory has no such file.

        Raises:
            ValueError: If the file is damaged.
        """
        save_id = getattr(getattr(self._metadata, "storage_meta", None), "save_id", None)
        extra = self.path / EXTRA
        if not extra.is_file() and save_id is not None:  # in a store without renames, or a copy of its files
            extra = self.path / save_id / EXTRA
        if not extra.is_file():
            return {}
        with fetched(extra) as file:
            verify(file)
            found: dict[str, Any] = read(file)
        return found

    def read(self, targets: Mapping[TreePath, Tensor | None]) -> dict[TreePath, Any]:
        """Read values. This is not a collective.

        Args:
            targets: For each path, the tensor to read into, with the saved shape and any sharding; ``None`` for a value
                that is not a tensor.

        Returns:
            The values by path, including tensors.

        Raises:
            ValueError: If a value differs from the value that was written.
            Exception: Any error of ``load_value``.
        """
        named = {self._names[path]: target for path, target in targets.items()}
        planner = _LoadPlanner(named, self._metadata, self._load_value)
        plan = planner.create_local_plan()
        with torch.no_grad():
            if isinstance(self.path, Path):
                self._read_files(self.path, plan, planner)
            else:
                self._read_remote(self.path, plan, planner)
        return {path: planner.values.get(self._names[path], target) for path, target in targets.items()}

    def _read_files(self, path: Path, plan: LoadPlan, planner: _LoadPlanner) -> None:
        for index in {item.storage_index: None for item in plan.items}:
            place = self._metadata.storage_data[index]
            verify(path / place.relative_path, offset=place.offset, length=place.length, holds=_described(index))
        reader = FileSystemReader(path)
        reader.set_up_storage_reader(self._metadata, is_coordinator=False)
        reader.read_data(plan, planner).wait()

    def _read_remote(self, path: RemotePath, plan: LoadPlan, planner: _LoadPlanner) -> None:
        """Read chunks like torch, but download each chunk and value only once, and verify its checksums."""
        items: dict[MetadataIndex, list[ReadItem]] = {}
        for item in plan.items:
            items.setdefault(item.storage_index, []).append(item)
        for index, wanted in items.items():
            place = self._metadata.storage_data[index]
            file = path / place.relative_path
            content = file.read(place.offset, place.length)
            verify_content(content, file, _described(index))
            if wanted[0].type == LoadItemType.BYTE_IO:
                planner.load_bytes(wanted[0], io.BytesIO(content))
                continue
            chunk = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            for item in wanted:
                part = chunk
                for dim, (begin, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    part = part.narrow(dim, begin, length)
                planner.resolve_tensor(item).copy_(part)


def _described(index: MetadataIndex) -> str:
    """Return a description of a stored value for messages."""
    offset = list(index.offset or ())
    return f"{index.fqn!r}{f' from {offset}' if any(offset) else ''}"


class _LoadPlanner(LoadPlanner):
    """A planner that reads the local chunks of every target, from any chunks that were written."""

    def __init__(
        self, targets: Mapping[str, Tensor | None], metadata: Metadata, load_value: Callable[[BinaryIO], Any]
    ) -> None:
        self._targets, self._metadata, self._load_value = targets, metadata, load_value
        self._chunks: dict[MetadataIndex, Tensor] = {}
        self.values: dict[str, Any] = {}

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Do nothing, because the constructor received the targets."""

    def create_local_plan(self) -> LoadPlan:
        """Return the items to read, each with its file."""
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
        """Return the plans unchanged, because ranks read independently."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Store a value that is not a tensor."""
        self.values[read_item.dest_index.fqn] = self._load_value(value)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Return the part of a chunk that is read from one file."""
        chunk = self._chunks[read_item.dest_index]
        for dim, (begin, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            chunk = chunk.narrow(dim, begin, length)
        return chunk

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Do nothing, because the tensor was read in place."""
