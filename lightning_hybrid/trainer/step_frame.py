"""The steps that are followed, on one rank: the cut of the user's step where its code runs on several stages."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_hybrid.data_parallel.broadcast import broadcast_tensors
from lightning_hybrid.distributed.failure import is_transport
from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.distributed.random import RandomStreams
from lightning_hybrid.pipeline_parallel.body import Body, BodyCut
from lightning_hybrid.pipeline_parallel.chain import (
    ChainCalls,
    ChainUse,
    CodeBefore,
    NotFollowedError,
    stays_text,
)
from lightning_hybrid.pipeline_parallel.frame.frame import FrameCut
from lightning_hybrid.pipeline_parallel.frame.plan import FramePlan, stages_by_parameter
from lightning_hybrid.pipeline_parallel.frame.routes import Travel, travel_text
from lightning_hybrid.pipeline_parallel.stage_map import StageMap
from lightning_hybrid.tensor_parallel.layers import ParallelLayer
from lightning_hybrid.trainer.layer_exchange import DifferentStepsError, LayerExchange

# So many steps are followed around a chain, of a sanity check and the first batch.
_MOST_USES = 16
_OTHERWISE, _WRITES = "does not call {} exactly once as a whole", "changes parameters outside {}"
_CALLED_ONCE = (
    "but zero_stage=3 frees its full parameters after each call. Set"
    " HybridStrategy(tuning=Tuning(reshard_after_forward=False))."
)


def make_frame(module: nn.Module, body: Body, stage_map: StageMap, device: torch.device, **arguments: Any) -> FrameCut:
    """The cut of steps at the layers of a body that any code may call.

    Args:
        module: The user's module.
        body: What is divided into stages.
        stage_map: Which stage holds what.
        device: Where this rank computes.
        arguments: Others of :class:`FrameCut`.
    """
    of_units = {part for unit in body.layers for part in unit.modules()}
    around = [(name, part) for name, part in module.named_modules() if part not in of_units]
    return FrameCut(
        module,
        list(zip(body.names, body.layers, strict=True)),
        stage_map.stages,
        stage_map.placement,
        device,
        holders=find_holders(module, stage_map),
        leaf_modules=[each for each in around if isinstance(each[1], ParallelLayer)],
        **arguments,
    )


def find_holders(module: nn.Module, stage_map: StageMap) -> Mapping[str, Collection[int]]:
    """Return the stages of parameters outside of the layers that not all stages have, by name.

    Args:
        module: The user's module.
        stage_map: Which stage holds what; around a chain, without anything else known, the first and the last one.
    """
    if not stage_map.is_chain:
        return stage_map.outside
    named = list(module.named_parameters(remove_duplicate=False))
    inside = {id(parameter) for name, parameter in named if not stage_map.is_outside(name)}
    stages = {name: stage_map.stages_of(name) for name, parameter in named if id(parameter) not in inside}
    return {name: held for name, held in stages.items() if len(held) < len(stage_map.stages)}


def make_chain_use(
    module: nn.Module, body: Body, stage_map: StageMap, device: torch.device, **arguments: Any
) -> ChainUse:
    """What finds out where parameters around a chain are used; arguments as for :func:`make_frame`."""
    assert body.chain is not None
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    holders = {name: stage_map.stages_of(name) for name in names if stage_map.is_outside(name)}
    stages = len(stage_map.stages)
    return ChainUse(module, body.name, body.chain, stages, device, holders=holders, remembers=False, **arguments)


class StepFrame:
    """What the ranks that run the user's step do of it.

    ::

                      stage 0                    between        last stage
        units         its units, code for them   likewise       likewise, and all the rest
        a chain       until the chain            only layers    around the chain
        one stage     all of it

    Args:
        module: The user's module, with placeholders for what lives elsewhere.
        body: What is divided into stages; ``None`` if there is one stage.
        stage_map: Which stage holds what.
        mesh: The ranks.
        device: Where this rank computes.
        streams: The random streams.
        remembers: Whether what is found out about a step holds for later ones with equal shapes.
        frees_early: Whether a layer's parameters are let go of after each call.
        opens: Whether the layers of a chain may serve as units: where the step writes parameters, and, if the user has
            not named it, where the step calls it otherwise than once, as a whole.
        around_discovery: Around a step that is followed without values.

    Attributes:
        body_cut: The cut of a chain; ``None`` without one.
        cut: The cut of steps that are followed, around units; ``None`` without these.
        places: Whether parameters outside of the body come to live where the first batch of training uses them.
        remembers: Whether what is found out about a step holds for later ones with equal shapes.
        microbatch: The last coordinate of the step that is followed; ``None`` outside of that.
    """

    def __init__(
        self,
        module: nn.Module,
        body: Body | None,
        stage_map: StageMap,
        mesh: Mesh,
        device: torch.device,
        streams: RandomStreams,
        *,
        remembers: bool,
        frees_early: bool,
        opens: bool,
        around_discovery: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._module, self._mesh, self._device, self._streams = module, mesh, device, streams
        self.remembers = remembers
        self.body_cut = BodyCut(body.name, body.chain, body.lists) if body and body.chain is not None else None
        self.places = stage_map.is_followed
        self.cut: FrameCut | None = None
        self.microbatch: int | None = None
        self._use: ChainUse | None = None
        self._uses: dict[Hashable, tuple[frozenset[str], ...]] = {}
        self._can_use = True
        self._body, self._stage_map, self._settled = body, stage_map, set[str]()
        self._fits_units, self._opens = opens, opens and body is not None and body.is_found
        self._around_discovery, self._frees_early = around_discovery, frees_early
        self._find_code_before(stage_map)
        last = stage_map.placement.ranks[-1]
        if self.places and self.body_cut is None:
            self.cut = self._make_cut()
        elif self.places and not stage_map.outside and mesh.pipeline_rank in (0, last):
            assert body is not None
            self._use = make_chain_use(module, body, stage_map, device, around_discovery=around_discovery)
        self._warned: set[Hashable] = set()
        self._exchange, self._in_lockstep = LayerExchange(mesh, device, type(module).__name__), set[str]()

    def _make_cut(self) -> FrameCut:
        assert self._body is not None
        return make_frame(
            self._module,
            self._body,
            self._stage_map,
            self._device,
            remembers=self.remembers,
            around_discovery=self._around_discovery,
            compare=self._compare_calls,
            once=_CALLED_ONCE if self._frees_early else None,
            agrees=self._agrees,
            metrics=[part for part in self._module.modules() if isinstance(part, Metric)],
        )

    def is_open(self, step: str) -> bool:
        """Return whether it is not yet known how a step calls the chain.

        Args:
            step: The name of the step.
        """
        is_asked = self._opens or (self._fits_units and step == "training_step")
        return is_asked and self.body_cut is not None and step not in self._settled

    def settle(self, step: Callable[..., Any], arguments: Sequence[Any], *coordinates: int) -> bool:
        """Follow a step once; cut it at the layers of the chain, on every rank, if it does not call that as a whole.

        ::

            x = self.body(x)                              the chain stays one
            two calls of it; for layer in self.body       its layers are units from now on, where they are
            parameters are written (a teacher)            likewise, also of a chain that the user has named

        Parameters around the chain stay where they are, too; buffers come to all stages. It is not undone: other steps
        may call the chain as they like then. Replicas may decide differently; the ranks of a model group decide
        together.

        Args:
            step: The user's step.
            arguments: Its arguments; the first one is the batch.
            coordinates: Of the random numbers that it draws.

        Returns:
            Whether the step may call the layers otherwise after all, as it could not be followed to its end.
        """
        self._settled.add(step.__name__)
        body = self._body
        assert body is not None
        assert body.chain is not None
        found = torch.zeros(3, dtype=torch.int)  # calls it otherwise, writes parameters, is not followed to its end
        if self._mesh.pipeline_rank == 0:  # ranks between the ends lack what is around the chain
            self._streams.seed_user(*coordinates)
            calls = ChainCalls(self._module, body.names, body.chain, self._device, self._around_discovery)
            found += torch.tensor(calls.look(step, arguments, self._streams.of_calls(*coordinates)))
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._mesh.control_group)
        is_other, writes, stops = found.tolist()
        if writes or (is_other and self._opens):
            self.open_chain(step.__name__, _OTHERWISE if is_other else _WRITES)
        return bool(stops) and self._opens

    @property
    def can_lockstep(self) -> bool:
        """Return whether a step may run in lockstep."""
        return not torch.is_grad_enabled() and self._mesh.sizes.context == 1

    @property
    def layers(self) -> tuple[nn.Module, ...]:
        """Return the layers of all stages."""
        return () if self._body is None else self._body.layers

    def open_chain(self, step: str, why: str = _OTHERWISE) -> None:
        """Let any code call the layers of the chain from now on; every rank of the model group does so.

        Args:
            step: The name of the step that does.
            why: What it does, with a place for the name of the chain.
        """
        assert self._body is not None
        self._share_buffers()
        self.body_cut, self._use, self.cut = None, None, self._make_cut()
        rank_zero_info(
            f"`{step}` {why.format(repr(self._body.name))}. From now on, the layers of {self._body.name!r} can be"
            f" called one by one, as with HybridStrategy(body=[{self._body.name!r}])."
        )

    def _share_buffers(self) -> None:
        """Give the buffers around a chain to the ranks between its ends, which run the code around the layers now."""
        mesh = self._mesh
        source = mesh.model_group_rank(0, 0)
        for name, buffer in list(self._module.named_buffers()):
            held = self._stage_map.ranks_of(name)
            if not self._stage_map.is_outside(name) or len(held) == mesh.sizes.pipeline:
                continue
            is_source = mesh.model_group.rank() == source
            # What is made like a placeholder is one.
            value = buffer if is_source else torch.empty(buffer.shape, dtype=buffer.dtype, device=self._device)
            broadcast_tensors([value], mesh.model_group, source)
            if mesh.pipeline_rank not in held:
                owner, _, key = name.rpartition(".")
                self._module.get_submodule(owner)._buffers[key] = value

    def __call__(self, *, repeats: bool) -> AbstractContextManager[None]:
        """While this is entered, calls of the body come here.

        Args:
            repeats: Whether the user's step runs several times, for a microbatch each.
        """
        if self.cut is not None:
            return self.cut(repeats=repeats)
        return nullcontext() if self.body_cut is None else self.body_cut()

    def unfollowed(self) -> AbstractContextManager[None]:
        """Inside, nothing that runs is part of the user's step."""
        if self.body_cut is not None and self.body_cut.code_before is not None:
            return self.body_cut.code_before.paused()
        followed = self.cut or self._use
        return nullcontext() if followed is None else followed.unfollowed()

    @property
    def is_followed(self) -> bool:
        """Whether this rank follows steps now: around a chain only until parameters have a place."""
        return self.cut is not None or self._use is not None

    def place_parameters(self, stage_map: StageMap) -> None:
        """Parameters outside of the layers have come to live where they are used.

        Args:
            stage_map: Which stage holds what.
        """
        self._stage_map = stage_map
        if self.cut is not None:
            self.cut.place_parameters(find_holders(self._module, stage_map))
            if stage_map.is_chain:  # what lives elsewhere has been replaced by placeholders again
                self._share_buffers()
        self._find_code_before(stage_map)

    def _find_code_before(self, stage_map: StageMap) -> None:
        """Whether this rank, if it runs the step, lacks parameters around a chain."""
        stage = 0 if self._mesh.pipeline_rank == 0 else len(stage_map.stages) - 1
        if self.body_cut is not None:
            lacks = any(stage not in stages for stages in stage_map.outside.values())
            self.body_cut.code_before = CodeBefore(self._device) if lacks else None

    def note_use(self, step: Callable[..., Any], arguments: Sequence[Any], *coordinates: int, key: Hashable) -> None:
        """Before parameters around a chain have a place: find out, without values, where a step uses them.

        Args:
            step: The user's step.
            arguments: Its arguments; the first one is the batch.
            coordinates: Of the random numbers that it draws.
            key: The version of the module, and the signature of the arguments: what has been seen is passed over.
        """
        key = step.__name__, key
        if self._use is None or key in self._uses or len(self._uses) == _MOST_USES:
            return
        self._streams.seed_user(*coordinates)
        try:
            self._uses[key] = self._use.find(step, arguments, self._streams.of_calls(*coordinates))
        except NotFollowedError as error:
            self._use, self._can_use = None, False
            rank_zero_info(stays_text(step.__name__, error))

    def take_uses(self, plans: Sequence[FramePlan]) -> dict[str, set[int]] | None:
        """The stages that use each parameter outside of the body, as far as this rank knows; nothing is noted any more.

        Args:
            plans: What stages do in steps that are followed.

        Returns:
            The stages by name; ``None`` if some step cannot be followed.
        """
        self._use = None
        if not self._can_use:
            return None
        known = [*plans, *([] if self.cut is None else self.cut.plans)]  # an evaluation may have come before
        return stages_by_parameter([*self._uses.values(), *(plan.parameters for plan in known)])

    def _compare_calls(self, calls: list[str]) -> None:
        """A step is followed on every rank of the model group, and must be the same there.

        Raises:
            WrongUseError: If it is not.
        """
        group = self._mesh.control_group
        digests: list[Any] = [None] * group.size()
        dist.all_gather_object(digests, hashlib.sha256("\n".join(calls).encode()).hexdigest(), group=group)
        if len(set(digests)) == 1:
            return
        found: list[Any] = [None] * group.size()
        dist.all_gather_object(found, calls, group=group)
        rows = list(zip_longest(*found, fillvalue="the end"))
        number = next(number for number, row in enumerate(rows) if len(set(row)) > 1)
        ranks = dist.get_process_group_ranks(group)
        names = ", ".join(f"{name} on rank {rank}" for rank, name in zip(ranks, rows[number], strict=True))
        raise DifferentStepsError(
            f"The step of {type(self._module).__name__} is not the same on every rank: call {number} is"
            f" {names}. Every stage runs this code, so the code must not depend on the rank. [LH433]"
        )

    def _agrees(self, number: int) -> bool:
        """Whether a number is the same on every rank of the model group."""
        extremes = torch.tensor([number, -number])
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self._mesh.control_group)
        return int(extremes.sum()) == 0

    def find_plan(
        self,
        step: Callable[..., Any],
        arguments: Sequence[Any],
        *coordinates: int,
        key: Hashable,
        choice: int | None = None,
    ) -> FramePlan | None:
        """What the stages do in a step of the user's.

        Args:
            step: The user's step.
            arguments: Its arguments; the first one is the batch.
            coordinates: Of the random numbers that it draws.
            key: The version of the module, as :meth:`version` gives it, and the signature of the arguments.
            choice: As of :meth:`FrameCut.find_plan`.

        Returns:
            The plan; ``None`` where steps are not followed.

        Raises:
            WrongUseError: If it cannot be divided.
        """
        if self.cut is None:
            return None
        seeds = self._streams.of_calls(*coordinates), partial(self._streams.seed_user, *coordinates)
        self.microbatch = coordinates[-1]
        plan = self.cut.find_plan((step.__name__, key), step, arguments, *seeds, choice=choice)
        self.microbatch = None
        return plan

    def find_plan_if_any(
        self, step: Callable[..., Any], arguments: Sequence[Any], *coordinates: int, key: Hashable
    ) -> FramePlan | None:
        """Return what the stages do in a step; ``None`` if it has to run in lockstep, on every rank of the model group.

        Args:
            step: The user's step.
            arguments: Its arguments; the first one is the batch.
            coordinates: Of the random numbers that it draws.
            key: As of :meth:`find_plan`.

        Raises:
            WrongUseError: If the step cannot be divided, and may not run in lockstep; if ranks do different things.
        """
        try:
            return self.find_plan(step, arguments, *coordinates, key=key)
        except Exception as error:  # of the user's code too, which without values may do anything
            if isinstance(error, DifferentStepsError) or is_transport(error) or not self.can_lockstep:
                raise
            self.microbatch = None
            self._compare_calls([f"the end of the traceable part of `{step.__name__}`"])
            return None

    def run_in_lockstep(
        self,
        step: Callable[..., Any],
        arguments: Sequence[Any],
        *coordinates: int,
        plain: Callable[[Any], Any],
    ) -> Any:
        """Run a step without gradients in lockstep, and return what it returns.

        Args:
            step: The user's step.
            arguments: Its arguments.
            coordinates: Of the random numbers that it draws.
            plain: Makes ordinary tensors of what tensor-parallel layers return.

        Raises:
            DifferentStepsError: If the ranks of the model group do different things.
        """
        assert self.cut is not None
        if step.__name__ not in self._in_lockstep:
            self._in_lockstep.add(step.__name__)
            rank_zero_info(
                f"Results of layers decide which layers `{step.__name__}` calls, so the stages run it in lockstep: only"
                " one stage computes at a time."
            )
        return self.cut.run_in_lockstep(
            step,
            arguments,
            self._mesh.pipeline_rank,
            self._exchange,
            random=lambda number: self._streams.layers(0, *coordinates, number),
            plain=plain,
            is_tensor_parallel=self._mesh.sizes.tensor > 1,
        )

    def fetch_parameters(self, step: str, plans: Sequence[FramePlan], *, warns: bool = True) -> dict[str, Tensor]:
        """Values of parameters for stages that come before those that have them; only a step without gradients may.

        Of whatever travels, in this way or with what stages send to each other, the user is told once.

        Args:
            step: The name of the step.
            plans: What the stages do, for each microbatch; nothing where steps are not followed.
            warns: If False, the user is told nothing: the plans are not those of a step of training.

        Returns:
            The values by name, on every rank of the model group.
        """
        mesh = self._mesh
        if warns:
            self._warn_of_travels(step, [travel for plan in plans for travel in plan.travels])
        fetched: dict[str, Tensor] = {}
        for name, stage in {name: stage for plan in plans for name, stage in plan.fetched.items()}.items():
            rank = self._stage_map.placement.ranks[stage]
            parameter, source = self._module.get_parameter(name), mesh.model_group_rank(rank, 0)
            is_source = mesh.model_group.rank() == source
            fetched[name] = parameter.detach() if is_source else torch.empty_like(parameter, device=self._device)
            broadcast_tensors([fetched[name]], mesh.model_group, source)
        return fetched

    def _warn_of_travels(self, step: str, travels: Iterable[Travel]) -> None:
        new = [travel for travel in travels if (step, travel.names, travel.stages) not in self._warned]
        if not new:
            return
        assert self.cut is not None
        num_bytes = 0
        for travel in new:
            trained = any(self._module.get_parameter(name).requires_grad for name in travel.names)
            num_bytes += travel.num_bytes * (2 if trained and torch.is_grad_enabled() else 1)
        rank_zero_warn(travel_text(step, new, self.cut.all_holders, num_bytes))
        self._warned |= {(step, travel.names, travel.stages) for travel in new}

    def run_frame(
        self,
        plan: FramePlan,
        stage: int,
        step: Callable[..., Any],
        arguments: Sequence[Any],
        inputs: Any,
        *coordinates: int,
        fetched: Mapping[str, Tensor],
        skipped: Collection[int] = (),
    ) -> Any:
        """Run a stage's part of a step of the user's.

        Args:
            plan: What the stages do.
            stage: The stage.
            step: The user's step.
            arguments: Its arguments.
            inputs: What the stage before made.
            coordinates: Of the random numbers that it draws.
            fetched: What :meth:`fetch_parameters` has given.
            skipped: Calls that write parameters, and that another microbatch makes.
        """
        assert self.cut is not None
        streams = self._streams
        return self.cut.run(
            plan,
            stage,
            step,
            arguments,
            inputs,
            seed=streams.of_calls(*coordinates),
            random=lambda number: streams.layers(0, *coordinates, number),  # the same numbers under every layout
            fetched=fetched,
            skipped=skipped,
        )
