"""Proving that a schedule is complete and cannot deadlock."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import product
from typing import NoReturn

from lightning_hybrid.pipeline_parallel.schedules.actions import Action, ChannelKey, Schedule
from lightning_hybrid.pipeline_parallel.schedules.kinds import COMPUTATIONS, Kind, Result


def validate(schedule: Schedule) -> None:
    """Prove that every rank gets to the end of its list and that nothing is missing.

    1. Every stage computes its outputs, and in a schedule with backward all gradients, exactly once for each
       microbatch; each result that another rank needs has one send and one receive; nothing else is in the lists.
    2. On its own list, a backward comes after its forward, a receive is posted before the computation that needs it,
       and a send follows the computation that makes it.
    3. On each channel the k-th send meets the k-th receive.
    4. Nothing deadlocks, even if every send blocks until its receive is posted.

    Whoever executes the lists may therefore wait for any of a rank's earlier sends at any time.

    Raises:
        ValueError: If one of these does not hold. A deadlock names each rank's waiting action.
    """
    _check_complete(schedule)
    _check_own_order(schedule)
    _check_channels(schedule)
    _check_progress(schedule)


def _check_complete(schedule: Schedule) -> None:
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
    return next(kind for kind in COMPUTATIONS if result in kind.results)


def _check_own_order(schedule: Schedule) -> None:
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
    if action.kind.is_receive:
        return []
    if action.kind.is_send:
        return [schedule.computation_of(action)]
    own_rank = schedule.rank_of(action.stage)
    needed = [other for other in schedule.needs(action) if schedule.rank_of(other.stage) == own_rank]
    receive = schedule.receive_for(action)
    return needed if receive is None else [*needed, receive]


def _check_channels(schedule: Schedule) -> None:
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
    passed: set[Action] = set()

    def do(_: int, action: Action) -> bool:
        # A send waits until its receive is posted; a receive only posts.
        blocker = schedule.counterpart(action) if action.kind.is_send else schedule.send_for(action)
        if blocker is not None and blocker not in passed:
            return False
        passed.add(action)
        return True

    waiting = schedule.play(do)
    if waiting:
        _fail(schedule, f"it deadlocks: {', '.join(waiting)}")


def _fail(schedule: Schedule, problem: str) -> NoReturn:
    raise ValueError(
        f"schedule {schedule.name!r} ({schedule.num_ranks} ranks, {schedule.num_chunks} chunks, "
        f"{schedule.num_microbatches} microbatches) is wrong: {problem}"
    )
