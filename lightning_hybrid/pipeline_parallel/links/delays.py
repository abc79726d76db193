"""Message times between neighboring pipeline ranks, measured on the channels that training uses.

:class:`~.step_schedules.StepSchedules` measures once in a run, usually before the fourth training step, and only links
between nodes. The messages of a training step do not show the delay of a link, because their times contain the time for
which the receiver or the sender is busy.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.pipeline_parallel.p2p import Channel
from lightning_hybrid.pipeline_parallel.schedules import ChannelKey, Placement

RankPair = tuple[int, int]
"""A pair of pipeline ranks: the rank that sends activations, and the rank that receives them."""

_ROUNDS = 4  # timed round trips, of which the fastest counts; an extra first one, which sends the meta, is not timed


@dataclass(frozen=True)
class Delay:
    """Time of a message on a link, in one direction.

    Attributes:
        latency: The time until a message of one byte arrives, in seconds.
        occupied: The additional time of the largest message of a step, in seconds, which is due to its size. For so
            long, the link is occupied.
    """

    latency: float
    occupied: float


def far_links(mesh: Mesh, placement: Placement) -> list[RankPair]:
    """Return the links between pipeline ranks that are on different nodes, in any replica.

    Links within a node need no measurement, because a message arrives as soon as a rank has sent it.

    Args:
        mesh: The ranks.
        placement: The rank of each stage.
    """
    return [(here, there) for here, there in placement.hops if mesh.spans_machines(here, there)]


def measure_delays(
    channels: Mapping[ChannelKey, Channel], rank: int, links: Sequence[RankPair], device: torch.device
) -> dict[RankPair, Delay]:
    """Measure the time of messages on links, one link after the other.

    All ranks of a pipeline must call this with equal `links`, between steps, when the channels are not in use. Messages
    are sent to the other rank and back; the channels count them and remember their formats.

    Args:
        channels: The channels of this rank. The largest message of a step must have been sent through them.
        rank: This pipeline rank.
        links: The links to measure.
        device: The device of the messages.

    Returns:
        The delays of the links on which this rank sends activations.
    """
    found: dict[RankPair, Delay] = {}
    for link in links:
        if rank not in link:
            continue
        sender, receiver = link
        out, home = channels[sender, receiver, "activation"], channels[receiver, sender, "gradient"]
        size = max(1, out.largest_message)  # both ranks know the sizes of the messages sent so far
        small, large = (_there_and_back(out, home, number, device, begins=rank == sender) for number in (1, size))
        if rank == sender:
            found[link] = Delay(small / 2, max(0.0, large - small) / 2)
    return found


def _there_and_back(out: Channel, home: Channel, size: int, device: torch.device, *, begins: bool) -> float:
    """Return the shortest round-trip time of a message, in seconds.

    Args:
        out: The channel from the first to the second rank.
        home: The channel back.
        size: The size of the message in bytes.
        device: The device of the message.
        begins: True on the first rank, which begins each round.
    """
    payload, key = [torch.zeros(size, dtype=torch.uint8, device=device)], ("delay", size)
    times = []
    for _ in range(1 + _ROUNDS):
        begin = time.perf_counter()
        if begins:
            sent, received = out.send(key, payload, None), home.post(key)
            received.wait()
        else:
            out.post(key).wait()
            sent = home.send(key, payload, None)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        sent.wait()
        times.append(time.perf_counter() - begin)
    return min(times[1:])
