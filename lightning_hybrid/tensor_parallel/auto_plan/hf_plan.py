"""The plans in Hugging Face models: `_tp_plan`, and `base_model_tp_plan` of the configuration.

:func:`~.auto_plan.auto_plan` creates one :class:`HuggingFacePlans` for a module. These plans are used before `blocks`
searches for names, because the authors of a model know it best. But each block is checked: if a parameter is missing in
its plan, or its heads cannot be divided, it is not sharded. The plans are read from attributes, so transformers need
not be installed.

A *block* is a module with layers that pass shards to each other. An *end* is a layer with replicated input and output,
such as an embedding or a head, for which other layers do not matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_hybrid.distributed.module_names import join_names, name_matches
from lightning_hybrid.tensor_parallel.auto_plan.builder import PlanBuilder
from lightning_hybrid.tensor_parallel.auto_plan.heads import HEADS, count_heads, indivisible_reason
from lightning_hybrid.tensor_parallel.auto_plan.known_code import unknown_reason

#: The styles of transformers that have an equivalent here, by their present and earlier names.
_STYLES = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "colwise_gather_output": "colwise_gather_output",
    "colwise_rep": "colwise_gather_output",
    "rowwise_split_input": "rowwise_split_input",
    "rowwise_rep": "rowwise_split_input",
    "packed_colwise": "packed_colwise_2",
    "embedding_rowwise": "vocab",
    "replicated_with_grad_allreduce": "on_shards",
}
#: Styles with replicated inputs and outputs, which do not depend on the styles of other layers.
_ALONE = {"colwise_gather_output", "rowwise_split_input", "vocab"}
_WHOLE = {"replicate", "replicated"}  # styles of layers that are not sharded


class HuggingFacePlans:
    """The plans of the models in a module, by block.

    Args:
        builder: The builder to which layers are added.
    """

    def __init__(self, builder: PlanBuilder) -> None:
        self._builder = builder
        self._ends: list[tuple[str, str]] = []
        self._blocks: dict[str, dict[str, str]] = {}
        self._named = _named_styles(builder.module)
        for name, style in self._named.items():
            if style in _WHOLE:
                continue
            if _STYLES.get(style) in _ALONE:
                self._ends.append((name, _STYLES[style]))
            else:
                self._blocks.setdefault(name.rpartition(".")[0], {})[name] = style
        _join_halves(self._blocks)

    def add_blocks(self) -> None:
        """Add the layers of blocks, which pass shards to each other. A block is added completely or not at all.

        A block that is not added gets a reason in the builder.
        """
        for name, styles in self._blocks.items():
            unknown = next((style for style in styles.values() if style not in _STYLES), None)
            reason = None if unknown is None else f"has a built-in plan with the unknown style {unknown!r}"
            reason = reason or next((f"has no module {each!r}" for each in styles if each not in self._layers), None)
            reason = reason or self._heads_reason(name, styles) or self._unnamed_reason(name)
            reason = reason or unknown_reason(self._layers[name])
            if reason is not None:
                self._builder.reasons[name] = reason
                continue
            ours = [(layer, _STYLES[style]) for layer, style in styles.items()]
            self._builder.add(*ours, *self._masks(name), *self._random_numbers(name, ours), block=name)

    def end_names(self) -> set[str]:
        """Return the names of layers with a style that does not depend on other layers, so that `blocks` skips them."""
        return {name for name, _ in self._ends}

    def add_ends(self) -> None:
        """Add layers whose style does not depend on other layers, such as embeddings, if they are not planned yet."""
        for name, style in self._ends:
            if name in self._layers:
                self._builder.add((name, style))

    @property
    def _layers(self) -> Mapping[str, nn.Module]:
        return self._builder.layers

    def _heads_reason(self, name: str, styles: Mapping[str, str]) -> str | None:
        """Return the reason why the heads of a block cannot be divided over the ranks; ``None`` if they can be."""
        block: Any = self._layers.get(name)
        length = getattr(block, "head_dim", None) or getattr(block, "head_size", None)
        if not isinstance(length, int):
            return None
        size = self._builder.size
        reason = indivisible_reason(self._heads(block), size)
        if reason is not None:
            return reason
        for layer, style in styles.items():
            features = getattr(self._layers[layer], "out_features", 0)
            if style == "colwise" and features % (length * size):
                return f"has heads of size {length} in {features} features, which cannot be divided over {size} ranks"
        return None

    def _unnamed_reason(self, name: str) -> str | None:
        """Return the reason why a block cannot be sharded if a parameter is missing from its plan, else ``None``.

        The gradient of this parameter may be a partial sum over the ranks.
        """
        for path, _ in self._layers[name].named_parameters(name):
            if path not in self._named and path.rpartition(".")[0] not in self._named:
                return f"has a parameter {path.removeprefix(f'{name}.')!r} that is missing from its built-in plan"
        return None

    def _heads(self, block: object) -> dict[str, int]:
        return count_heads(getattr(block, "config", None))

    def _masks(self, name: str) -> list[tuple[str, str]]:
        """Return the style of an attention, which can receive a mask and return the weights of all heads.

        The result is empty for blocks that are not attentions.
        """
        block = self._layers[name]
        heads = next((number for key, number in self._heads(block).items() if key in HEADS), None)
        is_attention = isinstance(getattr(block, "head_dim", None), int) and heads is not None
        return [(name, f"mask_per_head:{heads}")] if is_attention else []

    def _random_numbers(self, name: str, styles: list[tuple[str, str]]) -> list[tuple[str, str]]:
        """Return the style that makes each rank draw its own random numbers for dropout in a block.

        The result is empty without dropout, or without exactly one row-wise layer.
        """
        block = self._layers.get(name)
        if block is None or isinstance(block, (nn.ModuleList, nn.ModuleDict)):
            return []
        columns = [
            layer.removeprefix(f"{name}.") for layer, style in styles if style in ("colwise", "packed_colwise_2")
        ]
        rows = [layer.removeprefix(f"{name}.") for layer, style in styles if style == "rowwise"]
        rates = [value for key, value in vars(block).items() if "dropout" in key]
        rates += [each.p for each in block.modules() if isinstance(each, nn.Dropout)]
        if not columns or len(rows) != 1 or not any(isinstance(rate, float) and rate > 0 for rate in rates):
            return []
        return [(name, f"local_rng:{columns[-1]},{rows[0]}")]


def _named_styles(module: nn.Module) -> dict[str, str]:
    """Return the styles of the models in a module, by layer name. The plans of outer models come first."""
    names = [name for name, _ in module.named_modules()] + [name for name, _ in module.named_parameters()]
    found: dict[str, str] = {}
    for prefix, model in module.named_modules():
        plans = [getattr(model, "_tp_plan", None), getattr(getattr(model, "config", None), "base_model_tp_plan", None)]
        if getattr(model, "base_model", model) is not model:
            plans.pop()  # the configuration has the plan of the model inside
        if plans[0] is None:
            continue
        for plan in plans:
            for pattern, style in plan.items() if isinstance(plan, Mapping) else ():
                for name in names:
                    if name_matches(name, join_names(prefix, pattern)):
                        found.setdefault(name, style)
    return found


def _join_halves(blocks: dict[str, dict[str, str]]) -> None:
    """Merge blocks with only column-wise or only row-wise layers into their parents, in place, until none is left."""
    while True:
        half = next((name for name in blocks if name and _is_half(blocks[name])), None)
        if half is None:
            return
        styles = blocks.pop(half)
        blocks.setdefault(half.rpartition(".")[0], {}).update(styles)


def _is_half(styles: Mapping[str, str]) -> bool:
    kinds = {_STYLES.get(style) for style in styles.values()}
    return ("rowwise" in kinds) != bool(kinds & {"colwise", "packed_colwise_2"})
