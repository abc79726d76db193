"""A real SLURM over machines that are network namespaces: Debian's packages slurm-wlm and munge."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from typing_extensions import Self

from tests.nodes.machines import SECONDS, Machines
from tests.nodes.machines import why_not as why_no_machines

_CONFIGURATION = """
ClusterName=nodes
SlurmctldHost=node1({controller})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=2
MpiDefault=none
ReturnToService=2
JobRequeue=1
SlurmdParameters=config_overrides
MailProg=/bin/true
{nodes}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=120
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
"""
_NODE = "NodeName=node{number} NodeAddr={address} CPUs=8 SocketsPerBoard=1 CoresPerSocket=8 RealMemory=1000"
_JOB = """#!/bin/bash
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={processes}
#SBATCH --output={folder}/job.log
#SBATCH --chdir={folder}
#SBATCH --open-mode=append
#SBATCH --signal=USR1@90
#SBATCH --requeue
export LOCAL_WORLD_SIZE={processes} GROUP_WORLD_SIZE={nodes}
srun {words}
status=$?
[ $status = 138 ] && scontrol requeue "$SLURM_JOB_ID"  # SIGUSR1 came before anyone listened
exit $status
"""
_MUNGE_FILES = {"socket": "", "pid-file": ".pid", "log-file": ".log", "seed-file": ".seed"}


@cache
def why_not() -> str:
    """Why there can be no SLURM here; nothing if there can be."""
    missing = [program for program in ("slurmctld", "slurmd", "munged", "mungekey") if shutil.which(program) is None]
    return f"no {', '.join(missing)} here: slurm-wlm and munge have them" if missing else why_no_machines()


class Slurm:
    """SLURM that runs while this is entered, with its controller on the first machine.

    Args:
        machines: On which it runs; it ends with them.
        folder: Where its files are, such as logs.
    """

    def __init__(self, machines: Machines, folder: Path) -> None:
        self._machines, self._folder = machines, folder

    def __enter__(self) -> Self:
        """Start it."""
        (self._folder / "state").mkdir(parents=True)
        numbers = self._machines.numbers
        nodes = [_NODE.format(number=number, address=self._machines.address(number)) for number in numbers]
        controller = self._machines.address(1)
        text = _CONFIGURATION.format(folder=self._folder, controller=controller, nodes="\n".join(nodes))
        (self._folder / "slurm.conf").write_text(text)
        (self._folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        subprocess.run(["mungekey", "--create", f"--keyfile={self._folder}/key"], check=True)
        munge = [f"--{name}={self._folder}/munge{end}" for name, end in _MUNGE_FILES.items()]
        self._start(1, ["munged", "--foreground", "--force", f"--key-file={self._folder}/key", *munge])
        self._start(1, ["slurmctld", "-D"])
        for number in numbers:
            self._start(number, ["slurmd", "-D", "-N", f"node{number}"])
        self._wait(lambda: self.run("sinfo", "-h", "-o", "%D %T").startswith(f"{len(numbers)} idle"), "the nodes")
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing: the machines take with them what runs there."""

    def _start(self, number: int, words: Sequence[str]) -> subprocess.Popen[str]:
        return self._machines.start(number, words, SLURM_CONF=str(self._folder / "slurm.conf"))

    def _wait(self, is_reached: Callable[[], bool], what: str, seconds: float = SECONDS) -> None:
        end = time.monotonic() + seconds
        while not is_reached():
            if time.monotonic() > end:
                log = (self._folder / "slurmctld.log").read_text()
                raise TimeoutError(f"SLURM: waited {seconds:.0f} s for {what}; its controller says:\n{log}")
            time.sleep(0.2)

    def run(self, *words: str) -> str:
        """What a command of SLURM says, such as ``squeue``, on the first machine."""
        return self._start(1, words).communicate(timeout=SECONDS)[0]

    def submit(self, job: Path, *words: str, options: Sequence[str] = ()) -> str:
        """Submit a job file.

        Args:
            job: The file.
            words: Its arguments.
            options: Of sbatch, in the place of those in the file.

        Returns:
            The number of the job.
        """
        said = self.run("sbatch", "--parsable", *options, str(job), *words)
        if not said.strip().isdecimal():
            raise OSError(f"sbatch {job}: {said}")
        return said.strip()

    def start(self, words: Sequence[str], folder: Path, *, processes: int) -> str:
        """Submit a job of a script that may be requeued.

        Args:
            words: The script, and its arguments.
            folder: Where it runs, and prints into ``job.log``.
            processes: On each machine.

        Returns:
            The number of the job.
        """
        folder.mkdir(exist_ok=True)
        sizes = {"nodes": len(self._machines.numbers), "processes": processes}
        command = shlex.join([sys.executable, "-W", "ignore", *words])
        (folder / "job.sh").write_text(_JOB.format(folder=folder, words=command, **sizes))
        return self.submit(folder / "job.sh")

    def wait(self, job: str) -> str:
        """The state in which a job has ended, such as ``COMPLETED``; it may have been requeued before."""
        self._wait(lambda: not self.runs(job), f"job {job}", 3 * SECONDS)
        return self._state(job)

    def runs(self, job: str) -> bool:
        """Whether a job waits, runs, or is about to run again."""
        return self._state(job).startswith(("PENDING", "RUNNING", "SIGNALING", "COMPLETING", "REQUEUED", "CONFIGURING"))

    def _state(self, job: str) -> str:
        return self.run("squeue", "-h", "-t", "all", "-j", job, "-o", "%T").strip()
