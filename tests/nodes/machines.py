"""Several machines on one: network namespaces at a switch, each with its own address, host name and disk.

::

    this machine
      tests.nodes.switch --+-- TAP -- node1: eth0 10.77.1.1, /etc/hosts and a folder of its own
                           `-- TAP -- node2: eth0 10.77.1.2, ...

What they share is everything else: the processor, the clock, other folders, and numbers of processes. Needs root and
iproute2, as :func:`why_not` says.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from typing_extensions import Self

ROOT = Path(__file__).parents[2]
SECONDS = 150.0
_PATHS = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
_NUMBERS = itertools.count()
_ENTER = """#!/bin/bash
number=${{1#node}}; shift
exec ip netns exec {name}n$number unshare --uts --mount bash -c '
    hostname "$1"; mount --bind "$2/hosts" /etc/hosts; mount --bind "$2/disk" {disk}
    mount --bind "$2/boot_id" /proc/sys/kernel/random/boot_id; shift 2; exec "$@"
' - node$number {folder}/$number "$@"
"""
_REMOTE_SHELL = """#!/bin/bash
exec {folder}/enter "$1" bash -c "${{*:2}}"
"""
_RANKS_OF_MPI = """
export LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK
export NODE_RANK=$((OMPI_COMM_WORLD_RANK / OMPI_COMM_WORLD_LOCAL_SIZE))
exec "$@"
"""


@cache
def why_not() -> str:
    """Why there can be no machines here; nothing if there can be."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "network namespaces need iproute2 and unshare"
    try:
        with Machines(1, Path(f"/run/why-not-{os.getpid()}")):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"there are no network namespaces here: {error}"


class Machines:
    """Machines that exist while this is entered.

    Args:
        count: How many.
        folder: Where the files of each are; what is in its `disk`, each sees something else.
        delay: Of what goes from one to another, in seconds.
    """

    def __init__(self, count: int, folder: Path, delay: float = 0.0) -> None:
        self._folder, self._delay = folder, delay
        self._name = f"lh{os.getpid() % 100_000}x{next(_NUMBERS)}"
        self._net = os.getpid() % 200 + 20
        self.numbers = range(1, count + 1)
        self.disk = folder / "disk"
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        """Make them."""
        with ExitStack() as undo:
            undo.callback(shutil.rmtree, self._folder / "machines", ignore_errors=True)
            self.disk.mkdir(parents=True)
            for number in self.numbers:
                self._make(number, undo)
            self._write("enter", _ENTER)
            self._write("remote_shell", _REMOTE_SHELL)
            self._connect(undo)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: Any) -> None:
        """Take them away, with all that runs there."""
        self._undo.close()

    def _make(self, number: int, undo: ExitStack) -> None:
        space = self._space(number)
        _ip("netns", "add", space)
        undo.callback(_ip, "netns", "delete", space)
        undo.callback(self.kill, number)
        _ip("-n", space, "link", "set", "lo", "up")
        own = self._folder / "machines" / str(number)
        (own / "disk").mkdir(parents=True)
        others = [f"{self.address(other)} node{other}" for other in self.numbers if other != number]
        (own / "boot_id").write_text(f"{uuid.uuid4()}\n")  # processes elsewhere are not to be found by their numbers
        # As Debian and Ubuntu write it: the machine's own name is its loopback device.
        (own / "hosts").write_text("\n".join(["127.0.0.1 localhost", f"127.0.1.1 node{number}", *others, ""]))

    def _write(self, program: str, text: str) -> None:
        path = self._folder / "machines" / program
        path.write_text(text.format(name=self._name, disk=self.disk, folder=path.parent))
        path.chmod(0o755)

    def _connect(self, undo: ExitStack) -> None:
        places = [f"{self._space(number)}={self.address(number)}/24" for number in self.numbers]
        folder = self._folder / "machines"
        switch = subprocess.Popen(
            [sys.executable, "-m", "tests.nodes.switch", str(folder), str(self._delay), *places],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        undo.callback(switch.wait)
        undo.callback(switch.kill)
        while not (folder / "ready").exists():
            if switch.poll() is not None:
                raise OSError(f"the switch has ended: {switch.communicate()[1]}")
            time.sleep(0.01)

    def _space(self, number: int) -> str:
        return f"{self._name}n{number}"

    def cut(self, number: int) -> None:
        """The cable of a machine is cut, until :meth:`mend`."""
        (self._folder / "machines" / f"cut-{number}").touch()

    def mend(self, number: int) -> None:
        """The cable is whole again."""
        (self._folder / "machines" / f"cut-{number}").unlink()

    def num_bytes(self) -> int:
        """How many bytes have gone between the machines, up to a moment ago."""
        return int((self._folder / "machines" / "bytes").read_text())

    def address(self, number: int) -> str:
        """The address of a machine."""
        return f"10.77.{self._net}.{number}"

    def processes(self, number: int) -> list[int]:
        """What runs on a machine."""
        return [int(word) for word in _ip("netns", "pids", self._space(number)).split()]

    def kill(self, number: int) -> None:
        """The machine is lost."""
        self.signal(number, signal.SIGKILL)

    def signal(self, number: int, what: signal.Signals) -> None:
        """All that runs on a machine gets a signal."""
        for process in self.processes(number):
            with suppress(ProcessLookupError):
                os.kill(process, what)

    def start(self, number: int, words: Sequence[str], **environment: str) -> subprocess.Popen[str]:
        """Start a program on a machine.

        Args:
            number: Of the machine.
            words: The program and its arguments.
            environment: Variables, beside those of this process.
        """
        return subprocess.Popen(
            [str(self._folder / "machines" / "enter"), str(number), *words],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": _PATHS, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def lightning(self, words: Sequence[str], *, processes: int) -> list[Any]:
        """Start a script on all machines, where Lightning starts the processes.

        Args:
            words: The script, and its arguments.
            processes: On each machine.
        """
        meeting = {"MASTER_ADDR": self.address(1), "MASTER_PORT": "29512"}
        sizes = {"LOCAL_WORLD_SIZE": str(processes), "GROUP_WORLD_SIZE": str(len(self.numbers))}
        return [
            self.start(number, [sys.executable, "-W", "ignore", *words], NODE_RANK=str(number - 1), **meeting, **sizes)
            for number in self.numbers
        ]

    def torchrun(
        self, words: Sequence[str], *, processes: int, nodes: str = "", restarts: int = 0, only: int = 0
    ) -> list[Any]:
        """Start torchrun on all machines, or on one of them.

        Args:
            words: The script, and its arguments.
            processes: On each machine.
            nodes: How many machines there have to be, such as ``1:2``; all of them by default.
            restarts: How often processes are started again.
            only: The number of that one.
        """
        launch = ["-W", "ignore", "-m", "torch.distributed.run", f"--nnodes={nodes or len(self.numbers)}"]
        launch += [f"--nproc_per_node={processes}", f"--max_restarts={restarts}", "--rdzv_backend=c10d"]
        wait = "last_call_timeout=5"  # seconds, for more machines than there have to be
        launch += ["--rdzv_id=job", f"--rdzv_endpoint={self.address(1)}:29511"]
        return [
            self.start(number, [sys.executable, *launch, f"--rdzv_conf=is_host={int(number == 1)},{wait}", *words])
            for number in self.numbers
            if only in (0, number)
        ]

    def mpirun(self, words: Sequence[str], *, processes: int, has_mpi4py: bool = False) -> list[Any]:
        """Start a script on all machines by Open MPI, from the first.

        Args:
            words: The script, and its arguments.
            processes: On each machine.
            has_mpi4py: Whether Lightning asks MPI for the ranks. Otherwise a shell says them.
        """
        hosts = ",".join(f"node{number}:{processes}" for number in self.numbers)
        launch = ["mpirun", "--allow-run-as-root", "--host", hosts]
        launch += ["--mca", "plm_rsh_agent", str(self._folder / "machines" / "remote_shell")]
        sizes = {"LOCAL_WORLD_SIZE": str(processes), "GROUP_WORLD_SIZE": str(len(self.numbers))}
        meeting = {} if has_mpi4py else {"MASTER_ADDR": self.address(1), "MASTER_PORT": "29513"}
        variables = [word for name in (*sizes, *meeting) for word in ("-x", name)]
        ranks = [] if has_mpi4py else ["bash", "-c", _RANKS_OF_MPI, "-"]
        train = [*ranks, sys.executable, "-W", "ignore", *words]
        return [self.start(1, [*launch, *variables, *train], **sizes, **meeting)]

    @contextmanager
    def ray(self, *, processes: int) -> Iterator[str]:
        """A cluster of Ray on all machines, while this is entered.

        Args:
            processes: As many workers may run on each machine.

        Yields:
            Its address.
        """
        address = f"{self.address(1)}:6379"
        with TemporaryDirectory(prefix="ray") as folder:  # names of sockets are short
            first = ["--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={folder}"]
            for number in self.numbers:
                words = first if number == 1 else [f"--address={address}"]
                words += [f"--node-ip-address={self.address(number)}", f"--num-cpus={processes}", "--block"]
                words += ["--object-store-memory=100000000", "--disable-usage-stats"]
                # Ray makes the group of all workers itself, and does not choose gloo's interface.
                start = [sys.executable, "-m", "ray.scripts.scripts", "start", *words]
                self.start(number, start, GLOO_SOCKET_IFNAME="eth0")
                end = time.monotonic() + SECONDS
                # One after the other: they share a folder.
                while len(list(Path(folder, "session_latest", "sockets").glob("raylet*"))) < number:
                    assert time.monotonic() < end, "Ray does not start"
                    time.sleep(0.2)
            yield address
            for number in self.numbers:
                self.kill(number)


def outputs(started: Sequence[subprocess.Popen[str]]) -> list[tuple[int | None, str]]:
    """The exit status and the output of programs, once they have ended."""
    return [(each.returncode, text) for each in started for text in [each.communicate(timeout=SECONDS)[0]]]


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout
