"""What a rank holds of a module: stand-ins for what lives elsewhere, and values for what was made without any."""

from __future__ import annotations

from lightning_hybrid.materialize.initialize import Initialization, lacks_values
from lightning_hybrid.materialize.stand_ins import (
    StandInBuffer,
    StandInParameter,
    forget_stand_ins,
    is_stand_in,
    put_stand_ins,
    refuse_call,
    without_value_text,
)

__all__ = [
    "Initialization",
    "StandInBuffer",
    "StandInParameter",
    "forget_stand_ins",
    "is_stand_in",
    "lacks_values",
    "put_stand_ins",
    "refuse_call",
    "without_value_text",
]
