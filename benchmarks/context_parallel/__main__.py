"""What does a long sequence cost that ranks share? Each kind of attention against one process, time and memory."""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import lightning
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.ratios import interval
from benchmarks.timed_trainer import Stopwatch, trainer_round
from lightning_hybrid import HybridStrategy

WIDTH, HEADS, DEPTH = 128, 4, 2
KINDS = ("ulysses", "all_gather", "ring")
WARM_UP, BATCHES = 1, 2  # of a round
#: A round: the seconds of a batch, and in how many of them threads of this process computed.
Timed = Callable[[], tuple[float, float]]


class Block(nn.Module):
    """A causal transformer block, ``(batch, length, width)`` to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Attention and MLP, each around a residual."""
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(LightningModule):
    """Blocks, and a loss that looks at every position."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))

    def training_step(self, batch: Tensor) -> Tensor:
        """The mean square of what comes out."""
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD, whose step is short."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def shared(kind: str, length: int) -> Timed:
    """Trained by all ranks.

    Args:
        kind: How attention communicates.
        length: Of a sequence.
    """
    size = int(os.environ["WORLD_SIZE"])
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(length, WIDTH, generator=generator) for _ in range(WARM_UP + BATCHES)]
    loader: DataLoader[Any] = DataLoader(batches, 1)  # type: ignore[arg-type]
    strategy = HybridStrategy(context_parallel_size=size, context_parallel=kind)  # type: ignore[arg-type]
    watch = Stopwatch(WARM_UP)
    run = trainer_round(Model(), loader, BATCHES, watch=watch, strategy=strategy, devices=size)
    return lambda: (run(), watch.cpu_seconds / BATCHES)


def alone(length: int) -> Timed:
    """Trained by one process, while the other ranks wait."""
    module, batch = Model(), torch.randn(1, length, WIDTH, generator=torch.Generator().manual_seed(0))
    optimizer = module.configure_optimizers()

    def run() -> tuple[float, float]:
        start = cpu_start = 0.0
        for number in range(WARM_UP + BATCHES):
            if number == WARM_UP:
                start, cpu_start = time.perf_counter(), time.process_time()
            module.training_step(batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        return (time.perf_counter() - start) / BATCHES, (time.process_time() - cpu_start) / BATCHES

    return run


def compare(length: int, rounds: int) -> list[dict[str, Any]]:
    """Alternate one process and the kinds.

    Of each round the time of a kind over the ideal share of one process, for which each core does as much as the other
    ones; and the time in which cores compute, of all ranks over that of one process.
    """
    one_process, of_kinds = alone(length), {kind: shared(kind, length) for kind in KINDS}
    for each in of_kinds.values():
        each()
    size, rank = dist.get_world_size(), dist.get_rank()
    times = torch.zeros(1 + len(KINDS), rounds, 2, dtype=torch.float64)
    for number in range(rounds):
        dist.barrier()
        if rank == 0:
            times[0, number] = torch.tensor(one_process())
        for at, kind in enumerate(KINDS, 1):
            dist.barrier()
            times[at, number] = torch.tensor(of_kinds[kind]())
    computed = times[..., 1].clone()
    dist.all_reduce(computed)
    num_cores = min(size, os.cpu_count() or 1)
    results = []
    for at, kind in enumerate(KINDS, 1):
        ratios = (num_cores * times[at, :, 0] / times[0, :, 0]).tolist()
        results.append(
            {
                "kind": kind,
                "context_parallel_size": size,
                "length": length,
                "time_over_ideal_share": median(ratios),
                "interval_95": interval(ratios),
                "computing_over_one_process": median((computed[at] / computed[0]).tolist()),
                "ms": 1e3 * median(times[at, :, 0].tolist()),
                "ms_one_process": 1e3 * median(times[0, :, 0].tolist()),
                "rounds": rounds,
                "device": f"cpu, {os.cpu_count()} cores",
                "versions": {
                    "torch": torch.__version__,
                    "lightning": lightning.__version__,
                    "python": platform.python_version(),
                },
            }
        )
    return results


def peak(kind: str, length: int) -> float:
    """MiB of this process that two steps take beside what it has before."""
    contender = alone(length) if kind == "alone" else shared(kind, length)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    contender()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def launch(ranks: int, *words: str) -> Any:
    """Run a part of this in processes of its own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command += ["-m", "benchmarks.context_parallel", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise SystemExit(done.stdout + done.stderr)
    return json.loads(lines[0].removeprefix("RESULT "))


def main() -> None:
    """Run the comparisons, each in processes of its own."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.context_parallel", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--lengths", type=int, nargs="*", default=[2048, 4096, 8192, 16384])
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--worker", nargs=2, metavar=("KIND", "LENGTH"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        warnings.filterwarnings("ignore")
        torch.set_num_threads(1)
        kind, length = arguments.worker[0], int(arguments.worker[1])
        result: Any = compare(length, arguments.rounds) if kind == "times" else peak(kind, length)
        if os.environ["RANK"] == "0":
            print(f"RESULT {json.dumps(result)}")
        return
    results = []
    for length in arguments.lengths:
        alone = launch(1, "--worker", "alone", str(length))
        for ranks in arguments.ranks:
            for row in launch(ranks, "--rounds", str(arguments.rounds), "--worker", "times", str(length)):
                mib = launch(ranks, "--worker", row["kind"], str(length))
                results.append({**row, "peak_mib": mib, "peak_mib_one_process": alone})
                print(_line(results[-1]), flush=True)
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "context_parallel_cpu.json").write_text(json.dumps(results, indent=2) + "\n")


def _line(row: dict[str, Any]) -> str:
    low, high = row["interval_95"]
    return (
        f"{row['context_parallel_size']} ranks, {row['length']:>5} positions, {row['kind']:<10}"
        f" time / ideal share {row['time_over_ideal_share']:.3f} [{low:.3f}, {high:.3f}]"
        f"  computing / one process {row['computing_over_one_process']:.3f}"
        f"  ({row['ms']:.0f} and {row['ms_one_process']:.0f} ms)"
        f"  peak {row['peak_mib']:.0f} MiB of {row['peak_mib_one_process']:.0f}"
    )


if __name__ == "__main__":
    main()
