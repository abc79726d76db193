from __future__ import annotations

import copy
import time
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_hybrid.data_parallel import grad_buckets
from lightning_hybrid.data_parallel.all_reduce import start_all_reduce
from lightning_hybrid.data_parallel.grad_buckets import FIRST_BUCKET_BYTES, GradientBuckets, assign
from tests.pool import Pools, RankError

Gradients = list[Tensor | None]


def group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def mean_buckets(parameters: list[nn.Parameter], **options: Any) -> GradientBuckets:
    return GradientBuckets(parameters, group(), scale=1 / group().size(), **options)


def step(buckets: GradientBuckets, backward: Callable[[], None]) -> None:
    buckets.arm()
    backward()
    buckets.launch_rest()
    buckets.finish()


def gradients_of(module: nn.Module) -> Gradients:
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


# Modules, whose use differs between ranks, and their loss on one rank


class Network(nn.Module):
    """Some layers are used by every rank, one by the odd ranks, one by nobody."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.odd = nn.Linear(7, 7)
        self.nobody = nn.Linear(3, 3)
        self.norm = nn.LayerNorm(7)
        self.last = nn.Linear(7, 2)
        self.to(dtype)

    def loss(self, rank: int, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * rank + seed)
        x = torch.randn(4, 5, generator=generator, dtype=torch.float64).to(self.first.weight.dtype)
        hidden = self.first(x)
        if rank % 2:
            hidden = self.odd(hidden).relu()
        return self.last(self.norm(hidden)).square().mean()


class Shuffled(nn.Module):
    """Every rank uses the layers in an order of its own, so gradients arrive in another one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6, dtype=torch.float64) for _ in range(6))

    def loss(self, rank: int, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * rank + seed)
        x = torch.randn(3, 6, generator=generator, dtype=torch.float64)
        for index in torch.randperm(6, generator=generator).tolist():
            x = self.layers[index](x).tanh()
        return x.square().sum()


def oracle(module: Network | Shuffled, size: int, num_microbatches: int = 1) -> Gradients:
    """The mean over ranks in one process; gradients that nobody has are `None`."""
    for rank in range(size):
        for seed in range(num_microbatches):
            (module.loss(rank, seed) / size).backward()
    return gradients_of(module)


def reduced(module: Network | Shuffled, options: dict[str, Any], num_microbatches: int = 1) -> Gradients:
    buckets = mean_buckets(list(module.parameters()), **options)
    for seed in range(num_microbatches - 1):
        module.loss(dist.get_rank(), seed).backward()
    step(buckets, lambda: module.loss(dist.get_rank(), num_microbatches - 1).backward())
    return gradients_of(module)


def assert_gradients(actual: Gradients, expected: Gradients, tolerance: float = 1e-12) -> None:
    assert [g is None for g in actual] == [g is None for g in expected]
    for a, e in zip(actual, expected, strict=True):
        if a is not None and e is not None:
            torch.testing.assert_close(a, e, rtol=tolerance, atol=tolerance)


def assert_same_bits(results: list[Gradients]) -> None:
    for other in results[1:]:
        assert_gradients(other, results[0], tolerance=0.0)


OPTIONS = [{}, {"bucket_bytes": 1}, {"bucket_bytes": 300}, {"bucket_bytes": 300, "overlap": False}]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("num_microbatches", [1, 3])
@pytest.mark.parametrize("make", [Network, Shuffled])
def test_gradients_are_the_mean_over_ranks(ranks: Pools, make: Any, num_microbatches: int, options: Any) -> None:
    module = make()
    results = ranks(3).run(reduced, module, options, num_microbatches)
    assert_same_bits(results)
    assert_gradients(results[0], oracle(module, 3, num_microbatches))


@pytest.mark.parametrize("overlap", [True, False])
def test_one_rank_keeps_its_gradients(ranks: Pools, overlap: bool) -> None:
    module = Network()
    [result] = ranks(1).run(reduced, module, {"bucket_bytes": 300, "overlap": overlap})
    assert_gradients(result, oracle(module, 1), tolerance=0.0)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float16, 2e-3), (torch.bfloat16, 1.6e-2), (torch.float32, 1e-6)]
)
def test_other_dtypes(ranks: Pools, dtype: torch.dtype, tolerance: float) -> None:
    module = Network(dtype)
    results = ranks(2).run(reduced, module, {"bucket_bytes": 300})
    assert_same_bits(results)
    assert_gradients(results[0], oracle(module, 2), tolerance)


def several_dtypes() -> list[tuple[torch.dtype, float]]:
    kinds = [torch.float64, torch.float16, torch.float64, torch.bfloat16, torch.float32, torch.complex64]
    parameters = [nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in kinds]
    factor = dist.get_rank() + 1  # 1 and 2: the mean, 1.5, is exact in every dtype
    step(mean_buckets(parameters), lambda: sum((p * factor).abs().sum().double() for p in parameters).backward())  # type: ignore[union-attr]
    return [(p.grad.dtype, p.grad.real[0].item()) for p in parameters if p.grad is not None]


def test_several_dtypes_at_once(ranks: Pools) -> None:
    kinds = [torch.float64, torch.float16, torch.float64, torch.bfloat16, torch.float32, torch.complex64]
    assert ranks(2).run(several_dtypes) == [[(dtype, 1.5) for dtype in kinds]] * 2


def train(set_to_none: bool, num_steps: int, masked: bool = False) -> Gradients:
    """Some steps; masked, nobody may read from the sum which gradients other ranks have."""
    torch.manual_seed(3)
    module = Network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, weight_decay=0.5)
    mask_group = dist.new_group(backend="gloo") if masked else None
    buckets = mean_buckets(list(module.parameters()), bucket_bytes=300, mask_group=mask_group)
    for seed in range(num_steps):
        step(buckets, lambda seed=seed: module.loss(dist.get_rank(), seed).backward())  # type: ignore[misc]
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    return [p.detach() for p in module.parameters()]


@pytest.mark.parametrize(("set_to_none", "masked"), [(True, False), (False, False), (True, True)])
def test_training_equals_one_process(ranks: Pools, set_to_none: bool, masked: bool) -> None:
    results = ranks(2).run(train, set_to_none, 4, masked)
    torch.manual_seed(3)
    module = Network()
    unused = module.nobody.weight.clone()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, weight_decay=0.5)
    for seed in range(4):
        for rank in range(2):
            (module.loss(rank, seed) / 2).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    assert_same_bits(results)
    assert_gradients(results[0], list(module.parameters()))
    assert torch.equal(module.nobody.weight, unused), "no weight decay without a gradient"


# When collectives start


def launches(overlap: bool) -> tuple[list[int], int, list[int]]:
    module = Shuffled()
    buckets = mean_buckets(list(module.parameters()), bucket_bytes=6 * 8, overlap=overlap)
    sizes: list[int] = []

    def record(tensor: Tensor, *args: Any) -> Any:
        sizes.append(tensor.numel())
        return start_all_reduce(tensor, *args)

    with mock.patch.object(grad_buckets, "start_all_reduce", record):
        module.loss(dist.get_rank(), 0).backward()
        before = list(sizes)
        buckets.arm()
        module.loss(dist.get_rank(), 1).backward()
        during = len(sizes)
        buckets.launch_rest()
        buckets.finish()
    return before, during, sizes


def test_nothing_travels_before_the_last_backward_and_all_of_it_during(ranks: Pools) -> None:
    # 12 buckets of one parameter each: bias and weight of layer 5, of layer 4, ...; each with its mark
    assert ranks(2).run(launches, True) == [([], 12, [7, 37] * 6)] * 2


def test_without_overlap_all_travel_after_backward(ranks: Pools) -> None:
    assert ranks(2).run(launches, False) == [([], 0, [7, 37] * 6)] * 2


def unused_last_layer() -> tuple[int, int]:
    layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))
    buckets = mean_buckets(list(layers.parameters()), bucket_bytes=1)
    x = torch.ones(1, 4)
    for layer in list(layers)[: 2 if dist.get_rank() == 0 else 3]:
        x = layer(x)
    buckets.arm()
    x.sum().backward()
    during = buckets._num_launched
    buckets.launch_rest()
    total = buckets._num_launched
    buckets.finish()
    return during, total


def test_a_full_bucket_waits_for_the_ones_before_it(ranks: Pools) -> None:
    assert ranks(2).run(unused_last_layer) == [(0, 3), (3, 3)]


# What becomes of `.grad`


def grad_during_backward() -> list[Any]:
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    buckets = mean_buckets([first, second], bucket_bytes=1)
    seen: list[Any] = []
    # The second one's gradient arrives first: its bucket has started when the first one's arrives.
    first.register_hook(lambda _: seen.append(second.grad))
    buckets.arm()
    (first * 2).relu().mul(second).sum().backward()
    seen.append(first.grad)
    buckets.launch_rest()
    buckets.finish()
    return [*seen, first.grad, second.grad]


def test_gradients_are_freed_when_their_bucket_starts(ranks: Pools) -> None:
    [(second, first, *after)] = ranks(1).run(grad_during_backward)
    assert second is None
    assert first is None
    assert [gradient.tolist() for gradient in after] == [[2.0, 2.0], [2.0, 2.0]]


def life_of_a_bucket() -> list[bool]:
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    buckets = mean_buckets([first, second])
    step(buckets, lambda: (first * second).sum().backward())
    assert first.grad is not None
    assert second.grad is not None
    one_storage = first.grad.untyped_storage().data_ptr() == second.grad.untyped_storage().data_ptr()
    flat = weakref.ref(first.grad._base)
    first.grad = None
    alive = flat() is not None
    second.grad = None
    deadline = time.monotonic() + 10.0
    while flat() is not None and time.monotonic() < deadline:
        time.sleep(0.001)  # a thread of gloo lets go of the tensor a little after the end of `wait`
    return [one_storage, alive, flat() is None]


def test_a_bucket_lives_as_long_as_its_gradients(ranks: Pools) -> None:
    assert ranks(1).run(life_of_a_bucket) == [[True, True, True]]


def test_unarmed_backward_and_removed_hooks_change_nothing(ranks: Pools) -> None:
    ranks(1).run(unarmed_and_removed)


def unarmed_and_removed() -> None:
    parameter = nn.Parameter(torch.ones(2))
    buckets = GradientBuckets([parameter], group(), scale=0.5)
    step(buckets, lambda: (3 * parameter).sum().backward())
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [1.5, 1.5]
    parameter.grad = None
    (3 * parameter).sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [3.0, 3.0]
    buckets.remove()
    assert not parameter._post_accumulate_grad_hooks


def test_strides_are_those_of_the_parameter(ranks: Pools) -> None:
    assert ranks(2).run(channels_last) == [((36, 1, 12, 4), (36, 1, 12, 4), True)] * 2


def channels_last() -> tuple[Any, Any, bool]:
    layer = nn.Conv2d(4, 2, 3).to(memory_format=torch.channels_last)
    torch.manual_seed(0)
    nn.init.normal_(layer.weight)
    x = torch.randn(1, 4, 5, 5)
    layer(x).square().sum().backward()
    expected = copy.deepcopy(layer.weight.grad)
    layer.zero_grad()
    step(mean_buckets(list(layer.parameters())), lambda: layer(x).square().sum().backward())
    assert layer.weight.grad is not None
    assert expected is not None
    return layer.weight.stride(), layer.weight.grad.stride(), torch.allclose(layer.weight.grad, expected)


# Unusual gradients


def transposed_gradient() -> Tensor:
    parameter = nn.Parameter(torch.zeros(2, 3))
    parameter.grad = torch.arange(6.0).view(3, 2).t()
    buckets = mean_buckets([parameter])
    buckets.launch_rest()
    buckets.finish()
    assert parameter.grad.is_contiguous()
    return parameter.grad.clone()


def test_a_gradient_with_other_strides_is_put_in_order(ranks: Pools) -> None:
    for result in ranks(2).run(transposed_gradient):
        assert result.tolist() == [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]


def sparse_embedding() -> Tensor:
    table = nn.Embedding(5, 2, sparse=True)
    step(mean_buckets([table.weight]), lambda: table(torch.tensor([dist.get_rank(), 4, 4])).sum().backward())
    assert table.weight.grad is not None
    return table.weight.grad[:, 0].clone()


def test_sparse_gradients_become_dense(ranks: Pools) -> None:
    for result in ranks(2).run(sparse_embedding):
        assert result.tolist() == [0.5, 0.5, 0.0, 0.0, 2.0]


def foreign_dtype() -> str:
    parameter = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    parameter.grad_dtype = None  # any
    parameter.grad = torch.ones(2)
    buckets = mean_buckets([parameter])
    with pytest.raises(TypeError) as caught:
        step(buckets, lambda: None)
    return str(caught.value)


def test_gradient_of_another_dtype_is_refused(ranks: Pools) -> None:
    [message] = ranks(1).run(foreign_dtype)
    assert "torch.float32" in message
    assert "torch.bfloat16" in message


def wished_dtype() -> Tensor:
    parameter = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    parameter.grad_dtype = torch.float32
    step(mean_buckets([parameter]), lambda: (parameter * (1 + dist.get_rank() * 2**-7)).sum().backward())
    return parameter.grad


def test_a_gradient_travels_in_the_dtype_that_its_parameter_wants(ranks: Pools) -> None:
    for gradient in ranks(2).run(wished_dtype):
        assert gradient.dtype == torch.float32
        assert gradient.tolist() == [1 + 2**-8] * 2  # which bfloat16 has not


def reentrant(bucket_bytes: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(dist.get_rank())
    x = torch.randn(2, 4, requires_grad=True, dtype=torch.float64)
    torch.manual_seed(0)
    # The other layer completes last, and keeps the bucket that they share from travelling.
    other, twice = nn.Linear(4, 4, dtype=torch.float64), nn.Linear(4, 4, dtype=torch.float64)
    parameters = [*other.parameters(), *twice.parameters()]

    def backward() -> None:
        hidden = other(x)
        for _ in range(2):
            hidden = checkpoint(twice, hidden, use_reentrant=True).tanh()
        hidden.square().sum().backward()

    backward()
    expected = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
    dist.all_reduce(expected)
    for parameter in parameters:
        parameter.grad = None
    step(mean_buckets(parameters, bucket_bytes=bucket_bytes), backward)
    return torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]), expected / group().size()


def test_a_parameter_that_is_completed_twice_is_summed(ranks: Pools) -> None:
    for actual, expected in ranks(2).run(reentrant, 2**20):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_a_gradient_after_the_bucket_has_started_is_an_error(ranks: Pools) -> None:
    with pytest.raises(RankError, match="use_reentrant=False"):
        ranks(2).run(reentrant, 1)


def test_a_backward_between_launch_and_finish_is_an_error(ranks: Pools) -> None:
    ranks(1).run(late_backward)


def late_backward() -> None:
    parameter = nn.Parameter(torch.ones(2))
    buckets = mean_buckets([parameter])
    buckets.arm()
    parameter.sum().backward()
    buckets.launch_rest()
    parameter.sum().backward()
    with pytest.raises(RuntimeError, match="second gradient"):
        buckets.finish()


def freeze_and_thaw() -> list[tuple[bool, bool]]:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[0].requires_grad_(False)
    buckets = mean_buckets(list(module.parameters()))
    history = []
    for thaw in (False, True, False):
        module[0].requires_grad_(thaw)
        step(buckets, lambda: module(torch.full((1, 2), float(dist.get_rank()))).sum().backward())
        for layer in module:
            if layer.weight.grad is not None and layer is module[0]:
                # The row of ones that reaches each input, times the mean input of 0 and 1.
                torch.testing.assert_close(layer.weight.grad, 0.5 * module[1].weight.sum(0)[:, None].expand(2, 2))
        history.append((module[0].weight.grad is not None, module[1].weight.grad is not None))
        module.zero_grad()
    return history


def test_parameters_may_be_frozen_and_thawed(ranks: Pools) -> None:
    assert ranks(2).run(freeze_and_thaw) == [[(False, True), (True, True), (False, True)]] * 2


# How parameters are divided


def test_buckets_are_filled_from_the_end_and_the_first_one_is_small() -> None:
    sizes = [2**20, 2**19, 2**19, 2**17, 2**17]  # elements of 4 bytes
    parameters = [nn.Parameter(torch.empty(size, device="meta")) for size in sizes]
    buckets = assign(parameters, 4 * 2**20)
    assert FIRST_BUCKET_BYTES == 4 * (2**17 + 2**17)
    assert [[p.numel() for p in bucket] for bucket in buckets] == [[2**17, 2**17], [2**19, 2**19], [2**20]]


def test_buckets_have_one_dtype_and_come_in_the_order_of_completion() -> None:
    kinds = [torch.float32, torch.float64, torch.float32, torch.float64, torch.float32]
    parameters = [nn.Parameter(torch.empty(8, dtype=dtype, device="meta")) for dtype in kinds]
    buckets = assign(parameters, 2**20)
    assert [[id(p) for p in bucket] for bucket in buckets] == [
        [id(parameters[i]) for i in (3, 1)],
        [id(parameters[i]) for i in (4, 2, 0)],
    ]


def test_every_parameter_is_in_one_bucket() -> None:
    parameters = [nn.Parameter(torch.empty(n, device="meta")) for n in (0, 1, 10, 1000, 3)]
    for bucket_bytes in (1, 100, 10**6):
        buckets = assign(parameters, bucket_bytes)
        assert sorted(id(p) for bucket in buckets for p in bucket) == sorted(map(id, parameters))
    assert assign([], 100) == []
