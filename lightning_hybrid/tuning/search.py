"""All layouts of so many ranks, the best of those that fit, and why the others are not among them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from lightning_hybrid.tuning.candidates import Layout
from lightning_hybrid.tuning.cost_model import Cost, CostModel
from lightning_hybrid.tuning.search_space import EVERYTHING, SearchSpace, layouts

DOES_NOT_FIT = "does not fit"
#: How a layout is found that nobody looks at before it runs: an option that saves less of the time is not taken, as
#: estimates are rougher than that, and so many layouts are compared by what is simple.
FOUND_UNSEEN: dict[str, Any] = {"as_good": 0.05, "num_best": 12}


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

    @property
    def first_sentence(self) -> str:
        """The text without remedies, which are other layouts, so the search tries them too."""
        return " ".join(self.text.split()).split(". ")[0]


@dataclass(frozen=True)
class Suggestions:
    """What a search found.

    Attributes:
        best: Layouts with their costs, the fastest first; of those that differ by little, the simplest. Where
            steps differ in their samples, the time of a sample counts.
        losers: The others, by reason, of those that come closest first.
        num_layouts: How many layouts there are.
        num_simulated: How many of them had to be simulated.
    """

    best: tuple[Cost, ...]
    losers: tuple[Losers, ...]
    num_layouts: int
    num_simulated: int


def search(
    model: CostModel,
    num_ranks: int,
    *,
    refuse: Callable[[Layout], tuple[str, str] | None],
    prepared: Callable[[Iterable[Layout]], AbstractContextManager[None]] = lambda layouts: nullcontext(),
    space: SearchSpace = EVERYTHING,
    num_best: int = 5,
    as_good: float = 0.01,
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
        prepared: Makes a context for layouts that are going to be weighed, in which they are.
        space: What is tried.
        num_best: How many are wanted.
        as_good: The share of the time of the fastest by which a simpler layout may be slower, to come before it.
        progress: Gets what is done to layouts, to how many it has been done, and how many there are.
    """
    machine, step = model.machine, model.step
    most = machine.max_tensor or machine.ranks_per_node, machine.ranks_per_node
    refused: dict[str, list[tuple[Layout, str]]] = {}
    too_big: list[Cost] = []
    fitting: list[Cost] = []
    every = list(layouts(num_ranks, step, *most, space))
    with prepared(every):
        for number, layout in enumerate(every):
            progress("Estimating layouts", number, len(every))
            reason = refuse(layout)
            if reason is not None:
                refused.setdefault(reason[0], []).append((layout, reason[1]))
                continue
            cost = model.estimate(layout)
            (fitting if cost.bytes <= machine.memory else too_big).append(cost)
    ranking = _Ranking(model, num_best, progress)
    ranking.add(fitting)
    if space.some_layers:
        ranking.add(_partly_recomputed(model, fitting, too_big, ranking.worst))
    best = ranking.sorted(as_good)
    chosen = {cost.layout for cost in best}
    slower = [cost for cost in (*ranking.simulated, *ranking.left) if cost.layout not in chosen]
    losers = [*_slower(slower, best), *_too_big(too_big, machine.memory), *_refused(refused)]
    number = len(every) + ranking.num_layouts - len(fitting)
    return Suggestions(tuple(best), tuple(losers), number, len(ranking.simulated))


class _Ranking:
    """The fastest of all layouts that are added.

    Args:
        model: The costs.
        num_best: How many are wanted.
        progress: As of :func:`search`.

    Attributes:
        simulated: The costs of those that had to be simulated.
        left: Those of the others.
        num_layouts: How many have been added.
    """

    def __init__(self, model: CostModel, num_best: int, progress: Callable[[str, int, int], None]) -> None:
        self._model, self._num_best, self._progress = model, num_best, progress
        self._best: list[Cost] = []  # the fastest first
        self.simulated: list[Cost] = []
        self.left: list[Cost] = []
        self.num_layouts = 0

    @property
    def worst(self) -> float:
        """Seconds of a sample that are too many to be among the best."""
        return self._best[-1].seconds_of_sample if len(self._best) == self._num_best else inf

    def add(self, costs: Iterable[Cost]) -> None:
        """Simulate those that may be among the best."""
        waiting = sorted(costs, key=lambda cost: cost.least_of_sample)
        self.num_layouts += len(waiting)
        for number, cost in enumerate(waiting):
            if cost.least_of_sample > self.worst:
                self.left += waiting[number:]
                break
            self.simulated.append(self._model.simulate(cost))
            self._progress("Simulating layouts that fit", len(self.simulated), self.num_layouts)
            self._best = heapq.nsmallest(self._num_best, [*self._best, self.simulated[-1]], key=_rank)

    def sorted(self, as_good: float) -> list[Cost]:
        """The best, where a time that is longer than that of the fastest by this share is as good as that."""
        return sorted(self._best, key=lambda cost: _preference(cost, self._best[0], as_good))


def _partly_recomputed(
    model: CostModel, fitting: Sequence[Cost], too_big: Sequence[Cost], worst: float
) -> Iterator[Cost]:
    """Where layers have to run again, but not all of them: with as few as fit, in each stage.

    Args:
        model: The costs.
        fitting: Of layouts that fit.
        too_big: Of the others.
        worst: Seconds of a sample that are too many.
    """
    with_all = {replace(cost.layout, recompute=False) for cost in fitting if cost.layout.recompute is True}
    for cost in too_big:
        if cost.least_of_sample <= worst and cost.layout in with_all:
            layout = model.fewest_recomputed(cost.layout)
            if layout is not None:
                yield model.estimate(layout)


def _rank(cost: Cost) -> tuple[float, int]:
    """The fastest first; of equally fast ones, what is simpler to say."""
    layout = cost.layout
    options = layout.zero_stage + layout.num_chunks + bool(layout.recompute) + bool(layout.extra_in_flight)
    return cost.seconds_of_sample, options + (layout.context > 1) + (layout.tensor_mode != "1d")


def _preference(cost: Cost, fastest: Cost, as_good: float) -> tuple[int, int, float]:
    seconds, complexity = _rank(cost)
    return int((seconds / fastest.seconds_of_sample - 1) / as_good), complexity, seconds


def _slower(costs: list[Cost], best: list[Cost]) -> Iterator[Losers]:
    """Those that fit, by what they spend most on beyond the best one."""
    groups: dict[str, list[Cost]] = {}
    for cost in costs:
        excess = {
            name: seconds / cost.samples - best[0].parts.get(name, 0.0) / best[0].samples
            for name, seconds in cost.parts.items()
        }
        groups.setdefault(max(excess, key=lambda name: excess[name]), []).append(cost)
    for name, group in sorted(groups.items(), key=lambda entry: min(each.seconds_of_sample for each in entry[1])):
        first = min(group, key=lambda cost: cost.seconds_of_sample)
        times = first.seconds_of_sample / best[0].seconds_of_sample
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
