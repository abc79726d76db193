"""Whether a checkpoint is one of this model: names and shapes compared before anything is loaded."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.distributed.dtensor import distribute_like, is_in_blocks, is_zero_sharded
from lightning_hybrid.torch_internals import has_own_loading


def shape_of(value: Any) -> torch.Size | None:
    """The shape of a tensor; nothing for another value, such as the extra state of a layer."""
    return value.shape if isinstance(value, Tensor) else None


def check_match(
    module: nn.Module,
    own: Mapping[str, torch.Size | None],
    saved: Mapping[str, torch.Size | None],
    *,
    strict: bool,
) -> None:
    """Compare the names and shapes of a module with those of a checkpoint.

    Args:
        module: The module.
        own: The shapes of what is in its state dict, by name.
        saved: The shapes of what is in the checkpoint, by name.
        strict: Whether names that only one of them has are an error.

    Raises:
        RuntimeError: If they differ; as torch says it, with the nearest names.
    """
    missing = [name for name in own if name not in saved] if strict else []
    unexpected = [name for name in saved if name not in own] if strict else []
    lines = []
    if unexpected:
        lines.append(f"Unexpected key(s) in state_dict: {_quoted(unexpected)}. ")
    if missing:
        lines.append(f"Missing key(s) in state_dict: {_quoted(missing)}. ")
    lines += [
        f"size mismatch for {name}: copying a param with shape {saved[name]} from checkpoint, the shape in current"
        f" model is {shape}."
        for name, shape in own.items()
        if name in saved and saved[name] != shape
    ]
    if lines:
        text = "\n\t".join([f"Error(s) in loading state_dict for {type(module).__name__}:", *lines])
        raise RuntimeError(f"{text}{_hints(missing, unexpected)} [LH920]")


def load_module_state(module: nn.Module, state: Mapping[str, Any], *, strict: bool) -> None:
    """Load a state dict into a module as torch does, but all of it or nothing, and with the nearest names.

    It is tried with the values that the module has: so whatever decides what fits, torch or layers that load in a way
    of their own, decides before anything changes.

    Args:
        module: The module, with placeholders for what lives elsewhere.
        state: The undivided module's.
        strict: Whether names that only one of them has are an error.

    Raises:
        RuntimeError: If they do not fit.
    """
    own = module.state_dict()
    trial: Any = copy.copy(state)
    final: Any = copy.copy(state)
    parts = module.named_modules()
    otherwise = tuple(f"{path}." if path else "" for path, part in parts if has_own_loading(part))
    for name, value in state.items():
        changes = isinstance(value, Tensor) and name.startswith(otherwise)
        if changes:  # what a layer makes of it must not be its own memory, which the values of a directory are
            final[name] = value.clone()
        if name in own and shape_of(own[name]) == shape_of(value):
            trial[name] = own[name].clone() if changes else own[name]
            if is_zero_sharded(own[name]) or is_in_blocks(own[name]):
                final[name] = distribute_like(value, own[name])
    try:
        module.load_state_dict(trial, strict=strict)
    except RuntimeError as error:
        missing, unexpected = [name for name in own if name not in state], [name for name in state if name not in own]
        raise RuntimeError(f"{error}{_hints(missing, unexpected)} [LH920]") from error
    module.load_state_dict(final, strict=strict)


def _hints(missing: Iterable[str], unexpected: Iterable[str]) -> str:
    """For missing names the nearest ones that are there, in lines of their own; nothing if none is near."""
    others = list(unexpected)
    near = [(name, difflib.get_close_matches(name, others, n=1)) for name in missing]
    lines = [f"\n\tThe checkpoint has no {name!r}, but it has {found[0]!r}." for name, found in near if found]
    return "".join(lines[:8])


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)
