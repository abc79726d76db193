"""The order in which layers become whole: the same on every replica, whichever layers it uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_hybrid.data_parallel.zero.param_group import ParameterGroup

__all__ = ["Prefetcher"]


class Prefetcher:
    """Layers become whole one after the other, and the next one travels while one computes.

    Collectives of a group have one order on all ranks. So a layer that this replica skips becomes whole all the same,
    and goes at once; and what else travels while a backward walks does so at fixed places of the walk::

        layers used here            2           0
        of another replica          2     1     0
        backwards, on both          gather 2, gather 1, [scatter 2], gather 0, [scatter 1], and after it [scatter 0]

    Args:
        units: The layers, in the order of the model.
        keeps: Whether what is whole stays so until it is freed from elsewhere; then there is one walk in each step.
        arrive: Called in a backward with each place that the walk comes to: what lies behind it is done, if layers are
            used in their order.

    Attributes:
        is_orderly: Whether they have been: each at most once. To be set when a step begins.
    """

    def __init__(
        self, units: Sequence[ParameterGroup], *, keeps: bool, arrive: Callable[[int], None] = lambda place: None
    ) -> None:
        self._units = units
        self._keeps = keeps
        self._arrive = arrive
        self._backwards = False
        self.is_orderly = True
        self._rest: list[int] = []  # what has not been gathered yet, in order
        self._ahead: int | None = None  # travels, and nobody has asked for it

    def begin(self, *, backwards: bool = False) -> None:
        """A forward or a backward begins; the one before is over."""
        self.finish()
        self._backwards = backwards
        self._rest = list(range(len(self._units)))
        if backwards:
            self._rest.reverse()

    def to(self, place: int) -> None:
        """Make a layer whole.

        Args:
            place: Of the layer. If it was passed already, the layers run again, as they may outside of training.
        """
        unit = self._units[place]
        if unit.is_whole:
            return
        if place != self._ahead and place not in self._rest:
            self.is_orderly = False
            self.begin()
        while self._next() != place:
            self._pass()
        self._come(place)
        unit.make_whole()
        self._next()

    def finish(self) -> None:
        """Nobody asks for more: take part in what is left."""
        while self._next() is not None:
            self._pass()

    def forget(self) -> None:
        """Something failed: nothing is waited for."""
        self._rest.clear()
        self._ahead = None

    def _next(self) -> int | None:
        """Let the next layer travel, unless one does already."""
        if self._ahead is None and self._rest:
            self._ahead = self._rest.pop(0)
            self._units[self._ahead].request()
        return self._ahead

    def _come(self, place: int) -> None:
        self._ahead = None
        if self._backwards and self.is_orderly:
            self._arrive(place)

    def _pass(self) -> None:
        """Nobody asked for what travels."""
        place = self._ahead
        assert place is not None
        self._come(place)
        if self._keeps:
            self._units[place].make_whole()
        else:
            self._units[place].free()
