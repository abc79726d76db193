"""Checkpoints of the undivided model: one ordinary file, or a directory to which every rank adds its part."""

from __future__ import annotations

from lightning_hybrid.checkpoint.copies import copied
from lightning_hybrid.checkpoint.file_io import OUR_PLUGINS, FileIO, local_path
from lightning_hybrid.checkpoint.matching import load_module_state
from lightning_hybrid.checkpoint.optimizers import OptimizerStates
from lightning_hybrid.checkpoint.ownership import Ownership
from lightning_hybrid.checkpoint.sharded import ShardedCheckpoint
from lightning_hybrid.checkpoint.whole import WholeCheckpoint

__all__ = [
    "OUR_PLUGINS",
    "FileIO",
    "OptimizerStates",
    "Ownership",
    "ShardedCheckpoint",
    "WholeCheckpoint",
    "copied",
    "load_module_state",
    "local_path",
]
