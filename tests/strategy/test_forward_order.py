"""The order of the wrappers around the forward of a layer, with all kinds of parallelism at once."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

from torch import Tensor

from tests.entries import PACKAGE
from tests.pool import Pools
from tests.training_jobs import make_trainer
from tests.zoo.tensor import NanoAttention, NanoGPT

#: The function of each wrapper, from the outside to the inside. `replaced_forwards` documents this order.
ORDER = [
    ("body.py", "redirected"),  # the split of the chain into stages
    ("context_parallel.py", "divided"),  # the split of the sequence
    ("checkpoint.py", "checkpointed"),  # recomputation
    ("context_parallel.py", "inside"),  # the region of a layer, whose sequence is split
    ("layers.py", "forward"),  # the class of a tensor-parallel layer
]
LAYOUT = {
    "pipeline_parallel_size": 2,
    "tensor_parallel_size": 2,
    "context_parallel_size": 2,
    "recompute": True,
    "num_microbatches": 2,
}
noted: set[tuple[int, ...]] = set()


class Attention(NanoAttention):
    """Attention that notes the wrappers around each of its calls, as positions in `ORDER`."""

    def forward(self, x: Tensor) -> Tensor:
        found: list[int] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            path, name = Path(frame.f_code.co_filename), frame.f_code.co_name
            if str(path).startswith(PACKAGE) and (path.name, name) in ORDER:
                found.append(ORDER.index((path.name, name)))
            frame = frame.f_back
        noted.add(tuple(dict.fromkeys(reversed(found))))  # combined styles of a layer have one class each
        return super().forward(x)


class Model(NanoGPT):
    """A GPT whose attention notes the wrappers around it."""

    def build(self) -> None:
        super().build()
        for block in self.body:
            block.attn = Attention()


def find_orders() -> list[tuple[int, ...]]:
    make_trainer(LAYOUT, max_steps=2).fit(Model())
    return sorted(noted)


def test_wrappers_of_a_forward_have_one_order(ranks: Pools) -> None:
    """A trace, an evaluation and a backward enter only some of the wrappers, in the same order."""
    for orders in ranks(8, lightning=True).run(find_orders):
        assert orders == [tuple(sorted(order)) for order in orders]
        assert tuple(range(len(ORDER))) in orders
