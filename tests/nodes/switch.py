"""A network switch between namespaces, with a delay: the kernel's own way, netem, is not everywhere.

::

    node1: eth0 --- TAP --.                         .--- TAP --- eth0: node2
                           switch: a frame waits for
                           its delay, then goes on

    python -m tests.nodes.switch FOLDER DELAY SPACE=ADDRESS SPACE=ADDRESS ...

A file ``cut-2`` in the folder takes out the cable of the second machine. ``ready`` is there once all are connected, and
``bytes`` says how many have come through.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_SET_INTERFACE, _TAP, _NO_PACKET_INFORMATION = 0x400454CA, 0x0002, 0x1000
_MOST_BYTES = 60_000  # of a frame: few large ones, as Python hands them on


class _Frame(NamedTuple):
    due: float
    ports: list[int]
    data: bytes


def connect(number: int, space: str, address: str) -> int:
    """Put a TAP device into a namespace, as its ``eth0``.

    Args:
        number: Of the machine, from 1; the last byte of its hardware address.
        space: Its namespace.
        address: Its address, with the length of the network's prefix.

    Returns:
        The file that has its frames.
    """
    port = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    name = f"tap{os.getpid()}x{number}"[-15:]
    fcntl.ioctl(port, _SET_INTERFACE, struct.pack("16sH22s", name.encode(), _TAP | _NO_PACKET_INFORMATION, b""))
    subprocess.run(["ip", "link", "set", name, "netns", space, "name", "eth0"], check=True)
    hardware = ["address", f"02:00:00:00:00:{number:02x}", "mtu", str(_MOST_BYTES)]
    for words in (["link", "set", "eth0", *hardware, "up"], ["addr", "add", address, "dev", "eth0"]):
        subprocess.run(["ip", "-n", space, *words], check=True)
    return port


def serve(folder: Path, delay: float, ports: dict[int, int]) -> None:
    """Hand frames on, for ever.

    Args:
        folder: Where what is written, and looked for, is.
        delay: Of each frame, in seconds.
        ports: The file of each machine, by its number.
    """
    numbers = {port: number for number, port in ports.items()}
    waiting: deque[_Frame] = deque()
    poll = select.epoll()
    for port in numbers:
        poll.register(port, select.EPOLLIN)
    total, told = 0, time.monotonic()
    while True:
        for port, _ in poll.poll(max(0.0, waiting[0].due - time.monotonic()) if waiting else 0.2):
            for data in _read(port):
                is_for_all = data[0] & 1
                targets = [each for each in ports if each != numbers[port] and (is_for_all or each == data[5])]
                waiting.append(_Frame(time.monotonic() + delay, [numbers[port], *targets], data))
                total += len(data)
        while waiting and waiting[0].due <= time.monotonic():
            source, *targets = waiting[0].ports
            for target in targets:
                if not ((folder / f"cut-{source}").exists() or (folder / f"cut-{target}").exists()):
                    with suppress(BlockingIOError):  # lost, as in a full queue: TCP sends it again
                        os.write(ports[target], waiting[0].data)
            waiting.popleft()
        if time.monotonic() > told + 0.2:
            told = time.monotonic()
            (folder / "bytes").write_text(str(total))


def _read(port: int) -> list[bytes]:
    found = []
    with suppress(BlockingIOError):
        while True:
            found.append(os.read(port, _MOST_BYTES + 100))
    return found


def main() -> None:
    """Connect, and serve."""
    folder, delay, machines = Path(sys.argv[1]), float(sys.argv[2]), [each.split("=") for each in sys.argv[3:]]
    ports = {number: connect(number, *each) for number, each in enumerate(machines, 1)}
    (folder / "ready").touch()
    serve(folder, delay, ports)


if __name__ == "__main__":
    main()
