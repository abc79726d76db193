"""The suggested layouts are the fastest ones that fit, and their costs follow the documented formulas."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from lightning_hybrid import HybridStrategy
from lightning_hybrid.memory.account import MemoryUsage
from lightning_hybrid.pipeline_parallel.schedules import build
from lightning_hybrid.tuning.arguments import arguments, keywords, nested
from lightning_hybrid.tuning.candidates import Layout, LoaderStep, Step
from lightning_hybrid.tuning.cost_model import CostModel, StageCost
from lightning_hybrid.tuning.machine import Machine
from lightning_hybrid.tuning.messages import Exchange, Messages
from lightning_hybrid.tuning.search import UNATTENDED, search
from lightning_hybrid.tuning.search_space import SearchSpace

# -- the search against all layouts, evaluated one by one by other code ------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """A made-up module whose layers have their own costs, the ranks, and the machine."""

    seconds: tuple[float, ...]  # seconds of a forward with one sample
    weights: tuple[int, ...]  # bytes of parameters, and the same number of bytes of gradients
    saved: tuple[int, ...]  # bytes of activations of one sample
    output: int
    keys_kept: float  # bytes of gathered keys and values, as a share of the saved bytes
    num_ranks: int
    machine: Machine
    step: Step

    def refuse(self, layout: Layout) -> tuple[str, str] | None:
        if layout.pipeline * layout.num_chunks > len(self.seconds):
            return "too few layers", "so few"
        if layout.tensor_mode == "3d" and self.output % 2:
            return "tensor parallelism cannot be used", "in no cube"
        if layout.context_kind == "ulysses":
            is_possible = 12 // layout.tensor % layout.context == 0  # heads per rank
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
                    tensor=Exchange(tensor, tensor_back, tensor.sent if layout.recompute is True else 0.0),
                    context=Exchange(there, back, there.sent if layout.recompute else 0.0),
                    overlappable=forward / 3 if layout.context_kind == "ring" else 0.0,
                )
            )
        return costs

    def tensor_messages(self, layout: Layout, num_bytes: float, layers: list[int]) -> tuple[Messages, Messages]:
        """Return the tensor-parallel messages of transformer layers by the documented table."""
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
        """Return the context-parallel messages of layers by the documented table, for bytes of hidden states."""
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
        d, zero = layout.zero_size or layout.data, layout.zero_stage
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
    """Return the arrangements found by trying every number of ranks along three axes."""
    found = [("1d", 1)]
    for depth, edge in itertools.product(range(1, tensor + 1), range(2, tensor + 1)):
        if depth * edge * edge == tensor and context == 1:
            found.append(("2.5d", depth) if depth > 1 else ("2d", 1))
            found += [("3d", 1)] if depth == edge else []
    return found


def naive_layouts(problem: Problem) -> list[Layout]:
    """Return all combinations of arguments, without invalid ones."""
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
        zeros = [(stage, None) for stage in range(4)]
        order = problem.step.rank_order
        order = order if "cp" in order else order.replace("tp", "cp-tp")
        of_axes = {"dp": data, "tp": tensor, "pp": pipeline, "cp": context}
        apart = math.prod(of_axes[name] for name in order.split("-")[order.split("-").index("dp") + 1 :])
        beside = machine.ranks_per_node // apart
        if 1 < beside < data and data % beside == 0:
            zeros += [(stage, beside) for stage in (1, 2, 3)]
        every = itertools.product(powers, schedules, zeros, (False, "selective", True), kinds, modes)
        for number, (schedule, chunks), (zero, zero_size), again, kind, mode in every:
            if (pipeline == 1 and schedule != "1f1b") or pipeline * chunks > len(problem.seconds):
                continue
            if (data == 1 and zero) or (kind != "ulysses" and (context == 1 or again == "selective")):
                continue
            if kind == "ulysses" and 12 // tensor % context:
                continue
            if mode == ("3d", 1) and problem.output % 2:
                continue
            options = number, schedule, chunks, zero, again, ()
            found.append(Layout(data, tensor, pipeline, *options, context, kind, *mode, zero_size))
    return found


def coordinates_of(problem: Problem, layout: Layout) -> list[dict[str, int]]:
    """Return the coordinates of each rank."""
    sizes = {"dp": layout.data, "tp": layout.tensor, "pp": layout.pipeline, "cp": layout.context}
    order = problem.step.rank_order
    coordinates: list[dict[str, int]] = [{}]
    for name in (order if "cp" in order else order.replace("tp", "cp-tp")).split("-"):  # from the outermost axis
        coordinates = [{**each, name: at} for each in coordinates for at in range(sizes[name])]
    for each in coordinates:
        each["equal"], each["shards"] = divmod(each.pop("dp"), layout.zero_size or layout.data)
    return coordinates


def naive_link(problem: Problem, layout: Layout, *axes: str) -> tuple[float, float]:
    """Return bandwidth and latency, from the coordinates of all ranks of a group."""
    nodes: dict[tuple[tuple[str, int], ...], set[int]] = {}
    for rank, each in enumerate(coordinates_of(problem, layout)):
        group = tuple(sorted((name, at) for name, at in each.items() if name not in axes))
        nodes.setdefault(group, set()).add(rank // problem.machine.ranks_per_node)
    machine = problem.machine
    if any(len(each) > 1 for each in nodes.values()):
        return machine.network_bandwidth, machine.network_latency
    return machine.node_bandwidth, machine.node_latency


def naive_hop(problem: Problem, layout: Layout, stage: int) -> tuple[float, float]:
    """Return bandwidth and latency between a stage and the next one, from the coordinates of each pair of ranks."""
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
    """Return the seconds of context-parallel messages in a forward and in a backward of each stage."""
    machine, (bandwidth, latency) = problem.machine, naive_link(problem, layout, "cp")
    found = []
    for stage in stages if layout.context > 1 else ():
        there, back = (
            each.sent / bandwidth + each.hops * latency + each.collectives * machine.collective_seconds
            for each in (stage.context.forward, stage.context.backward)
        )
        there = max(0.0, there - machine.overlap * stage.overlappable)
        back = max(0.0, back - machine.overlap * 2 * stage.overlappable)
        found.append((there, back + there * stage.context.repeated_share))
    return found or [(0.0, 0.0)] * len(stages)


def naive_cost(problem: Problem, layout: Layout) -> tuple[float, float]:
    """Return the seconds of a step and the highest memory of a rank, by the documented formulas."""
    d, p, m = layout.data, layout.pipeline, layout.num_microbatches
    machine, zero = problem.machine, layout.zero_stage
    microbatch = -(-problem.step.samples // (d * m))
    stages = problem.stages(layout, microbatch)
    bandwidth, latency = naive_link(problem, layout, "tp")
    meet = machine.collective_seconds
    talk, answer = (
        [x.sent / bandwidth + x.hops * latency + x.collectives * meet if layout.tensor > 1 else 0.0 for x in messages]
        for messages in ([s.tensor.forward for s in stages], [s.tensor.backward for s in stages])
    )
    of_shares = naive_exchange(problem, layout, stages)
    hops = [naive_hop(problem, layout, stage) if p > 1 else (1e300, 0.0) for stage in range(len(stages))]
    # Longest paths through computations, by repetition until nothing changes. A message is sent when its receive has
    # been posted, and the previous message on the same link has been sent.
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
                    shard = microbatch * problem.output / layout.context
                    left[s, kind, i] = begin + shard / bandwidth
                    ready = max(ready, left[s, kind, i] + latency)
                forward = stages[s].forward + talk[s] + of_shares[s][0]
                backward = 2 * stages[s].forward + stages[s].recomputed
                backward += answer[s] + talk[s] * stages[s].tensor.repeated_share + of_shares[s][1]
                free = ready + (forward if kind == "F" else backward)
                if end.get((s, kind, i)) != free:
                    end[s, kind, i], changed = free, True
    bandwidth, latency = naive_link(problem, layout, "shards", *(() if zero else ("cp", "equal")))
    rows, wait = naive_link(problem, layout, "cp", "equal")
    shards = (layout.zero_size or layout.data) if zero else 1
    c, n = layout.context * layout.data // shards, shards if zero else layout.data * layout.context
    k, makespan = problem.step.accumulated, max(end.values())
    finished, fullest = [], 0.0
    for rank, w in enumerate(problem.weights_of(layout)):
        own = stages[rank::p]
        gathers = 2 * k if m == 1 else 1
        times = {0: 2, 1: 2, 2: m * k + 1, 3: m * k + gathers}[zero]
        sending = times * (n - 1) * (w / n / bandwidth + latency) + (times if zero else 1) * meet
        backward = 2 * sum(s.forward for s in own) * (m * k if zero > 1 else 1)
        exposed = max(0.0, sending - machine.overlap * backward) if n > 1 else 0.0
        if zero and c > 1:  # shards of gradients are summed over the ranks with equal shards
            exposed += 2 * (c - 1) * (w / shards / c / rows + wait) + meet
        states = 2 * w // shards
        optimizer = (3 * w / shards + 2 * states) / machine.memory_bandwidth
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
    chosen = [
        model.simulate(model.estimate(layout)).layout for layout in fits
    ]  # other tests check the extra microbatches in flight
    naive = {layout: without[layout] if layout in without else naive_cost(problem, layout) for layout in chosen}
    fitting = sorted(seconds for seconds, _ in naive.values())
    found = search(model, problem.num_ranks, refuse=problem.refuse)
    reasons = ("too few layers", "context parallelism cannot be used", "tensor parallelism cannot be used")
    refused = sum(group.count for group in found.rejected if group.reason in reasons)
    too_big = sum(group.count for group in found.rejected if group.reason == "does not fit")
    assert found.num_layouts - refused == len(without)
    assert too_big == len(without) - len(fitting)
    assert all(size <= problem.machine.memory for _, size in naive.values())
    assert len(found.best) + sum(group.count for group in found.rejected) == found.num_layouts
    assert sorted(cost.seconds or 0.0 for cost in found.best) == pytest.approx(fitting[:5], rel=1e-9)
    for cost in found.best:
        assert (cost.seconds, cost.bytes) == pytest.approx(naive[cost.layout], rel=1e-9)
        assert cost.least <= (cost.seconds or 0.0) * (1 + 1e-12)
    if found.best:
        assert (found.best[0].seconds or 0.0) <= 1.01 * fitting[0]  # the simplest one if times differ little


@pytest.mark.parametrize("seed", range(8))
def test_the_best_are_those_of_evaluating_every_layout(seed: int) -> None:
    check_problem(seed)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(8, 200))
def test_the_best_are_those_of_evaluating_every_layout_on_many_problems(seed: int) -> None:
    check_problem(seed)


# -- formulas ----------------------------------------------------------------------------------------------------------


def flat(number: int = 8, **machine: Any) -> Problem:
    """Return a problem with equal layers, 16 samples, and links that are free unless their figures are given."""
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


@pytest.mark.parametrize("context", [1, 2])
def test_hybrid_sharding_gathers_in_a_node_and_sums_shards_between_nodes(context: int) -> None:
    """ZeRO 3 over 2 of 4 replicas: all but the sum of the shards' gradients is sent within a node."""
    problem = flat(node_bandwidth=1000.0, network_bandwidth=10.0, ranks_per_node=2 * context)
    model = CostModel(Profile(problem), problem.machine, problem.step)
    hybrid, whole = (
        model.estimate(Layout(4, 1, 1, 4, zero_stage=3, context=context, zero_size=size)) for size in (2, None)
    )
    gathered, equal = 5 / 2 * 8000, 2 * context
    summed = 2 * (equal - 1) / equal * 8000 / 2
    assert hybrid.sent["data"] == pytest.approx(gathered + summed)
    assert hybrid.parts["data-parallel messages"] == pytest.approx(gathered / 1000 + summed / 10)
    assert whole.parts["data-parallel messages"] > 4 * hybrid.parts["data-parallel messages"]


@pytest.mark.parametrize(
    ("pipeline", "chunks", "messages"), [(2, 4, 4 + 3), (2, 1, 1), (4, 1, 2), (4, 2, 4), (1, 1, 0)]
)
def test_a_rank_sends_activations_forward_and_gradients_back(pipeline: int, chunks: int, messages: int) -> None:
    """The busiest rank sends over each boundary after one of its stages and before it; a sample has 10 bytes."""
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
    assert far < seconds + 3 * 12  # once in each direction: almost all other messages are hidden


def test_more_in_flight_hides_all_but_the_first_and_the_last_message() -> None:
    problem = flat(ranks_per_node=2, network_bandwidth=100.0, network_latency=11.9)
    model = CostModel(Profile(problem), problem.machine, problem.step)
    cost = model.simulate(model.estimate(Layout(2, 1, 2, 8)))
    assert cost.layout.extra_in_flight == (2,)  # 24 s in both directions, divided by 12 s of a microbatch
    # Eight microbatches through two stages of 12 s each, and a message of 10 bytes and its delay in each direction.
    assert cost.seconds == pytest.approx(12 * (8 + 1) + 2 * (11.9 + 0.1))


def test_more_in_flight_is_suggested_as_far_as_there_is_memory() -> None:
    """A stage saves 400 bytes for a microbatch, and the first rank holds two microbatches with 1F1B."""
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
    assert (
        machine.link(1, 3, 9).bandwidth == machine.network_bandwidth
    )  # one of three groups of 3 ranks is on two nodes


# -- steps of different sizes, and options -----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_of_steps_of_different_size_the_time_of_a_sample_counts(seed: int) -> None:
    """The best is the same as with separate searches for each number of replicas, where all steps have equal sizes."""
    problem = random_problem(seed)
    step = LoaderStep(problem.step.samples, problem.step.accumulated, problem.step.rank_order)
    found = search(CostModel(Profile(problem), problem.machine, step), problem.num_ranks, refuse=problem.refuse)
    alone = []
    for data in (size for size in range(1, problem.num_ranks + 1) if problem.num_ranks % size == 0):
        fixed = Step(step.samples * data, step.accumulated, step.rank_order)
        model = CostModel(Profile(problem), problem.machine, fixed)
        of_data = search(model, problem.num_ranks, refuse=problem.refuse, space=SearchSpace(data=(data,)))
        alone += [(cost.seconds or 0.0) / (step.samples * data * step.accumulated) for cost in of_data.best]
    assert [cost.seconds_of_sample for cost in found.best] == pytest.approx(sorted(alone)[: len(found.best)], rel=0.011)


@pytest.mark.parametrize("seed", range(5))
def test_an_option_has_to_be_worth_it(seed: int) -> None:
    problem = random_problem(seed)
    model = CostModel(Profile(problem), problem.machine, LoaderStep(problem.step.samples))
    first, *others = search(model, problem.num_ranks, refuse=problem.refuse, **UNATTENDED).best
    fastest = min(cost.seconds_of_sample for cost in (first, *others))
    assert first.seconds_of_sample <= 1.05 * fastest

    def options(layout: Layout) -> int:
        flags = bool(layout.recompute), bool(layout.extra_in_flight), layout.context > 1, layout.tensor_mode != "1d"
        return layout.zero_stage + layout.num_chunks + sum(flags) + bool(layout.zero_size)

    for cost in others:
        assert options(cost.layout) >= options(first.layout) or cost.seconds_of_sample > 1.0499 * fastest
