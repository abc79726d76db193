"""An evaluation step: the user's step runs once with the whole batch, and the step program splits it over stages.

Each `Run` makes one step object when it starts. `HybridStrategy` calls the object for each batch in `validation_step`,
`test_step` and `predict_step`. :class:`UncutEvaluationStep` is for model groups of one rank, :class:`EvaluationStep`
for all other model groups. A *model group* consists of the ranks that hold one replica.

A training step splits the batch before the user's step. An evaluation step does not, so that metrics and results are
computed from the whole batch, as in a single process. If the layers form a chain, the program splits only the input of
the layers into microbatches.

The *step program* decides which code of the user's step each stage runs. In *lockstep*, all stages execute the step
together, call by call, and each call of a layer is computed by its stage.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any

from lightning.pytorch import LightningModule

from lightning_hybrid.data_parallel.grad_sync import GradientSync
from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.pipeline_parallel.frame.path_change import LOCKSTEP, Choice
from lightning_hybrid.pipeline_parallel.splitting.microbatch import signature
from lightning_hybrid.trainer.program.program import StepCall, Trial
from lightning_hybrid.trainer.program.step_context import StepContext
from lightning_hybrid.trainer.redo.step_state import StepState
from lightning_hybrid.trainer.results.logging import merge_logs

# The first seed coordinates of evaluation steps; training steps have 0.
_STEPS = {"validation_step": 1, "test_step": 2, "predict_step": 3}


class UncutEvaluationStep:
    """An evaluation step that runs the user's step as it is, in a model group of one rank.

    Args:
        module: The user's module.
        grad_sync: The gradient synchronization, which unshards parameters.
    """

    def __init__(self, module: LightningModule, grad_sync: GradientSync) -> None:
        self._module, self._grad_sync = module, grad_sync

    def __call__(self, name: str, *arguments: Any, precision: Callable[[], AbstractContextManager[None]]) -> Any:
        """Run one batch; the arguments and the result are as for :meth:`EvaluationStep.__call__`."""
        with self._grad_sync.step(evaluates=True, is_cut=False), precision():
            return getattr(self._module, name)(*arguments)


class EvaluationStep:
    """An evaluation step that runs the user's step through the pipeline.

    Usually, the step program splits the step over the stages. If the results of layers determine which layers the step
    calls next, as in text generation, the step runs in lockstep. For some steps, this becomes known only when the last
    stage's part of the step raises an error. The effects of such a step are undone, and the step runs again::

        last stage      x = ...; while not is_over(x):  x = self(x)  fails    --> undone, runs again in lockstep
        other stages    their part                                            --> undone, runs again in lockstep

    An error of the user's code is raised in the second run.

    Args:
        context: The state that steps share.
        grad_sync: The gradient synchronization, which unshards parameters.
    """

    def __init__(self, context: StepContext, grad_sync: GradientSync) -> None:
        self._context, self._grad_sync = context, grad_sync
        self._tried = set[Hashable]()  # keys of steps that have run

    def __call__(self, name: str, *arguments: Any, precision: Callable[[], AbstractContextManager[None]]) -> Any:
        """Run one batch, and log the values that the step logs; every rank of the model group calls this.

        Args:
            name: ``"validation_step"``, ``"test_step"`` or ``"predict_step"``.
            arguments: The arguments of the user's step; the first one is the batch.
            precision: Returns the precision plugin's context for this kind of step.

        Returns:
            The result of the step, the same on every rank of the model group.

        Raises:
            ValueError: If the step can neither be divided among stages nor run in lockstep, or if it has changed state
                that cannot be restored for the second run.
            Exception: Any error of the user's code.
        """
        context, user_step = self._context, getattr(self._context.module, name)
        coordinates = _STEPS[name], context.streams.next_number("evaluation batches")
        with self._grad_sync.step(evaluates=True):
            # Computed before the user's code runs, which may remove something from the batch.
            version, shapes = (coordinates[0], context.version(gradients=False)), signature(arguments)
            call = StepCall(user_step, arguments[0], arguments[1:], coordinates, (version, shapes))
            if context.program.is_unsettled(name):
                with context.step(num_microbatches=1), precision():
                    context.program.settle(call)
            context.desync.note_batch(name, version, [shapes])
            program, trial = context.program, Trial(self._begin(call))
            with context.step(num_microbatches=1) as records, precision():
                value = program.evaluate(call, trial)
            failed = trial.error is not None
            again = Choice(0, LOCKSTEP, follows_rest=False) if failed and context.is_source else None
            shared = context.share(lambda: (value, merge_logs(records, [1])), again)
            if isinstance(shared, Choice):
                shared = self._again(call, trial, precision)
            elif trial.error is not None:  # not on the first tensor-parallel rank of the last stage, which decides
                with context.guard():
                    raise trial.error
            return shared

    def _begin(self, call: StepCall) -> StepState | None:
        """Save and return the state that a step may change, so that the step can run again.

        Returns:
            The state; ``None`` if the step cannot run in lockstep, or if a step with the same key has run before.
            Without the state, an error is raised at once.
        """
        context = self._context
        if not context.program.may_run_again(call):
            return None
        state = None
        if call.key not in self._tried:
            own = [layer for of_stage in context.layers.values() for layer in of_stage]
            state = StepState(context.module, (), context.all_layers, own)
            state.keep(list(call.arguments), copies_gradients=False)
        if context.remembers:
            self._tried.add(call.key)
        return state

    def _again(
        self, call: StepCall, trial: Trial[StepState], precision: Callable[[], AbstractContextManager[None]]
    ) -> Any:
        """Undo a step, run it again in lockstep, and return its result; every rank of the model group calls this.

        From now on, any code may call the layers, which may replace the step program of the run.

        Args:
            call: The step.
            trial: The state before the step and, on the last stage, the error of the first run.
            precision: Returns the precision plugin's context for this kind of step.

        Raises:
            ValueError: If the step has changed state that cannot be restored.
        """
        context = self._context
        assert trial.state is not None
        with context.guard():
            try:
                batch, *others = trial.state.put_back()
            except WrongUseError as refusal:
                raise refusal from trial.error
            context.forget_step()
            program = context.program.open_layers(call.name)
        with context.step(num_microbatches=1) as records, precision():
            value = program.run_in_lockstep(StepCall(call.step, batch, others, call.coordinates, call.key))
        return context.share(lambda: (value, merge_logs(records, [1])))
