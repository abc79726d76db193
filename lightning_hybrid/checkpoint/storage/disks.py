"""Nodes that do not share a disk: detected before training, and supplied with files of other nodes.

`Checkpointer` calls :func:`check_shared` when a fit starts that writes directories, and :func:`at_hand` around each
load of a file. If nodes do not share a disk, each would write a part of a directory to its own disk, and only the load
would fail, after the training. A file on the disk of one node has the opposite problem, which a copy solves.

A *host* is the name of a node. All functions with a group are collectives.
"""

from __future__ import annotations

import socket
import tempfile
import uuid
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_hybrid.checkpoint.storage.atomic import reserve, wait_for
from lightning_hybrid.checkpoint.storage.remote import Place, is_directory
from lightning_hybrid.distributed.agreement import agree, all_gather_values

NOT_SHARED = (
    "Every rank writes its part of a sharded checkpoint, so the directory must be on a disk that all nodes share. Set"
    " `ModelCheckpoint(dirpath=...)` or `Trainer(default_root_dir=...)` to a path on a shared disk, or set"
    " save_distributed_checkpoint=False, so that only rank 0 writes a file. [LH916]"
)

_MESSAGE = 1 << 24  # the size of a message in bytes
_BLOCK = 1 << 30  # the number of bytes between two barriers, which limits the time that a rank waits for another rank


# -- before training ---------------------------------------------------------------------------------------------------


def check_shared(folders: Sequence[Path], hosts: Sequence[str], group: dist.ProcessGroup) -> None:
    """Check that all nodes share the folders into which each rank will write; called by every rank.

    The first rank of each node writes an empty file into each folder, and rank 0 looks for all of these files. This
    takes one gather and one agreement; on a single node, it does nothing.

    Args:
        folders: The folders, equal on every rank. They are created.
        hosts: The host of each rank.
        group: All ranks, with a backend for tensors on the host.

    Raises:
        ValueError: If rank 0 does not see the files of another node; on every rank.
        OSError: If a node cannot write there; on every rank.
    """
    if len(set(hosts)) == 1 or not folders:
        return
    rank = dist.get_rank()
    name = f".{uuid.uuid4().hex}.seen" if hosts.index(hosts[rank]) == rank else None
    marks = [folder / name for folder in folders] if name is not None else []
    try:
        found = all_gather_values((name, _failure_of_writing(marks)), group)
        agree(lambda: _look_for(found, folders, hosts) if rank == 0 else None)
    finally:
        for mark in marks:
            with suppress(OSError):
                mark.unlink()


def _failure_of_writing(marks: Sequence[Path]) -> str | None:
    try:
        for mark in marks:
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    return None


def _look_for(found: Sequence[tuple[str | None, str | None]], folders: Sequence[Path], hosts: Sequence[str]) -> None:
    """Look for the files of all nodes, on rank 0.

    Args:
        found: For each rank, the name of its file, and the error of writing; each may be ``None``.
        folders: The folders.
        hosts: The host of each rank.
    """
    for host, (_, failure) in zip(hosts, found, strict=True):
        if failure is not None:
            raise OSError(f"{host} cannot write to the checkpoint folder: {failure} [LH911]")
    names = {host: name for host, (name, _) in zip(hosts, found, strict=True) if name is not None}
    if wait_for(lambda: not any(_unseen(folder, names) for folder in folders)):
        return
    folder, others = next((folder, unseen) for folder in folders if (unseen := _unseen(folder, names)))
    raise ValueError(
        f"{hosts[0]} does not see the files that {_names(others)} wrote to the checkpoint folder {str(folder)!r}."
        f" {NOT_SHARED}"
    )


def _unseen(folder: Path, names: Mapping[str, str]) -> list[str]:
    """Return the hosts whose files are not in a folder."""
    return [host for host, name in names.items() if not (folder / name).exists()]


# -- loading -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _View:
    """The files that a rank sees of a checkpoint, and the folder for a copy.

    Attributes:
        folder: The folder for a copy.
        file: The file, if the rank sees one.
        content: The size in bytes and a checksum of the file, to compare it with files of other nodes.
        is_directory: True if the rank sees a directory.
    """

    folder: Path
    file: Path | None = None
    content: tuple[int, int] = 0, 0
    is_directory: bool = False


@contextmanager
def at_hand(place: Place, hosts: Sequence[str], group: dist.ProcessGroup) -> Iterator[Place]:
    """Make a checkpoint in one file available on a disk of this node; called by every rank of the group.

    Each node downloads a checkpoint on a remote store once. A file that is only on the disks of some nodes is sent from
    node to node, in messages that fit into memory. If the files of nodes differ, the file of the lowest rank that has
    one is used on all nodes. Copies are temporary: they are removed at the end of the context::

        node1   last.ckpt --.
        node2   a copy    <-'--.      inside the context
        node3   a copy    <----'

    Args:
        place: The given place of the checkpoint, which need not exist, and may be a directory.
        hosts: The host of each rank.
        group: All ranks, with a backend for tensors on the host.

    Yields:
        The place where this rank can read it: the given place, or a copy.

    Raises:
        ValueError: If some nodes have a directory at this place and others do not; on every rank.
        OSError: If there is not enough space for a copy, or a download fails; on every rank.
    """
    if isinstance(place, Path) and len(set(hosts)) == 1:
        yield place
        return
    rank = dist.get_rank()
    fetches = hosts.index(hosts[rank]) == rank
    with ExitStack() as stack:
        folder = partial(tempfile.TemporaryDirectory, prefix="lightning_hybrid-", ignore_cleanup_errors=True)
        own = agree(lambda: _look(place, Path(stack.enter_context(folder())), fetches=fetches))
        views = all_gather_values(own, group)
        _check_directories(place, views, hosts)
        source = next((view for view in views if view.file is not None), None)
        if source is None:
            yield place
            return
        yield _hand_on(place, views, hosts, views.index(source), group)


def _look(place: Place, folder: Path, *, fetches: bool) -> _View:
    """Return the files that this rank sees.

    Args:
        place: The place of the checkpoint.
        folder: The folder for a copy.
        fetches: If True, this rank downloads a checkpoint that is not on a disk.
    """
    if is_directory(place):
        return _View(folder, is_directory=True)
    file = place if isinstance(place, Path) else folder / place.name
    if not isinstance(place, Path) and fetches and place.is_file():
        place.fetch(file)
    if not file.is_file():
        return _View(folder)
    return _View(folder, file, (file.stat().st_size, _checksum(file)))


def _checksum(file: Path) -> int:
    """Return a checksum of a file; for a zip archive, a checksum of its table, which has checksums of all records."""
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            entries = [(entry.filename, entry.file_size, entry.CRC) for entry in archive.infolist()]
        if any(checksum for *_, checksum in entries):
            return zlib.crc32(repr(entries).encode())
    checksum = 0
    with file.open("rb") as opened:
        while part := opened.read(_MESSAGE):
            checksum = zlib.crc32(part, checksum)
    return checksum


def _check_directories(place: Place, views: Sequence[_View], hosts: Sequence[str]) -> None:
    seeing = [host for host, view in zip(hosts, views, strict=True) if view.is_directory]
    others = [host for host in dict.fromkeys(hosts) if host not in seeing]
    if seeing and others:
        raise ValueError(
            f"The directory {str(place)!r} exists on {seeing[0]}, but not on {_names(others)}. Every rank reads its"
            " part of the checkpoint from this directory, so all nodes must have it. Copy it to a disk that all nodes"
            " share, or to the same path on each node. Alternatively, convert the checkpoint to one file with"
            " `lightning-hybrid consolidate`. A single file is sent to the nodes that do not have it. [LH917]"
        )


def _hand_on(place: Place, views: Sequence[_View], hosts: Sequence[str], source: int, group: dist.ProcessGroup) -> Path:
    """Send a rank's file to the nodes that do not have the same file, and return the path for this rank.

    Args:
        place: The given place of the checkpoint.
        views: The files that each rank sees.
        hosts: The host of each rank.
        source: The rank whose file is used.
        group: All ranks.
    """
    content, rank = views[source].content, dist.get_rank()
    files: dict[str, Path] = {}
    for host, view in zip(hosts, views, strict=True):
        if view.file is not None and view.content == content:
            files.setdefault(host, view.file)
    targets = [hosts.index(host) for host in dict.fromkeys(hosts) if host not in files]
    if targets:
        lacking = _names([hosts[target] for target in targets])
        rank_zero_warn(
            f"{place} ({content[0]:,} bytes) is read on {hosts[source]} and sent to {lacking}, where this file is"
            " missing or different. This takes time, and the copy needs space in the folder for temporary files"
            " (TMPDIR). To avoid both, use a disk that all nodes share."
        )
        files |= {hosts[target]: views[target].folder / place.name for target in targets}
        _send(files[hosts[rank]], content[0], [source, *targets], group)
    own = views[rank]
    return own.file if own.file is not None and own.content == content else files[hosts[rank]]


def _send(file: Path, size: int, ranks: Sequence[int], group: dist.ProcessGroup) -> None:
    """Send a file from the first of these ranks to the second, from there to the third, and so on; a collective."""
    rank = dist.get_rank()
    place = ranks.index(rank) if rank in ranks else None
    data = agree(lambda: None if place is None else _mapped(file, size, new=place > 0))
    for begin in range(0, size, _BLOCK):
        if data is not None and place is not None:
            for part in torch.split(data[begin : begin + _BLOCK], _MESSAGE):
                if place > 0:
                    dist.recv(part, ranks[place - 1], group=group)
                if place + 1 < len(ranks):
                    dist.send(part, ranks[place + 1], group=group)
        dist.barrier(group=group)


def _mapped(file: Path, size: int, *, new: bool) -> Tensor:
    """Return the bytes of a file as a tensor. Space for a new file is allocated first; memory maps raise no error.

    Raises:
        OSError: If there is not enough space.
    """
    if new:
        try:
            with file.open("wb") as opened:
                opened.truncate(size)
            reserve(file)
        except OSError as error:
            raise OSError(
                f"{socket.gethostname()} cannot create a copy of the checkpoint ({size:,} bytes) at {file}: {error}."
                " Set TMPDIR to a folder with enough space. [LH911]"
            ) from error
    return torch.from_file(str(file), shared=new, size=size, dtype=torch.uint8)


def _names(hosts: Sequence[str]) -> str:
    shown = [*hosts[:4], *(["others"] if len(hosts) > 4 else [])]
    return " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))
