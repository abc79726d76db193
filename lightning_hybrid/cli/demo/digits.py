"""The handwritten digits of scikit-learn as training data, without a download.

``lightning-hybrid demo`` trains on :class:`Digits`, and so do the files in `configs` and `examples`. It is ordinary
Lightning code: the strategy inserts the sampler that distributes samples over replicas.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

__all__ = ["Augment", "Digits", "ImageData", "Images", "load_digits"]


class Augment:
    """An augmentation that randomly crops a zero-padded image and optionally flips it.

    Args:
        padding: Number of pixels added on each side before the crop.
        flip: If True, about half of the images are mirrored.
    """

    def __init__(self, padding: int, flip: bool) -> None:
        self.padding = padding
        self.flip = flip

    def __call__(self, image: Tensor) -> Tensor:
        """Return an image ``(channels, height, width)``, shifted and perhaps mirrored."""
        _, height, width = image.shape
        top, left, mirrored = torch.randint(0, 2 * self.padding + 1, (3,)).tolist()
        image = F.pad(image, (self.padding,) * 4)[:, top : top + height, left : left + width]
        return image.flip(-1) if self.flip and mirrored % 2 else image


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Images ``(number, channels, height, width)`` with labels ``(number,)``.

    Args:
        images: Normalized images, float32.
        labels: Their classes, int64.
        augment: Function that is applied to an image each time it is read.
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


class ImageData(LightningDataModule):
    """Loaders for the data sets `train`, `val` and `test`, which a subclass creates in `setup`."""

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
        """Return the training loader: shuffled and augmented."""
        return self._loader(self.train, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Return the validation loader, in order."""
        return self._loader(self.val)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Return the test loader, in order."""
        return self._loader(self.test)

    def predict_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Return a loader for the test images, in order."""
        return self._loader(self.test)


class Digits(ImageData):
    """The 1797 handwritten digits of scikit-learn, 8 x 8 grayscale images.

    Args:
        batch_size: Number of images per batch and data-parallel replica.
        num_workers: Number of loading processes.
        augment: If True, training images are shifted by up to one pixel. For 8 x 8 pixels, this augmentation is strong
            and needs longer training.
    """

    num_val = 360
    mean, std = 0.3053, 0.3760

    def __init__(self, batch_size: int = 32, num_workers: int = 0, augment: bool = False) -> None:
        super().__init__(batch_size, num_workers)
        self.augment = augment

    def setup(self, stage: str) -> None:
        """Split the digits in the same way on every rank: 1437 for training, and 360 for validation and test."""
        images, labels = load_digits()
        images = (images.unsqueeze(1) / 16 - self.mean) / self.std
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        train, val = order[self.num_val :], order[: self.num_val]
        self.train = Images(images[train], labels[train], Augment(padding=1, flip=False) if self.augment else None)
        self.val = self.test = Images(images[val], labels[val])


def load_digits() -> tuple[Tensor, Tensor]:
    """Load the digits of scikit-learn.

    Returns:
        Images ``(1797, 8, 8)``, float32 from 0 to 16, and labels ``(1797,)``, int64.

    Raises:
        ModuleNotFoundError: If scikit-learn is not installed.
    """
    try:
        from sklearn import datasets
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "The demo trains on the digits data set of scikit-learn, but scikit-learn is not installed. Run `pip"
            " install scikit-learn`, or install lightning-hybrid with the extra `examples`. [LH1018]",
            name=error.name,
        ) from error
    digits = datasets.load_digits()
    return torch.tensor(digits.images, dtype=torch.float32), torch.tensor(digits.target)
