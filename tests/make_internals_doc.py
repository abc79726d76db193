"""Makes `docs/project/lightning-internals.md` from docstrings: `python -m tests.make_internals_doc`."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from lightning_hybrid.trainer import lightning_internals

FILE = Path(__file__).parent.parent / "docs" / "project" / "lightning-internals.md"

_HEAD = """# What this package uses of Lightning's insides

Lightning has no public API for some things that a strategy with a pipeline has to know or to change. All that is
private is in one file,
[`trainer/lightning_internals.py`](../../lightning_hybrid/trainer/lightning_internals.py), and
[`tests/test_lightning_contract.py`](../../tests/test_lightning_contract.py) tries each function of it alone: when a new
version of Lightning or torchmetrics moves something, a test says within seconds what, and this table says what for.

This page is made from the docstrings of that file: `python -m tests.make_internals_doc`.
"""
_COLUMNS = ("function", "what it does, and why", "what is used or replaced", "what would break without")
_SECTIONS = ("Args", "Returns", "Raises", "Touches", "Without")


def sections(docstring: str) -> dict[str, str]:
    """The text of a docstring by section; what comes before all of them is ``""``."""
    found: dict[str, list[str]] = {"": []}
    current = ""
    for line in docstring.splitlines():
        head = re.match(rf"({'|'.join(_SECTIONS)}):(.*)", line)
        if head:
            current, line = head.groups()
            found[current] = []
        elif line.strip() and not line.startswith(" ") and current:
            raise ValueError(f"{line!r} stands behind the sections")
        found[current].append(line.strip())
    return {name: " ".join(" ".join(lines).split()) for name, lines in found.items()}


def row(name: str, docstring: str) -> str:
    """A function's row of the table."""
    text = sections(docstring)
    missing = [section for section in ("Touches", "Without") if not text.get(section)]
    if missing:
        raise ValueError(f"{name} does not say {missing}")
    cells = (f"`{name}`", text[""], text["Touches"], text["Without"])
    return "| " + " | ".join(_plain(cell) for cell in cells) + " |"


def _plain(cell: str) -> str:
    return re.sub(r":\w+:`(\w+)`", r"`\1`", cell).replace("``", "`").replace("|", r"\|")


def tables() -> dict[str, list[str]]:
    """The rows of the table by the headings that divide the file."""
    source = inspect.getsource(lightning_internals)
    _, *parts = re.split(r"^# -- (.*?) -+$", source, flags=re.MULTILINE)
    found = {}
    for heading, body in zip(parts[::2], parts[1::2], strict=True):
        names = [name for name in re.findall(r"^def (\w+)", body, re.MULTILINE) if not name.startswith("_")]
        found[heading] = [row(name, inspect.getdoc(getattr(lightning_internals, name)) or "") for name in names]
    return found


def document() -> str:
    """The whole page."""
    lines = [_HEAD]
    for heading, rows in tables().items():
        lines += [f"## {heading.capitalize()}", "", *_table(_COLUMNS, rows)]
    members = lightning_internals.STRATEGY_MEMBERS.items()
    lines += ["## Members of Lightning's `Strategy` and `ParallelStrategy`", ""]
    lines += ["`HybridStrategy` inherits from them, and uses or overrides these private members.", ""]
    lines += _table(("member", "what would break without"), [f"| `{name}` | {why} |" for name, why in members])
    return "\n".join(lines).rstrip("\n") + "\n"


def _table(columns: tuple[str, ...], rows: list[str]) -> list[str]:
    return ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|", *rows, ""]


if __name__ == "__main__":
    FILE.write_text(document())
