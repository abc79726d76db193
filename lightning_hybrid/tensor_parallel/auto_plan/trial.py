"""The trial of a block before it is sharded: a run with full weights and a run with shards, on random values.

`blocks` calls :func:`try_blocks` for each block with usual names, while an automatic plan is made. Names and shapes
suggest how a block can be sharded, but only its code determines if the result is right. In one process, without
messages, a copy of the block runs as each rank would. The combined results of the ranks are compared with the results
of the full block. A *block* has *columns* (linear layers that take its input) and a *row* (the linear layer that takes
what the code computes from them)::

    input --> columns --> code of the block --> row --> sum over ranks  =  output of the full block
                (shards)                      (shards)
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.distributed.modes import FunctionMode
from lightning_hybrid.distributed.no_draws import NoDraws
from lightning_hybrid.distributed.pytree import flatten
from lightning_hybrid.distributed.random import seed_generators
from lightning_hybrid.distributed.replaced import Preserved, copied_buffers, default_dtype
from lightning_hybrid.tensor_parallel.auto_plan.operations import OperationWatch
from lightning_hybrid.tensor_parallel.auto_plan.straight_code import not_straight_reason
from lightning_hybrid.tensor_parallel.layers import NarrowInput, is_per_head, parallelize_layer, restore_layer
from lightning_hybrid.tensor_parallel.shard import shards_of
from lightning_hybrid.tensor_parallel.styles import find_style, is_conv1d
from lightning_hybrid.torch_internals import backward_hooks, forward_hooks, forward_pre_hooks

_TOLERANCE = 1e-3  # for float32; a wrong sharding changes values completely
_SHAPE = (2, 4)  # samples, and positions of each sample
_OTHER_SHAPE = (3, 5)  # in the second trial of a block whose code is unknown
_WITHOUT_DROPOUT = NoDraws(torch.device("cpu"), only_dropout=True)
#: The states in which a block runs: True if it is in training, and the scale of its input. Its code may depend on both.
_STATES = ((False, 1.0), (True, 1.0), (True, 10.0))


@dataclass(frozen=True)
class Block:
    """A way to shard a block. Paths are relative to the block.

    Attributes:
        columns: The paths of the layers that take the input of the block.
        row: The path of the layer that takes what the code computes from the shards of the columns.
        column_style: The style of the columns.
        core: The path of the module whose attributes have the number of heads; ``""`` for the block itself.
        heads: The number of heads; 0 if the block is not an attention.
        attributes: The names of the integer attributes of the core that are divided, such as numbers of heads.
        embeddings: The paths of embeddings with one feature for each head, which are sharded by features.
        is_narrow: True if the code of the core reads the width of its shards from its input.
    """

    columns: tuple[str, ...]
    row: str
    column_style: str = "colwise"
    core: str = ""
    heads: int = 0
    attributes: tuple[str, ...] = ()
    embeddings: tuple[str, ...] = ()
    is_narrow: bool = False

    def styles(self) -> list[tuple[str, str]]:
        """Return the sharded layers with their styles."""
        columns = [(path, self.column_style) for path in self.columns]
        return [*columns, (self.row, "rowwise"), *((path, "colwise") for path in self.embeddings)]

    def columns_below_core(self) -> tuple[str, ...]:
        """Return the paths of the columns relative to the core."""
        return tuple(path.removeprefix(f"{self.core}.") for path in self.columns)

    def wrappers(self) -> list[tuple[str, str]]:
        """Return the path of the core with each style that it needs."""
        parts = (
            (self.attributes, f"divide:{','.join(self.attributes)}"),
            (self.heads, f"mask_per_head:{self.heads}"),
            (self.is_narrow, f"narrow_input:{','.join(self.columns_below_core())}"),
        )
        return [(self.core, style) for is_needed, style in parts if is_needed]


@dataclass(frozen=True)
class Finding:
    """The result of a trial.

    Attributes:
        block: A correct way to shard the block; ``None`` if there is none.
        reason: The reason why there is none, as the end of a sentence; ``""`` if there is one.
        on_shards: The paths of unsharded layers with parameters between the columns and the row. The gradients of these
            parameters are partial sums over the ranks.
        draws_after: The path of the last column that is called, if dropout draws random numbers between it and the row;
            else ``None``.
        is_tested: False if the block could not be run, so that no way was tried.
        doubt: The reason why results may differ for other values, as the end of a sentence; ``None`` if they cannot
            differ, or if the code is known.
    """

    block: Block | None = None
    reason: str = ""
    on_shards: tuple[str, ...] = ()
    draws_after: str | None = None
    is_tested: bool = True
    doubt: str | None = None


@dataclass(frozen=True)
class _Run:
    """The result of one run of a block.

    Attributes:
        row: The output of the row. With shards, it is this rank's summand.
        outputs: The leaves of the output of the block (tensors and other values).
        kept: The tensors that its modules store, except parameters, by name.
        gradients: The gradients of the row's output for parameters of unsharded layers, by name. Parameters on which it
            does not depend have no entry.
        calls: The paths of the columns, in the order in which they are called.
        random: The states of the random generator after each column, and before the row.
        operations: The torch operations that the block called.
        problem: The reason why the block cannot be sharded, as the end of a sentence; ``None`` if there is none.
    """

    row: Tensor
    outputs: list[Any]
    kept: dict[str, Tensor]
    gradients: dict[str, Tensor]
    calls: list[str]
    random: list[Tensor]
    operations: OperationWatch
    problem: str | None


def try_blocks(host: nn.Module, candidates: Sequence[Block], size: int, *, is_known: bool = True) -> Finding:
    """Return the first of several ways to shard a block that gives the results of the full block.

    Args:
        host: The block. It does not change: a copy runs on the CPU, with random values in float32.
        candidates: The ways, with the same columns and the same row, the most likely first.
        size: The number of ranks.
        is_known: True if the code of the block is known. If False, the finding also has a doubt if there is one.

    Returns:
        The finding, with a way or with the reason why there is none. Errors of the block's code become a reason.

    Raises:
        MemoryError: If the host has too little memory for a copy.
    """
    with _isolated(), torch.enable_grad(), torch.device("cpu"):
        try:
            trial = _Trial(host, candidates[0])
            wholes = [trial.run(*state) for state in _STATES]
            dropping = trial.run(*_STATES[-1], drops=True)
        except MemoryError:
            raise
        except Exception as error:  # the code of the block can raise any error
            return Finding(reason=f"cannot be run on its own ({_first_line(error)})", is_tested=False)
        problem = next((run.problem for run in (*wholes, dropping) if run.problem), None)
        if problem is not None:
            return Finding(reason=problem)
        owners = sorted({path.rpartition(".")[0] for run in wholes for path in run.gradients})
        if any(not path or any(True for _ in trial.host.get_submodule(path).children()) for path in owners):
            return Finding(reason="has parameters between the layers that would be sharded")
        draws_after = None if torch.equal(*dropping.random[-2:]) else dropping.calls[-1]
        for block in candidates:
            try:
                is_right = all(trial.is_right(block, size, *each) for each in zip(_STATES, wholes, strict=True))
                doubt = None if is_known or not is_right else _doubt(host, block, size)
            except MemoryError:
                raise
            except Exception:  # such as a shape that does not match
                continue
            if is_right:
                kept = tuple(path for path in owners if path not in block.embeddings)
                return Finding(block, on_shards=kept, draws_after=draws_after, doubt=doubt)
    return Finding(reason="gives different results when it is sharded in a trial")


def _doubt(host: nn.Module, block: Block, size: int) -> str | None:
    """Return the reason why a block that passed one trial may differ for other values, as the end of a sentence."""
    reason = not_straight_reason(host)
    if reason is not None:
        return reason
    trial = _Trial(host, block, _OTHER_SHAPE)
    for training in (False, True):
        whole = trial.run(training, 1.0)
        if whole.operations.unknown is not None:
            return f"calls {whole.operations.unknown!r}, which can behave differently for other values"
        if not trial.is_separate(block, size, training):
            return "computes the input to the last layer on one rank from values of another rank"
        if not trial.is_right(block, size, (training, 1.0), whole, by_the_same=True):
            return "does not run the same computation on shards as on full tensors"
    return None


@contextmanager
def _isolated() -> Iterator[None]:
    """Use fixed random numbers and float32 inside the context, and restore the global state afterwards."""
    with Preserved(device=torch.device("cpu")), default_dtype(torch.float32):
        seed_generators(0)
        yield


class _Trial:
    """A copy of a block on the CPU, with random values, without the hooks on the block. The bias of the row is zero.

    Args:
        host: The block.
        block: A way to shard it. Other ways can be tried too if they have the same columns and row.
        shape: The numbers of samples and positions of the input.

    Attributes:
        host: The copy.

    Raises:
        TypeError: If the block needs other arguments than its input and masks.
    """

    def __init__(self, host: nn.Module, block: Block, shape: tuple[int, int] = _SHAPE) -> None:
        memo: dict[int, Any] = {}
        for parameter in host.parameters():
            memo[id(parameter)] = nn.Parameter(_random(parameter.shape))
        for buffer in host.buffers():
            is_float = buffer.is_floating_point()
            values = torch.zeros(buffer.shape, dtype=torch.float32 if is_float else buffer.dtype)
            memo[id(buffer)] = values if buffer.is_meta else buffer.detach().to("cpu", values.dtype).clone()
        self.host: Any = copy.deepcopy(host, memo)
        for hooks in (forward_hooks, forward_pre_hooks, backward_hooks):
            hooks(self.host).clear()
        self._block = block
        self._row = self.host.get_submodule(block.row)
        if isinstance(self._row.bias, Tensor):
            nn.init.zeros_(self._row.bias)
        column: Any = self.host.get_submodule(block.columns[0])
        width = column.nx if is_conv1d(column) else column.in_features
        self._input = _random((*shape, width))
        self._cotangent: Tensor | None = None
        self._without = _required_arguments(self.host)

    def run(self, training: bool, scale: float, expected: Tensor | None = None, *, drops: bool = False) -> _Run:
        """Run the block.

        Args:
            training: True if the block is in training.
            scale: The scale of its input.
            expected: The sum of the row's outputs over the ranks, if the block runs with shards. It replaces the row's
                output.
            drops: If True, dropout is active.

        Returns:
            The result of the run.

        Raises:
            RuntimeError: If the layers are not each called exactly once.
            Exception: Any error of the code of the block.
        """
        calls: list[str] = []
        taken: list[Tensor] = []
        rows: list[Tensor] = []
        random: list[Tensor] = []

        def column_is_called(path: str, layer: nn.Module, args: Any) -> Any:
            calls.append(path)
            taken.append(args[0])
            return (args[0].detach(), *args[1:])

        def row_is_called(layer: nn.Module, args: Any, output: Tensor) -> Tensor:
            rows.append(output)
            return output.detach() if expected is None else expected

        def remember(*args: Any) -> None:
            random.append(torch.get_rng_state())

        with ExitStack() as hooks, Preserved(self.host.modules()), copied_buffers(self.host):
            for path in self._block.columns:
                column = self.host.get_submodule(path)
                hooks.callback(column.register_forward_pre_hook(partial(column_is_called, path)).remove)
                hooks.callback(column.register_forward_hook(remember).remove)
            hooks.callback(self._row.register_forward_pre_hook(remember).remove)
            hooks.callback(self._row.register_forward_hook(row_is_called).remove)
            if not drops:
                hooks.enter_context(FunctionMode(_WITHOUT_DROPOUT))
            x = (scale * self._input).requires_grad_()
            operations = OperationWatch()
            hooks.enter_context(FunctionMode(operations))
            outputs, _ = flatten(self.host.train(training)(x, **self._without))
            kept = _kept(self.host)
        if sorted(calls) != sorted(self._block.columns) or len(rows) != 1 or len(random) != len(calls) + 1:
            raise RuntimeError("its layers are not each called exactly once, one after another")
        divided = {path for path, _ in self._block.styles()}
        named = self.host.named_parameters()
        inner = {name: parameter for name, parameter in named if name.rpartition(".")[0] not in divided}
        if self._cotangent is None:
            self._cotangent = _random(rows[0].shape)
        found: tuple[Tensor | None, ...] = torch.autograd.grad(
            rows[0], [x, *inner.values()], self._cotangent, allow_unused=True, retain_graph=True
        )
        gradients = {name: each for name, each in zip(inner, found[1:], strict=True) if each is not None}
        around = [*taken, *(leaf for leaf in outputs if isinstance(leaf, Tensor))]
        problem: str | None = None
        if found[0] is not None:
            problem = "also uses its input between the layers that would be sharded"
        elif not torch.equal(random[0], random[len(calls) - 1]) or not (drops or torch.equal(*random[-2:])):
            problem = "draws random numbers between the layers that would be sharded, but not exactly one per value"
        elif not rows[0].any():
            problem = "produces only zeros in a trial"
        elif _depend(around, [inner[name] for name in gradients]):
            problem = "uses the same parameters both between the layers that would be sharded and elsewhere"
        outputs = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in outputs]
        return _Run(rows[0].detach(), outputs, kept, gradients, calls, random, operations, problem)

    def is_right(
        self, block: Block, size: int, state: tuple[bool, float], whole: _Run, *, by_the_same: bool = False
    ) -> bool:
        """Return True if the results of all ranks combine to the result of the full block.

        Args:
            block: The way in which the block is sharded.
            size: The number of ranks.
            state: True if the block is in training, and the scale of its input, as in `_STATES`.
            whole: The run of the full block in this state.
            by_the_same: If True, the ranks must call the same operations, with the same plain arguments.
        """
        runs = []
        for rank in range(size):
            with self._sharded(block, rank, size):
                runs.append(self.run(*state, whole.row))
        inner = [name for name in whole.gradients if name.rpartition(".")[0] not in block.embeddings]
        if by_the_same and any(run.operations.calls != whole.operations.calls for run in runs):
            return False
        return (
            _is_same(sum(run.row for run in runs), whole.row)
            and all(run.kept.keys() == whole.kept.keys() for run in runs)
            and all(_is_same(run.kept[name], value) for run in runs for name, value in whole.kept.items())
            and _gives_same([run.outputs for run in runs], whole.outputs, block.heads)
            and (not inner or _is_same(sum(_joined(run, inner) for run in runs), _joined(whole, inner)))
        )

    def is_separate(self, block: Block, size: int, training: bool) -> bool:
        """Return True if each rank computes the input of the row only from its own shards of the columns.

        The features of the other ranks are NaN. A NaN reaches everything that is computed from it, even where ordinary
        values would hide the dependency, such as behind a threshold.
        """
        taken: list[Tensor] = []
        note = self._row.register_forward_pre_hook(lambda layer, args: taken.append(args[0]))
        for rank in range(size):
            with ExitStack() as hooks, Preserved(self.host.modules()), copied_buffers(self.host):
                for path in block.columns:
                    column = self.host.get_submodule(path)
                    keep = partial(_keep_only, _features_of(column, block.column_style, rank, size))
                    hooks.callback(column.register_forward_hook(keep).remove)
                hooks.enter_context(FunctionMode(_WITHOUT_DROPOUT))
                self.host.train(training)(self._input, **self._without)
        note.remove()
        return not any(each.chunk(size, -1)[rank].isnan().any() for rank, each in enumerate(taken))

    @contextmanager
    def _sharded(self, block: Block, rank: int, size: int) -> Iterator[None]:
        """Give the block the shards of a rank inside the context."""
        core = self.host.get_submodule(block.core)
        with ExitStack() as undo:
            for path, style in block.styles():
                layer = self.host.get_submodule(path)
                if is_conv1d(layer):  # its code reads the number of its features
                    undo.callback(setattr, layer, "nf", layer.nf)
                    layer.nf //= size if path != block.row else 1
                for split in find_style(style, layer).param_splits(layer):
                    parameter = layer._parameters[split.path]
                    undo.callback(setattr, layer, split.path, parameter)
                    shard = shards_of(parameter.detach(), split, size)[rank]
                    setattr(layer, split.path, nn.Parameter(shard))
            for attribute in block.attributes:
                undo.callback(setattr, core, attribute, getattr(core, attribute))
                setattr(core, attribute, getattr(core, attribute) // size)
            if block.is_narrow:
                undo.callback(restore_layer, core)
                group, takers = _Ranks(size), block.columns_below_core()
                parallelize_layer(core, NarrowInput, tensor_group=group, takers=takers)
            yield


def _features_of(column: Any, style: str, rank: int, size: int) -> Tensor:
    """Return the output features of a column that a rank computes."""
    count = column.nf if is_conv1d(column) else column.out_features
    split = next(each for each in find_style(style, column).param_splits(column) if each.path == "weight")
    return shards_of(torch.arange(count), replace(split, dim=0), size)[rank]


def _keep_only(features: Tensor, layer: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Replace the features of the other ranks with NaN."""
    kept = torch.full_like(output, math.nan)
    kept[..., features] = output[..., features]
    return kept


@dataclass(frozen=True)
class _Ranks:
    """A placeholder for a group of ranks."""

    size: int


def _required_arguments(host: nn.Module) -> dict[str, None]:
    """Return the arguments that a block requires in addition to its input. Masks are ``None``."""
    _, *others = inspect.signature(host.forward).parameters.values()
    required = [
        each.name
        for each in others
        if each.default is each.empty and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    ]
    unknown = [name for name in required if "mask" not in name]
    if unknown:
        raise TypeError(f"it needs the argument {unknown[0]!r} in addition to its input")
    return dict.fromkeys(required)


def _random(shape: Sequence[int]) -> Tensor:
    """Return values of about 1, or a matrix whose products with them are of about 1."""
    return torch.randn(*shape) / (math.sqrt(shape[-1]) if len(shape) > 1 else 1.0)


def _kept(host: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that the modules of a block store, except parameters."""
    return {
        f"{name} {key} {index}": leaf.detach()
        for name, module in host.named_modules()
        for key, value in vars(module).items()
        if key not in ("_parameters", "_modules")
        for index, leaf in enumerate(flatten(value)[0])
        if isinstance(leaf, Tensor)
    }


def _depend(values: Sequence[Tensor], parameters: Sequence[Tensor]) -> bool:
    """Return True if any of these values depends on any of the parameters."""
    values = [value for value in values if value.requires_grad]
    if not values or not parameters:
        return False
    ones = [torch.ones_like(value) for value in values]
    return any(each is not None for each in torch.autograd.grad(values, parameters, ones, allow_unused=True))


def _gives_same(of_ranks: Sequence[list[Any]], whole: list[Any], heads: int) -> bool:
    """Return True if outputs are equal on all ranks. Outputs after the first may have entries for each rank's heads."""
    for index, (value, *others) in enumerate(zip(whole, *of_ranks, strict=True)):
        if not isinstance(value, Tensor):
            continue
        if index and is_per_head(value, heads) and others[0].shape != value.shape:
            others = [torch.cat(others, 1)]
        if not all(_is_same(other, value) for other in others):
            return False
    return True


def _joined(run: _Run, names: Sequence[str]) -> Tensor:
    """Return gradients in one tensor, so that gradients that are zero except for rounding are compared with others."""
    return torch.cat([run.gradients[name].flatten() for name in names])


def _is_same(one: Any, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    if torch.equal(one, other):
        return True
    return other.is_floating_point() and bool((one - other).abs().max() <= _TOLERANCE * other.abs().max())


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:120]
