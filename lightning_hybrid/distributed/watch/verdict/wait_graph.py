"""A search for ranks that wait for each other forever: which rank waits for which, and if any of them can continue.

The judge calls :func:`find_deadlock` with the waits that watchers have written into records. A timeout would also end a
deadlock, but only after minutes, and without the calls that differ. *Collective 57* is the 57th collective of its
group, counted on each rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from lightning_hybrid.distributed.watch.record import Waiting

MOST = 8  # the number of ranks in one text


def find_deadlock(waiting: Mapping[int, Waiting]) -> tuple[set[int], str] | None:
    """Return the ranks that wait for each other forever, and a text with the reason.

    ::

        rank 0  waits for collective 57 of {0, 1}, which rank 1 has not started ---.    no other rank is waited for, so
        rank 1  waits for message 12 of rank 0, which rank 0 has not sent    <-----'    neither rank can ever continue
        rank 2  waits for rank 3, which computes: not a fault, however long that takes

    If all ranks have started a collective, or a message has been sent, the wait ends at some time, even on a slow
    network. A collective never ends if its kind is not the same on all of its ranks.

    Args:
        waiting: What each rank that does not move waits for, by rank, all at one moment. Other ranks may start anything
            at any time.

    Returns:
        The ranks, and a text with their names, waits and places; ``None`` if no ranks wait for each other forever.
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
    """Yield the missing calls that block a rank: (the other rank, True if it called something else, a description)."""
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
    alike: dict[str, list[int]] = {}  # the ranks of each text
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
    for text, ranks in list(alike.items())[:MOST]:
        waits = "" if waiting[ranks[0]].finished else "wait " if len(ranks) > 1 else "waits "
        told.append(f"{ranks_text(ranks)} {waits}{text}")
    return (
        f"Deadlock: the ranks made different calls and are waiting for each other: {'; '.join(told)}. {ADVICE} [LH227]"
    )


#: The advice if ranks make different calls.
ADVICE = (
    "All ranks must communicate in the same order. For example, do not call a torch collective or `self.log` in a hook,"
    " save a checkpoint, set `should_stop` or return -1 from `on_train_batch_start` on only some ranks. All ranks also"
    " need the same number of batches, the same arguments and the same callbacks."
)


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks as text: ``"rank 3"``, ``"ranks 0-3"``, ``"ranks 0, 2"``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:MOST]))}{', ...' if len(ranks) > MOST else ''}"
