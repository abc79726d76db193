"""Paths on file systems that are not mounted, such as ``s3://bucket/name``.

An object store cannot rename files, but replaces a file in one operation. So the files of each save have unique names,
and `.metadata`, which lists them, is written last::

    s3://bucket/last.ckpt/.metadata            lists the files of 5c1e...: they are the checkpoint
    s3://bucket/last.ckpt/5c1e.../__0_0.distcp
    s3://bucket/last.ckpt/5c1e.../meta.pt
    s3://bucket/last.ckpt/a07b.../__0_0.distcp  of a save that is running, or was interrupted

A checkpoint in one file is the object ``s3://bucket/last.ckpt`` itself. Almost all code of checkpoints takes a
:data:`Place`, from :func:`place_of`, so that it works with both kinds of paths. fsspec's own objects are not used,
because their directory cache hides files that other ranks have just written.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]

from lightning_hybrid.checkpoint.storage.atomic import MARK, resolve


@dataclass(frozen=True)
class RemotePath:
    """Path on a file system of fsspec, with the methods of `pathlib.Path` that checkpoints need.

    Args:
        url: The URL, with a protocol, and without a slash at its end.
    """

    url: str

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        """Return the last part of the URL."""
        return self.url.rpartition("/")[2]

    def _find(self) -> tuple[Any, str]:
        """Return the file system, without cached information that others may have changed, and the path in it."""
        files, path = fsspec.core.url_to_fs(self.url)
        files.invalidate_cache()
        return files, path

    def exists(self) -> bool:
        """Return True if the path exists."""
        files, path = self._find()
        return bool(files.exists(path))

    def is_file(self) -> bool:
        """Return True if the path is a file."""
        files, path = self._find()
        return bool(files.isfile(path))

    def is_dir(self) -> bool:
        """Return True if there are files below the path, and no file at it; object stores allow both."""
        files, path = self._find()
        return bool(not files.isfile(path) and files.isdir(path))

    def open(self, mode: str) -> Any:
        """Open the file for reading or writing. Written content is visible after the file was closed."""
        files, path = self._find()
        try:
            return files.open(path, mode)
        except FileNotFoundError:
            if mode != "wb":
                raise
            files.makedirs(path.rpartition("/")[0], exist_ok=True)  # needed on file systems with folders
            return files.open(path, mode)

    def read(self, offset: int, length: int) -> bytes:
        """Return a part of the file."""
        files, path = self._find()
        return bytes(files.cat_file(path, start=offset, end=offset + length))

    def write(self, content: bytes) -> None:
        """Make or replace the file, which object stores do in one operation."""
        files, path = self._find()
        files.pipe_file(path, content)

    def fetch(self, file: Path) -> None:
        """Download the file to a disk. It need not fit into memory."""
        files, path = self._find()
        files.get_file(path, str(file))

    def sizes(self) -> dict[str, int]:
        """Return the sizes of all files below the path in bytes, by their relative names."""
        files, path = self._find()
        found = files.find(path, detail=True).items()
        return {name[len(path) + 1 :]: info["size"] for name, info in found if name.startswith(f"{path}/")}

    def remove(self) -> None:
        """Remove the file, if it exists."""
        files, path = self._find()
        if files.isfile(path):
            files.rm_file(path)

    def remove_folder(self) -> None:
        """Remove the empty folder at this path, on file systems with folders."""
        files, path = self._find()
        if not files.isfile(path) and files.isdir(path):
            files.rmdir(path)

    def remove_below(self, *, keep: Collection[str] = ()) -> None:
        """Remove all files below the path.

        Args:
            keep: The names of files and folders, directly below the path, that are kept.
        """
        files, path = self._find()
        names = {name.partition("/")[0] for name in self.sizes()}.difference(keep)
        if names:
            files.rm([f"{path}/{name}" for name in sorted(names)], recursive=True)


#: The place of a checkpoint or of a file in it: on a mounted disk, or on another file system.
Place = Path | RemotePath


def place_of(path: Any) -> Place:
    """Return the place for a path in any form that Lightning accepts, or for a result of :func:`dated`."""
    if fsspec.utils.get_protocol(str(path)) == "file":
        return Path(fsspec.core.url_to_fs(str(path))[1])
    return RemotePath(str(path).rstrip("/").removesuffix(f"/{MARK}"))


def is_directory(place: Place, *, or_unfinished: bool = True) -> bool:
    """Return True if there is a checkpoint directory.

    Args:
        place: The place.
        or_unfinished: If True, any directory counts, too, such as an incomplete checkpoint.
    """
    found = resolve(place) if isinstance(place, Path) else place
    return (found / MARK).is_file() or (or_unfinished and found.is_dir())


def remove_directory(place: RemotePath) -> None:
    """Remove a directory, if it exists. The file that makes it complete is removed first."""
    (place / MARK).remove()
    place.remove_below()
    place.remove_folder()


def dated(url: str) -> str | None:
    """Return the URL of the file with the time of a checkpoint: the checkpoint, or the file that is written last.

    `strategy.launch` passes this function to Lightning's search for the last checkpoint (``ckpt_path="last"``).

    Args:
        url: The URL of the checkpoint, not on a disk.

    Returns:
        The URL of the file; ``None`` if no checkpoint is complete.
    """
    place = RemotePath(url)
    return next((str(file) for file in (place / MARK, place) if file.is_file()), None)


@contextmanager
def fetched(file: Place) -> Iterator[Path]:
    """Make a file available on a disk inside the context.

    Args:
        file: The file.

    Yields:
        The file itself, or a copy of it.
    """
    if isinstance(file, Path):
        yield file
        return
    with tempfile.TemporaryDirectory(prefix="lightning_hybrid-") as folder:
        copy = Path(folder, file.name)
        file.fetch(copy)
        yield copy
