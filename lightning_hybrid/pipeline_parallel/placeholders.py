"""Placeholders for what lives on other stages: a name, a shape and a dtype, without memory."""

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

#: What asks for values.
_READS = {Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__array__}
_READS |= {getattr(Tensor, f"__{kind}__") for kind in ("bool", "int", "float", "complex", "index")}

#: By these safetensors asks where the values are.
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
    """A tensor on the meta device that stays there when its module is moved.

    All of a module is moved at once (by the Trainer, by callbacks that copy it), which torch refuses for meta tensors.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Results of operations are without values too; tensors with values must not be written with them.

        Raises:
            WrongUseError: If one is (torch leaves it as it is, without a word), or if a value is asked for.
        """
        if func is torch.equal:  # by which callbacks look for parameters
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
        """Change the dtype, never the device."""
        for arg in (*args, kwargs.get("dtype"), kwargs.get("other")):
            dtype = arg.dtype if isinstance(arg, Tensor) else arg
            if isinstance(dtype, torch.dtype) and dtype != self.dtype:
                return self._like(super().to(dtype))
        return self

    def cuda(self, *args: Any, **kwargs: Any) -> Tensor:
        """Stay."""
        return self

    cpu = cuda

    def double(self, *args: Any, **kwargs: Any) -> Tensor:
        """To float64."""
        return self.to(torch.float64)

    def float(self, *args: Any, **kwargs: Any) -> Tensor:
        """To float32."""
        return self.to(torch.float32)

    def half(self, *args: Any, **kwargs: Any) -> Tensor:
        """To float16."""
        return self.to(torch.float16)

    def bfloat16(self, *args: Any, **kwargs: Any) -> Tensor:
        """To bfloat16."""
        return self.to(torch.bfloat16)

    def _like(self, tensor: Tensor) -> Tensor:
        return tensor.detach().as_subclass(PlaceholderBuffer)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled: the file would have no values, which is noticed only when it is read.

        It may be sent to processes of this job, such as a spawned worker of a loader that uses the module.

        Raises:
            WrongUseError: If it is pickled for anything else.
        """
        if not is_sent():
            raise WrongUseError(_SAVED_TEXT)
        return super().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __copy__(self) -> Tensor:
        """Return a copy that shares the attributes; `copy.copy` would pickle the tensor."""
        copied = self._like(self)
        vars(copied).update(vars(self))
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Ties stay ties: a tensor that was copied already is taken from ``memo``."""
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
    """Return whether an object is pickled for a process of this job: in :func:`sending_placeholders`, or a new one."""
    return _IS_SENT.get() or get_spawning_popen() is not None


_shows_absent = False


@contextmanager
def absent_gradients() -> Iterator[None]:
    """Let placeholders inside have a gradient without a value, where hooks look at gradients.

    Loops over gradients skip ``None``, and would take the gradients of one stage for those of the model. Optimizers
    skip it too, as they should, and run outside of this.
    """
    global _shows_absent
    before, _shows_absent = _shows_absent, True
    try:
        yield
    finally:
        _shows_absent = before


class PlaceholderParameter(PlaceholderTensor, nn.Parameter):
    """A parameter that lives on another stage."""

    @property
    def grad(self) -> Tensor | None:
        """The gradient: ``None``, and a tensor without a value inside :func:`absent_gradients`."""
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
    """A buffer that lives on another stage."""


class AbsentGradient(PlaceholderBuffer):
    """The gradient of a parameter that lives on another stage. What is computed from it is a `PlaceholderBuffer`."""


def _writes_values(function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a function writes a tensor that has values, by its name."""
    written = _written_operand(function, args, kwargs)
    if not isinstance(written, (list, tuple)):
        return _has_values(written)
    # Several at once, each with what stands at its place in other lists.
    others = [each for each in args[1:] if isinstance(each, (list, tuple))]
    return any(_has_values(row[0]) and any(map(is_placeholder, row[1:])) for row in zip(written, *others, strict=False))


def _written_operand(function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Return what a function writes, by its name: a tensor, or several; ``None`` for nothing."""
    name = getattr(function, "__name__", "")
    is_in_place = name.startswith("__i") if name.endswith("__") else name.endswith("_")
    return args[0] if args and (is_in_place or name == "__setitem__") else kwargs.get("out")


def written_operands(function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that a function writes, by its name.

    Args:
        function: A function of torch.
        args: Its arguments.
        kwargs: Likewise.
    """
    written = _written_operand(function, args, kwargs)
    return [each for each in flatten(written)[0] if isinstance(each, Tensor)]


def _has_values(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_meta


def is_placeholder(tensor: Tensor) -> bool:
    """Whether this tensor lives on another stage."""
    return isinstance(tensor, PlaceholderTensor)


def replace_with_placeholders(module: nn.Module, stage_map: StageMap, rank: int) -> dict[int, Tensor]:
    """Replace what other stages hold by placeholders; names, order and ties stay.

    Args:
        module: The module.
        stage_map: Which stage holds what.
        rank: This pipeline rank.

    Returns:
        The placeholders of the parameters that have been replaced, by the identities of these.
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
    """Undo what was done for placeholders, once there are none: layers may be called, and any state dict is loaded."""
    for layer in module.modules():
        hooks = forward_pre_hooks(layer)
        for key in [key for key, hook in hooks.items() if isinstance(hook, _Refusal)]:
            del hooks[key]
    for key in _loading_hooks(module):
        del load_state_dict_pre_hooks(module)[key]


def _loading_hooks(module: nn.Module) -> list[int]:
    """The keys of the module's hooks that let placeholders load themselves."""
    hooks = load_state_dict_pre_hooks(module)
    return [key for key, hook in hooks.items() if getattr(hook, "hook", None) is _load_into_themselves]


def _load_into_themselves(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Whoever loads a state dict into the module, or into a copy of it: a placeholder takes itself, without a warning.

    What does not fit stays in the state dict, and torch reports it as for any module.
    """
    for name, tensor in named_tensors(module):
        if is_placeholder(tensor) and getattr(state.get(prefix + name), "shape", None) == tensor.shape:
            state[prefix + name] = tensor


def _placeholder_parameter(parameter: Tensor) -> PlaceholderParameter:
    whole = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
    placeholder = PlaceholderParameter(whole, requires_grad=parameter.requires_grad)
    copy_attributes(parameter, placeholder)
    return placeholder


def _replace(
    module: nn.Module, tensors: dict[str, _T], local: set[int], make: Callable[[_T], Tensor]
) -> dict[int, Tensor]:
    replaced: dict[int, Tensor] = {}  # tied tensors stay tied
    for name, tensor in tensors.items():
        if id(tensor) in local or is_placeholder(tensor):
            continue
        if id(tensor) not in replaced:
            replaced[id(tensor)] = make(tensor)
        owner, _, leaf = name.rpartition(".")
        # Through `setattr`, so that modules that keep a second reference (recurrent ones do) notice.
        setattr(module.get_submodule(owner), leaf, replaced[id(tensor)])
    return replaced


def refuse_call(layer: nn.Module, error: type[Exception], text: str) -> None:
    """Make a layer that lives on another stage refuse to be called, while nothing has taken its place.

    Args:
        layer: The layer.
        error: What is raised then.
        text: The text of the error.
    """
    layer.register_forward_pre_hook(_Refusal(error, text))


def without_value_text(what: str) -> str:
    """The text for something that was computed from placeholders, and so has no value.

    Args:
        what: It, such as ``"the loss"``.
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
    """A hook that can be pickled, as the module that has it may be."""

    def __init__(self, error: type[Exception], text: str) -> None:
        self._error, self._text = error, text

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not getattr(module.forward, "is_redirected", False):
            raise self._error(self._text)
