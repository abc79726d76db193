"""Errors of processes and failures of ranks."""

from lightning_hybrid.error_codes.entry import Entry

ERRORS = {
    "LH201": Entry(
        "Ranks were started with different arguments or files, or your code behaves differently on different ranks.",
        "Use the same command and files on every node. Do not create modules, optimizers or microbatches inside `if"
        " self.global_rank == 0`.",
    ),
    "LH202": Entry(
        "A node could not resolve the host name in `MASTER_ADDR` within 30 seconds.",
        "Set `MASTER_ADDR` to the host name or IP address of the first node. Every node must be able to resolve it.",
    ),
    "LH203": Entry(
        "In a run started with torchrun, rank 0 did not answer the other ranks within the timeout. It has exited, is"
        " still starting, or cannot be reached.",
        "Read the output of the node with rank 0, and check the network between the nodes. If rank 0 needs more time"
        " to start, increase `timeout`. See [multi-node](../guides/multi-node.md).",
    ),
    "LH204": Entry(
        "The notebook used CUDA before the Trainer started its processes.",
        "Restart the notebook kernel, and do not use a GPU before the Trainer has started its processes.",
    ),
    "LH205": Entry(
        "The command or the layout search copies a process with `fork`, which this operating system does not support.",
        "Use Linux or macOS.",
    ),
    "LH206": Entry(
        "`check` was called in a process that has already created process groups. With this version of torch, copies"
        " of this process cannot create new process groups.",
        "Call `check` in a new process, or run `lightning-hybrid check`.",
    ),
    "LH207": Entry(
        "Ranks call different collectives, or call the same collectives in different orders.",
        "Make sure that every rank calls the same collectives in the same order. For example, do not call one inside"
        " `if self.trainer.is_global_zero`. Every rank must also log the same values.",
    ),
    "LH208": Entry(
        "One rank called a collective that at least one other rank did not call within the timeout.",
        "Call the collective on every rank or on none of them.",
    ),
    "LH209": Entry(
        "After training in a notebook, the trained weights were not returned to the notebook. Either the module was"
        " too large to be gathered, or `gather_module_on_teardown=False` is set.",
        "Load the trained weights from a checkpoint.",
    ),
    "LH210": Entry(
        "Some ranks must have equal weights, but their weights differ.",
        "Use the same random seed and load the same weights on every rank.",
    ),
    "LH221": Entry(
        "A process of the run crashed or was killed, for example because it ran out of memory, received `kill -9`, or"
        " was on a node that failed.",
        "Read the output of the process and the kernel log of its node. See [debug a hang](../guides/debug-a-hang.md).",
    ),
    "LH222": Entry(
        "The process that hosts the store, through which all ranks exchange messages, has exited. This process is rank"
        " 0, or torchrun on the node of rank 0.",
        "Read the output of the node with rank 0. See [debug a hang](../guides/debug-a-hang.md).",
    ),
    "LH223": Entry(
        "A rank has stopped sending heartbeats: its process was suspended, its node has failed, or the network is"
        " down.",
        "Check that the node of this rank is running and can be reached. If C++ code can hold Python's GIL for longer"
        " than `faults.heartbeat_timeout`, increase this timeout.",
    ),
    "LH224": Entry(
        "Ranks are waiting for each other, for a rank that is stuck, or for the network. No rank has made progress"
        " within `faults.stall_timeout`.",
        "Read in the message what each rank is doing. See [debug a hang](../guides/debug-a-hang.md).",
    ),
    "LH225": Entry(
        "Some ranks have finished the run, but other ranks are still waiting for them. The ranks have different"
        " numbers of batches, different arguments or different callbacks.",
        "Use the same number of batches, the same arguments and the same callbacks on every rank.",
    ),
    "LH226": Entry(
        "The process that launched the ranks of one node, such as torchrun, has exited or was killed. All ranks of the"
        " run print this error.",
        "Find the node on which the launcher is no longer running, and start the launcher there again.",
    ),
    "LH227": Entry(
        "A rank called a collective that the other ranks do not call, so the ranks are waiting for each other.",
        "Make sure that every rank calls the same collectives. For example, do not call one inside `if"
        " self.trainer.is_global_zero`. See [debug a hang](../guides/debug-a-hang.md).",
    ),
    "LH228": Entry(
        "The store, through which all ranks exchange messages, does not respond, because its process was suspended or"
        " its node has failed.",
        "Check that the node of rank 0 can be reached, and that rank 0 and torchrun are running on it.",
    ),
}
