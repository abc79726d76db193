"""A pytest plugin for Lightning's tests: a `Trainer` that was left the choice takes our strategy; outcomes are written.

Used by ``python -m tests.conformance``, which loads it with ``-p``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

import lightning_hybrid  # noqa: F401  registers "hybrid"
from tests.conformance import ranks


class Reporter:
    """Writes a line for each test: its outcome, why, and how many Trainers had the choice of a strategy.

    Args:
        path: Where to; lines are appended at once, so that a crash costs one test.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.replaced = 0
        self._reports: list[pytest.TestReport] = []

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.replaced, self._reports = 0, []
        self._write(test=nodeid, outcome="started")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        by_gravity = sorted(self._reports, key=lambda report: (not report.failed, not report.skipped))
        worst = by_gravity[0]
        text = "" if worst.passed else str(worst.longrepr)
        self._write(test=nodeid, outcome=worst.outcome, replaced=self.replaced, text=text)

    def _write(self, **line: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance")
    group.addoption("--conformance-strategy", default="auto", help="what a Trainer takes that was left the choice")
    group.addoption("--conformance-stages", type=int, default=1, help="2: models with two layers, ours on two ranks")
    group.addoption("--conformance-report", help="a file, for lines of JSON")
    group.addoption("--conformance-only", help="a file of lines: the tests to run")
    group.addoption("--conformance-done", help="a file of lines: tests to leave out")
    group.addoption("--conformance-meeting", help="a folder that the ranks have in common")
    group.addoption("--conformance-rank", type=int, default=0)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "flaky: of a plugin that is not needed here")
    path = config.getoption("--conformance-report")
    if not path:
        return
    reporter = Reporter(Path(path))
    config.pluginmanager.register(reporter)
    strategy, stages = config.getoption("--conformance-strategy"), config.getoption("--conformance-stages")
    meeting, rank = Path(config.getoption("--conformance-meeting")), config.getoption("--conformance-rank")
    make = None if strategy == "auto" else lambda connector: strategy
    if stages > 1:
        ranks.give_two_layers()
        if make is not None:
            make = ranks.pipeline_of(stages, rank)
    together = ranks.Together(meeting, rank, stages if strategy != "auto" else 1)
    config.pluginmanager.register(together)
    _replace_strategy(make, reporter)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    only, done = config.getoption("--conformance-only"), config.getoption("--conformance-done")
    if only:
        wanted = set(Path(only).read_text().splitlines())
        items[:] = [item for item in items if item.nodeid in wanted]
    if done:
        unwanted = set(Path(done).read_text().splitlines())
        items[:] = [item for item in items if item.nodeid not in unwanted]


def _replace_strategy(make: Callable[[_AcceleratorConnector], Any] | None, reporter: Reporter) -> None:
    """Where Lightning would choose its single-device strategy on the CPU, choose ours; without `make` only count."""
    choose = _AcceleratorConnector._choose_strategy

    def choose_strategy(connector: _AcceleratorConnector) -> Any:
        chosen = choose(connector)
        if type(chosen) is not SingleDeviceStrategy or chosen.root_device != torch.device("cpu"):
            return chosen
        reporter.replaced += 1
        return chosen if make is None else make(connector)

    _AcceleratorConnector._choose_strategy = choose_strategy
