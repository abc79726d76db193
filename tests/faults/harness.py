"""Runs a training with a fault in processes of its own, and says how it ended."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from tests.faults.fault import ALONE, Fault
from tests.faults.forks import fork, told

TIMEOUT = 120.0  # seconds after which a run hangs


@dataclass
class Ending:
    """How a run ended.

    Attributes:
        fault: What was done to it.
        seconds: From the fault to the end of all processes; ``None`` if it never happened.
        codes: Exit codes by rank; of a launcher, its own. ``None`` for what had to be ended.
        texts: What each rank said in the end.
        output: What the launcher said, if there is one.
        orphans: Processes that were left.
        checkpoint: Whether a run goes on from the last checkpoint, if there is one.
    """

    fault: Fault
    seconds: float | None = None
    codes: list[int | None] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)
    output: str = ""
    orphans: int = 0
    checkpoint: str = ""

    @property
    def hangs(self) -> bool:
        return None in self.codes

    @property
    def is_named(self) -> bool:
        """Whether every other rank names the true rank, in a step its stage and action, or what one does alone."""
        fault = self.fault
        if fault.kind == "disk_full":
            names = rf"could not be written.* rank {fault.rank}: "
            return bool(self.texts) and all(re.search(names, text) for text in self.texts.values())
        others = [text for rank, text in self.texts.items() if rank != fault.rank]
        if fault.kind in ALONE:
            return bool(self.texts) and all(_ALONE.search(text) for text in self.texts.values())
        if fault.launcher != "fork" and fault.kind == "sleep+sigint":  # its first rank is interrupted, or all are
            return bool(self.texts) and all(_INTERRUPTED.search(text) for text in self.texts.values())
        if fault.kind == "sleep+sigterm" and -signal.SIGTERM not in self.codes:  # else it came before a run: it kills
            return all(f"rank {fault.rank} is stuck at" in text for text in self.texts.values())
        if fault.kind == "sigterm":  # before a run has begun, it kills; and so it does a worker that gets it too
            names = rf"^SIGTERMException|\brank {fault.rank}\b|^RuntimeError: DataLoader worker"
            return all(re.search(names, text) for text in self.texts.values())
        true = fault.rank
        if "+" in fault.kind and fault.launcher == "fork":  # who was interrupted
            true = (fault.rank + 1) % fault.size
            others = [text for rank, text in self.texts.items() if rank != true]
        names = rf"\brank {true}\b"
        if fault.is_in_action:
            # Around a chain an evaluation runs outside of a schedule, and so does a step that is followed.
            names += r".*, (stage \d+, action \w+|(train|sanity check|validate) batch \d+), failed: "
        elif fault.kind == "sleep+sigint":
            names += ".* failed: KeyboardInterrupt"
        # A launcher ends other ranks at once, its own one too, so that some have no word; it has the last.
        ended_by_launcher = fault.kind in ("exit", "kill") and re.search(
            rf"Root Cause.*? rank +: {fault.rank} |\[rank: {fault.rank}\] Child process", self.output, re.DOTALL
        )
        is_killed = fault.launcher == "lightning" and not fault.rank and fault.kind in ("sigint", "keyboard_interrupt")
        is_complete = len(others) == fault.size - 1 or bool(ended_by_launcher) or is_killed
        return is_complete and all(re.search(names, text, re.IGNORECASE) for text in others)

    @property
    def problems(self) -> list[str]:
        """What is not as it should be."""
        found = []
        if self.hangs:
            found.append("HANG")
        if self.fault.works:
            if set(self.codes) != {0}:
                found.append("ended by what is no fault")
        elif self.seconds is not None:
            if 0 in self.codes and not self.fault.kind.endswith("sigterm"):
                found.append("exit code 0")
            if not self.is_named:
                found.append("wrong name")
        if self.orphans:
            found.append(f"{self.orphans} orphans")
        if self.checkpoint not in ("", "trains on"):
            found.append(self.checkpoint)
        return found


_INTERRUPTED = re.compile(r"^SystemExit: 1$|KeyboardInterrupt")
_ALONE = re.compile(r"made different calls|The run has ended on|in a step|not the same on every rank|logs '")


def run(fault: Fault, timeout: float = TIMEOUT) -> Ending:
    """Run a training with a fault, and one without from the last checkpoint that it has left.

    Args:
        fault: The fault.
        timeout: Seconds after which it hangs; a launcher has three times as many, which starts interpreters.
    """
    timeout *= 1 if fault.launcher == "fork" else 3
    ending = Ending(fault)
    with tempfile.TemporaryDirectory(prefix="fault-") as name:
        directory = Path(name)
        processes = _fork(fault, directory) if fault.launcher == "fork" else _launch(fault, directory)
        began = time.monotonic()
        codes: dict[int, int] = {}
        hit = False
        while _live(processes, codes) and time.monotonic() < began + timeout:
            if not hit and (directory / "ready").exists():
                hit = True
                _hit_from_outside(fault, directory, processes)
            time.sleep(0.02)
        ended = _wait_for_all(processes, directory, 5.0)
        with suppress(OSError, ValueError):
            ending.seconds = ended - float((directory / "fault").read_text())
        ending.codes = [codes.get(index) for index in range(len(processes))]
        ending.orphans = _end(processes, codes, directory) - sum(code is None for code in ending.codes)
        ending.texts = _texts(fault, directory)
        if fault.launcher != "fork":
            ending.output = (directory / "output").read_text()
        ending.checkpoint = _train_on(fault, directory)
    return ending


def _live(processes: list[int], codes: dict[int, int]) -> bool:
    """Whether a process still runs; the codes of those that have ended are added."""
    for index, pid in enumerate(processes):
        if index not in codes:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[index] = os.waitstatus_to_exitcode(status)
    return len(codes) < len(processes)


def _end(processes: list[int], codes: dict[int, int], directory: Path) -> int:
    """End what is left of a run; how many processes that were."""
    left = _members(processes, directory)
    for pid in left:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    for index, pid in enumerate(processes):
        if index not in codes:
            os.waitpid(pid, 0)
    return len(left)


def shared_memory() -> set[str]:
    """What is in shared memory."""
    return {path.name for path in Path("/dev/shm").iterdir()}


def _fork(fault: Fault, directory: Path, checkpoint: Path | None = None) -> list[int]:
    """Plain processes, forked from this one, which has imported everything."""
    from tests.faults import program

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": str(fault.size), "LOCAL_WORLD_SIZE": str(fault.size), "NODE_RANK": "0", "GROUP_RANK": "0"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "fault"}
    act = partial(program.run, fault, directory, checkpoint)
    return [
        fork(act, directory / f"output-{rank}", RANK=str(rank), LOCAL_RANK=str(rank), **shared)
        for rank in range(fault.size)
    ]


def _launch(fault: Fault, directory: Path) -> list[int]:
    """A launcher, in a session of its own."""
    import subprocess

    arguments = ["tests/faults/program.py", json.dumps(asdict(fault)), str(directory)]
    command = [sys.executable, "-X", "faulthandler"]
    if fault.launcher == "torchrun":
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={fault.size}"]
    with (directory / "output").open("w") as output:
        process = subprocess.Popen(
            [*command, *arguments], stdout=output, stderr=output, start_new_session=True, env=_environment(directory)
        )
    return [process.pid]


def _environment(directory: Path) -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", "FAULT": str(directory)}


def _hit_from_outside(fault: Fault, directory: Path, processes: list[int]) -> None:
    """Send the signal that the rank waits for; where it stands still, to another one."""
    time.sleep(0.1)
    pid = int((directory / "ready").read_text() or 0)
    name = fault.kind.rpartition("+")[2]
    if "+" in fault.kind:
        time.sleep(1.5)
        pid = processes[(fault.rank + 1) % fault.size] if fault.launcher == "fork" else processes[0]
    (directory / "fault").write_text(str(time.time()))
    number = {"sigint": signal.SIGINT, "sigterm": signal.SIGTERM, "stop": signal.SIGSTOP}.get(name)
    if number is not None:
        os.kill(pid, number)


def _members(sessions: list[int], directory: Path) -> list[int]:
    """The processes of a run that live: those of the sessions, and those that a launcher started in others."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, IndexError, ValueError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                is_member = int(fields[3]) in sessions or os.fsencode(directory) in (entry / "environ").read_bytes()
                if is_member and fields[0] != "Z":
                    found.append(int(entry.name))
    return found


def _wait_for_all(sessions: list[int], directory: Path, patience: float) -> float:
    """When the last process had ended; launchers and workers may take a moment longer than what was waited for."""
    deadline = time.monotonic() + patience
    while _members(sessions, directory) and time.monotonic() < deadline:
        time.sleep(0.02)
    return time.time()


def _texts(fault: Fault, directory: Path) -> dict[int, str]:
    forked = fault.launcher == "fork"
    outputs = {rank: directory / (f"output-{rank}" if forked else "output") for rank in range(fault.size)}
    return {rank: text for rank, output in outputs.items() if (text := told(directory, rank, output))}


def _train_on(fault: Fault, directory: Path) -> str:
    """Whether the last checkpoint loads, and a run without a fault goes on from it."""
    import torch

    files = sorted((directory / "checkpoints").glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    if not files:
        return ""
    try:
        checkpoint = torch.load(files[-1], weights_only=True)
        tensors = 68 if fault.layout.experts > 1 else 36
        missing = len(checkpoint["state_dict"]) != tensors or not checkpoint["optimizer_states"][0]["state"]
    except Exception as error:
        return f"the checkpoint is broken: {error}"
    if missing:
        return "the checkpoint is not complete"
    onward = directory / "onward"
    onward.mkdir()
    processes = _fork(Fault(fault.number, layout=fault.layout, kind="none", rank=-1), onward, files[-1])
    codes: dict[int, int] = {}
    deadline = time.monotonic() + TIMEOUT
    while _live(processes, codes) and time.monotonic() < deadline:
        time.sleep(0.02)
    _end(processes, codes, onward)
    if set(codes.values()) == {0} and len(codes) == len(processes):
        return "trains on"
    return f"from the checkpoint nothing goes on: {sorted(_texts(fault, onward).values())[:1]}"
