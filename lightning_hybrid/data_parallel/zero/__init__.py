"""ZeRO: replicas divide optimizer states (1), gradients (2) and parameters (3)."""
