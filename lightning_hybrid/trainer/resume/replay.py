"""Replayable data loaders: a resumed run reaches the same batch of an epoch with the same random numbers.

`DataLoaderPreparer` wraps each training loader in a :class:`ReplayableLoader`. :mod:`.dataloader_state` saves the
records of these loaders in a checkpoint and replays the records after a resume. To set a seed for each epoch and skip
batches would be simpler, but would change the order of the data from an ordinary run. A *record* of an iterator
contains states of random generators; to *replay* it is to make the iterator and fetch its batches again with these
states.
"""

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
    """A loader around another loader, with all attributes that Lightning reads from the inner loader.

    Args:
        loader: The inner loader, any iterable.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        for name in ("state_dict", "load_state_dict"):  # Lightning looks them up without `__getattr__`
            if callable(method := getattr(loader, name, None)):
                setattr(self, name, method)

    def __len__(self) -> int:
        return len(self._loader)

    @property
    def _iterator(self) -> Any:
        """The iterator of persistent workers. Lightning sets it to ``None`` on the loader itself to end the workers."""
        return persistent_iterator(self._loader)

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        set_persistent_iterator(self._loader, iterator)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # while the wrapper is copied or unpickled, and has no attributes yet
            raise AttributeError(name)
        return getattr(self._loader, name)


@dataclass(frozen=True)
class ReplicaOrder:
    """The way in which replicas take batches from one order of the samples: replica r of n takes samples r, r + n, ...

    Attributes:
        sampler: The class name of the sampler that determines the order.
        num_samples: The number of samples in one batch of all replicas together.
    """

    sampler: str
    num_samples: int


class ReplayableLoader(LoaderWrapper):
    """A training loader whose iterators record their random states, so that later iterators can replay them.

    Args:
        loader: The loader that the ranks of a model group iterate.
        device: The device of the model.
        order: The way in which replicas take their batches; ``None`` if it is unknown.
        waits: If True, because a run is about to resume, the first iterator yields only one batch, ``None``. Lightning
            requests this iterator before the position to resume from is known, and fetches a batch from it if the
            loader has no length.
    """

    def __init__(
        self, loader: Any, device: torch.device, order: ReplicaOrder | None = None, *, waits: bool = False
    ) -> None:
        super().__init__(loader)
        self._device = device
        self.order = order
        self._waits = waits
        self._histories: list[_History] = []  # one for each iterator of this epoch, and perhaps of earlier epochs
        self._to_replay: list[Mapping[str, Any]] = []  # records that the next iterators replay

    def __iter__(self) -> Iterator[Any]:
        if self._waits:
            self._waits = False
            return iter([None])
        iterator = ReplayableIterator(self._loader, self._device, self._to_replay.pop(0) if self._to_replay else None)
        self._histories.append(iterator.history)
        return iterator

    @property
    def is_stateful(self) -> bool:
        """Return True if the user's loader can save and load its own position."""
        return is_stateful(self._loader)

    def begin_epoch(self) -> None:
        """Discard the histories of earlier epochs, except the newest iterator's, and records not yet replayed."""
        del self._histories[:-1]
        self._to_replay = []

    def record(self, num_batches: int, num_repeated: int, *, cycles: bool) -> list[dict[str, Any]]:
        """Return records with which another loader reaches the same position, one for each iterator of this epoch.

        Args:
            num_batches: The number of batches that have been fetched in this epoch.
            num_repeated: How many of the fetched batches must be returned again after the resume.
            cycles: If True, this loader starts again at its end, because another loader is longer.

        Returns:
            Dictionaries of tensors and plain values: ``"generators"`` has the states of the random generators by event
            (see :class:`ReplayableIterator`), and ``"events"`` is the number of events. For a loader with its own
            state, the list has one entry, which also has ``"loader"``, the state, and ``"given"``, the number of
            batches that the iterator has returned up to this state.
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
        """Make the next iterators replay the iterators of an earlier run.

        Args:
            records: The result of :meth:`record` in the earlier run.
            num_batches: The number of batches that will be fetched to reach the position. A loader with a state returns
                ``None`` for each of them, because its loaded state is already at this position.
            num_repeated: The number of batches after the position that the earlier run had fetched, too.
        """
        self._waits, self._to_replay, self._histories = False, list(records), []
        if self.is_stateful:
            self._to_replay[:1] = [{**each, "skipped": num_batches, "repeated": num_repeated} for each in records[:1]]

    def mark_resumed(self) -> None:
        """Give the loader a `state_dict`, from which Lightning concludes that the loader resumes at its position."""
        if not self.is_stateful:
            self.state_dict, self.load_state_dict = dict, _ignore_state


@dataclass
class _History:
    """The record of one iterator.

    An event is the creation of the iterator (event 0) or a request for a batch.

    Attributes:
        generators: The states of the random generators before an event, for each event whose states must be saved.
        num_events: The number of events, including events that are still to be replayed.
        num_batches: The number of batches that the iterator has returned.
        former_state: For a loader without a length, its state before the last batch was fetched, because Lightning
            fetches one batch ahead.
    """

    generators: dict[int, dict[str, Any]] = field(default_factory=dict)
    num_events: int = 0
    num_batches: int = 0
    former_state: Any = None

    def record(self) -> dict[str, Any]:
        """Return the record as tensors and plain values."""
        return {"generators": dict(self.generators), "events": self.num_events}


class ReplayableIterator:
    """An iterator that records the random states with which another iterator can be brought to the same position.

    Samplers, datasets and workers draw random numbers when an iterator is made and when a batch is fetched. They use
    generators that other code uses too, and several loaders can share a generator. The states of the generators are
    recorded only at events that draw random numbers, and only if other code has used the generators since the previous
    event that drew numbers::

        event      0 (made)   1    2    3     others draw    4    5
        draws         x       x         x         x          x
        recorded      0                                      4

    Args:
        loader: The loader.
        device: The device of the model.
        record: The record of the iterator to replay, from :meth:`ReplayableLoader.record`; ``None`` for a new iterator.
            Replayed events do not change the generators that other code sees. For a loader with a state, ``"skipped"``
            is the number of batches that are returned as ``None``, and ``"repeated"`` the number of batches after them
            that the recorded iterator had already returned.

    Attributes:
        history: The record of this iterator.
    """

    def __init__(self, loader: Any, device: torch.device, record: Mapping[str, Any] | None) -> None:
        self._loader = loader
        self._generators = _Generators(loader, device)
        self._stateful = is_stateful(loader)
        self._length = sized_len(loader)
        self._stopped = False
        self._marks: Any = None  # marks of the generators after the last event that drew random numbers
        self._last_read: tuple[Any, dict[str, Any]] = (None, {})  # the last marks, and their states
        self._event = 0
        self._num_replayed = 0  # events with smaller numbers are replayed
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
        """Return True if the loader is known to have no more batches."""
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
        if self._stateful:  # the loader's own state replaces the replay of batches, so older states are not needed
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
        """Return the states. States of numpy and `random` that have not changed are the same objects as last time."""
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
    """The random generators that an iterator may draw from: the global generators, and the generators of its loader.

    Args:
        loader: The loader.
        device: The device of the model.
    """

    def __init__(self, loader: Any, device: torch.device) -> None:
        self._device = device
        self._own = _own_generators(loader)

    def marks(self) -> tuple[Any, ...]:
        """Return hashes that change with each draw: for torch, for numpy and `random`, and for each own generator."""
        return *generator_marks(self._device), *map(generator_mark, self._own)

    def states(self) -> dict[str, Any]:
        """Return the states as tensors and plain values."""
        return {**generator_states(self._device), "own": [generator.get_state() for generator in self._own]}

    def set_states(self, states: Mapping[str, Any]) -> None:
        """Restore states that :meth:`states` returned."""
        set_generator_states(states, self._device)
        for generator, state in zip(self._own, states["own"], strict=False):
            generator.set_state(state)


def loader_generators(loader: Any) -> list[torch.Tensor]:
    """Return the states of the generators that belong to a loader and its samplers."""
    return [generator.get_state() for generator in _own_generators(loader)]


def set_loader_generators(loader: Any, states: list[torch.Tensor]) -> None:
    """Restore the states of the generators that belong to a loader and its samplers."""
    for generator, state in zip(_own_generators(loader), states, strict=False):
        generator.set_state(state)


#: The attributes in which wrappers, loaders and samplers usually store the object that they wrap.
_WRAPPED = ("_loader", "sampler", "batch_sampler", "_sampler", "_batch_sampler")


def _own_generators(loader: Any) -> list[torch.Generator]:
    """Return the generators that belong to a loader and its samplers, at any depth of wrappers."""

    def wrapped(part: Any) -> list[Any] | None:
        return None if part is None else [getattr(part, name, None) for name in _WRAPPED]

    found = (getattr(part, "generator", None) for part in walk([loader], wrapped))
    return list(dict.fromkeys(each for each in found if isinstance(each, torch.Generator)))


def _ignore_state(state: Mapping[str, Any]) -> None:
    """Do nothing: the loader already resumes at its position."""


def is_stateful(loader: Any) -> bool:
    """Return True if a loader can save and load its own position."""
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))
