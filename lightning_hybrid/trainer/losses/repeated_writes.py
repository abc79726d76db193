"""Module state that a step writes independently of the batch: it changes once per step, not once per microbatch.

::

    microbatch     begins with     writes     computes with
    0              s               f(s)       s before the write, f(s) after it
    1              s, restored     f(s)       the same

Examples are the teacher of a student, and the singular vectors of spectral norm. Each microbatch repeats the write of
the first microbatch. To skip the write in later microbatches would be simpler, but the strategy cannot skip a part of
the user's code.

The training steps enter :meth:`ParameterWrites.around` for the forward of each microbatch, and `TrainingStep` calls
:meth:`PowerIterations.begin` before it. If steps are traced (their calls are recorded before they run), the plan of the
step determines instead which stages write parameters, see :mod:`~lightning_hybrid.pipeline_parallel.frame.writes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.data_parallel.grad_sync import GradientSync
from lightning_hybrid.distributed.dtensor import to_local
from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.distributed.modes import FunctionMode
from lightning_hybrid.distributed.pytree import flatten, unflatten
from lightning_hybrid.distributed.tensor_metadata import METADATA
from lightning_hybrid.pipeline_parallel.frame.graph import DETACHES
from lightning_hybrid.pipeline_parallel.frame.operators import SETS_DATA, memory_of
from lightning_hybrid.pipeline_parallel.frame.plan import assign
from lightning_hybrid.pipeline_parallel.frame.units import has_teacher
from lightning_hybrid.pipeline_parallel.frame.writes import call_each, is_foreach
from lightning_hybrid.torch_internals import COMPILED_CALL, forward_pre_hooks

__all__ = ["ParameterWrites", "PowerIterations"]


class ParameterWrites:
    """The parameters that a step writes. All microbatches start with the values that the first microbatch started with.

    A *teacher* is a frozen copy of a trained module, the *student*. The step or a hook updates its parameters.

    So each microbatch computes with the values of a single process, wherever in the step the write is. If parameters
    are sharded over replicas, the step gets full parameters, and each replica keeps its rows of the new values.

    Only modules with a teacher are checked for writes, because this takes time at each function call, and functions
    compiled by `torch.compile` with ``fullgraph=True`` raise an error if a mode is active.

    Args:
        module: The user's module. The constructor searches it for compiled submodules.
        grad_sync: The gradient synchronization, which has the parameters with values on this rank.

    Attributes:
        watches: True if there is a teacher. Otherwise, :meth:`around` is not needed.
    """

    def __init__(self, module: nn.Module, grad_sync: GradientSync) -> None:
        self._module, self._grad_sync = module, grad_sync
        self.watches = has_teacher(module)
        tables = [vars(part) for part in module.modules()] if self.watches else []
        self._compiled = [(table, COMPILED_CALL) for table in tables if table.get(COMPILED_CALL) is not None]
        self._compiled += [(table, "forward") for table in tables if "dynamo_ctx" in table]  # `torch.compile(module)`
        self._before: list[tuple[Tensor, Tensor]] = []
        self._after: list[Tensor] = []
        self._known = set[int]()

    @contextmanager
    def around(self, microbatch: int, number: int, optimizers: Iterable[Optimizer] = ()) -> Iterator[None]:
        """Record or repeat the writes of the user's step for one microbatch, inside the context.

        Args:
            microbatch: The index of the microbatch.
            number: The number of microbatches.
            optimizers: Optimizers that may step inside. Their writes are not recorded.

        Raises:
            WrongUseError: If the new value of a parameter differs between microbatches. This is checked only in the
                first step that writes the parameter.
        """
        if microbatch > 0 and not (self._before or self._grad_sync.zero.is_active):
            yield
            return
        self._put_back(microbatch)
        writes = _Writes(self._grad_sync)
        with writes.mode, self._uncovered(writes), writes.leaving_out(optimizers):
            yield
        if microbatch == 0:
            self._before = list(writes.before.values()) if number > 1 else []
            is_new = any(id(parameter) not in self._known for parameter, _ in self._before)
            self._after = [value.clone() for value in self._values()] if is_new else []
            return
        if self._after:
            for (parameter, _), now, after in zip(self._before, self._values(), self._after, strict=True):
                if not torch.equal(now, after):
                    self._refuse(parameter, number)
        self._known |= {id(parameter) for parameter, _ in self._before}
        self._after = []
        if microbatch == number - 1:
            self._before = []

    def _put_back(self, microbatch: int) -> None:
        """Restore the values that the first microbatch started with."""
        if microbatch == 0:
            self._before = []
        for now, (parameter, value) in zip(self._values(), self._before, strict=True):
            # Autograd does not see this change. If a graph has saved the old value, the step writes that value again.
            now.data.copy_(value)
            self._grad_sync.zero.note_write(parameter)

    def _values(self) -> list[Tensor]:
        """Return the local tensors of the parameters that the step writes, not copies."""
        if self._before:
            self._grad_sync.zero.unshard_layers()
        return [to_local(parameter) for parameter, _ in self._before]

    @contextmanager
    def _uncovered(self, writes: _Writes) -> Iterator[None]:
        """Let compiled modules run outside the mode, because inside it they would run without compilation."""
        calls = [table[name] for table, name in self._compiled]
        try:
            for (table, name), call in zip(self._compiled, calls, strict=True):
                table[name] = partial(writes.call_outside, call)
            yield
        finally:
            for (table, name), call in zip(self._compiled, calls, strict=True):
                table[name] = call

    def _refuse(self, parameter: Tensor, number: int) -> None:
        memory = memory_of(to_local(parameter))
        named = self._module.named_parameters()
        name = next((name for name, each in named if memory_of(to_local(each)) == memory), "")
        raise WrongUseError(
            f"`training_step` changes the parameter {name!r}, and its new value differs between microbatches. The value"
            f" depends on the batch or on random numbers. Each of the {number} microbatches would change the parameter,"
            " but a single process changes it only once per batch. Set `num_microbatches=1`, or change the parameter in"
            " a hook, such as `on_train_batch_end`. [LH466]"
        )


class _Writes:
    """A recorder of the parameters that are written, with the values before the write.

    A tensor that is assigned to `data` of a parameter is copied instead, because shards and buckets refer to the memory
    of the parameter. If ZeRO has not gathered a parameter yet, the call receives the full parameter.

    Args:
        grad_sync: As for :class:`ParameterWrites`.

    Attributes:
        mode: The mode that records writes while it is entered.
        before: The written parameters, each with a copy of its old value, by their memory.
    """

    def __init__(self, grad_sync: GradientSync) -> None:
        self.mode = FunctionMode(self._call_function)
        self._grad_sync, self._zero = grad_sync, grad_sync.zero
        self._parameters: dict[int, Tensor] = {}
        self.before: dict[int, tuple[Tensor, Tensor]] = {}
        self._is_paused = False

    @contextmanager
    def leaving_out(self, optimizers: Iterable[Optimizer]) -> Iterator[None]:
        """Record nothing during the steps of these optimizers."""
        with ExitStack() as undo:
            for optimizer in optimizers:
                undo.callback(optimizer.register_step_pre_hook(lambda *_: self._pause(True)).remove)
                undo.callback(optimizer.register_step_post_hook(lambda *_: self._pause(False)).remove)
            yield

    def _pause(self, is_paused: bool) -> None:
        self._is_paused = is_paused

    def call_outside(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function without recording its writes."""
        self.mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            return function(*args, **kwargs)
        finally:
            self.mode.__enter__()  # type: ignore[no-untyped-call]

    def _call_function(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._is_paused or func in METADATA:
            return func(*args, **kwargs)
        return call_each(self._call, func, args, kwargs) if is_foreach(func) else self._call(func, args, kwargs)

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._needs_whole(func):
            leaves, spec = flatten((args, kwargs))
            forms = [self._zero.unsharded(leaf) if isinstance(leaf, Tensor) else None for leaf in leaves]
            args, kwargs = unflatten(
                [leaf if form is None else form for form, leaf in zip(forms, leaves, strict=True)], spec
            )
        if func == SETS_DATA and isinstance(args[0], nn.Parameter):
            func = assign
        if func is assign or _writes(func) or "out" in kwargs:
            self._note(args[0] if args else None, kwargs.get("out"), kwargs.get("self"), kwargs.get("input"))
        return func(*args, **kwargs)

    def _needs_whole(self, func: Any) -> bool:
        """Return True if a call may need parameters that are not gathered yet.

        ZeRO stage 3 frees parameters, so calls that are recorded in a graph, which may save the parameters, are
        excluded.
        """
        if self._zero.keeps_layers:
            return not self._zero.is_unsharded
        return not torch.is_grad_enabled() or func in DETACHES or func == SETS_DATA

    def _note(self, *written: Any) -> None:
        if not self._parameters:
            parameters = self._grad_sync.local_parameters()
            self._parameters = {memory_of(to_local(each)): each for each in parameters if not each.is_meta}
        for leaf in flatten(written)[0]:
            if not isinstance(leaf, Tensor) or leaf.is_meta:
                continue
            try:
                memory = memory_of(to_local(leaf))
            except NotImplementedError:  # sparse tensors, and tensors inside transforms of `torch.func`
                continue
            parameter = self._parameters.get(memory)
            if parameter is None or memory in self.before:
                continue
            self._zero.note_write(parameter)
            self.before[memory] = parameter, to_local(parameter).clone()


def _writes(function: Callable[..., Any]) -> bool:
    """Return True if a function may write its first argument, judged by its name: `mul_`, `add_`, `__setitem__`."""
    name = getattr(function, "__name__", "")
    if name.endswith("__"):
        return name == "__setitem__" or name.startswith("__i")
    return name.endswith("_")


class PowerIterations:
    """The singular vectors of spectral norm. All microbatches of a step start with the same vectors.

    In training mode, each forward updates the vectors by a power iteration (Miyato et al., "Spectral Normalization for
    Generative Adversarial Networks", 2018). Each microbatch repeats the iteration of the first microbatch, so all
    microbatches and recomputed layers use the same weight.

    Args:
        layers: The layers to search for spectral norm, by stage.

    Attributes:
        stages: The stages with such layers.
    """

    def __init__(self, layers: Mapping[int, Iterable[nn.Module]]) -> None:
        found = {stage: list(_vectors(of_stage)) for stage, of_stage in layers.items()}
        self._vectors = {stage: vectors for stage, vectors in found.items() if vectors}
        self.stages = frozenset(self._vectors)
        self._first: dict[int, list[Tensor]] = {}

    @torch.no_grad()
    def begin(self, stage: int, microbatch: int) -> None:
        """Save the vectors before the first microbatch of a stage, and restore them before its other microbatches.

        Args:
            stage: The stage.
            microbatch: The index of the microbatch.
        """
        if stage not in self._vectors:
            return
        if microbatch == 0:
            self._first[stage] = [vector.clone() for vector in self._vectors[stage]]
        else:
            for vector, value in zip(self._vectors[stage], self._first[stage], strict=True):
                vector.copy_(value)


def _vectors(layers: Iterable[nn.Module]) -> Iterator[Tensor]:
    """Yield the singular vectors of both implementations in torch: a parametrization, and a hook before forwards."""
    for part in (part for layer in layers for part in layer.modules()):
        if hasattr(part, "n_power_iterations"):
            yield from (vector for name in ("_u", "_v") if isinstance(vector := getattr(part, name, None), Tensor))
        for hook in forward_pre_hooks(part).values():
            if hasattr(hook, "n_power_iterations"):
                name: Any = getattr(hook, "name", "weight")
                yield from (getattr(part, f"{name}_{kind}") for kind in "uv")
