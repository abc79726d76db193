"""Layers shared by several ranks: plans, styles, and a loss over divided classes.

Parameters are DTensors, so that optimizers, norms and checkpoints know every shard; activations stay plain tensors.
"""

from __future__ import annotations

import lightning_hybrid.tensor_parallel.operations  # noqa: F401  registers what logits in shards can do
from lightning_hybrid.tensor_parallel.collectives import TensorGroup
from lightning_hybrid.tensor_parallel.plan import Plan, UserPlan, make_plan
from lightning_hybrid.tensor_parallel.sharder import joined
from lightning_hybrid.tensor_parallel.styles import Division
from lightning_hybrid.tensor_parallel.vocabulary import VocabularyShards, whole

__all__ = [
    "Division",
    "Plan",
    "TensorGroup",
    "UserPlan",
    "VocabularyShards",
    "joined",
    "make_plan",
    "whole",
]
