"""A training step: splits a batch into microbatches, runs forward and backward, and returns the merged result.

Each `Run` makes one step object when it starts. `HybridStrategy.training_step` calls the object for each batch.
`HybridStrategy.backward` then calls the method ``backward`` of the object, also for a replica without a loss.

Lightning runs the whole forward, and then the whole backward. A pipeline schedule alternates between forwards and
backwards of microbatches, so the step has to run both. It weights the loss of each microbatch so that losses and
gradients equal the results of a single process.

:class:`TrainingStep` is for automatic optimization with several stages or microbatches, with tensor or context
parallelism, or with `microbatch_weight`. `ManualTrainingStep` is for manual optimization with tensor or context
parallelism. :class:`UncutTrainingStep` is for all other steps.

The *step program* decides which code of the user's step each stage runs. Some programs *trace* a step: they run it with
fake tensors to find its calls, and make a *plan* that divides the calls among the stages. If a step makes other calls
than its plan, another *attempt* at it follows. A *window* consists of the batches of one optimizer step. A batch or
microbatch is *left out* if `training_step` returns ``None`` for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_hybrid.config import Settings
from lightning_hybrid.data_parallel.grad_sync import GradientSync, LeftOut, Rest
from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.distributed.pytree import flatten, unflatten
from lightning_hybrid.pipeline_parallel.batch_norm import batch_norm_text, batch_norms, limit_microbatches
from lightning_hybrid.pipeline_parallel.engine import Compute, Profile
from lightning_hybrid.pipeline_parallel.frame.path_change import FOLLOW
from lightning_hybrid.pipeline_parallel.frame.plan import FramePlan
from lightning_hybrid.pipeline_parallel.links.step_schedules import StepSchedules
from lightning_hybrid.pipeline_parallel.links.traffic import TrafficWatch
from lightning_hybrid.pipeline_parallel.placeholders import without_value_text
from lightning_hybrid.pipeline_parallel.schedules import Schedule, build_forward
from lightning_hybrid.pipeline_parallel.splitting.microbatch import (
    find_batch_size,
    signature,
    signatures,
    split_into,
)
from lightning_hybrid.pipeline_parallel.splitting.split_watch import SplitWatch
from lightning_hybrid.pipeline_parallel.stage import NOTHING, Nothing
from lightning_hybrid.trainer.debug.anomaly_detection import AnomalyDetector
from lightning_hybrid.trainer.losses.loss_weights import (
    AccumulationWindow,
    LabelWatch,
    LossWeights,
    weighted,
    weighted_sum,
)
from lightning_hybrid.trainer.losses.repeated_writes import ParameterWrites, PowerIterations
from lightning_hybrid.trainer.losses.returned_none import may_return_none
from lightning_hybrid.trainer.losses.term_weights import TermWeights
from lightning_hybrid.trainer.microbatch_comparison import MicrobatchComparison
from lightning_hybrid.trainer.precision import SharedCasts
from lightning_hybrid.trainer.program.program import StepCall
from lightning_hybrid.trainer.program.step_context import StepContext
from lightning_hybrid.trainer.redo.attempts import BREAKS_OFF, Redo
from lightning_hybrid.trainer.replica_targets import ReplicaTargets
from lightning_hybrid.trainer.results.logging import Log, merge_logs
from lightning_hybrid.trainer.results.outputs import merge_outputs

_UNEXPECTED_NONE = (
    "`training_step` returned None but contains no `return None`. In a pipeline, the stages before the last one must"
    " know that this can happen. Write `if loss is None: return None` in `training_step` itself, not in a function that"
    " it calls, or set HybridStrategy(dynamic_shapes=True). [LH705]"
)
_NONE_WITH_EXPERTS = (
    "`training_step` returned None for a microbatch. With expert_parallel_size > 1, the other replicas wait for its"
    " backward. Return a loss for each microbatch, such as a loss multiplied by 0, or remove expert_parallel_size."
    " [LH727]"
)
_TRAINING = 0  # the first seed coordinate of training steps


class TrainingStep:
    """A training step that runs the user's `training_step` through the pipeline, forward and backward.

    Args:
        context: The state that steps share.
        grad_sync: The gradient synchronization.
        config: The arguments of the strategy.
        place_parameters: Moves parameters outside the layers to the stages that use them; every rank calls it, before
            the first batch runs. It receives the stages that use each parameter, by name, as far as this rank knows;
            ``None`` if the step could not be traced.
        shares_casts: If True, microbatches share the copies of parameters that autocast makes. False without autocast,
            or if ZeRO frees parameters after each use, because copies of all parameters would stay in memory.

    Attributes:
        has_gradients: True, because a step runs forward and backward.
        schedules: The schedules of steps with a backward, by number of microbatches.
        anomaly: Detects values that are not finite; set by the `Run`. ``None`` without `Trainer(detect_anomaly=True)`.
    """

    has_gradients = True

    def __init__(
        self,
        context: StepContext,
        grad_sync: GradientSync,
        config: Settings,
        *,
        place_parameters: Callable[[Mapping[str, Collection[int]] | None], None],
        shares_casts: bool,
    ) -> None:
        self._context = context
        self.anomaly: AnomalyDetector | None = None
        self._place_parameters = place_parameters
        self._is_settled = False
        self._grad_sync = grad_sync
        self.schedules = StepSchedules(config, context.mesh, context.engine, context.device)
        self._traffic = TrafficWatch(context.mesh, context.engine, config.axis_order)
        self._num_microbatches = num_microbatches = config.num_microbatches
        self._window = AccumulationWindow(context.device)
        self._left_out = LeftOut(context.mesh)
        self._rest: Rest | None = None
        # If True, messages between stages can be empty. Zero gradients would not work, as 0 times a loss of NaN is NaN.
        self._may_skip = config.dynamic_shapes or may_return_none(type(context.module))
        context.engine.has_dynamic_shapes = self._may_skip
        self._casts = SharedCasts(context.device.type, grad_sync.local_parameters) if shares_casts else None
        self._batch_norms = batch_norms(context.module) if num_microbatches > 1 else []
        self._limits = config.auto_microbatches and bool(self._batch_norms)
        # Replicas take part in the same collectives, so all use the smallest number of microbatches of any replica.
        self._agrees = num_microbatches > 1 and (
            grad_sync.zero.computes_together
            or grad_sync.zero.reduces_each_backward
            or (context.mesh.num_replicas > 1 and self._limits)
            or any(isinstance(layer, nn.SyncBatchNorm) for layer in self._batch_norms)
        )
        self._warns = bool(self._batch_norms)
        self._split_watch = SplitWatch(type(context.module).__name__)
        self._labels = LabelWatch(context.module) if num_microbatches > 1 and config.loss_reduction == "mean" else None
        self._comparison = MicrobatchComparison(context, grad_sync, config)
        self._iterations = PowerIterations(self._modules_of_stages())
        self._writes = ParameterWrites(context.module, grad_sync)
        self._redo = Redo(context, grad_sync)

    def __call__(
        self,
        *arguments: Any,
        step: int,
        precision: Callable[[], AbstractContextManager[None]],
        accumulated: int,
        is_first: bool,
        scale: Callable[[Tensor], Tensor] | None,
        backward: bool,
        reduce: bool,
    ) -> Any:
        """Run the forward and, if requested, the backward of a batch, and log the merged values of its microbatches.

        Every rank calls this at the same batch. The first calls do more: they trace the step, move parameters, compare
        losses with and without microbatches, and measure links between nodes.

        Args:
            arguments: The arguments of the user's `training_step`; the first one is the batch.
            step: The number of this batch since training began; random numbers depend on it.
            precision: Returns the precision plugin's context for a forward.
            accumulated: The number of batches whose gradients are accumulated; the loss is divided by it.
            is_first: True if the batch is the first of these batches.
            scale: Scales the loss for fp16; ``None`` for other precisions.
            backward: True to compute gradients.
            reduce: True to reduce gradients now, False to accumulate them on each rank.

        Returns:
            The result of `training_step`, merged over the microbatches of this replica, without an autograd graph. It
            is the same on every rank of the model group. ``None`` if the result is ``None`` for every microbatch.

        Raises:
            ValueError: If the step cannot be divided among stages, if its loss has no autograd graph or no value, or if
                it returns ``None`` unexpectedly. The other ranks raise an error with the same text.
            MisconfigurationException: If a result of `training_step` contains no loss.
        """
        context, grad_sync = self._context, self._grad_sync
        if backward and (self.schedules.is_choosing or self._traffic.is_counting):
            self._look_at_links(is_first=is_first)
        split = self._split(arguments[0])
        parts: Sequence[Hashable] = signatures(split[0])
        if not self._is_settled:
            version = context.version(gradients=backward)
            self._settle(self._calls(split[0], arguments[1:], step, version, parts), precision, backward=backward)
        is_due = backward and self._comparison.is_due(parts[0])
        if is_due and self._compare(len(parts), parts[0], arguments, step, precision):
            split = self._split(arguments[0])
            parts = signatures(split[0])
        microbatches, counts = split
        if self._labels is not None and not self._labels(microbatches, counts):
            self._labels = None
        weights = self._weights(microbatches, accumulates=accumulated > 1)
        windowed = weights is not None and accumulated > 1 and backward
        if windowed and is_first:  # an earlier epoch may have ended before its last batches were reduced
            self._window = AccumulationWindow(context.device)
        shares, factors = self._shares(counts, weights, windowed=windowed)
        term_weights = self._term_weights(microbatches, counts)
        outputs: list[Any] = []
        self._rest, left_out = None, self._left_out
        if is_first:
            left_out.begin()

        def loss_of(microbatch: int, value: Any) -> Tensor | Nothing:
            context.engine.check_message()
            outputs.append(value)
            if backward and len(outputs) == len(factors):
                self._note_left_out(outputs, factors)
                if reduce and context.is_source:
                    left_out.ask()
            if value is None:
                if self._grad_sync.zero.computes_together:
                    raise WrongUseError(_NONE_WITH_EXPERTS)
                if context.placement.num_ranks > 1 and not self._may_skip:
                    raise WrongUseError(_UNEXPECTED_NONE)
                return NOTHING
            loss = self._checked(_loss_of(value))
            if backward and not loss.requires_grad:
                _check_graphs(outputs, len(factors), each=context.num_stages > 1 and context.remembers)
            return _scaled(loss, factors[microbatch], accumulated, scale)

        grad_sync.reduces = reduce
        version = context.version(gradients=backward)
        context.desync.note_batch("training_step", version, parts, counts)
        cut = context.program.cut
        attempts = None if cut is None or not backward else self._redo(cut, step, is_first=is_first)
        is_over, profile = False, self._profile(backward=backward)
        with context.guard(), torch.set_grad_enabled(backward), grad_sync.step():
            while not is_over:
                outputs.clear()
                if attempts is not None:
                    microbatches = attempts.begin(microbatches)
                with (
                    nullcontext() if attempts is None else attempts.attempt(),
                    context.step(num_microbatches=len(counts), counts=counts) as records,
                    _looking(self.anomaly),
                ):
                    calls = self._calls(microbatches, arguments[1:], step, version, parts)
                    choose = None if attempts is None else attempts.choose
                    plans = [] if cut is None else context.program.plan(calls, precision, choose)
                    if attempts is not None:
                        attempts.follow(plans)
                    compute = self._make_compute(calls, precision, loss_of, plans, term_weights)
                    with nullcontext() if self._casts is None else self._casts.schedule():
                        keys = context.keys(version, parts, plans)
                        context.engine.run(
                            self._find_schedule(keys, (is_first, reduce), backward=backward),
                            compute,
                            keys,
                            profile=profile,
                            breaks_off=() if attempts is None else BREAKS_OFF,
                            **grad_sync.backward_hooks,
                        )
                # The last stage finishes first, and sends the result while the first stage runs its last backward.
                again = attempts.find_choice() if attempts is not None and context.is_source else None
                shared = context.share(
                    lambda: (
                        (
                            _merge(outputs, counts, shares, is_mean=self._comparison.loss_reduction == "mean"),
                            left_out.settle() if reduce else None,
                        ),
                        self._merge_logs(records, counts, weights),
                    ),
                    again,
                )
                is_over = attempts is None or not attempts.end(shared)
            value, self._rest = shared
            if reduce:
                self._reduce(accumulated, windowed=windowed)
        return value

    def _note_left_out(self, outputs: Sequence[Any], factors: Sequence[float | Tensor]) -> None:
        """Record the total weight of the microbatches that have a loss, and the total weight of all microbatches.

        If losses are summed, the weight is 1 if a microbatch has a loss, and otherwise 0; the total is 1.
        """
        kept = [factor for output, factor in zip(outputs, factors, strict=True) if output is not None]
        if self._comparison.loss_reduction == "sum":  # a missing loss adds 0 to the sum over this replica
            self._left_out.add(float(bool(kept)), 1.0, is_whole=bool(kept))
        else:
            self._left_out.add(sum(kept), sum(factors), is_whole=len(kept) == len(factors))

    def _modules_of_stages(self) -> dict[int, list[nn.Module]]:
        """Return the modules of each stage of this rank, to search them for spectral norm.

        These are the layers of the stage. On the first and the last stage, they include all modules without children
        outside the layers.
        """
        context = self._context
        of_layers = {part for layers in context.layers.values() for layer in layers for part in layer.modules()}
        around = [part for part in context.module.modules() if part not in of_layers and not list(part.children())]
        found = {stage: list(layers) for stage, layers in context.layers.items()}
        for stage in {0, context.num_stages - 1} & found.keys():
            found[stage] += around
        return found

    def _merge_logs(
        self, records: Sequence[Sequence[Log]], counts: Sequence[int], weights: LossWeights | None
    ) -> list[Log]:
        """Return the logs of the batch, merged from the logs of its microbatches."""
        is_told = getattr(self._context.module, "microbatch_weight", None) is not None
        return merge_logs(
            records, counts, self._num_microbatches, weights, None if is_told else self._comparison.log_kinds
        )

    def _look_at_links(self, *, is_first: bool) -> None:
        """Measure delays and traffic between nodes in the first steps; every rank calls this.

        Warn if another order of ranks would send fewer bytes between nodes, or if tensor-parallel groups span nodes.

        Args:
            is_first: True if the batch is the first batch of an optimizer step.
        """
        with self._context.guard():
            if self.schedules.is_choosing:
                self.schedules.begin_step()
            text = self._traffic.begin_step() if is_first and self._traffic.is_counting else None
        if text is not None:
            rank_zero_warn(text)

    def _profile(self, *, backward: bool) -> Profile | None:
        """Return the profile that records the actions of this step; ``None`` if they are not recorded."""
        is_timed = backward and self.schedules.is_choosing
        return self.schedules.profile(self._context) if is_timed else self._context.profile

    def _calls(
        self,
        microbatches: Sequence[Any],
        others: Sequence[Any],
        step: int,
        version: Hashable,
        parts: Sequence[Hashable],
        *,
        draws_alike: bool = False,
    ) -> list[StepCall]:
        """Return the call of the user's step for each microbatch.

        Args:
            microbatches: The microbatches.
            others: Arguments of the user's `training_step` other than the batch.
            step: The number of the batch since training began.
            version: The version of the module, as :meth:`StepContext.version` returns it.
            parts: The signature of each microbatch.
            draws_alike: If True, all microbatches draw the same random numbers, because each is a separate step.
        """
        user_step, device = self._context.module.training_step, self._context.device
        of_others = signature(others)
        moves_to = None if device.type == "cpu" else device  # on a CPU, the whole batch is already there
        numbers = [0] * len(parts) if draws_alike else range(len(parts))
        return [
            StepCall(user_step, microbatch, others, (_TRAINING, step, number), (version, part, of_others), moves_to)
            for number, microbatch, part in zip(numbers, microbatches, parts, strict=True)
        ]

    def _checked(self, loss: Tensor) -> Tensor:
        """Return the loss, after checking that it is finite if anomaly detection is on."""
        if self.anomaly is not None:
            self.anomaly.check_loss(loss)
        return loss

    def _reduce(self, accumulated: int, *, windowed: bool) -> None:
        """Sum and average the gradients, and end the window of accumulated batches; every rank calls this.

        If no batch of the window has a loss, delete the gradients, so that the optimizer changes nothing.

        Args:
            accumulated: The number of batches by which losses were divided.
            windowed: True if the batches of the window have different weights.
        """
        scale = _gradient_scale(self._rest, self._window if windowed else None, accumulated)
        with self._context.range("reduce"):
            self._grad_sync.finish(scale=scale)
        if self._rest is not None and self._rest.scale == 0:
            self._grad_sync.discard()  # stages before the last one have zeros
        if windowed:
            self._window = AccumulationWindow(self._context.device)

    def _find_schedule(self, keys: Sequence[int], place: tuple[bool, bool], *, backward: bool) -> Schedule:
        """Return the schedule of a step.

        Args:
            keys: The keys of its microbatches, from :meth:`StepContext.keys`.
            place: True if the batch is the first one whose gradients are accumulated, and True if it is the last one.
            backward: True if the step has a backward.
        """
        number, posts_early = len(keys), self._context.may_post_early(keys, *place)
        if not backward:
            return build_forward(self._context.placement, number, posts_early=posts_early)
        return self.schedules[number] if posts_early else self.schedules.without_early_receives(number)

    def _make_compute(
        self,
        calls: Sequence[StepCall],
        precision: Callable[[], AbstractContextManager[None]],
        loss_of: Callable[[int, Any], Tensor | Nothing],
        plans: Sequence[FramePlan],
        term_weights: TermWeights | None = None,
        *,
        draws_alike: bool = False,
    ) -> Compute:
        """Return the function that runs the forward of a stage: its part of the step, and the loss on the last stage.

        If plans fetch parameters from other stages, this is a collective over the model group.

        Args:
            calls: The call of the user's step for each microbatch.
            precision: Returns the precision plugin's context for a forward.
            loss_of: Returns the loss of a microbatch for the result of the step, or :data:`NOTHING` if it has no loss.
            plans: The plan of each step; empty if steps are not traced.
            term_weights: The weights of terms of the loss (means of cross entropies); ``None`` if all terms have the
                weight of their microbatch.
            draws_alike: If True, each microbatch is a separate step, which writes parameters itself.
        """
        context, zero, program, casts = self._context, self._grad_sync.zero, self._context.program, self._casts
        planned = program.planned_steps("training_step", plans, is_rehearsal=draws_alike) if plans else ()
        watches_writes = self._writes.watches and not planned  # plans contain the writes of traced steps

        def compute(stage: int, microbatch: int, inputs: Any) -> Any:
            if zero.is_active:
                zero.forward_begins(stage)
            is_last = stage == context.num_stages - 1
            number, count = (0, 1) if draws_alike else (microbatch, len(calls))
            if inputs is NOTHING:
                zero.forward_ends_early(stage)
                if not is_last:
                    return NOTHING
            if self._iterations.stages:
                self._iterations.begin(stage, number)
            weighed: AbstractContextManager[None] = nullcontext()
            if term_weights is not None and is_last:
                weighed = term_weights.of_microbatch(microbatch)
            has_writes = watches_writes and program.has_code(stage)
            writes = self._writes.around(number, count) if has_writes else nullcontext()
            with precision(), nullcontext() if casts is None else casts.forward(stage), weighed, writes:
                planned_step = planned[microbatch] if planned else None
                value = program.forward(stage, calls[microbatch], inputs, planned_step)()
                if value is NOTHING:  # the step has returned None before it called the layers
                    if not self._may_skip:
                        raise WrongUseError(_UNEXPECTED_NONE)
                    zero.forward_ends_early(stage)
                    return NOTHING
                if context.shards_activations and program.has_code(stage):  # layers alone return plain tensors
                    value = context.plain(value, to_stage=not is_last)
                return loss_of(microbatch, value) if is_last else value

        return compute

    def _settle(
        self, calls: list[StepCall], precision: Callable[[], AbstractContextManager[None]], *, backward: bool
    ) -> None:
        """Before the first batch, find out how the step calls the layers, and which stages use other parameters.

        Every rank calls this. It may replace the step program, and may move parameters outside the layers to the stages
        that use them.

        Args:
            calls: The call of the user's step for each microbatch. Their batches may be replaced by batches on the
                device.
            precision: Returns the precision plugin's context for a forward.
            backward: True to compute gradients.
        """
        context, self._is_settled = self._context, True
        if context.program.is_unsettled("training_step"):
            with self._around_trace(1, backward=backward), precision():
                context.program.settle(calls[0])
        if context.program.places_parameters:
            with self._around_trace(len(calls), backward=backward):
                uses = context.program.find_uses(calls, precision)
            self._place_parameters(uses)

    @contextmanager
    def _around_trace(self, num_microbatches: int, *, backward: bool) -> Iterator[None]:
        """Enter the context of a step that is traced and not run."""
        with (
            self._context.step(num_microbatches=num_microbatches),
            torch.set_grad_enabled(backward),
            self._grad_sync.step(),
        ):
            yield

    def _compare(
        self,
        num_microbatches: int,
        signature: Hashable,
        arguments: Sequence[Any],
        step: int,
        precision: Callable[[], AbstractContextManager[None]],
    ) -> bool:
        """Compare the microbatches of a batch with the batch, and return True if the batch must be split again.

        Every rank calls this. If the comparison requires it, all later batches run as one microbatch. If it explains
        the loss, labels are not examined any more.

        Args:
            num_microbatches: The number of microbatches.
            signature: The signature of a microbatch: its containers, shapes and dtypes.
            arguments: The arguments of the user's `training_step`.
            step: The number of the batch since training began.
            precision: Returns the precision plugin's context for a forward.
        """
        comparison = self._comparison
        forward = partial(self._forward, others=arguments[1:], step=step, precision=precision)
        is_split_anew = comparison(arguments[0], num_microbatches, signature, forward)
        if comparison.explains:
            self._labels = None
        if comparison.takes_one:
            self._num_microbatches = 1
            self._agrees = self._limits = self._warns = False
        return is_split_anew

    def _forward(
        self,
        batches: Sequence[Any],
        counts: Sequence[int],
        loss_of: Callable[[int, Tensor], Tensor],
        run: Callable[[int, Callable[[], Any]], Any],
        *,
        others: Sequence[Any],
        step: int,
        precision: Callable[[], AbstractContextManager[None]],
    ) -> tuple[Sequence[Tensor], Sequence[Sequence[Log]]]:
        """Run batches forward only, as separate steps that draw the same random numbers.

        Args:
            batches: See :class:`~.microbatch_comparison.Forward`, also for the next three arguments.
            counts: The number of samples in each batch.
            loss_of: Returns the loss to use for the number of a batch and its loss.
            run: Runs the forward of a stage, for the number of a batch.
            others: The arguments of the user's `training_step` other than the batch.
            step: The number of the batch since training began.
            precision: The precision plugin's context.

        Returns:
            The losses, on the last stage and if each batch has a loss; and the logs of each batch.
        """
        context, parts = self._context, signatures(batches)
        with (
            self._grad_sync.step(),
            context.step(num_microbatches=len(batches), counts=counts) as records,
            context.metrics.only_seen(),
            nullcontext() if self._casts is None else self._casts.schedule(),
        ):
            choice = FOLLOW if self._comparison.repeats else None
            version = context.version(gradients=torch.is_grad_enabled())
            calls = self._calls(batches, others, step, version, parts, draws_alike=True)
            plans = context.program.plan(calls, precision, lambda _: choice)

            def loss_of_value(number: int, value: Any) -> Tensor | Nothing:
                return NOTHING if value is None else loss_of(number, _loss_of(value))

            forward = self._make_compute(calls, precision, loss_of_value, plans, draws_alike=True)

            def compute(stage: int, number: int, inputs: Any) -> Any:
                num_records = len(records)

                def forward_of_stage() -> Any:
                    del records[num_records:]  # `run` may call this function twice, and the second call logs again
                    return forward(stage, number, _map_tensors(Tensor.clone, inputs))  # a step may write to its inputs

                # The graph of the result is not needed, but the step may have computed gradients with it.
                return _map_tensors(_without_graph, run(number, forward_of_stage))

            keys = context.keys(("comparison", context.version(gradients=True)), parts, plans)
            losses = context.engine.run(self._find_schedule(keys, (True, True), backward=False), compute, keys)
        return [] if any(loss is NOTHING for loss in losses) else losses, records

    def backward(self, loss: Tensor | None, run: Callable[[Tensor], None] | None = None, *, reduce: bool) -> bool:
        """Return True if a replica has a loss. Do nothing else, because the schedule has already run the backward.

        Args:
            loss: The loss; ``None`` if there is none.
            run: Lightning's backward of a loss; unused.
            reduce: True to reduce gradients; unused.

        Returns:
            True if a replica has a loss. While gradients are accumulated, only the loss of this replica is known.
        """
        return loss is not None or (self._rest is not None and self._rest.has_loss)

    def _split(self, batch: Any) -> tuple[list[Any], list[int]]:
        """Split a batch, and return the microbatches and the number of samples of each microbatch.

        If replicas must run equally many microbatches, this is a collective over the replicas. It may warn about the
        split, and sets the counts of the context.
        """
        context, user_split = self._context, getattr(self._context.module, "split_batch", None)
        number = self._num_microbatches
        if self._limits:
            number = limit_microbatches(number, find_batch_size(batch), self._batch_norms)
        microbatches, counts = split_into(batch, number, user_split)
        if user_split is None and number > 1:
            for warning in self._split_watch(batch, counts, number):
                rank_zero_warn(warning)
        if self._agrees:
            least = context.mesh.data_parallel_min(len(counts))
            if least < len(counts):
                microbatches, counts = split_into(batch, least, user_split)
        if not any(counts):  # a batch without samples still runs, as in a single process
            counts = [1] * len(counts)
        if self._warns:
            self._warns = False
            text = batch_norm_text(self._batch_norms, counts, context.mesh.num_replicas)
            if text is not None:
                rank_zero_warn(text)
        context.counts = counts
        return microbatches, counts

    def _weights(self, microbatches: Sequence[Any], *, accumulates: bool) -> LossWeights | None:
        """Return the weights of microbatches by `microbatch_weight` or targets; a collective over the replicas.

        Args:
            microbatches: The microbatches.
            accumulates: True if gradients are accumulated over batches; then all ranks need the weights, and not only
                the last stage.

        Returns:
            The weights; ``None`` if samples are the weights, if losses are summed, or on a rank that does not need the
            weights.
        """
        context = self._context
        weigh = getattr(context.module, "microbatch_weight", None) or self._comparison.labels  # may be set during a run
        if weigh is None or self._comparison.loss_reduction == "sum" or not (context.is_last or accumulates):
            return None
        with context.guard():
            return LossWeights.of(weigh, microbatches, context.mesh, context.device)

    def _term_weights(self, microbatches: Sequence[Any], counts: Sequence[int]) -> TermWeights | None:
        """Return the weights of terms of the loss that are means over targets; a collective over the replicas.

        A term is the mean of a cross entropy in the loss, and its targets are the classes that the mean counts.

        Returns:
            The weights; ``None`` if all terms have the weight of their microbatch, if the module has
            `microbatch_weight`, or if this rank does not have the last stage.
        """
        context, terms = self._context, self._comparison.terms
        is_told = getattr(context.module, "microbatch_weight", None) is not None
        if terms is None or is_told or not context.is_last:
            return None
        with context.guard():
            shares = [count / sum(counts) for count in counts]
            return TermWeights(terms, microbatches, shares, context.mesh, context.device)

    def _shares(
        self, counts: Sequence[int], weights: LossWeights | None, *, windowed: bool
    ) -> tuple[Sequence[float | Tensor], Sequence[float | Tensor]]:
        """Return the weights of microbatches in the reported loss, and the factors of their losses before backward.

        If the weights are relative to the window, add the batch to the window.

        Args:
            counts: The number of samples of each microbatch.
            weights: The weights other than numbers of samples; ``None`` if there are none.
            windowed: True if the weights are relative to all batches of the window.
        """
        if weights is not None:
            return weights.shares, weights.factors(self._window.add(weights.total) if windowed else None)
        shares = [1.0 if self._comparison.loss_reduction == "sum" else count / sum(counts) for count in counts]
        return shares, shares


class UncutTrainingStep:
    """A training step that runs the user's step as Lightning does.

    It is for one stage and one microbatch without tensor or context parallelism, so there is nothing to schedule. With
    automatic optimization, the Trainer calls backward after the step. With manual optimization, the user's step calls
    `manual_backward`, any number of times. In both cases, :meth:`backward` averages gradients over the replicas.

    Args:
        module: The user's module.
        grad_sync: The gradient synchronization. Parameters stay unsharded until after the backward.
        mesh: The ranks.
        device: The device of this rank.
        config: The arguments of the strategy.
        around_forwards: Returns a context for forwards, in which activations are recomputed or offloaded if the user
            requests it.

    Attributes:
        has_gradients: False, because Lightning or the user's step calls backward.
        anomaly: Detects values that are not finite; set by the `Run`. ``None`` without `Trainer(detect_anomaly=True)`.
    """

    has_gradients = False

    def __init__(
        self,
        module: LightningModule,
        grad_sync: GradientSync,
        mesh: Mesh,
        device: torch.device,
        config: Settings,
        around_forwards: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._module, self._grad_sync, self._around_forwards = module, grad_sync, around_forwards
        self._device = device
        self.anomaly: AnomalyDetector | None = None
        self._left_out = LeftOut(mesh)
        self._rest: Rest | None = None
        is_asked = config.faults.compare_microbatches and config.loss_reduction == "mean"
        self._targets = ReplicaTargets(module, mesh, device, is_asked=is_asked)
        self._writes = ParameterWrites(module, grad_sync)
        # Other parameters are plain tensors, to which a step can write. In manual optimization, optimizers step shards.
        self._watches_writes = self._writes.watches and (grad_sync.zero.is_active or mesh.sizes.tensor > 1)
        self._factor: Tensor | float = 1.0  # the factor of the loss before backward
        self._window: AccumulationWindow | None = None
        self._accumulated = 1

    def __call__(
        self,
        *arguments: Any,
        precision: Callable[[], AbstractContextManager[None]],
        accumulated: int,
        is_first: bool,
        backward: bool,
        reduce: bool,
        **others: Any,
    ) -> Any:
        """Run the forward of a batch, and return the result of the user's step with its autograd graph.

        The arguments have the same meaning as in :meth:`TrainingStep.__call__`, also ``step`` and ``scale``, which are
        unused. With manual optimization, the user's step also runs its backwards and optimizer steps inside this call.
        Replicas communicate, so all of them call this.
        """
        zero, is_automatic = self._grad_sync.zero, self._module.automatic_optimization
        weights: LossWeights | None = None
        zero.open()
        if zero.is_active:
            zero.forward_begins(0)
        try:
            writes = self._writes.around(0, 1) if self._watches_writes and is_automatic else nullcontext()
            with self._around_forwards(), precision(), _looking(self.anomaly), writes:
                if backward and is_automatic:
                    output, weights = self._targets.run(partial(self._run, arguments), arguments[0])
                else:
                    output = self._module.training_step(*arguments)
                if self.anomaly is not None and is_automatic:
                    self.anomaly.check_loss(output.get("loss") if isinstance(output, Mapping) else output)
        except BaseException:
            zero.abandon()
            raise
        if not backward or not is_automatic:
            zero.close()
            return output
        self._rest = None
        if is_first:
            self._left_out.begin()
            self._window = None
        self._factor, self._accumulated = 1.0, accumulated
        if weights is not None and accumulated > 1:
            self._window = self._window or AccumulationWindow(self._device)
            [self._factor] = weights.factors(self._window.add(weights.total))
        elif weights is not None:
            self._factor = weights.replica_factor
        self._left_out.add(0.0 if output is None else self._factor, self._factor, is_whole=output is not None)
        if reduce:
            self._left_out.ask(waits=output is None)
        return output

    def _run(self, arguments: Sequence[Any]) -> Any:
        """Run the user's step, and the collectives for which other replicas wait before losses are compared.

        The comparison of losses is :class:`ReplicaTargets`.
        """
        zero, meets = self._grad_sync.zero, self._targets.is_looking
        output = self._module.training_step(*arguments)
        if zero.is_active and (output is None or meets):
            zero.forward_ends_early(0)
        return output

    def backward(self, loss: Tensor | None, run: Callable[[Tensor], None] | None = None, *, reduce: bool) -> bool:
        """Run Lightning's backward, and average the gradients if requested; every replica calls this.

        Args:
            loss: The loss; ``None`` if this replica has none and only takes part in collectives.
            run: Lightning's backward of a loss; ``None`` if the step returned no loss.
            reduce: True to reduce gradients now, False to accumulate them.

        Returns:
            True if a replica has a loss, as :meth:`TrainingStep.backward` returns it.
        """
        grad_sync, is_automatic = self._grad_sync, self._module.automatic_optimization
        grad_sync.reduces = reduce
        grad_sync.backward_begins(0, is_last=True)
        if loss is not None and run is not None:
            with _looking(self.anomaly):
                run(weighted(loss, self._factor) if is_automatic else loss)
        grad_sync.backward_ends(0, is_last=True)
        if reduce:
            self._rest = self._left_out.settle() if is_automatic else None
            window = self._window if is_automatic else None
            grad_sync.finish(scale=_gradient_scale(self._rest, window, self._accumulated))
        if is_automatic:
            grad_sync.zero.close()
        return loss is not None or (self._rest is not None and self._rest.has_loss)


def _looking(anomaly: AnomalyDetector | None) -> AbstractContextManager[None]:
    """Return the context in which anomaly detection checks a step."""
    return nullcontext() if anomaly is None else anomaly.batch()


def _scaled(loss: Tensor, factor: float | Tensor, accumulated: int, scale: Callable[[Tensor], Tensor] | None) -> Tensor:
    """Return the loss with which the backward of a microbatch begins: weighted, divided, and scaled for fp16.

    Args:
        loss: The loss of the microbatch.
        factor: The weight of the microbatch.
        accumulated: The number of accumulated batches, by which the loss is divided.
        scale: Scales the loss for fp16; ``None`` for other precisions.
    """
    if isinstance(factor, Tensor):
        loss = weighted(loss, factor)
    elif factor != 1.0:
        loss = loss * factor
    loss = loss if accumulated == 1 else loss / accumulated
    return loss if scale is None else scale(loss)


def _gradient_scale(rest: Rest | None, window: AccumulationWindow | None, accumulated: int) -> Tensor | float | None:
    """Return the factor of gradients after they have been averaged; ``None`` for 1.

    Args:
        rest: The part of the optimizer step that has a loss; ``None`` if everything has a loss.
        window: The accumulated batches with different weights, of which this is the last; ``None`` if there are none.
        accumulated: The number of batches whose gradients are accumulated, by which losses were divided.
    """
    scale = None if rest is None else rest.scale
    return scale if window is None else window.close(accumulated) * (1.0 if scale is None else scale)


def _merge(outputs: Sequence[Any], counts: Sequence[int], shares: Sequence[float | Tensor], *, is_mean: bool) -> Any:
    """Merge the results of all microbatches into a loss or a dictionary with a loss; ``None`` if none has a loss.

    Args:
        outputs: The result of `training_step` for each microbatch; ``None`` if it has no loss.
        counts: The number of samples of each microbatch.
        shares: The weight of each microbatch in the loss.
        is_mean: True if the weights of the microbatches with a loss are rescaled to the sum 1; False if losses are
            summed.
    """
    kept = [index for index, output in enumerate(outputs) if output is not None]
    if not kept:
        return None
    if len(kept) < len(outputs):
        outputs, counts = [outputs[index] for index in kept], [counts[index] for index in kept]
        shares = [shares[index] for index in kept]
        if is_mean:
            total = sum(shares)
            shares = [share / total if isinstance(total, Tensor) or total else 0.0 for share in shares]
    losses = [_loss_of(output).detach() for output in outputs]
    if isinstance(shares[0], Tensor):
        loss = weighted_sum(losses, shares)
    else:
        loss = torch.stack([loss * share for loss, share in zip(losses, shares, strict=True)]).sum(0)
    return loss if isinstance(outputs[0], Tensor) else merge_outputs(outputs, counts, loss)


def _check_graphs(outputs: Sequence[Any], num_microbatches: int, *, each: bool) -> None:
    """Raise an error if nothing would be trained. The caller has found that the newest loss has no autograd graph.

    Args:
        outputs: The results of `training_step` so far.
        num_microbatches: The number of microbatches.
        each: True if every microbatch needs a graph, because an earlier stage waits for its gradients.

    Raises:
        WrongUseError: If no microbatch has a graph after the last microbatch, or if ``each`` is True.
    """
    losses = [_loss_of(output) for output in outputs if output is not None]
    if not each and (len(outputs) < num_microbatches or any(loss.requires_grad for loss in losses)):
        return
    raise WrongUseError(
        "The loss of `training_step` has no autograd graph, so nothing would be trained. The loss depends on no"
        " parameter that requires a gradient, or the loss was detached or copied into a new tensor. Return the loss"
        " that the model computed. For a batch without targets, return this loss multiplied by 0. If all parameters are"
        " frozen, there is nothing to train. [LH704]"
    )


def _map_tensors(change: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Return a tree in which each tensor is replaced by the result of a function."""
    leaves, spec = flatten(tree)
    return unflatten([change(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)


def _without_graph(tensor: Tensor) -> Tensor:
    """Return a tensor without its graph, but with the same `requires_grad`, which later stages may read."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _loss_of(output: Any) -> Tensor:
    """Return the loss in the result of `training_step`.

    Raises:
        MisconfigurationException: If it contains no loss.
        WrongUseError: If the loss has no value on this rank.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise MisconfigurationException(
            "With automatic optimization, `training_step` must return a tensor or a dict with the key 'loss', but it"
            " returned"
            f" {f'a dict with the keys {list(output)}' if isinstance(output, Mapping) else type(output).__name__}."
            " [LH718]"
        )
    if loss.is_meta:
        raise WrongUseError(without_value_text("the loss of `training_step`"))
    return loss
