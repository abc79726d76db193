"""Cutting the user's step at the body: what runs before it, the body's layers, and what runs after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_hybrid.distributed.failure import WrongUseError


def find_body(module: nn.Module, name: str | None) -> tuple[str, nn.Sequential]:
    """Find the `nn.Sequential` that is divided into stages.

    Args:
        module: The user's module.
        name: Its dotted name; ``None`` for the outermost `nn.Sequential` that holds more than half of the parameters.

    Returns:
        The dotted name and the `nn.Sequential`.

    Raises:
        ValueError: If the name leads nowhere, or no `nn.Sequential` stands out.
        TypeError: If what is found is not an `nn.Sequential`, or is one with a `forward` of its own.
    """
    if name is None:
        name = _largest_sequential(module)
    try:
        body = module.get_submodule(name)
    except AttributeError:
        raise ValueError(
            f"body={name!r} names nothing in {type(module).__name__}. {_candidates_text(module)}"
        ) from None
    if not isinstance(body, nn.Sequential):
        raise TypeError(
            f"body={name!r} is a {type(body).__name__}, but only an `nn.Sequential` can be divided into stages."
            f" {_candidates_text(module)}"
        )
    if type(body).forward is not nn.Sequential.forward:
        raise TypeError(
            f"The body {name!r} is a {type(body).__name__} with a `forward` of its own, so its layers cannot be run"
            " stage by stage. Move what `forward` adds into layers, or into the code around the body."
        )
    return name, body


def _largest_sequential(module: nn.Module) -> str:
    total = _count(module)
    for name, candidate in module.named_modules():  # outer modules come before inner ones
        if isinstance(candidate, nn.Sequential) and 2 * _count(candidate) > total:
            return str(name)
    raise ValueError(
        f"No `nn.Sequential` holds more than half of the {total:,} parameters of {type(module).__name__}, so it is not"
        f" clear what to divide into pipeline stages. {_candidates_text(module)}"
    )


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _candidates_text(module: nn.Module) -> str:
    total = max(1, _count(module))
    found = [
        f"{name!r} ({len(candidate)} layers, {100 * _count(candidate) / total:.0f} % of the parameters)"
        for name, candidate in module.named_modules()
        if isinstance(candidate, nn.Sequential)
    ]
    if not found:
        return (
            "It has no `nn.Sequential`: put the layers to divide into one, in `__init__` or in `configure_model`, and"
            " call it as `self.body(x)`."
        )
    return f"Candidates: {', '.join(found)}. Name one with HybridStrategy(body='...') or a `pipeline_body` attribute."


def body_call_text(name: str, step: str, calls: int) -> str:
    """The text for a step that does not call the body exactly once.

    Args:
        name: The dotted name of the body.
        step: The user's step, such as ``"training_step"``.
        calls: How often it was called.
    """
    times = "did not call" if calls == 0 else f"called {calls} times"
    return (
        f"`{step}` {times} the body {name!r}. With a pipeline the body must be called exactly once in a step, as a"
        f" whole: `x = self.{name}(x)`, not layer by layer or in a loop over its layers."
    )


def layer_call_text(name: str) -> str:
    """The text for a call of a layer that lives on another stage.

    Args:
        name: The dotted name of the body.
    """
    return (
        f"A layer of the body {name!r} was called that lives on another stage. In a step the body must be called"
        f" exactly once, as a whole: `x = self.{name}(x)`, not layer by layer or in a loop over its layers. Outside of"
        " steps no rank can run the model: use `trainer.predict`, or make the module whole after the run by"
        " `trainer.strategy.gather_module()` on every rank. A Trainer without a pipeline needs that too: an earlier one"
        " has divided this module, and so it stays."
    )


class BodyCallError(WrongUseError):
    """The user's step does not call the body exactly once, as a whole."""


class _Unwind(BaseException):
    """Leaves the user's step where the body was called; no `except Exception` of the user's catches it."""

    def __init__(self, value: Any) -> None:
        self.value = value


class BodyCut:
    """The user's step, cut where it calls the body.

    ::

        stage 0      step: code before, body(x) -> layers of stage 0 -> unwind                 value: their output
        stage s      no step, only layers
        last stage   step: code before, body(x) -> last layers on what arrived, code after     value: the step's

    Code before the body also runs on the last stage, where its result is dropped unless later code uses it (a residual
    around the body).

    Args:
        name: The dotted name of the body.
        body: The body.
    """

    def __init__(self, name: str, body: nn.Sequential) -> None:
        self._name = name
        self._body = body
        self._call: _Call | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """While this is entered, calls of the body come here instead of running all its layers."""

        def redirected(x: Any) -> Any:
            call = self._call
            assert call is not None, "the body was called outside of a step"
            call.count += 1
            if call.count > 1:
                raise BodyCallError(body_call_text(self._name, call.step, call.count))
            if not call.unwinds:
                x = call.inputs
            with call.random:
                for layer in call.layers:
                    x = layer(x)
            if call.unwinds:
                raise _Unwind(x)
            return x

        self._body.forward = redirected  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self._body.forward

    def until_body(
        self,
        step: Callable[..., Any],
        arguments: Sequence[Any],
        layers: Sequence[nn.Module],
        random: AbstractContextManager[None],
    ) -> Any:
        """Run a step up to the body, and the layers of the first stage on what the body is called with.

        Args:
            step: The user's step.
            arguments: Its arguments.
            layers: The layers of the first stage.
            random: Around the layers.

        Returns:
            The output of the last layer.

        Raises:
            BodyCallError: If the step ends without having called the body.
        """
        self._call = _Call(step.__name__, layers, random, unwinds=True)
        try:
            step(*arguments)
        except _Unwind as unwind:
            return unwind.value
        finally:
            self._call = None
        raise BodyCallError(body_call_text(self._name, step.__name__, 0))

    def around_body(
        self,
        step: Callable[..., Any],
        arguments: Sequence[Any],
        layers: Sequence[nn.Module],
        random: AbstractContextManager[None],
        inputs: Any,
    ) -> Any:
        """Run a whole step, with the body's call answered by the layers of the last stage.

        Args:
            step: The user's step.
            arguments: Its arguments.
            layers: The layers of the last stage.
            random: Around the layers.
            inputs: Of the first of them, whatever the step calls the body with.

        Returns:
            What the step returns.

        Raises:
            BodyCallError: If the step does not call the body exactly once.
        """
        self._call = call = _Call(step.__name__, layers, random, inputs)
        try:
            value = step(*arguments)
        finally:
            self._call = None
        if call.count != 1:
            raise BodyCallError(body_call_text(self._name, step.__name__, call.count))
        return value


@dataclass(slots=True)
class _Call:
    """The call of the body that is expected in the step that runs."""

    step: str
    layers: Sequence[nn.Module]
    random: AbstractContextManager[None]
    inputs: Any = None
    unwinds: bool = False
    count: int = 0
