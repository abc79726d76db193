"""What replicas divide: rows, bytes at each moment of a step, and what users do between and inside of steps."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from lightning_hybrid import Tuning
from lightning_hybrid.data_parallel.zero.grad_scatter import ReduceScatterBucket
from lightning_hybrid.data_parallel.zero.param import RowShards, shard
from lightning_hybrid.data_parallel.zero.zero import NoZero, ZeroParameters
from lightning_hybrid.distributed.dtensor import flatten_blocks, full_tensor, to_local
from lightning_hybrid.distributed.watch.flight_recorder import read_bytes
from tests.pool import Pools
from tests.training_jobs import Regression, assert_same, loader, make_trainer, together, train

pytestmark = pytest.mark.distributed
STAGES = [1, 2, 3]


# -- rows --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(7, 3), (1, 5, 2), (2,), (8, 4), (1, 1, 9), (3, 1)])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_rows_are_those_of_chunk(shape: tuple[int, ...], num_ranks: int) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    rows = RowShards.of(whole.shape, num_ranks)
    assert rows is not None
    chunks = whole.chunk(num_ranks, rows.dim)
    flat = torch.cat([whole.flatten(), whole.new_full((rows.num_ranks * rows.padded_numel - rows.numel,), -1)])
    assert torch.equal(rows.unsharded(flat), whole)
    for rank in range(num_ranks):
        expected = chunks[rank] if rank < len(chunks) else whole.narrow(rows.dim, 0, 0)
        assert torch.equal(rows.shard(flat, rank), expected)


def test_what_has_one_row_is_not_divided() -> None:
    assert all(RowShards.of(torch.Size(shape), 2) is None for shape in [(), (1,), (1, 1), (0, 3)])


TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def full_tensors(rows: int, blocks: int) -> list[bool | str]:
    """Whether torch makes all of what tensor-parallel ranks, and replicas, divide along the same dimension."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tensor_parallel", "data_parallel"))
    axis, full = mesh["tensor_parallel"], torch.arange(2.0 * rows).view(rows, 2)
    part = full.view(blocks, rows // blocks, 2).chunk(2, 1)[axis.get_local_rank()].contiguous()
    shared = nn.Parameter(flatten_blocks(DTensor.from_local(part, axis, [Shard(1)], run_check=False), 0))
    parameter = shard(shared, mesh, mesh.get_local_rank("data_parallel"), 2)
    assert parameter.shape == full.shape
    made = [parameter, parameter.detach().clone(), parameter * 2 - parameter, copy.deepcopy(parameter)]
    whole = [each.full_tensor() for each in made]  # type: ignore[attr-defined]
    return [torch.equal(each, full) for each in (*whole, full_tensor(parameter))]


@pytest.mark.parametrize(("rows", "blocks"), [(12, 3), (18, 3), (6, 3), (22, 1), (10, 1)])
def test_all_of_a_parameter_is_what_a_dtensor_promises(ranks: Pools, rows: int, blocks: int) -> None:
    """Also where rows do not divide evenly, and of a packed projection."""
    if blocks > 1 and TORCH < (2, 12):
        pytest.skip("torch 2.11 does not make all of a tensor that has been divided in blocks")
    assert ranks(4).run(full_tensors, rows, blocks) == [[True] * 5] * 4


# -- none --------------------------------------------------------------------------------------------------------------


def test_what_stands_for_no_zero_can_be_asked_for_the_same() -> None:
    public = {name for name in vars(ZeroParameters) if not name.startswith("_")} | {"keeps_layers"}
    of_instances = {"reduces_each_backward", "computes_together"}
    assert public == {name for name in vars(NoZero) if not name.startswith("_")} - of_instances


# -- bytes -------------------------------------------------------------------------------------------------------------


class Held(Callback):
    """Bytes of this rank at each moment, by kind; storages that several tensors share count once."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}
        self.in_backward: list[int] = []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        self._note("after backward", pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        states = [value for state in trainer.optimizers[0].state.values() for value in state.values()]
        self.bytes["optimizer"] = _bytes(value for value in states if value.ndim)
        self._note("between steps", pl_module)

    def on_before_backward(self, trainer: Trainer, pl_module: Any, loss: Tensor) -> None:
        self._note("in the step", pl_module)

    def _note(self, moment: str, module: Any) -> None:
        zero = module.trainer.strategy.run.grad_sync.zero
        sharded = list(zero.parameters.values()) if isinstance(zero, ZeroParameters) else []
        parameters = [*module.parameters(), *(each.flat for each in sharded), *(each.sharded for each in sharded)]
        self.bytes[f"parameters {moment}"] = _bytes(parameters)
        both = [*module.parameters(), *zero.tensors()]
        self.bytes[f"gradients {moment}"] = _bytes(each.grad for each in both if each.grad is not None)


def _bytes(tensors: Any) -> int:
    storages = {to_local(each).untyped_storage().data_ptr(): to_local(each) for each in tensors}
    return sum(each.untyped_storage().nbytes() for each in storages.values() if each.untyped_storage().nbytes())


def held(layout: Mapping[str, Any]) -> dict[str, int]:
    callback = Held()
    module = Regression(num_layers=4)
    make_trainer(layout, callbacks=[callback], limit_train_batches=2).fit(module, loader())
    return callback.bytes


def expected_bytes(stage: int, replicas: int) -> dict[str, float]:
    """The formulas of docs/concepts/data-parallel.md, of float64 and AdamW, of a rank that has full shares."""
    shapes = [parameter.shape for parameter in Regression(num_layers=4).parameters()]
    whole = 8 * sum(shape.numel() for shape in shapes)
    rows = [(RowShards.of(shape, replicas), shape) for shape in shapes]
    share = 8 * sum(shape.numel() if each is None else each.padded_numel for each, shape in rows)
    padded = 8 * sum(shape.numel() if each is None else replicas * each.padded_numel for each, shape in rows)
    small = 8 * sum(shape.numel() for each, shape in rows if each is None)  # is whole everywhere
    both = padded + share - small
    parameters = {0: (whole, whole), 1: (padded, padded), 2: (padded, padded), 3: (both, share)}[stage]
    return {
        "parameters in the step": parameters[0],
        "parameters between steps": parameters[1],
        "gradients after backward": whole if stage == 0 else share,
        "optimizer": 2 * (whole if stage == 0 else share),
    }


@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("stage", [0, *STAGES])
def test_bytes_are_those_of_the_formulas(ranks: Pools, stage: int, replicas: int) -> None:
    layout = {"zero_stage": stage, "tuning": Tuning(reshard_after_forward=False)}
    first = ranks(replicas, lightning=True).run(held, layout)[0]
    for what, expected in expected_bytes(stage, replicas).items():
        flags = 8 * 12 * what.startswith("gradients")  # one number for each parameter behind the gradients of a bucket
        assert expected <= first[what] <= expected + flags, (what, first)


class GradientPeak(Callback):
    """The most bytes of gradients, whole and in rows, that there are when some of them begin to travel."""

    peak = 0

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        zero = trainer.strategy.run.grad_sync.zero
        launch = ReduceScatterBucket.launch

        def watched(bucket: ReduceScatterBucket, *args: Any) -> None:
            gradients = [each.grad for each in zero.tensors() if each.grad is not None]
            self.peak = max(self.peak, _bytes(gradients))
            launch(bucket, *args)

        self._undo = launch
        ReduceScatterBucket.launch = watched  # type: ignore[method-assign]

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        ReduceScatterBucket.launch = self._undo  # type: ignore[method-assign]


def gradient_peak(layout: Mapping[str, Any]) -> int:
    callback = GradientPeak()
    make_trainer(layout, callbacks=[callback], limit_train_batches=2).fit(Regression(num_layers=16), loader())
    return callback.peak


@pytest.mark.parametrize("stage", [2, 3])
def test_no_rank_holds_more_gradients_than_its_share_and_a_layer(ranks: Pools, stage: int) -> None:
    """And those of what is outside of layers, which come together once a step."""
    module = Regression(num_layers=16)
    layer = 8 * sum(parameter.numel() for parameter in module.body[0].parameters())
    outside = 8 * sum(parameter.numel() for part in (module.embed, module.head) for parameter in part.parameters())
    share = 8 * sum(parameter.numel() for parameter in module.parameters()) / 2
    for peak in ranks(2, lightning=True).run(gradient_peak, {"zero_stage": stage, "num_microbatches": 4}):
        assert peak <= share + 2 * layer + outside + 8 * 100


# -- precision ---------------------------------------------------------------------------------------------------------


class Overflowing(Regression):
    """In float32; the third batch overflows in float16."""

    def __init__(self) -> None:
        super().__init__()
        self.float()
        self.scales: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step([each.float() for each in batch], batch_idx)
        return loss * 1e30 if self.trainer.global_step == 1 and len(self.scales) == 1 else loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())


def half(layout: Mapping[str, Any]) -> dict[str, Any]:
    plugin = MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=2.0**10, growth_interval=4))
    module = Overflowing()
    result = train(module, layout, loader(), max_epochs=2, plugins=plugin, gradient_clip_val=0.4)
    return {"scales": module.scales, "weights": result.weights}


def whole(module: nn.Module) -> dict[str, Tensor]:
    return {name: full_tensor(p).detach().clone() for name, p in module.named_parameters() if not p.is_meta}


@pytest.mark.parametrize("layout", [{}, {"pipeline_parallel_size": 2, "num_microbatches": 2}])
def test_an_overflow_skips_the_step_of_all(ranks: Pools, layout: dict[str, Any]) -> None:
    size = 2 * layout.get("pipeline_parallel_size", 1)
    expected = ranks(size, lightning=True).run(half, layout)
    for stage in STAGES:
        results = ranks(size, lightning=True).run(half, {**layout, "zero_stage": stage})
        assert all(result["scales"] == expected[0]["scales"] for result in results)
        assert 512.0 in expected[0]["scales"]
        weights = together([result["weights"] for result in results])
        assert_same(weights, together([result["weights"] for result in expected]), rtol=1e-5)


# -- what users do -----------------------------------------------------------------------------------------------------


class Uneven(Regression):
    """Replicas have batches of other sizes, so that they could run 4 and 3 microbatches."""

    def train_dataloader(self) -> Any:
        samples = loader(num_samples=12).dataset
        mine = range(12)[:8] if dist.get_rank() == 0 else range(12)[8:11]
        return torch.utils.data.DataLoader(torch.utils.data.Subset(samples, mine), 8)


def uneven(stage: int) -> dict[str, Tensor]:
    layout = {"zero_stage": stage, "num_microbatches": 4, "tuning": Tuning(reshard_after_forward=True)}
    return train(Uneven(), layout, max_epochs=3, use_distributed_sampler=False).weights


def test_replicas_may_have_batches_of_other_sizes(ranks: Pools) -> None:
    expected = ranks(2, lightning=True).run(uneven, 0)[0]
    for stage in STAGES:
        for result in ranks(2, lightning=True).run(uneven, stage):
            assert_same(result, expected)


class Alternating(Regression):
    """Optimizes by hand: body and head take turns, and the second loss sees what the first step has changed."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            self.clip_gradients(optimizer, 0.1, "norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        others = [*self.embed.parameters(), *self.head.parameters()]
        return [torch.optim.Adam(self.body.parameters(), 1e-2), torch.optim.SGD(others, 1e-2)]


class Asking(Regression):
    """Computes in hooks too, with the values of then."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            x = torch.ones(2, 6, dtype=torch.float64)
            self.asked += [float(self(x).sum()), float(self.body[1](self.embed(x)).sum())]


class Copying(Regression):
    """Keeps a copy of itself, as callbacks do, which goes its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[float] = []

    def on_train_start(self) -> None:
        self.copies = [copy.deepcopy(self)]

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for mine, other in zip(self.copies[0].parameters(), self.parameters(), strict=True):
                mine.lerp_(other, 0.5)
            x = torch.ones(2, 6, dtype=torch.float64)
            self.asked += [float(self.copies[0](x).sum()), float(self(x).sum())]


class Skipping(Regression):
    """One replica uses other layers than the other one, and not in every batch."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for index, layer in enumerate(self.body):
            if (index + self.trainer.global_step) % 3 or self.trainer.global_rank == 0:
                h = layer(h)
        return self.head(h)


def trained(cls: type[Regression], layout: Mapping[str, Any], **arguments: Any) -> dict[str, Any]:
    module = cls()
    if "average" in arguments:
        arguments = {"callbacks": [WeightAveraging(avg_fn=_mean)]}
    result = train(module, layout, loader(), loader(seed=2), max_epochs=2, **arguments)
    return {"weights": result.weights, "asked": getattr(module, "asked", [])}


def _mean(averaged: Tensor, current: Tensor, count: Any) -> Tensor:
    return averaged + (current - averaged) / 4


@pytest.mark.parametrize("case", ["alternating", "asking", "copying", "skipping", "averaging"])
def test_what_users_do_is_as_with_replicas_that_hold_everything(ranks: Pools, case: str) -> None:
    cls = {"alternating": Alternating, "asking": Asking, "copying": Copying, "skipping": Skipping}.get(case, Regression)
    arguments = {"average": True} if case == "averaging" else {}
    expected = ranks(2, lightning=True).run(trained_with, cls, {}, arguments)
    for layout in [{"zero_stage": stage} for stage in STAGES] + [
        {"zero_stage": 3, "tuning": Tuning(reshard_after_forward=False)}
    ]:
        results = ranks(2, lightning=True).run(trained_with, cls, layout, arguments)
        assert_same(results, expected, where=str(layout))


def trained_with(cls: type[Regression], layout: Mapping[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    return trained(cls, layout, **arguments)


def gathered(layout: Mapping[str, Any]) -> Any:
    module = Regression()
    trainer = make_trainer({**layout, "gather_module_on_teardown": False})
    trainer.fit(module, loader())
    divided = [name for name, parameter in module.named_parameters() if isinstance(parameter, DTensor)]
    metrics = trainer.validate(module, loader(seed=2), verbose=False)
    trainer.strategy.gather_module()
    assert not any(isinstance(each, DTensor) for each in module.state_dict().values())
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    second = make_trainer({})  # another layout
    second.fit(module, loader())
    return {"weights": weights, "later": whole(module), "metrics": metrics, "divided": len(divided)}


def test_a_module_is_made_whole_and_divided_in_another_way(ranks: Pools) -> None:
    expected = ranks(2, lightning=True).run(gathered, {})
    for stage in STAGES:
        for result, other in zip(ranks(2, lightning=True).run(gathered, {"zero_stage": stage}), expected, strict=True):
            assert result.pop("divided") > 0
            assert_same(result, {key: value for key, value in other.items() if key != "divided"})


@pytest.mark.parametrize("wish", [True, "selective"])
@pytest.mark.parametrize("pipeline", [1, 2])
def test_layers_run_again_in_backward_with_their_parameters(ranks: Pools, pipeline: int, wish: Any) -> None:
    layout = {"zero_stage": 3, "tuning": Tuning(reshard_after_forward=True), "pipeline_parallel_size": pipeline}
    expected = ranks(2 * pipeline, lightning=True).run(trained_with, Regression, layout, {})
    results = ranks(2 * pipeline, lightning=True).run(trained_with, Regression, {**layout, "recompute": wish}, {})
    for result, other in zip(results, expected, strict=True):
        assert_same(result, other, rtol=0.0)


# -- groups of replicas ------------------------------------------------------------------------------------------------


class Wide(Regression):
    """A module with so many parameters that the marks of buckets do not matter."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(7)
            self.embed, self.head = nn.Linear(6, 64), nn.Linear(64, 1)
            self.body = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
        self.double()


class Bytes(Callback):
    """The bytes of the collectives of the third step, by the groups of ZeRO."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.last = read_bytes()[1]

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            zero, found = trainer.strategy.mesh.zero, read_bytes(self.last)[0]
            self.found = {name: found.pop(getattr(zero, name).group_name) for name in ("group", "rows_group")}
            self.rest = sum(found.values())


def sent_in_a_step(layout: Mapping[str, Any]) -> tuple[dict[str, float], float]:
    counted = Bytes()
    make_trainer(layout, callbacks=[counted], max_epochs=1).fit(Wide(), loader(4, num_samples=48))
    return counted.found, counted.rest


@pytest.mark.parametrize(("stage", "reductions"), [(1, 1), (2, 2), (3, 2)])
def test_groups_of_replicas_send_what_the_table_says(ranks: Pools, stage: int, reductions: int) -> None:
    """Two microbatches: gradients are reduced once or twice and parameters gathered once, both in groups of 2 of 4.

    The shards of gradients are summed once over the two groups, which sends each byte twice around a ring. So does a
    reduction: gloo has no reduce-scatter, and sums all.
    """
    layout = {"zero_stage": stage, "zero_size": 2, "num_microbatches": 2}
    size = 8 * sum(parameter.numel() for parameter in Wide().parameters())
    for found, rest in ranks(4, lightning=True).run(sent_in_a_step, layout):
        assert found["group"] == pytest.approx((2 * reductions + 1) * size, rel=0.05)
        assert found["rows_group"] == pytest.approx(2 * size / 2, rel=0.05)
        assert rest < 0.05 * size
