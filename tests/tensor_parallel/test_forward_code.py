"""What is seen in the source of a `forward`, without running it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hybrid.tensor_parallel.auto_plan.forward_code import attributes_read, input_use


class Attention(nn.Module):
    num_heads: int
    q: Any
    k: Any
    o: Any
    norm: Any

    def separate(self, x: Tensor) -> Tensor:
        B, L, C = x.shape
        return self.o((self.q(x) * self.k(x)).reshape(B, len(x), C) + x.new_zeros(L, 1))

    def one_by_one(self, x: Tensor, mask: Tensor) -> Tensor:
        _, _, C = x.size()
        q, k = (layer(x).split(C, -1) for layer in (self.q, self.k))
        x = self.o(q @ k)
        return x + mask

    def by_index(self, x: Tensor) -> Tensor:
        return self.o((self.q(x) * self.k(x)).reshape(-1, x.shape[-1] // self.num_heads))

    def unused(self, x: Tensor) -> Tensor:
        B, L, _C = x.shape
        return self.o((self.q(x) * self.k(x)).reshape(B, L, -1))

    def normalises(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        B, L, C = y.shape
        return self.o((self.q(y) * self.k(y)).reshape(B, L, C))

    def adds(self, x: Tensor) -> Tensor:
        B, L, C = x.shape
        return x + self.o((self.q(x) * self.k(x)).reshape(B, L, C))

    def gives_it_to_others(self, x: Tensor) -> Tensor:
        B, L, C = x.shape
        return self.o((self.q(x) * self.k(x) * self.norm(x)).reshape(B, L, C))

    def after_heads(self, x: Tensor) -> Tensor:
        y = self.q(x)
        B, L, C = y.shape
        return self.o((y * self.k(x)).reshape(B, L, C))


@pytest.mark.parametrize(
    ("forward", "reads_width", "can_be_narrow"),
    [
        (Attention.separate, True, True),
        (Attention.one_by_one, True, True),
        (Attention.by_index, True, True),
        (Attention.unused, False, False),
        (Attention.normalises, True, False),
        (Attention.adds, True, False),
        (Attention.gives_it_to_others, True, False),
        (Attention.after_heads, False, False),
        (torch.relu, False, False),
    ],
)
def test_what_a_forward_does_with_its_input(
    forward: Callable[..., Any], reads_width: bool, can_be_narrow: bool
) -> None:
    use = input_use(type("Case", (Attention,), {"forward": forward})(), ["q", "k"])
    assert (use.reads_width, use.can_be_narrow) == (reads_width, can_be_narrow)
    assert not can_be_narrow or use.takers == ("q", "k")


class Inherited(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.only_made = self.num_heads = 4

    def forward(self, x: Tensor) -> Tensor:
        return self.by_index(x)


def test_attributes_that_code_reads_are_those_of_all_methods_but_the_first() -> None:
    read = attributes_read(Inherited())
    assert read is not None
    assert {"by_index", "num_heads", "q"} <= read
    assert "only_made" not in read
    made = type("Made", (nn.Module,), {})
    assert attributes_read(made()) is None
