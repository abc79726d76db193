"""Schedules on devices that have streams: what has run once the hosts have enqueued so many of their actions.

As ProcessGroupNCCL does it: computations run on one stream, one after the other, and the messages of a channel on a
stream of its own. A message starts when what was computed before it on its own rank is done, and it needs both sides at
once. A computation waits for its message, and for the sends that it retires.
"""

from __future__ import annotations

from collections import defaultdict

from lightning_hybrid.pipeline_parallel.schedules import Action, ChannelKey, Schedule


class Devices:
    """The devices of all ranks.

    Args:
        schedule: What the hosts enqueue.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.done: list[set[int]] = [set() for _ in schedule.actions]  # by rank: positions of its list
        self.enqueued = [0 for _ in schedule.actions]
        self._computed = [0 for _ in schedule.actions]
        self._computations: list[list[int]] = [[] for _ in schedule.actions]  # positions that have not run
        self._messages: dict[ChannelKey, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        self._before: list[list[int]] = []  # computations before each position
        self._positions = [{action: i for i, action in enumerate(actions)} for actions in schedule.actions]
        for actions in schedule.actions:
            count, before = 0, []
            for action in actions:
                before.append(count)
                count += action.kind.is_compute
            self._before.append(before)

    def enqueue(self, rank: int, until: int | None = None) -> None:
        """The host of a rank goes on, up to a position of its list, or to its end."""
        actions = self.schedule.actions[rank]
        until = len(actions) if until is None else until
        for position in range(self.enqueued[rank], until):
            action = actions[position]
            if action.kind.is_compute:
                self._computations[rank].append(position)
            else:
                self._messages[self.schedule.channel(action)][action.kind.is_receive].append(position)
        self.enqueued[rank] = until

    def run(self) -> None:
        """Until nothing moves any more."""
        moved = True
        while moved:
            moved = False
            for rank in range(len(self.done)):
                while self._computations[rank] and self._can_compute(rank, self._computations[rank][0]):
                    self.done[rank].add(self._computations[rank].pop(0))
                    self._computed[rank] += 1
                    moved = True
            for (sender, receiver, _), (sends, receives) in self._messages.items():
                while sends and receives and self._is_ready(sender, sends[0]) and self._is_ready(receiver, receives[0]):
                    self.done[sender].add(sends.pop(0))
                    self.done[receiver].add(receives.pop(0))
                    moved = True

    def is_idle(self, rank: int) -> bool:
        """Whether a rank's device has done all that its host has enqueued."""
        return len(self.done[rank]) == self.enqueued[rank]

    def _is_ready(self, rank: int, position: int) -> bool:
        return self._computed[rank] >= self._before[rank][position]

    def _can_compute(self, rank: int, position: int) -> bool:
        action = self.schedule.actions[rank][position]
        needed: list[Action] = list(self.schedule.retired[rank][position]) if self.schedule.retired else []
        receive = self.schedule.receive_for(action)
        if receive is not None:
            needed.append(receive)
        return all(self._positions[rank][each] in self.done[rank] for each in needed)


def places_that_hang(schedule: Schedule) -> list[tuple[int, int]]:
    """The places (rank, position) where a host that waits for all of its device, once, waits for ever."""
    places = []
    for rank, actions in enumerate(schedule.actions):
        devices = Devices(schedule)
        for other in range(schedule.num_ranks):
            devices.enqueue(other, 0 if other == rank else None)
        for position in range(len(actions) + 1):
            devices.enqueue(rank, position)
            devices.run()
            if not devices.is_idle(rank):
                places.append((rank, position))
    return places


def hangs_if_launches_block(schedule: Schedule) -> bool:
    """Whether hosts that wait for each action before the next one come to the ends of their lists."""
    devices = Devices(schedule)
    moved = True
    while moved:
        moved = False
        devices.run()
        for rank, actions in enumerate(schedule.actions):
            while devices.is_idle(rank) and devices.enqueued[rank] < len(actions):
                devices.enqueue(rank, devices.enqueued[rank] + 1)
                devices.run()
                moved = True
    return any(not devices.is_idle(rank) for rank in range(schedule.num_ranks))
