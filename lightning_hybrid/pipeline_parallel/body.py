"""Cutting the user's step at the body: what runs before it, the body's layers, and what runs after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.distributed.module_names import join_names
from lightning_hybrid.distributed.pytree import flatten
from lightning_hybrid.pipeline_parallel.chain import CodeBefore
from lightning_hybrid.pipeline_parallel.frame.units import (
    find_units,
    has_lists_beside_teacher,
    is_container,
    named_units,
    side_by_side,
    spread,
    stands_in_row,
)
from lightning_hybrid.pipeline_parallel.stage import NOTHING


@dataclass(frozen=True, eq=False)
class Body:
    """What is divided into stages.

    Attributes:
        name: Its dotted name; for units the names of the lists that hold them.
        names: The dotted names of its layers, in order.
        layers: Its layers.
        chain: The body, if it is an `nn.Sequential` that the user's step calls as a whole; ``None`` if the layers are
            units, which any code may call.
        rows: The number of layers in each row; a row stays on one stage. 1; 2 for a layer and its frozen copy; more
            where layers of a teacher are distributed.
        is_found: Whether a chain was found by rule, and not named by the user: its layers serve as units where the step
            calls it in another way.
        lists: The names for the error about a chain that is called in another way: its own, and those of a teacher or
            student.
    """

    name: str
    names: tuple[str, ...]
    layers: tuple[nn.Module, ...]
    chain: nn.Sequential | None
    rows: tuple[int, ...]
    is_found: bool = False
    lists: tuple[str, ...] = ()

    @classmethod
    def of_chain(cls, name: str, chain: nn.Sequential, *, is_found: bool = False, lists: Sequence[str] = ()) -> Body:
        """A body that is called as a whole."""
        names = tuple(join_names(name, key) for key in chain._modules)
        return cls(name, names, tuple(chain), chain, (1,) * len(names), is_found, tuple(lists) or (name,))

    @classmethod
    def of_units(cls, rows: Sequence[Sequence[tuple[str, nn.Module]]]) -> Body:
        """A body whose layers are called by any code; those of a row stay together."""
        units = [unit for row in rows for unit in row]
        lists = dict.fromkeys(name.rpartition(".")[0] or name for name, _ in units)
        names, layers = tuple(name for name, _ in units), tuple(unit for _, unit in units)
        return cls(", ".join(lists), names, layers, None, tuple(map(len, rows)))


class BodyWatch:
    """Whether the layers are still those that were divided, found out at the beginning of each step.

    Other stages have placeholders for them, and other replicas their gradients' places, so a change after that would
    be one of a module that nobody trains. It costs a comparison of identities for each layer, and for each module that
    has others, of the layers that this rank runs.

    Args:
        module: The user's module, divided.
        body: What was divided.
        own: The layers that this rank runs.
    """

    def __init__(self, module: nn.Module, body: Body, own: Iterable[nn.Module]) -> None:
        self._kind, self._own = type(module).__name__, list(own)
        paths = {name.rsplit(".", count)[0] for name in body.names for count in range(name.count(".") + 1)}
        owners = {path: module.get_submodule(path.rpartition(".")[0]) for path in sorted(paths)}
        self._places = [
            (path, owner, key, owner._modules[key])
            for path, owner in owners.items()
            for key in [path.rpartition(".")[2]]
        ]
        lists = {name.rpartition(".")[0]: owners[name] for name in body.names}
        self._lists = [(name, part, len(part._modules)) for name, part in lists.items() if is_container(part)]
        self._look()

    def _look(self) -> None:
        parts = [part for layer in self._own for part in layer.modules()]
        self._inside = [(part, list(part._modules.values())) for part in parts if part._modules]
        self._with_parameters = {id(part): part for part in parts if part._parameters}

    def check(self) -> None:
        """Compare.

        Raises:
            WrongUseError: If a layer is another one, is gone or is new, or one of this rank has other parameters.
        """
        for path, part, count in self._lists:
            if len(part._modules) != count:
                self._refuse(f"{path or 'the module'!r} has {len(part._modules)} layers instead of {count}")
        for path, owner, key, known in self._places:
            if owner._modules.get(key) is not known:
                self._refuse(f"{path!r} was {'replaced' if key in owner._modules else 'removed'}")
        if any(list(part._modules.values()) != children for part, children in self._inside):
            before = self._with_parameters
            self._look()
            both = before.keys() & self._with_parameters.keys()  # others, such as dropout, may come and go
            changed = [part for key, part in {**before, **self._with_parameters}.items() if key not in both]
            if changed:
                kinds = sorted({type(part).__name__ for part in changed})
                self._refuse(f"submodules with parameters were added or removed ({', '.join(kinds)})")

    def _refuse(self, what: str) -> NoReturn:
        raise WrongUseError(
            f"The layers of {self._kind} were changed after they had been split into stages: {what}. Other ranks and"
            " the optimizer still have the old layers. Change layers in `__init__` or in `configure_model`, before"
            " they are split. To add or remove layers during training, set pipeline_parallel_size=1. [LH305]"
        )


def find_body(module: nn.Module, wanted: str | Sequence[str] | None, num_stages: int, *, spreads: bool = True) -> Body:
    """Find what is divided into stages.

    Args:
        module: The user's module.
        wanted: The dotted name of a container of layers; or several names of containers or layers, in the order of the
            stages, in which ``*`` stands for anything between two dots. Of named containers the layers of a frozen copy
            stay beside those that they are copies of. ``None`` for the outermost `nn.Sequential` that holds more than
            half of the parameters; if there is none, the layers of the lists that hold most of them.
        num_stages: The number of stages.
        spreads: True to distribute the layers of a teacher over the layers of its student; False if the user assigns
            layers to stages.

    Returns:
        The body: a chain if one name, or none, leads to an `nn.Sequential` that is called as a whole; else units.

    Raises:
        ValueError: If a name leads nowhere, or there is no list of layers of any size.
        TypeError: If a single name leads to a module that contains no layers in order.
    """
    if wanted is None:
        return _largest(module, num_stages, spreads=spreads)
    if isinstance(wanted, str) and "*" not in wanted:
        try:
            part = module.get_submodule(wanted)
        except AttributeError:
            raise ValueError(
                f"body={wanted!r} is not a submodule of {type(module).__name__}. {_candidates_text(module)} [LH302]"
            ) from None
        if _is_chain(part):
            return Body.of_chain(wanted, cast(nn.Sequential, part), lists=_lists_with(module, wanted, num_stages))
        if not is_container(part):
            raise TypeError(
                f"body={wanted!r} is a {type(part).__name__}, not a list of layers. Only an `nn.Sequential`, an"
                f" `nn.ModuleList` or an `nn.ModuleDict` can be split into stages. {_candidates_text(module)} [LH303]"
            )
    patterns = [wanted] if isinstance(wanted, str) else wanted
    named = named_units(module, patterns)
    parts = dict(module.named_modules(remove_duplicate=False))
    if all(pattern in parts and is_container(parts[pattern]) for pattern in patterns):
        rows = side_by_side(module, named)
        return Body.of_units(spread(module, rows, num_stages) if spreads else rows)
    return Body.of_units([[unit] for unit in named])  # the user says the order of the layers themselves


def _largest(module: nn.Module, num_stages: int, *, spreads: bool) -> Body:
    total, has_teacher = _count(module), has_lists_beside_teacher(module)
    for name, candidate in module.named_modules():  # outer modules come before inner ones
        if (
            not has_teacher
            and _is_chain(candidate)
            and 2 * _count(candidate) > total
            and not stands_in_row(module, name)
        ):
            return Body.of_chain(name, cast(nn.Sequential, candidate), is_found=True)
    units = find_units(module, num_stages)
    if units:
        rows = side_by_side(module, units)
        return Body.of_units(spread(module, rows, num_stages) if spreads else rows)
    raise ValueError(
        f"No list of layers contains a large part of the {total:,} parameters of {type(module).__name__}, so the layers"
        f" to split into pipeline stages cannot be detected. {_candidates_text(module)} [LH301]"
    )


def _lists_with(module: nn.Module, name: str, num_stages: int) -> Sequence[str]:
    """Return the names of the lists to divide together with a chain: those of a teacher and its student."""
    units = find_units(module, num_stages) if has_lists_beside_teacher(module) else []
    lists = list(dict.fromkeys(path.rpartition(".")[0] for path, _ in units))
    return lists if name in lists else [name]


def _is_chain(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _candidates_text(module: nn.Module) -> str:
    total = max(1, _count(module))
    found = {name: part for name, part in module.named_modules() if is_container(part)}
    largest = sorted(found, key=lambda name: -_count(found[name]))[:5]
    if not largest:
        return (
            "The module has no list of layers. In `__init__` or `configure_model`, store the layers of the pipeline in"
            " an `nn.Sequential` or an `nn.ModuleList`, or name the layers with"
            " HybridStrategy(body=['first', 'second', ...])."
        )
    shares = [
        f"{name!r} ({len(list(found[name].children()))} layers, {100 * _count(found[name]) / total:.0f}% of the"
        " parameters)"
        for name in largest
    ]
    return (
        f"Candidates: {', '.join(shares)}. Name one of them with HybridStrategy(body='...') or with a `pipeline_body`"
        " attribute of the module. To name several candidates, or to name single layers, use a list."
    )


def body_call_text(name: str, lists: Sequence[str], step: str, calls: int) -> str:
    """The text for a step that does not call the body exactly once.

    Args:
        name: The dotted name of the body.
        lists: The lists to name instead.
        step: The user's step, such as ``"training_step"``.
        calls: How often it was called.
    """
    advice = (
        "If you name the body, or if the first step calls it as a whole, each step must call it exactly once. Write"
        f" `x = self.{name}(x)` instead of calling its layers one by one. To allow calls of single layers, set"
        f" HybridStrategy(body={list(lists)!r})."
    )
    if calls == 0:
        return f"`{step}` did not call the body {name!r}. {advice} [LH430]"
    return f"`{step}` called the body {name!r} {calls} times. {advice} [LH430]"


def layer_call_text(name: str, lists: Sequence[str]) -> str:
    """The text for a call of a layer that lives on another stage.

    Args:
        name: The dotted name of the body.
        lists: The lists to name instead.
    """
    return (
        f"A layer of the body {name!r} was called, but this layer is on another stage. In a step, call the body exactly"
        f" once (`x = self.{name}(x)`) instead of calling layers one by one. To allow calls of single layers, set"
        f" HybridStrategy(body={list(lists)!r}). Outside of a step, no rank can run the model. Use `trainer.predict`"
        " instead, or call `trainer.strategy.gather_module()` on every rank after the run. The module stays split after"
        " a run, so also gather it before you use it with a Trainer without a pipeline. [LH405]"
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
        lists: The lists of layers to name where a step calls it otherwise; by default itself.

    Attributes:
        code_before: Entered around steps where this stage lacks parameters around the body; ``None`` where it has them.
    """

    def __init__(self, name: str, body: nn.Sequential, lists: Sequence[str] = ()) -> None:
        self.code_before: CodeBefore | None = None
        self._name, self._lists = name, tuple(lists) or (name,)
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
                raise BodyCallError(body_call_text(self._name, self._lists, call.step, call.count))
            inputs = x if call.unwinds else call.inputs
            with nullcontext() if self.code_before is None else self.code_before.at_layers(inputs):
                y = call.layers(inputs)
            if call.unwinds:
                raise _Unwind(y)
            call.refuse_derivatives(self._name, x, y)
            return y

        self._body.forward = redirected  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self._body.forward

    def run(
        self,
        step: Callable[..., Any],
        arguments: Sequence[Any],
        layers: Callable[[Any], Any],
        inputs: Any = None,
        *,
        unwinds: bool,
        may_skip: bool = False,
    ) -> Any:
        """Run a step, with the call of the body answered by the layers of one stage.

        Args:
            step: The user's step.
            arguments: Its arguments.
            layers: Runs the layers of the stage.
            inputs: Of the first of them, whatever the step calls the body with; not on the first stage.
            unwinds: Whether the step ends there: on the first stage, whose layers get what the body is called with.
            may_skip: Whether the step may return ``None`` without a call of the body.

        Returns:
            The output of the last of these layers, or what the step returns; on the first stage :data:`NOTHING` if it
            does not call the body.

        Raises:
            BodyCallError: If the step does not call the body exactly once.
            WrongUseError: If it differentiates through the body.
        """
        self._call = call = _Call(step.__name__, layers, inputs, unwinds)
        try:
            with nullcontext() if self.code_before is None else self.code_before:
                value = step(*arguments)
        except _Unwind as unwind:
            return unwind.value
        except RuntimeError as error:
            if _NOT_IN_GRAPH in str(error) and not unwinds:
                raise WrongUseError(_derivative_text(step.__name__, self._name)) from error
            raise
        finally:
            self._call = None
            for hook in call.hooks:
                hook.remove()
        if may_skip and value is None and call.count == 0 and (unwinds or inputs is NOTHING):
            return NOTHING if unwinds else None
        if unwinds or call.count != 1:
            raise BodyCallError(body_call_text(self._name, self._lists, step.__name__, call.count))
        return value


@dataclass(slots=True)
class _Call:
    """The call of the body that is expected in the step that runs."""

    step: str
    layers: Callable[[Any], Any]
    inputs: Any
    unwinds: bool
    count: int = 0
    hooks: list[RemovableHandle] = field(default_factory=list)

    def refuse_derivatives(self, name: str, given: Any, output: Any) -> None:
        """Refuse a backward that comes to the layers, or to what is before them, until the step ends.

        ::

            x --> code before --> given      inputs --> layers --> output --> code after --> y
                                     `------------- around the layers ----------^

        The graph of what is given does not go on in the layers, which got what another stage made of it: a derivative
        of `y` with respect to `x` would be that of the way around them alone.

        Args:
            name: The dotted name of the body.
            given: What the body was called with.
            output: Of its last layer.
        """

        def refuse(*_: Any) -> None:
            raise WrongUseError(_derivative_text(self.step, name))

        for value in (given, output):
            for leaf in (value,) if isinstance(value, Tensor) else flatten(value)[0]:
                if not isinstance(leaf, Tensor):
                    continue
                if leaf.grad_fn is not None:
                    self.hooks.append(leaf.grad_fn.register_prehook(refuse))
                elif leaf.requires_grad:
                    self.hooks.append(leaf.register_hook(refuse))  # type: ignore[no-untyped-call]


_NOT_IN_GRAPH = "to not have been used in the graph"  # as torch says it


def _derivative_text(step: str, name: str) -> str:
    return (
        f"`{step}` computes derivatives through the body {name!r}, with `torch.autograd.grad` or `backward`. The layers"
        " of the body are on several stages, so no rank has the full autograd graph. If the loss contains derivatives,"
        " set pipeline_parallel_size=1. [LH407]"
    )
