"""What does sharding over replicas (ZeRO) cost and hold? Against Lightning's `ModelParallelStrategy` with FSDP2."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import logging
import platform
import subprocess
import sys
import time
import warnings
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.block import Block
from benchmarks.memory.live_tensors import LiveTensors
from benchmarks.ratios import interval
from lightning_hybrid import HybridStrategy, Tuning

REPLICAS = 2
BATCHES_PER_ROUND = 6


class Model(LightningModule):
    """As a user writes it for us; with `frees` as the user writes it for FSDP2."""

    def __init__(self, width: int, depth: int, *, frees: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frees = frees
        self.body = nn.Sequential(*[Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, 10)

    def configure_model(self) -> None:
        """What `ModelParallelStrategy` asks for."""
        if self.frees is None:
            return
        mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
        for block in self.body:
            fully_shard(block, mesh=mesh, reshard_after_forward=self.frees)
        fully_shard(self, mesh=mesh, reshard_after_forward=self.frees)
        self.frees = None

    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, width) -> (batch, 10); FSDP2 needs this to be called."""
        return self.head(self.body(x))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Cross entropy."""
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW: two values for each parameter."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Watch(Callback):
    """Seconds, or bytes, of the batches of one epoch after the first two."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.live_tensors: LiveTensors | None = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin at the third batch."""
        if batch_idx == 2:
            if self.live_tensors is not None:
                states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
                self.live_tensors.add((list(pl_module.parameters()), states, batch))
                self.live_tensors.__enter__()
            dist.barrier()
            self._start = time.perf_counter()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop."""
        dist.barrier()
        self.seconds = time.perf_counter() - self._start
        if self.live_tensors is not None:
            self.live_tensors.__exit__(None, None, None)


class Contender:
    """A Trainer that is fitted again and again, one epoch a round."""

    def __init__(self, strategy: Any, module: Model, width: int, batch: int) -> None:
        samples = (BATCHES_PER_ROUND + 2) * batch * REPLICAS
        data = TensorDataset(torch.randn(samples, width), torch.randint(0, 10, (samples,)))
        self.loader = DataLoader(data, batch, drop_last=True)
        self.watch, self.module = Watch(), module
        self.trainer = Trainer(
            accelerator="cpu",
            devices=REPLICAS,
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

    def bytes(self) -> int:
        """The most bytes of tensors during the batches of a round."""
        self.watch.live_tensors = LiveTensors()
        self.round()
        peak, self.watch.live_tensors = self.watch.live_tensors.peak, None
        return peak


#: What is compared: our arguments, and whether FSDP2 frees parameters after forward.
KINDS: dict[str, tuple[dict[str, Any], bool]] = {
    "parameters gathered twice a step": ({"zero_stage": 3}, True),
    "parameters gathered once a step": ({"zero_stage": 3, "tuning": Tuning(reshard_after_forward=False)}, False),
    "gradients and states only": ({"zero_stage": 2}, False),
}


def compare(kind: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Alternate the contenders, and the one that begins; ratios are throughput of ours over theirs."""
    options, frees = KINDS[kind]
    width, depth, batch = arguments.width, arguments.depth, arguments.batch
    theirs = ModelParallelStrategy(data_parallel_size=REPLICAS, tensor_parallel_size=1)
    contenders = {
        "theirs": Contender(theirs, Model(width, depth, frees=frees), width, batch),
        "ours": Contender(HybridStrategy(**options), Model(width, depth), width, batch),
    }
    for contender in contenders.values():
        contender.round()
    peaks = {name: contender.bytes() for name, contender in contenders.items()}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for index in range(arguments.rounds):
        for name in list(contenders)[:: 1 if index % 2 else -1]:
            times[name].append(contenders[name].round())
    ratios = [theirs / ours for theirs, ours in zip(times["theirs"], times["ours"], strict=True)]
    return {
        "kind": kind,
        "throughput_ratio": median(ratios),
        "interval_95": interval(ratios),
        "ms": {name: 1e3 * median(seconds) for name, seconds in times.items()},
        "peak_bytes": peaks,
        "rounds": arguments.rounds,
    }


def main() -> None:
    """All comparisons, each in processes of its own."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent / "results", help="folder of the JSON file"
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--kind", choices=KINDS, default=None, help="one comparison only")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        warnings.filterwarnings("ignore")
        logging.disable(logging.WARNING)
        torch.set_num_threads(1)
        result = compare(arguments.kind, arguments)
        if int(os.environ["RANK"]) == 0:
            print(f"RESULT {json.dumps(result)}", flush=True)
        return
    results = []
    for kind in KINDS if arguments.kind is None else [arguments.kind]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={REPLICAS}"]
        command += ["-m", "benchmarks.memory", "--worker", "--kind", kind, "--rounds", str(arguments.rounds)]
        command += ["--width", str(arguments.width), "--depth", str(arguments.depth), "--batch", str(arguments.batch)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if not lines:
            raise SystemExit(done.stdout + done.stderr)
        result = json.loads(lines[0].removeprefix("RESULT "))
        results.append(result)
        (low, high), peaks = result["interval_95"], result["peak_bytes"]
        print(
            f"{kind:<34} throughput ours / theirs {result['throughput_ratio']:.3f} [{low:.3f}, {high:.3f}]"
            f"  bytes {peaks['ours'] / peaks['theirs']:.3f} ({peaks['ours'] / 2**20:.1f} MiB)"
            f"  {result['ms']['ours']:.1f} and {result['ms']['theirs']:.1f} ms a batch"
        )
    sizes = {"width": arguments.width, "depth": arguments.depth, "batch": arguments.batch}
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    environment = {"device": f"cpu, {os.cpu_count()} cores", **versions, **sizes}
    arguments.output.mkdir(parents=True, exist_ok=True)
    report = {"environment": environment, "results": results}
    (arguments.output / "memory_cpu.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
