"""What a checkpoint says of how it was made."""

from __future__ import annotations

from typing import Any

import torch

from lightning_hybrid.config import HybridConfig
from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.pipeline_parallel.stage_map import StageMap
from lightning_hybrid.version import __version__

METADATA = "hybrid_parallel"  # its key in a checkpoint


def make_metadata(mesh: Mesh, settings: HybridConfig, stage_map: StageMap) -> dict[str, Any]:
    """The versions and the layout, of plain values.

    Args:
        mesh: The ranks.
        settings: The settings.
        stage_map: Which stage holds what.
    """
    layout = {
        "data_parallel_size": mesh.data_parallel_size,
        "tensor_parallel_size": mesh.tensor_parallel_size,
        "pipeline_parallel_size": mesh.pipeline_parallel_size,
        "num_chunks": settings.num_chunks,
        "num_microbatches": settings.num_microbatches,
        "schedule": settings.schedule,
        "rank_order": settings.rank_order,
        "body": stage_map.body,
        "layers_of_stages": [len(layers) for layers in stage_map.stages] if stage_map.body is not None else [],
    }
    versions = {"lightning_hybrid": __version__, "torch": str(torch.__version__)}
    return {"versions": versions, "layout": layout}
