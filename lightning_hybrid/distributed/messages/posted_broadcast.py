"""Broadcasts of bytes from one rank to the other ranks of its group, by messages whose receives are posted ahead.

`Mesh.posted_broadcast` makes these objects, one for each use and source: signals before each batch
(`strategy.watch.signals`), and the batches, results and layers that :class:`~.tree_broadcast.TreeBroadcast` sends
through them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.distributed.messages.host_messages import HostMessages, Work
from lightning_hybrid.torch_internals import is_profiling

_MOST_PENDING = 8  # pending messages of gloo to one rank


class PostedBroadcast:
    """A repeated broadcast of bytes from one rank to the other ranks of a group, with receives that are posted ahead.

    In a broadcast of gloo, every rank waits for two delays of the link, even the source: one for the request of the
    receivers, and one for the bytes. Here only receivers wait, for one delay::

        source    send 1                send 2               the next step, without a wait
                       `-------.             `-------.
        others    post 1    receive 1, post 2     receive 2, post 3

    Ranks forward messages along a binomial tree. So the source of a large group does not send to every rank. Most
    messages are between neighboring ranks, which are often on one node::

        ranks relative to the source    0 --> 4, 2, 1    4 --> 6, 5    2 --> 3    6 --> 7

    A message for only some of the ranks is sent along the branches that lead to these ranks.

    Receives stay posted between runs, so this object lives as long as its group.

    Args:
        messages: The messages between the ranks.
        source: The rank in the group that sends.
        tag: The tag of these messages, which no other messages between ranks of this group have.
        name: The name of the broadcast, for texts about waiting ranks.

    Attributes:
        source: The rank in the group that sends.
        is_source: True if this rank is the source.
        awaited: The message that this rank waits for: its channel, the global rank that must act (the sender, or the
            receiver that must post its receive), and its number from 1; ``None`` if this rank does not wait. Other
            threads may read this.
    """

    def __init__(self, messages: HostMessages, source: int, tag: int, name: str) -> None:
        self._messages, self._tag = messages, tag
        rank, ranks = messages.rank, messages.ranks
        size = len(ranks)
        self.source, self.is_source = source, rank == source
        position = (rank - source) % size
        span = position & -position or 1 << (size - 1).bit_length()
        steps = (span >> bits for bits in range(1, span.bit_length()))
        self._parent = None if self.is_source else (position - span + source) % size
        # The ranks to which this rank forwards messages, each with all ranks of its branch, including itself.
        self._children = {
            (position + step + source) % size: frozenset(
                (each + source) % size for each in range(position + step, min(position + 2 * step, size))
            )
            for step in steps
            if position + step < size
        }
        self._branch = frozenset({rank}).union(*self._children.values())
        # (channel, global rank at the other end)
        self._from = (
            None if self._parent is None else (_channel(name, ranks[self._parent], ranks[rank]), ranks[self._parent])
        )
        self._to = {child: (_channel(name, ranks[rank], ranks[child]), ranks[child]) for child in self._children}
        self._pending: deque[tuple[Work, Tensor, int, int]] = deque()
        self._posted: deque[tuple[Work, Tensor, Collection[int] | None]] = deque()
        self._num_sent = dict.fromkeys(self._children, 0)
        self._num_posted = 0
        self.awaited: tuple[str, int, int] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> PostedBroadcast:
        """Return the same object, as for a group: callbacks copy modules, which may refer to this object."""
        return self

    def passes(self, readers: Collection[int] | None) -> bool:
        """Return True if a message passes through this rank.

        Args:
            readers: The ranks of the group that the message is for; ``None`` for all ranks.
        """
        return readers is None or not self._branch.isdisjoint(readers)

    def send(self, data: Tensor, readers: Collection[int] | None = None) -> None:
        """Send a message from the source. This waits only if many messages are pending.

        Args:
            data: The message, which is contiguous and must not be modified afterwards.
            readers: The ranks of the group that the message is for; ``None`` for all ranks.
        """
        for child, branch in self._children.items():
            if readers is None or not branch.isdisjoint(readers):
                self._num_sent[child] += 1
                work = self._messages.send([data], child, self._tag)
                if work is not None:
                    self._pending.append((work, data, child, self._num_sent[child]))
        if self._pending:
            self.retire(0 if is_profiling() else _MOST_PENDING * len(self._children))

    def post(self, data: Tensor, readers: Collection[int] | None = None) -> None:
        """Post the receive of the next message that passes through this rank. The source does not call this.

        Args:
            data: A contiguous tensor with the length of the message, which gets the values.
            readers: The ranks of the group that the message is for; ``None`` for all ranks.
        """
        assert self._parent is not None
        self._num_posted += 1
        self._posted.append((self._messages.recv([data], self._parent, self._tag), data, readers))

    def post_ahead(self, num_bytes: int) -> None:
        """Post the receive of the next message, for :meth:`receive`. The source does not call this.

        Nothing is posted while torch's profiler runs. When a pending gloo message ends, it writes into the profiler
        cycle in which it began, and that cycle may have been freed.

        Args:
            num_bytes: The length of the message.
        """
        if not is_profiling():
            self.post(torch.empty(num_bytes, dtype=torch.uint8))

    def receive(self, num_bytes: int) -> Tensor:
        """Wait for the next message, and post its receive if it is not posted. The source does not call this.

        Args:
            num_bytes: The length of the message.
        """
        if not self._posted:
            self.post(torch.empty(num_bytes, dtype=torch.uint8))
        return self.wait()

    def wait(self) -> Tensor:
        """Wait for the message of the first posted receive, and forward it. The source does not call this.

        Returns:
            The tensor that was passed to :meth:`post`.
        """
        work, data, readers = self._posted.popleft()
        assert self._from is not None
        self.awaited = *self._from, self._num_posted - len(self._posted)
        work.wait()
        self.awaited = None
        if self._children:
            self.send(data.clone(), readers)  # a copy, because the caller may modify the data
        return data

    def retire(self, most: int = 0) -> None:
        """Wait until gloo has at most ``most`` pending messages. Messages in sockets are copies, and do not count."""
        while len(self._pending) > most:
            work, _, child, number = self._pending[0]
            channel, rank = self._to[child]
            self.awaited = _receipt(channel), rank, number
            work.wait()
            self._pending.popleft()
        self.awaited = None

    def progress(self) -> dict[str, int]:
        """Return the number of messages sent and of receives posted, by channel. Any thread may call this."""
        sent = {self._to[child][0]: number for child, number in self._num_sent.items()}
        return sent if self._from is None else {**sent, _receipt(self._from[0]): self._num_posted}

    def abandon(self) -> None:
        """Drop pending messages after a failure, because they keep connections open."""
        self._pending.clear()
        self._posted.clear()


def _channel(name: str, sender: int, receiver: int) -> str:
    return f"{name} from rank {sender} to rank {receiver}"


def _receipt(channel: str) -> str:
    return f"receipt of {channel}"
