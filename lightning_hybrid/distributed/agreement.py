"""What ranks agree on before anything is done: an error on one is an error on all."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_hybrid.distributed.process_group import world_device

_T = TypeVar("_T")


def agree(check: Callable[[], _T]) -> _T:
    """Run something on every rank; if it fails on one, it fails on all, with the same text.

    Args:
        check: May raise anything.

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
    failed = torch.tensor(error is not None, dtype=torch.int32, device=world_device())
    dist.all_reduce(failed, dist.ReduceOp.MAX)  # a third of the time that texts take
    if not failed.item():
        return result
    errors: list[Any] = [None] * dist.get_world_size()
    kind = next((number for number, kind in enumerate(_AGREED) if isinstance(error, kind)), len(_AGREED) - 1)
    text = str(error) if isinstance(error, _AGREED) else f"{type(error).__name__}: {error}"
    dist.all_gather_object(errors, None if error is None else (kind, text))
    first = next(found for found in errors if found is not None)
    if error is not None and text == first[1]:
        raise error
    raise _AGREED[first[0]](first[1]) from error


def check_equal(values: Mapping[str, str], advice: str) -> None:
    """Compare what must be the same on every rank.

    Args:
        values: Texts by name, of this rank.
        advice: What to do if they differ.

    Raises:
        ValueError: If one of them is not the same everywhere; on every rank.
    """
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, hashlib.sha256(repr(sorted(values.items())).encode()).digest())
    if len(set(found)) == 1:
        return
    dist.all_gather_object(found, dict(values))
    for name in dict.fromkeys(name for of_rank in found for name in of_rank):
        of_name = {rank: other.get(name, "nothing") for rank, other in enumerate(found)}
        if len(set(of_name.values())) > 1:
            raise ValueError(f"{unequal_text(name, of_name)} {advice}")


def unequal_text(name: str, values: Mapping[int, str]) -> str:
    """What differs, and on which ranks.

    Args:
        name: What it is.
        values: Its value on each rank.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks_of.setdefault(value, []).append(rank)
    parts = [
        f"{value} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_MOST]))}"
        f"{', ...' if len(ranks) > _MOST else ''}"
        for value, ranks in ranks_of.items()
    ]
    return f"`{name}` is not the same on every rank: {'; '.join(parts)}."


_MOST = 8  # ranks in one text
_AGREED = (FileNotFoundError, OSError, TypeError, ValueError, RuntimeError)
