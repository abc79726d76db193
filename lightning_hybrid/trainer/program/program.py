"""The interface of a step program, which divides the user's step among the stages of a pipeline.

::

                      stage 0                    stages between      last stage
    WholeProgram      the whole step
    ChainProgram      code before the layers,    its layers          its layers, code around the layers, loss
                      its layers
    FrameProgram      its layers, code for them  the same            the same, and the rest of the step

There are three programs, because the most general one is the slowest: :class:`FrameProgram` accepts calls of single
layers in any order, but it traces each new step and runs user code on every stage.

A run starts with one program, which :func:`make_program` chooses. A chain whose layers a step calls in another way
replaces itself by a :class:`FrameProgram`, so callers read ``context.program`` again after :meth:`StepProgram.settle`
and :meth:`StepProgram.open_layers`. The callers `TrainingStep`, `EvaluationStep` and `StepContext` do not name the kind
of program::

    around each step         entered, unfollowed
    first training batch     is_unsettled, settle, find_uses, parameters_moved
    every training batch     plan, planned_steps, and for each stage and microbatch has_code, forward
    evaluation               is_unsettled, settle, may_run_again, evaluate
    failed evaluation        open_layers, run_in_lockstep

The *layers* are the pipelined layers of the body. A *chain* is an `nn.Sequential` that a step calls once, as a whole.
To *trace* a step is to run its code with fake tensors as parameters and as results of layers, and to record its calls.
A *plan* divides the calls of a trace among the stages; steps with equal keys use the same plan. In *lockstep*, all
stages execute the step together, call by call, and each call of a layer is computed by its stage.
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
from lightning_hybrid.pipeline_parallel.frame.unit_attributes import KeptTensorError


class StepCall(NamedTuple):
    """A call of the user's step.

    Attributes:
        step: The user's step.
        batch: The first argument: a microbatch, or the whole batch in evaluation and in manual optimization.
        others: The other arguments.
        coordinates: The coordinates of its random numbers: the kind of step, the number of the batch, and, in training,
            the number of the microbatch.
        key: The version of the module and the signatures of the arguments, which determine how the step is divided. In
            manual optimization, where a step is never divided, the version alone.
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
        """Return all arguments. If :attr:`device` is set, each access copies the batch to it."""
        batch = self.batch if self.device is None else move_data_to_device(self.batch, self.device)
        return batch, *self.others

    def moved(self) -> StepCall:
        """Return this call with its batch on the device."""
        return self if self.device is None else self._replace(batch=self.arguments[0], device=None)


class PlannedStep(NamedTuple):
    """The step of one microbatch with everything that the stages have to agree on before it runs.

    Attributes:
        plan: The calls of functions and layers that each stage makes, and the tensors that it sends.
        fetched: Values of parameters for stages that come before the stages that hold them, by name; only in steps
            without gradients.
        skipped: The positions in ``plan`` of calls that write parameters, and that another microbatch makes.
    """

    plan: FramePlan
    fetched: Mapping[str, Tensor]
    skipped: Collection[int]


class SavedState(Protocol):
    """The state of a rank before a step that may have to run again: :class:`~.redo.step_state.StepState`."""

    def keep_new(self) -> None:
        """Save state that tracing the step has created."""


_State = TypeVar("_State", bound=SavedState)


class Trial(Generic[_State]):
    """The record that a rank keeps of an evaluation step, in case the step has to run again in lockstep.

    Args:
        state: The state before the step; ``None`` if the step never runs again.

    Attributes:
        state: The state before the step. A program sets it to ``None`` once it knows the whole path of the step.
        error: The error of the last stage's part of the step; ``None`` if there was none. If the first tensor-parallel
            rank of the stage has an error, the step runs again on all ranks. If only another rank has one, it raises
            this error.
    """

    def __init__(self, state: _State | None) -> None:
        self.state = state
        self.error: Exception | None = None

    def run(self, part: Callable[[], Any]) -> Any:
        """Run the last stage's part of the step, and return its result; ``None`` if it raised an error.

        Raises:
            Exception: The error of the part, if the step never runs again or would not run in lockstep either.
        """
        if self.state is None:
            return part()
        try:
            return part()
        except Exception as error:  # includes errors of the user's code, which occur again in lockstep
            if is_transport(error) or isinstance(error, KeptTensorError):
                raise
            self.error = error
            return None


class StepProgram(ABC):
    """The division of the user's step among the stages.

    Attributes:
        cut: The object that traces and plans steps; ``None`` unless every stage runs code of the step by a plan.
        microbatch: The last coordinate of the step that is being traced, in training the number of its microbatch;
            ``None`` outside tracing. After an error in a trace, it remains for the text of the error.
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
        """Return a context for code inside the user's step that is not part of it, such as hooks and `self.log`."""
        return nullcontext()

    def has_code(self, stage: int) -> bool:
        """Return True if a stage runs code of the user's step, and not only layers."""
        return True

    # -- analysis before a step runs ---------------------------------------------------------------------------------

    def is_unsettled(self, step: str) -> bool:
        """Return True if it is still unknown how a step calls the layers.

        Args:
            step: The name of the step.
        """
        return False

    def settle(self, call: StepCall) -> None:  # noqa: B027  only a chain has to trace a step first
        """Trace a step once to find out how it calls the layers.

        This is a collective operation of the model group, and may replace the program of the context.

        Args:
            call: The step.

        Raises:
            ValueError: If the layers must be called one by one, but the tensor-parallel plan does not allow this.
        """

    def find_uses(
        self, calls: list[StepCall], precision: Callable[[], AbstractContextManager[None]]
    ) -> dict[str, set[int]] | None:
        """Return the stages that use each parameter outside the layers, by name, as far as this rank knows.

        Afterward, :attr:`places_parameters` is False.

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
        """Return the plan of each step; an empty list if :attr:`cut` is ``None``.

        Every rank of the model group must call this method, because the ranks compare the traces of new steps.

        Args:
            calls: The steps of a batch. Each is replaced by a call whose batch is on the device.
            precision: The precision plugin's context.
            choose: Returns for the number of a microbatch the number of its plan, ``path_change.FOLLOW`` to trace the
                step again, or ``None`` to use the remembered plan. Default: every step uses the remembered plan.

        Raises:
            WrongUseError: If a step cannot be divided.
        """
        return []

    def planned_steps(
        self, step: str, plans: Sequence[FramePlan], *, is_rehearsal: bool = False
    ) -> Sequence[PlannedStep]:
        """Return the planned steps of the microbatches of a batch; an empty sequence without plans.

        This is a collective operation of the model group if stages fetch parameters. It also warns about parameters
        that each step sends between stages.

        Args:
            step: The name of the step.
            plans: The plan of each microbatch.
            is_rehearsal: True if each microbatch is a separate step, as in a comparison, and therefore writes
                parameters.

        Raises:
            WrongUseError: If several microbatches write a parameter, and one microbatch alone cannot make this write.
        """
        return ()

    # -- a step ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def forward(self, stage: int, call: StepCall, inputs: Any, planned: PlannedStep | None) -> Callable[[], Any]:
        """Prepare the forward of a stage, and return the function that runs it.

        Args:
            stage: The stage.
            call: The step.
            inputs: The output of the previous stage; ``None`` for the first stage.
            planned: The step's entry in the result of :meth:`planned_steps`; ``None`` without plans.

        Returns:
            A function that returns the output for the next stage, or on the last stage the result of the step. The
            caller calls it, because each stack frame between the engine and a layer is a line in the user's
            traceback.
        """

    @abstractmethod
    def evaluate(self, call: StepCall, trial: Trial[Any]) -> Any:
        """Run an evaluation step on the whole batch, and return its result; only the last stage's result is used.

        This is a collective operation of the model group.

        Args:
            call: The step.
            trial: Runs the part of the last stage.

        Raises:
            WrongUseError: If the step can neither be divided nor run in lockstep.
        """

    # -- steps in lockstep -------------------------------------------------------------------------------------------

    def may_run_again(self, call: StepCall) -> bool:
        """Return True if an evaluation step that fails may run again in lockstep."""
        return False

    def open_layers(self, step: str) -> StepProgram:
        """Let any code call the layers from now on, and return the program of the run, which this may replace.

        This is a collective operation of the model group.

        Args:
            step: The name of the step that requires it.
        """
        return self

    def run_in_lockstep(self, call: StepCall) -> Any:
        """Run an evaluation step in lockstep, now and whenever it has the same key, and return its result.

        This is a collective operation of the model group. `EvaluationStep` calls it only on the program that
        :meth:`open_layers` returns, and only if :meth:`may_run_again` is True.
        """
        raise NotImplementedError
