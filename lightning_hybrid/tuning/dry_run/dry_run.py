"""A run up to its first training step on fake tensors, without devices and processes, to estimate its memory.

``lightning-hybrid memory`` and ``lightning-hybrid check --dry`` call :func:`dry_run`. `ModuleProfile` calls
:func:`run_first_step` with `Recorder`, a subclass of :class:`DryRunStrategy` that records the costs of many layouts. It
does this for ``lightning-hybrid suggest``, for ``plan`` with several nodes, and for the layout search at the start of
training.

A fake tensor has a shape and a dtype, but no memory. Formulas from the shapes of parameters would not be enough: only a
step of the user's module shows which tensors autograd saves, and which errors a run raises. Lightning's own loop makes
the batch and calls the hooks, so that the step is the same as in a run.

Terms: the *body* has the layers that a pipeline splits into stages; the *stage map* has the stages of all tensors; a
*label* is the position of a layer in the body, or a text for code outside the layers; a *kind of recomputation* is
False, ``"selective"`` or True, as `recompute` of `HybridStrategy`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_hybrid.axes import TENSOR, Sizes
from lightning_hybrid.config import Settings
from lightning_hybrid.data_parallel.zero.param import find_owners, set_parameter
from lightning_hybrid.distributed.dtensor import copy_attributes, to_local
from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.distributed.mixed_operations import mixed_operations
from lightning_hybrid.distributed.pytree import flatten, unflatten
from lightning_hybrid.distributed.replaced import replaced_entries
from lightning_hybrid.distributed.sizes import accumulated_batches
from lightning_hybrid.error_codes.entry import without_code
from lightning_hybrid.memory.account import MemoryUsage, SavedTensorMeter
from lightning_hybrid.memory.estimate import MemoryEstimator
from lightning_hybrid.pipeline_parallel.batch_norm import batch_norms, limit_microbatches
from lightning_hybrid.pipeline_parallel.body import Body
from lightning_hybrid.pipeline_parallel.frame.alike import first_alike
from lightning_hybrid.pipeline_parallel.frame.fake_tensors import fake_mode, with_single_numbers
from lightning_hybrid.pipeline_parallel.links.step_schedules import find_schedule
from lightning_hybrid.pipeline_parallel.splitting.microbatch import find_batch_size, split_into
from lightning_hybrid.pipeline_parallel.stage_map import StageMap
from lightning_hybrid.strategy import layout
from lightning_hybrid.strategy.open_arguments import RECOMPUTE
from lightning_hybrid.strategy.summary import plan_table
from lightning_hybrid.tensor_parallel.context_parallel.hooks import Places
from lightning_hybrid.tensor_parallel.context_parallel.mappings import ContextGroup
from lightning_hybrid.tensor_parallel.layers import original_classes
from lightning_hybrid.tensor_parallel.mappings import TensorGroup
from lightning_hybrid.tensor_parallel.plan import Plan
from lightning_hybrid.tensor_parallel.vocab_parallel import to_plain_tensors
from lightning_hybrid.torch_internals import FakeTensor
from lightning_hybrid.trainer.lightning_internals import set_device_mesh
from lightning_hybrid.trainer.precision import keeps_gradients
from lightning_hybrid.trainer.program.make_program import find_uses
from lightning_hybrid.trainer.results.logging import LogRecorder
from lightning_hybrid.tuning.dry_run.noted_checkpoints import NotedCheckpoints, kinds_without
from lightning_hybrid.tuning.dry_run.parameters import (
    parameters_with_little_memory,
    parameters_without_memory,
)
from lightning_hybrid.tuning.dry_run.repeated_layers import RepeatedLayers
from lightning_hybrid.tuning.dry_run.saved_tensors import (
    AFTER,
    BEFORE,
    Activations,
    Saved,
    labeled_layers,
    labels_of_stages,
    saved_bytes,
)
from lightning_hybrid.tuning.dry_run.simulated_context import SimulatedContextParallel

_S = TypeVar("_S", bound="DryRunStrategy")


@dataclass(frozen=True)
class DryRun:
    """The result of a dry run.

    Attributes:
        layout: The layout, the stages and the tensor-parallel plan, as text.
        memory: The memory of each pipeline rank, for tensor-parallel rank 0 in the first replica.
    """

    layout: str
    memory: tuple[MemoryUsage, ...]


def dry_run(
    make: Callable[[], tuple[LightningModule, LightningDataModule | None]],
    config: Settings,
    sizes: Sizes,
    *,
    precision: Precision,
    **trainer: Any,
) -> DryRun:
    """Estimate the memory of the ranks of a run, and raise an error if its training could not start.

    Lightning's own loop runs up to the first training step, which runs on one microbatch of fake tensors, which have no
    memory. Parameters also have no memory, from the moment at which the module creates them. If this fails, everything
    runs again with values, unless these take too much memory. Layers are parallelized over ranks of a fake process
    group, so this process must not have a default process group. A dry run changes the module and its data, and draws
    random numbers.

    Args:
        make: Makes the user's module and its data (``None`` if the module has loaders itself). It is called a second
            time if the module needs values.
        config: The arguments of `HybridStrategy`.
        sizes: The number of ranks along each axis.
        precision: The precision plugin.
        trainer: Other arguments of the Trainer, see :func:`step_arguments`.

    Returns:
        The layout and the estimates.

    Raises:
        ValueError, TypeError: As at the start of training, or if a step needs values, and the module is on the meta
            device or the values take too much memory.
        Exception: Any other error of Lightning or of the module, such as `MisconfigurationException`.
    """
    strategy = run_first_step(make, partial(DryRunStrategy, config, sizes), precision=precision, **trainer)
    return DryRun(strategy.layout, tuple(strategy.memory))


def step_arguments(trainer: Trainer) -> dict[str, Any]:
    """Return the arguments of a Trainer that change its training steps, by name, for a dry run."""
    names = ("max_epochs", "max_steps", "accumulate_grad_batches", "limit_train_batches")
    return {name: getattr(trainer, name) for name in names}


def run_first_step(
    make: Callable[[], tuple[LightningModule, Any]],
    make_strategy: Callable[..., _S],
    *,
    precision: Precision,
    **trainer: Any,
) -> _S:
    """Run Lightning's loop up to the first training step, with a strategy that stops it there.

    While it runs, this process has a fake default process group. As in :func:`dry_run`, an attempt without parameter
    values is followed by an attempt with values if it fails.

    Args:
        make: See :func:`dry_run`; it can return loaders instead of a datamodule.
        make_strategy: Makes a strategy; the argument ``making`` is a stack of contexts that the strategy closes when
            the module has been made. It is called once per attempt.
        precision: The precision plugin.
        trainer: Other arguments of the Trainer, see :func:`step_arguments`.

    Returns:
        The strategy, after its step.

    Raises:
        ValueError: If the module received no training batch.
        ValueError, TypeError, Exception: See :func:`dry_run`.
    """
    trainer |= dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer |= {"logger": DummyLogger(), "num_sanity_val_steps": 0, "limit_val_batches": 0, "plugins": [precision]}

    def attempt(making: ExitStack) -> _S:
        with making:
            module, data = make()
            strategy = make_strategy(making=making)
            dry = Trainer(accelerator="cpu", devices=1, strategy=strategy, **trainer)
            with _fake_process_group(strategy.num_ranks), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a run shows the same warnings
                try:
                    dry.fit(module, data)
                except StopAfterFirstStepError:
                    return strategy
        raise ValueError(
            f"{type(module).__name__} received no training batch: its data loader is empty or limited to 0 batches."
            " [LH131]"
        )

    making = ExitStack()
    registered = making.enter_context(parameters_without_memory())
    try:
        return attempt(making)
    except Exception as error:  # any error can come from missing values; with values, it is the error of a run
        if not registered.number:
            raise
        reason = error
    making.enter_context(parameters_with_little_memory(reason))
    return attempt(making)


@contextmanager
def _fake_process_group(size: int) -> Iterator[None]:
    """Be rank 0 of a process group whose other ranks do not exist, while entered. Collectives return immediately.

    Raises:
        ValueError: If torch has no such process group.
    """
    if not hasattr(dist.Backend, "FAKE"):
        raise ValueError(
            f"Planning simulates other processes, which torch {torch.__version__} does not support. [LH135]"
        )
    dist.init_process_group(dist.Backend.FAKE, rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class StopAfterFirstStepError(Exception):
    """The signal that the first step is finished, which ends the dry run."""


class DryRunStrategy(SingleDeviceStrategy):
    """A strategy that measures the first training step, and stops there. Only :func:`run_first_step` uses it.

    It is not a `HybridStrategy`, because no other ranks exist. It calls the same functions of `strategy.layout` to find
    stages and plans.

    Args:
        config: The arguments of `HybridStrategy`.
        sizes: The number of ranks along each axis.
        making: The contexts in which the module is made; :meth:`setup` closes them.

    Attributes:
        sizes: The number of ranks along each axis.
        layout: The layout, the stages and the tensor-parallel plan, as text; empty before the step.
        memory: The estimated memory, by pipeline rank; empty before the step.
    """

    def __init__(self, config: Settings, sizes: Sizes, *, making: ExitStack) -> None:
        super().__init__(device="cpu")
        self._config, self.sizes, self._making = config, sizes, making
        self._mode = fake_mode()
        self._plan_table = self.layout = ""
        self.memory: list[MemoryUsage] = []
        self._tried: dict[Hashable, Places] = {}
        self._alike: dict[Hashable, dict[nn.Module, nn.Module]] = {}
        self._held_before: tuple[Hashable, list[Tensor]] | None = None
        self._context_groups: dict[int, dist.ProcessGroup] = {}

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the run."""
        return self.sizes.num_ranks

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    def model_to_device(self) -> None:
        """Leave the module where it is."""

    def teardown(self) -> None:
        """Do nothing, because the module is not used any longer."""

    def setup_environment(self) -> None:
        """Set the device mesh of the module, as in a run."""
        super().setup_environment()
        axes = self.sizes.axes
        shape, names = tuple(map(self.sizes.along, axes)), tuple(axis.name for axis in axes)
        self._mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        set_device_mesh(self._module, self._mesh)

    def setup(self, trainer: Trainer) -> None:
        """Parallelize layers and configure optimizers, as in a run, on fake tensors if the module has no values.

        Raises:
            ValueError, TypeError: As at the start of training.
        """
        self._making.close()
        module = self._module
        # Before there are fake tensors, which cannot be converted.
        self.model = self.precision_plugin.convert_module(module)
        self._has_values = not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
        self._body, self._stage_map = None, StageMap.uncut()
        if self.sizes.pipeline > 1:
            self._body, self._stage_map = layout.find_stages(module, self._config, self.sizes.pipeline)
        # Before there are fake tensors, because the plan tries layers with values, and a mesh reads values of tensors.
        plan = self._find_plan() if self.sizes.tensor > 1 else None
        tensor_ranks = None if plan is None else self._tensor_ranks(plan)
        with nullcontext() if self._has_values else self._mode:
            if not self._has_values:
                _replace_meta_tensors(module)
            if plan is not None and tensor_ranks is not None:
                self._plan_table = plan_table(plan, module)
                self._stage_map = layout.with_plan(self._stage_map, self._body, plan, module)
                plan.apply(module, *tensor_ranks, torch.device("cpu"))
            self.setup_optimizers(trainer)
            self.setup_precision_plugin()

    def _find_plan(self) -> Plan:
        """Return the tensor-parallel plan."""
        return layout.find_plan(self._module, self._config, self.sizes.tensor)

    def _tensor_ranks(self, plan: Plan) -> tuple[DeviceMesh, TensorGroup]:
        """Return the tensor-parallel ranks as a mesh and as a group. Their numbers do not matter in a dry run."""
        arrangement, line = plan.mode.arrangement, self._mesh[TENSOR.name]
        if arrangement.is_line:
            return line, plan.mode.make_group(line.get_group(), {})
        along = {axes: dist.new_group(arrangement.ranks_along(axes)) for axes in arrangement.groups()}
        axes = {name: arrangement.parts(of_name) for name, of_name in arrangement.mesh_axes.items()}
        shape, names = (self.num_ranks // arrangement.size, *axes.values()), ("replicas", *axes)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)[tuple(axes)]
        return mesh, plan.mode.make_group(line.get_group(), along)

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run one microbatch, and estimate the memory of each pipeline rank.

        Raises:
            StopAfterFirstStepError: If the step has been measured.
            ValueError: If the step cannot run without values of parameters, and there are none.
            Exception: The errors of the step.
        """
        module, config = self._module, self._config
        data, pipeline, number = self.sizes.num_replicas, self.sizes.pipeline, config.num_microbatches
        if config.auto_microbatches:
            number = limit_microbatches(number, find_batch_size(batch), batch_norms(module))
        microbatches, _ = split_into(batch, number, getattr(module, "split_batch", None))
        # Before the measurement, which updates metrics. Finding the stages has no side effects.
        self._place_outside(microbatches, args)
        activations = self._activations(microbatches[0], args)
        schedule = find_schedule(config, pipeline, len(microbatches))
        estimator = MemoryEstimator(module, self.optimizers, float32_gradients=config.tuning.float32_gradients)
        for rank in range(pipeline):
            layers = layout.find_own_layers(module, self._body, self._stage_map, rank)
            usage = estimator.usage(
                estimator.held(self._stage_map, layers, rank),
                config,
                num_shards=config.num_shards(data),
                num_backwards=len(microbatches) * self._num_accumulated(data),
            )
            peak = None if activations is None else activations.peak(schedule, rank)
            self.memory.append(replace(usage, activations=peak))
        raise StopAfterFirstStepError

    def _num_accumulated(self, replicas: int) -> int:
        """Return the number of batches of an optimizer step for a number of replicas."""
        trainer, samples = self._module.trainer, self._config.global_batch_size
        size = getattr(trainer.train_dataloader, "batch_size", None)
        if samples is None or size is None:
            return trainer.accumulate_grad_batches
        return accumulated_batches(samples, size, replicas)

    def _place_outside(self, microbatches: Sequence[Any], args: Sequence[Any]) -> None:
        """Find the stages of parameters outside the layers, as a run does with its first batch; set :attr:`layout`.

        If the step cannot be traced, the stages are estimated, and the text contains the reason.
        """
        module, reason = self._module, ""
        if self._stage_map.places_outside:
            try:
                outside = layout.find_outside(module, self._stage_map, self._find_use(microbatches[0], args))
                self._stage_map = replace(self._stage_map, outside=outside)
            except Exception as error:  # any error becomes part of the text
                where = "are assigned to stages according to an estimate"
                if self._stage_map.is_chain:
                    where = "stay on the first and the last stage"
                    self._stage_map = replace(self._stage_map, places_outside=False)
                text = " ".join(f"{type(error).__name__}: {error}".split())
                reason = f"The step cannot be traced, so parameters outside the pipelined layers {where}. {text}"
        table = layout.stages_text(
            module,
            self._config,
            self.sizes,
            self._body,
            self._stage_map,
            is_placed=not reason,
            num_microbatches=len(microbatches),
        )
        self.layout = "\n".join(filter(None, [table, reason, self._plan_table]))
        if reason:
            self._stage_map = layout.expect_outside(module, self._stage_map)

    def _find_use(self, microbatch: Any, args: Sequence[Any]) -> dict[str, set[int]]:
        """Return the stages that use each parameter outside the layers."""
        module = self._module
        assert self._body is not None

        @contextmanager
        def around_discovery() -> Iterator[None]:
            with original_classes(module), _real_buffers(module), LogRecorder(module)():
                yield

        step = module.training_step, (microbatch, *args)
        with self.precision_plugin.train_step_context():
            return find_uses(module, self._body, self._stage_map, *step, around_discovery)

    def _activations(self, microbatch: Any, args: Sequence[Any]) -> Activations | None:
        """Return the bytes that autograd saves for a microbatch; ``None`` with manual optimization.

        Copies of weights that autocast makes are counted separately, because microbatches share them.
        """
        if not self._module.automatic_optimization:
            return None  # the step can run any number of forwards and backwards
        shared: Saved = {}

        @contextmanager
        def casting(meter: SavedTensorMeter) -> Iterator[None]:
            yield
            if self._config.shares_casts and keeps_gradients():
                labels = (BEFORE, *range(len(self._body.layers) if self._body else 0), AFTER)
                shared.update({label: meter.casts(label) for label in labels})

        recompute = self._config.recompute
        found = self._follow(microbatch, args, self._config, self._body, self._stage_map, casting)
        saved = found["selective" if recompute == "selective" else bool(recompute)]
        casts = {key for storages in shared.values() for key in storages}
        own = {label: {k: size for k, size in each.items() if k not in casts} for label, each in saved.items()}
        stages = labels_of_stages(self._stage_map.stages)
        copies = [saved_bytes(shared, labels) if shared else 0 for labels in stages]
        return Activations([saved_bytes(own, labels) for labels in stages], copies)

    def _follow(
        self,
        microbatch: Any,
        args: Sequence[Any],
        config: Settings,
        body: Body | None,
        stage_map: StageMap,
        around: Callable[[SavedTensorMeter], AbstractContextManager[Any]] = lambda meter: nullcontext(),
    ) -> dict[bool | str, Saved]:
        """Run the step with a microbatch, on fake tensors if possible, up to three times.

        The first attempt runs only one of several equal layers, and the second runs all layers. If the second fails and
        parameters have values, the third runs with values.

        Args:
            microbatch: The microbatch.
            args: The other arguments of the step.
            config: The arguments of `HybridStrategy`; they determine which layers are recomputed.
            body: The layers with labels of their own.
            stage_map: The stages of these layers.
            around: Makes a context for the step; it gets the meter, which knows the label of the current layer.

        Returns:
            The tensors that autograd saves by label, for each kind of recomputation.

        Raises:
            WrongUseError: If the user's code cannot be parallelized in this way.
            ValueError: If the step fails without parameter values, and the parameters have none.
            Exception: The error of the step with values.
        """
        module = self._module
        run = partial(self._measure, microbatch, args, config, body, stage_map, around)
        with suppress(Exception):  # if layers cannot be repeated, all of them run
            return run(self._mode, repeats=True)
        try:
            return run(self._mode)
        except WrongUseError:  # values make no difference
            raise
        except Exception as error:
            if not self._has_values:
                raise ValueError(
                    f"The training step of {type(module).__name__} cannot run without parameter values."
                    f" Create the parameters in `__init__`. {without_code(error)} [LH130]"
                ) from error
        return run(nullcontext())

    def _measure(
        self,
        microbatch: Any,
        args: Sequence[Any],
        config: Settings,
        body: Body | None,
        stage_map: StageMap,
        around: Callable[[SavedTensorMeter], AbstractContextManager[Any]],
        mode: Any,
        *,
        repeats: bool = False,
    ) -> dict[bool | str, Saved]:
        """Run the step once, see :meth:`_follow`.

        Args:
            microbatch: See :meth:`_follow`.
            args: See :meth:`_follow`.
            config: See :meth:`_follow`.
            body: See :meth:`_follow`.
            stage_map: See :meth:`_follow`.
            around: See :meth:`_follow`.
            mode: The fake mode in which the step runs, or a `nullcontext` for a step with values.
            repeats: If True, run only the first of several layers that are alike.
        """
        module = self._module
        layers = layout.find_recomputed(module, config, body, stage_map)
        alike = self._first_alike(body)  # before counting, because comparing layers runs operations
        with mode, mixed_operations(), with_single_numbers(), LogRecorder(module)():
            leaves, spec = flatten(microbatch)
            leaves = [_in_mode(leaf, mode) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            inputs = (leaf for leaf in leaves if isinstance(leaf, Tensor))
            meter = SavedTensorMeter([*self._held(mode), *inputs])
            step = self.precision_plugin.train_step_context()
            with step, meter(), labeled_layers(body, meter), around(meter) as counted, ExitStack() as replaced:
                checkpoints = NotedCheckpoints(layers, meter, counted.paused if counted else nullcontext)
                inner = partial(self._with_context, config, body, checkpoints)
                replaced.enter_context(RepeatedLayers(alike, meter, counted, inner)() if alike and repeats else inner())
                output = to_plain_tensors(module.training_step(unflatten(leaves, spec), *args))
            labels = (BEFORE, *range(len(body.layers) if body else 0), AFTER)
            saved: dict[bool | str, Saved] = {
                recompute: {label: meter.storages(label, kinds_without(recompute)) for label in labels}
                for recompute in RECOMPUTE
            }
            del output
        return saved

    def _held(self, mode: Any) -> list[Tensor]:
        """Return the parameters and buffers, and their fake tensors in a mode; cached, because creation is slow."""
        tensors = (*self._module.parameters(), *self._module.buffers())
        key = mode if mode is self._mode else None, tuple(map(id, tensors))
        if self._held_before is None or self._held_before[0] != key:
            held = [to_local(tensor) for tensor in tensors]
            self._held_before = key, [*held, *(_in_mode(tensor, mode) for tensor in held)]
        return self._held_before[1]

    def _context_group(self, size: int) -> dist.ProcessGroup:
        """Return the context-parallel group. The numbers of its ranks do not matter in a dry run."""
        if size not in self._context_groups:
            self._context_groups[size] = dist.new_group(range(size))
        return self._context_groups[size]

    def _first_alike(self, body: Body | None) -> dict[nn.Module, nn.Module]:
        """Map each layer of a body to the first layer that is like it; empty if the module has no layers.

        Args:
            body: The body; ``None`` for the layers of a module that is a single stage.
        """
        if body is None:
            try:
                body = layout.find_layers(self._module, self._config, 1)
            except (ValueError, TypeError):
                return {}
        if body.names not in self._alike:
            self._alike[body.names] = first_alike(dict(zip(body.names, body.layers, strict=True)))
        return self._alike[body.names]

    def _with_context(
        self, config: Settings, body: Body | None, between: Callable[[], AbstractContextManager[None]]
    ) -> AbstractContextManager[None]:
        """Return a context for forwards: as in a run, the context-parallel hooks are outside of recomputation.

        Args:
            config: The arguments of `HybridStrategy`.
            body: The body; ``None`` for the layers of a module that is a single stage.
            between: Makes the context that records recomputation.
        """
        size = config.context_parallel_size
        if size == 1:
            return between()
        body = body or layout.find_layers(self._module, config, 1)
        layers = dict(zip(body.names, body.layers, strict=True))
        group = ContextGroup(self._context_group(size))
        given = self._module, layers, group, config.context_parallel, torch.device("cpu")
        simulated = SimulatedContextParallel(*given, tried=self._tried, alike=self._first_alike(body))
        return simulated.around(between)


def _real_buffers(module: nn.Module) -> AbstractContextManager[None]:
    """Replace buffers without values by zeros while entered. In a traced step, only parameters can be fake."""

    def real(buffer: Tensor | None) -> Tensor | None:
        return torch.zeros(buffer.shape, dtype=buffer.dtype) if isinstance(buffer, FakeTensor) else buffer

    tables = (part._buffers for part in module.modules())
    return replaced_entries((table, {name: real(buffer) for name, buffer in table.items()}) for table in tables)


def _in_mode(tensor: Tensor, mode: Any) -> Tensor:
    """Return the tensor that a step in a mode uses in place of a tensor: a fake tensor, or the tensor itself."""
    fake: Tensor = tensor if isinstance(mode, nullcontext) else mode.from_tensor(tensor)
    return fake


def _replace_meta_tensors(module: nn.Module) -> None:
    """Replace tensors on the meta device by fake tensors. Call it in the fake mode."""
    owners = find_owners(module)
    for parameter in [each for each in module.parameters() if each.is_meta]:
        made = nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad)
        copy_attributes(parameter, made)
        set_parameter(made, owners[id(parameter)])
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_meta:
                part._buffers[name] = torch.empty_like(buffer, device="cpu")
