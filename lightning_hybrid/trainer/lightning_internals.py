"""Everything private of Lightning and torchmetrics that this package reads or replaces, and nothing else.

Each function is called after what it does, and says in ``Touches`` which private names it uses and in ``Without`` what
would break if they went. ``tests/test_lightning_contract.py`` tries each one alone, so that an upgrade says within
seconds which of them moved; ``docs/lightning-internals.md`` is made from these docstrings.
"""

from __future__ import annotations

from lightning.pytorch import LightningModule
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["set_device_mesh"]

# -- loops and their progress ------------------------------------------------------------------------------------------

# -- logged values -----------------------------------------------------------------------------------------------------

# -- data --------------------------------------------------------------------------------------------------------------

# -- optimization and precision ----------------------------------------------------------------------------------------

# -- modules and callbacks ---------------------------------------------------------------------------------------------


def set_device_mesh(module: LightningModule, mesh: DeviceMesh | None) -> None:
    """Say what ``module.device_mesh`` is, which has no public setter.

    Touches: ``LightningModule._device_mesh``.

    Without: `configure_model` cannot use the mesh.
    """
    module._device_mesh = mesh


# -- torchmetrics ------------------------------------------------------------------------------------------------------

# -- processes ---------------------------------------------------------------------------------------------------------
