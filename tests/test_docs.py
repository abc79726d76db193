"""The documents say what is so."""

from __future__ import annotations

import ast
import inspect
import re
import runpy
from collections import defaultdict
from pathlib import Path

import pytest
from lightning.pytorch.strategies import StrategyRegistry

import lightning_hybrid
from lightning_hybrid import HybridStrategy
from lightning_hybrid.cli.main import COMMANDS
from tests.documents import DOCS, PAGES, README, ROOT, blocks, page_id

TESTS = ROOT / "tests"
PACKAGE = ROOT / "lightning_hybrid"
# Words of our own for what the field has others for.
JARGON = re.compile(
    r"\b(wholes|twins?|trays?|wish(es)?|reckon(s|ed|ing)?|stand-ins?)\b|`(Division|Placement)`", re.IGNORECASE
)


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


def rows_of(page: str) -> dict[int, str]:
    """The numbered rows of the tables of a page."""
    lines = (DOCS / page).read_text().splitlines()
    numbered = [line for line in lines if re.match(r"\| \d+ \|", line)]
    assert [int(line.split("|")[1]) for line in numbered] == list(range(1, 77))
    return {int(line.split("|")[1]): line for line in numbered}


def test_each_feature_of_lightning_has_its_row_and_each_row_its_tests() -> None:
    features, tests = rows_of("reference/lightning-features.md"), marked()
    for number, line in rows_of("project/lightning-features-tests.md").items():
        assert sorted(re.findall(r"`(test_\w+::\w+)`", line)) == sorted(tests.get(number, [])), f"row {number}: {line}"
        assert number in tests or "| waits |" in features[number], f"row {number} has no test"


def test_each_feature_of_lightning_works_or_is_refused() -> None:
    for line in rows_of("reference/lightning-features.md").values():
        _, _, behaviour, works, _, _ = line.split("|")
        assert behaviour.strip()
        assert re.match(r" (yes|refused|waits)\b", works), line


def anchors(page: Path) -> set[str]:
    """What can follow a ``#``: headings, as a browser is given them."""
    headings = re.findall(r"^#+ (.*)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{page_id(page)}: {target}"
        assert not anchor or anchor in anchors(found), f"{page_id(page)}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_pages_speak_the_language_of_the_field(page: Path) -> None:
    assert [match[0] for match in JARGON.finditer(page.read_text())] == []


def test_no_long_text_stands_twice() -> None:
    """More than 30 words in a row, without code and what the program writes."""
    seen: dict[tuple[str, ...], str] = {}
    for page in PAGES:
        text = re.sub(r"<!-- written:.*?<!-- end -->|^( *)(```+).*?^\1\2 *$", "", page.read_text(), flags=re.S | re.M)
        words = re.findall(r"[\w`'.]+", text.lower())
        for start in range(len(words) - 30):
            other = seen.setdefault(tuple(words[start : start + 31]), page_id(page))
            assert other == page_id(page), f"{page_id(page)}, {other}: {' '.join(words[start : start + 31])}"


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 120


def test_the_job_file_of_the_page_goes_on_as_that_of_the_examples() -> None:
    page = next(block.text for block in blocks(DOCS / "guides" / "slurm.md") if "#SBATCH" in block.text)
    example = (ROOT / "examples" / "slurm" / "train.sh").read_text()
    own = r"# (A training|  sbatch|The config)|CONFIG=|export PYTHONPATH|srun |    --trainer|#SBATCH --(nt|cpu)"
    expected = [line for line in example.splitlines() if not re.match(own, line)]
    shown = [re.sub(r"^(#SBATCH \S+) .*", r"\1", line) for line in page.splitlines()]
    assert len(expected) > 10
    assert [line for line in shown if line in expected] == expected


def written(kind: str) -> list[str]:
    """What `docs/write_reference.py` writes of a kind, by the comments in the pages."""
    text = "".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    return " ".join(re.findall(rf"^<!-- written: {kind} (.*) -->$", text, re.MULTILINE)).split()


def test_each_argument_stands_once_in_the_reference() -> None:
    kinds = (HybridStrategy, lightning_hybrid.Faults, lightning_hybrid.Launch, lightning_hybrid.Tuning)
    assert sorted(written("arguments")) == sorted(name for kind in kinds for name in inspect.signature(kind).parameters)


def test_each_public_name_is_in_the_reference() -> None:
    text = "".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    for name in lightning_hybrid.__all__:
        assert name == "__version__" or f"lightning_hybrid.{name}" in text, name


def test_each_hook_and_each_command_has_its_section_in_the_reference() -> None:
    hooks = [*lightning_hybrid.ModuleHooks.__annotations__, *vars(lightning_hybrid.ModuleHooks)]
    public = {f"lightning_hybrid:ModuleHooks.{name}" for name in hooks if not name.startswith("_")}
    assert public <= set(written("members"))
    assert sorted(written("command")) == sorted(COMMANDS)


def test_names_of_strategies_in_the_documents_are_registered() -> None:
    for page in PAGES:
        for name in re.findall(r"[\"' ](hybrid(?:_(?:dp|tp|pp|zero)\d+)*)[\"'}]", page.read_text()):
            assert name in StrategyRegistry.available_strategies(), f"{page_id(page)}: {name}"


def texts_of_the_package() -> list[str]:
    """The texts in its source, with ``…`` for values, without marks of code."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return [" ".join(text.replace("`", "").split()) for text in found]


def test_errors_in_the_reference_are_those_of_the_program() -> None:
    page, texts = (DOCS / "reference" / "errors.md").read_text(), texts_of_the_package()
    own = page[: page.index("## Errors from other libraries")]
    codes = re.findall(r"^### LH\d+\n\n`(.*)`$", own, re.MULTILINE)
    assert len(codes) == own.count("### LH")
    rows = codes + re.findall(r"^\| `(.*?)` \|", own, re.MULTILINE)
    for row in rows:
        assert any(has_in_order(text, [part.strip() for part in row.split("…")]) for text in texts), row


def has_in_order(text: str, parts: list[str]) -> bool:
    """Whether the parts follow each other in a text."""
    end = 0
    for part in parts:
        start = text.find(part, end)
        if start < 0:
            return False
        end = start + len(part)
    return True


def test_tests_that_fail_with_torchs_parts_exist() -> None:
    section = (DOCS / "project" / "architecture.md").read_text().partition("\n## Why not torch's own\n")[2]
    _, _, *rows = re.findall(r"^\|.*\|$", section, re.MULTILINE)
    assert rows
    for row in rows:
        *_, cell, _ = row.split("|")
        names = re.findall(r"`((?:\w+/)*\w+\.py)::(\w+)`", cell)
        benchmarks = re.findall(r"`python -m benchmarks\.(\w+)`", cell)
        assert names or benchmarks, row
        assert all((ROOT / "benchmarks" / benchmark).is_dir() for benchmark in benchmarks), row
        for file, name in names:
            defined = ast.parse((TESTS / file).read_text()).body
            assert any(isinstance(node, ast.FunctionDef) and node.name == name for node in defined), f"{file}::{name}"


def test_images_are_what_the_script_draws() -> None:
    drawn = runpy.run_path(str(DOCS / "draw_images.py"))["images"]()
    assert drawn.keys() == {path.name for path in (DOCS / "images").iterdir()}
    for name, content in drawn.items():
        assert (DOCS / "images" / name).read_text() == content, name


def test_files_that_documents_name_exist() -> None:
    """Files of the package, in the tables of ways and in the reading order."""
    for path in (DOCS / "project" / "package.md", DOCS / "project" / "architecture.md"):
        names = re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", path.read_text())
        assert names
        for name in names:
            root = ROOT if (ROOT / name.split("/")[0]).exists() else PACKAGE
            assert (root / name).exists(), f"{path.name}: {name}"
