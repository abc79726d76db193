"""Layouts of the user's own: how they are read, what lies where, what operators send, and training with them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

from lightning_hybrid import HybridStrategy
from lightning_hybrid.distributed.arrangement import arrange
from lightning_hybrid.distributed.dtensor import full_tensor
from lightning_hybrid.distributed.module_names import named_tensors
from lightning_hybrid.tensor_parallel.layouts.layout import distribute, parse_layout, stage_axes
from lightning_hybrid.tensor_parallel.layouts.operator_errors import explain_operator_error
from lightning_hybrid.tensor_parallel.mappings import TensorGroup
from lightning_hybrid.tensor_parallel.plan import make_plan
from tests.pool import Pools
from tests.training_jobs import Regression, assert_same, loader, make_trainer, train

AXES = "data_parallel", "tensor_parallel"
S0, S1, B = Shard(0), Shard(1), Replicate()


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("S(0),S(1)", {"data_parallel": S0, "tensor_parallel": S1}),
        ("S(-1), B", {"data_parallel": S1, "tensor_parallel": B}),
        ("P", {"tensor_parallel": Partial()}),
        ("S(1)", {"tensor_parallel": S1}),
        ("tensor_parallel=S(1), data_parallel=B", {"data_parallel": B, "tensor_parallel": S1}),
        ({"data_parallel": "S(0)"}, {"data_parallel": S0}),
        ({"tensor_parallel": "S(1)", "data_parallel": "B"}, {"data_parallel": B, "tensor_parallel": S1}),
    ],
)
def test_layouts_are_read(layout: str | Mapping[str, str], expected: dict[str, Any]) -> None:
    read = parse_layout(layout, AXES, (16, 8))
    assert list(read.items()) == list(expected.items())


@pytest.mark.parametrize(
    ("layout", "error", "text"),
    [
        (
            "S(0),S(1),B",
            ValueError,
            "has 3 placements, but must have one for each of the axes data_parallel, tensor_parallel",
        ),
        (
            "split(0)",
            ValueError,
            r"the invalid placement 'split\(0\)' for an axis. Write 'S\(dimension\)', 'B' or 'P'",
        ),
        ("rows=S(0)", ValueError, "names the unknown axis 'rows'. The axes are data_parallel, tensor_parallel"),
        ("S(2)", ValueError, r"splits dimension 2 of a tensor of shape \(16, 8\)"),
        (
            "tensor_parallel=S(0),tensor_parallel=S(1)",
            ValueError,
            r"gives 'S\(0\)' and 'S\(1\)' for the axis tensor_parallel. Keep",
        ),
        (
            "tensor_parallel=B, tensor_parallel=B",
            ValueError,
            "gives 'B' and 'B' for the axis tensor_parallel. Keep only one",
        ),
        ({}, ValueError, "names no axis. The axes are data_parallel, tensor_parallel"),
        ({"tensor_parallel": 0}, ValueError, "has the invalid placement 0 for an axis"),
        (["S(0)"], TypeError, r"must be a string or a mapping from axes to placements, got \['S\(0\)'\]"),
    ],
)
def test_what_is_no_layout_is_refused(layout: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        parse_layout(layout, AXES, (16, 8))


# -- values ------------------------------------------------------------------------------------------------------------


class Noise(nn.Module):
    """The example of LiBai's documentation."""

    def __init__(self, strategy: Any) -> None:
        super().__init__()
        noise = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
        self.noise_tensor = strategy.distribute(noise, "S(0),S(1)")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.noise_tensor


def noisy() -> tuple[str, Tensor, Tensor]:
    trainer = make_trainer({"data_parallel_size": 2, "tensor_parallel_size": 2, "tensor_parallel_plan": None})
    found: list[Any] = []

    class Module(Regression):
        def on_train_start(self) -> None:
            strategy: Any = self.trainer.strategy
            y: Any = Noise(strategy)(strategy.distribute(torch.zeros(16, 8), "S(0),S(1)"))
            placed = f"placements {y.placements} ranks {y.device_mesh.mesh.tolist()}"
            found.extend([f"shape {tuple(y.shape)} {placed} local {tuple(y.to_local().shape)}", y.to_local()])
            found.append(strategy.distribute(y, "B,B").to_local())

    trainer.fit(Module(), loader())
    return tuple(found)  # type: ignore[return-value]


def test_noise_lies_over_two_axes(ranks: Pools) -> None:
    outcomes = ranks(4, lightning=True).run(noisy)
    noise = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    text = "shape (16, 8) placements (Shard(dim=0), Shard(dim=1)) ranks [[0, 1], [2, 3]] local (8, 4)"
    for rank, (printed, local, whole) in enumerate(outcomes):
        assert printed == text
        rows, columns = divmod(rank, 2)
        assert torch.equal(local, noise[8 * rows : 8 * rows + 8, 4 * columns : 4 * columns + 4])
        assert torch.equal(whole, noise)


def differing() -> tuple[dict[str, int], Tensor, Tensor, list[Tensor]]:
    """Two operators: the first divides rows of its input, the second wants all of them, and divides columns."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=AXES)
    torch.manual_seed(0)
    x, first, second = (torch.randn(*shape, dtype=torch.float64) for shape in ((6, 4), (4, 8), (8, 2)))
    leaves = [each.requires_grad_() for each in (x, first, second)]
    a = distribute(x, "S(0)", mesh) @ distribute(first, "B", mesh)
    with CommDebugMode() as sent:
        b: Any = a @ distribute(second, "S(1)", mesh)
    whole = b.full_tensor()
    whole.square().sum().backward()
    counts = {str(operator).rpartition(".")[2]: number for operator, number in sent.get_comm_counts().items()}
    leaves.append(torch.ones(3, dtype=torch.float64, requires_grad=True))
    partial: Any = distribute(leaves[-1], "P", mesh)
    ones = partial.full_tensor()
    ones.sum().backward()
    return counts, whole.detach(), ones.detach(), [leaf.grad for leaf in leaves]  # type: ignore[misc]


def test_operators_with_other_layouts_are_given_what_they_need(ranks: Pools) -> None:
    torch.manual_seed(0)
    x, first, second = (torch.randn(*shape, dtype=torch.float64) for shape in ((6, 4), (4, 8), (8, 2)))
    leaves = [each.requires_grad_() for each in (x, first, second)]
    expected = x @ first @ second
    expected.square().sum().backward()
    for counts, whole, ones, gradients in ranks(2).run(differing):
        assert counts == {"all_gather_into_tensor": 1}
        assert_same(ones, torch.ones(3, dtype=torch.float64))
        assert_same([whole, gradients], [expected.detach(), [*(leaf.grad for leaf in leaves), ones]])


def refusals() -> list[str]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=AXES)
    parameter, texts = nn.Parameter(torch.ones(3, 4)), []
    attempts: list[tuple[Tensor, str]] = [(parameter, "S(0),B"), (parameter, "S(0)"), (parameter, "P")]
    there = distribute(torch.ones(4), "B", mesh)
    attempts += [(there, "B,B"), (there, "P")]
    for tensor, layout in attempts:
        try:
            distribute(tensor, layout, mesh)
        except ValueError as error:
            texts.append(str(error))
    placed: Any = distribute(parameter, "S(1)", mesh)
    assert isinstance(placed, nn.Parameter)
    assert placed.to_local().shape == (3, 2)
    return texts


def test_layouts_that_cannot_be_are_refused(ranks: Pools) -> None:
    (first, uneven, summed, axes, partial), _ = ranks(2).run(refusals)
    assert "must have 'B' for the axis data_parallel, because all ranks of this axis train the same parameter" in first
    assert "zero_stage=3" in first
    assert "dimension 0 of a parameter of shape (3, 4) into 2 equal parts" in uneven
    assert "an optimizer cannot update" in summed
    assert (
        "is for the axes data_parallel, tensor_parallel, but the tensor is distributed over the axes tensor_parallel"
        in axes
    )
    assert "an existing tensor cannot become" in partial


# -- in steps ----------------------------------------------------------------------------------------------------------


class Spread(Regression):
    """Its step lays out a parameter, and what it computes with it; `fails` is where it takes distances of such."""

    def __init__(self, fails: str = "") -> None:
        super().__init__(num_layers=2)
        self.mix, self.fails = nn.Parameter(torch.linspace(-1, 1, 64, dtype=torch.float64).view(8, 8)), fails

    def distances(self) -> Tensor:
        strategy: Any = self.trainer.strategy
        return torch.cdist(strategy.distribute(torch.ones(4, 2), "S(0)"), strategy.distribute(torch.ones(3, 2), "B"))

    def on_train_start(self) -> None:
        if self.fails == "hook":
            self.distances()

    def forward(self, x: Tensor) -> Tensor:
        strategy: Any = self.trainer.strategy
        h, mix = self.embed(x), self.mix
        if isinstance(strategy, HybridStrategy):
            h, mix = strategy.distribute(h, "B"), strategy.distribute(mix, "S(1)")
        if self.fails == "step":
            self.distances()
        return self.head(self.body(full_tensor(h @ mix)))


def spread(layout: Mapping[str, Any] | None) -> dict[str, Tensor]:
    return train(Spread(), layout, loader(), max_epochs=2).weights


def test_a_parameter_that_a_step_lays_out_gets_its_gradient(ranks: Pools) -> None:
    expected = spread(None)
    assert not torch.equal(expected["mix"], Spread().mix)
    for parameters in ranks(2, lightning=True).run(spread, {"tensor_parallel_size": 2, "tensor_parallel_plan": None}):
        assert_same(parameters, expected)


def failed(fails: str, layout: Mapping[str, Any]) -> str:
    with pytest.raises(Exception, match="cdist") as error:
        make_trainer(layout).fit(Spread(fails), loader())
    return str(error.value)


@pytest.mark.parametrize(
    ("fails", "layout"),
    [
        ("step", {"tensor_parallel_size": 2, "tensor_parallel_plan": None}),
        pytest.param("hook", {"tensor_parallel_size": 2, "tensor_parallel_plan": None}, marks=pytest.mark.thorough),
        pytest.param("step", {}, marks=pytest.mark.thorough),
    ],
)
def test_operators_without_a_rule_for_layouts_say_what_to_do(
    ranks: Pools, fails: str, layout: Mapping[str, Any]
) -> None:
    for text in ranks(2, lightning=True).run(failed, fails, layout):
        assert "aten._cdist_forward.default does not have a sharding strategy registered" in text  # torch's own
        assert text.count("here: 'S(0)' over tensor_parallel and 'B' over tensor_parallel") == 1
        assert "`x.full_tensor()` returns the full tensor on each rank" in text


def mixed_up() -> str:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=AXES)
    with pytest.raises(RuntimeError, match="got mixed") as error:
        distribute(torch.ones(4), "S(0)", mesh) + torch.ones(4)
    for _ in range(2):  # on the way out
        assert explain_operator_error(error.value)
    shapes = RuntimeError("shape '[3, 9]' is invalid\n\nSharding propagation failed for aten.view.default(...)")
    assert not explain_operator_error(shapes)
    return str(error.value)


def test_plain_tensors_beside_one_in_a_layout_say_what_to_do(ranks: Pools) -> None:
    (text,) = ranks(1).run(mixed_up)
    assert text.count("Distribute the plain tensors over the same axes too") == 1


# -- parameters, by a plan ---------------------------------------------------------------------------------------------


class Mixing(nn.Module):
    """Computes with parameters of its own, as no style knows it; counts its calls in a buffer, and reads another."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(16, 8) / 4), nn.Parameter(torch.randn(8, 16) / 4)
        self.scale, self.norm = nn.Parameter(torch.ones(8)), nn.LayerNorm(8)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("gain", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        self.gain = torch.full_like(self.gain, 1.5)
        return x + self.norm(torch.tanh(x @ self.up.T) @ self.down.T) * self.scale * self.gain


class Mixed(Regression):
    """Layers whose parameters lie in layouts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(*[Mixing() for _ in range(4)])
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        return loss


PLAN = {"body.*.up": "S(0)", "body.*.down": "S(1)", "body.*.scale": "S(0)"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {}),
    "tp2 pp2": (4, {"pipeline_parallel_size": 2, "num_microbatches": 2}),
    "tp2 zero 3": (4, {"zero_stage": 3}),
}


def mixed(layout: Mapping[str, Any] | None, path: str) -> Any:
    trainer = make_trainer(layout, max_epochs=2, gradient_clip_val=0.5)
    module: LightningModule = Mixed()
    if layout is not None:
        trainer.fit(module, loader())
        trainer.save_checkpoint(path)
        trainer.strategy.barrier()
        trainer = make_trainer(layout, max_epochs=3, gradient_clip_val=0.5)
        trainer.fit(Mixed(), loader(), ckpt_path=path)
        module = trainer.lightning_module
    else:
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module, loader())
    named = [*module.named_parameters(), *module.named_buffers()]
    states = {name: full_tensor(each.detach()) for name, each in named if not each.is_meta}
    return states, {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("name", LAYOUTS)
def test_parameters_in_layouts_train_as_in_one_process(ranks: Pools, tmp_path: Any, name: str) -> None:
    size, layout = LAYOUTS[name]
    arguments = {"tensor_parallel_size": 2, "tensor_parallel_plan": PLAN, **layout}
    outcomes = ranks(size, lightning=True).run(mixed, arguments, str(tmp_path / "state.ckpt"))
    one_process = size == 2 or "pipeline_parallel_size" in layout
    if one_process:
        expected, metrics = mixed(None, "")
    else:  # replicas see other batches: the oracle is the same layout, divided over nothing else
        (expected, metrics), _ = ranks(2, lightning=True).run(mixed, {}, str(tmp_path / "ddp.ckpt"))
    seen: set[str] = set()
    for states, logged in outcomes:
        # A stage counts each microbatch.
        parameters = {key: value for key, value in states.items() if not key.endswith("calls")}
        assert_same(parameters, {key: expected[key] for key in parameters})
        assert_same(logged, metrics)
        seen |= set(parameters)
    assert seen == {key for key in expected if not key.endswith("calls")}


class Recalling(nn.Module):
    """Reads a buffer, writes into another one, and sets a third anew."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(8, 8) / 4)
        self.register_buffer("table", torch.linspace(-1, 1, 64).view(8, 8))
        self.register_buffer("running", torch.linspace(0, 1, 8))
        self.register_buffer("last", torch.linspace(1, 2, 8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(x @ self.up.T + x @ self.table) * self.last + self.running
        if self.training:
            with torch.no_grad():
                self.running.mul_(0.9).add_(0.1 * h.mean(0))
            self.last = self.last * 0.9 + torch.linspace(0, 0.1, 8, dtype=x.dtype, device=x.device)
        return x + h


class Recalled(Mixed):
    """Layers whose buffers lie in layouts; one stands outside of the body."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.body, self.embed = nn.Sequential(Recalling(), Recalling()), nn.Sequential(self.embed, Recalling())
        self.double()


BUFFERS: dict[str, Any] = {
    "body.*.table": "S(1)",
    "body.*.running": {"tensor_parallel": "S(0)"},
    "body.*.last": "S(0)",
    "body.1.up": "tensor_parallel=S(0)",
    "embed.1.table": "B,S(0)",
    "embed.1.running": "S(-1)",
    "embed.1.last": "data_parallel=B,tensor_parallel=S(0)",
}
PARTS = {f"{layer}.{name}": (4,) for layer in ("body.0", "body.1", "embed.1") for name in ("running", "last")}
PARTS |= {"body.0.table": (8, 4), "body.1.table": (8, 4), "embed.1.table": (4, 8)}


def recalled(layout: Mapping[str, Any] | None, path: str, resumed: Sequence[str]) -> Any:
    """Two epochs, which are saved; and a third one, for each checkpoint that is resumed."""
    stays = None if layout is None else {**layout, "gather_module_on_teardown": False}
    trainer = make_trainer(stays, max_epochs=2)
    module: LightningModule = Recalled()
    trainer.fit(module, loader())
    trainer.save_checkpoint(path)
    trainer.strategy.barrier()
    divided = {name: tuple(each.to_local().shape) for name, each in module.named_buffers() if isinstance(each, DTensor)}
    outcomes = []
    for each in resumed:
        trainer = make_trainer(layout, max_epochs=3)
        trainer.fit(module := Recalled(), loader(), ckpt_path=each)
        if layout is not None:
            trainer.strategy.gather_module()
        outcomes.append({name: each.detach() for name, each in named_tensors(module)})
    return divided, outcomes


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (2, {}),
        pytest.param(2, {"save_distributed_checkpoint": True, "recompute": True}, marks=pytest.mark.thorough),
        pytest.param(4, {"pipeline_parallel_size": 2, "num_microbatches": 1}, marks=pytest.mark.thorough),
        pytest.param(4, {"zero_stage": 3}, marks=pytest.mark.thorough),
        pytest.param(4, {"zero_stage": 1, "save_distributed_checkpoint": True}, marks=pytest.mark.thorough),
    ],
)
def test_buffers_in_layouts_are_as_in_one_process(ranks: Pools, tmp_path: Any, size: int, layout: Any) -> None:
    arguments = {"tensor_parallel_size": 2, "tensor_parallel_plan": BUFFERS, **layout}
    paths = [str(tmp_path / "whole.ckpt"), str(tmp_path / "divided.ckpt")]
    if "zero_stage" in layout:  # replicas see other batches: the oracle is the same without tensor parallelism
        replicas = ranks(2, lightning=True).run(recalled, {}, paths[0], paths[:1])
    else:
        replicas = [recalled(None, paths[0], paths[:1])]
    before, held = Recalled().state_dict(), set()
    for rank, (divided, outcomes) in enumerate(ranks(size, lightning=True).run(recalled, arguments, paths[1], paths)):
        _, (expected,) = replicas[rank * len(replicas) // size]
        assert not torch.equal(expected["body.1.running"], before["body.1.running"])
        assert divided == {name: PARTS[name] for name in divided}
        held |= divided.keys()
        for states in outcomes:
            assert_same(states, expected)
    assert held == PARTS.keys()
    if "save_distributed_checkpoint" not in layout:
        whole, saved = (torch.load(path, weights_only=False)["state_dict"] for path in paths)
        assert_same(dict(saved), dict(whole))
        assert {"body.0.table", "embed.1.running"} <= saved.keys()
        assert "body.0.last" not in saved


class Setting(nn.Module):
    """Its buffer gets what a call says."""

    def __init__(self) -> None:
        super().__init__()
        self.dims = self.mesh = 1.0  # names that are the user's
        self.register_buffer("table", torch.arange(4.0))

    def forward(self, x: Tensor, kind: str = "") -> Tensor:
        y = x * self.table.sum() * self.dims * self.mesh
        if kind == "longer":
            self.table = torch.cat([self.table, self.table[:1]])
        elif kind == "plain":
            self.table = torch.full((6,), 2.0)
        elif kind == "none":
            self.table = None
        return y


def set_anew() -> list[Any]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=AXES)
    first, module = torch.ones(2), nn.Sequential(Setting())
    plan = make_plan(module, {"0.table": "S(0)"}, 2, sequence_parallel=False)
    plan.apply(module, mesh["tensor_parallel"], TensorGroup(mesh["tensor_parallel"].get_group()), torch.device("cpu"))
    layer: Any = module[0]
    found: list[Any] = [
        layer(first),
        layer.table.to_local().tolist(),
        layer.table.to_local().untyped_storage().nbytes(),
    ]
    layer.table = torch.arange(2.0, 8.0)  # by code that knows nothing of layouts
    for kind in ("", "longer", "plain", ""):
        found += [layer(first, kind), (type(layer.table).__name__, full_tensor(layer.table).tolist())]
    copied = copy.deepcopy(module)
    found += [copied(first), module.state_dict()["0.table"].to_local().untyped_storage().nbytes()]
    layer(first, "none")
    plan.undo(module)
    return [*found, layer.table, type(layer) is Setting]


def test_buffers_are_set_anew(ranks: Pools) -> None:
    ones = torch.ones(2)
    for rank, found in enumerate(ranks(2).run(set_anew)):
        assert_same(found[:3], [6 * ones, [2.0 * rank, 2.0 * rank + 1], 8])
        after = [2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
        assert_same(found[3:5], [27 * ones, ("DTensor", after)])
        assert_same(found[5:7], [27 * ones, ("Tensor", [*after, 2.0])])  # of seven entries no rank has a half
        assert_same(found[7:11], [29 * ones, ("DTensor", [2.0] * 6), 12 * ones, ("DTensor", [2.0] * 6)])
        assert_same(found[11:], [12 * ones, 12, None, True])


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        ({"body.*.sideways": "S(0)"}, "has no parameter or buffer with this name"),
        ({"body.0.up": "S(3)"}, "splits dimension 3"),
        (
            {"body.0.up": "S(0),S(1),B"},
            "has 3 placements, but must have one for each of the axes data_parallel, tensor_parallel",
        ),
        (
            {"body.0.up": "S(0),S(1)"},
            "of 'body.0.up' in .* must have 'B' for the axis data_parallel, .* HybridStrategy.zero_stage=3",
        ),
        (
            {"body.0.up": "P,S(1)"},
            "must have 'B' for the axis data_parallel, because all ranks of this axis train the same parameter. "
            "Use 'B'",
        ),
        ({"body.0.up": {"data_parallel": "S(0)"}}, "must have 'B' for the axis data_parallel"),
        (
            {"body.0.gain": "S(0),B"},
            "must have 'B' for the axis data_parallel, because all ranks of this axis have the same buffer. "
            ".*`strategy.dist",
        ),
        (
            {"body.0.up": "P"},
            r"contains 'P' \(a partial sum\), which an optimizer cannot update. Use 'S\(dim\)' or 'B'",
        ),
        ({"body.0.gain": "P"}, r"contains 'P' \(a partial sum\), which a buffer cannot be. Use 'S\(dim\)' or 'B'"),
        ({"body.0.calls": "S(0)"}, r"splits dimension 0 of a tensor of shape \(\)"),
        ({"body.0.up": "rows=S(0)"}, "names the unknown axis 'rows'. The axes are data_parallel, tensor_parallel"),
        ({"body.0.up": "tensor_parallel=S[0]"}, r"has the invalid placement 'S\[0\]' for an axis"),
        ({"body.0.up": "tensor_parallel=S(0),tensor_parallel=S(1)"}, "Keep only one"),
        ({"body.0.up": ["S(0)"]}, "gives 'body.0.up' the unknown style .* For a parameter or buffer, give a layout"),
        (
            {"body.0": "on_shards", "body.0.up": "S(0)"},
            "the style 'on_shards', .* also gives a layout to its parameter 'up'",
        ),
        ({"body.0.up": "S(0)", "body.0.norm": "on_shards"}, "its submodule 'body.0.norm' has the style 'on_shards'"),
        (
            {"body.0.norm.weight": "S(0)", "body.0.norm.bias": "B", "body.0": "layout"},
            "gives 'body.0' the unknown style 'layout'",
        ),
    ],
)
def test_what_a_plan_cannot_lay_out_is_refused(plan: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make_plan(Mixed(), plan, 2, sequence_parallel=False)


@pytest.mark.parametrize(
    "layout",
    [
        "B,S(0)",
        "tensor_parallel=S(0)",
        {"tensor_parallel": "S(0)"},
        "data_parallel=B, tensor_parallel=S(-2)",
        {"tensor_parallel": "S(0)", "data_parallel": "B"},
    ],
)
def test_a_plan_takes_the_axes_that_values_lie_over(layout: Any) -> None:
    plain, other = (make_plan(Mixed(), {"body.*.up": each}, 2, sequence_parallel=False) for each in ("S(0)", layout))
    assert [row.style for row in other.rows] == ["layout:up=S(0)"] * 4
    assert (other.rows, other.shapes) == (plain.rows, plain.shapes)


def test_letters_of_a_plan_are_in_the_order_of_the_ranks() -> None:
    axes = stage_axes("pp-tp-cp-dp")
    assert axes == ("tensor_parallel", "context_parallel", "data_parallel")
    plan = make_plan(Mixed(), {"body.0.up": "S(0),B,B"}, 2, sequence_parallel=False, axes=axes)
    assert [row.style for row in plan.rows] == ["layout:up=S(0)"]
    with pytest.raises(ValueError, match="must have 'B' for the axis context_parallel"):
        make_plan(Mixed(), {"body.0.up": "B,S(0),B"}, 2, sequence_parallel=False, axes=axes)


def test_a_plan_divides_buffers() -> None:
    plan = make_plan(
        Mixed(), {"body.0.gain": "S(0)", "body.0.up": "S(1)", "body.1.gain": "B"}, 2, sequence_parallel=False
    )
    assert [row.style for row in plan.rows] == ["layout:gain=S(0),up=S(1)"]
    assert plan.shapes == {"body.0.gain": (8,), "body.0.up": (16, 8)}
    with pytest.raises(ValueError, match=r"has 'gain' of shape \(8,\), whose dimension 0 cannot be split into 3 equal"):
        make_plan(Mixed(), {"body.0.gain": "S(0)"}, 3, sequence_parallel=False)
    tied = Mixed()
    tied.body[1].gain = tied.body[0].gain
    with pytest.raises(ValueError, match=r"'body\.0\.gain' and 'body\.1\.gain' are names of one tied"):
        make_plan(tied, {"body.0.gain": "S(0)"}, 2, sequence_parallel=False)


@pytest.mark.parametrize("mode", ["2d", "3d"])
def test_ranks_in_a_grid_take_no_layouts(mode: str) -> None:
    size = {"2d": 4, "3d": 8}[mode]
    text = (
        "assigns the layout gain=S.0. to .*. This works only with tensor_parallel_mode='1d'. With"
        f" tensor_parallel_mode='{mode}', .* remove the entry"
    )
    with pytest.raises(ValueError, match=text):
        make_plan(Mixed(), {"body.*.gain": "S(0)"}, size, sequence_parallel=False, arrangement=arrange(mode, size))


def test_layouts_are_read_from_yaml() -> None:
    parser = ArgumentParser()
    parser.add_class_arguments(HybridStrategy, "strategy")
    text = "{body.*.up: 'B,S(0)', body.*.down: {tensor_parallel: S(1)}, body.*.gain: data_parallel=B}"
    found = parser.parse_string(f"strategy: {{tensor_parallel_plan: {text}}}").strategy.tensor_parallel_plan
    assert found == {
        "body.*.up": "B,S(0)",
        "body.*.down": {"tensor_parallel": "S(1)"},
        "body.*.gain": "data_parallel=B",
    }
    plan = make_plan(Mixed(), found, 2, sequence_parallel=False)
    assert {row.style for row in plan.rows} == {"layout:up=S(0),down=S(1)"}


def test_the_last_pattern_counts() -> None:
    plan = {"body.*.up": "S(0)", "body.1.up": "S(-1)", "body.2.up": "B", "body.3.scale": "S(0)", "body.3.up": "B"}
    rows = make_plan(Mixed(), plan, 2, sequence_parallel=False).rows
    found = {row.name: row.style for row in rows}
    assert found == {"body.0": "layout:up=S(0)", "body.1": "layout:up=S(1)", "body.3": "layout:scale=S(0)"}
