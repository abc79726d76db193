"""Lint of the language: plain English and the terms of the field, in pages, docstrings, comments and messages.

``python docs/plain_words.py`` fails if there are more findings than :data:`MOST`. ``--list`` prints each finding;
``--list PATH ...`` only those of some files or folders.

Users read the README, the pages of the site, the changelog, comments in `configs/` and `examples/`, docstrings of
public names, help texts and messages. Maintainers read all other docstrings and comments, and the pages of the project.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "lightning_hybrid"

#: Allowed findings by reader.
MOST = {"users": 0, "maintainers": 0}

#: Pages for maintainers.
PROJECT_PAGES = ("docs/project/",)

_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

_START = r"(?:^|(?<=[.!;|]\s)|(?<=[.!]\)\s))"  # of a sentence, or of a cell
#: Patterns with the remedy for each. Matches are reported as they are, so patterns are as narrow as they can be.
RULES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.MULTILINE), remedy)
    for pattern, remedy in (
        (
            _START + r"(?:What|Who|Whoever|Whose|That of|Those of|Of)\b(?! course)[^?.]*(?=[.;|]|$)(?!\?)",
            "begin with a noun",
        ),
        (_START + r"Whether\b", "'If True, ...', or a verb"),
        (r"\b(?:that|those) (?:of|which) (?:a|an|the|its|their|all|each|one)\b", "repeat the noun"),
        (r"\bsuch ones?\b|\bthose that\b|\bof those\b|\bof which (?:there|it|they)\b", "repeat the noun"),
        (
            r"(?<![Tt]here )\b(?:is|are|was|were) no (?!longer|more\b|less\b|fewer\b|other\b)\w+",
            "'is not a ...', 'has no ...'",
        ),
        (r"\b[Nn]obody\b|\blonger than nothing\b|\b[Ss]omebody\b", "name the actor, or use the passive"),
        (r"\b(?:go|goes|going|went|gone) on\b", "'resume', 'continue'"),
        (r"\b(?:is|are|was|were) (?:told|said to|let)\b", "'receives', 'is reported as'"),
        (r"\b(?:hears?|meets?) (?:of|from)\b|\bstands? (?:beside|for|in|on|once|still)\b|\blies? (?:in|on)\b", "'is'"),
        (r"\btravels?\b|\btravell(?:ed|ing)\b", "'is sent', 'transfer'"),
        (r"\b(?:anew|likewise|thereof|as ever|beside|besides)\b", "'again', 'also', 'as usual', 'next to'"),
        (r"\b(?:mended|mends?|mending)\b", "'fix'"),
        (r"\b(?:microbatches|ranks|layers|bytes|seconds) more\b|\bas many more\b", "'extra microbatches'"),
        (
            r"\b(?:so|as) (?:does|do) who\b|\bwho(?:ever)? (?:reads|keeps|has|wants|needs|calls|asks)\b",
            "'you', the rank",
        ),
        (
            r"\b(?:learnt|neighbours?|colours?|behaviours?|(?:initial|penal|recogn|optim|normal|serial|summar|organ|real)"
            r"is(?:e[sd]?|ing|ation))\b",
            "American spelling",
        ),
        (r"\b\d+(?:\.\d+)? %", "'27.3%'"),
        (
            r"\bshared layers?\b|\b(?:layers?|ranks) that share|\branks? shares? (?:a |the )?(?:layer|sequence)",
            "'tensor-parallel'",
        ),
        (r"\bshares? of (?:a |the )?(?:sequence|layer)s?|\bin shares\b", "'sequence shard', 'shard'"),
        (
            r"\bdivided (?:module|class)|\bundivided\b|\bmade whole\b|\bwhole again\b",
            "'sharded', 'full model', 'gathered'",
        ),
        (r"\babsent values?\b|\bstand-ins?\b", "'fake tensor'"),
        (r"\bleases?\b|\bgives? (?:a )?signs?\b|\bsigns? of life\b", "'heartbeat'"),
        (r"\boptimizes by hand\b", "'manual optimization'"),
        (r"\bfullest\b", "'rank with the highest memory'"),
        (r"(?<!five-)\b(?:pictures|the error stream)\b", "'images', 'stderr'"),
        (r"\bthe house\b|\bwings?\b", "'package', 'subpackage'"),
        (r"\bhalf weights?\b|\bmasters\b", "'half-precision weights', 'master weights'"),
    )
)


@dataclass(frozen=True)
class Text:
    """A piece of text.

    Attributes:
        path: The file.
        line: The line of its first character.
        text: The text, without code.
        is_users: Whether users read it.
    """

    path: Path
    line: int
    text: str
    is_users: bool

    @property
    def reader(self) -> str:
        """Return who reads it, as a key of :data:`MOST`."""
        return "users" if self.is_users else "maintainers"

    def findings(self) -> Iterator[tuple[int, str, str]]:
        """Return the line, the words and the remedy of each finding."""
        for pattern, remedy in RULES:
            for match in pattern.finditer(self.text):
                yield self.line + self.text[: match.start()].count("\n"), " ".join(match[0].split())[:60], remedy


def _without_code(text: str) -> str:
    """Blank code out, and keep the lines."""

    def blank(match: re.Match[str]) -> str:
        return "\n" * match[0].count("\n") or "CODE"

    for pattern in (r"^ *(```+|~~~+)[^\n]*\n.*?^ *\1 *$", r"<!--.*?-->", r"``[^`]+``", r"`[^`\n]+`", r"\]\([^)]*\)"):
        text = re.sub(pattern, blank, text, flags=re.DOTALL | re.MULTILINE)
    return text


def texts_of_page(path: Path) -> Iterator[Text]:
    """Return the text of a page."""
    name = path.relative_to(ROOT).as_posix()
    yield Text(path, 1, _without_code(path.read_text()), not name.startswith(PROJECT_PAGES))


def texts_of_source(path: Path, public: frozenset[str]) -> Iterator[Text]:
    """Return docstrings, comments and messages of a source file.

    Args:
        path: The file.
        public: The names of public classes and functions.
    """
    source = path.read_text()
    tree = ast.parse(source)
    docstrings = set[int]()
    for node, is_public in _with_visibility(tree, public):
        document = ast.get_docstring(node, clean=False)
        if document is not None:
            constant = node.body[0].value  # type: ignore[attr-defined]
            docstrings.add(id(constant))
            yield Text(path, constant.lineno, _without_code(document), is_public)
    for part in ast.walk(tree):
        if id(part) in docstrings:
            continue
        if isinstance(part, ast.JoinedStr):
            pieces = [value.value if isinstance(value, ast.Constant) else "VALUE" for value in part.values]
            docstrings.update(map(id, part.values))
            yield Text(path, part.lineno, _without_code("".join(map(str, pieces))), True)
        elif isinstance(part, ast.Constant) and isinstance(part.value, str) and " " in part.value:
            yield Text(path, part.lineno, _without_code(part.value), True)
    yield from _comments(path, source, is_users=False)


def _with_visibility(tree: ast.Module, public: frozenset[str]) -> Iterator[tuple[_Documented, bool]]:
    """Return modules, classes and functions, each with whether users read its docstring."""

    def walk(node: ast.AST, is_public: bool) -> Iterator[tuple[_Documented, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                shown = child.name in public if isinstance(node, ast.Module) else is_public
                shown &= not child.name.startswith("_") or child.name == "__init__"
                yield child, shown
                yield from walk(child, shown)

    yield tree, False
    yield from walk(tree, False)


def _comments(path: Path, source: str, *, is_users: bool) -> Iterator[Text]:
    """Return the comments of a source file; those on lines that follow each other as one text."""
    lines: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            lines.append((token.start[0], token.string.lstrip("#: ")))
    yield from _joined(path, lines, is_users)


def _joined(path: Path, lines: list[tuple[int, str]], is_users: bool) -> Iterator[Text]:
    start, parts = 0, list[str]()
    for number, text in [*lines, (-1, "")]:
        if parts and number != start + len(parts):
            yield Text(path, start, _without_code("\n".join(parts)), is_users)
            parts = []
        if not parts:
            start = number
        parts.append(text)


def texts_of_config(path: Path) -> Iterator[Text]:
    """Return the comments of a YAML file."""
    lines = [
        (number, line.split("#", 1)[1].strip())
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if "#" in line
    ]
    yield from _joined(path, lines, True)


def public_names() -> frozenset[str]:
    """Return the names that the package exports."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    values = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    return frozenset(name for value in values for name in ast.literal_eval(value))


def all_texts() -> Iterator[Text]:
    """Return every text that is checked."""
    public = public_names()
    for page in [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]:
        yield from texts_of_page(page)
    for path in sorted(PACKAGE.rglob("*.py")):
        yield from texts_of_source(path, public)
    for path in sorted((ROOT / "examples").rglob("*.py")):
        yield from _comments(path, path.read_text(), is_users=True)
    for path in sorted((ROOT / "configs").rglob("*.yaml")):
        yield from texts_of_config(path)


def main() -> int:
    """Check all texts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", nargs="*", type=Path, metavar="PATH", help="print each finding, of these paths")
    options = parser.parse_args()
    found = [(text, *finding) for text in all_texts() for finding in text.findings()]
    if options.list is not None:
        wanted = [path.resolve() for path in options.list] or [ROOT]
        for text, line, words, remedy in found:
            if any(text.path.is_relative_to(path) for path in wanted):
                print(f"{text.path.relative_to(ROOT)}:{line}: [{text.reader}] {words!r}: {remedy}")
        return 0
    counts = Counter(text.reader for text, *_ in found)
    print(*(f"{counts[reader]} findings in text for {reader}, at most {most}." for reader, most in MOST.items()))
    if any(counts[reader] > most for reader, most in MOST.items()):
        print("`python docs/plain_words.py --list` prints them.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
