"""How much longer does a step take that `HybridTimeline` records? Every other step of one training is recorded."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from statistics import median
from typing import Any

import lightning
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.block import Block
from benchmarks.ratios import interval
from lightning_hybrid import HybridStrategy, HybridTimeline

WIDTH, DEPTH, BATCH, MICROBATCHES = 192, 8, 128, 8
PAIRS_PER_EPOCH = 20  # of steps, one recorded and one not; the first is not timed


class Model(LightningModule):
    """As a user writes it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(*[Block(WIDTH) for _ in range(DEPTH)])
        self.head = nn.Linear(WIDTH, 10)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Cross entropy."""
        x, y = batch
        return nn.functional.cross_entropy(self.head(self.body(x)), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD, so that the step itself is short."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Begin(Callback):
    """Notes when each batch begins. It comes behind `HybridTimeline`, at which all ranks meet first."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Meet twice, as before a step that is recorded, and begin: who meets once leaves the other way round."""
        if not is_recorded(trainer.fit_loop.total_batch_idx):
            trainer.strategy.barrier()
        trainer.strategy.barrier()
        self.times.append(time.perf_counter())


class End(Callback):
    """Notes when each batch ends. It comes before `HybridTimeline`, which then writes."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """End."""
        self.times.append(time.perf_counter())


class Written(Callback):
    """Notes when `HybridTimeline`, which comes before it, has written."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """End."""
        self.times.append(time.perf_counter())


def is_recorded(number: int) -> bool:
    """Whether a batch is: the first of a pair and the second one in turns, so that what drifts is even."""
    pair, second = divmod(number, 2)
    return pair % 2 == second


def compare(processes: int, epochs: int) -> dict[str, Any]:
    """Train, with a record of one step of each pair; ratios are the time with a record over the time without."""
    per_epoch = 2 * PAIRS_PER_EPOCH
    samples = per_epoch * BATCH
    data = TensorDataset(torch.randn(samples, WIDTH), torch.randint(0, 10, (samples,)))
    begin, end, written = Begin(), End(), Written()
    recorded = [number for number in range(epochs * per_epoch) if is_recorded(number)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="cpu",
            devices=processes,
            strategy=HybridStrategy(pipeline_parallel_size=processes, num_microbatches=MICROBATCHES),
            callbacks=[end, HybridTimeline(recorded, folder), begin, written],
            max_epochs=epochs,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Model(), DataLoader(data, BATCH))
    steps = [after - before for before, after in zip(begin.times, end.times, strict=True)]
    writing = [after - before for before, after in zip(end.times, written.times, strict=True)]
    pairs = [
        (steps[first], steps[first + 1]) if is_recorded(first) else (steps[first + 1], steps[first])
        for first in range(0, len(steps), 2)
        if first % per_epoch
    ]
    ratios = [with_record / without for with_record, without in pairs]
    return {
        "time_ratio": median(ratios),
        "interval_95": list(interval(ratios)),
        "ms_with": 1e3 * median(with_record for with_record, _ in pairs),
        "ms_without": 1e3 * median(without for _, without in pairs),
        "ms_to_write": 1e3 * median(writing[number] for number in recorded),
        "processes": processes,
        "microbatches": MICROBATCHES,
        "pairs": len(pairs),
        "device": f"cpu, {os.cpu_count()} cores",
        "versions": {"torch": torch.__version__, "lightning": lightning.__version__},
    }


def main() -> None:
    """Run the training in processes of its own."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.timeline", description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent / "results", help="folder of the JSON file"
    )
    parser.add_argument("--epochs", type=int, default=30, help=f"of {PAIRS_PER_EPOCH} pairs of steps")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        warnings.filterwarnings("ignore")
        torch.set_num_threads(1)
        result = compare(arguments.ranks, arguments.epochs)
        if int(os.environ["RANK"]) == 0:
            print(f"RESULT {json.dumps(result)}")
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={arguments.ranks}"]
    command += ["-m", "benchmarks.timeline", "--worker"]
    command += ["--ranks", str(arguments.ranks), "--epochs", str(arguments.epochs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise SystemExit(done.stdout + done.stderr)
    result = json.loads(lines[0].removeprefix("RESULT "))
    low, high = result["interval_95"]
    print(f"time of a step, with a record / without: {result['time_ratio']:.3f}  [{low:.3f}, {high:.3f}]")
    print(f"{result['ms_with']:.1f} and {result['ms_without']:.1f} ms; then {result['ms_to_write']:.1f} ms to write it")
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "timeline.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
