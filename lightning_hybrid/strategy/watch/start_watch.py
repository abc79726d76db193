"""The watch thread of a rank, from the creation of the store until the first run.

`HybridStrategy` makes a :class:`StartWatch` as soon as the store of all ranks exists, before process groups do. `World`
then passes it to `RunWatch`, which adds checks to the same thread. One class does not suffice, because a rank may also
fail or hang while groups are made and the module is sharded, when no mesh exists yet.

The *store* is torch's key-value store on the first node. The *watcher* is the watch thread. The *board* is the part of
the store through which watchers exchange information: *records* of ranks, flags, and the first failure.
"""

from __future__ import annotations

import os

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from lightning_hybrid.config import Settings
from lightning_hybrid.distributed.failure import close_groups, is_transport
from lightning_hybrid.distributed.messages.host_messages import shut_down_sockets
from lightning_hybrid.distributed.process_group import has_nccl
from lightning_hybrid.distributed.watch.board import Board
from lightning_hybrid.distributed.watch.connections import Connections
from lightning_hybrid.distributed.watch.failures import Failures
from lightning_hybrid.distributed.watch.rank_watch import RankWatch
from lightning_hybrid.distributed.watch.verdict.heartbeats import Heartbeats
from lightning_hybrid.distributed.watch.watched_thread import WatchedThread
from lightning_hybrid.distributed.watch.watcher import Watcher


class StartWatch:
    """The watch of this rank until `RunWatch` extends it. With a single process, no thread starts.

    ::

        store     groups are made   mesh    module parallelized ... first run     ... second run
        |------- this ------------------| RunWatch: the same thread, with more checks ...

    For the watch, the first run begins as soon as there is a store. A rank that is blocked in the setup is blocked in
    C++, often in a call of the store, where closing a connection cannot wake it. Its process then exits, with the
    cause.

    Args:
        store: A store that all ranks see.
        watched: A second client of the store, only for the watcher, because a client is locked while it waits for a
            key.
        config: The settings, with the timeouts.
        connections: The connections of the process groups.
        rank: The global rank of this process.
        size: The number of ranks.

    Attributes:
        store: The argument `store`.
        watched: The argument `watched`.
        connections: The argument `connections`.
        board: The board, over `store`.
        watched_board: The board, over `watched`.
        failures: The first failure.
        thread: The thread of the run.
        rank_watch: Finds failures.
        watcher: The watch thread.
        is_first_run: True if no run has ended yet.
    """

    def __init__(
        self, store: Store, watched: Store, config: Settings, connections: Connections, *, rank: int, size: int
    ) -> None:
        self.store, self.watched, self.connections, self._rank = store, watched, connections, rank
        self.board = Board(store, rank=rank, size=size)
        self.watched_board = self.board.over(watched)
        self.failures = Failures(self.board)
        if size > 1:
            self.failures.begin()  # before all else: ranks cannot detect the loss of a rank that has not begun
        self.thread = WatchedThread()
        self.is_first_run = size > 1
        stall, silence = config.seconds_to_stall, config.seconds_of_heartbeat
        place = self.thread.place
        self.rank_watch = RankWatch(
            self.failures,
            self.watched_board,
            thread=self.thread,
            heartbeats=None if silence is None else Heartbeats(self.watched_board, seconds=silence, place=place),
            abort=self._abort,
            interrupt=lambda exception: False,
            num_lost=connections.num_lost,
            parent=os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None,
        )
        self.watcher = Watcher(
            self.rank_watch.look,
            descriptors=self.rank_watch.descriptors,
            patience=min(filter(None, (stall, silence)), default=None),
            stuck=self.rank_watch.end_without_store,
        )
        if size > 1:
            self.board.learn_host(0, os.environ.get("MASTER_ADDR"))  # until its record contains the name of its node
            self.watcher.start()
            self.watcher.wake()

    def leave(self, exception: BaseException) -> BaseException | None:
        """Report an exception to the other ranks and leave the groups, unless all ranks raise the exception.

        `HybridStrategy.on_exception` calls this if the exception is raised before the mesh exists.

        Args:
            exception: The exception. A `ValueError` or `TypeError` is one that all ranks raise.

        Returns:
            The exception of another rank, if the exception of this rank only reports that another rank has left;
            otherwise ``None``.
        """
        # All ranks raise these, and the user can continue with other arguments.
        if isinstance(exception, (ValueError, TypeError)):
            self.failures.leave_together()
            return None
        cause = self.failures.leave(exception, f"Rank {self._rank}", lambda: None)
        return cause if is_transport(exception) else None

    def close(self) -> None:
        """Stop the watch thread, and end the checks of this run."""
        self.watcher.close()
        self.rank_watch.close()

    def _abort(self) -> None:
        """Wake this rank if it is blocked in a collective or message."""
        if dist.is_initialized() and has_nccl():
            close_groups(self.failures.cause(patience=0.0) if self.failures.is_known else None)
        port = os.environ.get("MASTER_PORT", "")
        self.connections.shut_down(int(port) if port.isdigit() else None)
        shut_down_sockets()
