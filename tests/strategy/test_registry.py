"""Names of strategies are known in whichever order the packages are imported. In the other tests Lightning is first."""

from __future__ import annotations

import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lightning_hybrid import strategy

ROOT = Path(__file__).parent.parent.parent

OURS_FIRST = """
import sys
import lightning_hybrid

assert not {"torch", "lightning"} & set(sys.modules)
(finder,) = (each for each in sys.meta_path if type(each).__module__.startswith("lightning_hybrid"))

from lightning.pytorch import Trainer

assert finder not in sys.meta_path
for name in ("hybrid", "HYBRID_PP2", "hybrid_pp3", "hybrid_tp5_dp3", "hybrid_zero3"):
    found = Trainer(strategy=name, accelerator="cpu", devices=15 if "5" in name else 6, logger=False).strategy
    assert type(found) is lightning_hybrid.HybridStrategy
    print(found.sizes, found.settings.zero_stage)
for name in ("hybrid_pp_2", "hybrid_ep2", "hybrid_pp2_pp2", "hybrid_", "hybrid_pp0", "hybrids"):
    try:
        Trainer(strategy=name, accelerator="cpu", devices=2, logger=False)
    except ValueError as error:
        print(str(error).partition('. After')[0].partition('. It must')[0])
"""


def test_names_are_known_where_lightning_comes_later() -> None:
    words = [sys.executable, "-W", "ignore", "-c", OURS_FIRST]
    found = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines() == [
        "data 6 x tensor 1 x pipeline 1 0",
        "data 3 x tensor 1 x pipeline 2 0",
        "data 2 x tensor 1 x pipeline 3 0",
        "data 3 x tensor 5 x pipeline 1 0",
        "data 6 x tensor 1 x pipeline 1 3",
        "The strategy name 'hybrid_pp_2' is invalid. Its part 'pp' is not a short name followed by a number",
        "The strategy name 'hybrid_ep2' is invalid. Its part 'ep2' is not a short name followed by a number",
        "The strategy name 'hybrid_pp2_pp2' is invalid. Its part 'pp2' appears twice",
        "The strategy name 'hybrid_' is invalid. Its part '' is not a short name followed by a number",
        "The strategy name 'hybrid_pp0' is invalid. Its part 'pp0' is not a short name followed by a number",
        "You selected an invalid strategy name: `strategy='hybrids'`",
    ]


class Recorder(dict[str, Any]):
    def register(self, name: str, strategy: object, **arguments: object) -> None:
        self[name] = arguments

    def available_strategies(self) -> list[str]:
        return list(self)


@pytest.fixture
def late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of a registry that nobody has imported yet."""
    (tmp_path / "late_registry.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(strategy, "_REGISTRY", "late_registry")
    others = [each for each in sys.meta_path if type(each) is not strategy._RegistryFinder]  # it may wait
    monkeypatch.setattr(sys, "meta_path", others)
    monkeypatch.delitem(sys.modules, "late_registry", raising=False)


@pytest.mark.usefixtures("late")
def test_others_find_the_module_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ModuleType] = []
    monkeypatch.setattr(strategy, "_register", seen.append)
    strategy.register_with_lightning()
    finder = sys.meta_path[0]
    assert finder.find_spec("another", None) is None
    import late_registry  # type: ignore[import-not-found]

    assert seen == [late_registry]
    assert isinstance(late_registry.__spec__, ModuleSpec)
    assert late_registry.__spec__.origin == late_registry.__file__
    assert finder not in sys.meta_path
    assert finder.find_spec("late_registry", None) is None


def test_presets_say_what_they_are() -> None:
    recorder = Recorder()
    strategy._register(SimpleNamespace(StrategyRegistry=recorder))  # type: ignore[arg-type]
    assert len(recorder) == 19
    assert recorder["hybrid_tp2_pp4"]["tensor_parallel_size"] == 2
    assert recorder["hybrid_tp2_pp4"]["pipeline_parallel_size"] == 4
    assert recorder["hybrid_zero2"]["description"] == "HybridStrategy(zero_stage=2)"
    assert "tensor_parallel_size" not in recorder["hybrid"]
    assert "hybrid_pp2_tp3" in recorder.available_strategies()
    assert recorder["hybrid_pp2_tp3"]["tensor_parallel_size"] == 3
    assert "ddp" not in recorder.available_strategies()
