"""Machines with disks of their own: found before training."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_hybrid.checkpoint.storage.atomic import wait_for
from lightning_hybrid.distributed.agreement import agree

NOT_SHARED = (
    "Every rank writes a part of a directory, so its disk must be one that all machines share: let it be there"
    " (`ModelCheckpoint(dirpath=...)`, `Trainer(default_root_dir=...)`), or use save_distributed_checkpoint=False,"
    " with which rank 0 writes one file."
)


def check_shared(folders: Sequence[Path], hosts: Sequence[str]) -> None:
    """Make sure that all machines share the folders into which each rank is going to write; called by every rank.

    The first rank of each machine writes an empty file into each, and rank 0 looks for all of them. It takes one gather
    and one decision; on one machine nothing.

    Args:
        folders: The same on every rank; they are made.
        hosts: The machine of each rank.

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
        found: list[Any] = [None] * len(hosts)
        dist.all_gather_object(found, (name, _failure_of_writing(marks)))
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
            raise OSError(f"{host} cannot write where checkpoints are going to be: {failure}")
    names = {host: name for host, (name, _) in zip(hosts, found, strict=True) if name is not None}
    if wait_for(lambda: not any(_unseen(folder, names) for folder in folders)):
        return
    folder, others = next((folder, unseen) for folder in folders if (unseen := _unseen(folder, names)))
    raise ValueError(
        f"{hosts[0]} does not see what {_names(others)} {'has' if len(others) == 1 else 'have'} written into the folder"
        f" {str(folder)!r}, where checkpoints are going to be. {NOT_SHARED}"
    )


def _unseen(folder: Path, names: Mapping[str, str]) -> list[str]:
    """The machines whose files are not in a folder."""
    return [host for host, name in names.items() if not (folder / name).exists()]


def _names(hosts: Sequence[str]) -> str:
    shown = [*hosts[:4], *(["others"] if len(hosts) > 4 else [])]
    return " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))
