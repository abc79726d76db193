"""Parallelization of a module: split into stages, shard over tensor-parallel ranks and replicas, and undo all of it.

`AttachedModule` makes one :class:`ModuleParallelizer` for a module, and another one after the module was gathered.
`strategy.layout` decides how to split the module; this file changes it, and knows afterwards how it was changed. The
order matters, so that it is in one place: the plan needs the parameters of all layers, placeholders come before
initialization so that no rank creates the full model, and ZeRO shards the tensor-parallel shards.

A *placeholder* replaces a tensor of another stage on this rank. The *body* is the set of layers that the pipeline
splits; a *chain* is a body that is an `nn.Sequential`, and other layers of a body are *units*, which any code may call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_hybrid.checkpoint.parts import mark_parts
from lightning_hybrid.checkpoint.weights.weights import Source, Weights
from lightning_hybrid.config import Settings
from lightning_hybrid.data_parallel.parameter_map import ParameterMap
from lightning_hybrid.data_parallel.zero.param import is_shard, num_shards
from lightning_hybrid.data_parallel.zero.shard_module import shard_module, take_places, unshard_module
from lightning_hybrid.data_parallel.zero.zero import NoZero, ZeroParameters
from lightning_hybrid.distributed.agreement import agree, all_gather_values, check_equal
from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.distributed.process_group import GroupRef
from lightning_hybrid.distributed.pytree import flatten
from lightning_hybrid.expert_parallel.dispatch import hook_experts
from lightning_hybrid.expert_parallel.experts import experts_text, find_experts
from lightning_hybrid.memory.account import MemoryUsage
from lightning_hybrid.memory.activation_checkpoint.checkpoint import ActivationCheckpointing
from lightning_hybrid.memory.estimate import MemoryEstimator
from lightning_hybrid.memory.offload import Offload
from lightning_hybrid.pipeline_parallel.body import Body, BodyCallError, layer_call_text
from lightning_hybrid.pipeline_parallel.links.step_schedules import find_placement
from lightning_hybrid.pipeline_parallel.placeholders import is_placeholder, refuse_call, replace_with_placeholders
from lightning_hybrid.pipeline_parallel.stage_map import StageMap
from lightning_hybrid.strategy import layout
from lightning_hybrid.strategy.gather import check_gathering, gather_module
from lightning_hybrid.strategy.meta_init import Initialization, lacks_values
from lightning_hybrid.strategy.summary import divided_share, plan_table
from lightning_hybrid.tensor_parallel.context_parallel.context_parallel import ContextParallel
from lightning_hybrid.tensor_parallel.context_parallel.mappings import ContextGroup
from lightning_hybrid.tensor_parallel.layouts.layout import stage_axes
from lightning_hybrid.tensor_parallel.plan import Plan, check_names, plan_texts

_PLAN = "_tensor_parallel_plan"  # attribute of a module with its tensor-parallel plan
_OUTSIDE = "_parameters_outside_the_body"  # attribute with (stages, stages of parameters outside the body)


class ModuleParallelizer:
    """Parallelization of one module: splits it into stages, and shards its layers.

    `AttachedModule` creates it and calls it in the setup of a run. `strategy.layout` makes the decisions.

    Args:
        module: The user's module.
        settings: The settings.
        mesh: The device mesh.
        device: The device of this rank.
        seed: The global seed, equal on all ranks.
        before: The earlier parallelizer of the module, if the module was sharded for these ranks and then gathered.
            Parameters outside the layers return to the same stages. Shards are the same objects as before, because
            optimizers and callbacks refer to them.

    Attributes:
        num_stages: The number of stages over all ranks. The chunks of a single pipeline rank count as one stage.
        body: The body; ``None`` with one stage, or before the module is parallelized.
        parameters: The places of the module's tensors.
        plan: The tensor-parallel plan; ``None`` without tensor parallelism, or before the module is parallelized.
        is_done: True if the module is parallelized.
        source: The source of the weights; ``None`` if the module has or initializes them.
        is_whole: True if the module was parallelized and then gathered.
        shards: The sharded parameters by all their names, from before the module was gathered; empty before.
        context_parallel: Splits the sequences of layers during a run; ``None`` without context parallelism.
    """

    def __init__(
        self,
        module: LightningModule,
        settings: Settings,
        mesh: Mesh,
        device: torch.device,
        seed: int,
        before: ModuleParallelizer | None = None,
    ) -> None:
        self._module = module
        self._before = before
        self._seed = seed
        self._device = device
        self._settings = settings
        self._mesh = mesh
        self.num_stages = find_placement(settings, mesh.sizes.pipeline).num_stages
        self.body: Body | None = None
        self.parameters = ParameterMap(module, StageMap.uncut(), mesh)
        self.plan: Plan | None = None
        self.is_done = self._was_parallelized = False
        self.is_whole = before is not None
        self.source: Source | None = None
        self.shards: dict[str, nn.Parameter] = {}
        self.context_parallel: ContextParallel | None = None
        self._experts: dict[str, nn.Module] = {}

    def __call__(self) -> None:
        """Put placeholders for parameters of other stages, and shard the remaining layers; only once.

        All ranks must call this. It also initializes tensors on the meta device, loads the weights of :attr:`source`,
        and logs the layout. With master weights, it converts the module to float32, at each call.

        Raises:
            ValueError: If the module has no body, if the body has fewer layers than the pipeline has stages, if layers
                cannot be sharded as the plan requires, if an earlier run has sharded the module for another layout, or
                if a tensor on the meta device cannot be initialized; on every rank.
            TypeError: If the body cannot be split; on every rank.
            FileNotFoundError, ValueError, RuntimeError: If weights cannot be read, or do not match; on every rank.
        """
        if self._settings.master_weights:
            self._module.float()  # so that loaded weights are not rounded
        lacks = lacks_values(self._module)
        if self.num_stages > 1 and not self.is_done:
            agree(self._plan)
            rank_zero_info(self.text())
            assert self.body is not None
            fragment = layout.fragment_text(self._module, self.body)
            if fragment is not None:
                rank_zero_warn(fragment)
        if not self.is_done:
            # This comes before placeholders, because the plan depends on the parameters of all layers.
            self._plan_tensor_parallel()
            self._find_experts()
            self._check_shards()
            if self.num_stages > 1:
                self._agree_on_tracing()
                self._replace_with_placeholders()
            weights = None if self.source is None else agree(lambda: Weights(cast(Source, self.source)))
            if lacks:
                agree(lambda: self._materialize(weights))
            else:
                self._apply_plan()
            if weights is not None:
                agree(lambda: self._load(weights))
                self.source = None
            if self._settings.gather_module_on_teardown is True:
                agree(lambda: check_gathering(self._module, self.plan))
            if self._settings.shards_over_replicas:
                sharded = self._settings.zero_stage > 0
                experts = self._experts.values()
                shard_module(self._module, self._mesh, self._device, experts=experts, shards_others=sharded)
            if self._before is not None:
                take_places(self._module, self._before.shards)
                self._before = None
        self.is_done, self.is_whole = True, False

    @property
    def stage_map(self) -> StageMap:
        """The assignment of the module's tensors to stages."""
        return self.parameters.stage_map

    @property
    def adds_up(self) -> Collection[str]:
        """The names of parameters whose gradients are partial sums on the tensor-parallel ranks."""
        return self.plan.partial_grads if self.plan else ()

    def make_zero(self) -> ZeroParameters | NoZero:
        """Return the object that unshards parameters in steps; `NoZero` if they are not sharded over replicas."""
        if not self._settings.shards_over_replicas or self._mesh.num_replicas == 1:
            return NoZero()
        zero = ZeroParameters(
            self._module,
            self.own_layers(),
            self._mesh.zero,
            self._mesh.experts,
            replica=self._mesh.data_rank,
            zero_stage=self._settings.zero_stage,
            reshard_after_forward=self._settings.frees_early,
        )
        if self._experts:
            hook_experts(self._experts.values(), zero, GroupRef(self._mesh.experts.expert_group))
        return zero

    def own_parameters(self) -> list[nn.Parameter]:
        """Return the parameters with values on this rank, as the same objects as in the optimizers of the last run."""
        earlier = {} if self._before is None else self._before.shards
        named = self._module.named_parameters(remove_duplicate=False)
        parameters = {earlier.get(name, parameter): None for name, parameter in named}
        return [parameter for parameter in parameters if not parameter.is_meta]

    def own_layers(self) -> dict[int, list[nn.Module]]:
        """Return the layers of each stage of this rank."""
        return layout.find_own_layers(self._module, self.body, self.stage_map, self._mesh.pipeline_rank)

    def load(self, source: Source) -> None:
        """Load weights now, or when the module is parallelized. All ranks must call this.

        Args:
            source: The argument of `HybridStrategy.load_weights`.

        Raises:
            FileNotFoundError, ValueError, RuntimeError: If they cannot be read, or do not match; on every rank.
        """
        if not self.is_done and not self.is_whole:
            self.source = source
            return
        weights = agree(lambda: Weights(source))
        agree(lambda: self._load(weights))

    def _load(self, weights: Weights) -> None:
        trainer = self._module.trainer  # the processes of a node share the reading of files
        weights.load(self._module, self.parameters, share=(trainer.local_rank, trainer.num_devices))

    def around_forwards(
        self, offload: Offload, stays: Callable[[], Iterable[Tensor]]
    ) -> Callable[[], AbstractContextManager[None]]:
        """Return a context for forwards, in which layers are recomputed and activations are offloaded to the host.

        `Run` calls this once. It also sets :attr:`context_parallel`, whose context is part of the result.

        Args:
            offload: Offloads activations.
            stays: Returns tensors that are not offloaded.

        Raises:
            ValueError, TypeError: If no layers match the argument `recompute`, or if the module has no body to choose
                layers from; on every rank.
        """
        layers = layout.find_recomputed(self._module, self._settings, self.body, self.stage_map)
        recompute = ActivationCheckpointing(layers, self._device, selective=self._settings.recompute == "selective")
        around = self._around_layers(recompute if layers else nullcontext, offload, stays)
        self.context_parallel = context = self._make_context_parallel()
        return around if context is None else lambda: context.around(around)

    def _make_context_parallel(self) -> ContextParallel | None:
        if self._mesh.sizes.context == 1:
            return None
        body = self.body or layout.find_layers(self._module, self._settings, 1)
        layers = dict(zip(body.names, body.layers, strict=True))
        group = ContextGroup(self._mesh.context_group)
        return ContextParallel(self._module, layers, group, self._settings.context_parallel, self._device)

    @staticmethod
    def _around_layers(
        recompute: Callable[[], AbstractContextManager[None]], offload: Offload, stays: Callable[[], Iterable[Tensor]]
    ) -> Callable[[], AbstractContextManager[None]]:
        if not offload.moves_activations:
            return recompute

        @contextmanager
        def around() -> Iterator[None]:
            with offload.activations(stays), recompute():
                yield

        return around

    def estimate_memory(self, optimizers: Collection[Optimizer]) -> MemoryUsage:
        """Return an estimate of this rank's memory.

        The estimate includes optimizer states only if all optimizers are torch's, because others may communicate in a
        step. This is not a collective.
        """
        tried = optimizers if all(type(each).__module__.startswith("torch.optim.") for each in optimizers) else None
        settings = self._settings
        estimator = MemoryEstimator(self._module, tried, float32_gradients=settings.tuning.float32_gradients)
        stage_map = layout.expect_outside(self._module, self.stage_map)
        return estimator.usage(
            estimator.held(stage_map, self.own_layers(), self._mesh.pipeline_rank),
            settings,
            num_shards=settings.num_shards(self._mesh.num_replicas),
            num_backwards=settings.num_microbatches * self._module.trainer.accumulate_grad_batches,
        )

    def _materialize(self, weights: Weights | None) -> None:
        """Initialize tensors on the meta device layer by layer.

        Each layer is sharded before the next layer is initialized, so that only one full layer is in memory.
        """
        shapes = weights.shapes(self._module) if weights else {}
        given = [name for name, value in self._module.state_dict().items() if shapes.get(name) == _shape(value)]
        frames = layout.find_frames(self._module, self._settings, self.num_stages, self.body)
        initialize = Initialization(self._module, self._device, self._seed, frames=frames, given=given)
        self._apply_plan(prepare=initialize)
        initialize.finish()

    def _plan_tensor_parallel(self) -> None:
        size = self._mesh.sizes.tensor
        settings = self._settings
        how = settings.tensor_parallel_mode, settings.tensor_parallel_depth, settings.expert_parallel
        requested = size, settings.tensor_parallel_plan, settings.sequence_parallel, *how
        known: Plan | None
        before, known = vars(self._module).get(_PLAN, (None, None))
        self._was_parallelized = known is not None
        if known is None and size == 1:
            plan = self._settings.tensor_parallel_plan
            if settings.expert_parallel == "tensor":
                agree(lambda: find_experts(self._module, 1, "tensor"))
            if isinstance(plan, Mapping):
                agree(lambda: check_names(self._module, plan, stage_axes(self._settings.axis_order)))
            return
        if known is not None and before != requested:
            raise ValueError(
                f"An earlier run sharded {type(self._module).__name__} with (tensor_parallel_size,"
                " tensor_parallel_plan, sequence_parallel, tensor_parallel_mode, tensor_parallel_depth,"
                f" expert_parallel) = {before}, but this run needs {requested}. After the earlier run, call"
                " `trainer.strategy.gather_module()` to gather the module. [LH318]"
            )
        self.plan = known
        if known is None:
            self.plan = self._find_plan(size)
            vars(self._module)[_PLAN] = requested, self.plan
            table = plan_table(self.plan, self._module)
            if not divided_share(self.plan, self._module):
                rank_zero_warn(
                    f"tensor_parallel_size={size} shards none of the parameters of {type(self._module).__name__}, so"
                    " all tensor-parallel ranks do the same work. Set `tensor_parallel_plan`, or use the ranks for data"
                    " parallelism."
                )
            rank_zero_info(table if self.num_stages > 1 else f"{self.text()}\n{table}")

    def _find_experts(self) -> None:
        """Find the experts that replicas share. Every rank must call this."""
        size = self._settings.expert_parallel_size
        if size > 1:
            self._experts = agree(lambda: find_experts(self._module, size))
            rank_zero_info(experts_text(self._experts, size))

    def _check_shards(self) -> None:
        """Check that an earlier run has sharded parameters in the same way, if it has.

        Raises:
            ValueError: If it has sharded parameters over other replicas.
        """
        mesh, experts = self._mesh, set(self._experts.values())
        for part in self._module.modules():
            for parameter in filter(is_shard, part._parameters.values()):
                groups, sizes = mesh.experts if part in experts else mesh.zero, num_shards(parameter)
                is_sharded = self._settings.zero_stage or part in experts
                needed = (groups.num_expert_ranks, groups.size if is_sharded else 1)
                if sizes != needed:
                    raise ValueError(
                        f"An earlier run sharded {type(self._module).__name__} over {math.prod(sizes)} replicas"
                        f" (zero_stage, zero_size or expert_parallel_size), but this run needs {math.prod(needed)} for"
                        f" {type(part).__name__}. Call `trainer.strategy.gather_module()` after that run. [LH318]"
                    )

    def _agree_on_tracing(self) -> None:
        """Agree on all ranks if steps are traced: not if a chain has tensor-parallel layers outside of it."""
        if self._mesh.sizes.tensor > 1:
            stage_map = agree(lambda: layout.with_plan(self.stage_map, self.body, self.plan, self._module))
            places_outside = all(all_gather_values(stage_map.places_outside))
            self.parameters.assign(replace(self.stage_map, places_outside=places_outside))

    def _find_plan(self, size: int) -> Plan:
        """Return the plan, equal on every rank. Only the first rank makes automatic plans, by trials of blocks."""
        requested = agree(lambda: layout.requested_plan(self._module, self._settings))
        check_equal(plan_texts(requested), "Use the same tensor_parallel_plan on every rank.")
        is_auto = requested == "auto"
        is_found_here = not is_auto or dist.get_rank() == 0
        plan = agree(lambda: layout.find_plan(self._module, self._settings, size) if is_found_here else None)
        found: list[Any] = [plan]
        if is_auto:
            dist.broadcast_object_list(found, src=0)
        return cast(Plan, found[0])

    def _apply_plan(self, prepare: Callable[[str], None] = lambda name: None) -> None:
        if self.plan is None:
            return
        group = self.plan.mode.make_group(self._mesh.tensor_group, self._mesh.arranged_groups)
        if self._was_parallelized:
            self.plan.set_tensor_group(self._module, group)
        else:
            self.plan.apply(self._module, self._mesh.tensor_mesh, group, self._device, prepare)

    def undo(self) -> None:
        """Gather the full module on every rank, so that it can be parallelized for another layout.

        All ranks must call this. Afterwards, this object only keeps the shards for the next parallelizer.

        Raises:
            ValueError: If other code has sharded layers of the module; on every rank.
        """
        named = self._module.named_parameters(remove_duplicate=False)
        self.shards = {name: parameter for name, parameter in named if isinstance(parameter, DTensor)}
        unshard_module(self._module)
        gather_module(self._module, self.parameters, self.plan)
        for name in (_PLAN, _OUTSIDE):
            vars(self._module).pop(name, None)

    def find_outside(self, used: Mapping[str, Collection[int]] | None) -> dict[str, frozenset[int]] | None:
        """Return the new stages of parameters outside the body, on every rank: see :func:`layout.find_outside`.

        All ranks must call this.

        Args:
            used: The stages that use each parameter in the steps of this replica, by one of its names; ``None`` if
                steps cannot be traced.

        Returns:
            The new stages of each parameter that leaves a stage, by name; ``None`` if a replica has no trace.
        """
        found = None if used is None else {name: sorted(stages) for name, stages in used.items()}
        of_replicas = all_gather_values(found)
        if None in of_replicas:
            return None
        names = {name for found in of_replicas for name in found}
        joined = {name: {stage for found in of_replicas for stage in found.get(name, ())} for name in names}
        return layout.find_outside(self._module, self.stage_map, joined)

    def release_parameters(self) -> None:
        """Do nothing before parameters move; see :class:`Follower`."""

    def take_parameters(self, placeholders: Mapping[int, Tensor]) -> None:
        """Store the new stages for the next run, and put placeholders into the callbacks' copies of the module."""
        stage_map, rank = self.stage_map, self._mesh.pipeline_rank
        vars(self._module)[_OUTSIDE] = stage_map.stages, stage_map.outside
        callbacks: list[Any] = self._module.trainer.callbacks  # type: ignore[attr-defined]
        values = [leaf for each in callbacks for leaf in flatten(dict(vars(each)))[0]]
        modules = [value for value in values if isinstance(value, nn.Module)]
        for part in {part for module in modules for part in module.modules() if type(part) is type(self._module)}:
            if part is not self._module:
                replace_with_placeholders(part, stage_map, rank)
        mark_parts(self._module)

    def check(self) -> None:
        """Check that the body has not changed since it was split. This is not a collective.

        Raises:
            ValueError: If the body, or the number of its layers, has changed.
        """
        if self.body is None:
            return
        body, chain = self.body, self.body.chain
        now = dict(self._module.named_modules(remove_duplicate=False))
        if chain is None:
            is_same = all(now.get(name) is layer for name, layer in zip(body.names, body.layers, strict=True))
        else:
            is_same = len(chain) == len(body.layers) and now.get(body.name) is chain
        if not is_same:
            raise ValueError(
                f"The body {body.name!r} of {type(self._module).__name__} was replaced, or its layers were changed,"
                " after it was split into stages. Create the body in `__init__` or, with `if self.body is None:`, in"
                " `configure_model`. Both run before the split. [LH319]"
            )

    def _replace_with_placeholders(self) -> None:
        assert self.body is not None
        body, rank = self.body, self._mesh.pipeline_rank
        replace_with_placeholders(self._module, self.stage_map, rank)
        paths = self._module.named_modules(remove_duplicate=False)
        own = {id(part) for path, part in paths if rank in self.stage_map.ranks_of(path)}
        for layer in {id(layer): layer for layer in body.layers if id(layer) not in own}.values():
            refuse_call(layer, BodyCallError, layer_call_text(body.name, body.lists))

    def _plan(self) -> None:
        """Find the body, and assign its layers to stages."""
        body, stage_map = layout.find_stages(self._module, self._settings, self._mesh.sizes.pipeline)
        before = None if self._before is None else self._before.stage_map
        known = (None, {}) if before is None else (before.stages, before.outside)
        stages, outside = vars(self._module).get(_OUTSIDE, known)
        if stages == stage_map.stages:
            stage_map = replace(stage_map, outside=outside)
            vars(self._module)[_OUTSIDE] = stages, outside
        own = [
            tensor_name
            for tensor_name, tensor in self._module.named_parameters()
            if self._mesh.pipeline_rank in stage_map.ranks_of(tensor_name) and is_placeholder(tensor)
        ]
        if own:
            raise ValueError(
                f"An earlier run sharded {type(self._module).__name__} for another layout: {own[0]!r} has no values on"
                " the rank that needs it now. After the earlier run, call `trainer.strategy.gather_module()` to gather"
                " the module. [LH318]"
            )
        self.body = body
        self.parameters.assign(stage_map)

    @property
    def fits_units(self) -> bool:
        """Return True if the layers of the body can be units that any code calls; False without a body."""
        if self.body is None:
            return False
        return self.plan is None or layout.fits_units(self.plan, self._module, self.body)

    def text(self) -> str:
        """Return the layout and the table of stages."""
        mesh = self._mesh
        return layout.stages_text(self._module, self._settings, mesh.sizes, self.body, self.stage_map, hosts=mesh.hosts)


def _shape(value: object) -> torch.Size | None:
    return value.shape if isinstance(value, torch.Tensor) else None
