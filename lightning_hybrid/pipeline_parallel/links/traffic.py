"""Traffic between nodes: the bytes that a step sends, and the order of the axes that sends the fewest.

An axis is one kind of parallelism: data, tensor, pipeline or context. Their order, the argument `launch.rank_order`,
decides which ranks are on the same node, and so which messages go over the slow links between nodes. `TrainingStep`
counts the bytes of one step with :class:`TrafficWatch` and warns if another order would send less. The command `plan`
calls the functions with estimated bytes. Bytes are counted and not only estimated, because they depend on the user's
step.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from rich import filesize

from lightning_hybrid.axes import LAYERS, SAMPLES, WEIGHTS, Role, Sizes
from lightning_hybrid.distributed.agreement import all_gather_values
from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.distributed.process_group import has_nccl
from lightning_hybrid.distributed.watch.flight_recorder import read_bytes
from lightning_hybrid.pipeline_parallel.engine import Engine

_COUNTED = 4  # number of the optimizer step whose bytes are counted
_WORTH = 0.8  # another order is recommended if it sends at most this fraction of the bytes


@dataclass(frozen=True)
class Traffic:
    """Bytes that an optimizer step sends.

    Attributes:
        data: The bytes that a rank sends to the next rank in the ring of its stage's replicas, or of its zero group.
        tensor: The bytes that a rank sends to the next rank in the ring of its tensor-parallel group.
        pipeline: The bytes that two neighboring pipeline ranks send to each other, by the first of these ranks.
        rows: The bytes that a rank sends to the next rank in the ring of the replicas with equal ZeRO shards.
        zero_size: The number of replicas in a zero group; ``None`` if `data` is sent in a ring of all replicas.
    """

    data: float = 0.0
    tensor: float = 0.0
    pipeline: Mapping[int, float] = field(default_factory=dict)
    rows: float = 0.0
    zero_size: int | None = None


def bytes_between_nodes(sizes: Sizes, rank_order: str, nodes: Sequence[Any], traffic: Traffic) -> tuple[float, float]:
    """Compute the bytes that all ranks together send between nodes in a step.

    Args:
        sizes: The number of ranks along each axis.
        rank_order: The axes from the outermost to the innermost, joined by ``-``.
        nodes: The node of each global rank.
        traffic: The bytes that ranks send to each other.

    Returns:
        The number of bytes, without messages of context parallelism, and the part of it that is due to tensor
        parallelism.
    """

    def crossing(ring: Sequence[int], sent: Sequence[float]) -> float:
        following = zip(ring, [*ring[1:], ring[0]], sent, strict=True)
        return sum(num_bytes for rank, after, num_bytes in following if nodes[rank] != nodes[after])

    total = of_sums = 0.0  # messages of context parallelism are not counted yet
    for ring in _rings(sizes, rank_order, LAYERS):
        total += crossing(ring, [traffic.pipeline.get(at, 0.0) for at in range(len(ring))])
    for ring in _rings(sizes, rank_order, WEIGHTS):
        of_sums += crossing(ring, [traffic.tensor] * len(ring))
    for ring in _rings(sizes, rank_order, SAMPLES):
        size = traffic.zero_size or len(ring)
        for first in range(0, len(ring), size):
            total += crossing(ring[first : first + size], [traffic.data] * size)
        for first in range(size):
            total += crossing(ring[first::size], [traffic.rows] * (len(ring) // size))
    return total + of_sums, of_sums


def _rings(sizes: Sizes, rank_order: str, role: Role) -> list[list[int]]:
    """Return the groups of ranks along all axes of a role; each lists its ranks in ascending order.

    Args:
        sizes: See :func:`bytes_between_nodes`.
        rank_order: See :func:`bytes_between_nodes`.
        role: The role.
    """
    steps = [(sizes.stride(axis, rank_order), sizes.along(axis), axis.role is role) for axis in sizes.axes]
    firsts, inside = [0], [0]  # the first rank of each ring, and the distances of its ranks from the first one
    for stride, size, is_along in sorted(steps, reverse=True):
        distances = inside if is_along else firsts
        distances[:] = [start + at * stride for start in distances for at in range(size)]
    return [[first + distance for distance in inside] for first in firsts]


def least_bytes(sizes: Sizes, rank_order: str, nodes: Sequence[Any], traffic: Traffic) -> tuple[str, float]:
    """Find the order of axes with which the fewest bytes are sent between nodes.

    Args:
        sizes: See :func:`bytes_between_nodes`.
        rank_order: The current order.
        nodes: See :func:`bytes_between_nodes`.
        traffic: See :func:`bytes_between_nodes`.

    Returns:
        The order and its number of bytes; the current order if no other order sends fewer bytes.
    """
    axes = sorted(sizes.axes, key=lambda axis: axis.role is not LAYERS)  # pipeline first: it wins among equal orders
    orders = ["-".join(axis.key for axis in order) for order in itertools.permutations(axes)]
    found = {order: bytes_between_nodes(sizes, order, nodes, traffic)[0] for order in (rank_order, *orders)}
    best = min(found, key=lambda order: found[order])
    return best, found[best]


def traffic_text(sizes: Sizes, rank_order: str, nodes: Sequence[Any], traffic: Traffic) -> str | None:
    """Return the warning that tensor-parallel groups span several nodes, or that another order would send less.

    Args:
        sizes: See :func:`bytes_between_nodes`.
        rank_order: See :func:`bytes_between_nodes`.
        nodes: See :func:`bytes_between_nodes`.
        traffic: See :func:`bytes_between_nodes`.

    Returns:
        The warning, with the bytes for the current and for the best order; ``None`` if neither is the case.
    """
    total, of_sums = bytes_between_nodes(sizes, rank_order, nodes, traffic)
    best, least = least_bytes(sizes, rank_order, nodes, traffic)
    is_worth = least <= _WORTH * total and total > 0
    if not (of_sums or is_worth):
        return None
    sums = f" (including {filesize.decimal(int(of_sums))} for sums over tensor-parallel groups)" if of_sums else ""
    text = f"With launch.rank_order={rank_order!r}, a step sends {filesize.decimal(int(total))} between nodes{sums}."
    if is_worth:
        return f"{text} Set launch.rank_order={best!r}, which sends {filesize.decimal(int(least))}."
    return (
        f"{text} With the best order, a step sends {filesize.decimal(int(least))}. To send less, set"
        " tensor_parallel_size to a divisor of the number of ranks per node."
    )


class TrafficWatch:
    """Counter of the bytes sent between nodes in the fourth optimizer step, which warns if another order sends less.

    By the fourth step, the delays of links have usually been measured (:class:`~.step_schedules.StepSchedules`), so
    these messages are not counted. Counting adds no work to a step: torch records the collectives of gloo anyway, and
    channels count their bytes. If torch does not record them, and with NCCL, no warning is printed;
    ``lightning-hybrid plan`` estimates the bytes in these cases.

    Args:
        mesh: The ranks.
        engine: The engine, whose channels count their bytes.
        rank_order: The order of the axes in the numbering of ranks.

    Attributes:
        is_counting: True until the bytes have been counted; always False with NCCL, on a single node, and if no other
            order could send less.
    """

    def __init__(self, mesh: Mesh, engine: Engine, rank_order: str) -> None:
        self._mesh, self._engine, self._rank_order = mesh, engine, rank_order
        sizes = mesh.num_replicas, mesh.sizes.pipeline
        is_told = not any(map(has_nccl, (mesh.data_group, mesh.tensor_group)))  # NCCL has a recorder of its own
        several = len(set(mesh.hosts)) > 1 and (mesh.sizes.tensor > 1 or min(sizes) > 1)
        self.is_counting = several and is_told
        self._num_steps = self._last = 0
        self._before: dict[int, int] = {}

    def begin_step(self) -> str | None:
        """Count an optimizer step whose first batch is about to run.

        Every rank must call this while `is_counting` is True, because the fifth call gathers the bytes of all ranks.

        Returns:
            The warning, at the fifth step and on every rank; ``None`` without a warning.
        """
        self._num_steps += 1
        if self._num_steps == _COUNTED:
            self._last, self._before = read_bytes()[1], self._sent()
        if self._num_steps <= _COUNTED:
            return None
        self.is_counting = False
        found = all_gather_values(self._measured(), self._mesh.decision_group)
        if any(each is None for each in found):
            return None
        return traffic_text(self._mesh.sizes, self._rank_order, self._mesh.hosts, most_traffic(found))

    def _sent(self) -> dict[int, int]:
        """Return the bytes that this rank has sent to its neighbors so far, by the first rank of the link."""
        sent: dict[int, int] = {}
        for (sender, receiver, kind), channel in self._engine.channels.items():
            if sender == self._mesh.pipeline_rank:
                link = sender if kind == "activation" else receiver
                sent[link] = sent.get(link, 0) + channel.num_bytes
        return sent

    def _measured(self) -> tuple[int, Traffic] | None:
        """Return this pipeline rank and the bytes that it has sent since the fourth step began.

        Returns:
            The rank and its traffic; ``None`` if torch has not recorded the collectives.
        """
        collectives, last = read_bytes(self._last)
        if last == self._last:
            return None

        def in_ring(group: dist.ProcessGroup) -> float:
            return (group.size() - 1) / group.size() * collectives.get(group.group_name, 0.0)

        mesh = self._mesh
        sent = {link: sent - self._before.get(link, 0) for link, sent in self._sent().items()}
        rows = in_ring(mesh.zero.rows_group) if mesh.zero.rows_group_size > 1 else 0.0
        of_groups = in_ring(mesh.zero.group), in_ring(mesh.tensor_group)
        return mesh.pipeline_rank, Traffic(*of_groups, sent, rows, mesh.zero.size)


def most_traffic(found: Sequence[tuple[int, Traffic]]) -> Traffic:
    """Return the maximum traffic over all replicas. The bytes that the two ranks of a link send are added.

    Args:
        found: The pipeline rank of each rank, and the bytes that it has sent.
    """
    of_ranks: dict[tuple[int, int], float] = {}  # by pipeline rank and link
    for rank, traffic in found:
        for link, sent in traffic.pipeline.items():
            of_ranks[rank, link] = max(sent, of_ranks.get((rank, link), 0.0))
    pipeline: dict[int, float] = {}
    for (_, link), sent in of_ranks.items():
        pipeline[link] = pipeline.get(link, 0.0) + sent
    traffics = [traffic for _, traffic in found]
    data, tensor, rows = (max(getattr(each, name) for each in traffics) for name in ("data", "tensor", "rows"))
    return Traffic(data, tensor, pipeline, rows, traffics[0].zero_size)
