"""ZeRO: parameters that replicas shard, and that are unsharded while steps compute with them.

`shard_module` has sharded the parameters before. :class:`GradientSync` makes the object through
`ModuleParallelizer.make_zero` when a run starts, keeps it as ``zero``, and calls it around each step and each backward.
Training steps and step programs also call it around forwards. Hooks on the modules gather each layer before it runs.
Gradients are reduced to shards, and optimizers have states for shards only.

The *replicas* are the data-parallel ranks that shard a parameter: all of them, or `zero_size`. Each has some *rows* of
the parameter, its *shard*. A step is *open* from :meth:`ZeroParameters.open` to :meth:`ZeroParameters.close`, while
layers find unsharded parameters. The *root* group has the parameters that belong to no single layer. Methods that
gather or reduce are collectives: all replicas must call them in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_hybrid.data_parallel.grad_buckets import GradientBuckets
from lightning_hybrid.data_parallel.zero.grad_scatter import ZeroGradients
from lightning_hybrid.data_parallel.zero.param import ShardedParameter, find_owners, is_expert, is_gathered, is_shard
from lightning_hybrid.data_parallel.zero.param_group import ParameterGroup
from lightning_hybrid.data_parallel.zero.prefetch import Prefetcher, post_backward_hook
from lightning_hybrid.data_parallel.zero.shard_module import own_parameters
from lightning_hybrid.distributed.dtensor import uncompiled
from lightning_hybrid.distributed.pytree import flatten
from lightning_hybrid.distributed.shard_groups import ShardGroups
from lightning_hybrid.torch_internals import DisableTorchFunction


@dataclass
class OwnHook:
    """A hook of this package, which torch does not compile. It is an object, so copying its module also copies it.

    Attributes:
        hook: The function that torch should call.
        runs_in_traces: True if traces call it, because the module fails without it. Traces remove other hooks.
    """

    hook: Callable[..., Any]
    runs_in_traces: bool = False

    @uncompiled
    def __call__(self, *args: Any) -> Any:
        """Call the hook."""
        with DisableTorchFunction():
            return self.hook(*args)


@dataclass(frozen=True)
class _Layer:
    """A layer whose parameters are unsharded together.

    Attributes:
        group: Its parameters.
        stage: Its stage.
        index: Its index among the layers of the stage that have parameters.
        position: Its index among all such layers of this rank.
    """

    group: ParameterGroup
    stage: int
    index: int
    position: int


class ZeroParameters:
    """The sharded parameters of this rank. Parameters with fewer than two rows are not sharded, and not included.

    A step is one batch of training, with its backward, or of evaluation. Between steps, optimizers, callbacks and
    checkpoints find shards in the module. During a step, layers find unsharded parameters. A call of the module or of a
    layer outside of a step is treated as a step::

        stage   gradients                            unsharded parameters
        1       unsharded until the last backward    always have memory; the rows of other ranks are gathered layer by
                before an optimizer step, then       layer while the first forward of a step runs
                rows of each rank
        2       rows of each rank, after each        the same
                layer of each backward
        3       the same                             have memory from a layer's first forward to its last backward; or,
                                                     with `reshard_after_forward`, in each forward and each backward

    The sequence of collectives is the same on every replica, whichever layers it uses: see :class:`Prefetcher`.

    From *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models* (Rajbhandari et al., 2020,
    https://arxiv.org/abs/1910.02054).

    Args:
        module: The user's module, with shards instead of parameters.
        layers: The layers of each stage of this rank, in order, by stage. Parameters in several layers, or in none,
            form the root group, and are unsharded together at the start of a step.
        zero: The replicas over which ZeRO shards parameters.
        experts: The replicas over which experts are sharded.
        replica: The number of this rank's replica among all replicas.
        zero_stage: 1, 2 or 3; 0 if only the parameters of experts are sharded.
        reshard_after_forward: If True, stage 3 reshards a layer after each forward, and after each backward.

    Attributes:
        is_active: True, because parameters are sharded; False for :class:`NoZero`.
        keeps_layers: True with stages 1 and 2, where unsharded parameters always have memory, of which the shards are
            views.
        parameters: The sharded parameters, by the identity of the shard.
        reduces_each_backward: True if gradients are reduced after each backward, and not only after the last backward
            before an optimizer step. Replicas must then run equally many microbatches.
        computes_together: True if replicas exchange tokens in forwards. They must then run equally many microbatches.
        is_open: True while layers find unsharded parameters: during a step, or a call outside of a step.
    """

    is_active, is_open = True, False

    def __init__(
        self,
        module: nn.Module,
        layers: Mapping[int, Sequence[nn.Module]],
        zero: ShardGroups,
        experts: ShardGroups,
        *,
        replica: int,
        zero_stage: int,
        reshard_after_forward: bool,
    ) -> None:
        self.reduces_each_backward = zero_stage > 1
        self.computes_together = experts is not zero
        self._zero, self._experts, self._replica = zero, experts, replica
        self._reshard_after_forward = self._reshards_now = reshard_after_forward and zero_stage == 3
        self._opened_by: nn.Module | None = None
        self._handles: list[RemovableHandle] = []
        self._kinds = (zero, experts) if self.computes_together else (zero,)
        owners, keeps = find_owners(module), zero_stage < 3
        self.keeps_layers = keeps
        self.parameters = {
            id(each): ShardedParameter(each, owners[id(each)], self._groups_of(each), aliased=keeps)
            for each in module.parameters()
            if is_shard(each)
        }
        self._groups: list[ParameterGroup] = []
        self._stage_groups: dict[int, list[ParameterGroup]] = {}
        layer_of: dict[int, _Layer] = {}  # by the identity of its parameters
        for stage, members in sorted(layers.items()):
            for child, keys in zip(members, own_parameters(members, layers, owners), strict=True):
                own = [self.parameters[key] for key in keys if key in self.parameters]
                if own:
                    groups = self._stage_groups.setdefault(stage, [])
                    group = ParameterGroup(own, keeps_memory=keeps)
                    layer = _Layer(group, stage, len(groups), len(self._groups))
                    self._hook_layer(child, layer)
                    groups.append(layer.group)
                    self._groups.append(layer.group)
                    layer_of |= dict.fromkeys(map(id, own), layer)
        rest = [parameter for parameter in self.parameters.values() if id(parameter) not in layer_of]
        self._root = ParameterGroup(rest, keeps_memory=keeps)
        self._gradients = ZeroGradients(
            self._stage_groups,
            self._root,
            zero_stage=zero_stage,
            reshard_after_forward=self._reshard_after_forward,
        )
        self._prefetcher = Prefetcher(self._groups, keeps_unsharded=True)
        self._stage_prefetchers = {
            stage: Prefetcher(groups, keeps_unsharded=False, on_unshard=partial(self._gradients.launch_behind, stage))
            for stage, groups in self._stage_groups.items()
        }
        self._hook_owners(layer_of)
        self._handles += [
            module.register_forward_pre_hook(OwnHook(self._open_for), prepend=True),
            module.register_forward_hook(OwnHook(self._close_for), always_call=True),
        ]

    def tensors(self) -> list[Tensor]:
        """Return both forms of all sharded parameters."""
        return [form for parameter in self.parameters.values() for form in (parameter.sharded, parameter.unsharded)]

    def shards(self) -> dict[int, nn.Parameter]:
        """Return the shard of each sharded parameter, by the identity of each of its two forms."""
        both = ((form, each.sharded) for each in self.parameters.values() for form in (each.sharded, each.unsharded))
        return {id(form): shard for form, shard in both}

    def _groups_of(self, shard: nn.Parameter) -> ShardGroups:
        return self._experts if is_expert(shard) else self._zero

    def counts_in_norm(self, parameter: nn.Parameter) -> bool:
        """Return True if this replica counts a parameter, or its rows of the parameter, in the gradient norm."""
        return self._groups_of(parameter).has_first_copy if is_shard(parameter) else self._replica == 0

    def gradient_buckets(
        self, stage: int | None, parameters: Sequence[nn.Parameter], *, has_mask: bool
    ) -> list[GradientBuckets]:
        """Return buckets for the gradients of the gathered parameters among some parameters.

        Sums over the group that gathers a parameter are divided by the number of shards, and must then be averaged over
        the rows group.

        Args:
            stage: The only stage with the parameters, if there is one.
            parameters: The parameters, in the order of the model.
            has_mask: True if the ranks agree on the host which gradients exist; see :class:`GradientBuckets`.
        """
        gathered = [each for each in parameters if is_shard(each) and is_gathered(each)]
        made = []
        for groups in self._kinds:
            own = [each for each in gathered if self._groups_of(each) is groups]
            mask_group, scale = groups.control_group if has_mask else None, 1 / groups.num_shards
            if own:
                made.append(self._gradients.buckets(stage, own, groups.group, scale=scale, mask_group=mask_group))
        return made

    def expert_buckets(
        self,
        stage: int | None,
        parameters: Sequence[nn.Parameter],
        group: ProcessGroup,
        mask_group: ProcessGroup | None,
    ) -> GradientBuckets:
        """Return buckets for the gradients of the experts among some parameters that are not gathered.

        The gradients of a rank include the tokens of all ranks over which the experts are sharded, so they are summed
        only over the ranks with the same experts.

        Args:
            stage: The only stage with the parameters, if there is one.
            parameters: The parameters, in the order of the model; some are experts.
            group: The ranks with the same experts, on all stages that hold them.
            mask_group: As for :class:`GradientBuckets`.
        """
        experts = [each for each in parameters if is_shard(each) and not is_gathered(each)]
        scale = 1 / (self._experts.num_shards * self._experts.rows_group_size)
        return self._gradients.buckets(stage, experts, group, scale=scale, mask_group=mask_group)

    def add_hooks(self, handles: Iterable[RemovableHandle]) -> None:
        """Add hooks of other code, which are removed with the hooks of this object."""
        self._handles += handles

    # -- steps ---------------------------------------------------------------------------------------------------------

    def open(self, *, unchanged: bool = False, reshard_after_forward: bool = True) -> None:
        """Start a step: let layers find unsharded parameters.

        Args:
            unchanged: True if parameters have not changed since the previous step, as between evaluation batches.
            reshard_after_forward: True if layers may be resharded after each use in this step. Replicas must then run
                equally many microbatches.
        """
        if self.is_open:
            return
        self.is_open = True
        self._reshards_now = self._reshard_after_forward and reshard_after_forward
        for group in self._all:
            if not unchanged:
                group.reshard()
            if group.keeps_memory or group.is_unsharded:
                group.to_unsharded()
        self._root.wait_for_unshard()
        for prefetcher in self._stage_prefetchers.values():
            prefetcher.is_in_order = True
        if not self._reshards_now:
            self._prefetcher.begin()

    def follow(self, optimizers: Iterable[Optimizer]) -> None:
        """Gather parameters again after one of these optimizers has stepped inside a step (manual optimization)."""
        for optimizer in optimizers:
            self._handles.append(optimizer.register_step_post_hook(lambda *_: self._reopen()))

    def _reopen(self) -> None:
        if self.is_open:
            self.close()
            self.open()

    def close(self) -> None:
        """End a step: let all code find shards."""
        if not self.is_open:
            return
        self.is_open = False
        for prefetcher in (self._prefetcher, *self._stage_prefetchers.values()):
            prefetcher.finish()
        for group in self._all:
            group.release()
            group.to_sharded()

    def abandon(self) -> None:
        """End a step after a failure, without waiting for collectives."""
        self.is_open = False
        for prefetcher in (self._prefetcher, *self._stage_prefetchers.values()):
            prefetcher.abandon()
        for group in self._all:
            group.abandon()
            group.to_sharded()

    @property
    def _all(self) -> tuple[ParameterGroup, ...]:
        return (self._root, *self._groups)

    def forward_begins(self, stage: int) -> None:
        """Start to gather the layers of a stage for one microbatch, if layers are resharded after each use."""
        if self._reshards_now and stage in self._stage_prefetchers:
            self._stage_prefetchers[stage].begin()

    def forward_ends_early(self, stage: int) -> None:
        """Take part in the collectives of other replicas, because this replica runs no more layers of the stage."""
        if not self._reshards_now:
            self._prefetcher.finish()
        elif stage in self._stage_prefetchers:
            self._stage_prefetchers[stage].finish()

    def backward_begins(self, stage: int) -> None:
        """Prepare for a backward of a stage."""
        if not self._reshards_now:
            self._prefetcher.finish()  # gradients are reduced from now on
        elif stage in self._stage_prefetchers:
            self._stage_prefetchers[stage].begin(is_backward=True)

    def backward_ends(self, stage: int, *, is_last: bool) -> None:
        """End a backward of a stage. After the last backward of a step, the stage's layers are not needed any more."""
        if self._reshards_now and stage in self._stage_prefetchers:
            self._stage_prefetchers[stage].finish()
        if is_last or self._reshards_now:
            for group in self._stage_groups.get(stage, ()):
                group.release()

    # -- layers --------------------------------------------------------------------------------------------------------

    def unshard_layers(self) -> None:
        """Gather the parameters of all layers, for code around the layers. All replicas must call this."""
        for position, group in enumerate(self._groups):
            if not group.is_unsharded:
                OwnHook(self._prefetcher.unshard)(position)

    @property
    def is_unsharded(self) -> bool:
        """True if the parameters of all layers are gathered. The root group is not considered."""
        return all(group.is_unsharded for group in self._groups)

    def unsharded(self, parameter: Tensor) -> Tensor | None:
        """Return the unsharded form of a parameter, with its values in place; ``None`` for other tensors.

        If the parameter is not gathered, this gathers all layers, so all replicas must call this.

        Args:
            parameter: Any tensor; a sharded parameter in either form.
        """
        found = self._gradients.find(parameter)
        if found is None:
            return None
        sharded, group = found
        if not group.is_unsharded:
            self.unshard_layers()
        return sharded.unsharded

    def note_write(self, parameter: Tensor) -> None:
        """Record that the step writes the unsharded form of a parameter, so that replicas keep their rows of it.

        With stages 1 and 2, shards are views of the unsharded form, so nothing must be recorded.

        Args:
            parameter: The parameter in either form. All replicas write it.
        """
        found = self._gradients.find(parameter)
        if found is not None and not self.keeps_layers:
            found[0].is_written = True

    def _hook_layer(self, module: nn.Module, layer: _Layer) -> None:
        self._handles += [
            module.register_forward_pre_hook(
                OwnHook(partial(self._before_layer, layer)), prepend=True, with_kwargs=True
            ),
            module.register_forward_hook(OwnHook(partial(self._after_layer, layer)), always_call=True),
        ]

    def _hook_owners(self, layer_of: Mapping[int, _Layer]) -> None:
        """Add hooks to all modules with sharded parameters.

        Modules inside layers may be called directly, and modules outside of layers may freeze parameters during a step.
        """
        owned: dict[nn.Module, list[ShardedParameter]] = {}
        for parameter in self.parameters.values():
            for owner, _ in parameter.owners:
                owned.setdefault(owner, []).append(parameter)
        for owner, parameters in owned.items():
            hook = OwnHook(partial(self._before_owner, parameters, layer_of.get(id(parameters[0]))))
            self._handles.append(owner.register_forward_pre_hook(hook))

    def _before_owner(self, parameters: Sequence[ShardedParameter], layer: _Layer | None, *_: Any) -> None:
        for parameter in parameters:
            parameter.sync_requires_grad()
        if layer is not None and self.is_open:
            self._unshard(layer)

    def _unshard(self, layer: _Layer) -> None:
        if not layer.group.is_unsharded:
            if self._reshards_now:
                self._stage_prefetchers[layer.stage].unshard(layer.index)
            else:
                self._prefetcher.unshard(layer.position)

    def _before_layer(self, layer: _Layer, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self.is_open:
            self._open_for(module)
        group = layer.group
        for parameter in group.parameters:
            parameter.sync_requires_grad()
        if group.in_backward and self._reshards_now:  # recomputation belongs to the backward
            return None
        self._unshard(layer)
        return post_backward_hook((args, kwargs), group.release) if self._reshards_now else None

    def _after_layer(self, layer: _Layer, module: nn.Module, args: Any, output: Any) -> None:
        group = layer.group
        if self._reshards_now and not group.in_backward:

            def pre_backward_hook(_: Tensor) -> None:
                if not group.in_backward:
                    self._stage_prefetchers[layer.stage].unshard(layer.index)
                    group.in_backward = True

            for leaf in flatten(output)[0]:
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(pre_backward_hook)  # type: ignore[no-untyped-call]
            group.release()
        self._close_for(module)

    def _open_for(self, module: nn.Module, *_: Any) -> None:
        """Open the parameters if the module or a layer is called outside of a step."""
        for parameter in self._root.parameters:
            parameter.sync_requires_grad()
        if not self.is_open:
            self.open()
            self._opened_by = module

    def _close_for(self, module: nn.Module, *_: Any) -> None:
        if self._opened_by is module:
            self._opened_by = None
            self.close()

    # -- the end -------------------------------------------------------------------------------------------------------

    def remove(self) -> None:
        """Leave the shards in the module, in separate memory, and remove all hooks, at the end of a run."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for parameter in self.parameters.values():
            parameter.remove()
        self.parameters.clear()
        self._groups.clear()
        self._stage_groups.clear()
        self._stage_prefetchers.clear()
        self._root.parameters.clear()


class NoZero:
    """The replacement of :class:`ZeroParameters` if replicas shard nothing."""

    is_active = reduces_each_backward = computes_together = is_open = False
    keeps_layers = is_unsharded = True

    def tensors(self) -> list[Tensor]:
        """Return an empty list."""
        return []

    def shards(self) -> dict[int, nn.Parameter]:
        """Return an empty dict."""
        return {}

    def counts_in_norm(self, parameter: nn.Parameter) -> bool:
        """Return True, because each replica counts every parameter and computes the norm alone."""
        return True

    def gradient_buckets(
        self,
        stage: int | None,
        parameters: Sequence[nn.Parameter],
        *,
        has_mask: bool,
    ) -> list[GradientBuckets]:
        """Return an empty list."""
        assert not any(map(is_shard, parameters))
        return []

    def expert_buckets(self, *_: Any) -> GradientBuckets:
        """Raise an error, because no parameters are sharded over replicas."""
        raise AssertionError

    def unsharded(self, parameter: Tensor) -> None:
        """Return ``None``, because no parameter is sharded."""

    def _nothing(self, *_: Any, **__: Any) -> None:
        pass

    open = close = abandon = follow = add_hooks = remove = unshard_layers = note_write = _nothing

    # Most callers check `is_active` before these calls, because even an empty call takes time.
    forward_begins = forward_ends_early = backward_begins = backward_ends = _nothing
