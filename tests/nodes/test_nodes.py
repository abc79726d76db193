"""What machines do that are far apart, go and come back, and have disks of their own."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, seed_everything

from tests.nodes import elastic, train
from tests.nodes.machines import Machines, outputs, why_not
from tests.training_jobs import Regression, assert_same, dataset, loader, make_trainer, weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PP2 = {"pipeline_parallel_size": 2, "num_microbatches": 4}


@pytest.fixture
def machines(tmp_path: Path, delay: float) -> Iterator[Machines]:
    """Two of them."""
    if why_not():
        pytest.skip(why_not())
    with Machines(2, tmp_path, delay) as made:
        yield made


@pytest.fixture
def delay() -> float:
    """Between them, in seconds."""
    return 0.0


far_apart = pytest.mark.parametrize("delay", [0.02])


def one_process(batch_size: int) -> dict[str, torch.Tensor]:
    module = Regression()
    make_trainer(None, max_epochs=2).fit(module, loader(batch_size))
    return weights(module)


def words(layout: dict[str, Any], folder: Path, *more: str) -> list[str]:
    return [train.__file__, json.dumps(layout), str(folder), *more]


def trained(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(folder / "weights.ckpt")["state_dict"]
    return found


@far_apart
@pytest.mark.thorough
@pytest.mark.parametrize("extra", [0, 4, "auto"])
def test_machines_that_are_far_apart_are_as_one_process(
    machines: Machines, tmp_path: Path, delay: float, extra: int | str
) -> None:
    layout = {**PP2, "tuning": {"extra_in_flight": extra}}
    ended = outputs(machines.lightning(words(layout, tmp_path), processes=1))
    assert [code for code, _ in ended] == [0, 0], ended
    assert_same(trained(tmp_path), one_process(8))
    told = re.findall(r"'auto' chose \[(\d+)\] .* between nodes takes up to ([\d.]+) ms,", ended[0][1])
    assert len(told) == (1 if extra == "auto" else 0)
    for chosen, milliseconds in told:  # of four microbatches, two are in flight without more
        assert int(chosen) == 2
        assert 1e3 * delay <= float(milliseconds) < 3e3 * delay


HEARTBEAT_TIMEOUT = 6.0


@far_apart
@pytest.mark.thorough
@pytest.mark.parametrize("lost", ["its cable is cut", "it stands still"])
@pytest.mark.parametrize("number", [1, 2])
def test_a_machine_that_falls_silent_ends_all(machines: Machines, tmp_path: Path, lost: str, number: int) -> None:
    """With the first machine the store is lost too. Who stands still is let go on for the others to read why."""
    run = words({**PP2, "faults": {"heartbeat_timeout": HEARTBEAT_TIMEOUT}}, tmp_path, str(tmp_path / "checkpoints"))
    started = machines.lightning(run, processes=1)
    while not (tmp_path / "checkpoints" / "last.ckpt").exists():
        assert started[0].poll() is None
    begin = time.monotonic()
    if lost == "its cable is cut":
        machines.cut(number)
    else:
        machines.signal(number, signal.SIGSTOP)
    other = started[2 - number]
    text = outputs([other])[0][1]
    seconds = time.monotonic() - begin
    machines.signal(number, signal.SIGCONT)
    ((_, of_lost),) = outputs([started[number - 1]])
    silent = "No heartbeat for 6 s from rank 1 (on node2)"
    no_store = "The store through which ranks exchange messages does not respond. Either rank 0 (on node1)"
    assert (no_store if number == 1 else silent) in text
    assert other.returncode
    assert started[number - 1].returncode, of_lost
    assert seconds < 60  # eight minutes without heartbeats; 10 s here, on a machine that does nothing else
    if lost == "its cable is cut":
        assert (silent if number == 1 else no_store) in of_lost


@far_apart
@pytest.mark.thorough
def test_a_cable_that_is_mended_in_time_ends_nothing(machines: Machines, tmp_path: Path) -> None:
    run = words({**PP2, "faults": {"heartbeat_timeout": HEARTBEAT_TIMEOUT}}, tmp_path, str(tmp_path / "checkpoints"))
    started = machines.lightning(run, processes=1)
    while not (tmp_path / "checkpoints" / "last.ckpt").exists():
        assert started[0].poll() is None
    machines.cut(2)
    time.sleep(HEARTBEAT_TIMEOUT / 2)
    machines.mend(2)
    ended = outputs(started)
    assert [code for code, _ in ended] == [0, 0], ended
    assert_same(trained(tmp_path), one_process(8))


@pytest.mark.thorough
def test_a_run_goes_on_after_a_rank_of_another_machine_was_killed(machines: Machines, tmp_path: Path) -> None:
    more = [str(tmp_path / "checkpoints"), "4"]
    ended = outputs(machines.torchrun(words(PP2, tmp_path, *more), processes=1, restarts=2))
    assert [code for code, _ in ended] == [0, 0], ended
    assert "rank 0 of 2: from step 4 to step 10" in ended[0][1]
    assert "Killed or crashed without an error message: rank 1 (on node2)" in ended[0][1]
    assert_same(trained(tmp_path), one_process(8))


@pytest.mark.thorough
def test_a_run_goes_on_without_the_machine_that_is_lost(machines: Machines, tmp_path: Path) -> None:
    """Its agent is lost with it, so the world is smaller then, and replicas are fewer."""
    more = [str(tmp_path / "checkpoints"), "2"]
    started = machines.torchrun(words(PP2, tmp_path, *more), processes=2, nodes="1:2", restarts=3)
    while not (tmp_path / "checkpoints" / "last.ckpt").exists():
        assert started[1].poll() is None
    machines.kill(2)
    ((code, text),) = outputs(started[:1])
    assert code == 0, text
    assert "rank 0 of 2: from step " in text


EPOCHS = 12


def undisturbed() -> tuple[dict[str, torch.Tensor], list[set[int]]]:
    """The weights of one process with the samples of a step in a batch, and these samples."""
    seed_everything(5)
    module, seen = Regression(), Samples()
    trainer = make_trainer(None, max_epochs=EPOCHS, callbacks=[seen])
    trainer.fit(module, loader(elastic.GLOBAL_BATCH, elastic.NUM_SAMPLES, shuffle=True))
    return weights(module), seen.steps


class Samples(Callback):
    """Which samples each batch has."""

    def __init__(self) -> None:
        self.numbers = {float(x[0]): number for number, (x, _) in enumerate(dataset(elastic.NUM_SAMPLES))}
        self.steps: list[set[int]] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Note them."""
        self.steps.append({self.numbers[float(x[0])] for x in batch[0]})


def noted(folder: Path) -> list[list[Any]]:
    """What all ranks have written down."""
    lines = [line for path in (folder / "notes").glob("*") for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines if line.endswith("]]")]


def num_trained(folder: Path, world: int) -> int:
    """In how many batches so many ranks have begun a step that is not their first."""
    return sum(size == world and step > 0 for _, size, _, step, _ in noted(folder))


def steps_that_counted(notes: list[list[Any]]) -> dict[int, set[int]]:
    """The samples of each step: those of the last start that has made it."""
    last: dict[int, float] = {}
    for begin, _, _, step, _ in notes:
        last[step] = max(begin, last.get(step, 0.0))
    steps: dict[int, set[int]] = {}
    for begin, _, _, step, samples in notes:
        if begin > last[step] - 5:  # ranks of one start begin at about the same time
            steps.setdefault(step, set()).update(samples)
    return steps


def until(condition: Callable[[], bool], started: Any) -> None:
    """Wait while a program runs."""
    while not condition():
        assert started.poll() is None, started.communicate()[0]
        time.sleep(0.1)


@pytest.mark.thorough
def test_samples_and_steps_stay_when_a_machine_goes_and_comes_back(
    machines: Machines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two machines, one, and two again: the steps are those of one process that nobody has disturbed.

    Agents that share their store with the ranks do not tell one that comes later where it is, in torch 2.13.
    """
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    layout = {"pipeline_parallel_size": [3, 2], "num_microbatches": 2, "zero_stage": 1}
    words = [elastic.__file__, str(tmp_path), json.dumps(layout), str(EPOCHS), "0.3"]
    how: dict[str, Any] = {"processes": 2, "nodes": "1:2", "restarts": 3}
    first, _ = machines.torchrun(words, **how)
    until(lambda: num_trained(tmp_path, world=4) > 1, first)
    machines.kill(2)
    until(lambda: num_trained(tmp_path, world=2) > 1, first)
    before = num_trained(tmp_path, world=4)
    (second,) = machines.torchrun(words, **how, only=2)
    until(lambda: num_trained(tmp_path, world=4) > before, first)
    ended = outputs([first, second])
    assert [code for code, _ in ended] == [0, 0], ended
    expected, steps = undisturbed()
    assert_same(trained(tmp_path), expected)
    assert steps_that_counted(noted(tmp_path)) == dict(enumerate(steps))


@pytest.mark.thorough
def test_a_directory_on_disks_of_their_own_is_refused_before_training(machines: Machines, tmp_path: Path) -> None:
    layout = {**PP2, "save_distributed_checkpoint": True}
    ended = outputs(machines.torchrun(words(layout, tmp_path, str(machines.disk)), processes=1))
    assert all(code for code, _ in ended)
    for _, text in ended:
        assert f"node1 does not see the files that node2 wrote to the checkpoint folder '{machines.disk}'" in text
        assert "so the directory must be on a disk that all nodes share" in text


@pytest.mark.thorough
def test_a_run_goes_on_from_a_file_that_only_the_first_machine_has(machines: Machines, tmp_path: Path) -> None:
    run = words(PP2, tmp_path, str(machines.disk))
    assert all(code for code, _ in outputs(machines.torchrun([*run, "4"], processes=1)))  # the last rank dies
    seen = [[path.name for path in (tmp_path / "machines" / node / "disk").iterdir()] for node in ("1", "2")]
    assert "last.ckpt" in seen[0]
    assert seen[1] == []
    ended = outputs(machines.torchrun(run, processes=1))
    assert [code for code, _ in ended] == [0, 0], ended
    assert re.search(r"last\.ckpt \([\d,]+ bytes\) is read on node1 and sent to node2, where this file", ended[0][1])
    assert [re.search(r": from step (\d) to step 10", text) is not None for _, text in ended] == [True, True], ended
    assert "from step 0" not in ended[0][1]
    assert_same(trained(tmp_path), one_process(8))
