"""A plan in the making: layers are taken together or not at all, and what is left whole has a reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import nn
from torch.distributed.tensor import DTensor

from lightning_hybrid.distributed.module_names import join_names
from lightning_hybrid.tensor_parallel.mode import Mode
from lightning_hybrid.tensor_parallel.sequence_parallel import count_uses
from lightning_hybrid.tensor_parallel.styles import WRAPPERS, ParamSplit


class PlanBuilder:
    """The plan so far, and why other layers are not in it.

    Args:
        module: The whole module.
        size: The number of ranks.
        mode: The way in which layers are sharded over them.

    Attributes:
        plan: Styles by module name.
        reasons: Why layers are not divided, as the rest of a sentence, by module name.
    """

    def __init__(self, module: nn.Module, size: int, mode: Mode) -> None:
        self.module, self.size, self.mode = module, size, mode
        self.plan: dict[str, str] = {}
        self.reasons: dict[str, str] = {}
        self.layers = dict(module.named_modules())
        self._uses = count_uses(module)
        self._names: dict[int, set[str]] = {}
        for name, layer in self.layers.items():
            for leaf, parameter in layer._parameters.items():
                self._names.setdefault(id(parameter), set()).add(join_names(name, leaf))

    def add(self, *styles: tuple[str, str], block: str | None = None) -> bool:
        """Plan for all of these names and styles, or, if one is not possible, for none.

        Args:
            styles: Names of layers, and styles.
            block: What they are parts of, which has the reason if they are not divided; else the layer has it.
        """
        if any(self._is_settled(name) for name, style in styles if not _is_wrapper(style)):
            return False
        found = self.obstacle(styles)
        if found is None:
            for name, style in styles:
                self.plan[name] = f"{self.plan[name]} + {style}" if name in self.plan else style
            return True
        name, reason = found
        if block not in (None, name):
            reason = f"contains {name.removeprefix(f'{block}.')!r}, which {reason}"
        self.reasons.setdefault(name if block is None else block, reason)
        return False

    def obstacle(self, styles: Sequence[tuple[str, str]]) -> tuple[str, str] | None:
        """The layer because of which these cannot be divided together, and the reason; ``None`` if they can."""
        hands_on = len(styles) > 1 and styles[0][1] != "vocab"
        held = {path: split for each in styles for path, split in self._held(*each)}
        for name, style in styles:
            layer = self.layers[name]
            kind = style.partition(":")[0]
            # Elsewhere, it may get what is not sharded, or give shards to what does not expect them.
            if hands_on and self._uses[id(layer)] > 1:
                return styles[0][0], "is used in several places, or a layer after it is used in several places"
            if _is_wrapper(style) and kind in self.plan.get(name, ""):
                return name, f"already has the style {kind!r}"
            reason = self.mode.find_style(style, layer).unsupported_reason(layer, self.size)
            if reason is not None:
                return name, reason
            for path, split in self._held(name, style):
                tied = self._names[id(self.module.get_parameter(path))]
                others = sorted(other for other in tied if other not in held or held[other] != split)
                if others:
                    return name, f"shares its {path.removeprefix(f'{name}.')!r} with {others[0]!r}"
        return None

    def _held(self, name: str, style: str) -> Iterator[tuple[str, ParamSplit | None]]:
        """The parameters of a layer that is divided, or whose gradients are parts of a sum, and how they are split."""
        if _is_wrapper(style):
            return
        layer = self.layers[name]
        found = self.mode.find_style(style, layer).param_splits(layer)
        splits = {each.path: replace(each, path="") for each in found}
        for path, _ in layer.named_parameters(remove_duplicate=False):
            yield join_names(name, path), splits.get(path)

    def _is_settled(self, name: str) -> bool:
        """Whether a layer is divided already, by this plan or by the user's `configure_model`, or has a reason."""
        is_divided = any(isinstance(each, DTensor) for each in self.layers[name]._parameters.values())
        return is_divided or name in self.plan or name in self.reasons


def _is_wrapper(style: str) -> bool:
    return style.partition(":")[0] in WRAPPERS
