"""Hybrid parallel training for PyTorch Lightning: data, tensor, context and pipeline parallelism in one strategy."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_hybrid.strategy import register_with_lightning
from lightning_hybrid.version import __version__

if TYPE_CHECKING:
    from lightning_hybrid.cli.check import check
    from lightning_hybrid.config import Faults, Launch, Tuning
    from lightning_hybrid.pipeline_parallel.splitting.splitters import (
        split_graphs,
        split_rows,
        split_samples,
        split_targets,
    )
    from lightning_hybrid.strategy.strategy import HybridStrategy
    from lightning_hybrid.trainer.module_hooks import ModuleHooks, count_tokens
    from lightning_hybrid.trainer.results.hybrid_timeline import HybridTimeline

__all__ = [
    "Faults",
    "HybridStrategy",
    "HybridTimeline",
    "Launch",
    "ModuleHooks",
    "Tuning",
    "__version__",
    "check",
    "count_tokens",
    "split_graphs",
    "split_rows",
    "split_samples",
    "split_targets",
]

# Importing torch and Lightning takes seconds, and some commands use neither, so each name is imported at its first use.
_HOMES = {
    "Faults": "config",
    "HybridStrategy": "strategy.strategy",
    "HybridTimeline": "trainer.results.hybrid_timeline",
    "Launch": "config",
    "ModuleHooks": "trainer.module_hooks",
    "Tuning": "config",
    "check": "cli.check",
    "count_tokens": "trainer.module_hooks",
    "split_graphs": "pipeline_parallel.splitting.splitters",
    "split_rows": "pipeline_parallel.splitting.splitters",
    "split_samples": "pipeline_parallel.splitting.splitters",
    "split_targets": "pipeline_parallel.splitting.splitters",
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, and store it in this module.

    Raises:
        AttributeError: If the name is not public.
    """
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names only."""
    return __all__


register_with_lightning()
