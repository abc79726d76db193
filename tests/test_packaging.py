"""What a package index is told."""

from __future__ import annotations

import re

import pytest

from tests.documents import README, ROOT

pytest.importorskip("hatchling", reason="hatchling, which builds the package, is in the extra `dev`")

from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

from hatch_build import without_relative_links


def test_the_description_has_no_links_into_the_repository() -> None:
    text = without_relative_links(README.read_text())
    assert re.findall(r"\]\((?!https?:)", text) == []
    assert "All of it, with intervals and commands." in text
    assert "# lightning_hybrid" in text


def test_the_package_takes_that_description() -> None:
    metadata = ProjectMetadata(str(ROOT), PluginManager())
    assert metadata.core.readme == without_relative_links(README.read_text())
    assert metadata.core.readme_content_type == "text/markdown"
    assert metadata.version
