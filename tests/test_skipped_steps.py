"""`training_step` that returns ``None``: what has no loss is left out, as if the batch had never held it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.amp import GradScaler
from torch.utils.data import DataLoader, TensorDataset

from tests.daily import daily
from tests.pool import Pools
from tests.training_jobs import Regression, assert_same, dataset, make_trainer, weights

#: (ranks, replicas, microbatches, arguments of the strategy)
LAYOUTS: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "one rank, microbatches": (1, 1, 2, {}),
    "dp2": (2, 2, 1, {}),
    "dp2, microbatches": (2, 2, 2, {}),
    "zero 1": (2, 2, 1, {"zero_stage": 1}),
    "zero 2": (2, 2, 1, {"zero_stage": 2}),
    "zero 3": (2, 2, 1, {"zero_stage": 3}),
    "zero 3, microbatches": (2, 2, 2, {"zero_stage": 3}),
    "pp2": (2, 1, 2, {"pipeline_parallel_size": 2}),
    "pp2, any code": (2, 1, 4, {"pipeline_parallel_size": 2, "body": ["body"]}),
    "chunks 2": (2, 1, 2, {"pipeline_parallel_size": 2, "num_chunks": 2, "schedule": "interleaved_1f1b"}),
    "tp2": (2, 1, 2, {"tensor_parallel_size": 2}),
    "pp2 x dp2": (4, 2, 2, {"pipeline_parallel_size": 2}),
    "pp2 x dp2, dynamic shapes": (4, 2, 2, {"pipeline_parallel_size": 2, "dynamic_shapes": True}),
    "pp2 x zero 2": (4, 2, 2, {"pipeline_parallel_size": 2, "zero_stage": 2}),
    "pp2 x zero 3": (4, 2, 2, {"pipeline_parallel_size": 2, "zero_stage": 3}),
}
DAILY = ("dp2, microbatches", "zero 3, microbatches", "pp2, any code", "tp2", "pp2 x dp2", "pp2 x zero 3")
SIZE = 8  # samples of a batch
Parts = Sequence[tuple[int, int]]  # (replica, microbatch)


def samples_of(part: tuple[int, int], replicas: int, microbatches: int) -> list[int]:
    """The samples of a batch that a microbatch of a replica has."""
    own = list(range(part[0], SIZE, replicas))
    size = len(own) // microbatches
    return own[part[1] * size : (part[1] + 1) * size]


class Skips(Regression):
    """Has no loss for what begins with a sample that does not count."""

    def __init__(self, when: str = "after") -> None:
        super().__init__()
        self.when = when
        if when == "float32":
            self.float()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, counts = batch
        x, y = x.to(self.dtype), y.to(self.dtype)
        if self.when == "before" and not counts[0]:
            return None
        loss = self.loss((x, y))
        if self.when == "nan" and loss.isnan():
            return None
        if self.when != "nan" and not counts[0]:
            return None
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(x))
        return {"loss": loss, "number": batch_idx} if self.when == "dictionary" else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)


class Seen(Callback):
    """Keeps what hooks see."""

    def __init__(self) -> None:
        self.losses: list[float | None] = []
        self.backwards = 0

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.backwards += 1

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]) if outputs else None)


def train(
    layout: Mapping[str, Any] | None,
    batch_size: int,
    counting: Sequence[Sequence[int]],
    when: str,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Train with batches of which some samples do not count; one process gets batches without them."""
    tensors, mask = dataset(SIZE * len(counting)).tensors, torch.zeros(len(counting), SIZE)
    for number, samples in enumerate(counting):
        mask[number, list(samples)] = 1
    if when == "nan":
        tensors[0][mask.flatten() == 0] = torch.nan
    data, module, seen = TensorDataset(*tensors, mask.flatten()), Skips(when), Seen()
    trainer = make_trainer(layout, callbacks=[seen], **options)
    if layout is None:  # a batch of which nothing counts is one sample that does not
        batches = [[SIZE * number + sample for sample in samples or [0]] for number, samples in enumerate(counting)]
        trainer.fit(module, DataLoader(data, batch_sampler=batches))
    else:
        trainer.fit(module, DataLoader(data, batch_size))
    states = trainer.optimizers[0].state.values()
    steps = {float(state["step"]) for state in states if state}
    if layout is not None:
        trainer.strategy.gather_module()
    return {
        "weights": weights(module),
        "logged": float(trainer.callback_metrics["loss"]),
        "losses": seen.losses,
        "backwards": seen.backwards,
        "global_step": trainer.global_step,
        "steps": sorted(steps),
    }


def assert_left_out(
    ranks: Pools, layout: str, left_out: Sequence[Parts], when: str = "after", rtol: float = 1e-10, **options: Any
) -> None:
    """Training without these parts of the batches equals one process that never had them."""
    size, replicas, microbatches, arguments = LAYOUTS[layout]
    parts = [(replica, number) for replica in range(replicas) for number in range(microbatches)]
    counting = [
        sorted(sample for part in parts if part not in out for sample in samples_of(part, replicas, microbatches))
        for out in left_out
    ]
    expected = train(None, SIZE, counting, when, options)
    layout_arguments = {**arguments, "num_microbatches": microbatches}
    pool = ranks(size, lightning=True)
    results = pool.run(train, layout_arguments, SIZE // replicas, counting, when, options)
    for result in results:
        assert_same(result["weights"], expected["weights"], rtol)
        for name in ("logged", "global_step"):
            assert_same(result[name], expected[name], rtol, name)
        assert set(result["steps"]) <= set(expected["steps"])
    # In the middle of a window replicas do not ask each other: hooks are called where there is a loss.
    backwards = [result["backwards"] for result in results]
    assert max(backwards) == expected["backwards"]
    assert options or len(set(backwards)) == 1
    for number, out in enumerate(left_out):
        weight = [sum((replica, each) not in out for each in range(microbatches)) for replica in range(replicas)]
        # Ranks of one replica follow each other, or are as many apart as there are replicas.
        losses = [results[replica]["losses"][number] for replica in range(replicas)]
        assert [loss is None for loss in losses] == [each == 0 for each in weight]
        if sum(weight):
            mean = sum(each * loss for each, loss in zip(weight, losses, strict=True) if each) / sum(weight)
            assert_same(mean, expected["losses"][number], rtol)


def all_parts(layout: str) -> Parts:
    _, replicas, microbatches, _ = LAYOUTS[layout]
    return [(replica, number) for replica in range(replicas) for number in range(microbatches)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_has_no_loss_is_left_out(ranks: Pools, layout: str) -> None:
    everything = all_parts(layout)
    assert_left_out(ranks, layout, [[], everything[-1:], everything, everything[:1], []])


@pytest.mark.parametrize("layout", ["dp2, microbatches", "zero 3, microbatches", "pp2 x dp2", "pp2 x zero 2"])
def test_a_replica_without_a_loss_is_left_out(ranks: Pools, layout: str) -> None:
    one, other = [(0, 0), (0, 1)], [(1, 0), (1, 1)]
    assert_left_out(ranks, layout, [one, other, [*one, (1, 1)], [], other], "dictionary")


@pytest.mark.parametrize("layout", daily(LAYOUTS, *DAILY))
def test_a_first_batch_without_a_loss_is_skipped(ranks: Pools, layout: str) -> None:
    everything = all_parts(layout)
    assert_left_out(ranks, layout, [everything, everything[1:], [], everything])


@pytest.mark.parametrize("layout", ["dp2", "zero 2", "zero 3", "pp2", "pp2 x dp2", "pp2 x zero 2"])
def test_batches_without_a_loss_are_left_out_of_accumulated_gradients(ranks: Pools, layout: str) -> None:
    everything = all_parts(layout)
    half = everything[len(everything) // 2 :]
    left_out = [everything, [], [], everything, half, half, everything, everything]
    assert_left_out(ranks, layout, left_out, accumulate_grad_batches=2)


@pytest.mark.parametrize("layout", daily(LAYOUTS, *DAILY))
def test_a_step_may_return_before_it_calls_a_layer(ranks: Pools, layout: str) -> None:
    everything = all_parts(layout)
    assert_left_out(ranks, layout, [[], everything[:1], everything, everything[1:], []], "before")
    assert_left_out(ranks, layout, [everything, everything[:1], []], "before")


@pytest.mark.parametrize("layout", daily(LAYOUTS, *DAILY))
def test_numbers_that_are_not_finite_stay_where_they_are(ranks: Pools, layout: str) -> None:
    everything = all_parts(layout)
    assert_left_out(ranks, layout, [[], everything[:1], everything, everything[1:], []], "nan")


# -- weights, windows, precision ---------------------------------------------------------------------------------------


class Tokens(Skips):
    """Its loss is a mean over what weighs something, not over samples."""

    def microbatch_weight(self, batch: Any) -> Tensor:
        return self.weights(batch).sum()

    def weights(self, batch: Any) -> Tensor:
        return 1.0 + (batch[0][:, :1] > 0)

    def loss(self, batch: Any) -> Tensor:
        weights = self.weights(batch)
        return (weights * (self(batch[0]) - batch[1]) ** 2).sum() / weights.sum()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch[:2])
        if not batch[2][0]:
            return None
        return loss


def train_windows(
    kind: str, layout: Mapping[str, Any] | None, batch_size: int, counting: Sequence[Sequence[int]], accumulated: int
) -> dict[str, Tensor]:
    """Train; one process takes at once what counts in all batches of an optimizer step."""
    tensors, mask = dataset(SIZE * len(counting)).tensors, torch.zeros(len(counting), SIZE)
    for number, samples in enumerate(counting):
        mask[number, list(samples)] = 1
    data, module = TensorDataset(*tensors, mask.flatten()), Tokens() if kind == "tokens" else Skips()
    if layout is None:
        kept = [[SIZE * number + sample for sample in samples] for number, samples in enumerate(counting)]
        firsts = range(0, len(kept), accumulated)
        windows = [[sample for batch in kept[first : first + accumulated] for sample in batch] for first in firsts]
        make_trainer(None).fit(module, DataLoader(data, batch_sampler=windows))
    else:
        trainer = make_trainer(layout, accumulate_grad_batches=accumulated)
        trainer.fit(module, DataLoader(data, batch_size))
        trainer.strategy.gather_module()
    return weights(module)


@pytest.mark.parametrize("kind", ["samples", "tokens"])
@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("layout", ["dp2, microbatches", "pp2", "pp2 x dp2", "pp2 x zero 2"])
def test_accumulated_gradients_are_one_mean_over_what_is_left(
    ranks: Pools, layout: str, accumulated: int, kind: str
) -> None:
    size, replicas, microbatches, arguments = LAYOUTS[layout]
    parts = all_parts(layout)
    left_out = [parts[:1], parts[1:], parts[-1:], []]
    counting = [
        sorted(sample for part in parts if part not in out for sample in samples_of(part, replicas, microbatches))
        for out in left_out
    ]
    expected = train_windows(kind, None, SIZE, counting, accumulated)
    given = {**arguments, "num_microbatches": microbatches}, SIZE // replicas, counting, accumulated
    for result in ranks(size, lightning=True).run(train_windows, kind, *given):
        assert_same(result, expected)


def train_half(layout: Mapping[str, Any] | None, batch_size: int, counting: Sequence[Sequence[int]]) -> Any:
    """Train with a loss that is scaled: the scale, the steps since it changed, and the weights."""
    plugin = MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=2.0**10, growth_interval=100))
    options = {"plugins": plugin, "accumulate_grad_batches": 2}
    result = train(layout, batch_size, counting, "float32", options)
    return plugin.scaler.get_scale(), plugin.scaler._get_growth_tracker(), result["weights"]


@pytest.mark.parametrize("layout", ["dp2", "zero 2", "pp2", "pp2 x dp2"])
def test_scaled_losses_are_skipped_as_in_one_process(ranks: Pools, layout: str) -> None:
    size, replicas, microbatches, arguments = LAYOUTS[layout]
    first = [sample for number in range(microbatches) for sample in samples_of((0, number), replicas, microbatches)]
    counting = [first, [], [], first, first, first, list(range(SIZE)), []]
    expected = train_half(None, SIZE, counting)
    given = {**arguments, "num_microbatches": microbatches}, SIZE // replicas, counting
    for scale, tracker, trained in ranks(size, lightning=True).run(train_half, *given):
        assert (scale, tracker) == expected[:2]
        assert_same(trained, expected[2], 1e-2)


# -- what is refused ---------------------------------------------------------------------------------------------------


class Helper(Regression):
    """Its `training_step` does not say that it may return ``None``."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(batch)

    def step(self, batch: Any) -> Any:
        return self.loss(batch[:2]) if batch[2][0] else None


class LateHelper(Helper):
    """Returns it when its layers have run."""

    def step(self, batch: Any) -> Any:
        loss = self.loss(batch[:2])
        return loss if batch[2][0] else None


class Logs(Skips):
    """Logs for each step where it has a loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not batch[2][0]:
            return None
        loss = self.loss(batch[:2])
        self.log("loss", loss, sync_dist=True)
        return loss


def refused(kind: type[Regression], layout: Mapping[str, Any], batch_size: int) -> str:
    mask = torch.ones(4, SIZE)
    mask[2, 1::2] = 0
    data = TensorDataset(*dataset(4 * SIZE).tensors, mask.flatten())
    with pytest.raises(Exception) as error:  # noqa: PT011 - its text is looked at
        make_trainer(layout).fit(kind(), DataLoader(data, batch_size))
    return str(error.value)


def test_a_none_that_stages_do_not_expect_is_refused(ranks: Pools) -> None:
    layout = {"pipeline_parallel_size": 2, "num_microbatches": 8}
    for kind in (Helper, LateHelper):
        for text in ranks(2, lightning=True).run(refused, kind, layout, SIZE):
            assert "returned None but contains no `return None`" in text
            assert "dynamic_shapes=True" in text


@pytest.mark.parametrize("layout", ["dp2", "pp2 x dp2"])
def test_a_value_that_is_reduced_in_each_step_and_one_replica_does_not_log_is_refused(
    ranks: Pools, layout: str
) -> None:
    size, replicas, microbatches, arguments = LAYOUTS[layout]
    given = Logs, {**arguments, "num_microbatches": microbatches}, SIZE // replicas
    for text in ranks(size, lightning=True).run(refused, *given):
        assert "made different calls" in text or "is not the same on every rank" in text
