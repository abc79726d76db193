"""Machines with disks of their own: found before training, and sent the files that others have."""

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

_MESSAGE = 1 << 24  # bytes
_BLOCK = 1 << 30  # bytes between two moments at which all ranks meet, so that none of them waits too long for another


# -- before training ---------------------------------------------------------------------------------------------------


def check_shared(folders: Sequence[Path], hosts: Sequence[str], group: dist.ProcessGroup) -> None:
    """Make sure that all machines share the folders into which each rank is going to write; called by every rank.

    The first rank of each machine writes an empty file into each, and rank 0 looks for all of them. It takes one gather
    and one decision; on one machine nothing.

    Args:
        folders: The same on every rank; they are made.
        hosts: The machine of each rank.
        group: All ranks, over a backend that takes tensors of the host.

    Raises:
        ValueError: If rank 0 does not see what another machine has written; on every rank.
        OSError: If a machine cannot write there; on every rank.
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
    """On rank 0: for each rank the name of its file, if it has written one, and why it could not, if so."""
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
    """The machines whose files are not in a folder."""
    return [host for host, name in names.items() if not (folder / name).exists()]


# -- loading -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _View:
    """What a rank sees of a checkpoint, and where it would put a copy.

    Attributes:
        folder: Where it would put one.
        file: The file, if it sees one.
        content: What tells it from another one: its size, and a checksum.
        is_directory: Whether it sees a directory.
    """

    folder: Path
    file: Path | None = None
    content: tuple[int, int] = 0, 0
    is_directory: bool = False


@contextmanager
def at_hand(place: Place, hosts: Sequence[str], group: dist.ProcessGroup) -> Iterator[Place]:
    """Inside, a checkpoint that is one file is on a disk of this machine; called by every rank of the group.

    What is on no disk is fetched once by each machine. A file that is on the disks of other machines only is handed on
    from one machine to the next, in messages that fit into memory::

        node1   last.ckpt --.
        node2   a copy    <-'--.      for as long as it is read
        node3   a copy    <----'

    Args:
        place: Where the checkpoint is said to be; it need not be there, and may be a directory.
        hosts: The machine of each rank.
        group: All ranks, over a backend that takes tensors of the host.

    Yields:
        Where this rank finds it: there, or in a copy.

    Raises:
        ValueError: If some machines see a directory there and others do not; on every rank.
        OSError: If there is no room for a copy; on every rank.
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
    """What this rank sees.

    Args:
        place: Where.
        folder: For a copy.
        fetches: Whether this rank makes one of what is on no disk.
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
    """Of the contents; of an archive, as checkpoints are, of its table, which has checksums of all that is in it."""
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
    """Send the file of a rank to the machines that lack it; where it is for this rank."""
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
    """From the first of these ranks to the second, from there to the third, and so on; called by all of the group."""
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
    """The bytes of a file; of a new one the room is taken first, as writing through a map says nothing of it.

    Raises:
        OSError: If there is no room.
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
