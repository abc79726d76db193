"""Atomic replacement of files and directories: a reader finds either the old or the new version, complete.

::

    path                the old checkpoint ----------------.  commit: exchanged in one operation of the file system
    .path.unfinished    the new one, being written --------'          (or in two renames if it has no such operation)
    .path.discarded     the old one, being removed

A process that is killed leaves files with these hidden names, but never an incomplete checkpoint under its own name.
If it was killed between two renames, `resolve` and `recover` find the complete checkpoint. `rollback` removes
incomplete files.

`FileIO` and `consolidate` write files with :func:`new_file`, `export` writes a folder with :func:`new_directory`, and
`dcp_writer` uses the single steps, because several ranks fill its directory. `dcp` and `remote` read through
:func:`resolve`. A plain rename is not enough: it cannot replace a directory that contains files.

A *commit* makes the new version visible under its path. A *rollback* drops it. Everything here acts on this process
alone, so only one process may write to a path.
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

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # constants of Linux, from <fcntl.h> and <linux/fs.h>

_SOME_MORE = 1 << 20  # bytes
_LOOKS = 9  # the number of attempts to see files of another node, for 5 seconds
MARK = ".metadata"  # a checkpoint directory that has this file is complete


def unfinished(path: Path) -> Path:
    """Return the path to which the new version is written, before :func:`commit` moves it to this path."""
    return path.with_name(f".{path.name}.unfinished")


def _discarded(path: Path) -> Path:
    return path.with_name(f".{path.name}.discarded")


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Write a file under its hidden name, and commit it when it is complete and on the disk.

    Args:
        path: The final path. An existing file is kept until then, or forever if writing fails.

    Yields:
        The path to write to.

    Raises:
        OSError: If the file cannot be committed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    recover(path)
    new = unfinished(path)
    _remove(new)  # it may be a directory
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
    """Replace the error of a writer that does not report the cause by the system's error, found by writing more bytes.

    torch's writer raises a `RuntimeError` without the cause, for example on a full disk.

    Args:
        file: The file that is being written inside the context.

    Raises:
        OSError: The system's error, such as a full disk.
        RuntimeError: The writer's error, if more bytes can be written.
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
    """Allocate disk space for all bytes of a file, because writing to a memory map on a full disk kills the process.

    Args:
        file: The file, with its final length, whose bytes may not be allocated yet.

    Raises:
        OSError: If there is not enough space.
    """
    length = file.stat().st_size
    if not length or not hasattr(os, "posix_fallocate"):
        return
    with file.open("r+b") as opened:
        try:
            os.posix_fallocate(opened.fileno(), 0, length)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # the file system does not support this
                raise


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Fill a directory under its hidden name, and commit it when its files are complete and on the disk.

    The directory must contain only files.

    Args:
        path: The final path. An existing directory is kept until then, or forever if writing fails.

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
    """Move the file or directory at :func:`unfinished` to its path, and remove the old version.

    Args:
        path: The final path.
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
    """Remove incomplete files, as far as possible."""
    new = unfinished(path)
    if new.is_dir():
        shutil.rmtree(new, ignore_errors=True)
    else:
        with suppress(OSError):
            new.unlink()


def discard(path: Path) -> None:
    """Remove a file or a directory atomically.

    Args:
        path: The path, which need not exist.
    """
    rollback(path)
    old = _discarded(path)
    _remove(old)
    if os.path.lexists(path):
        path.rename(old)
    _remove(old)


def wait_for(is_there: Callable[[], bool]) -> bool:
    """Return True once files of another node are visible, which may take a moment on a shared disk, else False.

    Args:
        is_there: Returns True if the files are visible.
    """
    for attempt in range(_LOOKS):
        if attempt:
            time.sleep(2.0**attempt / 100)
        if is_there():
            return True
    return False


def resolve(path: Path) -> Path:
    """Return the current path of a checkpoint directory: its path, or its hidden name between two renames.

    The hidden name is returned only if nothing exists at the path, and the hidden directory contains :data:`MARK`.
    """
    new = unfinished(path)
    return new if not path.exists() and (new / MARK).is_file() else path


def recover(path: Path) -> None:
    """Finish the commit of a checkpoint directory that was killed between its two renames.

    Without this, the next save would remove the only complete checkpoint.
    """
    if resolve(path) != path:
        unfinished(path).rename(path)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two existing paths in one operation; return False if the file system does not support this."""
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
