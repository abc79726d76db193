"""A single rank finds out which layers support context parallelism, and with which numbers of heads."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from torch import nn

from lightning_hybrid import HybridStrategy
from lightning_hybrid.axes import Sizes
from lightning_hybrid.tensor_parallel.context_parallel.attention import KINDS
from lightning_hybrid.tuning.dry_run.dry_run import DryRun, dry_run
from tests.training_jobs import Regression, loader
from tests.zoo import context as zoo
from tests.zoo import tensor


def run(make: Callable[[], LightningModule], data: Any = None, **arguments: Any) -> DryRun:
    strategy = HybridStrategy(**{"context_parallel_size": 2, **arguments})
    return dry_run(
        lambda: (make(), data),
        strategy.settings,
        Sizes(context=strategy.settings.context_parallel_size),
        precision=Precision(),
    )


def without_values(cls: type[nn.Module]) -> type[Any]:
    """Return a class of modules that are made in `configure_model`."""

    class Later(cls):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            self._is_later = True
            super().__init__()

        def build(self) -> None:
            if not self._is_later:
                super().build()

        def configure_model(self) -> None:
            if self._is_later:
                self._is_later = False
                self.build()
                self.double()

    return Later


@pytest.mark.parametrize("kind", zoo.MIXING)
@pytest.mark.parametrize("has_values", [True, False])
def test_what_else_mixes_positions_is_refused(kind: str, has_values: bool) -> None:
    cls = type(kind, (zoo.Mixing,), {"kind": kind})
    what = (
        "mixes" if kind != "Balanced" else "stores statistics of its sequence shard in the buffer 'bias', and so mixes"
    )
    with pytest.raises(ValueError, match=re.escape(f"'body.0' ({kind}). The layer {what} positions without")):
        run(cls if has_values else without_values(cls))


@pytest.mark.parametrize("cls", [zoo.Uneven, zoo.PaddedEncoder, zoo.SequenceFirst, zoo.Decoder, zoo.UsedTwice])
@pytest.mark.parametrize("kind", KINDS)
def test_what_trains_on_shares_is_not_refused(cls: type[LightningModule], kind: str) -> None:
    whole = run(cls, context_parallel_size=1).memory[0].activations
    shared = run(cls, context_parallel=kind).memory[0].activations
    assert whole is not None
    assert shared is not None
    assert shared < whole


@pytest.mark.parametrize(
    ("make", "arguments", "text"),
    [
        (
            zoo.Uneven,
            {"context_parallel_size": 3},
            "heads per rank, but context_parallel='ulysses' needs a multiple of",
        ),
        (zoo.Uneven, {"context_parallel_size": 8, "context_parallel": "ring"}, "positions cannot be sharded over"),
        (Regression, {}, "receives no hidden states of shape"),
    ],
)
def test_what_a_run_refuses_is_refused_without_ranks(
    make: Callable[[], LightningModule], arguments: dict[str, Any], text: str
) -> None:
    data = loader(8, 32) if make is Regression else None
    with pytest.raises(ValueError, match=text):
        run(make, data, **arguments)


def test_a_module_is_left_as_it_was() -> None:
    module = tensor.NanoGPT()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    run(lambda: module)
    for name, value in module.state_dict().items():
        assert torch.equal(before[name], value)
