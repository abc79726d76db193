"""The search for the fastest layouts that fit, and the reasons why the other layouts were rejected.

`choose_layout` calls :func:`search` when a run starts, and ``lightning-hybrid suggest`` calls it in a terminal. The
search needs no devices: the cost model estimates memory and time from the record of a step.

::

    every layout --> refused by the module        reason of the module
                 --> does not fit in memory       also tried with the fewest recomputed layers, if the space allows it
                 --> fits --> simulated in the order of the lower bound of the time --> the best layouts

A simulation of the pipeline is the slow part. The lower bound of a step's time, which is the work of the busiest rank
without waiting, is fast to compute, and lets the search skip most simulations.
"""

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
#: The options of a search whose result runs without a review. Estimates are not exact, so an option has to save more
#: than 5% of the time, and more layouts are compared to find a simple one.
UNATTENDED: dict[str, Any] = {"as_good": 0.05, "num_best": 12}


@dataclass(frozen=True)
class Rejected:
    """Layouts that were rejected for the same reason.

    Attributes:
        reason: The reason.
        count: The number of layouts.
        best: A layout among them: the layout with the least memory if they do not fit, the fastest layout if they are
            slower, and the first layout if the module does not support them.
        text: Details about this layout.
    """

    reason: str
    count: int
    best: Layout
    text: str

    @property
    def first_sentence(self) -> str:
        """The text without remedies: they are other layouts, which the search tries anyway."""
        return " ".join(self.text.split()).split(". ")[0]


@dataclass(frozen=True)
class Suggestions:
    """The result of a search.

    Attributes:
        best: The best layouts with their costs, ordered by the time per sample. If times differ little, the simpler
            layout is first. Empty if no layout can be used.
        rejected: The other layouts, grouped by reason: layouts that are slower, do not fit, or are not supported by the
            module.
        num_layouts: The number of compared layouts, including partly recomputed layouts.
        num_simulated: The number of layouts that were simulated.
    """

    best: tuple[Cost, ...]
    rejected: tuple[Rejected, ...]
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

    The memory of every layout is estimated. The layouts that fit are simulated in the order of the lower bound of their
    time, which is the work of the busiest rank. The search ends when the lower bound of the next layout exceeds the
    simulated time of the worst of the best layouts, because the same is true of all layouts after it. So the result is
    the same as if all layouts were simulated.

    If the space allows it, layouts that fit only with all layers recomputed are then tried with the fewest recomputed
    layers.

    Args:
        model: The cost model.
        num_ranks: The number of ranks of the run.
        refuse: Returns why the module does not support a layout, as a short and a full text; ``None`` if it does. It is
            called for every layout, before the layout is estimated.
        prepared: Makes a context from all layouts. They are estimated inside the context, in the same order.
        space: The values that are tried.
        num_best: The number of layouts to return.
        as_good: The share of the shortest time by which times must differ to count as different. Times are rounded down
            to multiples of it, and the simplest of equally fast layouts is first.
        progress: Gets a text, the number of finished layouts, and the number of layouts of the current phase. The
            phases are the estimates of all layouts, and the simulations of layouts that fit.

    Raises:
        ValueError, TypeError: The errors of `refuse` and `prepared`, if the module's step cannot run at all.
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
    rejected = [*_slower(slower, best), *_too_big(too_big, machine.memory), *_refused(refused)]
    number = len(every) + ranking.num_layouts - len(fitting)
    return Suggestions(tuple(best), tuple(rejected), number, len(ranking.simulated))


class _Ranking:
    """A ranking of layouts by time.

    Args:
        model: The cost model.
        num_best: The number of layouts to keep.
        progress: See :func:`search`.

    Attributes:
        simulated: The costs of layouts that were simulated.
        left: The costs of layouts that were not simulated, because their lower bound exceeds the time of the best
            layouts.
        num_layouts: The number of layouts that were added.
    """

    def __init__(self, model: CostModel, num_best: int, progress: Callable[[str, int, int], None]) -> None:
        self._model, self._num_best, self._progress = model, num_best, progress
        self._best: list[Cost] = []  # ordered by time
        self.simulated: list[Cost] = []
        self.left: list[Cost] = []
        self.num_layouts = 0

    @property
    def worst(self) -> float:
        """The seconds per sample above which a layout is not one of the best; infinite until `num_best` are known."""
        return self._best[-1].seconds_of_sample if len(self._best) == self._num_best else inf

    def add(self, costs: Iterable[Cost]) -> None:
        """Add layouts, and simulate a layout only if it can be one of the best."""
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
        """Return the best layouts; see `as_good` of :func:`search`."""
        return sorted(self._best, key=lambda cost: _preference(cost, self._best[0], as_good))


def _partly_recomputed(
    model: CostModel, fitting: Sequence[Cost], too_big: Sequence[Cost], worst: float
) -> Iterator[Cost]:
    """Yield the costs of layouts that fit only with recomputation, with the fewest recomputed layers on each rank.

    Args:
        model: The cost model.
        fitting: The costs of the layouts that fit.
        too_big: The costs of the layouts that do not fit.
        worst: The seconds per sample above which a layout is not one of the best.
    """
    with_all = {replace(cost.layout, recompute=False) for cost in fitting if cost.layout.recompute is True}
    for cost in too_big:
        if cost.least_of_sample <= worst and cost.layout in with_all:
            layout = model.fewest_recomputed(cost.layout)
            if layout is not None:
                yield model.estimate(layout)


def _rank(cost: Cost) -> tuple[float, int]:
    """Return a sort key: the seconds per sample, and the complexity of the layout.

    The complexity is the sum of the ZeRO stage, the number of chunks, and 1 for each of: hybrid sharding,
    recomputation, extra microbatches in flight, context parallelism, expert parallelism, and tensor-parallel ranks in a
    grid.
    """
    layout = cost.layout
    options = layout.zero_stage + layout.num_chunks + bool(layout.recompute) + bool(layout.extra_in_flight)
    options += bool(layout.zero_size) + (layout.experts > 1)
    return cost.seconds_of_sample, options + (layout.context > 1) + (layout.tensor_mode != "1d")


def _preference(cost: Cost, fastest: Cost, as_good: float) -> tuple[int, int, float]:
    """Return a sort key in which times that differ by less than a share count as equal, see :func:`search`."""
    seconds, complexity = _rank(cost)
    return int((seconds / fastest.seconds_of_sample - 1) / as_good), complexity, seconds


def _slower(costs: list[Cost], best: list[Cost]) -> Iterator[Rejected]:
    """Yield the layouts that fit, grouped by the kind of work that takes the most extra time."""
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
        yield Rejected(f"more {name}", len(group), first.layout, f"{least}{times:.2f} x the time of the best")


def _too_big(costs: list[Cost], memory: float) -> Iterator[Rejected]:
    if costs:
        first = min(costs, key=lambda cost: cost.bytes)
        text = f"{first.bytes / 2**30:,.1f} GiB, {first.bytes / memory:.2f} x the memory"
        yield Rejected(DOES_NOT_FIT, len(costs), first.layout, text)


def _refused(groups: dict[str, list[tuple[Layout, str]]]) -> Iterator[Rejected]:
    for reason, group in groups.items():
        layout, text = group[0]
        yield Rejected(reason, len(group), layout, text)
