"""Errors of processes and failures of ranks."""

from lightning_hybrid.error_codes.entry import Entry

ERRORS = {
    "LH201": Entry(
        "Ranks were started with different arguments or files, or the code does different things on different ranks.",
        "Use the same command and files on every node. Do not create modules, optimizers or microbatches inside"
        " `if self.global_rank == 0`.",
    ),
    "LH202": Entry(
        "A node could not resolve the host name in `MASTER_ADDR` within 30 seconds.",
        "Set `MASTER_ADDR` to an address of the first node that all nodes can resolve.",
    ),
    "LH203": Entry(
        "Under torchrun, rank 0 did not answer the other ranks within the timeout: it has ended, is slow to start,"
        " or cannot be reached.",
        "Read the output of rank 0's node, check the network between the nodes, or increase `timeout`. See"
        " [multi-node](../guides/multi-node.md).",
    ),
    "LH204": Entry(
        "The notebook used CUDA before the Trainer started its processes.",
        "Restart the notebook kernel, and do not use a GPU before the Trainer has started its processes.",
    ),
    "LH205": Entry(
        "The operating system cannot copy a process with `fork`, which the command or the layout search needs.",
        "Use Linux or macOS.",
    ),
    "LH206": Entry(
        "`check` was called in a process that has already created process groups, which this version of torch"
        " cannot replace.",
        "Call `check` in a new process, or run `lightning-hybrid check`.",
    ),
    "LH207": Entry(
        "Ranks call different collectives, or call the same collectives in different orders.",
        "Remove code that depends on the rank from steps and logging.",
    ),
    "LH208": Entry(
        "One rank has called a collective, but other ranks have not called it within the timeout.",
        "Call the collective on every rank or on none.",
    ),
    "LH209": Entry(
        "After training in a notebook, the trained weights stayed in the training processes, because the module"
        " was too large to gather or because `gather_module_on_teardown=False` is set.",
        "Load the trained weights from a checkpoint.",
    ),
    "LH210": Entry(
        "Weights that must be the same on several ranks differ between these ranks.",
        "Use the same random seed and load the same weights on every rank.",
    ),
    "LH221": Entry(
        "A process of the run crashed or was killed: it ran out of memory, received `kill -9`, or was on a node"
        " that failed.",
        "Read the output of the process and the kernel log of its node. See [debug a hang](../guides/debug-a-hang.md).",
    ),
    "LH222": Entry(
        "The process that hosts the store, through which all ranks exchange messages, has ended: rank 0, or"
        " torchrun on its node.",
        "Read the output of rank 0's node. See [debug a hang](../guides/debug-a-hang.md).",
    ),
    "LH223": Entry(
        "A rank sends no heartbeats: its process is stopped, its node has failed, or the network is down.",
        "Check that the node is running and can be reached. If C++ code can hold Python's GIL for longer than"
        " `faults.heartbeat_timeout`, increase this timeout.",
    ),
    "LH224": Entry(
        "No rank has made progress for `faults.stall_timeout`, because ranks wait for each other, for a rank that"
        " is stuck or for the network.",
        "In the message, find the position of each rank. See [debug a hang](../guides/debug-a-hang.md).",
    ),
    "LH225": Entry(
        "Some ranks have finished the run, but others still wait for them, because the batches, arguments or"
        " callbacks differ between ranks.",
        "Use the same number of batches, arguments and callbacks on every rank.",
    ),
    "LH226": Entry(
        "The process that launched the ranks of one node, such as torchrun, has exited or was killed. All ranks of"
        " the run print this error.",
        "Find the node on which no launcher is running, and start the launcher there again.",
    ),
    "LH227": Entry(
        "A rank calls a collective that the other ranks do not call, so the ranks wait for each other.",
        "Remove code that depends on the rank. See [debug a hang](../guides/debug-a-hang.md).",
    ),
    "LH228": Entry(
        "The store, through which all ranks exchange messages, does not respond: its process is stopped, or its"
        " node has failed.",
        "Check the node of rank 0, and whether rank 0 and torchrun are running there.",
    ),
}
