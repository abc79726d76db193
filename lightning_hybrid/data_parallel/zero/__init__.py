"""ZeRO: replicas shard optimizer states (1), gradients (2) and parameters (3)."""
