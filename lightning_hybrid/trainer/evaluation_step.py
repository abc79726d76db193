"""One evaluation step: the user's step runs once with the whole batch, the body in microbatches."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn

from lightning_hybrid.data_parallel.grad_sync import GradientSync
from lightning_hybrid.distributed.failure import WrongUseError, is_transport
from lightning_hybrid.distributed.messages.tree_broadcast import broadcast_object
from lightning_hybrid.error_codes.entry import without_code
from lightning_hybrid.pipeline_parallel.body import BodyCut
from lightning_hybrid.pipeline_parallel.frame.discovery import GENERATION
from lightning_hybrid.pipeline_parallel.frame.path_change import LOCKSTEP, Choice, PathChangedError
from lightning_hybrid.pipeline_parallel.frame.plan import shard_text
from lightning_hybrid.pipeline_parallel.schedules import build_forward
from lightning_hybrid.pipeline_parallel.splitting.microbatch import JoinError, find_batch_size, join, signature, slicing
from lightning_hybrid.trainer.redo.step_state import StepState
from lightning_hybrid.trainer.results.logging import merge_logs
from lightning_hybrid.trainer.step_context import StepContext

_STEPS = {"validation_step": 1, "test_step": 2, "predict_step": 3}
_NAMES = {number: name for name, number in _STEPS.items()}


class UncutEvaluationStep:
    """The user's own step, where nothing is cut.

    Args:
        module: The user's module.
        grad_sync: Unshards parameters.
    """

    def __init__(self, module: LightningModule, grad_sync: GradientSync) -> None:
        self._module, self._grad_sync = module, grad_sync

    def __call__(self, name: str, *arguments: Any, precision: Callable[[], AbstractContextManager[None]]) -> Any:
        """Run one batch; arguments as for :class:`EvaluationStep`."""
        with self._grad_sync.step(evaluates=True, is_cut=False), precision():
            return getattr(self._module, name)(*arguments)


class EvaluationStep:
    """Runs the user's `validation_step`, `test_step` or `predict_step` through the pipeline.

    ::

        first stage   step with the whole batch, until body(x) --> x divided --> layers, microbatch by microbatch
        middle        layers
        last stage    layers --> y joined --> step with the whole batch, body(x) answered by y

    So metrics see what they see in one process. Where x or y cannot be divided without doubt, the batch runs as one
    microbatch; that is agreed at the first batch of each signature, and remembered. A body that is no chain always runs
    so.

    A step that calls layers again, depending on results, runs in lockstep: on all stages at once. Some steps show that
    only while they run, after they have read a result on the last stage. Such a step is undone, and runs again::

        last stage    x = ...; while not is_over(x):  x = self(x)  fails    --> undone, and in lockstep
        the others    their part                                            --> undone, and in lockstep

    Args:
        context: What steps need.
        grad_sync: Unshards parameters.
        num_microbatches: The requested number of microbatches.
        dynamic_shapes: Whether shapes depend on values, so that nothing is remembered.
    """

    def __init__(
        self, context: StepContext, grad_sync: GradientSync, num_microbatches: int, *, dynamic_shapes: bool = False
    ) -> None:
        self._context, self._grad_sync = context, grad_sync
        self._num_microbatches = num_microbatches
        self._remembers = not dynamic_shapes
        self._counts: dict[Hashable, tuple[int, ...]] = {}
        self._lockstep = set[Hashable]()  # steps that run so
        self._tried = set[Hashable]()  # steps that have run
        self._state: StepState | None = None  # before the step that runs, if it may be undone
        self._error: Exception | None = None  # on the last stage, why it is

    def __call__(self, name: str, *arguments: Any, precision: Callable[[], AbstractContextManager[None]]) -> Any:
        """Run one batch.

        Args:
            name: ``"validation_step"``, ``"test_step"`` or ``"predict_step"``.
            arguments: Of the user's step; the first one is the batch.
            precision: The precision plugin's context.

        Returns:
            What the step returned, the same on every rank.
        """
        context = self._context
        user_step = getattr(context.module, name)
        coordinates = _STEPS[name], context.streams.next_number("evaluation batches")
        with self._grad_sync.step(evaluates=True):
            if context.frame.body_cut is None and context.frame.cut is None and context.mesh.model_group.size() == 1:
                with precision():
                    return user_step(*arguments)
            may_call_again = False
            if context.frame.is_open(name):
                with context.step(num_microbatches=1), precision():
                    may_call_again = context.frame.settle(user_step, arguments, *coordinates)
            key = self._begin(coordinates[0], arguments, may_call_again=may_call_again)
            with context.step(num_microbatches=1) as records, precision():
                if context.frame.body_cut is not None:
                    value = self._through_stages(context.frame.body_cut, user_step, arguments, coordinates)
                elif context.frame.cut is not None:
                    value = self._through_frame(user_step, arguments, coordinates, key)
                else:
                    context.enter_user_code(*coordinates, keep=True)
                    value = context.plain(user_step(*arguments))
            again = Choice(0, LOCKSTEP, follows_rest=False) if self._error is not None and context.is_source else None
            shared = context.share(lambda: (value, merge_logs(records, [1])), again)
            if isinstance(shared, Choice):
                shared = self._again(user_step, coordinates, key, precision)
            elif self._error is not None:  # of this tensor-parallel rank alone
                with context.guard():
                    raise self._error
            self._state = self._error = None
            return shared

    def _begin(self, step: int, arguments: Sequence[Any], *, may_call_again: bool) -> tuple[Hashable, Hashable]:
        """Keep what a step may change, if it may have to be undone.

        Args:
            step: The number of the user's step.
            arguments: Its arguments.
            may_call_again: Whether it may call the layers of a chain again.

        Returns:
            What decides how the step runs: its version, and the signature of its arguments; as user code may take
            something out of the batch, before it runs.
        """
        context, frame = self._context, self._context.frame
        self._state = self._error = None
        if frame.cut is None and not may_call_again:
            return None, None
        key = (step, context.version(gradients=False)), signature(arguments)
        if key not in self._tried and frame.can_lockstep:
            own = [layer for of_stage in context.layers.values() for layer in of_stage]
            self._state = StepState(context.module, (), frame.layers, own)
            self._state.keep(list(arguments), copies_gradients=False)
        if self._remembers:
            self._tried.add(key)
        return key

    def _try(self, run: Callable[[], Any]) -> Any:
        """Return what a part of a step on the last stage returns; nothing if the step has to be undone."""
        if self._state is None:
            return run()
        try:
            return run()
        except Exception as error:  # of the user's code too: it fails in lockstep again
            if is_transport(error):
                raise
            self._error = error
            return None

    def _again(
        self,
        user_step: Callable[..., Any],
        coordinates: tuple[int, ...],
        key: Hashable,
        precision: Callable[[], AbstractContextManager[None]],
    ) -> Any:
        """Undo a step, run it again in lockstep, and return what it returns."""
        context = self._context
        assert self._state is not None
        with context.guard():
            try:
                arguments = self._state.put_back()
            except WrongUseError as error:
                raise error from self._error
            context.forget_step()
            if context.frame.body_cut is not None:
                context.frame.open_chain(user_step.__name__)
        if self._remembers:
            self._lockstep.add(key)
        with context.step(num_microbatches=1) as records, precision():
            value = self._in_lockstep(user_step, arguments, coordinates)
        return context.share(lambda: (value, merge_logs(records, [1])))

    def _through_stages(
        self, body_cut: BodyCut, user_step: Callable[..., Any], arguments: Sequence[Any], coordinates: tuple[int, ...]
    ) -> Any:
        """What the step returns, on the last stage."""
        context = self._context
        # Before the first stage runs the user's code, which may take something out of the batch.
        version = coordinates[0], context.version(gradients=False)
        part = signature(arguments[0])
        context.desync.note_batch(_NAMES[coordinates[0]], version, [part])
        if context.frame.is_followed and context.module.trainer.state.fn == TrainerFn.FITTING:
            key_of_use = version, part, signature(arguments[2:])  # not the number of the batch
            context.frame.note_use(user_step, arguments, *coordinates, key=key_of_use)
        (key,) = context.keys(version, [part])
        total = None if key in self._counts else find_batch_size(arguments[0])
        around = user_step, arguments, _unchanged  # evaluation runs the layers apart, for each microbatch
        x: Any = None
        if context.is_first:
            context.enter_user_code(*coordinates, keep=False)
            x = body_cut.run(*around, unwinds=True)
        y = self._body(key, x, total, coordinates)
        if not context.is_last:
            return None
        context.enter_user_code(*coordinates, keep=True)
        return self._try(lambda: context.plain(body_cut.run(*around, y, unwinds=False)))

    def _through_frame(
        self,
        user_step: Callable[..., Any],
        arguments: Sequence[Any],
        coordinates: tuple[int, ...],
        key: tuple[Hashable, Hashable],
    ) -> Any:
        """Return the result of the step, on the last stage; the whole batch is one microbatch."""
        context = self._context
        version, part = key
        context.desync.note_batch(_NAMES[coordinates[0]], version, [part])
        if key in self._lockstep:
            return self._in_lockstep(user_step, arguments, coordinates)
        plan = context.frame.find_plan_if_any(user_step, arguments, *coordinates, key=key)
        if plan is None:
            if self._remembers:
                self._lockstep.add(key)
            return self._in_lockstep(user_step, arguments, coordinates)
        if plan.graph.needed is None:
            self._state = None  # all of it is known
        elif self._state is not None:
            self._state.keep_new()
        if plan.of_layers:
            if not self._grad_sync.zero.keeps_layers:
                raise WrongUseError(shard_text(plan.of_layers))
            self._grad_sync.zero.unshard_layers()
        fetched = context.frame.fetch_parameters(user_step.__name__, [plan])

        def compute(stage: int, microbatch: int, inputs: Any) -> Any:
            is_last = stage == context.num_stages - 1
            context.enter_user_code(*coordinates, keep=is_last)
            part = stage, user_step, arguments, context.received(inputs)

            def run() -> Any:
                value = context.frame.run_frame(plan, *part, *coordinates, fetched=fetched)
                return context.plain(value, to_stage=not is_last)

            return self._try(run) if is_last else run()

        keys = context.keys(version, [(plan.number, signature(arguments[0]))])
        early = context.may_post_early(keys)
        schedule = build_forward(context.placement, 1, posts_early=early)
        try:
            values = context.engine.run(schedule, compute, keys, profile=context.profile)
        except PathChangedError as error:
            if plan.graph.needed is None or context.frame.can_lockstep:
                raise
            raise WrongUseError(f"{without_code(error)} {GENERATION} [LH426]") from None
        return values[0] if values else None

    def _in_lockstep(
        self, user_step: Callable[..., Any], arguments: Sequence[Any], coordinates: tuple[int, ...]
    ) -> Any:
        """Return the result of a step that runs on all stages at once, on each rank."""
        context = self._context
        self._grad_sync.zero.unshard_layers()  # before layers wait for each other: replicas may call other ones
        context.enter_user_code(*coordinates, keep=context.is_last)
        return context.plain(context.frame.run_in_lockstep(user_step, arguments, *coordinates, plain=context.plain))

    def _body(self, key: Hashable, x: Any, total: int | None, coordinates: tuple[int, ...]) -> Any:
        """The output of the body for the whole batch, on the last stage."""
        known = self._counts.get(key)
        if known is not None:
            return self._run(key, x, known, coordinates)
        mesh = self._context.mesh
        control, last = mesh.control_group, mesh.model_group_rank(self._context.placement.ranks[-1], 0)
        counts = broadcast_object(self._divide(x, total)[1] if self._context.is_first else None, 0, control)
        y, joined = None, False
        with suppress(JoinError):
            y, joined = self._run(key, x, counts, coordinates, strict=True), True
        if not broadcast_object(joined, last, control):
            counts = (total or 1,)
            y = self._run(key, x, counts, coordinates)
        if self._remembers:
            self._counts[key] = counts
        return y

    def _divide(self, x: Any, total: int | None) -> tuple[list[Any], tuple[int, ...]]:
        """The input of the body in microbatches, and the number of samples of each."""
        user_split = getattr(self._context.module, "split_body_input", None)
        if user_split is not None:
            parts = list(user_split(x, self._num_microbatches))
            return parts, (1,) * len(parts)
        plan = slicing(x, total, self._num_microbatches)
        return plan.apply(x), plan.counts

    def _run(
        self, key: Hashable, x: Any, counts: tuple[int, ...], coordinates: tuple[int, ...], *, strict: bool = False
    ) -> Any:
        context = self._context
        parts = self._divide(x, sum(counts))[0] if context.is_first and len(counts) > 1 else [x]
        if context.is_first and len(parts) != len(counts):
            raise ValueError(
                f"The input of the body was split into {len(counts)} microbatches for an earlier batch, but into"
                f" {len(parts)} for this batch of the same shapes. If the shape of the input depends on values in the"
                " batch, set HybridStrategy(dynamic_shapes=True). [LH447]"
            )

        def compute(stage: int, microbatch: int, inputs: Any) -> Any:
            random = context.streams.layers(stage, *coordinates, microbatch)
            return context.run_layers(stage, random, parts[microbatch] if stage == 0 else inputs)

        # Parts that the user made may differ in shape where they do not differ in what they count.
        marks = range(len(counts)) if getattr(context.module, "split_body_input", None) else counts
        keys = context.keys((key, counts), marks)
        early = context.may_post_early(keys)
        schedule = build_forward(context.placement, len(counts), posts_early=early)
        outputs = context.engine.run(schedule, compute, keys, profile=context.profile)
        if not context.is_last:
            return None
        user_join = getattr(context.module, "join_body_output", None)
        return join(outputs, counts, strict=strict) if user_join is None or len(outputs) == 1 else user_join(outputs)


def _unchanged(x: Any) -> Any:
    return x
