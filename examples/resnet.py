"""A ResNet, built as an `nn.Sequential`, in an ordinary LightningModule without code for parallel training.

From the root of the repository, run the example in one process or with any configuration::

    python examples/resnet.py fit --trainer.max_epochs 5
    python examples/resnet.py fit --config configs/resnet_pipeline.yaml
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

__all__ = ["BasicBlock", "Bottleneck", "Classifier", "ResNet", "resnet"]


def _norm(norm: str, channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels) if norm == "batch" else nn.GroupNorm(min(8, channels), channels)


class Convolutions(NamedTuple):
    """Options of the 3 x 3 convolutions of bottlenecks.

    Attributes:
        groups: Number of independent groups of channels (https://arxiv.org/abs/1611.05431).
        width_per_group: Number of channels per group in a network whose first layer has 64 channels.
        dilation: Distance between neighboring weights, in pixels.
    """

    groups: int = 1
    width_per_group: int = 64
    dilation: int = 1


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions and a shortcut: ``(batch, inputs, h, w)`` to ``(batch, width, h/stride, w/stride)``."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, norm: str, options: Convolutions) -> None:
        super().__init__()
        if options != Convolutions():
            raise ValueError(
                f"groups, width_per_group and dilation work only with bottlenecks (resnet50); got {options}"
            )
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.norm1 = _norm(norm, width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = _norm(norm, width)
        self.shortcut = _shortcut(inputs, width, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block. The shortcut is added before the last activation."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions and a shortcut, with ``4 * width`` output channels."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, norm: str, options: Convolutions) -> None:
        super().__init__()
        groups, dilation = options.groups, options.dilation
        middle = width * options.width_per_group // 64 * groups
        self.conv1 = nn.Conv2d(inputs, middle, 1, bias=False)
        self.norm1 = _norm(norm, middle)
        self.conv2 = nn.Conv2d(middle, middle, 3, stride, dilation, dilation, groups, bias=False)
        self.norm2 = _norm(norm, middle)
        self.conv3 = nn.Conv2d(middle, 4 * width, 1, bias=False)
        self.norm3 = _norm(norm, 4 * width)
        self.shortcut = _shortcut(inputs, 4 * width, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block. The shortcut is added before the last activation."""
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


def _shortcut(inputs: int, outputs: int, stride: int, norm: str) -> nn.Module:
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), _norm(norm, outputs))


class Classifier(nn.Module):
    """A mean over all pixels and a linear layer: ``(batch, channels, h, w)`` to ``(batch, num_classes)``."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``(batch, num_classes)``."""
        return self.fc(x.mean(dim=(2, 3)))


BLOCKS: dict[str, tuple[type[BasicBlock] | type[Bottleneck], tuple[int, int, int, int]]] = {
    "resnet18": (BasicBlock, (2, 2, 2, 2)),
    "resnet34": (BasicBlock, (3, 4, 6, 3)),
    "resnet50": (Bottleneck, (3, 4, 6, 3)),
}


def resnet(
    name: str,
    channels: int,
    num_classes: int,
    width: int,
    small_images: bool,
    norm: str,
    *,
    groups: int = 1,
    width_per_group: int = 64,
    replace_stride_with_dilation: Sequence[bool] = (False, False, False),
    zero_init_residual: bool = False,
) -> nn.Sequential:
    """Create a ResNet (https://arxiv.org/abs/1512.03385) with six layers: conv, layer1 to layer4, and classifier.

    Args:
        name: ``"resnet18"``, ``"resnet34"`` or ``"resnet50"``.
        channels: Number of channels of the images.
        num_classes: Number of classes.
        width: Number of channels of the first layer (64 in the paper).
        small_images: If True, the first convolution keeps the resolution, as is usual for images up to 32 x 32 pixels.
        norm: ``"batch"``, or ``"group"`` for separate statistics of each image.
        groups: Number of groups of the 3 x 3 convolutions of bottlenecks.
        width_per_group: Number of channels per group in a network whose first layer has 64 channels.
        replace_stride_with_dilation: Three booleans, for layer2 to layer4. True: use dilation instead of a stride.
        zero_init_residual: If True, each block is initialized as the identity (https://arxiv.org/abs/1706.02677).

    Raises:
        ValueError: If `name` is unknown.
    """
    if name not in BLOCKS:
        raise ValueError(f"unknown ResNet {name!r}; choose one of {', '.join(map(repr, BLOCKS))}")
    block, depths = BLOCKS[name]
    kernel = 3 if small_images else 7
    stem = [
        nn.Conv2d(channels, width, kernel, stride=1 if small_images else 2, padding=kernel // 2, bias=False),
        _norm(norm, width),
        nn.ReLU(inplace=True),
    ]
    if not small_images:
        stem.append(nn.MaxPool2d(kernel_size=3, stride=2, padding=1))
    layers = [nn.Sequential(*stem)]
    inputs, dilation = width, 1
    for level, depth in enumerate(depths):
        blocks, before = [], dilation
        stride = 1 if level == 0 else 2
        if level > 0 and replace_stride_with_dilation[level - 1]:
            stride, dilation = 1, 2 * dilation
        for index in range(depth):
            options = Convolutions(groups, width_per_group, dilation if index else before)
            blocks.append(block(inputs, width * 2**level, 1 if index else stride, norm, options))
            inputs = width * 2**level * block.expansion
        layers.append(nn.Sequential(*blocks))
    model = nn.Sequential(*layers, Classifier(inputs, num_classes))
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif zero_init_residual and isinstance(module, (BasicBlock, Bottleneck)):
            nn.init.zeros_(module.norm3.weight if isinstance(module, Bottleneck) else module.norm2.weight)
    return model


class ResNet(LightningModule):
    """A ResNet for image classification. Its pipeline body is the full network.

    The defaults are for 8 x 8 handwritten digits. Batch norm uses separate statistics for each microbatch of a
    pipeline, just as it does for each batch in gradient accumulation. With ``norm="group"``, the statistics do not
    depend on the batch.

    Args:
        name: ``"resnet18"``, ``"resnet34"`` or ``"resnet50"``.
        channels: Number of channels of the images.
        num_classes: Number of classes.
        width: Number of channels of the first layer (64 in the paper).
        small_images: If True, the first convolution keeps the resolution, as is usual for images up to 32 x 32 pixels.
        norm: Kind of normalization, ``"batch"`` or ``"group"``.
        groups: Number of groups of the 3 x 3 convolutions of bottlenecks.
        width_per_group: Number of channels per group in a network whose first layer has 64 channels.
        replace_stride_with_dilation: Three booleans, for layer2 to layer4. True: use dilation instead of a stride.
        zero_init_residual: If True, each block is initialized as the identity.
        lr: Learning rate of Adam.
        warmup_epochs: Number of epochs of linear learning rate warm-up, followed by a linear decay to zero.
    """

    def __init__(
        self,
        name: str = "resnet18",
        channels: int = 1,
        num_classes: int = 10,
        width: int = 16,
        small_images: bool = True,
        norm: Literal["batch", "group"] = "batch",
        groups: int = 1,
        width_per_group: int = 64,
        replace_stride_with_dilation: tuple[bool, bool, bool] = (False, False, False),
        zero_init_residual: bool = False,
        lr: float = 1e-3,
        warmup_epochs: int = 1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr, self.warmup_epochs = lr, warmup_epochs
        self.body = resnet(
            name,
            channels,
            num_classes,
            width,
            small_images,
            norm,
            groups=groups,
            width_per_group=width_per_group,
            replace_stride_with_dilation=replace_stride_with_dilation,
            zero_init_residual=zero_init_residual,
        )
        self.val_accuracy = MulticlassAccuracy(num_classes, average="micro")
        self.test_accuracy = MulticlassAccuracy(num_classes, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        """Return logits ``(batch, num_classes)`` for images ``(batch, channels, height, width)``."""
        return self.body(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the cross-entropy of a batch of images and labels."""
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the loss and accuracy of a batch."""
        images, labels = batch
        logits = self(images)
        self.val_accuracy(logits, labels)
        self.log("val_loss", F.cross_entropy(logits, labels), prog_bar=True, sync_dist=True)
        self.log("val_acc", self.val_accuracy, prog_bar=True)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the accuracy of a batch."""
        images, labels = batch
        self.test_accuracy(self(images), labels)
        self.log("test_acc", self.test_accuracy)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the most likely class of each image, ``(batch,)``."""
        return self(batch[0]).argmax(dim=-1)

    def configure_optimizers(self) -> dict[str, Any]:
        """Return Adam, and a scheduler that runs after each epoch."""
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self.lr_factor)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def lr_factor(self, epoch: int) -> float:
        """Return the learning rate of an epoch, relative to its peak."""
        if epoch < self.warmup_epochs:
            return (epoch + 1) / (self.warmup_epochs + 1)
        epochs = max((self.trainer.max_epochs or 1) - self.warmup_epochs, 1)
        return max(1 - (epoch - self.warmup_epochs) / epochs, 0.0)


if __name__ == "__main__":
    from lightning_hybrid.cli.main import main

    main(model="examples.resnet.ResNet", data="examples.data.Digits")
