"""The strategy that Lightning calls, and the parts that put a run together: checks, layout, parallelization, launch.

The Trainer also accepts the strategy by name, such as ``strategy="hybrid_pp2"``. The package registers these names when
it is imported. Importing Lightning takes seconds, so the package does not import Lightning for this: if Lightning is
imported later, the names are registered at that time.

`lightning_hybrid/__init__.py` calls :func:`register_with_lightning`. Lightning has entry points for callbacks only, so
a package has to register its strategies itself.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from lightning_hybrid.axes import ALWAYS

_REGISTRY = "lightning.pytorch.strategies"  # the module that contains Lightning's registry
_PREFIX = "hybrid"  # the first part of each name
_ARGUMENTS = {  # the argument for each abbreviation in a name
    **{axis.key: axis.argument for axis in ALWAYS},
    "zero": "zero_stage",
}


def register_with_lightning() -> None:
    """Register ``"hybrid"`` and names such as ``"hybrid_tp2_pp2"``, now or as soon as Lightning is imported."""
    if _REGISTRY in sys.modules:
        _register(import_module(_REGISTRY))
    else:
        sys.meta_path.insert(0, _RegistryFinder())


def _register(strategies: ModuleType) -> None:
    """Register the common names. The Trainer's lookups register other sizes, see :class:`_Names`.

    Args:
        strategies: The module ``lightning.pytorch.strategies``, whose registry is changed.
    """
    registry = strategies.StrategyRegistry
    for tensor, pipeline in itertools.product((1, 2, 4, 8), repeat=2):
        parts = [f"{axis}{size}" for axis, size in (("tp", tensor), ("pp", pipeline)) if size > 1]
        _register_name(registry, "_".join([_PREFIX, *parts]))
    for zero_stage in (1, 2, 3):
        _register_name(registry, f"{_PREFIX}_zero{zero_stage}")
    names = registry.available_strategies
    registry.available_strategies = lambda: _Names(names(), registry)


def _register_name(registry: Any, name: str) -> None:
    """Register a name with the arguments of `HybridStrategy` that it sets."""
    arguments = _parse(name)
    text = ", ".join(f"{argument}={value}" for argument, value in arguments.items())
    registry.register(name, _make_strategy, description=f"HybridStrategy({text})", override=True, **arguments)


class _Names(list[str]):
    """The names of all strategies, in which the Trainer looks up a name. It also contains our names with any sizes."""

    def __init__(self, names: Sequence[str], registry: Any) -> None:
        super().__init__(names)
        self._registry = registry

    def __contains__(self, name: object) -> bool:
        is_new = isinstance(name, str) and name.startswith(f"{_PREFIX}_") and not super().__contains__(name)
        if is_new:
            _register_name(self._registry, str(name))
        return is_new or super().__contains__(name)

    def __reduce__(self) -> tuple[type, tuple[list[str]]]:
        """Pickle the names as a plain list, because a Trainer is pickled with the names that it has found."""
        return list, (list(self),)


def _parse(name: str) -> dict[str, int]:
    """Return the arguments that a name such as ``"hybrid_dp2_tp2_pp4_zero1"`` sets.

    Raises:
        ValueError: If a part of the name is unknown, or appears twice.
    """
    arguments: dict[str, int] = {}
    for part in name.split("_")[1:]:
        found = re.fullmatch(r"([a-z]+)([1-9]\d*)", part)
        argument = None if found is None else _ARGUMENTS.get(found[1])
        if found is None or argument is None or argument in arguments:
            reason = "appears twice" if argument in arguments else "is not a short name followed by a number"
            raise ValueError(
                f"The strategy name {name!r} is invalid. Its part {part!r} {reason}. After {_PREFIX!r}, you can add"
                f" {', '.join(_ARGUMENTS)}. Use each at most once, followed by a number, as in '{_PREFIX}_pp3',"
                f" '{_PREFIX}_dp2_tp2_pp4' or '{_PREFIX}_zero3'. To set other arguments, pass an object to the Trainer:"
                " `strategy=HybridStrategy(...)`. [LH126]"
            )
        arguments[argument] = int(found[2])
    return arguments


def _make_strategy(**arguments: Any) -> Any:
    from lightning_hybrid.strategy.strategy import HybridStrategy

    return HybridStrategy(**arguments)


class _RegistryFinder:
    """Registers the names when Lightning's registry is imported.

    It finds the module of the registry once, through the other finders, and wraps its loader.
    """

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
