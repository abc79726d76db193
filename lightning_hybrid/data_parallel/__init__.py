"""Replicas of a model: gradients averaged in buckets, tensors made equal, parameters divided over them (ZeRO)."""

from __future__ import annotations

from lightning_hybrid.data_parallel.batch_norm import synchronize_batch_norm
from lightning_hybrid.data_parallel.buckets import GradientBuckets
from lightning_hybrid.data_parallel.dividing import (
    divide_over_replicas,
    join_replicas,
    listed_layers,
    own_parameters,
)
from lightning_hybrid.data_parallel.replicas import equalize
from lightning_hybrid.data_parallel.rows import Rows
from lightning_hybrid.data_parallel.twins import is_divided, put, shape_here, slots_of
from lightning_hybrid.data_parallel.wide import WideGradients
from lightning_hybrid.data_parallel.zero import Wholes

__all__ = [
    "GradientBuckets",
    "Rows",
    "Wholes",
    "WideGradients",
    "divide_over_replicas",
    "equalize",
    "is_divided",
    "join_replicas",
    "listed_layers",
    "own_parameters",
    "put",
    "shape_here",
    "slots_of",
    "synchronize_batch_norm",
]
