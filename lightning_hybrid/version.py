"""The version of this package, and the other versions that a bug report has to name."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

__version__ = "0.2.0"

_PACKAGES = ("torch", "lightning", "transformers")


def environment() -> Iterator[tuple[str, str]]:
    """Return names and versions of the packages that are installed, of Python and the platform, and the devices."""
    for name in _PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, "not installed"
    yield "Python", platform.python_version()
    yield "platform", platform.platform()
    yield "devices", _devices()


def _devices() -> str:
    """Return the GPUs that the driver lists: to ask torch takes seconds."""
    if shutil.which("nvidia-smi") is None:
        return "none (there is no nvidia-smi)"
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({error})"
    counts = Counter(done.stdout.splitlines())
    return ", ".join(f"{count} x {name}" for name, count in counts.items()) or "none"
