"""Bytes from one rank to others of its group, by messages whose receives are posted ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.distributed.messages.host_messages import HostMessages, Work
from lightning_hybrid.torch_internals import is_profiling

_MOST_PENDING = 8  # messages to one rank that gloo has not sent


class PostedBroadcast:
    """Bytes from one rank to all of a group, again and again, by messages whose receives are posted ahead.

    In a broadcast of gloo every rank waits, the source too: for the others to ask for it, which is one delay of the
    link between them, and for the bytes, which is another one. Here only who reads waits, and for one delay::

        source    send 1                send 2               the next step: nobody has waited
                       `-------.             `-------.
        others    post 1    receive 1, post 2     receive 2, post 3

    The messages go along a binomial tree. A rank hands on what it reads, so the source of a large group does not send
    to everyone, and neighbours, which are on one machine, mostly hear from neighbours::

        ranks relative to the source    0 --> 4, 2, 1    4 --> 6, 5    2 --> 3    6 --> 7

    A message for some ranks alone takes the branches that lead to these.

    A receive stays posted when a run is over, so one of these lives as long as its group.

    Args:
        messages: Between the ranks.
        source: The rank inside the group that sends.
        tag: Of these messages, and of no others between ranks of this group.
        name: What is sent, for messages about ranks that wait.

    Attributes:
        source: The rank inside the group that sends.
        is_source: Whether that is this rank.
        awaited: What this rank waits for: the channel, the global rank that has to do something, and the number of the
            message; ``None`` if it does not wait. Another thread may ask.
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
        # For each the ranks to which it hands on what it gets, itself among them.
        self._children = {
            (position + step + source) % size: frozenset(
                (each + source) % size for each in range(position + step, min(position + 2 * step, size))
            )
            for step in steps
            if position + step < size
        }
        self._branch = frozenset({rank}).union(*self._children.values())
        # (channel, global rank at its other end)
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
        """Itself, as a group: callbacks copy modules, and what refers to this."""
        return self

    def passes(self, readers: Collection[int] | None) -> bool:
        """Whether a message for some ranks of the group, or for all, comes by here."""
        return readers is None or not self._branch.isdisjoint(readers)

    def send(self, data: Tensor, readers: Collection[int] | None = None) -> None:
        """On the source: send a message; it waits only where many are under way.

        Args:
            data: Contiguous. It must not be changed any more.
            readers: The ranks of the group that it is for; ``None`` for all.
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
        """On the others: receive one more message that :meth:`passes`.

        Args:
            data: Into this tensor, which is contiguous and as long as what is sent.
            readers: The ranks of the group that it is for; ``None`` for all.
        """
        assert self._parent is not None
        self._num_posted += 1
        self._posted.append((self._messages.recv([data], self._parent, self._tag), data, readers))

    def post_ahead(self, num_bytes: int) -> None:
        """On the others: post the receive of the next message, for :meth:`receive`.

        Not while torch's profiler runs: a message of gloo that is under way writes its end into the cycle of the
        profiler in which it began, which may have been freed.
        """
        if not is_profiling():
            self.post(torch.empty(num_bytes, dtype=torch.uint8))

    def receive(self, num_bytes: int) -> Tensor:
        """On the others: wait for the next message, of this length; its receive is posted now unless it has been."""
        if not self._posted:
            self.post(torch.empty(num_bytes, dtype=torch.uint8))
        return self.wait()

    def wait(self) -> Tensor:
        """On the others: wait for the message of the first receive that was posted."""
        work, data, readers = self._posted.popleft()
        assert self._from is not None
        self.awaited = *self._from, self._num_posted - len(self._posted)
        work.wait()
        self.awaited = None
        if self._children:
            self.send(data.clone(), readers)  # what was received is the caller's
        return data

    def retire(self, most: int = 0) -> None:
        """Wait until the latest ``most`` messages are all that gloo may not have sent; sockets have copies."""
        while len(self._pending) > most:
            work, _, child, number = self._pending[0]
            channel, rank = self._to[child]
            self.awaited = _receipt(channel), rank, number
            work.wait()
            self._pending.popleft()
        self.awaited = None

    def progress(self) -> dict[str, int]:
        """How many messages this rank has sent, and how many receives it has posted, by channel; any thread may ask."""
        sent = {self._to[child][0]: number for child, number in self._num_sent.items()}
        return sent if self._from is None else {**sent, _receipt(self._from[0]): self._num_posted}

    def abandon(self) -> None:
        """Drop what is under way, after a failure: it keeps connections open."""
        self._pending.clear()
        self._posted.clear()


def _channel(name: str, sender: int, receiver: int) -> str:
    return f"{name} from rank {sender} to rank {receiver}"


def _receipt(channel: str) -> str:
    return f"receipt of {channel}"
