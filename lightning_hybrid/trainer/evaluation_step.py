"""One evaluation step: the user's step runs once with the whole batch, the body in micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from lightning_hybrid.distributed.tree_broadcast import broadcast_object
from lightning_hybrid.pipeline_parallel.body import BodyCut
from lightning_hybrid.pipeline_parallel.microbatch import JoinError, find_batch_size, join, signature, slicing
from lightning_hybrid.pipeline_parallel.schedules import build_forward
from lightning_hybrid.tensor_parallel.vocab_parallel import to_plain_tensors
from lightning_hybrid.trainer.results.logging import merge_logs
from lightning_hybrid.trainer.step_context import StepContext

__all__ = ["EvaluationStep"]

_STEPS = {"validation_step": 1, "test_step": 2, "predict_step": 3}


class EvaluationStep:
    """Runs the user's `validation_step`, `test_step` or `predict_step` through the pipeline.

    ::

        first stage   step with the whole batch, until body(x) --> x divided --> layers, micro-batch by micro-batch
        middle        layers
        last stage    layers --> y joined --> step with the whole batch, body(x) answered by y

    So metrics see what they see in one process. Where x or y cannot be divided without doubt, the batch runs as one
    micro-batch; that is agreed at the first batch of each signature, and remembered.

    Args:
        pipeline: The parts.
        num_microbatches: The wished number of micro-batches.
        dynamic_shapes: Whether shapes depend on values, so that nothing is remembered.
    """

    def __init__(self, pipeline: StepContext, num_microbatches: int, *, dynamic_shapes: bool = False) -> None:
        self._pipeline = pipeline
        self._num_microbatches = num_microbatches
        self._remembers = not dynamic_shapes
        self._counts: dict[Hashable, tuple[int, ...]] = {}

    def __call__(
        self,
        name: str,
        arguments: Sequence[Any],
        *,
        step: int,
        context: Callable[[], AbstractContextManager[None]],
    ) -> Any:
        """Run one batch.

        Args:
            name: ``"validation_step"``, ``"test_step"`` or ``"predict_step"``.
            arguments: Of the user's step; the first one is the batch.
            step: The number of this batch; random numbers depend on it.
            context: The precision plugin's context.

        Returns:
            What the step returned, the same on every rank.
        """
        pipeline = self._pipeline
        user_step = getattr(pipeline.module, name)
        if pipeline.cut is None and pipeline.mesh.model_group.size() == 1:
            with context():
                return user_step(*arguments)
        coordinates = (_STEPS[name], step)
        with pipeline.step(num_microbatches=1) as records, context():
            if pipeline.cut is None:
                pipeline.enter_user_code(*coordinates, keep=True)
                value = to_plain_tensors(user_step(*arguments))
            else:
                value = self._through_stages(pipeline.cut, user_step, arguments, coordinates)
        return pipeline.share(lambda: (value, merge_logs(records, [1])))

    def _through_stages(
        self,
        cut: BodyCut,
        user_step: Callable[..., Any],
        arguments: Sequence[Any],
        coordinates: tuple[int, ...],
    ) -> Any:
        """What the step returns, on the last stage."""
        pipeline = self._pipeline
        # Before the first stage runs the user's code, which may take something out of the batch.
        key = (coordinates[0], pipeline.version(gradients=False), signature(arguments[0]))
        total = None if key in self._counts else find_batch_size(arguments[0])
        x: Any = None
        if pipeline.is_first:
            pipeline.enter_user_code(*coordinates, keep=False)
            x = cut.until_body(user_step, arguments, lambda x: x)
        y = self._body(key, x, total, coordinates)
        if not pipeline.is_last:
            return None
        pipeline.enter_user_code(*coordinates, keep=True)
        return to_plain_tensors(cut.around_body(user_step, arguments, lambda _: y))

    def _body(self, key: Hashable, x: Any, total: int | None, coordinates: tuple[int, ...]) -> Any:
        """The output of the body for the whole batch, on the last stage."""
        known = self._counts.get(key)
        if known is not None:
            return self._run(key, x, known, coordinates)
        control = self._pipeline.mesh.control_group
        counts: tuple[int, ...] = (total or 1,)
        if self._pipeline.is_first:
            counts = self._divide(x, total, None)[1]
        counts = broadcast_object(counts, 0, control)
        y, joined = None, True
        try:
            y = self._run(key, x, counts, coordinates, wary=True)
        except JoinError:
            joined = False
        if not broadcast_object(joined, control.size() - 1, control):
            counts = (total or 1,)
            y = self._run(key, x, counts, coordinates)
        if self._remembers:
            self._counts[key] = counts
        return y

    def _divide(self, x: Any, total: int | None, counts: tuple[int, ...] | None) -> tuple[list[Any], tuple[int, ...]]:
        """The input of the body in micro-batches, and the number of samples of each."""
        if counts is not None and len(counts) == 1:
            return [x], counts
        user_split = getattr(self._pipeline.module, "split_body_input", None)
        if user_split is not None:
            parts = list(user_split(x, self._num_microbatches))
            return parts, (1,) * len(parts)
        plan = slicing(x, total, self._num_microbatches)
        return plan.apply(x), plan.counts

    def _run(
        self, key: Hashable, x: Any, counts: tuple[int, ...], coordinates: tuple[int, ...], *, wary: bool = False
    ) -> Any:
        pipeline = self._pipeline
        parts = self._divide(x, sum(counts), counts)[0] if pipeline.is_first else []
        if pipeline.is_first and len(parts) != len(counts):
            raise ValueError(
                f"The input of the body was divided into {len(counts)} micro-batches before, and now into {len(parts)},"
                " for a batch of the same shapes. If its shape depends on values, use"
                " HybridStrategy(dynamic_shapes=True)."
            )

        def compute(stage: int, microbatch: int, inputs: Any) -> Any:
            layers = pipeline.layers(stage, *coordinates, microbatch)
            return layers(parts[microbatch] if stage == 0 else inputs)

        schedule = build_forward(pipeline.num_ranks, len(counts), pipeline.num_chunks)
        # Parts that the user made may differ in shape where they do not differ in what they count.
        marks = range(len(counts)) if hasattr(pipeline.module, "split_body_input") else counts
        outputs = pipeline.run(schedule, compute, [(key, counts, mark) for mark in marks])
        if not pipeline.is_last:
            return None
        user_join = getattr(pipeline.module, "join_body_output", None)
        return join(outputs, counts, strict=wary) if user_join is None or len(outputs) == 1 else user_join(outputs)
