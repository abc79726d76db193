"""The optional hooks of a LightningModule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from lightning_hybrid.distributed.failure import WrongUseError


class ModuleHooks(Protocol):
    """Optional hooks of a LightningModule, in addition to Lightning's own. Define only the hooks that you need.

    Do not inherit from this class unless a type checker requires it; in that case, define all hooks.

    Attributes:
        pipeline_body: Dotted name of the layer list that is split into stages, such as ``"model.layers"``. It can also
            be a list of names of layer lists and single layers, in the order in which they are called. The argument
            ``body`` of `HybridStrategy` overrides this attribute.
    """

    pipeline_body: str | Sequence[str]

    def microbatch_weight(self, microbatch: Any) -> float | Tensor:
        """Return the weight of a microbatch's loss, such as the number of unmasked tokens in the microbatch.

        Without this method, the weight is the number of samples in the microbatch. You can create this method with
        :func:`count_tokens`.

        Args:
            microbatch: The microbatch that `training_step` receives in place of the batch.

        Returns:
            The weight, at least 0, as a number or a tensor with one element. Each weight is divided by the sum of the
            weights of all microbatches in an optimizer step, over all replicas and accumulated batches. Gradients then
            equal the gradients of a single process with all samples in one batch. Mean values that `training_step` logs
            are weighted in the same way. The loss must be finite even if the weight is 0, so a step that divides by the
            weight must divide by at least 1.
        """

    def split_batch(self, batch: Any, num_microbatches: int) -> Sequence[Any]:
        """Split a training batch into microbatches.

        Without this method, a batch is split along the first dimension of its tensors if this dimension has the same
        size in all of them; otherwise, the whole batch is one microbatch. You can create this method with
        :func:`split_rows`, :func:`split_graphs`, :func:`split_targets` or :func:`split_samples`.

        Args:
            batch: The batch from the data loader.
            num_microbatches: The requested number of microbatches.

        Returns:
            The microbatches: at least one, and the same number on every rank of a replica. The weight of a microbatch
            is the result of :meth:`microbatch_weight` or, without that method, its number of samples (or graphs).
        """

    def split_body_input(self, x: Any, num_microbatches: int) -> Sequence[Any]:
        """Split the input to the body into microbatches in an evaluation step.

        A module that defines this method must also define :meth:`join_body_output`.

        Args:
            x: The input to the body for the whole batch. The body consists of the layers that the pipeline splits.
            num_microbatches: The requested number of microbatches.
        """

    def join_body_output(self, outputs: list[Any]) -> Any:
        """In an evaluation step, combine the outputs of the body for all microbatches into the output for the batch.

        Args:
            outputs: The output of the body for each microbatch.
        """

    def tensor_parallel_plan(self) -> Mapping[str, Any] | None:
        """Return the plan that ``tensor_parallel_plan="auto"`` uses for this module.

        Returns:
            A mapping from module names to styles, where ``*`` in a name matches any text between two dots. Instead of a
            method, the module can also have an attribute of this name that contains the mapping.
        """


def count_tokens(
    key: str | int | None = None, *, ignore_index: int = -100, shift: bool = False
) -> Callable[[Any], Tensor]:
    """Create a `microbatch_weight` hook that counts the labels that cross-entropy does not ignore.

    Args:
        key: Key, attribute name or index of the labels in a batch; ``None`` if the batch itself is the tensor of
            labels.
        ignore_index: Labels with this value are not counted; `torch.nn.CrossEntropyLoss` has the same argument.
        shift: If True, the first label of each sequence is not counted. Use this for causal language models of the
            library `transformers`, which shift the labels.

    Returns:
        A function that takes a microbatch and returns the number of its counted labels, as an int64 tensor of shape
        ``()``.

    Raises:
        TypeError: If `key` is not a string, an integer or ``None``.

    Example::

        class GPT(LightningModule):
            microbatch_weight = lightning_hybrid.count_tokens("labels", shift=True)
    """
    if isinstance(key, bool) or not isinstance(key, (str, int, type(None))):
        raise TypeError(
            "The `key` of count_tokens must be the key of a mapping, the name of an attribute, an index of a tuple, or"
            f" None; got {key!r} ({type(key).__name__}). [LH101]"
        )
    return _TokenCount(key, ignore_index, shift)


@dataclass(frozen=True)
class _TokenCount:
    """The result of `count_tokens`. A function would become a method of the class that it is assigned in."""

    key: str | int | None
    ignore_index: int
    shift: bool

    def __call__(self, microbatch: Any) -> Tensor:
        labels = self._find_labels(microbatch)
        if not isinstance(labels, Tensor) or labels.ndim == 0:
            kind = "a tensor without dimensions" if isinstance(labels, Tensor) else type(labels).__name__
            raise WrongUseError(
                f"count_tokens({self.key!r}) needs a tensor of labels in the batch, but found {kind}. [LH711]"
            )
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
                f"count_tokens({self.key!r}) found no such key, attribute or index in the batch. The batch is a"
                f" {type(microbatch).__name__}{keys}. Pass the key, attribute or index of the labels. [LH710]"
            ) from error
