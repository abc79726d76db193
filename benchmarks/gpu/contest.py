"""Two contenders that alternate in one process, and what is said of their times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median

from benchmarks.gpu.place import Place
from benchmarks.gpu.table import Report
from benchmarks.ratios import interval
from benchmarks.timed_trainer import Round

__all__ = ["compare", "tokens_per_second"]

GIB = 2**30


def compare(
    place: Place, contenders: Mapping[str, Callable[[], Round]], rounds: int, report: Report
) -> dict[str, list[float]]:
    """Time the contenders ``"theirs"`` and ``"ours"`` in turns; another one begins in each round.

    The first round of each warms it up; its peak of memory is measured there, without the memory that was in use before
    the contender was made.

    Args:
        place: The device.
        contenders: Functions that make a round.
        rounds: The number of timed rounds.
        report: Gets the times, the peaks and the ratio of throughputs after each round.

    Returns:
        Seconds of a batch, by contender and round.
    """
    made: dict[str, Round] = {}
    for name, make in contenders.items():
        place.reset_peak()
        before = place.allocated()
        made[name] = make()
        made[name]()
        report(**{f"peak_gib_{name}": round((place.peak() - before) / GIB, 3)})
    times: dict[str, list[float]] = {name: [] for name in made}
    for index in range(rounds):
        for name in list(made)[:: 1 if index % 2 else -1]:
            times[name].append(made[name]())
        ratios = [theirs / ours for theirs, ours in zip(times["theirs"], times["ours"], strict=True)]
        low, high = interval(ratios)
        report(
            rounds=index + 1,
            throughput_ratio=round(median(ratios), 4),
            interval_95=[round(low, 4), round(high, 4)],
            **{f"ms_{name}": round(1e3 * median(seconds), 3) for name, seconds in times.items()},
        )
    return times


def tokens_per_second(times: Mapping[str, list[float]], tokens: int, report: Report) -> dict[str, float]:
    """Report the tokens per second of both contenders and the ratio, and return the former.

    Args:
        times: From :func:`compare`.
        tokens: Of a batch.
        report: Gets them.
    """
    speeds = {name: tokens / median(seconds) for name, seconds in times.items()}
    report(**{f"tokens_per_second_{name}": round(speed) for name, speed in speeds.items()})
    ratios = [theirs / ours for theirs, ours in zip(times["theirs"], times["ours"], strict=True)]
    low, high = interval(ratios)
    report(
        summary=f"{speeds['ours']:,.0f} tokens/s, Lightning {speeds['theirs']:,.0f}:"
        f" {median(ratios):.3f} [{low:.3f}, {high:.3f}]"
    )
    return speeds
