"""The checksums of what is in a checkpoint. Those of `torch.save` it writes itself, and never looks at them.

Such a file is a zip archive, with a record for each storage, and the archive has the CRC-32 of every record::

    x.ckpt    data.pkl | data/0 | data/1 | ... | names, places and CRC-32s of the records

In a directory of `torch.distributed.checkpoint` each tensor of a file is such an archive; the index is a pickle and has
a checksum behind it, where whoever unpickles it does not look. Sums are taken of what is mapped into memory, at 4 GB/s
on one core (measured); where several processes read one file, each takes a part of it.
"""

from __future__ import annotations

import io
import mmap
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_hybrid.checkpoint.storage.unpickle import record_names

_BEGINS = b"PK\x03\x04"  # of a zip archive
_SUM = struct.Struct("<8sI")  # behind an index: a mark, and the CRC-32 of all that is before
_MARK = b"\0crc-32\0"
_HEADER = 30  # bytes of a record's header before its name
_CHANGED = "Copy the checkpoint again, or use another checkpoint."
_PICKLE = "data.pkl"  # the record that says which tensors are in the others


def verify(
    file: Path,
    *,
    offset: int = 0,
    length: int | None = None,
    share: tuple[int, int] = (0, 1),
    holds: str | None = None,
) -> None:
    """Make sure that a file holds what was written.

    What has no checksums, because it is no zip archive or was written without them, passes.

    Args:
        file: The file.
        offset: Where the archive begins in it, in bytes.
        length: Of the archive, in bytes; by default all that follows.
        share: (number, count): of so many equal parts of the archive, which one is looked at.
        holds: What the archive holds; by default the names of tensors are found in it.

    Raises:
        ValueError: If a record is not what was written, with the names of its tensors.
    """
    length = file.stat().st_size - offset if length is None else length
    aligned = offset - offset % mmap.ALLOCATIONGRANULARITY
    if not length:
        return
    with (
        file.open("rb") as opened,
        mmap.mmap(opened.fileno(), offset + length - aligned, offset=aligned, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as pages,
        pages[offset - aligned :] as view,
    ):
        _verify(view, file, share, holds)


def verify_content(content: bytes, file: Any, holds: str) -> None:
    """Make sure that an archive which has been read is what was written.

    Args:
        content: The archive.
        file: Where it was read, as text or as something that has one.
        holds: What it holds.

    Raises:
        ValueError: If it is not.
    """
    with memoryview(content) as view:
        _verify(view, file, (0, 1), holds)


def checksum_of(index: bytes) -> bytes:
    """What is written behind an index, for :func:`verify_index`."""
    return _SUM.pack(_MARK, zlib.crc32(index))


def verify_index(content: bytes, file: Any) -> None:
    """Make sure that an index is what was written; one that has no checksum passes, as torch writes it.

    Args:
        content: All that is in its file.
        file: Where it was read, as text or as something that has one.

    Raises:
        ValueError: If it is not.
    """
    index = content[: -_SUM.size]
    if content[len(index) :].startswith(_MARK) and checksum_of(index) != content[len(index) :]:
        raise ValueError(
            f"{file} is damaged: its CRC-32 checksum does not match, so the file changed after it was written."
            f" {_CHANGED} [LH901]"
        )


class _Reader(io.RawIOBase):
    """Reads memory as a file, without a copy.

    An archive has to begin where its file begins. Python looks for the end of an archive where it would be then, before
    it asks what is in front (seen in Ubuntu's 3.12.3), and finds the end of another archive there, of equal length.
    """

    def __init__(self, view: memoryview) -> None:
        super().__init__()
        self._view = view
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._view)}[whence]
        if self._position < 0:
            raise OSError(f"no position {self._position}")
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        with self._view[self._position : self._position + len(buffer)] as found:
            buffer[: len(found)] = found
            self._position += len(found)
            return len(found)


def _verify(view: memoryview, file: Any, share: tuple[int, int], holds: str | None) -> None:
    """Look at the archive that a view of memory is."""
    if view[: len(_BEGINS)] != _BEGINS:
        return
    try:
        with _Reader(view) as reader, zipfile.ZipFile(reader) as archive:
            damaged = next(_damaged(archive, view, share), None)
            if damaged is None:
                return
            what = holds or _tensors_of(archive, view, damaged)
    except zipfile.BadZipFile as error:
        if holds is None:
            return  # torch cannot read it either, and says so
        damaged, what = str(error), holds
    raise ValueError(
        f"{file} is damaged: {what} failed the CRC-32 check ({damaged}), so the file changed after it was written."
        f" {_CHANGED} [LH901]"
    )


def _damaged(archive: zipfile.ZipFile, view: memoryview, share: tuple[int, int]) -> Iterator[str]:
    """The records of a share that are not what was written."""
    number, count = share
    for record in archive.infolist():
        if record.header_offset * count // len(view) != number or record.compress_type != zipfile.ZIP_STORED:
            continue
        with _content(view, record) as written:
            found = zlib.crc32(written) if record.CRC else 0  # without checksums, as torch can be asked to write
        if found != record.CRC:
            yield record.filename.partition("/")[2]


def _content(view: memoryview, record: zipfile.ZipInfo) -> memoryview:
    """The bytes of a record, which follow its header."""
    header = view[record.header_offset : record.header_offset + _HEADER]
    lengths = (int.from_bytes(header[place : place + 2], "little") for place in (26, 28))  # of name and extra field
    begin = record.header_offset + _HEADER + sum(lengths)
    return view[begin : begin + record.file_size]


def _tensors_of(archive: zipfile.ZipFile, view: memoryview, record: str) -> str:
    """The names of the tensors in a record, as text."""
    number = record.rpartition("/")[2]
    pickled = next((each for each in archive.infolist() if each.filename.endswith(f"/{_PICKLE}")), None)
    if pickled is None or not record.startswith("data/"):
        return f"its record {record!r}"
    found = record_names(io.BytesIO(_content(view, pickled)))
    names = [".".join(map(str, path)) for path, storage in found if storage == number]
    return f"the tensor {' and '.join(map(repr, names[:4]))}" if names else f"its record {record!r}"
