"""What a pickle holds is read without running its code."""

from __future__ import annotations

import io
import pickle
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, TensorProperties

from lightning_hybrid.checkpoint.storage.unpickle import read_harmless


class Looked:
    """Is pickled as an attribute of something."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name

    def __reduce__(self) -> Any:
        return getattr, (self.owner, self.name)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_members_of_enumerations_are_read_as_any_python_writes_them(protocol: int) -> None:
    """Debian 12's Python 3.11.2, for one, writes `getattr` and a name."""
    member = _MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT
    for written in (member, Looked(_MEM_FORMAT_ENCODING, member.name)):
        assert read_harmless(io.BytesIO(pickle.dumps(written, protocol))) is member
    properties = TensorProperties(dtype=torch.float64)
    assert read_harmless(io.BytesIO(pickle.dumps(properties, protocol))) == properties


@pytest.mark.parametrize(("owner", "name"), [(torch.UntypedStorage, "from_file"), (str, "format"), (Looked, "owner")])
def test_attributes_of_anything_else_are_not_looked_up(owner: Any, name: str) -> None:
    found = read_harmless(io.BytesIO(pickle.dumps(Looked(owner, name))))
    assert type(found).__name__ == "_StandIn"
