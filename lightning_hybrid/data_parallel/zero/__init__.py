"""ZeRO: optimizer states (stage 1), gradients (2) and parameters (3) sharded over replicas."""
