"""What the schedules are, that every one of them is complete and cannot deadlock, and that a wrong one is refused."""

from __future__ import annotations

import itertools
import pickle
import random
import re
from collections import Counter, deque
from dataclasses import replace

import pytest

from lightning_hybrid.pipeline_parallel.schedules import (
    SCHEDULES,
    Action,
    ChannelKey,
    Kind,
    Placement,
    Schedule,
    add_communication,
    build,
    build_forward,
    compute_order,
    compute_schedule,
    post_receives_early,
    validate,
)

# --- A player, written independently of the package ------------------------------------------------------------------

Key = tuple[int, str, int]
#: The kinds of computations of a training step.
COMPUTATIONS = ("B", "F")


def needs_of(key: Key, last: int) -> list[Key]:
    """Return the actions that come before an action in every run; a send waits until its receive is posted."""
    stage, kind, number = key
    needs = {
        "F": [(stage - 1, "F", number)],
        "B": [(stage, "F", number), (stage + 1, "B", number)],
        "SEND_F": [(stage, "F", number), (stage + 1, "RECV_F", number)],
        "SEND_B": [(stage, "B", number), (stage - 1, "RECV_B", number)],
    }
    return [need for need in needs.get(kind, []) if 0 <= need[0] <= last]


def played(schedule: Schedule) -> list[Key]:
    """Return the computations of a run in which each rank waits wherever it can, independently of the package."""
    lists = [[(each.stage, each.kind.value, each.microbatch) for each in actions] for actions in schedule.actions]
    done: set[Key] = set()
    moved = True
    while moved:
        moved = False
        for keys in lists:
            while keys and all(need in done for need in needs_of(keys[0], schedule.num_stages - 1)):
                done.add(keys.pop(0))
                moved = True
    assert not any(lists), "a rank waits for ever"
    return sorted(key for key in done if key[1] in COMPUTATIONS)


# --- The pictures ---------------------------------------------------------------------------------------------------


def staircase(order: tuple[tuple[Action, ...], ...], num_stages: int) -> list[str]:
    """Play an order in unit time; one column of five letters per unit."""
    rows = ["" for _ in order]
    lists = [deque(actions) for actions in order]
    done: set[Key] = set()
    while any(lists):
        now = []
        for rank, actions in enumerate(lists):
            cell = ""
            if actions:
                stage, kind, i = actions[0].stage, actions[0].kind.value, actions[0].microbatch
                if done.issuperset(needs_of((stage, kind, i), num_stages - 1)):
                    now.append((stage, kind, i))
                    cell = f"{stage}{kind}{i}"
                    actions.popleft()
            rows[rank] += cell.ljust(5)
        assert now, "deadlock"
        done.update(now)
    return [row.rstrip() for row in rows]


@pytest.mark.parametrize(
    ("name", "num_chunks", "picture"),
    [
        pytest.param(
            "gpipe",
            1,
            """
            0F0  0F1  0F2  0F3                      0B0  0B1  0B2  0B3
                 1F0  1F1  1F2  1F3            1B0  1B1  1B2  1B3
                      2F0  2F1  2F2  2F3  2B0  2B1  2B2  2B3
            """,
            id="gpipe",
        ),
        pytest.param(
            "1f1b",
            1,
            """
            0F0  0F1  0F2            0B0  0F3  0B1       0B2       0B3
                 1F0  1F1       1B0  1F2  1B1  1F3  1B2       1B3
                      2F0  2B0  2F1  2B1  2F2  2B2  2F3  2B3
            """,
            id="1f1b",
        ),
        pytest.param(
            "interleaved_1f1b",
            2,
            """
            0F0  0F1  2F0  2F1  0F2  2B0  0F3  2B1  2F2  0B0  2F3  0B1       2B2       2B3  0B2  0B3
                 1F0  1F1  3F0  3B0  3F1  3B1  1F2  1B0  1F3  1B1  3F2  3B2  3F3  3B3  1B2  1B3
            """,
            id="interleaved",
        ),
        pytest.param(
            "gpipe",
            2,
            """
            0F0  0F1  0F2  0F3  2F0  2F1  2F2  2F3            2B0  2B1  2B2  2B3  0B0  0B1  0B2  0B3
                 1F0  1F1  1F2  1F3  3F0  3F1  3F2  3F3  3B0  3B1  3B2  3B3  1B0  1B1  1B2  1B3
            """,
            id="gpipe looped over chunks",
        ),
    ],
)
def test_staircase(name: str, num_chunks: int, picture: str) -> None:
    expected = [line[12:] for line in picture.splitlines()[1:-1]]
    num_ranks = len(expected)
    order = compute_order(name, num_ranks, num_microbatches=4, num_chunks=num_chunks)
    assert staircase(order, num_ranks * num_chunks) == expected


def test_fewer_microbatches_than_stages() -> None:
    assert staircase(compute_order("1f1b", 4, 2, 1), 4) == [
        "0F0  0F1                           0B0       0B1",
        "     1F0  1F1                 1B0       1B1",
        "          2F0  2F1       2B0       2B1",
        "               3F0  3B0  3F1  3B1",
    ]


def test_forwards_only() -> None:
    order = tuple(
        tuple(action for action in actions if action.kind is Kind.F)
        for actions in build_forward(Placement.in_turns(2, 2), num_microbatches=3).actions
    )
    assert staircase(order, 4) == [
        "0F0  0F1  0F2  2F0  2F1  2F2",
        "     1F0  1F1  1F2  3F0  3F1  3F2",
    ]


def test_lists_of_two_ranks() -> None:
    schedule = build("1f1b", num_ranks=2, num_microbatches=3)
    assert [" ".join(map(str, actions)) for actions in schedule.actions] == [
        "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0F2 0SEND_F2 0RECV_B2 0B1 0B2",
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1RECV_F2 1F1 1B1 1SEND_B1 1F2 1B2 1SEND_B2",
    ]


def test_one_rank_sends_nothing() -> None:
    assert " ".join(map(str, build("interleaved_1f1b", 1, 2, 2).actions[0])) == "0F0 1F0 1B0 0F1 0B0 1F1 1B1 0B1"


# --- The orders, against independent sources ------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("num_microbatches", [1, 2, 5, 8, 16])
def test_1f1b_warms_up_and_then_alternates(num_ranks: int, num_microbatches: int) -> None:
    for rank, actions in enumerate(compute_order("1f1b", num_ranks, num_microbatches)):
        kinds = "".join(action.kind.value for action in actions)
        kept = min(num_microbatches, num_ranks - rank)
        assert kinds == "F" * kept + "BF" * (num_microbatches - kept) + "B" * kept


@pytest.mark.parametrize("links", [(0, 0, 0), (2, 2, 2), (0, 3, 0), (0, 0, 20)])
def test_what_is_on_its_way_behind_a_rank_has_left_it(links: tuple[int, ...]) -> None:
    for rank, actions in enumerate(compute_order("1f1b", 4, 12, 1, links)):
        kinds = "".join(action.kind.value for action in actions)
        kept = min(12, 4 - rank + sum(links[rank:]))
        assert kinds == "F" * kept + "BF" * (12 - kept) + "B" * kept


@pytest.mark.parametrize(
    ("name", "extra", "words"),
    [("gpipe", (1,), "'gpipe'"), ("1f1b", (1, 1), "1 links"), ("1f1b", (-1,), r"\[-1\]")],
)
def test_what_cannot_be_on_its_way_is_refused(name: str, extra: tuple[int, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        compute_order(name, 2, 4, 1, extra)


@pytest.mark.parametrize("num_chunks", [2, 3, 4])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_interleaved_order_is_the_one_of_torch(num_ranks: int, num_chunks: int) -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    torch_schedule = getattr(schedules, "ScheduleInterleaved1F1B", None)
    if not hasattr(torch_schedule, "_calculate_single_rank_operations"):
        pytest.skip("this torch does not tell the order of its schedule")
    num_compared = 0
    for num_microbatches in range(1, 4 * num_ranks + 1):
        num_rounds = max(1, num_microbatches // num_ranks)
        if num_microbatches % num_rounds:
            continue  # torch refuses it
        oracle = object.__new__(torch_schedule)  # the constructor wants live stages and process groups
        oracle.pp_group_size, oracle.n_local_stages, oracle._n_microbatches = num_ranks, num_chunks, num_microbatches
        oracle.number_of_rounds, oracle.microbatches_per_round = num_rounds, num_microbatches // num_rounds
        for rank, actions in enumerate(compute_order("interleaved_1f1b", num_ranks, num_microbatches, num_chunks)):
            expected = [action for action in oracle._calculate_single_rank_operations(rank) if action is not None]
            assert [*map(str, actions)] == [*map(str, expected)]
        num_compared += 1
    assert num_compared >= 4


def chunks_of(name: str) -> list[int]:
    """The numbers of chunks of a rank that a schedule is tried with; of the forwards of an evaluation too."""
    return [1, 2, 3] if name == "forward" or SCHEDULES[name].takes_chunks else [1]


@pytest.mark.parametrize("name", SCHEDULES)
def test_gradients_of_a_stage_are_added_in_the_same_order_by_every_schedule(name: str) -> None:
    for actions in compute_order(name, num_ranks=3, num_microbatches=7, num_chunks=chunks_of(name)[:2][-1]):
        for stage in {action.stage for action in actions}:
            backwards = [a.microbatch for a in actions if a.kind.completes_gradients and a.stage == stage]
            assert backwards == list(range(7))


def test_interleaved_with_one_chunk_is_1f1b() -> None:
    assert compute_order("interleaved_1f1b", 4, 7, 1) == compute_order("1f1b", 4, 7, 1)


# --- The proof, for all of them -------------------------------------------------------------------------------------


def execute_with_blocking_sends(schedule: Schedule) -> str | None:
    """Run the lists with real queues for messages, written independently of the package; the fault, or ``None``.

    A send blocks until a receive is posted on its channel; then its message goes into the first posted one.
    """
    num_ranks, num_stages = schedule.num_ranks, schedule.num_ranks * schedule.num_chunks
    posted: dict[tuple[int, int, str], deque[tuple[int, int]]] = {}
    messages: dict[tuple[int, str, int], tuple[str, int]] = {}  # (stage, which, microbatch) -> what has come
    results: list[set[tuple[int, str, int]]] = [set() for _ in range(num_ranks)]
    positions = [0] * num_ranks

    def step(rank: int, action: Action) -> bool:
        stage, kind, i = action.stage, action.kind.value, action.microbatch
        if stage % num_ranks != rank:
            raise AssertionError("not on its rank")
        which, shift = kind[-1], 1 if kind[-1] == "F" else -1
        if kind.startswith("RECV"):
            posted.setdefault(((stage - shift) % num_ranks, rank, which), deque()).append((stage, i))
            return True
        if kind.startswith("SEND"):
            assert (stage, which, i) in results[rank], "sends what it does not have"
            waiting = posted.get((rank, (stage + shift) % num_ranks, which))
            if not waiting:
                return False
            receiver, number = waiting.popleft()
            messages[receiver, which, number] = (f"of stage {stage}", i)
            return True
        source = stage - shift
        if 0 <= source < num_stages:
            if source % num_ranks == rank:
                assert (source, which, i) in results[rank], "neighbour on the same rank has not run"
            elif (stage, which, i) not in messages:
                return False
            else:
                assert messages.pop((stage, which, i)) == (f"of stage {source}", i), "wrong message"
        assert which == "F" or (stage, "F", i) in results[rank], "backward before forward"
        assert (stage, which, i) not in results[rank], "twice"
        results[rank].add((stage, which, i))
        return True

    try:
        moved = True
        while moved:
            moved = False
            for rank, actions in enumerate(schedule.actions):
                while positions[rank] < len(actions) and step(rank, actions[positions[rank]]):
                    positions[rank] += 1
                    moved = True
    except AssertionError as error:
        return str(error)
    if any(position < len(actions) for position, actions in zip(positions, schedule.actions, strict=True)):
        return "deadlock"
    if messages or any(posted.values()):
        return "messages left over"
    num_results = schedule.num_chunks * schedule.num_microbatches * (2 if schedule.has_backward else 1)
    return None if all(len(done) == num_results for done in results) else "incomplete"


@pytest.mark.parametrize("num_ranks", range(1, 9))
@pytest.mark.parametrize("name", [*SCHEDULES, "forward"])
def test_every_schedule_is_complete_and_cannot_deadlock(name: str, num_ranks: int) -> None:
    for num_microbatches, num_chunks in itertools.product(range(1, 17), chunks_of(name)):
        if name == "forward":
            schedule = build_forward.__wrapped__(Placement.in_turns(num_ranks, num_chunks), num_microbatches)
        else:
            schedule = build.__wrapped__(name, num_ranks, num_microbatches, num_chunks)
        fault = execute_with_blocking_sends(schedule)
        assert fault is None, (
            f"{name}, {num_ranks} ranks, {num_microbatches} microbatches, {num_chunks} chunks: {fault}"
        )


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("num_chunks", [1, 2, 3])
def test_more_in_flight_cannot_deadlock(num_ranks: int, num_chunks: int) -> None:
    name = "interleaved_1f1b" if num_chunks > 1 else "1f1b"
    for num_microbatches in range(1, 17):
        for links in itertools.product((0, 1, 4), repeat=num_ranks - 1):
            schedule = build.__wrapped__(name, num_ranks, num_microbatches, num_chunks, links)
            assert execute_with_blocking_sends(schedule) is None, (num_microbatches, links)


# --- The passes -----------------------------------------------------------------------------------------------------

LAYOUTS = [("gpipe", 4, 6, 1), ("1f1b", 4, 6, 1), ("1f1b", 4, 2, 1), ("interleaved_1f1b", 4, 9, 2), ("gpipe", 2, 5, 3)]


def with_communication(name: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    return add_communication(compute_schedule(name, num_ranks, num_microbatches, num_chunks))


def num_computations_before(actions: tuple[Action, ...], action: Action) -> int:
    return sum(other.kind.is_compute for other in actions[: actions.index(action)])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_receives_are_posted_when_the_message_before_is_worked_on(layout: tuple[str, int, int, int]) -> None:
    """Or later, where a device needs that: `test_streams.py` says how much later."""
    schedule = with_communication(*layout)
    for before, after in zip(schedule.actions, post_receives_early(schedule).actions, strict=True):
        others = [action for action in before if not action.kind.is_receive]
        assert [action for action in after if not action.kind.is_receive] == others
        for channel in {schedule.channel(action) for action in before if action.kind.is_receive}:
            on_channel = [a for a in before if a.kind.is_receive and schedule.channel(a) == channel]
            assert [a for a in after if a.kind.is_receive and schedule.channel(a) == channel] == on_channel
            users = {schedule.receive_for(action): action for action in after if action.kind.is_compute}
            # computations before the one that works on the previous message; at first, before the one before its own
            before_that = max(0, num_computations_before(after, users[on_channel[0]]) - 1)
            for receive in on_channel:
                originally = num_computations_before(before, receive)
                posted = num_computations_before(after, receive)
                if layout == ("1f1b", 4, 6, 1):
                    assert posted == min(originally, before_that)
                assert min(originally, before_that) <= posted <= originally
                before_that = num_computations_before(after, users[receive])


def most_posted_ahead(schedule: Schedule) -> list[Counter[ChannelKey]]:
    """For each rank, how many receives of a channel are posted while it computes, at most."""
    found = []
    for actions in schedule.actions:
        ahead: Counter[ChannelKey] = Counter()
        most: Counter[ChannelKey] = Counter()
        for action in actions:
            if action.kind.is_receive:
                ahead[schedule.channel(action)] += 1
            elif action.kind.is_compute:
                receive = schedule.receive_for(action)
                if receive is not None:
                    ahead[schedule.channel(receive)] -= 1
                most |= ahead
        found.append(most)
    return found


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_at_most_one_receive_is_posted_ahead_on_a_channel(name: str) -> None:
    for most in most_posted_ahead(build(name, num_ranks=4, num_microbatches=12)):
        assert max(most.values()) <= 1


@pytest.mark.parametrize("links", [(3, 3, 3), (0, 2, 0)])
def test_as_many_more_receives_are_posted_as_are_on_their_way(links: tuple[int, ...]) -> None:
    schedule = build("1f1b", 4, 24, 1, links)
    for rank, most in enumerate(most_posted_ahead(schedule)):
        channels = {schedule.channel(action) for action in schedule.actions[rank] if action.kind.is_receive}
        assert most == {channel: 1 + links[min(channel[:2])] for channel in channels}


def retired_when_withheld(schedule: Schedule, withheld: Action) -> int | None:
    """Where the sender of ``withheld`` gets stuck if that message never arrives: to get beyond proves that it did."""
    sent: set[Action] = set()

    def do(_: int, action: Action) -> bool:
        receive = schedule.receive_for(action) if action.kind.is_compute else None
        if receive is not None and schedule.counterpart(receive) not in sent:
            return False
        if action.kind.is_send and action != withheld:
            sent.add(action)
        return True

    rank = schedule.rank_of(withheld.stage)
    stuck = [text for text in schedule.play(do) if text.startswith(f"rank {rank} ")]
    return schedule.actions[rank].index(Action.parse(stuck[0].split()[-1])) if stuck else None


@pytest.mark.parametrize("layout", [*LAYOUTS, ("forward", 3, 4, 2), ("forward", 3, 4, 1)])
def test_a_send_retires_at_the_first_action_that_needs_it_received(layout: tuple[str, int, int, int]) -> None:
    name, num_ranks, num_microbatches, num_chunks = layout
    forward = build_forward(Placement.in_turns(num_ranks, num_chunks), num_microbatches)
    schedule = forward if name == "forward" else build(*layout)
    for actions, retired in zip(schedule.actions, schedule.retired, strict=True):
        retired_at = {send: position for position, sends in enumerate(retired) for send in sends}
        assert sum(map(len, retired)) == len(retired_at), "a send retires once"
        for send in actions:
            if send.kind.is_send:
                assert retired_at.get(send) == retired_when_withheld(schedule, send), send


def test_gradient_retires_activation() -> None:
    schedule = build("1f1b", num_ranks=2, num_microbatches=3)
    assert {
        str(action): " ".join(map(str, sends))
        for actions, retired in zip(schedule.actions, schedule.retired, strict=True)
        for action, sends in zip(actions, retired, strict=True)
        if sends
    } == {"0B0": "0SEND_F0", "0B1": "0SEND_F1", "0B2": "0SEND_F2", "1F2": "1SEND_B0"}


# --- The validator --------------------------------------------------------------------------------------------------


def parse(text: str) -> tuple[Action, ...]:
    return tuple(map(Action.parse, text.split()))


def edit(schedule: Schedule, rank: int, actions: tuple[Action, ...]) -> Schedule:
    return replace(schedule, actions=(*schedule.actions[:rank], actions, *schedule.actions[rank + 1 :]))


# Rank 1 of the schedule that test_lists_of_two_ranks shows, with one fault each.
@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(
            "1RECV_F0 1F0 1RECV_F1 1B0 1F1 1RECV_F2 1B1 1SEND_B1 1F2 1B2 1SEND_B2",
            "rank 1 lacks 1SEND_B0",
            id="drop a send",
        ),
        pytest.param(
            "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1RECV_F2 1B1 1SEND_B1 1F2 1B2 1B2 1SEND_B2",
            "rank 1 repeats 1B2",
            id="run twice",
        ),
        pytest.param(
            "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1RECV_F2 1B1 1SEND_B1 1F2 1B2 1SEND_B2 1SEND_F2",
            "rank 1 does not need 1SEND_F2",
            id="send to nobody",
        ),
        pytest.param(
            "1RECV_F0 1B0 1RECV_F1 1F0 1SEND_B0 1F1 1RECV_F2 1B1 1SEND_B1 1F2 1B2 1SEND_B2",
            "rank 1 runs 1B0 (position 1) before 1F0, which must come first",
            id="backward before forward",
        ),
        pytest.param(
            "1RECV_F0 1F0 1B0 1SEND_B0 1F1 1RECV_F1 1RECV_F2 1B1 1SEND_B1 1F2 1B2 1SEND_B2",
            "rank 1 runs 1F1 (position 4) before 1RECV_F1, which must come first",
            id="receive after its use",
        ),
        pytest.param(
            "1RECV_F0 1F0 1RECV_F1 1SEND_B0 1B0 1F1 1RECV_F2 1B1 1SEND_B1 1F2 1B2 1SEND_B2",
            "rank 1 runs 1SEND_B0 (position 3) before 1B0, which must come first",
            id="send before its result",
        ),
        pytest.param(
            "1RECV_F0 1F0 1RECV_F2 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1F2 1B2 1SEND_B2",
            "activation number 1 from rank 0 to rank 1 is 0SEND_F1 on the sender but 1RECV_F2 on the receiver",
            id="reorder receives",
        ),
        pytest.param(
            "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1RECV_F2 1F2 1B2 1SEND_B2",
            None,
            id="late, but no fault",
        ),
    ],
)
def test_faults_are_found(text: str, message: str | None) -> None:
    schedule = edit(build("1f1b", num_ranks=2, num_microbatches=3), 1, parse(text))
    if message is None:
        validate(schedule)
    else:
        with pytest.raises(ValueError, match=re.escape(message)):
            validate(schedule)


def test_circular_wait_names_each_rank() -> None:
    # As one would write it by hand: receive right before use, send right after. Both ranks block in a send.
    naive = Schedule(
        "naive",
        Placement.in_turns(2),
        num_microbatches=2,
        actions=(
            parse("0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1"),
            parse("1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"),
        ),
    )
    with pytest.raises(ValueError, match="deadlocks: rank 0 waits at 0SEND_F1, rank 1 waits at 1SEND_B0"):
        validate(naive)


def test_circular_computation_names_each_rank() -> None:
    add_communication(Schedule("fine", Placement.in_turns(2), 2, (parse("0F1 0F0 0B0 0B1"), parse("1F0 1B0 1F1 1B1"))))
    order = parse("0F0 0B0 0F1 0B1"), parse("1F1 1B1 1F0 1B0")
    with pytest.raises(ValueError, match="deadlocks: rank 0 waits at 0B0, rank 1 waits at 1F1"):
        add_communication(Schedule("crossed", Placement.in_turns(2), 2, order))


def test_validator_agrees_with_execution_on_random_corruptions() -> None:
    rng = random.Random(0)
    verdicts: Counter[bool] = Counter()
    for _ in range(300):
        schedule = build(*rng.choice(LAYOUTS))
        rank = rng.randrange(schedule.num_ranks)
        actions = list(schedule.actions[rank])
        moved = actions.pop(rng.randrange(len(actions)))
        if rng.random() < 0.9:
            actions.insert(rng.randrange(len(actions) + 1), moved)
        corrupted = edit(schedule, rank, tuple(actions))
        fault = execute_with_blocking_sends(corrupted)
        try:
            validate(corrupted)
        except ValueError:
            refused = True
        else:
            refused = False
        assert refused == (fault is not None), fault
        verdicts[refused] += 1
    assert min(verdicts.values()) >= 20, "both verdicts occur"


# --- Actions and arguments ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["2F0", "0B13", "1SEND_F3", "0RECV_B2", "10RECV_F7", "3SEND_B1"])
def test_notation_there_and_back(text: str) -> None:
    assert str(Action.parse(text)) == text


@pytest.mark.parametrize("text", ["", "F0", "2X0", "2F", "2 F 0", "1SENDF3"])
def test_notation_that_is_none(text: str) -> None:
    with pytest.raises(ValueError, match=f"{text!r} is not an action"):
        Action.parse(text)


def test_schedule_is_plain_data() -> None:
    schedule = build("interleaved_1f1b", 2, 4, 2)
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    assert build("interleaved_1f1b", 2, 4, 2) is schedule, "built once"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("pipedream", 2, 4), "schedule='pipedream' must be one of 'gpipe', '1f1b', 'interleaved_1f1b'"),
        (("1f1b", 2, 4, 2), "only one chunk per rank, but num_chunks is 2"),
        (("1f1b", 0, 4), "num_ranks is 0"),
        (("gpipe", 2, 0), "num_microbatches is 0"),
        (("interleaved_1f1b", 2, 4, -1), "num_chunks is -1"),
    ],
)
def test_wrong_arguments(arguments: tuple[str, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        build(*arguments)


def test_wrong_arguments_of_forward() -> None:
    with pytest.raises(ValueError, match="num_microbatches is -1"):
        build_forward(Placement.in_turns(2), -1)
