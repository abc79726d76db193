"""A fault of each kind on two machines; ``python -m tests.nodes.faults 200`` runs more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nodes.faults import Lane
from tests.nodes.machines import why_not
from tests.nodes.node_fault import FULL, KINDS, LAYOUTS, MENDED, PLACES, Fault, draw

FAULTS = [
    # Before heartbeats began in the set-up, these took the 30 minutes of a collective.
    Fault(1, "machine stopped", place="set-up", rank=1, delay=0.1),
    Fault(2, "cable cut", place="set-up", rank=0, delay=0.2),
    Fault(3, "rank killed", place="set-up", rank=1, delay=0.1),
    Fault(4, "rank killed", place="saving", time=3, rank=1, delay=0.05),
    Fault(5, "machine killed", "dp2 pp2", place="validation", rank=3),
    Fault(6, "store killed", place="training", time=2),
    Fault(7, MENDED, place="training", rank=1, seconds=2.0),
    Fault(8, FULL, place="saving"),
]


@pytest.fixture(scope="module")
def lane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lane]:
    """Two machines, on which all of them happen."""
    if why_not():
        pytest.skip(why_not())
    with Lane(Path(tmp_path_factory.mktemp("faults"), "lane")) as made:
        yield made


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_ends_all_with_its_name_or_nothing(lane: Lane, fault: Fault) -> None:
    ending = lane.run(fault)
    assert ending.seconds is not None
    assert set(ending.problems) <= {"late"}, (str(ending), ending.texts)  # which a busy machine may be


def test_a_fault_is_what_its_number_says() -> None:
    faults = [draw(number) for number in range(300)]
    assert faults == [draw(number) for number in range(300)]
    assert {fault.kind for fault in faults} == set(KINDS)
    assert {fault.place for fault in faults} == set(PLACES)
    assert {fault.layout for fault in faults} == set(LAYOUTS)
