"""The optional hooks of a LightningModule.

:class:`ModuleHooks` is documentation, and a type for type checkers. The strategy looks the hooks up by name in the
user's module, which does not inherit from this class: the body and the plan when it shards the module, and the other
hooks in each step. :func:`count_tokens` makes one of the hooks; users call it in the body of their class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from lightning_hybrid.distributed.failure import WrongUseError


class ModuleHooks(Protocol):
    """Optional hooks of a LightningModule, in addition to Lightning's own. Define only the hooks that you need.

    Do not inherit from this class unless a type checker requires it. If you inherit from this class, define all hooks.

    Attributes:
        pipeline_body: Dotted name of the layer list that is split into stages, such as ``"model.layers"``. You can also
            set a list of dotted names. Each name refers to a layer list or a single layer. Put the names in the order
            in which `training_step` calls the layers. The argument ``body`` of `HybridStrategy` overrides this
            attribute.
    """

    pipeline_body: str | Sequence[str]

    def microbatch_weight(self, microbatch: Any) -> float | Tensor:
        """Return the weight of a microbatch's loss, such as the number of unmasked tokens in the microbatch.

        Without this method, the weight is the number of targets in the microbatch if the loss is recognized as a mean
        over targets, such as tokens. Otherwise, it is the number of samples. :func:`count_tokens` can create this
        method.

        Args:
            microbatch: The microbatch that `training_step` receives in place of the batch.

        Returns:
            The weight, as a number or a tensor with one element. The weight must be at least 0. The strategy divides
            each weight by the sum of the weights of all microbatches in the optimizer step, on all replicas and in all
            accumulated batches. The gradients then equal the gradients of a single process with all samples in one
            batch. Mean values that `training_step` logs are weighted in the same way. The loss must be finite even if
            the weight is 0. Therefore, if `training_step` divides the loss by the weight, the divisor must be at least
            1.
        """

    def split_batch(self, batch: Any, num_microbatches: int) -> Sequence[Any]:
        """Split a training batch into microbatches.

        Without this method, a batch is split along the first dimension of its tensors. If the tensors do not all have
        the same size in this dimension, the whole batch is one microbatch. :func:`split_rows`, :func:`split_graphs`,
        :func:`split_targets` and :func:`split_samples` can create this method.

        Args:
            batch: The batch from the data loader.
            num_microbatches: The requested number of microbatches.

        Returns:
            At least one microbatch. The hook must return the same number of microbatches on all ranks of a replica.
            :meth:`microbatch_weight` determines the weight of each microbatch. Without that method, the weight is the
            number of targets, samples or graphs in the microbatch.
        """

    def split_body_input(self, x: Any, num_microbatches: int) -> Sequence[Any]:
        """In an evaluation step, split the input of the body into microbatches.

        A module that defines this method must also define :meth:`join_body_output`.

        Args:
            x: The input of the body for the whole batch. The body consists of the layers that the pipeline splits into
                stages.
            num_microbatches: The requested number of microbatches.
        """

    def join_body_output(self, outputs: list[Any]) -> Any:
        """In an evaluation step, combine the outputs of the body for all microbatches into the output for the batch.

        Args:
            outputs: The outputs of the body, one for each microbatch.
        """

    def tensor_parallel_plan(self) -> Mapping[str, Any] | None:
        """Return the plan that ``tensor_parallel_plan="auto"`` uses for this module.

        Returns:
            A mapping from module names to styles. In a name, ``*`` matches any text without a dot. Instead of this
            method, you can define an attribute ``tensor_parallel_plan`` that contains the mapping.
        """


def count_tokens(
    key: str | int | None = None, *, ignore_index: int = -100, shift: bool = False
) -> Callable[[Any], Tensor]:
    """Create a `microbatch_weight` hook that counts the labels that contribute to a cross-entropy loss.

    Args:
        key: Key, attribute name or index of the labels in a batch. Use ``None`` if the batch itself is the tensor of
            labels.
        ignore_index: Labels with this value are not counted. Use the same value as in `torch.nn.CrossEntropyLoss`.
        shift: If True, the first label of each sequence is not counted. Use this option for causal language models of
            `transformers`, which shift the labels.

    Returns:
        A function that returns the number of counted labels in a microbatch, as an int64 tensor of shape ``()``.

    Raises:
        TypeError: If `key` is neither a string nor an integer nor ``None``.

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
    """The result of `count_tokens`: a class, because a function would become a method of the user's module.

    Attributes:
        key: The argument of `count_tokens`, as the next two attributes.
        ignore_index: Labels with this value are not counted.
        shift: If True, the first label of each sequence is not counted.
    """

    key: str | int | None
    ignore_index: int
    shift: bool

    def __call__(self, microbatch: Any) -> Tensor:
        """Return the number of counted labels in a microbatch.

        Raises:
            WrongUseError: If the microbatch has no such tensor of labels.
        """
        labels = self._find_labels(microbatch)
        if not isinstance(labels, Tensor) or labels.ndim == 0:
            kind = "a tensor without dimensions" if isinstance(labels, Tensor) else type(labels).__name__
            raise WrongUseError(
                f"count_tokens({self.key!r}) needs a tensor of labels in the batch, but found {kind}. [LH711]"
            )
        return ((labels[..., 1:] if self.shift else labels) != self.ignore_index).sum()

    def _find_labels(self, microbatch: Any) -> Any:
        """Return the value at the key, attribute or index.

        Raises:
            WrongUseError: If the microbatch has no value there.
        """
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
