"""Version of this package, and the other versions to name in a bug report."""

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
    """Yield the names and versions of the relevant packages, of Python and the platform, and the names of the devices.

    ``lightning-hybrid --version`` prints these pairs.

    Yields:
        A name and its value, such as ``("torch", "2.13.0")``.
    """
    for name in _PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, "not installed"
    yield "Python", platform.python_version()
    yield "platform", platform.platform()
    yield "devices", _devices()


def _devices() -> str:
    """Return the names of the GPUs that `nvidia-smi` lists, because importing torch takes seconds."""
    if shutil.which("nvidia-smi") is None:
        return "none (there is no nvidia-smi)"
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({error})"
    counts = Counter(done.stdout.splitlines())
    return ", ".join(f"{count} x {name}" for name, count in counts.items()) or "none"
