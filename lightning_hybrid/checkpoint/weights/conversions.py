"""Conversion of the tensors in a Hugging Face folder to the tensors of a model of transformers.

`HuggingFaceFolder` uses it where `from_pretrained` renames or joins tensors: most folders of mixture-of-experts models
contain each expert separately, but the models have one tensor for all experts of a layer. The conversions come from
transformers, which has them for each model since version 5. Other versions convert nothing.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class FolderTensors:
    """Tensors that are read when they are used.

    Attributes:
        shapes: The shape of each tensor, by name.
        read: Returns the tensor with a name, on the host.
    """

    shapes: Mapping[str, torch.Size]
    read: Callable[[str], Tensor]


class _Internals(NamedTuple):
    """The names of transformers that this file uses, which its documentation does not list.

    Attributes:
        find_conversions: Returns the conversions of a model, in order.
        renaming: The class of conversions that rename a tensor.
        converter: The class of conversions that join or split tensors.
        sort_key: The sort key of names with which experts are in order.
        rename: Returns the name in the model, and the pattern of the conversion; ``None`` without one.
    """

    find_conversions: Callable[[Any], list[Any]]
    renaming: Any
    converter: Any
    sort_key: Callable[[str], Any]
    rename: Callable[[str, list[Any], list[Any]], tuple[str, str | None]]


def _internals() -> _Internals | None:
    """Return the names of the installed transformers; ``None`` if it is not imported, or has no such names."""
    if "transformers" not in sys.modules:
        return None
    try:
        from transformers import conversion_mapping as mapping
        from transformers import core_model_loading as loading

        functions = mapping.get_model_conversion_mapping, loading.WeightRenaming, loading.WeightConverter
        return _Internals(*functions, loading.dot_natural_key, loading.rename_source_key)
    except (ImportError, AttributeError):  # another version: nothing is converted
        return None


def conversions_of(module: nn.Module) -> Iterator[tuple[nn.Module, list[Any]]]:
    """Yield each outermost model of transformers in a module that has conversions, with its conversions."""
    internals = _internals()
    if internals is None:
        return
    kind = sys.modules["transformers"].PreTrainedModel
    above: list[str] = []
    for name, part in module.named_modules():
        if isinstance(part, kind) and not any(name.startswith(each) for each in above):
            above.append(f"{name}." if name else "")
            found = internals.find_conversions(part)
            if found:
                yield part, found


def converted(tensors: FolderTensors, model: Any, conversions: list[Any]) -> FolderTensors:
    """Return the tensors of a folder under the names, and with the shapes, that they have in a model.

    Args:
        tensors: The tensors of the folder.
        model: The model of transformers.
        conversions: Its conversions, from :func:`conversions_of`.

    Raises:
        ValueError: If transformers cannot convert the tensors, for example because an expert is missing.
    """
    internals = _internals()
    assert internals is not None, "without transformers, there are no conversions"
    renamings = [each for each in conversions if isinstance(each, internals.renaming)]
    converters = [each for each in conversions if isinstance(each, internals.converter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    renamed: dict[str, str] = {}
    joined: dict[str, list[tuple[str, str]]] = {}  # the patterns and names of the tensors of each conversion
    for name in sorted(tensors.shapes, key=internals.sort_key):
        target, pattern = internals.rename(name, renamings, converters)
        if pattern is None:
            renamed[target] = name
        else:
            joined.setdefault(target, []).append((pattern, name))

    def convert(target: str, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        sources = joined[target]
        converter: Any = copy.deepcopy(by_pattern[sources[0][0]])
        for pattern, name in sources:
            converter.add_tensor(target, name, pattern, partial(read, name))
        try:
            made = converter.convert(target, model=model, config=model.config)
        except Exception as error:
            names = ", ".join(repr(name) for _, name in sources[:3])
            raise ValueError(
                f"transformers cannot convert {len(sources)} tensors of the folder ({names}, ...) to {target!r} of"
                f" {type(model).__name__}: {error} Check that the folder is complete, and that its config.json matches"
                " the model. [LH937]"
            ) from error
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def without_values(name: str) -> Tensor:
        return torch.empty(tensors.shapes[name], device="meta")

    shapes = {target: tensors.shapes[name] for target, name in renamed.items()}
    target_of: dict[str, str] = {}
    for target in joined:
        for name, value in convert(target, without_values).items():
            shapes[name], target_of[name] = value.shape, target

    def read(name: str) -> Tensor:
        return convert(target_of[name], tensors.read)[name] if name in target_of else tensors.read(renamed[name])

    return FolderTensors(shapes, read)
