"""Links that the files of `docs/` have to files outside of it: in the site they are text, as it has no such pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

DOCS = Path(__file__).parent


class OutsideLinks(SphinxPostTransform):
    """Replaces links to files of the repository by their text; comes before they are found to lead nowhere."""

    default_priority = 5

    def run(self, **kwargs: Any) -> None:
        """Look at all links of a page."""
        links = [node for kind in (addnodes.pending_xref, addnodes.download_reference) for node in self.find(kind)]
        for link in links:
            if self._is_outside(link["reftarget"]):
                link.replace_self(link.children)

    def find(self, kind: type[nodes.Element]) -> list[nodes.Element]:
        """Nodes of a kind that say where they lead."""
        return [node for node in self.document.findall(kind) if "reftarget" in node]

    def _is_outside(self, target: str) -> bool:
        # The path is that in the page, or, from the root, that of a page which includes a file of the root.
        page = Path(self.env.doc2path(self.env.docname))
        path = target.split("#")[0]
        places = [(base / f"{path}{end}").resolve() for base in (page.parent, DOCS, DOCS.parent) for end in ("", ".md")]
        found = [place for place in places if place.exists()]
        return bool(path) and bool(found) and not any(place.is_relative_to(DOCS) for place in found)


def setup(app: Sphinx) -> dict[str, Any]:
    """Tell Sphinx of it."""
    app.add_post_transform(OutsideLinks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
