"""What Lightning offers around training, where layers are shared by several ranks: as in one process."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.data import DataLoader

from examples.lamb import Lamb
from lightning_hybrid import Faults
from lightning_hybrid.distributed.dtensor import full_tensor, is_sharded, to_local
from lightning_hybrid.pipeline_parallel.p2p import Channel
from tests.pool import Pools
from tests.training_jobs import make_trainer
from tests.zoo import tensor as zoo

Layout = Mapping[str, Any] | None
TP2: dict[str, Any] = {"tensor_parallel_size": 2}
TP2_PP2: dict[str, Any] = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "num_microbatches": 4}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {"tp2": (2, TP2), "tp2 x pp2": (4, TP2_PP2)}
CALLBACKS: dict[str, Callable[[], Callback]] = {
    "exponential": lambda: EMAWeightAveraging(decay=0.5),
    "stochastic": lambda: StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1),
}

Outcome = tuple[dict[str, Tensor], dict[str, float]]


def fitted(
    module: LightningModule, layout: Layout, *, save: str | None = None, ckpt_path: str | None = None, **arguments: Any
) -> Outcome:
    """Train, perhaps save; the weights that live here, whole, and the metrics."""
    trainer = make_trainer(layout, **arguments)
    trainer.fit(module, ckpt_path=ckpt_path)
    if save is not None:
        trainer.save_checkpoint(save)
        trainer.strategy.barrier()
    named = module.named_parameters()
    weights = {name: full_tensor(parameter.detach()) for name, parameter in named if not parameter.is_meta}
    return weights, {name: float(value) for name, value in trainer.callback_metrics.items()}


def made(cls: type[zoo.Example]) -> zoo.Example:
    torch.manual_seed(3)
    return cls(batch_size=8).double()


def assert_same(results: list[Outcome], expected: Outcome, tolerance: float = 1e-9) -> None:
    for weights, metrics in results:
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[0][name], rtol=tolerance, atol=tolerance, msg=name)
        assert metrics.keys() == expected[1].keys()
        for name, value in metrics.items():
            assert value == pytest.approx(expected[1][name], rel=tolerance, abs=tolerance), name
    assert set().union(*(weights for weights, _ in results)) == set(expected[0])


# -- optimizers --------------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "fused adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "adamw one by one": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=False),
    "adamw at once": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=True, amsgrad=True),
    "sgd at once": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "lamb": lambda parameters: Lamb(parameters, lr=1e-2),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3, momentum=0.9),
    "adamax": lambda parameters: torch.optim.Adamax(parameters, lr=1e-3),
}


class Optimized(zoo.GPT):
    """Without biases of keys: their gradients are zero but for rounding, which Adam and its kin blow up."""

    optimizer = ""

    def configure_optimizers(self) -> Any:
        chosen = [p for name, p in self.named_parameters() if not name.endswith("in_proj_bias")]
        return OPTIMIZERS[self.optimizer](chosen)


def optimized(layout: Layout, name: str) -> Outcome:
    module = made(Optimized)
    module.optimizer = name
    return fitted(module, layout)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_equal_one_process(ranks: Pools, name: str) -> None:
    expected = optimized(None, name)
    assert_same(ranks(2, lightning=True).run(optimized, TP2, name), expected)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def resumed(layout: Layout, save: str | None, ckpt_path: str | None, epochs: int, callback: str | None) -> Outcome:
    callbacks = [CALLBACKS[callback]()] if callback else []
    module = made(zoo.GPT)
    return fitted(module, layout, save=save, ckpt_path=ckpt_path, max_epochs=epochs, callbacks=callbacks)


@pytest.mark.parametrize("callback", [None, *[pytest.param(each, marks=pytest.mark.thorough) for each in CALLBACKS]])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_checkpoints_are_those_of_one_process(ranks: Pools, tmp_path: Path, layout: str, callback: str | None) -> None:
    one, ours = str(tmp_path / "one.ckpt"), str(tmp_path / "ours.ckpt")
    first = resumed(None, one, None, 2, callback)
    size, arguments = LAYOUTS[layout]
    pool = ranks(size, lightning=True)
    assert_same(pool.run(resumed, arguments, ours, None, 2, callback), first)
    expected, saved = (torch.load(path, weights_only=False) for path in (one, ours))
    assert list(saved["state_dict"]) == list(expected["state_dict"])
    for name, value in expected["state_dict"].items():
        assert type(saved["state_dict"][name]) is Tensor
        torch.testing.assert_close(saved["state_dict"][name], value, rtol=1e-9, atol=1e-9)
    assert saved["optimizer_states"][0]["param_groups"] == expected["optimizer_states"][0]["param_groups"]
    for number, state in expected["optimizer_states"][0]["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(saved["optimizer_states"][0]["state"][number][key], value, rtol=1e-9, atol=1e-9)
    last = resumed(None, None, one, 4, callback)
    assert_same(pool.run(resumed, arguments, None, ours, 4, callback), last)
    assert_same(pool.run(resumed, arguments, None, one, 4, callback), last)
    assert_same([resumed(None, None, ours, 4, callback)], last)


# -- precision ---------------------------------------------------------------------------------------------------------


def in_precision(layout: Layout, precision: str) -> Outcome:
    return fitted(made(zoo.GPT).float(), layout, precision=precision)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_precisions(ranks: Pools, precision: str) -> None:
    expected = in_precision(None, precision)
    tolerance = 1e-9 if precision == "64-true" else 0.05
    for layout in LAYOUTS.values():
        assert_same(ranks(layout[0], lightning=True).run(in_precision, layout[1], precision), expected, tolerance)


class Overflowing(zoo.GPT):
    """One shard of one layer of one stage overflows at the third step."""

    def on_before_zero_grad(self, *args: Any) -> None:
        weight = self.body[3].mlp[0].weight
        if self.global_step == 2 and isinstance(weight, DTensor):
            self.handle = weight.register_hook(self.poisoned)
        elif hasattr(self, "handle"):
            self.handle.remove()

    def poisoned(self, gradient: Tensor) -> Tensor:
        if dist.get_rank(self.trainer.strategy.mesh.tensor_group) == 1:
            to_local(gradient)[0, 0] = float("inf")
        return gradient


def overflow(layout: Layout) -> tuple[float, dict[str, Tensor]]:
    scaler = GradScaler("cpu", init_scale=256.0, growth_interval=1000)
    module = made(Overflowing).float()
    fitted(module, layout, max_steps=3, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    plugin: Any = module.trainer.precision_plugin
    parameters = module.named_parameters()
    return plugin.scaler.get_scale(), {name: full_tensor(p.detach()) for name, p in parameters if not p.is_meta}


def test_an_overflow_of_one_shard_skips_the_step_of_all(ranks: Pools) -> None:
    results = ranks(4, lightning=True).run(overflow, TP2_PP2)
    assert [scale for scale, _ in results] == [128.0] * 4
    assert all(weight.isfinite().all() for _, weights in results for weight in weights.values())


def clipped(layout: Layout, algorithm: str) -> Outcome:
    return fitted(made(zoo.GPT), layout, gradient_clip_val=0.01, gradient_clip_algorithm=algorithm)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping(ranks: Pools, algorithm: str) -> None:
    expected = clipped(None, algorithm)
    for size, layout in LAYOUTS.values():
        assert_same(ranks(size, lightning=True).run(clipped, layout, algorithm), expected)


# -- evaluation, prediction, random numbers ----------------------------------------------------------------------------


class Watched(zoo.GPT):
    """Returns logits, keeps some, predicts, and drops out."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, targets = batch
        logits = self(tokens)
        self.log("val", F.cross_entropy(logits.transpose(1, 2), targets), sync_dist=True)
        self.log("confidence", logits.softmax(-1).amax(-1).mean(), sync_dist=True)
        self.kept = [*getattr(self, "kept", []), logits.detach()]
        return logits

    def on_validation_epoch_end(self) -> None:
        self.log("spread", torch.cat(self.kept).std())
        self.kept = []

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def predict_dataloader(self) -> Any:
        return DataLoader(self.val_dataloader().dataset, batch_size=self.batch_size)


def watched(layout: Layout) -> tuple[dict[str, float], list[Tensor]]:
    module = made(Watched)
    trainer = make_trainer(layout)
    trainer.fit(module)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    metrics |= {f"again {name}": value for name, value in trainer.validate(module, verbose=False)[0].items()}
    predictions: Any = trainer.predict(module)
    return metrics, predictions


def test_logits_in_shards_reach_hooks_and_callers_whole(ranks: Pools) -> None:
    expected, predictions = watched(None)
    for size, layout in LAYOUTS.values():
        for metrics, predicted in ranks(size, lightning=True).run(watched, layout):
            assert metrics == pytest.approx(expected, rel=1e-9)
            for mine, theirs in zip(predicted, predictions, strict=True):
                assert type(mine) is Tensor
                torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


class Dropping(zoo.Words):
    """Dropout in layers, on whole activations and on shards, and in the step."""

    def build(self) -> None:
        super().build()
        layer = nn.TransformerEncoderLayer(zoo.DIM, zoo.HEADS, 32, 0.3, batch_first=True)
        self.body = nn.Sequential(*(copy.deepcopy(layer) for _ in range(self.layers)))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(F.dropout(self.body(self.embed(tokens)), 0.1, self.training))


def dropped(layout: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    module = made(Dropping)
    weights, metrics = fitted(module, layout)
    return [metrics["loss_epoch"]], {name: weights[name] for name in weights if "norm" in name}


def test_dropout_is_reproducible_and_keeps_ranks_together(ranks: Pools) -> None:
    for sequence_parallel in (False, True):
        layout = {**TP2_PP2, "sequence_parallel": sequence_parallel}
        results = ranks(4, lightning=True).run(dropped, layout)
        again = ranks(4, lightning=True).run(dropped, layout)
        for (losses, weights), (losses_again, weights_again) in zip(results, again, strict=True):
            assert losses == losses_again == results[0][0]
            for name, weight in weights.items():
                assert torch.equal(weight, weights_again[name])
        for rank, peer in ((0, 1), (2, 3)):  # of one stage: whole parameters have the same bits
            for name, weight in results[rank][1].items():
                assert torch.equal(weight, results[peer][1][name]), name


# -- plans -------------------------------------------------------------------------------------------------------------


class SelfParallel(zoo.MLPs):
    """A module for Lightning's `ModelParallelStrategy`: it divides itself, with torch's styles."""

    def configure_model(self) -> None:
        if self.device_mesh is None or isinstance(self.body[0].weight, DTensor):
            return
        styles = {"body.0": ColwiseParallel(), "body.2": RowwiseParallel()}
        styles |= {"body.3.0": ColwiseParallel(), "body.3.2": RowwiseParallel()}
        parallelize_module(self, self.device_mesh["tensor_parallel"], styles)


class TorchStyles(zoo.MLPs):
    """A plan with styles of torch beside ours."""

    def tensor_parallel_plan(self) -> dict[str, Any]:
        return {
            "body.0": ColwiseParallel(),
            "body.2": RowwiseParallel(),
            "body.3.0": "colwise",
            "body.3.2": "rowwise",
            "body.4.[02]": "colwise_gather_output",
        }


class WeightUsedDirectly(zoo.Words):
    """The head is the embedding's weight itself, in the step."""

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.body(self.embed(tokens)), self.embed.weight)


class StatesLikeAParameter(zoo.Words):
    """A recurrent state, and masks, made in the likeness of parameters that are divided, as torch's examples do it."""

    def build(self) -> None:
        super().build()
        self.rnn = nn.LSTM(zoo.DIM, zoo.DIM, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        weight = next(self.parameters())
        assert not isinstance(weight, DTensor) or weight.shape == (zoo.TOKENS, zoo.DIM)
        made = [weight.new_zeros(1, len(tokens), zoo.DIM), weight.new_ones(1, len(tokens), zoo.DIM)]
        made += [torch.zeros_like(weight), torch.ones_like(weight), torch.full_like(weight, 2.0)]
        made += [torch.empty_like(weight), weight.new_full((2,), 1.0), weight.new_tensor([1.0])]
        assert all(type(each) is Tensor for each in made)
        assert made[2].shape == (zoo.TOKENS, zoo.DIM)
        h, _ = self.rnn(self.body(self.embed(tokens)), (made[0], made[1]))
        return self.head(h) + made[4].sum()


FOREIGN: dict[str, type[zoo.Example]] = {
    "self-parallel": SelfParallel,
    "torch styles": TorchStyles,
    "weight used directly": WeightUsedDirectly,
    "states like a parameter": StatesLikeAParameter,
}


def foreign(layout: Layout, name: str) -> tuple[Outcome, list[str]]:
    module = made(FOREIGN[name])
    outcome = fitted(module, layout, gradient_clip_val=0.1)
    return outcome, [name for name, parameter in module.named_parameters() if is_sharded(parameter)]


@pytest.mark.parametrize("name", FOREIGN)
def test_modules_that_bring_their_own_ways(ranks: Pools, name: str) -> None:
    expected, _ = foreign(None, name)
    for layout in (TP2, {**TP2, "num_microbatches": 3}):
        results = ranks(2, lightning=True).run(foreign, layout, name)
        assert_same([outcome for outcome, _ in results], expected)
        assert all(len(sharded) > 0 for _, sharded in results)


def refused(cls: type[zoo.Example], arguments: dict[str, Any], words: str = "tensor_parallel") -> str:
    with pytest.raises(ValueError, match=words) as caught:
        make_trainer({**TP2, **arguments}, max_steps=1).fit(made(cls))
    return str(caught.value)


REFUSALS: dict[str, tuple[Any, list[str]]] = {
    "nothing matches": ({"body.*.mpl": "colwise"}, ["'body.*.mpl'", "matches no module of GPT", "'body.3.mlp'"]),
    "no such style": ({"head": "columnwise"}, ["'columnwise'", "'head'", "colwise, "]),
    "another kind of layer": ({"norm": "colwise"}, ["'norm'", "LayerNorm", "instead of Linear"]),
    "indivisible": (
        {"body.*.attention": "divide:dropout"},
        ["body.0.attention.dropout is 0.0", "cannot be divided over tensor_parallel_size=2 ranks"],
    ),
    "tied": ({"embed": "vocab"}, ["'embed.weight' and 'head.weight'", "tied"]),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_wrong_plan_is_refused_on_every_rank(ranks: Pools, name: str) -> None:
    plan, words = REFUSALS[name]
    cls = zoo.TiedWords if name == "tied" else zoo.GPT
    for text in ranks(2, lightning=True).run(refused, cls, {"tensor_parallel_plan": plan}):
        for word in words:
            assert word in text, text


class ParametersOfInit(zoo.GPT):
    """Keeps its parameters in a list, from before its layers are shared."""

    def __init__(self, batch_size: int) -> None:
        super().__init__(batch_size)
        self.groups = [{"params": list(self.parameters())}]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.groups)


def test_an_optimizer_over_replaced_parameters_is_refused(ranks: Pools) -> None:
    for text in ranks(2, lightning=True).run(refused, ParametersOfInit, {}, "not in ParametersOfInit"):
        assert "In `configure_optimizers`, pass `self.parameters()` to the optimizer" in text


def test_a_sequence_that_cannot_be_divided_is_refused(ranks: Pools) -> None:
    for text in ranks(4, lightning=True).run(indivisible):
        assert "Pad the sequence to a multiple of 2, or use sequence_parallel=False" in text


def indivisible() -> str:
    class Odd(zoo.Encoders):
        def sample(self, index: int, generator: torch.Generator) -> Any:
            x, y = super().sample(index, generator)
            return x[:7], y[:7]

    with pytest.raises(ValueError, match="A sequence of length 7") as caught:
        make_trainer({**TP2_PP2, "sequence_parallel": True}, max_steps=1).fit(made(Odd))
    return str(caught.value)


def shares(layout: dict[str, Any]) -> dict[str, tuple[int, int]]:
    module = made(zoo.GPT)
    make_trainer(layout, max_steps=1).fit(module)
    return {
        name: (parameter.numel(), to_local(parameter).numel())
        for name, parameter in module.named_parameters()
        if not parameter.is_meta
    }


def test_a_rank_holds_its_share(ranks: Pools) -> None:
    for size in (2, 4):
        for held in ranks(size, lightning=True).run(shares, {"tensor_parallel_size": size}):
            divided = {name for name, (whole, local) in held.items() if local * size == whole}
            assert all(local in (whole, whole // size) for whole, local in held.values())
            whole = [name for name in held if name not in divided]
            assert whole == [name for name in held if "norm" in name or name.endswith(("out_proj.bias", "mlp.2.bias"))]


def boundary_bytes(sequence_parallel: bool) -> int:
    sent = 0

    def counting(channel: Channel, key: Any, leaves: list[Any], spec: Any) -> Any:
        nonlocal sent
        sent += sum(leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, Tensor))
        return send(channel, key, leaves, spec)

    send = Channel.send
    with mock.patch.object(Channel, "send", counting):
        layout = {**TP2_PP2, "sequence_parallel": sequence_parallel, "faults": Faults(compare_microbatches=False)}
        make_trainer(layout, max_steps=2, limit_val_batches=0).fit(made(zoo.Encoders))
    return sent


def test_sequence_parallel_boundaries_carry_shares(ranks: Pools) -> None:
    whole = ranks(4, lightning=True).run(boundary_bytes, False)
    shared = ranks(4, lightning=True).run(boundary_bytes, True)
    batch_bytes = 8 * zoo.LENGTH * zoo.DIM * 8
    assert whole == [2 * batch_bytes] * 4, "two steps; activations one way, gradients the other"
    assert shared == [batch_bytes] * 4


def test_presets() -> None:
    names = StrategyRegistry.available_strategies()
    assert {"hybrid", "hybrid_pp2", "hybrid_tp2", "hybrid_tp2_pp2", "hybrid_tp4_pp2"} <= set(names)


def test_packed_rows_are_an_ordinary_shard(ranks: Pools) -> None:
    ranks(2, lightning=True).run(packed)


def packed() -> None:
    module = made(zoo.GPT)
    before = module.body[0].attention.in_proj_weight.detach().clone()
    make_trainer(TP2, max_steps=1, limit_train_batches=0).fit(module)
    weight = module.body[0].attention.in_proj_weight
    assert weight.shape == before.shape
    assert torch.equal(weight.full_tensor(), before)
    seen = weight.detach().view(3, zoo.DIM, zoo.DIM)
    assert seen.placements == (Shard(1),)


class Failing(zoo.GPT):
    """One of the ranks that share the last stage fails."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 2 and dist.get_rank() == 3:
            raise RuntimeError("a shard is broken")
        return super().training_step(batch, batch_idx)


def failed() -> tuple[float, str]:
    start = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        make_trainer({**TP2_PP2, "timeout": timedelta(seconds=50)}).fit(made(Failing))
    return time.monotonic() - start, str(caught.value)


def test_a_failure_of_one_rank_ends_all_soon(ranks: Pools) -> None:
    for seconds, text in ranks(4, lightning=True).run(failed):
        assert "a shard is broken" in text
        assert seconds < 30, "not a timeout"


class OwnBlocks(zoo.OwnAttention):
    """Its plan divides an attribute: while a layer runs, whoever trains it."""


def trained_twice(layout: Layout) -> tuple[Outcome, int]:
    module = made(OwnBlocks)
    fitted(module, layout)
    outcome = fitted(module, layout)
    return outcome, module.body[0].attention.num_heads


def trained_otherwise(second: dict[str, Any]) -> str:
    module = made(zoo.GPT)
    fitted(module, TP2, limit_train_batches=0)
    with pytest.raises(ValueError, match=r"An earlier run sharded GPT with \(") as caught:
        fitted(module, second, limit_train_batches=0)
    return str(caught.value)


@pytest.mark.parametrize(
    "second", [{"data_parallel_size": 2}, {**TP2, "sequence_parallel": True}, {**TP2, "tensor_parallel_plan": None}]
)
def test_a_module_stays_divided_as_it_is(ranks: Pools, second: dict[str, Any]) -> None:
    for text in ranks(2, lightning=True).run(trained_otherwise, second):
        assert "`trainer.strategy.gather_module()`" in text


def test_several_trainers_train_one_module(ranks: Pools) -> None:
    expected, heads = trained_twice(None)
    results = ranks(2, lightning=True).run(trained_twice, TP2)
    assert_same([outcome for outcome, _ in results], expected)
    assert [heads for _, heads in results] == [heads] * 2
