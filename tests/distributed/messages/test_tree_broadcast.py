from __future__ import annotations

import copy
import dataclasses
import time
from collections import defaultdict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from lightning_hybrid.distributed.messages import tree_broadcast
from lightning_hybrid.distributed.messages.host_messages import connect
from lightning_hybrid.distributed.messages.posted_broadcast import PostedBroadcast
from lightning_hybrid.distributed.messages.tree_broadcast import TreeBroadcast, broadcast_object, reduce_over
from lightning_hybrid.distributed.pytree import flatten
from lightning_hybrid.distributed.watch.flight_recorder import read_collectives
from tests.pool import Pools


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Sample:
    image: Tensor
    name: str


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def make(source: int = 0, group: dist.ProcessGroup | None = None, tag: int = 1) -> TreeBroadcast:
    group = group or world()
    messages = PostedBroadcast(connect(group, range(group.size()), default_pg_timeout), source, tag, "trees")
    _MADE.append(messages)  # what is under way is lost with it
    return TreeBroadcast(messages, group, torch.device("cpu"))


_MADE: list[PostedBroadcast] = []


def equal(tree: Any, other: Any) -> bool:
    """Containers, plain values, shapes, dtypes and bits."""
    (leaves, spec), (others, other_spec) = flatten(tree), flatten(other)
    return spec == other_spec and all(map(_equal_leaf, leaves, others))


def _equal_leaf(leaf: Any, other: Any) -> bool:
    if not isinstance(leaf, Tensor):
        return type(leaf) is type(other) and bool(leaf == other)
    same = (leaf.shape, leaf.dtype) == (other.shape, other.dtype)
    return same and _bytes(leaf) == _bytes(other)


def _bytes(tensor: Tensor) -> list[int]:
    plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return plain.view(-1).view(torch.uint8).tolist()


def make_trees() -> list[Any]:
    """Made on the ranks, the same on all: plain pickle does not know every dtype."""
    torch.manual_seed(0)
    return [
        torch.rand(3, 4),
        torch.tensor(2.5),
        torch.tensor(7),
        torch.tensor(True),
        torch.rand(1, 1),
        torch.rand(0, 5),
        torch.tensor(float("nan")),
        torch.tensor(-0.0),
        torch.tensor(3.0e38),
        torch.tensor(1 / 3, dtype=torch.float64),
        torch.rand(4, 3).t(),
        torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.rand(5, 5)[::2, 1:],
        torch.arange(25).view(5, 5)[3:4, 2:3],  # one element, and a stride of 5
        torch.arange(5)[1:2].as_strided((1,), (3,)),
        torch.rand(3, dtype=torch.complex64).conj(),
        torch.rand(3, requires_grad=True) * 2,
        None,
        "text",
        [],
        {},
        {"a": [torch.rand(2), None, "b", {"c": (1, 2.5, torch.tensor(3))}], "d": Pair(torch.rand(1), [])},
        Sample(torch.rand(2, 2), "cat"),
        [torch.tensor(1.0), torch.tensor(2.0, dtype=torch.float64), torch.tensor(3.0, dtype=torch.bfloat16)],
        defaultdict(list, a=[torch.rand(1)]),
    ]


def make_dtypes() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.rand(shape).mul(5).to(dtype) for dtype in DTYPES for shape in ((3, 2), (1,), (), (0,))]


DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.complex64, torch.complex128),
]


def broadcast_trees(make_all: Callable[[], list[Any]], source: int) -> list[int]:
    exchange = make(source)
    trees = make_all()
    wrong = []
    for i, tree in enumerate([*trees, *trees]):  # new forms, then known ones
        received = exchange(tree if exchange.is_source else "ignored")
        assert received is tree or not exchange.is_source
        if not equal(received, tree):
            wrong.append(i)
    return wrong


@pytest.mark.parametrize("source", [0, 1])
def test_every_rank_gets_the_tree_of_the_source(ranks: Pools, source: int) -> None:
    assert ranks(2).run(broadcast_trees, make_trees, source) == [[], []]


@pytest.mark.parametrize("source", [0, 3])
def test_ranks_hand_on_what_they_get(ranks: Pools, source: int) -> None:
    assert ranks(4).run(broadcast_trees, make_trees, source) == [[]] * 4


def test_tensors_of_every_dtype_travel(ranks: Pools) -> None:
    assert ranks(2).run(broadcast_trees, make_dtypes, 1) == [[], []]


def received_tensor() -> tuple[bool, bool, bool]:
    exchange = make()
    weight = torch.rand(3, requires_grad=True)
    graph = weight * 2
    tree = exchange([graph, graph.sum()] if exchange.is_source else None)
    frozen = not any(tensor.requires_grad for tensor in tree)
    tree[0].detach().add_(1)  # nobody else's memory
    return frozen, tree[0] is graph, equal(tree[0].detach(), make(tag=2)(tree[0].detach()))


def test_the_source_keeps_its_graph_and_the_others_get_numbers(ranks: Pools) -> None:
    assert ranks(2).run(received_tensor) == [(False, True, True), (True, False, True)]


def num_messages(exchange: TreeBroadcast) -> int:
    """How many have been sent, or received; the receive of the next one is posted."""
    [number] = exchange._messages.progress().values()
    return number - len(exchange._messages._posted)


def count_messages() -> list[int]:
    exchange = make()
    tree = {"loss": torch.rand(()), "acc": torch.rand(()), "x": torch.rand(4), "y": torch.rand(2)}
    large = {"x": torch.rand(1 << 19), "y": torch.rand(1 << 19), "loss": torch.rand(())}
    long = {"name": "a" * (1 << 12)}
    counts = []
    for changed in (
        *(tree, tree, {**tree, "loss": torch.rand(())}, {**tree, "x": torch.rand(5)}, tree, {**tree, "z": "a"}),
        *(long, long, tree, long, tree),
        *(large, large, {**large, "y": torch.rand(3)}),
    ):
        before = num_messages(exchange)
        received = exchange(changed if exchange.is_source else None)
        assert equal(received, changed) or any(isinstance(leaf, Tensor) for leaf in flatten(changed)[0])
        counts.append(num_messages(exchange) - before)
    return counts


def test_a_tree_takes_one_message(ranks: Pools) -> None:
    # One more for what is longer than the tree before, and for each large tensor.
    one_each = [1, 1, 1, 1, 1, 1]
    lengths = [2, 1, 1, 2, 1]
    assert ranks(2).run(count_messages) == [[*one_each, *lengths, 1 + 2, 1 + 2, 1 + 1]] * 2


def late(folder: str) -> list[float]:
    """The others read when everybody before them has gone on, and has changed what was sent, and handed on."""
    exchange, rank = make(), dist.get_rank()
    sizes = 10, 1 << 19  # one in a packet, and one by itself
    deadline = time.monotonic() + 20
    found = []
    for number in range(3):
        # The source has what it has sent last until all have it, as in a step, whose result comes after its batch.
        before = [(number, other) for other in range(rank)] or [
            (number - 1, other) for other in range(4 * (number > 0))
        ]
        while not all(Path(folder, f"{tree}-{other}").exists() for tree, other in before):
            assert time.monotonic() < deadline, f"rank {rank} waits for one of {before}, which waits for others"
            time.sleep(0.01)
        tree = [torch.full((size,), float(number)) for size in sizes]
        received = exchange(tree if exchange.is_source else None)
        found += [float(leaf.mean()) for leaf in received]
        for leaf in received:
            leaf.zero_()
        Path(folder, f"{number}-{rank}").touch()
    return found


def test_nobody_waits_but_who_reads(ranks: Pools, tmp_path: Path) -> None:
    assert ranks(4).run(late, str(tmp_path), timeout=30.0) == [[0.0, 0.0, 1.0, 1.0, 2.0, 2.0]] * 4


def told() -> tuple[dict[str, int], Any]:
    exchange = make()
    messages = exchange._messages
    if exchange.is_source:
        for _ in range(3):
            exchange([1])
        dist.barrier()
        return messages.progress(), messages.awaited
    exchange.receive()
    work = mock.Mock(wait=lambda: seen.append(messages.awaited))
    seen: list[Any] = []
    posted = messages._posted.popleft()
    messages._posted.append((work, *posted[1:]))
    messages.wait()
    dist.barrier()
    return messages.progress(), seen[0]


def test_what_is_waited_for_can_be_told(ranks: Pools) -> None:
    channel = "trees from rank 0 to rank 1"
    assert ranks(2).run(told) == [({channel: 3}, None), ({f"receipt of {channel}": 2}, (channel, 0, 2))]


def forgetful() -> list[bool]:
    with mock.patch.object(tree_broadcast, "_MOST_METAS", 4):
        return mixed_forms()


def test_forms_are_forgotten_when_there_are_many(ranks: Pools) -> None:
    assert ranks(2).run(forgetful) == [[True] * 30] * 2


def mixed_forms() -> list[bool]:
    exchange = make()
    found = []
    for i in range(30):
        generator = torch.Generator().manual_seed(i)
        tree = {f"k{j}": torch.rand(i % 3 + j, generator=generator) for j in range(i % 4)} | {"i": i if i % 5 else None}
        found.append(equal(exchange(tree if exchange.is_source else None), tree))
    return found


def test_forms_may_change_all_the_time(ranks: Pools) -> None:
    assert ranks(3).run(mixed_forms) == [[True] * 30] * 3


def until_the_end(how: str) -> list[Any]:
    exchange = make()
    found: list[Any] = []
    if exchange.is_source:
        for tree in ([1], torch.zeros(2), torch.ones(2)):
            exchange(tree)
        exchange.end() if how == "end" else exchange.fail(KeyError("lost"))
    else:
        try:
            while True:
                found.append(exchange.receive())
        except (StopIteration, RuntimeError) as error:
            found.append(f"{type(error).__name__}: {error}")
    found.append(exchange(5 if exchange.is_source else None))  # the next epoch
    return [x.tolist() if isinstance(x, Tensor) else x for x in found]


def test_the_end_reaches_everybody(ranks: Pools) -> None:
    found = ranks(2).run(until_the_end, "end")
    assert found == [[5], [[1], [0.0, 0.0], [1.0, 1.0], "StopIteration: ", 5]]


def test_a_failure_reaches_everybody(ranks: Pools) -> None:
    found = ranks(2).run(until_the_end, "fail")
    assert found[1][-2] == "PeerFailedError: Rank 0 failed: KeyError: 'lost'"
    assert [rank[-1] for rank in found] == [5, 5]


def interrupted() -> list[str]:
    """A signal's handler raises while the source sends; the next message is a number, and not the rest of the tree."""
    exchange, told = make(), []
    if exchange.is_source:
        with mock.patch.object(exchange, "_exchange_tensors", side_effect=ArithmeticError("a worker was killed")):
            try:
                exchange(torch.zeros(2))
            except ArithmeticError as error:
                exchange.fail(error)
                told.append(str(error))
    else:
        with mock.patch.object(exchange, "_exchange_tensors"):
            exchange.receive()
    number = torch.tensor(7 if exchange.is_source else 0)
    dist.broadcast(number, 0)
    return [*told, str(int(number))]


def test_a_failure_in_the_middle_of_a_tree_is_not_taken_for_its_rest(ranks: Pools) -> None:
    assert ranks(2).run(interrupted) == [["a worker was killed", "7"], ["7"]]


def _unpicklable(kind: str) -> Any:
    if kind == "plain value":
        return {"function": lambda: 0, "x": torch.zeros(2)}
    local = namedtuple("local", "x")  # a class that other processes cannot find
    return local(torch.zeros(2))


def send_unpicklable(kind: str) -> str:
    exchange = make()
    try:
        if exchange.is_source:
            try:
                exchange(_unpicklable(kind))
            except Exception as error:
                exchange.fail(error)
                raise
        else:
            exchange.receive()
    except Exception as error:
        assert equal(exchange([1] if exchange.is_source else None), [1])  # still in step
        return type(error).__name__
    return "nothing"


@pytest.mark.parametrize("kind", ["plain value", "form"])
def test_what_cannot_travel_fails_on_every_rank(ranks: Pools, kind: str) -> None:
    source, other = ranks(2).run(send_unpicklable, kind, timeout=20.0)
    assert source in ("PicklingError", "AttributeError")
    assert other == "PeerFailedError"


def in_subgroup() -> Any:
    group = [dist.new_group([1, 0]), dist.new_group([2])][dist.get_rank() // 2]
    last = make(group.size() - 1, group)
    value = last({"rank": dist.get_rank(), "x": torch.tensor([dist.get_rank()])})
    return value["rank"], value["x"].item(), broadcast_object(dist.get_rank(), 0, group)


def test_the_source_is_counted_inside_the_group(ranks: Pools) -> None:
    assert ranks(3).run(in_subgroup) == [(1, 1, 0), (1, 1, 0), (2, 2, 2)]


# -- reductions --------------------------------------------------------------------------------------------------------


def reduced(dtype: torch.dtype) -> dict[str, Any]:
    rank = dist.get_rank()
    operations = ["mean", "avg", "MEAN", "sum", "SUM", "max", "min", "product"]
    enums = [dist.ReduceOp.AVG, dist.ReduceOp.SUM, dist.ReduceOp.MAX]
    found: dict[str, Any] = {}
    for operation in (*operations, *enums):
        tensor = torch.tensor([rank + 1, 3 * rank], dtype=dtype)
        result = reduce_over(tensor, world(), operation)
        assert (result is tensor) == (result.dtype == tensor.dtype)
        found[str(operation)] = result.tolist()
    return copy.deepcopy(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_reductions(ranks: Pools, dtype: torch.dtype) -> None:
    found = ranks(2).run(reduced, dtype)
    mean = [1.5, 1.5]  # of integers too
    expected = {
        **dict.fromkeys(("mean", "avg", "MEAN", str(dist.ReduceOp.AVG)), mean),
        **{name: [3, 3] for name in ("sum", "SUM", str(dist.ReduceOp.SUM))},
        **{name: [2, 3] for name in ("max", str(dist.ReduceOp.MAX))},
        "min": [1, 0],
        "product": [2, 0],
    }
    assert found == [expected] * 2


def alone() -> Any:
    group = [dist.new_group([0]), dist.new_group([1])][dist.get_rank()]
    return reduce_over(torch.tensor(3), group, "mean").item()


def test_a_group_of_one_has_nothing_to_reduce(ranks: Pools) -> None:
    assert ranks(2).run(alone) == [3, 3]


def objects(lengths: list[int]) -> list[tuple[int, int]]:
    """The length of what arrives, and how many broadcasts it took."""
    group, found = world(), []
    for length in lengths:
        before = read_collectives().last
        received = broadcast_object(bytes(length) if dist.get_rank() == 1 else None, 1, group)
        found.append((len(received), sum(len(kinds) for _, kinds in read_collectives(before).started.values())))
    return found


def test_an_object_takes_one_message_and_a_large_one_two(ranks: Pools) -> None:
    """Torch sends the length first, so that ranks that are far apart wait twice."""
    lengths = [0, 1, 4000, 4088, 5000, 1 << 17]
    assert ranks(3).run(objects, lengths) == [list(zip(lengths, [1, 1, 1, 2, 2, 2], strict=True))] * 3
