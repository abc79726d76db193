"""ZeRO: what replicas would hold several times is divided over them, and made whole where it is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_hybrid.data_parallel.zero.leaving import post_backward_hook
from lightning_hybrid.data_parallel.zero.param import ShardedParameter, is_divided, slots_of
from lightning_hybrid.data_parallel.zero.param_group import ParameterGroup
from lightning_hybrid.data_parallel.zero.prefetch import Prefetcher
from lightning_hybrid.data_parallel.zero.scattering import ZeroGradients
from lightning_hybrid.data_parallel.zero.shard_module import own_parameters
from lightning_hybrid.distributed.pytree import flatten

__all__ = ["ZeroParameters"]


class ZeroParameters:
    """The parameters of this rank, divided over replicas, and made whole for each step.

    Between steps everybody finds shards: optimizers, callbacks, checkpoints. During a step layers find wholes::

        stage   gradients                            wholes
        1       whole until the step's last          always there; the shards of others arrive layer by layer while
                backward, then each rank its rows    the first forward of a step runs
        2       each rank its rows after each        likewise
                layer of each backward
        3       likewise                             there from a layer's first forward to its last backward; or, with
                                                     `frees_early`, for each forward and each backward anew

    The sequence of collectives is the same on every replica, whichever layers it uses: see :class:`Prefetcher`.

    From *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models* (Rajbhandari et al., 2020,
    https://arxiv.org/abs/1910.02054).

    Args:
        module: The user's module, with shards in the place of parameters.
        layers: Of each stage of this rank the layers, in order, by stage; parameters that lie in several of them, or in
            none, are made whole together when a step begins.
        group: The replicas.
        stage: 1, 2 or 3.
        frees_early: Whether wholes go after each forward and each backward of a layer.

    Attributes:
        twins: The parameters that are divided, by the identity of the share.
        gradients: Sends theirs.
        watch: Called when much is whole.
    """

    def __init__(
        self,
        module: nn.Module,
        layers: Mapping[int, Sequence[nn.Module]],
        group: ProcessGroup,
        *,
        stage: int,
        frees_early: bool,
    ) -> None:
        self._stage = stage
        self._frees_early = self._frees_now = frees_early and stage == 3
        self._is_open = False
        self.watch: Callable[[None], None] | None = None
        self._opened_by: nn.Module | None = None
        self._handles: list[RemovableHandle] = []
        slots = slots_of(module)
        keeps = stage < 3
        self.twins = {
            id(each): ShardedParameter(each, slots[id(each)], group.rank(), aliased=keeps)
            for each in module.parameters()
            if is_divided(each)
        }
        self._units: list[ParameterGroup] = []
        self._units_of_stage: dict[int, list[ParameterGroup]] = {}
        for index, members in sorted(layers.items()):
            for layer, keys in zip(members, own_parameters(members, layers, slots), strict=True):
                own = [self.twins[key] for key in keys if key in self.twins]
                if own:
                    unit = ParameterGroup(own, group, keeps=keeps)
                    units = self._units_of_stage.setdefault(index, [])
                    self._watch(layer, unit, index, len(units), len(self._units))
                    units.append(unit)
                    self._units.append(unit)
        inside = {id(twin) for unit in self._units for twin in unit.twins}
        self._outside = ParameterGroup([t for t in self.twins.values() if id(t) not in inside], group, keeps=keeps)
        self.gradients = ZeroGradients(self._units_of_stage, self._outside, stage=stage, frees_early=self._frees_early)
        self._walk = Prefetcher(self._units, keeps=True)
        self._walks = {
            index: Prefetcher(units, keeps=False, arrive=partial(self.gradients.arrive, index))
            for index, units in self._units_of_stage.items()
        }
        self._settle_before_calls()
        self._handles += [
            module.register_forward_pre_hook(self._open_for, prepend=True),
            module.register_forward_hook(self._close_for, always_call=True),
        ]

    @property
    def scatters_each_backward(self) -> bool:
        """Whether gradients travel after each backward, and not only after the last one of a step."""
        return self._stage > 1

    @property
    def needs_equal_microbatches(self) -> bool:
        """Whether replicas have to run equally many micro-batches."""
        return self._stage > 1

    @property
    def travelling(self) -> list[Tensor]:
        """Parameters that are under way."""
        return [tensor for unit in self._all for tensor in unit.travelling]

    # -- steps ---------------------------------------------------------------------------------------------------------

    def open(self, *, unchanged: bool = False, frees_early: bool | None = None) -> None:
        """A step begins: layers find wholes.

        Args:
            unchanged: Whether parameters are the same as in the step before.
            frees_early: Whether wholes go after each use in this step, if not as in general: replicas have to run
                equally many micro-batches then.
        """
        if self._is_open:
            return
        self._is_open = True
        self._frees_now = self._frees_early if frees_early is None else self._frees_early and frees_early
        for unit in self._all:
            if not unchanged:
                unit.free()
            if unit.keeps or unit.is_whole:
                unit.put_whole()
        self._outside.make_whole()
        for walk in self._walks.values():
            walk.is_orderly = True
        if not self._frees_now:
            self._walk.begin()

    def refresh(self) -> None:
        """Parameters have changed in the middle of a step."""
        if self._is_open:
            self.close()
            self.open()

    def follow(self, optimizers: Iterable[Optimizer]) -> None:
        """Whoever steps one of these in the middle of a step finds new values in what follows."""
        for optimizer in optimizers:
            self._handles.append(optimizer.register_step_post_hook(lambda *_: self.refresh()))

    def close(self) -> None:
        """A step ends: everybody finds shards."""
        if not self._is_open:
            return
        self._is_open = False
        for walk in (self._walk, *self._walks.values()):
            walk.finish()
        for unit in self._all:
            unit.close()
            unit.put_shards()

    def abandon(self) -> None:
        """End a step in which something failed: nothing is waited for."""
        self._is_open = False
        for walk in (self._walk, *self._walks.values()):
            walk.forget()
        for unit in self._all:
            unit.abandon()
            unit.put_shards()

    @property
    def _all(self) -> tuple[ParameterGroup, ...]:
        return (self._outside, *self._units)

    def forward_begins(self, stage: int) -> None:
        """The layers of a stage are about to run, for one micro-batch."""
        if self._frees_now and stage in self._walks:
            self._walks[stage].begin()

    def backward_begins(self, stage: int) -> None:
        """A backward of a stage begins."""
        if not self._frees_now:
            self._walk.finish()  # gradients travel from now on
        elif stage in self._walks:
            self._walks[stage].begin(backwards=True)

    def backward_ends(self, stage: int, *, is_last: bool) -> None:
        """A backward of a stage is over; after the last one of a step its layers are not needed any more."""
        if self._frees_now and stage in self._walks:
            self._walks[stage].finish()
        if is_last or self._frees_now:
            for unit in self._units_of_stage.get(stage, ()):
                unit.close()

    # -- layers --------------------------------------------------------------------------------------------------------

    def _watch(self, layer: nn.Module, unit: ParameterGroup, stage: int, place: int, position: int) -> None:
        before = partial(self._before, unit, stage, place, position)
        after = partial(self._after, unit, stage, place)
        self._handles += [
            layer.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
            layer.register_forward_hook(after, always_call=True),
        ]

    def _settle_before_calls(self) -> None:
        """Parts of layers may be called by themselves, and parts outside of them freeze and thaw in a step."""
        reach: dict[int, partial[None]] = {}
        position = 0
        for stage, units in self._units_of_stage.items():
            for place, unit in enumerate(units):
                reach |= dict.fromkeys(map(id, unit.twins), partial(self._reach, unit, stage, place, position))
                position += 1
        owned: dict[nn.Module, list[ShardedParameter]] = {}
        for twin in self.twins.values():
            for part, _ in twin.slots:
                owned.setdefault(part, []).append(twin)
        for part, twins in owned.items():
            settle = partial(self._settle, twins, reach.get(id(twins[0])))
            self._handles.append(part.register_forward_pre_hook(settle))

    def _settle(self, twins: Sequence[ShardedParameter], reach: Callable[[], None] | None, *_: Any) -> None:
        for twin in twins:
            twin.freeze_or_thaw()
        if reach is not None and self._is_open:
            reach()

    def _reach(self, unit: ParameterGroup, stage: int, place: int, position: int) -> None:
        """Make a layer whole."""
        if not unit.is_whole:
            self._walks[stage].to(place) if self._frees_now else self._walk.to(position)

    def _before(
        self, unit: ParameterGroup, stage: int, place: int, position: int, layer: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        if not self._is_open:
            self._open_for(layer)
        for twin in unit.twins:
            twin.freeze_or_thaw()
        if unit.in_backward and self._frees_now:  # what is recomputed belongs to it
            return None
        self._reach(unit, stage, place, position)
        if self.watch is not None:
            self.watch(None)
        return post_backward_hook((args, kwargs), unit.close) if self._frees_now else None

    def _after(self, unit: ParameterGroup, stage: int, place: int, layer: nn.Module, args: Any, output: Any) -> None:
        if self._frees_now and not unit.in_backward:

            def backward_begins(_: Tensor) -> None:
                if not unit.in_backward:
                    self._walks[stage].to(place)
                    unit.in_backward = True

            for leaf in flatten(output)[0]:
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(backward_begins)  # type: ignore[no-untyped-call]
            unit.close()
        self._close_for(layer)

    def _open_for(self, layer: nn.Module, *_: Any) -> None:
        """Outside of steps a layer, or the module, can be called too."""
        for twin in self._outside.twins:
            twin.freeze_or_thaw()
        if not self._is_open:
            self.open()
            self._opened_by = layer

    def _close_for(self, layer: nn.Module, *_: Any) -> None:
        if self._opened_by is layer:
            self._opened_by = None
            self.close()

    # -- the end -------------------------------------------------------------------------------------------------------

    def remove(self) -> None:
        """Leave the module with shards that lie in memory of their own, and without hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for twin in self.twins.values():
            twin.put_shard()
            twin.detach()
        self.twins.clear()
        self._units.clear()
        self._units_of_stage.clear()
        self._walks.clear()
        self._outside.twins.clear()
