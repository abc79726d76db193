"""Random streams: the user's code draws the same numbers on every rank of a model group, layers draw their own.

`StepContext` and the step programs of `trainer` draw from :class:`RandomStreams` in each step. Tensor-parallel layers
use :func:`own_draws`, and activation checkpointing uses :class:`RandomReplay`. The other functions save, restore and
compare generators.

The global generators alone would not suffice. Ranks run different layers, so their generators would differ after the
first layer, and the user's code would then draw different numbers on each stage. Also, the numbers would depend on the
layout. Therefore each *stream* begins with a seed that is derived from *coordinates*: integers that identify a place in
the run, such as step and microbatch.
"""

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
_MT19937_BYTES = 4 * 625  # 624 words and a position


def derive_seed(*coordinates: int) -> int:
    """Return a seed that depends on every coordinate and is the same in every process and on every machine.

    Args:
        coordinates: Integers, such as (global seed, step, microbatch, data rank).

    Returns:
        A 64-bit integer.

    Note:
        Each coordinate goes through the finalizer of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom
        number generators", 2014), so neighboring coordinates give unrelated seeds.

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
    """Seed the global generators from which a step may draw: torch (CPU and ``device``), numpy and ``random``.

    Args:
        seed: An integer of up to 64 bits.
        device: The device of the model, whose generator is seeded too; ``None`` for the CPU alone.
    """
    # `torch.manual_seed` visits every backend, which takes 150 us, a hundred times as long as seeding.
    torch.default_generator.manual_seed(seed)
    if device is not None and device.type == "cuda":
        _cuda_generator(device).manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def generator_states(device: torch.device) -> dict[str, Any]:
    """Return the states of the generators that :func:`seed_generators` seeds, as tensors and plain values.

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
    """Restore states that :func:`generator_states` returned.

    Args:
        states: The states. The state of CUDA is ignored on another device.
        device: The device of the model.
    """
    cuda = states.get("cuda") if device.type == "cuda" else None
    set_torch_states((states["torch"], cuda), device)
    np.random.set_state(_with_arrays(states["numpy"]))
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers.numpy().view(np.uint32).tolist()), gauss))


def torch_states(device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the states of torch's default generators, of the CPU and of ``device``.

    This takes a hundredth of the time of :func:`generator_states`.
    """
    cuda = _cuda_generator(device).get_state() if device.type == "cuda" else None
    return torch.default_generator.get_state(), cuda


def set_torch_states(states: tuple[torch.Tensor, torch.Tensor | None], device: torch.device) -> None:
    """Restore states that :func:`torch_states` returned."""
    cpu, cuda = states
    torch.default_generator.set_state(cpu)
    if cuda is not None:
        _cuda_generator(device).set_state(cuda)


def _all_states(device: torch.device) -> tuple[Any, Any, Any]:
    return torch_states(device), np.random.get_state(), random.getstate()


def _set_all_states(states: tuple[Any, Any, Any], device: torch.device) -> None:
    """Restore states that :func:`_all_states` returned; if a state of numpy or `random` is ``None``, skip it."""
    of_torch, numpy, python = states
    set_torch_states(of_torch, device)
    if numpy is not None:
        np.random.set_state(numpy)
    if python is not None:
        random.setstate(python)


class GeneratorMarks(NamedTuple):
    """Hashes of generator states, which change when a number is drawn. The states themselves would take 30 kB.

    Attributes:
        torch: The hashes for torch's generators, of the CPU and of the device.
        elsewhere: The hashes for numpy and `random`.
    """

    torch: tuple[int, int | None]
    elsewhere: tuple[int, int]


def generator_marks(device: torch.device) -> GeneratorMarks:
    """Return hashes that change when a number is drawn. This takes a third of the time of the states.

    Args:
        device: The device of the model.
    """
    numpy = get_bit_generator()
    # Copying the state in Python would take 40 us.
    is_usual = isinstance(numpy, np.random.MT19937)
    state = ctypes.string_at(numpy.ctypes.state_address, _MT19937_BYTES) if is_usual else repr(numpy.state)
    cuda = generator_mark(_cuda_generator(device)) if device.type == "cuda" else None
    return GeneratorMarks((generator_mark(torch.default_generator), cuda), (hash(state), hash(random.getstate())))


def generator_mark(generator: torch.Generator) -> int:
    """Return a hash that changes when a number is drawn from a generator of torch."""
    return hash(generator.get_state().numpy().tobytes())


#: The types of generators that a module may own.
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def generator_state(generator: Any) -> Any:
    """Return a copy of the state of one of the user's :data:`GENERATORS`. Compare states by :func:`equal_states`."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def equal_states(state: Any, other: Any) -> bool:
    """Return True if two results of :func:`generator_state` are equal. Both may contain arrays."""
    return all(np.array_equal(one, another) for one, another in zip(flatten(state)[0], flatten(other)[0], strict=True))


def set_generator_state(generator: Any, state: Any) -> None:
    """Restore the state of a generator that :func:`generator_state` returned."""
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
    """Draw from another stream of torch's generators while entered; restore their states on exit.

    Args:
        seed: A 64-bit integer.
        device: The device whose generator is seeded, in addition to the CPU's.
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
    """Return the next random number of the CPU generator without advancing the generator.

    Ranks whose generators have equal states get the same number.
    """
    saved = torch.default_generator.get_state()
    number = int(torch.randint(1 << 62, (), generator=torch.default_generator, device="cpu"))
    torch.default_generator.set_state(saved)
    return number


@contextmanager
def own_draws(rank: int, device: torch.device) -> Iterator[None]:
    """Draw different numbers on each rank of a group while entered, from torch's generators.

    All ranks of the group must enter this together, with equal generator states. Each rank draws one number, and
    derives its seed from this number and its rank. Outside, all ranks keep drawing the same numbers. If code inside
    draws nothing, the generators are unchanged on exit. No other state exists, so a recomputation with restored
    generators draws the same numbers again.

    Args:
        rank: This rank in the group.
        device: The device whose generator is used, in addition to the CPU's.
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
    """A recording of the generator states before some code, so that the code can draw the same numbers again later.

    Activation checkpointing records the forward of a layer, and replays it for the recomputation. Restoring the states
    of numpy and `random` is slow, so they are restored only if they were used.

    Args:
        device: The device of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @contextmanager
    def record(self) -> Iterator[None]:
        """Store the states on entry, and record on exit which generators were used. An exception stores nothing."""
        states, numpy, python = _all_states(self._device)
        yield
        drew_numpy = not all(map(np.array_equal, numpy, np.random.get_state()))
        self._states = states, numpy if drew_numpy else None, python if python != random.getstate() else None

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Draw the recorded numbers again while entered; restore the generators on exit. Call :meth:`record` before."""
        _, numpy, python = self._states
        numpy = None if numpy is None else np.random.get_state()
        outside = torch_states(self._device), numpy, None if python is None else random.getstate()
        try:
            _set_all_states(self._states, self._device)
            yield
        finally:
            _set_all_states(outside, self._device)


class RandomStreams:
    """Two streams of random numbers inside a step. They do not change the states of the generators outside of the step.

    ::

        outside     ----.                                              .---->  as if no step had happened
                        | isolated()                                   |
        user's code     `-- seed(step, i) --.           .-- continues -'       equal on every rank of the model group
                                            | layers()  |
        layers                              `-- own  ---'                      one stream per call and data rank

    Seeds are derived from coordinates. Only the seed and counters are kept between steps, so a resumed run draws the
    same numbers as an uninterrupted one. Tensor-parallel and context-parallel ranks draw equal numbers in layers too;
    code of these layers makes them different where necessary.

    Args:
        seed: The global seed, the same on all ranks.
        data_rank: The data rank of this rank. Replicas draw different numbers.
        device: The device of the model.
    """

    def __init__(self, seed: int, data_rank: int, device: torch.device) -> None:
        self._seed = seed
        self._data_rank = data_rank
        self._device = device
        # For layers, this generator replaces the global generator of numpy, because copying a state for each microbatch
        # would take 80 us. (A second normal number that numpy has cached is lost.)
        self._layers_numpy = np.random.MT19937(0)
        self._numbers: Counter[str] = Counter()
        self._hooks = ExitStack()
        self._outside: list[tuple[Any, Any, Any]] = []

    def next_number(self, of: str) -> int:
        """Return the next number of a counter: 0, 1, 2, ...

        Events without a number of their own, such as evaluation batches, use it as a coordinate.

        Args:
            of: The name of the counter.
        """
        self._numbers[of] += 1
        return self._numbers[of] - 1

    def state_dict(self) -> dict[str, Any]:
        """Return the seed and the counters of :meth:`next_number`."""
        return {"seed": self._seed, "numbers": dict(self._numbers)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a seed and counters, so that the same numbers are drawn as with the streams that returned them."""
        self._seed = state["seed"]
        self._numbers = Counter(state["numbers"])

    def seed_user(self, *coordinates: int) -> None:
        """Start the stream of the user's code.

        Args:
            coordinates: The coordinates of the seed in addition to seed and data rank, such as (step, microbatch).
        """
        seed_generators(derive_seed(self._seed, self._data_rank, *coordinates), self._device)

    def of_calls(self, *coordinates: int) -> Callable[[int], None]:
        """Return a function that starts the stream of one call in a step, for torch's generators.

        The stream does not depend on the stage that makes the call.

        Args:
            coordinates: The coordinates of the step, as in :meth:`seed_user`.

        Returns:
            A function of the number of the call.
        """

        def seed(number: int) -> None:
            # The constant separates these seeds from the seeds of layers and of the user's code.
            value = derive_seed(self._seed, self._data_rank, *coordinates, -2, number)
            torch.default_generator.manual_seed(value)
            if self._device.type == "cuda":
                _cuda_generator(self._device).manual_seed(value)

        return seed

    def begin_hooks(self, *coordinates: int) -> None:
        """Seed the user's stream for hooks, and restore the states outside in :meth:`end_hooks`.

        Args:
            coordinates: The coordinates of the hooks, as in :meth:`seed_user`.
        """
        self._hooks.enter_context(self.isolated())
        self.seed_user(*coordinates)

    def end_hooks(self) -> None:
        """Restore the states from before :meth:`begin_hooks`, if it was called."""
        self._hooks.close()

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """Restore the states of all generators on exit."""
        self._outside.append(_all_states(self._device))
        try:
            yield
        finally:
            _set_all_states(self._outside.pop(), self._device)

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Give the generators the states that they have outside of :meth:`isolated` while entered."""
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
        """Draw from the stream of a call of layers while entered; continue the user's stream on exit.

        Args:
            stage: The global index of the stage; 0 if the coordinates identify the called layer, so that the numbers
                do not depend on the layout.
            coordinates: The other coordinates of the call, as in :meth:`seed_user`.
        """
        outside = get_bit_generator()
        saved = torch_states(self._device), None, random.getstate()
        set_bit_generator(self._layers_numpy)
        # The constant separates these seeds from the seeds of the user's code with equal coordinates.
        seed_generators(derive_seed(self._seed, self._data_rank, *coordinates, -1, stage), self._device)
        try:
            yield
        finally:
            set_bit_generator(outside)
            _set_all_states(saved, self._device)
