"""A plan in the making: layers are taken together or not at all, and what is left whole has a reason."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn
from torch.distributed.tensor import DTensor

from lightning_hybrid.tensor_parallel.sequence_parallel import count_uses
from lightning_hybrid.tensor_parallel.styles import DIVIDE, WRAPPERS, find_style


class PlanBuilder:
    """The plan so far, and why other layers are not in it.

    Args:
        module: The whole module.
        size: The number of ranks.

    Attributes:
        plan: Styles by module name.
        reasons: Why layers are not divided, as the rest of a sentence, by module name.
    """

    def __init__(self, module: nn.Module, size: int) -> None:
        self.module, self.size = module, size
        self.plan: dict[str, str] = {}
        self.reasons: dict[str, str] = {}
        self.layers = dict(module.named_modules())
        self._uses = count_uses(module)
        self._holders: dict[int, set[str]] = {}
        for name, layer in self.layers.items():
            for parameter in layer._parameters.values():
                if parameter is not None:
                    self._holders.setdefault(id(parameter), set()).add(name)

    def add(self, *styles: tuple[str, str]) -> bool:
        """Plan for all of these names and styles, or, if one is not possible, for none."""
        if any(name in self.plan or name in self.reasons for name, _ in styles):
            return False
        first, style = styles[0]
        # Elsewhere, a layer between the two of a pair may get an input that is not sharded.
        if len(styles) > 1 and style == "colwise" and self.is_used_twice(name for name, _ in styles):
            self.reasons[first] = "or what follows it stands at several places"
            return False
        for name, style in styles:
            reason = find_style(style, self.layers[name]).unsupported_reason(self.layers[name], self.size)
            if reason is not None:
                self.reasons[name] = reason
                return False
        self.plan.update(styles)
        return True

    def add_block(self, name: str, styles: Sequence[tuple[str, str]]) -> bool:
        """Plan for the layers of a block; if one of them is not possible, the block is left whole.

        Args:
            name: The block's.
            styles: Names and styles of the layers in it.
        """
        reason = self.block_reason(styles)
        if reason is not None:
            self.reasons.setdefault(name, reason)
            return False
        for layer, style in styles:
            self.plan[layer] = f"{self.plan[layer]} + {style}" if layer in self.plan else style
        return True

    def block_reason(self, styles: Sequence[tuple[str, str]]) -> str | None:
        """Why layers cannot be divided together, as the rest of a sentence; ``None`` if they can."""
        if self.is_used_twice(name for name, _ in styles):
            return "or a layer of it stands at several places"
        for name, style in styles:
            reason = self._layer_reason(name, style)
            if reason is not None:
                return reason if len(styles) == 1 else f"has a {name.rpartition('.')[2]!r} that {reason}"
        return None

    def _layer_reason(self, name: str, style: str) -> str | None:
        if style.startswith(DIVIDE):
            return None
        layer = self.layers[name]
        if style.partition(":")[0] in WRAPPERS:
            return find_style(style, layer).unsupported_reason(layer, self.size)
        if name in self.plan:
            return "is divided in another way"
        parameters = [parameter for parameter in layer._parameters.values() if parameter is not None]
        if any(isinstance(parameter, DTensor) for parameter in parameters):
            return "is divided already"
        found = find_style(style, layer)
        is_tied = found.param_splits(layer) and any(self._holders[id(each)] - {name} for each in parameters)
        reason = found.unsupported_reason(layer, self.size)
        return "shares its weight or bias with another layer" if reason is None and is_tied else reason

    def is_used_twice(self, names: Iterable[str]) -> bool:
        """Whether one of these layers stands at several places."""
        return any(self._uses[id(self.layers[name])] > 1 for name in names)
