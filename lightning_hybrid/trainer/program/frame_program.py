"""The step program for traced steps: user code runs on every stage, around the layers of that stage.

`make_program` makes this program if the body is not a chain (an `nn.Sequential` that the step calls once, as a whole);
a :class:`ChainProgram` also replaces itself by it. `TrainingStep`, `EvaluationStep` and `StepContext` call it for each
batch.

To *trace* a step is to run its code with fake tensors as parameters and as results of layers, and to record its calls.
The *plan* of a step is made from its trace: the calls that each stage makes, and the tensors that it sends. Later steps
with the same key use the plan without a trace. :class:`~.frame.frame.FrameCut` (the *cut*) does this for one rank.
This module adds the operations that need other ranks or ZeRO: comparing traces, fetching parameters, sending buffers,
and *lockstep*, in which all stages execute an evaluation step together, call by call.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_hybrid.data_parallel.broadcast import broadcast_tensors
from lightning_hybrid.data_parallel.grad_sync import GradientSync
from lightning_hybrid.distributed.agreement import all_gather_values
from lightning_hybrid.distributed.failure import WrongUseError, is_transport
from lightning_hybrid.error_codes.entry import without_code
from lightning_hybrid.pipeline_parallel.body import Body
from lightning_hybrid.pipeline_parallel.frame.frame import FrameCut
from lightning_hybrid.pipeline_parallel.frame.path_change import PathChangedError
from lightning_hybrid.pipeline_parallel.frame.plan import FramePlan, shard_text, skipped_writes, stages_by_parameter
from lightning_hybrid.pipeline_parallel.frame.routes import Travel, travel_text
from lightning_hybrid.pipeline_parallel.frame.unit_attributes import GENERATION, KeptTensorError
from lightning_hybrid.pipeline_parallel.schedules import build_forward
from lightning_hybrid.pipeline_parallel.stage_map import StageMap, locate
from lightning_hybrid.tensor_parallel.layers import ParallelLayer
from lightning_hybrid.trainer.layer_exchange import DifferentStepsError, LayerExchange
from lightning_hybrid.trainer.program.program import PlannedStep, StepCall, StepProgram, Trial
from lightning_hybrid.trainer.program.step_context import StepContext

_CALLED_ONCE = (
    "but zero_stage=3 frees its full parameters after each call. Set"
    " HybridStrategy(tuning=Tuning(reshard_after_forward=False))."
)


class FrameProgram(StepProgram):
    """A program in which every stage runs the user's step. Layers of other stages return fake tensors.

    In lockstep, they return the results that their stages send. The first batch of each key is traced, and each batch
    if ``context.remembers`` is False.

    Args:
        context: The state that steps share.
        body: The layers that are divided into stages.
        grad_sync: The gradient synchronization; its ``zero`` unshards parameters and records writes to them.
        frees_early: True if ZeRO stage 3 frees the full parameters of a layer after each call, so that a step may call
            a layer only once.
        places_parameters: True if the first training batch decides on which stages parameters outside the layers are.
        uses: For each step that a :class:`ChainProgram` has traced before, the names of the parameters that each stage
            uses; ``None`` if a step could not be traced.
    """

    def __init__(
        self,
        context: StepContext,
        body: Body,
        grad_sync: GradientSync,
        *,
        frees_early: bool,
        places_parameters: bool,
        uses: Sequence[Sequence[frozenset[str]]] | None = (),
    ) -> None:
        self._context = context
        self.places_parameters = places_parameters
        self._module, self._mesh, self._streams = context.module, context.mesh, context.streams
        self._map, self._grad_sync, self._uses = context.parameter_map, grad_sync, uses
        self.cut = self._cut = make_frame(
            context.module,
            body,
            self._map.stage_map,
            context.device,
            remembers=context.remembers,
            around_discovery=context.around_discovery,
            compare=self._compare_calls,
            once=_CALLED_ONCE if frees_early else None,
            agrees=self._agrees,
            metrics=[part for part in context.module.modules() if isinstance(part, Metric)],
        )
        self._warned: set[Hashable] = set()
        self._exchange = LayerExchange(context.mesh, context.device, type(context.module).__name__)
        self._in_lockstep: dict[str, set[Hashable]] = {}  # the keys of steps that run in lockstep, by name

    def entered(self, *, repeats: bool) -> AbstractContextManager[None]:
        """Redirect calls of layers to the cut; see :meth:`StepProgram.entered`."""
        return self._cut(repeats=repeats)

    def unfollowed(self) -> AbstractContextManager[None]:
        """Return a context for code that is not part of the user's step; see :meth:`StepProgram.unfollowed`."""
        return self._cut.unfollowed()

    # -- analysis before a step runs ---------------------------------------------------------------------------------

    def find_uses(
        self, calls: list[StepCall], precision: Callable[[], AbstractContextManager[None]]
    ) -> dict[str, set[int]] | None:
        """Return the stages that use each parameter outside the layers; see :meth:`StepProgram.find_uses`."""
        plans, self.places_parameters = self.plan(calls, precision), False
        if self._uses is None:
            return None
        known = [*plans, *self._cut.plans]  # an evaluation may have run before
        return stages_by_parameter([*self._uses, *(plan.parameters for plan in known)])

    def parameters_moved(self) -> None:
        """Use the new places of parameters; see :meth:`StepProgram.parameters_moved`."""
        self._cut.place_parameters(find_holders(self._module, self._map.stage_map))
        self.share_buffers()  # moving parameters has replaced the buffers by placeholders again

    def share_buffers(self) -> None:
        """Send buffers that only some stages have to all stages, because in this program every stage runs the step.

        This is a collective operation of the model group. The values of the first pipeline rank replace placeholders;
        other stages that have a buffer keep their values.
        """
        mesh = self._mesh
        source = mesh.model_group_rank(0, 0)
        for name, buffer in list(self._module.named_buffers()):
            held = self._map.stage_map.ranks_of(name)
            if not self._map.stage_map.is_outside(name) or len(held) == mesh.sizes.pipeline:
                continue
            is_source = mesh.model_group.rank() == source
            # `empty_like` of a placeholder would return a placeholder.
            value = buffer if is_source else torch.empty(buffer.shape, dtype=buffer.dtype, device=self._context.device)
            broadcast_tensors([value], mesh.model_group, source)
            if mesh.pipeline_rank not in held:
                owner, _, key = name.rpartition(".")
                self._module.get_submodule(owner)._buffers[key] = value

    def plan(
        self,
        calls: list[StepCall],
        precision: Callable[[], AbstractContextManager[None]],
        choose: Callable[[int], int | None] | None = None,
    ) -> list[FramePlan]:
        """Return the plan of each step, and trace steps without a plan; see :meth:`StepProgram.plan`."""
        plans: list[FramePlan] = []
        with precision():
            for number, call in enumerate(calls):
                # Tracing needs the batch on the device, and its forward follows soon.
                call = calls[number] = call.moved()
                plan = self._find_plan(call, None if choose is None else choose(number))
                if plan.computed_layers and not self._grad_sync.zero.keeps_layers:
                    raise WrongUseError(shard_text(plan.computed_layers))
                plans.append(plan)
        return plans

    def _find_plan(self, call: StepCall, choice: int | None = None) -> FramePlan:
        seeds = self._streams.of_calls(*call.coordinates), partial(self._streams.seed_user, *call.coordinates)
        self.microbatch = call.coordinates[-1]
        plan = self._cut.find_plan((call.name, call.key), call.step, call.arguments, *seeds, choice=choice)
        self.microbatch = None
        return plan

    def _compare_calls(self, calls: list[str]) -> None:
        """Check that a traced step makes the same calls on every rank of the model group; a collective of these ranks.

        Args:
            calls: The names of the calls on this rank.

        Raises:
            DifferentStepsError: If the calls differ.
        """
        group = self._mesh.control_group
        digest = hashlib.sha256("\n".join(calls).encode()).hexdigest()
        if len(set(all_gather_values(digest, group))) == 1:
            return
        rows = list(zip_longest(*all_gather_values(calls, group), fillvalue="the end"))
        number = next(number for number, row in enumerate(rows) if len(set(row)) > 1)
        ranks = dist.get_process_group_ranks(group)
        names = ", ".join(f"{name} on rank {rank}" for rank, name in zip(ranks, rows[number], strict=True))
        raise DifferentStepsError(
            f"The step of {type(self._module).__name__} is not the same on every rank: call {number} is {names}. Every"
            " stage runs the code of the step. Make sure that this code makes the same calls on every rank. [LH433]"
        )

    def _agrees(self, number: int) -> bool:
        """Return True if a number is the same on every rank of the model group; a collective of these ranks."""
        extremes = torch.tensor([number, -number])
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self._mesh.control_group)
        return int(extremes.sum()) == 0

    def planned_steps(
        self, step: str, plans: Sequence[FramePlan], *, is_rehearsal: bool = False
    ) -> Sequence[PlannedStep]:
        """Fetch parameters, and return the planned steps; see :meth:`StepProgram.planned_steps`."""
        fetched = self._fetch_parameters(step, plans, warns=not is_rehearsal)
        skipped: Sequence[Collection[int]] = [()] * len(plans) if is_rehearsal else skipped_writes(plans)
        return [PlannedStep(plan, fetched, of_plan) for plan, of_plan in zip(plans, skipped, strict=True)]

    def _fetch_parameters(self, step: str, plans: Sequence[FramePlan], *, warns: bool) -> dict[str, Tensor]:
        """Broadcast the values of parameters that only later stages hold than the stages that use them.

        Plans contain such parameters only if no gradient is needed. Other parameters are sent with the activations.

        Args:
            step: The name of the step.
            plans: The plan of each microbatch.
            warns: True to warn once about each parameter that is sent between stages in each step.

        Returns:
            The values by name, on every rank of the model group.
        """
        mesh = self._mesh
        if warns:
            self._warn_of_travels(step, [travel for plan in plans for travel in plan.travels])
        fetched: dict[str, Tensor] = {}
        for name, stage in {name: stage for plan in plans for name, stage in plan.fetched.items()}.items():
            rank = self._map.stage_map.placement.ranks[stage]
            parameter, source = self._module.get_parameter(name), mesh.model_group_rank(rank, 0)
            is_source = mesh.model_group.rank() == source
            fetched[name] = (
                parameter.detach() if is_source else torch.empty_like(parameter, device=self._context.device)
            )
            broadcast_tensors([fetched[name]], mesh.model_group, source)
        return fetched

    def _warn_of_travels(self, step: str, travels: Iterable[Travel]) -> None:
        new = [travel for travel in travels if (step, travel.names, travel.stages) not in self._warned]
        if not new:
            return
        num_bytes = 0
        for travel in new:
            trained = any(self._module.get_parameter(name).requires_grad for name in travel.names)
            num_bytes += travel.num_bytes * (2 if trained and torch.is_grad_enabled() else 1)
        rank_zero_warn(travel_text(step, new, self._cut.all_holders, num_bytes))
        self._warned |= {(step, travel.names, travel.stages) for travel in new}

    # -- a step ------------------------------------------------------------------------------------------------------

    def forward(self, stage: int, call: StepCall, inputs: Any, planned: PlannedStep | None) -> Callable[[], Any]:
        """Prepare the forward of a stage; see :meth:`StepProgram.forward`.

        If code around the layers uses parameters of layers, this gathers the ZeRO shards of all layers.
        """
        assert planned is not None
        context, plan, streams, coordinates = self._context, planned.plan, self._streams, call.coordinates
        if plan.of_layers:
            self._grad_sync.zero.unshard_layers()
        for name in plan.rewritten:
            self._grad_sync.zero.note_write(self._module.get_parameter(name))
        arguments = context.enter_user_code(call, keep=stage == context.num_stages - 1)
        return partial(
            self._cut.run,
            plan,
            stage,
            call.step,
            arguments,
            context.received(inputs),
            seed=streams.of_calls(*coordinates),
            random=lambda number: streams.layers(0, *coordinates, number),  # equal numbers under every layout
            fetched=planned.fetched,
            skipped=planned.skipped,
        )

    def evaluate(self, call: StepCall, trial: Trial[Any]) -> Any:
        """Run an evaluation step, whose batch is one microbatch; see :meth:`StepProgram.evaluate`.

        A step whose trace fails, or that ran in lockstep before with the same key, runs in lockstep. Parameters that
        the step writes keep their new values, even if replicas shard them.

        Raises:
            PathChangedError: If the step takes another path than its plan.
            WrongUseError: If the step can neither be divided nor run in lockstep.
        """
        context = self._context
        if call.key in self._in_lockstep.get(call.name, ()):
            return self._lockstep(call)
        plan = self._find_plan_if_any(call)
        if plan is None:
            return self.run_in_lockstep(call)
        if plan.graph.needed is None:
            trial.state = None  # the whole path is known
        elif trial.state is not None:
            trial.state.keep_new()
        if plan.of_layers:
            if not self._grad_sync.zero.keeps_layers:
                raise WrongUseError(shard_text(plan.of_layers))
            self._grad_sync.zero.unshard_layers()  # before parameters are fetched
        (planned,) = self.planned_steps(call.name, [plan])

        def compute(stage: int, microbatch: int, inputs: Any) -> Any:
            forward, is_last = self.forward(stage, call, inputs, planned), stage == context.num_stages - 1

            def run() -> Any:
                return context.plain(forward(), to_stage=not is_last)

            return trial.run(run) if is_last else run()

        keys = context.keys(call.key, [plan.number])
        schedule = build_forward(context.placement, 1, posts_early=context.may_post_early(keys))
        try:
            values = context.engine.run(schedule, compute, keys, profile=context.profile)
        except PathChangedError as error:
            if plan.graph.needed is None or self.may_run_again(call):
                raise
            raise WrongUseError(
                "Results of layers cannot decide which layers this step calls next."
                f" {without_code(error)} {GENERATION} [LH426]"
            ) from None
        return values[0] if values else None

    def _find_plan_if_any(self, call: StepCall) -> FramePlan | None:
        """Return the plan of an evaluation step; ``None`` if it has to run in lockstep, on every rank.

        Raises:
            Exception: The error of the trace, if the step cannot run in lockstep.
            DifferentStepsError: If the trace of another rank of the model group has reached another point.
        """
        try:
            return self._find_plan(call)
        except Exception as error:  # includes any error of the user's code, which runs without values here
            # In lockstep, a stage would read its own attributes of layers that it has not run.
            is_final = isinstance(error, (DifferentStepsError, KeptTensorError)) or is_transport(error)
            if is_final or not self.may_run_again(call):
                raise
            self.microbatch = None
            self._compare_calls([f"the end of the traceable part of `{call.name}`"])
            return None

    # -- steps in lockstep -------------------------------------------------------------------------------------------

    def may_run_again(self, call: StepCall) -> bool:
        """Return True if steps may run in lockstep: they have no gradients, and sequences are not sharded."""
        return not torch.is_grad_enabled() and self._mesh.sizes.context == 1

    def run_in_lockstep(self, call: StepCall) -> Any:
        """Run an evaluation step in lockstep; see :meth:`StepProgram.run_in_lockstep`.

        If ``context.remembers`` is False, later steps with the same key are tried without lockstep first.

        Raises:
            DifferentStepsError: If the ranks of the model group make different calls.
        """
        if call.name not in self._in_lockstep:
            self._in_lockstep[call.name] = set()
            rank_zero_info(
                f"The outputs of layers determine which layers `{call.name}` calls, so the stages run it in lockstep:"
                " only one stage computes at a time."
            )
        if self._context.remembers:
            self._in_lockstep[call.name].add(call.key)
        return self._lockstep(call)

    def _lockstep(self, call: StepCall) -> Any:
        context, coordinates = self._context, call.coordinates
        # Before layers wait for each other, because replicas may call other layers.
        self._grad_sync.zero.unshard_layers()
        arguments = context.enter_user_code(call, keep=context.is_last)
        value = self._cut.run_in_lockstep(
            call.step,
            arguments,
            self._mesh.pipeline_rank,
            self._exchange,
            random=lambda number: self._streams.layers(0, *coordinates, number),
            plain=context.plain,
            is_tensor_parallel=self._mesh.sizes.tensor > 1,
        )
        return context.plain(value)


def make_frame(module: nn.Module, body: Body, stage_map: StageMap, device: torch.device, **arguments: Any) -> FrameCut:
    """Return the cut, which traces and plans steps, for the layers of a body that any code may call.

    :class:`FrameProgram` calls this in a run, and :func:`.make_program.find_uses` in a single process.

    Args:
        module: The user's module.
        body: The layers that are divided into stages.
        stage_map: The stages of the module's tensors.
        device: The device of this rank.
        arguments: Other arguments of :class:`FrameCut`.
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
    """Return the stages of each parameter outside the layers, by name, without parameters that every stage has.

    Args:
        module: The user's module.
        stage_map: The stages of the module's tensors.
    """
    named = list(module.named_parameters(remove_duplicate=False))
    # The stages are equal for all names of a parameter.
    stages = {id(found.tensor): found.stages for found in locate(named, stage_map)}
    outside = {name: stages[id(parameter)] for name, parameter in named if stage_map.is_outside(name)}
    return {name: held for name, held in outside.items() if len(held) < len(stage_map.stages)}
