"""A record of changed paths, which decides when steps are traced before they run.

A *path* is the sequence of calls that a training step makes. To *trace* a step is to record its path before it runs.
:class:`~.attempts.Redo` has one record for a run, and updates it whenever a step is repeated because its path differed
from the expected one. A repeated step costs more than a trace, so a model whose path often changes is traced each time.
"""

from __future__ import annotations

from collections import deque

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_hybrid.pipeline_parallel.frame.path_change import FOLLOW, Choice

# If _MANY of _RECENT steps take new paths, each later step is traced before it runs, instead of after it has failed.
_MANY, _RECENT = 4, 16


class PathChanges:
    """The record of changed paths on one rank; it is equal on all ranks of a model group.

    ::

        a remembered path       the step is repeated with the plan of this path, which is tried first from then on
        a new path              the step is traced and repeated
        many new paths          each step is traced before it runs, and none is repeated

    Attributes:
        have_been: True if a path has changed in this run.
        follows_first: True if steps are traced before they run.
    """

    def __init__(self) -> None:
        self.have_been = self.follows_first = False
        self._new: deque[int] = deque(maxlen=_MANY)

    def note(self, choice: Choice, step: int) -> None:
        """Record that a step is repeated, and warn once when :attr:`follows_first` becomes True.

        Args:
            choice: The choice for the next attempt at the step: a remembered path, or a new trace.
            step: The number of the batch since training began.
        """
        self.have_been = True
        if choice.plan != FOLLOW or self.follows_first or step in self._new:
            return
        self._new.append(step)
        if len(self._new) == _MANY and step - self._new[0] < _RECENT:
            self.follows_first = True
            rank_zero_warn(
                f"`training_step` has taken {_MANY} new paths in {step - self._new[0] + 1} batches, because its path"
                " depends on something other than the batch, such as a counter or Python's `random`. From now on, each"
                " batch is traced before the training step, which takes 10 to 200 ms per microbatch. To trace from the"
                " first batch on, so that no step is repeated, set HybridStrategy(dynamic_shapes=True)."
            )
