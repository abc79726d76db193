"""Losses that microbatches change: seen in the first step, and equal to one process under "auto"."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.pool import Pools
from tests.training_jobs import Losses, make_trainer, together, weights
from tests.transparency import FRAME_SUBJECTS, SUBJECTS, TENSOR_SUBJECTS, Subject

SAMPLES, STEPS, FEATURES = 8, 3, 6

Loss = Callable[[Tensor, Tensor], Tensor]


def _off_diagonal(x: Tensor) -> Tensor:
    return x - torch.diag(torch.diag(x))


def contrastive(z: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(z, dim=1)
    return F.cross_entropy(z @ z.T / 0.5 + z.sum(1), torch.arange(len(z)))


def nt_xent(z: Tensor, y: Tensor) -> Tensor:
    views = F.normalize(torch.cat([z, z.roll(1, 1)]), dim=1)
    scores = views @ views.T / 0.3 - 1e9 * torch.eye(len(views), dtype=z.dtype)
    return F.cross_entropy(scores, torch.arange(len(views)).roll(len(z)))


def hardest_triplet(z: Tensor, y: Tensor) -> Tensor:
    distances = (z[:, None] - z[None]).square().sum(-1)
    alike = y[:, None] == y[None]
    far = torch.where(alike, distances, 0.0).amax(1)
    near = torch.where(alike, 1e3, distances).amin(1)
    return F.softplus(far - near).mean()


def dice(z: Tensor, y: Tensor) -> Tensor:
    p, truth = z.softmax(1), F.one_hot(y, z.shape[1]).to(z.dtype)
    return 1 - (2 * (p * truth).sum() + 1) / ((p + truth).sum() + 1)


def jaccard(z: Tensor, y: Tensor) -> Tensor:
    p, truth = z.softmax(1), F.one_hot(y, z.shape[1]).to(z.dtype)
    both = (p * truth).sum()
    return 1 - both / ((p + truth).sum() - both)


def barlow(z: Tensor, y: Tensor) -> Tensor:
    a, b = z - z.mean(0), z.roll(1, 1) - z.roll(1, 1).mean(0)
    return (a.T @ b / len(z) - torch.eye(z.shape[1], dtype=z.dtype)).square().sum()


def vicreg(z: Tensor, y: Tensor) -> Tensor:
    centred = z - z.mean(0)
    covariance = centred.T @ centred / len(z)
    return F.relu(1 - torch.sqrt(torch.diag(covariance) + 1e-4)).mean() + _off_diagonal(covariance).square().sum()


def ranking(z: Tensor, y: Tensor) -> Tensor:
    pairs = y[:, None] > y[None]
    return (F.softplus(z[None, :, 0] - z[:, None, 0]) * pairs).sum() / pairs.sum().clamp(min=1)


def targets_of_the_step(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, torch.where(y == 0, -100, y))


def two_tasks(z: Tensor, y: Tensor) -> Tensor:
    weight = torch.tensor([0.1, 1.0, 3.0, 7.0], dtype=z.dtype)
    return F.cross_entropy(z, y, weight=weight) + F.cross_entropy(z, y, ignore_index=1)


def normalized_advantages(z: Tensor, y: Tensor) -> Tensor:
    rewards = y.to(z.dtype)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
    return -(advantages * F.log_softmax(z, 1)[:, 0]).mean() + z.square().mean()


def masked_mean(z: Tensor, y: Tensor) -> Tensor:
    kept = (y > 0).to(z.dtype)
    return (z.square().mean(1) * kept).sum() / (kept.sum() + 1e-3)


def root_mean_square(z: Tensor, y: Tensor) -> Tensor:
    return (z[:, 0] - y).square().mean().sqrt()


def correlation(z: Tensor, y: Tensor) -> Tensor:
    a, b = z[:, 0] - z[:, 0].mean(), z[:, 1] - z[:, 1].mean()
    return 1 - (a * b).sum() / (a.norm() * b.norm() + 1e-6) + z.square().mean()


def explained_variance(z: Tensor, y: Tensor) -> Tensor:
    return (z[:, 0] - y).square().sum() / ((y - y.double().mean()).square().sum() + 1.0)


def entropy_of_the_mean(z: Tensor, y: Tensor) -> Tensor:
    p = z.softmax(1).mean(0)
    return (p * p.log()).sum() + F.cross_entropy(z, y)


def spread(z: Tensor, y: Tensor) -> Tensor:
    return -torch.log(_off_diagonal(torch.cdist(z, z)).sum() + 1) + z.square().mean()


def kernel_distance(z: Tensor, y: Tensor) -> Tensor:
    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return torch.exp(-(a[:, None] - b[None]).square().sum(-1)).mean()

    return kernel(z, z) - 2 * kernel(z, z.roll(1, 1)) + kernel(z.roll(1, 1), z.roll(1, 1)) + z.square().mean()


def softmax_over_samples(z: Tensor, y: Tensor) -> Tensor:
    return (z[:, 0].softmax(0) * z[:, 1]).sum() + z.square().mean()


def centre_loss(z: Tensor, y: Tensor) -> Tensor:
    return (z - z.mean(0)).square().mean() + F.cross_entropy(z, y)


def log_of_a_mean(z: Tensor, y: Tensor) -> Tensor:
    return z.square().mean().log()


def scaled_by_the_deviation(z: Tensor, y: Tensor) -> Tensor:
    return (z / z.std(0)).square().mean() + z.square().mean()


def decorrelation(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y) + _off_diagonal(z.T @ z / len(z)).square().sum()


COUPLED: list[Loss] = [
    *(contrastive, nt_xent, hardest_triplet, dice, jaccard, barlow, vicreg, ranking),
    targets_of_the_step,
    *(normalized_advantages, masked_mean, root_mean_square, correlation, explained_variance, entropy_of_the_mean),
    *(spread, kernel_distance, softmax_over_samples, centre_loss, log_of_a_mean, scaled_by_the_deviation),
    decorrelation,
]


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


def fit(layout: dict[str, Any] | None, losses: list[Loss], kind: type[Model] = Model) -> list[dict[str, Any]]:
    """Train with each loss, and keep the losses, the weights and the warnings of the comparison."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES * STEPS, FEATURES, dtype=torch.float64, generator=generator)
    data = DataLoader(TensorDataset(x, torch.randint(4, (len(x),), generator=generator)), SAMPLES)
    found = []
    for loss in losses:
        module, seen = kind(loss), Losses()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            make_trainer(layout, callbacks=[seen], precision="64-true").fit(module, data)
        texts = [str(warning.message) for warning in caught if "The loss of two microbatches" in str(warning.message)]
        found.append({"losses": seen.values, "weights": weights(module), "texts": texts})
    return found


def assert_like_one_process(ranks: Pools, layout: dict[str, Any], losses: list[Loss], kind: type[Model]) -> list[Any]:
    """Compare a layout of two ranks with one process, at 1e-10; return what the first rank has warned of."""
    expected = fit(None, losses, kind)
    results = ranks(2, lightning=True).run(fit, layout, losses, kind, timeout=300.0)
    for number, (loss, one) in enumerate(zip(losses, expected, strict=True)):
        for rank in results:
            assert rank[number]["losses"] == pytest.approx(one["losses"], rel=1e-10), loss.__name__
        whole = together([rank[number]["weights"] for rank in results])
        for name, value in one["weights"].items():
            torch.testing.assert_close(whole[name], value, rtol=1e-10, atol=1e-12, msg=f"{loss.__name__} {name}")
    return [found["texts"] for found in results[0]]


def test_losses_that_couple_samples_equal_one_process_and_are_said_once(ranks: Pools) -> None:
    texts = assert_like_one_process(ranks, {"pipeline_parallel_size": 2}, COUPLED, Model)
    for loss, said in zip(COUPLED, texts, strict=True):
        assert len(said) == 1, loss.__name__
        assert "one microbatch instead of 8" in said[0]


def test_a_sum_of_means_over_targets_keeps_its_microbatches(ranks: Pools) -> None:
    assert assert_like_one_process(ranks, {"pipeline_parallel_size": 2}, [two_tasks], Model) == [[]]


def test_the_same_around_a_sequential(ranks: Pools) -> None:
    texts = assert_like_one_process(ranks, {"pipeline_parallel_size": 2}, COUPLED[:4], Chain)
    assert [len(said) for said in texts] == [1] * 4


ZERO_3 = {"data_parallel_size": 2, "zero_stage": 3}


@pytest.mark.parametrize("frees", ["step", "microbatch"])
def test_parameters_that_are_gathered_are_those_of_the_step(ranks: Pools, frees: str) -> None:
    """A forward that left parameters as they were before they were gathered would find differences everywhere."""
    layout = {**ZERO_3, "zero_frees": frees, "num_microbatches": 2}
    mean, kept = (found["texts"] for found in ranks(2, lightning=True).run(fit, layout, [mean_of_samples, dice])[0])
    assert not mean
    assert len(kept) == 1


@pytest.mark.parametrize("layout", [{"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}], ids=str)
def test_a_number_that_was_set_is_kept_and_said(ranks: Pools, layout: dict[str, Any]) -> None:
    losses = [contrastive, mean_of_samples]
    results = ranks(2, lightning=True).run(fit, {**layout, "num_microbatches": 2}, losses)
    (kept,), none = (found["texts"] for found in results[0])
    assert "2 microbatches, as set, train to other numbers" in kept
    assert not none
    assert results[0][0]["losses"] != pytest.approx(fit(None, losses)[0]["losses"], rel=1e-3)


def test_the_comparison_can_be_switched_off(ranks: Pools) -> None:
    layout = {"pipeline_parallel_size": 2, "compare_microbatches": False}
    (found,) = ranks(2, lightning=True).run(fit, layout, [contrastive])[0]
    assert not found["texts"]
    assert found["losses"] != pytest.approx(fit(None, [contrastive])[0]["losses"], rel=1e-3)


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
    (expected,) = fit(None, [mean_of_samples], OwnGradients)
    ((found,),) = ranks(1, lightning=True).run(fit, {"num_microbatches": 4}, [mean_of_samples], OwnGradients)
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-10)
    assert not found["texts"]


def recomputed(z: Tensor, y: Tensor) -> Tensor:
    """A loss whose second term is computed again in backward."""

    def loss(a: Tensor, b: Tensor) -> Tensor:
        return F.cross_entropy(2 * a, b)

    return F.cross_entropy(z, y) + torch.utils.checkpoint.checkpoint(loss, z, y, use_reentrant=False)


def test_losses_that_are_recomputed_are_compared(ranks: Pools) -> None:
    (expected,) = fit(None, [recomputed])
    ((found,),) = ranks(1, lightning=True).run(fit, {"num_microbatches": 4}, [recomputed])
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-10)
    assert not found["texts"]


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
    return [str(each.message) for each in caught if "The loss of two microbatches" in str(each.message)]


ORDINARY = {**SUBJECTS, **FRAME_SUBJECTS, **TENSOR_SUBJECTS}
#: Losses that are no means over samples, and say nothing of it.
EXCEPTIONS: set[str] = set()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if number % 8 == 0 else pytest.mark.thorough)
        for number, name in enumerate(ORDINARY)
        if name not in EXCEPTIONS
    ],
)
def test_ordinary_modules_are_not_warned_of(ranks: Pools, name: str) -> None:
    layout = {"pipeline_parallel_size": 2, "num_microbatches": 4}
    assert ranks(2, lightning=True).run(first_warnings, ORDINARY[name], layout)[0] == []
