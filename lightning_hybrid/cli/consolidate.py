"""A checkpoint that ranks wrote into a directory, as the ordinary file that plain Lightning reads.

The file is laid out first, with room for every tensor, and then filled through a map of it, one tensor after the other.
So a checkpoint may be larger than the memory of the machine::

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
_OF_TRAINING = ("callbacks", OPTIMIZERS, "lr_schedulers")  # what Lightning leaves out where only weights are saved


@dataclass(frozen=True)
class Outline:
    """What a directory holds, as the tree of an ordinary checkpoint.

    Attributes:
        checkpoint: The tree; its tensors of model and optimizers have no values yet, the others do.
        tensors: Those without values, by their paths in the directory.
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
    """Find out what a directory holds; no tensor of the model or an optimizer is read.

    Args:
        directory: Written by this package, or by Lightning's FSDP or ModelParallel strategy.
        device: Where tensors without values are made; on the CPU they take memory when they are written to.
        weights_only: Whether to leave out what only a run that goes on needs.
        read_extra: Reads what is no tensor of the model or an optimizer.

    Raises:
        ValueError: If there is no module in it, or something cannot be read.
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
    except Exception as error:  # whatever unpickling raises
        raise ValueError(_unreadable(directory.path, error)) from error
    checkpoint = _merged(extra, values, directory)
    if weights_only:
        checkpoint = {key: value for key, value in checkpoint.items() if key not in _OF_TRAINING}
    ordered = {key: checkpoint[key] for key in (*_ORDER, *checkpoint) if key in checkpoint}
    return Outline(ordered, {path: target for path, target in targets.items() if target is not None})


def _merged(extra: dict[str, Any], values: Mapping[TreePath, Any], directory: DistributedCheckpoint) -> dict[str, Any]:
    """The ordinary checkpoint of what is in ``meta.pt`` and the rest."""
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
    if "lr_schedulers" in extra:  # not weights alone
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
    """Write a directory's checkpoint as one file, which appears when it is complete.

    No process group, and no class of the module, is needed. Of the tensors, one is in memory at a time.

    Args:
        path: The directory: of this package, or of Lightning's FSDP or ModelParallel strategy.
        file: The file.
        weights_only: Whether to leave out states of optimizers, schedulers and callbacks, as Lightning does for
            ``save_weights_only=True``.
        overwrite: Whether a file that exists may be replaced.
        progress: Called with the bytes that were just read, and with those that there are.

    Returns:
        What was written; its tensors have no values.

    Raises:
        FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError: If something is not where it should
            be.
        ValueError: If the checkpoint is not complete, or damaged.
        OSError: If the file cannot be written; what was there is as it was.
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
            except Exception as error:  # whatever unpickling raises
                raise ValueError(_unreadable(directory.path, error)) from error
            if progress is not None:
                progress(tensor.nbytes, total)
    return outline


def _lay_out(outline: Outline, file: Path) -> dict[int, Tensor]:
    """Write a file with room for the tensors, and values of those that have some.

    Returns:
        For the identity of each tensor of the checkpoint that tensor in the file, mapped into memory.
    """
    file.touch()  # an error of the system says more than torch's
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
    """Finds the tensors of a tree as pickling meets them, whatever objects hold them."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), protocol=2)
        self.found: list[Tensor] = []

    def persistent_id(self, obj: Any) -> str | None:
        """Collect a strided tensor; others, which consist of tensors, are looked into."""
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
    except Exception as error:  # whatever unpickling raises
        raise ValueError(_unreadable(file, error)) from error


def _unreadable(path: Place, error: Exception) -> str:
    return f"{path} is damaged or incomplete: {type(error).__name__}: {error} [LH901]"
