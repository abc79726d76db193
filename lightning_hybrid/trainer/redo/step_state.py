"""State that a step may change on a rank: saved before the step, and restored before another attempt at it.

:class:`~.attempts.Attempts` uses it for training steps whose path of calls differs from the expected one, and
`EvaluationStep` for steps that run again in lockstep (on all stages at once). Large tensors and parameters are not
copied, because that would double the memory: their version counters show if the step has written them, and then the
step cannot be repeated.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.distributed.pytree import flatten, unflatten
from lightning_hybrid.pipeline_parallel.frame.stage_states import Contents
from lightning_hybrid.torch_internals import COMPILED_CALL, DisableTorchFunctionSubclass, version_counter

# Larger containers, such as vocabularies and lists of samples, are not copied.
_MOST_ENTRIES = 1000
# Larger tensors are not copied before each step; a step that writes one cannot be repeated.
_MOST_ELEMENTS = 1 << 20
# Attributes that the strategy replaces while a step runs.
_OF_STEPS = frozenset({"log", "print", "forward", COMPILED_CALL})


class StepState:
    """State that this rank's part of a step may change: gradients, the module, the batch, and `trainer.should_stop`.

    Random numbers and logs are not included, because each attempt starts with the same seeds and with empty logs.

    Args:
        module: The user's module.
        parameters: The parameters whose gradients this rank holds; empty for evaluation steps.
        units: The pipelined layers of all stages.
        own: The pipelined layers of this rank. Layers of other ranks have no state here.
    """

    def __init__(
        self,
        module: LightningModule,
        parameters: Sequence[Tensor],
        units: Collection[nn.Module],
        own: Iterable[nn.Module],
    ) -> None:
        self._trainer, self._parameters = module.trainer, parameters
        around = [part for _, part in module.named_modules(memo=set(units))]
        modules = [*around, *(part for unit in own for part in unit.modules())]
        self._contents = Contents((), modules, outside=[*modules, *units], most=_MOST_ENTRIES)

    def keep(self, microbatches: list[Any], *, copies_gradients: bool) -> None:
        """Save the state before a step, or before another attempt at it.

        Args:
            microbatches: The microbatches, or the arguments of an evaluation step. Their tensors are not copied.
            copies_gradients: True to copy accumulated gradients of earlier batches. Otherwise a step that adds to them
                cannot be repeated.
        """
        self._stops = self._trainer.should_stop
        self._leaves, self._spec = flatten(microbatches)
        self._contents.renew(self._leaves)
        with DisableTorchFunctionSubclass(), torch.no_grad():
            trained = set(map(id, self._parameters))
            held = [each for each in self._contents.tensors.values() if _has_memory(each) and id(each) not in trained]
            is_small = [each.numel() <= _MOST_ELEMENTS and not isinstance(each, nn.Parameter) for each in held]
            self._copies = [(each, each.detach().clone()) for each, small in zip(held, is_small, strict=True) if small]
            self._gradients = [(parameter, parameter.grad) for parameter in self._parameters]
            gradients = [gradient for _, gradient in self._gradients if gradient is not None]
            self._copied_gradients = [gradient.clone() for gradient in gradients] if copies_gradients else []
            others = [
                *self._parameters,
                *(leaf for leaf in self._leaves if isinstance(leaf, Tensor)),
                *(each for each, small in zip(held, is_small, strict=True) if not small),
                *(() if copies_gradients else gradients),
            ]
            self._versions = [(each, version_counter(each)) for each in others if not each.is_inference()]

    def release(self) -> None:
        """Drop the saved state after the step has finished, to free the memory of batches and gradients."""
        self._leaves, self._copies, self._gradients, self._copied_gradients, self._versions = [], [], [], [], []
        self._contents.release()

    def keep_new(self) -> None:
        """Keep attributes that tracing has created, so that later steps have them too; call it after a trace."""
        self._contents.keep_new(_OF_STEPS)

    def put_back(self) -> list[Any]:
        """Restore the state of the last :meth:`keep`, and return the microbatches.

        Raises:
            WrongUseError: If the step has written a tensor that was not copied, or changed a large container.
        """
        with DisableTorchFunctionSubclass(), torch.no_grad():
            written = next((each for each, version in self._versions if version_counter(each) != version), None)
            if written is not None:
                raise WrongUseError(cannot_text(f"changed a tensor of shape {list(written.shape)}"))
            if not self._contents.can_be_put_back:
                raise WrongUseError(cannot_text(f"changed a container with more than {_MOST_ENTRIES} entries"))
            self._contents.put_back()
            for tensor, value in self._copies:
                tensor.detach().copy_(value)
            copies = iter(self._copied_gradients)
            for parameter, gradient in self._gradients:
                parameter.grad = gradient if gradient is None else next(copies, gradient)
        self._trainer.should_stop = self._stops
        microbatches: list[Any] = unflatten(list(self._leaves), self._spec)
        return microbatches


def _has_memory(tensor: Tensor) -> bool:
    """Return True if a tensor has its own memory: not a placeholder, and not of another type, which has no memory."""
    return not tensor.is_meta and (type(tensor) in (Tensor, nn.Parameter) or isinstance(tensor, DTensor))


def cannot_text(why: str) -> str:
    """Return the error message for a step that cannot be repeated.

    Args:
        why: The reason: a verb phrase whose subject is the step.
    """
    return (
        "The step took a different path than an earlier step whose batch had the same shapes. The strategy could not"
        f" restart the step, because the step had already {why}. Gradients, attributes, containers of up to"
        f" {_MOST_ENTRIES} entries and buffers of up to {_MOST_ELEMENTS} elements can be restored. Parameters and"
        " tensors of the batch cannot be restored. At the first change of the path, gradients of earlier batches cannot"
        " be restored either. Set HybridStrategy(dynamic_shapes=True), which traces every step. [LH432]"
    )
