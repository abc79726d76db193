"""Whether a layer computes the same on shares of a sequence: tried with a few positions, before its first call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.distributed.pytree import flatten, unflatten
from lightning_hybrid.distributed.random import generator_states, set_generator_states
from lightning_hybrid.tensor_parallel.context_parallel.attention import MULTI_HEAD, Region, is_balanced
from lightning_hybrid.tensor_parallel.context_parallel.division import Division
from lightning_hybrid.tensor_parallel.context_parallel.mappings import ContextGroup

# So many positions for each rank, if there are as many.
_POSITIONS = 4
_PLAIN = (type(None), bool, int, float, str, Tensor, torch.dtype, torch.device)


#: Of parts of a layer, by name, in the order in which they end: what they were given, and what they returned.
_Seen = dict[str, tuple[Tensor, Tensor]]


class Trial:
    """Runs a layer on the beginning of a sequence: whole, and in shares.

    Both without gradients and without dropout. It leaves no trace: buffers, objects that the layer is given, and random
    numbers are as they were.

    Args:
        name: Of the layer, for messages.
        layer: The layer.
        forward: Its `forward`, which may be another one's than its class has.
        kind: How attention communicates.
        sequence_dim: The dimension of the sequence.
        group: The ranks.
        device: Where they draw random numbers.
    """

    def __init__(
        self,
        name: str,
        layer: nn.Module,
        forward: Callable[..., Any],
        kind: str,
        sequence_dim: int,
        group: ContextGroup,
        device: torch.device,
    ) -> None:
        self._name, self._layer, self._forward, self._kind = name, layer, forward, kind
        self._dim, self._group, self._device = sequence_dim, group, device

    @torch.no_grad()
    def __call__(self, division: Division) -> None:
        """Compare.

        Args:
            division: The call.

        Raises:
            WrongUseError: If the results differ, on every rank.
        """
        total = division.shares.total
        length = min(total, _POSITIONS * self._group.size)
        random = generator_states(self._device)
        with self._kept_buffers():
            try:
                expected, by_part = self._run_whole(division, length)
            except Exception:  # it is made for sequences of this length
                if length == total:
                    raise
                length = total
                expected, by_part = self._run_whole(division, length)
            self._compare(division, length, expected, by_part)
        set_generator_states(random, self._device)

    def _run_whole(self, division: Division, length: int) -> tuple[list[Tensor], _Seen]:
        """The tensors that the layer makes, and what its parts make."""
        args, kwargs = copied(division.cropped(length))
        given = set(map(id, flatten((args, kwargs))[0]))
        with _Quiet(), self._watched() as by_part:
            leaves = {id(leaf): leaf for leaf in flatten(self._forward(*args, **kwargs))[0]}
        return [leaf for key, leaf in leaves.items() if isinstance(leaf, Tensor) and key not in given], by_part

    def _compare(self, division: Division, length: int, expected: Sequence[Tensor], by_part: _Seen) -> None:
        args, kwargs = copied(division.cropped(length))
        short = Division(self._name, self._dim, args, kwargs, self._group, balanced=is_balanced(self._kind))
        region = Region(self._name, short.shares, self._kind, drops=False)
        local_args, local_kwargs = short.local()
        try:
            with region, self._watched() as of_share:
                found = short.result_dims(self._forward(*local_args, **local_kwargs))
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            if isinstance(error, WrongUseError):
                raise
            raise region.refuse(
                f"which fails on a share of {short.shares.length} positions"
                f" ({type(error).__name__}: {' '.join(str(error).split())})."
                " What it is given for the whole sequence, and does not go to an attention, must go by positions."
            ) from error
        pairs = [(each, short.shares.own(whole, dim)) for whole, (each, dim) in zip(expected, found, strict=True)]
        differs = torch.tensor([not all(is_close(*pair) for pair in pairs)], dtype=torch.int32, device=self._device)
        dist.all_reduce(differs, dist.ReduceOp.MAX, group=self._group())
        if differs.item():
            raise region.refuse(self._text(self._culprit(short, by_part, of_share)))

    def _text(self, part: str) -> str:
        kind = type(self._layer.get_submodule(part)).__name__
        where = f"in which {part!r} ({kind})" if part else f"which ({kind})"
        return (
            f"{where} mixes positions in another way than by `F.scaled_dot_product_attention`: a convolution or pooling"
            " over time, a recurrent layer, statistics of the batch, or attention written by hand, perhaps. On a share"
            " it gives other numbers than on the whole sequence. Use that function, leave this layer out of the body"
            " (HybridStrategy(body=[...])), or use context_parallel_size=1."
        )

    def _culprit(self, short: Division, whole: _Seen, of_share: _Seen) -> str:
        """The first part of the layer, as they end, that makes something else of the same, on some rank."""
        order = list(of_share)
        differs = (
            self._is_share(short, given, whole[name][0]) and not self._is_share(short, made, whole[name][1])
            for name, (given, made) in of_share.items()
            if name in whole
        )
        own = next((at for at, found in enumerate(differs) if found), len(order))
        found: list[Any] = [None] * self._group.size
        dist.all_gather_object(found, own, group=self._group())
        return order[min(found)] if min(found) < len(order) else ""

    @staticmethod
    def _is_share(short: Division, share: Tensor, whole: Tensor) -> bool:
        """Whether a tensor is this rank's share of another one, along whatever dimension."""
        if share.ndim != whole.ndim:
            return False
        dims = [dim for dim in range(share.ndim) if share.shape[dim] != whole.shape[dim]]
        if len(dims) != 1 or whole.shape[dims[0]] != short.shares.total:
            return False
        return is_close(share, short.shares.own(whole, dims[0]))

    @contextmanager
    def _watched(self) -> Iterator[_Seen]:
        """What the parts of the layer are given and return inside."""
        seen: _Seen = {}
        with ExitStack() as hooks:
            for name, part in self._layer.named_modules():
                if name:

                    def note(_: Any, args: Any, result: Any, name: str = name) -> None:
                        made = result[0] if isinstance(result, tuple) and result else result
                        if args and isinstance(args[0], Tensor) and isinstance(made, Tensor):
                            seen.setdefault(name, (args[0], made))

                    hooks.callback(part.register_forward_hook(note).remove)
            yield seen

    @contextmanager
    def _kept_buffers(self) -> Iterator[None]:
        """Buffers are replaced by copies inside."""
        before = [
            (part._buffers, name, buffer)
            for part in self._layer.modules()
            for name, buffer in part._buffers.items()
            if buffer is not None
        ]
        try:
            for table, name, buffer in before:
                table[name] = buffer.clone()
            yield
        finally:
            for table, name, buffer in before:
                table[name] = buffer


class _Quiet(torch.overrides.TorchFunctionMode):
    """Without dropout."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.dropout:
            return args[0] if args else kwargs["input"]
        if func is nn.functional.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs = {**kwargs, "dropout_p": 0.0} if "dropout_p" in kwargs else kwargs
        if func is nn.functional.multi_head_attention_forward:
            call = MULTI_HEAD.bind(*args, **kwargs)
            call.arguments["dropout_p"] = 0.0
            return func(*call.args, **call.kwargs)
        return func(*args, **kwargs)


def copied(tree: Any) -> Any:
    """With copies of tensors, which a layer may write, and of objects that are no plain values, such as caches."""

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.clone()
        if isinstance(leaf, _PLAIN) or callable(leaf):
            return leaf
        return copy.deepcopy(leaf, {id(tensor): tensor.detach().clone() for tensor in _tensors_in(leaf, set())})

    leaves, spec = flatten(tree)
    made = {id(leaf): of_leaf(leaf) for leaf in leaves}
    return unflatten([made[id(leaf)] for leaf in leaves], spec)


def _tensors_in(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """The tensors in an object, its attributes and what these hold."""
    if isinstance(value, Tensor):
        yield value
    elif id(value) not in seen and not isinstance(value, type):
        seen.add(id(value))
        inside = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple, set)) else ()
        for each in (*inside, *vars(value).values()) if hasattr(value, "__dict__") else inside:
            yield from _tensors_in(each, seen)


def is_close(one: Tensor, other: Tensor) -> bool:
    """Up to rounding, relative to the largest number."""
    if one.shape != other.shape:
        return False
    if not one.is_floating_point() or one.numel() == 0:
        return torch.equal(one, other)
    tolerance = torch.finfo(one.dtype).eps ** 0.4
    scale = other.detach().abs().nan_to_num(0.0, 0.0, 0.0).max().item()
    return torch.allclose(one, other, rtol=0.0, atol=tolerance * max(scale, 1e-6), equal_nan=True)
