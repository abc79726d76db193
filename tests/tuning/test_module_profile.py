"""The costs of a module under a layout are those of a run, without processes and devices."""

from __future__ import annotations

import itertools
from dataclasses import replace
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
from lightning_hybrid.tensor_parallel.context_parallel.attention import KINDS
from lightning_hybrid.tuning import module_profile
from lightning_hybrid.tuning.arguments import every_argument, in_words
from lightning_hybrid.tuning.candidates import Layout, Step, arrangements
from lightning_hybrid.tuning.cost_model import CostModel, StageCost
from lightning_hybrid.tuning.dry_run import traces
from lightning_hybrid.tuning.dry_run.dry_run import DryRunStrategy, dry_run
from lightning_hybrid.tuning.dry_run.repeated_layers import RepeatedLayers
from lightning_hybrid.tuning.machine import Machine
from lightning_hybrid.tuning.messages import NO_EXCHANGE
from lightning_hybrid.tuning.module_profile import ModuleProfile
from lightning_hybrid.tuning.search import search
from lightning_hybrid.tuning.search_space import SearchSpace
from tests.zoo.context import Convolution


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
    step = Step(16 * layout.data)  # one batch of the loader for each replica
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
        expert_parallel_size=layout.experts,
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
    assert halves.tensor.forward.sent == pytest.approx(8 * 2 * tokens * width * 4)
    assert halves.tensor.forward.collectives == 8 * 2
    assert halves.tensor.backward == halves.tensor.forward
    assert whole.tensor == NO_EXCHANGE
    again = only_flops.stages(Layout(1, 1, 1, recompute=True), samples)[0]
    assert again.recomputed == pytest.approx(in_layers)


class Long(Blocks):
    """Layers on sequences that can be sharded evenly over four ranks."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__(depth=depth)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        read = self.body(self.first(x)).softmax(-1)  # reads the full sequence
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
    assert cost.context.forward.sent == pytest.approx(there + around)
    assert cost.context.backward.sent == pytest.approx(back + around)
    assert cost.context.forward.collectives == number + 1
    again = of_long.stages(Layout(4 // size, 1, 1, recompute=True, context=size, context_kind=kind), 16)[0]
    assert again.context.repeated_share == pytest.approx(there / (there + around))


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
    # The first of five layers receives the full sequence, the second a shard, and the others repeat the second.
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
    assert whole.context == NO_EXCHANGE
    (shared,) = of_long.stages(Layout(4 // size, 1, 1, context=size, context_kind=kind), 16)
    around = 2 * 16 * 16 * (8 * 32 + 32 * 3)  # products outside of the layers
    assert shared.forward - around == pytest.approx((whole.forward - around) / size)
    attention = 2 * 4 * 16 * 16 * 16 * 32 / size
    assert shared.overlappable == pytest.approx(attention if kind == "ring" else 0)
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
    """Layers that support 16 tensor-parallel ranks in a line, and grids with two and three dimensions."""

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
    whole = ring(tensor, 1, activations)  # at the beginning of the layers, in the backward, and at their end
    norms = 2 * 2 * ring(edge, 2, 4 * 16 * 16 * edge / tensor)  # a mean and a variance
    parameters = 2 * ring(tensor // edge, 2, 4 * 64 / edge)  # gradients of the norms' weights
    assert cost.tensor.forward.sent == pytest.approx(2 * (there + whole + norms))
    assert cost.tensor.backward.sent == pytest.approx(2 * (back + whole + norms + parameters))


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
    """In a line, each rank sends 15/2 of a layer's activations for any number of ranks; in a square, less.

    With few samples, this is less than the weights that a square sends. Several squares send even less, but each of
    them holds all weights. With the memory that one square needs, they have to split the batch, and send more often.
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
    """A layer that also has a convolution over time."""

    def __init__(self) -> None:
        Blocks.__init__(self, width=16, depth=2)
        self.body = nn.Sequential(nn.Sequential(self.body[0], Convolution()), nn.Sequential(self.body[1]))


def test_sequences_are_shared_only_where_a_run_could() -> None:
    profile = make_profile(Scanned, ranks=2, contexts=(1, 2))
    found = search(CostModel(profile, Machine(), Step(16)), 2, refuse=profile.refuse)
    assert all(cost.layout.context == 1 for cost in found.best)
    (group,) = [group for group in found.rejected if group.reason == "context parallelism cannot be used"]
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
    """With more than four samples, each sample takes ten times as long, by a clock of this class."""

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
    """For example, a batch does not fit into the caches, but its microbatches do."""
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


# -- layers of which only some are recomputed --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_stages() -> ModuleProfile:
    return make_profile(ranks=2)


def test_some_layers_save_and_take_what_is_between_none_and_all(two_stages: ModuleProfile) -> None:
    model = CostModel(two_stages, Machine(), Step(32))
    layout = Layout(1, 1, 2, 4)
    numbers = (0, 1, 3, 4)
    assert two_stages.num_layers(layout) == [4, 4]
    none, one, three, every = (model.stages(replace(layout, recompute=(number, number))) for number in numbers)
    for kind, same in ((False, none), (True, every)):
        for alike, expected in zip(same, model.stages(replace(layout, recompute=kind)), strict=True):
            assert figures_of(alike) == pytest.approx(figures_of(expected), rel=0.05)
    for low, high in ((none, one), (one, three), (three, every)):
        assert all(less.saved > more.saved for less, more in zip(low, high, strict=True))
        assert all(less.recomputed < more.recomputed for less, more in zip(low, high, strict=True))


def figures_of(cost: StageCost) -> dict[str, float]:
    return {name: value for name, value in vars(cost).items() if isinstance(value, (int, float))}


def test_as_few_layers_run_again_as_fit(two_stages: ModuleProfile) -> None:
    layout, step = Layout(1, 1, 2, 4), Step(32)
    unlimited = CostModel(two_stages, Machine(), step)
    whole, least = (unlimited.estimate(replace(layout, recompute=kind)).bytes for kind in (False, True))
    found = CostModel(two_stages, Machine(memory=(whole + least) / 2), step).fewest_recomputed(layout)
    assert found is not None
    assert isinstance(found.recompute, tuple)
    assert 0 < found.recompute[0] < 4, "the first stage has more microbatches in flight"
    assert found.recompute[1] < found.recompute[0]
    assert unlimited.estimate(found).bytes <= (whole + least) / 2
    fewer = replace(found, recompute=(found.recompute[0] - 1, found.recompute[1]))
    assert unlimited.estimate(fewer).bytes > (whole + least) / 2
    assert CostModel(two_stages, Machine(memory=least / 2), step).fewest_recomputed(layout) is None
    assert in_words(found).endswith(f"recompute layers {found.recompute[0]},{found.recompute[1]}")
    assert every_argument(found)["recompute"] == list(found.recompute)


# -- in copies of the process ------------------------------------------------------------------------------------------

SHARED = [
    Layout(4 // size, size, 1, tensor_mode=mode, tensor_depth=depth)
    for size in (1, 2, 4)
    for mode, depth in arrangements(size)
]


def test_a_step_is_recorded_in_copies_as_it_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    here, ahead = make_profile(Blocked, contexts=(1, 2)), make_profile(Blocked, contexts=(1, 2))
    expected = [here.record_or_error(layout.tensor_key) for layout in SHARED]
    monkeypatch.setattr(module_profile, "num_processors", lambda: len(SHARED))
    with ahead.recorded_ahead(SHARED):
        monkeypatch.setattr(module_profile, "run_first_step", lambda *_, **__: pytest.fail("it ran here"))
        assert [ahead.record_or_error(layout.tensor_key) for layout in SHARED] == expected
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
