"""Passes over the actions of a schedule: add sends and receives, post receives early, prove that sends are received.

:func:`~..schedules.complete` applies them in this order to a schedule that only computes, and validates the schedule
before the proofs. Simulations need no proofs. Each pass takes a schedule and returns a new one.

To *post* a receive is to provide memory for a message and to continue without waiting. A *channel* contains the
messages of one kind (activations or gradients) from one rank to another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lightning_hybrid.pipeline_parallel.schedules.actions import Action, ChannelKey, Schedule


def add_communication(schedule: Schedule) -> Schedule:
    """Add sends and receives to a schedule that only computes.

    The schedule is simulated once, on all ranks together, in unit time. When a computation finishes whose result
    another rank needs, the send is appended to one list and the receive to the other list, at the same time::

        rank 0   0F0 0SEND_F0   0F1 0SEND_F1       0RECV_B0   0B0
                        |              |               ^
                        v              v               |
        rank 1       1RECV_F0   1F0 1RECV_F1   1B0 1SEND_B0   1F1

    So each list is a projection of one global order. Ranks cannot deadlock, even if each send blocked until its receive
    is posted, and each receive until its message arrives: the first unfinished action in the global order can always
    run. Also, on each channel the k-th send matches the k-th receive.

    Raises:
        ValueError: If the computations deadlock. The message names the action that each rank waits at.
    """
    lists: list[list[Action]] = [[] for _ in schedule.actions]
    positions = [0] * len(lists)
    nexts = {rank: (actions[0], schedule.needs(actions[0])) for rank, actions in enumerate(schedule.actions) if actions}
    done: set[Action] = set()
    while True:
        # One unit of time: all ready computations run, and their results can be used in the next unit.
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
    """Post each receive one microbatch earlier, so that its message is transferred while the rank computes.

    ::

        before    B0 SEND_B0 RECV_F3         F3 SEND_F3  B1 SEND_B1 RECV_F4 F4
        after     B0 SEND_B0         RECV_F4 F3 SEND_F3  B1 SEND_B1         F4

    The receive moves before the computation that works on the previous message of its channel. The first receive of a
    channel moves before the computation before its own. It stays after the sends at that position, because other ranks
    wait for them. So the sender finds the receive posted. With one chunk per rank, a channel needs memory for one
    message in addition to the message that is in use. A receive never moves to a later position, and never past another
    receive of its channel. Posting a receive earlier can only let its send finish earlier, so a schedule without
    deadlock stays without deadlock.

    With extra microbatches in flight over a link, more receives are posted by the same number, because a sender can
    only send once the receive is posted.

    On a device, a posted receive is a kernel that runs until its message arrives. The host sometimes waits for all
    kernels of the device: when memory is freed, a kernel is loaded, or the user's code or a profiler synchronizes. If
    the message then depends on an operation that this rank has not enqueued yet, the message never arrives. So a
    receive also stays after the last send of its own rank that its message depends on::

        gpipe, rank 0   F2 SEND_F2           F3 SEND_F3 RECV_B0    B0
                                  ^--------------------' not before F3: B0 of rank 1 needs F3, which this host launches

    Args:
        schedule: A schedule with sends and receives.
        extra_in_flight: The number of extra microbatches in flight over each link between neighboring ranks; empty for
            none.
    """
    needed, extra = _last_sends_before(schedule), extra_in_flight or [0] * (schedule.num_ranks - 1)
    lists = (tuple(_post_early(schedule, actions, needed, extra)) for actions in schedule.actions)
    return replace(schedule, actions=tuple(lists), posts_early=True)


def _last_sends_before(schedule: Schedule) -> dict[Action, int]:
    """Return, for each receive, the number of computations of its rank that must come before it.

    The last of these is the last computation whose result the message depends on through other ranks. It is found with
    one clock per rank, as in :func:`prove_sends_received`.
    """
    ranks = range(schedule.num_ranks)
    known = [[0] * schedule.num_ranks for _ in ranks]  # known[rank][other]: number of computations that rank depends on
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
    """Return the list of a rank with its receives moved to earlier positions.

    Args:
        schedule: The schedule.
        actions: The list of the rank.
        needed: The result of :func:`_last_sends_before`.
        extra: The number of extra microbatches in flight over each link.
    """
    computations = [action for action in actions if action.kind.is_compute]
    users = {schedule.receive_for(action): number for number, action in enumerate(computations)}
    # gaps[i]: the sends and receives between computation i - 1 and computation i
    gaps: list[list[Action]] = [[] for _ in range(len(computations) + 1)]
    early: list[list[Action]] = [[] for _ in range(len(computations) + 1)]
    # By channel, the computations before which its receives may be posted: the computation before the user of the first
    # message, and the users of earlier messages.
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
    """Prove which sends have been received, without messages, and set :attr:`Schedule.retired`.

    A rank that has received a message knows all actions that the sender completed before sending it, and all actions
    that the sender knew to be complete on other ranks. If one of these actions used a message of this rank, the message
    has arrived and its memory can be freed::

        rank 0   0F0 0SEND_F0   0F1 0SEND_F1                  0B0
                        |              |               ^
                        v              v               |
        rank 1                  1F0            1B0 1SEND_B0   1F1

    When ``0B0`` has its gradient, ``1F0`` has run, so ``0SEND_F0`` is retired. ``0SEND_F1`` may still be unfinished.

    Without proofs, the engine would have to wait for each send, or keep the tensors of all sends until the end of the
    step. Sends without a proof are the last sends of a step, and most sends in evaluation. The engine has to wait for
    them, which cannot deadlock (see :func:`~.validation.validate`).

    Validate the schedule first: a schedule that deadlocks raises an `AssertionError`.

    This is Lamport's "happened before" relation with one clock per rank (https://dl.acm.org/doi/10.1145/359545.359563).
    """
    ranks = range(schedule.num_ranks)
    uses = [[schedule.send_for(action) for action in actions] for actions in schedule.actions]
    known = [[0] * schedule.num_ranks for _ in ranks]  # known[rank][other]: number of `other`'s actions surely done
    clocks: dict[Action, list[int]] = {}  # for each send, the sender's `known` at that time
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
