"""Conversion of a checkpoint directory to an ordinary file that plain Lightning can read.

The file is first created with room for every tensor. The tensors are then written one after the other through a memory
map, so a checkpoint may be larger than the memory of the node::

    .metadata, meta.pt ---> names, shapes, plain values ---> the file, without values
    __0_0.distcp, ... ----> one tensor after the other  ---> the same file, mapped
"""

from __future__ import annotations

import io
import mmap
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.checkpoint.metadata import METADATA
from lightning_hybrid.checkpoint.optimizer_state import numbered
from lightning_hybrid.checkpoint.storage.atomic import new_file, reserve
from lightning_hybrid.checkpoint.storage.dcp import MODEL, OPTIMIZERS, DistributedCheckpoint
from lightning_hybrid.checkpoint.storage.remote import Place
from lightning_hybrid.checkpoint.tree_paths import insert, tree_of
from lightning_hybrid.distributed.pytree import TreePath
from lightning_hybrid.torch_internals import set_layer_metadata

_ORDER = ("epoch", "global_step", "pytorch-lightning_version", MODEL, "loops", "callbacks", OPTIMIZERS)
_OF_TRAINING = ("callbacks", OPTIMIZERS, "lr_schedulers")  # entries that Lightning omits if it saves only weights


@dataclass(frozen=True)
class Outline:
    """The content of a checkpoint directory, as the tree of an ordinary checkpoint.

    Attributes:
        checkpoint: The tree. Tensors of the model and the optimizers have no values yet, but other tensors do.
        tensors: The tensors without values, by their paths in the directory.
    """

    checkpoint: dict[str, Any]
    tensors: dict[TreePath, Tensor]


def read_outline(
    directory: DistributedCheckpoint,
    *,
    device: str = "cpu",
    weights_only: bool = False,
    read_extra: Callable[[Path], Any] | None = None,
) -> Outline:
    """Return the content of a directory without reading tensors of the model or an optimizer.

    Args:
        directory: A directory of this package, or of Lightning's FSDP or ModelParallel strategy.
        device: The device of tensors without values. On the CPU, they take memory when they are written.
        weights_only: If True, omit everything that only a resumed run needs.
        read_extra: Reads a file with all values that are not tensors of the model or an optimizer.

    Raises:
        ValueError: If the directory has no module, or if a file cannot be read.
    """
    root = directory.module_root
    if not directory.below(root):
        roots = sorted({str(path[0]) for path in directory.entries})
        raise ValueError(
            f"{directory.path} does not contain a module: its entries are {roots}, but none of them is {MODEL!r} or"
            f" {root!r}. [LH1009]"
        )
    extra = directory.read_extra(read_extra or _read_extra)
    targets = {
        path: torch.empty(entry.size, dtype=entry.properties.dtype, device=device) if entry else None
        for path, entry in directory.entries.items()
        if path[0] == root or not weights_only
    }
    try:
        values = targets | directory.read({path: None for path, target in targets.items() if target is None})
    except Exception as error:  # unpickling can raise any error
        raise ValueError(_unreadable(directory.path, error)) from error
    checkpoint = _merged(extra, values, directory)
    if weights_only:
        checkpoint = {key: value for key, value in checkpoint.items() if key not in _OF_TRAINING}
    ordered = {key: checkpoint[key] for key in (*_ORDER, *checkpoint) if key in checkpoint}
    return Outline(ordered, {path: target for path, target in targets.items() if target is not None})


def _merged(extra: dict[str, Any], values: Mapping[TreePath, Any], directory: DistributedCheckpoint) -> dict[str, Any]:
    """Return an ordinary checkpoint from the content of ``meta.pt`` and all other values."""
    metadata = dict(extra.get(METADATA, {}))
    names, layers = metadata.pop("names", {}), metadata.pop("layers", None)
    checkpoint = {**extra, METADATA: metadata} if METADATA in extra else dict(extra)
    optimizers: dict[Any, dict[TreePath, Any]] = {root: {} for root in directory.optimizer_roots}
    others: dict[TreePath, Any] = {}
    for path, value in values.items():
        if path[0] in optimizers:
            optimizers[path[0]][path[1:]] = value
        else:
            others[(MODEL, *path[1:]) if path[0] == directory.module_root else path] = value
    insert(checkpoint, others, names)
    if layers is not None:
        checkpoint[MODEL] = OrderedDict(checkpoint[MODEL])
        set_layer_metadata(checkpoint[MODEL], layers)
    if "lr_schedulers" in extra:  # the checkpoint has more than weights
        checkpoint.setdefault(OPTIMIZERS, [])
    trees = [tree_of(state) for state in optimizers.values() if state]
    if trees:
        try:
            checkpoint[OPTIMIZERS] = [numbered({"state": {}, **tree}) for tree in trees]
        except KeyError as error:
            raise ValueError(
                f"In the checkpoint, an optimizer has a state for {error}, but none of its parameter groups contains"
                " this parameter. [LH1014]"
            ) from error
    return checkpoint


def consolidate(
    path: Place,
    file: Path,
    *,
    weights_only: bool = False,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Outline:
    """Write the checkpoint of a directory as one file, which appears when it is complete.

    This needs no process group and no class of the module. Only one tensor is in memory at a time.

    Args:
        path: A directory of this package, or of Lightning's FSDP or ModelParallel strategy.
        file: The file.
        weights_only: If True, omit states of optimizers, schedulers and callbacks, as Lightning does with
            ``save_weights_only=True``.
        overwrite: If True, an existing file is replaced.
        progress: Called with the number of bytes that were just read, and with the total number.

    Returns:
        The content of the file; its tensors have no values.

    Raises:
        FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError: If a path does not exist, exists
            already, or is of the wrong kind.
        ValueError: If the checkpoint is incomplete or damaged.
        OSError: If the file cannot be written. An existing file is then unchanged.
    """
    if path.is_file():
        raise NotADirectoryError(
            f"{path} is a file, not a sharded checkpoint, so there is nothing to consolidate. [LH1010]"
        )
    if file.is_dir():
        raise IsADirectoryError(f"{file} is a directory. Pass the path of a file. [LH1011]")
    if file.exists() and not overwrite:
        raise FileExistsError(f"{file} already exists. Use --overwrite to replace it. [LH1012]")
    directory = DistributedCheckpoint(path, load_value=partial(torch.load, weights_only=False))
    directory.check_files()
    outline = read_outline(directory, weights_only=weights_only)
    total = sum(tensor.nbytes for tensor in outline.tensors.values())
    with new_file(file) as new:
        try:
            mapped = _lay_out(outline, new)
        except (RuntimeError, OSError, pickle.PicklingError) as error:
            raise OSError(f"{file} ({total} bytes of tensors) cannot be written: {error} [LH1015]") from error
        for tree_path, tensor in outline.tensors.items():
            try:
                directory.read({tree_path: mapped[id(tensor)]})
            except Exception as error:  # unpickling can raise any error
                raise ValueError(_unreadable(directory.path, error)) from error
            if progress is not None:
                progress(tensor.nbytes, total)
    return outline


def _lay_out(outline: Outline, file: Path) -> dict[int, Tensor]:
    """Write a file with room for the tensors, and with the values that are known.

    Returns:
        The memory-mapped tensor in the file for the identity of each tensor of the checkpoint.
    """
    file.touch()  # an error of the system explains more than torch's error
    with torch.serialization.skip_data():
        torch.save(outline.checkpoint, file)
    reserve(file)
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
        in_file = torch.load(file, map_location="cpu", mmap=True, weights_only=False)
    pairs = list(zip(_tensors(outline.checkpoint), _tensors(in_file), strict=True))
    without_values = {id(tensor) for tensor in outline.tensors.values()}
    for tensor, target in pairs:
        if id(tensor) not in without_values:
            target.detach().copy_(tensor.detach())
    return {id(tensor): target for tensor, target in pairs}


class _Finder(pickle.Pickler):
    """A pickler that collects the tensors of a tree in the order of pickling, also inside other objects."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), protocol=2)
        self.found: list[Tensor] = []

    def persistent_id(self, obj: Any) -> str | None:
        """Collect a strided tensor. Other tensors consist of tensors, which are pickled in turn."""
        if not isinstance(obj, Tensor) or obj.layout is not torch.strided:
            return None
        self.found.append(obj)
        return "tensor"


def _tensors(tree: Any) -> list[Tensor]:
    finder = _Finder()
    finder.dump(tree)
    return finder.found


def _read_extra(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=False)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{file} contains an object whose class cannot be imported: {error}. Run the command in an environment in"
            " which your project can be imported. [LH1013]"
        ) from error
    except Exception as error:  # unpickling can raise any error
        raise ValueError(_unreadable(file, error)) from error


def _unreadable(path: Place, error: Exception) -> str:
    return f"{path} is damaged or incomplete: {type(error).__name__}: {error} [LH901]"
