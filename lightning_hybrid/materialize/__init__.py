"""What a rank holds of a module: stand-ins for what lives elsewhere."""

from __future__ import annotations

from lightning_hybrid.materialize.stand_ins import (
    StandInBuffer,
    StandInParameter,
    is_stand_in,
    put_stand_ins,
    refuse_call,
    without_value_text,
)

__all__ = [
    "StandInBuffer",
    "StandInParameter",
    "is_stand_in",
    "put_stand_ins",
    "refuse_call",
    "without_value_text",
]
