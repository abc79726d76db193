"""A step whose path has changed: what it has begun is undone, the new path is followed, and the step is done again."""

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
from lightning_hybrid.trainer.redo.path_changes import PathChanges
from lightning_hybrid.trainer.redo.step_state import StepState, cannot_text
from lightning_hybrid.trainer.step_context import StepContext

#: What ends a run of the schedule whose step may be done again.
BREAKS_OFF = (PathChangedError, BlankMessageError)

# So many attempts are made with plans that are remembered.
_GUESSES = 2


class Redo:
    """Makes the attempts at each step of a run, on one rank.

    Args:
        context: What steps need.
        grad_sync: Has the gradients.
    """

    def __init__(self, context: StepContext, grad_sync: GradientSync) -> None:
        self._context, self._grad_sync = context, grad_sync
        self._changes = PathChanges()
        self._state: StepState | None = None
        self._state_of: Any = None

    def __call__(self, step: int, *, is_first: bool) -> Attempts | None:
        """Return the attempts at a step that has a backward; ``None`` if it is not done again.

        Args:
            step: The number of the batch since training began.
            is_first: Whether it is the first one whose gradients are accumulated.
        """
        context, grad_sync, cut = self._context, self._grad_sync, self._context.frame.cut
        # Replicas meet in what a failed attempt leaves out: shards, statistics, reductions that cannot be taken back.
        # On a device no rank looks into a gradient, so it reduces what it has before it knows.
        meets = grad_sync.zero.is_active or grad_sync.has_sync_batch_norm
        meets |= grad_sync.reduces_early and context.engine.posts_kernels
        if cut is None or not context.frame.remembers or meets:
            return None
        epoch = context.module.trainer.current_epoch  # hooks make new metrics at its begin, for example
        if self._state is None or self._state_of != (cut, epoch):
            own = [layer for layers in context.layers.values() for layer in layers]
            self._state = StepState(context.module, grad_sync.local_parameters(), cut.layers, own)
            self._state_of = cut, epoch
        copies = not is_first and self._changes.have_been
        return Attempts(context, grad_sync, self._changes, step, self._state, copies_gradients=copies)


class Attempts:
    """The attempts at one step, on one rank.

    ::

        every rank       runs its part; where the path is another one, it goes on with blank messages
        the last stage   sees that in every case, and chooses a plan: with the results it sends the choice
        every rank       puts back what it has begun, and runs its part with the plan that was chosen

    So an ordinary step has no message more. Replicas do not wait for each other's attempts: gradients are reduced in
    the last backward of a stage, and a rank knows before that one that the step has failed.

    Args:
        context: What steps need.
        grad_sync: Has the gradients.
        changes: What is known about paths that change.
        step: The number of the batch since training began.
        state: What is put back.
        copies_gradients: Whether gradients that are there already are copied.

    """

    def __init__(
        self,
        context: StepContext,
        grad_sync: GradientSync,
        changes: PathChanges,
        step: int,
        state: StepState,
        *,
        copies_gradients: bool,
    ) -> None:
        self._context, self._grad_sync, self._changes, self._step = context, grad_sync, changes, step
        self._state, self._copies_gradients = state, copies_gradients
        self._choice: Choice | None = None
        self._plans: Sequence[FramePlan] = ()
        self._error: PathChangedError | BlankMessageError | None = None
        self._number, self._num_followed = 0, 0
        self._tried, self._followed = set[int](), set[int]()

    def begin(self, microbatches: list[Any]) -> list[Any]:
        """Begin an attempt, and return the microbatches: the first time those that are given.

        Args:
            microbatches: The microbatches.
        """
        if self._choice is not None:
            microbatches = self._state.put_back()
            self._context.forget_step()
        self._error, self._num_followed = None, self._cut.num_followed
        self._state.keep(microbatches, copies_gradients=self._copies_gradients)
        return microbatches

    def choose(self, microbatch: int) -> int | None:
        """Return the number of the plan of a microbatch, or ``FOLLOW``; ``None`` for what is remembered."""
        if self._choice is None:
            return FOLLOW if self._changes.follows_first else None
        if microbatch < self._choice.microbatch:
            return self._plans[microbatch].number
        return self._choice.plan_of(microbatch)

    def follow(self, plans: Sequence[FramePlan]) -> None:
        """Take the plans of the microbatches, which an attempt follows from here on."""
        self._plans = plans
        if self._cut.num_followed > self._num_followed:
            self._state.keep_new()

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Around an attempt, which may end with one of what breaks it off."""
        try:
            yield
        except BREAKS_OFF as error:
            self._error = error

    def find_choice(self) -> Choice | None:
        """Return, on the last stage, how the step is done again; ``None`` if it is over.

        Raises:
            PathChangedError: If its path cannot be found out.
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
            else:  # another rank has seen it
                fitting = next(iter(others), None)
        # Microbatches with paths of their own would fail one after the other.
        follows_rest = self._number > 1 and fitting is None
        if fitting is None:
            self._followed |= set(range(microbatch, len(self._plans) if follows_rest else microbatch + 1))
        return Choice(microbatch, FOLLOW if fitting is None else fitting.number, follows_rest)

    @property
    def _cut(self) -> FrameCut:
        cut = self._context.frame.cut
        assert cut is not None
        return cut

    def end(self, value: Any) -> bool:
        """End an attempt, and return whether there is another one.

        Args:
            value: What the last stage has sent: the value of the step, or how it is done again.

        Raises:
            PathChangedError: If this rank alone has seen another path.
            WrongUseError: If gradients are being reduced already.
        """
        if not isinstance(value, Choice):
            if self._error is not None:
                raise self._error
            self._state.release()
            return False
        if self._grad_sync.is_reducing:
            raise WrongUseError(cannot_text("has begun to average its gradients over the replicas"))
        self._choice = value
        self._changes.note(value, self._step)
        return True
