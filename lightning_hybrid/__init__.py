"""Hybrid parallel training for PyTorch Lightning: data x tensor x pipeline parallel ranks, one module."""

from __future__ import annotations

from lightning_hybrid.strategy import HybridStrategy

__all__ = ["HybridStrategy", "__version__"]

__version__ = "0.1.0"
