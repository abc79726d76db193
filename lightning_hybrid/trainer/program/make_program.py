"""The choice of the step program of a run, and the search for uses of parameters in a single process.

`Run` calls :func:`make_program` once, unless the run needs no step program: with one stage, one microbatch and nothing
sharded. `DryRun`, which estimates memory without other ranks, calls :func:`find_uses` to place parameters outside the
layers on the same stages as a run does. The two functions are in one module, because both choose between a *chain* (an
`nn.Sequential` that a step should call once, as a whole) and layers that any code may call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from lightning_hybrid.data_parallel.grad_sync import GradientSync
from lightning_hybrid.pipeline_parallel.body import Body
from lightning_hybrid.pipeline_parallel.frame.plan import stages_by_parameter
from lightning_hybrid.pipeline_parallel.stage_map import StageMap
from lightning_hybrid.trainer.program.chain_program import ChainProgram, make_chain_use
from lightning_hybrid.trainer.program.frame_program import FrameProgram, make_frame
from lightning_hybrid.trainer.program.program import StepProgram
from lightning_hybrid.trainer.program.step_context import StepContext
from lightning_hybrid.trainer.program.whole_program import WholeProgram


def make_program(
    context: StepContext,
    body: Body | None,
    grad_sync: GradientSync,
    *,
    num_microbatches: int,
    frees_early: bool,
    can_open: bool,
) -> StepProgram:
    """Return the step program of a run. The caller stores it in ``context.program``.

    Args:
        context: The state that steps share.
        body: The layers that are divided into stages; ``None`` if there is one stage.
        grad_sync: The gradient synchronization.
        num_microbatches: `HybridStrategy(num_microbatches=...)`. Evaluation steps with a chain use it.
        frees_early: True if ZeRO stage 3 frees the full parameters of a layer after each call.
        can_open: True if the tensor-parallel plan allows that the layers of a chain are called one by one.
    """
    if body is None:
        return WholeProgram(context)
    if body.chain is not None:
        return ChainProgram(
            context,
            body,
            body.chain,
            grad_sync,
            num_microbatches=num_microbatches,
            frees_early=frees_early,
            can_open=can_open,
        )
    return FrameProgram(
        context,
        body,
        grad_sync,
        frees_early=frees_early,
        places_parameters=context.parameter_map.stage_map.places_outside,
    )


def find_uses(
    module: nn.Module,
    body: Body,
    stage_map: StageMap,
    step: Callable[..., Any],
    arguments: Sequence[Any],
    around_discovery: Callable[[], AbstractContextManager[object]],
) -> dict[str, set[int]]:
    """Return the stages that use each parameter outside the layers, by name, from a trace of one step.

    To trace a step is to run its code with fake tensors, and to record its calls. No other rank takes part.

    Args:
        module: The user's module, with all its parameters.
        body: The layers that are divided into stages.
        stage_map: The stages of the module's tensors.
        step: The user's step.
        arguments: Its arguments.
        around_discovery: Makes the context in which a step is traced.

    Raises:
        NotFollowedError: If the body is a chain, and the step cannot be traced.
        Exception: If the body is not a chain, and the step cannot be traced: a `WrongUseError`, or the error of user
            code.
    """
    host, seed = torch.device("cpu"), lambda number: None
    if body.chain is not None:
        tracer = make_chain_use(module, body.chain, stage_map, host, around_discovery=around_discovery)
        return stages_by_parameter([tracer.find(step, arguments, seed)])
    frame = make_frame(module, body, stage_map, host, remembers=False, around_discovery=around_discovery)
    with frame():
        return stages_by_parameter([frame.find_plan(0, step, arguments, seed).parameters])
