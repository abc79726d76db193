"""A schedule in time: how long each rank computes and waits, what it keeps alive, and a picture of it."""

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
    """When an action begins and ends, in the unit of time that the simulation was given."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A schedule with a time for each action.

    All figures are about computing: the forwards and backwards of the ranks. Sends and receives take no time of a rank,
    their messages travel by themselves.

    Attributes:
        schedule: What was simulated, or has run.
        spans: ``spans[rank][position]`` is the span of the action at that position of the rank's list.
        unit: What times are counted in, for pictures.
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
        """Time from the begin of the step until the last rank is finished."""
        return max(spans[-1].end for spans in self.computing)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """How long each rank computes."""
        return tuple(sum(span.end - span.start for span in spans) for spans in self.computing)

    @property
    def bubble(self) -> float:
        """The share of the step that an average rank is idle: ``(p - 1) / (m + p - 1)`` for 1F1B."""
        return 1 - sum(self.busy) / (len(self.busy) * self.makespan)

    @property
    def bubble_over_ideal(self) -> float:
        """How much longer the step takes than the busiest rank alone would: ``(p - 1) / m`` for 1F1B.

        This is the bubble of the Megatron paper (https://arxiv.org/abs/2104.04473).
        """
        return self.makespan / max(self.busy) - 1

    @property
    def idle_inside(self) -> tuple[float, ...]:
        """How long each rank is idle between its own first and its own last computation.

        Without the skew between the ranks, which is real only where something joins the ranks in every step.
        """
        return tuple(
            spans[-1].end - spans[0].start - busy for spans, busy in zip(self.computing, self.busy, strict=True)
        )

    @cached_property
    def peak_in_flight(self) -> tuple[float, ...]:
        """How many microbatches each rank keeps activations of, at its peak.

        One is the activations of a microbatch in all ``v`` chunks of the rank; each chunk that has run ``F`` and not
        yet ``B`` counts ``1 / v``. A schedule without backward keeps nothing.
        """
        if not self.schedule.has_backward:
            return (0.0,) * len(self.spans)
        # A forward begins to wait for its backward, a backward ends that.
        changes = [[span.action.kind.kept for span in spans] for spans in self.computing]
        return tuple(max(accumulate(of_rank)) / self.schedule.num_chunks for of_rank in changes)

    def to_text(self, width: int = 100) -> str:
        """Draw one row per rank, for a terminal: ``3>>`` is the forward of microbatch 3, ``3<<`` its backward.

        With several chunks a letter names the chunk: ``3bb`` is a forward, ``3BB`` a backward. Dots are idle time.

        Args:
            width: Greatest number of columns. A longer picture continues below, in up to four panels; beyond that its
                microbatches have no numbers.
        """
        return _draw_text(self, width)

    def to_svg(self) -> str:
        """Draw one row per rank as an SVG document, with an axis, a legend and the figures of the schedule."""
        picture = _Picture(self, self.schedule.name, _scale(self))
        return _document([picture], _legend(self.schedule, _LEFT, picture.height))

    def to_svg_with(self, other: Timeline, *, title: str, title_of_other: str) -> str:
        """Draw two timelines of one schedule, one above the other, on the same scale.

        Args:
            other: The one below.
            title: Of the one above.
            title_of_other: Of the one below.
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
    """Give each action of a schedule a time.

    A rank does one action after the other. A forward or a backward waits for its message; sends and receives take no
    time of the rank. A message sets out when it is sent, its receive is posted, and the messages before it have left::

        sent, posted      link is free for the next      arrives
             |--- occupied ---|---------- send ----------|

    So a link passes on no more messages than its bandwidth allows, however many are in flight. Activations and
    gradients have a link each, in their direction.

    Args:
        schedule: A schedule with its sends and receives.
        forward: Time of the forward of one microbatch through all chunks of a rank, so that numbers of chunks can be
            compared: each takes ``forward / num_chunks``.
        backward: The same for the backward. Twice the forward is usual: for each product of matrices it has two, one
            for the gradient of the input and one for that of the weights.
        send: Delay of a message, of all or by the action that sends it.
        duration: The time of each computation, if they are not all equal; replaces ``forward`` and ``backward``.
        occupied: How long a message keeps its link from the next one, its bytes by the bandwidth; as `send`.

    Raises:
        ValueError: If the schedule deadlocks; names each rank's waiting action.
    """
    times = {
        kind: kind.share * (forward if kind.is_forward else backward) / schedule.num_chunks for kind in COMPUTATIONS
    }
    time_of = duration or (lambda action: times[action.kind])
    wire = _Wire(schedule, send, occupied)
    spans: list[list[Span]] = [[] for _ in schedule.actions]
    clocks = [0.0] * len(spans)

    def advance(rank: int, action: Action) -> bool:
        """Do ``action`` unless its message has not been sent yet."""
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

    # Times depend on nothing but the lists, so the order in which ranks get their turns does not matter.
    waiting = schedule.play(advance)
    if waiting:
        raise ValueError(f"schedule {schedule.name!r} deadlocks: {', '.join(waiting)}")
    return Timeline(schedule, tuple(map(tuple, spans)))


class _Wire:
    """The messages of a simulation.

    Args:
        schedule: What is simulated.
        send: As of :func:`simulate`.
        occupied: Likewise.

    Attributes:
        arrivals: When the message of a receive is there, as soon as that is known.
    """

    def __init__(
        self,
        schedule: Schedule,
        send: float | Callable[[Action], float],
        occupied: float | Callable[[Action], float],
    ) -> None:
        self.arrivals: dict[Action, float] = {}
        self._schedule, self._send, self._occupied = schedule, send, occupied
        self._passed: dict[Action, float] = {}  # when a send was sent and a receive posted
        self._free: dict[ChannelKey, float] = {}

    def passed(self, action: Action, time: float) -> None:
        """A send was sent or a receive posted; behind the second of both, it is known when the message arrives.

        On each channel the k-th send meets the k-th receive, so its messages come here in their order.
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
    return time(message) if callable(time) else time


# What is drawn beside the cells, on a light and on a dark page; the colours of cells suit both.
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
    return " ".join(
        f".{name} {{ {'stroke' if name == 'cell' else 'fill'}: {colour} }}" for name, colour in colours.items()
    )


def _figures(timeline: Timeline) -> str:
    schedule = timeline.schedule
    chunks = f", {schedule.num_chunks} chunks" if schedule.num_chunks > 1 else ""
    bubble = f"bubble {timeline.bubble:.1%} of the step"
    return f"{schedule.num_ranks} ranks{chunks}, {schedule.num_microbatches} microbatches, {bubble}"


def _shortest(timeline: Timeline) -> float:
    return min(span.end - span.start for spans in timeline.computing for span in spans if span.end > span.start)


def _draw_text(timeline: Timeline, width: int) -> str:
    schedule = timeline.schedule
    names = [f"rank {rank} ".ljust(6 + len(str(schedule.num_ranks - 1))) for rank in range(schedule.num_ranks)]
    columns = len(str(schedule.num_microbatches - 1)) + 1  # of the shortest cell: a number and a mark
    room = max(1, width - len(names[0]))
    room -= room % columns if room > columns else 0
    scale = columns / _shortest(timeline)
    # A picture that gets too long has marks alone, in one panel.
    is_numbered = timeline.makespan * scale <= _PANELS * room
    if not is_numbered:
        scale = room / timeline.makespan
    rows = [_draw_row(schedule, spans, timeline.makespan, scale, is_numbered) for spans in timeline.computing]
    lines, begin = [f"{schedule.name}: {_figures(timeline)}"], 0
    while begin < len(rows[0]):
        end = begin + room
        while any(row[end - 1 : end + 1].isdigit() for row in rows):
            end -= 1  # not within a number
        lines += [f"from {begin / scale:g} {timeline.unit}".rstrip()] if begin else []
        lines += [name + row[begin:end] for name, row in zip(names, rows, strict=True)]
        begin = end
    return "\n".join([*lines, _text_legend(schedule, is_numbered)])


def _draw_row(schedule: Schedule, spans: Sequence[Span], makespan: float, scale: float, is_numbered: bool) -> str:
    row = ["."] * round(makespan * scale)
    for span in spans:
        first, last = round(span.start * scale), round(span.end * scale)
        number = str(span.action.microbatch)
        cell = number if is_numbered and len(number) < last - first else ""
        row[first:last] = cell.ljust(last - first, _mark(schedule, span.action))
    return "".join(row)


def _text_legend(schedule: Schedule, is_numbered: bool) -> str:
    """Return what the marks mean, as they are drawn."""
    number, which = ("3", " of microbatch 3") if is_numbered else ("", "")
    backward = "its backward" if is_numbered else "backward"
    if schedule.num_chunks == 1:
        legend = f"{number}> forward{which}   {number}< {backward}   . idle"
    else:
        forwards, backwards = (f"{number}{first} {number}{second}" for first, second in ("ab", "AB"))
        legend = f"{forwards} forwards{which} through the rank's chunks   {backwards} {backward}s   . idle"
    return legend if is_numbered else f"{legend}   (too long to show numbers)"


def _mark(schedule: Schedule, action: Action) -> str:
    if schedule.num_chunks == 1:
        return ">" if action.kind.is_forward else "<"
    letter = chr(ord("a") + schedule.placement.chunk_of(action.stage) % 26)
    return letter if action.kind.is_forward else letter.upper()


_PANELS = 4  # of a picture in text, one below the other
_LEFT, _TOP, _PITCH, _HEIGHT = 70, 64, 34, 28  # pixels: of rows, from one to the next, and of a cell


def _scale(timeline: Timeline) -> float:
    """Pixels per unit of time."""
    return min(26 / _shortest(timeline), 1600 / timeline.makespan)


def _document(pictures: Sequence[_Picture], legend: Sequence[str]) -> str:
    """Pictures under each other, and one legend."""
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
    """The rows of one timeline, with its figures above and an axis below.

    Attributes:
        timeline: What is drawn.
        title: Its heading.
        scale: Pixels per unit of time.
    """

    timeline: Timeline
    title: str
    scale: float

    @property
    def width(self) -> float:
        """In pixels, with room for a legend."""
        return _LEFT + max(self.timeline.makespan * self.scale, 420) + 100

    @property
    def height(self) -> float:
        """In pixels."""
        return _TOP + _PITCH * self.timeline.schedule.num_ranks + 32

    def parts(self) -> list[str]:
        """The elements."""
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
        """The forwards and backwards of a rank; numbers stand where there is room for them."""
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
        """Times below the rows."""
        parts, tick = [], _tick(90 / self.scale)
        for number in range(math.floor(self.timeline.makespan / tick + 1e-9) + 1):
            x = _LEFT + number * tick * self.scale
            text = f"{number * tick:g}" if number else f"0 {self.timeline.unit}".rstrip()
            parts.append(f'<rect x="{x:.2f}" y="{y - 4}" width="1" height="5" class="faint"/>')
            parts.append(_text(x, y + 13, text, size=10, anchor="middle", fill="faint"))
        return parts


def _tick(least: float) -> float:
    """The smallest of 1, 2, 5, 10, ... that is not less."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * step for step in (1, 2, 5, 10) if power * step >= least * (1 - 1e-9))


def _legend(schedule: Schedule, x: float, y: float) -> list[str]:
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
    fill: str = "ink",  # a colour, or the name of one that depends on the page
    weight: str = "normal",
) -> str:
    paint = f'fill="{fill}"' if fill.startswith("#") else f'class="{fill}"'
    return (
        f'<text x="{x:.2f}" y="{y:.2f}" font-size="{size:.3g}" text-anchor="{anchor}" {paint} '
        f'font-weight="{weight}">{escape(text)}</text>'
    )
