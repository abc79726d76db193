"""Data parallelism: gradients averaged in buckets and clipped; gradients and parameters sharded (ZeRO)."""
