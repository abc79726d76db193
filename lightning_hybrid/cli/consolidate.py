"""Conversion of a checkpoint directory to an ordinary file that plain Lightning can read.

The command ``consolidate`` first creates the file with room for every tensor. It then writes the tensors one after the
other through a memory map, so a checkpoint may be larger than the memory of the node::

    .metadata, meta.pt ------> names, shapes, values of meta.pt --.
    __0_0.distcp, ... --.----> values other than tensors ---------+--> the file, in which other tensors have no values
                        `----> one tensor after the other ------------> the same file, mapped

The commands ``inspect`` and ``export`` read the content of a directory with :func:`read_outline`, too.
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

# Lightning writes the entries in this order.
_ORDER = ("epoch", "global_step", "pytorch-lightning_version", MODEL, "loops", "callbacks", OPTIMIZERS)
# The entries that Lightning omits if it saves only weights. The last two are precision plugins with a gradient scaler.
_OF_TRAINING = ("callbacks", OPTIMIZERS, "lr_schedulers", "MixedPrecision", "FSDPPrecision")


@dataclass(frozen=True)
class Outline:
    """The content of a checkpoint directory, as the tree of an ordinary checkpoint.

    Attributes:
        checkpoint: The tree. Tensors that are stored in ``.distcp`` files have no values yet: tensors of the module, of
            its copies in callbacks, and of the optimizers. Tensors from ``meta.pt`` have values.
        tensors: The tensors without values, by their paths in the directory.
    """

    checkpoint: dict[str, Any]
    tensors: dict[TreePath, Tensor]


def read_outline(
    directory: DistributedCheckpoint,
    *,
    device: str = "cpu",
    weights_only: bool = False,
    read_file: Callable[[Path], Any] | None = None,
) -> Outline:
    """Return the content of a directory without reading the tensors in its ``.distcp`` files.

    Args:
        directory: A directory of this package, or of Lightning's FSDP or ModelParallel strategy.
        device: The device of tensors without values. ``"cpu"`` reserves address space, which takes memory only when the
            tensors are written; `torch.save` stores no room for tensors on ``"meta"``.
        weights_only: If True, omit states of optimizers, schedulers, callbacks and the gradient scaler.
        read_file: Reads ``meta.pt``, a file of `torch.save`. By default, it is unpickled, which can run code in it.

    Raises:
        ValueError: If the directory has no module, if a file is damaged, if a class cannot be imported, or if an
            optimizer has a state without a parameter group.
    """
    root = directory.module_root
    if not directory.below(root):
        roots = sorted({str(path[0]) for path in directory.entries})
        raise ValueError(
            f"{directory.path} does not contain a module: its entries are {roots}, but none of them is {MODEL!r} or"
            f" {root!r}. [LH1009]"
        )
    extra = directory.read_extra(read_file or _unpickle)
    targets = {
        path: torch.empty(entry.size, dtype=entry.properties.dtype, device=device) if entry else None
        for path, entry in directory.entries.items()
        if path[0] == root or not weights_only
    }
    try:
        values = targets | directory.read({path: None for path, target in targets.items() if target is None})
    except Exception as error:  # unpickling can raise any error
        raise ValueError(_error_text(directory.path, error)) from error
    checkpoint = _merged(extra, values, directory)
    if weights_only:
        checkpoint = {key: value for key, value in checkpoint.items() if key not in _OF_TRAINING}
    ordered = {key: checkpoint[key] for key in (*_ORDER, *checkpoint) if key in checkpoint}
    return Outline(ordered, {path: target for path, target in targets.items() if target is not None})


def _merged(extra: dict[str, Any], values: Mapping[TreePath, Any], directory: DistributedCheckpoint) -> dict[str, Any]:
    """Return an ordinary checkpoint from the content of ``meta.pt`` and all other values.

    The metadata in ``meta.pt`` has all names of tied tensors, which the directory contains under one name, and the
    versions of layers that `Module.state_dict` attaches to its result.
    """
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
    if "lr_schedulers" in extra:  # more than weights: Lightning resumes only if there is a list, even an empty one
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
) -> None:
    """Write the checkpoint of a directory as one file, which appears when it is complete.

    This needs no process group, and does not create the module. Memory holds one of the tensors in ``.distcp`` files at
    a time. Other objects, such as hyperparameters, are unpickled: their classes must be importable, and the checkpoint
    can run code.

    Args:
        path: A directory of this package, or of Lightning's FSDP or ModelParallel strategy.
        file: The file.
        weights_only: As in :func:`read_outline`. Lightning's ``save_weights_only=True`` omits the same entries, and the
            entries that callbacks add in `on_save_checkpoint`.
        overwrite: If True, an existing file is replaced.
        progress: Called with the number of bytes that were just read, and with the total number.

    Raises:
        FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError: If a path does not exist, exists
            already, or is of the wrong kind.
        ValueError: If the checkpoint is incomplete, or as :func:`read_outline`.
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
                raise ValueError(_error_text(directory.path, error)) from error
            if progress is not None:
                progress(tensor.nbytes, total)


def _lay_out(outline: Outline, file: Path) -> dict[int, Tensor]:
    """Write a file with room for the tensors of an outline, and with the values that are known.

    Returns:
        The memory-mapped tensors of the file, by the `id` of the same tensor in ``outline.checkpoint``.
    """
    file.touch()  # an error of the system explains more than torch's error
    with torch.serialization.skip_data():
        torch.save(outline.checkpoint, file)
    reserve(file)
    # By default, the map is private, and values that are written to it do not reach the file.
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
        super().__init__(io.BytesIO(), protocol=torch.serialization.DEFAULT_PROTOCOL)
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


def _unpickle(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=False)
    except Exception as error:  # unpickling can raise any error
        raise ValueError(_error_text(file, error)) from error


def _error_text(path: Place, error: Exception) -> str:
    """Return the error message for a file that cannot be read."""
    if isinstance(error, (ImportError, AttributeError)):
        return (
            f"{path} contains an object whose class cannot be imported: {error}. Run the command in an environment in"
            " which your project can be imported. [LH1013]"
        )
    return f"{path} is damaged or incomplete: {type(error).__name__}: {error} [LH901]"
