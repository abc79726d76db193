from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hybrid.distributed.modes import FunctionMode
from lightning_hybrid.distributed.no_draws import NoDraws

CPU = torch.device("cpu")
X = torch.arange(1.0, 25.0).view(2, 3, 4)

DROPOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "function": lambda x: F.dropout(x, 0.5),
    "module": nn.Dropout(0.5),
    "channels": lambda x: F.dropout1d(x, 0.5),
    "alpha": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "operator": lambda x: torch.dropout(x, 0.5, True),
    "features": lambda x: torch.feature_dropout(x, 0.5, True),
    "in place": lambda x: F.dropout(x.clone(), 0.5, inplace=True),
}
ATTENTIONS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "by position": lambda x, p: F.scaled_dot_product_attention(x, x, x, None, p, True),
    "by name": lambda x, p: F.scaled_dot_product_attention(query=x, key=x, value=x, dropout_p=p),
}
DRAWS: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "uniform": (lambda x: torch.rand(3, 4), 0.5),
    "like": (torch.randn_like, 0.5),
    "in place": (lambda x: torch.empty(5).normal_(), 0.5),
    "bernoulli": (torch.bernoulli, 1.0),
}


@pytest.mark.parametrize("only_dropout", [False, True])
@pytest.mark.parametrize("drop", DROPOUTS.values(), ids=DROPOUTS)
def test_dropout_drops_nothing_and_draws_nothing(drop: Callable[[Tensor], Tensor], *, only_dropout: bool) -> None:
    before = torch.get_rng_state()
    with FunctionMode(NoDraws(CPU, only_dropout=only_dropout)):
        assert torch.equal(drop(X), X)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("attend", ATTENTIONS.values(), ids=ATTENTIONS)
def test_attention_drops_nothing(attend: Callable[[Tensor, float], Tensor]) -> None:
    with FunctionMode(NoDraws(CPU)):
        found = attend(X, 0.5)
    assert torch.equal(found, attend(X, 0.0))


def test_a_module_of_attention_drops_nothing() -> None:
    attention = nn.MultiheadAttention(4, 2, dropout=0.5)
    with FunctionMode(NoDraws(CPU)):
        found = attention(X, X, X)[0]
    assert torch.equal(found, attention.eval()(X, X, X, need_weights=True)[0])


@pytest.mark.parametrize(("draw", "number"), DRAWS.values(), ids=DRAWS)
def test_each_number_is_the_same_one(draw: Callable[[Tensor], Tensor], number: float) -> None:
    before = torch.get_rng_state()
    with FunctionMode(NoDraws(CPU)):
        assert draw(torch.full((2, 3), 0.5)).unique().tolist() == [number]
    assert torch.equal(torch.get_rng_state(), before)


def test_whole_numbers_are_the_same_one_however_many_there_are() -> None:
    with FunctionMode(NoDraws(CPU)):
        (first,) = torch.randint(100, (3,)).unique()
        assert torch.equal(torch.randint(100, (7,)), first.expand(7))


def test_noise_has_a_mean_in_its_place() -> None:
    with FunctionMode(NoDraws(CPU)):
        assert torch.equal(F.rrelu(-X, 0.2, 0.4, training=True), F.leaky_relu(-X, 0.3))
        assert torch.equal(F.gumbel_softmax(X, 2.0, dim=1), (X / 2.0).softmax(1))


def test_other_numbers_may_be_drawn_as_always() -> None:
    state = torch.get_rng_state()
    expected = torch.rand(3)
    torch.set_rng_state(state)
    with FunctionMode(NoDraws(CPU, only_dropout=True)):
        assert torch.equal(torch.rand(3), expected)


def test_another_function_may_take_the_place_of_one() -> None:
    with FunctionMode(NoDraws(CPU, {F.scaled_dot_product_attention: lambda q, k, v: v})):
        assert F.scaled_dot_product_attention(X, X, 2 * X).equal(2 * X)
