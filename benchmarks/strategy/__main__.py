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
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.block import Block
from benchmarks.ratios import interval
from lightning_hybrid import HybridStrategy

BATCHES_PER_ROUND = 8


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


class Stopwatch(Callback):
    """Seconds for the batches of one epoch after the first two."""

    seconds = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start at the third batch."""
        if batch_idx == 2:
            self._synchronize(pl_module)
            self._start = time.perf_counter()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop."""
        self._synchronize(pl_module)
        self.seconds = time.perf_counter() - self._start

    def _synchronize(self, module: LightningModule) -> None:
        if module.device.type == "cuda":
            torch.cuda.synchronize()


class Contender:
    """A Trainer that is fitted again and again, one epoch a round."""

    def __init__(self, strategy: Any, processes: int, accelerator: str, width: int, depth: int, batch: int) -> None:
        samples = (BATCHES_PER_ROUND + 2) * batch * processes
        data = TensorDataset(torch.randn(samples, width), torch.randint(0, 10, (samples,)))
        self.loader = DataLoader(data, batch, drop_last=True)
        self.watch = Stopwatch()
        self.module = Model(width, depth)
        self.trainer = Trainer(
            accelerator=accelerator,
            devices=processes,
            strategy=strategy,
            callbacks=[self.watch],
            max_epochs=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    def round(self) -> float:
        """Seconds for one batch."""
        self.trainer.fit_loop.max_epochs += 1
        self.trainer.fit(self.module, self.loader)
        return self.watch.seconds / BATCHES_PER_ROUND


def compare(processes: int, rounds: int, accelerator: str, width: int, depth: int, batch: int) -> dict[str, Any]:
    """Alternate the contenders, and the one that begins; ratios are throughput of ours over theirs."""
    size = (processes, accelerator, width, depth, batch)
    theirs = Contender("auto" if processes == 1 else "ddp", *size)
    ours = Contender(HybridStrategy(), *size)
    for contender in (theirs, ours):  # warm up
        contender.round()
    times: dict[str, list[float]] = {"theirs": [], "ours": []}
    for index in range(rounds):
        pair = [("theirs", theirs), ("ours", ours)]
        for name, contender in pair if index % 2 else pair[::-1]:
            times[name].append(contender.round())
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
        "device": torch.cuda.get_device_name() if accelerator == "gpu" else f"cpu, {os.cpu_count()} cores",
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
    parser.add_argument("--width", type=int, default=None, help="default: 192 on the CPU, 2048 on a GPU")
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--batch", type=int, default=None, help="default: 64 on the CPU, 1024 on a GPU")
    parser.add_argument("--worker", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    gpu = torch.cuda.is_available()
    width = arguments.width or (2048 if gpu else 192)
    batch = arguments.batch or (1024 if gpu else 64)
    if arguments.worker:
        warnings.filterwarnings("ignore")
        torch.set_num_threads(1)
        accelerator = "gpu" if torch.cuda.device_count() >= arguments.worker else "cpu"
        result = compare(arguments.worker, arguments.rounds, accelerator, width, arguments.depth, batch)
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"RESULT {json.dumps(result)}")
        return
    results = []
    for processes in (1,) if torch.cuda.device_count() == 1 else (1, 2):
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
    (arguments.output / f"strategy_{'gpu' if gpu else 'cpu'}.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
