"""A step that takes another path than its plan, and the search for a remembered plan that fits.

A *path* is the sequence of calls that a step makes. A trace of the step yields one path, and a plan is made for it. The
next step may take another path, for example because it depends on a counter. Then :meth:`FrameCut.run` raises
:class:`PathChangedError` on the stages that notice it. `trainer.redo` (training) and `trainer.evaluation_step` undo the
step, and repeat it as the last stage decides: with another remembered plan, with a new trace, or in lockstep. To trace
every step instead would take 10 to 200 ms for each microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple

from torch import nn

from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.pipeline_parallel.frame.graph import Call
from lightning_hybrid.pipeline_parallel.frame.plan import FramePlan

#: Plan numbers with a special meaning: trace the step again, and run the step in lockstep (see :class:`Lockstep`).
FOLLOW, LOCKSTEP = -1, -2


class Choice(NamedTuple):
    """The next attempt at a step. The last stage makes it, and sends it to all ranks of the model group.

    Attributes:
        microbatch: The first microbatch whose plan did not fit. Earlier microbatches keep their plans.
        plan: The number of the next plan for this microbatch, ``FOLLOW`` or ``LOCKSTEP``.
        follows_rest: If True, later microbatches are traced too, even if plans are remembered for them.
    """

    microbatch: int
    plan: int
    follows_rest: bool

    def plan_of(self, microbatch: int) -> int | None:
        """Return the plan number of a microbatch; ``None`` for its remembered plan.

        Args:
            microbatch: The number of the microbatch, which must not be less than `self.microbatch`.
        """
        if microbatch == self.microbatch:
            return self.plan
        return FOLLOW if self.follows_rest else None


class PathChangedError(WrongUseError):
    """A step takes another path than its plan.

    Args:
        text: The message for the user.
        plan: The plan.
        number: The number of the first call that differs.
        called: The function, the module, or the position of the unit that is called there; ``None`` if the step has
            ended, or if `is_same` is True.
        is_same: True if the calls are equal, but the step uses values of another stage that it did not use in the
            trace.
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
    """Return the first plan that has the calls of a step up to and including the call that differed from its plan.

    `trainer.redo.attempts` calls it on the last stage, after a failed attempt.

    ::

        its plan     embed  0  1  2  3  head
        the step     embed  0  1  3                    call 3 differs
        fits         embed  0  1  3  head              so does any plan that begins like this

    Args:
        error: The error of the step.
        plans: The remembered plans for the signature of the step that have not been tried yet.

    Returns:
        The plan; ``None`` if no plan fits, so that the step must be traced.
    """
    begin = list(map(_called, islice(error.plan.graph.calls, error.number)))
    return next((plan for plan in plans if _fits(plan, begin, error.called, is_same=error.is_same)), None)


def _fits(plan: FramePlan, begin: Sequence[Any], called: Any, *, is_same: bool) -> bool:
    """Return True if a plan has some first calls and then a call of the given function, module or unit.

    Args:
        plan: The plan.
        begin: The functions, modules or unit positions of the first calls.
        called: The next one; ``None`` if the step has ended.
        is_same: True if only the first calls count.
    """
    calls = plan.graph.calls
    if list(map(_called, calls[: len(begin)])) != list(begin):
        return False
    if is_same:
        return True
    if called is None:
        return plan.parts[-1].free_from <= len(begin)
    if isinstance(called, int):  # calls after the trace may come before the unit
        units = [call.unit for call in calls[len(begin) :] if call.unit is not None]
        return bool(units) and units[0] == called
    return len(calls) > len(begin) and bool(_called(calls[len(begin)]) == called)


def _called(call: Call) -> Any:
    """Return the function or module of a call, or the position of its unit."""
    return call.function if call.unit is None else call.unit
