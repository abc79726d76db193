"""Warnings about optimizer states in half precision, and about weight averages, because small updates are lost.

`Run.install` enters :func:`warning_of_half_precision` for the whole run. The check runs after the first optimizer step,
because optimizers create their states in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

_HALF = (torch.bfloat16, torch.float16)
_MOST = 3  # names in one message


@contextmanager
def warning_of_half_precision(trainer: Trainer, module: LightningModule) -> Iterator[None]:
    """While entered, check the states and averages once, after the first optimizer step, and warn.

    Nothing is checked if the module has no half-precision parameter.

    Args:
        trainer: The Trainer, whose optimizers exist.
        module: The user's module, in the precision in which it trains.
    """
    has_looked = False
    with ExitStack() as handles:

        def look(optimizer: Optimizer, *_: Any) -> None:
            nonlocal has_looked
            if not has_looked:  # torch iterates its hooks here, so they cannot be removed yet
                has_looked = True
                _look_at_states(optimizer, module)
                _look_at_averages(trainer, module)

        if _is_half(module.parameters()):
            for optimizer in trainer.strategy.optimizers:
                handles.callback(optimizer.register_step_post_hook(look).remove)
        yield


def _look_at_states(optimizer: Optimizer, module: LightningModule) -> None:
    """Warn if optimizer states are in half precision, which is not the case with master weights."""
    found: dict[str, torch.dtype] = {}
    for parameter, state in optimizer.state.items():
        if isinstance(parameter, Tensor) and parameter.dtype in _HALF:
            values = {name: value for name, value in state.items() if isinstance(value, Tensor)}
            found |= {name: value.dtype for name, value in values.items() if value.dtype in _HALF}
    if found:
        dtype = next(iter(found.values()))
        rank_zero_warn(
            f"{type(optimizer).__name__} keeps its states ({', '.join(found)}) in {dtype}, the dtype of the parameters"
            f" of {type(module).__name__}. Any update that is smaller than about {torch.finfo(dtype).eps:.0e} times the"
            " state or weight is lost to rounding. To keep states and weights in float32, use"
            " `HybridStrategy(master_weights=True)` or precision='bf16-mixed'."
        )


def _look_at_averages(trainer: Trainer, module: LightningModule) -> None:
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    owners = [(type(each).__name__, vars(each)) for each in callbacks] + [(type(module).__name__, vars(module))]
    held = [(f"{name}.{key}", value) for name, values in owners for key, value in values.items()]
    held += [(f"{type(module).__name__}.{name}", part) for name, part in module.named_modules()]
    averages = [(name, each) for name, each in held if isinstance(each, AveragedModel) and _is_half(each.parameters())]
    if averages:
        names = ", ".join(f"`{name}`" for name, _ in averages[:_MOST])
        rank_zero_warn(
            f"Weight averages are stored in half precision: {names}. Each update is so small that half precision rounds"
            " it away, so the averages never change. To average in float32, use `HybridStrategy(master_weights=True)`"
            " with Lightning's `EMAWeightAveraging`, or use precision='bf16-mixed'."
        )


def _is_half(tensors: Iterable[Tensor]) -> bool:
    return any(tensor.dtype in _HALF for tensor in tensors)
