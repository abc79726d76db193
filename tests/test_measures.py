"""Mechanisms that are in one place stay in one place."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.measures import MEASURES, compares_kinds, nodes, places_stages, trees

#: Rows of the table that have reached their number.
REACHED = (
    "files that compare kinds of actions",
    "files that place stages on ranks",
    "files that name context_parallel_size",
    'files that name "cp"',
    "files that name the grid",
    "dispatch modes",
    "files that make a fake-tensor mode",
    "private attributes of the package in tests",
    "function modes",
    "files that encode messages",
    "files that start a thread",
)


@pytest.fixture(autouse=True, scope="module")
def without_trees() -> Iterator[None]:
    """Drop the syntax trees afterwards: with them, each collection of garbage in later tests takes a second."""
    yield
    trees.cache_clear()
    nodes.cache_clear()


@pytest.mark.parametrize("name", REACHED)
def test_what_is_in_one_place_stays_there(name: str) -> None:
    found = list(MEASURES[name].found())
    assert len(found) <= MEASURES[name].asked, found


def test_each_row_finds_something_to_count() -> None:
    """Except for rows with nothing left; their patterns are tried on a planted line."""
    empty = [name for name, measure in MEASURES.items() if not any(True for _ in measure.found())]
    assert empty == ["files that place stages on ranks"]


@pytest.mark.parametrize(
    "line",
    ["rank = stage % self._num_ranks", "own = range(rank, num_stages, num_ranks)", "x = stage // size.num_ranks"],
)
def test_a_stage_that_is_placed_is_found(line: str) -> None:
    assert any(map(places_stages, ast.walk(ast.parse(line))))


@pytest.mark.parametrize("line", ["action.kind is Kind.F", "kind in (Kind.SEND_F, Kind.RECV_F)", "{Kind.F: 1}[kind]"])
def test_a_kind_that_is_compared_is_found(line: str) -> None:
    assert any(map(compares_kinds, ast.walk(ast.parse(line))))
