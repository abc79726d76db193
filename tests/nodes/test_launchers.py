"""Whoever starts the ranks on two machines or three, they end as one process does."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.daily import daily
from tests.nodes import ray_train, train
from tests.nodes.machines import Machines, outputs, why_not
from tests.nodes.slurm import Slurm
from tests.nodes.slurm import why_not as why_no_slurm
from tests.training_jobs import PP2, Regression, assert_same, loader, make_trainer, weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PAIRS = {"body.0.0": "colwise", "body.1.0": "rowwise", "body.4.0": "colwise", "body.5.0": "rowwise"}

#: (machines, processes on each, arguments of the strategy)
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "pp2": (2, 1, PP2),
    "pp4": (2, 2, {**PP2, "pipeline_parallel_size": 4}),
    "dp2 pp2": (2, 2, PP2),
    "tp2 pp2": (2, 2, {**PP2, "tensor_parallel_size": 2, "tensor_parallel_plan": PAIRS}),
    "dp2 pp2 zero 3": (2, 2, {**PP2, "zero_stage": 3}),
    "pp3": (3, 1, {**PP2, "pipeline_parallel_size": 3}),
    "dp3": (3, 1, {}),
    "dp3 pp2": (3, 2, PP2),
}


def torchrun(machines: Machines, words: list[str], processes: int) -> str:
    return text_of(machines.torchrun(words, processes=processes))


def lightning(machines: Machines, words: list[str], processes: int) -> str:
    return text_of(machines.lightning(words, processes=processes))


def srun(machines: Machines, words: list[str], processes: int) -> str:
    if why_no_slurm():
        pytest.skip(why_no_slurm())
    folder = machines.disk.parent / "slurm"
    with Slurm(machines, folder) as slurm:
        state = slurm.wait(slurm.start(words, folder, processes=processes))
    text = (folder / "job.log").read_text()
    assert state == "COMPLETED", text
    return text


def mpirun(machines: Machines, words: list[str], processes: int) -> str:
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun here: openmpi-bin has it")
    return text_of(machines.mpirun(words, processes=processes))


def mpirun_with_mpi4py(machines: Machines, words: list[str], processes: int) -> str:
    if importlib.util.find_spec("mpi4py") is None or shutil.which("mpirun") is None:
        pytest.skip("no mpi4py and mpirun here")
    return text_of(machines.mpirun(words, processes=processes, has_mpi4py=True))


def ray(machines: Machines, words: list[str], processes: int) -> str:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("no Ray here")
    with machines.ray(processes=processes) as address:
        run = [ray_train.__file__, address, str(processes * len(machines.numbers)), *words[1:]]
        return text_of([machines.start(1, [sys.executable, "-W", "ignore", *run], RAY_DEDUP_LOGS="0")])


def text_of(started: Any) -> str:
    ended = outputs(started)
    assert not any(code for code, _ in ended), ended
    return ended[0][1]


LAUNCHERS = [torchrun, lightning, srun, mpirun, mpirun_with_mpi4py, ray]


@pytest.mark.parametrize(
    ("launch", "name"),
    daily([(launch, name) for launch in LAUNCHERS for name in LAYOUTS], (torchrun, "pp2")),
    ids=lambda each: getattr(each, "__name__", each),
)
def test_several_machines_are_as_one_process(
    launch: Callable[[Machines, list[str], int], str], name: str, tmp_path: Path
) -> None:
    """The names of all mean their loopback devices, where gloo by itself would listen."""
    if why_not():
        pytest.skip(why_not())
    count, processes, layout = LAYOUTS[name]
    with Machines(count, tmp_path) as machines:
        text = launch(machines, [train.__file__, json.dumps(layout), str(tmp_path)], processes)
    assert f"rank 0 of {count * processes}: from step 0" in text
    # Ray numbers the machines as it likes.
    assert name != "pp2" or launch is ray or re.search(r"stage +ranks +node .*\n.*\n +0 +0 +node1 ", text)
    model = layout.get("pipeline_parallel_size", 1) * layout.get("tensor_parallel_size", 1)
    module = Regression()
    make_trainer(None, max_epochs=2).fit(module, loader(8 * count * processes // model))
    assert_same(torch.load(tmp_path / "weights.ckpt")["state_dict"], weights(module))


@pytest.mark.thorough
def test_ray_starts_all_ranks_again_where_one_was_killed(tmp_path: Path) -> None:
    if why_not():
        pytest.skip(why_not())
    with Machines(2, tmp_path) as machines:
        words = [train.__file__, json.dumps(PP2), str(tmp_path), str(tmp_path / "checkpoints"), "4"]
        text = ray(machines, words, 1)
    assert "rank 0 of 2: from step 4" in text
    module = Regression()
    make_trainer(None, max_epochs=2).fit(module, loader(8))
    assert_same(torch.load(tmp_path / "weights.ckpt")["state_dict"], weights(module))
