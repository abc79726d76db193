"""A module of which this rank has a part: who needs all of it is told what to call, before anything is written.

===========================================  =====================  ==================================================
while the module is divided                  in a run               after one
===========================================  =====================  ==================================================
`state_dict()`, also of a submodule          this rank's part       a warning; an error, if it was to be whole by then
`torch.save`                                 an error, and no file  an error
`pickle`                                     an error               an error
`save_pretrained`, `to_onnx` and the like    an error, and no file  an error, and no file
calls                                        as the run does them   an error, if the module was to be whole by then
===========================================  =====================  ==================================================
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerStatus
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_hybrid.distributed.dtensor import is_sharded
from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.distributed.pytree import flatten_with_path
from lightning_hybrid.pipeline_parallel.placeholders import is_placeholder, is_sent

#: Methods of Lightning, transformers and PEFT that write files. Some write others before the weights.
_WRITERS = ("save_pretrained", "push_to_hub", "to_onnx", "to_torchscript", "to_tensorrt")
#: The hooks of each module that is divided, and what removes them.
_HANDLES: weakref.WeakKeyDictionary[nn.Module, dict[_StateDictHook, RemovableHandle]] = weakref.WeakKeyDictionary()
_EXPECTED: ContextVar[bool] = ContextVar("_EXPECTED", default=False)

_REMEDY = (
    " On every rank, `trainer.save_checkpoint(path, weights_only=True)` writes all,"
    " `trainer.strategy.gather_module()` makes the module whole after a run, and"
    " `trainer.strategy.lightning_module_state_dict()` gives all on rank 0. In a hook parameters are whole inside of"
    " `with self.trainer.strategy.full_parameters():`."
)


def mark_parts(module: LightningModule) -> None:
    """Have everybody told who needs all of a module, while it is divided; nobody any more where it is whole.

    Args:
        module: The user's module.
    """
    for handle in _HANDLES.pop(module, {}).values():
        handle.remove()
    for part in module.modules():  # of a copy, too, which has copies of them
        for key in [key for key, hook in part._forward_pre_hooks.items() if isinstance(hook, _CallHook)]:
            del part._forward_pre_hooks[key]
        for name in [name for name, value in vars(part).items() if isinstance(value, _Writer)]:
            del vars(part)[name]
    handles = {}
    for part in module.modules():
        if not any(map(_is_part, (*part.parameters(), *part.buffers()))):
            continue
        hook = _StateDictHook(module)
        handles[hook] = part.register_state_dict_post_hook(hook)  # type: ignore[no-untyped-call]
        for name in _WRITERS:
            if callable(getattr(type(part), name, None)) and name not in vars(part):
                vars(part)[name] = _Writer(part, name)
    if handles:
        _HANDLES[module] = handles


def refuse_parts(module: LightningModule, why: str) -> None:
    """Make it an error to take the state dict of a module, or to call it: it was to be whole by now, and is divided.

    Args:
        module: The user's module, which :func:`mark_parts` has seen; with the next call of that they work again.
        why: Why it is divided, and what to do; sentences.
    """
    for hook in _HANDLES.get(module, {}):
        hook.why = why
    for part in module.modules():
        if any(map(_is_part, (*part.parameters(), *part.buffers()))):
            part.register_forward_pre_hook(_CallHook(type(module).__name__, why), prepend=True)


def _is_part(tensor: Any) -> bool:
    return is_placeholder(tensor) or is_sharded(tensor)


def _text(values: Iterable[Any], what: str) -> str | None:
    """What is wrong with some tensors, of which all were needed; ``None`` if nothing is."""
    values = list(values)
    absent, shards = sum(map(is_placeholder, values)), sum(map(is_sharded, values))
    if not absent and not shards:
        return None
    return (
        f"{what}: of {len(values)} tensors, {absent} live on other stages and have no values here, and of {shards} this"
        " rank has a shard."
    )


@contextmanager
def part_expected() -> Iterator[None]:
    """Inside, it is known that a state dict has a part."""
    token = _EXPECTED.set(True)
    try:
        yield
    finally:
        _EXPECTED.reset(token)


class _StateDictHook:
    """Looks at state dicts that are taken of a module, or of a part of it, between runs.

    It is copied with its module. Copies, which callbacks keep, are looked at when they are saved.

    Args:
        root: The user's module; ``None`` in a copy.
    """

    def __init__(self, root: LightningModule | None) -> None:
        self._root = None if root is None else weakref.ref(root)
        self.why: str | None = None  # it was to be whole by now

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        root = None if self._root is None else self._root()
        if root is None or (module is not root and prefix) or _EXPECTED.get():
            return
        try:
            is_running = root.trainer.state.status == TrainerStatus.RUNNING
        except RuntimeError:  # it has no Trainer
            return
        if is_running:
            return
        values = [value for name, value in state.items() if name.startswith(prefix)]
        text = _text(values, f"This state dict of {type(module).__name__} is not all of it")
        if text is None:
            return
        if self.why is not None:
            raise WrongUseError(f"{text} {self.why}")
        rank_zero_warn(text + _REMEDY)

    def __deepcopy__(self, memo: Any) -> _StateDictHook:
        return _StateDictHook(None)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not is_sent():
            raise WrongUseError(
                "A module is saved of which this rank has a part: layers live on other stages, or ranks share"
                f" parameters (tensor parallelism, ZeRO).{_REMEDY}"
            )
        return _StateDictHook, (None,)


class _CallHook:
    """Refuses a call: other ranks, which would have to take part, may not be there.

    Args:
        name: Of the user's module.
        why: Why it is divided, and what to do.
    """

    def __init__(self, name: str, why: str) -> None:
        self._text = f"{name} is called after a run, and this rank has a part of it. {why}"

    def __call__(self, module: nn.Module, args: Any) -> None:
        raise WrongUseError(self._text)


class _Writer:
    """In the place of a method that writes files: it is refused while this rank has a part of what it needs.

    Args:
        module: Whose method.
        name: Of the method.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module, self._name = module, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, name = self._module, self._name
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, Mapping)]
        states = [state for state in given if any(isinstance(value, torch.Tensor) for value in state.values())]
        needed = states[0].values() if states else (*module.parameters(), *module.buffers())
        text = _text(needed, f"`{type(module).__name__}.{name}` needs all of it")
        if text is not None:
            raise WrongUseError(text + _REMEDY)
        return getattr(type(module), name)(module, *args, **kwargs)


def _leaves(tree: Any) -> list[Any]:
    try:
        return [leaf for _, leaf in flatten_with_path(tree)]
    except RecursionError:  # it refers to itself, as what is pickled may
        return []


@contextmanager
def checked_saves() -> Iterator[None]:
    """Inside, `torch.save` refuses what this rank has a part of before it opens the file.

    Raises:
        WrongUseError: If such a thing is saved.
    """
    save = torch.save

    @functools.wraps(save)
    def checked(obj: object, *args: Any, **kwargs: Any) -> None:
        if not is_sent():
            leaves = _leaves(obj)
            values = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            for leaf in leaves:
                if isinstance(leaf, nn.Module):
                    values += [*leaf.parameters(), *leaf.buffers()]
            text = _text(values, "What is given to `torch.save` is not all of it")
            if text is not None:
                raise WrongUseError(text + _REMEDY)
        save(obj, *args, **kwargs)

    torch.save = checked
    try:
        yield
    finally:
        torch.save = save
