"""Places on file systems that are not mounted, such as ``s3://bucket/name``: what counts there is written last.

An object store renames nothing, but replaces an object in one operation. So the files of each save have names of their
own, and `.metadata`, which names them, is written last::

    s3://bucket/last.ckpt/.metadata            names the files of 5c1e...: they are the checkpoint
    s3://bucket/last.ckpt/5c1e.../__0_0.distcp
    s3://bucket/last.ckpt/5c1e.../meta.pt
    s3://bucket/last.ckpt/a07b.../__0_0.distcp  of a save that is under way, or was broken off
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
    """A place on a file system of fsspec, with as much of `pathlib.Path` as checkpoints need.

    Args:
        url: With a protocol, and without a slash at its end.
    """

    url: str

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        """The last part."""
        return self.url.rpartition("/")[2]

    def _find(self) -> tuple[Any, str]:
        """The file system, which remembers nothing of what others have changed since, and the place there."""
        files, path = fsspec.core.url_to_fs(self.url)
        files.invalidate_cache()
        return files, path

    def exists(self) -> bool:
        """Whether there is something."""
        files, path = self._find()
        return bool(files.exists(path))

    def is_file(self) -> bool:
        """Whether there is a file."""
        files, path = self._find()
        return bool(files.isfile(path))

    def is_dir(self) -> bool:
        """Whether there are files below, and none of this name, which object stores allow beside them."""
        files, path = self._find()
        return bool(not files.isfile(path) and files.isdir(path))

    def open(self, mode: str) -> Any:
        """The file, for reading or writing; what is written is there when it is closed."""
        files, path = self._find()
        try:
            return files.open(path, mode)
        except FileNotFoundError:
            if mode != "wb":
                raise
            files.makedirs(path.rpartition("/")[0], exist_ok=True)  # of a file system that has folders
            return files.open(path, mode)

    def read(self, offset: int, length: int) -> bytes:
        """A part of the file."""
        files, path = self._find()
        return bytes(files.cat_file(path, start=offset, end=offset + length))

    def write(self, content: bytes) -> None:
        """Make or replace the file: object stores do it in one operation."""
        files, path = self._find()
        files.pipe_file(path, content)

    def fetch(self, file: Path) -> None:
        """Copy the file to a disk; it need not fit into memory."""
        files, path = self._find()
        files.get_file(path, str(file))

    def sizes(self) -> dict[str, int]:
        """The sizes of all files below, by their names from here."""
        files, path = self._find()
        found = files.find(path, detail=True).items()
        return {name[len(path) + 1 :]: info["size"] for name, info in found if name.startswith(f"{path}/")}

    def remove(self) -> None:
        """Remove the file, if there is one."""
        files, path = self._find()
        if files.isfile(path):
            files.rm_file(path)

    def remove_folder(self) -> None:
        """Remove the folder that has become empty, of a file system that has folders."""
        files, path = self._find()
        if not files.isfile(path) and files.isdir(path):
            files.rmdir(path)

    def remove_below(self, *, keep: Collection[str] = ()) -> None:
        """Remove all files below.

        Args:
            keep: The names, directly below, of files and folders that stay.
        """
        files, path = self._find()
        names = {name.partition("/")[0] for name in self.sizes()}.difference(keep)
        if names:
            files.rm([f"{path}/{name}" for name in sorted(names)], recursive=True)


#: Where a checkpoint is.
Place = Path | RemotePath


def place_of(path: Any) -> Place:
    """A place that is given in any way that Lightning knows; what :func:`dated` gives is what it was given."""
    if fsspec.utils.get_protocol(str(path)) == "file":
        return Path(fsspec.core.url_to_fs(str(path))[1])
    return RemotePath(str(path).rstrip("/").removesuffix(f"/{MARK}"))


def is_directory(place: Place, *, or_unfinished: bool = True) -> bool:
    """Whether there is a checkpoint that is a directory, or was going to be one.

    Args:
        place: Where.
        or_unfinished: Whether one that is not complete counts too.
    """
    found = resolve(place) if isinstance(place, Path) else place
    return (found / MARK).is_file() or (or_unfinished and found.is_dir())


def remove_directory(place: RemotePath) -> None:
    """Remove a directory, if there is one; what says that it is complete goes first."""
    (place / MARK).remove()
    place.remove_below()
    place.remove_folder()


def dated(url: str) -> str | None:
    """What has the time at which the checkpoint at this URL was written: itself, or the file that is written last.

    Args:
        url: Not of a disk.

    Returns:
        Its URL; ``None`` if there is no complete checkpoint.
    """
    place = RemotePath(url)
    return next((str(file) for file in (place / MARK, place) if file.is_file()), None)


@contextmanager
def fetched(file: Place) -> Iterator[Path]:
    """Inside, a file is on a disk.

    Args:
        file: Where it is.

    Yields:
        Where it is, or a copy of it.
    """
    if isinstance(file, Path):
        yield file
        return
    with tempfile.TemporaryDirectory(prefix="lightning_hybrid-") as folder:
        copy = Path(folder, file.name)
        file.fetch(copy)
        yield copy
