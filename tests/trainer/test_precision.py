from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    FSDPPrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from torch import Tensor, nn
from torch.amp import GradScaler

from lightning_hybrid.data_parallel.grad_clip import clip_by_total_norm
from lightning_hybrid.trainer.precision import SUPPORTED, ModelGroupGradScaler, adapt, check, check_optimizer
from tests.pool import Pools

INFINITY = float("inf")


def world() -> dist.ProcessGroup | None:
    return dist.group.WORLD


def nobody() -> None:
    return None


def clip_in_world(parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
    return clip_by_total_norm(parameters, max_norm, group=world())


def clip_alone(parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
    return clip_by_total_norm(parameters, max_norm)


def mixed_precision(**settings: Any) -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", GradScaler("cpu", **settings))


def optimizer_with(gradients: list[float | None]) -> torch.optim.SGD:
    """A plain optimizer of scalars with these gradients; an empty one leaves a group without parameters."""
    parameters = [nn.Parameter(torch.tensor(1.0)) for _ in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = None if gradient is None else torch.tensor(gradient)
    optimizer = torch.optim.SGD(parameters or [nn.Parameter(torch.zeros(()))], lr=0.5)
    optimizer.param_groups[0]["params"] = parameters
    return optimizer


# Overflow

# For each step, the gradients of each of the three ranks: the last one never has any.
OVERFLOWS = [
    [[2.0, 4.0], [8.0], []],
    [[2.0], [INFINITY], []],
    [[2.0, None], [None], []],
    [[float("nan")], [1.0], []],
    [[2.0], [4.0], []],
    [[2.0], [4.0], []],
    [[None], [4.0], []],
]
SETTINGS = {"init_scale": 8.0, "growth_interval": 2, "growth_factor": 4.0, "backoff_factor": 0.25}


def scale_steps(steps: list[list[list[float | None]]], rank: int | None) -> list[tuple[list[float], dict[str, float]]]:
    """Values of the parameters and state of the scaler after each step, on one rank or (rank `None`) in one process."""
    if rank is None:
        scaler = GradScaler("cpu", **SETTINGS)
        scaler.scale(torch.zeros(()))
    else:
        scaler = ModelGroupGradScaler.adopt(GradScaler("cpu", **SETTINGS), world)
    history = []
    for step in steps:
        gradients = step[rank] if rank is not None else [g for stage in step for g in stage]
        optimizer = optimizer_with(gradients)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        history.append(([p.item() for p in optimizer.param_groups[0]["params"]], scaler.state_dict()))
    return history


def scale_steps_here() -> list[tuple[list[float], dict[str, float]]]:
    return scale_steps(OVERFLOWS, dist.get_rank())


def test_overflow_on_one_rank_is_overflow_on_all(ranks: Pools) -> None:
    expected = scale_steps(OVERFLOWS, None)
    results = ranks(3).run(scale_steps_here)
    for number, (values, state) in enumerate(expected):
        assert [result[number][1] for result in results] == [state] * 3
        assert [value for result in results for value in result[number][0]] == values
    assert {state["scale"] for _, state in expected} == {8.0, 2.0, 0.5}, "the story has growth and backoff"


def several_optimizers() -> tuple[int, list[float], float]:
    scaler = ModelGroupGradScaler.adopt(GradScaler("cpu", init_scale=4.0), world)
    first = optimizer_with([INFINITY if dist.get_rank() == 1 else 4.0])
    second = optimizer_with([4.0])
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        for optimizer in (first, second):
            scaler.step(optimizer)  # unscales on its own
        scaler.update()
    values = [optimizer.param_groups[0]["params"][0].item() for optimizer in (first, second)]
    return all_reduce.call_count, values, scaler.get_scale()


def test_each_optimizer_decides_for_itself_with_one_collective(ranks: Pools) -> None:
    assert ranks(2).run(several_optimizers) == [(2, [1.0, 0.5], 2.0)] * 2


def test_state_is_that_of_torch() -> None:
    theirs, given = GradScaler("cpu", **SETTINGS), GradScaler("cpu", **SETTINGS)
    ours = ModelGroupGradScaler.adopt(given, nobody)
    assert ours is given
    assert ours.state_dict() == theirs.state_dict()
    for scaler in (theirs, ours):
        optimizer = optimizer_with([4.0])
        scaler.scale(torch.zeros(()))
        scaler.step(optimizer)
        scaler.update()
    assert ours.state_dict() == theirs.state_dict()
    assert ours.state_dict()["_growth_tracker"] == 1
    assert ModelGroupGradScaler.adopt(ours, world).state_dict() == theirs.state_dict()
    fresh = ModelGroupGradScaler(nobody, "cpu")
    fresh.load_state_dict(theirs.state_dict())
    assert fresh.state_dict() == theirs.state_dict()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))])
def test_scaler_and_plugin_are_copied_with_their_state(duplicate: Any) -> None:
    plugin = adapt(mixed_precision(init_scale=32.0), model_group=nobody, clip_by_norm=clip_alone)
    plugin.scaler.initialize()  # type: ignore[union-attr]
    again = duplicate(plugin)
    assert again.state_dict() == plugin.state_dict()
    assert again.scaler.model_group is nobody
    optimizer = optimizer_with([64.0])
    again.scaler.step(optimizer)
    again.clip_gradients(optimizer, 1.0)
    assert optimizer.param_groups[0]["params"][0].item() == 0.0
    assert again.clip_grad_by_norm.args[0] is again


def test_without_a_group_torch_decides() -> None:
    scaler = ModelGroupGradScaler.adopt(GradScaler("cpu"), nobody)
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler.step(optimizer_with([]))


def test_a_scaler_of_the_user_is_refused() -> None:
    class Mine(GradScaler):
        pass

    plugin = MixedPrecision("16-mixed", "cpu", Mine("cpu"))
    with pytest.raises(TypeError, match=r"Mine.*torch\.amp\.GradScaler"):
        adapt(plugin, model_group=nobody, clip_by_norm=clip_alone)


def test_a_torch_without_the_method_is_refused() -> None:
    with mock.patch.object(GradScaler, "_unscale_grads_", None), pytest.raises(RuntimeError, match="bf16-mixed"):
        ModelGroupGradScaler(nobody, "cpu")


# Plugins


def test_a_plugin_keeps_its_identity_and_may_be_adapted_again() -> None:
    plugin = mixed_precision(init_scale=32.0)
    given = plugin.scaler
    assert adapt(plugin, model_group=world, clip_by_norm=clip_in_world) is plugin
    assert plugin.scaler is given  # whose scale its user may ask for
    assert type(plugin) is MixedPrecision
    adapt(plugin, model_group=nobody, clip_by_norm=clip_alone)
    assert isinstance(plugin.scaler, ModelGroupGradScaler)
    assert plugin.scaler.model_group is nobody
    assert plugin.state_dict()["scale"] == 32.0


@pytest.mark.parametrize(
    "plugin", [Precision(), DoublePrecision(), HalfPrecision("bf16-true"), MixedPrecision("bf16-mixed", "cpu")]
)
def test_every_plugin_clips_with_the_norm_of_the_model(plugin: Precision) -> None:
    clipped = []

    def clip(parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        clipped.append((list(parameters), max_norm))
        return torch.zeros(())

    adapt(plugin, model_group=nobody, clip_by_norm=clip)
    optimizer = optimizer_with([1.0, None])
    plugin.clip_gradients(optimizer, 0.25)
    assert clipped == [(optimizer.param_groups[0]["params"], 0.25)]
    plugin.clip_gradients(optimizer, 0.0)
    assert len(clipped) == 1


def test_clipping_of_the_user_stays_with_a_warning() -> None:
    class Mine(Precision):
        def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
            raise NotImplementedError

    with pytest.warns(UserWarning, match="Mine overrides `clip_grad_by_norm`"):
        plugin = adapt(Mine(), model_group=nobody, clip_by_norm=clip_alone)
    with pytest.raises(NotImplementedError):
        plugin.clip_gradients(optimizer_with([1.0]), 1.0)


def test_plugins_of_other_strategies_are_refused() -> None:
    with pytest.raises(ValueError, match="FSDPStrategy") as caught:
        check(FSDPPrecision("bf16-true"))
    assert all(repr(precision) in str(caught.value) for precision in SUPPORTED)


@pytest.mark.rows(14)
@pytest.mark.parametrize("name", ["TransformerEnginePrecision", "BitsandbytesPrecision"])
def test_plugins_that_replace_layers_are_refused(name: str) -> None:
    kind = getattr(pl.plugins.precision, name)
    with pytest.raises(ValueError, match=name):
        check(kind.__new__(kind))  # its libraries are not installed


@pytest.mark.rows(13)
def test_fused_optimizers_cannot_unscale() -> None:
    parameters = [nn.Parameter(torch.zeros(2))]
    fused, plain = torch.optim.AdamW(parameters, fused=True), torch.optim.AdamW(parameters)
    with pytest.raises(ValueError, match="fused=False"):
        check_optimizer(mixed_precision(), fused)
    check_optimizer(mixed_precision(), plain)
    check_optimizer(MixedPrecision("bf16-mixed", "cpu"), fused)
    check_optimizer(Precision(), fused)


# Through a Trainer on every rank, each with a part of the model


class Stage(BoringModel):
    """A model whose weights, on each rank, are a part of the whole; the gradient of step 1 overflows on rank 1."""

    def __init__(self, overflow: bool) -> None:
        super().__init__()
        self.overflow = overflow
        self.history: list[tuple[float, int, Tensor]] = []

    def on_after_backward(self) -> None:
        gradient = self.layer.weight.grad
        assert gradient is not None
        gradient.copy_(torch.full_like(gradient, 4.0 + dist.get_rank()) * self.scale)
        if self.overflow and self.trainer.fit_loop.total_batch_idx == 1 and dist.get_rank() == 1:
            gradient[0, 0] = INFINITY
        self.layer.bias.grad = None

    @property
    def scale(self) -> float:
        return self.trainer.precision_plugin.state_dict().get("scale", 1.0)

    def on_train_batch_end(self, *_: Any) -> None:
        state = self.trainer.precision_plugin.state_dict()
        self.history.append(
            (state.get("scale", 1.0), state.get("_growth_tracker", 0), self.layer.weight.detach().clone())
        )

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def fit(plugin: Precision, clip: float | None, overflow: bool, folder: Path) -> list[tuple[float, int, Tensor]]:
    adapt(plugin, model_group=world, clip_by_norm=clip_in_world)
    model = Stage(overflow)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=4,
        limit_val_batches=0,
        plugins=[plugin],
        gradient_clip_val=clip,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    start = model.layer.weight.detach().clone()
    trainer.fit(model)
    return [(scale, tracker, weight - start) for scale, tracker, weight in model.history]


@pytest.mark.filterwarnings("ignore")
def test_trainers_of_a_model_group_skip_together(ranks: Pools, tmp_path: Path) -> None:
    results = ranks(2).run(fit, mixed_precision(init_scale=16.0, growth_interval=2), None, True, tmp_path)
    for rank, history in enumerate(results):
        assert [(scale, tracker) for scale, tracker, _ in history] == [(16.0, 1), (8.0, 0), (8.0, 1), (16.0, 0)]
        for (_, _, change), num_steps in zip(history, [1, 1, 2, 3], strict=True):
            torch.testing.assert_close(change, torch.full_like(change, -num_steps * (4.0 + rank)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["fp32", "fp16"])
def test_trainers_of_a_model_group_clip_together(ranks: Pools, tmp_path: Path, kind: str) -> None:
    plugin = mixed_precision(init_scale=16.0) if kind == "fp16" else Precision()
    results = ranks(2).run(fit, plugin, 0.5, False, tmp_path)
    whole = torch.cat([torch.full((2, 32), 4.0), torch.full((2, 32), 5.0)])
    expected = -whole * 0.5 / (whole.norm() + 1e-6)
    for rank, history in enumerate(results):
        torch.testing.assert_close(history[0][2], expected[2 * rank : 2 * rank + 2])
