"""Plans without any process: what the automatic one takes and leaves, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from lightning_hybrid.tensor_parallel.plan import make_plan
from tests.pool import Pools
from tests.training_jobs import Regression, loader, make_trainer


def auto(module: nn.Module, size: int = 2, *, sequence_parallel: bool = False) -> tuple[dict[str, str], dict[str, str]]:
    plan = make_plan(module, "auto", size, sequence_parallel=sequence_parallel)
    return {row.name: row.style for row in plan.rows}, dict(plan.reasons)


def pair() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


class Gated(nn.TransformerEncoderLayer):
    """Computes in ways of its own."""

    def _ff_block(self, x: Tensor) -> Tensor:
        a, b = self.linear1(x).chunk(2, -1)
        return self.linear2(a * b.sigmoid())


def twice_in_place() -> nn.Module:
    dropout = nn.Dropout(0.5)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), dropout, nn.Linear(16, 8), dropout)


def shared_softmax() -> nn.Module:
    softmax = nn.Softmax(-1)
    return nn.Sequential(softmax, nn.Linear(8, 16), softmax, nn.Linear(16, 8))


def repeated() -> nn.Module:
    return nn.Sequential(*[nn.TransformerEncoderLayer(8, 2, 16)] * 3)


def hooked() -> nn.Module:
    module = pair()
    module[0].weight.register_hook(lambda gradient: gradient)
    return module


def parametrized() -> nn.Module:
    module = pair()
    parametrizations.weight_norm(module[0])
    return module


def pruned() -> nn.Module:
    module = pair()
    prune.l1_unstructured(module[2], "weight", 0.5)
    return module


LEFT: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "a layer with ways of its own": (
        lambda: nn.Sequential(Gated(8, 2, 16)),
        "0.linear1",
        "overrides methods of its torch class",
    ),
    "dropout that stands twice": (twice_in_place, "0", "several places"),
    "hooks": (hooked, "0", "has a hook"),
    "pruning": (pruned, "2", "from other parameters"),
    "indivisible": (lambda: nn.Sequential(nn.Linear(8, 15), nn.ReLU(), nn.Linear(15, 8)), "0", "(15, 8)"),
    "heads": (lambda: nn.MultiheadAttention(6, 3), "", "3 heads"),
    "sparse": (lambda: nn.Embedding(8, 4, sparse=True), "", "sparse"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_cannot_be_divided_stays_whole_with_a_reason(name: str) -> None:
    make, layer, words = LEFT[name]
    plan, reasons = auto(make())
    assert layer not in plan
    assert words in reasons[layer]


def test_parametrized_layers_stay_whole() -> None:
    assert auto(parametrized()) == ({}, {})
    with pytest.raises(ValueError, match="from other parameters"):
        make_plan(parametrized(), {"0": "colwise", "2": "rowwise"}, 2, sequence_parallel=False)


def test_what_stands_between_is_what_runs() -> None:
    assert auto(shared_softmax()) == ({}, {})


def test_a_repeated_layer_is_divided_once_and_hands_on_whole_sequences() -> None:
    module = repeated()
    assert set(auto(module)[0]) == {"0.self_attn", "0.linear1", "0.dropout", "0.linear2"}
    plan = make_plan(module, "auto", 2, sequence_parallel=True)
    (region,) = [row for row in plan.rows if row.kind == "sequence_region"]
    assert region.options == {"scatter_input": True, "gather_output": True}


def test_layers_known_by_two_names() -> None:
    layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16) for _ in range(2))
    module = nn.ModuleDict({"layers": layers, "body": nn.Sequential(*layers)})
    plan, _ = auto(module)
    assert {"layers.0.self_attn", "layers.1.self_attn"} <= set(plan)
    by_hand = make_plan(module, {"body.*.linear1": "colwise", "body.*.linear2": "rowwise"}, 2, sequence_parallel=False)
    assert {row.name: row.style for row in by_hand.rows}["layers.1.linear1"] == "colwise"


def test_neighbours_hand_on_shares() -> None:
    module = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 16) for _ in range(3)), nn.LayerNorm(8))
    plan = make_plan(module, "auto", 2, sequence_parallel=True)
    regions = {row.name: row for row in plan.rows if row.kind == "sequence_region"}
    assert [(row.options["scatter_input"], row.options["gather_output"]) for row in regions.values()] == [
        (True, False),
        (False, False),
        (False, True),
    ]
    assert {row.sequence_dim for row in regions.values()} == {0}


def test_heads_and_tied_embeddings() -> None:
    embedding, head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
    assert auto(nn.ModuleList([embedding, head]))[0] == {"0": "vocab", "1": "vocab"}
    head.weight = embedding.weight
    assert auto(nn.ModuleList([embedding, pair(), head, nn.Linear(8, 8)]))[0]["2"] == "vocab"


def test_a_bias_that_is_held_twice_keeps_head_and_embedding_whole() -> None:
    """As the head of BERT has it: its bias is an attribute of the module around it, too."""
    embedding, head = nn.Embedding(12, 8), nn.Linear(8, 12)
    head.weight = embedding.weight
    around = nn.ModuleDict({"decoder": head})
    around.bias = head.bias
    plan, reasons = auto(nn.ModuleList([embedding, around]))
    assert plan == {}
    assert reasons["0"] == "contains '1.decoder', which shares its 'bias' with '1.bias'"
    embedding.weight = nn.Parameter(embedding.weight.clone())
    assert auto(nn.ModuleList([embedding, around]))[0] == {"0": "vocab"}


def test_a_head_that_is_tied_to_one_of_two_embeddings() -> None:
    """There are as many places as words, and the places come first."""
    places, words, head = nn.Embedding(12, 8), nn.Embedding(12, 8), nn.Linear(8, 12)
    head.weight = words.weight
    assert auto(nn.ModuleList([places, words, head]))[0] == {"0": "vocab", "1": "vocab", "2": "vocab"}


def test_a_pair_that_shares_its_weight_stays_whole() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    module[2].weight = module[0].weight
    assert auto(module) == ({}, {"0": "shares its 'weight' with '2.weight'"})


def test_a_classifier_is_not_the_head_of_a_small_embedding() -> None:
    types, words, classifier = nn.Embedding(2, 8), nn.Embedding(64, 8), nn.Linear(8, 2)
    plan, reasons = auto(nn.ModuleList([types, words, classifier]))
    assert plan == {"1": "vocab"}
    assert reasons["0"] == "has few rows (2) compared with the largest embedding (64)"


REFUSED: dict[str, tuple[Any, str]] = {
    "two styles": ({"0": "colwise + rowwise"}, "cannot be combined"),
    "a suffix": ({"0": "colwise:3"}, "gives '0' the unknown style 'colwise:3'"),
    "a word": ("automatic", "tensor_parallel_plan='automatic' is not a valid plan"),
    "no such attribute": ({"0": "divide:heads"}, "0.heads is None"),
    "a norm in no region": ({"1": "sequence_parallel"}, "works only inside a module with the style 'sequence_region'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    plan, words = REFUSED[name]
    with pytest.raises(ValueError, match="tensor_parallel_plan") as caught:
        make_plan(pair(), plan, 2, sequence_parallel=True)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"bodies.*": "colwise"}, "matches no module of Regression"),
        ({"embed": "columns"}, "gives 'embed' the unknown style 'columns'"),
    ],
)
def test_a_plan_is_checked_without_shared_layers(ranks: Pools, plan: dict[str, str], words: str) -> None:
    (text,) = ranks(1, lightning=True).run(refused_plan, plan)
    assert words in text


def refused_plan(plan: dict[str, str]) -> str:
    make_trainer({"tensor_parallel_plan": {"embed": "colwise"}}, max_steps=1).fit(Regression(), loader())
    with pytest.raises(ValueError, match="tensor_parallel_plan") as error:
        make_trainer({"tensor_parallel_plan": plan}).fit(Regression(), loader())
    return str(error.value)


def test_nothing() -> None:
    assert make_plan(pair(), None, 2, sequence_parallel=False).rows == ()
    assert make_plan(pair(), {"0": None}, 2, sequence_parallel=False).rows == ()
    assert not make_plan(pair(), "auto", 2, sequence_parallel=False).reasons
