"""Timeline of a schedule: when each rank computes and waits, how many microbatches are in flight, and a drawing.

:func:`simulate` computes a timeline from times of actions; :func:`~.recorder.measured` makes one from a run. The layout
search and the choice of extra microbatches simulate many schedules and read the makespan. The command `timeline` and
the callback `HybridTimeline` also draw. Formulas for the bubble exist only for equal stages and messages without
latency, so the steps are simulated. A microbatch is *in flight* on a rank from its forward to its backward. The
*bubble* is the fraction of the time for which ranks are idle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from xml.sax.saxutils import escape

from lightning_hybrid.pipeline_parallel.schedules import COMPUTATIONS, Action, ChannelKey, Kind, Schedule


@dataclass(frozen=True)
class Span:
    """Start and end of an action, in the unit of the timeline, from the start of the step."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Schedule with a start and an end for each action.

    All properties are about computation: the forwards and backwards of the ranks. Sends and receives take no time of a
    rank, because messages are transferred in the background.

    Attributes:
        schedule: The schedule that was simulated or has run.
        spans: ``spans[rank][position]`` is the span of the action at this position in the rank's list.
        unit: The time unit, as text for drawings, such as ``"ms"``; empty for a simulation in abstract units.
    """

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]
    unit: str = ""

    @cached_property
    def computing(self) -> tuple[tuple[Span, ...], ...]:
        """The forwards and backwards of each rank, in order."""
        return tuple(tuple(span for span in spans if span.action.kind.is_compute) for spans in self.spans)

    @cached_property
    def makespan(self) -> float:
        """The time from the start of the step until the last rank has finished its last computation."""
        return max(spans[-1].end for spans in self.computing)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """The total time for which each rank computes."""
        return tuple(sum(span.end - span.start for span in spans) for spans in self.computing)

    @property
    def bubble(self) -> float:
        """The fraction of the step for which an average rank is idle: ``(p - 1) / (m + p - 1)`` for 1F1B."""
        return 1 - sum(self.busy) / (len(self.busy) * self.makespan)

    @property
    def bubble_over_ideal(self) -> float:
        """The additional time of the step relative to the busiest rank's compute time: ``(p - 1) / m`` for 1F1B.

        This is the bubble of the Megatron paper (https://arxiv.org/abs/2104.04473).
        """
        return self.makespan / max(self.busy) - 1

    @property
    def idle_inside(self) -> tuple[float, ...]:
        """The time for which each rank is idle between its own first and last computation.

        It does not contain the time shift between ranks, which only costs time if the ranks wait for each other in
        every step.
        """
        return tuple(
            spans[-1].end - spans[0].start - busy for spans, busy in zip(self.computing, self.busy, strict=True)
        )

    @cached_property
    def peak_in_flight(self) -> tuple[float, ...]:
        """The maximum number of microbatches whose activations each rank stores.

        A rank counts 1 for the activations of a microbatch in all its ``v`` chunks. Each chunk that has run ``F`` but
        not yet ``B`` counts ``1 / v``. A schedule without backward stores no activations.
        """
        if not self.schedule.has_backward:
            return (0.0,) * len(self.spans)
        # A forward adds the activations of a microbatch, and its backward frees them.
        changes = [[span.action.kind.kept for span in spans] for spans in self.computing]
        return tuple(max(accumulate(of_rank)) / self.schedule.num_chunks for of_rank in changes)

    def to_text(self, width: int = 100) -> str:
        """Draw one row per rank, for a terminal: ``3>>`` is the forward of microbatch 3, ``3<<`` its backward.

        With several chunks, a letter names the chunk: ``3bb`` is a forward, ``3BB`` a backward. Dots are idle time.

        Args:
            width: The maximum number of columns. A longer drawing continues below, in up to four panels. If four panels
                are not enough, the drawing has one panel and no microbatch numbers.
        """
        return _draw_text(self, width)

    def to_svg(self) -> str:
        """Draw one row per rank as an SVG document, with an axis, a legend and the properties of the schedule."""
        picture = _Picture(self, self.schedule.name, _scale(self))
        return _document([picture], _legend(self.schedule, _LEFT, picture.height))

    def to_svg_with(self, other: Timeline, *, title: str, title_of_other: str) -> str:
        """Draw two timelines of the same schedule, one below the other, on the same scale.

        Args:
            other: The lower timeline.
            title: The title of the upper timeline.
            title_of_other: The title of the lower timeline.
        """
        scale = min(_scale(self), _scale(other))
        pictures = [_Picture(self, title, scale), _Picture(other, title_of_other, scale)]
        return _document(pictures, _legend(self.schedule, _LEFT, sum(picture.height for picture in pictures)))


def simulate(
    schedule: Schedule,
    forward: float = 1.0,
    backward: float = 2.0,
    send: float | Callable[[Action], float] = 0.0,
    duration: Callable[[Action], float] | None = None,
    occupied: float | Callable[[Action], float] = 0.0,
) -> Timeline:
    """Compute the start and end of each action of a schedule.

    A rank runs one action after the other. A forward or a backward waits for its message. Sends and receives take no
    time of the rank. The transfer of a message begins when it has been sent, its receive has been posted, and the
    earlier messages have left the link::

        sent, posted      link is free for the next      arrives
             |--- occupied ---|---------- send ----------|

    So a link transfers no more messages than its bandwidth allows, no matter how many are in flight. Activations and
    gradients use separate links, one for each direction.

    Args:
        schedule: A schedule with its sends and receives.
        forward: The time of the forward of one microbatch through all chunks of a rank. Each chunk takes
            ``forward / num_chunks``, so schedules with different numbers of chunks can be compared.
        backward: The same for the backward. It usually takes twice as long as the forward, because for each matrix
            product it computes two: the gradients of the input and of the weights.
        send: The latency of a message: one value for all messages, or a function of the action that sends the message.
        duration: The time of each computation, if they are not all equal. It replaces ``forward`` and ``backward``.
        occupied: The time for which a message occupies its link, which is its size divided by the bandwidth: one value,
            or a function like `send`.

    Raises:
        ValueError: If the schedule deadlocks. The message names the action that each rank waits at.
    """
    times = {
        kind: kind.share * (forward if kind.is_forward else backward) / schedule.num_chunks for kind in COMPUTATIONS
    }
    time_of = duration or (lambda action: times[action.kind])
    wire = _Wire(schedule, send, occupied)
    spans: list[list[Span]] = [[] for _ in schedule.actions]
    clocks = [0.0] * len(spans)

    def advance(rank: int, action: Action) -> bool:
        """Run ``action``, and return True, unless its message has not been sent yet."""
        start = clocks[rank]
        if action.kind.is_compute:
            receive = schedule.receive_for(action)
            if receive is not None:
                if receive not in wire.arrivals:
                    return False
                start = max(start, wire.arrivals[receive])
            clocks[rank] = start + time_of(action)
        else:
            wire.passed(action, start)
        spans[rank].append(Span(action, start, clocks[rank]))
        return True

    # Times depend only on the lists, so the order in which ranks take turns does not matter.
    waiting = schedule.play(advance)
    if waiting:
        raise ValueError(f"schedule {schedule.name!r} deadlocks: {', '.join(waiting)}")
    return Timeline(schedule, tuple(map(tuple, spans)))


class _Wire:
    """Messages of a simulation.

    Args:
        schedule: The schedule.
        send: See :func:`simulate`.
        occupied: See :func:`simulate`.

    Attributes:
        arrivals: The arrival time of the message of each receive, as far as it is known.
    """

    def __init__(
        self,
        schedule: Schedule,
        send: float | Callable[[Action], float],
        occupied: float | Callable[[Action], float],
    ) -> None:
        self.arrivals: dict[Action, float] = {}
        self._schedule, self._send, self._occupied = schedule, send, occupied
        self._passed: dict[Action, float] = {}  # the time of each send and each posting of a receive
        self._free: dict[ChannelKey, float] = {}

    def passed(self, action: Action, time: float) -> None:
        """Record that a message was sent or a receive was posted. After both events, the arrival time is known.

        On each channel the k-th send matches the k-th receive, so the messages of a channel are recorded in order.
        """
        other = self._schedule.counterpart(action)
        self._passed[action] = time
        if other not in self._passed:
            return
        message, receive = (action, other) if action.kind.is_send else (other, action)
        channel = self._schedule.channel(message)
        begin = max(time, self._passed[other], self._free.get(channel, 0.0))
        self._free[channel] = begin + _time(self._occupied, message)
        self.arrivals[receive] = self._free[channel] + _time(self._send, message)


def _time(time: float | Callable[[Action], float], message: Action) -> float:
    """Return the time of a message."""
    return time(message) if callable(time) else time


# Colors of all elements except the cells, on a light and on a dark page. Colors of cells are the same on both.
_LIGHT = {
    "page": "#ffffff",
    "ink": "#24292f",
    "faint": "#57606a",
    "idle": "#eef1f4",
    "cell": "#ffffff",
}
_DARK = {
    "page": "#131416",
    "ink": "#e6e8eb",
    "faint": "#9aa4af",
    "idle": "#2a2e33",
    "cell": "#131416",
}


def _style(colours: Mapping[str, str]) -> str:
    """Return the style sheet for the colors of a page."""
    return " ".join(
        f".{name} {{ {'stroke' if name == 'cell' else 'fill'}: {colour} }}" for name, colour in colours.items()
    )


def _figures(timeline: Timeline) -> str:
    """Return the sizes and the bubble of a schedule as text."""
    schedule = timeline.schedule
    chunks = f", {schedule.num_chunks} chunks" if schedule.num_chunks > 1 else ""
    bubble = f"bubble {timeline.bubble:.1%} of the step"
    return f"{schedule.num_ranks} ranks{chunks}, {schedule.num_microbatches} microbatches, {bubble}"


def _shortest(timeline: Timeline) -> float:
    """Return the duration of the shortest computation."""
    return min(span.end - span.start for spans in timeline.computing for span in spans if span.end > span.start)


def _draw_text(timeline: Timeline, width: int) -> str:
    """Draw a timeline as text."""
    schedule = timeline.schedule
    names = [f"rank {rank} ".ljust(6 + len(str(schedule.num_ranks - 1))) for rank in range(schedule.num_ranks)]
    columns = len(str(schedule.num_microbatches - 1)) + 1  # of the shortest cell, which contains a number and a mark
    room = max(1, width - len(names[0]))
    room -= room % columns if room > columns else 0
    scale = columns / _shortest(timeline)
    # A drawing that is too long has only marks, in one panel.
    is_numbered = timeline.makespan * scale <= _PANELS * room
    if not is_numbered:
        scale = room / timeline.makespan
    rows = [_draw_row(schedule, spans, timeline.makespan, scale, is_numbered) for spans in timeline.computing]
    lines, begin = [f"{schedule.name}: {_figures(timeline)}"], 0
    while begin < len(rows[0]):
        end = begin + room
        while any(row[end - 1 : end + 1].isdigit() for row in rows):
            end -= 1  # do not split a number
        lines += [f"from {begin / scale:g} {timeline.unit}".rstrip()] if begin else []
        lines += [name + row[begin:end] for name, row in zip(names, rows, strict=True)]
        begin = end
    return "\n".join([*lines, _text_legend(schedule, is_numbered)])


def _draw_row(schedule: Schedule, spans: Sequence[Span], makespan: float, scale: float, is_numbered: bool) -> str:
    """Draw the row of a rank as text."""
    row = ["."] * round(makespan * scale)
    for span in spans:
        first, last = round(span.start * scale), round(span.end * scale)
        number = str(span.action.microbatch)
        cell = number if is_numbered and len(number) < last - first else ""
        row[first:last] = cell.ljust(last - first, _mark(schedule, span.action))
    return "".join(row)


def _text_legend(schedule: Schedule, is_numbered: bool) -> str:
    """Return the legend of a text drawing."""
    number, which = ("3", " of microbatch 3") if is_numbered else ("", "")
    backward = "its backward" if is_numbered else "backward"
    if schedule.num_chunks == 1:
        legend = f"{number}> forward{which}   {number}< {backward}   . idle"
    else:
        forwards, backwards = (f"{number}{first} {number}{second}" for first, second in ("ab", "AB"))
        legend = f"{forwards} forwards{which} through the rank's chunks   {backwards} {backward}s   . idle"
    return legend if is_numbered else f"{legend}   (too long to show numbers)"


def _mark(schedule: Schedule, action: Action) -> str:
    """Return the character that fills the cell of an action."""
    if schedule.num_chunks == 1:
        return ">" if action.kind.is_forward else "<"
    letter = chr(ord("a") + schedule.placement.chunk_of(action.stage) % 26)
    return letter if action.kind.is_forward else letter.upper()


_PANELS = 4  # maximum number of panels of a text drawing
_LEFT, _TOP, _PITCH, _HEIGHT = 70, 64, 34, 28  # in pixels: of the rows, from row to row, of a cell


def _scale(timeline: Timeline) -> float:
    """Return the number of pixels per unit of time."""
    return min(26 / _shortest(timeline), 1600 / timeline.makespan)


def _document(pictures: Sequence[_Picture], legend: Sequence[str]) -> str:
    """Return an SVG document with drawings below each other and one legend."""
    width = max(picture.width for picture in pictures)
    height = sum(picture.height for picture in pictures) + 36
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" font-family="Helvetica, Arial, sans-serif">',
        f"<style>{_style(_LIGHT)} @media (prefers-color-scheme: dark) {{ {_style(_DARK)} }}</style>",
        '<rect class="page" width="100%" height="100%"/>',
    ]
    y = 0.0
    for picture in pictures:
        parts += [f'<g transform="translate(0 {y:.0f})">', *picture.parts(), "</g>"]
        y += picture.height
    return "\n".join([*parts, *legend, "</svg>", ""])


@dataclass(frozen=True)
class _Picture:
    """Drawing of one timeline, with the sizes of the schedule above and an axis below.

    Attributes:
        timeline: The timeline.
        title: The title.
        scale: The number of pixels per unit of time.
    """

    timeline: Timeline
    title: str
    scale: float

    @property
    def width(self) -> float:
        """The width in pixels, with room for the legend."""
        return _LEFT + max(self.timeline.makespan * self.scale, 420) + 100

    @property
    def height(self) -> float:
        """The height in pixels."""
        return _TOP + _PITCH * self.timeline.schedule.num_ranks + 32

    def parts(self) -> list[str]:
        """Return the SVG elements."""
        timeline, schedule = self.timeline, self.timeline.schedule
        chart = timeline.makespan * self.scale
        parts = [
            _text(_LEFT, 26, self.title, size=18, weight="bold"),
            _text(_LEFT, 47, _figures(timeline), fill="faint"),
        ]
        for rank in range(schedule.num_ranks):
            y = _TOP + _PITCH * rank
            parts.append(_text(_LEFT - 10, y + 19, f"rank {rank}", anchor="end"))
            parts.append(f'<rect x="{_LEFT}" y="{y}" width="{chart:.2f}" height="{_HEIGHT}" class="idle"/>')
            parts += self._cells(rank, y)
            if schedule.has_backward:
                text = f"{timeline.peak_in_flight[rank]:.3g} in flight"
                parts.append(_text(_LEFT + chart + 12, y + 19, text, fill="faint"))
        return parts + self._axis(_TOP + _PITCH * schedule.num_ranks)

    def _cells(self, rank: int, y: float) -> list[str]:
        """Return the forwards and backwards of a rank, with numbers if there is room for them."""
        schedule, parts = self.timeline.schedule, []
        digits = len(str(schedule.num_microbatches - 1))
        size = max(7, min(12, 1.5 * self.scale * _shortest(self.timeline) / digits))
        for span in self.timeline.computing[rank]:
            x, cell = _LEFT + span.start * self.scale, (span.end - span.start) * self.scale
            fill, ink = _colors(span.action.kind, schedule.placement.chunk_of(span.action.stage) / schedule.num_chunks)
            number = str(span.action.microbatch)
            times = f"{span.start:.4g} to {span.end:.4g} {self.timeline.unit}".rstrip()
            parts.append(
                f'<rect x="{x:.2f}" y="{y}" width="{cell:.2f}" height="{_HEIGHT}" fill="{fill}" class="cell">'
                f"<title>{span.action}: {times}</title></rect>"
            )
            if 0.6 * size * len(number) < cell:
                parts.append(_text(x + cell / 2, y + 14 + 0.36 * size, number, size=size, anchor="middle", fill=ink))
        return parts

    def _axis(self, y: float) -> list[str]:
        """Return the time axis below the rows."""
        parts, tick = [], _tick(90 / self.scale)
        for number in range(math.floor(self.timeline.makespan / tick + 1e-9) + 1):
            x = _LEFT + number * tick * self.scale
            text = f"{number * tick:g}" if number else f"0 {self.timeline.unit}".rstrip()
            parts.append(f'<rect x="{x:.2f}" y="{y - 4}" width="1" height="5" class="faint"/>')
            parts.append(_text(x, y + 13, text, size=10, anchor="middle", fill="faint"))
        return parts


def _tick(least: float) -> float:
    """Return the smallest of the numbers 1, 2, 5, 10, ... (and 0.5, 0.2, ...) that is at least ``least``."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * step for step in (1, 2, 5, 10) if power * step >= least * (1 - 1e-9))


def _legend(schedule: Schedule, x: float, y: float) -> list[str]:
    """Return the SVG elements of the legend."""
    parts = []
    drawn = {action.kind for actions in schedule.actions for action in actions}
    for kind in (kind for kind in COMPUTATIONS if kind in drawn):
        for chunk in range(schedule.num_chunks):
            fill, _ = _colors(kind, chunk / schedule.num_chunks)
            parts.append(f'<rect x="{x}" y="{y}" width="16" height="16" fill="{fill}"/>')
            x += 18
        chunks = f" (chunks 0 to {schedule.num_chunks - 1})" if schedule.num_chunks > 1 else ""
        parts.append(_text(x + 4, y + 13, kind.label + chunks))
        x += 90 + 6.5 * len(chunks)
    parts.append(f'<rect x="{x}" y="{y}" width="16" height="16" class="idle"/>')
    parts.append(_text(x + 22, y + 13, "idle"))
    return parts


def _colors(kind: Kind, lightness: float) -> tuple[str, str]:
    """Return the colors of a cell and of the number on it; later chunks are lighter."""
    mixed = (round(part + (255 - part) * 0.75 * lightness) for part in kind.color)
    return "#" + "".join(f"{part:02x}" for part in mixed), "#ffffff" if lightness < 0.4 else "#24292f"


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: float = 13,
    anchor: str = "start",
    fill: str = "ink",  # a color, or the name of a color that depends on the page
    weight: str = "normal",
) -> str:
    """Return an SVG text element."""
    paint = f'fill="{fill}"' if fill.startswith("#") else f'class="{fill}"'
    return (
        f'<text x="{x:.2f}" y="{y:.2f}" font-size="{size:.3g}" text-anchor="{anchor}" {paint} '
        f'font-weight="{weight}">{escape(text)}</text>'
    )
