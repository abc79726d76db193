"""A message is what it was when its bytes have travelled, in as many parts as its length needs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_hybrid.distributed.pytree import Message, encode

TENSORS = [
    torch.tensor(2.5),
    torch.tensor([True, False, True]),
    torch.rand(3, 2, dtype=torch.complex128),
    torch.rand(0, 4),
    torch.rand(3, 4).t(),
    torch.rand(5).to(torch.float8_e5m2),
    torch.arange(3, dtype=torch.int16),
]


class Line:
    """Bytes between two ranks."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self.asked: list[int] = []

    def send(self, message: Message) -> None:
        self._bytes = torch.cat([self._bytes, *message.parts])

    def receive(self, size: int) -> Tensor:
        self.asked.append(size)
        first, self._bytes = self._bytes[:size], self._bytes[size:]
        return first.clone()


def travelled(sent: Message, size: int) -> tuple[Message, int]:
    """Return the message on the other side, and how many parts it took."""
    line = Line()
    line.send(sent)
    received = Message.receive(line.receive, size)
    assert len(line.receive(1)) == 0, "the next message begins where this one ends"
    return received, len(line.asked) - 1


@pytest.mark.parametrize(
    ("value", "tensors", "size", "parts"),
    [
        (None, [], 32, 1),
        (None, [], 4096, 1),
        ({"a": [1, "text", None]}, [], 4096, 1),
        (b"a" * 5000, [], 4096, 2),
        (b"a" * 5000, [], 32, 2),
        ("text", TENSORS, 4096, 1),
        ("text", TENSORS, 64, 2),
        (None, TENSORS, 64, 2),
    ],
)
def test_values_and_tensors_arrive(value: Any, tensors: list[Tensor], size: int, parts: int) -> None:
    encoded = b"" if value is None else encode(value)
    sent = Message.make(encoded, tensors, code=-3, subject=1 << 40, size=size)
    assert len(sent.parts) == parts
    assert len(sent.parts[0]) == size
    received, needed = travelled(sent, size)
    assert needed == parts
    assert (received.code, received.subject, received.num_bytes) == (-3, 1 << 40, sent.num_bytes)
    assert received.value() == value
    for tensor, other in zip(tensors, received.tensors(tensors), strict=True):
        assert tensor.dtype == other.dtype
        assert tensor.tolist() == other.tolist() if tensor.itemsize > 1 else tensor.float().equal(other.float())


def test_the_first_part_tells_the_length() -> None:
    sent = Message.make(encode("a" * 1000), size=100)
    assert Message.read(sent.parts[0]).num_bytes == sent.num_bytes == sum(map(len, sent.parts))
