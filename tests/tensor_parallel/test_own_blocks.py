"""The automatic plan for blocks of a user's own: what is proven, what is only proposed, and what is neither."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hybrid.cli.demo.vit import ViT
from lightning_hybrid.tensor_parallel.plan import make_plan
from tests.zoo import own_blocks as own
from tests.zoo import tensor as zoo


def auto(block: nn.Module, size: int = 2) -> tuple[dict[str, str], dict[str, str]]:
    plan = make_plan(nn.ModuleList([block]), "auto", size, sequence_parallel=False)
    return {row.name.removeprefix("0."): row.style for row in plan.rows}, dict(plan.reasons)


@pytest.mark.parametrize("name", own.REFUSED)
def test_what_a_trial_does_not_show_stays_whole(name: str) -> None:
    make, words = own.REFUSED[name]
    plan, reasons = auto(make())
    assert plan == {}
    assert words in reasons["0"]


MLP = {"fc1": "colwise", "fc2": "rowwise"}
QKV = {"query_key_value": "colwise", "dense": "rowwise"}


@pytest.mark.parametrize(
    ("make", "styles"),
    [
        (own.MLP, MLP),
        (own.Arbitrary, MLP),
        (own.FeedForward, {"dense_1": "colwise", "dense_2": "rowwise"}),
        (own.SelfAttention, QKV),
        (own.Counted, QKV),
        (zoo.Attention, {**dict.fromkeys("qkv", "colwise"), "proj": "rowwise", "norm": "on_shards"}),
    ],
)
def test_what_does_nothing_else_is_divided(make: Callable[[], nn.Module], styles: dict[str, str]) -> None:
    plan, reasons = auto(make())
    assert reasons == {}
    assert styles.items() <= plan.items()


def proposal(reason: str) -> dict[str, str]:
    entries: dict[str, str] = ast.literal_eval(reason[reason.index("{") : reason.index("}") + 1])
    return entries


class CountedWithFlag(own.Counted):
    """Not proven, because of a branch."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def test_a_proposal_was_tried() -> None:
    """Heads are outermost in the weight, so the shards are of heads, and not of queries, keys and values."""
    _, reasons = auto(CountedWithFlag())
    assert "With random values, this plan gave the same results as the unsharded block: {" in reasons["0"]
    entries = proposal(reasons["0"])
    assert entries.pop("*").startswith("divide:heads")
    assert entries == {"*.query_key_value": "colwise", "*.dense": "rowwise"}


class Picky(own.MLP):
    def forward(self, x: Tensor, context: Tensor) -> Tensor:  # type: ignore[override]
        return self.fc2(F.relu(self.fc1(x)) + context)


def test_a_proposal_that_could_not_be_tried_says_so() -> None:
    _, reasons = auto(Picky())
    assert proposal(reasons["0"]) == {"*.fc1": "colwise", "*.fc2": "rowwise"}
    assert (
        "It is untested, because the block cannot be run on its own (it needs the argument 'context' in addition to its"
        " input);" in reasons["0"]
    )


def test_no_plan_is_proposed_that_does_not_give_the_same() -> None:
    for make in (own.WideNorm, own.TalkingHeads):
        assert "{" not in auto(make())[1]["0"]


def test_the_configuration_of_the_example_divides_each_layer() -> None:
    config = yaml.safe_load((Path(__file__).parents[2] / "configs" / "vit_b16.yaml").read_text())
    with torch.device("meta"):
        model = ViT(**config["model"]["init_args"])
    size = config["trainer"]["strategy"]["init_args"]["tensor_parallel_size"]
    plan = make_plan(model, "auto", size, sequence_parallel=False)
    styles = {row.name: row.style for row in plan.rows if row.param_splits}
    for index in range(12):
        layers = {
            "attention.qkv": "packed_colwise_3",
            "attention.out": "rowwise",
            "mlp.0": "colwise",
            "mlp.2": "rowwise",
        }
        assert {f"body.{index}.{name}": style for name, style in layers.items()}.items() <= styles.items()
    assert plan.reasons == {}


VALUES = [
    *(torch.neg, torch.reciprocal, torch.square, torch.sqrt, torch.rsqrt, torch.exp, torch.sin, torch.cos, torch.tanh),
    *(torch.sigmoid, F.relu, F.gelu, F.silu, F.leaky_relu, F.elu, F.celu, F.selu, F.mish, F.softplus, F.softsign),
    *(F.logsigmoid, lambda x: x + 1, lambda x: 1 - x, lambda x: x * 0, lambda x: 0 / x, lambda x: x**2, lambda x: 2**x),
]
ROWS = [
    *(lambda x: x.softmax(-1), lambda x: x.log_softmax(-1), lambda x: F.layer_norm(x, (8,)), lambda x: x.mean(-1)),
    *(lambda x: F.rms_norm(x, (8,)), lambda x: x.sum(-1), lambda x: F.linear(x, torch.zeros(4, 8))),
    lambda x: F.normalize(x, dim=-1),
    *(lambda x: x @ torch.zeros(8, 4), lambda x: torch.einsum("btf,fg->btg", x, torch.zeros(8, 4))),
    lambda x: F.scaled_dot_product_attention(x, torch.randn(2, 3, 8), torch.randn(2, 3, 8)),
    lambda x: F.scaled_dot_product_attention(torch.randn(2, 3, 8), x, torch.randn(2, 3, 8)),
]


@pytest.mark.parametrize("operation", VALUES)
def test_what_is_known_of_values_hands_nan_on(operation: Callable[[Tensor], Tensor]) -> None:
    x = torch.rand(2, 3, 37)
    x[..., ::2] = torch.nan
    assert operation(x).isnan()[..., ::2].all()
    assert not operation(x).isnan()[..., 1::2].any()


@pytest.mark.parametrize("operation", ROWS)
def test_what_is_known_of_features_hands_nan_on(operation: Callable[[Tensor], Tensor]) -> None:
    x = torch.rand(2, 3, 8)
    x[..., 5] = torch.nan
    assert operation(x).isnan().all()
