"""Replicas of a model: gradients averaged in buckets, tensors made equal."""

from __future__ import annotations

from lightning_hybrid.data_parallel.batch_norm import synchronize_batch_norm
from lightning_hybrid.data_parallel.buckets import GradientBuckets
from lightning_hybrid.data_parallel.replicas import equalize

__all__ = ["GradientBuckets", "equalize", "synchronize_batch_norm"]
