"""Calls on loggers and `self.print` in a step are made on rank 0, with what the last stage says."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from torch import Tensor

from lightning_hybrid.trainer.results.logger_proxy import LoggerProxy
from tests.pool import Pools
from tests.test_logging_features import Memory
from tests.training_jobs import LAYOUTS, PP2, Regression, assert_same, loader, make_trainer

Layout = Mapping[str, Any] | None


class Album(Memory):
    """A logger whose experiment has methods, parts and items, as those of services have."""

    def __init__(self) -> None:
        super().__init__()
        self.pages: list[Any] = []

    @property
    def save_dir(self) -> str:
        return "album"

    def log_image(self, key: str, images: list[Any], step: int | None = None) -> None:
        self.pages.append(("log_image", key, [image.clone() for image in images], step))

    def add_text(self, tag: str, text: str) -> None:
        self.pages.append(("add_text", tag, text))

    @property
    def config(self) -> Album:
        return self

    def __getitem__(self, key: str) -> Any:
        return functools.partial(self.add_text, key)

    def __setitem__(self, key: str, value: Any) -> None:
        self.pages.append(("item", key, value))


class Illustrated(Regression):
    """Writes before and after the body, in the ways that loggers have."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.shared(batch, batch_idx, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.shared(batch, batch_idx, "val")

    def shared(self, batch: Any, batch_idx: int, stage: str) -> Tensor:
        x, y = batch
        assert isinstance(self.logger, Album)
        assert self.logger.save_dir == "album"
        self.logger.log_metrics({f"{stage}_mean": float(x.mean())}, self.global_step)
        prediction = self(x)
        self.logger.log_image(f"{stage}_prediction", [prediction], step=self.global_step)
        self.logger.experiment.add_text(stage, f"batch {batch_idx}")
        self.loggers[1].experiment.config.add_text("nested", "text")
        self.loggers[1].experiment["item"]("called")
        self.logger.experiment["kept"] = {"numbers": [1, prediction.sum().detach()]}
        loss = torch.nn.functional.mse_loss(prediction, y)
        self.print(stage, batch_idx, sep=":", end=";")
        return loss


def written(layout: Layout, batch_size: int, function: str, **arguments: Any) -> Any:
    loggers: list[Logger] = [Album(), Album()]
    trainer = make_trainer(layout, logger=loggers, num_sanity_val_steps=0, **arguments)
    module = Illustrated()
    lines: list[str] = []
    stdout = sys.stdout
    sys.stdout = type("Lines", (), {"write": lambda self, text: lines.append(text), "flush": lambda self: None})()
    try:
        getattr(trainer, function)(module, loader(batch_size, 20))
    finally:
        sys.stdout = stdout
    text = "".join(part for part in "".join(lines).split(";") if part.startswith(("train", "val")))
    return [(logger.pages, logger.history) for logger in loggers], text, trainer.loggers == loggers


@pytest.mark.rows(76)
@pytest.mark.parametrize("name", LAYOUTS)
def test_calls_in_evaluation_are_those_of_one_process(ranks: Pools, name: str) -> None:
    size, replicas, layout = LAYOUTS[name]
    first, *others = ranks(size, lightning=True).run(written, layout, 5, "validate")
    if replicas == 1:
        assert_same(first, written(None, 5, "validate"))
    assert len(first[0][0][0]) > 0, "this test is about calls"
    for pages, text, restored in others:
        assert [page for page, _ in pages] == [[], []]
        assert text == ""
        assert restored


@pytest.mark.rows(76)
def test_calls_in_training_are_made_for_each_microbatch_in_order(ranks: Pools) -> None:
    layout = {**PP2, "num_microbatches": 2}
    (pages, text, restored), other = ranks(2, lightning=True).run(
        functools.partial(written, max_steps=2), layout, 4, "fit"
    )
    (expected, _), _ = written(None, 4, "fit", max_steps=2)[0]
    ours = [page for page in pages[0][0] if page[0] == "log_image"]
    theirs = [page for page in expected if page[0] == "log_image"]
    assert restored
    assert [page[3] for page in ours] == [0, 0, 1, 1]
    joined = [torch.cat([ours[i][2][0], ours[i + 1][2][0]]) for i in (0, 2)]
    assert_same(joined, [page[2][0] for page in theirs])
    assert text == "train:0train:0train:1train:1"
    assert other[0][0][0] == []


def images_and_text(layout: Layout, directory: str) -> list[str]:
    class Pictures(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            for logger in self.loggers:
                if isinstance(logger, TensorBoardLogger):
                    logger.experiment.add_image("image", torch.rand(3, 4, 4), self.global_step)
                    logger.experiment.add_text("text", "hello", self.global_step)
                elif isinstance(logger, CSVLogger):
                    logger.log_metrics({"by_hand": float(loss)}, self.global_step)
            return loss

    loggers = [TensorBoardLogger(directory), CSVLogger(directory)]
    trainer = make_trainer(layout, logger=loggers, max_steps=2, log_every_n_steps=1)
    trainer.fit(Pictures(), loader(4))
    return [logger.log_dir for logger in loggers]


@pytest.mark.rows(76)
def test_images_text_and_metrics_reach_the_files_of_real_loggers(ranks: Pools, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (events, table), _ = ranks(2, lightning=True).run(images_and_text, PP2, str(tmp_path))
    (file,) = Path(events).glob("events*")
    accumulator = EventAccumulator(str(file)).Reload()
    assert accumulator.Tags()["images"] == ["image"]
    assert accumulator.Tags()["tensors"] == ["text/text_summary"]
    assert "by_hand" in (Path(table) / "metrics.csv").read_text()


class Unportable(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.logger.log_image("x", [lambda: None])
        return loss


def refused(layout: Layout) -> str:
    trainer = make_trainer(layout, logger=Album())
    with pytest.raises((TypeError, RuntimeError)) as caught:
        trainer.fit(Unportable(), loader())
    return str(caught.value)


def test_an_argument_that_cannot_travel_is_an_error_on_every_rank(ranks: Pools) -> None:
    for text in ranks(2, lightning=True).run(refused, PP2):
        assert "cannot be sent to rank 0, because it cannot be pickled" in text
        assert "Pass tensors, arrays, numbers, text or figures." in text


@pytest.mark.parametrize("read", [str, os.fspath, "{}".format, Path, list, lambda value: "x" in value])
def test_a_value_of_an_experiment_is_not_to_be_had_in_a_step(read: Any) -> None:
    trainer: Any = SimpleNamespace(loggers=[Album()])
    module: Any = SimpleNamespace(trainer=trainer)
    recorder: Any = SimpleNamespace(counts=True)
    calls = LoggerProxy(module, recorder, is_source=True)
    with calls() as found:
        experiment = trainer.loggers[0].experiment
        assert experiment.run, "experiments are asked whether they are there"
        text = r"`self\.logger\.experiment\.run\['id'\]` has no value in a step.*in a hook"
        if read is Path and sys.version_info >= (3, 12):  # it takes every `TypeError` for its own
            text = "argument should be a str"
        with pytest.raises(TypeError, match=text):
            read(experiment.run["id"])
    assert found == []
