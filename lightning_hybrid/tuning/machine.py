"""A machine's figures: what its devices and the links between them can do."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_hybrid.pipeline_parallel.links.link import Link


@dataclass(frozen=True)
class Machine:
    """What ranks run on. The defaults are an A100 of 80 GiB in nodes of 8, with NVLink inside and InfiniBand between.

    Attributes:
        memory: Bytes of a device that a run may use.
        ranks_per_node: Consecutive ranks that share a node.
        flops: Operations in a second that products of matrices reach: half of what an A100 has in bfloat16.
        memory_bandwidth: Bytes in a second between a device and its memory.
        operation_seconds: The least that an operation takes: the launch of a kernel.
        node_bandwidth: Bytes in a second that a rank sends inside a node.
        node_latency: Seconds until a message arrives inside a node.
        network_bandwidth: Bytes in a second that a rank sends to another node.
        network_latency: Seconds until a message arrives in another node.
        collective_seconds: What a collective takes beside its messages, until ranks that compute have met: about
            nothing where each has a device of its own, milliseconds where its threads wait for cores that compute.
        overlap: The share of computing beside which messages are sent: gradients beside a backward, blocks of a ring
            beside attention.
        max_tensor: The most ranks that may share a layer; ``None`` for those of a node.
        is_here: Whether ranks compute with the processor of the search, which can time layers then.
    """

    memory: float = 80 * 2**30
    ranks_per_node: int = 8
    flops: float = 156e12
    memory_bandwidth: float = 2e12
    operation_seconds: float = 5e-6
    node_bandwidth: float = 300e9
    node_latency: float = 5e-6
    network_bandwidth: float = 25e9
    network_latency: float = 20e-6
    collective_seconds: float = 0.0
    overlap: float = 0.5
    max_tensor: int | None = None
    is_here: bool = False

    def link(self, stride: int, size: int, num_ranks: int) -> Link:
        """The slowest link between neighbours of a group: every ``stride``-th of the ranks, ``size`` in all.

        Args:
            stride: From one rank of the group to the next.
            size: The ranks of a group.
            num_ranks: The ranks of the run.
        """
        return self.link_between(stride, size, num_ranks, (0, size - 1))

    def link_between(self, stride: int, size: int, num_ranks: int, ends: tuple[int, int]) -> Link:
        """The slowest link between two ranks of a group, over all groups; arguments as of :meth:`crosses_nodes`."""
        if self.crosses_nodes(stride, size, num_ranks, ends):
            return Link(self.network_latency, self.network_bandwidth)
        return Link(self.node_latency, self.node_bandwidth)

    def crosses_nodes(self, stride: int, size: int, num_ranks: int, ends: tuple[int, int]) -> bool:
        """Whether two ranks of a group are in two nodes, in any of the groups.

        Args:
            stride: From one rank of the group to the next.
            size: The ranks of a group.
            num_ranks: The ranks of the run.
            ends: The numbers of the two in their group.
        """
        here, there = (end * stride for end in ends)
        firsts = (rank for rank in range(num_ranks) if rank % (stride * size) < stride)
        return any((rank + here) // self.ranks_per_node != (rank + there) // self.ranks_per_node for rank in firsts)
