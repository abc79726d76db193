"""Errors of processes and failures of ranks."""

from lightning_hybrid.error_codes.entry import Entry

ERRORS = {
    "LH201": Entry(
        "Ranks were started with different arguments or files, or code depends on the rank.",
        "Use the same command and files on every node. Remove `if self.global_rank == 0` around modules, optimizers"
        " and `split_batch`.",
    ),
    "LH202": Entry(
        "The node could not resolve the name of `MASTER_ADDR` for half a minute.",
        "Set the address of the first node.",
    ),
    "LH203": Entry(
        "Under torchrun, rank 0 ended, starts slowly, or cannot be reached.",
        "Read the output of its node, check the [network](../guides/multi-node.md), or increase `timeout`.",
    ),
    "LH204": Entry(
        "The notebook used CUDA before the Trainer started its processes.",
        "Restart the kernel, and do not use a GPU before the Trainer does.",
    ),
    "LH205": Entry(
        "The operating system cannot fork a process.",
        "Use Linux or macOS.",
    ),
    "LH206": Entry(
        "This process has created process groups before.",
        "Call `check` in a new process, or run `lightning-hybrid check`.",
    ),
    "LH207": Entry(
        "Ranks call different collectives, or call them in different orders.",
        "Remove code that depends on the rank from steps and logs.",
    ),
    "LH208": Entry(
        "One rank calls a collective that others do not reach within the timeout.",
        "Call it on every rank, or on none.",
    ),
    "LH209": Entry(
        "In a notebook, the module was too large to gather, or `gather_module_on_teardown=False`.",
        "Load a checkpoint.",
    ),
    "LH210": Entry(
        "Weights that must be equal differ between ranks.",
        "Seed generators equally, and load weights on every rank.",
    ),
    "LH221": Entry(
        "A process was killed or crashed: out of memory, `kill -9`, or a lost node.",
        "Read the output and the kernel log of its node: [debug a hang](../guides/debug-a-hang.md).",
    ),
    "LH222": Entry(
        "The process that holds the store has ended: rank 0, or torchrun on its node.",
        "Read the output of that node: [debug a hang](../guides/debug-a-hang.md).",
    ),
    "LH223": Entry(
        "A process is stopped, a node is lost, or the network is cut.",
        "Check the node. If a rank computes for that long in C++, increase `faults.heartbeat_timeout`.",
    ),
    "LH224": Entry(
        "A rank is stuck for longer than `faults.stall_timeout`.",
        "Read the places of the message: [debug a hang](../guides/debug-a-hang.md).",
    ),
    "LH225": Entry(
        "Some ranks have fewer batches, other arguments or other callbacks.",
        "Make them equal on every rank.",
    ),
    "LH226": Entry(
        "The launcher of one node was killed. All ranks print it.",
        "Find the node without a launcher, and start it again.",
    ),
    "LH227": Entry(
        "A rank calls a collective that others do not call.",
        "Remove code that depends on the rank: [debug a hang](../guides/debug-a-hang.md).",
    ),
    "LH228": Entry(
        "The process that holds the store is stopped, or its node is lost.",
        "Check the node of rank 0, and torchrun.",
    ),
}
