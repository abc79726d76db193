"""Losses that microbatches change: seen in the first step, and equal to one process under "auto"."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from lightning_hybrid import Faults, Tuning
from tests.daily import daily
from tests.pool import Pools
from tests.training_jobs import Result, make_trainer, together, train
from tests.transparency import FRAME_SUBJECTS, SUBJECTS, TENSOR_SUBJECTS, Subject
from tests.zoo.coupled_losses import (
    COUPLED,
    Loss,
    clip,
    contrastive,
    dice,
    focal_by_positives,
    pairwise_hinge,
    two_tasks,
)

SAMPLES, STEPS, FEATURES = 8, 3, 6


class Model(LightningModule):
    """Layers in a list, and a loss."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(FEATURES, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.last = nn.Linear(8, 4)
        self.loss = loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.first(batch[0])
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        loss = self.loss(self.last(h), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Chain(Model):
    """The same in a Sequential."""

    def __init__(self, loss: Loss) -> None:
        super().__init__(loss)
        self.blocks = nn.Sequential(*self.blocks)  # type: ignore[assignment]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self.last(self.blocks(self.first(batch[0]))), batch[1])  # type: ignore[operator]


def trained(
    layout: dict[str, Any] | None,
    losses: list[Loss],
    kind: type[Model] = Model,
    order: Sequence[int] = range(SAMPLES * STEPS),
    **arguments: Any,
) -> list[tuple[Result, list[str]]]:
    """Train with each loss; return the results and the warnings of the comparison."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(len(order), FEATURES, dtype=torch.float64, generator=generator)
    samples = TensorDataset(x, torch.randint(4, (len(x),), generator=generator))
    data = DataLoader(Subset(samples, order), SAMPLES)
    found = []
    for loss in losses:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = train(kind(loss), layout, data, precision="64-true", **arguments)
        texts = [
            str(warning.message) for warning in caught if "The loss of the same samples is" in str(warning.message)
        ]
        found.append((result, texts))
    return found


def assert_like_one_process(ranks: Pools, layout: dict[str, Any], losses: list[Loss], kind: type[Model]) -> list[Any]:
    """Compare a layout of two ranks with one process, at 1e-10; return what the first rank has warned of."""
    expected = trained(None, losses, kind)
    results = ranks(2, lightning=True).run(trained, layout, losses, kind, timeout=300.0)
    for loss, (one, _), *found in zip(losses, expected, *results, strict=True):
        for result, _ in found:
            assert result.losses == pytest.approx(one.losses, rel=1e-10), loss.__name__
        assert_equal_weights([result for result, _ in found], one, loss)
    return [texts for _, texts in results[0]]


def assert_equal_weights(results: list[Result], expected: Result, loss: Loss) -> None:
    whole = together([result.weights for result in results])
    for name, value in expected.weights.items():
        torch.testing.assert_close(whole[name], value, rtol=1e-10, atol=1e-12, msg=f"{loss.__name__} {name}")


@pytest.mark.parametrize("loss", COUPLED, ids=lambda loss: loss.__name__)
def test_losses_that_couple_samples_equal_one_process_and_are_said_once(ranks: Pools, loss: Loss) -> None:
    ((said,),) = assert_like_one_process(ranks, {"pipeline_parallel_size": 2}, [loss], Model)
    assert "one microbatch instead of 8" in said


def class_weights(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, weight=torch.tensor([0.1, 1.0, 3.0, 7.0], dtype=z.dtype))


def ignored_targets(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, ignore_index=2)


def test_means_over_targets_equal_one_process_and_nothing_is_said(ranks: Pools) -> None:
    texts = assert_like_one_process(ranks, {"pipeline_parallel_size": 2}, [class_weights, ignored_targets], Model)
    assert texts == [[], []]


def dealt(samples: int, replicas: int) -> list[int]:
    """Return the order of samples in which one process has the batches of all replicas one after the other."""
    of_replicas = [range(replica, samples, replicas) for replica in range(replicas)]
    starts = range(0, samples // replicas, SAMPLES)
    return [number for start in starts for each in of_replicas for number in each[start : start + SAMPLES]]


def test_replicas_have_losses_of_their_own_batches(ranks: Pools) -> None:
    """One process that accumulates the batches of both replicas trains to the same weights."""
    layout = {"pipeline_parallel_size": 2, "data_parallel_size": 2}
    losses = [contrastive, clip, pairwise_hinge, focal_by_positives]
    order = dealt(SAMPLES * STEPS * 2, 2)
    expected = trained(None, losses, order=order, accumulate_grad_batches=2)
    results = ranks(4, lightning=True).run(trained, layout, losses, Model, range(len(order)), timeout=120.0)
    for loss, (one, _), *found in zip(losses, expected, *results, strict=True):
        assert_equal_weights([result for result, _ in found], one, loss)
        assert [len(texts) for _, texts in found] == [1, 0, 0, 0]


def test_a_sum_of_means_over_targets_keeps_its_microbatches(ranks: Pools) -> None:
    assert assert_like_one_process(ranks, {"pipeline_parallel_size": 2}, [two_tasks], Model) == [[]]


def test_the_same_around_a_sequential(ranks: Pools) -> None:
    texts = assert_like_one_process(ranks, {"pipeline_parallel_size": 2}, COUPLED[:4], Chain)
    assert [len(said) for said in texts] == [1] * 4


ZERO_3 = {"data_parallel_size": 2, "zero_stage": 3}


@pytest.mark.parametrize("reshards", [False, True])
def test_parameters_that_are_gathered_are_those_of_the_step(ranks: Pools, reshards: bool) -> None:
    """A forward that left parameters as they were before they were gathered would find differences everywhere."""
    layout = {**ZERO_3, "tuning": Tuning(reshard_after_forward=reshards), "num_microbatches": 2}
    (_, mean), (_, kept) = ranks(2, lightning=True).run(trained, layout, [mean_of_samples, dice])[0]
    assert not mean
    assert len(kept) == 1


@pytest.mark.parametrize("layout", [{"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}], ids=str)
def test_a_number_that_was_set_is_kept_and_said(ranks: Pools, layout: dict[str, Any]) -> None:
    losses = [contrastive, mean_of_samples]
    results = ranks(2, lightning=True).run(trained, {**layout, "num_microbatches": 2}, losses)
    (found, (kept,)), (_, none) = results[0]
    assert "With the 2 microbatches that you set, training does not give the same results" in kept
    assert not none
    assert found.losses != pytest.approx(trained(None, losses)[0][0].losses, rel=1e-3)


def test_the_comparison_can_be_switched_off(ranks: Pools) -> None:
    layout = {"pipeline_parallel_size": 2, "faults": Faults(compare_microbatches=False)}
    ((found, texts),) = ranks(2, lightning=True).run(trained, layout, [contrastive])[0]
    assert not texts
    assert found.losses != pytest.approx(trained(None, [contrastive])[0][0].losses, rel=1e-3)


class OwnGradients(Model):
    """A penalty on the gradient with respect to the batch, a hook on an activation, and a transform of `torch.func`."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].clone().requires_grad_()
        h = self.first(x)
        h.register_hook(lambda gradient: gradient)
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        z = self.last(h)
        (gradient,) = torch.autograd.grad(z.sum(), x, create_graph=True)

        def loss_of(weights: dict[str, Tensor]) -> Tensor:
            return F.cross_entropy(torch.func.functional_call(self.last, weights, (h.detach(),)), batch[1])

        found = torch.func.grad(loss_of)(dict(self.last.named_parameters()))
        assert all(each.isfinite().all() for each in found.values())
        return self.loss(z, batch[1]) + gradient.square().sum(1).mean()


def test_steps_with_gradients_of_their_own_are_compared(ranks: Pools) -> None:
    ((expected, _),) = trained(None, [mean_of_samples], OwnGradients)
    layout = {"num_microbatches": 4}
    (((found, texts),),) = ranks(1, lightning=True).run(trained, layout, [mean_of_samples], OwnGradients)
    assert found.losses == pytest.approx(expected.losses, rel=1e-10)
    assert not texts


def recomputed(z: Tensor, y: Tensor) -> Tensor:
    """A loss whose second term is computed again in backward."""

    def loss(a: Tensor, b: Tensor) -> Tensor:
        return F.cross_entropy(2 * a, b)

    return F.cross_entropy(z, y) + torch.utils.checkpoint.checkpoint(loss, z, y, use_reentrant=False)


def test_losses_that_are_recomputed_are_compared(ranks: Pools) -> None:
    ((expected, _),) = trained(None, [recomputed])
    (((found, texts),),) = ranks(1, lightning=True).run(trained, {"num_microbatches": 4}, [recomputed])
    assert found.losses == pytest.approx(expected.losses, rel=1e-10)
    assert not texts


def mean_of_samples(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y)


def sum_of_samples(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, reduction="sum")


def sum_by_a_constant(z: Tensor, y: Tensor) -> Tensor:
    """As code divides by `hparams.batch_size`."""
    return (z.square().sum() + F.cross_entropy(z, y, reduction="sum")) / SAMPLES


@pytest.mark.parametrize(
    "layout",
    [
        {"pipeline_parallel_size": 2},
        {"tensor_parallel_size": 2, "num_microbatches": 4},
        {"pipeline_parallel_size": 2, "num_microbatches": 3},
    ],
    ids=str,
)
def test_sums_are_summed(ranks: Pools, layout: dict[str, Any]) -> None:
    texts = assert_like_one_process(ranks, layout, [sum_of_samples, sum_by_a_constant, mean_of_samples], Model)
    assert texts == [[], [], []]


def first_warnings(subject: Subject, layout: dict[str, Any]) -> list[str]:
    """Train a few steps, and return the warnings of the comparison."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(1)
    module = subject.module(batch_size=subject.module.batch_per_step).double()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        arguments = {"max_steps": 2, "limit_val_batches": 0, **subject.trainer}
        make_trainer({**layout, **subject.strategy}, **arguments).fit(module)
    return [str(each.message) for each in caught if "The loss of the same samples is" in str(each.message)]


ORDINARY = {**SUBJECTS, **FRAME_SUBJECTS, **TENSOR_SUBJECTS}


@pytest.mark.parametrize("name", daily(ORDINARY, *[*ORDINARY][::8]))
def test_ordinary_modules_are_not_warned_of(ranks: Pools, name: str) -> None:
    layout = {"pipeline_parallel_size": 2, "num_microbatches": 4}
    assert ranks(2, lightning=True).run(first_warnings, ORDINARY[name], layout)[0] == []
