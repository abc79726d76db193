"""The step program for one stage: the user's step runs as it is, with each microbatch.

`make_program` makes it for runs without a pipeline, so that steps with several microbatches or with tensor or context
parallelism use the same `TrainingStep` and `EvaluationStep` as steps with a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning_hybrid.trainer.program.program import PlannedStep, StepCall, StepProgram, Trial
from lightning_hybrid.trainer.program.step_context import StepContext


class WholeProgram(StepProgram):
    """A program whose only stage runs the whole user's step.

    Args:
        context: The state that steps share.
    """

    def __init__(self, context: StepContext) -> None:
        self._context = context

    def forward(self, stage: int, call: StepCall, inputs: Any, planned: PlannedStep | None) -> Callable[[], Any]:
        """Prepare the user's step as a whole; see :meth:`StepProgram.forward`."""
        return partial(call.step, *self._context.enter_user_code(call, keep=True))

    def evaluate(self, call: StepCall, trial: Trial[Any]) -> Any:
        """Run the user's step on the whole batch; `trial` is unused, because the step never runs again."""
        return self._context.plain(self.forward(0, call, None, None)())
