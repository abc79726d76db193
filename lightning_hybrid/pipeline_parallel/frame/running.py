"""A stage's part of one step, while it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import Self

from lightning_hybrid.distributed.pytree import flatten
from lightning_hybrid.pipeline_parallel.frame.fake_tensors import FakeTensor
from lightning_hybrid.pipeline_parallel.frame.graph import METADATA, Argument, function_name
from lightning_hybrid.pipeline_parallel.frame.plan import Action, Part

# How functions are called that begin and end contexts.
_ENDS = ("_set_", "set_", "_enter_", "_exit_")


class OtherPathError(Exception):
    """The step does something else than what was discovered; ``args`` are the number of the call, and what it is."""


class AbsentOperandError(Exception):
    """A call is made with a value that is absent on this stage; ``args`` are its number."""


class LateUnitError(Exception):
    """A unit is called after the last one that was discovered; ``args`` are its position."""


class Unwind(BaseException):
    """Leaves the user's step once everything that later stages want is there."""


class Running(TorchFunctionMode):
    """A stage's part of one step."""

    def __init__(
        self,
        part: Part,
        inputs: Sequence[Tensor],
        seed: Callable[[int], None],
        random: Callable[[int], AbstractContextManager[None]],
    ) -> None:
        super().__init__()
        self._actions, self._inputs = part.actions, inputs
        self._free_from, self._leaves_from, self._is_last = part.free_from, part.leaves_from, part.is_last
        self._draws, self._followed_to = part.draws, part.followed_to
        self._is_over = False
        self._seed, self._random = seed, random
        self.number = 0
        self.sent: list[Any] = [None] * len(part.sent)
        for source, target, changes in part.passed:
            self.sent[target] = inputs[source].clone() if changes else inputs[source]
        self.missing = len(part.sent) - len(part.passed)
        self._is_left = False
        self._prepare(0)
        self._counted: list[tuple[Tensor, Tensor]] = []

    def __enter__(self) -> Self:
        """Follow calls from here on; not where there is nothing to follow any more."""
        if not self._is_over:
            super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        """Do not follow calls from here on."""
        if not self._is_over:
            super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def uncount(self) -> None:
        """Give back to tensors of this rank's own what they were before: a later stage of it counts once more."""
        for tensor, before in reversed(self._counted):
            tensor.data.copy_(before)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """A call of frame code."""
        if func in METADATA:
            return func(*args, **kwargs) if kwargs else func(*args)
        return self._call(func, func, args, kwargs)

    def _call(self, key: Any, func: Any, args: Any, kwargs: Any, name: str | None = None) -> Any:
        """Make a call, or answer it; nothing is followed in here.

        Args:
            key: What was found to be called here: a function, or a module.
            func: What is called.
            args: Arguments of the call.
            kwargs: Likewise.
            name: For messages; ``None`` for that of the function.
        """
        number = self.number
        self.number = number + 1
        if number >= self._free_from:
            return self._run_freely(number, key, func, args, kwargs)
        action = self._actions[number]
        if action.function is not key and action.function != key:
            raise OtherPathError(number, name or f"`{function_name(key)}`")
        if action.answer is None:
            if action.draws:
                self._seed(number)
            if action.counts:
                leaves, _ = flatten((args, kwargs or {}))
                self._counted += [(leaves[place], leaves[place].clone()) for place in action.counts]
            result = func(*args, **kwargs) if kwargs else func(*args)
            if type(result) is FakeTensor:
                raise AbsentOperandError(number)
        else:
            result = action.answer(self._inputs, args, kwargs or {})
        if action.draws:
            self._prepare(number + 1)
        if action.sent:
            self._keep(action, result, args, kwargs or {})
        return result

    def _run_freely(self, number: int, key: Any, func: Any, args: Any, kwargs: Any) -> Any:
        """A call after the last unit of the last stage: nothing is absent any more."""
        if not self._is_last:
            self._leave(func)
            return func(*args, **(kwargs or {}))
        if number < len(self._actions) and self._actions[number].draws and self._actions[number].function == key:
            self._seed(number)
        result = func(*args, **(kwargs or {}))
        if type(result) is FakeTensor:
            raise AbsentOperandError(number)
        return result

    def call_module(self, name: str, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call of a module of the frame that is one call.

        Args:
            name: Its dotted name.
            module: The module.
            forward: Its `forward`.
            args: Arguments of the call.
            kwargs: Likewise.
        """
        if self._is_over:
            return forward(*args, **kwargs)

        def checked(*args: Any, **kwargs: Any) -> Any:
            # Before the ranks that share it meet: all of them are without this value.
            if any(type(leaf) is FakeTensor for leaf in flatten((args, kwargs))[0]):
                raise AbsentOperandError(self.number - 1)
            return forward(*args, **kwargs)

        self.__exit__(None, None, None)
        try:
            return self._call(module, checked, args, kwargs, repr(name))
        finally:
            self.__enter__()

    def call_unit(self, index: int, unit: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call of a unit.

        Args:
            index: Its position.
            unit: Its `forward`.
            args: Arguments of the call.
            kwargs: Likewise.
        """
        number = self.number
        self.number = number + 1
        if number >= self._free_from:
            if not self._is_last:
                self._leave(unit)
            raise LateUnitError(index)
        action = self._actions[number]
        if action.unit != index:
            raise OtherPathError(number, index)
        if action.answer is not None:
            result = action.answer(self._inputs, args, kwargs)
        else:
            self.__exit__(None, None, None)
            try:
                if action.draws:
                    with self._random(number):
                        self._seed(number)
                        result = unit(*args, **kwargs)
                else:
                    result = unit(*args, **kwargs)
                if any(type(leaf) is FakeTensor for leaf in flatten(result)[0]):
                    raise AbsentOperandError(number)
                if action.sent:
                    self._keep(action, result, args, kwargs)
            finally:
                if self.number == self._followed_to:
                    self._is_over = True
                self.__enter__()
        if action.draws:
            with torch._C.DisableTorchFunction():
                self._prepare(number + 1)
        return result

    def _prepare(self, number: int) -> None:
        """Start the stream of the next call that draws: what checkpoints that one goes back there in backward."""
        upcoming = next((each for each in self._draws if each >= number), None)
        if upcoming is not None:
            self._seed(upcoming)

    def _leave(self, func: Any) -> None:
        """Leave the step at the first call after all that later stages want.

        Not at once: hooks of the layer that made the last of it come first. And not in a call that ends a context (of
        gradients switched off, of autocast), which has to be ended; nor while the step is being left.
        """
        if not self._is_left and not getattr(func, "__name__", "").startswith(_ENDS):
            self._is_left = True
            raise Unwind

    def _keep(self, action: Action, result: Any, args: Any, kwargs: Any) -> None:
        """Something that the next stage wants is there; once everything is, the step can be left on this stage."""
        leaves, _ = flatten(result)
        for leaf, position, changes in action.sent:
            tensor = flatten((args, kwargs))[0][leaf.position] if isinstance(leaf, Argument) else leaves[leaf]
            self.sent[position] = tensor.clone() if changes else tensor
        self.missing -= len(action.sent)
        if self.missing == 0 and not self._is_last:
            self._free_from = self._leaves_from
