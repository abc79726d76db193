"""Random numbers: equal on the ranks of a model group, different between replicas, unnoticed outside of steps."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from torch import Tensor, nn

from lightning_hybrid import Faults
from lightning_hybrid.torch_internals import FakeTensor
from tests.pool import Pools
from tests.training_jobs import LAYOUTS, PP2, Losses, Regression, assert_same, loader, make_trainer, train

Layout = Mapping[str, Any] | None
PP2_DP2 = LAYOUTS["pp2 x dp2"][2]
Draw = tuple[float, float, float]


def draw() -> Draw:
    return torch.rand(()).item(), float(np.random.rand()), random.random()


class Kept:
    """A list that stays what it is on each rank, as it is no plain value; a step that is followed leaves it alone."""

    def __init__(self) -> None:
        self.values: list[Draw] = []

    def append(self, value: Draw) -> None:
        self.values.append(value)


class Draws(Regression):
    """Draws in its steps before and after the body, and in its layers."""

    def __init__(self) -> None:
        super().__init__()
        self._before, self._after = Kept(), Kept()
        for index, layer in enumerate(self.body):
            layer.append(Noisy(index))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self._before.append(draw())
        prediction = self(x + torch.randn_like(x))
        self._after.append(draw())
        return nn.functional.mse_loss(prediction, y + torch.randn_like(y))

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.training_step(batch, batch_idx)


class Noisy(nn.Module):
    """Draws when it runs."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.draws: list[Draw] = []

    def forward(self, x: Tensor) -> Tensor:
        self.draws.append(draw())
        return x


def drawn(layout: Layout, seed: int, repeat: int = 1) -> dict[str, Any]:
    """What one rank draws; the last of several times in this process."""
    result: dict[str, Any] = {}
    for _ in range(repeat):
        seed_everything(seed, verbose=False)
        module = Draws()
        trained = train(module, layout, loader(8, 32), loader(8, 16), num_sanity_val_steps=0)
        result = {
            "before": module._before.values,
            "after": module._after.values,
            "layers": {layer[-1].index: layer[-1].draws for layer in module.body if layer[-1].draws},
            "losses": trained.losses,
            "weights": trained.weights,
        }
    return result


def test_noise_in_steps_is_equal_in_a_model_group_and_differs_between_replicas(ranks: Pools) -> None:
    results = ranks(4, lightning=True).run(drawn, PP2_DP2, 3)
    first, last = results[:2], results[2:]
    for replica in (0, 1):
        assert first[replica]["before"] == last[replica]["before"]
        assert first[replica]["after"] == []
        assert len(last[replica]["after"]) == len(last[replica]["before"]) == 2 * 3 + 1
    for column in (0, 1, 2):
        numbers = [found[column] for result in last for found in (*result["before"], *result["after"])]
        numbers += [found[column] for result in results for draws in result["layers"].values() for found in draws]
        assert len(set(numbers)) == len(numbers), "every microbatch, place, stage and replica draws its own numbers"


def test_noise_is_reproducible_and_depends_on_the_seed(ranks: Pools) -> None:
    pool = ranks(2, lightning=True)
    first, again, second, other = (
        pool.run(drawn, PP2, 3),
        pool.run(drawn, PP2, 3),
        pool.run(drawn, PP2, 3, 2),  # in a process that has trained before
        pool.run(drawn, PP2, 4),
    )
    for rank in (0, 1):
        assert_same(again[rank], first[rank], 0.0)
        assert_same(second[rank], first[rank], 0.0)
        assert other[rank]["before"] != first[rank]["before"]
        assert other[rank]["losses"] != first[rank]["losses"]


class Masks(Regression):
    """Drops in every layer; keeps which."""

    def __init__(self) -> None:
        super().__init__(dropout=0.5)


def dropped(layout: Layout, seed: int) -> dict[str, Any]:
    seed_everything(seed, verbose=False)
    module = Masks()
    masks: dict[int, list[list[bool]]] = {}

    def keep(index: int) -> Any:
        def hook(layer: nn.Module, inputs: Any, output: Tensor) -> None:
            if not isinstance(output, FakeTensor):  # without values when the step is followed
                masks.setdefault(index, []).append((output == 0).flatten().tolist())

        return hook

    for index, layer in enumerate(module.body):
        layer[2].register_forward_hook(keep(index))
    # The comparison of microbatches runs forwards without dropout, which hooks see too.
    result = train(module, {**layout, "faults": Faults(compare_microbatches=False)}, loader(8, 32))
    return {"masks": masks, "losses": result.losses}


@pytest.mark.rows(64, 72)
def test_dropout_differs_between_layers_stages_and_replicas_and_is_reproducible(ranks: Pools) -> None:
    results = ranks(4, lightning=True).run(dropped, PP2_DP2, 1)
    again = ranks(4, lightning=True).run(dropped, PP2_DP2, 1)
    assert results == again
    masks = [tuple(mask) for result in results for found in result["masks"].values() for mask in found]
    assert sum(len(result["masks"]) for result in results) == 12
    assert all(0.2 < sum(mask) / len(mask) < 0.8 for mask in masks)
    assert len(set(masks)) == len(masks)


class States(Callback):
    """The state of the global generators around steps."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.before: Any = None

    def _state(self) -> Any:
        return hash(torch.get_rng_state().numpy().tobytes()), str(np.random.get_state()), str(random.getstate())

    def on_train_epoch_start(self, *args: Any) -> None:
        self.before = None  # a loader draws a seed when an epoch begins

    def on_train_batch_start(self, *args: Any) -> None:
        torch.rand(1), np.random.rand(1), random.random()  # hooks at the start of a batch have numbers of their own

    def on_train_batch_end(self, *args: Any) -> None:
        before, self.before = self.before, self._state()
        if before is not None:
            self.values.append(before == self.before)

    on_validation_epoch_start = on_train_epoch_start
    on_validation_batch_start = on_train_batch_start
    on_validation_batch_end = on_train_batch_end


def untouched(layout: Layout) -> list[bool]:
    states = States()
    make_trainer(layout, callbacks=[states]).fit(Draws(), loader(8, 32), loader(8, 16))
    return states.values


def test_steps_do_not_touch_the_global_state(ranks: Pools) -> None:
    for size, layout in ((2, PP2), (4, PP2_DP2), (2, LAYOUTS["chunks 2"][2])):
        for result in ranks(size, lightning=True).run(untouched, layout):
            assert result
            assert all(result)


def noisy_resume(layout: Layout, path: str) -> tuple[list[float], list[float]]:
    seed_everything(3, verbose=False)
    straight, first, second = Losses(), Losses(), Losses()
    make_trainer(layout, max_epochs=2, callbacks=[straight]).fit(Masks(), loader(8, 32))
    trainer = make_trainer(layout, max_epochs=1, callbacks=[first])
    trainer.fit(Masks(), loader(8, 32))
    trainer.save_checkpoint(path)
    seed_everything(3, verbose=False)
    make_trainer(layout, max_epochs=2, callbacks=[second]).fit(Masks(), loader(8, 32), ckpt_path=path)
    return straight.values, [*first.values, *second.values]


def test_a_resumed_run_draws_what_the_uninterrupted_one_draws(ranks: Pools, tmp_path: Any) -> None:
    for straight, resumed in ranks(2, lightning=True).run(noisy_resume, PP2, str(tmp_path / "noisy.ckpt")):
        assert len(straight) == 8
        assert_same(resumed, straight)


@pytest.mark.rows(72)
@pytest.mark.parametrize("layout", [PP2])
def test_the_first_losses_of_two_runs_with_one_seed_are_equal(ranks: Pools, layout: dict[str, Any]) -> None:
    first, second = (ranks(2, lightning=True).run(dropped, layout, 5) for _ in range(2))
    assert first == second
    assert first[0]["losses"] == first[1]["losses"]
