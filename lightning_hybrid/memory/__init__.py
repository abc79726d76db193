"""The memory of a rank: estimates of it, and ways to reduce it (activation checkpointing and offload)."""
