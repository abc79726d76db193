"""Small images to learn from: handwritten digits (nothing to download) and CIFAR-10 (from its published files)."""

from __future__ import annotations

import io
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

__all__ = ["CIFAR10", "Augment", "Digits", "Images", "read_cifar10"]


class Augment:
    """A random crop of the zero-padded image, and for natural images a random flip.

    Args:
        padding: Pixels added on each side before the crop.
        flip: Whether half of the images are mirrored.
    """

    def __init__(self, padding: int, flip: bool) -> None:
        self.padding = padding
        self.flip = flip

    def __call__(self, image: Tensor) -> Tensor:
        """One image ``(channels, height, width)``, moved and perhaps mirrored."""
        _, height, width = image.shape
        top, left, mirrored = torch.randint(0, 2 * self.padding + 1, (3,)).tolist()
        image = F.pad(image, (self.padding,) * 4)[:, top : top + height, left : left + width]
        return image.flip(-1) if self.flip and mirrored % 2 else image


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Images ``(number, channels, height, width)`` with labels ``(number,)``.

    Args:
        images: Normalised images, float32.
        labels: Their classes, int64.
        augment: What is done to an image each time it is read.
    """

    def __init__(self, images: Tensor, labels: Tensor, augment: Augment | None = None) -> None:
        if len(images) != len(labels):
            raise ValueError(f"{len(images)} images, but {len(labels)} labels")
        self.images = images
        self.labels = labels
        self.augment = augment

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index]
        return (self.augment(image) if self.augment else image), self.labels[index]


class _ImageData(LightningDataModule):
    """Loaders over `train`, `val` and `test`, which `setup` of a subclass fills."""

    train: Images
    val: Images
    test: Images

    def __init__(self, batch_size: int, num_workers: int) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.num_workers = num_workers

    def _loader(self, images: Images, shuffle: bool = False) -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(
            images,
            batch_size=self.batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Shuffled and augmented."""
        return self._loader(self.train, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """In order."""
        return self._loader(self.val)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """In order."""
        return self._loader(self.test)

    def predict_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """The test images, in order."""
        return self._loader(self.test)


class Digits(_ImageData):
    """The 1797 handwritten digits, 8 x 8 and grey, that come with scikit-learn.

    Args:
        batch_size: Images of a batch, per data-parallel replica.
        num_workers: Processes that load.
        augment: Whether training images are moved by up to a pixel. Much for 8 x 8 pixels: it takes longer training.
    """

    num_val = 360
    mean, std = 0.3053, 0.3760

    def __init__(self, batch_size: int = 32, num_workers: int = 0, augment: bool = False) -> None:
        super().__init__(batch_size, num_workers)
        self.augment = augment

    def setup(self, stage: str) -> None:
        """The same split everywhere: 1437 digits to train on, 360 to validate, which are the test too."""
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = (torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16 - self.mean) / self.std
        labels = torch.tensor(digits.target)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        train, val = order[self.num_val :], order[: self.num_val]
        self.train = Images(images[train], labels[train], Augment(padding=1, flip=False) if self.augment else None)
        self.val = self.test = Images(images[val], labels[val])


class CIFAR10(_ImageData):
    """The 60000 natural images, 32 x 32 in colour, of CIFAR-10 (https://www.cs.toronto.edu/~kriz/cifar.html).

    Args:
        data_dir: Where the "python version" lies: the ``.tar.gz`` as published, or a folder that holds it, or a folder
            that holds ``data_batch_1`` to ``data_batch_5`` and ``test_batch``.
        batch_size: Images of a batch, per data-parallel replica.
        num_workers: Processes that load.
        augment: Whether training images are cropped and mirrored at random.
    """

    mean = (0.4914, 0.4822, 0.4465)
    std = (0.2470, 0.2435, 0.2616)

    def __init__(self, data_dir: str, batch_size: int = 64, num_workers: int = 0, augment: bool = True) -> None:
        super().__init__(batch_size, num_workers)
        self.data_dir = data_dir
        self.augment = augment

    def setup(self, stage: str) -> None:
        """The last tenth of the training images is for validation; the test images are apart."""
        files = read_cifar10(Path(self.data_dir))
        images = torch.cat([files[f"data_batch_{number}"][0] for number in range(1, 6)])
        labels = torch.cat([files[f"data_batch_{number}"][1] for number in range(1, 6)])
        split = len(labels) - len(labels) // 10
        augment = Augment(padding=4, flip=True) if self.augment else None
        self.train = Images(self._normalise(images[:split]), labels[:split], augment)
        self.val = Images(self._normalise(images[split:]), labels[split:])
        test_images, test_labels = files["test_batch"]
        self.test = Images(self._normalise(test_images), test_labels)

    def _normalise(self, images: Tensor) -> Tensor:
        mean, std = torch.tensor(self.mean).view(3, 1, 1), torch.tensor(self.std).view(3, 1, 1)
        return (images / 255 - mean) / std


CIFAR10_FILES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]


def read_cifar10(path: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """The six files of the "python version" of CIFAR-10.

    Args:
        path: A ``.tar.gz`` as published, or a folder that holds it or its files, at any depth.

    Returns:
        By file name: images ``(number, 3, 32, 32)`` uint8, and labels ``(number,)`` int64.

    Raises:
        FileNotFoundError: There is nothing at `path`, or files are missing in it.
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
            f"no {', '.join(missing)} in {path}: data_dir must hold the unpacked files of CIFAR-10's python version, "
            "or its .tar.gz"
        )
    return {name: _read_batch(content) for name, content in contents.items()}


def _read_batch(content: bytes) -> tuple[Tensor, Tensor]:
    """A pickled dictionary: ``data`` has a row per image, the red plane before the green before the blue."""
    batch = _ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
    images = torch.from_numpy(np.array(batch[b"data"], dtype=np.uint8)).view(-1, 3, 32, 32)
    return images, torch.tensor(batch[b"labels"])


class _ArrayUnpickler(pickle.Unpickler):
    """A pickle can run any program; these files need arrays only."""

    allowed = frozenset({"_reconstruct", "ndarray", "dtype", "encode", "_frombuffer"})

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] in {"numpy", "_codecs"} and name in self.allowed:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a CIFAR-10 file")
