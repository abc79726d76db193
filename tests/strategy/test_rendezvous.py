"""Processes of one attempt find each other, whatever an attempt before has left."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch.distributed as dist
from lightning.fabric.plugins.environments import TorchElasticEnvironment

from lightning_hybrid.strategy import rendezvous
from lightning_hybrid.strategy.rendezvous import Stores, address_towards, choose_interface, make_stores
from tests.nodes import train

SECONDS = timedelta(seconds=20)


@pytest.fixture
def interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable is put back afterwards."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    """The store of an agent, as torchrun tells its processes of it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=SECONDS)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    return store


class Rank(TorchElasticEnvironment):
    """One of three."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def global_rank(self) -> int:
        return self.rank

    def world_size(self) -> int:
        return 3


def attempt(*ranks: int) -> list[Stores]:
    """The stores of processes that come in this order."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        found = list(threads.map(lambda rank: make_stores(Rank(rank), SECONDS), ranks))
    assert None not in found
    return found


def share(one: Stores, other: Stores) -> bool:
    """Whether what is put into one is in the other, by both clients of either."""
    key = uuid.uuid4().hex
    one.of_run.set(key, "")
    one.of_run.get(key)  # the server has it: setting does not wait for that
    assert one.of_watcher.check([key])
    found = {bool(each.check([key])) for each in other}
    assert len(found) == 1
    return found.pop()


@pytest.mark.parametrize("ranks", [(0, 1, 2), (2, 1, 0)])
def test_each_attempt_has_an_empty_store_that_its_ranks_share(agent: dist.TCPStore, ranks: tuple[int, ...]) -> None:
    before, after = attempt(*ranks), attempt(*ranks)
    assert all(share(one, other) for stores in (before, after) for one in stores for other in stores)
    assert not any(share(one, other) for one in before for other in after)
    deadline = time.monotonic() + 10
    while any(thread.name == "attempt" for thread in threading.enumerate()):  # nobody is left who might ask
        assert time.monotonic() < deadline


def test_what_an_attempt_that_died_has_said_is_not_believed(agent: dist.TCPStore) -> None:
    """Its port is closed, or belongs to somebody else by now."""
    with socket.create_server(("127.0.0.1", 0)) as other, ThreadPoolExecutor(1) as threads:
        agent.set("lightning_hybrid/attempt", f"127.0.0.1 {other.getsockname()[1]} died")
        waiting = threads.submit(make_stores, Rank(1), SECONDS)
        connection, _ = other.accept()
        with connection:
            connection.sendall(b"something else")
        with socket.create_server(("127.0.0.1", 0)) as closed:
            port = closed.getsockname()[1]
        agent.set("lightning_hybrid/attempt", f"127.0.0.1 {port} died")
        first, *_ = attempt(0, 2)
        assert share(first, waiting.result(20))


def test_who_waits_for_a_first_rank_that_does_not_come_says_so(agent: dist.TCPStore) -> None:
    # On a busy machine, even the connection to the agent can take a second.
    with pytest.raises(TimeoutError, match=re.escape("Rank 0 has not started within 5 s")):
        make_stores(Rank(1), timedelta(seconds=5))


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_asks_for_the_port_once(agent: dist.TCPStore, rank: int) -> None:
    """Over MPI that is a collective, which all ranks have to call equally often."""
    asked: list[str] = []

    class OverMPI(Rank):
        @property
        def main_port(self) -> int:
            asked.append(threading.current_thread().name)
            return super().main_port

    with suppress(TimeoutError):  # nobody else is there
        make_stores(OverMPI(rank), timedelta(milliseconds=100))
    assert asked == ["MainThread"]


def test_the_first_rank_has_the_store_where_there_is_no_agent_and_nobody_waits_for_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setattr(Rank, "main_port", port)
    stores = []
    for rank in (0, 2):  # each in a process of its own
        monkeypatch.setattr(rendezvous, "_STARTS", count())
        stores.append([make_stores(Rank(rank), SECONDS) for _ in range(2)])
    (first, first_again), (third, third_again) = stores
    assert share(first, third)
    assert share(first_again, third_again)
    assert not share(first, third_again), "the server is the same one, with what groups before have left"


def test_gloo_listens_where_the_other_machines_are(interface: None) -> None:
    with mock.patch.object(rendezvous, "_interface_of", lambda address: f"the one with {address}"):
        with mock.patch.object(rendezvous, "address_towards", return_value="10.0.0.7"):
            choose_interface("somewhere")
        assert os.environ["GLOO_SOCKET_IFNAME"] == "the one with 10.0.0.7"
        choose_interface("127.0.0.1")
        assert os.environ["GLOO_SOCKET_IFNAME"] == "the one with 10.0.0.7", "the user's choice stays"


def test_gloo_listens_where_it_likes_on_one_machine(interface: None) -> None:
    for address in ("127.0.0.1", "localhost"):
        choose_interface(address)
    assert not os.environ["GLOO_SOCKET_IFNAME"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux is asked for its interfaces")
@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_an_interface_is_known_by_its_address(address: str) -> None:
    if ":" in address and not Path("/proc/net/if_inet6").is_file():
        pytest.skip("this machine has no IPv6")
    assert rendezvous._interface_of(address) == "lo"
    assert rendezvous._interface_of("192.0.2.1" if "." in address else "2001:db8::1") is None


class Probe:
    """A socket of a machine that has a way to some addresses only."""

    ways: ClassVar = {"127.0.1.1": "127.0.0.1", "192.0.2.1": "192.0.2.9"}

    def __init__(self, *_: Any) -> None:
        self.own = "::"

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *_: Any) -> None:
        """Nothing is open."""

    def connect(self, place: tuple[str, int]) -> None:
        if place[0] not in self.ways:
            raise OSError("Network is unreachable")
        self.own = self.ways[place[0]]

    def getsockname(self) -> tuple[str, int]:
        return self.own, 1


@pytest.mark.parametrize(
    ("addresses", "own"),
    [
        (["192.0.2.1"], "192.0.2.9"),
        (["2001:db8::1", "192.0.2.1"], "192.0.2.9"),
        (["127.0.1.1", "192.0.2.1"], "192.0.2.9"),
        (["127.0.1.1"], None),
        (["2001:db8::1"], None),
    ],
)
def test_the_own_address_is_one_that_others_can_reach(addresses: list[str], own: str | None) -> None:
    """Of a name that has several, the first may be of a protocol that this machine has no way for."""
    found = [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", (address, 1)) for address in addresses]
    with mock.patch.object(socket, "getaddrinfo", return_value=found), mock.patch.object(socket, "socket", Probe):
        assert address_towards("somewhere") == own


def test_a_name_that_is_not_known_is_refused() -> None:
    with (
        mock.patch.object(rendezvous, "_PATIENCE", 0.0),
        pytest.raises(
            ValueError, match=re.escape(f"MASTER_ADDR='nobody.invalid' cannot be resolved on {socket.gethostname()}")
        ),
    ):
        choose_interface("nobody.invalid")


@pytest.mark.thorough
def test_a_run_goes_on_after_torchrun_has_restarted_it(tmp_path: Path) -> None:
    """With the agent's store of torch the second attempt would read the addresses of the first, and wait for ever."""
    words = ["torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max_restarts=2", train.__file__]
    layout = json.dumps({"pipeline_parallel_size": 2, "num_microbatches": 2})
    root = Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", *words, layout, str(tmp_path), str(tmp_path / "checkpoints"), "3"],
        cwd=root,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    # Both write into one pipe, so the end of a line may come after the other's text.
    assert sorted(re.findall(r"rank \d of 2: from step \d+ to step \d+", ended.stdout)) == [
        "rank 0 of 2: from step 3 to step 10",
        "rank 1 of 2: from step 3 to step 10",
    ]
