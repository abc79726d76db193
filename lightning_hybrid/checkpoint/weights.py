"""Weights of another training: of a file, a directory or a state dict, each rank loads its part."""

from __future__ import annotations

import copy
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from lightning_hybrid.checkpoint.optimizer_state import OptimizerStates
from lightning_hybrid.checkpoint.ownership import Ownership
from lightning_hybrid.checkpoint.sharded import ShardedCheckpoint
from lightning_hybrid.checkpoint.state_dict_match import load_module_state
from lightning_hybrid.checkpoint.storage.dcp import DistributedCheckpoint
from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.pipeline_parallel.stage_map import StageMap

#: What a user may give: a path, or the state dict of an undivided module.
Source = str | Path | Mapping[str, Any]

_SUFFIX = ".safetensors"


class Weights:
    """The weights of an undivided module, found but not read: files are mapped into memory.

    Args:
        source: A state dict; a file of `torch.save` with one, alone or in a checkpoint of Lightning; a ``.safetensors``
            file; or a directory that `save_distributed_checkpoint=True` or another strategy of Lightning has written.

    Raises:
        FileNotFoundError: If there is nothing.
        ValueError: If it is no such thing, or is damaged.
    """

    def __init__(self, source: Source) -> None:
        self._directory = (
            None if isinstance(source, Mapping) or not DistributedCheckpoint.is_at(Path(source)) else Path(source)
        )
        if self._directory is not None:
            _check_folder(self._directory)
        self._state = {} if self._directory else _read(source)

    def shapes(self) -> dict[str, torch.Size]:
        """What there is, by name."""
        if self._directory is None:
            return {name: value.shape for name, value in self._state.items() if isinstance(value, Tensor)}
        directory = DistributedCheckpoint(self._directory)
        return {path[0]: entry.size for path, entry in directory.below(directory.module_root).items() if entry}

    def load(self, module: LightningModule, stage_map: StageMap, mesh: Mesh) -> None:
        """Give the module its values.

        Args:
            module: The user's module, parallelized. Its `strict_loading` says whether names may differ.
            stage_map: Which stage holds what.
            mesh: The ranks.

        Raises:
            RuntimeError: If names or shapes do not fit; nothing is loaded then.
        """
        if self._directory is None:
            load_module_state(module, _with_ties(self._state, module), strict=module.strict_loading)
            return
        checkpoint = ShardedCheckpoint(module, Ownership(module, stage_map, mesh), OptimizerStates(module), mesh)
        checkpoint.load(self._directory, strict=module.strict_loading, read_extra=lambda path: {})


def _with_ties(state: Mapping[str, Any], module: nn.Module) -> Mapping[str, Any]:
    """Of tied parameters many files have one name: the others have its value."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    completed: Any = copy.copy(state)  # with the versions of layers
    for tied in names.values():
        known = next((name for name in tied if name in state), None)
        if known is not None:
            completed.update({name: state[known] for name in tied if name not in state})
    full: Mapping[str, Any] = completed
    return full


def _check_folder(path: Path) -> None:
    files = sorted(file.name for suffix in (_SUFFIX, ".bin") for file in path.glob(f"*{suffix}"))
    if files:
        raise ValueError(
            f"{path} is a folder with {files[:3]}, and not a checkpoint. Give the file, or of several a state dict with"
            " all of them to `strategy.load_weights`."
        )


def _read(source: Source) -> Mapping[str, Any]:
    if isinstance(source, Mapping):
        found: Any = source
    else:
        path = Path(source)
        if not path.is_file():
            raise FileNotFoundError(f"There are no weights at {path}: neither a file nor a directory.")
        found = _read_safetensors(path) if path.suffix == _SUFFIX else _read_torch(path)
    state = found.get("state_dict", found) if isinstance(found, Mapping) else found
    if not isinstance(state, Mapping) or not any(isinstance(value, Tensor) for value in state.values()):
        what = f"{source} has" if isinstance(source, (str, Path)) else "This is"
        raise ValueError(
            f"{what} no state dict: tensors by name, alone or as 'state_dict' of a checkpoint. It is a"
            f" {type(found).__name__}{f' with {list(found)[:5]}' if isinstance(found, Mapping) else ''}."
        )
    return state


def _read_torch(path: Path) -> Any:
    try:
        return torch.load(path, "cpu", mmap=zipfile.is_zipfile(path) or None, weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} cannot be read as weights: {error} If you trust it, load it yourself and give"
            " `strategy.load_weights` the state dict, for example in `setup`."
        ) from error
    except (RuntimeError, EOFError, OSError) as error:
        raise ValueError(
            f"{path}, {path.stat().st_size} bytes, cannot be read: {type(error).__name__}: {error}"
        ) from error


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a ``.safetensors`` file, mapped into memory."""
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path}, {path.stat().st_size} bytes, is no complete .safetensors file: {error}") from error
