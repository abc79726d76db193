"""The builder of the automatic plan, which adds the layers of a block together or not at all.

`auto_plan`, `blocks` and `hf_plan` share one :class:`PlanBuilder` per plan. Half a block would give wrong results: a
column-wise layer returns a shard of its features, which only a row-wise layer accepts.
"""

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
    """A plan that is being built, with the reasons for layers that are not in it.

    Args:
        module: The full module.
        size: The number of ranks.
        mode: The way in which layers are sharded over the ranks.

    Attributes:
        plan: The styles by module name. Several styles of a module are joined by ``" + "``.
        reasons: The reasons why layers are not sharded, as the end of a sentence, by module name. A layer with a reason
            is never added later.
        layers: All modules, by name.
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
        """Add all of these layers to the plan, or none of them if a style is not possible.

        Args:
            styles: Names of layers, and their styles.
            block: The block that contains the layers, which gets the reason if they are not added. If `None`, the layer
                that cannot have its style gets the reason.

        Returns:
            True if the layers were added. If False, a reason is stored, except if a layer is in the plan already, has a
            reason already, or was sharded by the user.
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
        """Return the layer that prevents sharding these layers together, and the reason; ``None`` if there is none.

        Args:
            styles: Names of layers, and their styles. If the first style is not ``"vocab"``, several layers pass shards
                to each other.
        """
        hands_on = len(styles) > 1 and styles[0][1] != "vocab"
        held = {path: split for each in styles for path, split in self._held(*each)}
        for name, style in styles:
            layer = self.layers[name]
            kind = style.partition(":")[0]
            # A layer that is used elsewhere may receive an unsharded input there, or pass a shard to a layer that
            # expects all features.
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
        """Yield the names of the parameters of a layer with a style, each with its sharding; ``None`` if replicated.

        Styles that only wrap a module (`styles.WRAPPERS`) shard nothing.
        """
        if _is_wrapper(style):
            return
        layer = self.layers[name]
        found = self.mode.find_style(style, layer).param_splits(layer)
        splits = {each.path: replace(each, path="") for each in found}
        for path, _ in layer.named_parameters(remove_duplicate=False):
            yield join_names(name, path), splits.get(path)

    def _is_settled(self, name: str) -> bool:
        """Return True if a layer is in the plan, has a reason, or was sharded by the user's `configure_model`."""
        is_divided = any(isinstance(each, DTensor) for each in self.layers[name]._parameters.values())
        return is_divided or name in self.plan or name in self.reasons


def _is_wrapper(style: str) -> bool:
    return style.partition(":")[0] in WRAPPERS
