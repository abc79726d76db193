"""What links between ranks take: of one, and of those that the messages of a step go over."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from lightning_hybrid.pipeline_parallel.schedules import Action, Placement


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
        """Return the time of a computation."""
        return action.kind.share * (self.forwards if action.kind.is_forward else self.backwards)[action.stage]

    def send(self, message: Action) -> float:
        """The delay of a message, by the action that sends it."""
        return self.sends[_boundary(message)]

    def occupied(self, message: Action) -> float:
        """How long a message keeps its link."""
        return self.occupations[_boundary(message)]


def equal_times(placement: Placement, nodes: Sequence[int], inside: Link, between: Link) -> StepTimes:
    """Return the times of equal stages and messages of one unit: 1 for a forward through a rank, 2 for a backward.

    Args:
        placement: The rank of each stage.
        nodes: The node of each rank.
        inside: The links inside of a node.
        between: Those between two nodes.
    """
    of_stage = 1 / placement.num_chunks
    of_stages = [nodes[rank] for rank in placement.ranks]
    links = [inside if here == there else between for here, there in pairwise(of_stages)]
    return StepTimes(
        [of_stage] * placement.num_stages,
        [2 * of_stage] * placement.num_stages,
        [link.latency for link in links],
        [1 / link.bandwidth for link in links],
    )


def _boundary(message: Action) -> int:
    """Return the first of the two stages between which a message is sent."""
    return min(message.stage, message.stage + message.kind.flow)
