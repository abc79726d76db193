"""The position of this rank in its run: the Trainer's loop and the engine's action, for errors and the watch thread.

`StepContext.guard` and `ExceptionCallback` call :func:`place_text` when this rank fails, so that other ranks can name
the place. The watch thread, which detects ranks that are stuck, calls :func:`find_position` again and again. The
position is read from existing counters, so that steps do no work for it.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.distributed.watch.verdict.stall import Position
from lightning_hybrid.pipeline_parallel.engine import Engine
from lightning_hybrid.pipeline_parallel.schedules import Action, ChannelKey


def place_text(engine: Engine, mesh: Mesh, trainer: Trainer | None) -> str:
    """Return the name of this rank with its stage and action, or its batch, for an error on the other ranks.

    Args:
        engine: Runs the actions of schedules.
        mesh: The ranks, whose groups may be destroyed.
        trainer: The Trainer; ``None`` if no run has begun.
    """
    rank, position = mesh.peer(mesh.pipeline_rank), engine.position
    text = f"Rank {rank} (pipeline rank {mesh.pipeline_rank}, data rank {mesh.data_rank})"
    if position is not None:
        return f"{text}, stage {position.stage}, action {position},"
    begun = 0 if trainer is None else _loop(trainer).batch_progress.current.ready
    if trainer is None or trainer.state.stage is None or not begun:
        return text
    return f"{text}, {trainer.state.stage.value.replace('_', ' ')} batch {begun - 1},"


def _loop(trainer: Trainer) -> Any:
    """Return the loop that is running."""
    epoch_loop = trainer.fit_loop.epoch_loop
    if trainer.state.fn == TrainerFn.FITTING:
        return epoch_loop if trainer.training else epoch_loop.val_loop
    if trainer.state.fn == TrainerFn.TESTING:
        return trainer.test_loop
    return trainer.predict_loop if trainer.state.fn == TrainerFn.PREDICTING else trainer.validate_loop


def find_position(trainer: Trainer, engine: Engine, mesh: Mesh) -> Position:
    """Return the position of this rank, without changing or waiting for anything.

    Args:
        trainer: The Trainer.
        engine: Runs the actions of schedules.
        mesh: The ranks.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    loops = (epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
    evaluated = tuple(loop.batch_progress.total.ready for loop in loops)
    action, trained = engine.position, epoch_loop.batch_progress.total.ready
    stage = trainer.state.stage
    position = Position(progress=(engine.runs, action, trained, evaluated))
    if stage is not None:
        number = trained if trainer.training else sum(evaluated)
        position.batch = f"{stage.value} {max(number - 1, 0)}"
    awaited = next((each.awaited for each in mesh.broadcasts if each.awaited is not None), None)
    if awaited is not None:
        channel, other, _ = awaited
        position.pending, position.waits_for = [channel], [other]
    if action is None or awaited is not None:
        return position

    def told(message: Action, channel: ChannelKey) -> str:
        sender, receiver, _ = channel
        if message.kind.is_receive:
            return f"{message} from rank {mesh.peer(sender)}"
        return f"{message} to rank {mesh.peer(receiver)}"

    under_way = engine.under_way()
    position.action, position.last = str(action), under_way.last
    position.pending = [told(*each) for each in under_way.messages]
    if under_way.awaited is not None:
        position.pending.insert(0, told(*under_way.awaited))
        position.waits_for = [mesh.peer(under_way.awaited[1][0])]
    return position
