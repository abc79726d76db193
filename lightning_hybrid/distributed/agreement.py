"""Agreement of ranks: an error on one rank becomes an error on all ranks, and values are compared over ranks.

Setup code calls these functions (`strategy.checks`, `strategy.run`, `strategy.parallelize`), and so does code that
makes a decision from the values of all ranks (checkpoints, schedules, optimization). If only one rank raised an error,
the other ranks would wait in their next collective until the timeout. torch's `all_gather_object` has no such
agreement, and always takes two collectives. Every function here that takes a group, and :func:`check_equal`, is a
collective: every rank of the group must call it.
"""

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
_SMALL = 544  # bytes of each rank in the first collective
_RANK_INFO = struct.Struct("64sqQ")  # a host name has at most 64 bytes (HOST_NAME_MAX of Linux)


class RankInfo(NamedTuple):
    """Facts about a rank that the other ranks need before the mesh is made.

    `strategy.checks.check_ranks` exchanges them.

    Attributes:
        host: The name of its host.
        num_groups: The number of its process groups, as :func:`~.process_group.num_groups` counts them.
        seed: The seed of torch's default generator, 64 bits.
    """

    host: str
    num_groups: int
    seed: int

    @classmethod
    def own(cls) -> RankInfo:
        """Return the facts about this rank."""
        return cls(socket.gethostname(), num_groups(), torch.initial_seed() % (1 << 64))

    def to_bytes(self) -> bytes:
        """Return the facts as bytes, whose number is the same on every rank."""
        host, *numbers = self
        return _RANK_INFO.pack(host.encode()[:64], *numbers)

    @classmethod
    def from_bytes(cls, value: bytes) -> RankInfo:
        """Return the facts from the bytes of :meth:`to_bytes`."""
        host, *numbers = _RANK_INFO.unpack(value)
        return cls(host.rstrip(b"\0").decode(errors="replace"), *numbers)


def agree(check: Callable[[], _T], group: dist.ProcessGroup | None = None) -> _T:
    """Call a function on every rank. If it fails on one rank, raise the error on all ranks, with the same text.

    Every rank of the group must call this.

    Args:
        check: The function. It must not start a collective that other ranks skip if it fails there. Exceptions that are
            not an `Exception`, such as `KeyboardInterrupt`, leave this function at once, without the other ranks.
        group: The argument of :func:`~.process_group.all_gather_bytes`.

    Returns:
        The result of the function on this rank.

    Raises:
        ValueError, TypeError, RuntimeError, OSError: The error of the lowest rank that failed, on all ranks. A rank
            that failed with the same text raises its own exception. Other ranks raise the type in :data:`_AGREED` that
            matches first, or a `RuntimeError` for other types.
    """
    error: Exception | None = None
    result: _T
    try:
        result = check()
    except Exception as raised:
        error = raised
    failed = torch.tensor(error is not None, dtype=torch.int32, device=world_device() if group is None else "cpu")
    dist.all_reduce(failed, dist.ReduceOp.MAX, group=group)  # exchanging texts takes three times as long
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
    """Raise an error on all ranks if values are not the same on every rank.

    Every rank must call this. If the values are the same, it takes one collective.

    Args:
        values: The values of this rank as text, by name. A name that a rank lacks counts as a difference.
        advice: The remedy for a difference.
        own: Additional bytes of this rank, sent in the same collective. Their number is the same on every rank.

    Returns:
        The additional bytes of each rank, in the order of the ranks.

    Raises:
        ValueError: If a value is not the same on every rank.
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
    """Return the value of each rank of a group, in the order of the group.

    Every rank of the group must call this. It takes one collective if all values are small, and otherwise two. torch
    always takes two, the first one for the sizes.

    Args:
        value: The value of this rank, which can be pickled.
        group: The argument of :func:`~.process_group.all_gather_bytes`.
    """
    first, *rest = [part.numpy().tobytes() for part in Message.make(encode(value), size=_SMALL).parts]
    told = all_gather_bytes(first, group)
    longest = max(Message.read(bytes_tensor(of_rank)).num_bytes for of_rank in told)
    if longest > _SMALL:
        rests = all_gather_bytes(b"".join(rest).ljust(longest - _SMALL), group)
        told = [beginning + more for beginning, more in zip(told, rests, strict=True)]
    return [Message.read(bytes_tensor(of_rank)).value() for of_rank in told]


def unequal_text(name: str, values: Mapping[int, str]) -> str:
    """Return a sentence that lists the different values with their ranks.

    Args:
        name: The name of the value.
        values: The value on each rank, as text.
    """
    return f"`{name}` is not the same on every rank: {by_rank(values)}."


def by_rank(values: Mapping[int, str]) -> str:
    """Return the values, each with the ranks that have it.

    Args:
        values: The value on each rank, as text, by rank.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks_of.setdefault(value, []).append(rank)
    return "; ".join(
        f"{value} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_MOST]))}"
        f"{', ...' if len(ranks) > _MOST else ''}"
        for value, ranks in ranks_of.items()
    )


_MOST = 8  # ranks listed for one value
#: The types of errors that keep their type on other ranks, subclasses before their base classes.
_AGREED = (FileNotFoundError, OSError, TypeError, ValueError, RuntimeError)
