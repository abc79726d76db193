"""How the processes of a job find each other: the interface that gloo listens on, and a store that nobody used before.

A restart under torchrun finds the store of its agent as the processes before it have left it, with their addresses
(https://github.com/pytorch/pytorch/issues/135712). Neither the number of restarts (each agent has its own) nor the size
of the world says which processes belong together, so the first rank says it, and proves that it is alive::

    rank 0                      the agents' store                   rank 1, 2, ...
    listens on a port   ------> attempt = address, port, token ---> reads it, and connects there
    tells its token     <------------------------------------------
                                                                    refused, or another token: of an attempt before,
                                                                    it is read again
    every rank: PrefixStore(token, the agents' store)
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from ipaddress import ip_address
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from torch.distributed.distributed_c10d import PrefixStore, Store

_INTERFACE = "GLOO_SOCKET_IFNAME"  # of gloo, which listens on that interface
_ATTEMPT = "lightning_hybrid/attempt"
_SIOCGIFADDR = 0x8915  # of Linux, <linux/sockios.h>
_PATIENCE = 30.0  # seconds for a name that is not known yet: in a cluster it may belong to a container that starts
_ANSWER = 5.0  # seconds for an answer
_POLL = 0.05  # seconds
_POLL_NAME = 1.0  # seconds: a server of names is asked

_STARTS = count()  # of several ranks in this process, so equally many on each of them


class Stores(NamedTuple):
    """Two clients of what all ranks see: while one thread waits for a key, a client is locked.

    Attributes:
        of_run: For the process groups, and for the thread that trains.
        of_watcher: For the thread beside it.
    """

    of_run: Store
    of_watcher: Store

    def part(self, name: str) -> Stores:
        """The same, with keys of their own."""
        return Stores(*(PrefixStore(name, each) for each in self))


def choose_interface(main_address: str) -> None:
    """Have gloo listen where the other machines reach this one, unless the user has said where.

    By itself it takes the address of the machine's own name, which is one of the loopback device where ``/etc/hosts``
    says so, as Debian and Ubuntu write it (``127.0.1.1 NAME``). Nobody else reaches that.

    Args:
        main_address: Of the first rank's machine; nothing is done where no other machine is on the way there.

    Raises:
        ValueError: If no machine has that name.
    """
    if os.environ.get(_INTERFACE):
        return
    address = address_towards(main_address)
    name = None if address is None else _interface_of(address)
    if name is not None:
        os.environ[_INTERFACE] = name


def address_towards(main_address: str) -> str | None:
    """This machine's address on the way to another one, or to itself.

    Args:
        main_address: A name or an address; a name may have several, and a way need not lead to each.

    Returns:
        One that other machines can reach; ``None`` if there is only that of the loopback device, or no way at all, as
        connecting will say.

    Raises:
        ValueError: If no machine has that name.
    """
    for family, kind, protocol, _, place in _resolve(main_address):
        with suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.connect(place)  # which sends nothing: the system chooses a way, and with it an address
            address = str(probe.getsockname()[0]).partition("%")[0]
            if not ip_address(address).is_loopback:
                return address
    return None


def _resolve(main_address: str) -> list[Any]:
    """What to make a socket with, and where to connect it, for each address of a machine."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            return socket.getaddrinfo(main_address, 1, type=socket.SOCK_DGRAM)
        except socket.gaierror as error:
            if time.monotonic() > deadline:
                raise ValueError(
                    f"MASTER_ADDR={main_address!r} cannot be resolved on {socket.gethostname()}: {error}. Set it to the"
                    " address of the first node, or to a name that every node can resolve. [LH202]"
                ) from None
            time.sleep(_POLL_NAME)


def _interface_of(address: str) -> str | None:
    """The interface that has an address; ``None`` if that cannot be found out, as on other systems than Linux."""
    if not sys.platform.startswith("linux"):
        return None
    if ip_address(address).version == 6:
        wanted = ip_address(address).packed.hex()
        rows = [row.split() for row in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()]
        return next((row[5] for row in rows if row[0] == wanted), None)
    import fcntl  # there is none on Windows

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, name.encode().ljust(256, b"\0"))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def make_stores(environment: ClusterEnvironment, timeout: timedelta) -> Stores:
    """The store of this attempt: its own, or a part of the agents', which they share with the attempts before.

    One of its own may still be there from a start before in the same processes, with the addresses of its groups.

    Nobody waits for the others here: who has a store is watched.

    Args:
        environment: The cluster.
        timeout: Of what the store is asked for, and of waiting for the first rank.

    Raises:
        TimeoutError: If the first rank does not come.
    """
    # Asked once, and by this thread: over MPI the question is a collective.
    rank, main_address, main_port = environment.global_rank(), environment.main_address, environment.main_port
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)

    def connect(is_server: bool) -> Store:
        store: Store = dist.TCPStore(  # type: ignore[attr-defined]
            main_address,
            main_port,
            is_master=is_server,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=not is_agents,
        )
        return store

    if rank == 0 and not is_agents:
        server = connect(True)
        stores = Stores(server, server.clone())  # type: ignore[attr-defined]
    else:
        with ThreadPoolExecutor(1) as beside:  # each takes two ways there and back
            second = beside.submit(connect, False)
            stores = Stores(connect(False), second.result())
    if not is_agents:
        return _part_of_start(stores, environment.world_size())
    if rank == 0:
        others = set(range(1, environment.world_size()))
        token = _begin_attempt(stores.of_run, address_towards(main_address) or main_address, others)
    else:
        token = _join_attempt(stores.of_run, rank, timeout)
    return stores.part(f"lightning_hybrid/{token}")


def stores_of_groups() -> Stores:
    """What the processes have met over, where the group of them all exists already."""
    world = dist.group.WORLD
    assert world is not None
    store = world.get_group_store()
    return _part_of_start(Stores(store, store.clone()), world.size())  # type: ignore[attr-defined]


def _part_of_start(stores: Stores, size: int) -> Stores:
    """For this start alone: nothing that one before has written is in it."""
    return stores.part(f"lightning_hybrid/start {next(_STARTS) if size > 1 else -1}")


def _begin_attempt(store: Store, address: str, others: set[int]) -> str:
    """Say which attempt this is, until all other ranks have asked."""
    token = uuid.uuid4().hex
    listener = _listen(len(others))
    store.set(_ATTEMPT, f"{address} {listener.getsockname()[1]} {token}")

    def answer() -> None:
        with listener:
            while others:
                connection, _ = listener.accept()
                with connection, suppress(OSError, ValueError):  # of somebody else, who is no rank
                    connection.settimeout(_ANSWER)
                    asked = int(connection.makefile().readline())
                    connection.sendall(token.encode())
                    others.discard(asked)

    threading.Thread(target=answer, name="attempt", daemon=True).start()
    return token


def _listen(backlog: int) -> socket.socket:
    """A socket that takes connections by any protocol of the internet."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=backlog)


def _join_attempt(store: Store, rank: int, timeout: timedelta) -> str:
    """What the first rank says; what one of an attempt before has said is found to be so, as it listens no more."""
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        if store.check([_ATTEMPT]):
            address, port, token = str(store.get(_ATTEMPT), "ascii").split()
            with suppress(OSError), socket.create_connection((address, int(port)), timeout=_ANSWER) as connection:
                connection.sendall(f"{rank}\n".encode())
                if connection.makefile().read() == token:
                    return token
        time.sleep(_POLL)
    raise TimeoutError(
        f"Rank 0 has not started within {timeout.total_seconds():.0f} s. Check the output of the node that runs rank 0."
        " If rank 0 needs more time to start, increase HybridStrategy(timeout=...). [LH203]"
    )
