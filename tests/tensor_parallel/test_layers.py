"""Layers shared by ranks against the same layers in one process: outputs, gradients, communication."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from lightning_hybrid.distributed.dtensor import is_sharded, local_gradient
from lightning_hybrid.tensor_parallel.mappings import TensorGroup
from lightning_hybrid.tensor_parallel.plan import make_plan
from lightning_hybrid.tensor_parallel.vocab_parallel import to_plain_tensors
from tests.pool import Pools

CPU = torch.device("cpu")


class Decoder(nn.Module):
    """A decoder layer needs a memory."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(16, 4, 32, 0.0, **options)
        self.memory = nn.Parameter(torch.randn(4, 6, 16))

    def forward(self, x: Tensor) -> Tensor:
        if self.layer.self_attn.batch_first:
            return self.layer(x, self.memory * 1.0)
        return self.layer(x.transpose(0, 1), self.memory.transpose(0, 1) * 1.0).transpose(0, 1)


class Weighted(nn.Module):
    """An attention whose weights somebody looks at."""

    def __init__(self, average: bool, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True, **options)
        self.average = average

    def forward(self, x: Tensor) -> Tensor:
        y, weights = self.attention(x, x, x, average_attn_weights=self.average)
        return y + weights.flatten(1).sum(1)[:, None, None] * y.mean()


class Masked(nn.Module):
    """Causal and padding masks; a mask for each head."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).triu(1)
        padding = torch.arange(length) >= torch.tensor([[length], [length - 2], [length - 1], [3]])
        float_causal = torch.zeros(length, length, dtype=x.dtype).masked_fill(causal, float("-inf"))
        each_head = float_causal[None] - torch.arange(4 * 4).view(-1, 1, 1) * torch.rand(length, length).to(x)
        options: dict[str, Any] = {
            "causal": {"attn_mask": causal, "is_causal": True},
            "padding": {"key_padding_mask": padding, "attn_mask": causal},
            "heads": {"attn_mask": each_head},
            "float": {"attn_mask": float_causal, "key_padding_mask": padding.to(x) * -3},
        }[self.kind]
        torch.manual_seed(7)
        return self.attention(x, x, x, need_weights=False, **options)[0]


class Cross(nn.Module):
    """Keys and values of other sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, kdim=5, vdim=7, batch_first=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        return self.attention(x, x[:4, :, :5] * 2, x[:4, :, :7] * 3)[0].transpose(0, 1)


class Unbatched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.attention(each, each, each)[0] for each in x])


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.0), nn.Linear(32, 16))


def encoder(**options: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(16, 4, 32, 0.0, **options)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "encoder": lambda: nn.Sequential(encoder(batch_first=True), encoder(batch_first=True, norm_first=True)),
    "encoder, sequence first": lambda: nn.Sequential(encoder(activation="gelu"), encoder(bias=False)),
    "encoder stack": lambda: nn.TransformerEncoder(encoder(batch_first=True), 2, norm=nn.LayerNorm(16)),
    "decoder": lambda: Decoder(batch_first=True, norm_first=True),
    "decoder, sequence first": lambda: Decoder(),
    "mlp": lambda: nn.Sequential(mlp(), nn.LayerNorm(16), mlp()),
    "weights": lambda: Weighted(True),
    "weights of heads": lambda: Weighted(False, bias=False),
    "causal": lambda: Masked("causal"),
    "padding": lambda: Masked("padding"),
    "mask of heads": lambda: Masked("heads"),
    "float masks": lambda: Masked("float"),
    "other sizes": lambda: Cross(),
    "unbatched": lambda: Unbatched(),
}


def tensor_group(size: int) -> tuple[Any, TensorGroup]:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tensor_parallel",))["tensor_parallel"]
    return mesh, TensorGroup(mesh.get_group())


def parallel_and_dense(name: str, sequence_parallel: bool, training: bool) -> dict[str, Any]:
    """Differences between a module shared by all ranks and the same module on each of them."""
    torch.manual_seed(dist.get_rank())  # the values of the first rank count
    shared = MODULES[name]().double().train(training)
    torch.manual_seed(0)
    dense = MODULES[name]().double().train(training)
    mesh, group = tensor_group(dist.get_world_size())
    plan = make_plan(shared, "auto", group.size, sequence_parallel=sequence_parallel)
    plan.apply(shared, mesh, group, CPU)
    for parameter in shared.parameters():
        if not is_sharded(parameter):
            dist.broadcast(parameter.detach(), 0)
    x = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    seeds = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    outputs = []
    for module, leaf in zip((shared, dense), inputs, strict=True):
        torch.manual_seed(3)
        with torch.set_grad_enabled(training):
            outputs.append(module(leaf * 1.0))
        if training:
            (outputs[-1] * seeds).sum().backward()
    worst = {"output": float((outputs[0] - outputs[1]).abs().max())}
    if training:
        worst["input"] = float((inputs[0].grad - inputs[1].grad).abs().max())
        expected = dict(dense.named_parameters())
        for path, parameter in shared.named_parameters():
            gradient = local_gradient(parameter).clone()
            if path in plan.partial_grads:
                dist.all_reduce(gradient)
            full = parameter.grad.full_tensor() if is_sharded(parameter) else gradient
            worst[path] = float((full - expected[path].grad).abs().max())
            assert parameter.shape == expected[path].shape
    worst["sharded"] = sum(is_sharded(parameter) for parameter in shared.parameters())
    return worst


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("name", MODULES)
def test_layers_equal_one_process(ranks: Pools, name: str, sequence_parallel: bool, training: bool) -> None:
    for size in (2, 4):
        for worst in ranks(size).run(parallel_and_dense, name, sequence_parallel, training):
            assert worst.pop("sharded") > 0
            assert max(worst.values()) < 1e-12, worst


def banned(z: Tensor) -> Tensor:
    z = z * 1
    z[..., 3] = -5.0
    return z


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
    "product": lambda z, y: (z @ torch.ones(12, 2, dtype=z.dtype)).pow(2).sum(),
}


def loss_and_gradients(name: str) -> tuple[dict[str, float], int]:
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
    return worst, max(sent)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_over_divided_classes_equal_one_process_and_send_no_logits(ranks: Pools, name: str) -> None:
    for size in (2, 4):
        for worst, largest in ranks(size).run(loss_and_gradients, name):
            assert max(worst.values()) < 1e-12, worst
            assert largest <= 3 * 8 * 6, "the gradient of the head's input is the largest message, not the logits"


@pytest.mark.parametrize("name", GATHERED)
def test_what_needs_all_classes_gets_them(ranks: Pools, name: str) -> None:
    for worst, _ in ranks(2).run(loss_and_gradients, name):
        assert max(worst.values()) < 1e-12, worst


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
        assert [found[name] for name in ("target", "shape", "index", "twice")] == [
            "IndexError",
            "ValueError",
            "IndexError",
            "RuntimeError",
        ]


def communication(sequence_parallel: bool) -> dict[str, int]:
    layer = nn.Sequential(encoder(batch_first=True), encoder(batch_first=True))
    mesh, group = tensor_group(dist.get_world_size())
    make_plan(layer, "auto", group.size, sequence_parallel=sequence_parallel).apply(layer, mesh, group, CPU)
    x = torch.randn(3, 8, 16, requires_grad=True)
    with CommDebugMode() as mode:
        layer(x * 1.0).sum().backward()
    return {str(key).rpartition(".")[2]: count for key, count in mode.get_comm_counts().items()}


def test_two_encoder_layers_communicate_as_in_the_paper(ranks: Pools) -> None:
    for counts in ranks(2).run(communication, False):
        assert counts == {"allreduce_": 2 * (2 + 2)}, "of each layer 2 forward and 2 backward"
    for counts in ranks(2).run(communication, True):
        # Each all-reduce is a pair; the whole sequence is divided before the first layer, and joined after the last.
        assert counts == {"_allgather_base_": 2 * (2 + 2) + 2, "_reduce_scatter_base_": 2 * (2 + 2)}


def dropout_masks(sequence_parallel: bool) -> tuple[Tensor, Tensor, Tensor]:
    layer = nn.Sequential(nn.TransformerEncoderLayer(16, 4, 32, 0.5, batch_first=True))
    layer[0].linear1.bias.data.fill_(5.0)
    mesh, group = tensor_group(dist.get_world_size())
    make_plan(layer, "auto", group.size, sequence_parallel=sequence_parallel).apply(layer, mesh, group, CPU)
    seen: dict[str, Tensor] = {}
    for name in ("dropout", "dropout2"):
        hook: Callable[..., None] = lambda module, args, output, name=name: seen.__setitem__(name, output == 0)  # noqa: E731
        layer[0].get_submodule(name).register_forward_hook(hook)
    torch.manual_seed(5)
    y = layer(torch.ones(3, 8, 16))
    return seen["dropout"], seen["dropout2"], y


def test_dropout_is_equal_on_whole_activations_and_different_on_shards(ranks: Pools) -> None:
    first, second = ranks(2).run(dropout_masks, False)
    assert not torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert torch.equal(first[2], second[2])
    again, _ = ranks(2).run(dropout_masks, False)
    assert torch.equal(first[0], again[0])
    first, second = ranks(2).run(dropout_masks, True)
    assert not torch.equal(first[1], second[1]), "different parts of the sequence"
    assert torch.equal(first[2], second[2])


def test_a_copy_of_a_parallel_layer_is_one(ranks: Pools) -> None:
    ranks(2).run(copied)


def copied() -> None:
    layer = encoder(batch_first=True)
    mesh, group = tensor_group(2)
    make_plan(layer, "auto", 2, sequence_parallel=False).apply(layer, mesh, group, CPU)
    twin = copy.deepcopy(layer)
    x = torch.randn(3, 8, 16)
    dist.broadcast(x, 0)
    torch.testing.assert_close(twin(x), layer(x))
    assert isinstance(twin, nn.TransformerEncoderLayer)
    assert type(twin).__name__ == "TransformerEncoderLayer"
