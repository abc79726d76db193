"""Checkpoint files: replaced atomically, and on a disk mapped into memory where they are large."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

from lightning_hybrid.checkpoint.storage.atomic import MARK, discard, new_file, telling_why
from lightning_hybrid.checkpoint.storage.remote import place_of, remove_directory
from lightning_hybrid.checkpoint.tree_paths import cloned, replaced

_LARGE = 1 << 20  # bytes; what is smaller is read sooner than mapped
_MAPPED = ("state_dict", "optimizer_states")  # each rank takes a part of these


class FileIO(TorchCheckpointIO):
    """Lightning's own files, written so that a kill at any moment leaves the old file or the new one.

    On other than local file systems they are written as in Lightning: object stores show a file when it is complete.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write a checkpoint.

        Raises:
            TypeError: If there are ``storage_options``.
            OSError: If it cannot be written; what was there is as it was.
        """
        place = place_of(path)
        if storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        try:
            if isinstance(place, Path):
                with new_file(place) as new, telling_why(new):
                    torch.save(checkpoint, new)
            else:
                super().save_checkpoint(checkpoint, str(path))
        except (OSError, RuntimeError) as error:  # torch's own writer raises the latter
            raise OSError(
                # rank 0 writes files; its machine is to be looked at
                f"The checkpoint {path} could not be written. If an earlier checkpoint exists at this path, it is"
                f" unchanged. Error on rank 0: {type(error).__name__}: {error} [LH911]"
            ) from error
        if isinstance(place, Path) or not (place / MARK).is_file():
            return
        try:
            remove_directory(place)
        except Exception as error:  # of whatever kind a store's errors are
            raise OSError(
                f"The checkpoint {path} was written, but a directory with an earlier checkpoint at the same path could"
                f" not be removed. The earlier checkpoint would be loaded instead. Remove the file {place / MARK}."
                f" Error on rank 0: {type(error).__name__}: {error} [LH912]"
            ) from error

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint; of weights and states of optimizers, a rank reads what it uses.

        Raises:
            FileNotFoundError: If there is none.
            ValueError: If the file is damaged, or is none of `torch.save`.
            UnpicklingError: If it holds objects that `weights_only` does not allow.
        """
        file = place_of(path)
        if not isinstance(file, Path) or not file.exists() or file.is_dir():
            return super().load_checkpoint(path, map_location, weights_only)
        try:
            mapped = file.stat().st_size >= _LARGE and zipfile.is_zipfile(file)
            checkpoint: dict[str, Any] = torch.load(
                file, map_location or "cpu", mmap=mapped or None, weights_only=weights_only
            )
        except Exception as error:  # whatever unpickling raises
            if isinstance(error, pickle.UnpicklingError):
                if zipfile.is_zipfile(file) or "Unsupported global" in str(error):
                    raise pickle.UnpicklingError(f"The checkpoint {file} cannot be loaded: {error} [LH927]") from error
                raise ValueError(
                    f"{file} ({file.stat().st_size} bytes) cannot be loaded as a checkpoint. Either it was not written"
                    " by `torch.save`, or it is damaged. [LH902]"
                ) from error
            raise ValueError(
                f"The checkpoint {file} ({file.stat().st_size} bytes) cannot be read, because it is damaged or"
                f" incomplete. {type(error).__name__}: {error} [LH901]"
            ) from error
        if not mapped or not isinstance(checkpoint, dict):
            return checkpoint
        own = {(key,): cloned(value) for key, value in checkpoint.items() if key not in _MAPPED}
        copied: dict[str, Any] = replaced(checkpoint, own)  # callbacks may keep theirs when the file is gone
        return copied

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a file or a directory; nobody sees half of it."""
        place = place_of(path)
        if isinstance(place, Path):
            discard(place)
        else:
            place.remove()
            remove_directory(place)


FILE_PLUGINS = (FileIO, TorchCheckpointIO, AsyncCheckpointIO)  # they write files, so a directory is not theirs
