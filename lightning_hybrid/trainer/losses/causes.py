"""Experiments that find out why microbatches change a loss, so that the warning names the cause and the remedy.

:class:`~.microbatch_comparison.MicrobatchComparison` runs the experiments only after it has found a difference. An
experiment is a batch made of the *rows* (entries along the first dimension) of the tensors in one batch. *Blocks* are
the first four microbatches of the batch, and a *pair* is two of them joined. ::

    experiment                                result                   cause
    router losses without their coefficient   no difference is left    a router loss
    a number of the batch as the weight       no difference is left    a mean over that number (:mod:`.divisors`)
    all tensors with their rows reordered     another loss             rows are not samples, or their order counts
      ... all tensors but one                 the same loss            the rows of that tensor are not samples
      ... along the second dimension          the same loss            the second dimension is the batch dimension
    pairs of four microbatches                weights that agree       a ratio of two sums over samples
    otherwise                                                          the samples are coupled

No batch of an experiment is larger than the batches of the step or the comparison, so it fits in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from lightning_hybrid.distributed.messages.lazy_tensor import LazyTensor
from lightning_hybrid.distributed.pytree import flatten, unflatten
from lightning_hybrid.pipeline_parallel.splitting.batch_contents import is_irregular
from lightning_hybrid.pipeline_parallel.splitting.microbatch import signature_text, split_batch
from lightning_hybrid.trainer.losses.divisors import Divisor, fits, named_leaves, sizes_of
from lightning_hybrid.trainer.losses.verdict import Verdict, copied

__all__ = [
    "ROUTERS",
    "Cause",
    "Experiments",
    "Finding",
    "common_finding",
    "find_cause",
    "small_text",
    "structure_text",
    "warning_text",
]

#: The largest number of tensors with rows for which each tensor is left in its order once.
_MOST_LEAVES = 6
#: The names of the blocks and of the pairs. The pairs form a cycle, see :func:`_is_ratio`.
_BLOCKS = "ABCD"
_PAIRS = ("AB", "CD", "AC", "BD")
#: The largest relative error of the weights of blocks at which a ratio is still judged.
_MOST_ERROR = 0.01


class Cause(NamedTuple):
    """The reason why microbatches change a loss.

    Attributes:
        text: The cause, as a clause about the loss: "it couples the samples of a batch".
        remedy: The change to the user's code that allows microbatches.
    """

    text: str
    remedy: str


_SPLIT = "define a method `split_batch(batch, num_microbatches)` that splits the batch only between independent samples"
ROUTERS = Cause("the router loss is a product of means over the tokens of a batch", _SPLIT)
_COUPLED = Cause(
    "the loss of a sample depends on other samples of the batch, as in a contrastive loss or with statistics over"
    " samples",
    f"{_SPLIT}, or a method `microbatch_weight(microbatch)` that returns the number by which the loss is divided",
)
_UNKNOWN = _COUPLED._replace(text=f"{_COUPLED.text}, or the loss is a mean over something other than samples")
_RATIO = Cause(
    "the loss is a ratio of two sums over samples, such as a mean over masked tokens, a mean with class weights, or the"
    " Dice loss",
    "define a method `microbatch_weight(microbatch)` that returns the denominator (if this depends only on the batch),"
    f" or {_SPLIT.removeprefix('define ')}",
)
_ORDERED = Cause(
    "the loss depends on the order of the rows in the batch, so the rows are not independent samples: the loss compares"
    " neighbors, or the first dimension is not the batch dimension",
    _SPLIT,
)
_NOT_FINITE = Cause(
    "the loss of one microbatch alone is not finite, because it divides by a value that can be 0 or undefined in a"
    " microbatch, such as the standard deviation of one sample or the number of targets",
    _COUPLED.remedy,
)


class Finding(NamedTuple):
    """The result of the experiments on one rank, or the common result of all ranks.

    Attributes:
        divisors: The divisors that explain all pairs of microbatches.
        order: The effect of another order of rows on the loss: ``"same"`` or ``"changes"``; ``"unknown"`` if not
            tested.
        place: The path of the tensor whose rows are not samples, such as ``batch['mask']``, or the number of the real
            batch dimension; ``""`` if neither is known.
        is_ratio: True if the loss is a ratio of two sums over samples; ``None`` if the losses do not show this.
    """

    divisors: tuple[Divisor, ...] = ()
    order: str = "unknown"
    place: str | int = ""
    is_ratio: bool | None = None


class Experiments:
    """Batches made of the rows of one batch, whose losses show the cause of a difference.

    If the split of the batch involves more than the rows of tensors, no such batches are made. The caller runs the
    batches, and passes their losses to :meth:`judge`.

    Args:
        batch: The batch of the training step.
        num_microbatches: The number of its microbatches.
        largest: The number of samples of the largest batch that was compared.

    Attributes:
        batches: The batches by name: ``"A"`` to ``"D"`` are microbatches, ``"AB"`` is two of them joined, ``"rows"`` is
            the first ``largest`` samples, ``"order"`` is the same samples in another order, ``"but 0"`` is the same
            except that leaf 0 keeps its order, and ``"second"`` has another order along the second dimension.
        counts: The number of samples of each batch, by name.
    """

    def __init__(self, batch: Any, num_microbatches: int, largest: int) -> None:
        self.batches: dict[str, Any] = {}
        self.counts: dict[str, int] = {}
        self._leaves, self._spec = flatten(batch)
        self._paths = [path for path, _ in named_leaves(batch)]
        counts = split_batch(batch, num_microbatches)[1]
        self._rows = [number for number, leaf in enumerate(self._leaves) if _has_rows(leaf, sum(counts))]
        others = [leaf for number, leaf in enumerate(self._leaves) if number not in self._rows]
        if len(counts) < 2 or not all(map(_is_unsplit, others)):
            return
        if len(counts) >= len(_BLOCKS) and len(set(counts[: len(_BLOCKS)])) == 1:
            self._add_blocks(counts[0], largest)
        # Users may require sequences that are sorted by length, so sorted rows keep their order.
        if largest % 2 == 0 and not any(_is_sorted(self._leaves[number], largest) for number in self._rows):
            self._add_orders(largest)

    def _add(self, name: str, count: int, change: Callable[[Tensor], Tensor], *, but: int | None = None) -> None:
        """Add a batch of `count` samples, made by changing all tensors with rows, or all of them but one."""
        leaves = list(self._leaves)
        for number in self._rows:
            leaf = leaves[number] if number == but else change(leaves[number])
            leaves[number] = leaf.narrow(0, 0, count)
        self.batches[name], self.counts[name] = copied(unflatten(leaves, self._spec)), count

    def _add_blocks(self, size: int, largest: int) -> None:
        for pair in _PAIRS:
            self._add(pair, 2 * size, partial(_pair, size=size, pair=pair))
        for number, name in enumerate(_BLOCKS):
            self._add(name, size, partial(_narrowed, first=number * size, size=size))
        if largest >= len(_BLOCKS) * size:
            self._add(_BLOCKS, len(_BLOCKS) * size, _as_it_is)

    def _add_orders(self, count: int) -> None:
        shuffle = partial(_shuffled, count=count, dim=0)
        self._add("rows", count, _as_it_is)
        self._add("order", count, shuffle)
        for number in self._rows if 1 < len(self._rows) <= _MOST_LEAVES else ():
            self._add(f"but {number}", count, shuffle, but=number)
        seconds = {self._leaves[number].shape[1:2] for number in self._rows}
        if len(seconds) == 1 and (length := seconds.pop()) and length[0] > 1 and length[0] % 2 == 0:
            self._add("second", count, partial(_shuffled, count=length[0], dim=1))

    def judge(
        self,
        losses: Mapping[str, float],
        candidates: Sequence[Divisor],
        class_weights: Mapping[str, Tensor],
        rounding: float,
    ) -> Finding:
        """Return the finding that follows from the losses of the batches.

        Args:
            losses: The losses by the name of the batch; batches that not every rank has are missing.
            candidates: The divisors that explain the pairs that were compared before.
            class_weights: The result of :func:`~.divisors.find_class_weights`.
            rounding: The relative error of a loss.
        """
        bound = rounding * max((abs(loss) for loss in losses.values() if math.isfinite(loss)), default=0.0)
        divisors = [each for each in candidates if each.is_usual or "A" in losses]
        if divisors and "A" in losses:
            sizes = sizes_of([self.batches[block] for block in _BLOCKS], class_weights)
            of_blocks = {each: dict(zip(_BLOCKS, sizes[each], strict=True)) for each in divisors if each in sizes}
            divisors = [
                each
                for each, numbers in of_blocks.items()
                if all(fits([losses[n] for n in (pair, *pair)], [numbers[n] for n in pair], bound) for pair in _PAIRS)
            ]
        order, place = "unknown", cast("str | int", "")
        if "order" in losses and math.isfinite(losses["rows"]):
            changed = {name: not abs(loss - losses["rows"]) <= bound for name, loss in losses.items()}
            order = "changes" if changed["order"] else "same"
            alike = [number for number in self._rows if not changed.get(f"but {number}", True)]
            place = self._paths[alike[0]] if len(alike) == 1 else "" if changed.get("second", True) else 1
        return Finding(tuple(divisors), order, place, is_ratio=_is_ratio(losses, bound) if "A" in losses else None)


def _is_ratio(losses: Mapping[str, float], bound: float) -> bool | None:
    """Return True if a loss is ``N / D`` with sums over samples, from the losses of four blocks and of their pairs.

    The loss of a pair XY gives ``D(X) / D(Y)``. Around the cycle A, B, D, C, the product of these ratios is 1. The
    result is ``None`` if all blocks seem to have equal weights, because this also happens if coupled samples are in
    different blocks.

    Args:
        losses: The losses by the name of the batch.
        bound: The error of a loss.
    """
    ratios, error = dict[str, float](), 0.0
    for pair in _PAIRS:
        upper, lower = losses[pair[1]] - losses[pair], losses[pair] - losses[pair[0]]
        if not min(abs(upper), abs(lower)) > bound:
            return None
        if upper * lower < 0:
            return False
        ratios[pair] = upper / lower
        error += bound / abs(upper) + bound / abs(lower)
    cycle = ratios["AB"] * ratios["BD"] / ratios["CD"] / ratios["AC"]
    if error > _MOST_ERROR or all(abs(math.log(ratio)) <= error for ratio in ratios.values()):
        return None
    if abs(math.log(cycle)) > error:
        return False
    weights = {"A": 1.0, "B": 1 / ratios["AB"], "C": 1 / ratios["AC"]}
    weights["D"] = weights["B"] / ratios["BD"]
    if _BLOCKS not in losses:
        return True
    expected = sum(weight * losses[name] for name, weight in weights.items()) / sum(weights.values())
    return abs(losses[_BLOCKS] - expected) <= bound + error * max(map(abs, losses.values()))


def common_finding(found: Sequence[Finding]) -> Finding:
    """Return the common part of the findings of all replicas; an empty finding without findings."""
    if not found:
        return Finding()
    first = found[0]
    orders = {(each.order, each.place) for each in found}
    order, place = orders.pop() if len(orders) == 1 else ("unknown", "")
    return Finding(
        tuple(each for each in first.divisors if all(each in other.divisors for other in found)),
        order,
        place,
        is_ratio=None if any(each.is_ratio is None for each in found) else all(each.is_ratio for each in found),
    )


def find_cause(finding: Finding, verdict: Verdict) -> Cause:
    """Return the cause of a difference.

    Args:
        finding: The common finding of all replicas.
        verdict: The verdict, of kind ``"other"``.
    """
    if finding.divisors:
        divisor = finding.divisors[0]
        return Cause(
            f"the loss is a mean over something other than samples: it is divided by {divisor.text}", divisor.remedy
        )
    if not math.isfinite(verdict.difference):
        return _NOT_FINITE
    if finding.order == "changes" and finding.place == 1:
        text = "the second dimension of the tensors is the batch dimension, but the first dimension was split"
        return Cause(text, "define a method `split_batch(batch, num_microbatches)` that splits the second dimension")
    if finding.order == "changes" and finding.place:
        text = f"`{finding.place}` was split because its number of rows is the batch size, but its rows are not samples"
        return Cause(
            text, "make this tensor a buffer of the module, or define a method `split_batch(batch, num_microbatches)`"
        )
    if finding.order == "changes":
        return _ORDERED
    return _COUPLED if finding.is_ratio is False else _RATIO if finding.is_ratio else _UNKNOWN


def structure_text(signature: Any) -> str:
    """Return the warning about a batch with a structure that was not compared.

    Args:
        signature: The signature of one of its microbatches.
    """
    return (
        f"For microbatches like {signature_text(signature)}, the loss is not compared with the loss of the full batch."
        " The comparison used the batches of the first steps, which had a different structure. If the loss is not a"
        " mean over samples, define a method `microbatch_weight(self, microbatch)` that returns the number by which the"
        " loss is divided, or set `num_microbatches=1`."
    )


def small_text(verdict: Verdict, cause: Cause) -> str:
    """Return the note about a difference that is accepted.

    Args:
        verdict: The verdict with the two losses.
        cause: The cause.
    """
    return (
        f"The loss of the same samples is {verdict.joined:.6g} if they form one microbatch, but {verdict.expected:.6g}"
        f" (mean) if they form two, a difference of {100 * verdict.difference:.2g}%. The reason is that {cause.text},"
        " but each microbatch is computed separately. Set `num_microbatches=1` to match a single process."
    )


def warning_text(verdict: Verdict, number: int, cause: Cause, *, switches: bool, num_stages: int) -> str:
    """Return the warning about a loss that microbatches change.

    Args:
        verdict: The verdict, of kind ``"other"``.
        number: The number of microbatches.
        cause: The cause.
        switches: If True, the step continues with one microbatch.
        num_stages: The number of pipeline stages.
    """
    found = (
        f"The loss of the same samples is {verdict.joined:.6g} if they form one microbatch, but {verdict.expected:.6g}"
        " (weighted mean) if they form two"
    )
    if math.isfinite(verdict.difference):
        found += f", a difference of {100 * verdict.difference:.2g}%"
    if not switches:
        return (
            f"{found}. The reason is that {cause.text}. With the {number} microbatches that you set, training does not"
            " give the same results as a single process. To get the same results, set `num_microbatches=1`, or"
            f" {cause.remedy}."
        )
    bubble = (
        f" As a result, each of the {num_stages} stages is busy for only 1/{num_stages} of a step, instead of"
        f" {number}/{number + num_stages - 1} of a step."
        if num_stages > 1
        else ""
    )
    return (
        f"{found}. The reason is that {cause.text}. Each batch now runs as one microbatch instead of {number}, so that"
        f" training matches a single process.{bubble} To keep microbatches, {cause.remedy}. To accept the difference,"
        f" set `num_microbatches={number}`."
    )


def _has_rows(leaf: Any, total: int) -> bool:
    return isinstance(leaf, Tensor) and not is_irregular(leaf) and leaf.ndim > 0 and len(leaf) == total


def _is_unsplit(leaf: Any) -> bool:
    """Return True if a leaf without rows is passed to every microbatch without being split."""
    if isinstance(leaf, Tensor):
        return not is_irregular(leaf) and (leaf.ndim == 0 or len(leaf) == 1)
    return leaf is None or isinstance(leaf, (bool, int, float))


def _is_sorted(leaf: Tensor, count: int) -> bool:
    if isinstance(leaf, LazyTensor) or leaf.ndim != 1 or leaf.is_floating_point() or leaf.dtype == torch.bool:
        return False
    steps = leaf[:count].diff()
    return bool(steps.any()) and (bool((steps >= 0).all()) or bool((steps <= 0).all()))


def _as_it_is(leaf: Tensor) -> Tensor:
    return leaf


def _narrowed(leaf: Tensor, first: int, size: int) -> Tensor:
    return leaf.narrow(0, first, size)


def _pair(leaf: Tensor, size: int, pair: str) -> Tensor:
    """Return two of the blocks ABCD of a tensor, using only operators that keep a lazy tensor lazy."""
    if pair not in _BLOCKS:
        rows = leaf.narrow(0, 0, 4 * size)
        leaf = rows.reshape(2, 2, size, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)
    return leaf.narrow(0, 0 if pair.startswith("A") else 2 * size, 2 * size)


def _shuffled(leaf: Tensor, count: int, dim: int) -> Tensor:
    """Return the first `count` entries of a dimension in an order in which each entry has other neighbors."""
    rows = leaf.narrow(dim, 0, count).transpose(0, dim)
    halves = rows.reshape(2, count // 2, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)
    return halves.flip(0).transpose(0, dim)
