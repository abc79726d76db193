"""Uses of a divided module that need all of it: an error says what to call, before a file is begun.

============================================  =====================  ==================================================
while the module is divided                   in a run               after a run
============================================  =====================  ==================================================
`state_dict()`, also of a submodule           this rank's part       a warning; an error after :func:`refuse_parts`
`torch.save`, safetensors, `pickle`           an error               an error
`save_pretrained`, `to_onnx` and the like     an error               an error
calls                                         as in the run          an error after :func:`refuse_calls`
============================================  =====================  ==================================================
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerStatus
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from lightning_hybrid.checkpoint.full import is_part_expected, part_expected
from lightning_hybrid.distributed.dtensor import is_sharded
from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.distributed.pytree import flatten_with_path
from lightning_hybrid.distributed.replaced import replaced_attributes
from lightning_hybrid.pipeline_parallel.placeholders import is_placeholder, is_sent
from lightning_hybrid.torch_internals import forward_pre_hooks

#: Methods of Lightning, transformers and PEFT that write files. Some write other files before the weights.
_WRITERS = ("save_pretrained", "push_to_hub", "to_onnx", "to_torchscript", "to_tensorrt")
#: The hooks of each divided module, and of its parts.
_HOOKS: weakref.WeakKeyDictionary[nn.Module, list[tuple[_StateDictHook, RemovableHandle]]] = weakref.WeakKeyDictionary()

_REMEDY = (
    " On every rank, call `trainer.save_checkpoint(path, weights_only=True)` to save the full model,"
    " `trainer.strategy.gather_module()` to gather the module after a run, or"
    " `trainer.strategy.lightning_module_state_dict()` to get the full state dict on rank 0. In a hook, use"
    " `with self.trainer.strategy.full_parameters():` to get the full parameters. [LH904]"
)


def mark_parts(module: LightningModule) -> None:
    """Check uses of a module that need all of it, while this rank has a part; remove the checks once it is whole.

    Args:
        module: The user's module.
    """
    for _, handle in _HOOKS.pop(module, ()):
        handle.remove()
    for part in module.modules():  # by their kinds: a copy of a divided module has copies of them
        calls = forward_pre_hooks(part)
        for key in [key for key, hook in calls.items() if isinstance(hook, _CallHook)]:
            del calls[key]
        for name in [name for name, value in vars(part).items() if isinstance(value, _Writer)]:
            del vars(part)[name]
    divided = _divided_modules(module, is_part)
    hooks = _HOOKS[module] = []
    for part in divided:
        hook = _StateDictHook(module)
        hooks.append((hook, part.register_state_dict_post_hook(hook)))  # type: ignore[no-untyped-call]
        for name in _WRITERS:
            if callable(getattr(type(part), name, None)) and name not in vars(part):
                vars(part)[name] = _Writer(part, name)
    _stop_checking(id(module))
    if divided:
        _check_saves(module)


def refuse_parts(module: LightningModule, why: str) -> None:
    """Make the state dict, and calls, of a divided module an error, until :func:`mark_parts` is called again.

    Args:
        module: The user's module, which should be whole by now.
        why: Why it is divided, and what to do; sentences.
    """
    for hook, _ in _HOOKS.get(module, ()):
        hook.why = why
    refuse_calls(module, why)


def is_part(tensor: object) -> bool:
    """Return whether other ranks have values of this tensor that this rank does not have."""
    return isinstance(tensor, Tensor) and (is_placeholder(tensor) or is_sharded(tensor))


def refuse_calls(module: LightningModule, why: str, needs_others: Callable[[Tensor], bool] = is_part) -> None:
    """Make calls of a module, and of its parts, an error, until :func:`mark_parts` is called again.

    Args:
        module: The user's module.
        why: Why it is divided, and what to do; sentences.
        needs_others: Returns whether a layer cannot be called with a tensor like this.
    """
    for part in _divided_modules(module, needs_others):
        part.register_forward_pre_hook(_CallHook(type(module).__name__, why), prepend=True)


def _divided_modules(module: nn.Module, is_divided: Callable[[Tensor], bool]) -> list[nn.Module]:
    tensors = ((part, (*part._parameters.values(), *part._buffers.values())) for part in module.modules())
    owners = {part for part, own in tensors if any(is_divided(tensor) for tensor in own if tensor is not None)}
    return [part for part in module.modules() if not owners.isdisjoint(part.modules())]


def _text(values: Iterable[Any], what: str) -> str | None:
    """Return the error text for tensors that are not whole on this rank; ``None`` if all are."""
    values = list(values)
    absent, shards = sum(map(is_placeholder, values)), sum(map(is_sharded, values))
    if not absent and not shards:
        return None
    return (
        f"{what}: of {len(values)} tensors, {absent} are on other stages and have no values on this rank, and {shards}"
        " are sharded over several ranks."
    )


class _StateDictHook:
    """Checks the state dicts of a module, or of a part of it, between runs.

    It is copied with its module. Copies, which callbacks keep, are checked when they are saved.

    Args:
        root: The user's module; ``None`` in a copy.
    """

    def __init__(self, root: LightningModule | None) -> None:
        self._root = None if root is None else weakref.ref(root)
        self.why: str | None = None  # set if the module should be whole by now

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        root = None if self._root is None else self._root()
        if root is None or (module is not root and prefix) or is_part_expected():
            return
        try:
            is_running = root.trainer.state.status == TrainerStatus.RUNNING
        except RuntimeError:  # it has no Trainer
            return
        if is_running:
            return
        values = [value for name, value in state.items() if name.startswith(prefix)]
        text = _text(values, f"This state dict of {type(module).__name__} is incomplete")
        if text is None:
            return
        if self.why is not None:
            raise WrongUseError(f"{text} {self.why} [LH903]")
        rank_zero_warn(text + _REMEDY)

    def __deepcopy__(self, memo: Any) -> _StateDictHook:
        return _StateDictHook(None)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not is_sent():
            raise WrongUseError(
                "This rank has only a part of the module that is being saved: some layers are on other stages, or"
                f" parameters are sharded (by tensor parallelism or ZeRO).{_REMEDY}"
            )
        return _StateDictHook, (None,)


class _CallHook:
    """Refuses a call: it would need other ranks, which may not call, or layers that are not here.

    Args:
        name: The class of the user's module.
        why: Why it is divided, and what to do.
    """

    def __init__(self, name: str, why: str) -> None:
        self._text = f"{name} was called after a run, but this rank has only a part of the module. {why} [LH905]"

    def __call__(self, module: nn.Module, args: Any) -> None:
        raise WrongUseError(self._text)


class _Writer:
    """A method that writes files, replaced by one that raises an error while this rank has a part of the module.

    Args:
        module: The module with the method.
        name: The name of the method.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module, self._name = module, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, name = self._module, self._name
        state = kwargs.get("state_dict")
        if not isinstance(state, Mapping):
            with part_expected():
                state = module.state_dict()
        text = _text(state.values(), f"`{type(module).__name__}.{name}` needs the full module")
        if text is not None:
            raise WrongUseError(text + _REMEDY)
        return getattr(type(module), name)(module, *args, **kwargs)


# -- functions of other packages ---------------------------------------------------------------------------------------

#: Modules that are divided, by identity, with what notices the end of each.
_DIVIDED: dict[int, weakref.finalize[Any, Any]] = {}
#: Entered from the first divided module to the end of the last one. Several runs may begin and end in between.
_REPLACED = ExitStack()


def _check_saves(module: nn.Module) -> None:
    """Check `torch.save` and safetensors while a module is divided, also after a run."""
    if not _DIVIDED:
        _REPLACED.enter_context(_checked_saves())
    _DIVIDED[id(module)] = noticed = weakref.finalize(module, _stop_checking, id(module))
    noticed.atexit = False


def _stop_checking(key: int) -> None:
    noticed = _DIVIDED.pop(key, None)
    if noticed is None:
        return
    noticed.detach()
    if not _DIVIDED:
        _REPLACED.close()


@contextmanager
def _checked_saves() -> Iterator[None]:
    """Let `torch.save` and safetensors raise an error for tensors and modules that are not whole, while entered."""
    save, storage = torch.save, DTensor.storage

    @functools.wraps(save)
    def checked(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        if not is_sent() and not is_part_expected():
            text = _text(_saved_tensors(obj), "`torch.save` received only a part of the module")
            if text is not None:
                raise WrongUseError(text + _REMEDY)
        try:
            save(obj, f, *args, **kwargs)
        except WrongUseError:  # of an object that has such a tensor: the file has been begun
            if isinstance(f, (str, os.PathLike)):
                Path(f).unlink(missing_ok=True)
            raise

    def checked_storage(tensor: Any) -> Any:  # the last that safetensors asks a tensor for
        text = _text([tensor], "Only a part of the module is being saved")
        if text is not None:
            raise WrongUseError(text + _REMEDY)
        return storage(tensor)  # type: ignore[no-untyped-call]

    with replaced_attributes(DTensor, storage=checked_storage):
        # Not `replaced_attributes`: other code may replace the function after this, and it stays replaced then.
        torch.save = checked
        try:
            yield
        finally:
            if torch.save is checked:
                torch.save = save


def _saved_tensors(tree: Any) -> list[Tensor]:
    try:
        leaves = [leaf for _, leaf in flatten_with_path(tree)]
    except RecursionError:  # it refers to itself, as what is pickled may
        return []
    modules = [leaf for leaf in leaves if isinstance(leaf, nn.Module)]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return tensors + [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
