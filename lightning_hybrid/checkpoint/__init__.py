"""Checkpoints of the undivided model: one ordinary file, or a directory to which every rank adds its part."""

from __future__ import annotations

from lightning_hybrid.checkpoint.file_io import FileIO
from lightning_hybrid.checkpoint.matching import load_module_state
from lightning_hybrid.checkpoint.optimizers import OptimizerStates
from lightning_hybrid.checkpoint.ownership import Ownership
from lightning_hybrid.checkpoint.sharded import ShardedCheckpoint
from lightning_hybrid.checkpoint.whole import WholeCheckpoint

__all__ = [
    "FileIO",
    "OptimizerStates",
    "Ownership",
    "ShardedCheckpoint",
    "WholeCheckpoint",
    "load_module_state",
]
