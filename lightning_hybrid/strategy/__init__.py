"""The strategy that Lightning calls, and how a run is put together: checks, layout, parallelized module, launch.

Lightning's Trainer finds it by names such as ``"hybrid_pp2"``. They are registered as soon as both packages are
imported, in whichever order. Lightning, which takes seconds, is not imported for them: where it comes later, they are
registered when it has been imported.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_REGISTRY = "lightning.pytorch.strategies"  # the module that has it


def register_with_lightning() -> None:
    """Register ``"hybrid"`` and presets such as ``"hybrid_pp2"`` and ``"hybrid_tp2_pp2"``, now or with Lightning."""
    if _REGISTRY in sys.modules:
        _register(import_module(_REGISTRY))
    else:
        sys.meta_path.insert(0, _RegistryFinder())


def _register(strategies: ModuleType) -> None:
    for tensor, pipeline in itertools.product((1, 2, 4, 8), repeat=2):
        parts = [f"{axis}{size}" for axis, size in (("tp", tensor), ("pp", pipeline)) if size > 1]
        sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline} if parts else {}
        text = f"Pipeline of {pipeline} stages, layers shared by {tensor} ranks, data parallel over the rest"
        name = "_".join(["hybrid", *parts])
        strategies.StrategyRegistry.register(name, _make_strategy, description=text, override=True, **sizes)


def _make_strategy(**sizes: Any) -> Any:
    from lightning_hybrid.strategy.strategy import HybridStrategy

    return HybridStrategy(**sizes)


class _RegistryFinder:
    """Finds the module of the registry as others would, once, and adds to its execution that names are registered."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _REGISTRY or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                _register(module)

            vars(spec.loader)["exec_module"] = execute_and_register
        return spec
