"""Conversion of the tensors in a Hugging Face folder to the tensors of a model of transformers.

`HuggingFaceFolder` uses it where `from_pretrained` renames or joins tensors: most folders of mixture-of-experts models
contain each expert separately, but the models have one tensor for all experts of a layer. The conversions come from
transformers, which has them for each model since version 5. Older versions convert nothing.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

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


def conversions_of(module: nn.Module) -> Iterator[tuple[nn.Module, list[Any]]]:
    """Yield each outermost model of transformers in a module that has conversions, with its conversions."""
    models = sys.modules.get("transformers")
    if models is None:
        return
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:  # an older version of transformers
        return
    above: list[str] = []
    for name, part in module.named_modules():
        if isinstance(part, models.PreTrainedModel) and not any(name.startswith(each) for each in above):
            above.append(f"{name}." if name else "")
            found = get_model_conversion_mapping(part)
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
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    renamed: dict[str, str] = {}
    joined: dict[str, list[tuple[str, str]]] = {}  # the patterns and names of the tensors of each conversion
    for name in sorted(tensors.shapes, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters)
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
