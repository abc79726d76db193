"""Comparison of a checkpoint with a model: names and shapes are compared before anything is loaded.

`Checkpointer` and `Weights` call :func:`load_module_state` with a full state dict. `ShardedCheckpoint` and `Weights`
call :func:`check_match` with names and shapes, before they read tensors. torch's `load_state_dict` alone is not enough:
it raises its error after it has loaded the tensors that match, so a failed load would leave a mixed module.

The *extra state* of a layer is a value in its state dict that is not a tensor.
"""

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
    """Return the shape of a tensor; ``None`` for another value, such as the extra state of a layer."""
    return value.shape if isinstance(value, Tensor) else None


def check_match(
    module: nn.Module,
    own: Mapping[str, torch.Size | None],
    saved: Mapping[str, torch.Size | None],
    *,
    strict: bool,
) -> None:
    """Compare the names and shapes of a module with the names and shapes of a checkpoint.

    Args:
        module: The module.
        own: The shapes of the values in its state dict, by name; see :func:`shape_of`.
        saved: The shapes of the values in the checkpoint, by name; see :func:`shape_of`.
        strict: If True, names that only the module or only the checkpoint has are an error.

    Raises:
        RuntimeError: If they differ, with torch's error text and similar names.
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
        text = "\n\t".join(lines)
        hints = _hints(missing, unexpected)
        raise RuntimeError(f"Error(s) in loading state_dict for {type(module).__name__}:\n\t{text}{hints} [LH920]")


def load_module_state(module: nn.Module, state: Mapping[str, Any], *, strict: bool) -> None:
    """Load a state dict into a module like torch, but all of it or nothing, and with similar names in the error.

    A first attempt loads the module's own values. So torch, or layers with their own loading code, decide if everything
    fits before the module changes.

    Args:
        module: The module, with placeholders for tensors of other stages.
        state: The state dict of the full module.
        strict: If True, names that only the module or only the state dict has are an error.

    Raises:
        RuntimeError: If names or shapes do not match.
    """
    own = module.state_dict()
    trial: Any = copy.copy(state)
    final: Any = copy.copy(state)
    parts = module.named_modules()
    otherwise = tuple(f"{path}." if path else "" for path, part in parts if has_own_loading(part))
    for name, value in state.items():
        changes = isinstance(value, Tensor) and name.startswith(otherwise)
        # Values from a directory are the module's own tensors, so a layer's own loading code must receive a copy.
        if changes:
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
    """Return one line for each missing name with a similar unexpected name; an empty text if there are none."""
    others = list(unexpected)
    near = [(name, difflib.get_close_matches(name, others, n=1)) for name in missing]
    lines = [f"\n\tThe checkpoint has no {name!r}, but it has {found[0]!r}." for name, found in near if found]
    return "".join(lines[:8])


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)
