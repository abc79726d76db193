"""Public modules as their authors write them, under any layout: the numbers of one process, or a reason."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch

from tests.pool import Pools, RankError
from tests.results import Results, listed, run_alone
from tests.training_jobs import make_trainer
from tests.transparency import (
    SCHEDULES,
    ZOO_LAYOUTS,
    ZOO_SUBJECTS,
    Case,
    allowed,
    arguments_of,
    compare,
    cover,
    layout_of,
    oracle_of,
    train,
)

#: The first test of a batch waits for all of it.
pytestmark = pytest.mark.timeout(900)

#: What cannot be divided as it is, with what the user is told.
REFUSED = {
    "lstm_lm": "No list of layers contains a large part of the 2,627 parameters of LSTMLM",
    "gru_seq2seq": "No list of layers contains a large part of the 2,345 parameters of GRUSeq2Seq",
    "gan": "GAN uses manual optimization, in which `training_step` calls backward",
    "kept_losses": "uses a tensor that a layer of the body stores in an attribute",
    "wavenet": "Name the layers in the order of their calls:\n    HybridStrategy(body=['filter_convs.0', ",
}

#: What ought to train, with what happens; (model, layout).
FAULTS: dict[tuple[str, str], tuple[type[Exception], str]] = {
    ("mean_teacher", "zoo_zero3"): (AssertionError, "what is assigned to `.data` of a DTensor is lost, in torch"),
    ("pixel_cnn", "zoo_zero3"): (AssertionError, "what the step writes into gathered parameters is lost with ZeRO 3"),
}

#: A model of which some layouts have a fault is trained under the others.
TRAINED = [name for name in ZOO_SUBJECTS if name not in REFUSED and (name, "zoo_pp2") not in FAULTS]


def _possible(subject: str, layout: str, schedule: str) -> bool:
    """Three layers cannot be four stages; faults have tests of their own."""
    too_few = subject == "lstm_named" and layout_of(layout).pipeline * layout_of(layout).chunks > 3
    return allowed(subject, layout, schedule) and not too_few and (subject, layout) not in FAULTS


CASES = [Case(*triple) for triple in cover(TRAINED, ZOO_LAYOUTS, SCHEDULES, _possible)]
CASES.sort(key=lambda case: case.size)


def _daily() -> set[Case]:
    """One case of every eighth model, with the layouts in turns."""
    chosen = set()
    for number, model in enumerate(TRAINED[::8]):
        mine = [case for case in CASES if case.subject == model]
        layouts = [name for name in ZOO_LAYOUTS if any(case.layout == name for case in mine)]
        chosen.add(next(case for case in mine if case.layout == layouts[number % len(layouts)]))
    return chosen


DAILY = _daily()


def _marked(case: Case) -> Any:
    return pytest.param(case, id=str(case), marks=() if case in DAILY else pytest.mark.thorough)


@pytest.mark.distributed
@pytest.mark.parametrize("case", [_marked(case) for case in CASES])
def test_double_precision(results: Results, case: Case) -> None:
    differences = compare(case, *results[case])
    assert not differences, listed(differences)


def test_every_model_meets_every_layout() -> None:
    met = {(case.subject, case.layout) for case in CASES}
    possible = {(m, x) for m in TRAINED for x in ZOO_LAYOUTS if any(_possible(m, x, s) for s in SCHEDULES)}
    print(f"{len(TRAINED)} models x {len(ZOO_LAYOUTS)} layouts: {len(met)} pairs in {len(CASES)} cases,")
    print(f"{len(DAILY)} of them daily; {len(REFUSED)} models refused; {len(FAULTS)} faults known")
    assert met == possible
    assert {case.subject for case in DAILY} == set(TRAINED[::8])


def _validate(model: str, layout: str | None) -> dict[str, float]:
    """What `trainer.validate` finds; in one process where there is no layout."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(7)
    module = ZOO_SUBJECTS[model].module().double()
    arguments = {"body": ZOO_SUBJECTS[model].strategy.get("body"), "num_microbatches": "auto", "schedule": "gpipe"}
    trainer = make_trainer(None if layout is None else arguments_of(layout_of(layout)) | arguments)
    (found,) = trainer.validate(module, verbose=False)
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("layout", [pytest.param("zoo_pp3", marks=pytest.mark.thorough), "zoo_pp2_chunks2"])
def test_validation_alone(ranks: Pools, layout: str) -> None:
    """Without training, whole batches: also where training has other numbers, as batch norm has."""
    for model in ("nano_gpt", "resnet18", "unet", "pixel_cnn", "wavenet_named"):
        expected = _validate(model, None)
        for found in ranks(layout_of(layout).size, lightning=True).run(_validate, model, layout, timeout=90):
            assert found == pytest.approx(expected, rel=1e-10), model


@pytest.mark.distributed
@pytest.mark.parametrize("model", REFUSED)
def test_what_cannot_be_divided_is_refused_everywhere(ranks: Pools, model: str) -> None:
    with pytest.raises(RankError) as error:
        ranks(2, lightning=True).run(train, [Case(model, "zoo_pp2", "1f1b")], timeout=90)
    assert len(error.value.failures) == 2
    for text in error.value.failures.values():
        assert re.search(r"\nValueError: .*" + re.escape(REFUSED[model]), text)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param(*pair, id="-".join(pair), marks=pytest.mark.xfail(raises=raises, reason=reason))
        for pair, (raises, reason) in FAULTS.items()
    ],
)
def test_faults(ranks: Pools, model: str, layout: str) -> None:
    case = Case(model, layout, "gpipe")
    (oracle,) = train([oracle_of(case)])
    differences = compare(case, run_alone(ranks, case), [oracle])
    assert not differences, listed(differences)
