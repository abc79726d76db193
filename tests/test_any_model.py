"""A model that is no chain, under any layout and schedule, has the numbers of one process."""

from __future__ import annotations

import ast
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pool import Pools
from tests.results import Results, assert_equal_under, listed, run_alone
from tests.training_jobs import make_trainer
from tests.transparency import (
    FRAME_LAYOUTS,
    FRAME_SUBJECTS,
    SCHEDULES,
    Case,
    allowed,
    arguments_of,
    compare,
    cover,
    layout_of,
    oracle_of,
    subject_of,
    train,
)
from tests.zoo import frame

#: The first test of a batch waits for all of it.
pytestmark = pytest.mark.timeout(900)


def _possible(subject: str, layout: str, schedule: str) -> bool:
    """Tell whether a subject runs under a layout.

    A layer that is called twice in a step must not let go of its parameters in between. Code around layers that uses
    their parameters is refused under ZeRO 3.
    """
    is_called_twice = subject in ("siamese", "two_views", "views", "projected")
    loops = subject in ("penalised", "averaged", "momentum_teacher")
    refused = (is_called_twice and layout == "frame_zero3_early") or (loops and "zero3" in layout)
    return allowed(subject, layout, schedule) and not refused


CASES = [Case(*triple) for triple in cover(FRAME_SUBJECTS, FRAME_LAYOUTS, SCHEDULES, _possible)]
CASES.sort(key=lambda case: case.size)


def _marked(case: Case) -> Any:
    """Every day a layout for each model, or none."""
    number = list(FRAME_SUBJECTS).index(case.subject) + list(FRAME_LAYOUTS).index(case.layout)
    return pytest.param(case, id=str(case), marks=() if number % 15 == 0 else pytest.mark.thorough)


@pytest.mark.distributed
@pytest.mark.parametrize("case", [_marked(case) for case in CASES])
def test_double_precision(results: Results, case: Case) -> None:
    differences = compare(case, *results[case])
    assert not differences, listed(differences)


def _refused() -> str:
    """What is said of an `nn.Sequential` that is called twice, and was named as one body."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with pytest.raises(ValueError, match="called the body 'blocks' 2 times") as error:
        make_trainer({"pipeline_parallel_size": 2, "body": "blocks"}).fit(frame.TwoViews().double())
    return str(error.value)


@pytest.mark.distributed
def test_a_sequential_that_is_called_twice_trains_as_it_is_told(ranks: Pools) -> None:
    """How often it is called is known in the first step; what is said then, taken at its word, trains."""
    first, second = ranks(2, lightning=True).run(_refused, timeout=90)
    assert first == second
    advice = re.search(r"HybridStrategy\(body=(.*)\)", first)
    assert advice is not None
    assert ast.literal_eval(advice[1]) == subject_of("two_views").strategy["body"]
    case = Case("two_views", "frame_pp2_chunks2", "interleaved_1f1b")
    (oracle,) = train([oracle_of(case)])
    differences = compare(case, run_alone(ranks, case), [oracle])
    assert not differences, listed(differences)


@pytest.mark.distributed
def test_random_numbers_do_not_depend_on_the_layout(ranks: Pools) -> None:
    """Dropout, LayerDrop and stochastic depth: every stage draws what every other one does."""
    assert_equal_under(ranks, "frame_drops", ("frame_pp2", "frame_pp2_chunks2", "frame_pp3", "frame_pp4"))


def _train_on(name: str, path: str, layout: str | None, steps: int, resume: str | None) -> dict[str, torch.Tensor]:
    """Train, save, and give what the checkpoint holds; in one process where there is no layout."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(7)
    replicas = 1 if layout is None else layout_of(layout).data
    module = subject_of(name).module(batch_size=8 // replicas).double()
    sharded = {"save_distributed_checkpoint": path.endswith("directory")}
    arguments = {"num_microbatches": 2, "schedule": "gpipe", **sharded}
    trainer = make_trainer(
        None if layout is None else arguments_of(layout_of(layout)) | arguments,
        max_steps=steps,
        max_epochs=-1,
        limit_val_batches=0,
    )
    trainer.fit(module, ckpt_path=resume)
    trainer.save_checkpoint(path)
    return {} if path.endswith("directory") else torch.load(path, weights_only=False)["state_dict"]


OF_LAYERS = "frame_pp2", "frame_pp3", "frame_zero3", "frame_pp2_chunks2"
OF_SHARED_LAYERS = "frame_tp2_pp2", "frame_pp3", "frame_tp2_pp2_chunks2", "tp2"


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        *((name, OF_LAYERS) for name in ("encoder_decoder", "keyed", "hf_bert", "hf_t5", "hf_vit")),
        ("listed_tied", OF_SHARED_LAYERS),
        *(pytest.param(name, OF_SHARED_LAYERS, marks=pytest.mark.thorough) for name in ("shared_around", "hf_t5")),
    ],
)
def test_checkpoints_go_on_under_any_layout(ranks: Pools, name: str, layouts: tuple[str, ...], tmp_path: Path) -> None:
    """Stages, directories, replicas or ranks that shard, chunks: as if never stopped; and plain Lightning opens it."""
    if name.startswith("hf_"):
        pytest.importorskip("transformers")
    before = None
    files = "one", "directory", "another directory", "two"
    for layout, steps, file in zip(layouts, (2, 4, 6, 8), files, strict=True):
        path = f"{tmp_path}/{file}"
        ranks(layout_of(layout).size, lightning=True).run(_train_on, name, path, layout, steps, before, timeout=90)
        before = path
    found = torch.load(f"{tmp_path}/two", weights_only=False)["state_dict"]
    expected = _train_on(name, f"{tmp_path}/whole", None, 8, None)
    assert list(found) == list(expected)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert _train_on(name, f"{tmp_path}/plain", None, 9, before).keys() == expected.keys()
