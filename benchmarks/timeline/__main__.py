"""How much longer does a step take that `HybridTimeline` records? Two Trainers in turns, with and without it."""

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
BATCHES_PER_ROUND = 8
UNTIMED = 2  # batches of a round that come first
EVERY_BATCH = range(100_000)


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
        """Meet, with a recorder and without, and begin."""
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


class Contender:
    """A Trainer that is fitted again and again, one epoch a round."""

    def __init__(self, processes: int, folder: str | None) -> None:
        samples = (BATCHES_PER_ROUND + UNTIMED) * BATCH
        data = TensorDataset(torch.randn(samples, WIDTH), torch.randint(0, 10, (samples,)))
        self.loader = DataLoader(data, BATCH)
        self.begin, self.end, self.written = Begin(), End(), Written()
        recorder = [] if folder is None else [HybridTimeline(EVERY_BATCH, folder)]
        self.module = Model()
        self.trainer = Trainer(
            accelerator="cpu",
            devices=processes,
            strategy=HybridStrategy(pipeline_parallel_size=processes, num_microbatches=MICROBATCHES),
            callbacks=[self.end, *recorder, self.begin, self.written],
            max_epochs=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    def round(self) -> tuple[float, float]:
        """Seconds of a batch, and from its end until the record is written; the medians of a round."""
        for callback in (self.begin, self.end, self.written):
            callback.times.clear()
        self.trainer.fit_loop.max_epochs += 1
        self.trainer.fit(self.module, self.loader)
        begins, ends, written = (each.times[UNTIMED:] for each in (self.begin, self.end, self.written))
        steps = [end - begin for begin, end in zip(begins, ends, strict=True)]
        return median(steps), median([after - end for end, after in zip(ends, written, strict=True)])


def compare(processes: int, rounds: int) -> dict[str, Any]:
    """Alternate the contenders, and the one that begins; ratios are time with a record over time without."""
    with tempfile.TemporaryDirectory() as folder:
        contenders = {"with": Contender(processes, folder), "without": Contender(processes, None)}
        for contender in contenders.values():  # warm up
            contender.round()
        steps: dict[str, list[float]] = {name: [] for name in contenders}
        writing: dict[str, list[float]] = {name: [] for name in contenders}
        for index in range(rounds):
            for name, contender in list(contenders.items())[:: 1 if index % 2 else -1]:
                step, after = contender.round()
                steps[name].append(step)
                writing[name].append(after)
    ratios = sorted(a / b for a, b in zip(steps["with"], steps["without"], strict=True))
    return {
        "time_ratio": median(ratios),
        "interval_95": list(interval(ratios)),
        "ms_with": 1e3 * median(steps["with"]),
        "ms_without": 1e3 * median(steps["without"]),
        "ms_to_write": 1e3 * median(writing["with"]),
        "processes": processes,
        "microbatches": MICROBATCHES,
        "rounds": rounds,
        "versions": {"torch": torch.__version__, "lightning": lightning.__version__},
    }


def main() -> None:
    """Run the comparison in processes of its own."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.timeline", description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent / "results", help="folder of the JSON file"
    )
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        warnings.filterwarnings("ignore")
        torch.set_num_threads(1)
        result = compare(arguments.ranks, arguments.rounds)
        if int(os.environ["RANK"]) == 0:
            print(f"RESULT {json.dumps(result)}")
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={arguments.ranks}"]
    command += ["-m", "benchmarks.timeline", "--worker"]
    command += ["--ranks", str(arguments.ranks), "--rounds", str(arguments.rounds)]
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
