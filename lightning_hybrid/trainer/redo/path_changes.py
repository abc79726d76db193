"""Paths of the user's step that change during a run: what is done again, and when steps are followed beforehand."""

from __future__ import annotations

from collections import deque

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_hybrid.pipeline_parallel.frame.path_change import FOLLOW, Choice

# After so many steps with new paths among so many, paths are followed before a step, and not after it has failed.
_MANY, _RECENT = 4, 16


class PathChanges:
    """The record of changing paths on one rank; equal on all ranks of a model group.

    ::

        a path that is remembered     the step is done again with its plan, which comes first from then on
        a new one                     it is followed, and the step is done again
        new ones again and again      each step is followed before it is done, and nothing is done again

    Attributes:
        have_been: Whether there have been any.
        follows_first: Whether steps are followed before they are done.
    """

    def __init__(self) -> None:
        self.have_been = self.follows_first = False
        self._new: deque[int] = deque(maxlen=_MANY)

    def note(self, choice: Choice, step: int) -> None:
        """Remember that a step is done again.

        Args:
            choice: The next attempt at the step.
            step: The number of the batch since training began.
        """
        self.have_been = True
        if choice.plan != FOLLOW or self.follows_first or step in self._new:
            return
        self._new.append(step)
        if len(self._new) == _MANY and step - self._new[0] < _RECENT:
            self.follows_first = True
            rank_zero_warn(
                f"`training_step` has taken {_MANY} new paths in {step - self._new[0] + 1} batches, for reasons that"
                " are not in the batch, such as a counter or Python's `random`. From now on each batch is followed"
                " before it is trained with, which takes 10 to 200 ms for each microbatch."
                " HybridStrategy(dynamic_shapes=True) does so from the first batch on, and has to do none again."
            )
