"""What works on shares of a sequence around the layers, against the whole sequence: values, gradients, what is sent."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_hybrid.tensor_parallel.context_parallel.sharded_sequence import ShardedSequence, shard
from lightning_hybrid.tensor_parallel.sharded_activation import plain
from lightning_hybrid.tensor_parallel.sharding import Shares
from tests.pool import Pools
from tests.tensor_parallel.context_parallel.test_context_parallel import group_of_all
from tests.tensor_parallel.context_parallel.traffic import counted

BATCH, LENGTH, DIM, CLASSES = 3, 11, 6, 9
#: Of classes.
WEIGHTS = torch.linspace(0.1, 1, CLASSES, dtype=torch.float64)

Step = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Head(nn.Module):
    """A norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(DIM), nn.Linear(DIM, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


def _loss(**options: Any) -> Step:
    return lambda head, x, labels: F.cross_entropy(head(x).transpose(1, 2), labels, **options)


def causal_lm(head: Any, x: Tensor, labels: Tensor) -> Tensor:
    """As transformers has it, but for the cast to float32."""
    logits, labels = head(x), F.pad(labels, (0, 1), value=-100)
    labels = labels[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1), ignore_index=-100, reduction="sum") / 7


def rms_norm_by_hand(head: Any, x: Tensor, labels: Tensor) -> Tensor:
    x = head.norm.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
    logits = 3 * torch.tanh(x @ head.linear.weight.t() / 3)
    return F.nll_loss(logits.log_softmax(-1).flatten(0, 1), labels.flatten(), WEIGHTS)


def shifted(head: Any, x: Tensor, labels: Tensor) -> Tensor:
    logits = head(x)[..., :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, CLASSES), labels[..., 1:].contiguous().view(-1))


def with_positions(head: Any, x: Tensor, labels: Tensor) -> Tensor:
    """What differs by position, is computed from all positions, and is a parameter."""
    x = x + head.norm.weight * torch.arange(LENGTH)[:, None] + x.mean(1, keepdim=True) * (2 * head.norm.bias + 1)
    return F.cross_entropy(head(x)[:, 1:].transpose(1, 2), labels[:, 1:])


#: Of these nothing but numbers of each position are gathered.
ON_SHARES: dict[str, Step] = {
    "mean": lambda head, x, labels: _loss()(head, F.dropout(F.dropout(x, 0.0), training=False), labels),
    "sum": _loss(reduction="sum"),
    "weights": _loss(weight=WEIGHTS),
    "smoothing": _loss(label_smoothing=0.1, weight=WEIGHTS),
    "another ignored class": lambda head, x, labels: _loss(ignore_index=2)(head, x, labels.clamp_min(2)),
    "none": lambda head, x, labels: (_loss(reduction="none")(head, x, labels) * torch.arange(LENGTH)).mean(),
    "flat": lambda head, x, labels: F.cross_entropy(head(x).flatten(0, 1), labels.flatten()),
    "sequence first": lambda head, x, labels: F.cross_entropy(
        head(x.transpose(0, 1)).flatten(0, 1), labels.t().flatten()
    ),
    "probabilities": lambda head, x, labels: F.cross_entropy(
        head(x).mT, F.one_hot(labels.clamp_min(0), CLASSES).mT * 0.8 + 0.2 / CLASSES
    ),
    "shifted": shifted,
    "shifted before the head": lambda head, x, labels: F.cross_entropy(head(x[:, 2:-1]).mT, labels[:, 3:]),
    "causal_lm": causal_lm,
    "rms_norm": rms_norm_by_hand,
    "z_loss": lambda head, x, labels: _loss()(head, x, labels) + head(x).logsumexp(-1).square().mean(),
    "accuracy": lambda head, x, labels: (head(x).argmax(-1) == labels).double().mean() + _loss()(head, x, labels),
    "masked": lambda head, x, labels: F.cross_entropy(head(x).masked_fill((labels < 0)[..., None], 0.5).mT, labels),
    "microbatches": lambda head, x, labels: _loss()(head, torch.cat([x, 2 * x]), torch.cat([labels, labels])),
}


def read(head: Any, x: Tensor, labels: Tensor) -> Tensor:
    """On shares, and read through views, once."""
    logits = head(x)
    flat = logits.view(-1, CLASSES)
    return F.cross_entropy(flat, labels.flatten()) + flat.softmax(0).square().sum() + logits[:, -1].sum()


def written(head: Any, x: Tensor, labels: Tensor) -> Tensor:
    """Written into, through views too, which see that."""
    logits = head(x)
    flat = logits.view(-1, CLASSES)
    few = flat[:, :4]
    flat[:, 0] = 0.25
    logits *= 2
    return F.cross_entropy(logits.transpose(1, 2), labels) + F.cross_entropy(flat, labels.flatten()) + few.sum()


def watched(head: Any, x: Tensor, labels: Tensor) -> Tensor:
    """Hooks, and gradients that are kept or asked for, are those of the whole."""
    logits = head(x)
    logits.register_hook(lambda gradient: 2 * gradient)
    logits.retain_grad()
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
    return loss * gradient.abs().sum()


def unwatched(head: Any, x: Tensor, labels: Tensor) -> Tensor:
    """Views that are made without gradients have none."""
    logits = head(x)
    with torch.no_grad():
        flat, later = logits.view(-1, CLASSES), logits[:, 1:]
    factor = flat.softmax(0).square().sum() + F.cross_entropy(later.mT, labels[:, 1:])
    return F.cross_entropy(logits.mT, labels) * factor


class Cubed(torch.autograd.Function):
    """A function of the user's own, that keeps what it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * gradient * x * x


class Reversed(torch.autograd.Function):
    """The identity, whose gradient points the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


#: Of these the logits are gathered, once.
GATHERED: dict[str, Step] = {
    "read": read,
    "written": written,
    "of all positions": lambda head, x, labels: head(x).softmax(1).square().sum(),
    "another loss": lambda head, x, labels: F.mse_loss(head(x), torch.ones(BATCH, LENGTH, CLASSES, dtype=x.dtype)),
    "some positions": lambda head, x, labels: head(x)[labels == 3].sum(),
}
#: Of these hidden states, or gradients, are gathered too.
ALSO_GATHERED: dict[str, Step] = {
    "with_positions": with_positions,
    "own functions": lambda head, x, labels: _loss()(lambda x: Cubed.apply(head(Reversed.apply(x))), x, labels),
    "views of own functions": lambda head, x, labels: Reversed.apply(Reversed.apply(head(x)).mT).softmax(2).max(),
    "watched": watched,
    "without gradients": unwatched,
    "checkpointed": lambda head, x, labels: _loss()(lambda x: checkpoint(head, x, use_reentrant=True), x, labels),
}


def _given() -> tuple[Head, Tensor, Tensor]:
    torch.manual_seed(1)
    labels = torch.randint(CLASSES, (BATCH, LENGTH))
    labels[0, 3] = labels[1, -1] = labels[2, 2:] = -100
    return Head().double(), torch.randn(BATCH, LENGTH, DIM, dtype=torch.float64), labels


def _averaged(gradient: Tensor, shares: Shares) -> Tensor:
    """Of a parameter, as gradients are averaged over the ranks."""
    total = gradient.clone()
    torch.distributed.all_reduce(total)
    return total / shares.group.size


def compare(name: str, step: Step, balanced: bool) -> int:
    """Compare a step with one process, and count what it gathers."""
    head, x, labels = _given()
    shares = Shares(LENGTH, group_of_all(), balanced=balanced)
    whole = x.clone().requires_grad_()
    expected_head = copy.deepcopy(head)
    expected = step(expected_head, whole * 1, labels)
    expected.backward()

    own = shares.own(x, 1).clone().requires_grad_()
    with counted() as sent:
        found = step(head, shard(own * 1, 1, shares), labels)
        assert type(found) is Tensor
        found.backward()
    close = {"rtol": 1e-11, "atol": 1e-13}
    torch.testing.assert_close(found, expected, **close, msg=lambda text: f"{name}: {text}")
    # In the layers gradients are `size` times those of the share, for they are averaged over the ranks.
    torch.testing.assert_close(own.grad, shares.own(whole.grad, 1) * shares.group.size, **close)
    for mine, parameter in zip(head.parameters(), expected_head.parameters(), strict=True):
        if parameter.grad is None:
            assert mine.grad is None, name
        else:
            torch.testing.assert_close(_averaged(mine.grad, shares), parameter.grad, **close)
    return sent.get("all_gather", 0)


def compare_all() -> None:
    size = torch.distributed.get_world_size()
    padded = 8 * BATCH * -(-LENGTH // size) * (size - 1)  # bytes that a rank sends of a number for each position
    for balanced in (False, True):
        for name, step in ON_SHARES.items():
            assert compare(name, step, balanced) <= padded, name
        for name, step in GATHERED.items():
            assert padded * (CLASSES - 1) < compare(name, step, balanced) <= 1.2 * padded * CLASSES, name
        for name, step in ALSO_GATHERED.items():
            assert compare(name, step, balanced), name


@pytest.mark.distributed
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_heads_and_losses_are_those_of_the_whole_sequence(ranks: Pools, size: int) -> None:
    ranks(size).run(compare_all)


def without_gradients() -> None:
    head, x, labels = _given()
    shares = Shares(LENGTH, group_of_all(), balanced=True)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), counted() as sent:
            sequence = shard(shares.own(x, 1), 1, shares)
            torch.testing.assert_close(_loss()(head, sequence, labels), _loss()(head, x, labels))
            assert not sent
            torch.testing.assert_close(plain(head(sequence)), head(x))


def in_half_precision() -> None:
    head, x, labels = _given()
    head, x = head.float(), 100 * x.float()
    shares = Shares(LENGTH, group_of_all(), balanced=False)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = (causal_lm(head, each, labels) for each in (shard(shares.own(x, 1), 1, shares), x))
    assert found.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(found, expected)
    head, x = head.half(), x.half()
    many = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    found = _loss()(lambda x: head(x) * 100, shard(shares.own(x, 1), 1, shares), many)
    assert found.dtype == torch.float16
    torch.testing.assert_close(found, _loss()(lambda x: head(x) * 100, x, many))


def wrong_labels() -> None:
    head, x, labels = _given()
    shares = Shares(LENGTH, group_of_all(), balanced=False)
    sequence = shard(shares.own(x, 1), 1, shares)
    nothing = torch.full_like(labels, -100)
    assert math.isnan(_loss()(head, sequence, nothing).item())
    labels[0, -1] = CLASSES  # of the last rank; every rank says it
    with pytest.raises(IndexError, match="out of bounds"):
        _loss()(head, sequence, labels)
    with pytest.raises((ValueError, RuntimeError)):
        _loss()(head, sequence, labels[:, 1:])


@pytest.mark.distributed
@pytest.mark.parametrize("what", [without_gradients, in_half_precision, wrong_labels])
def test_losses_on_shares(ranks: Pools, what: Callable[[], None]) -> None:
    ranks(2).run(what)


def forms() -> None:
    """Sizes, strides and shapes are those of the whole, and what changes only these sends nothing."""
    shares = Shares(LENGTH, group_of_all(), balanced=True)
    x = torch.randn(BATCH, LENGTH, 4, 2, generator=torch.Generator().manual_seed(1))
    sequence = shard(shares.own(x, 1), 1, shares)
    changes: list[Callable[[Tensor], Tensor]] = [
        lambda x: x.transpose(1, 2).contiguous(),
        lambda x: x[..., 1].permute(1, 0, 2)[1:, None],
        lambda x: x.flatten(0, 1)[:, 2].unsqueeze(0),
        lambda x: x[:, 2:-3].flatten().view(BATCH, LENGTH - 5, 8),
        lambda x: x.reshape(-1, 8).unflatten(0, (BATCH, LENGTH)).movedim(1, 0),
    ]
    for change in changes:
        with counted() as sent:
            found, expected = change(sequence), change(x)
        assert isinstance(found, ShardedSequence)
        assert not sent
        assert (found.shape, found.stride()) == (expected.shape, expected.stride())
        torch.testing.assert_close(plain(found), expected)


@pytest.mark.distributed
def test_shapes_are_those_of_the_whole_sequence(ranks: Pools) -> None:
    ranks(2).run(forms)
