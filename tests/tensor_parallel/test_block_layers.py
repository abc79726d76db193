"""Blocks with code of their own, shared by two ranks under a plan, against one process: what they see and give."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hybrid.distributed.dtensor import full_tensor
from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.tensor_parallel.plan import make_plan
from tests.pool import Pools
from tests.tensor_parallel.groups import CPU, tensor_group

DIM, HEADS = 16, 4


class Attention(nn.Module):
    """Heads of the projections' outputs; a subclass says of what."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.q, self.k, self.v, self.proj = (nn.Linear(DIM, DIM) for _ in range(4))

    def heads(self, *values: Tensor) -> list[Tensor]:
        return [value.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for value in values]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        scores = q @ k.mT if mask is None else q @ k.mT + mask
        weights = scores.softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2)), weights


class Cross(Attention):
    """Attention to another sequence; the width of a head is read from the input."""

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        B, N, C = x.shape
        context = x if context is None else context
        width = C // self.num_heads
        pairs = ((self.q, x), (self.k, context), (self.v, context))
        q, k, v = (f(y).view(B, -1, self.num_heads, width).transpose(1, 2) for f, y in pairs)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, C))


class Hiding(Cross):
    """Some of its input is hidden."""

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return super().forward(x.masked_fill(torch.arange(x.shape[1])[:, None] > 1, 0.0))


class Biased(Attention):
    """It is given a bias of each head, and a table that looks like one; it gives its weights, too."""

    def forward(self, x: Tensor, table: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        q, k, v = (f(x).unflatten(-1, (self.num_heads, -1)) * table for f in (self.q, self.k, self.v))
        return self.attend(*(each.transpose(1, 2) for each in (q, k, v)), bias)


def slopes(number: int, length: int) -> Tensor:
    """The bias of ALiBi, ``(1, heads, length, length)``."""
    places = torch.arange(length, dtype=torch.float64)
    return (-(places[:, None] - places).abs() * (2.0 ** -torch.arange(1, number + 1))[:, None, None])[None]


class Model(nn.Module):
    """A block, and how it is called."""

    def __init__(self, block: nn.Module, call: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.block, self.call = block, call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.block, x)


def biased(block: Any, x: Tensor) -> Tensor:
    """As long as it has heads: four places."""
    bias = slopes(block.num_heads, x.shape[1]).expand(len(x), -1, -1, -1)
    table = torch.arange(x.shape[1], dtype=x.dtype).cos()[None, :, None, None].expand(1, -1, 1, DIM // HEADS)
    y, weights = block(x, table, bias=bias)
    return y + (weights * bias.exp().flip(1)).flatten(1).sum(-1)[:, None, None]


NARROW = {
    "block": "divide:num_heads + narrow_input:q,k,v",
    **{f"block.{name}": "colwise" for name in "qkv"},
    "block.proj": "rowwise",
}
WHOLE_INPUT = {**NARROW, "block": "divide:num_heads + mask_per_head:4"}
MODELS: dict[str, tuple[Callable[[], Model], dict[str, str]]] = {
    "cross attention": (lambda: Model(Cross(), lambda block, x: block(x, x.flip(1).tanh()) + block(x)), NARROW),
    "by keyword": (lambda: Model(Cross(), lambda block, x: block(context=x.sin(), x=x)), NARROW),
    "a bias of heads, made outside": (lambda: Model(Biased(), biased), WHOLE_INPUT),
}


def differences(name: str) -> dict[str, float]:
    make, requested = MODELS[name]
    torch.manual_seed(0)
    dense = make().double()
    shared = copy.deepcopy(dense)
    mesh, group = tensor_group(2)
    make_plan(shared, requested, 2, sequence_parallel=False).apply(shared, mesh, group, CPU)
    x = torch.randn(3, HEADS, DIM, dtype=torch.float64)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [module(leaf * 1.0) for module, leaf in zip((dense, shared), inputs, strict=True)]
    for output in outputs:
        output.square().sum().backward()
    worst = {"output": outputs[0] - outputs[1], "input": inputs[0].grad - inputs[1].grad}
    whole = dict(shared.named_parameters())
    worst |= {key: full_tensor(whole[key].grad) - value.grad for key, value in dense.named_parameters()}
    return {key: float(value.abs().max()) for key, value in worst.items()}


@pytest.mark.parametrize("name", MODELS)
def test_a_block_gives_what_one_process_gives(ranks: Pools, name: str) -> None:
    for worst in ranks(2).run(differences, name):
        assert all(value < 1e-11 for value in worst.values()), worst


def shared_block(block: nn.Module, requested: dict[str, str]) -> Any:
    mesh, group = tensor_group(dist.get_world_size())
    model = Model(block, lambda block, x: block(x)).double()
    make_plan(model, requested, 2, sequence_parallel=False).apply(model, mesh, group, CPU)
    return model.block


def refused() -> None:
    x = torch.randn(3, 5, DIM, dtype=torch.float64)
    with pytest.raises(WrongUseError, match="passes a modified input to layers that"):
        shared_block(Hiding(), NARROW)(x)
    block = shared_block(Biased(), WHOLE_INPUT)
    with pytest.raises(WrongUseError, match=r"received 'bias' of shape \(4, 5, 5\).*To keep the attention unsharded"):
        block(x, torch.ones(1).double(), slopes(4, 5)[0])
    assert block.num_heads == HEADS


def test_what_cannot_be_divided_is_refused_in_the_step(ranks: Pools) -> None:
    ranks(2).run(refused)
