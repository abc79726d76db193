"""Rendezvous of the processes of a job: the network interface for gloo, and a store that no earlier attempt has used.

After a restart, torchrun's agent provides the same store, with the addresses of the earlier processes
(https://github.com/pytorch/pytorch/issues/135712). Neither the number of restarts (each agent has its own) nor the
world size identifies the processes that belong together. Therefore the first rank publishes a token, and proves that it
is alive::

    rank 0                      the agents' store                   rank 1, 2, ...
    listens on a port   ------> attempt = address, port, token ---> reads it, and connects there
    sends its token     <------------------------------------------
                                                                    if refused, or if the token differs, the entry is
                                                                    from an earlier attempt: it is read again
    every rank: PrefixStore(token, the agents' store)

`strategy.launch` calls :func:`choose_interface` and :func:`make_stores` before it creates the group of all processes.
If the user has created this group, `HybridStrategy` calls :func:`stores_of_groups` instead.

A *store* is torch's key-value store on the first node; a *client* is an object that accesses it. An *agent* is
torchrun's process on a node, which starts the ranks. An *attempt* is one start of all ranks of a job; a restart is a
new attempt.
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

_INTERFACE = "GLOO_SOCKET_IFNAME"  # gloo's variable for the interface on which it listens
_ATTEMPT = "lightning_hybrid/attempt"
_SIOCGIFADDR = 0x8915  # a constant of Linux, <linux/sockios.h>
_PATIENCE = 30.0  # seconds until a name must be resolvable: it may belong to a container that is starting
_ANSWER = 5.0  # seconds to wait for an answer
_POLL = 0.05  # seconds
_POLL_NAME = 1.0  # seconds between DNS queries

_STARTS = count()  # counts starts with several ranks in this process; the count is equal on all ranks


class Stores(NamedTuple):
    """Two clients of the same store. There are two because a client is locked while a thread waits for a key.

    Attributes:
        of_run: The client for the process groups and the training thread.
        of_watcher: The client for the watch thread.
    """

    of_run: Store
    of_watcher: Store

    def part(self, name: str) -> Stores:
        """Return clients of the same store whose keys have a prefix."""
        return Stores(*(PrefixStore(name, each) for each in self))


def choose_interface(main_address: str) -> None:
    """Set the network interface on which gloo listens, so that other nodes can reach it, unless the user has set it.

    By default, gloo listens on the address of the node's own name. On Debian and Ubuntu, ``/etc/hosts`` maps this name
    to a loopback address (``127.0.1.1 NAME``), which other nodes cannot reach.

    Args:
        main_address: The address of the first node. If the route to it is only the loopback device, nothing is set.

    Raises:
        ValueError: If the name of the first node cannot be resolved.
    """
    if os.environ.get(_INTERFACE):
        return
    address = address_towards(main_address)
    name = None if address is None else _interface_of(address)
    if name is not None:
        os.environ[_INTERFACE] = name


def address_towards(main_address: str) -> str | None:
    """Return the address of this node on the route to another node, or to itself.

    Args:
        main_address: A name or an address. A name may have several addresses, of which some may be unreachable.

    Returns:
        An address that other nodes can reach; ``None`` if there is only the loopback device, or no route. Without a
        route, connecting fails later with its own error.

    Raises:
        ValueError: If the name cannot be resolved.
    """
    for family, kind, protocol, _, place in _resolve(main_address):
        with suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.connect(place)  # sends nothing: the system only chooses a route, and with it a local address
            address = str(probe.getsockname()[0]).partition("%")[0]
            if not ip_address(address).is_loopback:
                return address
    return None


def _resolve(main_address: str) -> list[Any]:
    """Return the results of `socket.getaddrinfo` for a node, after waiting for its name to become known."""
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
    """Return the network interface with an address; ``None`` if it cannot be found, as on systems other than Linux."""
    if not sys.platform.startswith("linux"):
        return None
    if ip_address(address).version == 6:
        wanted = ip_address(address).packed.hex()
        rows = [row.split() for row in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()]
        return next((row[5] for row in rows if row[0] == wanted), None)
    import fcntl  # not available on Windows

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # the interface has no address
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, name.encode().ljust(256, b"\0"))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def make_stores(environment: ClusterEnvironment, timeout: timedelta) -> Stores:
    """Return clients of a store for this attempt: a new store, or a part of the agents' store under torchrun.

    A new store may still exist from an earlier start in the same processes, with the addresses of its groups, so a part
    of it is used. This function does not wait for the other ranks: the watch begins as soon as a rank has a store.

    Args:
        environment: The cluster environment.
        timeout: The timeout of requests to the store, and of waiting for the first rank.

    Raises:
        TimeoutError: If the first rank does not start in time.
    """
    # Called once, on this thread, because with MPI these calls are collectives.
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
        with ThreadPoolExecutor(1) as beside:  # in parallel, because each connection takes two round trips
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
    """Return clients of the store of the existing process group of all ranks. Each rank calls this once per group."""
    world = dist.group.WORLD
    assert world is not None
    store = world.get_group_store()
    return _part_of_start(Stores(store, store.clone()), world.size())  # type: ignore[attr-defined]


def _part_of_start(stores: Stores, size: int) -> Stores:
    """Return a part of a store for this start, without keys of earlier starts."""
    return stores.part(f"lightning_hybrid/start {next(_STARTS) if size > 1 else -1}")


def _begin_attempt(store: Store, address: str, others: set[int]) -> str:
    """Publish the token of this attempt, and send it in the background to the other ranks until all have it."""
    token = uuid.uuid4().hex
    listener = _listen(len(others))
    store.set(_ATTEMPT, f"{address} {listener.getsockname()[1]} {token}")

    def answer() -> None:
        with listener:
            while others:
                connection, _ = listener.accept()
                with connection, suppress(OSError, ValueError):  # a connection that is not from a rank
                    connection.settimeout(_ANSWER)
                    asked = int(connection.makefile().readline())
                    connection.sendall(token.encode())
                    others.discard(asked)

    threading.Thread(target=answer, name="attempt", daemon=True).start()
    return token


def _listen(backlog: int) -> socket.socket:
    """Return a socket that accepts IPv4 and, if available, IPv6 connections."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=backlog)


def _join_attempt(store: Store, rank: int, timeout: timedelta) -> str:
    """Return the token that rank 0 has published for this attempt.

    An entry of an earlier attempt is recognized because its process no longer listens, or has another token.
    """
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
