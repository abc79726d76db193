"""How long does a run need from the start of its processes to the end of the first step? Against `DDPStrategy`."""

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

from benchmarks.ratios import interval

LAYERS = (12, 48)
#: Seconds that a pipeline may need more than DDP, by the number of layers.
BARS = {12: 0.5, 48: 0.7}
_STARTED = "BENCHMARK_STARTED"


def work(contender: str, layers: int) -> None:
    """Train one batch on one of two ranks, and print how long it took; libraries are loaded in here, as in a run."""
    import torch
    from lightning.pytorch import Callback, LightningModule, Trainer
    from torch import Tensor
    from torch.utils.data import DataLoader, TensorDataset
    from transformers import GPT2Config, GPT2LMHeadModel

    from lightning_hybrid import HybridStrategy

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    imported = time.time()

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = GPT2LMHeadModel(
                GPT2Config(vocab_size=128, n_positions=64, n_embd=64, n_layer=layers, n_head=4, use_cache=False)
            )

        def training_step(self, batch: list[Tensor]) -> Tensor:
            loss: Tensor = self.model(input_ids=batch[0], labels=batch[0]).loss
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    class Clock(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            self.ready = time.time()

        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
            self.done = time.time()

    clock = Clock()
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp" if contender == "ddp" else HybridStrategy(pipeline_parallel_size=2, num_microbatches=4),
        callbacks=[clock],
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), DataLoader(TensorDataset(torch.randint(128, (8, 64))), 8))
    started = float(os.environ[_STARTED])
    if trainer.global_rank == 0:
        times = {"imports": imported - started, "setup": clock.ready - imported, "first step": clock.done - clock.ready}
        print(json.dumps(times | {"total": clock.done - started}))


def measure(contender: str, layers: int) -> dict[str, float]:
    """Start one run."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["-m", "benchmarks.startup", "--worker", contender, str(layers)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", _STARTED: str(time.time())}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))  # type: ignore[no-any-return]


def compare(layers: int, rounds: int) -> dict[str, Any]:
    """Alternate the contenders, and the one that begins."""
    found: dict[str, list[dict[str, float]]] = {"ddp": [], "pp2": []}
    for index in range(-1, rounds):
        for contender in sorted(found, reverse=bool(index % 2)):
            times = measure(contender, layers)
            if index >= 0:
                found[contender].append(times)
    more = [pipeline["total"] - ddp["total"] for pipeline, ddp in zip(found["pp2"], found["ddp"], strict=True)]
    return {
        "layers": layers,
        "seconds_more": median(more),
        "interval_95": interval(more),
        "bar": BARS.get(layers),
        "seconds": {
            contender: {part: median(each[part] for each in times) for part in times[0]}
            for contender, times in found.items()
        },
        "rounds": rounds,
    }


def main() -> None:
    """Compare for each number of layers, print a line each, and write the results."""
    import torch
    import transformers

    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent / "results", help="folder of the JSON file"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS)
    parser.add_argument("--worker", nargs=2, metavar=("CONTENDER", "LAYERS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.worker[0], int(arguments.worker[1]))
        return
    results = []
    for layers in arguments.layers:
        result = compare(layers, arguments.rounds)
        low, high = result["interval_95"]
        seconds = result["seconds"]
        print(
            f"{layers} layers: pipeline {seconds['pp2']['total']:.2f} s, DDP {seconds['ddp']['total']:.2f} s,"
            f" {result['seconds_more']:.2f} [{low:.2f}, {high:.2f}] s more (bar: {result['bar']})",
            flush=True,
        )
        results.append(result)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    environment = {"device": f"cpu, {os.cpu_count()} cores", **versions, "python": platform.python_version()}
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / "startup_cpu.json"
    path.write_text(json.dumps({"environment": environment, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
