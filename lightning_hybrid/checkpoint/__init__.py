"""Checkpoints of the undivided model: one ordinary file, or a directory to which every rank adds its part."""
