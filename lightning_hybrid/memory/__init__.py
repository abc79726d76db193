"""The memory of a rank: an estimate of it, and what makes it less: activation checkpointing and offload."""
