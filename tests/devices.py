"""Which devices the ranks of a test have."""

from __future__ import annotations

import os
from typing import Any

import torch


def devices_of(accelerator: str, ranks: int) -> dict[str, Any]:
    """The arguments of a Trainer that say so.

    Ranks have a GPU each where there are as many. Otherwise all of them share the first: each is the only rank of a
    node then, also for NCCL, which refuses a device that two ranks of one host have ("Duplicate GPU detected"), and
    connects hosts by sockets.

    Args:
        accelerator: Lightning's name: ``"cpu"`` or ``"gpu"``.
        ranks: How many there are.
    """
    if accelerator == "cpu" or torch.cuda.device_count() >= ranks:
        return {"devices": ranks}
    rank = os.environ["RANK"]
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", NODE_RANK=rank, GROUP_RANK=rank)
    os.environ.update(NCCL_HOSTID=f"host-{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    return {"devices": 1, "num_nodes": ranks}
