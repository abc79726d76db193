"""Weights of an earlier training, from a file, a directory or a state dict. Each rank loads its part.

`ModuleParallelizer` makes a :class:`Weights` when the module is sharded, for `initial_weights` and for
`strategy.load_weights`. Loading the weights in the user's code before that would need the full model in each process. A
checkpoint that a run resumes from is read by `Checkpointer` instead, because it also has optimizer states.

Nothing here communicates; the callers use :func:`agree`, so that an error of one rank is raised on all ranks. *Tied*
parameters are one parameter with several names.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn

from lightning_hybrid.checkpoint.optimizer_state import OptimizerStates
from lightning_hybrid.checkpoint.state_dict_match import check_match, load_module_state, shape_of
from lightning_hybrid.checkpoint.storage.checksums import verify
from lightning_hybrid.checkpoint.storage.remote import is_directory
from lightning_hybrid.checkpoint.weights.hugging_face import HuggingFaceFolder
from lightning_hybrid.checkpoint.weights.tensor_files import SAFETENSORS, open_tensors, read_torch
from lightning_hybrid.data_parallel.parameter_map import ParameterMap
from lightning_hybrid.distributed.module_names import fold_numbered
from lightning_hybrid.error_codes.entry import without_code

#: The types of a source of weights: a path, or the state dict of a full module.
Source = str | Path | Mapping[str, Any]


class Weights:
    """The weights of a full module, which were found but not read yet: files are mapped into memory.

    Args:
        source: A state dict; a `torch.save` file with a state dict, alone or in a Lightning checkpoint; a
            ``.safetensors`` file; a Hugging Face folder; or a directory that `save_distributed_checkpoint=True` or
            another Lightning strategy has written.

    Raises:
        FileNotFoundError: If the file or directory does not exist.
        ValueError: If its content is something else, or is damaged.
    """

    def __init__(self, source: Source) -> None:
        path = None if isinstance(source, Mapping) else Path(source)
        self._folder = HuggingFaceFolder(path) if path is not None and HuggingFaceFolder.is_at(path) else None
        may_be = path is not None and self._folder is None
        self._directory = path if may_be and path is not None and is_directory(path) else None
        if self._directory is not None:
            _check_directory(self._directory)
        self._state = {} if self._folder or self._directory else _read(source)
        self._files = self._folder.files if self._folder else [path] if path is not None and path.is_file() else []

    def shapes(self, module: nn.Module) -> dict[str, torch.Size]:
        """Return the shapes of the available tensors, by their names in a module.

        Raises:
            FileNotFoundError, ValueError: If a Hugging Face folder matches no part of the module, or several parts; or
                if a directory contains no complete checkpoint.
        """
        if self._folder is not None:
            _, names = self._folder.names_in(module)
            shapes = self._folder.tensors_for(module).shapes
            return {name: shapes[source] for name, source in names.items()}
        if self._directory is None:
            return {name: value.shape for name, value in self._state.items() if isinstance(value, Tensor)}
        from lightning_hybrid.checkpoint.storage.dcp import DistributedCheckpoint  # importing torch's part takes time

        directory = DistributedCheckpoint(self._directory)
        return {path[0]: entry.size for path, entry in directory.below(directory.module_root).items() if entry}

    def load(self, module: LightningModule, parameters: ParameterMap, *, share: tuple[int, int] = (0, 1)) -> None:
        """Load the weights into a module.

        Args:
            module: The user's module, parallelized. Its `strict_loading` determines if names may differ.
            parameters: The places of its tensors, which are used only for a directory.
            share: (number, count): the part of each file, out of equally large parts, whose checksums this rank
                verifies.

        Raises:
            ValueError: If a Hugging Face folder matches no part of the module, or several parts; or if the content does
                not match its checksums, in formats with checksums.
            RuntimeError: If names or shapes do not match. Nothing is loaded then.
        """
        for file in self._files:
            verify(file, share=share)
        if self._folder is not None:
            _load_folder(self._folder, module)
            return
        if self._directory is None:
            load_module_state(module, _with_ties(self._state, module), strict=module.strict_loading)
            return
        from lightning_hybrid.checkpoint.sharded import ShardedCheckpoint  # imported late for the same reason

        checkpoint = ShardedCheckpoint(module, parameters, OptimizerStates(module))
        checkpoint.load(self._directory, strict=module.strict_loading, read_extra=lambda path: {})


def _load_folder(folder: HuggingFaceFolder, module: LightningModule) -> None:
    """Load the part of a module that a folder matches. Parameters of this part that the folder lacks are missing.

    Buffers that the folder lacks are not, because the model computes such buffers itself.
    """
    prefix, names = folder.names_in(module)
    tensors = folder.tensors_for(module)
    own, saved = module.state_dict(), {name: tensors.shapes[source] for name, source in names.items()}
    tied = _tied_names(module)
    missing = [ties[0] for ties in tied if saved.keys().isdisjoint(ties)]
    below = [name for name in missing if not prefix or name.startswith(f"{prefix}.")]
    needed = {name: shape_of(value) for name, value in own.items() if name in saved or name in below}
    try:
        check_match(module, needed, saved, strict=module.strict_loading)
    except RuntimeError as error:
        raise RuntimeError(
            f"{without_code(error)}\n\tThe weights in {folder.path} match `{prefix or type(module).__name__}` best. To"
            " load only the tensors whose names are in both the folder and the module, set `self.strict_loading ="
            " False`. [LH920]"
        ) from None
    if missing:
        kept = ", ".join(name for (name,) in fold_numbered((name,) for name in missing))
        rank_zero_info(f"These tensors were not loaded, because {folder.path} does not contain them: {kept}")
    here = {name: source for name, source in names.items() if name in own and not own[name].is_meta}
    state = {name: tensors.read(source) for name, source in here.items()}
    load_module_state(module, _with_ties(state, module), strict=False)


def _tied_names(module: nn.Module) -> list[list[str]]:
    """Return the names of each parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return list(names.values())


def _with_ties(state: Mapping[str, Any], module: nn.Module) -> Mapping[str, Any]:
    """Return a state dict with all names of tied parameters, because many files contain only one name of each."""
    completed: Any = copy.copy(state)  # keeps the versions of layers
    for tied in _tied_names(module):
        known = next((name for name in tied if name in state), None)
        if known is not None:
            completed.update({name: state[known] for name in tied if name not in state})
    full: Mapping[str, Any] = completed
    return full


def _check_directory(path: Path) -> None:
    files = sorted(file.name for suffix in (SAFETENSORS, ".bin") for file in path.glob(f"*{suffix}"))
    if files:
        raise ValueError(
            f"{path} is a folder with {files[:3]}, but it is neither a checkpoint nor a Hugging Face model"
            " (model.safetensors, or several files with an index). If all weights are in one file, pass the path of"
            " this file. Otherwise, pass a state dict with all tensors to `strategy.load_weights`. [LH928]"
        )


def _read(source: Source) -> Mapping[str, Any]:
    if isinstance(source, Mapping):
        found: Any = source
    else:
        path = Path(source)
        if not path.is_file():
            raise FileNotFoundError(f"No weights found: {path} is neither a file nor a directory. [LH913]")
        found = _read_safetensors(path) if path.suffix == SAFETENSORS else read_torch(path)
    state = found.get("state_dict", found) if isinstance(found, Mapping) else found
    if not isinstance(state, Mapping) or not any(isinstance(value, Tensor) for value in state.values()):
        what = source if isinstance(source, (str, Path)) else "The object"
        raise ValueError(
            f"{what} does not contain a state dict (a dictionary of named tensors), either directly or under the key"
            f" 'state_dict'. The loaded object is a"
            f" {type(found).__name__}{f' with the keys {list(found)[:5]}' if isinstance(found, Mapping) else ''}."
            " [LH925]"
        )
    return state


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    file = open_tensors(path)
    return {name: file.read(name) for name in file.shapes}
