"""Is what ``layout="auto"`` finds as fast as the best layout? All layouts of a few ranks train beside it, in turns.

The examples train on 2, 3 and 4 ranks under each size of the axes, 4 ranks that share layers also in a square,
pipelines with 2, 4 and 8 microbatches, and under what is found with nothing given. Each replica gets the loader's
batches, so the time of a sample counts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import lightning
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer

from benchmarks.ratios import interval
from benchmarks.suggest.__main__ import BATCHES_PER_ROUND, UNTIMED, Watch
from examples.data import Digits
from examples.gpt import GPT, Sources
from examples.resnet import ResNet
from examples.vit import ViT
from lightning_hybrid import HybridStrategy
from lightning_hybrid.tuning.candidates import arrangements

AUTO = "auto"
BAR = 1.05
MICROBATCHES = (2, 4, 8)
EXAMPLES: dict[str, Callable[[], tuple[LightningModule, LightningDataModule, int]]] = {
    "gpt": lambda: (GPT(), Sources(batch_size=16), 16),
    "vit": lambda: (ViT(depth=8), Digits(batch_size=32), 32),
    "resnet": lambda: (ResNet(), Digits(batch_size=32), 32),
}


def layouts(num_ranks: int) -> dict[str, dict[str, Any]]:
    """The arguments of all sizes, and of what is found."""
    found: dict[str, dict[str, Any]] = {AUTO: {"layout": "auto"}}
    for tensor in range(1, num_ranks + 1):
        for pipeline in range(1, num_ranks // tensor + 1):
            if num_ranks % (tensor * pipeline):
                continue
            sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
            name = f"data {num_ranks // tensor // pipeline} x tensor {tensor} x pipeline {pipeline}"
            for (mode, depth), number in product(arrangements(tensor), MICROBATCHES if pipeline > 1 else (1,)):
                arranged = {"tensor_parallel_mode": mode, "tensor_parallel_depth": depth} if mode != "1d" else {}
                full = ", ".join([name, *([mode] if arranged else []), *([str(number)] if pipeline > 1 else [])])
                found[full] = {**sizes, **arranged, "num_microbatches": number}
    return found


class Contender:
    """A Trainer that is fitted again and again, one epoch of some batches a round.

    Args:
        example: Its name.
        arguments: Of the strategy.
    """

    def __init__(self, example: str, arguments: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.module, self.data, self.batch_size = EXAMPLES[example]()
        self.watch = Watch()
        self.trainer = Trainer(
            accelerator="cpu",
            devices=int(os.environ["WORLD_SIZE"]),
            strategy=HybridStrategy(**arguments),
            callbacks=[self.watch],
            max_epochs=1,
            limit_train_batches=BATCHES_PER_ROUND + UNTIMED,
            limit_val_batches=0,
            num_sanity_val_steps=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    @property
    def strategy(self) -> HybridStrategy:
        """As it is in a run."""
        assert isinstance(self.trainer.strategy, HybridStrategy)
        return self.trainer.strategy

    def round(self) -> float:
        """Seconds of a sample."""
        self.trainer.fit(self.module, datamodule=self.data)
        self.trainer.fit_loop.max_epochs += 1
        return self.watch.seconds / (self.batch_size * self.strategy.sizes.data)


def measure(example: str, rounds: int) -> dict[str, Any]:
    """Train under each layout in turns; on every rank."""
    contenders = {}
    for name, arguments in layouts(int(os.environ["WORLD_SIZE"])).items():
        contender = Contender(example, arguments)
        try:
            contender.round()  # which warms up
        except ValueError as error:  # layers that cannot be divided so; on every rank
            contender.strategy.teardown()
            print(f"{example}: not {name}: {error}", file=sys.stderr)
            continue
        contenders[name] = contender
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for index in range(rounds):
        for name in sorted(contenders, reverse=bool(index % 2)):
            times[name].append(contenders[name].round())
    auto = contenders[AUTO].strategy
    settings = {
        name: getattr(auto.settings, name)
        for name in ("tensor_parallel_mode", "num_microbatches", "schedule", "zero_stage", "recompute")
    }
    return {"times": times, "found": {"sizes": auto.sizes, **settings}}


def on_ranks(num_ranks: int, example: str, rounds: int) -> dict[str, Any]:
    """The same in processes of their own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    command += ["-m", "benchmarks.suggest.auto", "--rounds", str(rounds), "--worker", example]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise SystemExit(done.stdout + done.stderr)
    found: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    return found


def compare(example: str, num_ranks: int, rounds: int) -> dict[str, Any]:
    """What is found against the best of the others: the ratio of each round, as neighbours disturb all alike."""
    measured = on_ranks(num_ranks, example, rounds)
    times: dict[str, list[float]] = measured["times"]
    seconds = {name: median(each) for name, each in times.items()}
    best = min((name for name in seconds if name != AUTO), key=seconds.__getitem__)
    ratios = [found / other for found, other in zip(times[AUTO], times[best], strict=True)]
    low, high = interval(ratios)
    verdict = "" if median(ratios) <= BAR else "  SLOWER THAN THE BAR" if low > BAR else "  slower, within noise"
    print(f"{example} on {num_ranks}: found {measured['found']}")
    print(f"  {median(ratios):.2f} [{low:.2f}, {high:.2f}] x the time of {best}{verdict}")
    for name in sorted(seconds, key=seconds.__getitem__):
        print(f"  {name:<42}{1e6 * seconds[name]:10.1f} us a sample", flush=True)
    return {
        "found": measured["found"],
        "best": best,
        "ratio": median(ratios),
        "interval_95": [low, high],
        "us_a_sample": {name: 1e6 * value for name, value in seconds.items()},
    }


def main() -> None:
    """Measure all, and compare."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.suggest.auto", description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent / "results", help="folder of the JSON file"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--examples", nargs="+", choices=tuple(EXAMPLES), default=list(EXAMPLES))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    if options.worker:
        result = measure(options.worker, options.rounds)
        if int(os.environ["RANK"]) == 0:
            print(f"RESULT {json.dumps(result)}", flush=True)
        return
    results: dict[str, Any] = {
        "rounds": options.rounds,
        "bar": BAR,
        "device": f"cpu, {os.cpu_count()} cores",
        "versions": {"torch": torch.__version__, "lightning": lightning.__version__},
        "examples": {},
    }
    for example in options.examples:
        for num_ranks in options.ranks:
            results["examples"][f"{example}, {num_ranks} ranks"] = compare(example, num_ranks, options.rounds)
            options.output.mkdir(parents=True, exist_ok=True)
            (options.output / "auto_cpu.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
