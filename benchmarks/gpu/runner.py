"""Runs parts, each in a process with a time limit, and writes every result as soon as it exists."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

__all__ = ["PREFIX", "Results", "run_part"]

#: Lines of a part's output that begin so are values.
PREFIX = "RESULT "
#: A part's process group has so many seconds between the signal that asks it to end and the one that ends it.
GRACE = 3.0
#: The characters of a failed part's output that are kept.
KEPT = 4000


class Results:
    """The result file of one device: ``{"device": ..., "parts": {name: result}}``.

    Args:
        path: The file; it is read if it exists.
        device: The name of the device.
    """

    def __init__(self, path: Path, device: str) -> None:
        self._path = path
        self._all: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self._all = {"device": device, "parts": self._all.get("parts", {})}

    @property
    def parts(self) -> dict[str, dict[str, Any]]:
        """Results by name of the part."""
        parts: dict[str, dict[str, Any]] = self._all["parts"]
        return parts

    def is_answered(self, name: str) -> bool:
        """Return whether the part has been measured before."""
        return self.parts.get(name, {}).get("status") == "measured"

    def write(self, name: str, result: dict[str, Any]) -> None:
        """Keep the result of a part, and write the file: complete or not at all."""
        self.parts[name] = result
        self._path.parent.mkdir(parents=True, exist_ok=True)
        beside = self._path.with_suffix(".part")
        beside.write_text(json.dumps(self._all, indent=1) + "\n")
        beside.replace(self._path)


def run_part(name: str, command: Sequence[str], seconds: float, results: Results, **about: Any) -> dict[str, Any]:
    """Run the process of one part, and write its values as they arrive.

    Args:
        name: The name of the part.
        command: Prints values as lines of JSON behind :data:`PREFIX`; exit code 0 means that the part is measured.
        seconds: The time limit. The process and its children are ended after it.
        results: Get the result, each time a value arrives.
        about: Further entries of the result, such as versions.

    Returns:
        The result: ``status`` is ``"measured"``, ``"failed"`` or ``"timed out"``.
    """
    result: dict[str, Any] = {"status": "running", "date": time.strftime("%Y-%m-%d"), **about, "values": {}}
    begin = time.monotonic()
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)
        timer = threading.Timer(seconds, _end, [process])
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(PREFIX):
                result["values"].update(json.loads(line.removeprefix(PREFIX)))
                results.write(name, result)
            else:
                log.write(line)
                log.flush()
        code = process.wait()
        timer.cancel()
        is_late = time.monotonic() - begin >= seconds
        _end(process)  # ranks that it has left behind
        log.seek(0)
        output = log.read()
    result["seconds"] = round(time.monotonic() - begin, 1)
    result["status"] = "measured" if code == 0 else "timed out" if is_late else "failed"
    if code:
        result["error"] = output[-KEPT:]
    results.write(name, result)
    return result


def _end(process: subprocess.Popen[str]) -> None:
    """End a process and its children: they are one process group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
            for _ in _until(time.monotonic() + GRACE):
                os.killpg(process.pid, 0)


def _until(end: float) -> Iterator[None]:
    while time.monotonic() < end:
        yield
        time.sleep(0.05)
