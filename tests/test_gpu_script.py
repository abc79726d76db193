"""The script for GPUs: its rehearsal, and the runner that keeps its results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu.models import CausalLM, llama_lora
from benchmarks.gpu.parts.lora import flops_per_token
from benchmarks.gpu.parts.memory import largest_at_peak
from benchmarks.gpu.place import Place
from benchmarks.gpu.runner import Results, run_part
from benchmarks.gpu.table import PARTS


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_a_rehearsal_stays_within_its_budget(tmp_path: Path) -> None:
    """How many parts it reaches depends on the machine; none fails."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--tiny", "--minutes", "1", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    results = Results(tmp_path / "rehearsal.json", "rehearsal").parts
    table = done.stdout.rpartition("\n\nwritten to")[0].rpartition("\n\n")[2].splitlines()
    assert [line.split()[0] for line in table] == [part.name for part in PARTS]
    assert results[PARTS[0].name]["status"] == "measured"
    assert all(result["versions"]["torch"] == torch.__version__ for result in results.values())


def run(tmp_path: Path, program: str, seconds: float = 60.0) -> dict[str, Any]:
    results = Results(tmp_path / "results.json", "a device")
    found = run_part("part", [sys.executable, "-c", program], seconds, results, versions={"torch": "2"})
    assert json.loads((tmp_path / "results.json").read_text())["parts"]["part"] == found
    return found


def test_values_of_a_part_that_fails_are_kept_with_its_error(tmp_path: Path) -> None:
    found = run(tmp_path, "print('RESULT {\"a\": 1}'); print('hello'); raise ValueError('too small')")
    assert (found["status"], found["values"], found["versions"]) == ("failed", {"a": 1}, {"torch": "2"})
    assert "hello" in found["error"]
    assert "ValueError: too small" in found["error"]
    assert not Results(tmp_path / "results.json", "a device").is_answered("part")


def test_a_part_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    child = "import time; time.sleep(600)"
    program = (
        "import json, subprocess, sys, time;"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}]);"
        "print('RESULT ' + json.dumps({'child': child.pid}), flush=True); time.sleep(600)"
    )
    found = run(tmp_path, program, seconds=5.0)
    assert found["status"] == "timed out"
    end = time.monotonic() + 60
    while _is_running(found["values"]["child"]) and time.monotonic() < end:
        time.sleep(0.05)
    assert not _is_running(found["values"]["child"])


def _is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_measured_parts_are_not_run_again(tmp_path: Path) -> None:
    known = {"status": "measured", "seconds": 3.0, "values": {"summary": "as before"}}
    text = {"device": "rehearsal", "parts": {part.name: known for part in PARTS}}
    path = tmp_path / "rehearsal.json"
    path.write_text(json.dumps(text))
    results = Results(path, "rehearsal")
    assert all(results.is_answered(part.name) for part in PARTS)
    results.write("overhead", {**known, "status": "failed"})
    assert not Results(path, "rehearsal").is_answered("overhead")


def test_results_of_a_device_are_readable() -> None:
    """The files in the repository are of the present form, and name their device."""
    folder = Path(__file__).parents[1] / "benchmarks" / "gpu" / "results"
    for path in folder.glob("*.json"):
        results = Results(path, json.loads(path.read_text())["device"])
        assert set(results.parts) <= {part.name for part in PARTS}
        assert all(result["status"] in ("measured", "failed", "timed out") for result in results.parts.values())


def test_the_largest_allocations_at_the_peak() -> None:
    """By hand: 3 + 4 MiB are live at the peak, where 2 MiB more have been freed; a later, lower hill does not count."""

    def event(action: str, addr: int, mib: int, line: int = 0) -> dict[str, Any]:
        frames = [
            {"filename": "/x/torch/nn/functional.py", "line": 1, "name": "linear"},
            {"filename": "/x/package/module.py", "line": line, "name": "forward"},
        ]
        return {"action": action, "addr": addr, "size": mib * 2**20, "frames": frames}

    trace = [
        event("alloc", 1, 3, 10),
        event("alloc", 2, 2, 20),
        event("free_completed", 2, 2),
        event("alloc", 3, 4, 30),
        event("free_completed", 3, 4),
        event("alloc", 4, 1, 40),
        event("segment_alloc", 5, 100, 50),
    ]
    assert largest_at_peak(trace) == {"package/module.py:30 forward": 4.0, "package/module.py:10 forward": 3.0}
    assert largest_at_peak(trace[:1]) == {"package/module.py:10 forward": 3.0}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft reads it
def test_floating_point_operations_of_lora_are_those_that_torch_counts() -> None:
    """Products alone: torch counts whole squares of attention. The first layer's input needs no gradient."""
    place, length = Place("cpu", tiny=True), 16
    module = CausalLM(llama_lora(place, torch.device("cpu")))
    tokens = torch.randint(64, (2, length))
    with FlopCounterMode(display=False) as counter:
        module.network(input_ids=tokens, labels=tokens).loss.backward()
    counts = counter.get_flop_counts()["Global"]
    products = sum(count for op, count in counts.items() if str(op) in ("aten.mm", "aten.addmm", "aten.bmm"))
    config: Any = module.network.config
    attention = 6 * config.num_hidden_layers * length * config.hidden_size
    assert products / tokens.numel() == pytest.approx(flops_per_token(module, length) - attention, rel=0.05)


def test_the_tests_that_parts_name_exist() -> None:
    """As pytest lists them; what is misspelt would cost minutes of a GPU."""
    named = [test for part in PARTS for test in part.arguments.get("tests", ()) if "::" in test]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *named]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=120, check=False)
    assert done.returncode == 0, done.stdout
    assert [line for line in done.stdout.splitlines() if "::" in line] == named
