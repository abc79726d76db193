"""Each function of `trainer/lightning_internals.py` alone, against the Lightning that is installed."""

from __future__ import annotations

from typing import Any, cast

from lightning.pytorch import LightningModule

from lightning_hybrid.trainer import lightning_internals as internals

# -- loops and their progress ------------------------------------------------------------------------------------------

# -- logged values -----------------------------------------------------------------------------------------------------

# -- data --------------------------------------------------------------------------------------------------------------

# -- optimization and precision ----------------------------------------------------------------------------------------

# -- modules and callbacks ---------------------------------------------------------------------------------------------


def test_the_mesh_of_a_module_can_be_set() -> None:
    module, mesh = LightningModule(), cast(Any, object())
    internals.set_device_mesh(module, mesh)
    assert module.device_mesh is mesh
    internals.set_device_mesh(module, None)
    assert module.device_mesh is None


# -- torchmetrics ------------------------------------------------------------------------------------------------------

# -- processes ---------------------------------------------------------------------------------------------------------
