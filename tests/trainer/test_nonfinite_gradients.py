"""Gradients that are not finite: no step, or an error, on every rank alike; and where they come from."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from lightning_hybrid import Faults
from lightning_hybrid.data_parallel.grad_clip import find_nonfinite
from lightning_hybrid.strategy.checks import check_nonfinite
from lightning_hybrid.trainer.debug.nonfinite_gradients import SKIPPED
from tests.pool import Pools
from tests.training_jobs import Regression, assert_same, loader, make_trainer, train, weights

#: Optimizer steps of ten, two epochs of five batches, whose gradients are not finite.
BAD = (1, 2, 6)


class Exploding(torch.autograd.Function):
    """The identity, whose gradient is not finite where that is asked for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bad: bool) -> Tensor:
        ctx.bad = bad
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * torch.inf if ctx.bad else gradient, None


class Spoiling(nn.Module):
    """A layer that spoils the gradients of what is before it, for some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.bad = False

    def forward(self, x: Tensor) -> Tensor:
        return Exploding.apply(x, self.bad)


class Spoiled(Regression):
    """Gradients of the first stage are infinite in some steps.

    Args:
        fused: Whether the optimizer is told on the device not to step.
    """

    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        self.body.insert(1, Spoiling())
        self.fused, self.bad_steps = fused, BAD

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if isinstance(self.body[1], Spoiling):
            self.body[1].bad = self.trainer.global_step in self.bad_steps

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=self.fused)


class Oracle(Spoiled):
    """One process that leaves the same steps out by itself."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        finite = all(bool(p.grad.isfinite().all()) for p in self.parameters() if p.grad is not None)
        assert finite == (self.trainer.global_step not in BAD)
        if not finite:
            for parameter in self.parameters():
                parameter.grad = None


class Skipped(Callback):
    def __init__(self) -> None:
        self.counts: list[float] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.counts.append(float(trainer.callback_metrics.get(SKIPPED, -1)))


def fit(layout: Mapping[str, Any] | None, arguments: Mapping[str, Any], *, fused: bool, batch_size: int) -> Any:
    """The weights, what was logged, and how many steps there were."""
    module, skipped = Oracle(fused) if layout is None else Spoiled(fused), Skipped()
    data = loader(batch_size, num_samples=40)
    result = train(module, layout, data, max_epochs=2, callbacks=[skipped], **arguments)
    return result.weights, skipped.counts, result.trainer.global_step


SKIP: dict[str, Any] = {"faults": Faults(on_nonfinite="skip")}
LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2": {"pipeline_parallel_size": 2, "num_microbatches": 4},
    "tp2": {"tensor_parallel_size": 2, "num_microbatches": 2},
    "dp2": {},
    "zero3": {"zero_stage": 3},
}


def fit_twice(layout: Mapping[str, Any], batch_size: int) -> list[Any]:
    """With an optimizer that is told on the host, by the norm of clipping, and with one that is told on the device."""
    own = {**layout, **SKIP}
    return [
        fit(own, {"gradient_clip_val": 0.05}, fused=False, batch_size=batch_size),
        fit(own, {}, fused=not ("zero_stage" in layout or "tensor_parallel_size" in layout), batch_size=batch_size),
    ]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_that_is_skipped_leaves_everything_as_it_was_on_every_rank(ranks: Pools, name: str) -> None:
    """Only the first of two stages has gradients that are not finite."""
    layout = LAYOUTS[name]
    replicas = 2 if name in ("dp2", "zero3") else 1
    expected = [fit(None, each, fused=False, batch_size=8) for each in ({"gradient_clip_val": 0.05}, {})]
    results = ranks(2, lightning=True).run(fit_twice, layout, 8 // replicas)
    for of_rank in results:
        for (found, counts, steps), (weights_of_one, _, steps_of_one) in zip(of_rank, expected, strict=True):
            assert_same(found, weights_of_one)
            assert steps == steps_of_one == 10
            assert counts == [float(sum(bad <= batch for bad in BAD)) for batch in range(10)]


def raised(layout: Mapping[str, Any]) -> tuple[str, dict[str, Tensor]]:
    module = Spoiled()
    with pytest.raises(RuntimeError) as error:
        make_trainer({**layout, "faults": Faults(on_nonfinite="raise")}).fit(module, loader())
    return str(error.value), weights(module)


def test_a_step_that_is_an_error_is_one_on_every_rank_and_changes_nothing(ranks: Pools) -> None:
    one = Spoiled()
    make_trainer(None, max_steps=1).fit(one, loader())
    for text, held in ranks(2, lightning=True).run(raised, LAYOUTS["pp2"]):
        expected = "Gradients of optimizer step 1 are not finite (embed.weight, embed.bias, body.0.0.weight and 1"
        assert expected in text
        assert_same(held, {name: weights(one)[name] for name in held})


def warned(layout: Mapping[str, Any], bad: tuple[int, ...], arguments: Mapping[str, Any]) -> list[str]:
    """The warnings of a run about gradients, whose optimizer uses them."""
    module = Spoiled()
    module.bad_steps = bad
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(layout, **arguments).fit(module, loader())
    return [str(each.message) for each in caught if "are not finite" in str(each.message)]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("bad", "arguments"), [((1, 2), {"gradient_clip_val": 0.05}), ((2,), {"max_steps": 3})])
def test_gradients_that_an_optimizer_uses_all_the_same_are_told_once(
    ranks: Pools, name: str, bad: tuple[int, ...], arguments: Mapping[str, Any]
) -> None:
    """By one rank, which says where. The last step of a run has none after it."""
    results = ranks(2, lightning=True).run(warned, LAYOUTS[name], bad, arguments)
    texts = [text for of_rank in results for text in of_rank]
    assert len(texts) == 1, texts
    start = rf"Gradients of optimizer step {bad[0]} are not finite on pipeline rank [01] \(embed.weight"
    assert re.match(start, texts[0]), texts


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_that_are_finite_are_not_talked_about(ranks: Pools, name: str) -> None:
    assert ranks(2, lightning=True).run(warned, LAYOUTS[name], (), {}) == [[], []]


def test_gradients_that_are_not_finite_are_found_by_kind() -> None:
    """A sum of squares would be too large for a number where gradients are large and finite."""
    values = [torch.tensor([1e30, -1e30]), torch.tensor([1.0, torch.nan]), torch.tensor([[torch.inf]]).double()]
    parameters = [nn.Parameter(torch.zeros_like(value)) for value in values]
    for parameter, value in zip(parameters, values, strict=True):
        parameter.grad = value
    sparse, without = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    sparse.grad = torch.tensor([torch.nan, 0.0]).to_sparse()
    found = find_nonfinite([*parameters, sparse, without])
    assert [flags.tolist() for _, flags in found] == [[False, True], [True]]
    assert [list(map(id, owners)) for owners, _ in found] == [list(map(id, parameters[:2])), [id(parameters[2])]]


def test_a_scaler_makes_such_gradients_on_purpose() -> None:
    with pytest.raises(
        ValueError,
        match=r"faults.on_nonfinite='raise' cannot be combined with a precision that scales the loss",
    ):
        check_nonfinite("raise", torch.amp.GradScaler("cpu"))
    check_nonfinite("skip", torch.amp.GradScaler("cpu"))
    check_nonfinite("raise", None)


class Faulty(nn.Module):
    """Makes a NaN at its n-th call: in the forward, or in the backward of that.

    Args:
        where: ``"forward"`` or ``"backward"``.
        call: The number of the call.
    """

    def __init__(self, where: str, call: int) -> None:
        super().__init__()
        self.where, self.left = where, call

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left:
            return x
        if self.where == "forward":
            return x + torch.nan
        return x + (x - x.detach()).abs().sqrt()  # its derivative at 0 is 0 / 0


class Anomalous(Regression):
    """Has a fault in one place.

    Args:
        where: Of the fault: a layer's ``"forward"`` or ``"backward"``, or ``"loss"``, ``"batch"``.
        layer: Of the body.
        call: The call of the layer, which is the microbatch, from 1.
    """

    def __init__(self, where: str, layer: int = 0, call: int = 3) -> None:
        super().__init__()
        self.where = where
        if where in ("forward", "backward"):
            self.body.insert(layer, Faulty(where, call))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        if self.where == "batch":
            x = x + torch.nan
        return nn.functional.mse_loss(self(x), y) + (torch.inf if self.where == "loss" else 0.0)


def find_anomaly(layout: Mapping[str, Any], faults: list[tuple[Any, ...]]) -> list[str]:
    texts = []
    for fault in faults:
        with pytest.raises(RuntimeError) as error:
            make_trainer(layout, detect_anomaly=True).fit(Anomalous(*fault), loader())
        texts.append(str(error.value))
    return texts


ANOMALIES: dict[tuple[Any, ...], str] = {
    ("forward", 1): "The forward pass of layer `body.1` (Faulty) produced NaNs",
    ("forward", 5): "The forward pass of layer `body.5` (Faulty) produced NaNs",
    ("backward", 1): "The backward pass of layer `body.1` (Faulty) produced",
    ("backward", 5): "The backward pass of layer `body.5` (Faulty) produced",
    ("batch",): "The input to layer `embed` (Linear) already contains NaNs, which come from the batch",
    ("loss",): "The loss is not finite",
}


@pytest.mark.rows(65)
def test_an_anomaly_is_named_by_stage_layer_and_microbatch_on_every_rank(ranks: Pools) -> None:
    for texts in ranks(2, lightning=True).run(find_anomaly, LAYOUTS["pp2"], list(ANOMALIES)):
        for fault, text in zip(ANOMALIES, texts, strict=True):
            stage = 1 if fault[-1] == 5 or fault == ("loss",) else 0
            assert ANOMALIES[fault] in text, text
            assert f"(stage {stage}, microbatch {2 if len(fault) > 1 else 0})" in text, text


@pytest.mark.parametrize("name", ["tp2", "dp2"])
def test_an_anomaly_is_named_where_there_are_no_stages(ranks: Pools, name: str) -> None:
    faults = [("forward", 1, 2), ("backward", 5, 2), ("loss",)]
    for texts in ranks(2, lightning=True).run(find_anomaly, LAYOUTS[name], faults):
        for fault, text in zip(faults, texts, strict=True):
            assert ANOMALIES[fault[:2]] in text, text
            assert ("(stage 0, microbatch" in text) == (name == "tp2"), text
