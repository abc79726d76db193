"""Training data: CIFAR-10 from its published files, random images, and the digits of ``lightning-hybrid demo``."""

from __future__ import annotations

import io
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_hybrid.cli.demo.digits import Augment, Digits, ImageData, Images

__all__ = ["CIFAR10", "Augment", "Digits", "Images", "RandomImages", "read_cifar10"]


class RandomImages(ImageData):
    """Random noise in the shape of images, to test and time models that are too large for the digits of the demo.

    Args:
        image_size: Height and width of the images, in pixels.
        channels: Number of channels of the images.
        num_classes: Number of classes of the random labels.
        num_images: Number of training images. The validation set and the test set each have a tenth of this number.
        batch_size: Number of images per batch and data-parallel replica.
        num_workers: Number of worker processes of each data loader.
    """

    def __init__(
        self,
        image_size: int,
        channels: int = 3,
        num_classes: int = 10,
        num_images: int = 1024,
        batch_size: int = 64,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size, num_workers)
        self.shape = channels, image_size, image_size
        self.num_classes, self.num_images = num_classes, num_images

    def setup(self, stage: str) -> None:
        """Create the images, which are the same in every process."""
        generator = torch.Generator().manual_seed(0)
        parts = []
        for number in (self.num_images, self.num_images // 10, self.num_images // 10):
            labels = torch.randint(self.num_classes, (number,), generator=generator)
            parts.append(Images(torch.randn(number, *self.shape, generator=generator), labels))
        self.train, self.val, self.test = parts


class CIFAR10(ImageData):
    """CIFAR-10: 60000 natural color images of 32 x 32 pixels (https://www.cs.toronto.edu/~kriz/cifar.html).

    Args:
        data_dir: Path of the "python version": the published ``.tar.gz`` file, a folder that contains it, or a folder
            that contains ``data_batch_1`` to ``data_batch_5`` and ``test_batch``.
        batch_size: Number of images per batch and data-parallel replica.
        num_workers: Number of worker processes of each data loader.
        augment: If True, training images are randomly cropped and mirrored.
    """

    mean = (0.4914, 0.4822, 0.4465)
    std = (0.2470, 0.2435, 0.2616)

    def __init__(self, data_dir: str, batch_size: int = 64, num_workers: int = 0, augment: bool = True) -> None:
        super().__init__(batch_size, num_workers)
        self.data_dir = data_dir
        self.augment = augment

    def setup(self, stage: str) -> None:
        """Read the images. The last tenth of the training images is used for validation."""
        files = read_cifar10(Path(self.data_dir))
        images = torch.cat([files[f"data_batch_{number}"][0] for number in range(1, 6)])
        labels = torch.cat([files[f"data_batch_{number}"][1] for number in range(1, 6)])
        split = len(labels) - len(labels) // 10
        augment = Augment(padding=4, flip=True) if self.augment else None
        self.train = Images(self._normalize(images[:split]), labels[:split], augment)
        self.val = Images(self._normalize(images[split:]), labels[split:])
        test_images, test_labels = files["test_batch"]
        self.test = Images(self._normalize(test_images), test_labels)

    def _normalize(self, images: Tensor) -> Tensor:
        mean, std = torch.tensor(self.mean).view(3, 1, 1), torch.tensor(self.std).view(3, 1, 1)
        return (images / 255 - mean) / std


CIFAR10_FILES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]


def read_cifar10(path: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Read the six files of the "python version" of CIFAR-10.

    Args:
        path: The published ``.tar.gz`` file, or a folder that contains this file or its unpacked files at any depth.

    Returns:
        A mapping from file names to images ``(number, 3, 32, 32)``, uint8, and labels ``(number,)``, int64.

    Raises:
        FileNotFoundError: If `path` does not exist, or if one of the six files is missing.
    """
    if path.is_dir() and not any(path.rglob("data_batch_1")):
        path = next(path.rglob("*.tar.gz"), path)
    if path.is_file():
        with tarfile.open(path) as archive:
            members = {Path(member.name).name: member for member in archive if member.isfile()}
            contents = {name: archive.extractfile(members[name]).read() for name in CIFAR10_FILES if name in members}  # type: ignore[union-attr]
    else:
        found = {file.name: file for file in path.rglob("*_batch*") if file.is_file()}
        contents = {name: found[name].read_bytes() for name in CIFAR10_FILES if name in found}
    if missing := [name for name in CIFAR10_FILES if name not in contents]:
        raise FileNotFoundError(
            f"no {', '.join(missing)} in {path}: data_dir must contain the unpacked files of CIFAR-10's python version,"
            " or its .tar.gz"
        )
    return {name: _read_batch(content) for name, content in contents.items()}


def _read_batch(content: bytes) -> tuple[Tensor, Tensor]:
    """Read a pickled dictionary. Each row of ``data`` is an image: its red plane, then its green and its blue plane."""
    batch = _ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
    images = torch.from_numpy(np.array(batch[b"data"], dtype=np.uint8)).view(-1, 3, 32, 32)
    return images, torch.tensor(batch[b"labels"])


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickle arrays only, because an unrestricted pickle can run any code. These files contain only arrays."""

    allowed = frozenset({"_reconstruct", "ndarray", "dtype", "encode", "_frombuffer"})

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] in {"numpy", "_codecs"} and name in self.allowed:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a CIFAR-10 file")
