"""A copy of a process returns the result of its function, and leaves no trace in this process."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.tuning.process_copy import Copies, ProcessCopy, run_in_copy


def test_a_copy_leaves_no_trace() -> None:
    kept: list[int] = []

    def change() -> float:
        kept.append(1)
        random.seed(3)
        torch.manual_seed(3)
        print("not shown")
        return torch.get_num_threads()

    before = torch.get_rng_state()
    assert run_in_copy(change, time_limit=20) == 1
    assert not kept
    assert torch.equal(before, torch.get_rng_state())


def test_a_copy_may_have_groups_of_its_own() -> None:
    def make() -> int:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()
        return 1

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert run_in_copy(make, time_limit=20) == 1
        dist.all_reduce(torch.ones(1))
    finally:
        dist.destroy_process_group()


def test_what_a_copy_raises_is_raised_here_and_in_time() -> None:
    def refuse() -> None:
        raise TypeError("no")

    def fail() -> None:
        raise KeyError("gone")

    with pytest.raises(TypeError, match="no"):
        run_in_copy(refuse, time_limit=20)

    def misuse() -> None:
        raise WrongUseError("not so")

    with pytest.raises(ValueError, match=r"^not so$"):
        run_in_copy(misuse, time_limit=20)
    with pytest.raises(RuntimeError, match="KeyError: 'gone'"):
        run_in_copy(fail, time_limit=20)
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        run_in_copy(lambda: os._exit(1), time_limit=20)
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="longer than"):
        run_in_copy(lambda: time.sleep(60), time_limit=0.2)
    assert time.monotonic() - start < 10


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_copies_give_what_their_functions_return_however_few_run_at_a_time() -> None:
    functions = {number: partial(pow, number, 2) for number in range(5)}
    with Copies(functions, most=2, time_limit=60) as copies:
        assert [copies.take(number) for number in (3, 0, 4, 1, 2)] == [9, 0, 16, 1, 4]
        assert copies.take(7) is None


def test_a_copy_that_fails_gives_nothing_and_the_others_run() -> None:
    def fail() -> int:
        raise KeyError("gone")

    functions: dict[str, Callable[[], int]] = {"fails": fail, "dies": lambda: os._exit(1), "works": lambda: 1}
    with Copies(functions, most=1, time_limit=60) as copies:
        assert [copies.take(name) for name in functions] == [None, None, 1]


def test_no_copy_is_left_after_an_error() -> None:
    functions = {number: partial(time.sleep, 600) for number in range(3)}
    copies: Copies[int, None] = Copies(functions, most=2, time_limit=600)
    running: list[int] = []

    def interrupted() -> None:
        with copies:
            running.extend(children_of(os.getpid()))
            raise KeyboardInterrupt

    before = set(children_of(os.getpid()))
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(set(running) - before) == 2
    assert set(children_of(os.getpid())) <= before
    assert copies.take(2) is None, "those that waited do not begin"


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not end a process with its parent")
def test_copies_of_a_copy_end_with_it() -> None:
    reading, writing = os.pipe()

    def outer() -> None:
        with Copies({0: partial(time.sleep, 600), 1: partial(time.sleep, 600)}, most=2, time_limit=600):
            os.write(writing, f"{children_of(os.getpid())}".encode())
            time.sleep(600)

    copy = ProcessCopy(outer, time_limit=600)
    inner = json.loads(os.read(reading, 100))
    assert len(inner) == 2
    assert all(map(is_alive, inner))
    copy.end()
    while any(map(is_alive, inner)):  # until the timeout of the test
        time.sleep(0.01)
