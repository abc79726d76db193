"""Layers shared by ranks against the same layers in one process: outputs, gradients, communication."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode

from lightning_hybrid.distributed.dtensor import full_tensor, is_sharded, local_gradient
from lightning_hybrid.tensor_parallel.plan import make_plan
from tests.pool import Pools
from tests.tensor_parallel.groups import CPU, tensor_group


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
    "layers": mlp,
}


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
            full = full_tensor(parameter.grad) if is_sharded(parameter) else gradient
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
            assert all(value < 1e-12 for value in worst.values()), worst


def dtypes_under_autocast(name: str) -> list[torch.dtype]:
    """Of what a module gives in one process, and shared by all ranks."""
    mesh, group = tensor_group(dist.get_world_size())
    found = []
    for is_shared in (False, True):
        module = MODULES[name]()
        if is_shared:
            make_plan(module, "auto", group.size, sequence_parallel=False).apply(module, mesh, group, CPU)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found.append(module(torch.randn(4, 8, 16)).dtype)
    return found


@pytest.mark.parametrize("name", ["other sizes", "layers"])
def test_what_shared_layers_give_under_autocast_is_of_the_dtype_of_one_process(ranks: Pools, name: str) -> None:
    """A bias of float32 made it float32, and the messages between stages twice as long."""
    for found in ranks(2).run(dtypes_under_autocast, name):
        assert found == [torch.bfloat16] * 2


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
