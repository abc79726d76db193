"""Export of the weights of a checkpoint to a Hugging Face folder, for `from_pretrained` and `safetensors`.

The command ``lightning-hybrid export`` calls :func:`export`. `save_pretrained` would need the user's module with all
weights in memory, and the names of tensors in a checkpoint have the attribute of the module as a prefix.

::

    names and shapes            --> names of each file, with at most `max_shard_size` bytes
    the tensors of one file     --> model-00001-of-00002.safetensors    one file after the other, so a checkpoint may
    the tensors of the next one --> model-00002-of-00002.safetensors    be larger than the memory of the node
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from lightning_hybrid.checkpoint.storage.atomic import new_directory
from lightning_hybrid.checkpoint.storage.dcp import MODEL, DistributedCheckpoint
from lightning_hybrid.checkpoint.storage.remote import Place, fetched, is_directory
from lightning_hybrid.checkpoint.storage.unpickle import load_lenient
from lightning_hybrid.checkpoint.weights.hugging_face import CONFIG, INDEX_SUFFIX, WEIGHTS
from lightning_hybrid.cli.consolidate import read_outline
from lightning_hybrid.cli.inspect import identity_of, read_mapped


@dataclass(frozen=True)
class Export:
    """The result of an export. The command prints it.

    Attributes:
        files: The names of the files in the folder, including the index and ``config.json``.
        prefix: The prefix that was removed from the names, with a dot at the end; empty if the names are unchanged.
        tied: For each name that is not in the files, because it has the tensor of another name, this other name;
            without prefix.
        left_out: The names in the checkpoint that do not begin with the prefix. They are not in the files.
        first_parts: The number of names in the checkpoint by their part up to the first dot.
        has_config: True if there is a ``config.json``.
    """

    files: list[str]
    prefix: str
    tied: dict[str, str]
    left_out: list[str]
    first_parts: Mapping[str, int]
    has_config: bool


def export(
    path: Place,
    folder: Path,
    *,
    prefix: str | None = None,
    max_shard_size: int = 5 * 10**9,
    dtype: torch.dtype | None = None,
    config: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Export:
    """Write a Hugging Face folder, which appears when it is complete.

    This needs no process group, no class of the module, and not transformers. Only the tensors of one file are in
    memory at the same time.

    Args:
        path: The checkpoint: a file from `torch.save`, or a directory of shards.
        folder: The folder, which must be new or empty.
        prefix: The attribute of the module that contains the model, with which names in the checkpoint begin. It is
            removed from names, and other names are not exported. ``None`` for the attribute with which all names begin,
            if there is one; ``""`` to export all names as they are.
        max_shard_size: The maximum number of bytes of tensors in a file. A larger tensor has its own file.
        dtype: The dtype to which floating-point tensors are converted; ``None`` to keep their dtypes.
        config: The path of a ``config.json`` or of its folder; ``None`` for the configuration in the checkpoint's
            hyperparameters, if they contain exactly one.
        progress: Called after each file, with the number of bytes that were just written and the total number.

    Returns:
        The names of the files, and the changes of tensor names.

    Raises:
        FileNotFoundError, FileExistsError: If an input does not exist, or the folder is not empty.
        ValueError: If the checkpoint is incomplete or damaged, if it has no weights or no names with the prefix, or if
            it has weights of adapters.
        OSError: If the folder cannot be written.
    """
    folder = folder.absolute()
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise FileExistsError(f"{folder} already exists and is not an empty folder. Use another path. [LH1012]")
    checkpoint, read = _open(path)
    state = {name: value for name, value in _state_of(checkpoint, path).items() if isinstance(value, Tensor)}
    begin, first_parts = _find_prefix(state, prefix, path)
    _refuse_adapters([name for name in state if name.startswith(begin)], path)
    names: dict[Any, str] = {}
    tied: dict[str, str] = {}
    for name, tensor in state.items():
        if name.startswith(begin):
            stored = names.setdefault(identity_of(tensor), name)
            if stored != name:
                tied[name[len(begin) :]] = stored[len(begin) :]
    sizes = {name: state[name].numel() * _dtype_of(state[name], dtype).itemsize for name in names.values()}
    settings = _find_config(checkpoint, config)
    shards, total = _split(sizes, max_shard_size), sum(sizes.values())
    files: dict[str, str] = {}
    with new_directory(folder) as new:
        for number, shard in enumerate(shards, 1):
            stem, suffix = WEIGHTS.split(".")
            file = WEIGHTS if len(shards) == 1 else f"{stem}-{number:05}-of-{len(shards):05}.{suffix}"
            tensors = {name[len(begin) :]: _packed(read(state[name]), dtype) for name in shard}
            try:
                save_file(tensors, new / file, metadata={"format": "pt"})
            except SafetensorError as error:
                raise OSError(f"{folder / file} cannot be written: {error} [LH1015]") from error
            files |= dict.fromkeys(tensors, file)
            del tensors
            if progress is not None:
                progress(sum(sizes[name] for name in shard), total)
        others = {} if len(shards) == 1 else {f"{WEIGHTS}{INDEX_SUFFIX}": _index(files, total)}
        if settings is not None:
            others[CONFIG] = _with_dtype(settings, [_dtype_of(state[name], dtype) for name in sizes])
        for file, content in others.items():
            (new / file).write_text(f"{json.dumps(content, indent=2)}\n", encoding="utf-8")
    left_out = [name for name in state if not name.startswith(begin)]
    written = [*dict.fromkeys(files.values()), *others]
    return Export(written, begin, tied, left_out, first_parts, settings is not None)


def _open(path: Place) -> tuple[Mapping[str, Any], Callable[[Tensor], Tensor]]:
    """Return a checkpoint whose tensors have not been read, and a function that reads one of them."""
    if not is_directory(path):
        if not path.exists():
            raise FileNotFoundError(f"Checkpoint not found: {path} [LH913]")
        with fetched(path) as file:
            return read_mapped(file, trusted=True), lambda tensor: tensor
    directory = DistributedCheckpoint(path, load_value=partial(load_lenient, trusted=True))
    directory.check_files()
    outline = read_outline(directory, device="meta", weights_only=True, read_file=partial(read_mapped, trusted=True))
    paths = {id(tensor): tree_path for tree_path, tensor in outline.tensors.items()}

    def read(tensor: Tensor) -> Tensor:
        tree_path = paths[id(tensor)]
        value: Tensor = directory.read({tree_path: torch.empty_like(tensor, device="cpu")})[tree_path]
        return value

    return outline.checkpoint, read


def _state_of(checkpoint: Mapping[str, Any], path: Place) -> Mapping[str, Any]:
    """Return the weights of a checkpoint, which may be a state dict itself.

    Raises:
        ValueError: If it has no tensors.
    """
    state = checkpoint.get(MODEL, checkpoint)
    if not isinstance(state, Mapping) or not any(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(
            f"{path} has no weights: neither the checkpoint nor its entry {MODEL!r} is a dictionary of tensors. The"
            f" keys of the checkpoint are {list(checkpoint)[:5]}. [LH925]"
        )
    return state


def _find_prefix(names: Mapping[str, Any], prefix: str | None, path: Place) -> tuple[str, Counter[str]]:
    """Return the prefix to remove, and the number of names by their part up to the first dot."""
    firsts = Counter(f"{first}." if rest else first for first, _, rest in (name.partition(".") for name in names))
    if prefix is None:
        (first, _), *others = firsts.most_common()
        return first if not others and first.endswith(".") else "", firsts
    begin = f"{prefix.removesuffix('.')}." if prefix else ""
    if not any(name.startswith(begin) for name in names):
        raise ValueError(
            f"No tensor name in {path} starts with {begin!r}. The names start with {', '.join(map(repr, firsts))}."
            " [LH1016]"
        )
    return begin, firsts


def _refuse_adapters(names: Sequence[str], path: Place) -> None:
    """Raise an error for a model with peft adapters, because transformers would ignore all its weights."""
    adapted = next((name for name in names if ".base_layer." in name or ".lora_A." in name), None)
    if adapted is not None:
        raise ValueError(
            f"{path} contains weights of peft adapters, such as {adapted!r}. transformers cannot load weights with"
            " these names. Load the checkpoint into your module in one process, and call"
            " `module.model.merge_and_unload().save_pretrained(FOLDER)` to save the merged model, or"
            " `module.model.save_pretrained(FOLDER)` to save only the adapters. [LH1020]"
        )


def _split(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Return the names of the tensors of each file, in their order."""
    shards: list[list[str]] = [[]]
    room = most
    for name, size in sizes.items():
        if size > room and shards[-1]:
            shards.append([])
            room = most
        shards[-1].append(name)
        room -= size
    return shards


def _dtype_of(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which a tensor is written."""
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def _packed(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a tensor in the form that safetensors requires: contiguous, and with its own memory."""
    packed = tensor.detach().to(_dtype_of(tensor, dtype)).contiguous()
    return packed if packed.untyped_storage().nbytes() == packed.nbytes else packed.clone()


def _index(files: Mapping[str, str], total: int) -> dict[str, Any]:
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}


def _find_config(checkpoint: Mapping[str, Any], given: Path | None) -> dict[str, Any] | None:
    """Return the model's configuration: from the given path, or the only configuration among the hyperparameters.

    Returns:
        The configuration; ``None`` if the hyperparameters contain none or several.

    Raises:
        FileNotFoundError: If the path does not exist.
        ValueError: If the file is not a JSON dictionary.
    """
    if given is not None:
        file = given / CONFIG if given.is_dir() else given
        if not file.is_file():
            raise FileNotFoundError(f"No model configuration found at {file}. [LH1017]")
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{file} is not a model configuration: {error} [LH1017]") from error
        if not isinstance(found, dict):
            raise ValueError(
                f"{file} is not a model configuration: it contains a {type(found).__name__} instead of a dictionary."
                " [LH1017]"
            )
        return found
    parameters = checkpoint.get("hyper_parameters")
    values = list(parameters.values()) if isinstance(parameters, Mapping) else []
    found = [value for value in map(_as_config, values) if value is not None]
    return found[0] if len(found) == 1 else None


def _as_config(value: Any) -> dict[str, Any] | None:
    """Return a configuration of transformers, an object or a dictionary, as a dictionary; otherwise ``None``."""
    if isinstance(value, Mapping):
        return dict(value) if isinstance(value.get("model_type"), str) else None
    if not hasattr(value, "model_type") or not hasattr(value, "to_json_string"):
        return None
    settings: dict[str, Any] = json.loads(value.to_json_string())
    return settings


def _with_dtype(settings: dict[str, Any], dtypes: Sequence[torch.dtype]) -> dict[str, Any]:
    """Return the configuration with the dtype of most tensors, because `from_pretrained` converts all tensors to it."""
    floating = Counter(dtype for dtype in dtypes if dtype.is_floating_point)
    if not floating:
        return settings
    key = "torch_dtype" if "torch_dtype" in settings else "dtype"  # the name in older versions of transformers
    return {**settings, key: str(floating.most_common(1)[0][0]).removeprefix("torch.")}
