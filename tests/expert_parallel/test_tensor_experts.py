"""Experts over the tensor-parallel ranks by an entry of the plan, in regions of sequences, and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_hybrid import HybridStrategy
from lightning_hybrid.expert_parallel.experts import find_experts
from lightning_hybrid.tensor_parallel.plan import make_plan
from tests.pool import Pools
from tests.training_jobs import Result, assert_same, train
from tests.zoo.experts import Experts, OneSided, Sparse, SparseLayers

pytestmark = pytest.mark.distributed

PLANS: dict[str, dict[str, Any]] = {
    "plan": {"tensor_parallel_plan": {"body.*.experts": "experts"}},
    # The last experts get no tokens, and each rank has other tokens outside of the experts.
    "region": {
        "tensor_parallel_plan": {
            "body.1": "sequence_region",
            "body.1.norm": "sequence_parallel",
            "body.*.experts": "experts",
        },
        "sequence_parallel": True,
    },
}


def trained(layout: dict[str, Any] | None, module: type[SparseLayers]) -> tuple[Result, list[tuple[int, ...]]]:
    torch.manual_seed(3)
    made = module()
    result = train(made, layout, precision="64-true", limit_val_batches=0)
    return result, [tuple(each.shape) for each in made.body[1].experts.parameters()]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("module", [SparseLayers, OneSided])
def test_a_plan_shards_experts(ranks: Pools, plan: str, module: type[SparseLayers]) -> None:
    expected, _ = trained(None, module)
    for found, _ in ranks(2, lightning=True).run(trained, {"tensor_parallel_size": 2, **PLANS[plan]}, module):
        assert found.losses == pytest.approx(expected.losses, rel=1e-10)
        assert_same(found.weights, expected.weights, 1e-10)


def test_the_plan_has_the_experts_beside_other_styles() -> None:
    module = SparseLayers()
    plan = make_plan(module, "auto", 2, sequence_parallel=False, experts=find_experts(module, 2, "tensor"))
    styles = {row.name: row.style for row in plan.rows}
    assert styles["body.1.experts"] == styles["body.3.experts"] == "experts"
    assert styles["body.0.self_attn"] == "attention"
    kept = make_plan(module, {"body.1.experts": None}, 2, sequence_parallel=False, experts=["body.1.experts"])
    assert not kept.rows


def test_a_module_without_experts_has_no_such_style() -> None:
    with pytest.raises(ValueError, match=r"'shared' the style 'experts', but this module has no .* \[LH505\]"):
        make_plan(Sparse(), {"shared": "experts"}, 2, sequence_parallel=False)
    with pytest.raises(ValueError, match=r"'up' of shape \(4, \S+ \S+, whose dimension 0 cannot be split into 3 equal"):
        make_plan(nn.Sequential(Experts()), {"0": "experts"}, 3, sequence_parallel=False)


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"but expert_parallel_size=2 shards them over replicas\. .* \[LH146\]"):
        HybridStrategy(expert_parallel="tensor", expert_parallel_size=2)
    text = (
        r"tensor_parallel_size=3 with expert_parallel='tensor' does not divide .* Set tensor_parallel_size to .*LH144"
    )
    with pytest.raises(ValueError, match=text):
        find_experts(nn.Sequential(Experts()), 3, "tensor")
    with pytest.raises(ValueError, match=r"shards experts, but Linear .*, or remove expert_parallel\. \[LH143\]"):
        find_experts(nn.Linear(2, 2), 2, "tensor")
