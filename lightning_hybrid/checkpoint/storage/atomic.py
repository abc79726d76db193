"""Files and directories that are replaced atomically: a reader finds the old one or the new one, complete.

::

    path                the old checkpoint ----------------.  commit: exchanged in one operation of the file system
    .path.unfinished    the new one, being written --------'          (where it has none: two renames)
    .path.discarded     the old one, being removed

A process that is killed leaves files with these hidden names, never half of a checkpoint under its own. `resolve` and
`recover` find the one that is complete between two renames; `rollback` removes what is unfinished.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux, <fcntl.h> and <linux/fs.h>

_SOME_MORE = 1 << 20  # bytes
_LOOKS = 9  # at what another machine has written, for 5 seconds
MARK = ".metadata"  # a directory that has this file is complete


def unfinished(path: Path) -> Path:
    """Where what :func:`commit` puts at this path is written."""
    return path.with_name(f".{path.name}.unfinished")


def _discarded(path: Path) -> Path:
    return path.with_name(f".{path.name}.discarded")


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Write a file under its hidden name, and commit it when it is complete and on the disk.

    Args:
        path: Where it shall be; what is there stays until then, and for good if writing fails.

    Yields:
        Where to write.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    recover(path)
    new = unfinished(path)
    _remove(new)  # which may be a directory
    try:
        yield new
        with new.open("rb") as file:
            os.fsync(file.fileno())
    except BaseException:
        rollback(path)
        raise
    commit(path)


@contextmanager
def telling_why(file: Path) -> Iterator[None]:
    """Around a writer that says that it could not write, but not why: the system is asked by writing some more.

    Args:
        file: The file.

    Raises:
        OSError: As the system says it, such as that the disk is full.
    """
    try:
        yield
    except RuntimeError:
        with file.open("ab") as opened:
            opened.write(bytes(_SOME_MORE))
            opened.flush()
            os.fsync(opened.fileno())
        raise


def reserve(file: Path) -> None:
    """Take the room on the disk for all bytes of a file: where there is none, writing through a map ends the process.

    Args:
        file: Of the length that it shall have; a part of it may not be on the disk yet.

    Raises:
        OSError: If there is no room.
    """
    length = file.stat().st_size
    if not length or not hasattr(os, "posix_fallocate"):
        return
    with file.open("r+b") as opened:
        try:
            os.posix_fallocate(opened.fileno(), 0, length)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # a file system that cannot
                raise


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Fill a directory under its hidden name, and commit it when its files are complete and on the disk.

    Args:
        path: Where it shall be; what is there stays until then, and for good if writing fails.

    Yields:
        The directory to fill.
    """
    new = unfinished(path)
    _remove(new)
    new.mkdir(parents=True)
    try:
        yield new
        for written in new.iterdir():
            with written.open("rb") as file:
                os.fsync(file.fileno())
    except BaseException:
        rollback(path)
        raise
    commit(path)


def commit(path: Path) -> None:
    """Move what :func:`unfinished` names, a file or a directory, to its path; what was there is removed.

    Args:
        path: Where it shall be.
    """
    new, old = unfinished(path), _discarded(path)
    _remove(old)
    if not os.path.lexists(path) or (path.is_file() and new.is_file()) or path.is_symlink():
        if path.is_symlink() and new.is_dir():
            path.unlink()
        new.replace(path)
    elif _exchange(new, path):
        new.rename(old)
    else:
        path.rename(old)
        new.rename(path)
    _remove(old)


def rollback(path: Path) -> None:
    """Remove what is unfinished, as far as that is possible."""
    new = unfinished(path)
    if new.is_dir():
        shutil.rmtree(new, ignore_errors=True)
    else:
        with suppress(OSError):
            new.unlink()


def discard(path: Path) -> None:
    """Remove a file or a directory; nobody sees half of it under its name.

    Args:
        path: Where it is; nothing need be there.
    """
    rollback(path)
    old = _discarded(path)
    _remove(old)
    if os.path.lexists(path):
        path.rename(old)
    _remove(old)


def wait_for(is_there: Callable[[], bool]) -> bool:
    """Whether something that another machine has written comes into sight: a shared disk may take a moment to show it.

    Args:
        is_there: Looks.
    """
    for attempt in range(_LOOKS):
        if attempt:
            time.sleep(2.0**attempt / 100)
        if is_there():
            return True
    return False


def resolve(path: Path) -> Path:
    """Where the directory of this name is: between the two renames of :func:`commit` it has its hidden name."""
    new = unfinished(path)
    return new if not path.exists() and (new / MARK).is_file() else path


def recover(path: Path) -> None:
    """Finish a :func:`commit` that was killed between its two renames: the directory may be the only one left."""
    if resolve(path) != path:
        unfinished(path).rename(path)


def _exchange(one: Path, other: Path) -> bool:
    """Whether the file system has exchanged the two, which both exist, in one operation."""
    if not sys.platform.startswith("linux"):
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    names = os.fsencode(one), os.fsencode(other)
    if rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
