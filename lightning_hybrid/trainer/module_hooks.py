"""The optional hooks of a LightningModule: what it may define, and needs not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from lightning_hybrid.distributed.failure import WrongUseError


class ModuleHooks(Protocol):
    """What a LightningModule may define beside Lightning's own hooks; each one alone, unless it says otherwise.

    Nothing has to be inherited. A module that does inherit from this class for its type checker has to define all.

    Attributes:
        pipeline_body: The dotted name of the list of layers that is divided into stages, such as ``"model.layers"``, or
            names of lists and layers in the order in which they are called; the argument ``body`` of `HybridStrategy`
            goes before it.
    """

    pipeline_body: str | Sequence[str]

    def microbatch_weight(self, microbatch: Any) -> float | Tensor:
        """The normaliser of the loss of a microbatch, such as its number of unmasked tokens; by default its samples.

        :func:`count_tokens` makes this method.

        Args:
            microbatch: What `training_step` gets as its batch.

        Returns:
            What the microbatch counts in the loss of the batch: at least 0, as a number or a tensor with one element.
            Weights are summed over the replicas too, and over the batches of ``accumulate_grad_batches``, so that the
            gradients are those of one process on the joined batch. Means that `training_step` logs count likewise.
            Where it is 0, the loss has to be a number all the same: divide by at least 1.
        """

    def split_batch(self, batch: Any, num_microbatches: int) -> Sequence[Any]:
        """Split a training batch.

        Without this method a batch is split along the first dimension of its tensors if all of them have the same one,
        and is one microbatch otherwise. :func:`split_rows`, :func:`split_graphs`, :func:`split_targets` and
        :func:`split_samples` make this method.

        Args:
            batch: As the loader gives it.
            num_microbatches: The requested number.

        Returns:
            The microbatches, at least one; the same number on every rank of a model group. A microbatch counts in the
            loss by its samples, for graphs by the number of graphs, or by :meth:`microbatch_weight`.
        """

    def split_body_input(self, x: Any, num_microbatches: int) -> Sequence[Any]:
        """Split what the body is called with in an evaluation step; together with :meth:`join_body_output`.

        Args:
            x: The input of the body for the whole batch.
            num_microbatches: The requested number.
        """

    def join_body_output(self, outputs: list[Any]) -> Any:
        """Join what the body returned for each microbatch of an evaluation step.

        Args:
            outputs: By microbatch.
        """

    def tensor_parallel_plan(self) -> Mapping[str, Any] | None:
        """How layers are shared by tensor-parallel ranks, where ``tensor_parallel_plan="auto"``.

        Returns:
            A style by name of module, where ``*`` stands for anything between two dots; a mapping as an attribute is
            as good as a method.
        """


def count_tokens(
    key: str | int | None = None, *, ignore_index: int = -100, shift: bool = False
) -> Callable[[Any], Tensor]:
    """Make a `microbatch_weight` that counts the tokens in a loss: the labels that cross-entropy does not ignore.

    Args:
        key: Where the labels are in a batch: a key of a mapping, an attribute, or the index in a tuple; ``None`` if the
            batch is the tensor of labels.
        ignore_index: The label that does not count; as for `torch.nn.CrossEntropyLoss`.
        shift: Whether the model predicts the next token, and shifts the labels itself, as causal language models of
            transformers do: then the first label of each sequence does not count.

    Returns:
        A function of a microbatch that returns a number of tokens, shape ``()``, int64.

    Raises:
        TypeError: If `key` is none of these.

    Example::

        class GPT(LightningModule):
            microbatch_weight = lightning_hybrid.count_tokens("labels", shift=True)
    """
    if isinstance(key, bool) or not isinstance(key, (str, int, type(None))):
        raise TypeError(
            "count_tokens(key) takes the key of a mapping, the name of an attribute, the index in a tuple, or None, got"
            f" {key!r} ({type(key).__name__})."
        )
    return _TokenCount(key, ignore_index, shift)


@dataclass(frozen=True)
class _TokenCount:
    """What `count_tokens` returns: no function, which would become a method of the class that it is assigned in."""

    key: str | int | None
    ignore_index: int
    shift: bool

    def __call__(self, microbatch: Any) -> Tensor:
        labels = self._find_labels(microbatch)
        if not isinstance(labels, Tensor) or labels.ndim == 0:
            kind = "a tensor without dimensions" if isinstance(labels, Tensor) else type(labels).__name__
            raise WrongUseError(f"count_tokens({self.key!r}) must find a tensor of labels in the batch, found {kind}.")
        return ((labels[..., 1:] if self.shift else labels) != self.ignore_index).sum()

    def _find_labels(self, microbatch: Any) -> Any:
        if self.key is None:
            return microbatch
        try:
            if isinstance(self.key, str) and not isinstance(microbatch, Mapping):
                return getattr(microbatch, self.key)
            return microbatch[self.key]
        except (AttributeError, LookupError, TypeError) as error:
            keys = f" with the keys {list(microbatch)}" if isinstance(microbatch, Mapping) else ""
            raise WrongUseError(
                f"count_tokens({self.key!r}) found nothing of this name in the batch, which is a"
                f" {type(microbatch).__name__}{keys}. Give the key, the attribute or the index of the labels."
            ) from error
