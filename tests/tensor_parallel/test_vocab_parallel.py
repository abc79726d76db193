"""Logits and losses over classes that ranks share, against the same in one process: values, gradients, messages."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode

from lightning_hybrid.tensor_parallel.plan import make_plan
from lightning_hybrid.tensor_parallel.vocab_parallel import to_plain_tensors
from tests.pool import Pools
from tests.tensor_parallel.context_parallel.traffic import counted
from tests.tensor_parallel.groups import CPU, tensor_group


def banned(z: Tensor) -> Tensor:
    z = z * 1
    z[..., 3] = -5.0
    return z


def hooked(z: Tensor, y: Tensor) -> Tensor:
    z = z * 1
    z.register_hook(lambda gradient: 2 * gradient.view(-1, 12).view_as(gradient))
    return F.cross_entropy(z.view(-1, 12), y.view(-1))


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "plain": lambda z, y: F.cross_entropy(z.view(-1, 12), y.view(-1)),
    "module": lambda z, y: nn.CrossEntropyLoss()(z.flatten(0, 1), y.flatten()),
    "classes second": lambda z, y: F.cross_entropy(z.transpose(1, 2), y),
    "sum": lambda z, y: F.cross_entropy(z.reshape(-1, z.size(-1)), y.reshape(-1), reduction="sum") / 7,
    "none": lambda z, y: F.cross_entropy(z.view(-1, 12), y.view(-1), reduction="none").pow(2).mean(),
    "ignored": lambda z, y: F.cross_entropy(z.view(-1, 12), y.view(-1).masked_fill(y.view(-1) == 3, -100)),
    "ignored class": lambda z, y: F.cross_entropy(z.view(-1, 12), y.view(-1), ignore_index=3),
    "smoothing": lambda z, y: F.cross_entropy(z.view(-1, 12), y.view(-1), label_smoothing=0.1),
    "weights": lambda z, y: F.cross_entropy(z.view(-1, 12), y.view(-1), weight=torch.arange(1.0, 13).to(z.dtype)),
    "all": lambda z, y: F.cross_entropy(
        z.view(-1, 12), y.view(-1), torch.arange(1.0, 13).to(z.dtype), ignore_index=5, label_smoothing=0.2
    ),
    "probabilities": lambda z, y: F.cross_entropy(z.view(-1, 12), F.one_hot(y.view(-1), 12).to(z.dtype) * 0.7 + 0.025),
    "weighted probabilities": lambda z, y: F.cross_entropy(
        z.view(-1, 12),
        F.one_hot(y.view(-1), 12).to(z.dtype),
        weight=torch.arange(1.0, 13).to(z.dtype),
        label_smoothing=0.3,
    ),
    "one sample": lambda z, y: F.cross_entropy(z[0, 0], y[0, 0]),
    "shifted": lambda z, y: F.cross_entropy(z[:, :-1].contiguous().view(-1, z.shape[-1]), y[:, 1:].reshape(-1)),
    "shifted, ellipsis": lambda z, y: F.cross_entropy(z[..., :-1, :].permute(0, 2, 1), y[..., 1:]),
    "masked": lambda z, y: F.cross_entropy(z[y > 4], y[y > 4]),
    "last": lambda z, y: F.cross_entropy(z[:, -1], y[:, -1]),
    "float": lambda z, y: F.cross_entropy(z.float().view(-1, 12), y.view(-1)).double(),
    "temperature": lambda z, y: F.cross_entropy((z / 0.7).view(-1, 12) * 2, y.view(-1)),
    "log_softmax, nll_loss": lambda z, y: F.nll_loss(F.log_softmax(z, dim=-1).view(-1, 12), y.view(-1), ignore_index=2),
    "method log_softmax": lambda z, y: nn.NLLLoss(reduction="sum")(z.log_softmax(-1).transpose(1, 2), y),
    "module log_softmax": lambda z, y: F.nll_loss(nn.LogSoftmax(-1)(z.view(-1, 12)), y.view(-1)),
}
GATHERED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "softmax": lambda z, y: (z.softmax(-1) ** 2).sum() + z.mean(),
    "gather": lambda z, y: z.gather(-1, y.unsqueeze(-1)).pow(2).mean(),
    "advanced index": lambda z, y: z[torch.arange(3)[:, None], torch.arange(8), y].sum(),
    "kl": lambda z, y: F.kl_div(F.log_softmax(z, -1), z.detach().softmax(-1) * 0.5, reduction="batchmean"),
    "binary": lambda z, y: F.binary_cross_entropy_with_logits(z, F.one_hot(y, 12).to(z.dtype)),
    "class by class": lambda z, y: z[..., 3].sum() + z[:, :, 2:4].pow(2).sum(),
    "other dimension": lambda z, y: F.log_softmax(z, dim=1).mul(torch.arange(12.0)).sum(),
    "target that learns": lambda z, y: F.cross_entropy(z.view(-1, 12), (z * 2).softmax(-1).view(-1, 12)),
    "new axis": lambda z, y: (z[..., None] * torch.arange(12.0).view(12, 1)).pow(2).sum(),
    "banned class": lambda z, y: F.cross_entropy(banned(z).view(-1, 12), y.view(-1), reduction="sum"),
    "clamped in place": lambda z, y: F.cross_entropy((z * 1).clamp_(-0.5, 0.5).view(-1, 12), y.view(-1)),
    "concatenated": lambda z, y: torch.cat([z, z * 2]).pow(2).sum(),
    "gradient hook": hooked,
    "product": lambda z, y: (z @ torch.ones(12, 2, dtype=z.dtype)).pow(2).sum(),
}


def loss_and_gradients(name: str) -> tuple[dict[str, float], int, int]:
    """Differences, entries of the largest message, and bytes of logits that are gathered."""
    torch.manual_seed(0)
    x = torch.randn(3, 8, 6, dtype=torch.float64)
    y = torch.randint(12, (3, 8))
    shared, dense = (nn.Sequential(nn.Linear(6, 12).double()) for _ in range(2))
    dense.load_state_dict(shared.state_dict())
    mesh, group = tensor_group(dist.get_world_size())
    make_plan(shared, {"0": "vocab"}, group.size, sequence_parallel=False).apply(shared, mesh, group, CPU)
    loss = {**LOSSES, **GATHERED}[name]
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    worst, sent = {}, []
    with counted() as gathered:  # without a mode, which does not see what operators on logits call
        loss(shared(x * 1.0), y).backward()
    shared.zero_grad()

    class Counting(CommDebugMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.__name__.split(".")[0] in ("allreduce_", "_allgather_base_", "_reduce_scatter_base_", "allgather_"):
                tensors = torch.utils._pytree.tree_leaves(args)
                sent.append(max(each.numel() for each in tensors if isinstance(each, Tensor)))
            return super().__torch_dispatch__(func, types, args, kwargs)

    results = []
    for module, leaf in zip((shared, dense), inputs, strict=True):
        with Counting():
            z = module(leaf * 1.0)
            results.append(loss(z, y))
            results[-1].backward()
        assert z.shape == (3, 8, 12), z.shape
        assert isinstance(z, Tensor)
        assert z.requires_grad
        assert z.size(-1) == 12
        worst["argmax"] = float((z.argmax(-1) - dense(x).argmax(-1)).abs().max())
        worst["accuracy"] = float(((z.argmax(dim=-1) == y) != (dense(x).argmax(-1) == y)).sum())
    precision = 1e-6 if name == "float" else 1.0
    worst["loss"] = float((results[0] - results[1]).detach().abs()) * precision
    worst["input"] = float((inputs[0].grad - inputs[1].grad).abs().max()) * precision
    worst["weight"] = float((shared[0].weight.grad.full_tensor() - dense[0].weight.grad).abs().max()) * precision
    assert type(to_plain_tensors(z)) is Tensor
    return worst, max(sent), gathered.get("all_gather", 0)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_over_divided_classes_equal_one_process_and_send_no_logits(ranks: Pools, name: str) -> None:
    for size in (2, 4):
        for worst, largest, gathered in ranks(size).run(loss_and_gradients, name):
            assert all(value < 1e-12 for value in worst.values()), worst
            assert largest <= 3 * 8 * 6, "the gradient of the head's input is the largest message, not the logits"
            assert gathered == 0


@pytest.mark.parametrize("name", GATHERED)
def test_what_needs_all_classes_gets_them(ranks: Pools, name: str) -> None:
    logits = 8 * 3 * 8 * 6  # bytes that a rank sends of its shard
    tensors = {"concatenated": 2, "target that learns": 2, "kl": 2}.get(name, 1)
    for worst, _, gathered in ranks(2).run(loss_and_gradients, name):
        assert all(value < 1e-12 for value in worst.values()), worst
        assert gathered == logits * tensors


def edges() -> dict[str, Any]:
    """What torch says, and what is said over divided classes."""
    torch.manual_seed(0)
    shared, dense = (nn.Linear(6, 12).double() for _ in range(2))
    dense.load_state_dict(shared.state_dict())
    embedding = nn.Embedding(12, 6)
    mesh, group = tensor_group(2)
    module = nn.ModuleDict({"head": shared, "embedding": embedding})
    plan = make_plan(module, {"head": "vocab", "embedding": "vocab"}, 2, sequence_parallel=False)
    plan.apply(module, mesh, group, CPU)
    x, y = torch.randn(4, 6, dtype=torch.float64), torch.full((4,), -100)
    loss = F.cross_entropy(shared(x), y)
    loss.backward()
    found: dict[str, Any] = {"nothing counts": (float(loss), float(shared.weight.grad.full_tensor().abs().max()))}
    t = nn.Parameter(torch.tensor(1.7, dtype=torch.float64))
    for name, head in (("shared", shared), ("dense", dense)):
        t.grad = None
        F.cross_entropy(head(x) * t, torch.arange(4)).backward()
        found[f"temperature {name}"] = float(t.grad)
    with torch.no_grad():
        z = shared(x)
        z[:, z.argmax(-1)] = -1e9
        found["argmax"] = z.argmax(-1).tolist(), [int(z.full_tensor()[row].argmax()) for row in range(4)]
        logits, full = shared(x), dense(x)
        out = torch.empty(4, dtype=torch.long)
        found["names"] = [
            torch.equal(call(logits), call(full))
            for call in (
                lambda z: torch.argmax(z, axis=1),
                lambda z: torch.argmax(input=z, dim=-1, keepdim=True),
                lambda z: z.argmax(axis=-1, keepdims=True),
                lambda z: torch.argmax(z, 1, out=out),
                lambda z: torch.ones_like(z.view(dtype=torch.int64)),
            )
        ]
    for name, call in {
        "target": lambda: F.cross_entropy(shared(x), torch.tensor([0, 1, 2, 12])),
        "shape": lambda: F.cross_entropy(shared(x), torch.tensor([1])),
        "index": lambda: embedding(torch.tensor([12])),
        "twice": lambda: torch.autograd.grad(
            torch.autograd.grad(F.cross_entropy(shared(x), torch.arange(4)), shared.weight, create_graph=True)[0]
            .to_local()
            .sum(),
            shared.weight,
        ),
    }.items():
        with pytest.raises((IndexError, ValueError, RuntimeError)) as caught:
            call()
        found[name] = type(caught.value).__name__
    return found


def test_edges_of_losses(ranks: Pools) -> None:
    for found in ranks(2).run(edges):
        assert math.isnan(found["nothing counts"][0])
        assert found["nothing counts"][1] == 0.0
        assert found["temperature shared"] == pytest.approx(found["temperature dense"], rel=1e-12)
        assert found["argmax"][0] == found["argmax"][1]
        assert all(found["names"]), found["names"]
        assert [found[name] for name in ("target", "shape", "index", "twice")] == [
            "IndexError",
            "ValueError",
            "IndexError",
            "RuntimeError",
        ]
