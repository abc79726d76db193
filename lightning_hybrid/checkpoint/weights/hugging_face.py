"""Hugging Face folders: the tensors in a folder, and the part of a module that they match.

`Weights` makes a :class:`HuggingFaceFolder` for a folder of initial weights; `export` writes such folders and uses the
names of files. `from_pretrained` is not used: it needs a full model in each process, while here each rank reads only
the tensors of its stage, under the names of the user's LightningModule.

The *part* of a module is the submodule whose tensors have the names of the folder, such as ``model.bert``.
"""

from __future__ import annotations

import json
import re
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path

import torch
from torch import nn

from lightning_hybrid.checkpoint.weights.conversions import FolderTensors, conversions_of, converted
from lightning_hybrid.checkpoint.weights.tensor_files import TensorFile, open_tensors
from lightning_hybrid.distributed.module_names import join_names, named_tensors

WEIGHTS = "model.safetensors"
INDEX_SUFFIX = ".index.json"  # the suffix of the index of a file that was split
CONFIG = "config.json"

#: The files with weights in the order of `from_pretrained`, which uses the first existing file.
_FILES = (WEIGHTS, f"{WEIGHTS}{INDEX_SUFFIX}", "pytorch_model.bin", f"pytorch_model.bin{INDEX_SUFFIX}")

#: The attribute of a transformers model with patterns of tensor names that the model ignores in a folder; and the
#: pattern of a table that older folders contain, but that models now compute themselves.
_IGNORED, _TABLE = "_keys_to_ignore_on_load_unexpected", r"rotary_emb\.inv_freq"


class HuggingFaceFolder:
    """The weights in a folder that `save_pretrained` has written: one file, or several files with an index.

    Args:
        path: The folder, for which :meth:`is_at` is True.

    Attributes:
        path: The folder.
        files: The files with tensors.
        shapes: The shapes of the tensors, by name.

    Raises:
        FileNotFoundError: If a file in the index does not exist.
        ValueError: If a file or the index is damaged, or the index names a tensor that its file does not contain.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: list[Path] = []
        self.shapes: dict[str, torch.Size] = {}
        self._files: dict[str, TensorFile] = {}
        self._latest: tuple[weakref.ref[nn.Module], FolderTensors] | None = None
        main = next(path / name for name in _FILES if (path / name).is_file())
        if not main.name.endswith(INDEX_SUFFIX):
            self._add(main)
            return
        index = _read_index(main)
        for name in sorted(set(index.values())):
            if not (path / name).is_file():
                raise FileNotFoundError(f"{main} lists the file {name!r}, which is missing from the folder. [LH915]")
            self._add(path / name)
        lacking = [name for name in index if name not in self.shapes]
        if lacking:
            name = lacking[0]
            raise ValueError(
                f"{main} lists the tensor {name!r} in {index[name]!r}, but this file does not contain it. [LH915]"
            )

    def _add(self, path: Path) -> None:
        file = open_tensors(path)
        self.files.append(path)
        self.shapes |= file.shapes
        self._files |= dict.fromkeys(file.shapes, file)

    @staticmethod
    def is_at(path: Path) -> bool:
        """Return True if the path is a folder with one of these files."""
        return any((path / name).is_file() for name in _FILES)

    def tensors_for(self, module: nn.Module) -> FolderTensors:
        """Return the tensors of the folder, converted for the model of transformers in a module that they match best.

        They are not converted if fewer of them would match then. The result for the latest module is kept.

        Args:
            module: The user's module, possibly with placeholders for tensors of other stages.
        """
        if self._latest is None or self._latest[0]() is not module:
            own = FolderTensors(self.shapes, lambda name: self._files[name].read(name))
            forms = [own, *(converted(own, *each) for each in conversions_of(module))]
            best = max(forms, key=lambda form: max(_scores(form.shapes, module).values(), default=(0, 0, 0)))
            self._latest = weakref.ref(module), best
        return self._latest[1]

    def names_in(self, module: nn.Module) -> tuple[str, dict[str, str]]:
        """Find the part of a module that has most of the folder's tensors, by name and shape.

        Of several such parts, the part with most names of the folder wins, and then the part with the fewest tensors.

        A module holds a model in an attribute, and the folder may belong to a model without the module's head. So
        ``layers.0.weight`` may match ``model.layers.0.weight``, ``model.model.layers.0.weight``, and so on.

        Args:
            module: The user's module, possibly with placeholders for tensors of other stages.

        Returns:
            The dotted name of the part; and the name of each tensor of :meth:`tensors_for`, by the name that it has, or
            would have, in the module. Buffers that the module does not save, and names that the model ignores, are
            excluded.

        Raises:
            ValueError: If no part matches, or several parts match equally well.
        """
        tensors, shapes = dict(named_tensors(module)), self.tensors_for(module).shapes
        scores = _scores(shapes, module)
        if not scores:
            raise ValueError(
                f"No tensor name in {self.path} matches a name in {type(module).__name__}. The first names in the"
                f" folder are {_first(self.shapes)}; the first names in the module are {_first(tensors)}. [LH922]"
            )
        best = [prefix for prefix, score in scores.items() if score == max(scores.values())]
        parts = {id(module.get_submodule(prefix)): prefix for prefix in reversed(best)}
        if len(parts) > 1:
            raise ValueError(
                f"The tensor names in {self.path} match several parts of {type(module).__name__} equally well:"
                f" {sorted(parts.values())}. Load the weights yourself (`safetensors.torch.load_file`), and pass a"
                " state dict with the module's names to `strategy.load_weights`. [LH923]"
            )
        (prefix,) = parts.values()
        ignored = [_TABLE, *(getattr(module.get_submodule(prefix), _IGNORED, None) or ())]
        persistent = module.state_dict().keys()
        named = {join_names(prefix, name): name for name in shapes}
        return prefix, {
            name: source
            for name, source in named.items()
            if name in persistent or not (name in tensors or any(re.search(each, source) for each in ignored))
        }


def _scores(shapes: Mapping[str, torch.Size], module: nn.Module) -> dict[str, tuple[int, int, int]]:
    """Return how well tensors match each part of a module with some of their names; larger is better.

    Returns:
        By the name of the part: how many tensors match by name and shape, how many by name, and minus the number of
        tensors of the part.
    """
    alike: Counter[str] = Counter()
    known: Counter[str] = Counter()
    size: Counter[str] = Counter()
    for name, tensor in named_tensors(module):
        for prefix, rest in _cuts(name):
            size[prefix] += 1
            known[prefix] += rest in shapes
            alike[prefix] += shapes.get(rest) == tensor.shape
    return {prefix: (alike[prefix], count, -size[prefix]) for prefix, count in known.items() if count}


def _read_index(path: Path) -> dict[str, str]:
    try:
        index = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in index.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a valid weight index: {type(error).__name__}: {error} [LH901]") from error


def _cuts(name: str) -> Iterator[tuple[str, str]]:
    """Yield each split of a dotted name into a prefix and the rest, starting with an empty prefix."""
    parts = name.split(".")
    for count in range(len(parts)):
        yield ".".join(parts[:count]), ".".join(parts[count:])


def _first(names: Iterable[str]) -> str:
    return ", ".join(map(repr, islice(names, 3)))
