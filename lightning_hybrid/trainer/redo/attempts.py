"""Attempts at a training step: restores the state and repeats the step if its path differs from its plan.

To *trace* (follow) a step is to run its code with fake tensors, and to record its calls. A *path* is the sequence of
calls that a step makes, and a *plan* divides the calls of one path among the stages. The plan of each traced path is
remembered, so that most steps run without being traced. The path of a step can still differ from its plan, for example
if it depends on a counter. To trace each step would be simpler, but takes 10 to 200 ms for each microbatch.

`TrainingStep` makes one :class:`Redo` for a run, calls it for each batch with a plan, and runs the batch in the
:class:`Attempts` that it returns. Evaluation steps, which repeat in another way, use only :mod:`.step_state`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning_hybrid.data_parallel.grad_sync import GradientSync
from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.pipeline_parallel.frame.frame import FrameCut
from lightning_hybrid.pipeline_parallel.frame.path_change import FOLLOW, Choice, PathChangedError, find_fitting
from lightning_hybrid.pipeline_parallel.frame.plan import FramePlan
from lightning_hybrid.pipeline_parallel.p2p import BlankMessageError
from lightning_hybrid.trainer.program.step_context import StepContext
from lightning_hybrid.trainer.redo.path_changes import PathChanges
from lightning_hybrid.trainer.redo.step_state import StepState, cannot_text

#: Errors that end a run of the schedule, after which its step may be repeated: the path has changed on this rank, or on
#: a rank that has therefore sent a *blank* message, which has no content.
BREAKS_OFF = (PathChangedError, BlankMessageError)

# The number of attempts with remembered plans before the step is traced.
_GUESSES = 2


class Redo:
    """A factory of the attempts at each step of a run, on one rank.

    Args:
        context: The state that steps share.
        grad_sync: The gradient synchronization, which has the parameters of this rank.
    """

    def __init__(self, context: StepContext, grad_sync: GradientSync) -> None:
        self._context, self._grad_sync = context, grad_sync
        self._changes = PathChanges()
        self._state: StepState | None = None
        self._state_of: Any = None

    def __call__(self, cut: FrameCut, step: int, *, is_first: bool) -> Attempts | None:
        """Return the attempts at a step with a backward; ``None`` if the step cannot be repeated.

        All ranks of a model group get the same kind of result.

        Args:
            cut: The :class:`FrameCut` that traces the step and makes its plans.
            step: The number of the batch since training began.
            is_first: True if the batch is the first of several batches whose gradients are accumulated.
        """
        context, grad_sync = self._context, self._grad_sync
        # Replicas wait for each other in collectives that a failed attempt skips or cannot undo: ZeRO's gathers,
        # statistics of SyncBatchNorm, early reductions. On a GPU, a rank reduces gradients before it can read in the
        # received messages that the attempt has failed. If steps are not remembered, each step is traced before it
        # runs, so its path fits.
        meets = grad_sync.zero.is_active or grad_sync.has_sync_batch_norm
        meets |= grad_sync.reduces_early and context.engine.posts_kernels
        if meets or not context.remembers:
            return None
        epoch = context.module.trainer.current_epoch  # hooks at the start of an epoch may have replaced metrics
        if self._state is None or self._state_of != (cut, epoch):
            own = [layer for layers in context.layers.values() for layer in layers]
            self._state = StepState(context.module, grad_sync.local_parameters(), cut.layers, own)
            self._state_of = cut, epoch
        copies = not is_first and self._changes.have_been
        return Attempts(context, grad_sync, cut, self._changes, step, self._state, copies_gradients=copies)


class Attempts:
    """The attempts at one step, on one rank.

    ::

        every rank       runs its stages; from the point where the path differs, it sends blank messages
        the last stage   always receives the blank messages; it chooses a plan and sends the choice instead of results
        every rank       restores its state, and runs its stages with the chosen plan

    A step whose path does not change sends no additional message. Replicas do not wait for each other's attempts:
    gradients are reduced in the last backward of a stage, and a rank learns before it that the attempt has failed.

    Args:
        context: The state that steps share.
        grad_sync: The gradient synchronization.
        cut: The :class:`FrameCut` that traces the step and makes its plans.
        changes: The record of changed paths.
        step: The number of the batch since training began.
        state: Saves the state before each attempt, and restores it before the next one.
        copies_gradients: True to copy accumulated gradients of earlier batches, so that they can be restored.
    """

    def __init__(
        self,
        context: StepContext,
        grad_sync: GradientSync,
        cut: FrameCut,
        changes: PathChanges,
        step: int,
        state: StepState,
        *,
        copies_gradients: bool,
    ) -> None:
        self._context, self._grad_sync, self._cut = context, grad_sync, cut
        self._changes, self._step = changes, step
        self._state, self._copies_gradients = state, copies_gradients
        self._choice: Choice | None = None
        self._plans: Sequence[FramePlan] = ()
        self._error: PathChangedError | BlankMessageError | None = None
        self._number, self._num_followed = 0, 0
        self._tried, self._followed = set[int](), set[int]()

    def begin(self, microbatches: list[Any]) -> list[Any]:
        """Begin an attempt, and return its microbatches: the argument in the first attempt, restored ones later.

        Args:
            microbatches: The microbatches of the batch.

        Raises:
            WrongUseError: If the failed attempt has changed something that cannot be restored.
        """
        if self._choice is not None:
            microbatches = self._state.put_back()
            self._context.forget_step()
        self._error, self._num_followed = None, self._cut.num_followed
        self._state.keep(microbatches, copies_gradients=self._copies_gradients)
        return microbatches

    def choose(self, microbatch: int) -> int | None:
        """Return the plan number of a microbatch, or ``FOLLOW`` to trace it; ``None`` for the remembered plan.

        This is the argument `choose` of :meth:`StepProgram.plan`.
        """
        if self._choice is None:
            return FOLLOW if self._changes.follows_first else None
        if microbatch < self._choice.microbatch:
            return self._plans[microbatch].number
        return self._choice.plan_of(microbatch)

    def follow(self, plans: Sequence[FramePlan]) -> None:
        """Set the plans of the microbatches for the current attempt, and keep attributes that traces have created."""
        self._plans = plans
        if self._cut.num_followed > self._num_followed:
            self._state.keep_new()

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Catch an error of :data:`BREAKS_OFF`, which ends a failed attempt; enter it around the schedule."""
        try:
            yield
        except BREAKS_OFF as error:
            self._error = error

    def find_choice(self) -> Choice | None:
        """Return the choice for the next attempt; ``None`` if this attempt has succeeded.

        Only the rank that sends the results of the model group calls this (see :attr:`StepContext.is_source`), and
        sends the choice to the other ranks.

        Raises:
            PathChangedError, BlankMessageError: If the path of a microbatch still differs after it was traced.
        """
        if self._error is None:
            return None
        position = self._context.engine.broke_off
        assert position is not None
        microbatch = position.microbatch
        if microbatch in self._followed:
            raise self._error
        self._number += 1
        self._tried.add(self._plans[microbatch].number)
        others = [plan for plan in self._cut.other_plans(self._plans[microbatch]) if plan.number not in self._tried]
        fitting = None
        if self._number <= _GUESSES:
            if isinstance(self._error, PathChangedError):
                fitting = find_fitting(self._error, others)
            else:  # another rank has detected the change
                fitting = next(iter(others), None)
        # Otherwise microbatches with new paths would fail one after the other.
        follows_rest = self._number > 1 and fitting is None
        if fitting is None:
            self._followed |= set(range(microbatch, len(self._plans) if follows_rest else microbatch + 1))
        return Choice(microbatch, FOLLOW if fitting is None else fitting.number, follows_rest)

    def end(self, value: Any) -> bool:
        """End an attempt on every rank, and return True if the step needs another attempt.

        Args:
            value: The message of the last stage: the value of the step, or the choice for the next attempt.

        Raises:
            PathChangedError, BlankMessageError: If this attempt failed here, but the last stage has not noticed it.
            WrongUseError: If another attempt is needed, but the reduction of gradients has begun.
        """
        if not isinstance(value, Choice):
            if self._error is not None:
                raise self._error
            self._state.release()
            return False
        if self._grad_sync.is_reducing:
            raise WrongUseError(cannot_text("begun to average its gradients over the replicas"))
        self._choice = value
        self._changes.note(value, self._step)
        return True
