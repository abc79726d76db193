"""The check that finds private names of torch finds them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.private_names import LIGHTNINGS, TORCHS
from tests.test_lightning_privates import write

USE = f"use {TORCHS}"
PLANTED = {
    "an import": ("from torch.utils import _pytree", f"private import torch.utils._pytree; {USE}"),
    "a module": ("import torch._dynamo.config", f"private import torch._dynamo.config; {USE}"),
    "of a private module": ("from torch._C import Size", f"private import torch._C.Size; {USE}"),
    "of torch's tests": (
        "from torch.testing._internal.distributed.fake_pg import FakeStore",
        "private import torch.testing._internal.distributed.fake_pg.FakeStore",
    ),
    "a late import that may fail": (
        "def f():\n    try:\n        from torch import _C\n    except ImportError:\n        pass",
        "private import torch._C",
    ),
    "a class in a module": ("import torch\nx = torch._C.Size", "torch._C is private"),
    "an operator": ("import torch\nx = torch.ops.aten._to_copy", "torch.ops.aten._to_copy is private"),
    "an attribute of a tensor": ("def f(x):\n    return x._version", "x._version is private"),
    "an assignment": ("def f(x):\n    x._local_tensor = None", "x._local_tensor is private"),
    "hooks": ("def f(x):\n    return x._forward_hooks", "x._forward_hooks is private"),
    "an inherited attribute": (
        "from torch import Tensor\nclass A(Tensor):\n    def f(self): return self._base",
        "self._base is private",
    ),
    "what another class has too": ("class A:\n    def f(self): return self._scale", "self._scale is private"),
    "getattr": ("def f(x): return getattr(x, '_cdata', None)", "x._cdata is private"),
    "a string": ("NAMES = ('forward', '_compiled_call_impl')", "'_compiled_call_impl' is private"),
    "an operator's name": ("NAME = 'aten::_to_copy'", "'aten::_to_copy' is private"),
    "a module's name": ("NAME = 'torch._utils'", "'torch._utils' is private"),
    "an override": (
        "from torch import amp\nclass A(amp.GradScaler):\n    def _unscale_grads_(self): pass",
        "_unscale_grads_ is private",
    ),
    "an override of an imported class": (
        "from torch.nn import Module as Base\nclass A(Base):\n    def _apply(self, f): pass",
        "_apply is private",
    ),
}


@pytest.mark.parametrize(("source", "complaint"), PLANTED.values(), ids=PLANTED)
def test_planted_violation_is_caught(tmp_path: Path, source: str, complaint: str) -> None:
    third = "class B:\n    def f(self): self._scale = 1\n"
    found = write(tmp_path / "package", **{"wing.py": source, "third.py": third})
    assert len(found) == 1, found
    assert complaint in found[0]
    assert USE in found[0]
    assert found[0].startswith("package/wing.py:")


def test_neither_register_may_use_names_of_the_other_library(tmp_path: Path) -> None:
    torchs = "from lightning.pytorch.loops import _FitLoop"
    lightnings = "from torch import _C\nfrom torch import nn\nclass A(nn.Module):\n    def _apply(self, f): pass"
    assert write(tmp_path / "package", **{TORCHS: torchs, LIGHTNINGS: lightnings}) == [
        f"package/{TORCHS}:1: private import lightning.pytorch.loops._FitLoop; use {LIGHTNINGS}",
        f"package/{LIGHTNINGS}:1: private import torch._C; {USE}",
        f"package/{LIGHTNINGS}:4: _apply is private; {USE}",
    ]
