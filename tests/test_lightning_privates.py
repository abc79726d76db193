"""The check that finds private names of Lightning and torchmetrics finds them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import lightning_hybrid
from tests.private_names import LIGHTNINGS, OTHERS, TABLES, TORCHS, attributes, violations

PLANTED = {
    "an import": ("from lightning.pytorch.loops import _FitLoop", "private import lightning.pytorch.loops._FitLoop"),
    "a private module": ("import lightning.pytorch._graveyard.x", "private import lightning.pytorch._graveyard.x"),
    "of a private module": ("from torchmetrics._x import y", "private import torchmetrics._x.y"),
    "a late import": ("def f():\n    from lightning import _x", "private import lightning._x"),
    "an attribute": ("def f(trainer):\n    return trainer._results", "trainer._results is private"),
    "an assignment": ("def f(x):\n    x.loop._restarting = False", "x.loop._restarting is private"),
    "a class": ("import lightning.pytorch.loops as l\nx = l._FitLoop", "l._FitLoop is private"),
    "an inherited member": ("class A:\n    def f(self): return self._launch()", "self._launch is private"),
    "an overridden one": ("class A:\n    def f(self): super()._launch()", "super()._launch is private"),
    "getattr": ("def f(x): return getattr(x, '_results', None)", "x._results is private"),
    "setattr": ("def f(x): setattr(x, '_results', None)", "x._results is private"),
    "hasattr": ("def f(x): return hasattr(x, '_results')", "x._results is private"),
    "vars": ("def f(x): return vars(x)['_results']", "x._results is private"),
    "a method of vars": ("def f(x): return vars(x).pop('_results', None)", "x._results is private"),
    "__dict__": ("def f(x): x.y.__dict__['_results'] = 1", "x.y._results is private"),
    "a method of __dict__": ("def f(x): x.__dict__.get('_results')", "x._results is private"),
    "attrgetter": ("from operator import attrgetter\nf = attrgetter('loop._results')", "_results is private"),
    "what another file defines": ("def f(x): return x._own", "x._own is private"),
}


def write(root: Path, **files: str) -> list[str]:
    """The violations in a package of these files, beside the registers and a sound file."""
    files = {
        "sound.py": SOUND,
        "other.py": "class B:\n    _own = 1\n",
        LIGHTNINGS: LIGHTNINGS_OWN,
        TORCHS: TORCHS_OWN,
        **files,
    }
    for name, source in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return violations(root)


LIGHTNINGS_OWN = """
from lightning.pytorch.loops import _FitLoop
x._results
"""
TORCHS_OWN = """
from torch import Tensor, _C
x = Tensor._version, "_version"
"""
SOUND = """
from lightning.pytorch import Trainer

class A:
    __slots__ = ("_slot",)
    _shared = 1

    def __init__(self, other, module):
        self._field = other._field
        self._field = other._shared, other._slot, getattr(other, "_field"), vars(other)["_shared"]
        self._field = module._parameters, vars(module)["log"], getattr(module, "__len__"), super().__init__
        self._field = self._method(), self._own, self._layer_sync, module["_results"]

    def _method(self, _argument):
        return _argument, "_argument", "_results", "torch.nn", "a sentence with _version"
"""


@pytest.mark.parametrize(("source", "complaint"), PLANTED.values(), ids=PLANTED)
def test_planted_violation_is_caught(tmp_path: Path, source: str, complaint: str) -> None:
    found = write(tmp_path / "package", **{"wing.py": source})
    assert len(found) == 1, found
    assert complaint in found[0]
    assert found[0].startswith("package/wing.py:")


def test_the_package_is_sound() -> None:
    assert violations(Path(lightning_hybrid.__file__).parent) == []


def test_each_name_that_is_allowed_is_used() -> None:
    root = Path(lightning_hybrid.__file__).parent
    used = {name for path in root.rglob("*.py") for _, _, name in attributes(ast.parse(path.read_text()))}
    assert sorted({*TABLES, *OTHERS} - used) == []


def test_registers_and_sound_files_are_left_in_peace(tmp_path: Path) -> None:
    assert write(tmp_path / "package") == []
