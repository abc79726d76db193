"""Passes over the lists of actions: adding sends and receives, posting receives early, proving sends received."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lightning_hybrid.pipeline_parallel.schedules.actions import Action, ChannelKey, Schedule


def add_communication(schedule: Schedule) -> Schedule:
    """Add the sends and receives to a schedule that only computes.

    The schedule is played once, on all ranks together, in unit time. When a computation finishes whose result another
    rank needs, the send is written on the one list and the receive on the other, at that same time::

        rank 0   0F0 0SEND_F0   0F1 0SEND_F1       0RECV_B0   0B0
                        |              |               ^
                        v              v               |
        rank 1       1RECV_F0   1F0 1RECV_F1   1B0 1SEND_B0   1F1

    So each list is a projection of one global order. Even if each send blocked until its receive is posted, and each
    receive until its message is there, the ranks could not wait in a circle: of all that is not done yet, what comes
    first in the global order can always be done. And on each channel the k-th send meets the k-th receive.

    Raises:
        ValueError: If the computations wait for each other in a circle; names each rank's waiting action.
    """
    lists: list[list[Action]] = [[] for _ in schedule.actions]
    positions = [0] * len(lists)
    nexts = {rank: (actions[0], schedule.needs(actions[0])) for rank, actions in enumerate(schedule.actions) if actions}
    done: set[Action] = set()
    while True:
        # One unit of time: all that can begin does, and what has finished at the end can be used in the next unit.
        ready = {rank: action for rank, (action, needed) in nexts.items() if done >= needed}
        if not ready:
            break
        for rank, action in ready.items():
            lists[rank].append(action)
            positions[rank] += 1
            del nexts[rank]
            if positions[rank] < len(schedule.actions[rank]):
                following = schedule.actions[rank][positions[rank]]
                nexts[rank] = following, schedule.needs(following)
        for rank, action in ready.items():
            done.add(action)
            send = schedule.send_of(action)
            if send is not None:
                receive = schedule.counterpart(send)
                lists[rank].append(send)
                lists[schedule.rank_of(receive.stage)].append(receive)
    waiting = schedule.waiting(positions)
    if waiting:
        raise ValueError(f"schedule {schedule.name!r} deadlocks: {', '.join(waiting)}")
    return replace(schedule, actions=tuple(map(tuple, lists)))


def post_receives_early(schedule: Schedule, extra_in_flight: Sequence[int] = ()) -> Schedule:
    """Post each receive one microbatch earlier, so that its message travels while the rank computes.

    ::

        before    B0 SEND_B0 RECV_F3         F3 SEND_F3  B1 SEND_B1 RECV_F4 F4
        after     B0 SEND_B0         RECV_F4 F3 SEND_F3  B1 SEND_B1         F4

    The receive moves in front of the computation that works on the message before it on its channel (the first one of a
    channel: in front of the computation before its own), and stays behind the sends there, for which others wait. So
    its sender finds the receive posted. With one chunk per rank, a channel needs memory for one message more than the
    one that is being worked on. A receive never moves back, and never past another one of its channel. Posting it
    earlier can only let its send pass earlier, so a schedule that did not deadlock still does not.

    Where more is on its way over a link, because messages take a while, as many more receives are posted: a sender has
    to know of a receive before it can send.

    On a device, a posted receive is a kernel that runs until its message is there. Where the host then waits for all of
    the device (memory is freed, a kernel is loaded, the user's code or a profiler asks for it), a message that needs
    what this rank has not enqueued yet would never come. So a receive also stays behind the last send of its own rank
    that its message depends on::

        gpipe, rank 0   F2 SEND_F2           F3 SEND_F3 RECV_B0    B0
                                  ^--------------------' before F3: B0 of rank 1 waits for F3, which waits for this host

    Args:
        schedule: With its communication.
        extra_in_flight: For each link between neighbouring ranks, how many microbatches more are on their way over it;
            nothing for none.
    """
    needed, extra = _last_sends_before(schedule), extra_in_flight or [0] * (schedule.num_ranks - 1)
    lists = (tuple(_post_early(schedule, actions, needed, extra)) for actions in schedule.actions)
    return replace(schedule, actions=tuple(lists), posts_early=True)


def _last_sends_before(schedule: Schedule) -> dict[Action, int]:
    """For each receive the computation of its rank behind which it may be posted: how many come before.

    The last one whose result the message depends on by way of other ranks. Found with one clock per rank, as in
    :func:`prove_sends_received`.
    """
    ranks = range(schedule.num_ranks)
    known = [[0] * schedule.num_ranks for _ in ranks]  # known[rank][other]: computations that rank's results depend on
    computed = [0 for _ in ranks]
    clocks: dict[Action, list[int]] = {}

    def do(rank: int, action: Action) -> bool:
        if action.kind.is_send:
            clocks[action] = [*known[rank]]
            clocks[action][rank] = computed[rank]
        elif action.kind.is_compute:
            send = schedule.send_for(action)
            if send is not None and send not in clocks:
                return False
            if send is not None:
                known[rank] = list(map(max, known[rank], clocks[send]))
            computed[rank] += 1
        return True

    waiting = schedule.play(do)
    assert not waiting, f"communication deadlocks: {waiting}"
    receives = map(schedule.counterpart, clocks)
    return {receive: clocks[schedule.counterpart(receive)][schedule.rank_of(receive.stage)] for receive in receives}


def _post_early(
    schedule: Schedule, actions: tuple[Action, ...], needed: Mapping[Action, int], extra: Sequence[int]
) -> list[Action]:
    computations = [action for action in actions if action.kind.is_compute]
    users = {schedule.receive_for(action): number for number, action in enumerate(computations)}
    # gaps[i]: what is between computation i - 1 and computation i
    gaps: list[list[Action]] = [[] for _ in range(len(computations) + 1)]
    early: list[list[Action]] = [[] for _ in range(len(computations) + 1)]
    # By channel, the computations behind which its messages may be posted: before the first one, and those that work on
    # the messages before.
    users_before: dict[ChannelKey, list[int]] = {}
    gap = 0
    for action in actions:
        if action.kind.is_compute:
            gap += 1
        elif action.kind.is_send:
            gaps[gap].append(action)
        else:
            channel = schedule.channel(action)
            before = users_before.setdefault(channel, [max(0, users[action] - 1)])
            sender, receiver, _ = channel
            ahead = 1 + (extra[min(sender, receiver)] if abs(sender - receiver) == 1 else max(extra))
            earlier = max(before[-min(ahead, len(before))], needed[action])
            (early[earlier] if earlier < gap else gaps[gap]).append(action)
            before.append(users[action])
    moved: list[Action] = []
    for number, action in enumerate(computations):
        moved += [*gaps[number], *early[number], action]
    return [*moved, *gaps[-1]]


def prove_sends_received(schedule: Schedule) -> Schedule:
    """Prove, without asking, which sends have been received; fills :attr:`Schedule.retired`.

    A rank that holds a message knows all that its sender did before sending it, and all that the sender knew of others.
    If one of the rank's own messages was used by then, it has arrived and its memory can go::

        rank 0   0F0 0SEND_F0   0F1 0SEND_F1                  0B0
                        |              |               ^
                        v              v               |
        rank 1                  1F0            1B0 1SEND_B0   1F1

    When ``0B0`` has its gradient, ``1F0`` has run: ``0SEND_F0`` is retired there. ``0SEND_F1`` may still be under way.

    Nothing is measured and no message is added. Sends without a proof (the last ones of a step, and in evaluation most)
    have to be waited for, which cannot deadlock (see :func:`~.validation.validate`).

    This is Lamport's "happened before" with one clock per rank (https://dl.acm.org/doi/10.1145/359545.359563).
    """
    ranks = range(schedule.num_ranks)
    uses = [[schedule.send_for(action) for action in actions] for actions in schedule.actions]
    known = [[0] * schedule.num_ranks for _ in ranks]  # known[rank][other]: how much of the other's list is surely done
    clocks: dict[Action, list[int]] = {}  # for each send, what its sender knew
    proofs: list[list[tuple[Action, ...]]] = [[] for _ in ranks]

    def do(rank: int, action: Action) -> bool:
        proven: list[Action] = []
        send = uses[rank][known[rank][rank]]
        if send is not None:
            if send not in clocks:
                return False
            for other, (old, new) in enumerate(zip(known[rank], clocks[send], strict=True)):
                if other != rank and new > old:
                    used = (own for own in uses[other][old:new] if own is not None)
                    proven += [own for own in used if schedule.rank_of(own.stage) == rank]
                    known[rank][other] = new
        elif action.kind.is_send:
            clocks[action] = [*known[rank]]
        proofs[rank].append(tuple(proven))
        known[rank][rank] += 1
        return True

    waiting = schedule.play(do)
    assert not waiting, f"the schedule deadlocks ({waiting}): validate it first"
    return replace(schedule, retired=tuple(map(tuple, proofs)))
