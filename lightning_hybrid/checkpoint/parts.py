"""Checks for uses of a parallelized module that need the full module. The error names the method to call instead.

============================================  =====================  ==================================================
while a rank has only a part of the module    in a run               after a run
============================================  =====================  ==================================================
`state_dict()`, also of a submodule           this rank's part       a warning; an error after :func:`refuse_parts`
`torch.save`, safetensors, `pickle`           an error               an error
`save_pretrained`, `to_onnx` and similar      an error               an error
calls                                         as in the run          an error after :func:`refuse_calls`
============================================  =====================  ==================================================

Errors are raised before a file is written.

`AttachedModule` calls :func:`mark_parts` when the module is attached, sharded and gathered, and the refusals at the end
of a run. Without these checks, `torch.save(model.state_dict())` would write a file without the layers of other stages,
and only loading the file would show it.

A *part* of a module is what one rank holds: some tensors are *placeholders* (tensors of other stages, without values)
or shards. The functions here do not communicate.
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

#: Methods of Lightning, transformers and PEFT that write files. Some of them write other files before the weights.
_WRITERS = ("save_pretrained", "push_to_hub", "to_onnx", "to_torchscript", "to_tensorrt")
#: The hooks of each parallelized module, and of its submodules.
_HOOKS: weakref.WeakKeyDictionary[nn.Module, list[tuple[_StateDictHook, RemovableHandle]]] = weakref.WeakKeyDictionary()

_REMEDY = (
    " On every rank, call `trainer.save_checkpoint(path, weights_only=True)` to save the full model,"
    " `trainer.strategy.gather_module()` to gather the module after a run, or"
    " `trainer.strategy.lightning_module_state_dict()` to get the full state dict on rank 0. In a hook, use"
    " `with self.trainer.strategy.full_parameters():` to get the full parameters."
)


def mark_parts(module: LightningModule) -> None:
    """Check uses of a module that need the full module while this rank has a part; remove the checks once it has all.

    Hooks are added to the module and its submodules. While any such module exists in this process, `torch.save` and
    `DTensor.storage`, which safetensors calls, are replaced.

    Args:
        module: The user's module.
    """
    for _, handle in _HOOKS.pop(module, ()):
        handle.remove()
    for part in module.modules():  # tested by class, because a copied module has copied hooks
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
    """Make state dicts and calls of a parallelized module an error, until :func:`mark_parts` is called again.

    Args:
        module: The user's module, which should have been gathered by now.
        why: The reason why it has not, and the remedy, in full sentences.
    """
    for hook, _ in _HOOKS.get(module, ()):
        hook.why = why
    refuse_calls(module, why)


def is_part(tensor: object) -> bool:
    """Return True if other ranks have values of this tensor that this rank does not have."""
    return isinstance(tensor, Tensor) and (is_placeholder(tensor) or is_sharded(tensor))


def refuse_calls(module: LightningModule, why: str, needs_others: Callable[[Tensor], bool] = is_part) -> None:
    """Make calls of a module and of its submodules an error, until :func:`mark_parts` is called again.

    Args:
        module: The user's module.
        why: The reason why this rank has only a part, and the remedy, in full sentences.
        needs_others: Returns True if a layer with this tensor cannot be called.
    """
    for part in _divided_modules(module, needs_others):
        part.register_forward_pre_hook(_CallHook(type(module).__name__, why), prepend=True)


def _divided_modules(module: nn.Module, is_divided: Callable[[Tensor], bool]) -> list[nn.Module]:
    tensors = ((part, (*part._parameters.values(), *part._buffers.values())) for part in module.modules())
    owners = {part for part, own in tensors if any(is_divided(tensor) for tensor in own if tensor is not None)}
    return [part for part in module.modules() if not owners.isdisjoint(part.modules())]


def _counts_text(values: Iterable[Any]) -> str | None:
    """Return how many tensors are incomplete on this rank, as a part of an error; ``None`` if all are complete."""
    values = list(values)
    absent, shards = sum(map(is_placeholder, values)), sum(map(is_sharded, values))
    if not absent and not shards:
        return None
    return (
        f"of {len(values)} tensors, {absent} are on other stages and have no values on this rank, and {shards} are"
        " sharded over several ranks."
    )


class _StateDictHook:
    """Hook that checks the state dicts of a module or submodule between runs.

    It is copied with its module. Copies of modules, which callbacks keep, are checked when they are saved: to pickle
    this hook is an error.

    Args:
        root: The user's module; ``None`` in a copy.

    Attributes:
        why: The reason why the module was not gathered, which makes state dicts an error; ``None`` for a warning.
    """

    def __init__(self, root: LightningModule | None) -> None:
        self._root = None if root is None else weakref.ref(root)
        self.why: str | None = None  # set if the module should have been gathered by now

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        root = None if self._root is None else self._root()
        if root is None or (module is not root and prefix) or is_part_expected():
            return
        try:
            is_running = root.trainer.state.status == TrainerStatus.RUNNING
        except RuntimeError:  # the module has no Trainer
            return
        if is_running:
            return
        values = [value for name, value in state.items() if name.startswith(prefix)]
        counts = _counts_text(values)
        if counts is None:
            return
        if self.why is not None:
            raise WrongUseError(
                f"This state dict of {type(module).__name__} is incomplete: {counts} {self.why} [LH903]"
            )
        rank_zero_warn(f"This state dict of {type(module).__name__} is incomplete: {counts}{_REMEDY} [LH904]")

    def __deepcopy__(self, memo: Any) -> _StateDictHook:
        return _StateDictHook(None)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not is_sent():
            raise WrongUseError(
                "This rank has only a part of the module that is being saved: some layers are on other stages, or"
                f" parameters are sharded (by tensor parallelism or ZeRO).{_REMEDY} [LH904]"
            )
        return _StateDictHook, (None,)


class _CallHook:
    """Hook that raises an error at a call that needs other ranks, which may not call, or layers of other ranks.

    Args:
        name: The name of the class of the user's module.
        why: The reason and the remedy.
    """

    def __init__(self, name: str, why: str) -> None:
        self._text = f"{name} was called after a run, but this rank has only a part of the module. {why} [LH905]"

    def __call__(self, module: nn.Module, args: Any) -> None:
        raise WrongUseError(self._text)


class _Writer:
    """Replacement of a method that writes files. It raises an error while this rank has a part of the module.

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
        counts = _counts_text(state.values())
        if counts is not None:
            raise WrongUseError(f"`{type(module).__name__}.{name}` needs the full module: {counts}{_REMEDY} [LH904]")
        return getattr(type(module), name)(module, *args, **kwargs)


# -- functions of other packages ---------------------------------------------------------------------------------------

#: Finalizers of the parallelized modules, by the identity of the module.
_DIVIDED: dict[int, weakref.finalize[Any, Any]] = {}
#: This context is entered from the first parallelized module to the end of the last one, over several runs.
_REPLACED = ExitStack()


def _check_saves(module: nn.Module) -> None:
    """Check `torch.save` and safetensors while this rank has a part of the module, also after a run."""
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
    """Let `torch.save` and safetensors raise an error for incomplete tensors and modules inside the context."""
    save, storage = torch.save, DTensor.storage

    @functools.wraps(save)
    def checked(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        if not is_sent() and not is_part_expected():
            counts = _counts_text(_saved_tensors(obj))
            if counts is not None:
                raise WrongUseError(f"`torch.save` received only a part of the module: {counts}{_REMEDY} [LH904]")
        try:
            save(obj, f, *args, **kwargs)
        except WrongUseError:  # raised by an object with an incomplete tensor, after the file was created
            if isinstance(f, (str, os.PathLike)):
                Path(f).unlink(missing_ok=True)
            raise

    def checked_storage(tensor: Any) -> Any:  # safetensors calls this last for each tensor
        counts = _counts_text([tensor])
        if counts is not None:
            raise WrongUseError(f"Only a part of the module is being saved: {counts}{_REMEDY} [LH904]")
        return storage(tensor)  # type: ignore[no-untyped-call]

    with replaced_attributes(DTensor, storage=checked_storage):
        # Not by `replaced_attributes`: if other code replaces the function after this, its function must stay.
        torch.save = checked
        try:
            yield
        finally:
            if torch.save is checked:
                torch.save = save


def _saved_tensors(tree: Any) -> list[Tensor]:
    try:
        leaves = [leaf for _, leaf in flatten_with_path(tree)]
    except RecursionError:  # the tree contains itself, which `pickle` allows
        return []
    modules = [leaf for leaf in leaves if isinstance(leaf, nn.Module)]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return tensors + [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
