"""Loaders that can be brought back to where they were in the middle of an epoch, random numbers included."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from lightning_hybrid.random import generator_marks, generator_states, set_generator_states

__all__ = ["LoaderWrapper", "TracedIterator", "TracedLoader", "own_states", "set_own_states"]


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


class TracedLoader(LoaderWrapper):
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
        self._past: tuple[Mapping[str, Any], int] | None = None

    def __iter__(self) -> Iterator[Any]:
        if self._waits:
            self._waits = False
            return iter([None])
        past, self._past = self._past, None
        return TracedIterator(self._loader, self._device, *(past if past is not None else ()))

    @property
    def is_stateful(self) -> bool:
        """Whether the user's loader knows by itself where it is."""
        return _is_stateful(self._loader)

    def go_on(self, record: Mapping[str, Any], num_again: int) -> None:
        """Let the next iterator begin where another one was.

        Args:
            record: Of the other one, from :meth:`TracedIterator.record`.
            num_again: How many of the batches that it gave shall be given again.
        """
        self._waits, self._past = False, (record, num_again)

    def is_resumed(self) -> None:
        """Tell Lightning, which asks whether there is a state, that the loader goes on where it was."""
        if not self.is_stateful:
            self.state_dict, self.load_state_dict = dict, _forget


class TracedIterator:
    """An iterator over a loader, and what is needed to bring another one to the same place.

    Samplers, data sets and workers draw random numbers when an iterator is made and when it is asked for a batch, from
    generators that others use too. What matters for a repetition are the states of the generators at these events, but
    only where something was drawn, and only where others have used them since the last time::

        event      0 (made)   1    2    3     others draw    4    5
        draws         x       x         x         x          x
        kept          0                                      4

    Args:
        loader: The loader.
        device: The device of the model.
        past: The record of an iterator that this one follows to its place. Others do not notice what is drawn.
        num_again: How many batches before that place it stops. They are given with the random numbers of then.
    """

    def __init__(
        self, loader: Any, device: torch.device, past: Mapping[str, Any] | None = None, num_again: int = 0
    ) -> None:
        self._loader = loader
        self._device = device
        self._stateful = _is_stateful(loader)
        self._length = _length(loader)
        self._stopped = False
        self._loader_state: Any = None
        self._kept: dict[int, dict[str, Any]] = {}
        self._marks: Any = None  # of the generators after the last event that has drawn
        self._looked: tuple[Any, dict[str, Any]] = (None, {})  # marks of the generators, and their states
        self._event = 0
        self._last_again = 0  # events before this one are repetitions
        self._states: Mapping[str, Any] = {}
        if past is not None:
            set_own_states(loader, past["own"])
            self._kept = dict(past["generators"])
            self._states = generator_states(device)
            self._last_again = past["events"]
            if past["loader"] is not None:
                loader.load_state_dict(past["loader"])
        self._own = own_states(loader)
        self._batches: Iterator[Any] = self._run(lambda: iter(loader))
        if past is not None and past["loader"] is not None:
            self._event = max(self._event, past["events"] - num_again)
        while self._event < self._last_again - num_again:
            next(self, None)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._stateful and self._length is None:  # Lightning may fetch one batch ahead
            self._loader_state = self._loader.state_dict()
        try:
            return self._run(lambda: next(self._batches))
        except StopIteration:
            self._stopped = True
            raise

    @property
    def has_ended(self) -> bool:
        """Whether there are no more batches, as far as is known."""
        return self._stopped or (self._length is not None and self._event > self._length)

    def _run(self, action: Callable[[], Any]) -> Any:
        return self._again(action) if self._event < self._last_again else self._first(action)

    def _first(self, action: Callable[[], Any]) -> Any:
        before = generator_marks(self._device)
        if self._stateful:  # it is not brought back batch by batch: what came before the last one does not matter
            self._marks = None
            self._kept = {event: states for event, states in self._kept.items() if event == 0}
        moved = before != self._marks
        if moved and before != self._looked[0]:
            self._looked = before, generator_states(self._device)
        try:
            return action()
        finally:
            after = generator_marks(self._device)
            if after != before:
                if moved:
                    self._kept[self._event] = self._looked[1]
                self._marks = after
            self._event += 1

    def _again(self, action: Callable[[], Any]) -> Any:
        outside = generator_states(self._device)
        set_generator_states(self._kept.get(self._event, self._states), self._device)
        try:
            return action()
        finally:
            self._states, self._marks = generator_states(self._device), generator_marks(self._device)
            set_generator_states(outside, self._device)
            self._event += 1

    def record(self, num_again: int) -> dict[str, Any]:
        """How another iterator comes to the same place: tensors and plain values.

        Args:
            num_again: How many of the batches that were given shall be given again.
        """
        state = None
        if self._stateful:
            state = self._loader_state if num_again and self._length is None else self._loader.state_dict()
        return {"own": self._own, "generators": dict(self._kept), "events": self._event, "loader": state}


def _forget(state: Mapping[str, Any]) -> None:
    """There is no state to load."""


def _is_stateful(loader: Any) -> bool:
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def _own_generators(loader: Any) -> list[torch.Generator]:
    """The generators that a loader and its samplers have of their own, whatever is wrapped around them."""
    found: dict[int, torch.Generator] = {}
    seen: dict[int, Any] = {}
    waiting = [loader]
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen[id(each)] = each
        generator = getattr(each, "generator", None)
        if isinstance(generator, torch.Generator):
            found.setdefault(id(generator), generator)
        waiting += [getattr(each, name, None) for name in ("_loader", "sampler", "batch_sampler", *_WRAPPED)]
    return list(found.values())


_WRAPPED = ("_sampler", "_batch_sampler")  # in samplers of ours and of Lightning


def own_states(loader: Any) -> list[torch.Tensor]:
    """The states of the generators that a loader and its samplers have of their own."""
    return [generator.get_state() for generator in _own_generators(loader)]


def set_own_states(loader: Any, states: list[torch.Tensor]) -> None:
    """Put the generators that a loader and its samplers have of their own into these states."""
    for generator, state in zip(_own_generators(loader), states, strict=False):
        generator.set_state(state)
