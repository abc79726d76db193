"""Placeholders: parameters and buffers of other stages, with a shape and a dtype but without memory.

They replace the tensors that this rank does not hold, so that the module keeps all names: optimizers, state dicts,
hooks and callbacks of the user work as in a single process. An operation that would need the values raises an error
with advice. Plain meta tensors would not be enough: torch raises an error when they are moved to a device, and ignores
them, without an error, when they are written into a tensor with values.

`Parallelizer` replaces tensors when the module is split, before the first run. `ParameterMap.move` replaces further
tensors after the first training batch, and `strategy.gather` puts full tensors back. Most other code only asks
:func:`is_placeholder`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from multiprocessing.context import get_spawning_popen
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_hybrid.distributed.dtensor import copy_attributes
from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.distributed.module_names import named_tensors
from lightning_hybrid.distributed.pytree import flatten
from lightning_hybrid.pipeline_parallel.stage_map import StageMap
from lightning_hybrid.torch_internals import DisableTorchFunctionSubclass, forward_pre_hooks, load_state_dict_pre_hooks

_T = TypeVar("_T", bound=Tensor)

#: Functions that read values.
_READS = {Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__array__}
_READS |= {getattr(Tensor, f"__{kind}__") for kind in ("bool", "int", "float", "complex", "index")}

#: Functions by which safetensors finds the memory of the values.
_ADDRESSES = {Tensor.data_ptr}

_SAVED_TEXT = (
    "A tensor of another pipeline stage cannot be saved, because this rank does not have its values. To save the full"
    " model, call `trainer.save_checkpoint(path, weights_only=True)` on every rank. In a hook, save the tensor inside"
    " `with self.trainer.strategy.full_parameters():`, which gathers the parameters. After a run, call"
    " `trainer.strategy.gather_module()` before you save the tensor. [LH904]"
)

_WRITTEN_TEXT = (
    "A tensor is set to the values of a parameter on another stage, but this rank does not have these values. If a hook"
    " averages weights, the average must be on the same stage as the weights. Make both part of one layer."
    " Alternatively, in the first training batch, use both before the layers or both after the layers. You can also use"
    " Lightning's `WeightAveraging`. [LH424]"
)

_GRADIENT_TEXT = (
    "The gradient of a parameter on another stage was set to a tensor with values. These values would be lost. Change"
    " gradients in place (`p.grad.mul_(...)`), or set them inside"
    " `with self.trainer.strategy.full_parameters(gradients=True, writes=True)`. [LH425]"
)


class PlaceholderTensor(Tensor):
    """Tensor on the meta device that stays there when its module is moved to another device.

    The Trainer, and callbacks that copy the module, move all tensors of a module together. Torch raises an error for
    meta tensors.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function. Its results have no values either.

        Raises:
            WrongUseError: If the function reads a value or an address, computes with placeholders and tensors with
                values, or writes placeholders into a tensor with values. In the last case, torch would leave the tensor
                unchanged without an error.
        """
        if func is torch.equal:  # callbacks use it to find a parameter
            return args[0] is args[1]
        if func in _READS:
            raise WrongUseError(without_value_text(f"the tensor in the `{func.__name__.strip('_')}` call"))
        if func in _ADDRESSES:
            raise WrongUseError(_SAVED_TEXT)
        with DisableTorchFunctionSubclass():
            if _writes_values(func, args, kwargs or {}):
                raise WrongUseError(_WRITTEN_TEXT)
            try:
                result = func(*args, **(kwargs or {}))
            except RuntimeError as error:
                if "meta" in str(error) and any(map(_has_values, flatten((args, kwargs))[0])):
                    raise WrongUseError(without_value_text(f"the result of `{func.__name__}`")) from error
                raise
            return result.as_subclass(PlaceholderBuffer) if type(result) is Tensor and result.is_meta else result

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """Change the dtype, but never the device."""
        for arg in (*args, kwargs.get("dtype"), kwargs.get("other")):
            dtype = arg.dtype if isinstance(arg, Tensor) else arg
            if isinstance(dtype, torch.dtype) and dtype != self.dtype:
                return self._like(super().to(dtype))
        return self

    def cuda(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the placeholder unchanged."""
        return self

    cpu = cuda

    def double(self, *args: Any, **kwargs: Any) -> Tensor:
        """Convert to float64."""
        return self.to(torch.float64)

    def float(self, *args: Any, **kwargs: Any) -> Tensor:
        """Convert to float32."""
        return self.to(torch.float32)

    def half(self, *args: Any, **kwargs: Any) -> Tensor:
        """Convert to float16."""
        return self.to(torch.float16)

    def bfloat16(self, *args: Any, **kwargs: Any) -> Tensor:
        """Convert to bfloat16."""
        return self.to(torch.bfloat16)

    def _like(self, tensor: Tensor) -> Tensor:
        """Return a placeholder for a meta tensor."""
        return tensor.detach().as_subclass(PlaceholderBuffer)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the placeholder for another process of this job, such as a spawned worker of a data loader.

        Raises:
            WrongUseError: If the placeholder is pickled for any other purpose. A file would have no values, and the
                user would only notice it when loading the file.
        """
        if not is_sent():
            raise WrongUseError(_SAVED_TEXT)
        return super().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __copy__(self) -> Tensor:
        """Return a copy that shares the attributes. Without this method, `copy.copy` would pickle the tensor."""
        copied = self._like(self)
        vars(copied).update(vars(self))
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return a copy; tied tensors stay tied, because a copied tensor is taken from ``memo``."""
        if id(self) not in memo:
            memo[id(self)] = self._like(self)
            vars(memo[id(self)]).update(copy.deepcopy(vars(self), memo))
        copied: Tensor = memo[id(self)]
        return copied


_IS_SENT: ContextVar[bool] = ContextVar("_IS_SENT", default=False)


@contextmanager
def sending_placeholders() -> Iterator[None]:
    """Allow placeholders to be pickled while entered, to send them to another rank of this job."""
    token = _IS_SENT.set(True)
    try:
        yield
    finally:
        _IS_SENT.reset(token)


def is_sent() -> bool:
    """Return whether objects are currently pickled for a process of this job.

    This is the case in :func:`sending_placeholders`, and while multiprocessing starts a process.
    """
    return _IS_SENT.get() or get_spawning_popen() is not None


_shows_absent = False


@contextmanager
def absent_gradients() -> Iterator[None]:
    """Give all placeholders of this process a gradient without values while entered, for hooks that look at gradients.

    The strategy enters it around the user's hooks between backward and the optimizer step, and around gradient
    clipping. Loops over gradients skip ``None``, and would treat the gradients of one stage as all gradients of the
    model. Optimizers must skip placeholders, so they run outside of this context.
    """
    global _shows_absent
    before, _shows_absent = _shows_absent, True
    try:
        yield
    finally:
        _shows_absent = before


class PlaceholderParameter(PlaceholderTensor, nn.Parameter):
    """Parameter of another stage. Optimizers and gradient synchronization skip it."""

    @property
    def grad(self) -> Tensor | None:
        """The gradient: ``None``, but a tensor without values inside :func:`absent_gradients`."""
        if not _shows_absent or not self.requires_grad:
            return None
        with DisableTorchFunctionSubclass():
            return self.detach().as_subclass(AbsentGradient)

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        if gradient is not None and not is_placeholder(gradient):
            raise WrongUseError(_GRADIENT_TEXT)

    @grad.deleter
    def grad(self) -> None:
        pass

    def _like(self, tensor: Tensor) -> Tensor:
        with DisableTorchFunctionSubclass():
            plain = tensor.detach().as_subclass(Tensor)
        return PlaceholderParameter(plain, requires_grad=self.requires_grad)


class PlaceholderBuffer(PlaceholderTensor):
    """Buffer of another stage, or the result of an operation on placeholders."""


class AbsentGradient(PlaceholderBuffer):
    """Gradient of a parameter of another stage. Results of operations on it are of class `PlaceholderBuffer`."""


def _writes_values(function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether a function writes placeholders into a tensor that has values, judged by its name."""
    written = _written_operand(function, args, kwargs)
    if not isinstance(written, (list, tuple)):
        return _has_values(written)
    # A function on lists of tensors: compare each written tensor with the tensors at the same position of other lists.
    others = [each for each in args[1:] if isinstance(each, (list, tuple))]
    return any(_has_values(row[0]) and any(map(is_placeholder, row[1:])) for row in zip(written, *others, strict=False))


def _written_operand(function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the tensor or tensors that a function writes, judged by its name; ``None`` if it writes none."""
    name = getattr(function, "__name__", "")
    is_in_place = name.startswith("__i") if name.endswith("__") else name.endswith("_")
    return args[0] if args and (is_in_place or name == "__setitem__") else kwargs.get("out")


def written_operands(function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that a function writes, judged by its name.

    Args:
        function: A function of torch.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    written = _written_operand(function, args, kwargs)
    return [each for each in flatten(written)[0] if isinstance(each, Tensor)]


def _has_values(value: Any) -> bool:
    """Return whether a value is a tensor that is not on the meta device."""
    return isinstance(value, Tensor) and not value.is_meta


def is_placeholder(tensor: Tensor) -> bool:
    """Return whether a tensor is a placeholder, so that this rank does not have its values."""
    return isinstance(tensor, PlaceholderTensor)


def replace_with_placeholders(module: nn.Module, stage_map: StageMap, rank: int) -> dict[int, Tensor]:
    """Replace the parameters and buffers of other stages by placeholders. Names, order and ties do not change.

    Existing placeholders stay, also if this rank now holds their tensors. The module gets a hook so that it can load
    full state dicts. This rank does not communicate with other ranks.

    Args:
        module: The user's module, or a copy of it in a callback.
        stage_map: The stages of the tensors.
        rank: This pipeline rank.

    Returns:
        The placeholders of the parameters that were replaced now, by the `id` of the replaced parameter.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    buffers = dict(module.named_buffers(remove_duplicate=False))
    local = {id(tensor) for name, tensor in named_tensors(module) if rank in stage_map.ranks_of(name)}
    replaced = _replace(module, parameters, local, _placeholder_parameter)
    _replace(module, buffers, local, lambda tensor: tensor.detach().to("meta").as_subclass(PlaceholderBuffer))
    if not _loading_hooks(module):
        module.register_load_state_dict_pre_hook(_load_into_themselves)  # type: ignore[no-untyped-call]
    return replaced


def remove_placeholder_hooks(module: nn.Module) -> None:
    """Remove the hooks for placeholders, once the module has none.

    Afterward, all layers can be called, and state dicts are loaded as usual.
    """
    for layer in module.modules():
        hooks = forward_pre_hooks(layer)
        for key in [key for key, hook in hooks.items() if isinstance(hook, _Refusal)]:
            del hooks[key]
    for key in _loading_hooks(module):
        del load_state_dict_pre_hooks(module)[key]


def _loading_hooks(module: nn.Module) -> list[int]:
    """Return the keys of the module's hooks by which placeholders load themselves."""
    hooks = load_state_dict_pre_hooks(module)
    return [key for key, hook in hooks.items() if getattr(hook, "hook", None) is _load_into_themselves]


def _load_into_themselves(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Make placeholders load themselves, without a warning, when a state dict is loaded into the module or its copy.

    This is a pre-hook of `load_state_dict`. Entries with another shape stay in the state dict, so that torch reports
    them as usual.
    """
    for name, tensor in named_tensors(module):
        if is_placeholder(tensor) and getattr(state.get(prefix + name), "shape", None) == tensor.shape:
            state[prefix + name] = tensor


def _placeholder_parameter(parameter: Tensor) -> PlaceholderParameter:
    """Return the placeholder of a parameter."""
    whole = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
    placeholder = PlaceholderParameter(whole, requires_grad=parameter.requires_grad)
    copy_attributes(parameter, placeholder)
    return placeholder


def _replace(
    module: nn.Module, tensors: dict[str, _T], local: set[int], make: Callable[[_T], Tensor]
) -> dict[int, Tensor]:
    """Replace tensors of other stages, and return the new tensors by the `id` of the replaced tensor.

    Args:
        module: The module.
        tensors: All tensors by name. Tied tensors have several names.
        local: The `id` of each tensor that this rank holds.
        make: Returns the placeholder of a tensor.
    """
    replaced: dict[int, Tensor] = {}  # tied tensors stay tied
    for name, tensor in tensors.items():
        if id(tensor) in local or is_placeholder(tensor):
            continue
        if id(tensor) not in replaced:
            replaced[id(tensor)] = make(tensor)
        owner, _, leaf = name.rpartition(".")
        # `setattr` also updates modules that keep a second reference to the tensor, such as recurrent layers.
        setattr(module.get_submodule(owner), leaf, replaced[id(tensor)])
    return replaced


def refuse_call(layer: nn.Module, error: type[Exception], text: str) -> None:
    """Make a layer of another stage raise an error when it is called, unless its `forward` is redirected at that time.

    A trace redirects it, to record the call.

    Args:
        layer: The layer.
        error: The class of the error.
        text: The message of the error.
    """
    layer.register_forward_pre_hook(_Refusal(error, text))


def without_value_text(what: str) -> str:
    """Return the error message for something that depends on placeholders and so has no value.

    Args:
        what: A name for it, such as ``"the loss"``.
    """
    return (
        f"{what[0].upper()}{what[1:]} depends on parameters of layers on other stages, but no stage has the values of"
        " all parameters.\n"
        "  - To read parameters in a hook, use `with self.trainer.strategy.full_parameters():` on every rank, and pass"
        " `gradients=True` to read gradients. Or check `if not p.is_meta`, to read only the parameters of this stage.\n"
        "  - To penalize weights, use the optimizer's `weight_decay`. Or list the name of the `nn.Sequential` in"
        " `HybridStrategy(body=[...])`: then `training_step` can compute a penalty over parameters.\n"
        "  - To get the gradient norm, use `self.trainer.strategy.grad_norm()` or `torch.nn.utils.get_total_norm`.\n"
        "  - To update a teacher or an average of weights, use a hook, such as `on_train_batch_end`, or"
        " `WeightAveraging`.\n"
        "  - To find the device, use `self.device`, not the device of a parameter. [LH401]"
    )


class _Refusal:
    """Forward pre-hook that raises an error. It can be pickled together with the module."""

    def __init__(self, error: type[Exception], text: str) -> None:
        self._error, self._text = error, text

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not getattr(module.forward, "is_redirected", False):
            raise self._error(self._text)
