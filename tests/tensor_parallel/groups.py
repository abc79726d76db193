"""All ranks of a pool as tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from lightning_hybrid.tensor_parallel.mappings import TensorGroup

CPU = torch.device("cpu")


def tensor_group(size: int) -> tuple[Any, TensorGroup]:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tensor_parallel",))["tensor_parallel"]
    return mesh, TensorGroup(mesh.get_group())
