"""How long until the first step is done, between machines that are far apart? Ours against Lightning's DDP.

From the start of the processes, their imports with it: python -m benchmarks.nodes.start [--delay 0.02] [--rounds 6].
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import RandomDataset
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

CONTENDERS = "ddp", "pp2"


class Blocks(LightningModule):
    """Eight blocks of width 32, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(8)))
        self.head = nn.Linear(32, 2)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The loss of a batch."""
        loss = self.head(self.body(batch)).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> optim.Optimizer:
        """Adam."""
        return optim.Adam(self.parameters())


class Started(Callback):
    """Says when the first step is done."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Once."""
        if trainer.global_step == 1:
            print(f"RESULT {time.time() - float(os.environ['STARTED'])}", flush=True)


def train(contender: str) -> None:
    """Two steps on two machines."""
    strategy: Strategy = DDPStrategy()
    if contender != "ddp":
        from lightning_hybrid import HybridStrategy  # DDP does not wait for it

        strategy = HybridStrategy(pipeline_parallel_size=2, num_microbatches=4)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=2,
        strategy=strategy,
        max_steps=2,
        callbacks=[Started()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Blocks(), DataLoader(RandomDataset(32, 64), batch_size=16))


def seconds(contender: str, delay: float) -> float:
    """Until the later of two machines has done its first step."""
    from tests.nodes.machines import Machines, outputs

    with tempfile.TemporaryDirectory() as folder, Machines(2, Path(folder), delay) as machines:
        os.environ["STARTED"] = str(time.time())
        # DDP does not find the interface where the machine's own name means loopback.
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        ended = outputs(machines.lightning(["-m", "benchmarks.nodes.start", "--worker", contender], processes=1))
    found = [line for _, text in ended for line in text.splitlines() if line.startswith("RESULT ")]
    if len(found) < 2:
        sys.exit("\n".join(text for _, text in ended))
    return max(float(line.split()[1]) for line in found)


def main() -> None:
    """Alternate, and print how much later ours is."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.nodes.start", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--delay", type=float, default=0.02, help="one way, in seconds")
    parser.add_argument("--worker", choices=CONTENDERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        train(arguments.worker)
        return
    rounds = [[seconds(each, arguments.delay) for each in CONTENDERS] for _ in range(arguments.rounds)]
    later = sorted(ours - ddp for ddp, ours in rounds)
    medians = dict(zip(CONTENDERS, map(statistics.median, zip(*rounds, strict=True)), strict=True))
    result = {"delay_ms": 1e3 * arguments.delay, "seconds": medians, "later": later, "rounds": rounds}
    told = ", ".join(f"{name} {value:.2f} s" for name, value in medians.items())
    print(
        f"first step done after: {told}; ours later by {statistics.median(later):.2f} [{later[0]:.2f}, {later[-1]:.2f}]"
    )
    (arguments.output / "start_cpu.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
