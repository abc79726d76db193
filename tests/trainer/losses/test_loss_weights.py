"""Losses that are normalised by tokens: over microbatches, replicas and accumulated batches, as in one process."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor
from torch.amp import GradScaler
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid import HybridStrategy, Tuning, count_tokens
from lightning_hybrid.trainer.losses.loss_weights import LossWeights, unequal_labels
from tests.pool import Pools
from tests.training_jobs import Regression, make_trainer, together, train

BATCH = 4  # samples of a batch on each replica
PLAN = {"embed": "colwise_gather_output", "body.*.0": "colwise_gather_output"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "m3": {"num_microbatches": 3},
    "dp2": {"data_parallel_size": 2},
    "pp2": {"pipeline_parallel_size": 2, "num_microbatches": 3},
    "pp3": {"pipeline_parallel_size": 3, "num_microbatches": 2},
    "dp2_pp2": {"data_parallel_size": 2, "pipeline_parallel_size": 2, "num_microbatches": 2},
    "zero1": {"data_parallel_size": 2, "zero_stage": 1, "num_microbatches": 2},
    "zero2": {"data_parallel_size": 2, "zero_stage": 2, "num_microbatches": 2},
    "zero3": {"data_parallel_size": 2, "zero_stage": 3, "num_microbatches": 2},
    "zero3_early": {
        "data_parallel_size": 2,
        "zero_stage": 3,
        "tuning": Tuning(reshard_after_forward=True),
        "num_microbatches": 2,
    },
    "tp2": {"tensor_parallel_size": 2, "num_microbatches": 2, "tensor_parallel_plan": PLAN},
    "zero3_pp2": {"data_parallel_size": 2, "pipeline_parallel_size": 2, "zero_stage": 3, "num_microbatches": 2},
}


def size_of(layout: Mapping[str, Any]) -> tuple[int, int]:
    """The number of processes, and of replicas."""
    replicas = layout.get("data_parallel_size", 1)
    return replicas * layout.get("pipeline_parallel_size", 1) * layout.get("tensor_parallel_size", 1), replicas


class Tokens(Regression):
    """The loss is a mean over what counts, and what counts differs from batch to batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        counts = x[:, 0] > 0
        # Of nothing the loss is 0, so that one process can be asked too.
        return ((self(x) - y).squeeze(1) ** 2 * counts).sum() / counts.sum().clamp(min=1)

    def microbatch_weight(self, microbatch: Any) -> Tensor:
        return (microbatch[0][:, 0] > 0).sum()


def tokens(*, nothing: range = range(0), samples: int = 44, batch_size: int = BATCH) -> DataLoader[Any]:
    """44 samples: 11 batches on one replica, 5 and a half on each of two; windows of 4 are short at the end.

    Args:
        nothing: The samples that do not count.
        samples: The number of samples.
        batch_size: Of the loader.
    """
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    y = torch.randn(samples, 1, generator=generator, dtype=torch.float64)
    x[:, 0] -= torch.linspace(-1, 1, samples, dtype=torch.float64)  # fewer and fewer count
    x[list(nothing), 0] = -1.0
    return DataLoader(TensorDataset(x, y), batch_size)


@dataclass
class Seen(Callback):
    """What hooks see of the optimizer steps."""

    norms: list[Tensor] = field(default_factory=list)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if isinstance(trainer.strategy, HybridStrategy):
            self.norms.append(trainer.strategy.grad_norm())
        else:
            norms = [p.grad.norm() for p in pl_module.parameters() if p.grad is not None]
            self.norms.append(torch.stack(norms).norm())


def accumulated(
    layout: Mapping[str, Any] | None, batch_size: int, accumulate: int, nothing: range, arguments: Mapping[str, Any]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    seen, data = Seen(), tokens(nothing=nothing, batch_size=batch_size)
    how = {"max_epochs": 2, "accumulate_grad_batches": accumulate, "limit_val_batches": 0, **arguments}
    return seen.norms, train(Tokens(), layout, data, callbacks=[seen], **how).weights


def check_windows(
    ranks: Pools, name: str, accumulate: int, nothing: range = range(0), **arguments: Any
) -> list[tuple[list[Tensor], dict[str, Tensor]]]:
    """Batches of a window have the gradients of one process with all their samples in one batch."""
    layout = LAYOUTS[name]
    size, replicas = size_of(layout)
    norms, expected = accumulated(None, BATCH * replicas * accumulate, 1, nothing, arguments)
    results = ranks(size, lightning=True).run(accumulated, layout, BATCH, accumulate, nothing, arguments)
    for found, _ in results:
        torch.testing.assert_close(found, norms, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(together([part for _, part in results]), expected, rtol=1e-10, atol=1e-12)
    return results


@pytest.mark.parametrize(
    "accumulate", [pytest.param(1, marks=pytest.mark.thorough), 2, pytest.param(4, marks=pytest.mark.thorough)]
)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_window_of_batches_is_one_batch_of_one_process(ranks: Pools, name: str, accumulate: int) -> None:
    check_windows(ranks, name, accumulate)


@pytest.mark.parametrize("name", ["m3", pytest.param("dp2_pp2", marks=pytest.mark.thorough), "zero3"])
@pytest.mark.parametrize("nothing", [range(8), range(8, 16), range(16)], ids=["first", "second", "all"])
def test_batches_of_a_window_may_weigh_nothing(ranks: Pools, name: str, nothing: range) -> None:
    check_windows(ranks, name, 2, nothing)


@pytest.mark.parametrize("name", ["m3", "dp2_pp2", "zero2"])
def test_clipping_sees_the_final_gradients(ranks: Pools, name: str) -> None:
    check_windows(ranks, name, 2, gradient_clip_val=0.05)


def scheduled(layout: Mapping[str, Any] | None, batch_sizes: Sequence[int], accumulate: Mapping[int, int]) -> Any:
    """Windows that are longer in later epochs; in one process the loader has larger batches there."""
    module, seen = Tokens(), Seen()
    callbacks = [seen, GradientAccumulationScheduler(dict(accumulate))]
    trainer = make_trainer(
        layout, callbacks=callbacks, max_epochs=2, limit_val_batches=0, reload_dataloaders_every_n_epochs=1
    )
    module.train_dataloader = lambda: tokens(batch_size=batch_sizes[trainer.current_epoch])  # type: ignore[method-assign]
    trainer.fit(module)
    return seen.norms


def test_windows_may_change_between_epochs(ranks: Pools) -> None:
    expected = scheduled(None, [BATCH, 3 * BATCH], {0: 1})
    (norms,) = ranks(1, lightning=True).run(scheduled, {}, [BATCH, BATCH], {0: 1, 1: 3})
    torch.testing.assert_close(norms, expected, rtol=1e-10, atol=1e-12)


class BrokenOff(Tokens):
    """Leaves each epoch at a batch."""

    def __init__(self, stop: int) -> None:
        super().__init__()
        self.stop = stop

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == self.stop else None


def broken_off(layout: Mapping[str, Any] | None, batch_size: int, accumulate: int, stop: int) -> list[Tensor]:
    seen = Seen()
    trainer = make_trainer(
        layout, callbacks=[seen], max_epochs=3, accumulate_grad_batches=accumulate, limit_val_batches=0
    )
    trainer.fit(BrokenOff(stop), tokens(batch_size=batch_size))
    return seen.norms


def test_a_window_that_is_left_open_does_not_count_in_the_next(ranks: Pools) -> None:
    expected = broken_off(None, 2 * BATCH, 1, stop=1)
    (norms,) = ranks(1, lightning=True).run(broken_off, LAYOUTS["m3"], BATCH, 2, 3)
    assert len(expected) == 3
    torch.testing.assert_close(norms, expected, rtol=1e-10, atol=1e-12)


def half(layout: Mapping[str, Any] | None, batch_size: int, accumulate: int, arguments: dict[str, Any]) -> list[Tensor]:
    if arguments == {}:
        scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        arguments = {"plugins": MixedPrecision("16-mixed", "cpu", scaler)}
    module, seen = Tokens().float(), Seen()
    trainer = make_trainer(
        layout, callbacks=[seen], accumulate_grad_batches=accumulate, limit_val_batches=0, **arguments
    )
    loader = tokens(batch_size=batch_size)
    loader.dataset.tensors = tuple(tensor.float() for tensor in loader.dataset.tensors)  # type: ignore[attr-defined]
    trainer.fit(module, loader)
    return [norm.double() for norm in seen.norms]


@pytest.mark.parametrize(
    ("precision", "layout"),
    [
        ({}, {}),
        ({"precision": "bf16-true"}, {"tuning": Tuning(float32_gradients=True)}),
    ],
    ids=["16-mixed", "bf16-true"],
)
def test_windows_in_half_precision(ranks: Pools, precision: dict[str, Any], layout: dict[str, Any]) -> None:
    layout = {**LAYOUTS["dp2_pp2"], **layout}
    expected = half(None, 4 * BATCH, 1, {"precision": "32-true"})
    for norms in ranks(4, lightning=True).run(half, layout, BATCH, 2, precision):
        torch.testing.assert_close(norms, expected, rtol=3e-2, atol=1e-3)


class Logs(Tokens):
    """Logs the very loss that it returns, in every way.

    Args:
        given: Whether to say what batches weigh, as a user of one process has to.
    """

    def __init__(self, *, given: bool) -> None:
        super().__init__()
        self.given = given

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        size = {"batch_size": int(self.microbatch_weight(batch))} if self.given else {}
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, **size)
        self.log("own", loss, on_step=True, on_epoch=True, **size)
        self.log("number", loss.item(), on_epoch=True, sync_dist=True, **size)
        self.log("single", loss.float(), on_step=True, on_epoch=True, sync_dist=True, **size)
        self.log("half", loss.bfloat16(), on_epoch=True, **size)
        self.log("whole", (loss > 0).int(), on_epoch=True, **size)
        positive = (batch[0][:, 1] > 0).double()
        self.log("samples", positive.mean(), on_step=True, on_epoch=True, batch_size=len(batch[0]), sync_dist=True)
        for reduction in ("sum", "max"):
            value = getattr(positive, reduction)()
            self.log(reduction, value, on_step=True, on_epoch=True, reduce_fx=reduction, sync_dist=True)
        if batch_idx % 2 == 0:
            self.log("sometimes", loss, on_step=False, on_epoch=True, sync_dist=True, **size)
        return {"loss": loss}


@dataclass
class Logged(Callback):
    """What is known after each batch and each epoch."""

    steps: list[dict[str, Tensor]] = field(default_factory=list)
    epochs: list[dict[str, Tensor]] = field(default_factory=list)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.steps.append({**trainer.callback_metrics, "returned": outputs["loss"]})

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.epochs.append(dict(trainer.callback_metrics))


def logged(
    layout: Mapping[str, Any] | None, batch_size: int, nothing: range
) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    found = Logged()
    trainer = make_trainer(layout, callbacks=[found], max_epochs=2, limit_val_batches=0, log_every_n_steps=1)
    trainer.fit(Logs(given=layout is None), tokens(nothing=nothing, batch_size=batch_size))
    return found.steps, found.epochs


def without(entries: list[dict[str, Tensor]], *names: str) -> list[dict[str, Tensor]]:
    return [{key: value for key, value in entry.items() if not key.startswith(names)} for entry in entries]


@pytest.mark.parametrize("name", ["one", "m3", "dp2", "pp2", "dp2_pp2", "zero3_pp2"])
def test_a_logged_loss_is_the_loss(ranks: Pools, name: str) -> None:
    """What a module that says the weight of its losses logs, one process logs with this weight as `batch_size`."""
    layout = LAYOUTS[name]
    size, replicas = size_of(layout)
    steps, epochs = logged(None, BATCH * replicas, range(8))
    # Each replica has its own value where nothing says that it be reduced.
    own = ("own", "returned", "half", "whole") if replicas > 1 else ()
    rounded = ("number", "single", "half")
    for found_steps, found_epochs in ranks(size, lightning=True).run(logged, layout, BATCH, range(8)):
        for found, expected in ((found_steps, steps), (found_epochs, epochs)):
            exact = (*own, *rounded)
            torch.testing.assert_close(without(found, *exact), without(expected, *exact), rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(without(found, *own), without(expected, *own), rtol=1e-2, atol=1e-6)


class _Moves(TorchDispatchMode):
    """Counts what is moved to the meta device, which stands for one that the host has to wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.count += function._overloadpacket is torch.ops.aten._to_copy and kwargs.get("device") == torch.device(
            "meta"
        )
        return function(*args, **kwargs)


@pytest.mark.parametrize("weigh", [float, torch.tensor, lambda value: torch.tensor([value])])
def test_weights_on_the_host_move_to_the_device_in_one_go(weigh: Any) -> None:
    mesh: Any = SimpleNamespace(num_replicas=1)
    with _Moves() as moves:
        weights = LossWeights.of(weigh, [1, 2, 3, 4], mesh, torch.device("meta"))
    assert weights.each.shape == (4,)
    assert weights.each.is_meta
    assert moves.count == 1


def test_weights_may_be_on_the_host_and_on_the_device() -> None:
    mesh: Any = SimpleNamespace(num_replicas=1)
    found = [torch.tensor(3, device="meta"), 0]
    assert LossWeights.of(lambda each: found[each], [0, 1], mesh, torch.device("meta")).each.shape == (2,)


# -- who should say it -------------------------------------------------------------------------------------------------


def padded(*lengths: int) -> Tensor:
    """Labels of sequences of these lengths."""
    return torch.tensor([[1] * length + [-100] * (4 - length) for length in lengths])


@pytest.mark.parametrize(
    ("microbatches", "counts", "key"),
    [
        (
            [{"x": torch.ones(2, 4), "labels": padded(4, 1)}, {"x": torch.ones(2, 4), "labels": padded(4, 4)}],
            [2, 2],
            "labels",
        ),
        ([(torch.ones(2, 4), padded(4, 1)), (torch.ones(1, 4), padded(4))], [2, 1], 1),
        ([{"labels": padded(3, 1)}, {"labels": padded(2, 2)}], [2, 2], None),
        ([{"labels": padded(2, 2)}, {"labels": padded(2)}], [2, 1], None),
        ([{"labels": padded(4, 4)}, {"labels": padded(4)}], [2, 1], None),
        ([{"x": torch.full((2, 2), -100.0)}, {"x": torch.ones(2, 2)}], [2, 2], None),
        ([torch.ones(2, 2), torch.ones(2, 2)], [2, 2], None),
        ([{"labels": padded(0, 0)}, {"labels": padded(0)}], [2, 1], None),
    ],
)
def test_labels_that_do_not_count_are_found(microbatches: list[Any], counts: list[int], key: object) -> None:
    assert unequal_labels(microbatches, counts) == key


class Labelled(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, labels = batch
        return self(x).mean() + 0.0 * (labels != -100).sum()


class Counted(Labelled):
    microbatch_weight = count_tokens(1)


def warnings_of(kind: type[Labelled], labels: Tensor, num_microbatches: int) -> list[str]:
    trainer = make_trainer({"pipeline_parallel_size": 2, "num_microbatches": num_microbatches}, max_epochs=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(kind(), DataLoader(TensorDataset(torch.ones(len(labels), 6).double(), labels), 4))
    return [str(each.message) for each in caught if "count_tokens" in str(each.message)]


def test_a_loss_that_is_likely_to_be_a_mean_over_labels_is_warned_of(ranks: Pools) -> None:
    pool, labels = ranks(2, lightning=True), padded(4, 4, 4, 4, 4, 1, 2, 4)
    (text,), others = pool.run(warnings_of, Labelled, labels, 2)
    assert "`microbatch_weight = lightning_hybrid.count_tokens(1)` in Labelled" in text
    assert not others
    for arguments in ((Counted, labels, 2), (Labelled, labels, 1), (Labelled, padded(2, 2, 2, 2), 2)):
        assert pool.run(warnings_of, *arguments) == [[], []]
