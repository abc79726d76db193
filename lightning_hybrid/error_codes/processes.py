"""Errors of processes and failures of ranks."""

from lightning_hybrid.error_codes.entry import Entry

ERRORS = {
    "LH201": Entry(
        "Ranks were started with different arguments or files, or code depends on the rank.",
        "Use the same command and files on every node. Remove `if self.global_rank == 0` around modules, optimizers"
        " and `split_batch`.",
    ),
    "LH202": Entry(
        "The node could not resolve the name in `MASTER_ADDR` within 30 seconds.",
        "Set `MASTER_ADDR` to the address of the first node.",
    ),
    "LH203": Entry(
        "Under torchrun, rank 0 has ended, is slow to start, or cannot be reached.",
        "Read the output of its node, check the [network](../guides/multi-node.md), or increase `timeout`.",
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
        "This process has created process groups before.",
        "Call `check` in a new process, or run `lightning-hybrid check`.",
    ),
    "LH207": Entry(
        "Ranks call different collectives, or call them in a different order.",
        "Remove rank-dependent code from steps and logging.",
    ),
    "LH208": Entry(
        "One rank calls a collective that other ranks do not reach within the timeout.",
        "Call it on every rank, or on none.",
    ),
    "LH209": Entry(
        "After training in a notebook, the module was too large to gather, or `gather_module_on_teardown=False`.",
        "Load the trained weights from a checkpoint.",
    ),
    "LH210": Entry(
        "Weights that must be equal differ between ranks.",
        "Use the same random seed, and load the same weights, on every rank.",
    ),
    "LH221": Entry(
        "A process crashed or was killed: it ran out of memory, received `kill -9`, or its node failed.",
        "Read the output and the kernel log of its node; see [debug a hang](../guides/debug-a-hang.md).",
    ),
    "LH222": Entry(
        "The process that hosts the store has ended: rank 0, or torchrun on its node.",
        "Read the output of that node; see [debug a hang](../guides/debug-a-hang.md).",
    ),
    "LH223": Entry(
        "A process is stopped, a node has failed, or the network is down.",
        "Check the node. If a rank runs C++ code for that long, increase `faults.heartbeat_timeout`.",
    ),
    "LH224": Entry(
        "A rank is stuck for longer than `faults.stall_timeout`.",
        "Check where each rank is in the message; see [debug a hang](../guides/debug-a-hang.md).",
    ),
    "LH225": Entry(
        "Some ranks have fewer batches, or different arguments or callbacks.",
        "Use the same number of batches, arguments and callbacks on every rank.",
    ),
    "LH226": Entry(
        "The launcher of one node was killed. All ranks print this error.",
        "Find the node without a launcher, and start the launcher again.",
    ),
    "LH227": Entry(
        "A rank calls a collective that the other ranks do not call.",
        "Remove rank-dependent code; see [debug a hang](../guides/debug-a-hang.md).",
    ),
    "LH228": Entry(
        "The process that hosts the store is stopped, or its node has failed.",
        "Check the node of rank 0, and torchrun on that node.",
    ),
}
