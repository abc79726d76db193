"""The thread beside a run, from the moment there is a store: while groups are made, and the module is divided."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from lightning_hybrid.config import Settings
from lightning_hybrid.distributed.failure import FailureStore, close_groups, is_transport
from lightning_hybrid.distributed.failure_watch import FailureWatch
from lightning_hybrid.distributed.messages.host_messages import shut_down_sockets
from lightning_hybrid.distributed.process_group import has_nccl
from lightning_hybrid.distributed.watch.connections import Connections
from lightning_hybrid.distributed.watch.heartbeats import Heartbeats
from lightning_hybrid.distributed.watch.watched_thread import WatchedThread
from lightning_hybrid.distributed.watch.watcher import Watcher


class StartWatch:
    """What watches this rank, before there is anything else of a run to look at.

    ::

        store    groups are made    mesh    module divided ... first run          ... second run
        |------- this ------------------| RunWatch: the same thread, which looks at more things ...

    The first run begins for the watch when there is a store. Who waits in the set-up waits in C++, often for the store,
    and mostly where nothing can be closed to wake it: then its process ends, with the cause.

    Args:
        store: What all ranks see.
        watched: Another client of it, for the watcher alone: one is locked while it waits for a key.
        config: How long a rank may be silent, and how long nothing may finish.
        connections: Those of the process groups.
        rank: This rank.
        size: The number of ranks.

    Attributes:
        store: As given.
        watched: As given.
        connections: As given.
        failures: Of this rank.
        thread: That of the run.
        failure_watch: Finds failures.
        watcher: The thread that looks.
        is_first_run: Whether no run has come to an end yet.
    """

    def __init__(
        self, store: Store, watched: Store, config: Settings, connections: Connections, *, rank: int, size: int
    ) -> None:
        self.store, self.watched, self.connections, self._rank = store, watched, connections, rank
        self.failures = FailureStore(store, rank=rank, size=size)
        if size > 1:
            self.failures.begin()  # before all else: who is cut off before it has said that it is there is waited for
        self.thread = WatchedThread()
        self.is_first_run = size > 1
        stall, silence = config.seconds_to_stall, config.seconds_of_heartbeat
        given: dict[str, Any] = {"rank": rank, "size": size, "place": self.thread.place}
        heartbeats = None if silence is None else Heartbeats(self.watched, self.failures.key, seconds=silence, **given)
        self.failure_watch = FailureWatch(
            self.failures,
            self.watched,
            rank=rank,
            size=size,
            thread=self.thread,
            waits=None,
            heartbeats=heartbeats,
            abort=self._abort,
            interrupt=lambda exception: False,
            num_lost=connections.num_lost,
            parent=os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None,
        )
        self.watcher = Watcher(
            self.failure_watch.look,
            descriptors=self.failure_watch.descriptors,
            patience=min(filter(None, (stall, silence)), default=None),
            stuck=self.failure_watch.end_without_store,
        )
        if size > 1:
            self.failures.learn_host(0, os.environ.get("MASTER_ADDR"))  # until it says its host's name
            self.watcher.start()
            self.watcher.wake()

    def leave(self, exception: BaseException) -> BaseException | None:
        """Tell the other ranks of an exception, and leave the groups; not if it is one that all of them raise.

        Returns:
            What was raised on another rank, if this exception only says that it has left.
        """
        if isinstance(exception, (ValueError, TypeError)):  # with other arguments they go on
            return None
        cause = self.failures.leave(exception, f"Rank {self._rank}", lambda: None)
        return cause if is_transport(exception) else None

    def close(self) -> None:
        """Watch nothing any more."""
        self.watcher.close()
        self.failure_watch.close()

    def _abort(self) -> None:
        """Wake who waits in a group."""
        if dist.is_initialized() and has_nccl():
            close_groups(self.failures.cause(patience=0.0) if self.failures.is_known else None)
        port = os.environ.get("MASTER_PORT", "")
        self.connections.shut_down(int(port) if port.isdigit() else None)
        shut_down_sockets()
