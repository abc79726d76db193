"""Names of strategies are known in whichever order the packages are imported. In the other tests Lightning is first."""

from __future__ import annotations

import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

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
for name in ("hybrid", "HYBRID_PP2"):
    found = Trainer(strategy=name, accelerator="cpu", devices=2, logger=False).strategy
    assert type(found) is lightning_hybrid.HybridStrategy
    print(found.sizes)
"""


def test_names_are_known_where_lightning_comes_later() -> None:
    words = [sys.executable, "-W", "ignore", "-c", OURS_FIRST]
    found = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout == "(2, 1, 1)\n(1, 1, 2)\n"


class Recorder(dict):  # type: ignore[type-arg]
    def register(self, name: str, strategy: object, **arguments: object) -> None:
        self[name] = arguments


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
    assert len(recorder) == 16
    assert recorder["hybrid_tp2_pp4"]["tensor_parallel_size"] == 2
    assert recorder["hybrid_tp2_pp4"]["pipeline_parallel_size"] == 4
    assert "tensor_parallel_size" not in recorder["hybrid"]
