"""The messages that a rank sends in a computation.

`OperationCounter` counts them in a dry run, :mod:`~.dry_run.stage_parts` adds them up for a stage, and the cost model
converts them to seconds: it multiplies hops by the latency of a link, and divides bytes by its bandwidth. Bytes alone
are not enough: a ring of small messages takes as long as its hops, and a collective also waits until all ranks have
started it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Messages:
    """The messages that a rank sends.

    Attributes:
        sent: The number of bytes.
        hops: The number of messages that are sent one after the other. Each of them takes the latency of the link.
        collectives: The number of collectives; each message of ring attention counts as one.
    """

    sent: float = 0.0
    hops: float = 0.0
    collectives: float = 0.0

    def __add__(self, other: Messages) -> Messages:
        return Messages(self.sent + other.sent, self.hops + other.hops, self.collectives + other.collectives)

    def __mul__(self, number: float) -> Messages:
        return Messages(self.sent * number, self.hops * number, self.collectives * number)


NO_MESSAGES = Messages()


@dataclass(frozen=True)
class Exchange:
    """The messages of a computation in one process group, such as the tensor-parallel group.

    Attributes:
        forward: The messages of a forward.
        backward: The messages of a backward, without the repeated messages.
        repeated: Bytes of the forward that the backward sends again, because it recomputes the forward.
    """

    forward: Messages = NO_MESSAGES
    backward: Messages = NO_MESSAGES
    repeated: float = 0.0

    def __add__(self, other: Exchange) -> Exchange:
        return Exchange(self.forward + other.forward, self.backward + other.backward, self.repeated + other.repeated)

    def __mul__(self, number: int) -> Exchange:
        return Exchange(self.forward * number, self.backward * number, self.repeated * number)

    def between(self, size: int) -> Exchange:
        """Return the messages of a rank in a group of a size, if these are all-to-alls of all of its rows.

        The rank keeps a share of the rows, and receives the other shares one after the other.
        """
        share = (size - 1) / size

        def messages(of_rows: Messages) -> Messages:
            return Messages(share * of_rows.sent, (size - 1) * of_rows.collectives, of_rows.collectives)

        return Exchange(messages(self.forward), messages(self.backward), share * self.repeated)

    @property
    def repeated_share(self) -> float:
        """The share of the forward's messages that the backward sends again."""
        return self.repeated / self.forward.sent if self.forward.sent else 0.0

    @property
    def sent(self) -> float:
        """Bytes that a rank sends in a forward and a backward."""
        return (1 + self.repeated_share) * self.forward.sent + self.backward.sent


NO_EXCHANGE = Exchange()


def in_ring(size: int, passes: int, num_bytes: float) -> Messages:
    """Return the messages of a rank in a collective that a ring runs.

    Args:
        size: The number of ranks of the group.
        passes: The number of times that the tensor passes through the ring: 2 for an all-reduce, and 1 for an
            all-gather, a reduce-scatter or an all-to-all.
        num_bytes: The bytes of the full tensor; for an all-to-all, of the tensor of one rank.
    """
    if size == 1:
        return NO_MESSAGES
    return Messages(passes * (size - 1) / size * num_bytes, passes * (size - 1), 1)
