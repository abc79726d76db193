"""``python -m tests.nodes.faults 100``: a hundred faults on two machines, and a table of how they ended."""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from queue import Queue
from tempfile import TemporaryDirectory
from typing import Any

import torch
from typing_extensions import Self

from tests.faults.forks import told
from tests.nodes.machines import Machines
from tests.nodes.node_fault import FULL, KINDS, MENDED, Fault, draw
from tests.nodes.rank_server import Job
from tests.training_jobs import assert_same

HANGS = 60.0  # seconds from the fault after which a run hangs
_STARTS = 180.0  # seconds in which the ranks have come to where the fault happens, or through a run without one
_CONTINUED = 20.0  # seconds in which who was stopped ends, once it goes on
_COMPARED = ("state_dict", "optimizer_states", "global_step", "epoch", "loops")  # what a run that goes on needs


@dataclass
class Ending:
    """How a run ended.

    Attributes:
        fault: What was done to it.
        load: Of the machine, when it ended.
        seconds: From the fault to the end of all ranks that are to name who was hit; ``None`` if it never happened.
        codes: Exit statuses by rank; ``None`` for who had to be ended.
        texts: What each rank said in the end, the first line of it.
        checkpoint: What is wrong with the checkpoints.
        is_again: Whether it was late before, on a busy machine, and this is how it ends alone.
    """

    fault: Fault
    load: float = 0.0
    seconds: float | None = None
    codes: dict[int, int | None] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    checkpoint: str = ""
    is_again: bool = False

    @property
    def is_late(self) -> bool:
        """Whether it took longer than it may."""
        return self.seconds is not None and self.fault.kind != MENDED and self.seconds > self.fault.limit

    def is_named(self, rank: int) -> bool:
        """Whether a rank names one that was hit, and its host."""
        fault, text = self.fault, self.texts.get(rank, "")
        if fault.kind == FULL:
            return re.search(r"could not be written.*\brank 0: ", text) is not None
        hosts = [rf"rank {true} \(on (node|[\d.]+\.){fault.machine(true)}\)" for true in fault.true_ranks(rank)]
        return re.search("|".join(hosts), text) is not None  # before it has said its host's name, rank 0 has an address

    @property
    def problems(self) -> list[str]:
        """What is not as it should be."""
        fault = self.fault
        found = ["HANG"] if None in self.codes.values() else []
        if fault.kind == MENDED:
            found += ["ended by a cable that is back"] if set(self.codes.values()) != {0} else []
        elif self.seconds is not None:
            found += ["exit code 0"] if 0 in self.codes.values() else []
            found += ["late"] if self.is_late else []
            found += ["wrong name"] if not all(map(self.is_named, fault.survivors)) else []
        return [*found, *filter(None, [self.checkpoint])]

    def __str__(self) -> str:
        seconds = "never happened" if self.seconds is None else f"{self.seconds:.1f} s"
        again = ", alone" if self.is_again else ""
        said = "; ".join(self.problems) or "as it should"
        return f"{self.fault}: {seconds}, codes {[*self.codes.values()]}, load {self.load:.1f}{again}: {said}"


class Lane:
    """Two machines, on which one run comes after the other.

    Args:
        folder: Of all files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._machines = folder, Machines(2, folder)
        self._small = self._machines.disk / "small"
        self._undo = ExitStack()
        self._ports = count(29600)
        self._expected: dict[str, Path] = {}

    def __enter__(self) -> Self:
        """Make them."""
        self._undo.enter_context(self._machines)
        words = [sys.executable, "-W", "ignore", "-m", "tests.nodes.rank_server"]
        numbers = self._machines.numbers
        self._servers = {each: self._machines.start(each, [*words, str(each), str(self._small)]) for each in numbers}
        return self

    def __exit__(self, *_: Any) -> None:
        """Take them away."""
        self._undo.close()

    def run(self, fault: Fault) -> Ending:
        """Train, with a fault."""
        if fault.layout not in self._expected and fault.kind != "none":
            undisturbed = Fault(-1 - len(self._expected), layout=fault.layout)
            ending = self.run(undisturbed)
            assert set(ending.codes.values()) == {0}, ending
            self._expected[fault.layout] = self._folder / str(undisturbed.number)
        port = next(self._ports)
        folder = self._folder / (str(fault.number) if fault.kind == "none" else f"{fault.number}-{port}")
        folder.mkdir()
        job = Job(str(folder), str(self._small), self._machines.address(1), port, fault)
        for server in self._servers.values():
            assert server.stdin is not None
            print(job.dumps(), file=server.stdin, flush=True)
        ending = Ending(fault)
        began = None if fault.kind == "none" else self._hit(fault, folder)
        waited_for = range(fault.size) if began is None else fault.survivors
        _until(lambda: _have_ended(folder, waited_for), _STARTS if began is None else HANGS)
        for rank in fault.hit - fault.survivors:  # who was stopped goes on, to find out the same
            _signal(folder, rank, signal.SIGCONT)
        _until(lambda: _have_ended(folder, range(fault.size)), _CONTINUED)
        ending.load = os.getloadavg()[0]
        self._gather(ending, folder, began)
        return ending

    def _hit(self, fault: Fault, folder: Path) -> float | None:
        """Do it, and say when; ``None`` if the ranks have not come to the place."""
        ready = [folder / f"ready-{rank}" for rank in (range(fault.size) if fault.place == "set-up" else [fault.rank])]
        _until(lambda: all(path.exists() for path in ready) or _have_ended(folder, range(fault.size)), _STARTS)
        if not all(path.exists() for path in ready):
            return None
        if fault.kind == FULL:
            _until(lambda: _have_ended(folder, range(fault.size)), HANGS)
            return float((folder / "saves-at").read_text())
        time.sleep(fault.delay)
        if _have_ended(folder, fault.hit):
            return None
        began, number = time.time(), fault.machine(fault.rank)
        if fault.kind in ("cable cut", MENDED):
            self._machines.cut(number)
        else:
            what = signal.SIGSTOP if fault.kind == "machine stopped" else signal.SIGKILL
            for rank in fault.hit:
                _signal(folder, rank, what)
        if fault.kind == MENDED:
            time.sleep(fault.seconds)
            self._machines.mend(number)
        return began

    def _gather(self, ending: Ending, folder: Path, began: float | None) -> None:
        """Note how a run has ended, and end what is left of it."""
        fault = ending.fault
        ended = {}
        for rank in range(fault.size):
            if not (folder / f"code-{rank}").exists():
                ending.codes[rank] = None
                _signal(folder, rank, signal.SIGKILL)
                _until(lambda path=folder / f"code-{rank}": path.exists(), HANGS)  # type: ignore[misc]
            else:
                code, moment = (folder / f"code-{rank}").read_text().split()
                ending.codes[rank], ended[rank] = int(code), float(moment)
            ending.texts[rank] = told(folder, rank, folder / f"output-{rank}").partition("\n")[0]
        if fault.kind == "cable cut" and began is not None:
            self._machines.mend(fault.machine(fault.rank))
        if began is not None:
            ending.seconds = max([moment for rank, moment in ended.items() if rank in fault.survivors], default=began)
            ending.seconds -= began
        if fault.kind != "none":
            ending.checkpoint = self._compare(fault, folder)

    def _compare(self, fault: Fault, folder: Path) -> str:
        """What is wrong with the checkpoints that are left; each is to be that of a run without a fault."""
        # What a machine has on its own disk is seen from here through one of its processes.
        small = Path(f"/proc/{self._servers[1].pid}/root{self._small}")
        checkpoints = (small if fault.kind == FULL else folder) / "checkpoints"
        expected = self._expected[fault.layout]
        try:
            for path in checkpoints.glob("*.ckpt"):
                found, wanted = (torch.load(each) for each in (path, expected / "checkpoints" / path.name))
                for name in _COMPARED:
                    assert_same(found[name], wanted[name], where=name)
            if fault.kind == MENDED:
                weights = [torch.load(each / "weights.ckpt")["state_dict"] for each in (folder, expected)]
                assert_same(*weights)
        except Exception as error:
            return f"checkpoint: {type(error).__name__}: {error}"
        return ""


def _have_ended(folder: Path, ranks: Iterable[int]) -> bool:
    return all((folder / f"code-{rank}").exists() for rank in ranks)


def _signal(folder: Path, rank: int, what: signal.Signals) -> None:
    path = folder / f"pid-{rank}"
    if path.exists() and not (folder / f"code-{rank}").exists():
        with suppress(ProcessLookupError):
            os.kill(int(path.read_text()), what)


def _until(condition: Callable[[], bool], seconds: float) -> None:
    """Wait, but not for ever."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)


def endings(faults: list[Fault], lanes: int, told: Callable[[Ending], None]) -> list[Ending]:
    """Run faults, and those that a busy machine has made late once more, alone.

    Args:
        faults: These.
        lanes: How many at a time; they spend most of their time waiting.
        told: Is called with each.
    """
    with TemporaryDirectory(prefix="faults-") as folder, ExitStack() as stack, ThreadPoolExecutor(lanes) as pool:
        free: Queue[Lane] = Queue()
        for number in range(lanes):
            free.put(stack.enter_context(Lane(Path(folder, str(number)))))

        def run(fault: Fault) -> Ending:
            lane = free.get()
            try:
                ending = lane.run(fault)
            finally:
                free.put(lane)
            told(ending)
            return ending

        found = list(pool.map(run, faults))
        lane = free.get()
        for index, ending in enumerate(found):
            if ending.is_late:
                found[index] = lane.run(ending.fault)
                found[index].is_again = True
                told(found[index])
    return found


def table(found: list[Ending]) -> str:
    """How the faults of each kind have ended."""
    rows = [f"{'kind':<16} {'faults':>6} {'happened':>8} {'median s':>9} {'max s':>7}  problems"]
    for kind in KINDS:
        those = [each for each in found if each.fault.kind == kind]
        seconds = sorted(each.seconds for each in those if each.seconds is not None)
        problems = [f"#{each.fault.number} {problem}" for each in those for problem in each.problems]
        numbers = f"{statistics.median(seconds):9.1f} {seconds[-1]:7.1f}" if seconds else f"{'-':>9} {'-':>7}"
        rows.append(f"{kind:<16} {len(those):6} {len(seconds):8} {numbers}  {'; '.join(problems) or 'none'}")
    return "\n".join(rows)


def main() -> int:
    """Run them; the exit code is the number of runs that did not end as they should."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=20)
    parser.add_argument("--first", type=int, default=0, help="the number of the first fault")
    parser.add_argument("--numbers", type=int, nargs="*", help="of the faults, instead of the first one and the count")
    parser.add_argument("--kinds", nargs="*", help=f"what to choose from: {', '.join(KINDS)}")
    parser.add_argument("--lanes", type=int, default=1, help="how many at a time")
    parser.add_argument("--texts", action="store_true", help="what the ranks said")
    arguments = parser.parse_args()

    def tell(ending: Ending) -> None:
        lines = [f"    rank {rank}: {text[:400]}" for rank, text in ending.texts.items()]
        print("\n".join([str(ending), *(lines if arguments.texts or ending.problems else [])]), flush=True)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # which takes the machines away
    numbers = arguments.numbers or range(arguments.first, arguments.first + arguments.count)
    found = endings([draw(number, arguments.kinds) for number in numbers], arguments.lanes, tell)
    print(table(found))
    return min(100, sum(bool(each.problems) for each in found))


if __name__ == "__main__":
    sys.exit(main())
