"""Weights of losses: of a microbatch in its batch, of a batch among replicas, and of a batch in accumulation.

`TrainingStep` and `UncutTrainingStep` use these weights for each batch if the module defines `microbatch_weight`, or if
a comparison in the first steps has shown that the loss is a mean over targets. Otherwise, numbers of samples are the
weights, and only :class:`LabelWatch` is used: it warns if they are probably wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.distributed.tensor_bytes import move

_LOOKS = 4  # the number of batches to examine, from the first batch on
_IGNORED = -100  # the `ignore_index` of torch's cross-entropy


@dataclass(frozen=True)
class LossWeights:
    """The weights of the microbatches of one batch, with which losses match a single process.

    They are results of the module's `microbatch_weight`, or of a :class:`~.loss_terms.LabelCount`.

    Attributes:
        each: The weight of each microbatch of this replica, shape ``(microbatches,)``, float64.
        total: The sum over the microbatches of all replicas, shape ``()``, float64.
        num_replicas: The data-parallel size.
    """

    each: Tensor
    total: Tensor
    num_replicas: int

    @classmethod
    def of(
        cls, weigh: Callable[[Any], float | Tensor], microbatches: Sequence[Any], mesh: Mesh, device: torch.device
    ) -> LossWeights:
        """Return the weights of the microbatches of a batch; a collective over the replicas.

        Args:
            weigh: The module's `microbatch_weight`, or a :class:`~.loss_terms.LabelCount`.
            microbatches: The microbatches of this replica.
            mesh: The mesh.
            device: The device of this rank.
        """
        [weights] = cls.of_each([weigh], microbatches, mesh, device)
        return weights

    @classmethod
    def of_each(
        cls,
        weighs: Sequence[Callable[[Any], float | Tensor]],
        microbatches: Sequence[Any],
        mesh: Mesh,
        device: torch.device,
    ) -> list[LossWeights]:
        """Return the weights of microbatches for several such functions, with one all-reduce; see :meth:`of`."""
        found = [
            torch.as_tensor(weigh(each), dtype=torch.float64).reshape(()) for weigh in weighs for each in microbatches
        ]
        # Weights on the host are copied together, and the host does not wait for the copy.
        if len({weight.device for weight in found}) > 1:
            found = [move(weight, device) for weight in found]
        each = move(torch.stack(found), device).view(len(weighs), len(microbatches))
        totals = each.sum(1)
        if mesh.num_replicas > 1:
            dist.all_reduce(totals, group=mesh.data_group)
        return [cls(of_way, total, mesh.num_replicas) for of_way, total in zip(each, totals, strict=True)]

    @property
    def sum(self) -> Tensor:
        """Return the weight of the batch of this replica, shape ``()``."""
        return self.each.sum()

    @property
    def shares(self) -> Sequence[Tensor]:
        """Return each microbatch's fraction of the weight of this replica. The sum is 1, or 0 if all weights are 0."""
        return (self.each / self.each.sum()).nan_to_num().unbind()

    def factors(self, total: Tensor | None = None) -> Sequence[Tensor]:
        """Return the factors of the losses of microbatches, before gradients are averaged over the replicas.

        Args:
            total: The weight to use instead of :attr:`total`, from :meth:`AccumulationWindow.add`.
        """
        total = self.total if total is None else total
        return (self.each * (self.num_replicas / total)).nan_to_num().unbind()

    @property
    def replica_factor(self) -> Tensor:
        """Return the factor of a mean of this replica, so that the mean over replicas is the mean over all samples."""
        return (self.each.sum() * (self.num_replicas / self.total)).nan_to_num()


class AccumulationWindow:
    """The batches of one optimizer step, whose total weight is known only after the last batch.

    ::

        batch of the window          1              2            ...    k
        a loss is multiplied by      w n / W1 k     w n / W1 k          w n / W1 k
        then the gradients by                                           k W1 / (W1 + W2 + ... + Wk)

    Here w is the weight of a microbatch, n is the number of replicas, and W is the weight of a batch over all replicas.
    A loss is about as large as if all batches had equal weights, which is the range that the loss scale of fp16 is made
    for. The gradients need only one multiplication at the end. W1 is the weight of the first batch whose weight is not
    0.

    Args:
        device: The device of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._first = self._sum = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, total: Tensor) -> Tensor:
        """Record the weight of the next batch, before it runs.

        Args:
            total: Its weight over all replicas, shape ``()``.

        Returns:
            The weight by which the losses are divided, in addition to `accumulate_grad_batches`.
        """
        self._first = torch.where(self._first > 0, self._first, total)
        self._sum = self._sum + total
        return self._first

    def close(self, num_batches: int) -> Tensor:
        """End the window, and return the factor of the gradients.

        Args:
            num_batches: `accumulate_grad_batches`, by which each loss was divided, even if the window had fewer
                batches.

        Returns:
            The factor, shape ``()``, float64.
        """
        return (num_batches * self._first / self._sum).nan_to_num()


def weighted_sum(values: Sequence[Tensor], weights: Sequence[float | Tensor]) -> Tensor:
    """Return the sum of numbers times their weights. A number with weight 0 adds nothing, even if it is 0 / 0.

    Args:
        values: Floating-point tensors of equal shapes.
        weights: Equally many numbers, at least 0, or tensors of shape ``()``.
    """
    parts = [_part(value, weight) for value, weight in zip(values, weights, strict=True)]
    return sum(parts[1:], parts[0])


def _part(value: Tensor, weight: float | Tensor) -> Tensor:
    part = weighted(value, weight)
    return torch.where(weight > 0, part, torch.zeros_like(part)) if isinstance(weight, Tensor) else part


def weighted(value: Tensor, weight: float | Tensor) -> Tensor:
    """Return a floating-point tensor times a weight, in the tensor's precision."""
    if isinstance(weight, Tensor):
        return value * weight.to(value.dtype)
    return value if weight == 1.0 else value * weight


class LabelWatch:
    """A watch that warns once about a loss that is probably a mean over something other than samples.

    `TrainingStep` calls it for the first batches, until a comparison has explained the loss. It examines only tensors
    on the host, because the host would have to wait for a device.

    Args:
        module: The user's module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._looks = _LOOKS

    def __call__(self, microbatches: Sequence[Any], counts: Sequence[int]) -> bool:
        """Examine a batch.

        Args:
            microbatches: The microbatches of the batch.
            counts: The number of samples of each microbatch.

        Returns:
            True if the next batch should be examined, too. A batch with one microbatch, or of a module with
            `microbatch_weight`, does not count as examined.
        """
        if len(counts) == 1 or getattr(self._module, "microbatch_weight", None) is not None:
            return True
        self._looks -= 1
        key = unequal_labels(microbatches, counts)
        if key is not None:
            self._looks = 0
            rank_zero_warn(
                f"The batch contains ignored labels (-100 in {key!r}), and the number of other labels differs between"
                " microbatches. If the loss is a mean over labels, its value and gradients differ from the results for"
                " the full batch, because microbatches are weighted by their number of samples. Set `microbatch_weight"
                f" = lightning_hybrid.count_tokens({key!r})` in {type(self._module).__name__}. Add `shift=True` if the"
                " model shifts the labels, as causal language models of transformers do."
            )
        return self._looks > 0


def unequal_labels(microbatches: Sequence[Any], counts: Sequence[int]) -> object | None:
    """Return the place of labels in a batch whose numbers of non-ignored labels are not proportional to the samples.

    A loss that is a mean over non-ignored labels then needs other weights, which only the module can provide.

    Args:
        microbatches: The microbatches of a batch.
        counts: The number of samples of each microbatch.

    Returns:
        The key of a mapping, or the index in a tuple or list; ``None`` without such labels.
    """
    first = microbatches[0]
    keys: Sequence[Any] = ()
    if isinstance(first, Mapping):
        keys = list(first)
    elif isinstance(first, (tuple, list)):
        keys = range(len(first))
    for key in keys:
        parts = [microbatch[key] for microbatch in microbatches]
        if all(isinstance(part, Tensor) and part.dtype == torch.int64 and part.is_cpu for part in parts):
            kept = [int((part != _IGNORED).sum()) for part in parts]
            if sum(kept) < sum(part.numel() for part in parts) and not _is_proportional(kept, counts):
                return cast("object", key)
    return None


def _is_proportional(numbers: Sequence[int], others: Sequence[int]) -> bool:
    return all(number * sum(others) == other * sum(numbers) for number, other in zip(numbers, others, strict=True))
