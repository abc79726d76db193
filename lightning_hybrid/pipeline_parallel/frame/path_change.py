"""A step that takes another path than its plan, and which of the plans that are remembered it may have taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple

from torch import nn

from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.pipeline_parallel.frame.graph import Call
from lightning_hybrid.pipeline_parallel.frame.plan import FramePlan

#: In the place of a plan's number: the step is followed, whatever is remembered.
FOLLOW = -1


class Choice(NamedTuple):
    """The next attempt at a step.

    Attributes:
        microbatch: The first one whose plan is another; those before it have taken theirs.
        plan: The number of its plan, or ``FOLLOW``.
        follows_rest: Whether those after it are followed too, and not only where nothing is remembered.
    """

    microbatch: int
    plan: int
    follows_rest: bool

    def plan_of(self, microbatch: int) -> int | None:
        """Return what is chosen for a microbatch; ``None`` for what is remembered."""
        if microbatch == self.microbatch:
            return self.plan
        return FOLLOW if self.follows_rest else None


class PathChangedError(WrongUseError):
    """The step takes another path than its plan.

    Args:
        text: For the user.
        plan: The plan.
        number: Of the first call that is another one.
        called: What is called there: a function, a module, or the position of a unit; ``None`` if the step has ended.
        is_same: Whether the calls are the same as far as they are known, but use other values.
    """

    def __init__(
        self,
        text: str,
        plan: FramePlan,
        number: int,
        called: Callable[..., Any] | nn.Module | int | None = None,
        *,
        is_same: bool = False,
    ) -> None:
        super().__init__(text)
        self.plan, self.number, self.called, self.is_same = plan, number, called, is_same


def find_fitting(error: PathChangedError, plans: Sequence[FramePlan]) -> FramePlan | None:
    """Return the first plan that makes the same calls up to the one where a step has left its plan, and that one.

    ::

        its plan     embed  0  1  2  3  head
        the step     embed  0  1  3                    call 3 is another one
        fits         embed  0  1  3  head              so does any plan that begins like this

    Args:
        error: Of that step.
        plans: That are remembered for its signature, and have not been tried.

    Returns:
        The plan; ``None`` if there is none, so that the step has to be followed.
    """
    begin = list(map(_called, islice(error.plan.graph.calls, error.number)))
    return next((plan for plan in plans if _fits(plan, begin, error.called, is_same=error.is_same)), None)


def _fits(plan: FramePlan, begin: Sequence[Any], called: Any, *, is_same: bool) -> bool:
    calls = plan.graph.calls
    if list(map(_called, calls[: len(begin)])) != list(begin):
        return False
    if is_same:
        return True
    if called is None:
        return plan.parts[-1].free_from <= len(begin)
    if isinstance(called, int):  # behind the last call that was followed, others may come before it
        units = [call.unit for call in calls[len(begin) :] if call.unit is not None]
        return bool(units) and units[0] == called
    return len(calls) > len(begin) and bool(_called(calls[len(begin)]) == called)


def _called(call: Call) -> Any:
    """The callee of a call; a unit is given by its position."""
    return call.function if call.unit is None else call.unit
