from __future__ import annotations

import dataclasses
import pickle
import random
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils import _pytree as torch_pytree

from lightning_hybrid.distributed.pytree import LEAF, contents, flatten, flatten_with_path, map_leaves, unflatten, walk


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Sample:
    image: Any
    label: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    """Refuses what `unflatten` must not ask for: the constructor's work, and assignment."""

    value: Any
    double: Any = dataclasses.field(init=False, default="computed")

    def __post_init__(self) -> None:
        if not isinstance(self.value, int):
            raise TypeError("only integers")


@dataclasses.dataclass(init=False)
class Slotted:
    __slots__ = ("a", "b")
    a: Any
    b: Any


def slotted(a: Any, b: Any) -> Slotted:
    instance = Slotted()
    instance.a, instance.b = a, b
    return instance


class Encoding(UserDict[str, Any]):
    """Like `transformers.BatchEncoding`."""


@pytest.mark.parametrize(
    ("tree", "leaves"),
    [
        (1, [1]),
        (None, [None]),
        ("text", ["text"]),
        (b"bytes", [b"bytes"]),
        ({1, 2}, [{1, 2}]),
        ([], []),
        ({}, []),
        ((), []),
        ([1, (2, {"a": 3, "b": [4]})], [1, 2, 3, 4]),
        ({"x": None, "y": [None, (None,)]}, [None, None, None]),
        (Point(1, [2, 3]), [1, 2, 3]),
        (Sample(1, {"k": 2}), [1, 2]),
        (Frozen(1), [1, "computed"]),
        (OrderedDict(b=1, a=2), [1, 2]),
        (Encoding(ids=1, mask=2), [1, 2]),
        (torch.Size((2, 3)), [2, 3]),
        (int, [int]),
        (Sample, [Sample]),
        (range(3), [range(3)]),
    ],
)
def test_a_tree_becomes_its_leaves_and_comes_back(tree: Any, leaves: list[Any]) -> None:
    found, spec = flatten(tree)
    assert found == leaves
    assert spec.num_leaves == len(leaves)
    again = unflatten(found, spec)
    assert again == tree
    assert type(again) is type(tree)


def test_objects_with_slots_come_back() -> None:
    again = map_leaves(lambda x: x + 1, slotted(1, 2))
    assert isinstance(again, Slotted)
    assert (again.a, again.b) == (2, 3)


def test_keys_of_any_type_come_back_in_their_order() -> None:
    tree = {3: "c", "a": 1, (1, 2): 2, None: 0}
    again = map_leaves(lambda x: x, tree)
    assert list(again.items()) == list(tree.items())


def test_a_defaultdict_stays_one() -> None:
    tree = defaultdict(list, a=[1], b=[2, 3])
    again = map_leaves(lambda x: x + 1, tree)
    assert isinstance(again, defaultdict)
    assert again == {"a": [2], "b": [3, 4]}


def test_frozen_dataclasses_are_rebuilt_without_their_constructor() -> None:
    _, spec = flatten(Frozen(1))
    again = unflatten(["not an integer", 5], spec)
    assert (again.value, again.double) == ("not an integer", 5)


def test_packed_sequences_come_back() -> None:
    packed = pack_sequence([torch.arange(3), torch.arange(2)])
    again = map_leaves(lambda x: x, packed)
    assert type(again) is type(packed)
    assert torch.equal(again.data, packed.data)
    assert torch.equal(again.batch_sizes, packed.batch_sizes)


def test_what_torch_returns_by_name_comes_back() -> None:
    best = torch.arange(6.0).view(2, 3).max(1)
    again = map_leaves(lambda x: x.clone(), best)
    assert type(again) is type(best)
    assert torch.equal(again.values, best.values)


def test_tensors_are_the_same_objects() -> None:
    tensor = torch.zeros(2, requires_grad=True)
    leaves, spec = flatten({"a": [tensor]})
    assert leaves[0] is tensor
    assert unflatten(leaves, spec)["a"][0] is tensor


@pytest.mark.parametrize(
    ("tree", "other"),
    [
        ([1, 2], (1, 2)),
        ([1], [1, 2]),
        ({"a": 1}, {"b": 1}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ([[1], 2], [1, [2]]),
        (Point(1, 2), (1, 2)),
        (Point(1, 2), namedtuple("Point", "x y")(1, 2)),
        ({"a": 1}, OrderedDict(a=1)),
        ([], {}),
        ([], 1),
    ],
)
def test_different_shapes_have_different_specs(tree: Any, other: Any) -> None:
    assert flatten(tree)[1] != flatten(other)[1]


def test_a_spec_is_a_key_in_every_process() -> None:
    # In another process the hash of a string is another one: a pickled spec must not carry this one's.
    _, spec = flatten({"x": [1, (2,)], "y": Point(3, None)})
    again = pickle.loads(pickle.dumps(spec))
    assert again == spec
    assert {spec: 1}[again] == 1
    assert str(hash(spec)).encode() not in pickle.dumps(spec, protocol=0)
    assert again.num_leaves == 4


def test_a_spec_is_no_other_thing() -> None:
    assert LEAF != None  # noqa: E711
    assert LEAF != "*"


def test_a_wrong_number_of_leaves_is_an_error() -> None:
    _, spec = flatten({"x": 1, "y": [2]})
    with pytest.raises(ValueError, match=r"dict\(x: \*, y: list\(\*\)\) has 2 leaves, got 3"):
        unflatten([1, 2, 3], spec)


def _random_tree(rng: random.Random, depth: int) -> Any:
    kind = rng.choice(["leaf", "list", "tuple", "dict", "point"]) if depth else "leaf"
    if kind == "leaf":
        return rng.choice([None, rng.randrange(100), "text", 0.5])
    children = [_random_tree(rng, depth - 1) for _ in range(2 if kind == "point" else rng.randrange(4))]
    if kind == "dict":
        return {f"k{i}": child for i, child in enumerate(children)}
    return {"list": list, "tuple": tuple, "point": lambda c: Point(*c)}[kind](children)


def test_leaves_are_those_of_torch() -> None:
    rng = random.Random(0)
    for _ in range(300):
        tree = _random_tree(rng, 4)
        leaves, spec = flatten(tree)
        expected, _ = torch_pytree.tree_flatten(tree)
        assert leaves == expected
        assert unflatten(leaves, spec) == tree
        assert flatten(unflatten(leaves, spec))[1] == spec


def test_paths_lead_to_the_leaves() -> None:
    tree = {"a": [1, (2, None)], 3: Point([], {"b": 4}), "c": UserDict(d=5), "e": Sample(6)}
    found = flatten_with_path(tree)
    assert [path for path, _ in found] == [("a", 0), ("a", 1, 0), ("a", 1, 1), (3, 1, "b"), ("c",), ("e",)]
    for path, leaf in found:
        node: Any = tree
        for key in path:
            node = node[key]
        assert node is leaf
    assert flatten_with_path(7) == [((), 7)]
    assert flatten_with_path(tree, lambda node: isinstance(node, tuple))[:3] == [
        (("a", 0), 1),
        (("a", 1), (2, None)),
        ((3,), tree[3]),
    ]


def test_a_walk_meets_each_object_once_and_in_order() -> None:
    shared = ["shared"]
    tree = {"a": [shared, 1], "b": (shared, None), "c": {}}
    tree["c"]["self"] = tree  # type: ignore[call-overload, index]

    def inside(value: Any) -> list[Any] | None:
        if value is None:
            return None
        return list(value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ())

    assert [id(value) for value in walk([tree], inside)] == [
        *map(id, (tree, tree["a"], shared, shared[0], 1, tree["b"], tree["c"])),
    ]


@pytest.mark.parametrize(
    ("tree", "found"),
    [
        ([1, 2], ((), [1, 2])),
        ((), ((), ())),
        ({"x": 1, 2: "y"}, (("x", 2), (1, "y"))),
        ("text", None),
        (torch.zeros(2), None),
    ],
)
def test_the_contents_of_a_container(tree: Any, found: Any) -> None:
    assert contents(tree) == found
