"""Parameters that take the place of others."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_hybrid.distributed.dtensor import copy_attributes


def test_attributes_are_the_users_and_not_torchs() -> None:
    class Other(Tensor):
        """Of a class of its own, which torch marks as a parameter."""

    old = nn.Parameter(torch.ones(2).as_subclass(Other))
    assert "_is_param" in vars(old)
    old.no_weight_decay = True  # type: ignore[attr-defined]
    new = torch.zeros(2)
    new.no_weight_decay = False  # type: ignore[attr-defined]
    copy_attributes(old, new)
    assert vars(new) == {"no_weight_decay": True}
    assert not isinstance(new, nn.Parameter)
