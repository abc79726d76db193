"""A step whose path differs from its plan, and the search for a remembered plan that fits it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple

from torch import nn

from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.pipeline_parallel.frame.graph import Call
from lightning_hybrid.pipeline_parallel.frame.plan import FramePlan

#: Plan numbers that stand for tracing the step anew, and for running it in lockstep.
FOLLOW, LOCKSTEP = -1, -2


class Choice(NamedTuple):
    """The next attempt at a step.

    Attributes:
        microbatch: The first microbatch whose plan did not fit; earlier ones keep theirs.
        plan: The number of its next plan, ``FOLLOW`` or ``LOCKSTEP``.
        follows_rest: Whether later microbatches are traced too, even if plans are remembered for them.
    """

    microbatch: int
    plan: int
    follows_rest: bool

    def plan_of(self, microbatch: int) -> int | None:
        """Return the plan number of a microbatch; ``None`` for its remembered plan."""
        if microbatch == self.microbatch:
            return self.plan
        return FOLLOW if self.follows_rest else None


class PathChangedError(WrongUseError):
    """An error for a step whose path differs from its plan.

    Args:
        text: The message for the user.
        plan: The plan.
        number: The position of the first call that differs.
        called: The callee there: a function, a module, or the position of a unit; ``None`` if the step has ended.
        is_same: Whether all known calls are equal, but use other values.
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
    """Return the first plan that agrees with the calls of a step up to and including the one that left its plan.

    ::

        its plan     embed  0  1  2  3  head
        the step     embed  0  1  3                    call 3 is another one
        fits         embed  0  1  3  head              so does any plan that begins like this

    Args:
        error: The error of that step.
        plans: The remembered plans for its signature that were not tried yet.

    Returns:
        The plan; ``None`` if no plan fits, and the step must be traced.
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
    if isinstance(called, int):  # after the last traced call, other calls may come before it
        units = [call.unit for call in calls[len(begin) :] if call.unit is not None]
        return bool(units) and units[0] == called
    return len(calls) > len(begin) and bool(_called(calls[len(begin)]) == called)


def _called(call: Call) -> Any:
    """The callee of a call; a unit is given by its position."""
    return call.function if call.unit is None else call.unit
