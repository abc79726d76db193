"""What a rank does next: one action, and the lists of actions that make a schedule."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

ChannelKey = tuple[int, int, Literal["activation", "gradient"]]
"""Sender rank, receiver rank, and the kind of message."""


class Kind(enum.Enum):
    """What an action does; the values are the letters of torch's notation."""

    F = "F"
    B = "B"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"

    __hash__ = object.__hash__  # schedules of thousands of actions are looked up by it

    def __init__(self, letters: str) -> None:
        self.is_send: bool = letters.startswith("SEND")
        self.is_receive: bool = letters.startswith("RECV")  # it posts the receive, and does not wait for the message
        self.is_compute: bool = not (self.is_send or self.is_receive)


class Action(NamedTuple):
    """One thing that one stage does with one microbatch.

    ::

        stage s-1               stage s                 stage s+1
            F --SEND_F--> RECV_F  F  SEND_F --> RECV_F      F
            B  RECV_B <-- SEND_B  B  RECV_B <-- SEND_B      B

    ``SEND_F`` sends the stage's output and ``RECV_F`` receives its input; ``RECV_B`` receives the gradient of its
    output and ``SEND_B`` sends the gradient of its input. A send names the stage of the sender and the receive that it
    meets the stage of the receiver: ``1SEND_F3`` meets ``2RECV_F3``.

    Example:
        >>> str(Action(2, Kind.F, 0)), Action.parse("1SEND_F3").stage
        ('2F0', 1)
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        """In torch's notation, such as ``"2F0"``."""
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read torch's notation, such as ``"2F0"`` or ``"0RECV_B2"``.

        Raises:
            ValueError: If ``text`` is not an action.
        """
        match = _NOTATION.fullmatch(text.strip())
        if match is None:
            kinds = ", ".join(kind.value for kind in Kind)
            raise ValueError(
                f"{text!r} is not an action; write stage, kind and microbatch, as in '2F0' (kinds: {kinds})"
            )
        stage, kind, microbatch = match.groups()
        return cls(int(stage), Kind(kind), int(microbatch))


_NOTATION = re.compile(rf"(\d+)({'|'.join(kind.value for kind in Kind)})(\d+)")


@dataclass(frozen=True)
class Schedule:
    """What every rank does in one step, in order.

    Stage ``s`` lives on rank ``s % num_ranks`` as its chunk ``s // num_ranks``. Neighbouring stages on one rank need no
    messages.

    Attributes:
        name: The generator that made it.
        num_ranks: Number of pipeline ranks.
        num_chunks: Stages per rank.
        num_microbatches: Microbatches in one step.
        actions: ``actions[rank]`` is that rank's list.
        retired: ``retired[rank][position]`` are this rank's own sends that are proven received once the action at
            ``position`` has its input; empty before :func:`~.passes.prove_sends_received`.
        posts_early: Whether receives have been moved in front of computations that their senders may wait for.
    """

    name: str
    num_ranks: int
    num_chunks: int
    num_microbatches: int
    actions: tuple[tuple[Action, ...], ...]
    retired: tuple[tuple[tuple[Action, ...], ...], ...] = ()
    posts_early: bool = False

    @property
    def num_stages(self) -> int:
        """Number of stages over all ranks."""
        return self.num_ranks * self.num_chunks

    @cached_property
    def has_backward(self) -> bool:
        """Whether gradients flow back; ``False`` for the schedules of evaluation."""
        return any(action.kind is Kind.B for actions in self.actions for action in actions)

    def rank_of(self, stage: int) -> int:
        """The rank that owns ``stage``."""
        return stage % self.num_ranks

    def needs(self, action: Action) -> set[Action]:
        """The computations, on any rank, whose results the computation ``action`` works on."""
        own = Action(action.stage, Kind.F, action.microbatch) if action.kind is Kind.B else None
        return {needed for needed in (own, self._neighbour(action)) if needed is not None}

    def receive_for(self, action: Action) -> Action | None:
        """The receive that the computation ``action`` waits for; ``None`` if all that it needs is made on its rank."""
        is_forward = action.kind is Kind.F
        if self.num_ranks == 1 or action.stage == (0 if is_forward else self.num_stages - 1):
            return None
        return Action(action.stage, Kind.RECV_F if is_forward else Kind.RECV_B, action.microbatch)

    def send_for(self, action: Action) -> Action | None:
        """The send whose message ``action`` works on; ``None`` if it is no computation, or needs no message."""
        receive = self.receive_for(action) if action.kind.is_compute else None
        return None if receive is None else self.counterpart(receive)

    def send_of(self, action: Action) -> Action | None:
        """The send that passes on the result of the computation ``action``, or ``None`` if no other rank needs it."""
        is_forward = action.kind is Kind.F
        if self.num_ranks == 1 or action.stage == (self.num_stages - 1 if is_forward else 0):
            return None
        return Action(action.stage, Kind.SEND_F if is_forward else Kind.SEND_B, action.microbatch)

    def counterpart(self, message: Action) -> Action:
        """The receive that meets a send, and the send that meets a receive: ``1SEND_F3`` and ``2RECV_F3``."""
        kind, step = _COUNTERPARTS[message.kind]
        return Action(message.stage + step, kind, message.microbatch)

    def channel(self, message: Action) -> ChannelKey:
        """The channel over which a send or a receive goes: sender rank, receiver rank, and what travels."""
        kind, step = _COUNTERPARTS[message.kind]
        here, there = self.rank_of(message.stage), self.rank_of(message.stage + step)
        what: Literal["activation", "gradient"] = "activation" if Kind.SEND_F in (kind, message.kind) else "gradient"
        return (there, here, what) if message.kind.is_receive else (here, there, what)

    def waiting(self, positions: Iterable[int]) -> list[str]:
        """Who waits where if each rank has come to this position of its list; empty if all are at the end."""
        nexts = enumerate(zip(self.actions, positions, strict=True))
        return [f"rank {rank} waits at {actions[i]}" for rank, (actions, i) in nexts if i < len(actions)]

    def play(self, do: Callable[[int, Action], bool]) -> list[str]:
        """Let each rank go through its list as far as it can, in turns, until all are at the end or none can move.

        Args:
            do: Gets a rank and its next action; returns ``False`` if the action has to wait.

        Returns:
            Who waits where, for the message of a deadlock; empty if all ranks got to the end.
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

    def _neighbour(self, action: Action) -> Action | None:
        """The computation of the stage before (``F``) or after (``B``) whose result ``action`` works on."""
        assert action.kind.is_compute
        stage = action.stage - 1 if action.kind is Kind.F else action.stage + 1
        return Action(stage, action.kind, action.microbatch) if 0 <= stage < self.num_stages else None


_COUNTERPARTS = {
    Kind.SEND_F: (Kind.RECV_F, 1),
    Kind.RECV_F: (Kind.SEND_F, -1),
    Kind.SEND_B: (Kind.RECV_B, -1),
    Kind.RECV_B: (Kind.SEND_B, 1),
}
