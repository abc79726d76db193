"""Kinds of actions, as a table.

Generators, passes, validation, the simulator and the drawings read the properties in this table instead of comparing an
action with single kinds. A new kind, such as a backward that computes only the gradients of the input, needs a row in
the table, a member of :class:`Kind` and, if it is a computation, a handler in the engine.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class Result(enum.Enum):
    """Result that each stage computes once for each microbatch, in this order; only `OUTPUTS` without backward."""

    OUTPUTS = enum.auto()
    INPUT_GRADIENTS = enum.auto()
    PARAMETER_GRADIENTS = enum.auto()


_RESULTS = tuple(Result)


class _Row(NamedTuple):
    """Properties of a kind. See `Kind`."""

    label: str
    results: tuple[Result, ...] = ()
    flow: int = 0
    share: float = 0.0
    color: tuple[int, int, int] = (0, 0, 0)


_TABLE = {
    "F": _Row("forward", (Result.OUTPUTS,), 1, 1.0, (31, 95, 168)),
    "B": _Row("backward", (Result.INPUT_GRADIENTS, Result.PARAMETER_GRADIENTS), -1, 1.0, (32, 132, 88)),
    "SEND_F": _Row("send", flow=1),
    "RECV_F": _Row("receive", flow=1),  # posts the receive, and does not wait for the message
    "SEND_B": _Row("send", flow=-1),
    "RECV_B": _Row("receive", flow=-1),
}


class Kind(enum.Enum):
    """Kind of action. The values are the letters of torch's notation.

    Attributes:
        label: The name in drawings and profiles.
        results: The results of a computation; empty for a send or a receive.
        flow: The direction of the message that the action sends, receives, or takes and makes: 1 for activations, which
            go to the next stage; -1 for gradients, which go to the previous stage; 0 for no message.
        share: The fraction of a whole forward or backward that a computation is: 1 for all current computations, 0 for
            sends and receives.
        color: The red, green and blue values of its cells in drawings. Sends and receives are not drawn.
        is_send: True for sends.
        is_receive: True for receives.
        is_compute: True for computations.
        is_forward: True for computations of outputs.
        needs: The result of the same stage and microbatch that a computation needs; ``None`` if it needs none.
        kept: The change in the number of microbatches whose activations the stage stores: 1, -1 or 0.
        completes_gradients: If True, the last computation of this kind completes the gradients of a stage's parameters.
    """

    F = "F"
    B = "B"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"

    __hash__ = object.__hash__  # faster: schedules contain thousands of actions

    def __init__(self, letters: str) -> None:
        row = _TABLE[letters]
        self.label, self.results, self.flow, self.share, self.color = row
        self.is_send: bool = row.label == "send"
        self.is_receive: bool = row.label == "receive"
        self.is_compute: bool = bool(row.results)
        self.is_forward: bool = Result.OUTPUTS in row.results
        self.completes_gradients: bool = Result.PARAMETER_GRADIENTS in row.results
        self.kept: int = int(self.is_forward) - int(self.completes_gradients)
        first = _RESULTS.index(row.results[0]) if row.results else 0
        self.needs: Result | None = _RESULTS[first - 1] if first else None


COMPUTATIONS = tuple(kind for kind in Kind if kind.is_compute)
SENDS = {kind.flow: kind for kind in Kind if kind.is_send}
RECEIVES = {kind.flow: kind for kind in Kind if kind.is_receive}
#: For each kind of send or receive, the kind at the other end, and the step from this stage to the other stage.
COUNTERPARTS = {SENDS[flow]: (RECEIVES[flow], flow) for flow in SENDS}
COUNTERPARTS |= {RECEIVES[flow]: (SENDS[flow], -flow) for flow in SENDS}
