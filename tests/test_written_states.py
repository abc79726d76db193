"""State that a forward writes from the batch: seen in the first step where microbatches make it another."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.pool import Pools
from tests.training_jobs import Result, together, train

SAMPLES, STEPS, WIDTH = 8, 3, 6


class Writes(nn.Module):
    """A layer with a state, which begins as zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("state", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x).tanh()
        if self.training:
            self.write(x.detach())
        return x

    def write(self, x: Tensor) -> None:
        raise NotImplementedError


class RunningMean(Writes):
    def write(self, x: Tensor) -> None:
        self.state.mul_(0.9).add_(0.1 * x.mean(0))


class ReplacedMean(Writes):
    """The same in an assignment."""

    def write(self, x: Tensor) -> None:
        self.state = 0.9 * self.state + 0.1 * x.mean(0)


class Codebook(Writes):
    """Codes that move to the mean of the inputs that are closest to them (VQ-VAE, van den Oord et al., 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.linspace(-1, 1, 4)[:, None].repeat(1, WIDTH))

    def write(self, x: Tensor) -> None:
        mine = F.one_hot(torch.cdist(x, self.codes).argmin(1), 4).to(x)
        means = mine.T @ x / mine.sum(0)[:, None].clamp(min=1)
        self.codes.lerp_(torch.where(mine.sum(0)[:, None] > 0, means, self.codes), 0.2)


class Quantile(Writes):
    """A tensor in an attribute that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.median = torch.zeros(WIDTH, dtype=torch.float64)

    def write(self, x: Tensor) -> None:
        self.median += 0.1 * (x.median(0).values - self.median)


class Sum(Writes):
    def write(self, x: Tensor) -> None:
        self.state += x.sum(0)


class Largest(Writes):
    def write(self, x: Tensor) -> None:
        self.state.copy_(torch.maximum(self.state, x.amax(0)))


class Queue(Writes):
    """The last samples, in a ring (MoCo, He et al., 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ring", torch.zeros(4 * SAMPLES, WIDTH))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def write(self, x: Tensor) -> None:
        places = (self.place + torch.arange(len(x))) % len(self.ring)
        self.ring[places] = x
        self.place.add_(len(x)).remainder_(len(self.ring))


class Counter(Writes):
    """How many samples there were, and the last batch, which is no state."""

    def write(self, x: Tensor) -> None:
        self.state += len(x)
        self.last = x


class Net(LightningModule):
    def __init__(self, layer: type[Writes], *, is_chain: bool) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            layers = [nn.Linear(WIDTH, WIDTH), layer(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)]
        self.body = nn.Sequential(*layers) if is_chain else nn.ModuleList(layers)
        self.double()

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        for layer in [self.body] if isinstance(self.body, nn.Sequential) else self.body:
            x = layer(x)
        return F.cross_entropy(x, y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.2)


def trained(
    layout: dict[str, Any] | None, layers: list[type[Writes]], is_chain: bool
) -> list[tuple[Result, list[str]]]:
    """Train a module with each layer; return the results and the warnings about states."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS * SAMPLES, WIDTH, dtype=torch.float64, generator=generator)
    y = torch.randint(0, 3, (len(x),), generator=generator)
    found = []
    for layer in layers:
        data = DataLoader(TensorDataset(x, y), SAMPLES)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = train(Net(layer, is_chain=is_chain), layout, data, precision="64-true")
        texts = [str(each.message) for each in caught if "values that depend on the batch" in str(each.message)]
        found.append((result, texts))
    return found


DIFFERENT = [RunningMean, ReplacedMean, Codebook, Quantile]
ALIKE = [Sum, Largest, Queue, Counter]


def texts_of(results: list[Any]) -> list[list[str]]:
    """What the ranks said of each layer."""
    return [[text for _, texts in of_ranks for text in texts] for of_ranks in zip(*results, strict=True)]


def assert_equal(ranks: Pools, layout: dict[str, Any], layers: list[type[Writes]], is_chain: bool) -> list[list[str]]:
    size = layout.get("pipeline_parallel_size", 1)
    results = ranks(size, lightning=True).run(trained, layout, layers, is_chain)
    for layer, (expected, _), *of_ranks in zip(layers, trained(None, layers, is_chain), *results, strict=True):
        found = together([result.weights for result, _ in of_ranks])
        for name, value in expected.weights.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-10, msg=f"{layer.__name__}: {name}")
    return texts_of(results)


@pytest.mark.parametrize("is_chain", [True, False], ids=["chain", "list"])
def test_a_state_that_microbatches_change_takes_one(ranks: Pools, is_chain: bool) -> None:
    for said in assert_equal(ranks, {"pipeline_parallel_size": 2}, DIFFERENT, is_chain):
        assert len(said) == 1
        assert "'body.1." in said[0]
        assert "one microbatch instead of 8" in said[0]


@pytest.mark.parametrize("is_chain", [True, False], ids=["chain", "list"])
def test_a_state_that_is_the_same_is_not_told(ranks: Pools, is_chain: bool) -> None:
    assert assert_equal(ranks, {"pipeline_parallel_size": 2}, ALIKE, is_chain) == [[]] * len(ALIKE)


class Contrast(Queue):
    """Samples are compared with those in the queue before they are put there, as in MoCo."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x).tanh()
        compared = x - (x @ self.ring.clone().T).softmax(1) @ self.ring.clone()
        if self.training:
            self.write(x.detach())
        return compared


@pytest.mark.parametrize("is_chain", [True, False], ids=["chain", "list"])
def test_a_queue_that_the_loss_uses_takes_one_microbatch(ranks: Pools, is_chain: bool) -> None:
    ((said,),) = assert_equal(ranks, {"pipeline_parallel_size": 2}, [Contrast], is_chain)
    assert "The loss of the second microbatch depends on the state" in said
    assert "one microbatch instead of 8" in said


@pytest.mark.parametrize("layout", [{"num_microbatches": 4}, {"num_microbatches": 4, "pipeline_parallel_size": 2}])
def test_a_number_that_was_set_is_kept(ranks: Pools, layout: dict[str, Any]) -> None:
    size = layout.get("pipeline_parallel_size", 1)
    results = ranks(size, lightning=True).run(trained, layout, DIFFERENT, True)
    for said in texts_of(results):
        assert len(said) == 1
        assert "With the 4 microbatches that you set, the state is updated once for each microbatch" in said[0]
