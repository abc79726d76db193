"""How long a thread is going to sleep: what it has asked the kernel for."""

from __future__ import annotations

import os
import platform
import struct
import time
from contextlib import suppress
from pathlib import Path

_CLOCK_NANOSLEEP = {"x86_64": 230, "aarch64": 115}.get(platform.machine())  # the number of the system call
_TIMER_ABSTIME = 1  # its flag for a time of the clock, not a number of seconds
_TIMESPEC = struct.Struct("qq")  # seconds and nanoseconds


def seconds_of_sleep(thread: int) -> float:
    """How long a thread of this process is going to sleep yet, if nothing interrupts it.

    Python's `time.sleep` (from 3.11) tells the kernel when to wake the thread, and the kernel which system call a
    thread is in (Linux, ``proc_pid_syscall(5)``). A thread that waits for anything else, such as a device, a lock or a
    message, is in another one.

    Args:
        thread: As `threading.get_native_id` names it.

    Returns:
        Seconds; 0 if it does not sleep, or nobody tells.
    """
    with suppress(OSError, ValueError, IndexError, struct.error):
        call = _system_call(thread)
        number, clock, flags, address = (int(word, 0) for word in call[:4])
        if number == _CLOCK_NANOSLEEP and clock == time.CLOCK_MONOTONIC and flags == _TIMER_ABSTIME:
            end = _read(address)
            if _system_call(thread) == call:  # so that was still its time
                return max(0.0, end - time.monotonic())
    return 0.0


def _system_call(thread: int) -> list[str]:
    """Its number, its arguments, and two registers; of a thread that computes one word."""
    return Path(f"/proc/self/task/{thread}/syscall").read_text().split()


def _read(address: int) -> float:
    """The time at an address; not by a pointer, behind which there may be nothing when the thread has ended."""
    with Path("/proc/self/mem").open("rb", buffering=0) as memory:
        seconds, nanoseconds = _TIMESPEC.unpack(os.pread(memory.fileno(), _TIMESPEC.size, address))
    return float(seconds + 1e-9 * nanoseconds)
