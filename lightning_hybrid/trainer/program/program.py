"""The interface of a step program, which divides the user's step among the ranks of a model group.

::

                      stage 0                    stages between      last stage
    whole model       the whole step
    chain of layers   code before the chain      layers only         code around the chain, loss
    traced frame      its layers, code for them  the same            the same, and the rest of the step

A run makes one program. The training step, the evaluation step and the placement of parameters call it, and do not
depend on its kind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from lightning_hybrid.distributed.failure import is_transport
from lightning_hybrid.pipeline_parallel.frame.frame import FrameCut
from lightning_hybrid.pipeline_parallel.frame.plan import FramePlan


class StepCall(NamedTuple):
    """A call of the user's step, with a microbatch or with the whole batch of an evaluation.

    Attributes:
        step: The user's step.
        batch: The first argument.
        others: The other arguments.
        coordinates: The coordinates of its random numbers: the kind of step, the number of the batch, and, in training,
            the number of the microbatch.
        key: The version of the module and the signatures of the arguments, which determine how the step is divided.
        device: The device to which the batch moves when its values are needed; ``None`` if it does not have to move.
    """

    step: Callable[..., Any]
    batch: Any
    others: Sequence[Any]
    coordinates: tuple[int, ...]
    key: Hashable
    device: torch.device | None = None

    @property
    def name(self) -> str:
        """Return the name of the step."""
        return self.step.__name__

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Return all arguments, on the device."""
        batch = self.batch if self.device is None else move_data_to_device(self.batch, self.device)
        return batch, *self.others

    def moved(self) -> StepCall:
        """Return a call whose batch is on the device, and stays there as long as the call exists."""
        return self if self.device is None else self._replace(batch=self.arguments[0], device=None)


class StepPart(NamedTuple):
    """The part of a traced step that all stages agree on.

    Attributes:
        plan: The calls that each stage makes, and the tensors that it sends.
        fetched: Values of parameters for stages that need them before the stages that hold them, by name.
        skipped: The numbers of calls that write parameters, and that run only with another microbatch.
    """

    plan: FramePlan
    fetched: Mapping[str, Tensor]
    skipped: Collection[int]


class SavedState(Protocol):
    """The state of a rank before a step that may have to run again."""

    def keep_new(self) -> None:
        """Save state that tracing the step has created."""


_State = TypeVar("_State", bound=SavedState)


class Trial(Generic[_State]):
    """An evaluation step that may have to run again in lockstep, on one rank.

    Args:
        state: The state before the step; ``None`` if the step never runs again.

    Attributes:
        state: The state before the step. A program sets it to ``None`` once it knows the whole path of the step.
        error: On the last stage, the reason why the step has to run again; ``None`` if it does not.
    """

    def __init__(self, state: _State | None) -> None:
        self.state = state
        self.error: Exception | None = None

    def run(self, part: Callable[[], Any]) -> Any:
        """Return the result of the last stage's part of the step; ``None`` if the step has to run again."""
        if self.state is None:
            return part()
        try:
            return part()
        except Exception as error:  # includes errors of the user's code, which occur again in lockstep
            if is_transport(error):
                raise
            self.error = error
            return None


class StepProgram(ABC):
    """The division of the user's step among the stages.

    Attributes:
        cut: The cut of traced steps; ``None`` if the program does not trace steps.
        microbatch: The number of the microbatch whose step is being traced; ``None`` outside tracing.
        places_parameters: True until the first training batch has shown which stages use the parameters outside the
            layers; False if these parameters do not move.
    """

    cut: FrameCut | None = None
    microbatch: int | None = None
    places_parameters = False

    # -- around a step -----------------------------------------------------------------------------------------------

    def entered(self, *, repeats: bool) -> AbstractContextManager[None]:
        """Redirect calls of the layers to the program while the context is entered.

        Args:
            repeats: True if the user's step runs several times, once for each microbatch.
        """
        return nullcontext()

    def unfollowed(self) -> AbstractContextManager[None]:
        """Return a context for code that is not part of the user's step."""
        return nullcontext()

    def has_code(self, stage: int) -> bool:
        """Return True if a stage runs code of the user's step, and not only layers."""
        return True

    # -- analysis before a step runs ---------------------------------------------------------------------------------

    def is_open(self, step: str) -> bool:
        """Return True if it is still unknown how a step calls the layers.

        Args:
            step: The name of the step.
        """
        return False

    def settle(self, call: StepCall) -> None:  # noqa: B027  only a chain has to trace a step first
        """Trace a step once to find out how it calls the layers; every rank calls this.

        Args:
            call: The step.
        """

    def find_uses(
        self, calls: list[StepCall], precision: Callable[[], AbstractContextManager[None]]
    ) -> dict[str, set[int]] | None:
        """Return the stages that use each parameter outside the layers, by name, as far as this rank knows.

        Args:
            calls: The steps of the first training batch.
            precision: The precision plugin's context.

        Returns:
            The stages by name; ``None`` if a step could not be traced.
        """
        return {}

    def parameters_moved(self) -> None:  # noqa: B027  a program with one stage has all parameters
        """Update the program after a change of the context's parameter map."""

    def plan(
        self,
        calls: list[StepCall],
        precision: Callable[[], AbstractContextManager[None]],
        choose: Callable[[int], int | None] | None = None,
    ) -> list[FramePlan]:
        """Return the plan of each step; an empty list if the program does not trace steps.

        Args:
            calls: The steps of a batch. Each is replaced by a call whose batch is on the device.
            precision: The precision plugin's context.
            choose: Returns for a microbatch the number of its plan or ``FOLLOW``; ``None`` for the remembered plan.

        Raises:
            WrongUseError: If a step cannot be divided.
        """
        return []

    def parts(self, step: str, plans: Sequence[FramePlan], *, is_rehearsal: bool = False) -> Sequence[StepPart]:
        """Return the parts of the steps of a batch that all stages agree on; an empty sequence without plans.

        Args:
            step: The name of the step.
            plans: The plan of each step.
            is_rehearsal: True if each call is a separate step, as in a comparison, so that each call writes parameters.
        """
        return ()

    # -- a step ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def forward(self, stage: int, call: StepCall, inputs: Any, part: StepPart | None) -> Callable[[], Any]:
        """Prepare the forward of a stage, and return the function that runs it.

        Args:
            stage: The stage.
            call: The step.
            inputs: The output of the previous stage.
            part: The step's entry in the result of :meth:`parts`; ``None`` without plans.

        Returns:
            A function that returns the output for the next stage, or on the last stage the result of the step. The
            caller calls it, because each frame between the engine and a layer is a line in the user's traceback.
        """

    @abstractmethod
    def evaluate(self, call: StepCall, trial: Trial[Any]) -> Any:
        """Run an evaluation step on the whole batch, and return its result; only the last stage's result is used.

        Args:
            call: The step.
            trial: Runs the part of the last stage.
        """

    # -- steps in lockstep -------------------------------------------------------------------------------------------

    def may_run_again(self, call: StepCall) -> bool:
        """Return True if an evaluation step that fails may run again in lockstep, on all stages at once."""
        return False

    def opened(self, step: str) -> StepProgram:
        """Return the program in which any code may call the layers, and make it the program of the run.

        Args:
            step: The name of the step that needs it.
        """
        return self

    def run_in_lockstep(self, call: StepCall) -> Any:
        """Run an evaluation step in lockstep, now and whenever it has the same key, and return its result."""
        raise NotImplementedError
