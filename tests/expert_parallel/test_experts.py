"""The modules whose experts replicas can share, and errors about the others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_hybrid.distributed.sizes import check_expert_parallel_size
from lightning_hybrid.expert_parallel.experts import experts_text, find_experts, is_experts
from tests.test_mixture_of_experts import FAMILIES
from tests.test_mixture_of_experts import Experts as Language
from tests.zoo.experts import EXPERTS, Experts, Sparse, SparseLayers


@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_transformers(family: str) -> None:
    """Each sparse layer has a module with experts; routers, which have a row for each expert too, are none."""
    model = Language(family).model
    found = find_experts(model, 2)
    num_dense = getattr(model.config, "first_k_dense_replace", 0)
    assert [name.rsplit(".", 2)[1:] for name in found] == [["mlp", "experts"]] * (4 - num_dense)
    assert all(each.num_experts == 4 for each in found.values())


class OtherNames(Experts):
    def forward(self, x: Tensor, ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, ids, scores)


class AnotherParameter(Experts):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, 2))


def test_own_code() -> None:
    assert is_experts(Experts())
    for other in (Sparse(), OtherNames(), AnotherParameter(), nn.Linear(2, 2)):
        assert not is_experts(other)
    assert list(find_experts(SparseLayers(), 2)) == ["body.1.experts", "body.3.experts"]


def test_a_model_without_experts() -> None:
    with pytest.raises(ValueError, match=r"expert_parallel_size=2 shards experts, but Linear has no module .* \[LH143"):
        find_experts(nn.Linear(2, 2), 2)


def test_a_number_of_experts_that_is_not_divisible() -> None:
    with pytest.raises(ValueError, match=rf"the number of experts of '1', which is {EXPERTS}\..* \[LH144\]"):
        find_experts(nn.Sequential(nn.Linear(2, 2), Experts()), 3)


def test_experts_with_two_names() -> None:
    experts = Experts()
    for shared in (nn.ModuleList([experts, experts]), nn.ParameterList([experts.up])):
        module = nn.ModuleList([experts, shared])
        with pytest.raises(ValueError, match=r"'0\.up' and '1\.\S+' are the same, so .* \[LH145\]"):
            find_experts(module, 2)


def test_a_number_of_replicas_that_is_not_divisible() -> None:
    check_expert_parallel_size(2, 4)
    with pytest.raises(ValueError, match=r"which is 4\. Set expert_parallel_size to one of \[1, 2, 4\]\. \[LH142\]"):
        check_expert_parallel_size(3, 4)


def test_the_message_about_a_run() -> None:
    found = find_experts(nn.ModuleList([Experts(), Experts(), Experts(8)]), 2)
    text = "2 modules with 2 of 4 experts on each rank, 1 module with 4 of 8 experts on each rank (0, ...)"
    assert experts_text(found, 2) == f"expert_parallel_size=2: {text}"
