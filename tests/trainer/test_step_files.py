"""How far a training step goes: the files and frames between the strategy and the user's layers."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
from torch import Tensor, nn

from lightning_hybrid import HybridStrategy
from tests.entries import PACKAGE, Chain, counting_entries
from tests.pool import Pools
from tests.training_jobs import loader, make_trainer

_STEP = 6  # one whose shapes, plans and metas are all known, and whose labels nobody counts any more


def entries_of_a_step() -> Counter[str]:
    """How often each file of the package is entered from another one of it, in a step that is like those before it."""
    entries: Counter[str] = Counter()
    numbers = iter(range(100))
    training_step = HybridStrategy.training_step

    def profiled(self: HybridStrategy, *args: Any, **kwargs: Any) -> Any:
        if next(numbers) != _STEP:
            return training_step(self, *args, **kwargs)
        with counting_entries(entries):
            return training_step(self, *args, **kwargs)

    with patch.object(HybridStrategy, "training_step", profiled):
        make_trainer({"pipeline_parallel_size": 2, "num_microbatches": 4}).fit(Chain(), loader(num_samples=64))
    return entries


def test_a_step_enters_few_files(ranks: Pools) -> None:
    """Whoever reads a step must find the way: more files are a reason to look at who calls whom.

    20 files and 150 entries were enough before batches were looked at for what cannot be split, and losses for how they
    follow from those of microbatches.
    """
    for entries in ranks(2, lightning=True).run(entries_of_a_step):
        assert 10 < len(entries) <= 23, entries
        assert entries.total() <= 160, entries


class Seen(nn.Linear):
    """A layer that counts the frames of the package between the strategy and itself.

    Attributes:
        depth: In the last step; the first one is followed before it runs.
    """

    depth: ClassVar[int] = 0

    def forward(self, x: Tensor) -> Tensor:
        depth, frame = 0, sys._getframe(1)
        while frame.f_code is not HybridStrategy.training_step.__code__:
            depth += frame.f_code.co_filename.startswith(PACKAGE)
            assert frame.f_back is not None
            frame = frame.f_back
        Seen.depth = depth
        return super().forward(x)


def frames_above_layers(dynamic_shapes: bool) -> int:
    module = Chain()
    module.body = nn.Sequential(*[Seen(6, 6) for _ in range(4)]).double()
    layout = {"pipeline_parallel_size": 2, "num_microbatches": 4, "dynamic_shapes": dynamic_shapes}
    make_trainer(layout).fit(module, loader(num_samples=64))
    return Seen.depth


@pytest.mark.parametrize("lacks", [True, False], ids=["a head on the last stage", "a head on both"])
def test_at_most_seven_frames_lead_to_a_layer(ranks: Pools, lacks: bool) -> None:
    """Each is a call for every microbatch, and a line of a user's traceback."""
    for depth in ranks(2, lightning=True).run(frames_above_layers, not lacks):
        assert 4 < depth <= 7
