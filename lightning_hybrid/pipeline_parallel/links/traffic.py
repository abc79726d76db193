"""What a step sends over the links between machines: by how ranks are numbered, and by what it has sent."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich import filesize

from lightning_hybrid.axes import AXES, DATA, LAYERS, PIPELINE, TENSOR, Sizes
from lightning_hybrid.distributed.agreement import all_gather_values
from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.distributed.process_group import has_nccl
from lightning_hybrid.distributed.watch.flight_recorder import read_bytes
from lightning_hybrid.pipeline_parallel.engine import Engine

_COUNTED = 4  # the optimizer step whose bytes are counted
_WORTH = 0.8  # a share of the bytes that another order of the axes has to stay below


@dataclass(frozen=True)
class Traffic:
    """The bytes of an optimizer step.

    Attributes:
        data: That a rank sends to the next one in the ring of its replicas.
        tensor: That a rank sends to the next one in the ring of those that share its layers.
        pipeline: That two neighbouring pipeline ranks send to each other, by the first of them.
    """

    data: float = 0.0
    tensor: float = 0.0
    pipeline: Mapping[int, float] = field(default_factory=dict)


def bytes_between_nodes(sizes: Sizes, rank_order: str, nodes: Sequence[Any], traffic: Traffic) -> tuple[float, float]:
    """The bytes that cross nodes in a step, of all ranks, and how many of these are of tensor parallelism.

    Args:
        sizes: The number of ranks along each axis.
        rank_order: The axes from the outermost to the innermost, joined by ``-``.
        nodes: The node of each global rank.
        traffic: What ranks send to each other.
    """
    crossing = dict.fromkeys(AXES, 0.0)
    steps = {axis: (sizes.stride(axis, rank_order), sizes.along(axis)) for axis in sizes.axes}
    for rank, (axis, (stride, size)) in itertools.product(range(sizes.num_ranks), steps.items()):
        at = rank // stride % size
        following = rank + ((at + 1) % size - at) * stride
        if nodes[rank] != nodes[following]:
            sent = {DATA: traffic.data, TENSOR: traffic.tensor, PIPELINE: traffic.pipeline.get(at, 0.0)}
            crossing[axis] += sent.get(axis, 0.0)  # messages of context parallelism are not counted yet
    return sum(crossing.values()), crossing[TENSOR]


def least_bytes(sizes: Sizes, rank_order: str, nodes: Sequence[Any], traffic: Traffic) -> tuple[str, float]:
    """The order of axes with which the fewest bytes cross nodes, and these; today's if no other has fewer."""
    axes = sorted(sizes.axes, key=lambda axis: axis.role is not LAYERS)  # of equal orders, one with stages outermost
    orders = ["-".join(axis.key for axis in order) for order in itertools.permutations(axes)]
    found = {order: bytes_between_nodes(sizes, order, nodes, traffic)[0] for order in (rank_order, *orders)}
    best = min(found, key=lambda order: found[order])
    return best, found[best]


def traffic_text(sizes: Sizes, rank_order: str, nodes: Sequence[Any], traffic: Traffic) -> str | None:
    """The warning where tensor-parallel groups are on several nodes, or another order would send less between nodes.

    Args:
        sizes: As of :func:`bytes_between_nodes`, as the others.
        rank_order: Likewise.
        nodes: Likewise.
        traffic: Likewise.

    Returns:
        The text, with the bytes of today's order and of the best one; ``None`` if there is nothing to say.
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
    """Finds out in the fourth optimizer step what is sent between machines, and says it if that could be less.

    By then delays have been measured (:class:`~.step_schedules.StepSchedules`), whose messages do not count. Nothing is
    done in a step for it: torch notes collectives of gloo anyway, and channels know their messages. Where torch does
    not, and with NCCL, nothing is said; ``lightning-hybrid plan`` works it out for these.

    Args:
        mesh: The ranks.
        engine: Runs the schedules.
        rank_order: How ranks are numbered.

    Attributes:
        is_counting: Whether there is yet something to be found out.
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
        """The first batch of an optimizer step is about to run, on every rank. To be called while it `is_counting`.

        Returns:
            The warning, on every rank, if there is one: at the fifth step.
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
        """The bytes that this rank has sent to its neighbours so far, by the pipeline rank before the link."""
        sent: dict[int, int] = {}
        for (sender, receiver, kind), channel in self._engine.channels.items():
            if sender == self._mesh.pipeline_rank:
                link = sender if kind == "activation" else receiver
                sent[link] = sent.get(link, 0) + channel.num_bytes
        return sent

    def _measured(self) -> tuple[int, Traffic] | None:
        """This pipeline rank, and what it has sent since the step before began; ``None`` if torch does not say it."""
        collectives, last = read_bytes(self._last)
        if last == self._last:
            return None
        data, tensor = (
            (group.size() - 1) / group.size() * collectives.get(group.group_name, 0.0)
            for group in (self._mesh.data_group, self._mesh.tensor_group)
        )
        sent = {link: sent - self._before.get(link, 0) for link, sent in self._sent().items()}
        return self._mesh.pipeline_rank, Traffic(data, tensor, sent)


def most_traffic(found: Sequence[tuple[int, Traffic]]) -> Traffic:
    """Of what ranks have sent, the most of any replica; over a link what its two ranks send is added up.

    Args:
        found: The pipeline rank of each rank, and what it has sent to its neighbours and in rings.
    """
    of_ranks: dict[tuple[int, int], float] = {}  # by pipeline rank and link
    for rank, traffic in found:
        for link, sent in traffic.pipeline.items():
            of_ranks[rank, link] = max(sent, of_ranks.get((rank, link), 0.0))
    pipeline: dict[int, float] = {}
    for (_, link), sent in of_ranks.items():
        pipeline[link] = pipeline.get(link, 0.0) + sent
    traffics = [traffic for _, traffic in found]
    return Traffic(max(each.data for each in traffics), max(each.tensor for each in traffics), pipeline)
