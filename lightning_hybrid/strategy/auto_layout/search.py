"""All layouts of so many ranks, the best of those that fit, and why the others are not among them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lightning_hybrid.strategy.auto_layout.cost_model import MOST_CHUNKS, RECOMPUTE, Cost, CostModel, Layout

DOES_NOT_FIT = "does not fit"


@dataclass(frozen=True)
class Losers:
    """Layouts that are not among the best, for one reason.

    Attributes:
        reason: Why.
        count: How many they are.
        best: The least bad of them: that needs the least memory, or the least time.
        text: What is wrong with it.
    """

    reason: str
    count: int
    best: Layout
    text: str


@dataclass(frozen=True)
class Suggestions:
    """What a search found.

    Attributes:
        best: Layouts with their costs, the fastest first; of those that differ by less than 1 %, the simplest.
        losers: The others, by reason, of those that come closest first.
        num_layouts: How many layouts there are.
        num_simulated: How many of them had to be simulated.
    """

    best: tuple[Cost, ...]
    losers: tuple[Losers, ...]
    num_layouts: int
    num_simulated: int


def layouts(num_ranks: int, samples: int, max_tensor: int) -> Iterator[Layout]:
    """Every layout.

    Sizes whose product is the number of ranks; as many replicas as the samples can be divided by; microbatches ``p``,
    ``2 p``, ``4 p``, ... up to one for each sample of a replica; 1F1B and GPipe with one chunk on a rank, interleaved
    1F1B with 2 to 4; each stage of ZeRO where there are replicas; every kind of recomputation.

    Args:
        num_ranks: Of the run.
        samples: Of a step, over all replicas.
        max_tensor: The most ranks that may share a layer.
    """
    for tensor in _divisors(num_ranks):
        if tensor > max_tensor:
            continue
        for pipeline in _divisors(num_ranks // tensor):
            data = num_ranks // tensor // pipeline
            if samples % data:
                continue
            schedules = [("1f1b", 1)]
            if pipeline > 1:
                schedules += [("gpipe", 1), *(("interleaved_1f1b", chunks) for chunks in range(2, MOST_CHUNKS + 1))]
            for microbatches in microbatch_numbers(pipeline, samples // data):
                for schedule, chunks in schedules:
                    for zero in range(4 if data > 1 else 1):
                        for recompute in RECOMPUTE:
                            yield Layout(data, tensor, pipeline, microbatches, schedule, chunks, zero, recompute)


def microbatch_numbers(pipeline: int, samples: int) -> list[int]:
    """Into how many microbatches a batch may be split: ``p``, ``2 p``, ... or all that there are.

    Args:
        pipeline: The pipeline ranks.
        samples: Of the batch.
    """
    if samples < pipeline:
        return [samples]
    numbers = [pipeline]
    while 2 * numbers[-1] <= samples:
        numbers.append(2 * numbers[-1])
    return numbers


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def search(
    model: CostModel,
    num_ranks: int,
    *,
    refuse: Callable[[Layout], tuple[str, str] | None],
    num_best: int = 5,
    progress: Callable[[str, int, int], None] = lambda text, done, total: None,
) -> Suggestions:
    """Find the fastest layouts that fit.

    Every layout is asked for its memory. Of those that fit, a step is simulated in the order of the least that it can
    take, which is what its busiest rank has to do: no rank can be finished earlier than that. When the next one would
    take at least as long without any waiting as the worst of the best takes with it, so would all that come after it,
    and none of them has to be simulated. So the result is that of simulating all.

    Args:
        model: The costs.
        num_ranks: Of the run.
        refuse: Says why a module cannot be divided by a layout, in short and in full; ``None`` if it can.
        num_best: How many are wanted.
        progress: Gets what is done to layouts, to how many it has been done, and how many there are.
    """
    machine, step = model.machine, model.step
    max_tensor = machine.max_tensor or machine.ranks_per_node
    refused: dict[str, list[tuple[Layout, str]]] = {}
    too_big: list[Cost] = []
    fitting: list[Cost] = []
    every = list(layouts(num_ranks, step.samples, max_tensor))
    for number, layout in enumerate(every):
        progress("Weighing layouts", number, len(every))
        reason = refuse(layout)
        if reason is not None:
            refused.setdefault(reason[0], []).append((layout, reason[1]))
            continue
        cost = model.estimate(layout)
        (fitting if cost.bytes <= machine.memory else too_big).append(cost)
    fitting.sort(key=lambda cost: cost.least)
    best: list[Cost] = []  # the fastest first
    simulated: list[Cost] = []
    for cost in fitting:
        if len(best) == num_best and cost.least > _seconds(best[-1]):
            break
        simulated.append(model.simulate(cost))
        progress("Simulating those that fit, at most", len(simulated), len(fitting))
        best = heapq.nsmallest(num_best, [*best, simulated[-1]], key=_rank)
    fastest = best[:1]
    best.sort(key=lambda cost: _preference(cost, fastest[0]))
    chosen = {cost.layout for cost in best}
    slower = [cost for cost in (*simulated, *fitting[len(simulated) :]) if cost.layout not in chosen]
    losers = [*_slower(slower, best), *_too_big(too_big, machine.memory), *_refused(refused)]
    return Suggestions(tuple(best), tuple(losers), len(every), len(simulated))


def _seconds(cost: Cost) -> float:
    return cost.least if cost.seconds is None else cost.seconds


def _rank(cost: Cost) -> tuple[float, int]:
    """The fastest first; of equally fast ones, what is simpler to say."""
    layout = cost.layout
    options = layout.zero_stage + layout.num_chunks + bool(layout.recompute) + bool(layout.extra_in_flight)
    return _seconds(cost), options


def _preference(cost: Cost, fastest: Cost) -> tuple[int, int, float]:
    """As above, where a time within 1 % of the fastest is as good as that."""
    seconds, complexity = _rank(cost)
    return int(100 * (seconds / _seconds(fastest) - 1)), complexity, seconds


def _slower(costs: list[Cost], best: list[Cost]) -> Iterator[Losers]:
    """Those that fit, by what they spend most on beyond the best one."""
    groups: dict[str, list[Cost]] = {}
    for cost in costs:
        excess = {name: seconds - best[0].parts.get(name, 0.0) for name, seconds in cost.parts.items()}
        groups.setdefault(max(excess, key=lambda name: excess[name]), []).append(cost)
    for name, group in sorted(groups.items(), key=lambda entry: min(map(_seconds, entry[1]))):
        first = min(group, key=_seconds)
        times = _seconds(first) / _seconds(best[0])
        least = "" if first.seconds is not None else "at least "
        yield Losers(f"more {name}", len(group), first.layout, f"{least}{times:.2f} x the time of the best")


def _too_big(costs: list[Cost], memory: float) -> Iterator[Losers]:
    if costs:
        first = min(costs, key=lambda cost: cost.bytes)
        text = f"{first.bytes / 2**30:,.1f} GiB, {first.bytes / memory:.2f} x the memory"
        yield Losers(DOES_NOT_FIT, len(costs), first.layout, text)


def _refused(groups: dict[str, list[tuple[Layout, str]]]) -> Iterator[Losers]:
    for reason, group in groups.items():
        layout, text = group[0]
        yield Losers(reason, len(group), layout, text)
