"""What cannot work with a pipeline is refused, with what is wrong, the values, and what to do."""

from __future__ import annotations

import inspect
from typing import Any

from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.plugins.io import AsyncCheckpointIO, CheckpointIO, TorchCheckpointIO
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import LBFGS, Optimizer

from lightning_hybrid.distributed.dtensor import is_sharded

__all__ = [
    "check_module",
    "check_optimizers",
    "check_plugin",
    "check_storage",
    "check_trainer",
]


def check_module(module: LightningModule, *, cut: bool) -> None:
    """Check what a module does on its own account.

    Args:
        module: The user's module.
        cut: Whether steps run in micro-batches or stages, so that Lightning's automatic optimization must drive them.

    Raises:
        ValueError: If something of it cannot work.
    """
    if not cut:
        return
    name = type(module).__name__
    if not module.automatic_optimization:
        raise ValueError(
            f"{name} uses manual optimization, which calls backward inside `training_step`; with micro-batches the"
            " strategy runs forward and backward itself. Remove `self.automatic_optimization = False`, or use"
            " pipeline_parallel_size=1 and num_microbatches=1."
        )
    if is_overridden("backward", module):
        raise ValueError(
            f"{name} overrides `backward`, which would never be called: with micro-batches the strategy runs backward"
            " itself. Remove the method, or use pipeline_parallel_size=1 and num_microbatches=1."
        )
    for step in ("training_step", "validation_step", "test_step", "predict_step"):
        method = getattr(module, step)  # `None` is how some switch a step off
        if callable(method) and "dataloader_iter" in inspect.signature(method).parameters:
            raise ValueError(
                f"`{name}.{step}(dataloader_iter)` fetches batches itself, so they cannot be split into micro-batches."
                f" Write `{step}(batch, batch_idx)`."
            )
    given = [hook for hook in ("split_body_input", "join_body_output") if hasattr(module, hook)]
    if len(given) == 1:
        raise ValueError(
            f"{name} defines `{given[0]}` alone; `split_body_input` and `join_body_output` belong together: define"
            " both, or neither."
        )


def check_trainer(trainer: Trainer, module: LightningModule, *, num_stages: int) -> None:
    """Check what else the Trainer was given.

    Args:
        trainer: The Trainer.
        module: The user's module.
        num_stages: The number of stages.

    Raises:
        ValueError: If something of it cannot work.
    """
    if num_stages == 1:
        return
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        if isinstance(callback, ModelPruning):
            raise ValueError(
                f"{type(callback).__name__} compares and masks the parameters of the whole model, of which each stage"
                " holds a part. Prune with pipeline_parallel_size=1, before or after this training."
            )
    if is_overridden("configure_gradient_clipping", module):
        rank_zero_warn(
            f"{type(module).__name__} overrides `configure_gradient_clipping`. With a pipeline, `self.clip_gradients`"
            " and `self.trainer.strategy.grad_norm()` know the gradients of the whole model; functions of torch see"
            " those of one stage."
        )


def check_optimizers(optimizers: list[Optimizer], module: nn.Module, *, cut: bool) -> None:
    """Check what `configure_optimizers` returned.

    Args:
        optimizers: The optimizers.
        module: The module, divided.
        cut: As in :func:`check_module`.

    Raises:
        ValueError: If there are several, one whose step is a search over the whole model, or one over parameters that
            the module had before its layers were shared.
    """
    if cut and len(optimizers) > 1:
        raise ValueError(
            f"`configure_optimizers` returned {len(optimizers)} optimizers; automatic optimization, which micro-batches"
            " need, works with one. Put the parameters into groups of one optimizer."
        )
    if cut and any(isinstance(optimizer, LBFGS) for optimizer in optimizers):
        raise ValueError(
            "LBFGS searches along the gradient of the whole model, of which each stage knows a part. Use an optimizer"
            " that treats parameters one by one, such as AdamW or SGD, or pipeline_parallel_size=1."
        )
    known = set(map(id, module.parameters()))
    groups = [group["params"] for optimizer in optimizers for group in getattr(optimizer, "param_groups", ())]
    foreign = [tuple(parameter.shape) for group in groups for parameter in group if id(parameter) not in known]
    if foreign and any(is_sharded(parameter) for parameter in module.parameters()):
        raise ValueError(
            f"`configure_optimizers` returned an optimizer over parameters that are not in {type(module).__name__}, of"
            f" the shapes {foreign[:3]}{' and more' if len(foreign) > 3 else ''}. Sharing a layer replaces its"
            " parameters: take them from `self.parameters()` in `configure_optimizers`, not from a list that was made"
            " before."
        )


def check_plugin(plugin: CheckpointIO | None, *, sharded: bool, beside: bool) -> None:
    """Check a plugin that the user brings for writing checkpoints.

    Args:
        plugin: The plugin.
        sharded: Whether checkpoints are directories.
        beside: Whether they are written beside training.

    Raises:
        ValueError: If it would not be used, or both write beside training.
    """
    if beside and isinstance(plugin, AsyncCheckpointIO):
        raise ValueError(
            "HybridStrategy(async_save=True) and Trainer(plugins=[AsyncCheckpointIO()]) both write checkpoints beside"
            " training, and neither would know when the other one is done. Leave one of them out."
        )
    inner = plugin.checkpoint_io if isinstance(plugin, AsyncCheckpointIO) else plugin
    if sharded and inner is not None and type(inner) is not TorchCheckpointIO:
        raise ValueError(
            f"Trainer(plugins=[{type(inner).__name__}()]) writes files, but with"
            " HybridStrategy(save_distributed_checkpoint=True) every rank adds to a directory, and the plugin would not"
            " be used. Leave one of them out."
        )


def check_storage(path: Any, options: Any, *, sharded: bool) -> None:
    """Check where and how a checkpoint is to be written.

    Args:
        path: The place.
        options: What `Trainer.save_checkpoint` was given.
        sharded: Whether the checkpoint is a directory.

    Raises:
        TypeError: If there is no use for options; as Lightning says it.
        ValueError: If a directory is to be on another than the local file system.
    """
    if options is not None and sharded:
        raise TypeError(
            "`Trainer.save_checkpoint(..., storage_options=...)` with `storage_options` arg is not supported for"
            " `HybridStrategy(save_distributed_checkpoint=True)`. Use save_distributed_checkpoint=False, and a plugin"
            " of your own: Trainer(plugins=[MyCheckpointIO()])."
        )
    if sharded and not _is_local_file_protocol(path):
        raise ValueError(
            f"HybridStrategy(save_distributed_checkpoint=True) cannot write to {path}: a directory appears complete by"
            " being renamed, which needs a file system that is mounted. Save to one and copy it, or use"
            " save_distributed_checkpoint=False."
        )
