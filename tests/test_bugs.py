"""One story for each bug that there has been."""

from __future__ import annotations

import functools
import pickle
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BackboneFinetuning, StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler

from tests.pool import Pools
from tests.training_jobs import (
    PP2,
    Regression,
    Result,
    assert_same,
    dataset,
    loader,
    make_trainer,
    together,
    train,
    users_trainer,
    weights,
)

Layout = Mapping[str, Any] | None
TASKS = Path("/proc/self/task")


def check_fit(ranks: Pools, job: Any, layout: Layout = PP2) -> None:
    """`job(layout)` has the losses and weights of one process on two ranks."""
    expected = job(None)
    results = ranks(2, lightning=True).run(job, layout)
    assert_same([result.losses for result in results], [expected.losses] * 2)
    assert_same(together([result.weights for result in results]), expected.weights)


class Uneven(Regression):
    """Microbatches of 1 and 7 samples, and a body whose input is divided in another way again."""

    def split_batch(self, batch: Any, num_microbatches: int) -> list[Any]:
        return [tuple(part[:1] for part in batch), tuple(part[1:] for part in batch)]

    def split_body_input(self, x: Tensor, num_microbatches: int) -> list[Tensor]:
        return [x[:3], x[3:4], x[4:]]

    def join_body_output(self, outputs: list[Tensor]) -> Tensor:
        return torch.cat(outputs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("logged", loss, sync_dist=True)
        return loss


def with_uneven_parts(layout: Layout) -> Result:
    return train(Uneven(), layout, loader(), max_steps=4)


def test_microbatches_of_the_users_own_count_by_their_samples(ranks: Pools) -> None:
    check_fit(ranks, with_uneven_parts)


def validated_with_uneven_parts(layout: Layout) -> Any:
    return make_trainer(layout).validate(Uneven(), loader(), verbose=False)


def test_body_inputs_may_be_divided_into_parts_of_any_shape(ranks: Pools) -> None:
    expected = validated_with_uneven_parts(None)
    assert_same(ranks(2, lightning=True).run(validated_with_uneven_parts, PP2), [expected, expected])


class Masked(Regression):
    """The mean over samples whose feature is positive: in some microbatches there are none."""

    def microbatch_weight(self, batch: Any) -> Tensor:
        return (batch[0][:, 0] > 0.4).sum()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        mask = x[:, 0] > 0.4
        return nn.functional.mse_loss(self(x)[mask], y[mask])


def with_empty_microbatches(layout: Layout) -> Result:
    return train(Masked(), layout, loader(), max_steps=4)


def test_a_microbatch_that_counts_nothing_does_not_spoil_the_loss(ranks: Pools) -> None:
    counts = [[int((part > 0.4).sum()) for part in batch[0][:, 0].chunk(4)] for batch in list(loader())[:4]]
    assert any(0 in count for count in counts), "this test is about empty ones"
    assert all(sum(count) > 0 for count in counts)
    check_fit(ranks, with_empty_microbatches)


class WeighsLater(Masked):
    """Says how microbatches are weighted when training begins."""

    microbatch_weight = None  # type: ignore[assignment]

    def on_train_start(self) -> None:
        self.microbatch_weight = functools.partial(Masked.microbatch_weight, self)


def weighted_later(layout: Layout) -> Result:
    return train(WeighsLater(), layout, loader(), max_steps=4)


def test_hooks_that_come_during_a_run_count(ranks: Pools) -> None:
    check_fit(ranks, weighted_later)


class Normalized(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.body[4] = nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8)).double()


def averaged_with_batch_norm(layout: Layout) -> Result:
    averaging = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)
    return train(Normalized(), layout, loader(), callbacks=[averaging], max_epochs=3)


@pytest.mark.rows(35)
def test_weight_averaging_runs_its_extra_epoch_without_gradients(ranks: Pools) -> None:
    layout = {**PP2, "num_microbatches": 1}  # statistics of whole batches, as in one process
    check_fit(ranks, averaged_with_batch_norm, layout)


class Backbone(Regression):
    @property
    def backbone(self) -> nn.Module:
        return self.body

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


def finetuned(layout: Layout) -> Result:
    finetuning = BackboneFinetuning(1, lambda _: 1.5, backbone_initial_lr=0.01)
    return train(Backbone(), layout, loader(), callbacks=[finetuning], max_epochs=3)


@pytest.mark.rows(36)
def test_the_body_can_be_unfrozen_by_a_callback(ranks: Pools) -> None:
    check_fit(ranks, finetuned)


class Extra(Regression):
    """A part of it keeps something that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.counter = Counter()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.counter.count += 1
        return self.loss(batch)


class Counter(nn.Module):
    count = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def resumed(layout: Layout, path: str) -> int:
    trainer = make_trainer(layout, max_steps=2)
    trainer.fit(Extra(), loader())
    trainer.save_checkpoint(path)
    module = Extra()
    make_trainer(layout, max_steps=3, max_epochs=2).fit(module, loader(), ckpt_path=path)
    return module.counter.count


@pytest.mark.parametrize("layout", [{}, {**PP2, "num_microbatches": 1}])
def test_extra_state_that_is_no_tensor_is_saved_and_loaded(ranks: Pools, layout: Layout, tmp_path: Any) -> None:
    size = 2 if layout else 1
    assert ranks(size, lightning=True).run(resumed, layout, str(tmp_path / "a.ckpt"))[-1] == 3


class Endless(Sampler[int]):
    """Has no length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(36))


def fitted_without_length(layout: Layout) -> int:
    trainer = make_trainer(layout, max_steps=3)
    trainer.fit(Regression(), DataLoader(dataset(), 4, sampler=Endless()))
    return trainer.global_step


def test_a_sampler_without_a_length_is_divided(ranks: Pools) -> None:
    assert ranks(2, lightning=True).run(fitted_without_length, {"data_parallel_size": 2}) == [3, 3]


class Peeking(Callback):
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module(torch.zeros(1, 6, dtype=torch.float64))


def peeked(layout: Layout) -> str:
    with pytest.raises(ValueError, match="layer") as caught:
        train(Regression(), layout, loader(), callbacks=[Peeking()])
    return str(caught.value)


def test_running_the_model_outside_of_steps_is_refused_with_what_to_do(ranks: Pools) -> None:
    for text in ranks(2, lightning=True).run(peeked, PP2):
        assert "Outside of a step, no rank can run the model. Use `trainer.predict`" in text


def validated_without_pipeline(layout: Layout) -> str:
    module = Regression()
    make_trainer({**(layout or {}), "gather_module_on_teardown": False}, max_steps=1).fit(module, loader())
    with pytest.raises(ValueError, match="layer") as caught:
        make_trainer(None).validate(module, loader(), verbose=False)
    return str(caught.value)


def test_a_divided_module_tells_a_trainer_without_a_pipeline_what_to_do(ranks: Pools) -> None:
    for text in ranks(2, lightning=True).run(validated_without_pipeline, PP2):
        assert "The module stays split after a run" in text
        assert "`trainer.strategy.gather_module()`" in text


class Skipping(DataLoader[Any]):
    """A loader that gives ``None`` in the middle."""

    def __iter__(self) -> Any:
        for number, batch in enumerate(super().__iter__()):
            yield batch
            if number == 1:
                yield None


def batches_seen(layout: Layout) -> int:
    from lightning_hybrid.trainer.dataloader import ComparedLoader

    return len(list(ComparedLoader(Skipping(dataset(), 12), torch.distributed.group.WORLD)))


def test_a_batch_that_is_none_is_not_the_end(ranks: Pools) -> None:
    assert ranks(2).run(batches_seen, None) == [4, 4]


class MixUp(Callback):
    """Mixes the samples of a batch in place: inputs on the first stage, targets on the last one."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        share, order = torch.rand(1, dtype=torch.float64), torch.randperm(len(batch[0]))
        batch[0].copy_(share * batch[0] + (1 - share) * batch[0][order])
        batch[1].copy_(share * batch[1] + (1 - share) * batch[1][order])
        self.drawn = [float(share), *map(float, order)]


def mixed(layout: Layout) -> Any:
    mix, state = MixUp(), torch.random.get_rng_state()
    losses = train(Regression(), layout, loader(), callbacks=[mix], max_steps=3).losses
    return losses, mix.drawn, torch.equal(torch.random.get_rng_state(), state)


def test_a_callback_that_mixes_samples_draws_the_same_on_every_stage(ranks: Pools) -> None:
    first, last = ranks(2, lightning=True).run(mixed, PP2)
    assert first[:2] == last[:2]
    assert first[1] == ranks(2, lightning=True).run(mixed, PP2)[0][1], "reproducible"
    assert last[2], "the ranks that do not load draw nothing outside"


def trained_again_and_again(layout: Layout) -> list[tuple[int, int]]:
    used = []
    for _ in range(3):
        make_trainer(layout, max_steps=1).fit(Regression(), loader())
        time.sleep(0.1)  # the system counts a thread for a moment after it has been joined
        used.append((len(list(TASKS.iterdir())), len(list(Path("/proc/self/fd").iterdir()))))
    return used


@pytest.mark.rows(71)
@pytest.mark.skipif(not TASKS.is_dir(), reason="counts threads and files as Linux tells them")
def test_trainers_in_one_process_share_groups(ranks: Pools) -> None:
    for used in ranks(2, lightning=True).run(trained_again_and_again, PP2):
        assert used[1] == used[2] == used[0]


class SwitchedOff(Regression):
    validation_step = None  # type: ignore[assignment]


def fitted_and_pickled(layout: Layout) -> Any:
    module = SwitchedOff()
    trainer = users_trainer(layout, max_steps=1)
    trainer.fit(module, loader())
    return weights(pickle.loads(pickle.dumps(module))), weights(module)


def test_a_step_that_is_none_and_a_module_pickled_after_a_run(ranks: Pools) -> None:
    for copied, mine in ranks(2, lightning=True).run(fitted_and_pickled, PP2):
        assert_same(copied, mine)


class NormInStep(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("head", self.head.weight.norm())  # every rank that runs steps has what is outside of the body
        self.log("weights", sum(p.norm() for p in self.parameters()))
        return self.loss(batch)


def norm_refused(layout: Layout) -> str:
    with pytest.raises((ValueError, RuntimeError)) as caught:
        train(NormInStep(), layout, loader(), max_steps=1)
    return str(caught.value)


def test_a_log_of_weights_that_live_elsewhere_is_refused_with_what_to_do(ranks: Pools) -> None:
    for text in ranks(2, lightning=True).run(norm_refused, PP2):
        assert "The value logged as 'weights' depends on parameters of layers on other stages" in text
        assert "with self.trainer.strategy.full_parameters():" in text


class NormInHook(Regression):
    """What that text says."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        strategy: Any = self.trainer.strategy
        self.log("gradients", strategy.grad_norm(), on_epoch=False, on_step=True)
        state = strategy.lightning_module_state_dict()
        if self.trainer.is_global_zero:
            norm = torch.stack([value.norm() for value in state.values()]).norm()
            self.log("weights", norm, rank_zero_only=True)


def logged_norm(layout: Layout) -> float:
    module = NormInHook()
    before = float(torch.stack([p.norm() for p in module.parameters()]).norm())
    trainer = make_trainer(layout, max_steps=1)
    trainer.fit(module, loader())
    assert trainer.callback_metrics["gradients"] > 0
    return float(trainer.callback_metrics.get("weights", before)) / before


def test_norms_can_be_logged_in_hooks(ranks: Pools) -> None:
    assert_same(ranks(2, lightning=True).run(logged_norm, PP2), [1.0, 1.0])


def followed(layout: Layout, module: Regression, batches: Any = None, **arguments: Any) -> Any:
    """What is logged, how many steps there were, and what the module has seen."""
    result = train(module, layout, *(batches or (loader(), loader(12))), log_every_n_steps=1, **arguments)
    return result.metrics, result.trainer.global_step, list(getattr(module, "seen", []))


def check_followed(ranks: Pools, job: Any, size: int = 2) -> None:
    """`job(layout)` is on all ranks of a pipeline what it is in one process."""
    expected = job(None)
    layout = {**PP2, "pipeline_parallel_size": size}
    assert_same(ranks(size, lightning=True).run(job, layout), [expected] * size)


class Popping(Regression):
    """Takes the targets out of the batch, as much code from the hub does."""

    def loss(self, batch: Any) -> Tensor:
        targets = batch.pop("targets")
        return nn.functional.mse_loss(self(batch["x"]), targets[:, :1])


def named(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    x, y = (torch.stack(part) for part in zip(*samples, strict=True))
    return {"x": x, "targets": y.repeat(1, 2 + int(x.sum() > 0))}  # not of one shape in all batches


def with_popped_targets(layout: Layout) -> Any:
    batches = [DataLoader(dataset(), size, collate_fn=named) for size in (12, 6)]
    return followed(layout, Popping(), batches)


def test_a_step_may_take_something_out_of_the_batch(ranks: Pools) -> None:
    check_followed(ranks, with_popped_targets)


class Stopping(Regression):
    """Ends training from a step, where the loss is known."""

    def __init__(self, step: str, at: int) -> None:
        super().__init__()
        self.step, self.at = step, at

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.stop("training_step")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.stop("validation_step")

    def stop(self, step: str) -> None:
        if step == self.step and self.trainer.global_step >= self.at:
            self.trainer.should_stop = True


def stopped(layout: Layout) -> Any:
    modules = Stopping("training_step", 2), Stopping("training_step", 7), Stopping("validation_step", 5)
    return [followed(layout, module, max_epochs=4) for module in modules]


def test_a_step_may_end_training(ranks: Pools) -> None:
    check_followed(ranks, stopped)
    assert [steps for _, steps, _ in stopped(None)] == [3, 8, 5]


class Saving(Regression):
    """Asks where to put its pictures, as Lightning's documentation of `Trainer.log_dir` shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        directory = self.trainer.log_dir
        loss = self.loss(batch)
        assert directory == self.trainer.log_dir
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        if batch_idx == 0:
            self.seen.append(str(self.trainer.log_dir))


def asked_for_log_dir(layout: Layout, path: str) -> list[Any]:
    loggers = [False, CSVLogger(path, version="v"), TensorBoardLogger(path, version="t")]
    return [followed(layout, Saving(), default_root_dir=path, logger=logger, max_steps=2) for logger in loggers]


def test_a_step_may_ask_for_the_directory_of_logs(ranks: Pools, tmp_path: Path) -> None:
    check_followed(ranks, functools.partial(asked_for_log_dir, path=str(tmp_path)))


COLLECTIVES: dict[str, Any] = {
    "barrier": lambda trainer: trainer.strategy.barrier(),
    "broadcast": lambda trainer: trainer.strategy.broadcast("text"),
    "lightning_module_state_dict": lambda trainer: trainer.save_checkpoint("never.ckpt"),
}


class Meeting(Regression):
    """Waits for all ranks in a step."""

    def __init__(self, name: str, before: bool) -> None:
        super().__init__()
        self.name, self.before = name, before

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.before:
            COLLECTIVES[self.name](self.trainer)
        self.loss(batch)
        COLLECTIVES[self.name](self.trainer)


def met(layout: Layout, name: str, before: bool) -> str:
    with pytest.raises(ValueError, match="step") as caught:
        make_trainer(layout).fit(Meeting(name, before), loader(), loader())
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "before"), [("barrier", True), ("broadcast", False), ("lightning_module_state_dict", False)]
)
def test_calls_that_need_every_rank_are_refused_in_a_step(ranks: Pools, name: str, before: bool) -> None:
    for text in ranks(2, lightning=True).run(met, PP2, name, before):
        assert text.startswith(f"`strategy.{name}` was called in a step")
        assert "Call it in a hook" in text


class Deciding(Regression):
    """Its hooks do what its steps have decided."""

    improved = False

    def __init__(self) -> None:
        super().__init__()
        self.best, self.steps, self.worst, self.note = float("inf"), 0, None, "none yet"
        self.seen: list[Any] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = float(self.loss(batch))
        self.steps += 1
        self.improved = loss < self.best
        if self.improved:
            self.best, self.note = loss, f"{loss:.2g}"
        self.worst = None if self.improved else 2**60 + self.steps  # type: ignore[assignment]

    def on_validation_batch_end(self, *args: Any) -> None:
        if self.improved:
            self.log("best", self.best)
        self.seen.append([self.improved, self.best, self.steps, self.worst, self.note])
        self.improved = False


def decided(layout: Layout) -> Any:
    return followed(layout, Deciding(), max_epochs=2)


def test_a_hook_may_log_what_a_step_has_decided(ranks: Pools) -> None:
    assert {entry[0] for entry in decided(None)[2]} == {False, True}, "both happen"
    check_followed(ranks, decided, size=3)


class History(nn.Module):
    """A loss that keeps what it has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[Tensor] = []

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        self.values.append(nn.functional.mse_loss(prediction, target))
        return self.values[-1]


class Keeping(Regression):
    """Counts in a buffer, and lets its loss keep what the end of the epoch needs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("signs", torch.zeros(2, 2, dtype=torch.float64))
        self.history = History()
        self.seen: list[Any] = []

    def on_validation_epoch_start(self) -> None:
        self.signs.zero_()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        prediction = self(batch[0])
        self.history(prediction, batch[1])
        self.signs += torch.bincount((prediction > 0).long().add(2 * (batch[1] > 0)).view(-1), minlength=4).view(2, 2)

    def on_validation_epoch_end(self) -> None:
        self.log("accuracy", self.signs.diag().sum() / self.signs.sum())
        self.log("loss", torch.stack(self.history.values).mean())
        self.seen.append([self.signs.clone(), len(self.history.values)])
        self.history.values.clear()


def kept(layout: Layout) -> Any:
    return followed(layout, Keeping(), max_epochs=2)


def test_buffers_and_what_a_loss_keeps_reach_the_end_of_the_epoch(ranks: Pools) -> None:
    check_followed(ranks, kept)


class Penalized(Regression):
    """Asks for the values of all parameters, which no stage has."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def penalty(self) -> Any:
        return sum(parameter.abs().sum() for parameter in self.parameters())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if self.where == "log":
            self.log("penalty", self.penalty())
        return loss + 1e-3 * self.penalty() if self.where == "loss" else loss

    def on_train_batch_end(self, *args: Any) -> None:
        if self.where == "reads":
            float(next(iter(self.body[0].parameters())).norm() + self.body[5][0].weight.norm())
        if self.where == "hook":
            self.log("last", self.body[5][0].weight.norm())  # the last stage has it
            self.log("penalty", self.penalty())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.where == "norms":  # of what has a gradient, as many write it
            self.log("norm", torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]).norm())


def penalized(layout: Layout, where: str) -> str:
    with pytest.raises(ValueError, match="stage") as caught:
        make_trainer(layout, max_steps=1).fit(Penalized(where), loader())
    return str(caught.value)


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("loss", ["The loss of `training_step` depends on parameters of layers on", "`weight_decay`"]),
        ("log", ["The value logged as 'penalty' depends on parameters", "`self.device`"]),
        ("hook", ["The value logged as 'penalty' depends on parameters", "`self.device`"]),
        ("reads", ["The tensor in the `float` call depends on parameters", "`if not p.is_meta`"]),
        ("norms", ["The result of `stack` depends on parameters", "`self.trainer.strategy.grad_norm()`"]),
    ],
)
def test_values_of_all_parameters_are_refused_with_what_to_use(ranks: Pools, where: str, words: list[str]) -> None:
    for text in ranks(2, lightning=True).run(penalized, PP2, where):
        assert all(word in text for word in words), text


class Probing(Regression):
    """The body is not trained in the first epoch, by switching gradients off around it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        with torch.set_grad_enabled(self.current_epoch >= 1):
            h = self.body(self.embed(x))
        return nn.functional.mse_loss(self.head(h), y)


def probed(layout: Layout) -> Result:
    return train(Probing(), layout, loader(), max_epochs=2)


def refused_to_probe(layout: Layout) -> str:
    with pytest.raises((ValueError, RuntimeError), match="requires_grad") as caught:
        probed(layout)
    return str(caught.value)


def test_gradients_may_be_switched_on_later_with_dynamic_shapes(ranks: Pools) -> None:
    check_fit(ranks, probed, {**PP2, "dynamic_shapes": True})
    for text in ranks(2, lightning=True).run(refused_to_probe, PP2):
        assert "`torch.set_grad_enabled`), set HybridStrategy(dynamic_shapes=True)" in text


class Drawn(Regression):
    """Draws its parameters, as many do."""

    def on_train_epoch_end(self) -> None:
        assert isinstance(self.logger, TensorBoardLogger)
        for name, parameter in self.named_parameters():
            self.logger.experiment.add_histogram(name, parameter, self.current_epoch)
            self.logger.experiment.add_scalar(f"norm of {name}", parameter.norm(), self.current_epoch)


def drawn(layout: Layout, directory: str) -> list[str]:
    from torch.utils.tensorboard import SummaryWriter

    trainer = make_trainer(layout, logger=TensorBoardLogger(directory), max_epochs=2)
    method = SummaryWriter.add_histogram
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Drawn(), loader())
    assert SummaryWriter.add_histogram is method
    return [str(warning.message) for warning in caught if "p.is_meta" in str(warning.message)]


def test_no_random_numbers_are_drawn_for_parameters_of_other_stages(ranks: Pools, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first, last = ranks(2, lightning=True).run(drawn, PP2, str(tmp_path))
    assert [len(first), len(last)] == [1, 0], "one warning, where there is a writer"
    events = EventAccumulator(str(next(tmp_path.rglob("version_0"))), {"histograms": 0, "scalars": 0}).Reload()
    others = "body.3", "body.4", "body.5", "head"
    mine = {name for name, _ in Regression().named_parameters() if not name.startswith(others)}
    assert set(events.Tags()["histograms"]) == mine
    assert {f"norm of {name}" for name in mine} <= set(events.Tags()["scalars"])
    assert not any("body.3" in tag for tag in events.Tags()["scalars"])


def profiled(layout: Layout, directory: str) -> int:
    for _ in range(3):
        trainer = make_trainer(layout, profiler="pytorch", default_root_dir=directory)
        trainer.fit(Regression(), loader(), loader(8, 20, seed=2))
    return trainer.global_step


@pytest.mark.rows(65)
def test_torchs_profiler_outlives_no_message(ranks: Pools, tmp_path: Path) -> None:
    """A send that was still pending when the profiler ended a cycle wrote into that cycle, and the process died."""
    assert ranks(2, lightning=True).run(profiled, PP2, str(tmp_path)) == [5, 5]


class SkipsRest(Regression):
    """Ends each epoch early, from the hook in which random numbers are the model group's."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 else None


def skipped(layout: Layout) -> Result:
    with torch.random.fork_rng():
        torch.manual_seed(11)
        return train(SkipsRest(), layout, loader(shuffle=True), max_epochs=3)


def test_an_epoch_that_ends_in_a_hook_leaves_the_order_of_the_next_one_alone(ranks: Pools) -> None:
    check_fit(ranks, skipped)
