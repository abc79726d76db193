"""The costs of experts over replicas: the messages of the documented formula, the memory of a run, and a search."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_hybrid.tuning.candidates import Layout, Step
from lightning_hybrid.tuning.cost_model import CostModel
from lightning_hybrid.tuning.machine import Machine
from lightning_hybrid.tuning.module_profile import ModuleProfile
from lightning_hybrid.tuning.search import search
from lightning_hybrid.tuning.search_space import SearchSpace
from tests.test_mixture_of_experts import VOCABULARY, Experts
from tests.tuning.test_module_profile import check_held, make_profile

LENGTH, SAMPLES, LAYERS, HIDDEN, K = 12, 16, 4, 32, 2


class Mixtral(Experts):
    """4 experts in each of 4 layers, and float32."""

    def __init__(self) -> None:
        super().__init__("Mixtral", output_router_logits=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(torch.randint(VOCABULARY, (2 * SAMPLES, LENGTH)), SAMPLES)


@pytest.fixture(scope="module")
def profile() -> ModuleProfile:
    return make_profile(Mixtral)


@pytest.mark.parametrize(("experts", "recompute"), [(2, False), (4, False), (2, True)])
def test_bytes_equal_the_documented_formula(profile: ModuleProfile, experts: int, recompute: bool) -> None:
    """See docs/concepts/expert-parallel.md: a hidden state has b h bytes, a weight w, and the number of an expert 4."""
    number = 2
    layout = Layout(4, 1, 1, number, recompute=recompute, experts=experts)
    rows, b, w = LENGTH * SAMPLES // number * K, 4, 4
    share = (experts - 1) / experts
    forward = rows * share * (b * HIDDEN + w + 4) + rows * share * b * HIDDEN
    backward = rows * share * b * HIDDEN + rows * share * (b * HIDDEN + w)
    cost = CostModel(profile, Machine(), Step(4 * SAMPLES)).estimate(layout)
    assert cost.sent["tokens"] == pytest.approx(number * LAYERS * ((1 + recompute) * forward + backward))
    assert cost.parts["messages with tokens of experts"] > 0


def test_nothing_is_sent_if_each_replica_has_all_experts(profile: ModuleProfile) -> None:
    cost = CostModel(profile, Machine(), Step(4 * SAMPLES)).estimate(Layout(4, 1, 1))
    assert (cost.sent["tokens"], cost.parts["messages with tokens of experts"]) == (0, 0)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(2, 1, 1, experts=2),
        Layout(4, 1, 1, 2, zero_stage=1, experts=2),
        Layout(4, 1, 1, zero_stage=3, experts=2),
        Layout(2, 1, 2, 4, experts=2),
        Layout(4, 1, 1, zero_stage=2, experts=4),
    ],
    ids=str,
)
def test_a_layout_holds_what_the_command_memory_says(profile: ModuleProfile, layout: Layout) -> None:
    check_held(profile, Mixtral, layout)


def test_experts_are_sharded_where_memory_is_short_or_gradients_take_longer_than_tokens(profile: ModuleProfile) -> None:
    assert profile.expert_sizes == (1, 2, 4)
    space = SearchSpace(
        data=(4,), pipeline=(1,), context=(1,), recompute=(False,), zero_stages=(0,), expert_sizes=profile.expert_sizes
    )

    def best(samples: int, **machine: Any) -> int:
        model = CostModel(profile, Machine(**machine), Step(samples))
        return search(model, 4, refuse=profile.refuse, space=space).best[0].layout.experts

    def held(experts: int) -> float:
        return CostModel(profile, Machine(), Step(4 * SAMPLES)).estimate(Layout(4, 1, 1, 16, experts=experts)).bytes

    slow = {"node_bandwidth": 1e6, "node_latency": 0.0, "operation_seconds": 0.0, "overlap": 0.0}
    assert best(4 * SAMPLES, **slow) == 1
    assert best(4, **slow) == 4
    assert held(4) < held(2) < held(1)
    assert best(4 * SAMPLES, **slow, memory=(held(2) + held(1)) / 2) == 2
    assert best(4 * SAMPLES, **slow, memory=(held(4) + held(2)) / 2) == 4
