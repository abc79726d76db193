"""What ranks agree on before anything is done: an error on one is an error on all."""

from __future__ import annotations

import hashlib
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from lightning_hybrid.distributed.process_group import all_gather_bytes, num_groups, world_device
from lightning_hybrid.distributed.pytree import Message, encode
from lightning_hybrid.distributed.tensor_bytes import bytes_tensor

_T = TypeVar("_T")
_SMALL = 544  # bytes that each rank tells all others in one collective
_RANK_INFO = struct.Struct("64sqQ")  # names of hosts have at most 64 bytes (HOST_NAME_MAX of Linux)


class RankInfo(NamedTuple):
    """What the others have to know of a rank before there is anything else.

    Attributes:
        host: The name of its machine.
        num_groups: How many process groups it has.
        seed: Of torch's random numbers.
    """

    host: str
    num_groups: int
    seed: int

    @classmethod
    def own(cls) -> RankInfo:
        """That of this rank."""
        return cls(socket.gethostname(), num_groups(), torch.initial_seed() % (1 << 64))

    def to_bytes(self) -> bytes:
        """As bytes, equally many for every rank."""
        host, *numbers = self
        return _RANK_INFO.pack(host.encode()[:64], *numbers)

    @classmethod
    def from_bytes(cls, value: bytes) -> RankInfo:
        """The inverse of :meth:`to_bytes`."""
        host, *numbers = _RANK_INFO.unpack(value)
        return cls(host.rstrip(b"\0").decode(errors="replace"), *numbers)


def agree(check: Callable[[], _T], group: dist.ProcessGroup | None = None) -> _T:
    """Run something on every rank; if it fails on one, it fails on all, with the same text.

    Args:
        check: May raise anything.
        group: As of :func:`~.process_group.all_gather_bytes`.

    Returns:
        What it returns.

    Raises:
        ValueError, TypeError, RuntimeError, OSError: The first rank's; another kind is a `RuntimeError` elsewhere.
    """
    error: Exception | None = None
    result: _T
    try:
        result = check()
    except Exception as raised:
        error = raised
    failed = torch.tensor(error is not None, dtype=torch.int32, device=world_device() if group is None else "cpu")
    dist.all_reduce(failed, dist.ReduceOp.MAX, group=group)  # a third of the time that texts take
    if not failed.item():
        return result
    kind = next((number for number, kind in enumerate(_AGREED) if isinstance(error, kind)), len(_AGREED) - 1)
    text = str(error) if isinstance(error, _AGREED) else f"{type(error).__name__}: {error}"
    errors = all_gather_values(None if error is None else (kind, text), group)
    first = next(found for found in errors if found is not None)
    if error is not None and text == first[1]:
        raise error
    raise _AGREED[first[0]](first[1]) from error


def check_equal(values: Mapping[str, str], advice: str, own: bytes = b"") -> list[bytes]:
    """Compare what must be the same on every rank: by one collective if it is.

    Args:
        values: Texts by name, of this rank.
        advice: What to do if they differ.
        own: What all ranks get to know beside that; of equal length on every rank.

    Returns:
        Those of all ranks.

    Raises:
        ValueError: If one of them is not the same everywhere; on every rank.
    """
    digest = hashlib.sha256(repr(sorted(values.items())).encode()).digest()
    told = all_gather_bytes(digest + own)
    if len({of_rank[: len(digest)] for of_rank in told}) == 1:
        return [of_rank[len(digest) :] for of_rank in told]
    found = all_gather_values(dict(values))
    for name in dict.fromkeys(name for of_rank in found for name in of_rank):
        of_name = {rank: other.get(name, "nothing") for rank, other in enumerate(found)}
        if len(set(of_name.values())) > 1:
            raise ValueError(f"`{name}` is not the same on every rank: {by_rank(of_name)}. {advice} [LH201]")
    raise AssertionError("the digests differ, but the texts are equal")


def all_gather_values(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What each rank of a group has, by one collective if these are small: torch takes two, of which one is the sizes.

    Args:
        value: Of this rank; anything that can be pickled.
        group: As of :func:`~.process_group.all_gather_bytes`.
    """
    first, *rest = [part.numpy().tobytes() for part in Message.make(encode(value), size=_SMALL).parts]
    told = all_gather_bytes(first, group)
    longest = max(Message.read(bytes_tensor(of_rank)).num_bytes for of_rank in told)
    if longest > _SMALL:
        rests = all_gather_bytes(b"".join(rest).ljust(longest - _SMALL), group)
        told = [beginning + more for beginning, more in zip(told, rests, strict=True)]
    return [Message.read(bytes_tensor(of_rank)).value() for of_rank in told]


def unequal_text(name: str, values: Mapping[int, str]) -> str:
    """What differs, and on which ranks.

    Args:
        name: What it is.
        values: Its value on each rank.
    """
    return f"`{name}` is not the same on every rank: {by_rank(values)}."


def by_rank(values: Mapping[int, str]) -> str:
    """Return the values, each with the ranks that have it.

    Args:
        values: The value on each rank.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks_of.setdefault(value, []).append(rank)
    return "; ".join(
        f"{value} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_MOST]))}"
        f"{', ...' if len(ranks) > _MOST else ''}"
        for value, ranks in ranks_of.items()
    )


_MOST = 8  # ranks in one text
_AGREED = (FileNotFoundError, OSError, TypeError, ValueError, RuntimeError)
