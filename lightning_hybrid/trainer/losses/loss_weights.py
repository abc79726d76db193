"""What losses count: a microbatch in its batch, a batch among replicas, and in a window of accumulated gradients."""

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

_LOOKS = 4  # batches, from the first one on
_IGNORED = -100  # the `ignore_index` of torch's cross-entropy


@dataclass(frozen=True)
class LossWeights:
    """What the module's `microbatch_weight` says of a batch, so that losses are those of one process on the joined one.

    Attributes:
        each: Of each microbatch of this replica, shape ``(microbatches,)``, float64.
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
        """Weigh the microbatches of a batch; every replica does at the same time.

        Args:
            weigh: The module's `microbatch_weight`.
            microbatches: Of this replica.
            mesh: The ranks.
            device: Where this rank computes.
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
        """Weigh the microbatches of a batch in several ways, and tell the replicas of all at once; see :meth:`of`."""
        found = [
            torch.as_tensor(weigh(each), dtype=torch.float64).reshape(()) for weigh in weighs for each in microbatches
        ]
        # What is on the host moves in one go, and the host does not wait for it.
        if len({weight.device for weight in found}) > 1:
            found = [move(weight, device) for weight in found]
        each = move(torch.stack(found), device).view(len(weighs), len(microbatches))
        totals = each.sum(1)
        if mesh.num_replicas > 1:
            dist.all_reduce(totals, group=mesh.data_group)
        return [cls(of_way, total, mesh.num_replicas) for of_way, total in zip(each, totals, strict=True)]

    @property
    def sum(self) -> Tensor:
        """Of the batch of this replica, shape ``()``."""
        return self.each.sum()

    @property
    def shares(self) -> Sequence[Tensor]:
        """What each microbatch counts in the loss of this replica: together 1, or 0 if all weigh nothing."""
        return (self.each / self.each.sum()).nan_to_num().unbind()

    def factors(self, total: Tensor | None = None) -> Sequence[Tensor]:
        """What the loss of each microbatch is multiplied by, before gradients are averaged over the replicas.

        Args:
            total: What stands for the weight of all; by default :attr:`total`.
        """
        total = self.total if total is None else total
        return (self.each * (self.num_replicas / total)).nan_to_num().unbind()

    @property
    def replica_factor(self) -> Tensor:
        """What a mean of this replica is multiplied by, so that the mean over replicas is the one of all."""
        return (self.each.sum() * (self.num_replicas / self.total)).nan_to_num()


class AccumulationWindow:
    """The batches of one optimizer step, whose weight is known only when the last of them is there.

    ::

        batch of the window          1              2            ...    k
        a loss is multiplied by      w n / W1 k     w n / W1 k          w n / W1 k
        then the gradients by                                           k W1 / (W1 + W2 + ... + Wk)

    with the weight w of a microbatch, n replicas, and the weight W of a batch over all replicas. So a loss is about as
    large as it would be if all batches weighed the same, which is the range that fp16 has its scale for, and gradients
    need one multiplication at the end. The first batch that weighs anything is the one that the others are measured by.

    Args:
        device: Where this rank computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._first = self._sum = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, total: Tensor) -> Tensor:
        """A batch is about to run.

        Args:
            total: Its weight over all replicas, shape ``()``.

        Returns:
            The weight to divide by, before `accumulate_grad_batches`.
        """
        self._first = torch.where(self._first > 0, self._first, total)
        self._sum = self._sum + total
        return self._first

    def close(self, num_batches: int) -> Tensor:
        """The window ends.

        Args:
            num_batches: `accumulate_grad_batches`, by which every loss was divided, however many batches there were.

        Returns:
            What the gradients are multiplied by, shape ``()``, float64.
        """
        return (num_batches * self._first / self._sum).nan_to_num()


def weighted_sum(values: Sequence[Tensor], weights: Sequence[float | Tensor]) -> Tensor:
    """The sum of numbers times their weights; what weighs nothing adds nothing, also where it is 0 / 0.

    Args:
        values: Floating-point tensors of one shape.
        weights: As many numbers, at least 0, or tensors of shape ``()``.
    """
    parts = [_part(value, weight) for value, weight in zip(values, weights, strict=True)]
    return sum(parts[1:], parts[0])


def _part(value: Tensor, weight: float | Tensor) -> Tensor:
    part = weighted(value, weight)
    return torch.where(weight > 0, part, torch.zeros_like(part)) if isinstance(weight, Tensor) else part


def weighted(value: Tensor, weight: float | Tensor) -> Tensor:
    """A floating-point tensor times a weight, in the tensor's precision."""
    if isinstance(weight, Tensor):
        return value * weight.to(value.dtype)
    return value if weight == 1.0 else value * weight


class LabelWatch:
    """Warns once of a loss that is likely to be a mean over something else than samples.

    Only the first batches are looked at, and only on the host, which would have to wait for a device.

    Args:
        module: The user's module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._looks = _LOOKS

    def __call__(self, microbatches: Sequence[Any], counts: Sequence[int]) -> bool:
        """Look at a batch.

        Args:
            microbatches: Of the batch.
            counts: Their numbers of samples.

        Returns:
            Whether the next one is to be looked at too.
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
    """Where a batch has labels that cross-entropy ignores, in shares that are not those of the samples.

    A loss that is a mean over the other labels counts other than samples do, which only the module can say.

    Args:
        microbatches: Of a batch.
        counts: Their numbers of samples.

    Returns:
        The key of a mapping, or the index in a tuple or list; ``None`` if there are no such labels.
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
