from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from lightning_hybrid.distributed.pytree import TreeMeta, flatten


def meta_of(tree: Any) -> TreeMeta:
    return TreeMeta.of(*flatten(tree))


def tree(**changes: Any) -> dict[str, Any]:
    return {"x": torch.zeros(2, 3), "name": "a", "flag": True, "rate": 0.5, "table": [{1, 2}]} | changes


def test_trees_that_differ_in_numbers_have_equal_metas() -> None:
    known, same = meta_of(tree()), meta_of(tree(x=torch.ones(2, 3)))
    assert known == same
    assert hash(known) == hash(same)
    assert known.equals(same)
    assert known.fits(*flatten(tree(x=torch.ones(2, 3))))
    assert pickle.loads(pickle.dumps(known)) == known


@pytest.mark.parametrize(
    "changes",
    [
        {"x": torch.zeros(2)},
        {"x": torch.zeros(2, 3, dtype=torch.float64)},
        {"x": torch.zeros(2, 3, requires_grad=True)},
        {"x": torch.zeros(2, 3, device="meta")},
        {"x": None},
        {"name": "b"},
        {"flag": 1},
        {"rate": 0.25},
        {"table": [{1}]},
        {"table": ({1, 2},)},
        {"more": None},
    ],
)
def test_every_other_difference_is_one(changes: dict[str, Any]) -> None:
    known, other = meta_of(tree()), meta_of(tree(**changes))
    assert known != other
    assert not known.equals(other)
    assert not other.equals(known)
    assert not known.fits(*flatten(tree(**changes)))


def test_pickles_of_equal_values_may_differ() -> None:
    first, second = {8, 16, 0}, {0, 16, 8}
    first.add(24)
    second.add(24)
    known, other = meta_of([first, None]), meta_of([second, None])
    assert known.equals(other)
    assert not meta_of([np.zeros(2)]).equals(meta_of([np.ones(2)])), "arrays compare element by element"


def test_values_are_copies_where_they_could_be_changed() -> None:
    meta = meta_of(tree())
    assert meta.has_values
    assert meta.values() == [None, "a", True, 0.5, {1, 2}]
    meta.values()[-1].add(3)
    assert meta.values()[-1] == {1, 2}
    assert [index for index, _ in meta.tensors()] == [0]
    assert not meta_of([torch.zeros(1)]).has_values


def test_the_text_names_shapes_and_values() -> None:
    text = str(meta_of(tree(x=torch.zeros(2, 3, requires_grad=True))))
    assert text.startswith("float32[2, 3] requires_grad, 'a', True, 0.5, {1, 2} in dict(x: *")
    assert str(meta_of(torch.zeros(2))) == "float32[2]"


def test_leaves_that_cannot_be_sent() -> None:
    with pytest.raises(TypeError, match=r"function cannot be sent .* cannot be pickled"):
        meta_of([lambda: None])
    with pytest.raises(TypeError, match=r"layout torch.sparse_coo cannot be sent .*to_dense"):
        meta_of([torch.eye(2).to_sparse()])
