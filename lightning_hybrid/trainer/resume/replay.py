"""Loaders that can be brought back to where they were in the middle of an epoch, random numbers included."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_hybrid.trainer.resume.own_generators import Generators

__all__ = ["LoaderWrapper", "ReplayableLoader", "TracedIterator"]


class LoaderWrapper:
    """Shows what Lightning reads of a loader.

    Args:
        loader: The loader; anything that can be iterated.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        for name in ("state_dict", "load_state_dict"):  # where they are looked for without `__getattr__`
            if callable(method := getattr(loader, name, None)):
                setattr(self, name, method)

    def __len__(self) -> int:
        return len(self._loader)

    @property
    def _iterator(self) -> Any:
        """That of persistent workers. Lightning ends them by setting it to ``None``, on the loader itself."""
        return self._loader._iterator

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        self._loader._iterator = iterator

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self._loader, name)


class ReplayableLoader(LoaderWrapper):
    """A training loader whose iterators know how they came where they are.

    Args:
        loader: The loader as the ranks of a model group iterate it.
        device: The device of the model.
        waits: Whether the first iterator is not to be used: Lightning asks for one before it is known where the data
            shall go on. It has one batch, ``None``, because where there is no length Lightning fetches that too.
    """

    def __init__(self, loader: Any, device: torch.device, *, waits: bool = False) -> None:
        super().__init__(loader)
        self._device = device
        self._waits = waits
        self._passes: list[_Pass] = []  # of this epoch, and perhaps earlier ones
        self._past: list[Mapping[str, Any]] = []  # records of passes that are yet to be repeated
        self._skipped = 0
        self._again = 0

    def __iter__(self) -> Iterator[Any]:
        if self._waits:
            self._waits = False
            return iter([None])
        past = self._past.pop(0) if self._past else None
        iterator = TracedIterator(self._loader, self._device, past, num_skipped=self._skipped, num_again=self._again)
        self._skipped = self._again = 0
        self._passes.append(iterator.log)
        return iterator

    @property
    def is_stateful(self) -> bool:
        """Whether the user's loader knows by itself where it is."""
        return _is_stateful(self._loader)

    def begin_epoch(self) -> None:
        """What was before the last iterator does not matter any more."""
        del self._passes[:-1]
        self._past = []

    def record(self, num_batches: int, num_again: int, *, cycles: bool) -> list[dict[str, Any]]:
        """How another loader comes to the same place: tensors and plain values for each of this epoch's iterators.

        Args:
            num_batches: How many batches have been asked for in this epoch.
            num_again: How many of them shall be given again.
            cycles: Whether it begins anew where it ends before others.
        """
        if self.is_stateful:
            last = self._passes[-1]
            is_ahead = num_again > 0 and _length(self._loader) is None
            state = last.former_state if is_ahead else self._loader.state_dict()
            return [{**last.record(), "given": last.given - num_again, "loader": state}]
        passes: list[dict[str, Any]] = []
        for each in reversed(self._passes):
            passes.insert(0, each.record())
            num_batches -= each.given
            if num_batches <= 0 or not cycles:
                break
        return [*passes, *map(dict, self._past)]

    def go_on(self, past: list[Mapping[str, Any]], num_batches: int, num_again: int) -> None:
        """Let the next iterators repeat others.

        Args:
            past: The record of these, from :meth:`record`.
            num_batches: How many batches will be asked for, up to the place to go on from. A loader with a state gives
                ``None`` for them: it is there already.
            num_again: How many come after that which others have had, too.
        """
        self._waits, self._past, self._passes = False, list(past), []
        if self.is_stateful:
            self._skipped, self._again = num_batches, num_again

    def is_resumed(self) -> None:
        """Tell Lightning, which asks whether there is a state, that the loader goes on where it was."""
        if not self.is_stateful:
            self.state_dict, self.load_state_dict = dict, _forget


@dataclass
class _Pass:
    """What an iterator has done.

    Attributes:
        generators: The states of the generators that mattered, by event.
        events: How many there have been, with those that are yet to be repeated.
        given: How many batches it has given.
        former_state: That of a loader without a length before it was last asked for a batch: Lightning may fetch ahead.
    """

    generators: dict[int, dict[str, Any]] = field(default_factory=dict)
    events: int = 0
    given: int = 0
    former_state: Any = None

    def record(self) -> dict[str, Any]:
        """As tensors and plain values."""
        return {"generators": dict(self.generators), "events": self.events}


class TracedIterator:
    """An iterator over a loader, and what is needed to bring another one to the same place.

    Samplers, data sets and workers draw random numbers when an iterator is made and when it is asked for a batch, from
    generators that others use too; loaders may share one of their own. What matters for a repetition are the states of
    the generators at these events, but only where something was drawn, and only where others have used them since::

        event      0 (made)   1    2    3     others draw    4    5
        draws         x       x         x         x          x
        kept          0                                      4

    Args:
        loader: The loader.
        device: The device of the model.
        past: The record of an iterator that this one repeats. Others do not notice what is drawn at these events.
        num_skipped: Of a loader with a state, how many batches it is asked for that it has given before.
        num_again: Likewise, how many are repeated after these.

    Attributes:
        log: What it has done.
    """

    def __init__(
        self,
        loader: Any,
        device: torch.device,
        past: Mapping[str, Any] | None = None,
        *,
        num_skipped: int = 0,
        num_again: int = 0,
    ) -> None:
        self._loader = loader
        self._generators = Generators(loader, device)
        self._stateful = _is_stateful(loader)
        self._length = _length(loader)
        self._stopped = False
        self._marks: Any = None  # of the generators after the last event that has drawn
        self._looked: tuple[Any, dict[str, Any]] = (None, {})  # marks of the generators, and their states
        self._event = 0
        self._last_again = 0  # events before this one are repetitions
        self._states: Mapping[str, Any] = {}
        self._skipped = num_skipped
        self.log = _Pass()
        if past is not None:
            self.log = _Pass(dict(past["generators"]), past["events"], past.get("given", 0))
            self._states = self._generators.states()
            self._last_again = past["events"]
            if "loader" in past:
                loader.load_state_dict(past["loader"])
        self._batches: Iterator[Any] = self._run(lambda: iter(loader))
        if past is not None and "loader" in past:
            self._event = max(self._event, past["events"] - num_again)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._skipped:
            self._skipped -= 1
            return None
        if self._stateful and self._length is None:
            self.log.former_state = self._loader.state_dict()
        try:
            batch = self._run(lambda: next(self._batches))
        except StopIteration:
            self._stopped = True
            raise
        self.log.given += 1
        return batch

    @property
    def has_ended(self) -> bool:
        """Whether there are no more batches, as far as is known."""
        return self._stopped or (self._length is not None and self.log.given >= self._length)

    def _run(self, action: Callable[[], Any]) -> Any:
        try:
            return self._again(action) if self._event < self._last_again else self._first(action)
        finally:
            self._event += 1
            self.log.events = max(self.log.events, self._event)

    def _first(self, action: Callable[[], Any]) -> Any:
        before = self._generators.marks()
        kept = self.log.generators
        if self._stateful:  # it is not brought back batch by batch: what came before the last one does not matter
            self._marks = None
            kept = self.log.generators = {event: states for event, states in kept.items() if event == 0}
        moved = before != self._marks
        if moved and before != self._looked[0]:
            self._looked = before, self._generators.states()
        try:
            return action()
        finally:
            after = self._generators.marks()
            if after != before:
                if moved:
                    kept[self._event] = self._looked[1]
                self._marks = after

    def _again(self, action: Callable[[], Any]) -> Any:
        outside = self._generators.states()
        self._generators.set_states(self.log.generators.get(self._event, self._states))
        try:
            return action()
        finally:
            self._states, self._marks = self._generators.states(), self._generators.marks()
            self._generators.set_states(outside)


def _forget(state: Mapping[str, Any]) -> None:
    """There is no state to load."""


def _is_stateful(loader: Any) -> bool:
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None
