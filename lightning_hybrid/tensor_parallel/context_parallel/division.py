"""The arguments of a layer that are sharded along the sequence, and the sequence dimensions of its results.

`ContextParallel` creates one :class:`Division` for each call of a layer: it passes `local()` to the layer and returns
`joined(...)` to the user's step. `Trial` creates divisions for shorter sequences. Nothing in the signature of a layer
names the sequence, so the shapes and dtypes of the arguments decide, as in the table of the class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.distributed.pytree import TreeSpec, flatten, unflatten
from lightning_hybrid.tensor_parallel.context_parallel.mappings import ContextGroup, copy_to_cp, scatter_to_cp
from lightning_hybrid.tensor_parallel.context_parallel.sharded_sequence import ShardedSequence
from lightning_hybrid.tensor_parallel.sharded_activation import plain
from lightning_hybrid.tensor_parallel.sharding import Sharding, Shares
from lightning_hybrid.torch_internals import version_counter

#: The minimum length of a shard. Models treat a single position as the next token of a generation.
_LEAST = 2


def sequence_dim_of(layer: nn.Module) -> int:
    """Return the sequence dimension of hidden states: 0 for layers of torch with `batch_first=False`, else 1.

    It is 0 if the layer contains `nn.MultiheadAttention`, and none of them has `batch_first=True`.
    """
    of_torch = [part for part in layer.modules() if isinstance(part, nn.MultiheadAttention)]
    return 0 if of_torch and not any(part.batch_first for part in of_torch) else 1


class Division:
    """One call of a layer, with the arguments that have values for each position.

    ::

        (batch, sequence, features)     hidden states, rotary tables     sharded
        (batch, sequence), (sequence)   positions, masks of keys         sharded
        (..., sequence, features)       rotary tables, heads             sharded
        (batch, sequence, heads, ...)   keys and values                  sharded
        (..., sequence, sequence)       masks of queries and keys        full, for the attention
        (batch, 1, 1, sequence)         masks of keys                    full, for the attention
        without the sequence            all others                       full

    The first three-dimensional floating-point tensor, the hidden states, defines the length of the sequence. A *leaf*
    is a tensor or another value in the tree of the arguments.

    Args:
        name: The name of the layer, for messages.
        sequence_dim: The dimension of the sequence in tensors with three dimensions, as :func:`sequence_dim_of` returns
            it.
        args: The arguments of the call.
        kwargs: The keyword arguments of the call.
        group: The context-parallel ranks.
        balanced: True if each rank has two pieces, as in :class:`Shares`.
        dims: The dimension along which each leaf of the arguments is sharded, in order, or ``None`` for a leaf that
            stays full; by default it follows from the shapes.

    Attributes:
        shares: The positions of each rank.
        batch_size: The number of sequences.

    Raises:
        WrongUseError: If no argument has the shape of hidden states, or if the sequence is too short for the ranks.
    """

    def __init__(
        self,
        name: str,
        sequence_dim: int,
        args: Any,
        kwargs: Any,
        group: ContextGroup,
        *,
        balanced: bool,
        dims: Sequence[int | None] | None = None,
    ) -> None:
        self._name, self._dim, self._group = name, sequence_dim, group
        self._leaves, self._spec = flatten((args, kwargs))
        tensors = [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]
        hidden = next((each for each in tensors if each.is_floating_point() and each.ndim == 3), None)
        if hidden is None or hidden.is_nested:
            shapes = ", ".join(str(list(each.shape)) for each in tensors) or "none"
            raise WrongUseError(
                f"context_parallel_size={group.size} shards sequences, but {name!r} receives no hidden states of shape"
                f" (batch, sequence, features). It receives tensors of these shapes: {shapes}. Set"
                " HybridStrategy(body=[...]) to the names of the layers that receive hidden states, or use"
                " context_parallel_size=1. [LH605]"
            )
        self._hidden, self.batch_size = hidden, hidden.shape[1 - sequence_dim]
        total = hidden.shape[sequence_dim]
        if total < _LEAST * group.size:
            raise WrongUseError(
                f"A sequence of {total} positions cannot be sharded over context_parallel_size={group.size} ranks."
                f" {name!r} needs at least {_LEAST} positions per rank ({_LEAST * group.size} in total). Pad the"
                " sequence, or use fewer ranks. [LH606]"
            )
        self.shares = Shares(total, group, balanced=balanced)
        found = map(self._find_dim, self._leaves) if dims is None else dims
        self._dims = dict(zip(map(id, self._leaves), found, strict=True))
        self._given: dict[int, tuple[Any, Any, int]] = {}  # shards and full arguments, by the `id()` of the shard
        self._enter: Callable[[Tensor], Tensor] = _unchanged
        self._exit: Callable[[Tensor], object] = _unchanged

    def _find_dim(self, tensor: Any) -> int | None:
        """Return the dimension along which an argument is sharded; ``None`` if it stays full."""
        if not isinstance(tensor, Tensor):
            return None
        total, shape = self.shares.total, tensor.shape
        if tensor is self._hidden:
            return self._dim
        if tensor.ndim == 0 or total not in shape:
            return None
        if tensor.ndim == 1:
            return 0
        if shape[-1] == total and (tensor.ndim > 3 or shape[-2] == total):  # masks of (queries and) keys
            is_index = not tensor.is_floating_point() and tensor.dtype.is_signed
            return 1 if tensor.ndim == 2 and is_index else None
        if tensor.ndim == 3 and shape[self._dim] == total:
            return self._dim
        if tensor.ndim == 2:
            return 1 if shape[1] == total else 0
        return next((dim for dim in (tensor.ndim - 2, 1) if shape[dim] == total), None)

    def mark(self, enter: Callable[[Tensor], Tensor], leave: Callable[[Tensor], object]) -> None:
        """Set functions that receive the tensors which enter and leave the layer.

        Args:
            enter: Called with each shard that enters the layer; returns its replacement.
            leave: Called with each full sequence that code around the layer receives.
        """
        self._enter, self._exit = enter, leave

    def local(self) -> tuple[Any, Any]:
        """Return the arguments that the layer receives on this rank.

        All ranks must call it, because it can gather sharded sequences. Gradients of full tensors are reduced over the
        ranks.

        Raises:
            WrongUseError: If another full sequence is as long as a shard.
        """
        made: dict[int, Any] = {}  # a tensor that is passed twice stays one tensor
        for leaf in self._leaves:
            if id(leaf) not in made:
                made[id(leaf)] = self._enter(self._local(leaf)) if isinstance(leaf, Tensor) else leaf
        leaves = [made[id(leaf)] for leaf in self._leaves]
        self._given = {
            id(mine): (mine, leaf, version_of(mine)) for mine, leaf in zip(leaves, self._leaves, strict=True)
        }
        args, kwargs = unflatten(leaves, self._spec)
        return args, kwargs

    def _local(self, tensor: Tensor) -> Tensor:
        dim = self._dims[id(tensor)]
        if dim is None:
            self._check_whole(tensor)
            return copy_to_cp(plain(tensor), self._group)
        if isinstance(tensor, ShardedSequence):
            return tensor.share(dim, self.shares)
        if tensor.requires_grad or tensor.is_floating_point():  # copied, because a layer may write into it
            return scatter_to_cp(tensor, dim, self.shares)
        return self.shares.own(tensor, dim)

    def _check_whole(self, tensor: Tensor) -> None:
        """Raise an error if another full sequence is as long as a shard.

        Attention could not tell the keys of this sequence from the keys of a shard, because it compares their number.
        """
        if self._is_sequence(tensor) and tensor.shape[self._dim] in self.shares.lengths:
            raise WrongUseError(
                f"{self._name!r} receives a sequence of {self.shares.total} positions and another sequence of"
                f" {tensor.shape[self._dim]} positions. With context_parallel_size={self._group.size}, a shard of the"
                " first sequence is as long as the second sequence, so the strategy cannot distinguish them. Pad one of"
                " the sequences to a different length. [LH607]"
            )

    @staticmethod
    def _is_sequence(leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and leaf.ndim == 3 and leaf.is_floating_point()

    def length_from(self, length: int) -> int:
        """Return a length to which the sequence can be cropped.

        Args:
            length: The minimum; at most the length of the sequence.

        Returns:
            The first length from the minimum on for which no shard is as long as another sequence.
        """
        others = {
            leaf.shape[self._dim] for leaf in self._leaves if self._is_sequence(leaf) and self._dims[id(leaf)] is None
        }
        total, balanced = self.shares.total, self.shares.balanced
        lengths = range(length, total)
        apart = (at for at in lengths if others.isdisjoint(Shares(at, self._group, balanced=balanced).lengths))
        return next(apart, total)

    def cropped(self, length: int) -> tuple[Any, Any]:
        """Return the arguments of a call with only the first positions, without gradients. This is a collective.

        Args:
            length: The number of positions.

        Returns:
            The arguments and the keyword arguments.
        """
        total = self.shares.total

        def crop(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            dim = self._dims[id(leaf)]
            short = plain(leaf).detach()
            if dim is not None:
                return short.narrow(dim, 0, length)
            for dim in range(max(0, leaf.ndim - 2), leaf.ndim) if total in leaf.shape[-2:] else ():
                short = short.narrow(dim, 0, length) if leaf.shape[dim] == total else short
            return short

        made = {id(leaf): crop(leaf) for leaf in self._leaves}  # a tensor that is passed twice stays one tensor
        args, kwargs = unflatten([made[id(leaf)] for leaf in self._leaves], self._spec)
        return args, kwargs

    def of_cropped(self, args: Any, kwargs: Any, *, balanced: bool) -> Division:
        """Return the call with only the first positions, sharded along the same dimensions as this call.

        Args:
            args: The arguments that :meth:`cropped` returned, or copies.
            kwargs: The keyword arguments that :meth:`cropped` returned, or copies.
            balanced: True if each rank has two pieces.
        """
        dims = [self._dims[id(leaf)] for leaf in self._leaves]
        return Division(self._name, self._dim, args, kwargs, self._group, balanced=balanced, dims=dims)

    def joined(self, result: Any) -> Any:
        """Return the result of the layer for the code around it, with sharded sequences in place of shards.

        An argument that the layer returns unchanged is replaced by the full argument.

        Raises:
            WrongUseError: If a tensor in the result has no dimension as long as this rank's shard.
        """
        return self._map_results(result, lambda tensor, dim: self._wrapped(tensor, Sharding(dim, self.shares)))

    def whole(self, tensor: Tensor, sharding: Sharding | None) -> Tensor:
        """Return the full tensor that code around the layer sees for a tensor inside the layer.

        Args:
            tensor: The tensor inside the layer.
            sharding: The sharding of the sequence in the tensor; ``None`` if the tensor is not a sequence shard.
        """
        mine, whole = self._argument(tensor)
        if isinstance(mine, Tensor):
            return whole  # type: ignore[no-any-return]
        return tensor if sharding is None else self._wrapped(tensor, sharding)

    def _wrapped(self, tensor: Tensor, sharding: Sharding) -> Tensor:
        made = ShardedSequence.wrap(tensor, sharding)
        self._exit(made)
        return made

    def _argument(self, leaf: Any) -> tuple[Any, Any]:
        """Return an argument of the layer and its full tensor, or two ``None`` if there is none or it was written."""
        mine, whole, version = self._given.get(id(leaf), (None, None, 0))
        return (mine, whole) if mine is leaf and version == version_of(leaf) else (None, None)

    def result_dims(self, result: Any) -> list[tuple[Tensor, int]]:
        """Return the tensors that a layer created and returned, each with its sequence dimension.

        Raises:
            WrongUseError: As in :meth:`joined`.
        """
        found: list[tuple[Tensor, int]] = []
        self._map_results(result, lambda tensor, dim: found.append((tensor, dim)))
        return found

    def _map_results(self, result: Any, function: Callable[[Tensor, int], Any]) -> Any:
        leaves: list[Any]
        spec: TreeSpec
        leaves, spec = flatten(result)
        made: dict[int, Any] = {}
        for leaf in leaves:
            if id(leaf) in made:
                continue
            mine, whole = self._argument(leaf)
            if mine is not None:
                made[id(leaf)] = whole
            elif isinstance(leaf, Tensor):
                made[id(leaf)] = function(leaf, self._result_dim(leaf))
        return unflatten([made.get(id(leaf), leaf) for leaf in leaves], spec)

    def _result_dim(self, tensor: Tensor) -> int:
        own = self.shares.length
        candidates = {2: (1,), 3: (self._dim,), 4: (2, 1)}.get(tensor.ndim, ())
        found = next((dim for dim in candidates if tensor.shape[dim] == own), None)
        if found is None:
            raise WrongUseError(
                f"With context_parallel_size={self._group.size}, {self._name!r} receives a shard of {own} positions,"
                f" but returns a tensor of shape {list(tensor.shape)}, which has no sequence dimension of this length."
                " Such a tensor, for example a router loss, covers only one shard. Return only hidden states, or use"
                " context_parallel_size=1. [LH608]"
            )
        return found


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def version_of(leaf: Any) -> int:
    """Return the number of writes into a tensor that torch has counted; 0 for other values."""
    return version_counter(leaf) if isinstance(leaf, Tensor) and not leaf.is_inference() else 0
