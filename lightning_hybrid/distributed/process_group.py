"""A process group, held weakly, and collectives whose names differ between versions of torch."""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as dist

# The names that torch 2.13 brought. The old ones are looked up only where there are no new ones: they may go.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class GroupRef:
    """A weak reference to a process group: torch owns groups, and destroying one must close its connections.

    A copy is the reference itself, so that its owners can be copied: callbacks copy modules.

    Args:
        group: The group; ``None`` is a group that this rank is not in, which is an error of the caller.

    Attributes:
        weak: The reference of the interpreter, for hot paths: it gives ``None`` for a group that has been destroyed.
    """

    __slots__ = ("__weakref__", "weak")

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        assert group is not None, "this rank is in none of these groups"
        self.weak = weakref.ref(group)

    def __call__(self) -> dist.ProcessGroup:
        """The group, which must not have been destroyed."""
        group = self.weak()
        assert group is not None, "the process groups have been destroyed"
        return group

    @property
    def is_alive(self) -> bool:
        """Whether the group still exists."""
        return self.weak() is not None

    def __copy__(self) -> GroupRef:
        """Itself."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> GroupRef:
        """Itself."""
        return self
