"""Recomputing activations in backward: what a layer computes inside is made again instead of being kept."""

from __future__ import annotations

from lightning_hybrid.recompute.choice import Recompute, check_recompute, chosen_layers, is_by_name
from lightning_hybrid.recompute.layers import Recomputation

__all__ = ["Recomputation", "Recompute", "check_recompute", "chosen_layers", "is_by_name"]
