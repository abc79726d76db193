"""Results of layers in a step that runs in lockstep: the stage of a layer sends its result to the other ranks.

In *lockstep*, all stages execute an evaluation step together, call by call, and each call of a layer is computed by its
stage. A step runs in lockstep if results of layers decide which layers it calls next, for example in text generation.
:class:`~.program.frame_program.FrameProgram` makes one :class:`LayerExchange`, and passes it to
`FrameCut.run_in_lockstep`, which calls it for each call of a layer and at the end of the step.

With a plain broadcast, ranks that call different layers would wait forever or mix up results. Messages are therefore
numbered, and each step ends with a comparison of all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.distributed.messages.tree_broadcast import TreeBroadcast


class DifferentStepsError(WrongUseError):
    """An error for ranks of a model group that make different calls in a step."""


class LayerExchange:
    """An exchange that sends trees, such as results of layers, from any pipeline rank to all ranks of the model group.

    The *model group* consists of the ranks that hold one replica. For a pipeline rank, its first tensor-parallel rank
    sends. Messages are numbered, so that a rank detects if another rank makes different calls. The watch over all ranks
    detects ranks that wait for each other in a cycle.

    Args:
        mesh: The ranks.
        device: The device of this rank.
        name: The class name of the user's module, for error messages.
    """

    def __init__(self, mesh: Mesh, device: torch.device, name: str) -> None:
        self._mesh, self._device, self._name = mesh, device, name
        self._number = 0

    def __call__(self, owner: int, tree: Any = None) -> Any:
        """Send or receive the tree of a pipeline rank, and return it; every rank of the model group calls this.

        Args:
            owner: The pipeline rank that sends.
            tree: The tree; only the argument on the owner's first tensor-parallel rank is used.

        Raises:
            DifferentStepsError: If the ranks do not make the same calls.
        """
        trees = self._trees_of(owner)
        self._number += 1
        trees.about = self._number
        try:
            return trees(tree)
        except (WrongUseError, StopIteration):
            raise self._other_calls() from None

    def end(self, checksum: Tensor) -> None:
        """End a step on all ranks of the model group, so that no rank waits forever for a layer.

        Each rank that can send reports that its step has ended. The first pipeline rank also sends its checksum.

        Args:
            checksum: A scalar tensor that is equal on all ranks if they have called layers with the same tokens.

        Raises:
            DifferentStepsError: If the step of another rank continues, or called layers with other tokens.
        """
        every = list(map(self._trees_of, range(self._mesh.sizes.pipeline)))
        for trees in every:
            trees.about = self._number
            if trees.is_source:
                trees.end()
        if not all(trees.is_source or self._is_over(trees) for trees in every):
            raise self._other_calls()
        if not torch.equal(self(0, checksum), checksum):
            raise DifferentStepsError(
                f"The step of {self._name} calls layers with different tokens on different ranks. The step runs on all"
                " stages, because the outputs of layers determine which layers it calls next. Make sure that the step"
                " draws the same random numbers and makes the same decisions on every rank. [LH434]"
            )

    def _is_over(self, trees: TreeBroadcast) -> bool:
        """Receive a message, and return True if it is the end of the sender's step, after equally many messages."""
        try:
            trees.receive()
        except StopIteration:
            return True
        except WrongUseError:
            return False
        return False

    def _trees_of(self, owner: int) -> TreeBroadcast:
        """Return the broadcast from the first tensor-parallel rank of a pipeline rank."""
        return self._mesh.tree_broadcast("layers", self._mesh.model_group_rank(owner, 0), self._device)

    def _other_calls(self) -> DifferentStepsError:
        return DifferentStepsError(
            f"The step of {self._name} does not call the same layers on every rank. The step runs on all stages,"
            " because the outputs of layers determine which layers it calls next. Make sure that the step makes the"
            " same decisions on every rank. [LH433]"
        )
