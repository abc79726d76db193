"""Time of messages on links between ranks of any axis, and the times of the parts of a pipeline step.

A :class:`Link` is one number for latency and one for bandwidth: the layout search and the command `timeline` estimate
all messages with it. :class:`StepTimes` contains measured or estimated times, in the form that the simulation of a step
takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from lightning_hybrid.pipeline_parallel.schedules import Action, Placement


@dataclass(frozen=True)
class Link:
    """Link between two ranks, in one direction.

    Attributes:
        latency: The time until a message arrives, in addition to the time for its content.
        bandwidth: The amount that is sent per unit of time. The layout search uses seconds and bytes;
            :func:`equal_times` uses the forward of a rank and one message.
    """

    latency: float = 0.0
    bandwidth: float = math.inf

    def seconds(self, sent: float, hops: float) -> float:
        """Return the time to send the amount ``sent`` in ``hops`` hops."""
        return sent / self.bandwidth + hops * self.latency


@dataclass(frozen=True)
class StepTimes:
    """Times of the parts of a step, all in the same unit. Its methods are arguments of :func:`~..timeline.simulate`.

    Attributes:
        forwards: The time of the forward of one microbatch, by stage.
        backwards: The time of the backward of one microbatch, by stage.
        sends: The latency of a message between a stage and the next stage, by the first of these stages. Gradients,
            which go the other way, take the same time.
        occupations: The time for which this message occupies its link, by the first of these stages.
    """

    forwards: Sequence[float]
    backwards: Sequence[float]
    sends: Sequence[float]
    occupations: Sequence[float]

    def duration(self, action: Action) -> float:
        """Return the time of a computation."""
        return action.kind.share * (self.forwards if action.kind.is_forward else self.backwards)[action.stage]

    def send(self, message: Action) -> float:
        """Return the latency of a message, given the action that sends it."""
        return self.sends[_boundary(message)]

    def occupied(self, message: Action) -> float:
        """Return the time for which a message occupies its link, given the action that sends it."""
        return self.occupations[_boundary(message)]


def equal_times(placement: Placement, nodes: Sequence[int], inside: Link, between: Link) -> StepTimes:
    """Return the times of a step with equal stages, where a forward through a rank takes 1 and a backward 2.

    Times are multiples of this forward, and each message has the size 1.

    Args:
        placement: The rank of each stage.
        nodes: The node of each rank.
        inside: The links within a node.
        between: The links between two nodes.
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
