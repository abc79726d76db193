"""Which random stream runs where: the user's code draws the same on every rank of a model group, layers their own."""

from __future__ import annotations

import ctypes
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator

from lightning_hybrid.distributed.pytree import flatten

_MASK = (1 << 64) - 1
_MT19937_BYTES = 4 * 625  # 624 words and the position among them


def derive_seed(*coordinates: int) -> int:
    """A seed that depends on every coordinate and is the same in every process and on every machine.

    Args:
        coordinates: Integers, such as (global seed, step, microbatch, data rank).

    Returns:
        An integer of 64 bits.

    Note:
        Each coordinate goes through the finalizer of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom
        number generators", 2014), so neighbouring coordinates give unrelated seeds.

    Example:
        >>> derive_seed(1, 2) == derive_seed(1, 2), derive_seed(1, 2) == derive_seed(2, 1)
        (True, False)
    """
    state = 0
    for coordinate in coordinates:
        state = (state + coordinate + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def seed_generators(seed: int, device: torch.device | None = None) -> None:
    """Seed the generators that a step may draw from: torch (CPU and ``device``), numpy and ``random``.

    Args:
        seed: An integer of up to 64 bits.
        device: The device of the model; its generator is seeded too.
    """
    # Not `torch.manual_seed`: it visits every backend and costs 150 us, a hundred times the seeding itself.
    torch.default_generator.manual_seed(seed)
    if device is not None and device.type == "cuda":
        _cuda_generator(device).manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def generator_states(device: torch.device) -> dict[str, Any]:
    """The states of the generators that :func:`seed_generators` seeds, of tensors and plain values only.

    Args:
        device: The device of the model.
    """
    version, numbers, gauss = random.getstate()
    python = torch.from_numpy(np.array(numbers, dtype=np.uint32).view(np.int32))
    states = {
        "torch": torch.default_generator.get_state(),
        "numpy": _without_arrays(np.random.get_state(legacy=False)),
        "python": [version, python, gauss],
    }
    if device.type == "cuda":
        states["cuda"] = _cuda_generator(device).get_state()
    return states


def set_generator_states(states: Mapping[str, Any], device: torch.device) -> None:
    """Put the generators into states that :func:`generator_states` gave.

    Args:
        states: The states. One of CUDA is left out on another device.
        device: The device of the model.
    """
    cuda = states.get("cuda") if device.type == "cuda" else None
    set_torch_states((states["torch"], cuda), device)
    np.random.set_state(_with_arrays(states["numpy"]))
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers.numpy().view(np.uint32).tolist()), gauss))


def torch_states(device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The states of torch's own generators, of the CPU and of ``device``; they cost a hundredth of all states."""
    cuda = _cuda_generator(device).get_state() if device.type == "cuda" else None
    return torch.default_generator.get_state(), cuda


def set_torch_states(states: tuple[torch.Tensor, torch.Tensor | None], device: torch.device) -> None:
    """Put torch's generators into states that :func:`torch_states` gave."""
    cpu, cuda = states
    torch.default_generator.set_state(cpu)
    if cuda is not None:
        _cuda_generator(device).set_state(cuda)


def _all_states(device: torch.device) -> tuple[Any, Any, Any]:
    return torch_states(device), np.random.get_state(), random.getstate()


def _set_all_states(states: tuple[Any, Any, Any], device: torch.device) -> None:
    """Put the generators into states that :func:`_all_states` gave; ``None`` leaves one of numpy or `random` alone."""
    of_torch, numpy, python = states
    set_torch_states(of_torch, device)
    if numpy is not None:
        np.random.set_state(numpy)
    if python is not None:
        random.setstate(python)


class GeneratorMarks(NamedTuple):
    """What differs after something has been drawn: hashes, as states that are kept would take 30 kB.

    Attributes:
        torch: Of torch's generators, of the CPU and of the device.
        elsewhere: Of those of numpy and `random`.
    """

    torch: tuple[int, int | None]
    elsewhere: tuple[int, int]


def generator_marks(device: torch.device) -> GeneratorMarks:
    """What differs after something has been drawn; a third of the price of the states."""
    numpy = get_bit_generator()
    # Copying this state through Python costs 40 us.
    is_usual = isinstance(numpy, np.random.MT19937)
    state = ctypes.string_at(numpy.ctypes.state_address, _MT19937_BYTES) if is_usual else repr(numpy.state)
    cuda = generator_mark(_cuda_generator(device)) if device.type == "cuda" else None
    return GeneratorMarks((generator_mark(torch.default_generator), cuda), (hash(state), hash(random.getstate())))


def generator_mark(generator: torch.Generator) -> int:
    """What differs after something has been drawn from a generator of torch."""
    return hash(generator.get_state().numpy().tobytes())


#: The types of generators that a module may have of its own.
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def generator_state(generator: Any) -> Any:
    """Return a copy of the state of a generator of one of the :data:`GENERATORS`; see :func:`equal_states`."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def equal_states(state: Any, other: Any) -> bool:
    """Return whether two results of :func:`generator_state` are equal; both may contain arrays."""
    return all(np.array_equal(one, another) for one, another in zip(flatten(state)[0], flatten(other)[0], strict=True))


def set_generator_state(generator: Any, state: Any) -> None:
    """Put a generator into a state that :func:`generator_state` returned."""
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.from_numpy(state))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def _without_arrays(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _without_arrays(value) for key, value in state.items()}
    return torch.from_numpy(state.view(np.int32).copy()) if isinstance(state, np.ndarray) else state


def _with_arrays(state: Any) -> Any:
    if isinstance(state, Mapping):
        return {key: _with_arrays(value) for key, value in state.items()}
    return state.numpy().view(np.uint32) if isinstance(state, torch.Tensor) else state


@contextmanager
def with_seed(seed: int, device: torch.device) -> Iterator[None]:
    """Inside, torch draws from another stream, on the CPU and on a device; outside, the same numbers as before.

    Args:
        seed: An integer of 64 bits.
        device: Where numbers are drawn.
    """
    saved = torch_states(device)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        _cuda_generator(device).manual_seed(seed)
    try:
        yield
    finally:
        set_torch_states(saved, device)


def peek_number() -> int:
    """The number that comes next on the CPU, which stays where it is: the same on ranks whose streams are equal."""
    saved = torch.default_generator.get_state()
    number = int(torch.randint(1 << 62, (), generator=torch.default_generator, device="cpu"))
    torch.default_generator.set_state(saved)
    return number


@contextmanager
def own_draws(rank: int, device: torch.device) -> Iterator[None]:
    """Inside, torch draws other numbers than on the other ranks of a group; outside, the same ones as before.

    The ranks of the group must come here together, with equal streams: each takes one number from its stream, and makes
    another one from that and its rank. Where nothing is drawn inside, nothing is taken from the stream either. Nothing
    else is remembered, so what is recomputed from a restored stream draws the same numbers again.

    Args:
        rank: This rank inside the group.
        device: Where numbers are drawn.
    """
    before = torch_states(device)
    number = int(torch.randint(1 << 62, (), generator=torch.default_generator, device="cpu"))
    with with_seed(derive_seed(number, rank), device):
        begin = torch_states(device)
        yield
        pairs = zip(begin, torch_states(device), strict=True)
        drew = any(one is not None and other is not None and not torch.equal(one, other) for one, other in pairs)
    if not drew:
        set_torch_states(before, device)


def _cuda_generator(device: torch.device) -> torch.Generator:
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


class RandomReplay:
    """Records what is drawn from the generators once, and replays it later, unnoticed by others.

    The states of numpy and `random` take long to restore; that is done only if something was drawn from them.

    Args:
        device: The device of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @contextmanager
    def record(self) -> Iterator[None]:
        """Around what draws."""
        states, numpy, python = _all_states(self._device)
        yield
        drew_numpy = not all(map(np.array_equal, numpy, np.random.get_state()))
        self._states = states, numpy if drew_numpy else None, python if python != random.getstate() else None

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Inside, the same numbers are drawn again; afterwards the generators are as they were before."""
        _, numpy, python = self._states
        numpy = None if numpy is None else np.random.get_state()
        outside = torch_states(self._device), numpy, None if python is None else random.getstate()
        try:
            _set_all_states(self._states, self._device)
            yield
        finally:
            _set_all_states(outside, self._device)


class RandomStreams:
    """Two streams of random numbers inside a step, and the states outside of it, which neither changes.

    ::

        outside     ----.                                              .---->  as if no step had happened
                        | isolated()                                   |
        user's code     `-- seed(step, i) --.           .-- goes on ---'       equal on every rank of the model group
                                            | layers()  |
        layers                              `-- own  ---'                      one stream per (stage, data rank)

    Seeds are derived from coordinates and no state but a count lives between steps, so a resumed run draws what the
    uninterrupted one would have drawn.

    Args:
        seed: The global seed, equal on all ranks.
        data_rank: This rank inside its data-parallel group: replicas draw different numbers.
        device: The device of the model.
    """

    def __init__(self, seed: int, data_rank: int, device: torch.device) -> None:
        self._seed = seed
        self._data_rank = data_rank
        self._device = device
        # The layers' stream of numpy is a generator of its own that takes the global one's place: copying the state
        # costs 80 us, too much for each microbatch. (A second normal number that numpy has in store gets lost.)
        self._layers_numpy = np.random.MT19937(0)
        self._numbers: Counter[str] = Counter()
        self._hooks = ExitStack()
        self._outside: list[tuple[Any, Any, Any]] = []

    def next_number(self, of: str) -> int:
        """0, 1, 2, ...: a coordinate for what has none, such as the batches of evaluations.

        Args:
            of: The name of the count.
        """
        self._numbers[of] += 1
        return self._numbers[of] - 1

    def state_dict(self) -> dict[str, Any]:
        """The seed, and the counts of :meth:`next_number`: all that has to be saved."""
        return {"seed": self._seed, "numbers": dict(self._numbers)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Draw from here on what the streams with this state would have drawn."""
        self._seed = state["seed"]
        self._numbers = Counter(state["numbers"])

    def seed_user(self, *coordinates: int) -> None:
        """Start the stream of the user's code.

        Args:
            coordinates: What the numbers depend on beside seed and data rank, such as (step, microbatch).
        """
        seed_generators(derive_seed(self._seed, self._data_rank, *coordinates), self._device)

    def of_calls(self, *coordinates: int) -> Callable[[int], None]:
        """Streams of torch's generators, one for each call of a step, whichever stages make it.

        Args:
            coordinates: As in :meth:`seed_user`.

        Returns:
            Starts the stream of the call of a number.
        """

        def seed(number: int) -> None:
            # The constant keeps calls apart from layers and the user's code.
            value = derive_seed(self._seed, self._data_rank, *coordinates, -2, number)
            torch.default_generator.manual_seed(value)
            if self._device.type == "cuda":
                _cuda_generator(self._device).manual_seed(value)

        return seed

    def begin_hooks(self, *coordinates: int) -> None:
        """What hooks draw from here on is not noticed outside, until :meth:`end_hooks`; coordinates as for the user."""
        self._hooks.enter_context(self.isolated())
        self.seed_user(*coordinates)

    def end_hooks(self) -> None:
        """Hooks are over, if any have begun."""
        self._hooks.close()

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """Nothing that is drawn or seeded inside is noticed outside."""
        self._outside.append(_all_states(self._device))
        try:
            yield
        finally:
            _set_all_states(self._outside.pop(), self._device)

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Inside, the generators are in the states that they have outside of :meth:`isolated`."""
        if not self._outside:
            yield
            return
        isolated = _all_states(self._device)
        _set_all_states(self._outside[0], self._device)
        try:
            yield
        finally:
            _set_all_states(isolated, self._device)

    @contextmanager
    def layers(self, stage: int, *coordinates: int) -> Iterator[None]:
        """The stream of a stage's layers; afterwards the user's stream goes on where it was.

        Args:
            stage: The global index of the stage.
            coordinates: As in :meth:`seed_user`.
        """
        outside = get_bit_generator()
        saved = torch_states(self._device), None, random.getstate()
        set_bit_generator(self._layers_numpy)
        # The constant keeps layers and the user's code apart where their coordinates are equal.
        seed_generators(derive_seed(self._seed, self._data_rank, *coordinates, -1, stage), self._device)
        try:
            yield
        finally:
            set_bit_generator(outside)
            _set_all_states(saved, self._device)
