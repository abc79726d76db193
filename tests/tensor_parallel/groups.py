"""All ranks of a pool as tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from lightning_hybrid.axes import Sizes
from lightning_hybrid.distributed.arrangement import Arrangement
from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.tensor_parallel.grid.styles import GridMode
from lightning_hybrid.tensor_parallel.mappings import TensorGroup

CPU = torch.device("cpu")


def tensor_group(size: int) -> tuple[Any, TensorGroup]:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tensor_parallel",))["tensor_parallel"]
    return mesh, TensorGroup(mesh.get_group())


def grid_group(grid: Arrangement) -> tuple[Any, TensorGroup]:
    """All ranks of a pool, arranged in two or three dimensions."""
    mesh = Mesh(Sizes(1, grid.size, 1), arrangement=grid)
    return mesh.tensor_mesh, GridMode(grid).make_group(mesh.tensor_group, mesh.arranged_groups)
