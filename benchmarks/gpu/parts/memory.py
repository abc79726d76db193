"""The estimate of memory against the allocator, and where the bytes at the peak were allocated."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import HalfPrecision, MixedPrecision

from benchmarks.gpu.models import CausalLM, gpt2, llama_lora, token_loader
from benchmarks.gpu.place import Place
from benchmarks.gpu.table import Report
from lightning_hybrid import HybridStrategy
from lightning_hybrid.axes import Sizes
from lightning_hybrid.tuning.dry_run.dry_run import dry_run

GIB = 2**30
STEPS = 3


def measure(place: Place, report: Report, lora: bool = False) -> None:
    """Estimate without the device, then train a few steps on it."""
    batch_size, length = place.pick((1, 4096) if lora else (8, 1024), (4, 16))
    loader = token_loader(place, STEPS, batch_size, length)
    strategy = HybridStrategy()
    plugin = HalfPrecision("bf16-true") if lora else MixedPrecision("bf16-mixed", "cpu")

    def make(device: torch.device) -> CausalLM:
        return CausalLM(llama_lora(place, device) if lora else gpt2(place))

    class OnMeta(CausalLM):
        """The data of the run beside a network without values."""

        def train_dataloader(self) -> Any:
            return loader

    network = make(torch.device("meta")).network
    (expected,) = dry_run(lambda: (OnMeta(network), None), strategy.settings, Sizes(), precision=plugin).memory
    report(estimate_gib={name: round((value or 0) / GIB, 4) for name, value in asdict(expected).items()})
    assert expected.total is not None
    gc.collect()
    place.reset_peak()
    before = place.allocated()
    if place.kind == "cuda":
        torch.cuda.memory._record_memory_history(max_entries=2_000_000, context="alloc", stacks="python")
    trainer = Trainer(
        accelerator=place.accelerator,
        devices=1,
        strategy=strategy,
        precision="bf16-true" if lora else "bf16-mixed",
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(make(place.device), loader)
    peak = place.peak() - before
    report(
        allocated_gib=round(peak / GIB, 4),
        ratio=round(peak / expected.total, 4),
        summary=f"{peak / GIB:.2f} GiB allocated, {expected.total / GIB:.2f} estimated: {peak / expected.total:.2f}",
    )
    if place.kind == "cuda":
        snapshot = torch.cuda.memory._snapshot()
        report(largest_at_peak_mib=largest_at_peak(snapshot["device_traces"][torch.cuda.current_device()]))


def largest_at_peak(trace: Iterable[Mapping[str, Any]], most: int = 16) -> dict[str, float]:
    """Return where the bytes that are allocated at the peak were allocated.

    Args:
        trace: The events of an allocator in their order, as in torch's memory snapshot.
        most: The number of places.

    Returns:
        MiB by ``file:line function``, the largest first; the innermost line outside of torch counts.
    """
    live: dict[int, tuple[int, str]] = {}
    total = peak = 0
    at_peak: dict[int, tuple[int, str]] = {}
    grown = False  # since `at_peak` was taken: copies are made where the total begins to fall, not at each allocation
    for event in trace:
        if event["action"] == "alloc":
            live[event["addr"]] = event["size"], _place_of(event.get("frames", ()))
            total += event["size"]
            grown = grown or total > peak
            peak = max(peak, total)
        elif event["action"] == "free_completed" and event["addr"] in live:
            if grown and total == peak:
                at_peak, grown = dict(live), False
            total -= live.pop(event["addr"])[0]
    if grown and total == peak:
        at_peak = dict(live)
    sizes: Counter[str] = Counter()
    for size, where in at_peak.values():
        sizes[where] += size
    return {where: round(size / 2**20, 2) for where, size in sizes.most_common(most)}


def _place_of(frames: Iterable[Mapping[str, Any]]) -> str:
    for frame in frames:
        path = str(frame["filename"])
        if path.endswith(".py") and "/torch/" not in path:
            return f"{'/'.join(path.split('/')[-2:])}:{frame['line']} {frame['name']}"
    return "?"
