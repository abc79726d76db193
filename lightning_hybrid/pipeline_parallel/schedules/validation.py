"""Validation of schedules: a schedule is complete and cannot deadlock.

:func:`~..schedules.complete` calls :func:`validate` once for each schedule, before its first step. Without it, an error
in a generator would only show as ranks that wait for each other in a step until a timeout.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import product
from typing import NoReturn

from lightning_hybrid.pipeline_parallel.schedules.actions import Action, ChannelKey, Schedule
from lightning_hybrid.pipeline_parallel.schedules.kinds import COMPUTATIONS, Kind, Result


def validate(schedule: Schedule) -> None:
    """Prove that every rank reaches the end of its list and that no action is missing.

    1. Every stage computes its outputs, and in a schedule with backward all gradients, exactly once for each
       microbatch. Each result that another rank needs has one send and one receive. The lists contain no other actions.
    2. In each list, a backward comes after its forward, a receive is posted before the computation that needs it, and a
       send comes after the computation whose result it sends.
    3. On each channel, the k-th send matches the k-th receive.
    4. The schedule does not deadlock, even if every send blocks until its receive is posted.

    So the engine may wait for any earlier send of its rank at any time.

    Raises:
        ValueError: If a condition does not hold. For a deadlock, the message names the action that each rank waits at.
    """
    _check_complete(schedule)
    _check_own_order(schedule)
    _check_channels(schedule)
    _check_progress(schedule)


def _check_complete(schedule: Schedule) -> None:
    """Raise an error if an action is missing, repeated or not needed (condition 1)."""
    if len(schedule.actions) != schedule.num_ranks:
        _fail(schedule, f"it has {len(schedule.actions)} lists of actions for {schedule.num_ranks} ranks")
    results = [result for result in Result if schedule.has_backward or result is Result.OUTPUTS]
    for rank, actions in enumerate(schedule.actions):
        counts = Counter(actions)
        makers: dict[tuple[int, int, Result], list[Action]] = defaultdict(list)
        for action in counts:
            for result in action.kind.results:
                makers[action.stage, action.microbatch, result].append(action)
        expected: set[Action] = set()
        repeated = [action for action in counts if counts[action] > 1]
        for key in product(schedule.placement.stages_of(rank), range(schedule.num_microbatches), results):
            stage, microbatch, result = key
            made_by = makers[key] or [Action(stage, _usual_kind(result), microbatch)]
            repeated += made_by[1:]
            expected.update(made_by)
        messages = [(schedule.receive_for(action), schedule.send_of(action)) for action in expected]
        expected.update(message for pair in messages for message in pair if message is not None)
        for problem, culprits in {
            "lacks": [action for action in expected if action not in counts],
            "repeats": repeated,
            "does not need": [action for action in counts if action not in expected],
        }.items():
            if culprits:
                _fail(schedule, f"rank {rank} {problem} {', '.join(sorted(map(str, culprits)))}")


def _usual_kind(result: Result) -> Kind:
    """Return the first kind of computation that makes a result."""
    return next(kind for kind in COMPUTATIONS if result in kind.results)


def _check_own_order(schedule: Schedule) -> None:
    """Raise an error if an action of a rank comes before another action that it needs (condition 2)."""
    for rank, actions in enumerate(schedule.actions):
        before: set[Action] = set()
        for position, action in enumerate(actions):
            for needed in _needed_on_own_list(schedule, action):
                if needed not in before:
                    _fail(
                        schedule,
                        f"rank {rank} runs {action} (position {position}) before {needed}, which must come first",
                    )
            before.add(action)


def _needed_on_own_list(schedule: Schedule, action: Action) -> list[Action]:
    """Return the actions in the same list that must come before an action."""
    if action.kind.is_receive:
        return []
    if action.kind.is_send:
        return [schedule.computation_of(action)]
    own_rank = schedule.rank_of(action.stage)
    needed = [other for other in schedule.needs(action) if schedule.rank_of(other.stage) == own_rank]
    receive = schedule.receive_for(action)
    return needed if receive is None else [*needed, receive]


def _check_channels(schedule: Schedule) -> None:
    """Raise an error if sends and receives of a channel are in a different order (condition 3)."""
    sends: dict[ChannelKey, list[Action]] = defaultdict(list)
    receives: dict[ChannelKey, list[Action]] = defaultdict(list)
    for actions in schedule.actions:
        for action in actions:
            if action.kind.is_send:
                sends[schedule.channel(action)].append(action)
            elif action.kind.is_receive:
                receives[schedule.channel(action)].append(action)
    for channel, sent in sends.items():
        for number, (send, receive) in enumerate(zip(sent, receives[channel], strict=True)):
            if schedule.counterpart(send) != receive:
                sender, receiver, what = channel
                _fail(
                    schedule,
                    f"{what} number {number} from rank {sender} to rank {receiver} is {send} on the sender but"
                    f" {receive} on the receiver",
                )


def _check_progress(schedule: Schedule) -> None:
    """Raise an error if the schedule deadlocks (condition 4)."""
    passed: set[Action] = set()

    def do(_: int, action: Action) -> bool:
        # A send waits until its receive is posted. A receive does not wait.
        blocker = schedule.counterpart(action) if action.kind.is_send else schedule.send_for(action)
        if blocker is not None and blocker not in passed:
            return False
        passed.add(action)
        return True

    waiting = schedule.play(do)
    if waiting:
        _fail(schedule, f"it deadlocks: {', '.join(waiting)}")


def _fail(schedule: Schedule, problem: str) -> NoReturn:
    """Raise an error about a schedule."""
    raise ValueError(
        f"schedule {schedule.name!r} ({schedule.num_ranks} ranks, {schedule.num_chunks} chunks, "
        f"{schedule.num_microbatches} microbatches) is wrong: {problem}"
    )
