"""The trial of a layer before its first call: does it compute the same results on sequence shards?

`ContextParallel` makes a :class:`Trial` before the first call of each layer, in training and in evaluation. A layer
that mixes positions outside of attention, for example by a convolution, would give wrong results on shards without an
error. The source of a layer does not show this reliably, so the layer is run on both. The simulation of
`tuning.dry_run.simulated_context` uses the functions of this file without other ranks.

Terms: *mixing* means that the result of a position depends on other positions. A *tap* is a forward hook of the user
inside the layer. A *place* is the position of a tensor among the arguments of such a hook.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.distributed.modes import FunctionMode
from lightning_hybrid.distributed.no_draws import NoDraws
from lightning_hybrid.distributed.pytree import copy_object, flatten, unflatten
from lightning_hybrid.distributed.random import with_seed
from lightning_hybrid.distributed.replaced import Preserved, copied_buffers, default_dtype, replaced_entries
from lightning_hybrid.distributed.taps import TappedCall, Taps
from lightning_hybrid.tensor_parallel.context_parallel.attention import Region, is_balanced
from lightning_hybrid.tensor_parallel.context_parallel.block_attention.block_attention import without_autocast
from lightning_hybrid.tensor_parallel.context_parallel.division import Division
from lightning_hybrid.tensor_parallel.context_parallel.hooks import Along, Place, Places, common_places
from lightning_hybrid.tensor_parallel.context_parallel.mappings import ContextGroup
from lightning_hybrid.tensor_parallel.sharding import Shares

_POSITIONS = 4  # positions of each rank in the short run
_TOKENS = 4096  # positions of all samples in the long run; its activations take little memory without gradients
_HALF = (torch.bfloat16, torch.float16)
_OF_MODULES = vars(nn.Module()).keys()  # attributes of every module, such as its parameters and hooks
_GROW = (list, dict, set, deque)  # attributes to which a forward may add entries

#: The first input and output of each part of a layer, by name, in the order in which the parts end.
_Seen = dict[str, tuple[Tensor, Tensor]]
#: The buffers of a layer after a run, by name.
Buffers = dict[str, Tensor]


class Trial:
    """A comparison of a layer on the full beginning of a sequence and on its shards.

    A run with few positions shows statistics, and functions that mix adjacent positions. A run with many positions
    shows functions that mix distant positions. Parameters that are zero have other values in the trial, so that
    functions behind a gate that is initially zero are found too.

    The runs use no gradients and no random numbers. They leave no trace: buffers, attributes of the layer and its
    parts, argument objects and random generators are restored. Hooks that are called with full sequences are not
    called. Their arguments show along which dimension they have the sequence. All ranks must run a trial together.

    Args:
        name: The name of the layer, for messages.
        layer: The layer.
        forward: The `forward` of the layer, which may differ from the `forward` of its class.
        kind: The method by which attention communicates.
        group: The context-parallel ranks.
        device: The device of the random generators.
        taps: The hooks inside the layer that are called with full sequences.
    """

    def __init__(
        self,
        name: str,
        layer: nn.Module,
        forward: Callable[..., Any],
        kind: str,
        group: ContextGroup,
        device: torch.device,
        taps: Taps,
    ) -> None:
        self._name, self._layer, self._forward, self._kind = name, layer, forward, kind
        self._group, self._device, self._taps = group, device, taps

    @torch.no_grad()
    def __call__(self, division: Division) -> Places:
        """Compare the results on full sequences and on shards.

        Args:
            division: The call.

        Returns:
            The sequence dimensions of the arguments of hooks, equal on every rank.

        Raises:
            WrongUseError: If the results differ; on every rank. Also if the layer fails on a shard, or returns a tensor
                without a sequence; on the ranks where this happens.
            Exception: Any error of the layer on the full sequence.
        """
        total, few = division.shares.total, _POSITIONS * self._group.size
        found: list[Places] = []
        for length in sorted({min(few, total), min(max(few, _TOKENS // division.batch_size), total)}):
            places = self._compare(division, division.length_from(length))
            if places is None:  # the layer only accepts sequences of the full length
                return self._compare(division, total) or {}
            found.append(places)
        return common_places(found)

    def _compare(self, division: Division, length: int) -> Places | None:
        """Compare the results for a number of positions; return ``None`` if the layer does not run with them on a rank.

        The layer runs in float32 if possible, so that rounding errors do not look like wrong results. For example,
        rounding can change which expert receives a token.
        """
        given = division.cropped(length)  # a collective, so it runs before anything that can fail on some ranks
        for is_wide in (True, False):
            with self._wide() if is_wide else nullcontext(), self._without_zeros():
                error: Exception | None = None
                try:
                    whole = self._run_whole(given, is_wide=is_wide)
                except Exception as raised:
                    error = raised
                if self._is_on_all(error is None):
                    return self._compare_share(division, given, *whole, is_wide=is_wide)
                if error is not None and not is_wide and length == division.shares.total:
                    raise error
        return None

    def _is_on_all(self, mine: bool) -> bool:
        """Return True if a value is True on all ranks, so that a rank without memory does not diverge from others.

        This is a collective.
        """
        verdicts: list[Any] = [None] * self._group.size
        dist.all_gather_object(verdicts, mine, group=self._group())
        return all(verdicts)

    def _run_whole(self, given: Any, *, is_wide: bool) -> tuple[list[Tensor], _Seen, Buffers, list[TappedCall]]:
        """Run the layer on full sequences.

        Args:
            given: The arguments and keyword arguments, which are copied.
            is_wide: True if half-precision arguments become float32.

        Returns:
            The tensors that the layer created and returned, the first input and output of each part, the buffers
            afterwards, and the calls of hooks.
        """
        args, kwargs = copied(given, is_wide=is_wide)
        own = set(map(id, flatten((args, kwargs))[0]))
        with (
            without_trace(self._layer, self._device) as buffers,
            FunctionMode(NoDraws(self._device)),
            self._watched() as by_part,
            self._taps.recording() as calls,
        ):
            leaves = {id(leaf): leaf for leaf in flatten(self._forward(*args, **kwargs))[0]}
        made = [leaf for key, leaf in leaves.items() if isinstance(leaf, Tensor) and key not in own]
        return made, by_part, buffers, calls

    def _compare_share(
        self,
        division: Division,
        given: Any,
        expected: Sequence[Tensor],
        by_part: _Seen,
        buffers: Buffers,
        calls: Sequence[TappedCall],
        *,
        is_wide: bool,
    ) -> Places:
        """Run the layer on this rank's shard, and compare the results. This is a collective.

        Args:
            division: The call.
            given: The arguments and keyword arguments of the run on full sequences.
            expected: The first result of :meth:`_run_whole`. The next three arguments are its other results.
            by_part: The first input and output of each part.
            buffers: The buffers.
            calls: The calls of hooks.
            is_wide: As for :meth:`_run_whole`.

        Returns:
            The sequence dimensions of the arguments of hooks, equal on every rank.

        Raises:
            WrongUseError: As in :meth:`__call__`.
        """
        args, kwargs = copied(given, is_wide=is_wide)
        short = division.of_cropped(args, kwargs, balanced=is_balanced(self._kind))
        region = Region(self._name, short.shares, self._kind, NoDraws(self._device))
        local_args, local_kwargs = short.local()
        try:
            with (
                without_trace(self._layer, self._device) as own_buffers,
                region,
                self._watched() as of_share,
                self._taps.recording() as own_calls,
            ):
                found = short.result_dims(self._forward(*local_args, **local_kwargs))
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            if isinstance(error, (WrongUseError, torch.OutOfMemoryError)):
                raise
            raise region.refuse(
                f"The layer fails on a sequence shard of {short.shares.length} positions ({type(error).__name__}:"
                f" {' '.join(str(error).split())}). An argument for the full sequence must be passed to"
                " `F.scaled_dot_product_attention` or have one value per position. Masks of hand-written attention are"
                " not sharded: with transformers, use attn_implementation='sdpa'. [LH620]"
            ) from error
        pairs = [(each, short.shares.own(whole, dim)) for whole, (each, dim) in zip(expected, found, strict=True)]
        parts = (self._mixing(name, short, of_share[name], by_part[name]) for name in of_share if name in by_part)
        culprit = next((found for found in parts if found), "") or written_text(own_buffers, buffers)
        differs = bool(culprit) or not all(is_close(*pair) for pair in pairs)
        verdicts: list[Any] = [None] * self._group.size
        verdict = differs, culprit, find_places(own_calls, calls, short.shares)
        dist.all_gather_object(verdicts, verdict, group=self._group())
        if any(differs for differs, *_ in verdicts):
            layer = f"The layer ({type(self._layer).__name__})"
            raise region.refuse(mixing_text(next((culprit for _, culprit, _ in verdicts if culprit), layer)))
        return common_places([places for *_, places in verdicts])

    def _mixing(self, name: str, short: Division, of_share: tuple[Tensor, Tensor], whole: tuple[Tensor, Tensor]) -> str:
        """Return the subject of a message about a part that mixes positions; ``""`` if its results are equal.

        Args:
            name: The name of the part in the layer.
            short: The call on this rank's shard.
            of_share: The first input and output of the part on the shard.
            whole: The first input and output of the part on the full sequence.
        """
        shares, part = short.shares, self._layer.get_submodule(name)
        (given, made), (all_given, all_made) = of_share, whole
        dim = _sequence_dim(given, all_given, shares)
        if dim is None:
            return ""
        if not is_close(given, shares.own(all_given, dim)):
            # Tokens without a batch dimension may be in another order, for example sorted by expert.
            layer = f"Before {name!r} ({type(part).__name__}), the layer ({type(self._layer).__name__})"
            return layer if given.ndim > 2 else ""
        if made.shape == all_made.shape:
            is_share = is_close(made, all_made)
        else:
            dim_made = _sequence_dim(made, all_made, shares)
            is_share = dim_made is None or is_close(made, shares.own(all_made, dim_made))
        # A convolution mixes positions even if its weights are zero at first.
        mixes = not is_share or _kernel_size(part, dim, given.ndim) > 1
        return f"The submodule {name!r} ({type(part).__name__})" if mixes else ""

    @contextmanager
    def _watched(self) -> Iterator[_Seen]:
        """Record the first input and output of each part of the layer inside the context."""
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
    def _wide(self) -> Iterator[None]:
        """Use float32 instead of half precision, and no autocast, inside the context."""
        halves = [each for each in _tensors_of(self._layer, "_parameters", "_buffers") if each[2].dtype in _HALF]
        wide = [(table, {name: _like(tensor, tensor.detach().float())}) for table, name, tensor in halves]
        default = torch.get_default_dtype()
        dtype = torch.float32 if default in _HALF else default
        with default_dtype(dtype), replaced_entries(wide), without_autocast(self._device.type):
            yield

    def _without_zeros(self) -> AbstractContextManager[None]:
        """Give parameters that are zero small random numbers inside the context, the same on every rank."""
        changes = []
        zeros = [each for each in _tensors_of(self._layer, "_parameters") if _is_zero(each[2])]
        for number, (table, name, tensor) in enumerate(zeros):
            with with_seed(number, tensor.device):
                made = torch.randn_like(tensor) / max(1, *tensor.shape[-1:]) ** 0.5
            changes.append((table, {name: _like(tensor, made)}))
        return replaced_entries(changes)


def _like(tensor: Tensor, value: Tensor) -> Tensor:
    """Return a value, as a parameter if it replaces a parameter."""
    return nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value


@contextmanager
def without_trace(layer: nn.Module, device: torch.device) -> Iterator[Buffers]:
    """Restore buffers, attributes, their containers and random generators after the context.

    Args:
        layer: The layer.
        device: The device of the random generators.

    Yields:
        The buffers. They are filled at the end of the context with their values at that time.
    """
    held = (value for part in layer.modules() for name, value in vars(part).items() if name not in _OF_MODULES)
    grown = [each for each in held if isinstance(each, _GROW)]
    made = Buffers()
    with Preserved(layer.modules(), containers=grown, device=device), copied_buffers(layer):
        yield made
        made |= layer.named_buffers()


def find_places(of_share: Sequence[TappedCall], of_whole: Sequence[TappedCall], shares: Shares) -> Places:
    """Find the sequence dimensions of hook arguments by comparing their values.

    Args:
        of_share: The calls of the hooks on a shard.
        of_whole: The same calls on the full sequence.
        shares: The positions of each rank.

    Returns:
        The dimensions. Arguments whose values do not match have no entry. The result is empty if other hooks were
        called on a shard.
    """
    if [call.tap for call in of_share] != [call.tap for call in of_whole]:
        return {}
    found: dict[Place, set[Along | None]] = {}
    for (tap, given), (_, all_given) in zip(of_share, of_whole, strict=True):
        leaves, wholes = flatten(given)[0], flatten(all_given)[0]
        for position, (leaf, whole) in enumerate(zip(leaves, wholes, strict=False)):
            if isinstance(leaf, Tensor) and isinstance(whole, Tensor):
                place = Place(tap, len(leaves), position)
                found.setdefault(place, set()).add(_find_along(leaf, whole, shares))
    # A hook whose calls have different dimensions gets no entry.
    return {place: each for place, (each, *others) in found.items() if each is not None and not others}


def _find_along(share: Tensor, whole: Tensor, shares: Shares) -> Along | None:
    if share.shape == whole.shape:
        return Along(None) if is_close(share, whole) else None
    dims = range(share.ndim) if share.ndim == whole.ndim else ()
    for along in (Along(dim, is_outer) for dim in dims for is_outer in (True, False)):
        layout = along.layout(share, shares.length, shares)
        is_whole = layout is not None and layout.whole_shape(share.shape) == list(whole.shape)
        if layout is not None and is_whole and is_close(share, layout.own(whole)):
            return along
    return None


def written_text(of_share: Buffers, of_whole: Buffers) -> str:
    """Return the text for :func:`mixing_text` if a layer writes other values into a buffer on a shard, else ``""``."""
    for name, whole in of_whole.items():
        share = of_share.get(name, whole)  # some forwards may add a buffer
        if share.shape == whole.shape and not is_close(share, whole):  # others are tables for a length
            return f"The layer stores statistics of its sequence shard in the buffer {name!r}, and so"
    return ""


def mixing_text(culprit: str) -> str:
    """Return the message that a layer, or a part of it, mixes positions.

    Args:
        culprit: The subject of the message, as :func:`written_text` returns it, for example.
    """
    return (
        f"{culprit} mixes positions without `F.scaled_dot_product_attention`, for example by a convolution or pooling"
        " over time, a recurrent layer, batch statistics, or hand-written attention. Its results on a sequence shard"
        " differ from those on the full sequence. Use `F.scaled_dot_product_attention`. Alternatively, limit the body"
        " to modules that do not mix positions in this way, for example with HybridStrategy(body=['layers.*.attention',"
        " 'layers.*.mlp']). All other modules then receive full sequences. Or use context_parallel_size=1. [LH619]"
    )


def _tensors_of(layer: nn.Module, *kinds: str) -> list[tuple[dict[str, Any], str, Tensor]]:
    """Return the parameters or buffers of a layer, each with the dictionary and the name under which it is stored."""
    tables = [vars(part)[kind] for part in layer.modules() for kind in kinds]
    return [(table, name, tensor) for table in tables for name, tensor in table.items() if tensor is not None]


def _is_zero(parameter: Tensor) -> bool:
    return type(parameter) is nn.Parameter and parameter.is_floating_point() and not parameter.any()


def _sequence_dim(share: Tensor, whole: Tensor, shares: Shares) -> int | None:
    """Return the dimension along which a tensor is this rank's shard of another one, according to their shapes."""
    if share.ndim != whole.ndim:
        return None
    dims = [dim for dim in range(share.ndim) if share.shape[dim] != whole.shape[dim]]
    is_one = len(dims) == 1 and (share.shape[dims[0]], whole.shape[dims[0]]) == (shares.length, shares.total)
    return dims[0] if is_one else None


def _kernel_size(part: nn.Module, dim: int, ndim: int) -> int:
    """Return the kernel size of a convolution along a dimension; 1 for other modules."""
    if not isinstance(part, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return 1
    at = dim - (ndim - len(part.kernel_size))
    return part.kernel_size[at] if at >= 0 else 1


def copied(tree: Any, *, is_wide: bool = False) -> Any:
    """Return a tree with copies of tensors, which a layer may write, and of objects such as caches.

    Args:
        tree: The tree.
        is_wide: If True, copies of half-precision tensors are float32.
    """

    def of_tensor(tensor: Tensor) -> Tensor:
        return tensor.to(torch.float32 if is_wide and tensor.dtype in _HALF else tensor.dtype, copy=True)

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return of_tensor(leaf)
        return copy_object(leaf, lambda tensor: of_tensor(tensor.detach()))

    leaves, spec = flatten(tree)
    made = {id(leaf): of_leaf(leaf) for leaf in leaves}
    return unflatten([made[id(leaf)] for leaf in leaves], spec)


def is_close(one: Tensor, other: Tensor) -> bool:
    """Return True if tensors are equal up to rounding errors, relative to the largest value."""
    if one.shape != other.shape:
        return False
    if not one.is_floating_point() or one.numel() == 0:
        return torch.equal(one, other)
    tolerance = torch.finfo(one.dtype).eps ** 0.4
    scale = other.detach().abs().nan_to_num(0.0, 0.0, 0.0).max().item()
    return torch.allclose(one, other, rtol=0.0, atol=tolerance * max(scale, 1e-6), equal_nan=True)
