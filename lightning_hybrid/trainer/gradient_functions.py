"""Gradient functions of torch and Lightning, such as `clip_grad_norm_`, made to use all gradients of the model.

A rank holds only some gradients: the gradients of its stages, its tensor-parallel shards and its ZeRO shards. Users
call these functions in hooks such as `on_before_optimizer_step`, and expect the norm of the full model. Existing code
and libraries do not call `HybridStrategy.grad_norm`, so the functions themselves are replaced.

`HybridStrategy.setup` makes :class:`GradientFunctions` if other ranks own a part of the parameters, and `Run.install`
enters :meth:`~GradientFunctions.installed` for the whole run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.nn import utils

from lightning_hybrid.data_parallel.grad_clip import parameter_norms, total_norm
from lightning_hybrid.data_parallel.grad_sync import GradientSync
from lightning_hybrid.distributed.dtensor import local_view
from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.pipeline_parallel.placeholders import AbsentGradient, is_placeholder

_Function = Callable[..., Any]


def route(function: _Function, to: _Function) -> Callable[[], None]:
    """Replace the code of a library function in this process, for all names under which it was imported.

    The function object does not change, so code that ran ``from torch.nn.utils import clip_grad_norm_`` before is
    affected too.

    Args:
        function: A Python function without free variables, or a wrapper of such a function.
        to: The replacement, which receives the original function and then the arguments of the call.

    Returns:
        A function that restores the original code. Restore functions that were replaced several times in reverse order.
    """
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    assert isinstance(function, FunctionType), f"{function} must be a Python function"
    code, keywords = function.__code__, function.__kwdefaults__
    before = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    before.__kwdefaults__ = keywords
    function.__kwdefaults__ = {"_to": partial(to, before)}
    function.__code__ = _routed.__code__

    def undo() -> None:
        function.__code__, function.__kwdefaults__ = code, keywords

    return undo


def _routed(*args: Any, _to: _Function, **kwargs: Any) -> Any:
    """Call the replacement. Its code is the new code of each replaced function."""
    return _to(*args, **kwargs)


class GradientFunctions:
    """Replacements of gradient functions of torch and Lightning, which cover the full model during a run.

    Norms are collectives over the ranks that own the parameters (the model group, or all ranks with ZeRO), so each of
    these ranks must call the function, in the same order. Tensors that do not belong to the module are passed to the
    original functions.

    ============================================  =================================================================
    `torch.nn.utils.get_total_norm`               the norm of the gradients of all stages and shards
    `torch.nn.utils.clip_grad_norm_`              the same norm; each rank scales its own gradients
    `clip_grads_with_norm_`, `clip_grad_value_`   each rank changes its own gradients
    `lightning.pytorch.utilities.grad_norm`       the norm of each parameter, and the total norm, on every rank
    ============================================  =================================================================

    Args:
        grad_sync: The gradient synchronization, which has the parameters of this rank.
        norm_arguments: Returns the keyword arguments of :func:`~.grad_clip.total_norm`.
    """

    def __init__(self, grad_sync: GradientSync, norm_arguments: Callable[[], Mapping[str, Any]]) -> None:
        self._grad_sync, self._norm_arguments = grad_sync, norm_arguments

    @contextmanager
    def installed(self) -> Iterator[None]:
        """While entered, replace the functions, for all code of this process."""
        routes: dict[_Function, _Function] = {
            utils.get_total_norm: self._total_norm,
            utils.clip_grad_norm_: self._clip_norm,
            utils.clip_grads_with_norm_: self._change,
            utils.clip_grad_value_: self._change,
            grad_norm: self._norm_by_name,
        }
        with ExitStack() as undo:
            for function, to in routes.items():
                undo.callback(route(function, to))
            yield

    def _clip_norm(self, before: _Function, parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Any:
        """Call torch's `clip_grad_norm_` with the optimizer's parameters. It calls two other replaced functions."""
        return before(self._optimized(_listed(parameters)), *args, **kwargs)

    def _change(self, before: _Function, parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Any:
        """Call a function that changes gradients in place with the local tensors of this rank."""
        held = [each for each in self._optimized(_listed(parameters)) if not is_placeholder(each)]
        return before([local_view(each) for each in held], *args, **kwargs)

    def _total_norm(
        self,
        before: _Function,
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Any:
        """Return the norm of the gradients of the full model; a collective if the gradients belong to the module.

        Raises:
            ValueError: If the exponent is not positive.
            WrongUseError: See :meth:`_held`.
        """
        tensors = _listed(tensors)
        held = self._held(tensors)
        if held is None:
            return before(tensors, norm_type, error_if_nonfinite, foreach)
        norm = total_norm(held, _exponent(norm_type), **self._norm_arguments())
        like = tensors or list(self._grad_sync.optimized_parameters().values())
        norm = norm.to(torch.stack([each.new_zeros((), device="meta") for each in like]).dtype) if like else norm
        return before([norm], norm_type, error_if_nonfinite, foreach)

    def _norm_by_name(
        self, before: _Function, module: nn.Module, norm_type: float | str, group_separator: str = "/"
    ) -> Any:
        """Return the norm of each parameter and the total norm, by name; a collective if they belong to the module.

        Raises:
            ValueError: If the exponent is not positive.
            WrongUseError: If only some parameters belong to the module of the run.
        """
        named = dict(module.named_parameters())
        parameters = self._optimized(list(named.values()))
        own = self._grad_sync.optimized_parameters()
        is_own = [id(each) in own or is_placeholder(each) for each in parameters]
        if not any(is_own):
            return before(module, norm_type, group_separator)
        if not all(is_own):
            raise WrongUseError(_MIXED_TEXT)
        exponent = _exponent(norm_type)
        norms = parameter_norms(parameters, exponent, **self._norm_arguments())
        found = {
            f"grad_{exponent}_norm{group_separator}{name}": norm.to(parameter.dtype)
            for name, parameter, norm in zip(named, parameters, norms, strict=True)
            if norm is not None
        }
        if found:
            found[f"grad_{exponent}_norm_total"] = torch.linalg.vector_norm(torch.stack(list(found.values())), exponent)
        return found

    def _optimized(self, parameters: Sequence[Tensor]) -> list[Any]:
        """Return the parameters, where the optimizer's parameter shards replace unsharded parameters."""
        own = self._grad_sync.optimized_parameters()
        return [own.get(id(parameter), parameter) for parameter in parameters]

    def _held(self, gradients: Sequence[Tensor]) -> list[nn.Parameter] | None:
        """Return the parameters of this rank that some gradients belong to.

        Args:
            gradients: The gradients that the user passed.

        Returns:
            The parameters; ``None`` if the gradients do not belong to the module. An empty list is valid, because all
            parameters of a rank may be frozen or belong to another optimizer.

        Raises:
            WrongUseError: If only some gradients belong to the module, or if a step with ZeRO has moved the gradients
                to the shards.
        """
        if not gradients and self._grad_sync.zero.is_open:
            raise WrongUseError(_IN_STEP_TEXT)
        own = {id(each.grad): each for each in self._grad_sync.optimized_parameters().values() if each.grad is not None}
        is_own = [id(each) in own or isinstance(each, AbsentGradient) for each in gradients]
        if all(is_own):
            return [own[id(each)] for each in gradients if id(each) in own]
        if any(is_own) or any(map(is_placeholder, gradients)):
            raise WrongUseError(_MIXED_TEXT)
        return None


def _listed(tensors: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """Return one or several tensors as a list."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _exponent(norm_type: float | str) -> float:
    """Return the exponent of a norm as a number.

    Raises:
        ValueError: If the exponent is not positive.
    """
    exponent = float(norm_type)
    if not exponent > 0:
        raise ValueError(f"norm_type={norm_type} must be a positive number or inf. [LH103]")
    return exponent


_MIXED_TEXT = (
    "Gradients of the module were passed to a norm function together with other tensors. Each rank holds only a part of"
    " the module, so the other tensors would be counted once per rank. Pass only the unmodified `p.grad` of the"
    " module's parameters. To include other tensors, use `with self.trainer.strategy.full_parameters(gradients=True)`."
    " [LH403]"
)
_IN_STEP_TEXT = (
    "`get_total_norm` finds no gradients in a step under ZeRO, because each replica has only the gradients of its"
    " parameter shards. Call `torch.nn.utils.clip_grad_norm_(self.parameters(), ...)` or"
    " `self.trainer.strategy.grad_norm()`. [LH404]"
)
