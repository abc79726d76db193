"""Shutting down the connections of process groups wakes who waits in them, and touches nothing else."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist

from lightning_hybrid.distributed.failure import is_transport
from lightning_hybrid.distributed.watch.connections import Connections
from lightning_hybrid.distributed.watch.flight_recorder import ranks_of, read_collectives, read_progress
from lightning_hybrid.distributed.watch.watched_thread import WatchedThread
from tests.pool import Pools


def woken() -> tuple[bool, bool, float]:
    """Rank 0 waits in a new group for rank 1, which does not come, until its connections are shut down."""
    own, other = socket.socketpair(socket.AF_UNIX)
    listener = socket.create_server(("127.0.0.1", 0))
    connections = Connections()
    with connections.opened():
        group = dist.new_group([0, 1], backend="gloo")
        client = socket.create_connection(listener.getsockname())  # its number is taken by another one later
        loggers = socket.create_connection(listener.getsockname())
    client.close()
    late = socket.create_connection(listener.getsockname())
    dist.all_reduce(torch.zeros(1), group=group)
    began = time.monotonic()
    is_woken = True
    if dist.get_rank() == 0:
        timer = threading.Timer(0.3, connections.shut_down)
        timer.start()
        with pytest.raises(RuntimeError) as error:
            dist.all_reduce(torch.zeros(1), group=group)
        is_woken = is_transport(error.value)
        timer.join()
    seconds = time.monotonic() - began
    dist.barrier()  # over the group of all ranks, which is another one
    own.sendall(b"x")
    is_left_alone = other.recv(1) == b"x" and late.getpeername() == loggers.getpeername() == listener.getsockname()
    late.sendall(b"x")
    loggers.sendall(b"x")
    return is_woken, is_left_alone, seconds


def test_who_waits_in_a_group_is_woken_and_other_sockets_are_left_alone(ranks: Pools) -> None:
    for is_woken, is_left_alone, seconds in ranks(2).run(woken):
        assert is_woken
        assert is_left_alone
        assert seconds < 5


def test_connections_that_are_closed_here_or_elsewhere_are_counted() -> None:
    connections, listener = Connections(), socket.create_server(("127.0.0.1", 0))

    def connect() -> int:
        return socket.create_connection(listener.getsockname()).detach()  # as in C++

    with connections.opened():
        own = [connect() for _ in range(3)]
    connections.watch_opened()
    with connections.opened():  # of a group that may go
        os.close(connect())
        own.append(connect())
    others = [listener.accept()[0] for _ in range(5)]
    os.close(own[3])
    assert connections.num_lost() == 0
    os.close(own[0])
    others[1].close()
    assert connections.num_lost() == 2
    connections.shut_down()
    assert connections.num_lost() == 0
    for each in own[1:3]:
        os.close(each)
    for other in (*others, listener):
        other.close()


def test_what_python_and_the_store_have_opened_is_not_counted() -> None:
    """A logger's thread may connect to its server while groups are made, and the server close that when it is idle."""
    connections = Connections()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as store:
        with connections.opened():
            loggers = socket.create_connection(server.getsockname())
            numbers = [socket.create_connection(store.getsockname()).detach()]
            numbers += [each.detach() for each in socket.socketpair(socket.AF_UNIX)]
            numbers.append(socket.create_server(("127.0.0.1", 0)).detach())
        connections.watch_opened(store.getsockname()[1])
        loggers.close()
        for number in numbers:
            os.close(number)
        assert connections.num_lost() == 0


def recorded() -> tuple[list[tuple[str, int, str]], str, dict[str, tuple[int, list[str]]], list[int], bool, str]:
    """What is told of a rank that waits in the second collective of a group, after a receive and a foreign group."""
    old = dist.new_group([0, 1], backend="gloo")
    dist.barrier(group=old)
    before = read_collectives().last
    group = dist.new_group([0, 1], backend="gloo")
    dist.broadcast(torch.zeros(1), 0, group=group)
    if dist.get_rank() == 1:
        dist.send(torch.zeros(1), 0, group=group)
        time.sleep(0.6)
        dist.all_reduce(torch.zeros(1), group=group)
        return [], "", {}, [], False, ""
    dist.recv(torch.zeros(1), 1, group=group)
    thread, seen, progress = WatchedThread(), [], []

    def look() -> None:
        thread.look()
        progress.append(read_progress())
        collectives = read_collectives(before, thread.ident)
        seen.append((collectives, thread.in_collective, thread.place()))

    timers = [threading.Timer(delay, look) for delay in (0.2, 0.3)]
    before_it = read_progress()
    for timer in timers:
        timer.start()
    dist.all_reduce(torch.zeros(1), group=group)
    for timer in timers:
        timer.join()
    assert before_it != progress[0] == progress[1] is not None, "it changes when something is started, and only then"
    collectives, in_collective, place = seen[0]
    ranks = list(ranks_of(group.group_name) or ())
    return collectives.pending, group.group_name, collectives.started, ranks, in_collective, place


def test_the_flight_recorder_tells_what_a_rank_waits_for(ranks: Pools) -> None:
    """A contract with torch: what its recorder says, and how its fields are called."""
    pending, name, started, group_ranks, in_collective, place = ranks(2).run(recorded)[0]
    assert pending == [(name, 2, "all_reduce")]
    assert started == {name: (1, ["broadcast", "all_reduce"])}, "nothing from before, and no receive"
    assert group_ranks == [0, 1]
    assert in_collective
    assert place.startswith("recorded (test_connections.py:")
