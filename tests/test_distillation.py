"""A frozen teacher and its student, each a list of layers: both are divided, equal to one process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid.pipeline_parallel.body import find_body
from tests.pool import Pools
from tests.training_jobs import Result, assert_same, make_trainer, together, train

BATCH = 12


class Sizes(NamedTuple):
    """Width and number of layers of both; whether they are Sequentials that the step calls, or lists."""

    teacher: tuple[int, int] = (16, 6)
    student: tuple[int, int] = (8, 4)
    is_called: bool = False
    names: tuple[str, str] = ("teacher", "student")


LARGE, SMALL, TINY = Sizes(), Sizes((8, 4), (16, 5)), Sizes((16, 4), (4, 4), is_called=True)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return out


class Distillation(LightningModule):
    """The student learns from labels, from what its teacher says and from what each does in its middle; in float64."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        with torch.random.fork_rng():
            torch.manual_seed(3)
            for name, (width, number) in zip(sizes.names, sizes[:2], strict=True):
                blocks = [Block(width) for _ in range(number)]
                setattr(self, name, nn.Sequential(*blocks) if sizes.is_called else nn.ModuleList(blocks))
                setattr(self, f"{name}_ends", nn.ModuleList([nn.Linear(6, width), nn.Linear(width, 3)]))
        for name in (sizes.names[0], f"{sizes.names[0]}_ends"):
            getattr(self, name).requires_grad_(False)
        self.double()

    def run_layers(self, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the result of a network, and the mean of what is in its middle."""
        first, last = getattr(self, f"{name}_ends")
        x, layers = first(x), getattr(self, name)
        if self.sizes.is_called:
            return last(layers(x)), x.mean(1)
        for number, layer in enumerate(layers):
            x = layer(x)
            if number == len(layers) // 2:
                middle = x.mean(1)
        return last(x), middle

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        teacher, student = self.sizes.names
        with torch.no_grad():
            taught, middle = self.run_layers(teacher, x)
        result, own_middle = self.run_layers(student, x)
        loss = F.mse_loss(result, taught) + F.mse_loss(result[:, :1], y) + 0.1 * F.mse_loss(own_middle, middle)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        results = [self.run_layers(name, batch[0])[0] for name in self.sizes.names]
        self.log("distance", F.mse_loss(*results), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=1e-2)


def trained(sizes: Sizes, layout: Mapping[str, Any] | None, replicas: int = 1) -> Result:
    """Train with validation on the same samples."""
    x = torch.randn(48, 6, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), BATCH // replicas)
    return train(Distillation(sizes), layout, data, data, max_epochs=2)


def layers_of(held: Iterable[str], name: str) -> set[str]:
    return {path.split(".")[1] for path in held if path.startswith(f"{name}.")}


PP2 = {"pipeline_parallel_size": 2, "num_microbatches": 3}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("sizes", "size", "layout"),
    [
        (LARGE, 2, PP2),
        (SMALL, 2, PP2 | {"body": ["teacher", "student"]}),
        (TINY, 2, PP2),
        (LARGE, 4, PP2),
        (TINY, 4, PP2 | {"zero_stage": 2}),
        (LARGE, 2, PP2 | {"num_chunks": 2, "num_microbatches": 4}),
    ],
)
def test_both_are_divided_and_train_as_in_one_process(
    ranks: Pools, sizes: Sizes, size: int, layout: dict[str, Any]
) -> None:
    expected = trained(sizes, None)
    results = ranks(size, lightning=True).run(trained, sizes, layout, size // 2)
    for result in results:
        assert_same(result.metrics, expected.metrics)
        for name, (_, number) in zip(sizes.names, sizes[:2], strict=True):
            assert 0 < len(layers_of(result.held, name)) < number
    assert_same(together([result.weights for result in results]), expected.weights)


class Loops(Distillation):
    """Loops over the layers of its Sequentials."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.sizes = self.sizes._replace(is_called=False)
        return super().training_step(batch, batch_idx)


def refusal_of_loop(sizes: Sizes) -> str:
    data = DataLoader(TensorDataset(torch.randn(12, 6).double(), torch.randn(12, 1).double()), BATCH)
    with pytest.raises(ValueError, match="one by one") as caught:
        make_trainer(PP2 | {"body": "student"}).fit(Loops(sizes), data)
    return str(caught.value)


@pytest.mark.distributed
def test_a_loop_over_the_layers_of_a_named_one_is_told_to_name_both(ranks: Pools) -> None:
    sequentials = Sizes(is_called=True)
    for text in ranks(2, lightning=True).run(refusal_of_loop, sequentials):
        assert "body=['student', 'teacher']" in text


def rows_of(sizes: Sizes, num_stages: int, **arguments: Any) -> list[str]:
    """Return the rows of layers, as text: ``s0 t0 t1``."""
    body = find_body(Distillation(sizes), None, num_stages, **arguments)
    names = iter(f"{name[0]}{name.rpartition('.')[2]}" for name in body.names)
    return [" ".join(next(names) for _ in range(number)) for number in body.rows]


def test_layers_of_the_teacher_are_dealt_out_over_those_that_are_trained() -> None:
    assert rows_of(LARGE, 2) == ["s0 t0 t1", "s1 t2", "s2 t3 t4", "s3 t5"]
    assert rows_of(SMALL, 2) == ["s0 t0", "s1 t1", "s2 t2", "s3 t3", "s4"]
    assert rows_of(Sizes((8, 2), (16, 5)), 2) == ["s0", "s1", "s2", "s3", "s4"]  # it stays whole
    assert rows_of(TINY, 4) == ["s0 t0", "s1 t1", "s2 t2", "s3 t3"]
    assert rows_of(LARGE, 6) == ["s0 t0", "s1 t1", "t2", "s2 t3", "s3 t4", "t5"]
    assert rows_of(LARGE, 2, spreads=False) == ["s0", "s1", "s2", "s3", *(f"t{number}" for number in range(6))]


def test_a_frozen_encoder_stays_before_what_takes_its_results() -> None:
    body = find_body(Distillation(Sizes((16, 6), (12, 4), names=("encoder", "decoder"))), None, 2)
    assert [name.partition(".")[0] for name in body.names] == ["encoder"] * 6 + ["decoder"] * 4
    assert set(body.rows) == {1}
