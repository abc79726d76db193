"""Messages of the host: small ones within a machine go through sockets, and nothing about them differs from gloo's."""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import threading
import time
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from lightning_hybrid.axes import Sizes
from lightning_hybrid.distributed.failure import is_transport
from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.distributed.messages import host_messages
from lightning_hybrid.distributed.messages.host_messages import (
    LARGEST_EAGER,
    HostMessages,
    Work,
    connect,
    shut_down_sockets,
)
from tests.pool import Pools

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no sockets without a file")


def connected(timeout: float = 50.0, room: int = 212_992) -> HostMessages:
    """Of all ranks; with as much room as Linux gives if nobody has changed that."""
    group = dist.group.WORLD
    assert group is not None
    with mock.patch.object(host_messages, "_ROOM", room):
        return connect(group, range(group.size()), timedelta(seconds=timeout))


def peers_of(messages: HostMessages) -> list[int]:
    """The ranks inside of the group to which there is a socket."""
    return sorted(messages._peers)


def finish(work: Work | None) -> None:
    if work is not None:
        work.wait()


def value_of(sender: int, receiver: int, tag: int, number: int, dtype: torch.dtype, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * number + 100 * sender + 10 * receiver + tag)
    return torch.randint(0, 100, (size,), generator=generator).to(dtype)


def exchange(seed: int) -> list[int]:
    """Every rank sends many messages to every other one, and receives theirs, in an order of its own."""
    messages, rank, size = connected(), dist.get_rank(), dist.get_world_size()
    plan = random.Random(seed)  # the same on all ranks: who sends what
    sizes = [1, 7, 1000, LARGEST_EAGER // 8, LARGEST_EAGER // 8 + 1, 40_000]
    dtypes = [torch.float64, torch.int64, torch.uint8, torch.bfloat16]
    streams = {
        (sender, receiver, tag): [(plan.choice(dtypes), plan.choice(sizes)) for _ in range(plan.randrange(12))]
        for sender in range(size)
        for receiver in range(size)
        for tag in (1, 2, 77)
        if sender != receiver
    }
    own = random.Random(seed + rank + 1)
    waiting: list[tuple[Any, Tensor, Tensor | None]] = []
    todo = [(*key, list(enumerate(formats))) for key, formats in streams.items() if rank in key[:2]]
    while any(formats for *_, formats in todo):
        sender, receiver, tag, formats = own.choice([each for each in todo if each[3]])
        number, (dtype, length) = formats.pop(0)
        value = value_of(sender, receiver, tag, number, dtype, length)
        if sender == rank:
            waiting.append((messages.send([value], receiver, tag), value, None))
        else:
            received = torch.full((length,), 101).to(dtype)
            waiting.append((messages.recv([received], sender, tag), received, value))
    own.shuffle(waiting)
    for work, tensor, expected in waiting:
        finish(work)
        assert expected is None or torch.equal(tensor, expected)
    dist.barrier()
    return peers_of(messages)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_message_arrives_whatever_the_order_of_waits(ranks: Pools, seed: int) -> None:
    assert ranks(3).run(exchange, seed) == [[1, 2], [0, 2], [0, 1]]


def flood(waits_first: bool) -> int:
    """Both ranks send more than the kernel keeps before either receives anything."""
    messages, peer = connected(), 1 - dist.get_rank()
    received = [torch.empty(LARGEST_EAGER, dtype=torch.uint8) for _ in range(300)]
    for n in range(300):
        assert messages.send([torch.full((LARGEST_EAGER,), n % 256, dtype=torch.uint8)], peer, 1) is None
    works = [] if waits_first else [messages.recv([each], peer, 1) for each in received]
    messages.flush()
    works = works or [messages.recv([each], peer, 1) for each in received]
    for work in reversed(works):
        work.wait()
    dist.barrier()
    return sum(bool((each == n % 256).all()) for n, each in enumerate(received))


@pytest.mark.parametrize("waits_first", [False, True])
def test_ranks_that_fill_their_sockets_do_not_wait_for_each_other(ranks: Pools, waits_first: bool) -> None:
    assert ranks(2).run(flood, waits_first) == [300, 300]


def circle() -> int:
    """Each waits for the message of the one before, while the one behind has no room left for its own."""
    messages, rank, size = connected(), dist.get_rank(), dist.get_world_size()
    for n in range(200):
        messages.send([torch.full((2048,), float(n))], (rank + 1) % size, 1)
    for number in range(200):
        received = torch.empty(2048)
        messages.recv([received], (rank - 1) % size, 1).wait()
        assert received[0] == number
    messages.flush()
    dist.barrier()
    return number + 1


def test_ranks_in_a_circle_with_full_sockets_get_everything(ranks: Pools) -> None:
    assert ranks(3).run(circle) == [200] * 3


def goes_on() -> int:
    """Rank 0 fills its socket, and goes on to a collective; rank 1 comes to it when it has everything."""
    messages, rank = connected(), dist.get_rank()
    values = [torch.full((LARGEST_EAGER,), n % 256, dtype=torch.uint8) for n in range(100)]
    if rank == 0:
        for value in values:
            messages.send([value], 1, 1)
    for value in values if rank == 1 else ():
        received = torch.empty_like(value)
        messages.recv([received], 0, 1).wait()
        assert torch.equal(received, value)
    dist.barrier()
    return threading.active_count()


def test_a_rank_with_a_full_socket_may_go_on_to_a_collective(ranks: Pools) -> None:
    """gloo's threads send in the meantime; so a step in which ranks wait crosswise must not stop here either."""
    before = ranks(2).run(threading.active_count)
    assert ranks(2).run(goes_on) == before


def failing(how: str) -> tuple[str, bool, float]:
    """What rank 1 sees, after how long, when rank 0 leaves, or nothing comes."""
    messages = connected(0.5 if how == "timeout" else 50.0)
    dist.barrier()
    if dist.get_rank() == 0:
        time.sleep(0.5)
        if how == "abandon":
            messages.abandon()
        time.sleep(1.5)
        return "", True, 0.0
    if how == "thread":
        threading.Timer(0.5, shut_down_sockets).start()
    begin = time.monotonic()
    with pytest.raises(RuntimeError) as error:
        messages.recv([torch.empty(1)], 0, 1).wait()
    return str(error.value), is_transport(error.value), time.monotonic() - begin


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("abandon", "Connection closed by rank 0"),
        ("thread", "Connection closed by rank 0"),
        ("timeout", "Timed out waiting 0 s for a message from rank 0"),
    ],
)
def test_a_wait_ends_when_the_other_rank_leaves(ranks: Pools, how: str, text: str) -> None:
    told, transport, seconds = ranks(2).run(failing, how)[1]
    assert (told, transport) == (text, True)
    assert seconds < 1.5


def destroyed() -> float:
    """Rank 0 destroys its groups, as after a failure; rank 1 waits for it."""
    dist.init_process_group("gloo")
    messages = Mesh(Sizes(1, 1, 2), timeout=timedelta(seconds=50)).host_messages
    dist.barrier()
    begin = time.monotonic()
    if dist.get_rank() == 0:
        time.sleep(0.3)
        dist.destroy_process_group()
        time.sleep(1.5)
        return 0.0
    with pytest.raises(dist.DistNetworkError, match="Connection closed by rank 0"):
        messages.recv([torch.empty(1)], 0, 1).wait()
    seconds = time.monotonic() - begin
    dist.destroy_process_group()
    return seconds


def test_destroying_the_groups_is_noticed(ranks: Pools) -> None:
    assert ranks(2, lightning=True).run(destroyed)[1] < 1.5


def last_words() -> list[float]:
    """Rank 0 sends something and leaves, and has not read what came: Linux tells of that before the last messages."""
    messages = connected()
    if dist.get_rank() == 1:
        messages.send([torch.zeros(1)], 0, 1)
    dist.barrier()
    if dist.get_rank() == 0:
        for n in range(3):
            messages.send([torch.full((1,), float(n))], 1, 1)
        messages.close()
        dist.barrier()
        return []
    dist.barrier()
    received = torch.full((3,), -1.0)
    for each in received.split(1):
        messages.recv([each], 0, 1).wait()
    with pytest.raises(dist.DistNetworkError):
        messages.recv([torch.empty(1)], 0, 1).wait()
    return received.tolist()


def test_what_a_rank_has_sent_before_it_left_arrives(ranks: Pools) -> None:
    assert ranks(2).run(last_words)[1] == [0.0, 1.0, 2.0]


def unequal_lengths() -> str:
    messages, peer = connected(), 1 - dist.get_rank()
    messages.send([torch.zeros(2)], peer, 1)
    with pytest.raises(RuntimeError) as error:
        messages.recv([torch.zeros(3)], peer, 1).wait()
    dist.barrier()
    return str(error.value)


def test_a_message_of_another_length_is_refused(ranks: Pools) -> None:
    assert ranks(2).run(unequal_lengths)[0] == "Rank 1 sent 8 bytes, but 12 were expected"


def of_subclass() -> list[float]:
    """What functional collectives return has no memory of its own."""
    messages, peer = connected(), 1 - dist.get_rank()
    total = funcol.all_reduce(torch.ones(2) + dist.get_rank(), "sum", dist.group.WORLD)
    assert type(total) is not Tensor
    messages.send([total], peer, 1)
    received = torch.zeros(2)
    messages.recv([received], peer, 1).wait()
    return received.tolist()


def test_results_of_functional_collectives_are_waited_for(ranks: Pools) -> None:
    assert ranks(2).run(of_subclass) == [[3.0, 3.0]] * 2


def at_other_timeouts() -> list[list[int]]:
    """Two runs of one process, which differ in what is nearly the default."""
    found = []
    for timeout in (None, default_pg_timeout, None):
        mesh = Mesh(Sizes(1, 1, 2), timeout=timeout)
        trees = mesh.tree_broadcast("results", 0, torch.device("cpu"))
        for number in range(3):
            found.append(trees(number) if dist.get_rank() == 0 else trees.receive())
        mesh.retire()
    return found


def test_runs_with_other_timeouts_do_not_take_each_others_messages(ranks: Pools) -> None:
    assert ranks(2).run(at_other_timeouts) == [[0, 1, 2] * 3] * 2


def sends_to_nobody() -> str:
    messages = connected()
    dist.barrier()
    if dist.get_rank() == 0:
        messages.abandon()
        dist.barrier()
        return ""
    dist.barrier()
    with pytest.raises(dist.DistNetworkError) as error:
        messages.send([torch.empty(1)], 0, 1)
    return str(error.value)


def test_a_send_to_a_rank_that_has_left_says_so(ranks: Pools) -> None:
    assert ranks(2).run(sends_to_nobody)[1] == "Connection closed by rank 0"


def leaves_a_copy() -> float:
    """Rank 0 has a copy that lives longer, as a loader's worker; rank 1 waits for it."""
    messages = connected()
    dist.barrier()
    if dist.get_rank() == 0:
        child = os.fork()
        if not child:
            time.sleep(20)
            os._exit(0)
        time.sleep(0.2)
        messages.close()  # as the kernel does when a process ends
        time.sleep(1)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return 0.0
    begin = time.monotonic()
    with pytest.raises(dist.DistNetworkError):
        messages.recv([torch.empty(1)], 0, 1).wait()
    return time.monotonic() - begin


def test_copies_of_a_process_do_not_keep_sockets_open(ranks: Pools) -> None:
    assert ranks(2).run(leaves_a_copy)[1] < 1


def apart(what: str) -> tuple[list[int], float]:
    """As in two containers that have one name, where sockets of the other one cannot be found, or where none may be."""
    with mock.patch.object(socket.socket, what, side_effect=PermissionError):
        messages = connected()
    received, peer = torch.empty(1), 1 - dist.get_rank()
    send = messages.send([torch.full((1,), float(peer))], peer, 1)
    messages.recv([received], peer, 1).wait()
    finish(send)
    return peers_of(messages), received.item()


@pytest.mark.parametrize("what", ["connect", "bind", "__init__"])
def test_ranks_that_cannot_connect_talk_over_the_group(ranks: Pools, what: str) -> None:
    assert ranks(2).run(apart, what) == [([], 0.0), ([], 1.0)]


def beside_a_stranger() -> tuple[list[int], float]:
    """Somebody else connects first, and says nothing."""
    strangers, bind = [], socket.socket.bind

    def bound(listener: socket.socket, name: Any) -> None:
        bind(listener, name)
        listener.listen(1)
        strangers.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        strangers[0].connect(name)

    begin = time.monotonic()
    with mock.patch.object(socket.socket, "bind", bound):
        messages = connected()
    return peers_of(messages), time.monotonic() - begin


def test_a_stranger_does_not_hold_up_the_start(ranks: Pools) -> None:
    (first, seconds), (second, _) = ranks(2).run(beside_a_stranger)
    assert (first, second) == ([1], [0])
    assert seconds < 10


def test_a_stranger_is_not_taken_for_a_rank() -> None:
    """Names of sockets are seen by everyone on the machine, and metas are pickled."""
    secret = bytes(range(16))
    for said, peer in ((secret + b"\3\0\0\0", 3), (bytes(16) + b"\3\0\0\0", None), (b"short", None), (b"", None)):
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with here, there:
            there.send(said) if said else there.close()
            assert host_messages._peer_of(here, secret) == peer


def of_mesh(hosts: list[str]) -> list[int]:
    return peers_of(Mesh(Sizes(1, 1, len(hosts)), hosts=hosts).host_messages)


def test_only_ranks_of_one_machine_are_connected(ranks: Pools) -> None:
    assert ranks(3).run(of_mesh, ["node0", "node0", "node1"]) == [[1], [0], []]
