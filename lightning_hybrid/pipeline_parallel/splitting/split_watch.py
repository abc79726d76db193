"""Warnings and notes about how a batch was split.

`TrainingStep` makes one :class:`SplitWatch` for each run. If the module has no `split_batch` hook and several
microbatches are requested, it checks each batch. `StepContext` adds :func:`microbatch_text` to an exception that a
microbatch raises.

Splitting has to guess from shapes, and a wrong guess changes the loss without an error. So this file looks for signs of
a wrong guess over several batches; a single batch does not have enough information.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from lightning_hybrid.distributed.pytree import flatten
from lightning_hybrid.pipeline_parallel.splitting.batch_contents import is_irregular, whole_text
from lightning_hybrid.pipeline_parallel.splitting.microbatch import find_misfits


def microbatch_text(number: int, counts: Sequence[int]) -> str:
    """Return the note for an exception that was raised while a microbatch ran.

    Args:
        number: The number of the microbatch, from 0.
        counts: The number of samples of each microbatch.
    """
    return (
        f"The error was raised in microbatch {number + 1} of {len(counts)}, which contains {counts[number]} of"
        f" {sum(counts)} samples. If the code needs the full batch, set num_microbatches=1. To split batches in a"
        " different way, define a method `split_batch(batch, num_microbatches)` in the module."
    )


class LengthWatch:
    """Detector of tensors that are split only because their length happens to be the number of samples.

    A single batch cannot distinguish the class weights of eight classes from eight samples. But class weights have the
    same length when the number of samples changes, or they are the same tensor object in every batch while other
    tensors are new.
    """

    def __init__(self) -> None:
        self._total: int | None = None
        self._leaves: list[weakref.ref[Tensor]] = []
        self._lengths: list[int] = []

    def __call__(self, batch: Any, total: int) -> list[int]:
        """Compare a batch with the previous batch, and remember it. Only weak references to its tensors are kept.

        Args:
            batch: A batch that was passed to :func:`~.microbatch.split_batch`, also if it was not split.
            total: The number of samples.

        Returns:
            The lengths of the detected tensors; empty for the first batch.
        """
        tensors = [
            leaf for leaf in flatten(batch)[0] if isinstance(leaf, Tensor) and leaf.ndim > 0 and not is_irregular(leaf)
        ]
        lengths = list(map(len, tensors))
        before = (self._total, self._lengths, self._leaves)
        self._total, self._lengths, self._leaves = total, lengths, list(map(weakref.ref, tensors))
        if len(before[1]) != len(lengths):
            return []
        if total != before[0]:
            pairs = zip(lengths, before[1], strict=True)
            return [new for new, old in pairs if new == old and new in (total, before[0])]
        is_old = [old() is new for new, old in zip(tensors, before[2], strict=True) if len(new) == total]
        return [total] * sum(is_old) if not all(is_old) else []


class SplitWatch:
    """Source of two warnings, each given once per run: a batch was not split, or a tensor was split by mistake.

    Args:
        module: The name of the user's class.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._lengths: LengthWatch | None = LengthWatch()
        self._has_told_of_whole = self._was_split = False

    def __call__(self, batch: Any, counts: Sequence[int], num_microbatches: int) -> Iterator[str]:
        """Check a batch. The check runs while the caller iterates, so iterate to the end.

        Args:
            batch: A batch that was passed to :func:`~.microbatch.split_batch`.
            counts: The number of samples of each microbatch; one entry if the batch was not split.
            num_microbatches: The requested number of microbatches, more than 1.

        Yields:
            Warnings.
        """
        misfits = None if len(counts) > 1 or self._has_told_of_whole else find_misfits(batch)
        if misfits is not None:
            self._has_told_of_whole = True
            yield whole_text(misfits, batch, self._module, num_microbatches)
        found = self._lengths(batch, sum(counts)) if self._lengths is not None else []
        was_split, self._was_split = self._was_split, len(counts) > 1
        if found and (was_split or self._was_split):
            self._lengths = None
            yield length_text(found[0], self._module)


def length_text(length: int, module: str) -> str:
    """Return the warning about a tensor that a :class:`LengthWatch` has detected.

    Args:
        length: The length of the tensor.
        module: The name of the user's class.
    """
    return (
        f"A tensor of length {length} in the batch was split into microbatches because its length equals the number of"
        " samples, but the tensor is the same in every batch. Register it as a buffer of the module, or define"
        f" `{module}.split_batch(batch, num_microbatches)`, which returns a list of microbatches."
    )
