"""What do layers shared by 2 ranks cost? Against the same module divided by hand with torch's `parallelize_module`."""

from __future__ import annotations

import argparse
import itertools
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

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from benchmarks.ratios import interval
from lightning_hybrid.tensor_parallel.async_linear import OVERLAP_FROM
from lightning_hybrid.tensor_parallel.mappings import TensorGroup
from lightning_hybrid.tensor_parallel.plan import make_plan

RANKS = 2
DEPTH = 4
BATCH, LENGTH = 4, 16
HEADS = 4


class Block(nn.Module):
    """A transformer block as users write it, ``(batch, length, width)`` to the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.head_dim = width // HEADS
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attention and MLP, each around a residual."""
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class MLP(nn.Module):
    """Two linear layers around an activation, with a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, length, width)`` to the same."""
        return x + self.down(F.relu(self.up(x)))


AGAINST = ["by hand", "without overlap"]
KINDS: dict[str, type[nn.Module]] = {"mlp": MLP, "transformer": Block}
COLUMNS, ROWS = ("q", "k", "v", "up"), ("out", "down")


class Contender:
    """A model of `DEPTH` layers and its optimizer.

    Args:
        kind: Of the layers.
        width: Likewise.
        mesh: The ranks.
        ours: Divided by a plan of this package, or by hand.
        overlaps: Whether gradients of inputs are reduced beside products for gradients of weights.
    """

    def __init__(self, kind: str, width: int, mesh: DeviceMesh, *, ours: bool, overlaps: bool) -> None:
        self.overlap_from = 2**22 if overlaps else 2**62
        torch.manual_seed(0)
        self.model = nn.Sequential(*(KINDS[kind](width) for _ in range(DEPTH)))
        names = {name.rpartition(".")[2] for name, _ in self.model.named_modules()}
        if ours:
            styles: dict[str, Any] = {f"*.{name}": "colwise" for name in COLUMNS if name in names}
            styles |= {f"*.{name}": "rowwise" for name in ROWS if name in names}
            plan = make_plan(self.model, styles, RANKS, sequence_parallel=False)
            plan.apply(self.model, mesh, TensorGroup(mesh.get_group()), torch.device("cpu"))
        else:
            by_hand: dict[str, ParallelStyle] = {f"*.{name}": ColwiseParallel() for name in COLUMNS if name in names}
            by_hand |= {f"*.{name}": RowwiseParallel() for name in ROWS if name in names}
            parallelize_module(self.model, mesh, by_hand)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.x = torch.randn(BATCH, LENGTH, width)

    def round(self, steps: int) -> float:
        """Seconds for a training step."""
        OVERLAP_FROM["cpu"] = self.overlap_from
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            self.model(self.x).pow(2).mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return (time.perf_counter() - start) / steps


def compare(kind: str, width: int, rounds: int, mesh: DeviceMesh, against: str) -> dict[str, Any]:
    """Alternate the contenders, and the one that begins; ratios are throughput of ours over theirs."""
    theirs = Contender(kind, width, mesh, ours=against != "by hand", overlaps=False)
    ours = Contender(kind, width, mesh, ours=True, overlaps=against != "by hand")
    estimate = torch.tensor(max(contender.round(5) for contender in (theirs, ours, theirs, ours)))
    dist.all_reduce(estimate, dist.ReduceOp.MAX)
    steps = max(1, round(0.08 / estimate.item()))
    times: dict[str, list[float]] = {"theirs": [], "ours": []}
    for index in range(rounds):
        pair = [("theirs", theirs), ("ours", ours)]
        for name, contender in pair if index % 2 else pair[::-1]:
            times[name].append(contender.round(steps))
    ratios = sorted(a / b for a, b in zip(times["theirs"], times["ours"], strict=True))
    low, high = interval(ratios)
    return {
        "kind": kind,
        "against": against,
        "width": width,
        "throughput_ratio": median(ratios),
        "interval_95": [low, high],
        "ms_theirs": 1e3 * median(times["theirs"]),
        "ms_ours": 1e3 * median(times["ours"]),
        "rounds": rounds,
        "steps_per_round": steps,
        "depth": DEPTH,
        "batch": [BATCH, LENGTH],
        "device": f"cpu, {os.cpu_count()} cores",
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }


def work(widths: list[int], rounds: int, against: list[str]) -> None:
    """One of the ranks."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tensor_parallel",))
    with implicit_replication():  # for optimizers over divided and whole parameters, of both contenders
        for each, kind, width in itertools.product(against, KINDS, widths):
            result = compare(kind, width, rounds, mesh, each)
            if dist.get_rank() == 0:
                print(f"RESULT {json.dumps(result)}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks, and write down what they measure."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tensor_parallel", description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent / "results", help="folder of the JSON file"
    )
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--widths", type=int, nargs="+", default=[16, 32, 64, 256, 512])
    parser.add_argument("--against", nargs="+", choices=AGAINST, default=AGAINST[:1])
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.widths, arguments.rounds, arguments.against)
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"]
    command += ["-m", "benchmarks.tensor_parallel", "--worker", "--rounds", str(arguments.rounds)]
    command += ["--against", *arguments.against, "--widths"]
    done = subprocess.run(
        [*command, *map(str, arguments.widths)], capture_output=True, text=True, timeout=1800, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise SystemExit(done.stdout + done.stderr)
    results = [json.loads(line.removeprefix("RESULT ")) for line in lines]
    for result in results:
        low, high = result["interval_95"]
        ratio = f"{result['throughput_ratio']:.3f}  [{low:.3f}, {high:.3f}]"
        times = f"{result['ms_ours']:.2f} and {result['ms_theirs']:.2f} ms a step"
        print(
            f"{result['kind']:<12} width {result['width']:>4}  throughput ours / {result['against']} {ratio}  ({times})"
        )
    arguments.output.mkdir(parents=True, exist_ok=True)
    for against, name in zip(AGAINST, ("tensor_parallel_cpu.json", "tensor_parallel_overlap_cpu.json"), strict=True):
        found = [result for result in results if result["against"] == against]
        if found:
            (arguments.output / name).write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
