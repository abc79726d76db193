"""Compare the time and memory of a Mixtral with experts over two ranks to plain replicas, and to transformers."""

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
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

import lightning
import torch
import torch.distributed as dist
import transformers
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.distributed import DistributedConfig

from benchmarks.ratios import interval
from benchmarks.timed_trainer import Stopwatch, trainer_round
from lightning_hybrid import Faults, HybridStrategy

WARM_UP, BATCHES = 1, 3  # of a round
SAMPLES, LENGTH = 4, 128
#: Arguments of the strategy, by contender; the first is the reference.
CONTENDERS: dict[str, dict[str, Any]] = {
    "replicas": {},
    "experts over replicas": {"expert_parallel_size": 2},
    "ZeRO 3": {"zero_stage": 3},
    "ZeRO 3, experts over replicas": {"zero_stage": 3, "expert_parallel_size": 2},
}
#: The same with transformers alone: FSDP2 and its all-to-all of tokens, in a loop by hand.
TRANSFORMERS = "transformers: FSDP2, experts"


class Mixtral(LightningModule):
    """A Mixtral with random weights, whose experts have nearly all parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = transformers.MixtralConfig(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=8,
            num_experts_per_tok=2,
            max_position_embeddings=LENGTH,
        )
        self.model = transformers.MixtralForCausalLM(config)
        self.model.set_experts_implementation("eager")

    def training_step(self, batch: Tensor) -> Tensor:
        """The loss of next tokens."""
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW, whose states take twice the parameters."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def on_train_epoch_end(self) -> None:
        """Count the bytes of the training state of this rank."""
        self.state_bytes = state_bytes(self, self.trainer.optimizers[0])


def state_bytes(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """The bytes of parameters and optimizer states of this rank: of experts, and of all parameters."""
    found = {True: 0, False: 0}
    for name, parameter in module.named_parameters():
        state = [each for each in optimizer.state[parameter].values() if isinstance(each, Tensor)]
        found[".experts." in name] += _bytes([parameter, *state])
    return {"experts": found[True], "all": found[True] + found[False]}


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum((each.to_local() if hasattr(each, "to_local") else each).nbytes for each in tensors)


def batches() -> DataLoader[Any]:
    """The batches of a round of this rank."""
    generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
    rows = torch.randint(256, ((WARM_UP + BATCHES) * SAMPLES, LENGTH), generator=generator)
    return DataLoader(list(rows), SAMPLES)  # type: ignore[arg-type]


class TransformersLoop:
    """A training by transformers' own expert parallelism over all ranks; dense parameters are sharded by FSDP2."""

    def __init__(self) -> None:
        size = int(os.environ["WORLD_SIZE"])
        config = DistributedConfig(fsdp_size=size, ep_size=size, ep_implementation="all_to_all")
        with tempfile.TemporaryDirectory() as folder:
            folders = [folder]
            dist.broadcast_object_list(folders)
            Mixtral().model.save_pretrained(folders[0])  # writes on the first rank
            dist.barrier()
            self.model: Any = transformers.MixtralForCausalLM.from_pretrained(
                folders[0], distributed_config=config, experts_implementation="eager"
            )
            dist.barrier()
        self.model.train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.loader = batches()

    def __call__(self) -> float:
        """Train for a round, and return the seconds of a batch."""
        start = 0.0
        for index, batch in enumerate(self.loader):
            if index == WARM_UP:
                start = time.perf_counter()
            loss = self.model(input_ids=batch, labels=batch).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return (time.perf_counter() - start) / BATCHES

    @property
    def state_bytes(self) -> dict[str, int]:
        """The bytes of this rank."""
        return state_bytes(self.model, self.optimizer)


def contender(arguments: dict[str, Any]) -> tuple[Callable[[], float], Mixtral]:
    """A function that trains for a round and returns the seconds of a batch, and its module."""
    size = int(os.environ["WORLD_SIZE"])
    loader = batches()
    strategy = HybridStrategy(**arguments, faults=Faults(compare_microbatches=False))
    module = Mixtral()
    run = trainer_round(module, loader, BATCHES, watch=Stopwatch(WARM_UP), strategy=strategy, devices=size)
    return run, module


def compare(rounds: int) -> list[dict[str, Any]]:
    """Alternate the contenders: times over the reference's of the same round, and bytes."""
    made: dict[str, tuple[Callable[[], float], Mixtral | TransformersLoop]] = {}
    for name, arguments in CONTENDERS.items():
        made[name] = contender(arguments)
        made[name][0]()
    loop = TransformersLoop()
    made[TRANSFORMERS] = loop, loop
    loop()
    times: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(rounds):
        for name, (run, _) in made.items():
            dist.barrier()
            times[name].append(run())
    reference = times["replicas"]
    results = []
    for name, (_, module) in made.items():
        ratios = [mine / other for mine, other in zip(times[name], reference, strict=True)]
        results.append(
            {
                "contender": name,
                "time_over_replicas": median(ratios),
                "interval_95": interval(ratios),
                "ms": 1e3 * median(times[name]),
                "state_bytes": module.state_bytes,
                "rounds": rounds,
                "device": f"cpu, {os.cpu_count()} cores",
                "versions": {
                    "torch": torch.__version__,
                    "lightning": lightning.__version__,
                    "transformers": transformers.__version__,
                    "python": platform.python_version(),
                },
            }
        )
    return results


def main() -> None:
    """Run the comparison on two ranks."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.experts", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        warnings.filterwarnings("ignore")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        torch.set_num_threads(1)
        result = compare(arguments.rounds)
        if os.environ["RANK"] == "0":
            print(f"RESULT {json.dumps(result)}")
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["-m", "benchmarks.experts", "--worker", "--rounds", str(arguments.rounds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise SystemExit(done.stdout + done.stderr)
    results = json.loads(lines[0].removeprefix("RESULT "))
    for row in results:
        low, high = row["interval_95"]
        of_experts, of_all = (row["state_bytes"][kind] / 2**20 for kind in ("experts", "all"))
        print(
            f"{row['contender']:<30} time / replicas {row['time_over_replicas']:.3f} [{low:.3f}, {high:.3f}]"
            f"  ({row['ms']:.0f} ms)  state of experts {of_experts:.1f} MiB, of all {of_all:.1f} MiB"
        )
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "experts_cpu.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
