"""Functions of torch and Lightning take another route for a while, under whatever names they were imported."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import utilities
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

from lightning_hybrid.trainer.gradient_functions import route

FUNCTIONS: list[Callable[..., Any]] = [
    get_total_norm,
    clip_grad_norm_,
    clip_grads_with_norm_,
    clip_grad_value_,
    grad_norm,
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_the_libraries_have_what_is_replaced(function: Callable[..., Any]) -> None:
    inner = inspect.unwrap(function)
    assert inspect.isfunction(inner)
    assert not inner.__code__.co_freevars
    assert inner.__kwdefaults__ is None
    calls: list[Any] = []
    undo = route(function, lambda before, *args, **kwargs: calls.append((args, kwargs)))
    assert function(1, b=2) is None
    undo()
    assert calls == [((1,), {"b": 2})]
    with pytest.raises(TypeError):
        function()


def test_clipping_takes_the_norm_and_scales_by_the_functions_that_are_replaced() -> None:
    weight = nn.Parameter(torch.tensor([3.0, 4.0]))
    weight.grad = torch.tensor([3.0, 4.0])
    undo = route(get_total_norm, lambda before, *args: before(*args) * 2)
    undo_scaling = route(clip_grads_with_norm_, lambda before, parameters, *args: before([weight, weight], *args))
    norm = clip_grad_norm_([weight], 5.0)
    undo_scaling()
    undo()
    assert float(norm) == 10
    assert weight.grad.tolist() == pytest.approx([0.75, 1.0])
    assert float(clip_grad_norm_([weight], 5.0)) == pytest.approx(1.25)


def test_routes_are_undone_in_turn() -> None:
    def doubled(before: Callable[..., Tensor], *args: Any) -> Tensor:
        return 2 * before(*args)

    ones = [torch.ones(4)]
    undo = route(get_total_norm, doubled)
    undo_again = route(get_total_norm, doubled)
    assert float(get_total_norm(ones)) == 8
    undo_again()
    assert float(get_total_norm(ones)) == 4
    undo()
    assert float(get_total_norm(ones)) == 2
    assert utilities.grad_norm is grad_norm
