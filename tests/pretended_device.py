"""A device that is pretended: tensors in the memory of the host that say they are on ``cuda:0``.

Every branch for CUDA runs, without a GPU: what is made, moved or computed there says ``device == cuda:0``; tensors of
two devices in one operation are an error, as with CUDA; and whatever would make the host wait for the device is listed,
with the line that asked for it. ::

    storage of a tensor    marked: the device        not marked: the host
    torch.Tensor.device    says what the mark says
    a dispatch mode        under every operation: results of the device are the device's; mixtures are refused
    groups                 of the backend "device" take tensors of the device alone, like NCCL's; others of the host

Numbers are those of the CPU, so a run here and one on the CPU must end with the same bits.

What this cannot show: anything about streams (all work is done at once, in the order of the host, so a missing wait is
not seen), kernels and their numbers, NCCL (gloo carries the messages: no deadlock of its kind, no missing
connection), memory, time. Those need a GPU: see ``tests/gpu``.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

_ROOT = Path(__file__).parent.parent
#: The type of tensors that are taken as they are; subclasses take their own operations apart first.
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)
_DEVICE_OF = torch._C.TensorBase.device.__get__  # type: ignore[attr-defined]
_READS = frozenset({"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim", "bincount"})
_MIXES = frozenset({"copy_", "_to_copy", "index", "index_put", "index_put_", "_index_put_impl_", "set_"})


@dataclass(frozen=True)
class Wait:
    """Something that makes the host wait for the device.

    Attributes:
        what: The operation: a number that is read, a copy between host and device that is not from or to pinned memory.
        caller: Where it was asked for: the innermost line that is not torch's.
    """

    what: str
    caller: str

    @property
    def is_ours(self) -> bool:
        """Whether a line of the package asked for it."""
        return self.caller.startswith("lightning_hybrid/")


@dataclass
class PretendedDevice:
    """What has been seen while the device was pretended.

    Attributes:
        device: What tensors on it say.
        waits: Of the host for the device, in their order; cleared by whoever wants to see those of a part of a run.
        moved: The number of elements of each copy from the host to the device.
        refuses: Whether a wait is an error, as in ``torch.cuda.set_sync_debug_mode("error")``.
    """

    device: torch.device
    waits: list[Wait] = field(default_factory=list)
    moved: list[int] = field(default_factory=list)
    refuses: bool = False

    def note(self, what: str) -> None:
        """The host waits."""
        self.waits.append(Wait(what, _caller()))
        if self.refuses:
            raise RuntimeError(f"called a synchronizing CUDA operation: {self.waits[-1]}")

    def set_sync_debug_mode(self, mode: str) -> None:
        """As of `torch.cuda`."""
        self.refuses = mode == "error"


def _caller() -> str:
    frame: Any = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if "/torch/" not in path and path != __file__ and "contextlib" not in path:
            path = path.removeprefix(f"{_ROOT}/").rpartition("site-packages/")[2]
            return f"{path}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "?"


def _is_marked(tensor: Tensor) -> bool:
    return getattr(tensor.untyped_storage(), "_is_pretended", False) if type(tensor) in _PLAIN else False


def _is_pinned(tensor: Tensor) -> bool:
    return getattr(tensor.untyped_storage(), "_is_pinned", False)


def _mark(tensor: Tensor, *, device: bool) -> None:
    if _DEVICE_OF(tensor).type == "cpu":
        tensor.untyped_storage()._is_pretended = device  # type: ignore[attr-defined]


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


class _DeviceMode(TorchDispatchMode):
    """Under every operation: where its results are, whether its tensors are together, whether the host waits."""

    def __init__(self, seen: PretendedDevice) -> None:
        super().__init__()
        self.seen = seen
        self.target: str | None = None  # of a copy between host and device
        self.sets_number = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:  # it comes after this mode
            return func(*args, **kwargs)
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented
        name = func.overloadpacket.__name__
        inputs = [t for t in _tensors((*args, *kwargs.values())) if _DEVICE_OF(t).type == "cpu"]
        marks = [_is_marked(tensor) for tensor in inputs]
        if func.namespace == "c10d":
            if name != "barrier":  # its tensor is torch's own
                self._check_group(args, kwargs, marks)
            return func(*args, **kwargs)
        pin = kwargs.get("pin_memory")
        if pin:
            kwargs["pin_memory"] = False
        target = kwargs.get("device")
        if target is not None and torch.device(target).type == "cuda":
            kwargs["device"], on_device = torch.device("cpu"), True
        elif name == "_to_copy":
            on_device = self.target == "cuda" if self.target else any(marks)
        else:
            on_device = target is None and any(marks)
        self._check_mixture(name, inputs, marks)
        self._note_waits(name, args, kwargs, inputs, marks, on_device)
        result = func(*args, **kwargs)
        shared = {id(tensor.untyped_storage()) for tensor in inputs}
        for tensor in _tensors([result]):
            if type(tensor) in _PLAIN and id(tensor.untyped_storage()) not in shared:
                _mark(tensor, device=on_device)
                if pin or (name == "_to_copy" and any(marks) and not on_device and kwargs.get("non_blocking")):
                    tensor.untyped_storage()._is_pinned = True  # type: ignore[attr-defined]
        return result

    def _check_mixture(self, name: str, inputs: list[Tensor], marks: list[bool]) -> None:
        if name in _MIXES or not any(marks):
            return
        if any(not mark and tensor.ndim > 0 for tensor, mark in zip(inputs, marks, strict=True)):
            raise RuntimeError(f"Expected all tensors to be on the same device, but {name} got some of cpu and of cuda")

    def _check_group(self, args: Any, kwargs: Any, marks: list[bool]) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
                wants = dist.ProcessGroup.unbox(value).group_name not in _HOST_GROUPS
                if marks and any(mark != wants for mark in marks):
                    raise RuntimeError(f"No backend type associated with device type {'cpu' if wants else 'cuda'}")

    def _note_waits(
        self, name: str, args: Any, kwargs: Any, inputs: list[Tensor], marks: list[bool], on_device: bool
    ) -> None:
        if name == "copy_" and len(marks) == 2:
            target, source = marks[0], marks[1]
            others = (inputs[0], inputs[1])
            if target != source and not (self.sets_number and inputs[0].ndim):  # into one element it is copied
                non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
                self._note_copy(others[0 if source else 1], to_device=target, non_blocking=non_blocking)
        elif name == "_to_copy" and marks and marks[0] != on_device:
            non_blocking = kwargs.get("non_blocking", False)
            if on_device:
                self._note_copy(inputs[0], to_device=True, non_blocking=non_blocking)
            elif not non_blocking:
                self.seen.note("copy to the host")
        elif name in _READS and any(marks):
            self.seen.note(name)
        elif name.startswith(("index", "_index_put")) and marks and marks[0]:
            indices = [tensor for tensor in inputs[1:] if tensor.dtype in (torch.bool, torch.uint8)]
            if indices or not all(marks):
                self.seen.note(name)

    def _note_copy(self, host: Tensor, *, to_device: bool, non_blocking: bool) -> None:
        if to_device:
            self.seen.moved.append(host.numel())
        if not (non_blocking and _is_pinned(host)):
            pinned = "pinned" if _is_pinned(host) else "pageable"
            self.seen.note(f"copy to the {'device' if to_device else 'host'} ({pinned}, non_blocking={non_blocking})")


_HOST_GROUPS: set[str] = set()


def _device_of(tensor: Tensor) -> torch.device:
    found: torch.device = _DEVICE_OF(tensor)
    if found.type != "cpu":
        return found
    return _active[-1].device if _is_marked(tensor._local_tensor if isinstance(tensor, DTensor) else tensor) else found


def _tensor_attributes(mode: _DeviceMode) -> dict[str, Any]:
    """What `torch.Tensor` has instead of its own: its methods in C do not ask a mode, or see the same device twice."""
    own = {name: getattr(Tensor, name) for name in ("to", "tolist", "numpy", "__setitem__", "pin_memory")}

    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not (type(tensor) in _PLAIN or isinstance(tensor, DTensor)) or _DEVICE_OF(tensor).type != "cpu":
            return own["to"](tensor, *args, **kwargs)
        if args and isinstance(args[0], Tensor):
            args = (_device_of(args[0]), args[0].dtype, *args[1:])
        copy = kwargs.pop("copy", False)
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        how: dict[str, Any] = {"non_blocking": non_blocking, "copy": copy}
        if memory_format is not None:
            how["memory_format"] = memory_format
        dtype = dtype or tensor.dtype
        if device is None or device.type == _device_of(tensor).type:
            return own["to"](tensor, dtype, **how)
        if device.type not in ("cpu", "cuda"):
            return own["to"](tensor, device, dtype, **how)
        mode.target = device.type  # torch itself sees a copy from the host to the host
        try:
            return own["to"](tensor, "cpu", dtype, **{**how, "copy": True})
        finally:
            mode.target = None

    def cpu(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return to(tensor, "cpu", *args, **kwargs)

    def cuda(tensor: Tensor, device: Any = None, non_blocking: bool = False) -> Tensor:
        return to(tensor, "cuda", non_blocking=non_blocking)

    def tolist(tensor: Tensor) -> Any:
        if _is_marked(tensor):
            mode.seen.note("tolist")
        return own["tolist"](tensor)

    def numpy(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if _is_marked(tensor):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
        return own["numpy"](tensor, *args, **kwargs)

    def set_item(tensor: Tensor, index: Any, value: Any) -> None:
        mode.sets_number = not isinstance(value, Tensor)  # into a row, it is a kernel's argument
        try:
            own["__setitem__"](tensor, index, value)
        finally:
            mode.sets_number = False

    def pin_memory(tensor: Tensor, *args: Any) -> Tensor:
        if _is_marked(tensor):
            raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
        if _is_pinned(tensor):
            return tensor
        copy = tensor.clone()
        copy.untyped_storage()._is_pinned = True  # type: ignore[attr-defined]
        return copy

    return {
        "device": property(_device_of),
        "is_cuda": property(lambda tensor: _device_of(tensor).type == "cuda"),
        "is_cpu": property(lambda tensor: _device_of(tensor).type == "cpu"),
        "to": to,
        "cpu": cpu,
        "cuda": cuda,
        "tolist": tolist,
        "numpy": numpy,
        "__setitem__": set_item,
        "pin_memory": pin_memory,
        "is_pinned": lambda tensor, *_: _is_pinned(tensor),
        "record_stream": lambda tensor, stream: None,
    }


class _Stream:
    """A stream, or an event: what is asked of it has happened already."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name in ("wait_stream", "wait_event", "wait", "record", "query"):
            return lambda *args, **kwargs: True
        if name == "record_event":
            return lambda *args: _Stream()
        if name == "elapsed_time":
            return lambda other: 0.0
        raise AttributeError(name)

    def synchronize(self) -> None:
        _active[-1].note("synchronize")


_active: list[PretendedDevice] = []


def active_device() -> PretendedDevice:
    """Return the device that is pretended now."""
    return _active[-1]


def _cuda_functions(seen: PretendedDevice, count: int) -> dict[str, Any]:
    generator = torch.default_generator
    nothing: Callable[..., None] = lambda *args, **kwargs: None  # noqa: E731
    stream = _Stream()
    return {
        **dict.fromkeys(["_lazy_init", "init", "set_device", "empty_cache", "reset_peak_memory_stats"], nothing),
        **dict.fromkeys(["manual_seed", "manual_seed_all"], nothing),  # the generator is that of the host
        **dict.fromkeys(["is_available", "is_initialized", "is_bf16_supported"], lambda *args, **kwargs: True),
        "is_current_stream_capturing": lambda: False,
        "set_sync_debug_mode": seen.set_sync_debug_mode,
        "device_count": lambda: count,
        "current_device": lambda: seen.device.index,
        "get_device_capability": lambda *args: (7, 0),
        "get_device_name": lambda *args: "pretended",
        "get_device_properties": lambda *args: SimpleNamespace(name="pretended", total_memory=2**34),
        "max_memory_allocated": lambda *args: 0,
        "memory_stats": lambda *args: {},
        "synchronize": lambda *args: seen.note("synchronize"),
        "current_stream": lambda *args: stream,
        "Stream": _Stream,
        "Event": _Stream,
        "stream": lambda *args: contextlib.nullcontext(),
        "default_generators": (generator,) * count,
        "get_rng_state": lambda *args: generator.get_state(),
        "set_rng_state": lambda state, *args: generator.set_state(state),
        "get_rng_state_all": lambda: [generator.get_state()] * count,
        "set_rng_state_all": lambda states: [generator.set_state(state) for state in states],
    }


def _make_groups(seen: PretendedDevice) -> dict[str, Any]:
    """Process groups over gloo: those that name it take tensors of the host, the others of the device alone."""
    initialize, new_group, config = dist.init_process_group, dist.new_group, dist.get_backend_config

    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("device_id", None)
        initialize("gloo", *args, **kwargs)

    def make_group(ranks: Any = None, *args: Any, backend: Any = None, **kwargs: Any) -> Any:
        group = new_group(ranks, *args, backend="gloo", **kwargs)
        if backend == "gloo" and isinstance(group, dist.ProcessGroup):
            _HOST_GROUPS.add(group.group_name)
        return group

    def get_backend_config(group: Any = None) -> str:
        group = dist.group.WORLD if group is None else group
        return config(group) if group.group_name in _HOST_GROUPS else "cuda:device"

    def object_device(group: Any = None) -> str:
        group = dist.group.WORLD if group is None else group
        return "cpu" if group.group_name in _HOST_GROUPS else "cuda"

    return {
        "init_process_group": init_process_group,
        "new_group": make_group,
        "get_backend_config": get_backend_config,
        "_get_object_coll_device": object_device,
    }


@contextlib.contextmanager
def pretended_device(index: int = 0, count: int = 1) -> Iterator[PretendedDevice]:
    """Inside, this process has CUDA devices: ``Trainer(accelerator="gpu", devices=1)`` finds one.

    Groups must be made inside; the backend's name does not matter.

    Args:
        index: Of the device that this process computes on.
        count: The number of devices.

    Yields:
        What is seen.
    """
    importlib.import_module("torch._dynamo")  # it takes stock of the functions of torch, and would find ours
    seen = PretendedDevice(torch.device("cuda", index))
    mode = _DeviceMode(seen)
    autocast, as_tensor, tensor, clone = torch.autocast, torch.as_tensor, torch.tensor, torch.UntypedStorage.clone

    def autocast_of(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return autocast("cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    def to_device(make: Any, data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        made: Tensor = make(data, *args, **kwargs)
        return made if device is None else made.to(device)

    def clone_storage(storage: Any) -> Any:
        copy: Any = clone(storage)
        copy._is_pretended = getattr(storage, "_is_pretended", False)
        return copy

    def group_by_device(*args: Any) -> Any:
        found = group_tensors(*args)
        return {(_device_of(next(_tensors(lists[0]))), dtype): lists for (_, dtype), lists in found.items()}

    def wait(work: Any, *args: Any) -> Any:  # gloo copies there what it has made on the way
        with torch._C._DisableTorchDispatch():
            return wait_for(work, *args)

    group_tensors, wait_for = torch._C._group_tensors_by_device_and_dtype, dist.Work.wait
    groups = _make_groups(seen)
    with contextlib.ExitStack() as stack:
        for name, value in _tensor_attributes(mode).items():
            stack.enter_context(patch.object(Tensor, name, value))
        for name, value in _cuda_functions(seen, count).items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        for name, value in groups.items():
            for module in (dist, dist.distributed_c10d):
                if hasattr(module, name):
                    stack.enter_context(patch.object(module, name, value))
        # A build of torch for CUDA knows of one, and asks the driver, which is not there.
        stack.enter_context(patch.object(torch.accelerator, "current_accelerator", return_value=None))
        stack.enter_context(patch.object(torch._C, "_group_tensors_by_device_and_dtype", group_by_device))
        stack.enter_context(patch.object(dist.Work, "wait", wait))
        stack.enter_context(patch.object(torch, "autocast", autocast_of))
        stack.enter_context(patch.object(torch, "as_tensor", partial(to_device, as_tensor)))
        stack.enter_context(patch.object(torch, "tensor", partial(to_device, tensor)))
        stack.enter_context(patch.object(torch.UntypedStorage, "clone", clone_storage))
        _active.append(seen)
        stack.callback(_active.pop)
        stack.callback(_HOST_GROUPS.clear)
        stack.enter_context(mode)
        yield seen
