"""Draws the images of `docs/concepts/parallelism-in-five-pictures.md` into `docs/images`.

``python docs/draw_images.py`` writes them; with ``--check`` it fails if a file differs from what it draws.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from lightning_hybrid.pipeline_parallel.schedules import Kind, build  # noqa: E402
from lightning_hybrid.pipeline_parallel.timeline import simulate  # noqa: E402

IMAGES = ROOT / "docs" / "images"
#: Pixels. The text column of the site is as wide, so a font size is what a reader sees.
WIDTH = 736
SMALL, NORMAL, TITLE = 13, 14, 16
#: Fills that suit a light and a dark page, with white text on them.
BLUE, ORANGE, GREEN, PURPLE = "#1f5fa8", "#b04f00", "#2b7a4b", "#7a4da3"
COLORS = (BLUE, ORANGE, GREEN, PURPLE)
#: Fills and strokes by class, on a light and on a dark page.
LIGHT = {"page": "#ffffff", "ink": "#24292f", "faint": "#57606a", "panel": "#eef1f4", "line": "#57606a"}
DARK = {"page": "#131416", "ink": "#e6e8eb", "faint": "#9aa4af", "panel": "#2a2e33", "line": "#9aa4af"}


class Drawing:
    """An SVG image.

    Args:
        title: The heading.
        height: In pixels.
    """

    def __init__(self, title: str, height: int) -> None:
        self.height = height
        self.parts: list[str] = []
        self.title = title
        self.text(16, 26, title, size=TITLE, anchor="start", bold=True)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: int = SMALL,
        anchor: str = "middle",
        bold: bool = False,
        color: str = "ink",
    ) -> None:
        """Write a line of text.

        Args:
            x: Of its anchor.
            y: Of its baseline.
            text: The text.
            size: Of the font.
            anchor: ``"start"``, ``"middle"`` or ``"end"``.
            bold: If True, in bold.
            color: A class, or a color.
        """
        look = f'fill="{color}"' if color.startswith("#") else f'class="{color}"'
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" {look}{weight}>{escape(text)}</text>'
        )

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        color: str = "panel",
        lines: Sequence[str] = (),
        is_round: bool = True,
    ) -> None:
        """Draw a box with lines of text in its middle.

        Args:
            x: Of its left side.
            y: Of its upper side.
            width: In pixels.
            height: In pixels.
            color: A class, or a color.
            lines: The text.
            is_round: If True, with round corners.
        """
        look = f'fill="{color}"' if color.startswith("#") else f'class="{color}"'
        corners = ' rx="5"' if is_round else ""
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"{corners} {look}/>')
        ink = "#ffffff" if color.startswith("#") else "ink"
        for number, line in enumerate(lines):
            baseline = y + height / 2 + 5 + (number - (len(lines) - 1) / 2) * 17
            self.text(x + width / 2, baseline, line, color=ink)

    def arrow(self, x1: float, y1: float, x2: float, y2: float, *, both: bool = False) -> None:
        """Draw an arrow from the first point to the second one.

        Args:
            x1: Of the first point.
            y1: Of the first point.
            x2: Of the second point.
            y2: Of the second point.
            both: If True, the first point has a head too.
        """
        start = ' marker-start="url(#head)"' if both else ""
        ends = f'x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"'
        self.parts.append(f'<line {ends} class="line"{start} marker-end="url(#head)"/>')

    def document(self) -> str:
        """Return the SVG document."""
        styles = [
            " ".join(
                f".{name} {{ {'stroke' if name == 'line' else 'fill'}: {color} }}" for name, color in colors.items()
            )
            + f" .head {{ fill: {colors['line']} }}"
            for colors in (LIGHT, DARK)
        ]
        head = (
            '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8"'
            ' orient="auto-start-reverse" markerUnits="userSpaceOnUse">'
            '<path d="M0 0 L8 4 L0 8 z" class="head"/></marker>'
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" width="{WIDTH}"'
                f' height="{self.height}" font-family="Helvetica, Arial, sans-serif" role="img">',
                f"<title>{escape(self.title)}</title>",
                f"<style>.line {{ stroke-width: 1.5 }} {styles[0]} "
                f"@media (prefers-color-scheme: dark) {{ {styles[1]} }}</style>",
                f"<defs>{head}</defs>",
                '<rect class="page" width="100%" height="100%"/>',
                *self.parts,
                "</svg>",
                "",
            ]
        )


def eight_gpus() -> str:
    """Draw two replicas, each of two pipeline stages, each of two tensor-parallel ranks."""
    drawing = Drawing("8 GPUs = 2 replicas x 2 pipeline stages x 2 tensor-parallel ranks", 372)
    left, width, gap = 120, 250, 96
    for replica in range(2):
        x = left + replica * (width + gap)
        drawing.box(x, 44, width, 248)
        drawing.text(x + width / 2, 66, f"replica {replica}: its own batches", size=NORMAL, bold=True)
        for stage in range(2):
            y = 80 + stage * 124
            for shard in range(2):
                lines = (f"GPU {4 * stage + 2 * replica + shard}", f"layers {4 * stage}-{4 * stage + 3}")
                lines += (f"{('left', 'right')[shard]} half",)
                drawing.box(x + 14 + shard * 126, y, 96, 76, color=COLORS[stage], lines=lines)
            drawing.arrow(x + 112, y + 38, x + 138, y + 38, both=True)
        for shard in range(2):
            drawing.arrow(x + 62 + shard * 126, 158, x + 62 + shard * 126, 202, both=True)
    for stage in range(2):
        y = 80 + stage * 124
        drawing.text(left - 12, y + 34, "pipeline", anchor="end", color="faint")
        drawing.text(left - 12, y + 51, f"stage {stage}", anchor="end", color="faint")
        drawing.arrow(left + width + 6, y + 38, left + width + gap - 6, y + 38, both=True)
        drawing.text(left + width + gap / 2, y + 28, "gradients", color="faint")
    messages = (
        ("tensor parallel, in a stage:", "activations of each layer (keep these GPUs in one node)"),
        ("pipeline parallel, between stages:", "activations and their gradients, once a microbatch"),
        ("data parallel, between replicas:", "gradients, once an optimizer step"),
    )
    for number, (name, content) in enumerate(messages):
        drawing.text(16, 316 + 21 * number, name, anchor="start", bold=True)
        drawing.text(286, 316 + 21 * number, content, anchor="start")
    return drawing.document()


def zero_bars() -> str:
    """Draw the bytes that a rank holds between steps with each stage of ZeRO."""
    drawing = Drawing("ZeRO with 4 replicas: bytes per parameter on a rank (float32, AdamW)", 244)
    parts = (("parameter", 4, BLUE), ("gradient", 4, ORANGE), ("optimizer states", 8, GREEN))
    left, scale, first_sharded = 118, 32, (3, 2, 1)  # the stage from which each part is sharded
    for stage in range(4):
        x, y, total = float(left), 44 + stage * 42, 0.0
        drawing.text(left - 10, y + 21, f"zero_stage={stage}", anchor="end")
        for (_, size, color), first in zip(parts, first_sharded, strict=True):
            own = size / 4 if stage >= first else size
            drawing.box(x, y, own * scale - 2, 32, color=color, lines=[f"{own:g}"], is_round=False)
            x, total = x + own * scale, total + own
        drawing.text(x + 8, y + 21, f"= {total:g} bytes", anchor="start", bold=True)
    x = float(left)
    for name, _, color in parts:
        drawing.box(x, 216, 14, 14, color=color, is_round=False)
        drawing.text(x + 20, 228, name, anchor="start")
        x += 44 + 8 * len(name)
    return drawing.document()


def column_row_split() -> str:
    """Draw how two ranks share a pair of linear layers: columns of the first weight, rows of the second one."""
    drawing = Drawing("Tensor parallel: a column-wise layer, then a row-wise layer, then one all-reduce", 306)
    headings = ((64, "input"), (206, "weight A"), (352, "activation"), (486, "weight B"), (666, "output"))
    for x, heading in headings:
        drawing.text(x, 58, heading, bold=True)
    drawing.text(206, 75, "split by columns", color="faint")
    drawing.text(486, 75, "split by rows", color="faint")
    for rank in range(2):
        y, color = 88 + rank * 92, COLORS[rank]
        drawing.box(24, y + 8, 80, 60, lines=["x", "(full)"])
        drawing.arrow(106, y + 38, 144, y + 38)
        for half in range(2):
            own = half == rank
            drawing.box(
                150 + 57 * half,
                y,
                55,
                76,
                color=color if own else "panel",
                lines=[f"A{half}"] if own else [],
                is_round=False,
            )
        drawing.arrow(266, y + 38, 296, y + 38)
        drawing.box(302, y + 8, 100, 60, color=color, lines=[f"gelu(x A{rank})", "half"])
        drawing.arrow(404, y + 38, 430, y + 38)
        for half in range(2):
            own = half == rank
            drawing.box(
                436,
                y + 39 * half,
                100,
                37,
                color=color if own else "panel",
                lines=[f"B{half}"] if own else [],
                is_round=False,
            )
        drawing.arrow(538, y + 38, 610, 172 + (rank - 0.5) * 20)
        drawing.text(24, y - 2, f"GPU {rank}", anchor="start", color="faint")
    drawing.box(614, 142, 104, 60, lines=["all-reduce", "= y (full)"])
    drawing.text(16, 290, "Each GPU holds half of both weights. y = gelu(x A0) B0 + gelu(x A1) B1", anchor="start")
    return drawing.document()


def one_f_one_b() -> str:
    """Draw the 1F1B schedule of four ranks with its bubble."""
    timeline = simulate(build("1f1b", 4, 8))
    title = f"1F1B: 4 pipeline ranks, 8 microbatches, {timeline.bubble:.1%} of the step is bubble"
    drawing = Drawing(title, 240)
    left = 62
    scale = (WIDTH - left - 14) / timeline.makespan
    for rank, spans in enumerate(timeline.computing):
        y, before = 44 + rank * 38, 0.0
        drawing.text(left - 8, y + 20, f"rank {rank}", anchor="end")
        drawing.box(left, y, timeline.makespan * scale, 30, is_round=False)
        for span in spans:
            if span.start - before >= 3:
                drawing.text(left + (before + span.start) / 2 * scale, y + 20, "idle", color="faint")
            color = BLUE if span.action.kind is Kind.F else ORANGE
            width = (span.end - span.start) * scale - 1
            number = str(span.action.microbatch)
            drawing.box(left + span.start * scale, y, width, 30, color=color, lines=[number], is_round=False)
            before = span.end
    x = float(left)
    legend = (("forward of a microbatch", BLUE), ("its backward", ORANGE), ("idle: the bubble", "panel"))
    for name, color in legend:
        drawing.box(x, 210, 14, 14, color=color, is_round=False)
        drawing.text(x + 20, 222, name, anchor="start")
        x += 48 + 7 * len(name)
    return drawing.document()


def ring_and_ulysses() -> str:
    """Draw who computes which part of attention, in Ulysses and in a ring."""
    drawing = Drawing("Ulysses: exchange positions for heads, and back", 452)
    grids = ("layers: own positions", "attention: own heads", "layers: own positions")
    cell = 26
    for number, caption in enumerate(grids):
        x = 62 + number * 252
        for head in range(4):
            for position in range(4):
                rank = head if number == 1 else position
                place = (x + position * cell, 58 + head * cell)
                drawing.box(*place, cell - 2, cell - 2, color=COLORS[rank], lines=[str(rank)], is_round=False)
        drawing.text(x + 2 * cell, 52, "positions", color="faint")
        drawing.text(x - 8, 58 + 2 * cell + 4, "heads", anchor="end", color="faint")
        drawing.text(x + 2 * cell, 182, caption)
        if number < 2:
            drawing.arrow(x + 4 * cell + 14, 58 + 2 * cell, x + 188, 58 + 2 * cell)
            drawing.text(x + 4 * cell + 50, 58 + 2 * cell - 10, "all-to-all")
    drawing.text(16, 226, "Ring: keep the queries, pass keys and values on", size=TITLE, anchor="start", bold=True)
    width, height, top = 120, 34, 258
    for turn in range(4):
        drawing.text(112 + turn * 152 + width / 2, top - 8, f"round {turn + 1}", color="faint")
        for rank in range(4):
            owner = (rank - turn) % 4
            x, y = 112 + turn * 152, top + rank * (height + 6)
            drawing.box(
                x, y, width, height, color=COLORS[owner], lines=[f"queries {rank}, keys {owner}"], is_round=False
            )
            if turn < 3 and rank < 3:
                drawing.arrow(x + width + 2, y + height / 2, x + 150, y + height + 6 + height / 2)
    for rank in range(4):
        drawing.text(100, top + rank * (height + 6) + 22, f"rank {rank}", anchor="end")
    drawing.text(
        16, 438, "A number, or a color, is a rank. Rank 3 sends its keys and values to rank 0.", anchor="start"
    )
    return drawing.document()


def images() -> dict[str, str]:
    """Return the content of each file by its name."""
    return {
        "eight_gpus.svg": eight_gpus(),
        "zero_bars.svg": zero_bars(),
        "column_row_split.svg": column_row_split(),
        "one_f_one_b.svg": one_f_one_b(),
        "ring_and_ulysses.svg": ring_and_ulysses(),
    }


def main() -> None:
    """Write the images, or check them."""
    for name, content in images().items():
        path = IMAGES / name
        if "--check" not in sys.argv:
            path.write_text(content)
        elif not path.exists() or path.read_text() != content:
            sys.exit(f"{path.relative_to(ROOT)} is outdated; run `python docs/draw_images.py`.")


if __name__ == "__main__":
    main()
