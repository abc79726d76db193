"""Answer the questions that only a GPU answers, most uncertain first, within a time budget.

    python -m benchmarks.gpu                       on a machine with a GPU
    python -m benchmarks.gpu --tiny                a rehearsal without one
    python -m benchmarks.gpu --parts lora --again

Each part runs in a process of its own with a time limit, and its values are written as soon as they exist. Parts that
have been measured on this device before are not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.runner import PREFIX, Results, run_part
from benchmarks.gpu.table import PARTS, Part, Report

FOLDER = Path(__file__).parent
#: A rehearsal is limited by the budget alone; on a shared CPU each part starts slowly.
REHEARSAL_SECONDS = 240.0
#: A part does not start with less than this left.
LEAST_SECONDS = 5.0


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [part.name for part in PARTS]
    parser.add_argument("--minutes", type=float, default=9.0, help="time budget (default: 9)")
    parser.add_argument("--tiny", action="store_true", help="rehearse with tiny models, without a GPU")
    parser.add_argument("--parts", nargs="+", choices=names, default=names, metavar="PART", help=", ".join(names))
    parser.add_argument("--again", action="store_true", help="run parts again that have been measured")
    parser.add_argument("--output", type=Path, help="folder of the result file (default: results; build with --tiny)")
    parser.add_argument("--child", nargs=3, metavar=("PART", "PLACE", "RESULTS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # processes that have asked CUDA cannot be copied
    if options.child:
        _answer(*options.child, tiny=options.tiny)
        return
    begin = time.monotonic()
    about = _describe()
    if about["device"] is None and not options.tiny:
        raise SystemExit("There is no CUDA device. Rehearse with --tiny, or run this on a machine with a GPU.")
    device = str(about.pop("device") if not options.tiny else "rehearsal")
    folder = options.output or (FOLDER.parents[1] / "build" / "gpu" if options.tiny else FOLDER / "results")
    path = folder / f"{re.sub('[^a-z0-9]+', '_', device.lower())}.json"
    if options.tiny:
        path.unlink(missing_ok=True)
    results = Results(path, device)
    if options.again:
        for name in options.parts:
            results.parts.pop(name, None)
    rows: list[tuple[str, str, float, str]] = []
    for part in (part for part in PARTS if part.name in options.parts):
        left = 60 * options.minutes - (time.monotonic() - begin)
        rows.append(_row(part, results, about, left, path, tiny=options.tiny))
        print(f"{rows[-1][0]:<22}{rows[-1][1]:<14}{rows[-1][2]:6.1f} s", flush=True)
    print(f"\n{device}, {time.strftime('%Y-%m-%d')}, {_text(about['versions'])}\n")
    for name, status, seconds, text in rows:
        print(f"{name:<22}{status:<14}{seconds:6.1f} s  {text}")
    print(f"\nwritten to {path}")
    if any(status in ("failed", "timed out") for _, status, _, _ in rows):
        raise SystemExit(1)


def _row(
    part: Part, results: Results, about: Mapping[str, Any], left: float, path: Path, *, tiny: bool
) -> tuple[str, str, float, str]:
    """Run a part if it has to be, and return its row: name, status, seconds, finding."""
    if results.is_answered(part.name):
        known = results.parts[part.name]
        return part.name, "known", known["seconds"], known["values"].get("summary", "")
    if left < LEAST_SECONDS:
        return part.name, "not reached", 0.0, part.question
    place = part.rehearsal if tiny else "cuda"
    command = [sys.executable, "-m", "benchmarks.gpu", "--child", part.name, place, str(path)]
    limit = REHEARSAL_SECONDS if tiny else part.seconds
    command += ["--tiny"] if tiny else []
    result = run_part(part.name, command, min(left, limit), results, **about, place=place)
    error = result.get("error", "").strip().splitlines()
    is_cut = result["status"] == "timed out" and left < limit  # by the budget, which is not a fault of the part
    finding = result["values"].get("summary") or "".join(error[-1:])
    return part.name, "out of budget" if is_cut else result["status"], result["seconds"], finding


def _answer(name: str, kind: str, path: str, *, tiny: bool) -> None:
    """Measure one part in this process; its values are printed."""
    warnings.filterwarnings("ignore")
    from benchmarks.gpu.place import Place

    def show(**values: Any) -> None:
        print(f"{PREFIX}{json.dumps(values)}", flush=True)

    results = Results(Path(path), "")
    earlier = {part: result.get("values", {}) for part, result in results.parts.items()}
    next(part for part in PARTS if part.name == name).measure(Place(kind, tiny=tiny), Report(show, earlier))


def _describe() -> dict[str, Any]:
    """Return the device's name, or ``None``, and versions; asked in another process, which leaves the device alone."""
    program = (
        "import json, torch; from benchmarks.gpu.place import versions;"
        "name = torch.cuda.get_device_name() if torch.cuda.is_available() else None;"
        "print(json.dumps({'device': name, 'versions': versions()}))"
    )
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _text(versions: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version)


if __name__ == "__main__":
    main()
