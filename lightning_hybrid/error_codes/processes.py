"""Errors of processes and failures of ranks."""

from lightning_hybrid.error_codes.entry import Entry

ERRORS = {
    "LH201": Entry(
        "Ranks use different arguments or files, or your code behaves differently on different ranks.",
        "Use the same command and files on every node. Do not create modules, optimizers or data loaders"
        " inside `if self.global_rank == 0`.",
    ),
    "LH202": Entry(
        "A node could not resolve the host name in `MASTER_ADDR` within 30 seconds.",
        "Set `MASTER_ADDR` to the IP address of the first node, or to a host name that every node can resolve.",
    ),
    "LH203": Entry(
        "In a run started with torchrun, rank 0 did not answer the other ranks within the strategy's"
        " `timeout`. Rank 0 has exited, is still starting, or cannot be reached.",
        "Read the output of the node that runs rank 0, and check the network between the nodes. If rank 0"
        " needs more time to start, increase `HybridStrategy(timeout=...)`. See"
        " [multi-node](../guides/multi-node.md).",
    ),
    "LH204": Entry(
        "The notebook used CUDA before the Trainer started its processes.",
        "Restart the notebook kernel. Do not use a GPU until the Trainer has started its processes.",
    ),
    "LH205": Entry(
        "A `lightning-hybrid` command or the layout search must copy its process with `fork`, which this"
        " operating system does not support.",
        "Use Linux or macOS.",
    ),
    "LH206": Entry(
        "`check` was called in a process that has already created process groups. With this version of torch, copies"
        " of this process cannot create new process groups.",
        "Call `check` in a new process, or run `lightning-hybrid check`.",
    ),
    "LH207": Entry(
        "Ranks call different collectives, or call the same collectives in different orders.",
        "Make sure that every rank calls the same collectives in the same order. For example, do not call a"
        " collective inside `if self.trainer.is_global_zero`. Every rank must also log the same metrics in the"
        " same order.",
    ),
    "LH208": Entry(
        "One rank called a collective that at least one other rank did not call within the strategy's `timeout`.",
        "Call the collective on every rank or on none of them.",
    ),
    "LH209": Entry(
        "The Trainer ran in worker processes, for example in a notebook. The trained weights stayed in these"
        " processes, because the module was too large to be gathered, or because"
        " `gather_module_on_teardown=False` is set.",
        "Load the trained weights from a checkpoint.",
    ),
    "LH210": Entry(
        "`faults.detect_desync=True` compares ranks that must have the same parameters, batch and random state."
        " The values of these ranks differ.",
        "Use the same random seed, weights and data on every rank.",
    ),
    "LH221": Entry(
        "A process of the run crashed or was killed. For example, the process ran out of memory or received"
        " `kill -9`, or its node failed.",
        "Read the output of the process and the kernel log of its node. See [debug a hang](../guides/debug-a-hang.md).",
    ),
    "LH222": Entry(
        "The process that hosts the store for messages between ranks has exited. This process is rank 0, or"
        " torchrun on the node of rank 0.",
        "Read the output of the processes on the node that runs rank 0. See [debug a hang](../guides/debug-a-hang.md).",
    ),
    "LH223": Entry(
        "A rank has stopped sending heartbeats. Its process was suspended, its node has failed, or the"
        " network is down.",
        "Check that the node of this rank is running and can be reached. If C++ code can hold Python's GIL"
        " for longer than `faults.heartbeat_timeout`, increase this timeout.",
    ),
    "LH224": Entry(
        "No rank has made progress within `faults.stall_timeout`. Ranks are waiting for each other, for a"
        " rank that is stuck, or for the network.",
        "In the message, find the rank that the other ranks are waiting for. If the message names no rank, check"
        " the network. See [debug a hang](../guides/debug-a-hang.md).",
    ),
    "LH225": Entry(
        "Some ranks have finished the run, but other ranks are still waiting for them. This happens if ranks"
        " have different numbers of batches, different arguments or different callbacks.",
        "Use the same number of batches, the same arguments and the same callbacks on every rank.",
    ),
    "LH226": Entry(
        "The process that launched the ranks of a node, such as torchrun, has exited or was killed. All ranks"
        " of the run print this error.",
        "Find the node on which the launcher has exited, and start the launcher again on this node.",
    ),
    "LH227": Entry(
        "A rank called a collective that the other ranks did not call, so the ranks are waiting for each other.",
        "Make sure that every rank calls the same collectives. For example, do not call a collective inside"
        " `if self.trainer.is_global_zero`. See [debug a hang](../guides/debug-a-hang.md).",
    ),
    "LH228": Entry(
        "The store for messages between ranks does not respond. The process that hosts the store is"
        " suspended, or the node of that process has failed.",
        "Check that the node of rank 0 can be reached, and that rank 0 and its launcher, such as torchrun,"
        " are running on this node.",
    ),
}
