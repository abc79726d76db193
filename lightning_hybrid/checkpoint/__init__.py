"""Checkpoints of the full model: one ordinary file, or a directory into which every rank writes its shards."""
