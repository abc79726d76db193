"""Files of named tensors, which are mapped into memory: a tensor is read only when it is used.

`Weights` and `HuggingFaceFolder` open each file of initial weights with it. Every rank opens the file of the full
model, but uses only some tensors, so reading all of it would need the memory of the full model in each process.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

SAFETENSORS = ".safetensors"


@dataclass(frozen=True)
class TensorFile:
    """File from which only names and shapes have been read.

    Attributes:
        shapes: The shapes of its tensors, by name.
        read: Returns the full tensor with a name, on the host.
    """

    shapes: dict[str, torch.Size]
    read: Callable[[str], Tensor]


def open_tensors(path: Path) -> TensorFile:
    """Open a ``.safetensors`` file, or a `torch.save` file with a dictionary of tensors.

    Args:
        path: The file.

    Raises:
        ValueError: If the file has neither format, or is damaged.
    """
    if path.suffix != SAFETENSORS:
        found = read_torch(path)
        if not isinstance(found, dict):
            raise ValueError(f"{path} contains a {type(found).__name__}, not a dictionary of named tensors. [LH925]")
        tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
        return TensorFile({name: tensor.shape for name, tensor in tensors.items()}, tensors.__getitem__)
    try:
        file: Any = safe_open(path, framework="pt")
    except SafetensorError as error:
        size = path.stat().st_size
        raise ValueError(f"{path} ({size} bytes) is not a complete .safetensors file: {error} [LH901]") from error
    shapes = {name: torch.Size(file.get_slice(name).get_shape()) for name in file.offset_keys()}
    return TensorFile(shapes, file.get_tensor)


def read_torch(path: Path) -> Any:
    """Return the content of a `torch.save` file, read with ``weights_only=True``, so that no code of the file runs.

    Args:
        path: The file.

    Raises:
        ValueError: If it contains other objects than weights, or is damaged.
    """
    try:
        return torch.load(path, "cpu", mmap=zipfile.is_zipfile(path) or None, weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} cannot be loaded as weights: {error} If you trust the file, load it yourself and pass the state"
            " dict to `strategy.load_weights`, for example in `setup`. [LH927]"
        ) from error
    except (RuntimeError, EOFError, OSError) as error:
        raise ValueError(
            f"{path} ({path.stat().st_size} bytes) cannot be read: {type(error).__name__}: {error} [LH901]"
        ) from error
