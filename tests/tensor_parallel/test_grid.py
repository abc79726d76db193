"""Layers over a grid of ranks against the same layers in one process; what is sent against the papers' formulas."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional as F

from lightning_hybrid.distributed.arrangement import arrange
from lightning_hybrid.distributed.dtensor import full_tensor, is_first_copy, is_sharded, local_gradient
from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.tensor_parallel.grid import blocks
from lightning_hybrid.tensor_parallel.plan import make_plan
from lightning_hybrid.tensor_parallel.shard import shards_of, unshard
from tests.daily import daily
from tests.pool import Pools
from tests.tensor_parallel.groups import CPU, grid_group
from tests.tensor_parallel.test_layers import MODULES, encoder, mlp
from tests.zoo.tensor import OwnBlock

GRIDS = {
    "2d": arrange("2d", 4),
    "2.5d, depth 1": arrange("2.5d", 4, 1),
    "2.5d": arrange("2.5d", 8, 2),
    "3d": arrange("3d", 8),
}
#: Eight ranks on two cores take a while.
EACH_GRID = daily(GRIDS, *(name for name, grid in GRIDS.items() if grid.size <= 4))


class Gated(nn.Module):
    """Two layers with one input, also without a graph; a slope that is infinite at 0; linear layers alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(16, 32), nn.Linear(16, 32, bias=False), nn.Linear(32, 16)
        self.alone, self.other = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = x * 1.0
        with torch.no_grad():
            target = self.pair(h)
        return self.other(self.alone(self.pair(h) - target / 2)).tanh()

    def pair(self, h: Tensor) -> Tensor:
        return self.down((F.silu(self.gate(h)) * self.up(h)).abs().sqrt())


class Cross(nn.Module):
    """Keys and values of other sizes, the batch in the second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, kdim=8, vdim=4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        return self.attention(x, x[:4, :, :8] * 2, x[:4, :, :4] * 3)[0].transpose(0, 1)


class Vocabulary(nn.Module):
    """An embedding, and a head that shares its weight; the loss of shards of the classes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(24, 16), nn.Linear(16, 24, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x.detach()[..., 0] * 100).long() % 24
        logits = self.head(self.embed(tokens) + x)
        return F.cross_entropy(logits.view(-1, 24), tokens.roll(1, -1).flatten(), reduction="none").view(
            *x.shape[:2], 1
        )


#: As for sequence parallelism: in these modes what is in a region is in blocks.
OWN_BLOCK = {
    "block": "sequence_region",
    "block.norm*": "sequence_parallel",
    "block.attention": "divide:num_heads + sequence_gathered",
    "block.attention.[qkv]": "colwise",
    "block.attention.norm": "on_shards",
    "block.attention.proj": "rowwise",
    "block.up": "colwise",
    "block.gate": "colwise",
    "block.down": "rowwise",
}
PLANS: dict[str, tuple[Any, Any]] = {
    "gated": (
        Gated,
        {
            "up": "colwise",
            "gate": "colwise",
            "down": "rowwise",
            "alone": "colwise_gather_output",
            "other": "rowwise_split_input",
        },
    ),
    "own block": (lambda: nn.ModuleDict({"block": OwnBlock()}), OWN_BLOCK),
    "vocabulary": (Vocabulary, "auto"),
    **{name: (make, "auto") for name, make in MODULES.items() if name not in ("unbatched", "other sizes")},
    "other sizes": (Cross, "auto"),
}
#: Of every run, on four ranks.
DAILY = ("gated", "own block", "vocabulary", "encoder", "decoder, sequence first", "mask of heads", "weights")
#: Modules for which any number of samples will do.
ANY_NUMBER = ("gated", "own block", "vocabulary", "encoder", "encoder, sequence first", "mlp", "weights of heads")


def run(module: nn.Module, x: Tensor) -> Any:
    return module["block"](x) if isinstance(module, nn.ModuleDict) else module(x)


def grid_and_dense(name: str, grid: str, samples: int) -> dict[str, Any]:
    """Differences between a module over a grid and the same module on each of its ranks."""
    make, requested = PLANS[name]
    torch.manual_seed(dist.get_rank())  # the values of the first rank count
    shared = make().double()
    torch.manual_seed(0)
    dense = make().double()
    shape = GRIDS[grid]
    mesh, group = grid_group(shape)
    plan = make_plan(shared, requested, shape.size, sequence_parallel=False, arrangement=shape)
    plan.apply(shared, mesh, group, CPU)
    for parameter in shared.parameters():
        if not is_sharded(parameter):
            dist.broadcast(parameter.detach(), 0)
    x = torch.randn(samples, 8, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = []
    for module, leaf in zip((shared, dense), inputs, strict=True):
        torch.manual_seed(3)
        outputs.append(run(module, leaf * 1.0))
        seeds = torch.randn(outputs[0].shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        (outputs[-1] * seeds).sum().backward()
    worst = {"output": float((outputs[0] - outputs[1]).abs().max())}
    worst["input"] = float((inputs[0].grad - inputs[1].grad).abs().max())
    expected, counted = dict(dense.named_parameters()), torch.zeros(())
    for path, parameter in shared.named_parameters():
        gradient = local_gradient(parameter).clone()
        if path in plan.partial_grads:
            dist.all_reduce(gradient)
        full = full_tensor(parameter.grad) if is_sharded(parameter) else gradient
        worst[path] = float((full - expected[path].grad).abs().max())
        worst[f"value of {path}"] = float((unsharded(parameter) - expected[path]).abs().max())
        assert parameter.shape == expected[path].shape
        counted += parameter.to_local().numel() if is_sharded(parameter) and is_first_copy(parameter) else 0
    dist.all_reduce(counted)
    sharded = [parameter for parameter in shared.parameters() if is_sharded(parameter)]
    assert sharded
    assert int(counted) == sum(parameter.numel() for parameter in sharded), "norms count each entry once"
    return worst


def unsharded(parameter: Any) -> Tensor:
    return full_tensor(parameter).detach()


def _layers() -> list[Any]:
    return daily(itertools.product(PLANS, GRIDS), *((name, "2d") for name in DAILY), ("encoder", "2.5d, depth 1"))


@pytest.mark.parametrize(("name", "grid"), _layers())
def test_layers_equal_one_process(ranks: Pools, name: str, grid: str) -> None:
    for samples in (4, 3) if name in ANY_NUMBER else (4,):
        for worst in ranks(GRIDS[grid].size).run(grid_and_dense, name, grid, samples):
            assert all(difference < 1e-12 for difference in worst.values()), worst


# -- what is sent ------------------------------------------------------------------------------------------------------


class SentElements(CommDebugMode):
    """Counts the elements that a rank sends, as over a ring: each passes on all but one part of what is gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = {"gather": 0, "reduce_scatter": 0, "all_reduce": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if "_allgather_base_" in name:
            self.sent["gather"] += args[0].numel() - args[1].numel()
        elif "_reduce_scatter_base_" in name:
            self.sent["reduce_scatter"] += args[1].numel() - args[0].numel()
        elif "allreduce_" in name:
            self.sent["all_reduce"] += sum(tensor.numel() for tensor in args[0])
        return super().__torch_dispatch__(func, types, args, kwargs)


BATCH, LENGTH, WIDTH = 8, 4, 16


def sent_by_products(grid: str) -> list[dict[str, int]]:
    """Of the four linear layers of a transformer layer, forward and backward."""
    shape = GRIDS[grid]
    _, group = grid_group(shape)
    assert isinstance(group, blocks.Grid)
    sizes = [(WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)]
    found: list[dict[str, int]] = []
    layers = []
    for number, (width, features) in enumerate(sizes):
        source, target = (shape.outer, shape.inner) if number % 2 == 0 else (shape.inner, shape.outer)
        x = torch.randn(
            BATCH // shape.parts(source.rows), LENGTH, width // shape.parts([source.features]), requires_grad=True
        )
        of_output, of_input = map(shape.parts, blocks.weight_axes(shape, target))
        weight = torch.randn(features // of_output, width // of_input, requires_grad=True)
        layers.append((x, weight, {"source": source, "target": target}))
    with SentElements() as forward:
        outputs = [blocks.block_linear(x, w, None, group, **layouts, rows_dim=0) for x, w, layouts in layers]
    with SentElements() as backward:
        torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
    found += [forward.sent, backward.sent]
    return found


def formulas(grid: str) -> list[dict[str, float]]:
    """Elements that a rank sends: of activations 7 bsh go in and 9 bsh come out, of weights there are 12 h^2."""
    shape = GRIDS[grid]
    edge, depth = dict(shape.axes)[shape.outer.features], dict(shape.axes).get("depth", 1)
    bsh, weights = BATCH * LENGTH * WIDTH, 12 * WIDTH**2
    if shape.mode == "3d":  # Bian et al., algorithms 1 and 2
        share = (edge - 1) / edge**3
        forward = {"gather": share * (7 * bsh + weights), "reduce_scatter": share * 9 * bsh, "all_reduce": 0}
        backward = {
            "gather": share * (9 * bsh + weights + 7 * bsh),
            "reduce_scatter": share * (7 * bsh + weights),
            "all_reduce": 0,
        }
        return [forward, backward]
    # Xu et al., table 1: what log p / 2 broadcasts along trees send, each rank passes on here; backward twice as much.
    share = (edge - 1) / edge**2
    once = share * (7 * bsh / depth + weights)
    # Wang et al.: where there are several depths, gradients of weights are summed over them.
    copies = weights / edge**2 if depth > 1 else 0
    return [
        {"gather": once, "reduce_scatter": 0, "all_reduce": 0},
        {"gather": once, "reduce_scatter": once, "all_reduce": copies},
    ]


@pytest.mark.parametrize("grid", EACH_GRID)
def test_what_is_sent_is_what_the_papers_say(ranks: Pools, grid: str) -> None:
    expected = formulas(grid)
    assert all(math.isclose(value, round(value)) for each in expected for value in each.values())
    for found in ranks(GRIDS[grid].size).run(sent_by_products, grid):
        assert found == expected


# -- without any process -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grid", GRIDS)
def test_parameters_lie_in_blocks(grid: str) -> None:
    shape = GRIDS[grid]
    module = nn.Sequential(encoder(batch_first=True), mlp(), nn.MultiheadAttention(16, 4, kdim=8, vdim=8))
    plan = make_plan(module, "auto", shape.size, sequence_parallel=False, arrangement=shape)
    assert not plan.reasons
    edge = dict(shape.axes)[shape.outer.features]
    for name, split in plan.param_splits().items():
        full = module.get_parameter(name).detach()
        shards = shards_of(full, split, shape.size)
        assert torch.equal(unshard(shards, split), full)
        assert list(shards[0].shape) == split.local_shape(full.shape, shape.size)
        powers = (1, 2) if full.dim() == 1 else (3,) if shape.mode == "3d" else (2,)
        assert full.numel() // shards[0].numel() in [edge**power for power in powers]


@pytest.mark.parametrize(
    ("make", "requested", "words"),
    [
        (mlp, {"0": "narrow_input:x"}, "Use one of colwise, "),
        (mlp, {"0": "sequence_parallel"}, "which tensor_parallel_mode='2d' does not support"),
        (lambda: nn.Sequential(nn.LayerNorm(16)), {"0": "sequence_parallel"}, "works only inside another module"),
        (
            lambda: nn.Sequential(nn.Sequential(nn.LayerNorm([4, 16], elementwise_affine=False))),
            {"0": "sequence_region", "0.0": "sequence_parallel"},
            r"normalizes over dimensions of sizes \[4, 16\]",
        ),
        (lambda: nn.Sequential(OwnBlock()), {"0.attention": "divide:num_heads"}, "works only inside another module"),
        (lambda: nn.Sequential(nn.Linear(16, 15)), {"0": "colwise"}, "whose dimension 0 cannot be split into 2"),
        (lambda: nn.Sequential(nn.Linear(15, 16)), {"0": "colwise"}, "whose dimension 1 cannot be split into 2"),
        (
            lambda: nn.Sequential(nn.MultiheadAttention(9, 3)),
            {"0": "attention"},
            "3 heads, which cannot be divided over 2",
        ),
    ],
)
def test_what_no_grid_can_do_is_refused(make: Any, requested: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_plan(make(), requested, 4, sequence_parallel=False, arrangement=GRIDS["2d"])


def test_blocks_of_other_packages_stay_whole() -> None:
    plan = make_plan(nn.Sequential(OwnBlock()), "auto", 4, sequence_parallel=False, arrangement=GRIDS["2d"])
    assert plan.rows == ()


def refusals() -> list[str]:
    shape = GRIDS["2d"]
    mesh, group = grid_group(shape)
    module = nn.ModuleDict({"attention": nn.MultiheadAttention(16, 4), "pair": mlp()})
    make_plan(module, "auto", 4, sequence_parallel=False, arrangement=shape).apply(module, mesh, group, CPU)
    found = []
    x = torch.randn(8, 16)
    with pytest.raises(WrongUseError) as error:
        module["attention"](x, x, x)
    found.append(str(error.value))
    with pytest.raises(WrongUseError) as error:
        module["pair"](x[0])
    found.append(str(error.value))
    with pytest.raises(WrongUseError) as error:
        module["pair"][3](torch.randn(4, 16))
    found.append(str(error.value))
    return found


def test_calls_that_no_grid_can_do_are_refused(ranks: Pools) -> None:
    for found in ranks(4).run(refusals):
        assert "without a batch dimension" in found[0]
        assert "without a batch dimension" in found[1]
        assert "no column-wise layer produced" in found[2]
