"""What does a model of any kind cost in a pipeline? A Llama against its blocks in an `nn.Sequential`."""

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

import torch
import transformers
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.ratios import interval
from lightning_hybrid import HybridStrategy

BLOCKS, VOCABULARY, LENGTH, MICROBATCHES, BATCHES_PER_ROUND = 8, 64, 32, 8, 6


class Llama(LightningModule):
    """As a user writes it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=width,
                intermediate_size=2 * width,
                num_hidden_layers=BLOCKS,
                num_attention_heads=4,
                use_cache=False,
            )
        )

    def logits(self, tokens: Tensor) -> Tensor:
        """Of the next token."""
        logits: Tensor = self.model(input_ids=tokens).logits
        return logits

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Cross entropy of the next token."""
        (tokens,) = batch
        return nn.functional.cross_entropy(self.logits(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD, so that the step itself is short."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Alone(nn.Module):
    """A block with the rotary table of its own that the model would hand to it."""

    def __init__(self, block: nn.Module, cos: Tensor, sin: Tensor) -> None:
        super().__init__()
        self.block = block
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Run it."""
        output: Tensor = self.block(x, position_embeddings=(self.cos, self.sin))
        return output


class Chain(Llama):
    """The same blocks, rewritten as a Sequential."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        inner = self.model.model
        x = torch.zeros(1, LENGTH, width)
        cos, sin = inner.rotary_emb(x, torch.arange(LENGTH)[None])
        self.embed, self.norm, self.head = inner.embed_tokens, inner.norm, self.model.lm_head
        self.body = nn.Sequential(*(Alone(block, cos, sin) for block in inner.layers))
        del self.model

    def logits(self, tokens: Tensor) -> Tensor:
        """Of the next token."""
        logits: Tensor = self.head(self.norm(self.body(self.embed(tokens))))
        return logits


class Watch(Callback):
    """Seconds for the batches of one epoch after the first two, by the clock and of this rank's CPU; the last loss."""

    seconds = cpu_seconds = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start at the third batch."""
        if batch_idx == 2:
            torch.distributed.barrier()
            self._start, self._cpu_start = time.perf_counter(), time.process_time()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the loss."""
        self.loss = float(outputs["loss"])

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop."""
        self.cpu_seconds = time.process_time() - self._cpu_start
        torch.distributed.barrier()
        self.seconds = time.perf_counter() - self._start


class Contender:
    """A Trainer that is fitted again and again, one epoch a round."""

    def __init__(self, module: LightningModule, ranks: int, batch: int) -> None:
        tokens = torch.randint(
            VOCABULARY, ((BATCHES_PER_ROUND + 2) * batch, LENGTH), generator=torch.Generator().manual_seed(1)
        )
        self.loader = DataLoader(TensorDataset(tokens), batch)
        self.module, self.watch = module, Watch()
        self.trainer = Trainer(
            accelerator="cpu",
            devices=ranks,
            strategy=HybridStrategy(pipeline_parallel_size=ranks, num_microbatches=MICROBATCHES),
            callbacks=[self.watch],
            max_epochs=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    def round(self) -> tuple[float, float]:
        """Seconds for one batch: by the clock, and of CPU for each rank, their mean."""
        self.trainer.fit_loop.max_epochs += 1
        self.trainer.fit(self.module, self.loader)
        cpu = torch.tensor(self.watch.cpu_seconds)
        torch.distributed.all_reduce(cpu)
        ranks = torch.distributed.get_world_size()
        return self.watch.seconds / BATCHES_PER_ROUND, float(cpu) / ranks / BATCHES_PER_ROUND


def compare(ranks: int, rounds: int, width: int, batch: int) -> dict[str, Any]:
    """Alternate the contenders, and the one that begins; ratios are the times of the model over those of the chain."""
    contenders = {"model": Contender(Llama(width), ranks, batch), "chain": Contender(Chain(width), ranks, batch)}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    cpu_times: dict[str, list[float]] = {name: [] for name in contenders}
    for index in range(-1, rounds):
        for name in sorted(contenders, reverse=bool(index % 2)):
            seconds, cpu_seconds = contenders[name].round()
            if index >= 0:
                times[name].append(seconds)
                cpu_times[name].append(cpu_seconds)
    losses = [contender.watch.loss for contender in contenders.values()]
    assert abs(losses[0] - losses[1]) < 1e-4 * abs(losses[1]), f"not the same arithmetic: {losses}"
    ratios = [model / chain for model, chain in zip(times["model"], times["chain"], strict=True)]
    cpu_pairs = list(zip(cpu_times["model"], cpu_times["chain"], strict=True))
    extra = [1e6 * (model - chain) / (BLOCKS * MICROBATCHES) for model, chain in cpu_pairs]
    return {
        "ranks": ranks,
        "width": width,
        "ratio": median(ratios),
        "interval_95": interval(ratios),
        "cpu_ratio": median([model / chain for model, chain in cpu_pairs]),
        "cpu_us_of_frame_per_block_microbatch_and_stage": median(extra),
        "frame_interval_95": interval(extra),
        "ms_model": 1e3 * median(times["model"]),
        "ms_chain": 1e3 * median(times["chain"]),
        "rounds": rounds,
        "batch": batch,
        "device": f"cpu, {os.cpu_count()} cores",
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }


def main() -> None:
    """Run the comparisons, each in processes of its own."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.any_model", description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent / "results", help="folder of the JSON file"
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--worker", nargs=3, type=int, metavar=("RANKS", "WIDTH", "BATCH"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        warnings.filterwarnings("ignore")
        torch.set_num_threads(1)
        ranks, width, batch = arguments.worker
        result = compare(ranks, arguments.rounds, width, batch)
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"RESULT {json.dumps(result)}")
        return
    results = []
    for ranks, width, batch in ((2, 256, 32), (4, 256, 32), (2, 16, 16), (4, 16, 16)):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        command += ["-m", "benchmarks.any_model", "--rounds", str(arguments.rounds)]
        command += ["--worker", str(ranks), str(width), str(batch)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if not lines:
            raise SystemExit(done.stdout + done.stderr)
        result = json.loads(lines[0].removeprefix("RESULT "))
        results.append(result)
        low, high = result["interval_95"]
        frame = result["cpu_us_of_frame_per_block_microbatch_and_stage"]
        frame_low, frame_high = result["frame_interval_95"]
        print(
            f"{ranks} ranks, width {width:<4} model / chain {result['ratio']:.3f}  [{low:.3f}, {high:.3f}]"
            f"  ({result['ms_model']:.1f} and {result['ms_chain']:.1f} ms a batch;"
            f" CPU {result['cpu_ratio']:.3f}, {frame:.0f} [{frame_low:.0f}, {frame_high:.0f}] us more for each block,"
            " microbatch and stage)",
            flush=True,
        )
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "any_model_cpu.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
