"""Checks of arguments, modules, the Trainer, optimizers and plugins, with errors that explain the problem and its fix.

`HybridStrategy` and `AttachedModule` call them, mostly in this order: :func:`check_arguments` in the constructor,
:func:`check_module` when the Trainer connects the module, :func:`check_ranks` as soon as the ranks are connected,
:func:`check_modules` and :func:`check_own_parts` before the module is sharded, and :func:`check_optimizers` after
`configure_optimizers`. They come early because a wrong value would otherwise show up in the first step, on some ranks
only, while the other ranks wait. :func:`check_ranks`, :func:`check_modules`, :func:`check_own_parts` and
:func:`check_optimizers` are collectives.

Other checks are in the modules with the necessary knowledge: of arguments in `memory.offload` and
`memory.activation_checkpoint.policy` (called from here), of plans in `tensor_parallel.plan`, of the body in
`pipeline_parallel.body`, of gathering in `strategy.gather`, of optimizers in `trainer.precision`, and of callbacks'
states in `checkpoint`.
"""

from __future__ import annotations

import inspect
import itertools
import os
import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import lightning
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.plugins.io import AsyncCheckpointIO, CheckpointIO, TorchCheckpointIO
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Optimizer

from lightning_hybrid.axes import AXES, Sizes
from lightning_hybrid.config import HybridConfig, Settings, choices
from lightning_hybrid.distributed.agreement import RankInfo, agree, all_gather_values, check_equal
from lightning_hybrid.distributed.arrangement import check_arrangement
from lightning_hybrid.distributed.dtensor import is_sharded
from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.distributed.module_names import join_names
from lightning_hybrid.distributed.tensor_bytes import as_bytes
from lightning_hybrid.memory.activation_checkpoint.policy import check_recompute
from lightning_hybrid.memory.offload import check_offload
from lightning_hybrid.pipeline_parallel.partition import STAGE_MARK, is_numbered, numbered
from lightning_hybrid.pipeline_parallel.schedules import SCHEDULES
from lightning_hybrid.strategy.open_arguments import SIZES
from lightning_hybrid.tensor_parallel.context_parallel.context_parallel import check_context_parallel
from lightning_hybrid.tensor_parallel.plan import check_styles, plan_texts
from lightning_hybrid.trainer.lightning_internals import validation_interval
from lightning_hybrid.version import __version__

# Arguments that are a positive integer or this value.
_OTHERWISE = {"data_parallel_size": "auto", "num_microbatches": "auto", "global_batch_size": None, "num_chunks": "auto"}


def check_arguments(config: HybridConfig) -> None:
    """Check the arguments of `HybridStrategy`, whose types are already checked: their values and combinations.

    Args:
        config: The arguments, from :func:`~.open_arguments.resolve_open`: arguments that the layout search chooses have
            provisional values. The tensor- and pipeline-parallel sizes may be lists of allowed sizes.

    Raises:
        TypeError: If a value in a list has the wrong type.
        ValueError: If a value or a combination is invalid.
    """
    sizes: dict[str, Any] = {name: getattr(config, name) for name in SIZES}
    for name, size in sizes.items():
        _check_allowed(name, size)
    for name in (*(axis.argument for axis in AXES if axis.is_optional), "tensor_parallel_depth"):
        _check_number(name, getattr(config, name), "")
    for name, other in _OTHERWISE.items():
        if getattr(config, name) != other:
            _check_number(name, getattr(config, name), f" or {other!r}")
    mode, depth, tensor = config.tensor_parallel_mode, config.tensor_parallel_depth, sizes["tensor_parallel_size"]
    check_arrangement(mode, choices(tensor), depth, sequence_parallel=config.sequence_parallel)
    if config.schedule not in (known := (*SCHEDULES, "auto")):  # "auto" has been replaced by a value
        raise ValueError(f"schedule must be one of {', '.join(map(repr, known))}, got {config.schedule!r}. [LH102]")
    check_context_parallel(
        config.context_parallel_size,
        config.context_parallel,
        sequence_parallel=config.sequence_parallel,
        recompute=config.recompute,
        tensor_parallel_mode=mode,
    )
    chunks = int(config.num_chunks)
    if chunks > 1 and not SCHEDULES[config.schedule].takes_chunks:
        raise ValueError(
            f"schedule={config.schedule!r} supports only one chunk per rank, got num_chunks={chunks}. Remove one of"
            " these arguments. [LH114]"
        )
    for name in ("body", "initial_weights"):
        if getattr(config, name) in ("", []):
            raise ValueError(
                f"{name} must not be empty, got {getattr(config, name)!r}. To use the default, pass None. [LH102]"
            )
    check_styles(config.tensor_parallel_plan)
    check_offload(config.offload)
    # Arguments with a value for each stage must be valid for all sizes.
    for size in choices(sizes["pipeline_parallel_size"]):
        _check_in_flight(config, size)
        _check_partition(config.partition, size, chunks)
        check_recompute(config.recompute, size, chunks)


def _check_allowed(name: str, value: Any) -> None:
    """Check a size, or a list of allowed sizes."""
    if not isinstance(value, (list, tuple)):
        _check_number(name, value, ", a list of integers or 'auto'")
        return
    if not value:
        raise ValueError(f"{name} must list at least one size, got {value!r}. [LH103]")
    for size in value:
        _check_number(f"each {name}", size, "")


def _check_number(name: str, value: Any, others: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer{others}, got {value!r} ({type(value).__name__}). [LH101]")
    if value < 1:
        raise ValueError(f"{name} must be at least 1{others}, got {value}. [LH103]")


def _check_in_flight(config: HybridConfig, num_ranks: int) -> None:
    """Check the number of extra microbatches in flight on the links between stages."""
    extra, num_links = config.tuning.extra_in_flight, num_ranks - 1
    if extra == "auto":
        return
    if not isinstance(extra, int) and len(extra) != num_links:
        raise ValueError(
            f"tuning.extra_in_flight={list(extra)} contains {len(extra)} numbers, but with"
            f" pipeline_parallel_size={num_ranks} there are {num_links} links between neighboring ranks. Set one number"
            " for each link, or a single number for all links. [LH115]"
        )
    if config.schedule == "gpipe" and any([extra] if isinstance(extra, int) else extra):
        raise ValueError(
            f"tuning.extra_in_flight={extra!r} has no effect with schedule='gpipe', which already has all microbatches"
            " in flight. Remove tuning.extra_in_flight, or use schedule='1f1b'. [LH116]"
        )


def _check_partition(partition: str | Sequence[int], num_ranks: int, num_chunks: int) -> None:
    num_stages = num_ranks * num_chunks
    if isinstance(partition, (list, tuple)) and is_numbered(partition):
        numbered(partition, len(partition), num_stages)
    elif isinstance(partition, (list, tuple)):
        if len(partition) != num_stages or not all(isinstance(count, int) and count >= 1 for count in partition):
            raise ValueError(
                f"partition={list(partition)} must list either the number of layers in each stage or the stage of each"
                f" layer. With pipeline_parallel_size={num_ranks} and num_chunks={num_chunks} there are {num_stages}"
                " stages; each needs at least one layer, and stage numbers start at 0. [LH117]"
            )
    elif partition not in ("uniform", "parameters"):
        raise ValueError(
            "partition must be 'uniform', 'parameters', a list with the number of layers in each stage, or a list with"
            f" the stage of each layer; got {partition!r}. [LH102]"
        )


def check_module(module: LightningModule, *, cut: bool, runs_backward: bool) -> None:
    """Check that the strategy can run the steps of a module.

    Args:
        module: The user's module.
        cut: True if the strategy runs the steps, see :func:`~.layout.is_cut`. Otherwise nothing is checked.
        runs_backward: True if the strategy calls backward, so that manual optimization is impossible.

    Raises:
        ValueError: If the module does something that is not supported.
    """
    if not cut:
        return
    name = type(module).__name__
    if runs_backward and not module.automatic_optimization:
        raise ValueError(
            f"{name} uses manual optimization, in which `training_step` calls backward. With a pipeline, several"
            " microbatches or `microbatch_weight`, the strategy must run forward and backward itself. Remove"
            " `self.automatic_optimization = False`. Alternatively, set pipeline_parallel_size=1 and"
            " num_microbatches=1, and remove `microbatch_weight`. Tensor parallelism, context parallelism and ZeRO"
            " support manual optimization. [LH306]"
        )
    if is_overridden("backward", module) and module.automatic_optimization:
        raise ValueError(
            f"{name} overrides `backward`, but the strategy runs backward itself and does not call this method. It does"
            " so with pipeline, tensor or context parallelism, several microbatches or `microbatch_weight`. Remove the"
            " method. Alternatively, use manual optimization with pipeline_parallel_size=1 and num_microbatches=1, or"
            " set the pipeline-, tensor- and context-parallel sizes and num_microbatches to 1 and remove"
            " `microbatch_weight`. [LH307]"
        )
    for step in ("training_step", "validation_step", "test_step", "predict_step"):
        method = getattr(module, step)  # some users set a step to `None` to disable it
        if callable(method) and "dataloader_iter" in inspect.signature(method).parameters:
            raise ValueError(
                f"`{name}.{step}(dataloader_iter)` fetches batches itself, so the strategy cannot split them into"
                f" microbatches. Use `{step}(batch, batch_idx)` instead. [LH308]"
            )
    given = [hook for hook in ("split_body_input", "join_body_output") if hasattr(module, hook)]
    if len(given) == 1:
        raise ValueError(
            f"{name} defines only `{given[0]}`. Define both `split_body_input` and `join_body_output`, or neither."
            " [LH309]"
        )


def check_trainer(trainer: Trainer, module: LightningModule, *, num_stages: int) -> None:
    """Check callbacks of the Trainer, and warn about hooks of the module that see only one stage.

    Args:
        trainer: The Trainer.
        module: The user's module.
        num_stages: The number of stages over all ranks. With one stage, nothing is checked.

    Raises:
        ValueError: If a callback is not supported.
    """
    if num_stages == 1:
        return
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        if isinstance(callback, ModelPruning):
            raise ValueError(
                f"{type(callback).__name__} compares and masks the parameters of the full model, but each stage holds"
                " only some of these parameters. Prune in a separate run with pipeline_parallel_size=1, before or after"
                " this run. [LH310]"
            )
    if is_overridden("configure_gradient_clipping", module):
        rank_zero_warn(
            f"{type(module).__name__} overrides `configure_gradient_clipping`. With a pipeline, a loop over the"
            " optimizer's parameters in this method sees only the gradients of one stage. Use `self.clip_gradients`,"
            " torch's `clip_grad_norm_` or `self.trainer.strategy.grad_norm()`, which use the gradients of the full"
            " model."
        )


def check_ranks(settings: Settings, sizes: Sizes, trainer: Trainer) -> list[RankInfo]:
    """Compare arguments over all ranks. A difference would make some ranks wait for others forever.

    All ranks must call this, before the mesh exists.

    Args:
        settings: The arguments of the strategy.
        sizes: The number of ranks along each axis.
        trainer: The Trainer, which is about to run.

    Returns:
        Information about each rank, which is sent with the compared values.

    Raises:
        ValueError: If a value differs between ranks; on every rank.
    """
    values = {name: repr(value) for name, value in settings.by_name().items()}
    values |= {"searched": repr(settings.searched), "auto_microbatches": repr(settings.auto_microbatches)}
    values |= plan_texts(settings.tensor_parallel_plan)
    values |= {name: str(size) for name, size in sizes.by_argument.items()}
    # The paths may differ between nodes.
    values["initial_weights"] = "None" if settings.initial_weights is None else "given"
    values |= {f"Trainer.{name}": repr(getattr(trainer, name, None)) for name in _SAME_OF_TRAINER}
    values["Trainer.val_check_interval in seconds"] = repr(validation_interval(trainer))
    values["trainer.state.fn"] = str(trainer.state.fn)
    values |= {f"{package.__name__}.__version__": str(package.__version__) for package in (torch, lightning)}
    values["lightning_hybrid.__version__"] = __version__
    own = RankInfo.own().to_bytes()
    advice = "Run the same program with the same arguments on all ranks."
    return [RankInfo.from_bytes(of_rank) for of_rank in check_equal(values, advice, own)]


def check_tensor_groups(mesh: Mesh) -> None:
    """Warn if the ranks of any tensor-parallel group are on several nodes, because messages between nodes are slow.

    Args:
        mesh: The device mesh.
    """
    size, hosts = mesh.sizes.tensor, mesh.hosts
    others = mesh.sizes.pipeline, mesh.num_replicas, mesh.sizes.context
    for stage, replica, share in itertools.product(*map(range, others)):
        ranks = [mesh.rank(stage, replica, tensor_rank, share) for tensor_rank in range(size)]
        names = list(dict.fromkeys(hosts[rank] for rank in ranks))
        if len(names) > 1:
            rank_zero_warn(
                f"A tensor-parallel group spans several nodes: ranks {', '.join(map(str, ranks))} are on"
                f" {' and '.join(names)}. This makes training slow, because tensor parallelism all-reduces activations"
                " several times per layer and microbatch, and waits for each result. Set tensor_parallel_size to a"
                " divisor of the number of ranks on a node. Also make tp the innermost axis, as in"
                " launch.rank_order='pp-dp-tp'."
            )
            return


def check_modules(module: nn.Module) -> None:
    """Compare the parameters and the `pipeline_stage` marks over all ranks before parallelization.

    Names, shapes, dtypes and `requires_grad` of parameters are compared. All ranks must call this. Buffers may differ,
    because the rank that computed a result in an earlier run may have stored it in a buffer.

    Args:
        module: The user's module.

    Raises:
        ValueError: If the module differs between ranks; on every rank.
    """
    parameters = module.named_parameters(remove_duplicate=False)
    values = {name: "lazy" if is_lazy(parameter) else _looks_of(parameter) for name, parameter in parameters}
    marks = {name: getattr(part, STAGE_MARK, None) for name, part in module.named_modules(remove_duplicate=False)}
    values |= {join_names(name, STAGE_MARK): repr(mark) for name, mark in marks.items() if mark is not None}
    check_equal(
        values,
        f"Create {type(module).__name__} with the same sizes and stages on every rank. If these are random, set a seed"
        " (`seed_everything`). If they are read from files, use the same files on all nodes.",
    )


def _looks_of(parameter: Tensor) -> str:
    dtype = str(parameter.dtype).removeprefix("torch.")
    return f"{list(parameter.shape)} of {dtype}{'' if parameter.requires_grad else ', frozen'}"


def check_own_parts(module: nn.Module, before: Collection[Tensor], mesh: Mesh) -> None:
    """Check if each rank has created its own part of a parameter in `configure_model`, as a plain tensor.

    All ranks must call this.

    The ranks that hold a plain parameter receive the values of the first of them, so the other parts would be lost.
    With a seed, all ranks draw equal values unless code reads the rank, so a difference is an error. Without a seed, it
    may be chance.

    Args:
        module: The user's module, not sharded yet.
        before: The parameters of the module before `configure_model`.
        mesh: The device mesh.

    Raises:
        ValueError: If plain parameters that `configure_model` created differ although a seed was set; on every rank.
    """
    known = set(map(id, before))
    sums = {
        name: zlib.crc32(as_bytes(parameter.cpu()).numpy().data)
        for name, parameter in module.named_parameters()
        if id(parameter) not in known and not parameter.is_meta and not isinstance(parameter, DTensor)
        if not is_lazy(parameter)
    }
    found = all_gather_values(sums, mesh.control_group)
    names = [name for name, own in sums.items() if any(other.get(name) != own for other in found)]
    has_seed = "PL_GLOBAL_SEED" in os.environ
    text = (
        f"Parameters created in `configure_model` differ between ranks{', although a seed is set' * has_seed}:"
        f" {', '.join(map(repr, names[:3]))}{' and more' if len(names) > 3 else ''}. They are plain tensors, so all"
        " tensor-parallel ranks receive the values of the first tensor-parallel rank. If each rank creates its shard of"
        " a larger parameter, use `DTensor.from_local(part, self.device_mesh['tensor_parallel'], [Shard(dim)])`."
        " Otherwise, use the same random numbers on every rank (`seed_everything`). [LH314]"
    )

    def refuse() -> None:
        if names and has_seed:
            raise ValueError(text)

    agree(refuse)
    if names:
        rank_zero_warn(text)


#: Attributes of the Trainer that determine how often ranks communicate.
_SAME_OF_TRAINER = (
    *("max_epochs", "min_epochs", "max_steps", "min_steps", "accumulate_grad_batches", "gradient_clip_val"),
    *("gradient_clip_algorithm", "precision", "val_check_interval", "check_val_every_n_epoch", "num_sanity_val_steps"),
    *("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches", "overfit_batches"),
    "reload_dataloaders_every_n_epochs",
)


def _group_text(optimizer: Optimizer, group: Mapping[str, Any]) -> str:
    options = {key: value for key, value in group.items() if isinstance(value, (bool, int, float, str, tuple))}
    return f"{type(optimizer).__name__} of {len(group['params'])} tensors with {options}"


SEVERAL_OPTIMIZERS = (
    "`configure_optimizers` returned several optimizers, each of which needs its own backward pass. With a pipeline,"
    " several microbatches or `microbatch_weight`, the strategy itself runs the backward pass, and supports only one"
    " optimizer. Use one optimizer with several parameter groups: `[{'params': ..., 'lr': ...}, ...]`. Alternatively,"
    " use manual optimization with pipeline_parallel_size=1 and num_microbatches=1, and remove `microbatch_weight`."
    " [LH801]"
)


def check_optimizers(optimizers: list[Optimizer], module: nn.Module, *, cut: bool) -> None:
    """Check the optimizers that `configure_optimizers` returned. All ranks must call this.

    Args:
        optimizers: The optimizers, with placeholders for parameters of other stages.
        module: The parallelized module.
        cut: The argument of :func:`check_module`.

    Raises:
        ValueError: If an optimizer searches along the gradient of the full model (LBFGS), needs full parameters
            although a rank has shards (Adafactor), has parameters from before the module was sharded, or differs
            between ranks.
    """
    if any(is_sharded(parameter) for parameter in module.parameters()):
        names = {kind.__name__ for optimizer in optimizers for kind in type(optimizer).__mro__}
        if "Adafactor" in names:
            raise ValueError(
                "Adafactor keeps row and column sums of each full parameter, and scales updates by the size of the"
                " parameter. With tensor_parallel_size > 1 or zero_stage > 0, each rank holds only a shard of the"
                " parameter, so the ranks would compute different updates. Use an elementwise optimizer, such as AdamW"
                " or SGD, or set tensor_parallel_size=1 and zero_stage=0. Adafactor works with a pipeline, which does"
                " not shard parameters. [LH802]"
            )
    if cut and any(isinstance(optimizer, LBFGS) for optimizer in optimizers):
        raise ValueError(
            "LBFGS searches along the gradient of the full model, and computes the loss several times per step. This"
            " does not work with pipeline, tensor or context parallelism, several microbatches or `microbatch_weight`."
            " Use an optimizer that updates each parameter separately, such as AdamW or SGD. Alternatively, use only"
            " data parallelism with num_microbatches=1. [LH803]"
        )
    values = {
        f"optimizer {number}, group {position}": _group_text(optimizer, group)
        for number, optimizer in enumerate(optimizers)
        for position, group in enumerate(getattr(optimizer, "param_groups", ()))
    }
    check_equal(values, "Configure the same optimizer, parameter groups and options on every rank.")
    known = set(map(id, module.parameters()))
    groups = [group["params"] for optimizer in optimizers for group in getattr(optimizer, "param_groups", ())]
    foreign = [tuple(parameter.shape) for group in groups for parameter in group if id(parameter) not in known]
    if foreign and any(is_sharded(parameter) for parameter in module.parameters()):
        raise ValueError(
            f"`configure_optimizers` returned an optimizer with parameters that are not in {type(module).__name__}."
            f" Their shapes are {foreign[:3]}{' and more' if len(foreign) > 3 else ''}. Sharding a layer replaces its"
            " parameters, so a list of parameters that was created earlier is outdated. In `configure_optimizers`, pass"
            " `self.parameters()` to the optimizer. [LH804]"
        )


def check_nonfinite(on_nonfinite: str, scaler: object | None) -> None:
    """Check the action for gradients that are not finite, because a gradient scaler causes them on purpose.

    Args:
        on_nonfinite: The argument `faults.on_nonfinite`.
        scaler: The scaler of the precision plugin; ``None`` without a scaler.

    Raises:
        ValueError: If there is a scaler, and the action is an error.
    """
    if scaler is not None and on_nonfinite == "raise":
        raise ValueError(
            "faults.on_nonfinite='raise' cannot be combined with a precision that scales the loss, such as '16-mixed'."
            " With such a precision, some steps have gradients that are not finite, and the gradient scaler skips these"
            " steps. Set faults.on_nonfinite='ignore', or use precision='bf16-mixed', which does not scale the loss."
            " [LH805]"
        )


def check_plugin(plugin: CheckpointIO | None, *, sharded: bool, beside: bool) -> None:
    """Check the user's plugin for checkpoint files.

    `plugin` is ``None`` if the user passes none. If ``sharded`` is True, checkpoints are directories, which a plugin
    cannot write. If ``beside`` is True, the strategy writes checkpoints in the background, so the plugin must not do
    this too.

    Raises:
        ValueError: If the plugin would not be used, or if it also writes in the background.
    """
    if beside and isinstance(plugin, AsyncCheckpointIO):
        raise ValueError(
            "HybridStrategy(async_save=True) and Trainer(plugins=[AsyncCheckpointIO()]) both write checkpoints in the"
            " background, but neither knows when the other has finished. Remove one of the two. [LH931]"
        )
    inner = plugin.checkpoint_io if isinstance(plugin, AsyncCheckpointIO) else plugin
    if sharded and inner is not None and type(inner) is not TorchCheckpointIO:
        raise ValueError(
            f"Trainer(plugins=[{type(inner).__name__}()]) writes files, but with"
            " HybridStrategy(save_distributed_checkpoint=True), every rank writes to a directory, so the plugin would"
            " not be used. Remove either the plugin or save_distributed_checkpoint=True. [LH932]"
        )


#: The error for checkpoints that are directories, in the style of Lightning's error.
STORAGE_OPTIONS = (
    "`Trainer.save_checkpoint(..., storage_options=...)` is not supported with"
    " `HybridStrategy(save_distributed_checkpoint=True)`. Set save_distributed_checkpoint=False and use a plugin that"
    " accepts storage options: Trainer(plugins=[MyCheckpointIO()]). [LH930]"
)
