"""The step program for a chain of layers that the step calls once, as a whole: stages in between run only layers.

A *chain* is an `nn.Sequential`, and the body of the pipeline. `make_program` makes this program if there is a chain.
`TrainingStep`, `EvaluationStep` and `StepContext` call it for each batch. As the step is cut only at its call of the
chain, no step needs a plan, the code around the chain may take any path, and stages in between run no user code. So
this program is faster than :class:`FrameProgram`, but handles fewer steps. To *open* the chain is to replace this
program by a :class:`FrameProgram`, in which any code may call the layers.

To *trace* a step is to run its code with fake tensors as parameters and as results of layers, and to record its calls.
This program traces a step only before its first batch: to find out how the step calls the chain, and which stage uses
each parameter *around* (outside) the chain.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn

from lightning_hybrid.data_parallel.grad_sync import GradientSync
from lightning_hybrid.distributed.messages.tree_broadcast import broadcast_object
from lightning_hybrid.pipeline_parallel.body import Body, BodyCut
from lightning_hybrid.pipeline_parallel.chain import ChainCalls, ChainUse, CodeBefore, NotFollowedError, stays_text
from lightning_hybrid.pipeline_parallel.frame.plan import stages_by_parameter
from lightning_hybrid.pipeline_parallel.frame.unit_attributes import HiddenAttributes, KeptAttribute
from lightning_hybrid.pipeline_parallel.schedules import build_forward
from lightning_hybrid.pipeline_parallel.splitting.microbatch import JoinError, find_batch_size, join, slicing
from lightning_hybrid.pipeline_parallel.stage_map import StageMap
from lightning_hybrid.trainer.program.frame_program import FrameProgram
from lightning_hybrid.trainer.program.program import PlannedStep, StepCall, StepProgram, Trial
from lightning_hybrid.trainer.program.step_context import StepContext

# The most steps around a chain that are traced, in a sanity check and the first training batch.
_MOST_USES = 16
_OTHERWISE, _WRITES = "does not call {} exactly once as a whole", "changes parameters outside {}"
_USES_INSIDE = "uses tensors from inside {}"


class ChainProgram(StepProgram):
    """A program in which the first and the last stage run the user's step around the chain; others run only layers.

    In a training step, all code receives microbatches. In an evaluation step, code around the chain receives the whole
    batch, and the layers receive microbatches::

        first stage   step with the whole batch, until body(x) --> x is split --> layers, microbatch by microbatch
        middle        layers
        last stage    layers --> y is joined --> step with the whole batch, in which body(x) returns y

    So metrics receive the same values as in a single process. If it is ambiguous how to split x or y, the batch runs as
    one microbatch. The ranks agree on this at the first batch of each signature, and remember it unless
    ``context.remembers`` is False.

    If a step calls the layers in another way, the chain is opened (see :meth:`settle` for the conditions): from then
    on, a :class:`FrameProgram` runs the steps on every rank of the model group. The chain is never closed again.

    Args:
        context: The state that steps share.
        body: The layers of the chain.
        chain: The chain.
        grad_sync: The gradient synchronization, used only by the :class:`FrameProgram` of an opened chain.
        num_microbatches: The requested number of microbatches of an evaluation step.
        frees_early: True if ZeRO stage 3 frees the full parameters of a layer after each call.
        can_open: True if the tensor-parallel plan allows that the layers of the chain are called one by one.
    """

    def __init__(
        self,
        context: StepContext,
        body: Body,
        chain: nn.Sequential,
        grad_sync: GradientSync,
        *,
        num_microbatches: int,
        frees_early: bool,
        can_open: bool,
    ) -> None:
        self._context = context
        self._body, self._chain, self._grad_sync = body, chain, grad_sync
        self._num_microbatches, self._frees_early = num_microbatches, frees_early
        stage_map = context.parameter_map.stage_map
        self._cut = BodyCut(body.name, chain, body.lists)
        self.places_parameters = stage_map.places_outside
        # A chain that the user has named is not opened for other calls, which are an error of the user.
        self._can_open, self._opens_for_calls = can_open, can_open and body.is_found
        self._settled = set[str]()
        self._kept: dict[str, Sequence[KeptAttribute]] = {}  # by step: attributes in which layers store tensors
        self._unsettled: str | None = None  # the step that was not traced to its end; reset when it runs
        self._tracer: ChainUse | None = None
        self._uses: dict[Hashable, tuple[frozenset[str], ...]] = {}
        self._is_traceable = True
        self._find_code_before()
        if self.places_parameters and not stage_map.outside and (context.is_first or context.is_last):
            self._tracer = make_chain_use(
                context.module, chain, stage_map, context.device, around_discovery=context.around_discovery
            )
        self._counts: dict[Hashable, tuple[int, ...]] = {}  # the number of samples of each microbatch in evaluation

    def entered(self, *, repeats: bool) -> AbstractContextManager[None]:
        """Redirect calls of the chain to the cut; see :meth:`StepProgram.entered`."""
        return self._cut()

    def unfollowed(self) -> AbstractContextManager[None]:
        """Return a context for code that is not part of the user's step; see :meth:`StepProgram.unfollowed`."""
        if self._cut.code_before is not None:
            return self._cut.code_before.paused()
        return super().unfollowed() if self._tracer is None else self._tracer.unfollowed()

    def has_code(self, stage: int) -> bool:
        """Return True if a stage is the first or the last one."""
        return stage in (0, self._context.num_stages - 1)

    # -- analysis before a step runs ---------------------------------------------------------------------------------

    def is_unsettled(self, step: str) -> bool:
        """Return True until :meth:`settle` has been called for a step.

        Args:
            step: The name of the step.
        """
        return step not in self._settled

    def settle(self, call: StepCall) -> None:
        """Trace a step once, on the first pipeline rank, and open the chain on all ranks if the step requires it.

        ::

            x = self.body(x)                              the chain stays closed
            two such calls; for layer in self.body        the chain is opened; but if the user has named it, it stays
                                                          closed, and the step raises an error when it runs
            parameters are written (a teacher)            the chain is opened, even if the user has named it
            the loss uses tensors that layers or their    the same; a tensor that a layer keeps in an attribute is then
            hooks keep                                    refused

        If the chain is opened, parameters around the chain keep their stages, and buffers are sent to all stages.
        Replicas may decide differently, but the ranks of a model group decide together.

        Args:
            call: The step.

        Raises:
            ValueError: If the chain must be opened, but the tensor-parallel plan does not allow this.
        """
        context, body = self._context, self._body
        self._settled.add(call.name)
        # True for: the step calls the chain in another way, writes parameters, uses tensors from inside the chain, is
        # not traced to its end, may use attributes in which layers store tensors.
        found, kept = torch.zeros(5, dtype=torch.int), list[KeptAttribute]()
        if context.mesh.pipeline_rank == 0:  # other ranks may lack parameters around the chain
            context.streams.seed_user(*call.coordinates)
            calls = ChainCalls(context.module, body.names, self._chain, context.device, context.around_discovery)
            seed = context.streams.of_calls(*call.coordinates)
            answers, kept = calls.look(call.step, call.arguments, seed)
            found += torch.tensor([*answers, bool(kept)])
        dist.all_reduce(found, dist.ReduceOp.MAX, group=context.mesh.control_group)
        is_other, writes, uses_inside, stops, keeps = found.tolist()
        if writes or (self._opens_for_calls if is_other else uses_inside):
            why = _OTHERWISE if is_other else _WRITES if writes else _USES_INSIDE
            if not self._can_open:
                raise ValueError(
                    f"`{call.name}` {why.format(repr(body.name))}. Therefore the layers of {body.name!r} must be called"
                    " one by one, but the tensor-parallel plan shards a layer with torch's own API, or has one style"
                    f" for several layers. Set the name of a style for each of these layers in `tensor_parallel_plan`."
                    " [LH474]"
                )
            self.open_layers(call.name, why)
        elif keeps:
            self._kept[call.name] = broadcast_object(kept, 0, context.mesh.control_group)
        self._unsettled = call.name if stops and self._opens_for_calls else None

    def open_layers(self, step: str, why: str = _OTHERWISE) -> FrameProgram:
        """Replace this program by a :class:`FrameProgram`, in which any code may call the layers, and return it.

        This is a collective operation of the model group, in which all stages receive the buffers around the chain.

        Args:
            step: The name of the step that requires it.
            why: The reason for the log, as a text with ``{}`` for the name of the chain.
        """
        program = FrameProgram(
            self._context,
            self._body,
            self._grad_sync,
            frees_early=self._frees_early,
            places_parameters=self.places_parameters,
            uses=list(self._uses.values()) if self._is_traceable else None,
        )
        program.share_buffers()
        self._context.program = program
        rank_zero_info(
            f"`{step}` {why.format(repr(self._body.name))}. From now on, the layers of {self._body.name!r} can be"
            f" called one by one, as with HybridStrategy(body=[{self._body.name!r}])."
        )
        return program

    def find_uses(
        self, calls: list[StepCall], precision: Callable[[], AbstractContextManager[None]]
    ) -> dict[str, set[int]] | None:
        """Return the stages that use each parameter outside the chain; see :meth:`StepProgram.find_uses`.

        The result includes steps of a sanity check. Only the first and the last pipeline rank trace steps; the result
        of other ranks is empty.
        """
        with precision():
            for call in calls:
                self._note_use(call)
        self._tracer, self.places_parameters = None, False
        return stages_by_parameter(self._uses.values()) if self._is_traceable else None

    def _note_use(self, call: StepCall) -> None:
        """Trace a step, once for each key, to find the stages that use each parameter around the chain."""
        key = call.name, call.key
        if self._tracer is None or key in self._uses or len(self._uses) == _MOST_USES:
            return
        streams = self._context.streams
        streams.seed_user(*call.coordinates)
        try:
            self._uses[key] = self._tracer.find(call.step, call.arguments, streams.of_calls(*call.coordinates))
        except NotFollowedError as error:
            self._tracer, self._is_traceable = None, False
            rank_zero_info(stays_text(call.name, error))

    def parameters_moved(self) -> None:
        """Update the program after parameters outside the chain moved; see :meth:`StepProgram.parameters_moved`."""
        self._find_code_before()

    def _find_code_before(self) -> None:
        """Set how this rank runs the code before the chain: if parameters are missing, without calls that need them.

        Such a call returns fake tensors, and advances the random generators as usual.
        """
        stage_map = self._context.parameter_map.stage_map
        stage = 0 if self._context.mesh.pipeline_rank == 0 else len(stage_map.stages) - 1
        lacks = any(stage not in stages for stages in stage_map.outside.values())
        self._cut.code_before = CodeBefore(self._context.device) if lacks else None

    # -- a step ------------------------------------------------------------------------------------------------------

    def forward(self, stage: int, call: StepCall, inputs: Any, planned: PlannedStep | None) -> Callable[[], Any]:
        """Prepare the forward of a stage; see :meth:`StepProgram.forward`."""
        context, is_last = self._context, stage == self._context.num_stages - 1
        run_layers = partial(context.run_layers, stage, context.streams.layers(stage, *call.coordinates))
        if not self.has_code(stage):
            return partial(run_layers, inputs)
        arguments = context.enter_user_code(call, keep=is_last)
        run = partial(self._cut.run, call.step, arguments, unwinds=stage == 0, may_skip=True)
        if not is_last or not self._kept:
            return partial(run, run_layers, inputs)
        hidden = self._hidden_attributes(call.name, context.parameter_map.stage_map.stages[stage])
        return partial(run, hidden.showing(run_layers), inputs, around=hidden)

    def _hidden_attributes(self, step: str, present: Container[int]) -> HiddenAttributes:
        """Return the context for a step on the last stage, in which attributes that lack tensors cannot be used.

        Args:
            step: The name of the step.
            present: The positions of the layers whose attributes have the tensors of the step.
        """
        return HiddenAttributes(self._kept.get(step, ()), present, self._context.module, self._body.layers)

    def evaluate(self, call: StepCall, trial: Trial[Any]) -> Any:
        """Run an evaluation step, with the layers in microbatches; see :meth:`StepProgram.evaluate`.

        In a sanity check before training, this also traces the step to find the stages that use each parameter around
        the chain.
        """
        context = self._context
        self._unsettled = None
        if self._tracer is not None and context.module.trainer.state.fn == TrainerFn.FITTING:
            self._note_use(call)
        (key,) = context.keys(call.key, [None])
        total = None if key in self._counts else find_batch_size(call.arguments[0])
        x: Any = None
        if context.is_first:
            arguments = context.enter_user_code(call, keep=False)
            x = self._cut.run(call.step, arguments, _unchanged, unwinds=True)
        y = self._run_body(key, x, total, call.coordinates)
        if not context.is_last:
            return None
        arguments = context.enter_user_code(call, keep=True)
        # The layers have run in microbatches, so their attributes do not have the tensors of the whole batch.
        around = self._hidden_attributes(call.name, ())
        run = partial(self._cut.run, call.step, arguments, _unchanged, y, unwinds=False, around=around)
        return trial.run(lambda: context.plain(run()))

    def _run_body(self, key: Hashable, x: Any, total: int | None, coordinates: tuple[int, ...]) -> Any:
        """Run the layers, and return the output of the chain for the whole batch; ``None`` except on the last stage.

        For a new key, the ranks of the model group agree on the microbatches: if the outputs of microbatches cannot be
        joined, the layers run again on the whole batch.

        Args:
            key: The key of the step, as an integer.
            x: The input of the chain, on the first stage.
            total: The number of samples in the batch; ``None`` if unknown or if the key is known.
            coordinates: The coordinates of the step's random numbers.
        """
        known = self._counts.get(key)
        if known is not None:
            return self._run_microbatches(key, x, known, coordinates)
        context = self._context
        control = context.mesh.control_group
        last = context.mesh.model_group_rank(context.placement.ranks[-1], 0)
        counts = broadcast_object(self._split(x, total)[1] if context.is_first else None, 0, control)
        y, is_joined = None, False
        with suppress(JoinError):
            y, is_joined = self._run_microbatches(key, x, counts, coordinates, strict=True), True
        if not broadcast_object(is_joined, last, control):
            counts = (total or 1,)
            y = self._run_microbatches(key, x, counts, coordinates)
        if context.remembers:
            self._counts[key] = counts
        return y

    def _split(self, x: Any, total: int | None) -> tuple[list[Any], tuple[int, ...]]:
        """Return the microbatches of the input of the chain, and the number of samples in each of them."""
        user_split = getattr(self._context.module, "split_body_input", None)
        if user_split is not None:
            parts = list(user_split(x, self._num_microbatches))
            return parts, (1,) * len(parts)
        plan = slicing(x, total, self._num_microbatches)
        return plan.apply(x), plan.counts

    def _run_microbatches(
        self, key: Hashable, x: Any, counts: tuple[int, ...], coordinates: tuple[int, ...], *, strict: bool = False
    ) -> Any:
        """Run the layers in microbatches, and return their joined output; ``None`` except on the last stage.

        Args:
            key: The key of the step, as an integer.
            x: The input of the chain, on the first stage.
            counts: The number of samples of each microbatch.
            coordinates: The coordinates of the step's random numbers.
            strict: True to raise a `JoinError` on the last stage if it is ambiguous how to join the outputs.

        Raises:
            ValueError: If the input is not split into as many microbatches as ``counts`` has.
        """
        context = self._context
        parts = self._split(x, sum(counts))[0] if context.is_first and len(counts) > 1 else [x]
        if context.is_first and len(parts) != len(counts):
            raise ValueError(
                f"The input to the body was split into {len(counts)} microbatches for an earlier batch, but into"
                f" {len(parts)} for this batch, which has the same shapes. If the shape of the input depends on values"
                " in the batch, set HybridStrategy(dynamic_shapes=True). [LH447]"
            )

        def compute(stage: int, microbatch: int, inputs: Any) -> Any:
            random = context.streams.layers(stage, *coordinates, microbatch)
            return context.run_layers(stage, random, parts[microbatch] if stage == 0 else inputs)

        # The parts of the user's hook may differ in shape even if they have the same number of samples.
        marks = range(len(counts)) if getattr(context.module, "split_body_input", None) else counts
        keys = context.keys((key, counts), marks)
        schedule = build_forward(context.placement, len(counts), posts_early=context.may_post_early(keys))
        outputs = context.engine.run(schedule, compute, keys, profile=context.profile)
        if not context.is_last:
            return None
        user_join = getattr(context.module, "join_body_output", None)
        return join(outputs, counts, strict=strict) if user_join is None or len(outputs) == 1 else user_join(outputs)

    # -- steps in lockstep -------------------------------------------------------------------------------------------

    def may_run_again(self, call: StepCall) -> bool:
        """Return True if a step was not traced to its end, so that it may call the layers one by one later.

        Steps with gradients, or with context parallelism, never run again.
        """
        is_possible = not torch.is_grad_enabled() and self._context.mesh.sizes.context == 1
        return is_possible and self._unsettled == call.name


def _unchanged(x: Any) -> Any:
    """Return the input; used instead of the layers, which run separately for each microbatch."""
    return x


def make_chain_use(
    module: nn.Module, chain: nn.Sequential, stage_map: StageMap, device: torch.device, **arguments: Any
) -> ChainUse:
    """Return the tracer of the parameters that a step uses around a chain.

    Args:
        module: The user's module.
        chain: The chain.
        stage_map: The stages of the module's tensors.
        device: The device of this rank.
        arguments: Other arguments of :class:`ChainUse`.
    """
    assert stage_map.body is not None
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    holders = {name: stage_map.stages_of(name) for name in names if stage_map.is_outside(name)}
    stages = len(stage_map.stages)
    return ChainUse(module, stage_map.body, chain, stages, device, holders=holders, remembers=False, **arguments)
