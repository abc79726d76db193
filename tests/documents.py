"""The pages for users, and the blocks of code in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted(DOCS.rglob("*.md"))]
PAGES += sorted((ROOT / "benchmarks").rglob("*.md"))


def page_id(path: Path) -> str:
    """A page's name in the list of tests."""
    return str(path.relative_to(ROOT))


@dataclass(frozen=True)
class Block:
    """A fenced block: the page, the line after its fence, what the fence says it is, and the text."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{page_id(self.page)}:{self.line}"

    @property
    def is_script(self) -> bool:
        """Whether it can be run as it stands."""
        return self.language == "python" and 'if __name__ == "__main__":' in self.text


def blocks(page: Path) -> list[Block]:
    """Return all blocks of a page, without the indentation of lists."""
    found, text = [], page.read_text()
    for match in re.finditer(r"^( *)(```+)(.*)\n((?:.*\n)*?)\1\2 *$", text, re.MULTILINE):
        indent, _, language, inside = match.groups()
        inside = re.sub(rf"^{indent}", "", inside, flags=re.MULTILINE)
        found.append(Block(page, text[: match.start()].count("\n") + 2, language.strip(), inside))
    return found


BLOCKS = [block for page in PAGES for block in blocks(page)]
SCRIPTS = [block for block in BLOCKS if block.is_script]
