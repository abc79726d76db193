"""Hybrid parallel training for PyTorch Lightning: data x tensor x pipeline parallel ranks, one module."""

from __future__ import annotations

from lightning_hybrid.cli.check import check
from lightning_hybrid.strategy.strategy import HybridStrategy
from lightning_hybrid.trainer.module_hooks import ModuleHooks, count_tokens
from lightning_hybrid.trainer.results.hybrid_timeline import HybridTimeline
from lightning_hybrid.version import __version__

__all__ = ["HybridStrategy", "HybridTimeline", "ModuleHooks", "__version__", "check", "count_tokens"]


def __dir__() -> list[str]:
    """What is public, and nothing else."""
    return __all__
