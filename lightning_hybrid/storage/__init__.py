"""Checkpoints on the disk: what appears under its name is complete."""

from __future__ import annotations

from lightning_hybrid.storage.background import Background
from lightning_hybrid.storage.directory import EXTRA, Directory, write_directory
from lightning_hybrid.storage.replace import discard, new_file

__all__ = ["EXTRA", "Background", "Directory", "discard", "new_file", "write_directory"]
