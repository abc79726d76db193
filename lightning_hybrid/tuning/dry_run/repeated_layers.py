"""Layers that are alike run once in a step on fake tensors: the others repeat the record of the first one.

`DryRunStrategy` enters :class:`RepeatedLayers` around the forward of a dry run. A model often has a hundred layers that
differ only in the values of their parameters. All of them would take a hundred times as long, and a search runs the
step for many arrangements of ranks.

Layers are *alike* if they have the same classes, shapes and attributes (`frame.alike`), and are called with alike
inputs. A layer can only be repeated if other code uses nothing but its outputs. A *leak* is a use of any other tensor
that the layer has created, for example a hidden state that it stores in an attribute. Then the caller runs the step
again with all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.distributed.modes import OperatorMode
from lightning_hybrid.distributed.pytree import TreeSpec, flatten, unflatten
from lightning_hybrid.distributed.replaced import replaced_attributes, replaced_forwards
from lightning_hybrid.memory.account import Repetition, SavedTensorMeter
from lightning_hybrid.pipeline_parallel.frame.alike import PLAIN
from lightning_hybrid.tensor_parallel.context_parallel.sharded_sequence import ShardedSequence
from lightning_hybrid.tensor_parallel.sharding import Sharding
from lightning_hybrid.torch_internals import FakeTensor, storage_identity
from lightning_hybrid.tuning.dry_run.operations import OperationCounter


class LeakError(Exception):
    """Code outside a layer uses a tensor that the layer created and did not return."""


@dataclass
class _Call:
    """The record of a call of the first of several layers that are alike. Its tensors are detached.

    Attributes:
        given: The leaves of the inputs.
        returned: The leaves of the output, which are its tensors and other values.
        spec: The tree structure of the output.
        made: The tensors that the layer created and returned, each once.
        counted: The elements that the call added to the lists of the counter.
        repetition: The tensors that the layer saved.
    """

    given: list[Any]
    returned: list[Any]
    spec: TreeSpec
    made: list[_Made]
    counted: list[list[Any]]
    repetition: Repetition


@dataclass(frozen=True)
class _Made:
    """A tensor that a layer created.

    Attributes:
        tensor: The tensor, detached; for a sharded sequence, the shard of this rank.
        requires_grad: True if the tensor requires a gradient.
        sequence: How the sequence is sharded; ``None`` if `tensor` is not a sequence shard.
    """

    tensor: Tensor
    requires_grad: bool
    sequence: Sharding | None


class RepeatedLayers:
    """A context in which only the first of alike layers with alike inputs runs.

    The other layers return tensors of the same shapes, and repeat the operations, messages and saved tensors of the
    first one. A step that runs in it has no backward.

    Args:
        alike: For each layer, the first layer that is like it; a first layer maps to itself.
        meter: Knows the label of the current layer, and the saved tensors.
        counter: Counts the operations; ``None`` if nothing counts them.
        inner: Makes another context for forwards, which is entered inside this one.
    """

    def __init__(
        self,
        alike: Mapping[nn.Module, nn.Module],
        meter: SavedTensorMeter,
        counter: OperationCounter | None,
        inner: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._alike, self._meter, self._counter, self._inner = alike, meter, counter, inner
        self._calls: dict[Hashable, _Call | None] = {}
        self._leaks = _LeakDetector()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Repeat layers while entered. Enter it around forwards.

        Raises:
            LeakError: If code outside a layer uses a tensor that the layer has created and not returned.
        """
        with self._inner(), replaced_forwards(self._alike, self._repeated), OperatorMode(self._leaks):
            yield

    def _repeated(self, layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        first = self._alike[layer]
        kind = getattr(forward, "__qualname__", None)  # a recomputed layer is not like one that is not recomputed

        def repeated(*args: Any, **kwargs: Any) -> Any:
            given, spec = flatten((args, kwargs))
            signature = _signature(given)
            if signature is None:
                return forward(*args, **kwargs)
            key = first, kind, spec, signature, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
            if key not in self._calls:
                self._calls[key] = None  # if the layer calls itself, the inner call runs
                returned, self._calls[key] = self._run(forward, args, kwargs, given)
                return returned
            call = self._calls[key]
            return forward(*args, **kwargs) if call is None else self._repeat(call, given)

        return repeated

    def _lists(self) -> Sequence[list[Any]]:
        return [] if self._counter is None else self._counter.lists_of(self._meter.label)

    def _run(self, forward: Callable[..., Any], args: Any, kwargs: Any, given: list[Any]) -> tuple[Any, _Call | None]:
        """Return the result of the first layer and its record; ``None`` for the record if it cannot be repeated."""
        lengths = [len(each) for each in self._lists()]
        with self._leaks.making() as made, self._meter.recorded() as repetition:
            returned = forward(*args, **kwargs)
        counted = [each[length:] for each, length in zip(self._lists(), lengths, strict=True)]
        leaves, spec = flatten(returned)
        tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
        if not all(type(_data(tensor)) is FakeTensor for tensor in tensors.values()):
            return returned, None
        inputs = {key for leaf in given if isinstance(leaf, Tensor) for key in _keys(leaf)}
        known = set(map(id, given))
        new = {key: tensor for key, tensor in tensors.items() if key not in known}
        if any(not inputs.isdisjoint(_keys(tensor)) for tensor in new.values()):
            return returned, None  # a view of an input
        outputs = {key for tensor in new.values() for key in _keys(tensor)}
        self._leaks.inside |= {key: storage for key, storage in made.items() if key not in outputs}
        repetition.made = frozenset(made)
        with self._leaks.paused():
            plain = {id(leaf): _data(leaf).detach() for leaf in (*given, *leaves) if isinstance(leaf, Tensor)}
        of_given, of_returned = ([plain.get(id(leaf), leaf) for leaf in each] for each in (given, leaves))
        of_made = [
            _Made(plain[key], tensor.requires_grad, tensor.sharding if isinstance(tensor, ShardedSequence) else None)
            for key, tensor in new.items()
        ]
        return returned, _Call(of_given, of_returned, spec, of_made, counted, repetition)

    def _repeat(self, call: _Call, given: list[Any]) -> Any:
        """Count a recorded call again under the current label, and return new outputs of the same shapes."""
        lists = self._lists()
        lengths = [len(each) for each in lists]
        with self._leaks.paused():
            made = _make(call.made, [leaf for leaf in given if isinstance(leaf, Tensor) and leaf.requires_grad])
        for each, length, repeated in zip(lists, lengths, call.counted, strict=True):
            each[length:] = repeated
        of_made = zip((each.tensor for each in call.made), made, strict=True)
        pairs = [*zip(call.given, given, strict=True), *of_made]
        pairs = [(before, now) for before, now in pairs if isinstance(now, Tensor)]
        same: dict[Hashable, Hashable] = {}
        for before, now in pairs:
            same.update(zip(_keys(before), _keys(now), strict=True))
        self._meter.repeat(call.repetition, same, [_storages(now) for _, now in pairs])
        results = {id(before): now for before, now in pairs}
        return unflatten([results.get(id(leaf), leaf) for leaf in call.returned], call.spec)


def _make(like: Sequence[_Made], given: list[Tensor]) -> list[Tensor]:
    """Make tensors of the same shapes, connected to `given` in the autograd graph."""
    requiring = [each.local if isinstance(each, ShardedSequence) else each for each in given]
    if not requiring and any(each.requires_grad for each in like):
        requiring = [torch.empty((), requires_grad=True)]
    made = _LikeOthers.apply(like, *requiring) if like else ()  # type: ignore[no-untyped-call]
    pairs = zip(made, like, strict=True)
    return [tensor if of.sequence is None else ShardedSequence.wrap(tensor, of.sequence) for tensor, of in pairs]


class _LikeOthers(torch.autograd.Function):
    """Tensors with given shapes that depend on given tensors in the autograd graph."""

    @staticmethod
    def forward(ctx: Any, like: Sequence[_Made], *given: Tensor) -> Any:
        tensors = [each.tensor for each in like]
        made = [torch.empty_strided(each.shape, each.stride(), dtype=each.dtype) for each in tensors]
        ctx.mark_non_differentiable(*(tensor for tensor, of in zip(made, like, strict=True) if not of.requires_grad))
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError("a step that runs only on shapes has no backward")


class _LeakDetector:
    """Records the storages that layers create, and raises an error if code outside a layer uses its inner ones.

    Attributes:
        inside: The storages that layers created and did not return. They stay alive, so that no other storage gets
            their address.
    """

    def __init__(self) -> None:
        self.inside: dict[int, Any] = {}
        self._made: dict[int, Any] | None = None
        self._is_paused = False

    @contextmanager
    def making(self) -> Iterator[dict[int, Any]]:
        """Record the storages of new tensors while entered."""
        made: dict[int, Any] = {}
        with replaced_attributes(self, _made=made):
            yield made

    def paused(self) -> AbstractContextManager[None]:
        """Record and check nothing while entered."""
        return replaced_attributes(self, _is_paused=True)

    def __call__(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator, and check its inputs and outputs."""
        result = function(*args, **kwargs)
        if self._is_paused:
            return result
        given = {key: storage for leaf in flatten((args, kwargs))[0] for key, storage in _storages(leaf).items()}
        if not self.inside.keys().isdisjoint(given):
            raise LeakError
        if self._made is not None:
            made = {key: storage for leaf in flatten(result)[0] for key, storage in _storages(leaf).items()}
            self._made |= {key: storage for key, storage in made.items() if key not in given}
        return result


def _data(tensor: Tensor) -> Tensor:
    return tensor.local_data if isinstance(tensor, ShardedSequence) else tensor


def _storages(leaf: Any) -> dict[int, Any]:
    data = _data(leaf)
    if type(data) not in (FakeTensor, Tensor) or data.layout is not torch.strided:
        return {}
    storage = data.untyped_storage()
    return {storage_identity(storage): storage}


def _keys(tensor: Tensor) -> list[int]:
    return list(_storages(tensor))


def _signature(given: Sequence[Any]) -> tuple[Hashable, ...] | None:
    """Return a key that is equal for alike inputs; ``None`` if they cannot be compared."""
    keys: dict[int, int] = {}
    parts: list[Hashable] = []
    for leaf in given:
        if isinstance(leaf, Tensor):
            data = _data(leaf)
            if type(data) not in (FakeTensor, Tensor):
                return None
            # Tensors with the same storage get the same number.
            same = tuple(keys.setdefault(key, len(keys)) for key in _keys(leaf))
            of_data = type(data), data.shape, data.stride(), data.dtype, leaf.requires_grad, same
            parts.append((*of_data, _division(leaf) if isinstance(leaf, ShardedSequence) else None))
        else:
            parts.append((type(leaf), leaf) if isinstance(leaf, PLAIN) else (type(leaf), id(leaf)))
    return tuple(parts)


def _division(x: ShardedSequence) -> Hashable:
    """Return a key of how a sequence is sharded, and of whether it has been gathered or written."""
    sharding, pieces = x.sharding, tuple(tuple(map(tuple, of_rank)) for of_rank in x.sharding.shares.pieces)
    return sharding.dim, sharding.outer, sharding.inner, sharding.shares.total, pieces, x.is_read, x.is_written()
