"""The layouts that are suggested are the fastest that fit, and cost what a run of them would."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import HalfPrecision, Precision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid import HybridStrategy
from lightning_hybrid.axes import Sizes
from lightning_hybrid.config import Settings
from lightning_hybrid.memory.account import MemoryUsage
from lightning_hybrid.pipeline_parallel.schedules import build
from lightning_hybrid.strategy.auto_layout import module_profile
from lightning_hybrid.strategy.auto_layout.arguments import arguments, keywords, nested
from lightning_hybrid.strategy.auto_layout.candidates import Layout, Step, arrangements
from lightning_hybrid.strategy.auto_layout.cost_model import CostModel, StageCost
from lightning_hybrid.strategy.auto_layout.dry_run import traces
from lightning_hybrid.strategy.auto_layout.dry_run.dry_run import DryRunStrategy, dry_run
from lightning_hybrid.strategy.auto_layout.dry_run.repeated_layers import RepeatedLayers
from lightning_hybrid.strategy.auto_layout.machine import Machine, Messages
from lightning_hybrid.strategy.auto_layout.module_profile import ModuleProfile
from lightning_hybrid.strategy.auto_layout.search import SearchSpace, search
from lightning_hybrid.tensor_parallel.context_parallel.attention import KINDS
from tests.context_modules import Convolution

# -- the search against all layouts, evaluated one by one by other code ------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """A made-up module whose layers have their own costs, the ranks, and the machine."""

    seconds: tuple[float, ...]  # of a forward with one sample
    weights: tuple[int, ...]  # bytes of parameters, and as many of gradients
    saved: tuple[int, ...]  # bytes of activations of one sample
    output: int
    keys_kept: float  # what gathered keys and values are, as a share of what is saved
    num_ranks: int
    machine: Machine
    step: Step

    def refuse(self, layout: Layout) -> tuple[str, str] | None:
        if layout.pipeline * layout.num_chunks > len(self.seconds):
            return "too few layers", "so few"
        if layout.tensor_mode == "3d" and self.output % 2:
            return "tensor parallelism cannot be used", "in no cube"
        if layout.context_kind == "ulysses":
            is_possible = 12 // layout.tensor % layout.context == 0  # of its heads
        else:
            is_possible = layout.recompute != "selective"
        return None if is_possible else ("context parallelism cannot be used", "so")

    def layers(self, layout: Layout) -> list[list[int]]:
        number = layout.pipeline * layout.num_chunks
        ends = [round(len(self.seconds) * stage / number) for stage in range(number + 1)]
        return [list(range(*ends[stage : stage + 2])) for stage in range(number)]

    def stages(self, layout: Layout, samples: int) -> Sequence[StageCost]:
        kept = {False: 1.0, "selective": 0.4, True: 0.1}[layout.recompute]
        again = {False: 0.0, "selective": 0.2, True: 1.0}[layout.recompute]
        size = layout.context
        more = self.keys_kept * (size - 1) / size if layout.context_kind == "all_gather" else 0.0
        costs = []
        for layers in self.layers(layout):
            forward = samples * sum(self.seconds[at] for at in layers) / layout.tensor / size
            there, back = self.messages(layout, samples * self.output / layout.tensor, len(layers))
            tensor, tensor_back = self.tensor_messages(layout, samples * self.output, layers)
            costs.append(
                StageCost(
                    forward=forward,
                    recomputed=again * forward,
                    saved=kept * samples * sum(self.saved[at] for at in layers) / layout.tensor * (1 / size + more),
                    output=samples * self.output / size,
                    tensor=tensor,
                    tensor_back=tensor_back,
                    tensor_repeated=float(layout.recompute is True),
                    context=there,
                    context_back=back,
                    context_repeated=float(bool(layout.recompute)),
                    context_beside=forward / 3 if layout.context_kind == "ring" else 0.0,
                )
            )
        return costs

    def tensor_messages(self, layout: Layout, num_bytes: float, layers: list[int]) -> tuple[Messages, Messages]:
        """Of transformer layers, by the table of the documents: each has activations of so many bytes, and weights."""
        size, mode, number = layout.tensor, layout.tensor_mode, layout.tensor_depth
        weights, activations = sum(self.weights[at] for at in layers), num_bytes * len(layers)
        edge = round(size ** (1 / 3)) if mode == "3d" else round((size / number) ** (1 / 2))
        if mode == "1d":
            there = back = 4 * (size - 1) / size * activations
        elif mode == "3d":
            there = (edge - 1) / edge**3 * (16 * activations + weights)
            back = (edge - 1) / edge**3 * (23 * activations + 2 * weights)
        else:
            there = (edge - 1) / edge**2 * (7 * activations / number + weights)
            back = 2 * there + 2 * (number - 1) / number * weights / edge**2
        hops = 4 * (size - 1) if mode == "1d" else 8 * (edge - 1)
        each = 2 if mode == "1d" else 8
        count = len(layers) if size > 1 else 0
        return Messages(there, hops * count, each * count), Messages(back, 2 * hops * count, 2 * each * count)

    def messages(self, layout: Layout, num_bytes: float, number: int) -> tuple[Messages, Messages]:
        """Of layers on shares of sequences, by the table of the documents: each has an attention of so many bytes."""
        size, ring = layout.context, layout.context_kind == "ring"
        if layout.context_kind == "ulysses":
            each, hops, collectives = 4 * (size - 1) / size**2, 4 * (size - 1), 4
        else:
            each, hops, collectives = 2 * (size - 1) / size, (1 if ring else 2) * (size - 1), size - 1 if ring else 2
        there = Messages(number * each * num_bytes, number * hops, number * collectives)
        back = (2 * size - 1) / (size - 1) if ring else 1.0
        return there, Messages(back * there.sent, back * there.hops, back * there.collectives)

    def weights_of(self, layout: Layout) -> list[int]:
        stages = self.layers(layout)
        shares = layout.tensor // layout.tensor_depth  # squares have the same weights
        return [
            sum(self.weights[at] for layers in stages[rank :: layout.pipeline] for at in layers) // shares
            for rank in range(layout.pipeline)
        ]

    def held(self, layout: Layout) -> Sequence[MemoryUsage]:
        d, zero = layout.data, layout.zero_stage
        return [
            MemoryUsage(w // (d if zero == 3 else 1), w // (d if zero > 1 else 1), 2 * w // (d if zero else 1), None, 0)
            for w in self.weights_of(layout)
        ]


class Profile:
    def __init__(self, problem: Problem) -> None:
        self.stages, self.held = problem.stages, problem.held
        self._weights = problem.weights_of

    def weights(self, layout: Layout) -> Sequence[tuple[int, int]]:
        return [(weight, weight) for weight in self._weights(layout)]


def random_problem(seed: int) -> Problem:
    draw = random.Random(seed)
    number = draw.randint(2, 9)

    def each(low: float, high: float) -> tuple[float, ...]:
        level = draw.uniform(low, high)
        return tuple(level * draw.uniform(0.5, 2) for _ in range(number))

    weights = tuple(map(int, each(1e5, 1e7)))
    saved = tuple(map(int, each(1e4, 1e6)))
    ranks = draw.choice([2, 4, 6, 8])
    machine = Machine(
        memory=draw.uniform(0.2, 6) * sum(weights) * 4 / ranks + sum(saved),
        ranks_per_node=draw.choice([2, 4, 8]),
        memory_bandwidth=10 ** draw.uniform(9, 12),
        node_bandwidth=10 ** draw.uniform(8, 11),
        node_latency=10 ** draw.uniform(-7, -4),
        network_bandwidth=10 ** draw.uniform(7, 10),
        network_latency=10 ** draw.uniform(-6, -3),
        collective_seconds=draw.choice([0.0, 10 ** draw.uniform(-5, -2)]),
        overlap=draw.choice([0.0, 0.5, 1.0]),
        max_tensor=draw.choice([None, 2, 8]),
    )
    step = Step(draw.choice([4, 8, 12, 16]), draw.choice([1, 1, 3]), draw.choice(["pp-dp-tp", "dp-cp-pp-tp"]))
    output, keys_kept = draw.randint(10**3, 10**6), draw.uniform(0.1, 0.5)
    return Problem(each(1e-4, 1e-2), weights, saved, output, keys_kept, ranks, machine, step)


def naive_arrangements(tensor: int, context: int) -> list[tuple[str, int]]:
    """Every number of ranks along three axes."""
    found = [("1d", 1)]
    for depth, edge in itertools.product(range(1, tensor + 1), range(2, tensor + 1)):
        if depth * edge * edge == tensor and context == 1:
            found.append(("2.5d", depth) if depth > 1 else ("2d", 1))
            found += [("3d", 1)] if depth == edge else []
    return found


def naive_layouts(problem: Problem) -> list[Layout]:
    """All that an argument may be, then what contradicts itself is left out."""
    sizes, machine = range(1, problem.num_ranks + 1), problem.machine
    schedules = [("1f1b", 1), ("gpipe", 1), *(("interleaved_1f1b", chunks) for chunks in (2, 3, 4))]
    kinds = ("ulysses", "ring", "all_gather")
    found = []
    for data, tensor, pipeline, context in itertools.product(sizes, repeat=4):
        too_many = tensor > (machine.max_tensor or machine.ranks_per_node) or context > machine.ranks_per_node
        if data * tensor * pipeline * context != problem.num_ranks or problem.step.samples % data or too_many:
            continue
        batch = problem.step.samples // data
        powers = [pipeline * 2**power for power in range(10) if pipeline * 2**power <= batch] or [batch]
        modes = naive_arrangements(tensor, context)
        every = itertools.product(powers, schedules, range(4), (False, "selective", True), kinds, modes)
        for number, (schedule, chunks), zero, again, kind, mode in every:
            if (pipeline == 1 and schedule != "1f1b") or pipeline * chunks > len(problem.seconds):
                continue
            if (data == 1 and zero) or (kind != "ulysses" and (context == 1 or again == "selective")):
                continue
            if kind == "ulysses" and 12 // tensor % context:
                continue
            if mode == ("3d", 1) and problem.output % 2:
                continue
            options = number, schedule, chunks, zero, again, ()
            found.append(Layout(data, tensor, pipeline, *options, context, kind, *mode))
    return found


def coordinates_of(problem: Problem, layout: Layout) -> list[dict[str, int]]:
    """Of each rank, its number along each axis."""
    sizes = {"dp": layout.data, "tp": layout.tensor, "pp": layout.pipeline, "cp": layout.context}
    order = problem.step.rank_order
    coordinates: list[dict[str, int]] = [{}]
    for name in (order if "cp" in order else order.replace("tp", "cp-tp")).split("-"):  # the outermost first
        coordinates = [{**each, name: at} for each in coordinates for at in range(sizes[name])]
    return coordinates


def naive_link(problem: Problem, layout: Layout, *axes: str) -> tuple[float, float]:
    """Bandwidth and latency, from the coordinates of all ranks of a group."""
    nodes: dict[tuple[tuple[str, int], ...], set[int]] = {}
    for rank, each in enumerate(coordinates_of(problem, layout)):
        group = tuple(sorted((name, at) for name, at in each.items() if name not in axes))
        nodes.setdefault(group, set()).add(rank // problem.machine.ranks_per_node)
    machine = problem.machine
    if any(len(each) > 1 for each in nodes.values()):
        return machine.network_bandwidth, machine.network_latency
    return machine.node_bandwidth, machine.node_latency


def naive_hop(problem: Problem, layout: Layout, stage: int) -> tuple[float, float]:
    """Bandwidth and latency between a stage and the next one, from the coordinates of every pair of ranks."""
    coordinates = coordinates_of(problem, layout)
    here, there = stage % layout.pipeline, (stage + 1) % layout.pipeline
    machine = problem.machine
    for rank, each in enumerate(coordinates):
        if each["pp"] == here:
            other = coordinates.index({**each, "pp": there})
            if rank // machine.ranks_per_node != other // machine.ranks_per_node:
                return machine.network_bandwidth, machine.network_latency
    return machine.node_bandwidth, machine.node_latency


def naive_exchange(problem: Problem, layout: Layout, stages: Sequence[StageCost]) -> list[tuple[float, float]]:
    """Seconds of the messages of context parallelism in a forward and in a backward of each stage."""
    machine, (bandwidth, latency) = problem.machine, naive_link(problem, layout, "cp")
    found = []
    for stage in stages if layout.context > 1 else ():
        there, back = (
            each.sent / bandwidth + each.hops * latency + each.collectives * machine.collective_seconds
            for each in (stage.context, stage.context_back)
        )
        there = max(0.0, there - machine.overlap * stage.context_beside)
        back = max(0.0, back - machine.overlap * 2 * stage.context_beside)
        found.append((there, back + there * stage.context_repeated))
    return found or [(0.0, 0.0)] * len(stages)


def naive_cost(problem: Problem, layout: Layout) -> tuple[float, float]:
    """Seconds of a step and bytes of the fullest rank, by the formulas of the documents."""
    d, p, m = layout.data, layout.pipeline, layout.num_microbatches
    machine, zero = problem.machine, layout.zero_stage
    microbatch = -(-problem.step.samples // (d * m))
    stages = problem.stages(layout, microbatch)
    bandwidth, latency = naive_link(problem, layout, "tp")
    meet = machine.collective_seconds
    talk, answer = (
        [x.sent / bandwidth + x.hops * latency + x.collectives * meet if layout.tensor > 1 else 0.0 for x in messages]
        for messages in ([s.tensor for s in stages], [s.tensor_back for s in stages])
    )
    of_shares = naive_exchange(problem, layout, stages)
    hops = [naive_hop(problem, layout, stage) if p > 1 else (1e300, 0.0) for stage in range(len(stages))]
    # Longest paths through computations, by repeating until nothing moves. A message sets out when its receive has been
    # posted, and the one before it on its way has left.
    order = build(layout.schedule, p, m, layout.num_chunks, layout.extra_in_flight).actions
    ways: dict[tuple[int, int, str], list[tuple[int, str, int]]] = {}
    for actions in order:
        for action in actions:
            if action.kind.value.startswith("SEND"):
                s, kind = action.stage, action.kind.value[-1]
                to = s + 1 if kind == "F" else s - 1
                ways.setdefault((s % p, to % p, kind), []).append((to, kind, action.microbatch))
    before = {message: way[at - 1] if at else None for way in ways.values() for at, message in enumerate(way)}
    left: dict[tuple[int, str, int], float] = {}
    end: dict[tuple[int, str, int], float] = {}
    posted: dict[tuple[int, str, int], float] = {}
    changed = True
    while changed:
        changed = False
        for actions in order:
            free = 0.0
            for action in actions:
                s, (way, _, kind), i = action.stage, action.kind.value.rpartition("_"), action.microbatch
                if way == "RECV":
                    posted[s, kind, i] = free
                if way:
                    continue
                step = 1 if kind == "B" else -1
                ready = free
                if (s, kind, i) in posted:
                    bandwidth, latency = hops[min(s, s + step)]
                    previous = before[s, kind, i]
                    begin = max(end.get((s + step, kind, i), 0.0), posted[s, kind, i])
                    begin = max(begin, left.get(previous, 0.0) if previous else 0.0)
                    share = (
                        microbatch * problem.output / layout.context
                    )  # of ranks that share sequences each sends its own
                    left[s, kind, i] = begin + share / bandwidth
                    ready = max(ready, left[s, kind, i] + latency)
                forward = stages[s].forward + talk[s] + of_shares[s][0]
                backward = 2 * stages[s].forward + stages[s].recomputed
                backward += answer[s] + talk[s] * stages[s].tensor_repeated + of_shares[s][1]
                free = ready + (forward if kind == "F" else backward)
                if end.get((s, kind, i)) != free:
                    end[s, kind, i], changed = free, True
    bandwidth, latency = naive_link(problem, layout, "dp", *(() if zero else ("cp",)))
    rows, wait = naive_link(problem, layout, "cp")
    c, n = layout.context, layout.data if zero else layout.data * layout.context
    k, makespan = problem.step.accumulated, max(end.values())
    finished, fullest = [], 0.0
    for rank, w in enumerate(problem.weights_of(layout)):
        own = stages[rank::p]
        gathers = 2 * k if m == 1 else 1
        times = {0: 2, 1: 2, 2: m * k + 1, 3: m * k + gathers}[zero]
        sending = times * (n - 1) * (w / n / bandwidth + latency) + (times if zero else 1) * meet
        backward = 2 * sum(s.forward for s in own) * (m * k if zero > 1 else 1)
        exposed = max(0.0, sending - machine.overlap * backward) if n > 1 else 0.0
        if zero and c > 1:  # shards of gradients are summed over those that share sequences
            exposed += 2 * (c - 1) * (w / d / c / rows + wait) + meet
        states = 2 * w // (d if zero else 1)
        optimizer = (3 * w / (d if zero else 1) + 2 * states) / machine.memory_bandwidth
        ends = [time for (s, _, _), time in end.items() if s % p == rank]
        finished.append((k - 1) * makespan + max(ends) + exposed + optimizer)
        alive = most = 0
        for action in (each for each in order[rank] if each.kind.value in "FB"):
            alive += (1 if action.kind.value == "F" else -1) * int(stages[action.stage].saved)
            most = max(most, alive)
        usage = problem.held(layout)[rank]
        fullest = max(fullest, usage.parameters + usage.gradients + (usage.optimizer or 0) + most)
    return max(finished), fullest


def check_problem(seed: int) -> None:
    problem = random_problem(seed)
    model = CostModel(Profile(problem), problem.machine, problem.step)
    without = {layout: naive_cost(problem, layout) for layout in naive_layouts(problem)}
    fits = [layout for layout, (_, size) in without.items() if size <= problem.machine.memory]
    chosen = [model.simulate(model.estimate(layout)).layout for layout in fits]  # how many more, is tested elsewhere
    naive = {layout: without[layout] if layout in without else naive_cost(problem, layout) for layout in chosen}
    fitting = sorted(seconds for seconds, _ in naive.values())
    found = search(model, problem.num_ranks, refuse=problem.refuse)
    reasons = ("too few layers", "context parallelism cannot be used", "tensor parallelism cannot be used")
    refused = sum(group.count for group in found.losers if group.reason in reasons)
    too_big = sum(group.count for group in found.losers if group.reason == "does not fit")
    assert found.num_layouts - refused == len(without)
    assert too_big == len(without) - len(fitting)
    assert all(size <= problem.machine.memory for _, size in naive.values())
    assert len(found.best) + sum(group.count for group in found.losers) == found.num_layouts
    assert sorted(cost.seconds or 0.0 for cost in found.best) == pytest.approx(fitting[:5], rel=1e-9)
    for cost in found.best:
        assert (cost.seconds, cost.bytes) == pytest.approx(naive[cost.layout], rel=1e-9)
        assert cost.least <= (cost.seconds or 0.0) * (1 + 1e-12)
    if found.best:
        assert (found.best[0].seconds or 0.0) <= 1.01 * fitting[0]  # the simplest of those that are as good


@pytest.mark.parametrize("seed", range(8))
def test_the_best_are_those_of_evaluating_every_layout(seed: int) -> None:
    check_problem(seed)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(8, 200))
def test_the_best_are_those_of_evaluating_every_layout_on_many_problems(seed: int) -> None:
    check_problem(seed)


# -- formulas ----------------------------------------------------------------------------------------------------------


def flat(number: int = 8, **machine: Any) -> Problem:
    """Equal layers, 16 samples, and links that cost nothing unless they are given."""
    fast = dict.fromkeys(("memory_bandwidth", "node_bandwidth", "network_bandwidth"), 1e30)
    free = {"node_latency": 0.0, "network_latency": 0.0, "overlap": 0.0}
    described = Machine(**{"memory": 1e30, **fast, **free, **machine})
    return Problem((1.0,) * number, (1000,) * number, (100,) * number, 10, 0.5, 4, described, Step(16))


@pytest.mark.parametrize(("chunks", "schedule"), [(1, "1f1b"), (1, "gpipe"), (2, "interleaved_1f1b")])
def test_the_bubble_is_that_of_megatron(chunks: int, schedule: str) -> None:
    problem = flat()
    layout = Layout(1, 1, 4, 8, schedule, chunks)
    model = CostModel(Profile(problem), problem.machine, problem.step)
    cost = model.simulate(model.estimate(layout))
    ideal = 3 * 16 * 8 / 4
    assert cost.seconds == pytest.approx(ideal * (1 + 3 / (chunks * 8)))


@pytest.mark.parametrize(
    ("zero", "microbatches", "passes"), [(0, 1, 2), (0, 4, 2), (1, 4, 2), (2, 4, 5), (3, 4, 5), (3, 1, 3)]
)
def test_replicas_send_what_the_zero_paper_says(zero: int, microbatches: int, passes: int) -> None:
    problem = flat(node_bandwidth=100.0)
    model = CostModel(Profile(problem), problem.machine, problem.step)
    cost = model.estimate(Layout(4, 1, 1, microbatches, zero_stage=zero))
    volume = passes * 3 / 4 * 8000
    assert cost.sent["data"] == pytest.approx(volume)
    assert cost.parts["data-parallel messages"] == pytest.approx(volume / 100)


@pytest.mark.parametrize(
    ("pipeline", "chunks", "messages"), [(2, 4, 4 + 3), (2, 1, 1), (4, 1, 2), (4, 2, 4), (1, 1, 0)]
)
def test_a_rank_sends_activations_forward_and_gradients_back(pipeline: int, chunks: int, messages: int) -> None:
    """Of the fullest rank: each boundary behind one of its stages, and each one before it; 10 bytes for one sample."""
    problem = flat()
    schedule = "interleaved_1f1b" if chunks > 1 else "1f1b"
    model = CostModel(Profile(problem), problem.machine, problem.step)
    cost = model.estimate(Layout(4 // pipeline, 1, pipeline, 4 * pipeline, schedule, chunks))
    assert cost.sent["pipeline"] == 4 * pipeline * messages * 10


def best_of(**machine: Any) -> tuple[Layout, float]:
    problem = flat(ranks_per_node=2, max_tensor=1, **machine)
    model, space = CostModel(Profile(problem), problem.machine, problem.step), SearchSpace(context=(1,))
    found = search(model, 4, refuse=problem.refuse, space=space)
    assert found.best[0].seconds is not None
    return found.best[0].layout, found.best[0].seconds


def test_the_best_layout_is_another_one_where_links_between_nodes_are_slow() -> None:
    """Replicas sum 8000 bytes over the network; two stages, one on each node, send 10 bytes a sample."""
    layout, seconds = best_of()
    assert (layout.data, layout.pipeline, seconds) == (4, 1, pytest.approx(3 * 8 * 16 / 4))
    layout, seconds = best_of(network_bandwidth=100.0)
    assert (layout.data, layout.pipeline, layout.extra_in_flight) == (2, 2, ())
    assert seconds < 96 + 2 * 3 / 4 * 8000 / 100
    layout, far = best_of(network_bandwidth=100.0, network_latency=12.0)
    assert layout.pipeline == 2
    assert any(layout.extra_in_flight)
    assert far < seconds + 3 * 12  # there once, and back once: nearly all others are hidden


def test_more_in_flight_hides_all_but_the_first_and_the_last_message() -> None:
    problem = flat(ranks_per_node=2, network_bandwidth=100.0, network_latency=11.9)
    model = CostModel(Profile(problem), problem.machine, problem.step)
    cost = model.simulate(model.estimate(Layout(2, 1, 2, 8)))
    assert cost.layout.extra_in_flight == (2,)  # 24 s there and back over the 12 s of a microbatch
    # Eight microbatches through two stages of 12 s each, and a message of 10 bytes and its delay in each direction.
    assert cost.seconds == pytest.approx(12 * (8 + 1) + 2 * (11.9 + 0.1))


def test_more_in_flight_is_suggested_as_far_as_there_is_memory() -> None:
    """A stage keeps 400 bytes of a microbatch, and 1F1B two of them on the first rank."""
    slow = {"network_bandwidth": 100.0, "network_latency": 24.0, "ranks_per_node": 2}
    layout = Layout(2, 1, 2, 8)
    for memory, expected in ((1e30, (4,)), (16000 + 5 * 400, (3,)), (16000 + 3.5 * 400, (1,)), (16000 + 900, ())):
        problem = flat(memory=memory, **slow)
        model = CostModel(Profile(problem), problem.machine, problem.step)
        cost = model.simulate(model.estimate(layout))
        assert cost.layout.extra_in_flight == expected
        assert cost.bytes == 16000 + 400 * (2 + sum(expected))


def test_a_layout_names_its_microbatches_in_flight_as_the_argument_does() -> None:
    assert "tuning.extra_in_flight" not in arguments(Layout(1, 1, 2, 8))
    given = arguments(Layout(1, 1, 4, 8, extra_in_flight=(0, 3, 0)))
    assert nested(given)["tuning"] == {"extra_in_flight": [0, 3, 0]}
    assert HybridStrategy(**keywords(given)).settings.extra_of_links(4) == (0, 3, 0)


def test_a_group_that_crosses_nodes_has_the_links_of_the_network() -> None:
    machine = Machine(ranks_per_node=4)
    assert machine.link(1, 4, 8).bandwidth == machine.node_bandwidth
    assert machine.link(1, 8, 8).bandwidth == machine.network_bandwidth
    assert machine.link(4, 2, 8).bandwidth == machine.network_bandwidth
    assert machine.link_between(2, 4, 8, (0, 1)).bandwidth == machine.node_bandwidth  # stages of two ranks each
    assert machine.link_between(2, 4, 8, (1, 2)).bandwidth == machine.network_bandwidth
    assert machine.link(1, 3, 9).bandwidth == machine.network_bandwidth  # of three groups of 3, one crosses


# -- a module ----------------------------------------------------------------------------------------------------------


class Blocks(LightningModule):
    def __init__(self, width: int = 32, depth: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.body = nn.Sequential(
            *(nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True) for _ in range(depth))
        )
        self.last = nn.Linear(width, 3)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.last(self.body(self.first(x))).mean(1), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.randn(32, 6, 8), torch.randint(0, 3, (32,))), 16)


def open_config(**arguments: Any) -> Settings:
    return HybridStrategy(num_microbatches=1, **arguments).settings


def make_profile(cls: type[LightningModule] = Blocks, ranks: int = 4, **kwargs: Any) -> ModuleProfile:
    given = {"machine": Machine(), "precision": Precision(), "contexts": (1,), **kwargs}
    return ModuleProfile(lambda: (cls(), None), open_config(), ranks, **given)


@pytest.fixture(scope="module")
def profile() -> ModuleProfile:
    return make_profile()


@pytest.mark.parametrize(
    "layout",
    [
        Layout(4, 1, 1, zero_stage=3),
        Layout(4, 1, 1, 4, zero_stage=1, recompute=True),
        Layout(1, 1, 4, 16),
        Layout(2, 1, 2, 4, "gpipe", zero_stage=2),
        Layout(2, 1, 2, 8, "interleaved_1f1b", 2, recompute="selective"),
        Layout(2, 2, 1, 2, zero_stage=1),
        Layout(1, 2, 2, 4, recompute=True),
    ],
    ids=str,
)
def test_a_layout_holds_what_the_command_memory_says(profile: ModuleProfile, layout: Layout) -> None:
    check_held(profile, Blocks, layout)


def check_held(profile: ModuleProfile, cls: type[LightningModule], layout: Layout) -> None:
    step = Step(16 * layout.data)  # as many samples for each replica as the loader gives
    found = CostModel(profile, Machine(), step).estimate(layout)
    strategy = HybridStrategy(
        layout.data,
        layout.tensor,
        layout.pipeline,
        num_microbatches=layout.num_microbatches,
        schedule=layout.schedule,
        num_chunks=layout.num_chunks,
        zero_stage=layout.zero_stage,  # type: ignore[arg-type]
        recompute=layout.recompute,
        context_parallel_size=layout.context,
        context_parallel=layout.context_kind,  # type: ignore[arg-type]
        tensor_parallel_mode=layout.tensor_mode,  # type: ignore[arg-type]
        tensor_parallel_depth=layout.tensor_depth,
    )
    expected = dry_run(lambda: (cls(), None), strategy.settings, layout.sizes, precision=Precision())
    for usage, other in zip(found.memory, expected.memory, strict=True):
        assert vars(usage) == pytest.approx(vars(other), rel=1e-6)


class MadeOnMeta(Blocks):
    def __init__(self) -> None:
        LightningModule.__init__(self)

    def configure_model(self) -> None:
        if not hasattr(self, "body"):
            with torch.device("meta"):
                made = Blocks(depth=2)
            self.first, self.body, self.last = made.first, made.body, made.last
            for layer in self.body:
                layer.self_attn.dropout = layer.dropout.p = layer.dropout1.p = layer.dropout2.p = 0.0


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_module_on_the_meta_device_holds_half_as_much_in_half_precision(tensor: int) -> None:
    """Fake tensors, and DTensors of them, cannot be converted."""
    whole, half = (
        dry_run(lambda: (MadeOnMeta(), None), open_config(), Sizes(tensor=tensor), precision=precision).memory[0]
        for precision in (Precision(), HalfPrecision("bf16-true"))
    )
    assert (2 * half.parameters, 2 * half.gradients) == (whole.parameters, whole.gradients)


def test_products_are_counted_as_two_operations_for_each_multiplication(profile: ModuleProfile) -> None:
    width, samples, length = 32, 16, 6
    only_flops = make_profile_with(Machine(flops=1.0, memory_bandwidth=1e30, operation_seconds=0.0))
    whole, halves = (only_flops.stages(Layout(1, tensor, 1), samples)[0] for tensor in (1, 2))
    tokens = samples * length
    in_layers = 8 * (2 * tokens * 12 * width * width + 4 * tokens * length * width)
    around = 2 * tokens * (8 * width + width * 3)
    assert whole.forward == pytest.approx(in_layers + around)
    assert halves.forward == pytest.approx(in_layers / 2 + around)
    # A ring of two: each rank sends half of the sum there, and half of it back; two sums in each layer.
    assert halves.tensor.sent == pytest.approx(8 * 2 * tokens * width * 4)
    assert halves.tensor.collectives == 8 * 2
    assert halves.tensor_back == halves.tensor
    assert whole.tensor == whole.tensor_back == Messages()
    again = only_flops.stages(Layout(1, 1, 1, recompute=True), samples)[0]
    assert again.recomputed == pytest.approx(in_layers)


class Long(Blocks):
    """Layers, and sequences that four ranks can share evenly."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__(depth=depth)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        read = self.body(self.first(x)).softmax(-1)  # of the whole sequence
        return nn.functional.cross_entropy(self.last(read).mean(1), y)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.randn(32, 16, 8), torch.randint(0, 3, (32,))), 16)


@pytest.fixture(scope="module")
def of_long() -> ModuleProfile:
    machine = Machine(flops=1.0, memory_bandwidth=1e30, operation_seconds=0.0)
    return make_profile(Long, machine=machine, contexts=(2, 4))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_shares_of_sequences_send_what_the_papers_say(of_long: ModuleProfile, kind: str, size: int) -> None:
    cost = of_long.stages(Layout(4 // size, 1, 1, context=size, context_kind=kind), 16)[0]
    hidden = 4 * 16 * 16 * 32  # bytes of the hidden states
    around = (size - 1) / size * hidden  # the last layer's output is gathered, and the first one's gradient
    if kind == "ulysses":
        there = back = 2 * 4 * hidden * (size - 1) / size**2
        number = 2 * 4
    else:
        there, number = 2 * 2 * hidden * (size - 1) / size, 2 * (size - 1 if kind == "ring" else 2)
        back = there * (2 * size - 1) / (size - 1) if kind == "ring" else there
    assert cost.context.sent == pytest.approx(there + around)
    assert cost.context_back.sent == pytest.approx(back + around)
    assert cost.context.collectives == number + 1
    again = of_long.stages(Layout(4 // size, 1, 1, recompute=True, context=size, context_kind=kind), 16)[0]
    assert again.context_repeated == pytest.approx(there / (there + around))


class Longer(Long):
    def __init__(self) -> None:
        super().__init__(depth=5)


def test_repeated_layers_on_shares_cost_what_they_would_cost_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    repeat, number = RepeatedLayers._repeat, 0

    def count(self: RepeatedLayers, *args: Any) -> Any:
        nonlocal number
        number += 1
        return repeat(self, *args)

    monkeypatch.setattr(RepeatedLayers, "_repeat", count)
    repeated = make_profile(Longer, contexts=(2, 4))
    layouts = [
        Layout(4 // size, 1, 1, context=size, context_kind=kind, recompute=recompute)
        for size, kind, recompute in itertools.product((2, 4), KINDS, (False, True, "selective"))
    ]
    layouts = [layout for layout in layouts if repeated.refuse(layout) is None]
    found = [[repeated.stages(layout, samples) for samples in (16, 7)] for layout in layouts]
    # Of five layers the first one is given a whole sequence, the second one a share, and the others repeat this one.
    shares = {(layout.context, layout.context_kind) for layout in layouts}  # one forward for all kinds of recomputation
    assert number >= 2 * 3 * len(shares)
    measure = DryRunStrategy._measure
    monkeypatch.setattr(DryRunStrategy, "_measure", lambda self, *args, repeats=False: measure(self, *args))
    every = make_profile(Longer, contexts=(2, 4))
    for layout, of_layout in zip(layouts, found, strict=True):
        assert [every.stages(layout, samples) for samples in (16, 7)] == of_layout, layout
    assert len(layouts) == 14


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_on_shares_compute_and_keep_a_share(of_long: ModuleProfile, kind: str, size: int) -> None:
    (whole,) = of_long.stages(Layout(4, 1, 1), 16)
    assert whole.context == whole.context_back == Messages()
    (shared,) = of_long.stages(Layout(4 // size, 1, 1, context=size, context_kind=kind), 16)
    around = 2 * 16 * 16 * (8 * 32 + 32 * 3)  # products outside of the layers
    assert shared.forward - around == pytest.approx((whole.forward - around) / size)
    attention = 2 * 4 * 16 * 16 * 16 * 32 / size
    assert shared.context_beside == pytest.approx(attention if kind == "ring" else 0)
    most = {"ulysses": 1.1, "ring": 1.1, "all_gather": 1.3}[kind]
    assert 0.75 * whole.saved / size < shared.saved < most * whole.saved / size + 16 * 16 * 32 * 4
    stages = of_long.stages(Layout(2 if size == 2 else 1, 1, 2, 4, context=size, context_kind=kind), 4)
    assert stages[0].output == 4 * 16 * 32 * 4 / size, "each rank sends its share to its neighbour"


@pytest.mark.parametrize(
    "layout",
    [
        Layout(2, 1, 1, 2, zero_stage=2, context=2),
        Layout(1, 1, 2, 4, context=2, context_kind="all_gather", recompute=True),
        Layout(1, 2, 1, context=2, context_kind="ring"),
        Layout(2, 1, 1, 4, context=2, recompute="selective"),
    ],
    ids=str,
)
def test_a_layout_with_shares_of_sequences_holds_what_the_command_memory_says(
    of_long: ModuleProfile, layout: Layout
) -> None:
    check_held(of_long, Long, layout)


def test_what_cannot_be_shared_is_refused(of_long: ModuleProfile) -> None:
    reason, text = of_long.refuse(Layout(1, 1, 1, context=4, context_kind="ring", recompute="selective")) or ("", "")
    assert reason == "context parallelism cannot be used"
    assert "recompute='selective' saves the results of" in text
    unasked = make_profile(Long, contexts=None)
    _, text = unasked.refuse(Layout(1, 1, 1, context=4)) or ("", "")
    assert text.startswith("with 16 positions per sequence, each of 4 ranks has fewer than 1024")


class Blocked(Long):
    """Layers that 16 ranks can share, in a line, squares or a cube."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 64), nn.Linear(64, 3)
        layers = (nn.TransformerEncoderLayer(64, 16, 256, batch_first=True, bias=False) for _ in range(2))
        self.body = nn.Sequential(*layers)


@pytest.fixture(scope="module")
def of_blocked() -> ModuleProfile:
    return make_profile(Blocked, ranks=16)


def arranged(data: int, tensor: int, mode: str, depth: int = 1, **options: Any) -> Layout:
    return Layout(data, tensor, 16 // data // tensor, tensor_mode=mode, tensor_depth=depth, **options)


def ring(size: int, passes: int, num_bytes: float) -> float:
    return passes * (size - 1) / size * num_bytes


@pytest.mark.parametrize(
    ("tensor", "mode", "depth"),
    [
        (4, "2d", 1),
        pytest.param(16, "2d", 1, marks=pytest.mark.thorough),
        (8, "2.5d", 2),
        pytest.param(16, "2.5d", 4, marks=pytest.mark.thorough),
        (8, "3d", 1),
    ],
)
def test_blocks_over_a_grid_send_what_the_papers_say(
    of_blocked: ModuleProfile, tensor: int, mode: str, depth: int
) -> None:
    cost = of_blocked.stages(arranged(16 // tensor, tensor, mode, depth), 16)[0]
    activations, weights = 4 * 16 * 16 * 64, 4 * 12 * 64 * 64
    if mode == "3d":
        edge = 2
        there = (edge - 1) / edge**3 * (16 * activations + weights)
        back = (edge - 1) / edge**3 * (23 * activations + 2 * weights)
    else:
        edge = round((tensor / depth) ** 0.5)
        there = (edge - 1) / edge**2 * (7 * activations / depth + weights)
        back = 2 * there + ring(depth, 2, weights / edge**2)
    whole = ring(tensor, 1, activations)  # where blocks begin, in backward, and where they end
    norms = 2 * 2 * ring(edge, 2, 4 * 16 * 16 * edge / tensor)  # a mean and a variance
    parameters = 2 * ring(tensor // edge, 2, 4 * 64 / edge)  # gradients of the norms' weights
    assert cost.tensor.sent == pytest.approx(2 * (there + whole + norms))
    assert cost.tensor_back.sent == pytest.approx(2 * (back + whole + norms + parameters))


@pytest.mark.parametrize(
    "layout",
    [
        arranged(2, 4, "2d", num_microbatches=4, zero_stage=1),
        pytest.param(arranged(2, 8, "2.5d", 2, recompute=True), marks=pytest.mark.thorough),
        pytest.param(arranged(1, 8, "3d", num_microbatches=2), marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_a_layout_in_blocks_holds_what_the_command_memory_says(of_blocked: ModuleProfile, layout: Layout) -> None:
    check_held(of_blocked, Blocked, layout)


def test_squares_are_chosen_where_many_ranks_share_wide_activations_over_slow_links(of_blocked: ModuleProfile) -> None:
    """In a line each rank sends 15/2 of a layer's activations, however many ranks there are; in a square less.

    With few samples that is less than the weights that a square sends. Several squares send still less, but each has
    the weights: with as much memory as one square needs, they have to split the batch, and send them more often.
    """
    only = SearchSpace(data=(1,), tensor=(16,), pipeline=(1,), context=(1,), recompute=(False,))

    def best(samples: int, memory: float = 1e30) -> tuple[Layout, dict[str, Any]]:
        machine = Machine(memory=memory, ranks_per_node=16, node_bandwidth=1e7, node_latency=0.0)
        model = CostModel(of_blocked, machine, Step(samples))
        costs = {mode: model.estimate(arranged(1, 16, *mode)) for mode in (("1d", 1), ("2d", 1), ("2.5d", 4))}
        return search(model, 16, refuse=of_blocked.refuse, space=only).best[0].layout, costs

    layout, costs = best(4)
    assert layout.tensor_mode == "1d"
    assert costs["1d", 1].sent["tensor"] < costs["2d", 1].sent["tensor"]
    layout, costs = best(24)
    assert (layout.tensor_mode, layout.tensor_depth) == ("2.5d", 4)
    line, square, squares = costs.values()
    assert squares.sent["tensor"] < square.sent["tensor"] < line.sent["tensor"]
    assert square.bytes < squares.bytes < line.bytes
    layout, _ = best(24, (square.bytes + squares.bytes) / 2)
    assert (layout.tensor_mode, layout.num_microbatches) == ("2d", 1)


def test_what_does_not_go_with_blocks_is_refused() -> None:
    config = open_config(sequence_parallel=True)
    profile = ModuleProfile(lambda: (Blocked(), None), config, 4, Machine(), precision=Precision())
    reason, text = profile.refuse(arranged(4, 4, "2d")) or ("", "")
    assert reason == "tensor parallelism cannot be used"
    assert "sequence_parallel=True" in text


class Scanned(Long):
    """A layer has a convolution over time, too."""

    def __init__(self) -> None:
        Blocks.__init__(self, width=16, depth=2)
        self.body = nn.Sequential(nn.Sequential(self.body[0], Convolution()), nn.Sequential(self.body[1]))


def test_sequences_are_shared_only_where_a_run_could() -> None:
    profile = make_profile(Scanned, ranks=2, contexts=(1, 2))
    found = search(CostModel(profile, Machine(), Step(16)), 2, refuse=profile.refuse)
    assert all(cost.layout.context == 1 for cost in found.best)
    (group,) = [group for group in found.losers if group.reason == "context parallelism cannot be used"]
    assert "'body.0' (Sequential). The layer mixes positions" in group.text


def make_profile_with(machine: Machine) -> ModuleProfile:
    return ModuleProfile(lambda: (Blocks(), None), open_config(), 2, machine, precision=Precision())


def test_a_stage_sends_what_its_last_layer_returns(profile: ModuleProfile) -> None:
    stages = profile.stages(Layout(1, 1, 4, 4), 4)
    assert [stage.output for stage in stages[:-1]] == [4 * 6 * 32 * 4] * 3
    assert sum(stage.forward for stage in stages[1:3]) == pytest.approx(2 * stages[1].forward)


def test_measured_forwards_are_those_of_this_machine() -> None:
    measured = make_profile(ranks=1, measure=True)
    (stage,) = measured.stages(Layout(1, 1, 1), 16)
    assert 1e-4 < stage.forward < 10


class Cached(Blocks):
    """Its layers take ten times as long for each sample where these are more than four, by a clock of its own."""

    now = 0.0

    def __init__(self) -> None:
        super().__init__(depth=2)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        def run(layer: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
            type(self).now += len(args[0]) * (10.0 if len(args[0]) > 4 else 1.0)

        handles = [layer.register_forward_hook(run, prepend=True) for layer in self.body]
        try:
            return super().training_step(batch)
        finally:
            for handle in handles:
                handle.remove()


def test_a_small_microbatch_is_measured_and_not_concluded_from_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a batch does not fit into the caches, and its microbatches do."""
    monkeypatch.setattr(traces, "perf_counter", lambda: Cached.now)
    profile = make_profile(Cached, ranks=2, measure=True)

    def seconds(samples: int) -> float:
        return sum(stage.forward for stage in profile.stages(Layout(1, 1, 2), samples))

    assert [seconds(samples) for samples in (1, 2, 4, 8, 16, 32)] == pytest.approx([2, 4, 8, 160, 320, 640])
    assert seconds(3) == pytest.approx(6)  # between two that were measured
    assert seconds(6) == pytest.approx((8 + 160) / 2)


class Normed(Blocks):
    """Batch norm refuses a single sample."""

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        if len(batch[0]) < 4:
            raise ValueError("Expected more than 1 value per channel when training")
        return super().training_step(batch)


def test_what_is_too_small_for_a_module_is_not_timed() -> None:
    profile = make_profile(Normed, ranks=2, measure=True)
    small, least, large = (
        sum(stage.forward for stage in profile.stages(Layout(1, 1, 2), samples)) for samples in (1, 4, 16)
    )
    assert small == least > 0
    assert large > 0


class ByHand(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def test_a_module_that_optimizes_by_hand_is_refused() -> None:
    with pytest.raises(ValueError, match="ByHand uses manual optimization"):
        _ = make_profile(ByHand).batch_size


# -- in copies of the process ------------------------------------------------------------------------------------------

SHARED = [
    Layout(4 // size, size, 1, tensor_mode=mode, tensor_depth=depth)
    for size in (1, 2, 4)
    for mode, depth in arrangements(size)
]


def test_a_step_is_recorded_in_copies_as_it_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    here, ahead = make_profile(Blocked, contexts=(1, 2)), make_profile(Blocked, contexts=(1, 2))
    expected = [here.record_or_error(layout.sharing) for layout in SHARED]
    monkeypatch.setattr(module_profile, "num_processors", lambda: len(SHARED))
    with ahead.recorded_ahead(SHARED):
        monkeypatch.setattr(module_profile, "run_first_step", lambda *_, **__: pytest.fail("it ran here"))
        assert [ahead.record_or_error(layout.sharing) for layout in SHARED] == expected
    assert ahead.divided_shares() == here.divided_shares()


class Fussy(Blocks):
    error: Exception

    def configure_optimizers(self) -> torch.optim.Optimizer:
        strategy = self.trainer.strategy
        assert isinstance(strategy, DryRunStrategy)
        if strategy.sizes.tensor > 1:
            raise self.error
        return super().configure_optimizers()


class Refusing(Fussy):
    error = TypeError("it shares nothing")


class Failing(Fussy):
    error = KeyError("gone")


def test_an_error_in_a_copy_is_the_error_here() -> None:
    plan, layout = {"body.*.linear1": "colwise", "body.*.linear2": "rowwise"}, Layout(2, 2, 1)
    given: Any = {"machine": Machine(), "precision": Precision(), "contexts": (1,)}
    for cls, is_ahead in itertools.product((Refusing, Failing), (False, True)):
        config = open_config(tensor_parallel_plan=plan)
        found = ModuleProfile(lambda cls=cls: (cls(), None), config, 4, **given)  # type: ignore[misc]
        with found.recorded_ahead([layout] if is_ahead else []):
            if cls is Refusing:
                assert found.refuse(layout) == ("tensor parallelism cannot be used", "it shares nothing")
            else:
                with pytest.raises(KeyError, match="gone"):
                    found.refuse(layout)
