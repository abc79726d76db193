"""A block is tried before it is divided: run whole, then in shards, on random values.

Names and shapes say how a block may be divided; only its code can say whether that is right. In one process, a copy of
the block runs as each rank would, and what its ranks make is compared with what the whole block makes::

    input --> columns --> what the block does between --> row --> sum over ranks  =  the whole block's
                (shards)                                 (shards)
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.distributed.pytree import flatten
from lightning_hybrid.distributed.random import generator_states, seed_generators, set_generator_states
from lightning_hybrid.tensor_parallel.layers import NarrowInput, parallelize_layer, restore_layer
from lightning_hybrid.tensor_parallel.shard import shards_of
from lightning_hybrid.tensor_parallel.styles import find_style, is_conv1d

_TOLERANCE = 1e-3  # of float32; a wrong division is wrong by as much as the values
_BATCH, _LENGTH = 2, 4


@dataclass(frozen=True)
class Block:
    """How a block may be divided; paths are below the block.

    Attributes:
        columns: Layers that take the block's input.
        row: The layer that takes what is made of their shards.
        column_style: The style of the columns.
        core: The module whose attributes count heads.
        heads: How many heads there are; 0 if it is no attention.
        attributes: Its integer attributes that are divided.
        embeddings: Embeddings of one feature for each head.
        is_narrow: Whether the core reads from its input how wide its shards are.
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
        """The layers that are divided, with their styles."""
        columns = [(path, self.column_style) for path in self.columns]
        return [*columns, (self.row, "rowwise"), *((path, "colwise") for path in self.embeddings)]


@dataclass(frozen=True)
class Finding:
    """What a trial has found.

    Attributes:
        block: The way to divide that is right; ``None`` if there is none.
        reason: Why there is none, as the rest of a sentence.
        on_shards: Layers with parameters of their own between columns and row: each rank has a part of their gradient.
        draws: Whether random numbers are drawn between columns and row in training.
    """

    block: Block | None = None
    reason: str = ""
    on_shards: tuple[str, ...] = ()
    draws: bool = False


@dataclass
class _Run:
    """What one run of a block gives: the row's output, that of the block, and gradients of the former."""

    row: Tensor
    output: Tensor
    gradients: dict[str, Tensor] = field(default_factory=dict)
    is_leaking: bool = False


def try_blocks(host: nn.Module, candidates: Sequence[Block], size: int) -> Finding:
    """Find the first of several ways to divide a block that gives what the whole block gives.

    Args:
        host: The block. It stays as it is: a copy runs, on the CPU, with random values in float32.
        candidates: The ways, with the same columns and the same row.
        size: The number of ranks.
    """
    with _isolated(), torch.enable_grad(), torch.device("cpu"):
        try:
            trial = _Trial(host, candidates[0])
            whole = trial.run()
        except Exception as error:  # it is code of any kind
            return Finding(reason=f"cannot be tried on its own ({_first_line(error)})")
        if whole.is_leaking:
            return Finding(reason="uses its input between the layers that would be divided, too")
        owners = sorted({path.rpartition(".")[0] for path in whole.gradients})
        if any(not path or any(True for _ in trial.host.get_submodule(path).children()) for path in owners):
            return Finding(reason="has parameters of its own between the layers that would be divided")
        for block in candidates:
            kept = tuple(path for path in owners if path not in block.embeddings)
            with suppress(Exception):  # such as a shape that does not fit
                if trial.is_right(block, size, whole):
                    return Finding(block, on_shards=kept, draws=trial.draws())
    return Finding(reason="does not give the same when it is tried in shards")


@contextmanager
def _isolated() -> Iterator[None]:
    """Inside, random numbers are always the same, and numbers are float32; outside, nothing is noticed."""
    states, dtype = generator_states(torch.device("cpu")), torch.get_default_dtype()
    seed_generators(0)
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        set_generator_states(states, torch.device("cpu"))


class _Trial:
    """A copy of a block, with random values."""

    def __init__(self, host: nn.Module, block: Block) -> None:
        memo: dict[int, Any] = {}
        for parameter in host.parameters():
            memo[id(parameter)] = nn.Parameter(_random(parameter.shape))
        for buffer in host.buffers():
            is_float = buffer.is_floating_point()
            values = torch.zeros(buffer.shape, dtype=torch.float32 if is_float else buffer.dtype)
            memo[id(buffer)] = values if buffer.is_meta else buffer.detach().to("cpu", values.dtype).clone()
        self.host: Any = copy.deepcopy(host, memo)
        for layer in self.host.modules():
            for hooks in (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks):
                hooks.clear()
        self.host.eval()
        self._block = block
        self._row = self.host.get_submodule(block.row)
        if isinstance(self._row.bias, Tensor):
            nn.init.zeros_(self._row.bias)
        column: Any = self.host.get_submodule(block.columns[0])
        width = column.nx if is_conv1d(column) else column.in_features
        self._input = _random((_BATCH, _LENGTH, width))
        self._cotangent: Tensor | None = None
        self._without = _required_arguments(self.host)

    def run(self, expected: Tensor | None = None) -> _Run:
        """Run the block.

        Args:
            expected: What the sum of the row's outputs over the ranks is, if it runs in shards.
        """
        calls: list[str] = []
        rows: list[Tensor] = []

        def column_is_called(layer: nn.Module, args: Any) -> Any:
            calls.append("column")
            return (args[0].detach(), *args[1:])

        def row_is_called(layer: nn.Module, args: Any, output: Tensor) -> Tensor:
            calls.append("row")
            rows.append(output)
            return output.detach() if expected is None else expected

        with ExitStack() as hooks:
            for path in self._block.columns:
                column = self.host.get_submodule(path)
                hooks.callback(column.register_forward_pre_hook(column_is_called).remove)
            hooks.callback(self._row.register_forward_hook(row_is_called).remove)
            x = self._input.clone().requires_grad_()
            output = self.host(x, **self._without)
        if calls != ["column"] * len(self._block.columns) + ["row"]:
            raise RuntimeError("its layers are not called once, one after another")
        run = _Run(rows[0].detach(), _first_tensor(output).detach())
        divided = {path for path, _ in self._block.styles()}
        named = self.host.named_parameters()
        inner = {name: parameter for name, parameter in named if name.rpartition(".")[0] not in divided}
        if self._cotangent is None:
            self._cotangent = _random(rows[0].shape)
        found = torch.autograd.grad(rows[0], [x, *inner.values()], self._cotangent, allow_unused=True)
        run.is_leaking = found[0] is not None
        pairs = zip(inner, found[1:], strict=True)
        run.gradients = {name: gradient for name, gradient in pairs if gradient is not None}
        return run

    def is_right(self, block: Block, size: int, whole: _Run) -> bool:
        """Whether the shards of the ranks give together what the whole block gives."""
        runs = []
        for rank in range(size):
            with self._sharded(block, rank, size):
                runs.append(self.run(whole.row))
        inner = [name for name in whole.gradients if name.rpartition(".")[0] not in block.embeddings]
        return (
            _is_same(sum(run.row for run in runs), whole.row)
            and all(_is_same(run.output, whole.output) for run in runs)
            and (not inner or _is_same(sum(_joined(run, inner) for run in runs), _joined(whole, inner)))
        )

    @contextmanager
    def _sharded(self, block: Block, rank: int, size: int) -> Iterator[None]:
        """Inside, the block is what a rank has of it."""
        core = self.host.get_submodule(block.core)
        with ExitStack() as undo:
            for path, style in block.styles():
                layer = self.host.get_submodule(path)
                if is_conv1d(layer):  # its own code counts its features
                    undo.callback(setattr, layer, "nf", layer.nf)
                    layer.nf //= size if path != block.row else 1
                for split in find_style(style, layer).param_splits(layer):
                    parameter = layer._parameters[split.path]
                    undo.callback(setattr, layer, split.path, parameter)
                    shard = shards_of(parameter.detach(), split.dim, size, blocks=split.blocks)[rank]
                    setattr(layer, split.path, nn.Parameter(shard))
            for attribute in block.attributes:
                undo.callback(setattr, core, attribute, getattr(core, attribute))
                setattr(core, attribute, getattr(core, attribute) // size)
            if block.is_narrow:
                undo.callback(restore_layer, core)
                takers = tuple(path.removeprefix(f"{block.core}.") for path in block.columns)
                parallelize_layer(core, NarrowInput, tensor_group=_Ranks(size), takers=takers)
            yield

    def draws(self) -> bool:
        """Whether random numbers are drawn between columns and row in training."""
        states: list[Tensor] = []

        def remember(*args: Any) -> None:
            states.append(torch.get_rng_state())

        with ExitStack() as hooks:
            hooks.callback(self.host.eval)
            hooks.callback(self.host.get_submodule(self._block.columns[-1]).register_forward_hook(remember).remove)
            hooks.callback(self._row.register_forward_pre_hook(remember).remove)
            self.host.train()(self._input, **self._without)
        return not torch.equal(*states)


@dataclass(frozen=True)
class _Ranks:
    """In the place of a group of ranks."""

    size: int


def _required_arguments(host: nn.Module) -> dict[str, None]:
    """What a block must be given beside its input; of masks, none."""
    _, *others = inspect.signature(host.forward).parameters.values()
    required = [
        each.name
        for each in others
        if each.default is each.empty and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    ]
    unknown = [name for name in required if "mask" not in name]
    if unknown:
        raise TypeError(f"it wants {unknown[0]!r} beside its input")
    return dict.fromkeys(required)


def _random(shape: Sequence[int]) -> Tensor:
    """Values of about one, and of matrices such that their products are."""
    return torch.randn(*shape) / (math.sqrt(shape[-1]) if len(shape) > 1 else 1.0)


def _first_tensor(output: Any) -> Tensor:
    return next(leaf for leaf in flatten(output)[0] if isinstance(leaf, Tensor))


def _joined(run: _Run, names: Sequence[str]) -> Tensor:
    """Gradients in one tensor: those that are zero but for rounding are compared beside others."""
    return torch.cat([run.gradients[name].flatten() for name in names])


def _is_same(one: Any, other: Tensor) -> bool:
    return one.shape == other.shape and bool((one - other).abs().max() <= _TOLERANCE * other.abs().max())


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:120]
