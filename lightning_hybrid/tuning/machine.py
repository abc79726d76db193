"""The speed and the memory of the devices of a machine, and of the links between them.

A *machine* is all nodes of a run. The cost model converts operations and messages to seconds with its figures.
`choose_layout` measures them with :func:`~.measure.measure_machine` when a run starts. ``lightning-hybrid suggest``
takes them from the command line, because the devices need not exist. ``plan`` only counts bytes, and uses the defaults.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_hybrid.pipeline_parallel.links.link import Link


@dataclass(frozen=True)
class Machine:
    """The figures of all nodes of a run. The defaults describe eight A100 of 80 GiB per node, NVLink and InfiniBand.

    Attributes:
        memory: Bytes of a device that a run can use; infinite on a CPU without a limit.
        ranks_per_node: The number of ranks on a node; they have consecutive numbers.
        flops: FLOP/s that matrix multiplications reach. The default is half of the peak of an A100 in bfloat16.
        memory_bandwidth: Memory bandwidth of a device, in bytes per second.
        operation_seconds: Minimum time of an operation, such as the launch of a kernel.
        node_bandwidth: Bandwidth of each rank for messages within a node, in bytes per second.
        node_latency: Latency of a message within a node, in seconds.
        network_bandwidth: Bandwidth of each rank for messages between nodes, in bytes per second.
        network_latency: Latency of a message between nodes, in seconds.
        collective_seconds: Fixed overhead of a collective, until all ranks that compute have started it. It is about 0
            if each rank has its own device, and milliseconds if threads wait for cores that compute.
        overlap: The share of the compute time during which messages can be sent: gradients during a backward, and
            blocks of a ring during attention.
        max_tensor: The largest tensor-parallel size; ``None`` for the number of ranks of a node.
        is_here: True if ranks compute on the CPU that runs the search, so that the search can time layers.
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
        """Return the slowest link between neighboring ranks of a group, over all groups of an axis.

        Args:
            stride: The distance from one rank of a group to the next.
            size: The number of ranks of a group.
            num_ranks: The number of ranks of the run.
        """
        return self.link_between(stride, size, num_ranks, (0, size - 1))

    def link_between(self, stride: int, size: int, num_ranks: int, ends: tuple[int, int]) -> Link:
        """Return the slowest link between two ranks of a group, over all groups; see :meth:`crosses_nodes`."""
        if self.crosses_nodes(stride, size, num_ranks, ends):
            return Link(self.network_latency, self.network_bandwidth)
        return Link(self.node_latency, self.node_bandwidth)

    def crosses_nodes(self, stride: int, size: int, num_ranks: int, ends: tuple[int, int]) -> bool:
        """Return True if two ranks of a group are on different nodes, in any of the groups.

        Args:
            stride: The distance from one rank of a group to the next.
            size: The number of ranks of a group.
            num_ranks: The number of ranks of the run.
            ends: The indices of the two ranks in their group.
        """
        here, there = (end * stride for end in ends)
        firsts = (rank for rank in range(num_ranks) if rank % (stride * size) < stride)
        return any((rank + here) // self.ranks_per_node != (rank + there) // self.ranks_per_node for rank in firsts)
