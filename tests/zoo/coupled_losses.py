"""Losses that couple the samples of a batch, or are means over something else than samples."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

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


def supervised_contrastive(z: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(z, dim=1)
    others = 1 - torch.eye(len(z), dtype=z.dtype)
    log_p = z @ z.T / 0.5 - ((z @ z.T / 0.5).exp() * others).sum(1, keepdim=True).clamp(min=1e-9).log()
    alike = (y[:, None] == y[None]).to(z.dtype) * others
    return -((log_p * alike).sum(1) / alike.sum(1).clamp(min=1)).mean() + z[:, 0].mean()


def clip(z: Tensor, y: Tensor) -> Tensor:
    images, texts = F.normalize(z[:, :2], dim=1), F.normalize(z[:, 2:], dim=1)
    scores, own = images @ texts.T / 0.2, torch.arange(len(z))
    return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2 + z[:, 0].mean()


def prototypes(z: Tensor, y: Tensor) -> Tensor:
    """As prototypical networks classify samples by the nearest mean of a class."""
    truth = F.one_hot(y, 4).to(z.dtype)
    means = truth.T @ z / truth.sum(0).clamp(min=1)[:, None]
    return F.cross_entropy(-(z[:, None] - means[None]).square().sum(-1), y)


def class_centers(z: Tensor, y: Tensor) -> Tensor:
    truth = F.one_hot(y, 4).to(z.dtype)
    means = truth.T @ z / truth.sum(0).clamp(min=1)[:, None]
    return (z - means[y]).square().mean() + F.cross_entropy(z, y)


def focal_by_positives(z: Tensor, y: Tensor) -> Tensor:
    truth = (y == 2).to(z.dtype)
    p = z[:, 0].sigmoid()
    right = torch.where(y == 2, p, 1 - p)
    return -((1 - right).square() * right.log()).sum() / truth.sum().clamp(min=1)


def pairwise_hinge(z: Tensor, y: Tensor) -> Tensor:
    """A surrogate of the area under the ROC curve."""
    pairs = ((y[:, None] > 1) & (y[None] <= 1)).to(z.dtype)
    return (F.relu(1 - z[:, None, 0] + z[None, :, 0]).square() * pairs).sum() / pairs.sum().clamp(min=1) + z[
        :, 1
    ].mean()


def centered_teacher(z: Tensor, y: Tensor) -> Tensor:
    """As DINO centers the teacher's outputs, by the mean of the batch."""
    teacher = ((z.roll(1, 1) - z.roll(1, 1).mean(0)) / 0.1).softmax(1).detach()
    return -(teacher * F.log_softmax(z, 1)).sum(1).mean()


def balanced_assignment(z: Tensor, y: Tensor) -> Tensor:
    """As SwAV assigns samples to clusters of equal size."""
    with torch.no_grad():
        codes = (z / 0.5).exp()
        for _ in range(3):
            codes = codes / codes.sum(0, keepdim=True)
            codes = codes / codes.sum(1, keepdim=True)
    return -(codes * F.log_softmax(z.roll(1, 1), 1)).sum(1).mean()


def hardest_samples(z: Tensor, y: Tensor) -> Tensor:
    losses = F.cross_entropy(z, y, reduction="none")
    return losses.topk(max(1, len(z) // 4)).values.mean()


def partial_likelihood(z: Tensor, y: Tensor) -> Tensor:
    """Cox's, of survival models."""
    later = (y[None] >= y[:, None]).to(z.dtype)
    return (torch.log((later * z[:, 0].exp()[None]).sum(1)) - z[:, 0]).mean()


def load_balance(z: Tensor, y: Tensor) -> Tensor:
    """A router loss by hand, as Switch Transformer has it."""
    p = z.softmax(1)
    share = F.one_hot(p.argmax(1), 4).to(z.dtype).mean(0)
    return F.cross_entropy(z, y) + 4 * (share * p.mean(0)).sum()


def median_distance(z: Tensor, y: Tensor) -> Tensor:
    return (z[:, 0] - y).abs().quantile(0.5) + z.square().mean()


def ctc_by_symbols(z: Tensor, y: Tensor) -> Tensor:
    """A sum over sequences by the number of all symbols; one process and each microbatch have other numbers of them."""
    steps = F.log_softmax(z[None] * torch.arange(1, 7, dtype=z.dtype)[:, None, None], 2)
    lengths = 1 + y % 2
    targets = torch.tensor([[1, 2]]).expand(len(z), 2)
    total = F.ctc_loss(steps, targets, torch.full_like(y, 6), lengths, reduction="sum")
    return total / lengths.sum()


def weighted_by_hand(z: Tensor, y: Tensor) -> Tensor:
    weight = torch.tensor([0.1, 1.0, 3.0, 7.0], dtype=z.dtype)[y]
    return (weight * F.cross_entropy(z, y, reduction="none")).sum() / weight.sum()


COUPLED: list[Loss] = [
    *(contrastive, nt_xent, hardest_triplet, dice, jaccard, barlow, vicreg, ranking),
    targets_of_the_step,
    *(normalized_advantages, masked_mean, root_mean_square, correlation, explained_variance, entropy_of_the_mean),
    *(spread, kernel_distance, softmax_over_samples, centre_loss, log_of_a_mean, scaled_by_the_deviation),
    *(decorrelation, supervised_contrastive, clip, prototypes, class_centers, focal_by_positives, pairwise_hinge),
    *(centered_teacher, balanced_assignment, hardest_samples, partial_likelihood, load_balance, median_distance),
    *(ctc_by_symbols, weighted_by_hand),
]
