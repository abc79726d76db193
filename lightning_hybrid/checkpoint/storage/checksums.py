"""Checksums of the content of a checkpoint. `torch.save` writes them into its files, but `torch.load` ignores them.

Such a file is a zip archive with a record for each storage, and the archive contains the CRC-32 of every record::

    x.ckpt    data.pkl | data/0 | data/1 | ... | names, places and CRC-32s of the records

In a directory of `torch.distributed.checkpoint`, each tensor or other value in a file is such an archive. The index
(``.metadata``) is a pickle, followed by a checksum, which readers of the pickle ignore. Checksums are computed from
memory-mapped files, at 4 GB/s on one core (measured). If several processes read one file, each process verifies a part
of it.

`Checkpointer` and `Weights` call :func:`verify` before they load a file. `storage.dcp` verifies the index, and each
chunk that it reads; `storage.dcp_writer` writes the checksum of the index. Without these checks, a flipped bit on a
disk would silently become a wrong weight.
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

_BEGINS = b"PK\x03\x04"  # the first bytes of a zip archive
_SUM = struct.Struct("<8sI")  # follows an index: a mark, and the CRC-32 of all bytes before it
_MARK = b"\0crc-32\0"
_HEADER = 30  # the size in bytes of a record's header before its name
_CHANGED = "Copy the checkpoint again, or use another checkpoint."
_PICKLE = "data.pkl"  # the record that maps tensors to the other records


def verify(
    file: Path,
    *,
    offset: int = 0,
    length: int | None = None,
    share: tuple[int, int] = (0, 1),
    holds: str | None = None,
) -> None:
    """Check that a file contains what was written.

    Content without checksums (it is not a zip archive, or was written without them) passes.

    Args:
        file: The file.
        offset: The start of the archive in the file, in bytes.
        length: The length of the archive, in bytes; by default, the rest of the file.
        share: (number, count): the part to verify, out of `count` equally large parts of the archive.
        holds: A description of the content; by default, the names of the tensors are found in the archive.

    Raises:
        ValueError: If a record differs, with the names of its tensors; or, if `holds` is given, if the archive cannot
            be read.
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
    """Check that an archive that has been read is what was written.

    Args:
        content: The archive.
        file: The place of the archive, as text or as an object that can be formatted.
        holds: A description of the content.

    Raises:
        ValueError: If a record differs, or the archive cannot be read.
    """
    with memoryview(content) as view:
        _verify(view, file, (0, 1), holds)


def checksum_of(index: bytes) -> bytes:
    """Return the bytes that follow an index, for :func:`verify_index`."""
    return _SUM.pack(_MARK, zlib.crc32(index))


def verify_index(content: bytes, file: Any) -> None:
    """Check that an index is what was written. An index without a checksum, as torch writes it, passes.

    Args:
        content: The content of the file.
        file: The place of the file, as text or as an object that can be formatted.

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
    """File object that reads memory without a copy.

    An archive has to start at the beginning of its file. Otherwise, Python looks for the end of the archive at a
    position that ignores the bytes before the archive (seen in Ubuntu's 3.12.3), and finds the end of another archive
    of equal length there.
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
    """Verify the archive in a view of memory."""
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
            return  # torch cannot read it either, and raises an error
        damaged, what = str(error), holds
    raise ValueError(
        f"{file} is damaged: {what} failed the CRC-32 check ({damaged}), so the file changed after it was written."
        f" {_CHANGED} [LH901]"
    )


def _damaged(archive: zipfile.ZipFile, view: memoryview, share: tuple[int, int]) -> Iterator[str]:
    """Yield the names of the damaged records in a part of the archive."""
    number, count = share
    for record in archive.infolist():
        if record.header_offset * count // len(view) != number or record.compress_type != zipfile.ZIP_STORED:
            continue
        with _content(view, record) as written:
            found = zlib.crc32(written) if record.CRC else 0  # a file without checksums, which torch can write
        if found != record.CRC:
            yield record.filename.partition("/")[2]


def _content(view: memoryview, record: zipfile.ZipInfo) -> memoryview:
    """Return the bytes of a record, which follow its header."""
    header = view[record.header_offset : record.header_offset + _HEADER]
    # The lengths of the name and the extra field.
    lengths = (int.from_bytes(header[place : place + 2], "little") for place in (26, 28))
    begin = record.header_offset + _HEADER + sum(lengths)
    return view[begin : begin + record.file_size]


def _tensors_of(archive: zipfile.ZipFile, view: memoryview, record: str) -> str:
    """Return the names of the tensors in a record, as text."""
    number = record.rpartition("/")[2]
    pickled = next((each for each in archive.infolist() if each.filename.endswith(f"/{_PICKLE}")), None)
    if pickled is None or not record.startswith("data/"):
        return f"its record {record!r}"
    found = record_names(io.BytesIO(_content(view, pickled)))
    names = [".".join(map(str, path)) for path, storage in found if storage == number]
    return f"the tensor {' and '.join(map(repr, names[:4]))}" if names else f"its record {record!r}"
