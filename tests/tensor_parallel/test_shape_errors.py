"""Where a plan divides some layers of a block and lacks an entry for another, the error names the entry."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.pool import Pools
from tests.training_jobs import Regression, loader, make_trainer


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k = (layer(x).view(len(x), self.num_heads, 2) for layer in (self.q, self.k))
        return self.out((q.softmax(1) * k).flatten(1))


class NarrowAttention(nn.Module):
    """Takes the width of what it makes from its input, as nanoGPT does."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape  # samples, positions, features
        q, k, v = self.qkv(x).split(C, dim=2)
        q, k, v = (each.view(B, T, self.heads, C // self.heads).transpose(1, 2) for each in (q, k, v))
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, T, C))


class NarrowBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = NarrowAttention()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x.unsqueeze(1)).squeeze(1)


class NarrowBlocks(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*[NarrowBlock() for _ in range(4)]).double()


NARROW = {"body.*.attention.qkv": "packed_colwise_3", "body.*.attention.out": "rowwise"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.down(torch.relu(self.up(x)))


class Blocks(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*[Block() for _ in range(4)]).double()


ATTENTION = {"body.*.attention.q": "colwise", "body.*.attention.k": "colwise", "body.*.attention.out": "rowwise"}
MLP = {"body.*.up": "colwise", "body.*.down": "rowwise"}
HEADS = {"body.*.attention": "divide:num_heads"}


def trained(plan: dict[str, str], module: type[Regression] = Blocks) -> str:
    try:
        make_trainer({"tensor_parallel_size": 2, "tensor_parallel_plan": plan}).fit(module(), loader())
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("plan", "torchs", "words"),
    [
        (
            {**ATTENTION, **MLP},
            "shape '[8, 4, 2]' is invalid for input of size 32\nThis error occurred in 'body.0.attention', where"
            " tensor_parallel_plan shards 'body.0.attention.q', 'body.0.attention.k', 'body.0.attention.out'. Each",
            "The plan may lack the entry 'body.*.attention': 'divide:num_heads'.",
        ),
        (
            {**ATTENTION, **HEADS, "body.*.up": "colwise"},
            "mat1 and mat2 shapes cannot be multiplied (8x8 and 16x8)\nThis error occurred in 'body.0', where"
            " tensor_parallel_plan shards 'body.0.attention', 'body.0.up'. Each rank has only a shard",
            "The plan may lack the entry 'body.*.down': 'rowwise'.",
        ),
        (
            {"embed": "colwise"},
            "This error occurred in 'Blocks', where tensor_parallel_plan shards 'embed'. Each rank",
            "The plan may lack the entry 'embed': 'colwise_gather_output'.",
        ),
        ({**ATTENTION, **MLP, **HEADS}, "no error", ""),
    ],
    ids=["heads", "rowwise", "around", "complete"],
)
def test_a_shape_that_does_not_fit_names_the_entry_that_is_missing(
    ranks: Pools, plan: dict[str, str], torchs: str, words: str
) -> None:
    for text in ranks(2, lightning=True).run(trained, plan):
        assert torchs in text
        assert words in text


@pytest.mark.parametrize("entry", [{}, {"body.*.attention": "divide:heads"}], ids=["no entry", "heads alone"])
def test_code_that_takes_the_width_of_its_input_is_told_to_narrow_it(ranks: Pools, entry: dict[str, str]) -> None:
    both = "divide:heads + narrow_input:qkv"
    for text in ranks(2, lightning=True).run(trained, {**NARROW, **entry}, NarrowBlocks):
        assert (
            "not enough values to unpack (expected 3, got 2)\nThis error occurred in 'body.0.attention', where" in text
        )
        assert f"The plan may lack the entry 'body.*.attention': '{both}'." in text
    assert ranks(2, lightning=True).run(trained, {**NARROW, "body.*.attention": both}, NarrowBlocks) == ["no error"] * 2


class JoinedBlock(nn.Module):
    """Norm, attention, residual and a gated multilayer perceptron in one `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 4, 2
        self.norm = nn.LayerNorm(8)
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        y = self.norm(x)
        q, k, v = (
            each(y).view(b, t, self.num_heads, self.head_dim).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        x = x + self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, c))
        return x + self.down(torch.relu(self.gate(x)) * self.up(x))


class JoinedBlocks(Regression):
    block: type[nn.Module] = JoinedBlock

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*[self.block() for _ in range(4)]).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.embed(x).unsqueeze(1)).squeeze(1))


class ReadsBehind(JoinedBlock):
    """As the advice says."""

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        y = self.norm(x)
        q, k, v = (each(y).view(b, t, self.num_heads, -1).transpose(1, 2) for each in (self.q, self.k, self.v))
        x = x + self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, -1))
        return x + self.down(torch.relu(self.gate(x)) * self.up(x))


class ReadBehind(JoinedBlocks):
    block = ReadsBehind


QKVO = {**{f"body.*.{name}": "colwise" for name in "qkv"}, "body.*.o": "rowwise"}
GATED = {"body.*.gate": "colwise", "body.*.up": "colwise", "body.*.down": "rowwise"}
JOINED = {"body.*": "divide:num_heads"}
BEHIND = "read widths in `forward` from the outputs of the sharded layers (`.view(b, t, self.num_heads, -1)`, `."


@pytest.mark.parametrize(
    ("plan", "torchs", "words", "absent"),
    [
        (
            QKVO,
            "shape '[8, 1, 4, 2]' is",
            "The plan may lack the entry 'body.*': 'divide:num_heads'. The code reads the full width",
            "head_dim",
        ),
        (
            {**QKVO, **JOINED},
            "shape '[8, 1, 8]' is",
            "gathers the outputs. The code reads the full width of its input",
            "'divide:",
        ),
        (
            {**QKVO, "body.*": "divide:num_heads + narrow_input:q,k,v"},
            "Given normalized_shape=[8]",
            "The plan contains 'body.*': 'narrow_input:q,k,v', so this code receives an input that has the width of a",
            "The plan may lack",
        ),
    ],
    ids=["nothing", "heads", "narrow"],
)
def test_a_block_in_one_forward_is_told_to_read_widths_behind_its_layers(
    ranks: Pools, plan: dict[str, str], torchs: str, words: str, absent: str
) -> None:
    """Its input is normalised and added, so it cannot be narrowed; `head_dim` is the same on all ranks."""
    for text in ranks(2, lightning=True).run(trained, plan, JoinedBlocks):
        assert torchs in text
        assert words in text
        assert BEHIND in text
        assert absent not in text.partition("This error occurred in")[2]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"body.*.up": "replicate"}, "The plan may lack the entry 'body.*.up': 'colwise'."),
        (
            {"body.*.up": "replicate", "body.*.down": "colwise_gather_output"},
            "The plan may lack the entry 'body.*.up': 'colwise'.",
        ),
        (
            {"body.*.gate": "replicate", "body.*.up": "replicate"},
            "The plan may lack the entries 'body.*.gate': 'colwise' and 'body.*.up': 'colwise'.",
        ),
        ({"body.*.down": "colwise_gather_output"}, "The plan may lack the entry 'body.*.down': 'rowwise'."),
        ({"body.*.v": "replicate"}, "The plan may lack the entry 'body.*.v': 'colwise'."),
        ({"body.*.o": "replicate"}, "The plan may lack the entry 'body.*.o': 'rowwise'."),
        ({}, "no error"),
    ],
    ids=["up", "up, then down", "gate and up", "down", "v", "o", "complete"],
)
def test_the_linear_layer_that_the_plan_lacks_is_proposed(ranks: Pools, change: dict[str, str], words: str) -> None:
    for text in ranks(2, lightning=True).run(trained, {**QKVO, **JOINED, **GATED, **change}, ReadBehind):
        assert words in text


class Unrelated(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(3, 5)


def test_code_around_blocks_that_are_divided_rightly_has_no_entry_proposed(ranks: Pools) -> None:
    for text in ranks(2, lightning=True).run(trained, {**ATTENTION, **MLP, **HEADS}, Unrelated):
        assert "shape '[3, 5]' is invalid" in text
        assert "where tensor_parallel_plan shards" in text
        assert "The plan may lack" not in text


def unrelated() -> Any:
    with pytest.raises(RuntimeError) as error:
        make_trainer({"num_microbatches": 2}).fit(Unrelated(), loader())
    return str(error.value)


def test_without_divided_layers_an_error_stays_what_it_is(ranks: Pools) -> None:
    (text,) = ranks(1, lightning=True).run(unrelated)
    assert "shape '[3, 5]' is invalid" in text
    assert "tensor_parallel_plan" not in text
