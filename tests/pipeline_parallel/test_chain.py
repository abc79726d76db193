"""The code before a chain, where some of its parameters are elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.pipeline_parallel.chain import CodeBefore
from lightning_hybrid.pipeline_parallel.placeholders import replace_with_placeholders
from lightning_hybrid.pipeline_parallel.schedules import Placement
from lightning_hybrid.pipeline_parallel.stage_map import StageMap
from lightning_hybrid.torch_internals import FakeTensor

CPU = torch.device("cpu")


class Before(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.norm = nn.BatchNorm1d(4, affine=False)


def lacking() -> Before:
    """What the last stage has, when the embedding lives on the first one."""
    module = Before()
    outside = {name: frozenset((0,)) for name in ("embed.weight", "embed.bias")}
    replace_with_placeholders(
        module,
        StageMap("body", ("body.0", "body.1"), (range(1), range(1, 2)), Placement.in_turns(2), outside=outside),
        1,
    )
    return module


def draws(module: Before, x: Tensor) -> list[Tensor]:
    """Random numbers between calls that one stage makes and the other does not."""
    first = torch.rand(3)
    hidden = F.dropout(module.embed(x), 0.5)
    second = torch.rand(3)
    hidden = torch.randn_like(hidden) + hidden.uniform_()
    third = torch.rand(3)
    wide = F.dropout2d(hidden.expand(2, 5, 4).transpose(1, 2), 0.5)  # not contiguous; its mask is made inside
    torch.multinomial((wide + torch.randn_like(wide)).sum(1).softmax(-1), 1)
    return [first, second, third, torch.rand(3), torch.randn(3)]


def test_calls_that_are_not_made_draw_their_random_numbers() -> None:
    whole, module = Before(), lacking()
    torch.manual_seed(1)
    expected = draws(whole, torch.ones(5, 4))
    torch.manual_seed(1)
    with CodeBefore(CPU):
        found = draws(module, torch.ones(5, 4))
    assert all(map(torch.equal, found, expected))


def numbers(module: Before, x: Tensor) -> Tensor:
    return x if module.embed(x).sum() > 0 else -x


def writes(module: Before, x: Tensor) -> Tensor:
    return module.norm(module.embed(x))


def counts(module: Before, x: Tensor) -> Tensor:
    return torch.poisson(module.embed(x))


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (numbers, "`__bool__` (DataDependentOutputException) needs the values of a parameter outside the layers"),
        (writes, "`batch_norm` updates a tensor of every stage with a value computed from a parameter outside"),
        (counts, "`poisson` (ValueError) needs the values of a parameter outside the layers"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_needs_a_parameter_of_another_stage_is_refused(
    code: Callable[[Before, Tensor], Tensor], text: str
) -> None:
    with pytest.raises(WrongUseError) as caught, CodeBefore(CPU):
        code(lacking(), torch.ones(5, 4))
    assert str(caught.value).startswith(f"In this step, {text}")
    assert "dynamic_shapes=True" in str(caught.value)


def test_what_has_no_value_is_of_no_use_after_the_chain() -> None:
    module, before = lacking(), CodeBefore(CPU)
    with before:
        hidden = module.embed(torch.ones(5, 4))
        assert module.embed.weight.device == CPU
        with before.at_layers(torch.ones(2)):
            assert (torch.ones(2) + 1).tolist() == [2, 2]
        assert module.embed.weight.device == CPU
        with pytest.raises(WrongUseError, match="uses a tensor from another pipeline stage"):
            hidden.sum()
        with pytest.raises(WrongUseError, match="`mul` uses a parameter outside the layers, but this parameter is on"):
            torch.ones(4) * module.embed.bias


def test_the_next_step_begins_anew() -> None:
    module, before = lacking(), CodeBefore(CPU)
    for _ in range(2):
        with before:
            assert isinstance(module.embed(torch.ones(5, 4)), FakeTensor)
            with before.at_layers(torch.ones(2)):
                pass


def test_the_chain_is_not_called_with_what_has_no_value() -> None:
    module, before = lacking(), CodeBefore(CPU)
    with before, pytest.raises(WrongUseError, match="In this step, the input to the body is computed from a parameter"):
        before.at_layers(module.embed(torch.ones(5, 4))).__enter__()
