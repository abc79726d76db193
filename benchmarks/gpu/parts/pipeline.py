"""Two stages that share a device: the engine against `torch.distributed.pipelining` in the same two processes."""

from __future__ import annotations

from statistics import median

from benchmarks.engine.measurements import on_ranks, time_rounds
from benchmarks.gpu.place import Place
from benchmarks.gpu.table import Report
from benchmarks.ratios import interval

RANKS = 2


def measure(place: Place, report: Report, schedule: str) -> None:
    """Time tiny stages, where the host is all there is, and normal ones."""
    microbatches, rounds, steps = place.pick((32, 12, 3), (4, 2, 1))
    texts = []
    for setting in place.pick(("tiny", "normal"), ("tiny",)):
        arguments = (setting, schedule, microbatches, rounds, steps, place.device.type)
        times = on_ranks(RANKS, time_rounds, *arguments, device=place.device.type)
        seconds = {name: [wall for wall, _ in values] for name, values in times.items()}
        ratios = [ours / theirs for ours, theirs in zip(seconds["ours"], seconds["torch"], strict=True)]
        low, high = interval(ratios)
        micros = {name: round(1e6 * median(values) / microbatches, 1) for name, values in seconds.items()}
        found = {"time_ratio": round(median(ratios), 4), "interval_95": [round(low, 4), round(high, 4)]}
        report(**{setting: {**found, "us_per_microbatch": micros, "microbatches": microbatches, "rounds": rounds}})
        texts.append(f"{setting} {median(ratios):.2f} [{low:.2f}, {high:.2f}] ({micros['ours']:g} us a microbatch)")
    report(summary="time over torch's: " + "; ".join(texts))
