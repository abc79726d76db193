"""The optional hooks of a LightningModule: what it may define, and needs not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn


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

        Args:
            microbatch: What `training_step` gets as its batch.

        Returns:
            What the microbatch counts in the loss of the batch: at least 0, as a number or a tensor with one element.
            Weights are summed over the replicas too, so that the loss is that of one process on the joined batch.
        """

    def split_batch(self, batch: Any, num_microbatches: int) -> Sequence[Any]:
        """Split a training batch.

        Args:
            batch: As the loader gives it.
            num_microbatches: The requested number.

        Returns:
            The microbatches, at least one; the same number on every rank of a model group.
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


def find_hook(module: nn.Module, name: str) -> Any:
    """The hook of this name; ``None`` if the module does not define it."""
    assert name in vars(ModuleHooks) or name in ModuleHooks.__annotations__, name
    return getattr(module, name, None)
