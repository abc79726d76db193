"""Body of the pipeline: which layers are split into stages, and how the user's step is cut where it calls them.

A body is either a *chain*, which is an `nn.Sequential` that the step calls as a whole, or a set of layers that any code
may call, called *units*. :class:`BodyCut` handles steps around a chain; :class:`~.frame.frame.FrameCut` handles all
other bodies. A chain is the simpler case: the stages between the first and the last one do not run the step, and steps
need no plan. If a step calls the chain in another way, `ChainProgram` can open it: from then on, its layers are units.

:func:`find_body` is called on every rank before the module is split, and in commands such as `plan`. `ChainProgram`
makes one :class:`BodyCut` for each run, and `StepContext` one :class:`BodyWatch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
    """Layers that are split into stages.

    Attributes:
        name: The dotted name of the chain, or the names of the lists that contain the layers, joined by commas.
        names: The dotted names of the layers, row by row.
        layers: The layers, in the same order.
        chain: The `nn.Sequential`, if the body is a chain; ``None`` if any code may call the layers. It stays set after
            the chain was opened.
        rows: The number of layers in each row. All layers of a row are on the same stage. A row is a single layer, a
            layer with its frozen copy, or a layer of a student with layers of its teacher (or the other way round).
        is_found: True if the strategy has detected the chain, and the user has not named it. A step may then also call
            the chain several times, or its layers one by one: the chain is opened.
        lists: The names for the error about a step that does not call the chain as a whole: the name of the chain, and
            the names of the layer lists of its teacher or student.
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
        """Return the body for an `nn.Sequential` that the step calls as a whole."""
        names = tuple(join_names(name, key) for key in chain._modules)
        return cls(name, names, tuple(chain), chain, (1,) * len(names), is_found, tuple(lists) or (name,))

    @classmethod
    def of_units(cls, rows: Sequence[Sequence[tuple[str, nn.Module]]]) -> Body:
        """Return the body for layers that any code may call. All layers of a row are on the same stage."""
        units = [unit for row in rows for unit in row]
        lists = dict.fromkeys(name.rpartition(".")[0] or name for name, _ in units)
        names, layers = tuple(name for name, _ in units), tuple(unit for _, unit in units)
        return cls(", ".join(lists), names, layers, None, tuple(map(len, rows)))


class BodyWatch:
    """Watch that raises an error if the layers are no longer the layers that were split into stages.

    A layer that the user replaces, adds or removes after the split would not be trained: other stages have placeholders
    for the old layers, and other replicas exchange gradients of the old layers. `StepContext` calls :meth:`check` at
    the beginning of each step, on every rank and without communication. It compares the identities of the layers and of
    the modules that contain them, the number of layers in each list, and the identities of the submodules of the layers
    that this rank runs.

    Args:
        module: The user's module, after the split.
        body: The layers that were split.
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
        """Record the submodules of this rank's layers."""
        parts = [part for layer in self._own for part in layer.modules()]
        self._inside = [(part, list(part._modules.values())) for part in parts if part._modules]
        self._with_parameters = {id(part): part for part in parts if part._parameters}

    def check(self) -> None:
        """Compare the layers with the layers at the time of the split.

        Raises:
            WrongUseError: If a layer was replaced, removed or added, or if submodules with parameters were added to or
                removed from a layer of this rank.
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
            both = before.keys() & self._with_parameters.keys()  # modules without parameters may change
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
    """Find the layers that are split into stages.

    Args:
        module: The user's module.
        wanted: The dotted name of a container of layers; several names of containers or layers, in the order of the
            stages; or ``None``. In a name, ``*`` matches any text without a dot. ``None`` selects the outermost plain
            `nn.Sequential` that contains more than half of the parameters, if it is not one of a numbered row
            (``layer1``, ``layer2``) and no teacher has lists of layers. Otherwise, it selects the layers of the lists
            that contain most parameters (:func:`~.frame.units.find_units`). If `wanted` is ``None`` or all names are
            names of containers, each layer of a frozen copy is on the same stage as the original layer.
        num_stages: The number of stages, over all ranks and their chunks.
        spreads: If True, distribute the layers of a teacher over the layers of its student. Set it to False if the user
            assigns layers to stages.

    Returns:
        The body. It is a chain if `wanted` is the name of a plain `nn.Sequential` as a string, or if ``None`` selects
        one. Plain means that the class does not override `forward`.

    Raises:
        ValueError: If a name does not exist, a named layer is part of another one, or no list of layers is large
            enough.
        TypeError: If a single name is the name of a module that is not a container of layers.
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
    return Body.of_units([[unit] for unit in named])  # the user has chosen the order of single layers


def _largest(module: nn.Module, num_stages: int, *, spreads: bool) -> Body:
    """Find the body of a module whose user has not named it."""
    total, has_teacher = _count(module), has_lists_beside_teacher(module)
    for name, candidate in module.named_modules():  # outer modules first
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
    """Return the names for :attr:`Body.lists`: a chain, and the layer lists of its teacher or student."""
    units = find_units(module, num_stages) if has_lists_beside_teacher(module) else []
    lists = list(dict.fromkeys(path.rpartition(".")[0] for path, _ in units))
    return lists if name in lists else [name]


def _is_chain(module: nn.Module) -> bool:
    """Return whether a module is a plain `nn.Sequential`."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _count(module: nn.Module) -> int:
    """Return the number of parameter elements in a module."""
    return sum(parameter.numel() for parameter in module.parameters())


def _candidates_text(module: nn.Module) -> str:
    """Return the part of an error message that lists the largest containers of layers."""
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
    """Return the error message for a step that does not call the body exactly once.

    Args:
        name: The dotted name of the body.
        lists: The names of layer lists that the message recommends for `HybridStrategy(body=...)`.
        step: The name of the user's step, such as ``"training_step"``.
        calls: The number of calls.
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
    """Return the error message for a call of a layer that is on another stage.

    Args:
        name: The dotted name of the body.
        lists: The names of layer lists that the message recommends for `HybridStrategy(body=...)`.
    """
    return (
        f"A layer of the body {name!r} was called, but this layer is on another stage. In a step, call the body exactly"
        f" once (`x = self.{name}(x)`) instead of calling layers one by one. To allow calls of single layers, set"
        f" HybridStrategy(body={list(lists)!r}). Outside of a step, no rank can run the model. Use `trainer.predict`"
        " instead, or call `trainer.strategy.gather_module()` on every rank after the run. The module stays split after"
        " a run, so also gather it before you use it with a Trainer without a pipeline. [LH405]"
    )


class BodyCallError(WrongUseError):
    """Error: a wrong call of the body.

    The user's step does not call a chain exactly once, or code calls a layer that is on another stage.
    """


class _Unwind(BaseException):
    """Exception that leaves the user's step at the call of the body.

    It is a `BaseException`, so that no ``except Exception`` in the user's code catches it.
    """

    def __init__(self, value: Any) -> None:
        self.value = value


class BodyCut:
    """User's step, cut at its call of the body.

    ::

        stage 0      step: code before, body(x) -> layers of stage 0 -> unwind                 value: the layers' output
        stage s      no step, only layers
        last stage   step: code before, body(x) -> last layers on received input, code after   value: the step's result

    Code before the body also runs on the last stage. There, its result is dropped unless later code uses it, for
    example in a residual connection around the body.

    In evaluation, `ChainProgram` runs the layers separately, microbatch by microbatch. There, the first stage runs the
    step only to get the argument of body(x), and the last stage runs it with the joined output of all layers.

    Args:
        name: The dotted name of the body.
        body: The body.
        lists: The names of layer lists that the error about a wrong call recommends; by default the name of the body.

    Attributes:
        code_before: The context in which this stage runs a step if it lacks parameters outside the body; ``None`` if it
            has all of them.
    """

    def __init__(self, name: str, body: nn.Sequential, lists: Sequence[str] = ()) -> None:
        self.code_before: CodeBefore | None = None
        self._name, self._lists = name, tuple(lists) or (name,)
        self._body = body
        self._call: _Call | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Redirect calls of the body to this object while entered."""

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

        # An assignment, not `replaced_entries`: this is entered in every step.
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
        around: AbstractContextManager[object] | None = None,
    ) -> Any:
        """Run a step in which the layers of one stage replace the body.

        Args:
            step: The user's step.
            arguments: The arguments of the step.
            layers: A function that runs the layers of the stage. In evaluation, it returns its argument.
            inputs: The input of the layers, which replaces the argument of the user's call; :data:`NOTHING` if the
                first stage has skipped the body. Ignored if `unwinds` is True.
            unwinds: If True, the step ends after the layers. This is the case on the first stage, whose layers receive
                the argument of the user's call.
            may_skip: If True, the step may return ``None`` without a call of the body. The first stage decides; the
                last stage may only do so if `inputs` is :data:`NOTHING`.
            around: A context for the step; ``None`` for none.

        Returns:
            On the first stage, the output of the layers; :data:`NOTHING` if the step skips the body. On the last stage,
            the result of the step.

        Raises:
            BodyCallError: If the step does not call the body exactly once.
            WrongUseError: If the step computes derivatives through the body, or if it needs a parameter that this stage
                lacks (see :class:`~.chain.CodeBefore`).
        """
        self._call = call = _Call(step.__name__, layers, inputs, unwinds)
        try:
            with around or nullcontext(), nullcontext() if self.code_before is None else self.code_before:
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
    """Call of the body that the running step has to make.

    Attributes:
        step: The name of the user's step.
        layers: See :meth:`BodyCut.run`.
        inputs: See :meth:`BodyCut.run`.
        unwinds: See :meth:`BodyCut.run`.
        count: The number of calls so far.
        hooks: The hooks of :meth:`refuse_derivatives`; :meth:`BodyCut.run` removes them.
    """

    step: str
    layers: Callable[[Any], Any]
    inputs: Any
    unwinds: bool
    count: int = 0
    hooks: list[RemovableHandle] = field(default_factory=list)

    def refuse_derivatives(self, name: str, given: Any, output: Any) -> None:
        """Add hooks that raise an error if a backward reaches the layers or the code before them before the step ends.

        ::

            x --> code before --> given      inputs --> layers --> output --> code after --> y
                                     `---------- path around the layers --------^

        The autograd graph of `given` ends before the layers, because `inputs` comes from another stage. So a derivative
        of `y` with respect to `x` would contain only the path around the layers.

        Args:
            name: The dotted name of the body.
            given: The argument of the user's call of the body.
            output: The output of the last layer.
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


_NOT_IN_GRAPH = "to not have been used in the graph"  # in torch's error message


def _derivative_text(step: str, name: str) -> str:
    """Return the error message for a step that computes derivatives through the body."""
    return (
        f"`{step}` computes derivatives through the body {name!r}, with `torch.autograd.grad` or `backward`. The layers"
        " of the body are on several stages, so no rank has the full autograd graph. If the loss contains derivatives,"
        " set pipeline_parallel_size=1. [LH407]"
    )
