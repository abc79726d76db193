"""How long messages take between neighbouring ranks of a pipeline, measured on the channels that they go through."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.pipeline_parallel.p2p import Channel
from lightning_hybrid.pipeline_parallel.schedules import ChannelKey, Placement

Link = tuple[int, int]
"""A link between two pipeline ranks: the rank that sends activations, and the rank that receives them."""

_ROUNDS = 4  # there and back, of which the quickest counts; the first one, which tells the form, does not


@dataclass(frozen=True)
class Delay:
    """Of a message, in one direction.

    Attributes:
        latency: Seconds until a small one is there.
        occupied: Seconds more that the largest message of a step takes, which are those of its bytes.
    """

    latency: float
    occupied: float


def far_links(mesh: Mesh, placement: Placement) -> list[Link]:
    """Return the links between pipeline ranks that are on different nodes, in any replica.

    Within a node a message arrives as soon as a rank has sent it.

    Args:
        mesh: The ranks.
        placement: The rank of each stage.
    """
    return [(here, there) for here, there in placement.hops if mesh.spans_machines(here, there)]


def measure_delays(
    channels: Mapping[ChannelKey, Channel], rank: int, links: Sequence[Link], device: torch.device
) -> dict[Link, Delay]:
    """Send a few messages over links and back again, link by link; all ranks of a pipeline do it at the same time.

    Between steps, when nothing else goes through the channels.

    Args:
        channels: Of this rank; the largest message of a step has gone through them.
        rank: This pipeline rank.
        links: The links that are measured.
        device: Where messages live.

    Returns:
        The delays of the links on which this rank sends activations.
    """
    found: dict[Link, Delay] = {}
    for link in links:
        if rank not in link:
            continue
        sender, receiver = link
        out, home = channels[sender, receiver, "activation"], channels[receiver, sender, "gradient"]
        size = max(1, out.largest_message)  # both ends know the forms of what has gone through it
        small, large = (_there_and_back(out, home, number, device, begins=rank == sender) for number in (1, size))
        if rank == sender:
            found[link] = Delay(small / 2, max(0.0, large - small) / 2)
    return found


def _there_and_back(out: Channel, home: Channel, size: int, device: torch.device, *, begins: bool) -> float:
    """Seconds that so many bytes take from one end to the other and back, the quickest time."""
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
