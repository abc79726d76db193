"""Time and memory of the comparison of microbatches in the first step, relative to those of a step.

A Trainer is fitted again and again, as in the other benchmarks of this folder. In each fit the first step compares, and
the steps after it are what the comparison is measured by::

    python -m benchmarks.step.first_comparison [--rounds 20]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import warnings
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from benchmarks.memory.live_tensors import LiveTensors
from benchmarks.ratios import interval
from benchmarks.step.__main__ import SIZES, Model, Size, dist_rank, loader_of
from lightning_hybrid import HybridStrategy
from lightning_hybrid.trainer.microbatch_comparison import MicrobatchComparison

_SECONDS, _BYTES = "seconds", "bytes"
#: A comparison has constant costs of about 25 ms on a CPU, half of the shortest step here: "wide" shows the rest.
_SIZES = {"normal": SIZES["normal"], "wide": SIZES["normal"]._replace(width=768)}


class Measured(Callback):
    """Seconds, or the peak of live bytes, of the comparison and of the steps after the first one.

    Args:
        what: ``"seconds"`` or ``"bytes"``.
    """

    def __init__(self, what: str) -> None:
        self._tensors = LiveTensors() if what == _BYTES else None
        self.steps: list[float] = []
        self.comparison = 0.0
        self._compare = MicrobatchComparison.__call__

    def fit(self, size: Size, layout: dict[str, Any]) -> None:
        """Train one epoch."""
        this = self

        def compare(self: MicrobatchComparison, *args: Any) -> bool:
            start = this._begin()
            changed = this._compare(self, *args)
            this.comparison = this._end(start)
            return changed

        trainer = Trainer(
            accelerator="cpu",
            devices=layout.get("pipeline_parallel_size", 1),
            strategy=HybridStrategy(num_microbatches=size.microbatches, **layout),
            callbacks=[self],
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        with mock.patch.object(MicrobatchComparison, "__call__", compare):
            if self._tensors is None:
                trainer.fit(Model(size), loader_of(size, 0))
            else:
                with self._tensors:
                    trainer.fit(Model(size), loader_of(size, 0))

    def _begin(self) -> float:
        if self._tensors is None:
            return time.perf_counter()
        start = self._tensors.peak = self._tensors.now()
        return float(start)

    def _end(self, start: float) -> float:
        return (time.perf_counter() if self._tensors is None else self._tensors.peak) - start

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """A step begins."""
        self._start = self._begin()

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """It ends; the first one is not counted."""
        if args[-1] > 0:
            self.steps.append(self._end(self._start))


def measure(kind: str, microbatches: int, layout: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Fit several times; a ratio is of one fit."""
    size = _SIZES[kind]._replace(microbatches=microbatches)
    ratios = []
    for _ in range(rounds + 1):
        measured = Measured(_SECONDS)
        measured.fit(size, layout)
        ratios.append(measured.comparison / median(measured.steps))
    memory = Measured(_BYTES)
    memory.fit(size, layout)
    low, high = interval(ratios[1:])  # in the first one connections are made
    return {
        "stages": kind,
        "microbatches": microbatches,
        **layout,
        "time_ratio": median(ratios[1:]),
        "interval_95": [low, high],
        "bytes_ratio": memory.comparison / median(memory.steps),
    }


CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("normal", 8, {"pipeline_parallel_size": 2}),
    ("normal", 2, {"pipeline_parallel_size": 2}),
    ("wide", 2, {"pipeline_parallel_size": 2}),
    ("normal", 8, {}),
]


def main() -> None:
    """Each case in processes of its own; the last rank, whose stage holds the fewest microbatches, is reported."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step.first_comparison", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--worker", type=int, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        warnings.filterwarnings("ignore")
        torch.set_num_threads(1)
        kind, microbatches, layout = CASES[arguments.worker]
        result = measure(kind, microbatches, layout, arguments.rounds)
        if dist_rank() == layout.get("pipeline_parallel_size", 1) - 1:
            print(f"RESULT {json.dumps(result)}")
        return
    results = []
    for number, (kind, microbatches, layout) in enumerate(CASES):
        processes = layout.get("pipeline_parallel_size", 1)
        command = [sys.executable]
        if processes > 1:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        command += ["-m", "benchmarks.step.first_comparison", "--worker", str(number)]
        command += ["--rounds", str(arguments.rounds)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if not lines:
            raise SystemExit(done.stdout + done.stderr)
        results.append(json.loads(lines[0].removeprefix("RESULT ")))
        low, high = results[-1]["interval_95"]
        print(
            f"{kind} stages, {processes} ranks, {microbatches} microbatches: comparison / step"
            f" {results[-1]['time_ratio']:.2f} [{low:.2f}, {high:.2f}], peak bytes {results[-1]['bytes_ratio']:.2f}",
            flush=True,
        )
    (arguments.output / "first_comparison_cpu.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
