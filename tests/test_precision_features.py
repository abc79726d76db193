"""Every precision that trains in one process trains in a pipeline, and ranks agree on overflow and scale."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.amp import GradScaler

from lightning_hybrid.trainer import precision as precision_room
from tests.pool import Pools
from tests.training_jobs import LAYOUTS, PP2, Regression, Result, assert_same, make_trainer, together, train, weights

Layout = Mapping[str, Any] | None


class Watching(nn.Linear):
    """A layer that remembers the dtypes of what comes in."""

    seen: set[str]

    def forward(self, x: Tensor) -> Tensor:
        vars(self).setdefault("seen", set()).add(str(x.dtype))
        return super().forward(x)


class Plain(Regression):
    """In the default dtype; layers without activation, so that what crosses a boundary is what a layer computes."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(9)
            self.body = nn.Sequential(*[Watching(8, 8) for _ in range(6)])
        self.float()

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        return self.head(self.body(h))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True, on_epoch=True)
        return loss


def floats(batch_size: int) -> Any:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(36, 6, generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.mean(1, keepdim=True)), batch_size)


def half_plugin() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=2.0**10, growth_interval=4))


def precise(layout: Layout, batch_size: int, precision: str) -> tuple[Result, set[str], Any]:
    """Train; return the result, the dtype of the input of layer 3, and the gradient scale."""
    how: dict[str, Any] = {"plugins": half_plugin()} if precision == "16-mixed" else {"precision": precision}
    module = Plain()
    data = floats(batch_size), floats(batch_size)
    result = train(module, layout, *data, max_epochs=2, gradient_clip_val=0.4, **how)
    scaler = getattr(result.trainer.precision_plugin, "scaler", None)
    boundary = {getattr(layer, "seen", set()).pop() for layer in module.body[3:4] if hasattr(layer, "seen")}
    return result, boundary, None if scaler is None else (scaler.get_scale(), scaler._get_growth_tracker())


@pytest.mark.rows(11, 12)
@pytest.mark.parametrize("name", ["pp2", "pp2 x dp2", "chunks 2"])
@pytest.mark.parametrize(
    ("precision", "dtype", "rtol"),
    [
        ("32-true", torch.float32, 1e-5),
        ("64-true", torch.float64, 1e-10),
        ("bf16-mixed", torch.bfloat16, 3e-2),
        ("bf16-true", torch.bfloat16, 6e-2),
        ("16-mixed", torch.float16, 6e-3),
    ],
)
def test_every_precision_trains_close_to_one_process(
    ranks: Pools, name: str, precision: str, dtype: torch.dtype, rtol: float
) -> None:
    size, replicas, layout = LAYOUTS[name]
    expected, _, expected_scale = precise(None, 8 * replicas, precision)
    results = ranks(size, lightning=True).run(precise, layout, 8, precision)
    for result, _, scale in results:
        assert_same(result.metrics, expected.metrics, rtol)
        if replicas == 1:
            assert_same(result.losses, expected.losses, rtol)
        assert scale == expected_scale
    assert_same(together([result.weights for result, *_ in results]), expected.weights, rtol)
    # Layer 3 is the first one of a stage (of two, and of four stages in the middle of one).
    assert set().union(*(boundary for _, boundary, _ in results)) == {str(dtype)}


class Hearing(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[float] = []

    def on_before_backward(self, loss: Tensor) -> None:
        self.heard.append(float(loss.detach()))


def heard(layout: Layout) -> list[float]:
    module = Hearing()
    make_trainer(layout, plugins=half_plugin(), accumulate_grad_batches=2).fit(module, floats(8))
    return module.heard


@pytest.mark.rows(11)
def test_the_hook_before_backward_gets_the_scaled_loss(ranks: Pools) -> None:
    expected = heard(None)
    assert max(expected) > 10, "it is scaled"
    for losses in ranks(2, lightning=True).run(heard, PP2):
        assert_same(losses, expected, 6e-3)


class Overflow(Plain):
    """In the third batch the gradient of one layer is infinite, on the last replica."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.batches = 0
        self.history: list[tuple[float, float]] = []

    def on_fit_start(self) -> None:
        parameter = self.body[self.layer].weight
        if not parameter.is_meta and self.trainer.global_rank in {2: (0, 1), 4: (1, 3)}[self.trainer.world_size]:
            parameter.register_hook(lambda gradient: gradient / 0 if self.batches == 3 else gradient)

    def on_train_batch_start(self, *args: Any) -> None:
        self.batches += 1

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        total = sum(float(p.detach().sum()) for p in self.parameters() if not p.is_meta)
        self.history.append((self.trainer.precision_plugin.scaler.get_scale(), total))


def overflow(layout: Layout, layer: int) -> dict[str, Any]:
    module = Overflow(layer)
    result = train(module, layout, floats(8), max_epochs=2, plugins=half_plugin())
    return {"history": module.history, "weights": result.weights}


@pytest.mark.rows(11)
@pytest.mark.parametrize("layer", [1, 4])
def test_an_overflow_of_one_stage_skips_the_step_of_all(ranks: Pools, layer: int) -> None:
    for size, layout in ((2, PP2), (4, LAYOUTS["pp2 x dp2"][2])):
        results = ranks(size, lightning=True).run(overflow, layout, layer)
        together([result["weights"] for result in results])  # replicas agree
        for result in results:
            scales = [scale for scale, _ in result["history"]]
            totals = [total for _, total in result["history"]]
            assert scales[:4] == [1024.0, 1024.0, 512.0, 512.0], scales
            assert totals[1] == totals[2] != totals[0]
            assert totals[3] != totals[2]
            assert all(torch.isfinite(value).all() for value in result["weights"].values())
            assert scales == [scale for scale, _ in results[0]["history"]]


class Casts(Regression):
    """Four layers of 24 x 24 without a bias; where wanted, the code around them changes a weight each time."""

    def __init__(self, changes: bool) -> None:
        super().__init__()
        self.changes = changes
        self.float()
        with torch.random.fork_rng():
            torch.manual_seed(9)
            self.embed, self.head = nn.Identity(), nn.Linear(24, 1, bias=False)
            self.body = nn.Sequential(*[nn.Linear(24, 24, bias=False) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.head(batch[0])  # a copy that has no gradient is not the one that is shared
            if self.changes:
                self.head.weight.mul_(0.9)
        return self.loss(batch)


def casts(shares: bool, changes: bool) -> dict[str, Any]:
    """A step in gpipe: the copies of weights that autograd has saved in it, as a multiple of the stage's weights.

    Without stages where the step changes weights: with stages, a weight that it uses before and after is refused.
    """
    storages: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.shape == (24, 24) and tensor.dtype == torch.bfloat16:
            storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()  # alive: none gets its address
        return tensor

    x = torch.randn(48, 24, generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.mean(1, keepdim=True)), 16)
    stages = {} if changes else {"pipeline_parallel_size": 2, "schedule": "gpipe"}
    layout = {"num_microbatches": 8, **stages}
    module = Casts(changes)
    counts: list[float] = []

    class Counts(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            counts.append(len(storages) / 2)
            storages.clear()

    shares_or_not = nullcontext() if shares else patch.object(precision_room, "keeps_gradients", lambda: False)
    with shares_or_not, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        make_trainer(layout, precision="bf16-mixed", callbacks=[Counts()]).fit(module, loader)
    return {"counts": counts, "weights": weights(module)}


@pytest.mark.parametrize("changes", [False, True])
def test_weights_are_cast_once_for_all_microbatches(ranks: Pools, changes: bool) -> None:
    size = 1 if changes else 2
    shared, own = (ranks(size, lightning=True).run(casts, shares, changes) for shares in (True, False))
    if not changes:
        # The first microbatch of all shows whether the step changes weights, and has copies of its own.
        assert max(result["counts"][0] for result in shared) <= 2.0
        assert max(max(result["counts"][1:]) for result in shared) <= 1.0
        assert [result["counts"] for result in own] == [[4.0] * 3, [8.0] * 3]
    for one, other in zip(shared, own, strict=True):
        for name, weight in other["weights"].items():
            assert torch.equal(one["weights"][name], weight), name
