"""The device that a part computes on: a GPU, the pretended device of the tests, or the CPU."""

from __future__ import annotations

import contextlib
import platform
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import torch

__all__ = ["Place", "versions"]

_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Place:
    """The device of a part, and the size of its models.

    Attributes:
        kind: ``"cuda"``; ``"pretended"``, tensors of the host that say ``cuda:0``; or ``"cpu"``.
        tiny: If True, models are as small as a rehearsal needs.
    """

    kind: str
    tiny: bool

    @property
    def accelerator(self) -> str:
        """The `Trainer`'s name of the device."""
        return "cpu" if self.kind == "cpu" else "gpu"

    @property
    def device(self) -> torch.device:
        """The device of tensors."""
        return torch.device("cpu" if self.kind == "cpu" else "cuda")

    def pick(self, full: Any, tiny: Any) -> Any:
        """Return the first argument on a GPU, and the second one in a rehearsal."""
        return tiny if self.tiny else full

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Make the pretended device exist inside, if this is it."""
        if self.kind != "pretended":
            yield
            return
        from tests.pretended_device import pretended_device

        with pretended_device():
            yield

    def synchronize(self) -> None:
        """Wait until the device has done its work."""
        if self.kind == "cuda":
            torch.cuda.synchronize()

    def allocated(self) -> int:
        """Return the bytes of tensors on the device; 0 where there is no allocator to ask."""
        return torch.cuda.memory_allocated() if self.kind == "cuda" else 0

    def peak(self) -> int:
        """Return the most bytes of tensors since :meth:`reset_peak`; 0 where there is no allocator to ask."""
        return torch.cuda.max_memory_allocated() if self.kind == "cuda" else 0

    def reset_peak(self) -> None:
        """Return unused memory to the device, and begin a new peak."""
        if self.kind == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    @contextlib.contextmanager
    def host_waits(self) -> Iterator[list[str]]:
        """List the lines that make the host wait for the device, as ``file:line function``; empty on the CPU.

        The innermost line outside of torch counts. On a GPU torch warns of each such operation
        (`torch.cuda.set_sync_debug_mode`).
        """
        waits: list[str] = []
        if self.kind == "cpu":
            yield waits
        elif self.kind == "pretended":
            from tests.pretended_device import active_device

            seen = active_device()
            before = len(seen.waits)
            yield waits
            waits += [wait.caller for wait in seen.waits[before:]]
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("always")
                warnings.showwarning = lambda message, *_, **__: (  # type: ignore[assignment]
                    waits.append(_caller()) if "synchronizing CUDA operation" in str(message) else None
                )
                torch.cuda.set_sync_debug_mode("warn")
                try:
                    yield waits
                finally:
                    torch.cuda.set_sync_debug_mode("default")


def _caller() -> str:
    """Return the innermost line of Python that is neither torch's nor the warning's."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if "/torch/" not in path and path not in (__file__, warnings.__file__):
            path = path.removeprefix(f"{_ROOT}/").rpartition("site-packages/")[2]
            return f"{path}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "?"


def versions() -> dict[str, str | None]:
    """Return the versions that a result depends on."""
    found: dict[str, str | None] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "lightning": lightning.__version__,
        "python": platform.python_version(),
    }
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    with contextlib.suppress(ImportError):
        import transformers

        found["transformers"] = transformers.__version__
    return found
