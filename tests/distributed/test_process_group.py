"""Process groups and collectives, by whatever name this version of torch has them."""

from __future__ import annotations

import runpy
from unittest import mock

import pytest
import torch.distributed as dist

from lightning_hybrid.distributed import process_group

NAMES = {"all_gather_single": "all_gather_into_tensor", "reduce_scatter_single": "reduce_scatter_tensor"}


@pytest.mark.parametrize(("new", "old"), NAMES.items())
def test_a_collective_is_found_when_its_old_name_has_gone(new: str, old: str) -> None:
    with mock.patch.object(dist, new, len, create=True), mock.patch.object(dist, old):
        delattr(dist, old)
        assert runpy.run_path(process_group.__file__)[new] is len


@pytest.mark.parametrize(("new", "old"), NAMES.items())
def test_a_collective_is_found_before_it_got_its_new_name(new: str, old: str) -> None:
    with mock.patch.object(dist, new, None, create=True):
        assert runpy.run_path(process_group.__file__)[new] is getattr(dist, old)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nccl", True),
        ("cuda:nccl", True),
        ("cpu:gloo,cuda:nccl", True),
        ("gloo", False),
        ("cpu:gloo", False),
        ("cpu:gloo,cuda:gloo", False),
    ],
)
def test_nccl_is_known_by_every_name(name: str, expected: bool) -> None:
    """The failure watch and barriers compared a name, and `cpu:gloo,cuda:nccl` switched them off."""
    config = str(dist.distributed_c10d.BackendConfig(dist.Backend(name)))
    with mock.patch.object(dist, "get_backend_config", return_value=config):
        assert process_group.has_nccl() is expected
