from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_hybrid.distributed.messages.lazy_tensor import LazyTensor, peek
from lightning_hybrid.trainer import batch_hooks


class Lazy:
    """A lazy tensor, and how often its numbers have been asked for."""

    def __init__(self) -> None:
        self.numbers = torch.arange(24, dtype=torch.float64).reshape(4, 2, 3)
        self.asked: list[str] = []
        self.tensor = LazyTensor(self.numbers, torch.device("cpu"), self._make, lambda: self.asked.append("read"))

    def _make(self) -> Tensor:
        self.asked.append("made")
        return self.numbers


LOOKS: dict[str, Callable[[Tensor], Any]] = {
    "shape": lambda x: x.shape,
    "length": len,
    "dtype": lambda x: (x.dtype, x.is_floating_point(), x.element_size()),
    "device": lambda x: (x.device, x.is_cuda, x.is_meta),
    "size": lambda x: (x.size(0), x.dim(), x.numel(), x.stride(), x.nbytes),
    "kind": lambda x: isinstance(x, Tensor),
    "gradient": lambda x: (x.requires_grad, x.is_leaf),
}
MOVES: dict[str, Callable[[Tensor], Any]] = {
    "split": lambda x: torch.split(x, [1, 3])[1],
    "method": lambda x: x.split(2)[0],
    "chunk": lambda x: x.chunk(2)[1],
    "flatten": lambda x: x.flatten(1),
    "view": lambda x: x.view(x.size(0), -1),
    "named": lambda x: x.view(size=(8, 3)),
    "reshape": lambda x: torch.reshape(x, (-1,)),
    "permute": lambda x: x.permute(2, 0, 1),
    "dtype": lambda x: x.float(),
    "several": lambda x: x.split(2)[1].flatten(1).float().unsqueeze(0),
    "device": lambda x: x.to(torch.device("cpu")),
    "to dtype": lambda x: x.to(torch.float32),
    "device, later": lambda x: x.to("cpu", non_blocking=True),
}
READS: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda x: x + 1,
    "function": lambda x: F.linear(x, torch.ones(2, 3, dtype=torch.float64)),
    "list": lambda x: x.tolist(),
    "array": lambda x: x.numpy().tolist(),
    "as array": lambda x: np.asarray(x).tolist(),
    "number": lambda x: (float(x.sum()), x.max().item()),
    "index": lambda x: x[1],
    "mask": lambda x: x[x > 3],
    "stack": lambda x: torch.stack([x, x]),
    "other": lambda x: torch.ones_like(x) + torch.zeros(4, 2, 3).add(x),
    "copy": copy.deepcopy,
    "device and dtype": lambda x: x.to(torch.device("cpu"), dtype=torch.float16),
    "both": lambda x: x.to("cpu", torch.float16),
    "copy on the same device": lambda x: x.to("cpu", copy=True),
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "text": repr,
    "iteration": list,
    "moved, then read": lambda x: x.flatten(1).float() * 2,
}


@pytest.mark.parametrize("name", LOOKS)
def test_a_look_needs_no_numbers(name: str) -> None:
    lazy = Lazy()
    assert LOOKS[name](lazy.tensor) == LOOKS[name](lazy.numbers)
    assert not lazy.asked


@pytest.mark.parametrize("name", MOVES)
def test_what_is_moved_is_as_lazy(name: str) -> None:
    lazy = Lazy()
    moved, expected = MOVES[name](lazy.tensor), MOVES[name](lazy.numbers)
    assert isinstance(moved, LazyTensor)
    assert (moved.shape, moved.dtype, moved.stride()) == (expected.shape, expected.dtype, expected.stride())
    assert not lazy.asked
    assert torch.equal(peek(moved), expected)
    assert lazy.asked == ["made"]
    assert torch.equal(moved, expected)
    assert lazy.asked == ["made", "read"]
    assert torch.equal(moved * 1, expected)
    assert lazy.asked == ["made", "read"]
    assert peek(moved) is peek(moved)


@pytest.mark.parametrize("name", READS)
def test_what_reads_gets_the_numbers(name: str) -> None:
    lazy = Lazy()
    found, expected = READS[name](lazy.tensor), READS[name](lazy.numbers)
    assert str(found) == str(expected)
    assert type(found) is type(expected)
    assert lazy.asked == ["made", "read"]


def test_gradients_of_what_reads() -> None:
    lazy, weight = Lazy(), torch.ones(6, 5, dtype=torch.float64, requires_grad=True)
    (lazy.tensor.flatten(1) @ weight).sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, lazy.numbers.flatten(1).sum(0)[:, None].expand(6, 5))


def test_what_is_written_is_seen_by_what_shares_the_memory() -> None:
    lazy = Lazy()
    first, second = lazy.tensor.split(2)
    first.zero_()
    second.flatten(1).add_(1)
    assert torch.equal(lazy.tensor * 1, lazy.numbers)
    assert lazy.numbers[:2].abs().sum() == 0
    assert lazy.numbers[2, 0, 0] == 13


def test_copies_do_not_contain_later_writes() -> None:
    lazy = Lazy()
    view, numbers = lazy.tensor.view(-1), lazy.numbers.view(-1)
    copies = [lazy.tensor.float(), lazy.tensor.flip(0), view.bool(), view.long().split(3)[1]]
    expected = [lazy.numbers.float(), lazy.numbers.flip(0), numbers.bool(), numbers.long().split(3)[1]]
    lazy.tensor.mul_(-7)
    for copied, each in zip(copies, expected, strict=True):
        assert torch.equal(copied * 1, each * 1)
    assert torch.equal(view * 1, numbers)


def test_what_is_to_be_page_locked_stays_lazy() -> None:
    lazy = Lazy()
    (same,) = batch_hooks.pinned([lazy.tensor])
    assert same is lazy.tensor
    assert not lazy.asked


@pytest.mark.parametrize("name", ["unsqueeze_", "squeeze_", "transpose_", "resize_", "requires_grad_", "add_"])
def test_what_has_been_changed_in_place_is_told(name: str) -> None:
    arguments = {"unsqueeze_": (1,), "transpose_": (0, 1), "resize_": (2, 3), "add_": (1,)}.get(name, ())
    found, expected = Lazy().tensor, Lazy().numbers
    for tensor in (found, expected):
        getattr(tensor, name)(*arguments)
    for look in LOOKS.values():
        assert look(found) == look(expected)
    assert found._version == expected._version
    assert found.flatten().shape == expected.flatten().shape
    assert torch.equal(found * 1, expected * 1)


def test_a_copy_on_the_same_device_is_one() -> None:
    lazy = Lazy()
    lazy.tensor.to("cpu", copy=True).zero_()
    assert lazy.numbers.sum() > 0


def test_an_operator_below_torch_functions_gets_the_numbers() -> None:
    lazy = Lazy()
    with torch._C.DisableTorchFunctionSubclass():
        assert torch.equal(lazy.tensor + 1, lazy.numbers + 1)
