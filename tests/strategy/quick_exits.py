"""Processes that end right after a collective, in all of Python's own way: `python -m tests.strategy.quick_exits 200`.

On a busy machine one exit in some 200 was a SIGABRT ("terminate called without an active exception") before groups were
left at exit: see `lightning_hybrid.strategy.launch`.
"""

from __future__ import annotations

import os
import socket
import sys
from collections import Counter

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import TorchElasticEnvironment

from lightning_hybrid.strategy import launch

SIZE = 2


def rank_of_a_job(rank: int, port: int) -> None:
    """Some collectives, whose threads may not have come to rest when this returns."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": SIZE, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
    torch.set_num_threads(1)
    launch.start_groups(TorchElasticEnvironment(), "gloo", torch.device("cpu"), None)
    works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(20)]
    for work in works:
        assert work is not None
        work.wait()


def exits(count: int) -> Counter[int]:
    """The statuses of so many jobs' processes, as `os.waitpid` gives them."""
    found: Counter[int] = Counter()
    for _ in range(count):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        children = []
        for rank in range(SIZE):
            child = os.fork()
            if child == 0:
                rank_of_a_job(rank, port)
                sys.exit(0)
            children.append(child)
        found.update(os.waitpid(child, 0)[1] for child in children)
    return found


if __name__ == "__main__":
    statuses = exits(int(sys.argv[1]))
    print(f"{statuses[0]} of {statuses.total()} ended well; the others: {dict(statuses - Counter({0: statuses[0]}))}")
    sys.exit(statuses.total() != statuses[0])
