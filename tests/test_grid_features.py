"""What Lightning offers around training, where layers are shared by ranks in two and three dimensions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_hybrid.distributed.dtensor import is_sharded
from tests.pool import Pools
from tests.test_tensor_features import Layout, Outcome, assert_same, fitted, made, optimized, resumed
from tests.training_jobs import make_trainer
from tests.zoo import tensor as zoo

pytestmark = [pytest.mark.timeout(600), pytest.mark.distributed]

SQUARE: dict[str, Any] = {"tensor_parallel_size": 4, "tensor_parallel_mode": "2d"}
TESSERACT = {"tensor_parallel_size": 8, "tensor_parallel_mode": "2.5d", "tensor_parallel_depth": 2}
CUBE = {"tensor_parallel_size": 8, "tensor_parallel_mode": "3d"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "2d": (4, SQUARE),
    "2d, directories": (4, {**SQUARE, "save_distributed_checkpoint": True}),
    "2d pp2": (8, {**SQUARE, "pipeline_parallel_size": 2, "num_microbatches": 4}),
    "2d dp2 zero3": (8, {**SQUARE, "data_parallel_size": 2, "zero_stage": 3, "save_distributed_checkpoint": True}),
    "2.5d": (8, {**TESSERACT, "save_distributed_checkpoint": True}),
    "3d": (8, {**CUBE, "save_distributed_checkpoint": True}),
}


@pytest.mark.thorough
@pytest.mark.parametrize("layout", LAYOUTS)
def test_checkpoints_are_those_of_one_process(ranks: Pools, tmp_path: Path, layout: str) -> None:
    one, ours = str(tmp_path / "one.ckpt"), str(tmp_path / "ours.ckpt")
    size, arguments = LAYOUTS[layout]
    pool, is_directory = ranks(size, lightning=True), "save_distributed_checkpoint" in arguments
    first, last = resumed(None, one, None, 2, None), resumed(None, None, one, 4, None)
    if arguments.get("data_parallel_size", 1) == 1:  # else replicas see other samples
        assert_same(pool.run(resumed, arguments, ours, None, 2, None), first)
        assert_same(pool.run(resumed, arguments, None, one, 4, None), last)
        assert_same(pool.run(resumed, arguments, None, ours, 4, None), last)
    else:
        whole = pool.run(resumed, arguments, None, None, 4, None)
        pool.run(resumed, arguments, ours, None, 2, None)
        assert_same(pool.run(resumed, arguments, None, ours, 4, None), whole[0])
    if is_directory:  # another arrangement reads it
        if arguments.get("data_parallel_size", 1) == 1:
            assert_same(ranks(2, lightning=True).run(resumed, {"tensor_parallel_size": 2}, None, ours, 4, None), last)
        return
    expected, saved = (torch.load(path, weights_only=False) for path in (one, ours))
    assert list(saved["state_dict"]) == list(expected["state_dict"])
    for name, value in expected["state_dict"].items():
        assert type(saved["state_dict"][name]) is Tensor
        torch.testing.assert_close(saved["state_dict"][name], value, rtol=1e-9, atol=1e-9)
    assert_same([resumed(None, None, ours, 4, None)], last)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["adamw at once", "fused adamw"])
def test_optimizers_equal_one_process(ranks: Pools, name: str) -> None:
    assert_same(ranks(4, lightning=True).run(optimized, SQUARE, name), optimized(None, name))


def in_half(layout: Layout, precision: str) -> Outcome:
    return fitted(made(zoo.Encoders).float(), layout, precision=precision)


@pytest.mark.thorough
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_precisions(ranks: Pools, precision: str) -> None:
    assert_same(ranks(4, lightning=True).run(in_half, SQUARE, precision), in_half(None, precision), 0.05)


def gathered(layout: dict[str, Any]) -> tuple[int, dict[str, Tensor], float]:
    """How many parameters were divided, the module made whole, and its loss where it is on its own."""
    module = made(zoo.OwnAttention)
    trainer = make_trainer(layout, max_epochs=1)
    trainer.fit(module)
    divided = sum(map(is_sharded, module.parameters()))
    trainer.strategy.gather_module()  # type: ignore[attr-defined]
    assert not any(map(is_sharded, module.parameters()))
    x = torch.ones(2, zoo.LENGTH, zoo.DIM, dtype=torch.float64).cumsum(1)
    weights = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    return divided, weights, float(module(x).detach().sum())


def alone() -> tuple[dict[str, Tensor], float]:
    module = made(zoo.OwnAttention)
    make_trainer(None, max_epochs=1).fit(module)
    x = torch.ones(2, zoo.LENGTH, zoo.DIM, dtype=torch.float64).cumsum(1)
    return {name: each.detach() for name, each in module.named_parameters()}, float(module(x).detach().sum())


def test_a_module_is_made_whole_again(ranks: Pools) -> None:
    weights, total = alone()
    for divided, own, found in ranks(4, lightning=True).run(gathered, SQUARE):
        assert divided > len(own) / 2
        torch.testing.assert_close(own, weights, rtol=1e-9, atol=1e-9)
        assert found == pytest.approx(total, rel=1e-9)
