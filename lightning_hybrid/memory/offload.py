"""Offloading of activations and optimizer states to the host until the device needs them.

`Run` makes one :class:`Offload`. `ModuleParallelizer` enters :meth:`Offload.activations` around forwards, and
`HybridStrategy.optimizer_step` calls :meth:`Offload.load_states` and :meth:`Offload.offload_states`. torch's
`save_on_cpu` is not used, because each of its copies blocks the computation. Here, copies run on a stream of their own,
and the copy that backward needs next starts early.

The *host* is the memory of the CPU. An *activation* is a tensor that autograd saves in a forward for its backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_hybrid.distributed.dtensor import put_local, to_local
from lightning_hybrid.torch_internals import storage_identity

#: The names of tensors that can be offloaded to the host.
OFFLOADS = ("activations", "optimizer")

# Smaller tensors stay on the device, because copying them is not worth the time.
_MIN_BYTES = 2**20


def check_offload(offload: Any) -> None:
    """Check the argument `offload` of `HybridStrategy`. `strategy.checks` calls this.

    Args:
        offload: The argument.

    Raises:
        TypeError: If it is not a name, a list of names or ``None``.
        ValueError: If a name is unknown.
    """
    names = [offload] if isinstance(offload, str) else [] if offload is None else offload
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"offload must be a name, a list of names, or None, got {offload!r} ({type(offload).__name__}). [LH101]"
        )
    unknown = [name for name in names if name not in OFFLOADS]
    if unknown:
        raise ValueError(f"offload must be one or more of {', '.join(map(repr, OFFLOADS))}, got {offload!r}. [LH102]")


class Offload:
    """Object that moves tensors to the host and back. It does nothing if the device is the CPU.

    ::

                     forwards and backwards                  optimizer step
        activations  device -> host, when autograd saves     -
                     them; host -> device, before backward
                     needs them
        optimizer    on the host                             host -> device, and back

    Copies of activations overlap with computation. Sharded activations (DTensors) and activations of other tensor
    classes stay on the device.

    Args:
        names: Some of :data:`OFFLOADS`.
        device: The device of this rank: the CPU or a CUDA device.
        min_bytes: Smaller activations, in bytes, stay on the device.

    Attributes:
        has_effect: True if something is offloaded.
        moves_activations: True if activations are offloaded.
    """

    def __init__(self, names: Collection[str], device: torch.device, *, min_bytes: int = _MIN_BYTES) -> None:
        self._device = device
        self._min_bytes = min_bytes
        self.has_effect = bool(names) and device.type != "cpu"
        self.moves_activations = self.has_effect and "activations" in names
        self._states = self.has_effect and "optimizer" in names
        self._stream: Any = None
        self._last: Callable[[], _OffloadedTensor | None] = lambda: None  # returns the activation that was saved last

    @contextmanager
    def activations(self, resident: Callable[[], Iterable[Tensor]]) -> Iterator[None]:
        """Offload the activations of forwards inside the context. Their backwards may run after the context.

        Args:
            resident: Returns tensors that stay on the device, such as parameters.
        """
        if not self.moves_activations:
            yield
            return
        self._last = lambda: None  # activations of an earlier forward may be needed much later
        resident_storages = {storage_identity(to_local(tensor).untyped_storage()) for tensor in resident()}

        def pack(tensor: Tensor) -> Any:
            local = to_local(tensor)
            stays = local.device != self._device or storage_identity(local.untyped_storage()) in resident_storages
            if stays or type(tensor) is not Tensor or tensor.nbytes < self._min_bytes:
                return tensor
            if self._stream is None:
                self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            saved = _OffloadedTensor(tensor, self._stream, self._last)
            self._last = weakref.ref(saved)
            return saved

        def unpack(saved: Any) -> Tensor:
            return saved.to_device() if isinstance(saved, _OffloadedTensor) else saved

        with saved_tensors_hooks(pack, unpack):
            yield

    def load_states(self, optimizer: Optimizer) -> None:
        """Move the optimizer's states to the device before its step."""
        if self._states:
            self._move(optimizer, torch.device("cpu"), self._device)

    def offload_states(self, optimizer: Optimizer) -> None:
        """Move the optimizer's states to the host after its step."""
        if self._states:
            self._move(optimizer, self._device, torch.device("cpu"))

    def _move(self, optimizer: Optimizer, source: torch.device, target: torch.device) -> None:
        """Move states with the shape of their parameter. Other states, such as counters, stay on their device.

        The host does not wait for each copy, because the copies on the host are in pinned memory. Copies to the device
        precede the optimizer step in its stream. After copies to the host, the host waits once for the last copy,
        because any code may read them afterwards.
        """
        copies = False
        for parameter, state in optimizer.state.items():
            for name, value in state.items():
                if not isinstance(value, Tensor) or value.shape != parameter.shape or not value.ndim:
                    continue
                local = to_local(value)
                if local.device == source:
                    moved = _pinned_copy(local) if target.type == "cpu" else local.to(target, non_blocking=True)
                    copies = True
                    if isinstance(value, DTensor):
                        put_local(value, moved)
                    else:
                        state[name] = moved
        if copies and source.type == "cuda":
            torch.cuda.current_stream(source).synchronize()


def _pinned_copy(tensor: Tensor) -> Tensor:
    """Return a copy in pinned memory of the host, which is complete when the device's stream has reached it."""
    copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)


class _OffloadedTensor:
    """An activation on the host, or in transfer. Autograd stores it in place of the activation.

    Backward needs activations in the reverse order of forward. When it needs an activation, the previous activation is
    fetched too. In this example, backwards B3 to B1 need activations 3 to 1::

        device    B3        | B2        | B1
        copies    3, 2      | 1         |

    Args:
        tensor: The activation on its device.
        stream: The stream that copies the activation.
        before: Returns the activation that was saved before this activation, if it still exists.
    """

    def __init__(self, tensor: Tensor, stream: Any, before: Callable[[], _OffloadedTensor | None]) -> None:
        self._device, self._stream, self._before = tensor.device, stream, before
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            self._copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)  # its memory can be reused only after the copy
        self._fetched: Tensor | None = None
        self._arrived: Any = None

    def fetch(self) -> None:
        """Start the copy to the device, on the same stream as the copy to the host, which it follows."""
        if self._fetched is None:
            with torch.cuda.stream(self._stream):
                self._fetched = self._copy.to(self._device, non_blocking=True)
            self._arrived = self._stream.record_event()

    def to_device(self) -> Tensor:
        """Return the activation on the device."""
        self.fetch()
        before = self._before()
        if before is not None:
            before.fetch()
        tensor, self._fetched = self._fetched, None
        assert tensor is not None
        current = torch.cuda.current_stream(self._device)
        current.wait_event(self._arrived)
        tensor.record_stream(current)  # it was created on the other stream, and is used on this stream
        return tensor
