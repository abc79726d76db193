"""Are layouts in the order that `lightning-hybrid suggest` predicts? Its times beside those of training here.

First the ranks measure the figures of the machine, as ``layout="auto"`` does it, and forwards of the module are timed
in one process, as ``suggest --measure`` does it; from these come the predicted times. Then two ranks train under each
of the layouts in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import lightning
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.block import Block
from benchmarks.ratios import interval
from lightning_hybrid import HybridStrategy
from lightning_hybrid.tuning.arguments import arguments, keywords
from lightning_hybrid.tuning.candidates import Layout, Step
from lightning_hybrid.tuning.cost_model import CostModel
from lightning_hybrid.tuning.machine import Machine
from lightning_hybrid.tuning.measure import measure_machine
from lightning_hybrid.tuning.module_profile import ModuleProfile

RANKS = 2
BATCHES_PER_ROUND, UNTIMED = 6, 2
LAYOUTS = {
    "data 2": Layout(2, 1, 1),
    "tensor 2": Layout(1, 2, 1),
    "pipeline 2, 8 microbatches": Layout(1, 1, 2, 8),
    "pipeline 2, 2 microbatches": Layout(1, 1, 2, 2),
}
# The links between the blocks' layers: the first product's columns, the second one's rows.
PLAN = {"body.*.layers.1": "colwise", "body.*.layers.2": "on_shards", "body.*.layers.3": "rowwise"}


@dataclass(frozen=True)
class Case:
    """A module and a batch.

    Attributes:
        width: Of a sample.
        depth: Number of blocks.
        samples: Of a step, over all replicas.
    """

    width: int
    depth: int
    samples: int


CASES = {
    "narrow layers, many samples": Case(64, 8, 4096),
    "wide layers, few samples": Case(768, 4, 64),
}


class Model(LightningModule):
    """Blocks and a head.

    Args:
        case: Their size.
        batch_size: Of the loader.
    """

    def __init__(self, case: Case, batch_size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.case, self.batch_size = case, batch_size
        self.body = nn.Sequential(*[Block(case.width) for _ in range(case.depth)])
        self.head = nn.Linear(case.width, 10)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Cross entropy."""
        x, y = batch
        return nn.functional.cross_entropy(self.head(self.body(x)), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Random batches for one round, made before: to load them costs nothing."""
        number = self.case.samples // self.batch_size * (BATCHES_PER_ROUND + UNTIMED)
        x, y = torch.randn(number, self.batch_size, self.case.width), torch.randint(0, 10, (number, self.batch_size))
        return DataLoader(TensorDataset(x, y), batch_size=None)


def strategy(layout: Layout) -> HybridStrategy:
    """As a user writes it."""
    plan: Any = PLAN if layout.tensor > 1 else "auto"
    return HybridStrategy(**keywords(arguments(layout)), tensor_parallel_plan=plan)


# -- what is predicted -------------------------------------------------------------------------------------------------


def predict(case: Case, machine: Machine) -> dict[str, float]:
    """Seconds of a step of each layout."""
    profile = ModuleProfile(
        lambda: (Model(case, case.samples), None),
        HybridStrategy(tensor_parallel_plan=PLAN).settings,
        RANKS,
        machine,
        measure=True,
        precision=Precision(),
    )
    model = CostModel(profile, machine, Step(case.samples))
    found = {}
    for name, layout in LAYOUTS.items():
        assert profile.refuse(layout) is None, profile.refuse(layout)
        seconds = model.simulate(model.estimate(layout)).seconds
        assert seconds is not None
        found[name] = seconds
    return found


# -- what is measured --------------------------------------------------------------------------------------------------


class Watch(Callback):
    """Seconds for the batches of an epoch after the first ones."""

    seconds = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin behind the untimed ones."""
        if batch_idx == UNTIMED:
            torch.distributed.barrier()
            self._start = time.perf_counter()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End."""
        torch.distributed.barrier()
        self.seconds = (time.perf_counter() - self._start) / BATCHES_PER_ROUND


class Contender:
    """A Trainer that is fitted again and again, one epoch a round."""

    def __init__(self, case: Case, layout: Layout) -> None:
        self.module, self.watch = Model(case, case.samples // layout.data), Watch()
        self.trainer = Trainer(
            accelerator="cpu",
            devices=RANKS,
            strategy=strategy(layout),
            callbacks=[self.watch],
            max_epochs=0,
            limit_train_batches=BATCHES_PER_ROUND + UNTIMED,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    def round(self) -> float:
        """Seconds of a batch."""
        self.trainer.fit_loop.max_epochs += 1
        self.trainer.fit(self.module)
        return self.watch.seconds


def measure(case: Case, rounds: int) -> dict[str, list[float]]:
    """Train under each layout in turns."""
    contenders = {name: Contender(case, layout) for name, layout in LAYOUTS.items()}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for index in range(-1, rounds):
        for name in sorted(contenders, reverse=bool(index % 2)):
            seconds = contenders[name].round()
            if index >= 0:
                times[name].append(seconds)
    return times


def work(kind: str, case: str, rounds: int) -> Any:
    """What a rank does that was started for it: measure the machine, or train."""
    warnings.filterwarnings("ignore")
    if kind == "machine":
        torch.distributed.init_process_group("gloo")
        return asdict(measure_machine(torch.device("cpu"), torch.float32, 1, Machine.memory))
    return measure(CASES[case], rounds)


def on_ranks(kind: str, case: str = "", rounds: int = 0) -> Any:
    """The same in processes of their own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"]
    command += ["-m", "benchmarks.suggest", "--rounds", str(rounds), "--worker", kind, case]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise SystemExit(done.stdout + done.stderr)
    return json.loads(lines[0].removeprefix("RESULT "))


def main() -> None:
    """Predict, measure, and compare the orders."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.suggest", description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent / "results", help="folder of the JSON file"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.worker:
        result = work(*options.worker, options.rounds)
        if int(os.environ["RANK"]) == 0:
            print(f"RESULT {json.dumps(result)}")
        return
    warnings.filterwarnings("ignore")
    machine = Machine(**on_ranks("machine"))
    results: dict[str, Any] = {
        "machine": asdict(machine),
        "cases": {},
        "rounds": options.rounds,
        "device": f"cpu, {os.cpu_count()} cores",
        "versions": {"torch": torch.__version__, "lightning": lightning.__version__},
    }
    print(json.dumps(asdict(machine)))
    for name, case in CASES.items():
        predicted, times = predict(case, machine), on_ranks("train", name, options.rounds)
        measured = {layout: median(each) for layout, each in times.items()}
        same = sorted(LAYOUTS, key=predicted.__getitem__) == sorted(LAYOUTS, key=measured.__getitem__)
        print(f"{name}: {'the same order' if same else 'ANOTHER ORDER'}")
        rows = {
            layout: {
                "ms_predicted": 1e3 * predicted[layout],
                "ms_measured": 1e3 * measured[layout],
                "interval_95": [1e3 * bound for bound in interval(times[layout])],
            }
            for layout in sorted(LAYOUTS, key=predicted.__getitem__)
        }
        for layout, row in rows.items():
            low, high = row["interval_95"]
            print(f"  {layout:<28}{row['ms_predicted']:8.1f}{row['ms_measured']:8.1f}  [{low:.1f}, {high:.1f}]")
        results["cases"][name] = {**asdict(case), "is_same_order": same, "layouts": rows}
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "suggest_cpu.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
