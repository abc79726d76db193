"""The README as a package index shows it: without the links and pictures that lead into the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_RELATIVE = r"\((?!https?:)[^)]+\)"


def without_relative_links(text: str) -> str:
    """Markdown in which pictures of the repository are left out, and links to its files are their text."""
    return re.sub(rf"\[([^\]]+)\]{_RELATIVE}", r"\1", re.sub(rf"!\[[^\]]*\]{_RELATIVE}\n\n", "", text))


class ReadmeHook(MetadataHookInterface):
    """Gives hatchling the description of the package."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set `readme`, which `pyproject.toml` says is dynamic."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": without_relative_links(text)}
