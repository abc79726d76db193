"""How long does a step take? A Trainer with `HybridStrategy` against a loop written by hand on torch's pipeline."""

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
from typing import Any, NamedTuple

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.block import Block
from benchmarks.ratios import interval
from benchmarks.timed_trainer import Round, Stopwatch, trainer_round
from lightning_hybrid import HybridStrategy

WARM_UP = 2
CLASSES = 10
CPU = torch.device("cpu")


class Size(NamedTuple):
    """What is trained.

    Attributes:
        width: Of the layers.
        depth: The number of layers in the body.
        samples: Of one microbatch.
        batches: Of one round.
        microbatches: Of one batch.
    """

    width: int
    depth: int
    samples: int
    batches: int
    microbatches: int = 8


SIZES = {"tiny": Size(8, 4, 2, 10), "normal": Size(256, 8, 64, 4)}


def body_of(size: Size) -> list[nn.Module]:
    """The layers, with equal values in every process."""
    torch.manual_seed(0)
    if size.width < 16:
        return [nn.Linear(size.width, size.width) for _ in range(size.depth)]
    return [Block(size.width) for _ in range(size.depth)]


def loader_of(size: Size, replica: int) -> DataLoader[Any]:
    """The batches of a round, and those before it."""
    samples = (size.batches + WARM_UP) * size.microbatches * size.samples
    generator = torch.Generator().manual_seed(replica)
    x = torch.randn(samples, size.width, generator=generator)
    y = torch.randint(0, CLASSES, (samples,), generator=generator)
    return DataLoader(TensorDataset(x, y), size.microbatches * size.samples)


class Model(LightningModule):
    """As a user writes it."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.body = nn.Sequential(*body_of(size))
        self.head = nn.Linear(size.width, CLASSES)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Cross entropy, logged."""
        x, y = batch
        loss = nn.functional.cross_entropy(self.head(self.body(x)), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD, so that the step itself is short."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def hand_round(size: Size, data_parallel_size: int, clip: float | None) -> Round:
    """What one writes without a Trainer: torch's schedule, its DDP, an optimizer, a loader on every rank."""
    ranks = dist.get_world_size() // data_parallel_size
    stage, replica = dist.get_rank() // data_parallel_size, dist.get_rank() % data_parallel_size
    pipelines = [dist.new_group([s * data_parallel_size + r for s in range(ranks)]) for r in range(data_parallel_size)]
    replicas = [dist.new_group([s * data_parallel_size + r for r in range(data_parallel_size)]) for s in range(ranks)]
    layers = body_of(size)
    torch.manual_seed(1)
    head = nn.Linear(size.width, CLASSES)
    share = len(layers) // ranks
    part = nn.Sequential(*layers[stage * share : (stage + 1) * share], *([head] if stage == ranks - 1 else []))
    module: nn.Module = part
    if data_parallel_size > 1:
        module = DistributedDataParallel(part, process_group=replicas[stage])
    optimizer = torch.optim.SGD(part.parameters(), lr=1e-3)
    schedule = Schedule1F1B(
        PipelineStage(module, stage, ranks, CPU, group=pipelines[replica]),
        size.microbatches,
        loss_fn=nn.functional.cross_entropy,
    )
    loader, group = loader_of(size, replica), pipelines[replica]

    def run() -> float:
        start = 0.0
        for number, (x, y) in enumerate(loader):
            if number == WARM_UP:
                start = time.perf_counter()
            optimizer.zero_grad()
            losses: list[Tensor] = []
            inputs = (x,) if stage == 0 else ()
            target = {"target": y, "losses": losses} if stage == ranks - 1 else {}
            schedule.step(*inputs, return_outputs=False, **target)
            if clip is not None:
                _clip(part, clip, group)
            optimizer.step()
            if losses:
                torch.stack(losses).mean().item()  # what is logged
        return (time.perf_counter() - start) / size.batches

    return run


def _clip(part: nn.Module, clip: float, group: dist.ProcessGroup) -> None:
    """Clip by the norm over all stages."""
    gradients = [parameter.grad for parameter in part.parameters() if parameter.grad is not None]
    total = torch.stack([gradient.norm() for gradient in gradients]).pow(2).sum()
    dist.all_reduce(total, group=group)
    scale = (clip / (total.sqrt() + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale)


def compare(kind: str, data_parallel_size: int, clip: float | None, rounds: int) -> dict[str, Any]:
    """A case, and what it measured."""
    return {
        "stages": kind,
        "data_parallel_size": data_parallel_size,
        "clipping": clip is not None,
        **measure(SIZES[kind], data_parallel_size, clip, rounds),
    }


def measure(size: Size, data_parallel_size: int, clip: float | None, rounds: int, **arguments: Any) -> dict[str, Any]:
    """Alternate the contenders; a ratio is the time of ours over that of the loop.

    Args:
        size: What is trained.
        data_parallel_size: The number of replicas.
        clip: The gradient norm to clip to.
        rounds: How often each is measured.
        arguments: Others of the strategy.
    """
    strategy = HybridStrategy(pipeline_parallel_size=2, num_microbatches=size.microbatches, **arguments)
    replica = dist_rank() % data_parallel_size
    ours = trainer_round(
        Model(size),
        loader_of(size, replica),
        size.batches,
        watch=Stopwatch(WARM_UP),
        strategy=strategy,
        devices=2 * data_parallel_size,
        gradient_clip_val=clip,
    )
    ours()  # makes the process groups
    contenders = {"ours": ours, "by hand": hand_round(size, data_parallel_size, clip)}
    contenders["by hand"]()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for index in range(rounds):
        for name in list(contenders)[:: 1 if index % 2 else -1]:
            dist.barrier()
            times[name].append(contenders[name]())
    ratios = sorted(a / b for a, b in zip(times["ours"], times["by hand"], strict=True))
    low, high = interval(ratios)
    return {
        "time_ratio": median(ratios),
        "interval_95": [low, high],
        **{f"ms_{name.replace(' ', '_')}": 1e3 * median(values) for name, values in times.items()},
        "rounds": rounds,
        **_environment(),
    }


def plain_loop(rounds: int) -> dict[str, Any]:
    """Lightning's own share of a step: one process, one layer, one log."""
    size = SIZES["tiny"]
    run = trainer_round(
        Model(size._replace(depth=1)), loader_of(size, 0), size.batches, watch=Stopwatch(WARM_UP), devices=1
    )
    run()
    return {"stages": "one process, tiny", "ms": 1e3 * median([run() for _ in range(rounds)]), **_environment()}


def dist_rank() -> int:
    """This rank, before there are groups too."""
    return int(os.environ.get("RANK", "0"))


def _environment() -> dict[str, Any]:
    versions = {"torch": torch.__version__, "lightning": lightning.__version__, "python": platform.python_version()}
    return {"device": f"cpu, {os.cpu_count()} cores", "date": time.strftime("%Y-%m-%d"), "versions": versions}


#: What is compared: the stages, the data-parallel size, the gradient norm to clip to.
CASES: list[tuple[str, int, float | None]] = [
    ("tiny", 1, None),
    ("tiny", 1, 1.0),
    ("tiny", 2, None),
    ("normal", 1, None),
    ("normal", 1, 1.0),
    ("normal", 2, None),
]


def main() -> None:
    """Run the comparisons, each in processes of its own."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--cases", type=int, nargs="*", default=range(len(CASES)), help="numbers of cases, from 0")
    parser.add_argument("--worker", type=int, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        warnings.filterwarnings("ignore")
        torch.set_num_threads(1)
        case = None if arguments.worker < 0 else CASES[arguments.worker]
        result = plain_loop(arguments.rounds) if case is None else compare(*case, arguments.rounds)
        if dist_rank() == 0:
            print(f"RESULT {json.dumps(result)}")
        return
    results = []
    for number in (-1, *arguments.cases):
        processes = 1 if number < 0 else 2 * CASES[number][1]
        command = [sys.executable]
        if processes > 1:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        command += ["-m", "benchmarks.step", "--worker", str(number), "--rounds", str(arguments.rounds)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if not lines:
            raise SystemExit(done.stdout + done.stderr)
        results.append(json.loads(lines[0].removeprefix("RESULT ")))
        print(_line(results[-1]), flush=True)
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "step_cpu.json").write_text(json.dumps(results, indent=2) + "\n")


def _line(result: dict[str, Any]) -> str:
    if "time_ratio" not in result:
        return f"Lightning's own loop, one process, tiny: {result['ms']:.2f} ms a step"
    low, high = result["interval_95"]
    name = f"{result['stages']} stages, pp 2" + (f", dp {result['data_parallel_size']}") * (
        result["data_parallel_size"] > 1
    )
    name += ", clipping" * result["clipping"]
    times = f"{result['ms_ours']:.1f} and {result['ms_by_hand']:.1f} ms a step"
    return f"{name:<32} time ours / by hand {result['time_ratio']:.3f}  [{low:.3f}, {high:.3f}]  ({times})"


if __name__ == "__main__":
    main()
