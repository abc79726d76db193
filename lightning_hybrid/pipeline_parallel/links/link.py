"""What links between ranks take: of one, and of those that the messages of a step go over."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_hybrid.pipeline_parallel.schedules import Action, Kind


@dataclass(frozen=True)
class Link:
    """Between two ranks, in one direction.

    Attributes:
        latency: Seconds until a message arrives, beside those that its bytes take.
        bandwidth: Bytes in a second.
    """

    latency: float = 0.0
    bandwidth: float = math.inf

    def seconds(self, sent: float, hops: float) -> float:
        """How long it takes to send so many bytes in so many hops."""
        return sent / self.bandwidth + hops * self.latency


@dataclass(frozen=True)
class StepTimes:
    """What the parts of a step take, in one unit of time; the arguments of :func:`~..timeline.simulate`.

    Attributes:
        forwards: Of one microbatch, by stage.
        backwards: Likewise.
        sends: Delays of a message between a stage and the next one, by the first of the two.
        occupations: How long such a message keeps its link from the next one, likewise.
    """

    forwards: Sequence[float]
    backwards: Sequence[float]
    sends: Sequence[float]
    occupations: Sequence[float]

    def duration(self, action: Action) -> float:
        """Of a forward or a backward."""
        return (self.forwards if action.kind is Kind.F else self.backwards)[action.stage]

    def send(self, message: Action) -> float:
        """The delay of a message, by the action that sends it."""
        return self.sends[_boundary(message)]

    def occupied(self, message: Action) -> float:
        """How long a message keeps its link."""
        return self.occupations[_boundary(message)]


def equal_times(num_stages: int, num_ranks: int, nodes: Sequence[int], inside: Link, between: Link) -> StepTimes:
    """Of equal stages, whose messages are of one unit; a forward through all of a rank takes 1, a backward 2.

    Args:
        num_stages: Over all ranks.
        num_ranks: Of the pipeline.
        nodes: The node of each rank.
        inside: The links inside of a node.
        between: Those between two nodes.
    """
    of_stage = num_ranks / num_stages
    ends = ((nodes[stage % num_ranks], nodes[(stage + 1) % num_ranks]) for stage in range(num_stages - 1))
    links = [inside if here == there else between for here, there in ends]
    return StepTimes(
        [of_stage] * num_stages,
        [2 * of_stage] * num_stages,
        [link.latency for link in links],
        [1 / link.bandwidth for link in links],
    )


def _boundary(message: Action) -> int:
    """The first of the two stages between which a message is sent."""
    return message.stage if message.kind is Kind.SEND_F else message.stage - 1
