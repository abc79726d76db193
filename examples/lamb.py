"""LAMB (https://arxiv.org/abs/1904.00962), an optimizer for large batches that torch does not provide.

LAMB updates each parameter separately, so it works unchanged in a pipeline: each stage updates its own parameters::

    optimizer = Lamb(self.parameters(), lr=1.8e-2, weight_decay=0.1)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["Lamb"]


class Lamb(Optimizer):
    """Adam, with each update scaled to the norm of its parameter times the learning rate.

    This is Algorithm 2 of the paper. ``m`` and ``v`` are Adam's moments, each divided by ``1 - beta ** step``::

        update = m / (sqrt(v) + eps) + weight_decay * parameter
        parameter -= lr * (norm(parameter) / norm(update)) * update

    The ratio of the norms, called the trust ratio, is 1 if either norm is 0.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate.
        betas: Decay rates of the first and second moment.
        eps: Value added to the square root of the second moment.
        weight_decay: Fraction of the parameter that is added to the update.
        bias_correction: If True, moments are divided by ``1 - beta ** step``. Several implementations, such as
            Colossal-AI's, omit this division.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
    ) -> None:
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if value < 0.0:
                raise ValueError(f"{name} must be at least 0, got {value}")
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"betas must be at least 0 and below 1, got {betas}")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "bias_correction": bias_correction})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Args:
            closure: Function that computes the loss and the gradients.

        Returns:
            The value that the closure returns, or ``None`` without a closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, group)
        return loss

    def _step(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
        state["step"] += 1
        first, second = group["betas"]
        m = state["exp_avg"].lerp_(gradient, 1 - first)
        v = state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        if group["bias_correction"]:
            m, v = m / (1 - first ** state["step"]), v / (1 - second ** state["step"])
        update = (m / (v.sqrt() + group["eps"])).add_(parameter, alpha=group["weight_decay"])
        length, stride = parameter.norm(), update.norm()
        trust_ratio = torch.where((length > 0) & (stride > 0), length / stride, 1.0)
        parameter.sub_(update * (group["lr"] * trust_ratio))
