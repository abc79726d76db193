"""Checkpoint files, which are replaced atomically, and mapped into memory when large files are read from a disk.

`HybridStrategy` uses :class:`FileIO` unless the user passes a plugin, and `Checkpointer` calls its methods. Rank 0
saves and removes; every rank loads. Lightning's `TorchCheckpointIO` first writes the whole checkpoint into memory, and
its load makes every rank read all bytes of the full model into memory.
"""

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

_LARGE = 1 << 20  # bytes; smaller files are read faster than mapped
_MAPPED = ("state_dict", "optimizer_states")  # each rank reads a part of these entries


class FileIO(TorchCheckpointIO):
    """Plugin for Lightning's checkpoint files. A kill at any time leaves the old or the new file complete.

    Other file systems than local ones use Lightning's code, because object stores show only complete files.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write a checkpoint. It replaces a file or a directory at this path.

        Raises:
            TypeError: If there are ``storage_options``.
            OSError: If the checkpoint cannot be written; an earlier checkpoint at this path is then unchanged. Or, on a
                store that is not a disk, if the checkpoint was written, but an earlier directory cannot be removed.
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
        except (OSError, RuntimeError) as error:  # torch's own writer raises `RuntimeError`
            raise OSError(
                # only rank 0 writes files, so the user has to check its node
                f"The checkpoint {path} could not be written. If an earlier checkpoint exists at this path, it is"
                f" unchanged. Error on rank 0: {type(error).__name__}: {error} [LH911]"
            ) from error
        if isinstance(place, Path) or not (place / MARK).is_file():
            return
        try:
            remove_directory(place)
        except Exception as error:  # stores raise errors of any class
            raise OSError(
                f"The checkpoint {path} was written, but a directory with an earlier checkpoint at the same path could"
                f" not be removed. The earlier checkpoint would be loaded instead. Remove the file {place / MARK}."
                f" Error on rank 0: {type(error).__name__}: {error} [LH912]"
            ) from error

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint.

        The weights and optimizer states of a file on a disk are mapped into memory if it has 1 MiB or more, so each
        rank reads only the parts that it uses. Everything else is copied.

        Raises:
            FileNotFoundError: If the file does not exist.
            ValueError: If the file is damaged, or was not written by `torch.save`.
            UnpicklingError: If it contains objects that `weights_only` does not allow.
        """
        file = place_of(path)
        if not isinstance(file, Path) or not file.exists() or file.is_dir():
            return super().load_checkpoint(path, map_location, weights_only)
        try:
            mapped = file.stat().st_size >= _LARGE and zipfile.is_zipfile(file)
            checkpoint: dict[str, Any] = torch.load(
                file, map_location or "cpu", mmap=mapped or None, weights_only=weights_only
            )
        except Exception as error:  # unpickling may raise any error
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
        copied: dict[str, Any] = replaced(checkpoint, own)  # callbacks may keep these values after the file was removed
        return copied

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a file or a directory. At no time is a part of it visible as a complete checkpoint."""
        place = place_of(path)
        if isinstance(place, Path):
            discard(place)
        else:
            place.remove()
            remove_directory(place)


# Plugins that read and write ordinary files. For their checkpoints, `Checkpointer` examines the place before it reads:
# it verifies checksums, and reads directories itself. Other plugins may use any format.
FILE_PLUGINS = (FileIO, TorchCheckpointIO, AsyncCheckpointIO)
