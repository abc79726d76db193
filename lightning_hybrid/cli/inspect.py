"""Inspection of a checkpoint file or directory: its content as text or as data.

The command ``lightning-hybrid inspect`` calls :func:`inspect_checkpoint`, and `cli.export` uses :func:`read_mapped` and
:func:`identity_of`. `torch.load` would read all tensors, and run the code of a pickle. Here, tensors of the model and
the optimizers are not read, and no code from a file runs, so unknown files are safe.

Tensors of a directory are meta tensors, because only its metadata is read. Tensors of a file are memory-mapped. Tensors
are *tied* if several names have the same tensor.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich import filesize
from torch import Tensor

from lightning_hybrid.axes import Sizes, sizes_in
from lightning_hybrid.checkpoint.metadata import METADATA
from lightning_hybrid.checkpoint.storage.dcp import DistributedCheckpoint
from lightning_hybrid.checkpoint.storage.remote import Place, fetched, is_directory
from lightning_hybrid.checkpoint.storage.unpickle import load_lenient
from lightning_hybrid.cli.consolidate import read_outline
from lightning_hybrid.distributed.module_names import fold_numbered
from lightning_hybrid.distributed.pytree import flatten_with_path
from lightning_hybrid.strategy.summary import text_table

_KNOWN = {"state_dict", "optimizer_states", "lr_schedulers", "callbacks", "loops", "epoch", "global_step", METADATA}
_KNOWN |= {"pytorch-lightning_version", "hyper_parameters", "hparams_name", "hparams_type"}


@dataclass(frozen=True)
class Inspection:
    """The content of a checkpoint, without the values of tensors.

    Attributes:
        path: The path of the checkpoint, local or remote.
        kind: ``"file"``, or ``"directory of N files"``.
        num_bytes: The size on the disk.
        checkpoint: The tree of the checkpoint: nested dictionaries and lists, with tensors and other values.
    """

    path: Place
    kind: str
    num_bytes: int
    checkpoint: Mapping[str, Any]

    def text(self, *, every_name: bool = False) -> str:
        """Return the content as text.

        Args:
            every_name: If True, each tensor has its own line. If False, tensors whose names differ only in numbers have
                one line together.
        """
        tree = self.checkpoint
        head = f"{self.path}: {self.kind}, {filesize.decimal(self.num_bytes)}"
        if isinstance(tree.get("state_dict"), Mapping):
            others = [key for key in tree if key not in _KNOWN]
        else:  # not a checkpoint of Lightning
            others = [key for key, value in tree.items() if not _tensors(value)]
        state = _state_of(tree)
        sections = ["\n".join([head, _columns(_origin(tree))]).strip(), _table(state, every_name=every_name)]
        rest = [*_optimizers(tree.get("optimizer_states", [])), *_schedulers(tree.get("lr_schedulers", []))]
        rest += [(name, ", ".join(map(str, tree[name]))) for name in ("callbacks", "loops") if tree.get(name)]
        if tree.get("hyper_parameters"):
            rest.append(("hyper-parameters", _values(_public(tree["hyper_parameters"]))))
        rest += [(str(key), _value(tree[key])) for key in others]
        return "\n\n".join(section for section in (*sections, _columns(rest)) if section)

    def as_dict(self) -> dict[str, Any]:
        """Return the content as numbers, strings, lists and dictionaries, for programs."""
        tree, record = self.checkpoint, self.checkpoint.get(METADATA, {})
        first: dict[Any, str] = {}
        tensors = []
        for name, value in _state_of(tree).items():
            if isinstance(value, Tensor):
                stored = first.setdefault(identity_of(value), name)
                dtype = str(value.dtype).removeprefix("torch.")
                tied_to = stored if stored != name else None
                tensors.append({"name": name, "shape": list(value.shape), "dtype": dtype, "tied_to": tied_to})
        return {
            "path": str(self.path),
            "kind": self.kind,
            "num_bytes": self.num_bytes,
            "versions": {**record.get("versions", {}), "lightning": tree.get("pytorch-lightning_version")},
            "layout": _plain(record.get("layout")),
            "epoch": tree.get("epoch"),
            "global_step": tree.get("global_step"),
            "tensors": tensors,
            "optimizers": [
                {
                    "num_states": len(state.get("state", {})),
                    "param_groups": _plain(state.get("param_groups")),
                }
                for state in tree.get("optimizer_states", [])
            ],
            "lr_schedulers": _plain(tree.get("lr_schedulers", [])),
            "callbacks": [str(name) for name in tree.get("callbacks", {})],
            "hyper_parameters": _plain(tree.get("hyper_parameters")),
        }


def inspect_checkpoint(path: Place) -> Inspection:
    """Return the content of a checkpoint.

    Args:
        path: A file from `torch.save`, or a directory of shards.

    Raises:
        FileNotFoundError: If the path does not exist.
        ValueError: If it is not a checkpoint, or if it is damaged.
    """
    if not is_directory(path):
        if not path.exists():
            raise FileNotFoundError(f"Checkpoint not found: {path} [LH913]")
        with fetched(path) as file:
            return Inspection(path, "file", file.stat().st_size, read_mapped(file))
    directory = DistributedCheckpoint(path, load_value=load_lenient)
    directory.check_files()
    outline = read_outline(directory, device="meta", read_file=read_mapped)
    sizes = directory.file_sizes().values()
    return Inspection(path, f"directory of {len(sizes)} files", sum(sizes), outline.checkpoint)


def read_mapped(file: Path, *, trusted: bool = False) -> Mapping[str, Any]:
    """Return the content of a file, with memory-mapped tensors, and only the class names of other objects.

    Args:
        file: The file.
        trusted: If True, objects are created if their classes can be imported.

    Raises:
        ValueError: If it is not a checkpoint, or if it is damaged.
    """
    size = file.stat().st_size
    if not zipfile.is_zipfile(file):
        raise ValueError(
            f"{file} ({size:,} bytes) is not a complete checkpoint. The table of contents, which is written last, is"
            " missing. [LH914]"
        )
    with zipfile.ZipFile(file) as archive:
        if any(name.endswith("/constants.pkl") for name in archive.namelist()):
            raise ValueError(f"{file} ({size:,} bytes) is a TorchScript program, not a checkpoint. [LH902]")
    try:
        tree = load_lenient(file, mmap=True, trusted=trusted)
    except Exception as error:  # unpickling can raise any error
        raise ValueError(f"{file} ({size:,} bytes) cannot be read: {type(error).__name__}: {error} [LH901]") from error
    if not isinstance(tree, Mapping):
        raise ValueError(f"{file} contains {_value(tree)}, but a checkpoint must be a dictionary. [LH902]")
    return tree


def _state_of(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state dict. If the checkpoint is not Lightning's, return all tensors by their paths."""
    state = tree.get("state_dict")
    if isinstance(state, Mapping):
        return state
    return {".".join(map(str, path)): leaf for path, leaf in flatten_with_path(tree) if isinstance(leaf, Tensor)}


# -- sections ----------------------------------------------------------------------------------------------------------


def _origin(tree: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the versions that wrote the checkpoint, the layout, and the progress of training."""
    record = tree.get(METADATA, {})
    versions = {**record.get("versions", {}), "lightning": tree.get("pytorch-lightning_version")}
    written_by = ", ".join(f"{name} {version}" for name, version in versions.items() if version is not None)
    if written_by:
        yield "written by", written_by
    layout = record.get("layout")
    if layout:
        yield "layout", _layout(layout)
    progress = [f"{text} {tree[key]}" for text, key in (("epoch", "epoch"), ("step", "global_step")) if key in tree]
    if progress:
        yield "progress", ", ".join(progress)


def _layout(layout: Mapping[str, Any]) -> str:
    sizes = Sizes(**sizes_in(layout))
    if layout.get("pipeline_parallel_size", 1) == 1:
        return f"{sizes}, {layout.get('rank_order')}"
    stages = " + ".join(map(str, layout.get("layers_of_stages", [])))
    chunks = layout.get("num_chunks", 1)
    return (
        f"{sizes}, {layout.get('rank_order')}; {layout.get('schedule')!r}"
        f"{f', {chunks} chunks per rank' if chunks > 1 else ''}, {layout.get('num_microbatches')} microbatches;"
        f" {layout.get('body')!r} in stages of {stages} layers"
    )


def _table(state: Mapping[str, Any], *, every_name: bool) -> str:
    """Return the tensors of a state dict as text: a sum, a table, tied names, and entries that are not tensors.

    Args:
        state: The state dict.
        every_name: See :meth:`Inspection.text`.
    """
    first: dict[Any, str] = {}
    tied = {name: first.setdefault(identity_of(value), name) for name, value in state.items()}
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor) and tied[name] == name}
    rows = [
        (name, "x".join(map(str, value.shape)) or "-", str(value.dtype).removeprefix("torch."))
        for name, value in tensors.items()
    ]
    lines = [f"state_dict: {_sum(tensors.values())}"]
    lines.append(text_table([("name", "shape", "dtype"), *(rows if every_name else fold_numbered(rows))]))
    aliases = fold_numbered((name, stored) for name, stored in tied.items() if name != stored)
    lines += [f"{name} tied to {stored}" for name, stored in aliases]
    lines += [f"{name}: {_value(value)}" for name, value in state.items() if not isinstance(value, Tensor)]
    return "\n".join(lines)


def _optimizers(states: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    for number, state in enumerate(states):
        values = state.get("state", {})
        keys = sorted({str(key) for value in values.values() for key in value})
        content = f"{', '.join(keys)} for {len(values)} parameters; {_sum(_tensors(values))}" if keys else "no state"
        yield f"optimizer {number}", content
        for index, group in enumerate(state.get("param_groups", [])):
            names = sorted(group.keys() - {"params", "param_names"}, key=lambda name: (name != "lr", name))
            rest = {name: group[name] for name in names}
            yield f"  group {index}", f"{len(group['params'])} parameters; {_values(rest)}"


def _schedulers(states: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    for number, state in enumerate(states):
        yield f"scheduler {number}", _values(_public(state))


# -- values ------------------------------------------------------------------------------------------------------------


def identity_of(value: Any) -> Any:
    """Return a value that is equal for tied tensors, which are the same object or have the same memory.

    For tensors without memory, it is the `id` of the object, so the caller must keep the object alive.
    """
    if not isinstance(value, Tensor) or value.is_meta or value.layout is not torch.strided or value.numel() == 0:
        return id(value)
    return value.data_ptr(), value.shape, value.stride(), value.dtype


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for _, leaf in flatten_with_path(tree) if isinstance(leaf, Tensor)]


def _sum(tensors: Iterable[Tensor]) -> str:
    distinct = {identity_of(tensor): tensor for tensor in tensors}.values()
    elements = sum(tensor.numel() for tensor in distinct)
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in distinct)
    return f"{len(distinct)} tensor{'s' * (len(distinct) != 1)}, {elements:,} elements, {filesize.decimal(num_bytes)}"


def _values(values: Any) -> str:
    """Return names and values as text, without values that are ``None`` or ``False``."""
    if not isinstance(values, Mapping):
        return _value(values)
    return ", ".join(
        f"{key} {_value(value)}" for key, value in values.items() if value is not None and value is not False
    )


def _public(values: Any) -> Any:
    """Return a mapping without the private entries of Lightning and torch."""
    if not isinstance(values, Mapping):
        return values
    return {key: value for key, value in values.items() if not str(key).startswith("_")}


def _plain(value: Any) -> Any:
    """Return a value as JSON types. Values that JSON cannot represent are replaced by their text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    is_plain = value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value))
    return value if is_plain else _value(value)


def _value(value: Any) -> str:
    """Return a value as a short text."""
    tensors = _tensors(value)
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta:
        return str(value.item())
    if tensors:
        return _sum(tensors)
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, (dict, list, tuple, str, int, type(None))):
        text = repr(value)
        return text if len(text) <= 72 else f"{text[:69]}..."
    return f"<{type(value).__module__}.{type(value).__qualname__}>"


def _columns(rows: Iterable[tuple[str, str]]) -> str:
    rows = list(rows)
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"{name.ljust(width)}  {text}" for name, text in rows)
