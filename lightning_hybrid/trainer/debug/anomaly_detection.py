"""`Trainer(detect_anomaly=True)`: the first stage, layer and microbatch with a value that is not finite.

`Run` makes one :class:`AnomalyDetector` if the Trainer detects anomalies, and stores it in the attribute ``anomaly`` of
the training step. The training step enters :meth:`AnomalyDetector.batch` for each batch, and passes each loss of
automatic optimization to :meth:`AnomalyDetector.check_loss`. Torch's own detection, which Lightning also turns on, only
finds NaNs of backward functions, and does not know stages, layers or microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from lightning_hybrid.distributed.pytree import flatten
from lightning_hybrid.pipeline_parallel.engine import Engine

_OF_TORCH = "returned nan values"  # part of torch's message about a backward function


class AnomalyDetector:
    """A check of the outputs of every layer, and of the gradients of these outputs, during training.

    A layer is any submodule here, except metrics. Each check makes the host wait for the device. The hooks are added by
    the constructor.

    A NaN raises an error in the layer that produces it. An infinity can be intended, as in masks, so it is remembered,
    and named in the error if a NaN follows. An infinite gradient raises an error unless a `GradScaler` handles it.

    Args:
        module: The user's module, after it was parallelized.
        engine: The engine, which knows the current stage and microbatch.
        unfollowed: Returns a context in which the checks are not recorded as calls of the user's step.
        scales: True if there is a `GradScaler`, for which infinite gradients are not errors. NaNs remain errors.
    """

    def __init__(
        self,
        module: LightningModule,
        engine: Engine,
        *,
        unfollowed: Callable[[], AbstractContextManager[None]] = nullcontext,
        scales: bool = False,
    ) -> None:
        self._module, self._engine, self._scales = module, engine, scales
        self._unfollowed = unfollowed
        self._first_infinity = ""
        self._entered = ""  # the layer whose backward began last
        metrics = (metric for metric in module.modules() if isinstance(metric, Metric))
        passed_over = {module, *(part for metric in metrics for part in metric.modules())}
        self._names = {part: name for name, part in module.named_modules() if part not in passed_over}
        self._handles = [part.register_forward_hook(self._made, with_kwargs=True) for part in self._names]

    def __deepcopy__(self, memo: dict[int, Any]) -> AnomalyDetector:
        """Return the detector itself: callbacks that deep-copy the module copy the hooks of its layers, too."""
        return self

    def remove(self) -> None:
        """Remove the hooks from the layers."""
        for handle in self._handles:
            handle.remove()

    @property
    def _where(self) -> str:
        position = self._engine.position
        return "" if position is None else f" (stage {position.stage}, microbatch {position.microbatch})"

    def _named(self, layer: nn.Module) -> str:
        return f"layer `{self._names[layer]}` ({type(layer).__name__})"

    def _made(self, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if layer not in self._names or not self._module.training or not torch.is_grad_enabled():
            return  # the layer is a callback's copy, or the call is an evaluation
        with self._unfollowed():
            tensors = list(_floating(output))
            with torch.no_grad():
                has_nan, is_finite = _look_at(tensors)
                if has_nan:
                    given_nan, _ = _look_at(_floating((args, kwargs)))
                    if given_nan:
                        raise RuntimeError(
                            f"The input to {self._named(layer)} already contains NaNs, which come from the batch or"
                            f" from code before this layer{self._where}.{self._first_infinity} [LH708]"
                        )
                    raise RuntimeError(
                        f"The forward pass of {self._named(layer)} produced NaNs{self._where}.{self._first_infinity}"
                        " [LH708]"
                    )
                if not is_finite and not self._first_infinity:
                    self._first_infinity = f" The first infinite value came from {self._named(layer)}{self._where}."
            for tensor in tensors:
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._arrived, layer))  # type: ignore[no-untyped-call]

    def check_loss(self, loss: Any) -> None:
        """Check the loss of the user's step, after the layers have run.

        Args:
            loss: The loss; values that are not tensors are ignored.

        Raises:
            RuntimeError: If the loss is not finite although no output of a layer contains NaNs.
        """
        if isinstance(loss, Tensor):
            with self._unfollowed(), torch.no_grad():
                _, is_finite = _look_at(_floating(loss))
            if not is_finite:
                raise RuntimeError(
                    f"The loss is not finite{self._where}, but the layers produced no NaNs. The cause is therefore in"
                    f" the labels, or in the code between the last layer and the loss.{self._first_infinity} [LH707]"
                )

    def _arrived(self, layer: nn.Module, gradient: Tensor) -> None:
        """Check the gradient of a layer's output, with which the backward of this layer begins."""
        with torch.no_grad():
            has_nan, is_finite = _look_at(_floating(gradient))
        if has_nan or not (is_finite or self._scales):
            raise RuntimeError(self._backward_text("produced gradients that are not finite"))
        self._entered = self._named(layer)

    def _backward_text(self, what: str) -> str:
        of = f"of {self._entered}" if self._entered else "of the code after the last layer, such as the loss,"
        return f"The backward pass {of} {what}{self._where}.{self._first_infinity} [LH708]"

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Forget earlier infinities, and while entered, add the layer to torch's own errors about NaNs.

        Enter this context around the forward and backward of a batch, or around each of them.

        Raises:
            RuntimeError: If torch finds a NaN in a backward function, with the name of the layer.
        """
        self._first_infinity = self._entered = ""
        try:
            yield
        except RuntimeError as error:
            if _OF_TORCH not in str(error):
                raise
            raise RuntimeError(f"{self._backward_text('produced NaNs')} {error}") from error


def _floating(tree: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors in a tree that have values on this rank."""
    for leaf in flatten(tree)[0]:
        value = leaf.to_local() if isinstance(leaf, DTensor) else leaf
        if type(value) in (Tensor, nn.Parameter) and value.is_floating_point() and not value.is_meta:
            yield value


def _look_at(tensors: Iterable[Tensor]) -> tuple[bool, bool]:
    """Return two flags: True if there is a NaN, and True if all values are finite. Waits for the device."""
    has_nan, is_finite = False, True
    for tensor in tensors:
        if not tensor.isfinite().all():
            has_nan, is_finite = has_nan or bool(tensor.isnan().any()), False
    return has_nan, is_finite
