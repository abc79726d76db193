"""What a device does not need for a while, kept on the host."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_hybrid.distributed.dtensor import put_local, to_local

__all__ = ["OFFLOADS", "Offload", "check_offload"]

#: What can be kept on the host.
OFFLOADS = ("activations", "optimizer")

# Smaller tensors stay: a copy takes longer than it is worth.
_SMALL = 2**20


def check_offload(wish: Any) -> None:
    """Check the argument of `HybridStrategy`.

    Raises:
        TypeError: If it is no name, list of names or ``None``.
        ValueError: If there is no such thing to keep on the host.
    """
    names = [wish] if isinstance(wish, str) else [] if wish is None else wish
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"offload must be a name, a list of names, or None, got {wish!r} ({type(wish).__name__}).")
    unknown = [name for name in names if name not in OFFLOADS]
    if unknown:
        raise ValueError(f"offload must be of {', '.join(map(repr, OFFLOADS))}, got {wish!r}.")


class Offload:
    """Moves to the host and back; on a device that is the host, nothing.

    ::

                     forwards and backwards                  optimizer step
        activations  device -> host, when autograd keeps     -
                     them; host -> device, when it asks
        optimizer    on the host                             host -> device, and back

    Copies to the host run beside what the device computes.

    Args:
        what: Some of :data:`OFFLOADS`.
        device: Where this rank computes.
        small: Tensors of fewer bytes stay.
    """

    def __init__(self, what: Collection[str], device: torch.device, *, small: int = _SMALL) -> None:
        self._device = device
        self._small = small
        self.has_effect = bool(what) and device.type != "cpu"
        self._activations = self.has_effect and "activations" in what
        self._states = self.has_effect and "optimizer" in what
        self._stream: Any = None

    @contextmanager
    def activations(self, stays: Callable[[], Iterable[Tensor]]) -> Iterator[None]:
        """Enter it around forwards; backwards may follow later.

        Args:
            stays: Gives what is on the device anyway, such as parameters.
        """
        if not self._activations:
            yield
            return
        places = {to_local(tensor).untyped_storage()._cdata for tensor in stays()}

        def keep(tensor: Tensor) -> Any:
            local = to_local(tensor)
            elsewhere = local.device != self._device or local.untyped_storage()._cdata in places
            if elsewhere or type(tensor) is not Tensor or tensor.nbytes < self._small:
                return tensor
            return self._away(tensor)

        def give(kept: Any) -> Tensor:
            return kept.back() if isinstance(kept, _Away) else kept

        with saved_tensors_hooks(keep, give):
            yield

    def _away(self, tensor: Tensor) -> _Away:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return _Away(tensor, self._stream)

    def fetch(self, optimizer: Optimizer) -> None:
        """Its states are needed on the device."""
        if self._states:
            self._move(optimizer, torch.device("cpu"), self._device)

    def put_away(self, optimizer: Optimizer) -> None:
        """Its states are not needed any more in this step."""
        if self._states:
            self._move(optimizer, self._device, torch.device("cpu"))

    def _move(self, optimizer: Optimizer, source: torch.device, target: torch.device) -> None:
        """Move what has as many elements as its parameter: counters are where the optimizer wants them."""
        for parameter, state in optimizer.state.items():
            for name, value in state.items():
                if not isinstance(value, Tensor) or value.shape != parameter.shape or not value.ndim:
                    continue
                local = to_local(value)
                if local.device == source:
                    moved = _pinned(local) if target.type == "cpu" else local.to(target, non_blocking=True)
                    if isinstance(value, DTensor):
                        put_local(value, moved)
                    else:
                        state[name] = moved


def _pinned(tensor: Tensor) -> Tensor:
    """A copy on the host, from which the device can fetch by itself."""
    copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return copy.copy_(tensor)


class _Away:
    """An activation on the host, or on its way.

    Args:
        tensor: It, on a device.
        stream: On which it is copied.
    """

    def __init__(self, tensor: Tensor, stream: Any) -> None:
        self._device = tensor.device
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            self._copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)  # its memory is free when it has been copied, not before
        self._is_there = stream.record_event()

    def back(self) -> Tensor:
        """It, on the device again."""
        torch.cuda.current_stream(self._device).wait_event(self._is_there)
        return self._copy.to(self._device, non_blocking=True)
