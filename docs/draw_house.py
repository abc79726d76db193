"""Draws the package into `docs/project/architecture.md`, from the source: each file, and which wing imports which.

``python docs/draw_house.py`` writes it; with ``--check`` it only says whether what is written is what is so.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "lightning_hybrid"
DOCUMENT = ROOT / "docs" / "project" / "architecture.md"
BEGIN, END = "<!-- drawn by docs/draw_house.py -->", "<!-- end of the drawing -->"

# From the top; what stands on one line may not import each other, but for what the contracts in `pyproject.toml` say.
WINGS = (
    "cli",
    "strategy",
    "trainer",
    "checkpoint",
    "memory",
    "data_parallel",
    "tensor_parallel",
    "pipeline_parallel",
    "distributed",
    "config",
)
WIDTH = 118


def wing_of(path: Path) -> str:
    """The wing, or the file at the top."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def first_line(path: Path, width: int) -> str:
    """What a file says of itself: its first sentence, or as many clauses of it as there is room for."""
    text = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0].rstrip(".")
    while len(text) > width:
        text = re.split(r"[:;,](?=[^:;,]*$)", text)[0] if re.search("[:;,]", text) else text[: width - 3] + "..."
    return text


def imported_wings(path: Path) -> Iterator[str]:
    """The wings that a file imports from, once for each import statement."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{node.names[0].name}"]
        yield from (name.split(".")[1] for name in names if name.startswith(f"{PACKAGE.name}."))


def rooms() -> str:
    """Each wing as a box with its files."""
    lines = []
    for wing in WINGS:
        top = PACKAGE / wing
        lines.append(f"┌─ {wing} " + "─" * (WIDTH - len(wing) - 5) + "┐")
        paths = sorted(top.rglob("*.py")) if top.is_dir() else [top.with_suffix(".py")]
        folders = sorted({path.parent for path in paths}, key=lambda folder: (folder != top, folder))
        for folder in folders:
            if folder != top and top.is_dir():
                title = f"{folder.relative_to(top)}/"
                lines.append(f"│ {title:<{WIDTH - 4}} │")
            indent = "" if folder in (top, PACKAGE) else "  "
            for path in (path for path in paths if path.parent == folder and path.name != "__init__.py"):
                text = f"{indent}{path.stem:<{24 - len(indent)}} {first_line(path, WIDTH - 29)}"
                lines.append(f"│ {text:<{WIDTH - 4}} │")
        lines.append("└" + "─" * (WIDTH - 2) + "┘")
    return "\n".join(lines)


def arrows() -> str:
    """How many import statements go from the wing of a row to that of a column."""
    counts = Counter((wing_of(path), wing) for path in PACKAGE.rglob("*.py") for wing in imported_wings(path))
    width = max(map(len, WINGS))
    lines = [" " * width + "".join(f"{wing[:9]:>10}" for wing in WINGS[1:])]
    for row, wing in enumerate(WINGS[:-1]):
        others = enumerate(WINGS[1:], start=1)
        cells = ["" if column <= row else str(counts[wing, other] or "·") for column, other in others]
        lines.append(f"{wing:<{width}}" + "".join(f"{cell:>10}" for cell in cells))
    return "\n".join(line.rstrip() for line in lines)


def drawing() -> str:
    """All that is drawn."""
    title = "Import statements, from the wing of a row to that of a column:"
    return f"{BEGIN}\n\n```\n{rooms()}\n```\n\n{title}\n\n```\n{arrows()}\n```\n\n{END}"


def main() -> None:
    """Draw, or check."""
    text = DOCUMENT.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    drawn = f"{before}{drawing()}{after}"
    if "--check" not in sys.argv:
        DOCUMENT.write_text(drawn)
    elif drawn != text:
        sys.exit(f"{DOCUMENT.relative_to(ROOT)} shows an older house; run `python docs/draw_house.py`.")


if __name__ == "__main__":
    main()
