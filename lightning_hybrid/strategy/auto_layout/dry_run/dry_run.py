"""A run up to its first training step, without devices and processes and on shapes alone, to estimate its memory."""

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
from lightning_hybrid.pipeline_parallel.frame.fake_tensors import FakeMode, fake_mode, with_single_numbers
from lightning_hybrid.pipeline_parallel.links.step_schedules import find_schedule
from lightning_hybrid.pipeline_parallel.splitting.microbatch import find_batch_size, split_into
from lightning_hybrid.pipeline_parallel.stage_map import StageMap
from lightning_hybrid.strategy import layout
from lightning_hybrid.strategy.auto_layout.candidates import RECOMPUTE
from lightning_hybrid.strategy.auto_layout.dry_run.noted_checkpoints import NotedCheckpoints, kinds_without
from lightning_hybrid.strategy.auto_layout.dry_run.parameters import (
    parameters_with_little_memory,
    parameters_without_memory,
)
from lightning_hybrid.strategy.auto_layout.dry_run.repeated_layers import RepeatedLayers
from lightning_hybrid.strategy.auto_layout.dry_run.saved_tensors import (
    AFTER,
    BEFORE,
    Activations,
    Saved,
    labelled_layers,
    labels_of_stages,
    saved_bytes,
)
from lightning_hybrid.strategy.auto_layout.dry_run.sequence_shares import AloneContextParallel
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

_S = TypeVar("_S", bound="DryRunStrategy")


@dataclass(frozen=True)
class DryRun:
    """What a dry run found out.

    Attributes:
        layout: The layout, the stages and the tensor-parallel plan.
        memory: By pipeline rank, what its first tensor-parallel rank in the first replica will hold.
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
    """Estimate what the ranks of a run will hold.

    Lightning's own loop runs up to the first training step, which runs on one microbatch of fake tensors: they have
    shapes and no memory. Nor have parameters, from the moment at which the module makes them. With real values the step
    runs only if it reads some, and if they are few. Layers are parallelized over ranks of a fake process group.

    Args:
        make: Makes the user's module and its data (``None`` if the module has loaders itself). It is called a second
            time if the module cannot do without values.
        config: The arguments of `HybridStrategy`.
        sizes: The number of ranks along each axis.
        precision: The precision plugin.
        trainer: Other arguments of the Trainer that decide about steps, such as ``accumulate_grad_batches``.

    Returns:
        The layout and the estimates.

    Raises:
        ValueError, TypeError: As at the start of training, or if a step needs values that a module on the meta device
            has not, or that take too much memory.
    """
    strategy = run_first_step(make, partial(DryRunStrategy, config, sizes), precision=precision, **trainer)
    return DryRun(strategy.layout, tuple(strategy.memory))


def run_first_step(
    make: Callable[[], tuple[LightningModule, Any]],
    make_strategy: Callable[..., _S],
    *,
    precision: Precision,
    **trainer: Any,
) -> _S:
    """Let Lightning's loop come to the first training step, under a strategy that ends it there.

    Args:
        make: As for :func:`dry_run`; loaders may take the place of a datamodule.
        make_strategy: Makes a strategy; it gets what ends when the module has been made (``making``).
        precision: The precision plugin.
        trainer: Other arguments of the Trainer.

    Returns:
        The strategy, after its step.

    Raises:
        ValueError, TypeError: As :func:`dry_run`.
    """
    trainer |= dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer |= {"logger": DummyLogger(), "num_sanity_val_steps": 0, "limit_val_batches": 0, "plugins": [precision]}

    def attempt(making: ExitStack) -> _S:
        with making:
            module, data = make()
            strategy = make_strategy(making=making)
            dry = Trainer(accelerator="cpu", devices=1, strategy=strategy, **trainer)
            with _fake_process_group(strategy.num_ranks), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a run says them too
                try:
                    dry.fit(module, data)
                except StopAfterFirstStepError:
                    return strategy
        raise ValueError(
            f"{type(module).__name__} received no training batch: its data loader is empty or limited to 0 batches."
            " [LH131]"
        )

    if FakeMode is None:  # then the step is run with numbers
        return attempt(ExitStack())
    making = ExitStack()
    registered = making.enter_context(parameters_without_memory())
    try:
        return attempt(making)
    except Exception as error:  # whatever it is, with values it is what a run says
        if not registered.number:
            raise
        reason = error
    making.enter_context(parameters_with_little_memory(reason))
    return attempt(making)


@contextmanager
def _fake_process_group(size: int) -> Iterator[None]:
    """Be the first of so many processes, of which the others do not exist."""
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
    """The first step has been run, and the dry run is over."""


class DryRunStrategy(SingleDeviceStrategy):
    """A strategy that measures the first training step, and stops there.

    Args:
        config: The arguments of `HybridStrategy`.
        sizes: The number of ranks along each axis.
        making: What was entered for as long as the module is made.

    Attributes:
        sizes: The number of ranks along each axis.
        layout: The layout as text.
        memory: The estimates, by pipeline rank.
    """

    def __init__(self, config: Settings, sizes: Sizes, *, making: ExitStack) -> None:
        super().__init__(device="cpu")
        self._config, self.sizes, self._making = config, sizes, making
        self._mode = None if FakeMode is None else fake_mode()
        self._plan_table = self.layout = ""
        self.memory: list[MemoryUsage] = []
        self._tried: dict[Hashable, Places] = {}
        self._alike: dict[Hashable, dict[nn.Module, nn.Module]] = {}
        self._held_before: tuple[Hashable, list[Tensor]] | None = None
        self._context_groups: dict[int, dist.ProcessGroup] = {}

    @property
    def num_ranks(self) -> int:
        """The ranks of the run."""
        return self.sizes.num_ranks

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    def model_to_device(self) -> None:
        """It stays where it is."""

    def teardown(self) -> None:
        """The module is of no use any more."""

    def setup_environment(self) -> None:
        """Give the module the mesh that it has in a run."""
        super().setup_environment()
        axes = self.sizes.axes
        shape, names = tuple(map(self.sizes.along, axes)), tuple(axis.name for axis in axes)
        self._mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        set_device_mesh(self._module, self._mesh)

    def setup(self, trainer: Trainer) -> None:
        """Parallelize layers as a run does, and let the user configure optimizers."""
        self._making.close()
        module = self._module
        self.model = self.precision_plugin.convert_module(module)  # now: fake tensors cannot be converted
        self._has_values = not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
        self._body, self._stage_map = None, StageMap.uncut()
        if self.sizes.pipeline > 1:
            self._body, self._stage_map = layout.find_stages(module, self._config, self.sizes.pipeline)
        # Before fake tensors come: blocks are tried with numbers, and a mesh reads the values of tensors.
        plan = self._find_plan() if self.sizes.tensor > 1 else None
        tensor_ranks = None if plan is None else self._tensor_ranks(plan)
        with nullcontext() if self._has_values else self._without_memory():
            if not self._has_values:
                _replace_meta_tensors(module)
            if plan is not None and tensor_ranks is not None:
                self._plan_table = plan_table(plan, module)
                self._stage_map = layout.with_plan(self._stage_map, self._body, plan, module)
                plan.apply(module, *tensor_ranks, torch.device("cpu"))
            self.setup_optimizers(trainer)
            self.setup_precision_plugin()

    def _find_plan(self) -> Plan:
        """Return how layers are shared by the tensor-parallel ranks."""
        return layout.find_plan(self._module, self._config, self.sizes.tensor, self._body)

    def _tensor_ranks(self, plan: Plan) -> tuple[DeviceMesh, TensorGroup]:
        """The ranks that share layers, as a mesh and as a group; which numbers they have does not matter here."""
        arrangement, line = plan.mode.arrangement, self._mesh[TENSOR.name]
        if arrangement.is_line:
            return line, plan.mode.make_group(line.get_group(), {})
        along = {axes: dist.new_group(arrangement.ranks_along(axes)) for axes in arrangement.groups()}
        axes = {name: arrangement.parts(of_name) for name, of_name in arrangement.mesh_axes.items()}
        shape, names = (self.num_ranks // arrangement.size, *axes.values()), ("replicas", *axes)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)[tuple(axes)]
        return mesh, plan.mode.make_group(line.get_group(), along)

    def _without_memory(self) -> AbstractContextManager[Any]:
        if self._mode is None:
            raise ValueError(
                f"torch {torch.__version__} cannot run a module whose parameters have no values. Create the parameters"
                " in `__init__`. [LH135]"
            )
        mode: AbstractContextManager[Any] = self._mode
        return mode

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run one microbatch, and estimate what each pipeline rank holds.

        Raises:
            StopAfterFirstStepError: Always.
        """
        module, config = self._module, self._config
        data, pipeline, number = self.sizes.num_replicas, self.sizes.pipeline, config.num_microbatches
        if config.auto_microbatches:
            number = limit_microbatches(number, find_batch_size(batch), batch_norms(module))
        microbatches, _ = split_into(batch, number, getattr(module, "split_batch", None))
        self._place_outside(microbatches, args)  # first: it leaves no trace, and metrics keep what is measured
        activations = self._activations(microbatches[0], args)
        schedule = find_schedule(config, pipeline, len(microbatches))
        estimator = MemoryEstimator(module, self.optimizers, float32_gradients=config.tuning.float32_gradients)
        for rank in range(pipeline):
            layers = layout.find_own_layers(module, self._body, self._stage_map, rank)
            usage = estimator.usage(
                estimator.held(self._stage_map, layers, rank),
                config,
                num_replicas=data,
                num_backwards=len(microbatches) * self._num_accumulated(data),
            )
            peak = None if activations is None else activations.peak(schedule, rank)
            self.memory.append(replace(usage, activations=peak))
        raise StopAfterFirstStepError

    def _num_accumulated(self, replicas: int) -> int:
        trainer, samples = self._module.trainer, self._config.global_batch_size
        size = getattr(trainer.train_dataloader, "batch_size", None)
        if samples is None or size is None:
            return trainer.accumulate_grad_batches
        return accumulated_batches(samples, size, replicas)

    def _place_outside(self, microbatches: Sequence[Any], args: Sequence[Any]) -> None:
        """Find where parameters outside of the layers will live once the first batch has been seen, and say it."""
        module, reason = self._module, ""
        if self._stage_map.places_outside:
            try:
                outside = layout.find_outside(module, self._stage_map, self._find_use(microbatches[0], args))
                self._stage_map = replace(self._stage_map, outside=outside)
            except Exception as error:  # whatever it is, it is said
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
        """The stages that use each parameter outside of the layers."""
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
        """The bytes that autograd saves of a microbatch, and of a step."""
        if not self._module.automatic_optimization:
            return None  # its step is forward and backward, as often as it likes
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
        """Run the step with a microbatch, if it can be without numbers, and say what autograd saves.

        It says so for each kind of recomputation of the layers that `config` chooses.

        Args:
            microbatch: What it gets.
            args: Its other arguments.
            config: Says which layers run again.
            body: Whose layers are told apart.
            stage_map: The stages of these layers.
            around: Entered around the step; gets the meter, which knows where the step is.
        """
        module = self._module
        run = partial(self._measure, microbatch, args, config, body, stage_map, around)
        if self._mode is not None:
            with suppress(Exception):  # if layers cannot repeat what others did, all of them run
                return run(self._mode, repeats=True)
            try:
                return run(self._mode)
            except WrongUseError:  # numbers make no difference
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
        module = self._module
        layers = layout.find_recomputed(module, config, body, stage_map)
        alike = self._first_alike(body)  # before the step is counted: comparing layers runs operations too
        with mode, mixed_operations(), with_single_numbers(), LogRecorder(module)():
            leaves, spec = flatten(microbatch)
            leaves = [_in_mode(leaf, mode) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            inputs = (leaf for leaf in leaves if isinstance(leaf, Tensor))
            meter = SavedTensorMeter([*self._held(mode), *inputs])
            step = self.precision_plugin.train_step_context()
            with step, meter(), labelled_layers(body, meter), around(meter) as counted, ExitStack() as replaced:
                checkpoints = NotedCheckpoints(layers, meter, counted.paused if counted else nullcontext)
                inner = partial(self._with_shares, config, body, checkpoints)
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
        """Return the parameters and buffers and their fake tensors in a mode. Caches them: making them is slow."""
        tensors = (*self._module.parameters(), *self._module.buffers())
        key = mode if mode is self._mode else None, tuple(map(id, tensors))
        if self._held_before is None or self._held_before[0] != key:
            held = [to_local(tensor) for tensor in tensors]
            self._held_before = key, [*held, *(_in_mode(tensor, mode) for tensor in held)]
        return self._held_before[1]

    def _context_group(self, size: int) -> dist.ProcessGroup:
        """The ranks that share a sequence; which numbers they have does not matter here."""
        if size not in self._context_groups:
            self._context_groups[size] = dist.new_group(range(size))
        return self._context_groups[size]

    def _first_alike(self, body: Body | None) -> dict[nn.Module, nn.Module]:
        """Return for each layer of a body, or of the one that could be cut, the first one that is like it."""
        if body is None:
            try:
                body = layout.find_layers(self._module, self._config, 1)
            except (ValueError, TypeError):
                return {}
        if body.names not in self._alike:
            self._alike[body.names] = first_alike(dict(zip(body.names, body.layers, strict=True)))
        return self._alike[body.names]

    def _with_shares(
        self, config: Settings, body: Body | None, between: Callable[[], AbstractContextManager[None]]
    ) -> AbstractContextManager[None]:
        """What is entered around forwards: as in a run, layers get their share of a sequence around what runs again."""
        size = config.context_parallel_size
        if size == 1:
            return between()
        body = body or layout.find_layers(self._module, config, 1)
        layers = dict(zip(body.names, body.layers, strict=True))
        group = ContextGroup(self._context_group(size))
        given = self._module, layers, group, config.context_parallel, torch.device("cpu")
        context = AloneContextParallel(*given, tried=self._tried, alike=self._first_alike(body))
        return context.around(between)


def _real_buffers(module: nn.Module) -> AbstractContextManager[None]:
    """Make buffers without values zeros while entered: in a step that is followed only parameters have none."""

    def real(buffer: Tensor | None) -> Tensor | None:
        return torch.zeros(buffer.shape, dtype=buffer.dtype) if isinstance(buffer, FakeTensor) else buffer

    tables = (part._buffers for part in module.modules())
    return replaced_entries((table, {name: real(buffer) for name, buffer in table.items()}) for table in tables)


def _in_mode(tensor: Tensor, mode: Any) -> Tensor:
    """What a step in this mode computes with in the place of a tensor."""
    fake: Tensor = tensor if isinstance(mode, nullcontext) else mode.from_tensor(tensor)
    return fake


def _replace_meta_tensors(module: nn.Module) -> None:
    """Inside the fake mode: put fake tensors, which are like any others, in the place of those on the meta device."""
    owners = find_owners(module)
    for parameter in [each for each in module.parameters() if each.is_meta]:
        made = nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad)
        copy_attributes(parameter, made)
        set_parameter(made, owners[id(parameter)])
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_meta:
                part._buffers[name] = torch.empty_like(buffer, device="cpu")
