"""The state dict of a divided module has a part of it: who takes it after a run is told how to get all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerStatus
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_hybrid.distributed.dtensor import is_sharded
from lightning_hybrid.pipeline_parallel.placeholders import is_placeholder

_WARNS = "_warns_of_parts"  # where a module remembers the hook
_EXPECTED: ContextVar[bool] = ContextVar("_EXPECTED", default=False)


def warn_of_parts(module: LightningModule) -> None:
    """Have a warning where the state dict of a divided module is taken between runs, until it is whole again.

    Args:
        module: The user's module.
    """
    hook = vars(module).pop(_WARNS, None)
    if hook is not None:
        hook.remove()
    if any(map(_is_part, module.parameters())):
        vars(module)[_WARNS] = module.register_state_dict_post_hook(_warn)  # type: ignore[no-untyped-call]


def _is_part(tensor: Any) -> bool:
    return is_placeholder(tensor) or is_sharded(tensor)


@contextmanager
def part_expected() -> Iterator[None]:
    """Inside, it is known that a state dict has a part."""
    token = _EXPECTED.set(True)
    try:
        yield
    finally:
        _EXPECTED.reset(token)


def _warn(module: LightningModule, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """A hook that is copied and pickled with its module."""
    try:
        is_running = module.trainer.state.status == TrainerStatus.RUNNING
    except RuntimeError:  # it has no Trainer: a copy that a callback keeps
        return
    if is_running or _EXPECTED.get():
        return
    values = [value for name, value in state.items() if name.startswith(prefix)]
    absent, shards = sum(map(is_placeholder, values)), sum(map(is_sharded, values))
    if absent or shards:
        rank_zero_warn(
            f"This state dict of {type(module).__name__} is not all of it: of {len(values)} tensors, {absent} live on"
            f" other stages and have no values here, and of {shards} this rank has a shard. On every rank,"
            " `trainer.save_checkpoint(path, weights_only=True)` writes all, `trainer.strategy.gather_module()` makes"
            " the module whole, and `trainer.strategy.lightning_module_state_dict()` gives all on rank 0."
        )
