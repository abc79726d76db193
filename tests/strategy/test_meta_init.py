"""Weights do not depend on the layout, and no rank makes more of them than its own and one layer."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_hybrid.distributed.dtensor import full_tensor
from lightning_hybrid.pipeline_parallel.placeholders import replace_with_placeholders
from lightning_hybrid.pipeline_parallel.schedules import Placement
from lightning_hybrid.pipeline_parallel.stage_map import StageMap
from lightning_hybrid.strategy.meta_init import Initialization, lacks_values
from tests.daily import daily
from tests.pool import Pools
from tests.training_jobs import PP2, Losses, Regression, assert_same, loader, make_trainer
from tests.zoo import tensor as zoo

Layout = Mapping[str, Any]
CPU = torch.device("cpu")
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2": (2, {"pipeline_parallel_size": 2}),
    "tp2": (2, {"tensor_parallel_size": 2}),
    "dp2": (2, {}),
    "tp2 pp2": (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    "tp2 pp2 units": (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "body": ["body"]}),
    "dp2 pp2 chunks 2": (4, {"pipeline_parallel_size": 2, "num_chunks": 2, "schedule": "interleaved_1f1b"}),
}


class Scaled(nn.Module):
    """A layer of a user's own, with what lies inside of it, a table and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(zoo.DIM, 16), nn.GELU(), nn.Linear(16, zoo.DIM))
        self.gain = nn.Parameter(torch.empty(zoo.DIM))
        self.gain.no_weight_decay = True  # type: ignore[attr-defined]
        self.shift = nn.Parameter(torch.empty(zoo.DIM), requires_grad=False)
        self.register_buffer("table", torch.empty(3, dtype=torch.long), persistent=False)
        self.register_buffer("on", torch.empty((), dtype=torch.bool))

    def reset_parameters(self) -> None:
        self.mlp[2].weight.mul_(0.5)  # type: ignore[operator]
        self.gain.data.uniform_(0.5, 1.5)  # torch does not count this as a change
        nn.init.normal_(self.shift)
        self.table = torch.arange(3)
        self.on.fill_(True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x) * self.gain + self.shift


class FromMeta(zoo.TiedWords):
    """Layers of many kinds without values: attention, recurrent and normalising ones, tied and frozen parameters."""

    def build(self) -> None:
        pass

    def configure_model(self) -> None:
        if hasattr(self, "body"):
            return
        with torch.device("meta"):
            self.embed = nn.Embedding(zoo.TOKENS, zoo.DIM)
            self.positions = nn.Parameter(torch.empty(zoo.LENGTH, zoo.DIM))
            self.body = nn.Sequential(
                nn.TransformerEncoderLayer(zoo.DIM, zoo.HEADS, 32, 0.0, batch_first=True, norm_first=True),
                Scaled(),
                nn.Sequential(Recurrent(), nn.LayerNorm(zoo.DIM)),
                nn.TransformerEncoderLayer(zoo.DIM, zoo.HEADS, 32, 0.0, batch_first=True),
                Scaled(),
                Scaled(),
            )
            self.head = nn.Linear(zoo.DIM, zoo.TOKENS)
        self.head.weight = self.embed.weight
        self.body[5].mlp[0].weight = self.body[1].mlp[0].weight  # type: ignore[union-attr,index]
        self.body[3].linear1.requires_grad_(False)  # type: ignore[union-attr]
        self.double()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.positions, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.embed(tokens) + self.positions))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(zoo.DIM, zoo.DIM, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


class AtStart(Callback):
    """Keeps the tensors of the first moment, and the random state."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        self.tensors = {name: full_tensor(x.detach()).clone() for name, x in named if not x.is_meta}
        self.ties = [name for name, x in named if any(x is other for before, other in named if before < name)]
        self.flags = {name: (x.requires_grad, getattr(x, "no_weight_decay", None)) for name, x in named}
        self.draw = torch.rand(3)


def started(kind: type[zoo.Example], layout: Layout, seed: int = 3, batch_size: int = 8) -> dict[str, Any]:
    start, losses = AtStart(), Losses()
    torch.manual_seed(seed)
    module = kind(batch_size=batch_size)
    trainer = make_trainer(layout, max_steps=3, callbacks=[start, losses])
    trainer.fit(module)
    loss = [float(trainer.strategy.reduce(torch.tensor(value, dtype=torch.float64))) for value in losses.values]
    kept = ("tensors", "ties", "flags", "draw")
    return {**{name: getattr(start, name) for name in kept}, "losses": loss}


@pytest.mark.parametrize("name", daily(LAYOUTS, "dp2", "tp2 pp2 units", "dp2 pp2 chunks 2"))
def test_a_module_without_values_starts_alike_under_every_layout(ranks: Pools, name: str) -> None:
    size, layout = LAYOUTS[name]
    replicas = 2 if "dp2" in name else 1
    (expected,) = ranks(1, lightning=True).run(started, FromMeta, {}, 3, 8 * replicas)
    results = ranks(size, lightning=True).run(started, FromMeta, layout)
    found: set[str] = set()
    for result in results:
        for tensor_name, value in result["tensors"].items():
            assert torch.equal(value, expected["tensors"][tensor_name]), tensor_name
            assert value.dtype == expected["tensors"][tensor_name].dtype
        found |= set(result["tensors"])
        assert torch.equal(result["draw"], expected["draw"]), "the random state outside is another"
        assert (result["ties"], result["flags"]) == (expected["ties"], expected["flags"])
        assert_same(result["losses"], expected["losses"])
    assert found == set(expected["tensors"])
    assert set(expected["ties"]) == {"head.weight", "body.5.mlp.0.weight"}


def test_training_goes_on_from_there_as_in_one_process(ranks: Pools) -> None:
    (expected,) = ranks(1, lightning=True).run(started, FromMeta, {})
    module = FromMeta(batch_size=8)
    module.configure_model()
    module.to_empty(device="cpu")
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        tensor.data.copy_(expected["tensors"][name])
    module.head.weight = module.embed.weight
    module.body[5].mlp[0].weight = module.body[1].mlp[0].weight  # type: ignore[union-attr,index]
    losses = Losses()
    make_trainer(None, max_steps=3, callbacks=[losses]).fit(module)
    assert_same(expected["losses"], losses.values)
    other = ranks(1, lightning=True).run(started, FromMeta, {}, 4)[0]["tensors"]
    assert not torch.equal(other["positions"], expected["tensors"]["positions"]), "the seed counts"


# -- wherever it is made -----------------------------------------------------------------------------------------------


class Empty(Regression):
    """Made in a script, under `Trainer.init_module`."""

    def __init__(self) -> None:
        super().__init__()
        assert self.embed.weight.is_meta


def made_empty(layout: Layout) -> dict[str, Tensor]:
    torch.manual_seed(3)
    trainer = make_trainer(layout, max_steps=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*init_module")
        with trainer.init_module(empty_init=True):
            module = Empty()
    with trainer.init_module():
        assert not nn.Linear(1, 1).weight.is_meta
    trainer.callbacks.append(start := AtStart())
    trainer.fit(module, loader())
    return start.tensors


def test_a_whole_module_can_be_made_without_values(ranks: Pools) -> None:
    (expected,) = ranks(1, lightning=True).run(made_empty, {})
    assert all(value.dtype == torch.float64 and not value.isnan().any() for value in expected.values())
    results = ranks(2, lightning=True).run(made_empty, PP2)
    for result in results:
        assert all(torch.equal(value, expected[name]) for name, value in result.items())
    assert set(expected) == set(results[0]) | set(results[1]) > set(results[0])


class DividedByHand(Regression):
    """As for Lightning's `ModelParallelStrategy`: made without values, and divided with styles of torch."""

    def configure_model(self) -> None:
        if self.body[0][0].weight.is_meta:
            return
        with torch.device("meta"):
            self.body = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(4)))
        self.double()
        if self.device_mesh["tensor_parallel"].size() > 1:
            styles = {"*.0": ColwiseParallel(), "*.2": RowwiseParallel()}
            parallelize_module(self.body, self.device_mesh["tensor_parallel"], styles)


def test_layers_divided_by_styles_of_torch_get_their_part_of_the_same_values(ranks: Pools) -> None:
    (expected,) = ranks(1, lightning=True).run(started_by_hand, {})
    for result in ranks(2, lightning=True).run(started_by_hand, {"tensor_parallel_size": 2}):
        assert result.keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in result.items())


def started_by_hand(layout: Layout) -> dict[str, Tensor]:
    start = AtStart()
    torch.manual_seed(3)
    make_trainer({**layout, "tensor_parallel_plan": None}, max_steps=1, callbacks=[start]).fit(
        DividedByHand(), loader()
    )
    return start.tensors


# -- memory ------------------------------------------------------------------------------------------------------------

WIDTH, DEPTH = 64, 8


class Wide(Regression):
    """Equal layers, of which each is more than all the rest."""

    def configure_model(self) -> None:
        if len(self.body) == DEPTH:
            return
        with torch.device("meta"):
            self.embed, self.head = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 1)
            self.body = nn.Sequential(
                *(
                    nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
                    for _ in range(DEPTH)
                )
            )
        self.double()


def live_bytes() -> int:
    """What the tensors of this process take."""
    tensors = [x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter) and not x.is_meta]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


def peak(layout: Layout) -> int:
    """The most bytes of tensors while values are made, beyond those of before."""
    reset, found = Initialization._reset, [0]

    def measured(self: Any, unit: Any) -> None:
        reset(self, unit)
        found.append(live_bytes())

    module = Wide(num_layers=1)
    gc.collect()
    before = live_bytes()
    with mock.patch.object(Initialization, "_reset", measured):
        make_trainer(layout, max_steps=1).fit(module, loader())
    return max(found) - before


@pytest.mark.parametrize(("layout", "share"), [({}, 1.0), (PP2, 0.5), ({"tensor_parallel_size": 2}, 0.5)])
def test_a_rank_makes_its_own_part_and_at_most_one_layer_more(ranks: Pools, layout: Layout, share: float) -> None:
    layer = 8 * WIDTH * WIDTH * 8
    for found in ranks(2 if layout else 1, lightning=True).run(peak, layout):
        assert share * DEPTH * layer * 0.9 < found < (share * DEPTH + 1.2) * layer


# -- layers by themselves ----------------------------------------------------------------------------------------------


def meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def initialized(module: nn.Module, seed: int = 1, **arguments: Any) -> nn.Module:
    Initialization(module, CPU, seed, **arguments).finish()
    return module


KINDS: dict[str, Callable[[], nn.Module]] = {
    "transformer": lambda: nn.Transformer(8, 2, 1, 1, 16),
    "attention": lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True, kdim=3, vdim=5),
    "lstm": lambda: nn.LSTM(4, 4, 2, bidirectional=True, proj_size=2),
    "convolution": lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.PReLU()),
    "instance norm": lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True),
    "embedding": lambda: nn.EmbeddingBag(5, 4, padding_idx=1),
    "group norm": lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.RMSNorm(4), nn.Bilinear(4, 4, 2)),
    "half": lambda: nn.Linear(4, 4).bfloat16(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_torch_get_values_as_they_give_them_to_themselves(kind: str) -> None:
    real, made = KINDS[kind](), initialized(meta(KINDS[kind]))
    for (name, expected), value in zip(real.state_dict().items(), made.state_dict().values(), strict=True):
        assert (value.shape, value.dtype, value.device) == (expected.shape, expected.dtype, expected.device), name
        if expected.unique().numel() == 1:  # not drawn
            assert torch.equal(value, expected), name
        elif value.numel() >= 16:
            assert 0.3 < value.float().std() / expected.float().std() < 3, name
    assert not lacks_values(made)


def test_what_has_values_keeps_them() -> None:
    module = meta(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    weight, whole = nn.Parameter(torch.ones(3, 3)), initialized(copy.deepcopy(module))
    module[1].weight = weight  # type: ignore[index,union-attr]
    initialized(module)
    assert module[1].weight is weight  # type: ignore[index,union-attr]
    assert torch.equal(weight, torch.ones(3, 3))
    assert torch.equal(module[1].bias, whole[1].bias)  # type: ignore[index]
    assert torch.equal(module[0].weight, whole[0].weight)  # type: ignore[index]


def test_a_stage_has_the_values_of_the_whole_although_a_tie_leads_to_another_stage() -> None:
    def make() -> nn.Module:
        module = nn.ModuleDict({"body": nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))})
        module["body"][3].weight = module["body"][0].weight  # type: ignore[index]
        return module

    whole, stage = initialized(meta(make)).state_dict(), meta(make)
    replace_with_placeholders(
        stage,
        StageMap("body", tuple(f"body.{key}" for key in range(4)), (range(2), range(2, 4)), Placement.in_turns(2)),
        1,
    )
    initialized(stage, frames=["", "body"])
    found = {name: value for name, value in stage.state_dict().items() if not value.is_meta}
    assert all(torch.equal(value, whole[name]) for name, value in found.items())
    assert sorted(found) == ["body.0.weight", "body.2.bias", "body.2.weight", "body.3.bias", "body.3.weight"]


def test_what_comes_from_elsewhere_gets_memory_only() -> None:
    module = meta(lambda: nn.Sequential(nn.ParameterList([torch.empty(2)]), nn.Linear(2, 2)))
    with mock.patch.object(nn.Linear, "reset_parameters", side_effect=AssertionError):
        initialized(module, given=list(module.state_dict()))
    assert not lacks_values(module)


# -- what cannot be given values ---------------------------------------------------------------------------------------


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


class Loose(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mask = nn.Linear(2, 2), torch.ones(2)


class Reaching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(()))
        self.linear = nn.Linear(2, 2)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)
        nn.init.zeros_(self.linear.weight)


FAULTS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "no method": (lambda: nn.ParameterList([torch.empty(2)]), r"ParameterList .* parameter '0', .* `reset_parameters`"),
    "not set": (
        Table,
        r"Table .* buffer 'table', .* its `reset_parameters` does not set the buffer.*torch.device\('cpu'\)",
    ),
    "attribute": (Loose, r"'mask' .* neither a parameter nor a buffer of Loose"),
    "reaches": (Reaching, r"`Reaching.reset_parameters` changes 'linear.weight'"),
    "parametrized": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
        r"cannot initialize the parameter '.*original0'",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_get_values_is_named(fault: str) -> None:
    make, text = FAULTS[fault]
    with pytest.raises(ValueError, match=text):
        initialized(meta(make), frames=[""])


class Unsettable(Regression):
    def configure_model(self) -> None:
        with torch.device("meta"):
            self.body[-1].append(Table().double())


def refused(layout: Layout) -> str:
    with pytest.raises(ValueError, match="cannot initialize the") as error:
        make_trainer(layout).fit(Unsettable(), loader())
    return str(error.value)


@pytest.mark.parametrize("layout", [PP2, {"tensor_parallel_size": 2}])
def test_it_is_refused_on_every_rank(ranks: Pools, layout: Layout) -> None:
    texts = ranks(2, lightning=True).run(refused, layout)
    assert texts[0] == texts[1]
    assert "'body.5.3.table'" in texts[0]
