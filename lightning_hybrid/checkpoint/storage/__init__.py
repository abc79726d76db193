"""Checkpoints on the disk: what appears under its name is complete."""
