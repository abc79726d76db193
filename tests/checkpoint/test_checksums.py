"""A byte of a checkpoint that has changed on the disk is found when it is loaded, and its tensor named."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_hybrid.checkpoint.storage.checksums import checksum_of, verify, verify_index


def flip(path: Path, record: str, offset: int = 0, length: int | None = None) -> None:
    """Change one bit of a record of a file of `torch.save`, or of one that is a part of a file."""
    content = bytearray(path.read_bytes())
    end = len(content) if length is None else offset + length
    with zipfile.ZipFile(io.BytesIO(content[offset:end])) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(f"/{record}"))
        content[content.index(archive.read(name), offset, end)] ^= 1
    path.write_bytes(content)


def saved(path: Path) -> Path:
    """Some tensors, of which two share memory, and values."""
    linear = nn.Linear(3, 4)
    shared = torch.arange(6.0)
    adam = torch.optim.Adam(linear.parameters())
    linear(torch.ones(3)).sum().backward()
    adam.step()
    tree = {"state_dict": linear.state_dict(), "optimizer_states": [adam.state_dict()], "epoch": 3}
    torch.save({**tree, "one": shared, "other": {"part": shared[2:]}, "layer": linear.weight}, path)
    return path


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ("data/0", "the tensor 'state_dict.weight' and 'layer' failed the CRC-32 check (data/0), so the file changed"),
        ("data/1", "the tensor 'state_dict.bias' failed"),
        ("data/3", "the tensor 'optimizer_states.0.state.0.exp_avg' failed"),
        ("data/8", "the tensor 'one' and 'other.part' failed"),
        ("data.pkl", "its record 'data.pkl' failed"),
    ],
)
def test_a_bit_that_changed_is_found_by_one_of_those_that_share_the_work(
    tmp_path: Path, record: str, words: str
) -> None:
    path = saved(tmp_path / "x.ckpt")
    for share in ((0, 1), (0, 3), (1, 3), (2, 3)):
        verify(path, share=share)
    flip(path, record)
    with pytest.raises(ValueError, match="is damaged") as error:
        verify(path)
    assert str(error.value).startswith(f"{path} is damaged: {words}")
    said = [refusal(path, (number, 3)) for number in range(3)]
    assert [each for each in said if each] == [str(error.value)]


def refusal(path: Path, share: tuple[int, int]) -> str | None:
    try:
        verify(path, share=share)
    except ValueError as error:
        return str(error)
    return None


def test_every_byte_counts(tmp_path: Path) -> None:
    """Also in the middle of a file that has other things before and after."""
    tensor = torch.arange(1000.0)
    torch.save(tensor, tmp_path / "tensor")
    content = (tmp_path / "tensor").read_bytes()
    begin = content.index(tensor.numpy().tobytes())
    path = tmp_path / "several"
    before = 5000  # not a multiple of a page
    for place in range(begin, begin + tensor.nbytes, 97):
        changed = bytearray(content)
        changed[place] ^= 0x10
        path.write_bytes(bytes(before) + content + changed + bytes(100))
        verify(path, offset=before, length=len(content))
        with pytest.raises(ValueError, match="several is damaged: the weight failed the CRC-32 check"):
            verify(path, offset=before + len(content), length=len(content), holds="the weight")


def test_a_tensor_without_a_table_of_records_is_named(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.ckpt")
    length = path.read_bytes().rindex(b"PK\x05\x06")
    match = r"is damaged: the weight failed the CRC-32 check .*, so the file changed after it was written"
    with pytest.raises(ValueError, match=match):
        verify(path, length=length, holds="the weight")


def test_a_part_of_a_file_is_an_archive_without_anything_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Newer Pythons take the end of an archive in front, which is as long, for that of the archive, and refuse it."""
    one, other = io.BytesIO(), io.BytesIO()
    torch.save(torch.ones(3), one)
    torch.save(torch.zeros(3), other)
    assert len(one.getvalue()) == len(other.getvalue())
    path, length = tmp_path / "x.distcp", len(one.getvalue())
    path.write_bytes(one.getvalue() + other.getvalue())
    seen: list[bytes] = []
    archive_of = zipfile.ZipFile

    def look(file: Any) -> zipfile.ZipFile:
        file.seek(0)
        seen.append(file.read())
        return archive_of(file)

    monkeypatch.setattr(zipfile, "ZipFile", look)
    verify(path, offset=0, length=length, holds="one")
    verify(path, offset=length, length=length, holds="other")
    assert seen == [one.getvalue(), other.getvalue()]


@pytest.mark.parametrize("kind", ["empty", "text", "old format", "no checksums"])
def test_what_has_no_checksums_passes(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x"
    options: dict[str, Any] = {"_use_new_zipfile_serialization": kind != "old format"}
    computes = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(kind != "no checksums")
    try:
        torch.save(torch.ones(100), path, **options)
    finally:
        torch.serialization.set_crc32_options(computes)
    if kind in ("empty", "text"):
        path.write_text("" if kind == "empty" else "no archive")
    verify(path)


def test_every_byte_of_an_index_counts() -> None:
    """It could be taken for a good one, or fail far from where it was read."""
    index = pickle.dumps({"state_dict.weight": (3, 4), "state_dict.bias": (4,)})
    content = index + checksum_of(index)
    verify_index(content, "x")
    assert pickle.loads(content) == pickle.loads(index), "torch reads the one as the other"
    for place in range(len(index)):
        damaged = bytearray(content)
        damaged[place] ^= 1
        with pytest.raises(
            ValueError,
            match="x is damaged: its CRC-32 checksum does not match, so the file changed after it was written",
        ):
            verify_index(bytes(damaged), "x")
    verify_index(index[:-1], "of torch, which has no checksum")
