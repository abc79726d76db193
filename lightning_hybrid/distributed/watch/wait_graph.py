"""Ranks that wait for each other for ever: who waits for whom, and whether one of them can ever go on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field

_MOST = 8  # ranks in one text


@dataclass
class Waiting:
    """What a rank that does not move waits for, and what it has started before.

    A number says which of the collectives of a group, or of the messages of a channel, from the first one on.

    Attributes:
        collectives: (group, its global ranks, number, kind) of those that have not ended.
        message: (channel, global rank of the sender, number) of a message that has not come.
        started: By group: the number of the first collective that is listed, and the kinds of these in order.
        sent: By channel: how many messages have been sent.
        place: Where it waits, in the user's code if it came from there.
        state: Where its Trainer is.
        finished: Whether its run is over: it will never start anything any more.
    """

    collectives: list[tuple[str, list[int], int, str]] = field(default_factory=list)
    message: tuple[str, int, int] | None = None
    started: dict[str, tuple[int, list[str]]] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    place: str = ""
    state: str = ""
    finished: bool = False

    def dumps(self) -> str:
        """As text."""
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> Waiting:
        """From text."""
        return cls(**json.loads(text))

    def has_started(self, group: str, number: int) -> bool:
        """Whether a collective of a group has been started."""
        first, kinds = self.started.get(group, (0, []))
        return number < first + len(kinds)

    def kind_of(self, group: str, number: int) -> str | None:
        """What a collective that has been started is; ``None`` if that is no longer known."""
        first, kinds = self.started.get(group, (0, []))
        return kinds[number - first] if 0 <= number - first < len(kinds) else None


def find_deadlock(waiting: Mapping[int, Waiting]) -> tuple[set[int], str] | None:
    """Which ranks wait for each other for ever, if any, and why.

    Args:
        waiting: The ranks that do not move, all at one moment. Others may start anything at any time.

    ::

        rank 0  waits for collective 57 of {0, 1}, which rank 1 has not started ---.    nobody else is waited for:
        rank 1  waits for message 12 of rank 0, which rank 0 has not sent    <-----'    neither can ever go on
        rank 2  waits for rank 3, which computes: it is no fault, however long that takes

    What was started everywhere, and what was sent, is on its way: who waits for it goes on, however slow the network
    is. A collective that is of one kind here and of another there ends nowhere.

    Returns:
        The ranks, and a text that names them, what they wait for and where; ``None`` if there are none.
    """
    stuck = set(waiting)
    while True:
        moving = {rank for rank in stuck if not _waits_in_vain(rank, waiting, stuck)}
        if not moving:
            break
        stuck -= moving
    if all(waiting[rank].finished for rank in stuck):
        return None
    return stuck, _describe(waiting, stuck)


def _waits_in_vain(rank: int, waiting: Mapping[int, Waiting], stuck: set[int]) -> bool:
    return waiting[rank].finished or any(other in stuck or differs for other, differs, _ in _missing(rank, waiting))


def _missing(rank: int, waiting: Mapping[int, Waiting]) -> Iterator[tuple[int, bool, str]]:
    """What a rank waits for that has not been started: (who has not, whether something else was, its description)."""
    own = waiting[rank]
    for group, ranks, number, kind in own.collectives:
        for other in ranks:
            if other == rank or other not in waiting:
                continue
            theirs = waiting[other].kind_of(group, number)
            if not waiting[other].has_started(group, number):
                yield other, False, f"`{kind}` of {ranks_text(ranks)}"
            elif theirs is not None and theirs != kind:
                yield other, True, f"`{kind}` of {ranks_text(ranks)}, where that rank called `{theirs}`"
    if own.message is not None:
        channel, sender, number = own.message
        if sender in waiting and waiting[sender].sent.get(channel, 0) < number:
            yield sender, False, f"message {number} ({channel})"


def _describe(waiting: Mapping[int, Waiting], stuck: set[int]) -> str:
    alike: dict[str, list[int]] = {}  # ranks that would be told of in the same words
    for rank in sorted(stuck):
        own = waiting[rank]
        state = f" ({own.state})" if own.state else ""
        if own.finished:
            text = f"reached the end of the run{state}"
        else:
            missing = [each for each in _missing(rank, waiting) if each[0] in stuck or each[1]]
            others = sorted({other for other, *_ in missing})
            text = f"for {ranks_text(others)} in {missing[0][2]}, at {own.place}{state}"
        alike.setdefault(text, []).append(rank)
    told = []
    for text, ranks in list(alike.items())[:_MOST]:
        waits = "" if waiting[ranks[0]].finished else "wait " if len(ranks) > 1 else "waits "
        told.append(f"{ranks_text(ranks)} {waits}{text}")
    return (
        f"Deadlock: the ranks made different calls and are waiting for each other: {'; '.join(told)}. {ADVICE} [LH227]"
    )


#: What to do where ranks do not do the same.
ADVICE = (
    "All ranks must communicate in the same order. For example, do not call a torch collective or `self.log` in a hook,"
    " save a checkpoint, set `should_stop` or return -1 from `on_train_batch_start` on only some ranks. All ranks also"
    " need the same number of batches, the same arguments and the same callbacks."
)


def ranks_text(ranks: list[int]) -> str:
    """Ranks as text: ``"rank 3"``, ``"ranks 0-3"``, ``"ranks 0, 2"``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:_MOST]))}{', ...' if len(ranks) > _MOST else ''}"
