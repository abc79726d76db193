"""Does `HybridStrategy` cost anything where nothing is divided? Against Lightning's own strategies."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import warnings
from pathlib import Path
from statistics import median
from typing import Any

import lightning
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.block import Block
from benchmarks.ratios import interval
from benchmarks.timed_trainer import Round, Stopwatch, trainer_round
from lightning_hybrid import HybridStrategy

BATCHES_PER_ROUND = 8
WARM_UP = 2


class Model(LightningModule):
    """As a user writes it."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(*[Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, 10)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Cross entropy."""
        x, y = batch
        loss = nn.functional.cross_entropy(self.head(self.body(x)), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD, so that the step itself is short."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def make_round(strategy: Any, processes: int, width: int, depth: int, batch: int) -> Round:
    """Return a round of one contender."""
    samples = (BATCHES_PER_ROUND + WARM_UP) * batch * processes
    data = TensorDataset(torch.randn(samples, width), torch.randint(0, 10, (samples,)))
    loader = DataLoader(data, batch, drop_last=True)
    arguments = {"strategy": strategy, "devices": processes, "use_distributed_sampler": True}
    return trainer_round(Model(width, depth), loader, BATCHES_PER_ROUND, watch=Stopwatch(WARM_UP), **arguments)


def compare(processes: int, rounds: int, width: int, depth: int, batch: int) -> dict[str, Any]:
    """Alternate the contenders, and the one that begins; ratios are throughput of ours over theirs."""
    size = (processes, width, depth, batch)
    theirs = make_round("auto" if processes == 1 else "ddp", *size)
    ours = make_round(HybridStrategy(), *size)
    for contender in (theirs, ours):  # warm up
        contender()
    times: dict[str, list[float]] = {"theirs": [], "ours": []}
    for index in range(rounds):
        pair = [("theirs", theirs), ("ours", ours)]
        for name, contender in pair if index % 2 else pair[::-1]:
            times[name].append(contender())
    ratios = sorted(a / b for a, b in zip(times["theirs"], times["ours"], strict=True))
    low, high = interval(ratios)
    return {
        "question": "one process, single device" if processes == 1 else f"data parallel {processes}, DDP",
        "throughput_ratio": median(ratios),
        "interval_95": [low, high],
        "ms_theirs": 1e3 * median(times["theirs"]),
        "ms_ours": 1e3 * median(times["ours"]),
        "rounds": rounds,
        "width": width,
        "depth": depth,
        "batch": batch,
        "device": f"cpu, {os.cpu_count()} cores",
        "date": time.strftime("%Y-%m-%d"),
        "versions": {
            "torch": torch.__version__,
            "lightning": lightning.__version__,
            "python": platform.python_version(),
        },
    }


def main() -> None:
    """Run the comparisons, each in processes of its own."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.strategy", description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent / "results", help="folder of the JSON file"
    )
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--worker", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    width, batch = arguments.width, arguments.batch
    if arguments.worker:
        warnings.filterwarnings("ignore")
        torch.set_num_threads(1)
        result = compare(arguments.worker, arguments.rounds, width, arguments.depth, batch)
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"RESULT {json.dumps(result)}")
        return
    results = []
    for processes in (1, 2):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        command = command if processes > 1 else [sys.executable]
        command += ["-m", "benchmarks.strategy", "--worker", str(processes), "--rounds", str(arguments.rounds)]
        command += ["--width", str(width), "--depth", str(arguments.depth), "--batch", str(batch)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if not lines:
            raise SystemExit(done.stdout + done.stderr)
        results.append(json.loads(lines[0].removeprefix("RESULT ")))
        result = results[-1]
        low, high = result["interval_95"]
        times = f"{result['ms_ours']:.1f} and {result['ms_theirs']:.1f} ms a batch"
        ratio = f"{result['throughput_ratio']:.3f}  [{low:.3f}, {high:.3f}]"
        print(f"{result['question']:<28} throughput ours / theirs {ratio}  ({times}, {arguments.rounds} rounds)")
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "strategy_cpu.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
