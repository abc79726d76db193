"""Loaders that can be brought back to where they were in the middle of an epoch, random numbers included."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len

from lightning_hybrid.distributed.pytree import walk
from lightning_hybrid.distributed.random import (
    generator_mark,
    generator_marks,
    generator_states,
    set_generator_states,
)
from lightning_hybrid.torch_internals import persistent_iterator, set_persistent_iterator


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
        return persistent_iterator(self._loader)

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        set_persistent_iterator(self._loader, iterator)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self._loader, name)


@dataclass(frozen=True)
class ReplicaOrder:
    """How replicas take batches from one order of the samples: replica r of n takes samples r, r + n, ...

    Attributes:
        sampler: What makes the order.
        num_samples: How many of it the batches of all replicas take at a time.
    """

    sampler: str
    num_samples: int


class ReplayableLoader(LoaderWrapper):
    """A training loader that records what its iterators did, and whose iterators can replay that.

    Args:
        loader: The loader as the ranks of a model group iterate it.
        device: The device of the model.
        order: How replicas take their batches; ``None`` if that is not known.
        waits: Whether the first iterator is not to be used: Lightning asks for one before it is known where the data
            shall continue. It has one batch, ``None``, because where there is no length Lightning fetches that too.
    """

    def __init__(
        self, loader: Any, device: torch.device, order: ReplicaOrder | None = None, *, waits: bool = False
    ) -> None:
        super().__init__(loader)
        self._device = device
        self.order = order
        self._waits = waits
        self._histories: list[_History] = []  # of the iterators of this epoch, and perhaps earlier ones
        self._to_replay: list[Mapping[str, Any]] = []  # records of iterators

    def __iter__(self) -> Iterator[Any]:
        if self._waits:
            self._waits = False
            return iter([None])
        iterator = ReplayableIterator(self._loader, self._device, self._to_replay.pop(0) if self._to_replay else None)
        self._histories.append(iterator.history)
        return iterator

    @property
    def is_stateful(self) -> bool:
        """Whether the user's loader knows by itself where it is."""
        return is_stateful(self._loader)

    def begin_epoch(self) -> None:
        """What was before the last iterator does not matter any more."""
        del self._histories[:-1]
        self._to_replay = []

    def record(self, num_batches: int, num_repeated: int, *, cycles: bool) -> list[dict[str, Any]]:
        """How another loader comes to the same place: tensors and plain values for each of this epoch's iterators.

        Args:
            num_batches: How many batches have been asked for in this epoch.
            num_repeated: How many of them shall be given again.
            cycles: Whether it begins anew where it ends before others.
        """
        if self.is_stateful:
            last = self._histories[-1]
            is_ahead = num_repeated > 0 and sized_len(self._loader) is None
            state = last.former_state if is_ahead else self._loader.state_dict()
            return [{**last.record(), "given": last.num_batches - num_repeated, "loader": state}]
        records: list[dict[str, Any]] = []
        for history in reversed(self._histories):
            records.insert(0, history.record())
            num_batches -= history.num_batches
            if num_batches <= 0 or not cycles:
                break
        return [*records, *map(dict, self._to_replay)]

    def replay(self, records: list[Mapping[str, Any]], num_batches: int, num_repeated: int) -> None:
        """Let the next iterators do what others did.

        Args:
            records: Of these, from :meth:`record`.
            num_batches: How many batches will be asked for, up to the place to continue from. A loader with a state
                gives ``None`` for them: it is there already.
            num_repeated: How many come after that which others have had, too.
        """
        self._waits, self._to_replay, self._histories = False, list(records), []
        if self.is_stateful:
            self._to_replay[:1] = [{**each, "skipped": num_batches, "repeated": num_repeated} for each in records[:1]]

    def mark_resumed(self) -> None:
        """Tell Lightning, which asks whether there is a state, that the loader continues where it was."""
        if not self.is_stateful:
            self.state_dict, self.load_state_dict = dict, _ignore_state


@dataclass
class _History:
    """What an iterator has done.

    Attributes:
        generators: The states of the generators that mattered, by event.
        num_events: How many there have been, with those that are yet to be replayed.
        num_batches: How many batches it has given.
        former_state: That of a loader without a length before it was last asked for a batch: Lightning may fetch ahead.
    """

    generators: dict[int, dict[str, Any]] = field(default_factory=dict)
    num_events: int = 0
    num_batches: int = 0
    former_state: Any = None

    def record(self) -> dict[str, Any]:
        """As tensors and plain values."""
        return {"generators": dict(self.generators), "events": self.num_events}


class ReplayableIterator:
    """An iterator over a loader that records what is needed to bring another one to the same place.

    Samplers, data sets and workers draw random numbers when an iterator is made and when it is asked for a batch, from
    generators that others use too; loaders may share one of their own. What matters for a replay are the states of
    the generators at these events, but only where something was drawn, and only where others have used them since::

        event      0 (made)   1    2    3     others draw    4    5
        draws         x       x         x         x          x
        recorded      0                                      4

    Args:
        loader: The loader.
        device: The device of the model.
        record: Of an iterator that this one replays. Others do not notice what is drawn at these events. Of a loader
            with a state also how many batches it is asked for that it has given before, which are skipped, and how many
            are repeated after these.

    Attributes:
        history: What it has done.
    """

    def __init__(self, loader: Any, device: torch.device, record: Mapping[str, Any] | None) -> None:
        self._loader = loader
        self._generators = _Generators(loader, device)
        self._stateful = is_stateful(loader)
        self._length = sized_len(loader)
        self._stopped = False
        self._marks: Any = None  # of the generators after the last event that has drawn
        self._last_read: tuple[Any, dict[str, Any]] = (None, {})  # marks of the generators, and their states
        self._event = 0
        self._num_replayed = 0  # events before this one are replayed
        self._states: Mapping[str, Any] = {}
        self._num_skipped = 0
        self.history = _History()
        if record is not None:
            self.history = _History(dict(record["generators"]), record["events"], record.get("given", 0))
            self._states = self._generators.states()
            self._num_replayed, self._num_skipped = record["events"], record.get("skipped", 0)
            if "loader" in record:
                loader.load_state_dict(record["loader"])
        self._batches: Iterator[Any] = self._run(lambda: iter(loader))
        if record is not None and "loader" in record:
            self._event = max(self._event, record["events"] - record.get("repeated", 0))

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._num_skipped:
            self._num_skipped -= 1
            return None
        if self._stateful and self._length is None:
            self.history.former_state = self._loader.state_dict()
        try:
            batch = self._run(lambda: next(self._batches))
        except StopIteration:
            self._stopped = True
            raise
        self.history.num_batches += 1
        return batch

    @property
    def has_ended(self) -> bool:
        """Whether there are no more batches, as far as is known."""
        return self._stopped or (self._length is not None and self.history.num_batches >= self._length)

    def _run(self, action: Callable[[], Any]) -> Any:
        try:
            return self._replay(action) if self._event < self._num_replayed else self._record(action)
        finally:
            self._event += 1
            self.history.num_events = max(self.history.num_events, self._event)

    def _record(self, action: Callable[[], Any]) -> Any:
        before = self._generators.marks()
        recorded = self.history.generators
        if self._stateful:  # it is not brought back batch by batch: what came before the last one does not matter
            self._marks = None
            recorded = self.history.generators = {event: states for event, states in recorded.items() if event == 0}
        others_drew = before != self._marks
        if others_drew and before != self._last_read[0]:
            self._last_read = before, self._read(before)
        try:
            return action()
        finally:
            after = self._generators.marks()
            if after != before:
                if others_drew:
                    recorded[self._event] = self._last_read[1]
                self._marks = after

    def _read(self, marks: tuple[Any, ...]) -> dict[str, Any]:
        """The states; those of numpy and `random`, from which few loaders draw, are kept once where they are equal."""
        states, (former_marks, former) = self._generators.states(), self._last_read
        is_alike = former_marks is not None and former_marks[1] == marks[1]
        return {**states, "numpy": former["numpy"], "python": former["python"]} if is_alike else states

    def _replay(self, action: Callable[[], Any]) -> Any:
        outside = self._generators.states()
        self._generators.set_states(self.history.generators.get(self._event, self._states))
        try:
            return action()
        finally:
            self._states, self._marks = self._generators.states(), self._generators.marks()
            self._generators.set_states(outside)


class _Generators:
    """Those that an iterator may draw from: everybody's, and those of its loader.

    Args:
        loader: The loader.
        device: The device of the model.
    """

    def __init__(self, loader: Any, device: torch.device) -> None:
        self._device = device
        self._own = _own_generators(loader)

    def marks(self) -> tuple[Any, ...]:
        """What differs after something has been drawn: of torch's generators, of others, of each of the loader's."""
        return *generator_marks(self._device), *map(generator_mark, self._own)

    def states(self) -> dict[str, Any]:
        """The states, of tensors and plain values."""
        return {**generator_states(self._device), "own": [generator.get_state() for generator in self._own]}

    def set_states(self, states: Mapping[str, Any]) -> None:
        """Put the generators into these states."""
        set_generator_states(states, self._device)
        for generator, state in zip(self._own, states["own"], strict=False):
            generator.set_state(state)


def loader_generators(loader: Any) -> list[torch.Tensor]:
    """The states of the generators that a loader and its samplers have of their own."""
    return [generator.get_state() for generator in _own_generators(loader)]


def set_loader_generators(loader: Any, states: list[torch.Tensor]) -> None:
    """Put the generators that a loader and its samplers have of their own into these states."""
    for generator, state in zip(_own_generators(loader), states, strict=False):
        generator.set_state(state)


#: Where wrappers, loaders and samplers usually have what they are made around.
_WRAPPED = ("_loader", "sampler", "batch_sampler", "_sampler", "_batch_sampler")


def _own_generators(loader: Any) -> list[torch.Generator]:
    """The generators that a loader and its samplers have of their own, whatever is wrapped around them."""

    def wrapped(part: Any) -> list[Any] | None:
        return None if part is None else [getattr(part, name, None) for name in _WRAPPED]

    found = (getattr(part, "generator", None) for part in walk([loader], wrapped))
    return list(dict.fromkeys(each for each in found if isinstance(each, torch.Generator)))


def _ignore_state(state: Mapping[str, Any]) -> None:
    """There is no state to load."""


def is_stateful(loader: Any) -> bool:
    """Whether a loader knows by itself where it is."""
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))
