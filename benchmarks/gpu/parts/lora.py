"""LoRA on a Llama of 8 B: the one published number that a single GPU can confirm.

NeMo Automodel publishes 12,473 tokens/s and 402 TFLOP/s on one H100 for Llama-3-8B with LoRA and sequences of 4,096.
"""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.contest import compare, tokens_per_second
from benchmarks.gpu.models import CausalLM, llama_lora, token_loader
from benchmarks.gpu.place import Place
from benchmarks.gpu.table import Report
from benchmarks.timed_trainer import Stopwatch, trainer_round
from lightning_hybrid import HybridStrategy

WARM_UP = 1
#: FLOP/s of an H100 (SXM) in bf16 without sparsity, by NVIDIA's data sheet.
PEAK_FLOPS = 989.4e12
AUTOMODEL = {"tokens_per_second": 12_473, "tflops": 402}


def measure(place: Place, report: Report) -> None:
    """Train one module under both strategies in turns, in bf16."""
    batches, rounds = place.pick((4, 6), (2, 2))
    batch_size, length = place.pick((1, 4096), (4, 16))
    loader = token_loader(place, WARM_UP + batches, batch_size, length)
    module = CausalLM(llama_lora(place, place.device), stays=True)
    flops = flops_per_token(module, length)
    report(batch_size=batch_size, length=length, tflop_per_token=flops / 1e12, automodel=AUTOMODEL)
    resident = place.allocated()
    report(resident_gib=round(resident / 2**30, 3))

    def make(strategy: Any) -> Any:
        how = {"accelerator": place.accelerator, "devices": 1, "precision": "bf16-true"}
        return trainer_round(module, loader, batches, watch=Stopwatch(WARM_UP), strategy=strategy, **how)

    times = compare(place, {"theirs": lambda: make("auto"), "ours": lambda: make(HybridStrategy())}, rounds, report)
    speeds = tokens_per_second(times, batch_size * length, report)
    report(
        **{f"tflops_{name}": round(flops * speed / 1e12, 1) for name, speed in speeds.items()},
        **{f"mfu_{name}": round(flops * speed / PEAK_FLOPS, 4) for name, speed in speeds.items()},
    )


def flops_per_token(module: CausalLM, length: int) -> float:
    """Return the floating-point operations of a training step, for each token.

    A frozen weight of a product costs 2 operations forward and 2 backward (the gradient of its input), one that trains
    6. Causal attention costs 2 x length x width x layers forward and twice as much backward: half of the square of
    positions is computed ("PaLM", arXiv 2204.02311, appendix B, halved). The embedding is a look-up, and costs nothing.
    """
    config: Any = module.network.config
    frozen = trained = 0
    for name, parameter in module.named_parameters():
        if parameter.ndim == 2 and "embed_tokens" not in name:
            trained += parameter.numel() * parameter.requires_grad
            frozen += parameter.numel() * (not parameter.requires_grad)
    attention = 6 * config.num_hidden_layers * length * config.hidden_size
    return float(4 * frozen + 6 * trained + attention)
