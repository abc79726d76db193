"""Writes the list of files and the import counts of the package into `docs/project/architecture.md`.

``python docs/draw_house.py`` writes them; with ``--check`` it fails if the page is out of date.
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
BEGIN, END = "<!-- written by docs/draw_house.py -->", "<!-- end -->"

# From the top. A subpackage imports only from those below it.
SUBPACKAGES = (
    "cli",
    "tuning",
    "strategy",
    "trainer",
    "checkpoint",
    "memory",
    "expert_parallel",
    "data_parallel",
    "tensor_parallel",
    "pipeline_parallel",
    "distributed",
    "config",
    "axes",
    "torch_internals",
)
WIDTH = 88


def package_of(path: Path) -> str:
    """Return the subpackage, or the file at the top."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def first_line(path: Path, width: int) -> str:
    """Return the first line of the docstring, or as many of its clauses as fit."""
    text = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0].rstrip(".")
    while len(text) > width:
        text = re.split(r"[:;,](?=[^:;,]*$)", text)[0] if re.search("[:;,]", text) else text[: width - 3] + "..."
    return text


def imported_packages(path: Path) -> Iterator[str]:
    """Return the subpackages that a file imports from, once for each import statement."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{node.names[0].name}"]
        yield from (name.split(".")[1] for name in names if name.startswith(f"{PACKAGE.name}."))


def files() -> str:
    """Return each subpackage with its files."""
    lines = []
    for package in SUBPACKAGES:
        top = PACKAGE / package
        lines += [f"── {package} " + "─" * (WIDTH - len(package) - 4)]
        paths = sorted(top.rglob("*.py")) if top.is_dir() else [top.with_suffix(".py")]
        for folder in sorted({path.parent for path in paths}, key=lambda folder: (folder != top, folder)):
            indent = "" if folder in (top, PACKAGE) else "  "
            if indent:
                lines.append(f"{folder.relative_to(top)}/")
            for path in (path for path in paths if path.parent == folder and path.name != "__init__.py"):
                lines.append(f"{indent}{path.stem:<{24 - len(indent)}} {first_line(path, WIDTH - 25)}".rstrip())
    return "\n".join(lines)


def imports() -> str:
    """Return the number of import statements from the subpackage of a row to that of a column."""
    counts = Counter((package_of(path), other) for path in PACKAGE.rglob("*.py") for other in imported_packages(path))
    names = [re.sub("_(?:parallel|internals)$", "", name) for name in SUBPACKAGES]
    width = max(map(len, names))
    lines = [" " * width + "".join(f"{name[:7]:>8}" for name in names[1:])]
    for row, package in enumerate(SUBPACKAGES[:-1]):
        others = enumerate(SUBPACKAGES[1:], start=1)
        cells = ["" if column <= row else str(counts[package, other] or "·") for column, other in others]
        lines.append(f"{names[row]:<{width}}" + "".join(f"{cell:>8}" for cell in cells))
    return "\n".join(line.rstrip() for line in lines)


def written() -> str:
    """Return the part of the page that is written here."""
    title = "Import statements, from the subpackage of a row to the subpackage of a column:"
    return f"{BEGIN}\n\n```\n{files()}\n```\n\n{title}\n\n```\n{imports()}\n```\n\n{END}"


def main() -> None:
    """Write the page, or check it."""
    text = DOCUMENT.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    new = f"{before}{written()}{after}"
    if "--check" not in sys.argv:
        DOCUMENT.write_text(new)
    elif new != text:
        sys.exit(f"{DOCUMENT.relative_to(ROOT)} is out of date; run `python docs/draw_house.py`.")


if __name__ == "__main__":
    main()
