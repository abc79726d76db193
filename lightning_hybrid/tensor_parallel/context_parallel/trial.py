"""Whether a layer computes the same on shares of a sequence: tried before its first call."""

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
from lightning_hybrid.distributed.random import generator_marks, generator_states, set_generator_states
from lightning_hybrid.tensor_parallel.context_parallel.attention import MULTI_HEAD, Region, is_balanced
from lightning_hybrid.tensor_parallel.context_parallel.division import Division
from lightning_hybrid.tensor_parallel.context_parallel.draws import NoDraws
from lightning_hybrid.tensor_parallel.context_parallel.mappings import ContextGroup, Shares

_POSITIONS = 4  # so many for each rank are few
_TOKENS = 4096  # so many of all samples are many: a layer's activations without gradients are a part of a step's
_PLAIN = (type(None), bool, int, float, str, Tensor, torch.dtype, torch.device)


#: Of parts of a layer, by name, in the order in which they end: what they were given, and what they returned.
_Seen = dict[str, tuple[Tensor, Tensor]]


class Trial:
    """Runs a layer on the beginning of a sequence: whole, and in shares.

    Few positions show what mixes neighbours, and statistics; many show what looks farther. A part of the layer that
    mixes positions is found also where a gate that is zero at first hides it.

    Both without gradients and without random numbers. It leaves no trace: buffers, objects that the layer is given, and
    random numbers are as they were.

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
    def __call__(self, division: Division) -> bool:
        """Compare.

        Args:
            division: The call.

        Returns:
            Whether the layer draws random numbers by other functions than :class:`Draws` knows.

        Raises:
            WrongUseError: If the results differ, on every rank.
        """
        total, few = division.shares.total, _POSITIONS * self._group.size
        random, before = generator_states(self._device), generator_marks(self._device).torch
        with self._kept_buffers():
            for length in sorted({min(few, total), min(max(few, _TOKENS // division.batch_size), total)}):
                if not self._try(division, division.length_from(length)):  # it is made for sequences of this length
                    self._try(division, total)
                    break
        draws = generator_marks(self._device).torch != before
        set_generator_states(random, self._device)
        return draws

    def _try(self, division: Division, length: int) -> bool:
        """Compare with some positions; whether the layer runs with so few."""
        try:
            expected, by_part = self._run_whole(division, length)
        except Exception:
            if length == division.shares.total:
                raise
            return False
        self._compare(division, length, expected, by_part)
        return True

    def _run_whole(self, division: Division, length: int) -> tuple[list[Tensor], _Seen]:
        """The tensors that the layer makes, and what its parts make."""
        args, kwargs = copied(division.cropped(length))
        given = set(map(id, flatten((args, kwargs))[0]))
        with _Quiet(NoDraws(self._device)), self._watched() as by_part:
            leaves = {id(leaf): leaf for leaf in flatten(self._forward(*args, **kwargs))[0]}
        return [leaf for key, leaf in leaves.items() if isinstance(leaf, Tensor) and key not in given], by_part

    def _compare(self, division: Division, length: int, expected: Sequence[Tensor], by_part: _Seen) -> None:
        args, kwargs = copied(division.cropped(length))
        short = division.of_cropped(args, kwargs, balanced=is_balanced(self._kind))
        region = Region(self._name, short.shares, self._kind, NoDraws(self._device))
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
        order = list(of_share)
        mixes = (name in by_part and self._mixes(name, short, of_share[name], by_part[name]) for name in order)
        first = next((at for at, found in enumerate(mixes) if found), len(order))
        differs = first < len(order) or not all(is_close(*pair) for pair in pairs)
        verdicts: list[Any] = [None] * self._group.size
        dist.all_gather_object(verdicts, (differs, first), group=self._group())
        if any(differs for differs, _ in verdicts):
            culprit = min(first for _, first in verdicts)
            raise region.refuse(self._text(order[culprit] if culprit < len(order) else ""))

    def _text(self, part: str) -> str:
        kind = type(self._layer.get_submodule(part)).__name__
        where = f"in which {part!r} ({kind})" if part else f"which ({kind})"
        return (
            f"{where} mixes positions in another way than by `F.scaled_dot_product_attention`: a convolution or pooling"
            " over time, a recurrent layer, statistics of the batch, or attention written by hand, perhaps. On a share"
            " it gives other numbers than on the whole sequence. Use that function; name what does not mix positions as"
            " the body, such as HybridStrategy(body=['layers.*.attention', 'layers.*.mlp']): what stands beside it gets"
            " whole sequences; or use context_parallel_size=1."
        )

    def _mixes(self, name: str, short: Division, of_share: tuple[Tensor, Tensor], whole: tuple[Tensor, Tensor]) -> bool:
        """Whether a part makes something else of a share than this rank's share of what it makes of the whole."""
        shares = short.shares
        (given, made), (all_given, all_made) = of_share, whole
        dim = _sequence_dim(given, all_given, shares)
        if dim is None or not is_close(given, shares.own(all_given, dim)):
            return False
        if _kernel_size(self._layer.get_submodule(name), dim, given.ndim) > 1:
            return True  # whatever its weights are: some begin with zeros
        if made.shape == all_made.shape:
            return not is_close(made, all_made)
        dim = _sequence_dim(made, all_made, shares)
        return dim is not None and not is_close(made, shares.own(all_made, dim))

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
    """Without random numbers."""

    def __init__(self, draws: NoDraws) -> None:
        super().__init__()
        self._draws = draws

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs = {**kwargs, "dropout_p": 0.0} if "dropout_p" in kwargs else kwargs
        if func is nn.functional.multi_head_attention_forward:
            call = MULTI_HEAD.bind(*args, **kwargs)
            call.arguments["dropout_p"] = 0.0
            return func(*call.args, **call.kwargs)
        return (self._draws.find(func) or func)(*args, **kwargs)


def _sequence_dim(share: Tensor, whole: Tensor, shares: Shares) -> int | None:
    """The dimension along which shapes say that a tensor is this rank's share of another one, if there is one."""
    if share.ndim != whole.ndim:
        return None
    dims = [dim for dim in range(share.ndim) if share.shape[dim] != whole.shape[dim]]
    is_one = len(dims) == 1 and (share.shape[dims[0]], whole.shape[dims[0]]) == (shares.length, shares.total)
    return dims[0] if is_one else None


def _kernel_size(part: nn.Module, dim: int, ndim: int) -> int:
    """How many positions along a dimension a convolution sees at once; 1 of what is none."""
    if not isinstance(part, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return 1
    at = dim - (ndim - len(part.kernel_size))
    return part.kernel_size[at] if at >= 0 else 1


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
