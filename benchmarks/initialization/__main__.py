"""How much memory does a rank need to start? A body made in `__init__`, and one without values in `configure_model`."""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid import HybridStrategy

LAYOUTS = {"pp1": (1, 1), "pp2": (1, 2), "pp4": (1, 4), "tp2": (2, 1), "tp2 pp2": (2, 2)}
WAYS = ("__init__", "configure_model")
MIB = 2**20


class Model(LightningModule):
    """A body of equal layers, each of two linear layers of 4 x width^2 parameters."""

    def __init__(self, width: int, depth: int, way: str) -> None:
        super().__init__()
        self.width, self.depth = width, depth
        if way == "__init__":
            self.build()

    def build(self) -> None:
        """Make the body."""
        width = self.width
        self.body = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
                for _ in range(self.depth)
            )
        )

    def configure_model(self) -> None:
        """Make the body, without values."""
        if not hasattr(self, "body"):
            with torch.device("meta"):
                self.build()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """A loss."""
        return self.body(batch[0]).pow(2).mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Without state."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def start(width: int, depth: int, way: str, tensor: int, pipeline: int) -> Model:
    """Everything up to the first step."""
    strategy = HybridStrategy(tensor_parallel_size=tensor, pipeline_parallel_size=pipeline)
    trainer = Trainer(
        accelerator="cpu",
        devices=tensor * pipeline,
        strategy=strategy,
        max_epochs=1,
        limit_train_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model(width, depth, way)
    trainer.fit(model, DataLoader(TensorDataset(torch.zeros(8, width)), 8))
    return model


def status(key: str) -> float:
    """A line of what the system says of this process, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{key}:"))


def held(module: nn.Module) -> float:
    """What the parameters take that are here, in MiB."""
    total = 0
    for parameter in module.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        total += 0 if local.is_meta else local.nbytes
    return total / MIB


def work(layout: str, way: str, width: int, depth: int, output: Path) -> None:
    """One of the ranks."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    tensor, pipeline = LAYOUTS[layout]
    start(8, 4, way, tensor, pipeline)  # what is loaded and connected at the first time does not count
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins here
    before, begin = status("VmRSS"), time.perf_counter()
    model = start(width, depth, way, tensor, pipeline)
    seconds, peak, own = time.perf_counter() - begin, status("VmHWM") - before, held(model)
    layer = 4 * (8 * width * width + 5 * width) / MIB
    result = {
        "layout": layout,
        "made_in": way,
        "rank": int(os.environ["RANK"]),
        "peak_mib": peak,
        "own_parameters_mib": own,
        "largest_layer_mib": layer,
        "whole_body_mib": layer * depth,
        "seconds": seconds,
        "width": width,
        "depth": depth,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }
    (output / f"{result['rank']}.json").write_text(json.dumps(result))


def measure(layout: str, way: str, width: int, depth: int) -> list[dict[str, Any]]:
    """Start the ranks of one layout."""
    tensor, pipeline = LAYOUTS[layout]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={tensor * pipeline}"]
    command += ["-m", "benchmarks.initialization", "--layout", layout, "--way", way]
    command += ["--width", str(width), "--depth", str(depth)]
    # Every tensor of size is mapped by itself, so that what is freed goes back to the system.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as output:
        command += ["--output", output]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        return [json.loads(path.read_text()) for path in sorted(Path(output).iterdir())]


def main() -> None:
    """Measure each layout in both ways, and write down what the ranks say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.initialization", description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent / "results", help="folder of the JSON file"
    )
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--layout", help=argparse.SUPPRESS)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.layout:
        work(arguments.layout, arguments.way, arguments.width, arguments.depth, arguments.output)
        return
    results = []
    for layout in LAYOUTS:
        for way in WAYS:
            ranks = measure(layout, way, arguments.width, arguments.depth)
            results += ranks
            worst = max(ranks, key=lambda result: float(result["peak_mib"]))
            own, layer = worst["own_parameters_mib"], worst["largest_layer_mib"]
            print(
                f"{layout:<8} made in {way:<16} peak {worst['peak_mib']:7.1f} MiB on the worst rank, which keeps"
                f" {own:6.1f}, with the largest layer {own + layer:6.1f}"
            )
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "initialization_cpu.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
