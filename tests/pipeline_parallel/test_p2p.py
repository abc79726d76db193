from __future__ import annotations

import enum
import math
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_hybrid.distributed.pytree import FIRST_PART, flatten, unflatten
from lightning_hybrid.pipeline_parallel import p2p
from lightning_hybrid.pipeline_parallel.p2p import Channel
from tests.pipeline_parallel.channels import open_channel
from tests.pool import Pools

Pair = namedtuple("Pair", ["left", "right"])


class Color(enum.Enum):
    RED = 1


@dataclass
class Batch:
    tokens: torch.Tensor
    length: int


def exchange(trees: list[tuple[str, Any]], dynamic_shapes: bool = False) -> tuple[list[Any], list[tuple[str, int]]]:
    """Rank 0 sends all trees at once; rank 1 posts all receives at once and waits for the last first."""
    opened = open_channel(0, 1, dynamic_shapes)
    assert opened is not None
    channel, group = opened
    if dist.get_rank() == 0:
        sent = [channel.send(key, *flatten(tree)) for key, tree in trees]
        for message in sent:
            message.wait()
        assert group.unwaited == 0
        return [], group.calls
    receives = [channel.post(key) for key, _ in trees]
    waited = {i: receives[i].wait() for i in reversed(range(len(receives)))}
    return [unflatten(*waited[i]) for i in range(len(receives))], group.calls


def assert_same(received: Any, sent: Any) -> None:
    received_leaves, received_spec = flatten(received)
    sent_leaves, sent_spec = flatten(sent)
    assert received_spec == sent_spec
    for ours, theirs in zip(received_leaves, sent_leaves, strict=True):
        assert type(ours) is type(theirs)
        if isinstance(theirs, torch.Tensor):
            assert (ours.dtype, ours.requires_grad) == (theirs.dtype, theirs.requires_grad)
            torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=0, check_stride=False)
        elif isinstance(theirs, float) and math.isnan(theirs):
            assert math.isnan(ours)
        else:
            assert ours == theirs


def every_dtype() -> dict[str, torch.Tensor]:
    integers = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.bool]
    floats = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]
    return {str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in [*integers, *floats]}


def trees() -> dict[str, Any]:
    x = torch.randn(4, 3)
    return {
        "tensor": x,
        "gradient": {"x": torch.randn(2, requires_grad=True), "frozen": torch.randn(2)},
        "dtypes": every_dtype(),
        "0-d": [torch.tensor(3.5), torch.tensor(True)],
        "empty": (torch.empty(0, 3), torch.empty(0, requires_grad=True), x),
        "only empty": torch.empty(2, 0),
        "no tensors": {"a": None, "b": (1, True, "text", 2.5)},
        "not contiguous": [x.t(), x[:, 1], x.expand(2, 4, 3)],
        "channels last": torch.randn(1, 2, 4, 4).to(memory_format=torch.channels_last),
        "lazy bits": (torch.randn(3, dtype=torch.complex64).conj(), torch.randn(1, dtype=torch.complex64).conj().imag),
        "twice": (x, x),
        "nested": {"a": [x, {"b": (None, Pair(x, 3))}], "c": Batch(torch.arange(3), 7)},
        "plain": [None, True, 1, 1.5, float("nan"), "text", b"bytes", Color.RED, {1, 2}, torch.float16, 1j],
    }  # fmt: skip


def exchange_all(dynamic_shapes: bool) -> int:
    torch.manual_seed(0)
    cases = list(trees().items()) * 2
    received, _ = exchange(cases, dynamic_shapes)
    for ours, (_, theirs) in zip(received, cases[: len(received)], strict=True):
        assert_same(ours, theirs)
    return len(received)


@pytest.mark.parametrize("dynamic_shapes", [False, True])
def test_every_tree_crosses(ranks: Pools, dynamic_shapes: bool) -> None:
    assert ranks(2).run(exchange_all, dynamic_shapes) == [0, 2 * len(trees())]


def test_the_meta_travels_once_per_key(ranks: Pools) -> None:
    small, large = torch.randn(2), torch.randn(5)
    messages = [("small", small), ("small", small), ("large", large), ("small", small), ("large", large)]
    (_, sent), (received, posted) = ranks(2).run(exchange, messages)
    assert [tensor.numel() for tensor in received] == [2, 2, 5, 2, 5]
    sizes = [size for _, size in sent]
    assert sizes == [FIRST_PART, 2, 2, FIRST_PART, 5, 2, 5]
    assert [size for _, size in posted] == sizes, "the k-th send meets the k-th receive"
    (_, sent), _ = ranks(2).run(exchange, messages, True)
    assert len(sent) == 2 * len(messages)


def test_a_long_meta_is_two_messages(ranks: Pools) -> None:
    names = {f"{number:01000}": torch.ones(()) for number in range(9)}
    (_, sent), (received, posted) = ranks(2).run(exchange, [("key", names)] * 2)
    assert list(received[1]) == list(names)
    first, second, *numbers = [size for _, size in sent]
    assert [size for _, size in posted] == [first, second, *numbers]
    assert first == FIRST_PART
    assert second > 4000
    assert numbers == [1] * 2 * len(names)


def test_message_without_elements_costs_nothing_once_known(ranks: Pools) -> None:
    messages = [("none", [None, None])] * 3 + [("empty", torch.empty(0, 2))] * 3
    (_, sent), (received, _) = ranks(2).run(exchange, messages)
    assert len(sent) == 2
    assert received[2] == [None, None]
    assert received[5].shape == (0, 2)


def send_to_nobody(first: Any, second: Any) -> str:
    opened = open_channel(0, 1)
    assert opened is not None
    channel, _ = opened
    if dist.get_rank() == 1:
        channel.post("key").wait()
        return ""
    channel.send("key", *flatten(first)).wait()
    try:
        channel.send("key", *flatten(second))
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (torch.zeros(2), torch.zeros(3), ["float32[2]", "float32[3]"]),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), ["float32[2]", "float64[2]"]),
        (torch.zeros(2), torch.zeros(2, requires_grad=True), ["float32[2]", "float32[2] requires_grad"]),
        ((torch.zeros(2), 1), (torch.zeros(2), 2), ["float32[2], 1", "float32[2], 2"]),
        ((torch.zeros(2), 1), (torch.zeros(2), True), ["float32[2], True"]),
        ((torch.zeros(2), 0.5), (torch.zeros(2), 0.25), ["float32[2], 0.25"]),
        ((torch.zeros(2), None), [torch.zeros(2), None], ["tuple(*, *)", "list(*, *)"]),
        ({"a": torch.zeros(2)}, {"b": torch.zeros(2)}, ["dict(a: *)", "dict(b: *)"]),
        (torch.zeros(2), None, ["first: float32[2]", "now:   None"]),
    ],
)
def test_sender_refuses_what_the_receiver_does_not_expect(
    ranks: Pools, first: Any, second: Any, words: list[str]
) -> None:
    story, _ = ranks(2).run(send_to_nobody, first, second)
    assert story.startswith("ValueError")
    assert "dynamic_shapes=True" in story
    for word in words:
        assert word in story


def test_equal_plain_values_are_not_a_difference(ranks: Pools) -> None:
    first = (float("nan"), {"a", "b", "c"}, torch.Size([1]), Color.RED)
    second = (float("nan"), {"c", "b", "a"}, torch.Size([1]), Color.RED)
    assert ranks(2).run(send_to_nobody, first, second)[0] == "nothing"


def send_oddities() -> list[str]:
    opened = open_channel(0, 1)
    assert opened is not None
    stories = []
    for leaf in (lambda: None, torch.eye(2).to_sparse()):
        with pytest.raises(TypeError) as error:
            opened[0].send("key", [leaf], None)
        stories.append(str(error.value))
    assert opened[1].calls == []
    return stories


def test_what_cannot_cross_is_refused_before_anything_is_sent(ranks: Pools) -> None:
    function, sparse = ranks(2).run(send_oddities)[0]
    assert "function" in function
    assert "pickled" in function
    assert "torch.sparse_coo" in sparse


def receive_mutable() -> tuple[list[set[int]], bool]:
    opened = open_channel(0, 1)
    assert opened is not None
    channel, _ = opened
    if dist.get_rank() == 0:
        for _ in range(3):
            channel.send("key", [{1}, torch.ones(1)], None).wait()
        return [], True
    values, tensors = [], []
    for _ in range(3):
        (value, tensor), _ = channel.post("key").wait()
        values.append(set(value))
        value.add(2)
        tensors.append(tensor)
    return values, len({tensor.data_ptr() for tensor in tensors}) == 3


def test_every_receive_is_fresh(ranks: Pools) -> None:
    assert ranks(2).run(receive_mutable)[1] == ([{1}, {1}, {1}], True)


def overtake() -> list[tuple[str, int]]:
    """A receive with a known meta is posted behind one with an unknown meta, long before anything is sent."""
    opened = open_channel(0, 1)
    assert opened is not None
    channel, group = opened
    if dist.get_rank() == 0:
        channel.send("known", [torch.ones(1)], None).wait()
        dist.barrier()
        sent = [channel.send(key, [torch.full((size,), float(size))], None) for key, size in (("new", 4), ("known", 1))]
        for message in sent:
            message.wait()
        return []
    channel.post("known").wait()
    before = len(group.calls)
    new, known = channel.post("new"), channel.post("known")
    assert len(group.calls) == before, "posting neither blocks nor overtakes an unread meta"
    dist.barrier()
    assert known.wait()[0][0].tolist() == [1.0]
    assert new.wait()[0][0].tolist() == [4.0] * 4
    again = channel.post("new")
    assert group.calls[-1] == ("recv", 4), "a known meta is received at once"
    del again
    return group.calls


def test_receive_does_not_overtake_an_unread_meta(ranks: Pools) -> None:
    ranks(2).run(overtake)


def exchange_with_few_formats() -> tuple[int, int]:
    """More keys than are remembered, in two batches, so that receives are posted with and without an unread meta."""
    sizes = [1, 2, 3, 1, 1, 4, 2, 4, 3, 1, 3]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(p2p, "MOST_FORMATS", 2)
        opened = open_channel(0, 1)
        assert opened is not None
        channel, group = opened
        for part in (sizes[:5], sizes[5:]):
            if dist.get_rank() == 0:
                for message in [channel.send(size, [torch.full((size,), float(size))], None) for size in part]:
                    message.wait()
            else:
                receives = [channel.post(size) for size in part]
                assert [each.wait()[0][0].tolist() for each in receives] == [[float(size)] * size for size in part]
            dist.barrier()
    return len(group.calls), len(channel._formats)


def test_formats_are_forgotten_on_both_sides_at_the_same_message(ranks: Pools) -> None:
    # 1 2 3(-1) 1(-2) 1 4(-3) 2(-1) 4 3(-4) 1(-2) 3: eight of eleven are sent with a meta before them.
    assert ranks(2).run(exchange_with_few_formats) == [(11 + 8, 2)] * 2


def test_gloo_keeps_the_order_of_many_messages(ranks: Pools) -> None:
    messages = [(str(i % 2), torch.full((1 + 7000 * (i % 2),), float(i))) for i in range(200)]
    _, (received, _) = ranks(2).run(exchange, messages)
    assert [tensor[0].item() for tensor in received] == [float(i) for i in range(200)]


def in_inference_mode() -> bool:
    with torch.inference_mode():
        received, _ = exchange([("key", torch.ones(2)), ("key", torch.ones(2))])
    return all(tensor.is_inference() for tensor in received)


def test_messages_cross_in_inference_mode(ranks: Pools) -> None:
    assert ranks(2).run(in_inference_mode) == [True, True]


def over_gloo_from_a_gpu() -> None:
    device = torch.device("cuda", 0)
    group = dist.new_group([0, 1], backend="gloo")
    channel = Channel(group, 1 - dist.get_rank(), device)
    on_gpu = [torch.arange(5.0, device=device, dtype=torch.float16), torch.ones(2, 2, device=device).t()]
    tree = [*on_gpu, torch.arange(3), torch.ones(2, device=device, dtype=torch.bool)]
    for _ in range(3):
        if dist.get_rank() == 0:
            channel.send("key", tree, None).wait()
        else:
            leaves, _ = channel.post("key").wait()
            for ours, theirs in zip(leaves, tree, strict=True):
                assert ours.device == theirs.device
                assert torch.equal(ours, theirs)


@pytest.mark.gpu
def test_tensors_of_a_gpu_cross_a_gloo_group(ranks: Pools) -> None:
    ranks(2).run(over_gloo_from_a_gpu)
