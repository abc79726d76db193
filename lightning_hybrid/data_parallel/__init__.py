"""Replicas of a model: gradients averaged in buckets and clipped; gradients and parameters sharded (ZeRO)."""
