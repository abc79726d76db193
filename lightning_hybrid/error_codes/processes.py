"""Errors of processes and failures of ranks."""

from lightning_hybrid.error_codes.entry import Entry

ERRORS = {
    "LH201": Entry(
        "Ranks were started with different arguments or files, or the code depends on the rank.",
        "Use the same command and files on every node. Remove `if self.global_rank == 0` around modules,"
        " optimizers and `split_batch`.",
    ),
    "LH202": Entry(
        "The node could not resolve the host name in `MASTER_ADDR` within 30 seconds.",
        "Set `MASTER_ADDR` to the address of the first node.",
    ),
    "LH203": Entry(
        "Under torchrun, rank 0 has ended, is slow to start, or cannot be reached.",
        "Read the output of rank 0's node, check the [network](../guides/multi-node.md), or increase `timeout`.",
    ),
    "LH204": Entry(
        "The notebook used CUDA before the Trainer started its processes.",
        "Restart the kernel, and do not use a GPU before the Trainer does.",
    ),
    "LH205": Entry(
        "The operating system does not support `fork`.",
        "Use Linux or macOS.",
    ),
    "LH206": Entry(
        "This process has already created process groups.",
        "Call `check` in a new process, or run `lightning-hybrid check`.",
    ),
    "LH207": Entry(
        "Ranks call different collectives, or call the same collectives in a different order.",
        "Remove rank-dependent code from steps and logging.",
    ),
    "LH208": Entry(
        "One rank calls a collective that other ranks do not reach within the timeout.",
        "Call the collective on every rank or on none.",
    ),
    "LH209": Entry(
        "After training in a notebook, the module stayed sharded in the training processes: it was too large to"
        " gather, or `gather_module_on_teardown=False` is set.",
        "Load the trained weights from a checkpoint.",
    ),
    "LH210": Entry(
        "Weights that must be equal differ between ranks.",
        "Use the same random seed and load the same weights on every rank.",
    ),
    "LH221": Entry(
        "A process crashed or was killed: it ran out of memory, received `kill -9`, or its node failed.",
        "Read the output of the process and the kernel log of its node; see [debug a hang](../guides/debug-a-hang.md).",
    ),
    "LH222": Entry(
        "The process that hosts the store has ended: rank 0, or torchrun on its node.",
        "Read the output of that node; see [debug a hang](../guides/debug-a-hang.md).",
    ),
    "LH223": Entry(
        "A rank sends no heartbeats: its process is stopped, its node has failed, or the network is down.",
        "Check the node. If C++ code can hold Python's GIL for longer than `faults.heartbeat_timeout`, increase"
        " this timeout.",
    ),
    "LH224": Entry(
        "Ranks wait for each other, and no rank has made progress for `faults.stall_timeout`.",
        "Look in the message for the position of each rank; see [debug a hang](../guides/debug-a-hang.md).",
    ),
    "LH225": Entry(
        "Some ranks have finished the run while others still wait, because their batches, arguments or callbacks"
        " differ.",
        "Use the same number of batches, arguments and callbacks on every rank.",
    ),
    "LH226": Entry(
        "The launcher of one node, such as torchrun, was killed. All ranks print this error.",
        "Find the node on which no launcher is running, and start its launcher again.",
    ),
    "LH227": Entry(
        "A rank calls a collective that the other ranks do not call, so the ranks wait for each other.",
        "Remove rank-dependent code; see [debug a hang](../guides/debug-a-hang.md).",
    ),
    "LH228": Entry(
        "The process that hosts the store is stopped, or its node has failed.",
        "Check the node of rank 0, and torchrun on that node.",
    ),
}
