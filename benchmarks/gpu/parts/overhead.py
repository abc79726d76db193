"""The cost of the strategy where nothing is divided: tokens per second and memory against Lightning's own strategy."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.contest import compare, tokens_per_second
from benchmarks.gpu.models import CausalLM, gpt2, token_loader
from benchmarks.gpu.place import Place
from benchmarks.gpu.table import Report
from benchmarks.timed_trainer import Stopwatch, trainer_round
from lightning_hybrid import HybridStrategy

WARM_UP = 2


def measure(place: Place, report: Report) -> None:
    """Train GPT-2 under both strategies in turns, in bf16-mixed."""
    batches, rounds = place.pick((20, 8), (2, 2))
    batch_size, length = place.pick((8, 1024), (4, 16))
    loader = token_loader(place, WARM_UP + batches, batch_size, length)
    report(batch_size=batch_size, length=length)

    def make(strategy: Any) -> Any:
        module = CausalLM(gpt2(place))
        report(parameters=sum(parameter.numel() for parameter in module.parameters()))
        how = {"accelerator": place.accelerator, "devices": 1, "precision": "bf16-mixed"}
        return trainer_round(module, loader, batches, watch=Stopwatch(WARM_UP), strategy=strategy, **how)

    result = compare(place, {"theirs": lambda: make("auto"), "ours": lambda: make(HybridStrategy())}, rounds, report)
    tokens_per_second(result, batch_size * length, report)
