"""The documents say what is so."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
DOCS = TESTS.parent / "docs"
README = TESTS.parent / "README.md"


def marked() -> dict[int, list[str]]:
    """The tests that carry the number of a row, by row."""
    found: dict[int, list[str]] = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.FunctionDef):
                continue
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.rows":
                    for number in decorator.args:
                        assert isinstance(number, ast.Constant)
                        found[int(str(number.value))].append(f"{path.stem}::{node.name}")
    return dict(found)


def test_each_feature_of_lightning_has_its_row_and_each_row_its_tests() -> None:
    lines = (DOCS / "lightning-features.md").read_text().splitlines()
    rows = {int(line.split("|")[1]): line for line in lines if re.match(r"\| \d+ \|", line)}
    assert list(rows) == list(range(1, 77))
    tests = marked()
    for number, line in rows.items():
        assert sorted(re.findall(r"`(test_\w+::\w+)`", line)) == sorted(tests.get(number, [])), f"row {number}: {line}"
        assert number in tests or "| waits |" in line, f"row {number} has no test"


@pytest.mark.parametrize("path", [README, *sorted(DOCS.glob("*.md"))], ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", path.read_text()):
        assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_the_house_is_drawn_as_it_is() -> None:
    drawn = subprocess.run([sys.executable, DOCS / "draw_house.py", "--check"], capture_output=True, text=True)
    assert drawn.returncode == 0, drawn.stderr


def test_files_that_documents_name_exist() -> None:
    """Files of the package, in the tables of ways and in the README's reading order."""
    package = TESTS.parent / "lightning_hybrid"
    for path in (README, DOCS / "architecture.md"):
        names = re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", path.read_text())
        assert names
        for name in names:
            root = TESTS.parent if (TESTS.parent / name.split("/")[0]).exists() else package
            assert (root / name).exists(), f"{path.name}: {name}"
