"""Actions of a rank, and schedules, which contain the list of actions of each rank.

Generators and passes make a :class:`Schedule` before a step. The engine, the simulator, the memory account and the
validation read it. They all ask its methods which result a computation needs and which message transfers it, so the
rules exist only here. The notation of actions, such as ``2F0``, is the notation of `torch.distributed.pipelining`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from lightning_hybrid.pipeline_parallel.schedules.kinds import COUNTERPARTS, RECEIVES, SENDS, Kind, Result
from lightning_hybrid.pipeline_parallel.schedules.placement import Placement

ChannelKey = tuple[int, int, Literal["activation", "gradient"]]
"""Key of a channel: the sender's rank, the receiver's rank, and the kind of message."""


class Action(NamedTuple):
    """One action of one stage for one microbatch.

    ::

        stage s-1               stage s                 stage s+1
            F --SEND_F--> RECV_F  F  SEND_F --> RECV_F      F
            B  RECV_B <-- SEND_B  B  RECV_B <-- SEND_B      B

    ``SEND_F`` sends the stage's output and ``RECV_F`` receives its input. ``RECV_B`` receives the gradient of its
    output and ``SEND_B`` sends the gradient of its input. A send contains the stage of the sender, and the matching
    receive contains the stage of the receiver: ``1SEND_F3`` matches ``2RECV_F3``.

    Example:
        >>> str(Action(2, Kind.F, 0)), Action.parse("1SEND_F3").stage
        ('2F0', 1)
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        """Return torch's notation, such as ``"2F0"``."""
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Parse torch's notation, such as ``"2F0"`` or ``"0RECV_B2"``.

        Raises:
            ValueError: If ``text`` is not an action.
        """
        match = _NOTATION.fullmatch(text.strip())
        if match is None:
            kinds = ", ".join(kind.value for kind in Kind)
            raise ValueError(
                f"{text!r} is not an action; write its stage, kind and microbatch, as in '2F0' (kinds: {kinds})"
            )
        stage, kind, microbatch = match.groups()
        return cls(int(stage), Kind(kind), int(microbatch))


_NOTATION = re.compile(rf"(\d+)({'|'.join(kind.value for kind in Kind)})(\d+)")


@dataclass(frozen=True)
class Schedule:
    """Actions of every pipeline rank in one step, in order.

    Attributes:
        name: The name of the generator, or ``"forward"`` for a schedule of :func:`~..schedules.build_forward`.
        placement: The rank of each stage. Consecutive stages on one rank need no messages.
        num_microbatches: The number of microbatches in one step.
        actions: ``actions[rank]`` is the list of actions of this pipeline rank. It contains only computations before
            :func:`~.passes.add_communication`.
        retired: ``retired[rank][position]`` are the sends of this rank that are proven to be received once the action
            at ``position`` has its input; empty before :func:`~.passes.prove_sends_received`.
        posts_early: True if receives have been moved before computations that their senders may wait for.
    """

    name: str
    placement: Placement
    num_microbatches: int
    actions: tuple[tuple[Action, ...], ...]
    retired: tuple[tuple[tuple[Action, ...], ...], ...] = ()
    posts_early: bool = False

    @property
    def num_ranks(self) -> int:
        """The number of pipeline ranks."""
        return self.placement.num_ranks

    @property
    def num_chunks(self) -> int:
        """The number of stages per rank."""
        return self.placement.num_chunks

    @property
    def num_stages(self) -> int:
        """The number of stages over all ranks."""
        return self.placement.num_stages

    @cached_property
    def has_backward(self) -> bool:
        """False if this is a schedule for evaluation, which computes no gradients."""
        return any(action.kind.completes_gradients for actions in self.actions for action in actions)

    @cached_property
    def _sources(self) -> dict[tuple[int, Result, int], Action]:
        """The computation of each result, by stage, result and microbatch."""
        computations = (action for actions in self.actions for action in actions if action.kind.is_compute)
        return {(each.stage, result, each.microbatch): each for each in computations for result in each.kind.results}

    def rank_of(self, stage: int) -> int:
        """Return the rank of a stage."""
        return self.placement.ranks[stage]

    def needs(self, action: Action) -> set[Action]:
        """Return the computations, on any rank, whose results a computation needs."""
        stage, kind, microbatch = action
        before = self._before(action)
        own = None if kind.needs is None else self._sources.get((stage, kind.needs, microbatch))
        other = None if before is None else self._sources.get((before, kind.results[0], microbatch))
        return {needed for needed in (own, other) if needed is not None}

    def receive_for(self, action: Action) -> Action | None:
        """Return the receive that a computation waits for; ``None`` if its rank computes all its inputs."""
        before = self._before(action)
        if before is None or self.rank_of(before) == self.rank_of(action.stage):
            return None
        return Action(action.stage, RECEIVES[action.kind.flow], action.microbatch)

    def send_for(self, action: Action) -> Action | None:
        """Return the send whose message a computation needs; ``None`` for sends, receives and other computations."""
        receive = self.receive_for(action) if action.kind.is_compute else None
        return None if receive is None else self.counterpart(receive)

    def send_of(self, action: Action) -> Action | None:
        """Return the send of the result of a computation; ``None`` if no other rank needs it."""
        after = action.stage + action.kind.flow
        if not action.kind.flow or not 0 <= after < self.num_stages:
            return None
        if self.rank_of(after) == self.rank_of(action.stage):
            return None
        return Action(action.stage, SENDS[action.kind.flow], action.microbatch)

    def computation_of(self, send: Action) -> Action:
        """Return the computation whose result a send transfers."""
        result = Result.OUTPUTS if send.kind.flow > 0 else Result.INPUT_GRADIENTS
        return self._sources[send.stage, result, send.microbatch]

    def counterpart(self, message: Action) -> Action:
        """Return the receive for a send, or the send for a receive: ``1SEND_F3`` and ``2RECV_F3``."""
        kind, step = COUNTERPARTS[message.kind]
        return Action(message.stage + step, kind, message.microbatch)

    def channel(self, message: Action) -> ChannelKey:
        """Return the channel of a send or receive: the sender's rank, the receiver's rank, and the kind of message."""
        _, step = COUNTERPARTS[message.kind]
        here, there = self.rank_of(message.stage), self.rank_of(message.stage + step)
        what: Literal["activation", "gradient"] = "activation" if message.kind.flow > 0 else "gradient"
        return (there, here, what) if message.kind.is_receive else (here, there, what)

    def waiting(self, positions: Iterable[int]) -> list[str]:
        """Return the action that each rank waits at, as text for an error message.

        Args:
            positions: The position of each rank in its list.

        Returns:
            One text for each rank that is not at the end of its list.
        """
        nexts = enumerate(zip(self.actions, positions, strict=True))
        return [f"rank {rank} waits at {actions[i]}" for rank, (actions, i) in nexts if i < len(actions)]

    def play(self, do: Callable[[int, Action], bool]) -> list[str]:
        """Advance each rank through its list, in turns, until all ranks are at the end or none can advance.

        Args:
            do: Receives a rank and its next action. Returns ``False`` if the action has to wait.

        Returns:
            One text for each rank that waits, for a deadlock error; empty if all ranks are at the end.
        """
        positions = [0] * len(self.actions)
        moved = True
        while moved:
            moved = False
            for rank, actions in enumerate(self.actions):
                while positions[rank] < len(actions) and do(rank, actions[positions[rank]]):
                    positions[rank] += 1
                    moved = True
        return self.waiting(positions)

    def _before(self, action: Action) -> int | None:
        """Return the neighboring stage that sends the input of a computation; ``None`` at the ends of the model.

        It is the previous stage for a forward, and the next stage for a backward.
        """
        assert action.kind.is_compute
        before = action.stage - action.kind.flow
        return before if action.kind.flow and 0 <= before < self.num_stages else None
