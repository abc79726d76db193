"""Information in a checkpoint about how it was made.

`Checkpointer` adds it to each checkpoint, and calls :func:`check_kind` for each checkpoint that it has read. `inspect`
prints it, `consolidate` keeps it, and `ResumeCallback` compares the layout with the layout of its run. Lightning's own
entry contains only the version of Lightning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.config import Settings
from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.pipeline_parallel.stage_map import StageMap
from lightning_hybrid.version import __version__

METADATA = "hybrid_parallel"  # the key of this package's record in a checkpoint


def check_kind(found: Any, path: Any) -> None:
    """Check that the content of a file is a Lightning checkpoint.

    Args:
        found: The content.
        path: The place of the file; a text or a path.

    Raises:
        ValueError: If it is something else. The error describes the content.
    """
    if isinstance(found, Mapping) and "pytorch-lightning_version" in found:
        return
    values = list(found.values()) if isinstance(found, Mapping) else []
    weights = "To load only the weights, set HybridStrategy(initial_weights='...') or call `strategy.load_weights`"
    if values and all(isinstance(value, Tensor) for value in values):
        what = f"a plain state dict of {len(values)} tensors without the training state. {weights}"
    elif isinstance(found, Mapping):
        also = f". {weights}" if isinstance(found.get("state_dict"), Mapping) else ""
        what = f"a dict with the keys {list(found)[:5]}, but without the key 'pytorch-lightning_version'{also}"
    else:
        what = f"a {type(found).__name__}"
    raise ValueError(f"{path} is not a checkpoint of a Trainer: it contains {what}. [LH902]")


def make_metadata(mesh: Mesh, settings: Settings, stage_map: StageMap) -> dict[str, Any]:
    """Return the versions and the layout, as plain values, under the keys ``"versions"`` and ``"layout"``.

    Args:
        mesh: The mesh.
        settings: The settings.
        stage_map: The stages of the module's tensors.
    """
    layout = {
        **mesh.sizes.by_argument,
        "num_chunks": settings.num_chunks,
        "num_microbatches": settings.num_microbatches,
        "schedule": settings.schedule,
        "rank_order": settings.axis_order,
        "body": stage_map.body,
        "layers_of_stages": [len(layers) for layers in stage_map.stages] if stage_map.body is not None else [],
    }
    versions = {"lightning_hybrid": __version__, "torch": str(torch.__version__)}
    return {"versions": versions, "layout": layout}
