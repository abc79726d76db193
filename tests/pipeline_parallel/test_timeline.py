"""The simulator against the formulas of the papers and a table made independently, and the pictures."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from lightning_hybrid.pipeline_parallel.schedules import (
    Action,
    Kind,
    Placement,
    add_communication,
    build,
    build_forward,
    compute_schedule,
)
from lightning_hybrid.pipeline_parallel.timeline import Timeline, simulate

# Makespan over the ideal and peak microbatches in flight on rank 0, with a backward of twice the forward. What stands
# for the interleaved schedules was simulated from the orders that torch 2.13 generates; rounded to 4 digits.
TABLE = {
    # ranks, microbatches: GPipe, 1F1B, interleaved with 2 and 4 chunks; peaks of 1F1B, interleaved with 2 and 4 chunks
    (2, 4): ([0.2500, 0.2500, 0.1250, 0.0625], [2, 2.5, 2.25]),
    (4, 8): ([0.3750, 0.3750, 0.1875, 0.0938], [4, 5.5, 4.75]),
    (4, 16): ([0.1875, 0.1875, 0.0938, 0.0469], [4, 5.5, 4.75]),
    (8, 32): ([0.2188, 0.2188, 0.1094, 0.0547], [8, 11.5, 9.75]),
}


@pytest.mark.parametrize(("size", "expected"), TABLE.items(), ids=[f"p={p} m={m}" for p, m in TABLE])
def test_table_of_bubbles_and_activations(size: tuple[int, int], expected: tuple[list[float], list[float]]) -> None:
    bubbles, peaks = expected
    timelines = [
        simulate(build("gpipe", *size)),
        simulate(build("1f1b", *size)),
        simulate(build("interleaved_1f1b", *size, 2)),
        simulate(build("interleaved_1f1b", *size, 4)),
    ]
    assert [timeline.bubble_over_ideal for timeline in timelines] == pytest.approx(bubbles, abs=0.5001e-4)
    assert [timeline.peak_in_flight[0] for timeline in timelines] == [size[1], *peaks]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 5, 8, 13])
def test_formulas_of_gpipe_and_1f1b(num_ranks: int, num_microbatches: int) -> None:
    p, m = num_ranks, num_microbatches
    for name, in_flight in {"gpipe": [m] * p, "1f1b": [min(m, p - rank) for rank in range(p)]}.items():
        timeline = simulate(build(name, p, m))
        assert timeline.makespan == 3 * (m + p - 1)
        assert timeline.bubble_over_ideal == pytest.approx((p - 1) / m)
        assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1))
        assert list(timeline.peak_in_flight) == in_flight


@pytest.mark.parametrize("extra", range(5))
@pytest.mark.parametrize("send", [0.5, 1.0, 2.0])
def test_a_microbatch_takes_what_its_way_takes_over_those_in_flight(send: float, extra: int) -> None:
    """Two ranks: there, both computations, and back, by 2 + extra microbatches; but never less than to compute one."""
    in_flight, way = 2 + extra, 1 + send + 3 + send + 2
    few, many = (simulate(build("1f1b", 2, m, 1, (extra,)), send=send) for m in (30, 150))
    assert (many.makespan - few.makespan) / 120 == pytest.approx(max(3, way / in_flight))
    assert many.peak_in_flight == (in_flight, 1)


@pytest.mark.parametrize("extra", range(5))
@pytest.mark.parametrize("occupied", [0.5, 2.0, 4.0])
@pytest.mark.parametrize("send", [0.0, 1.5])
def test_a_link_passes_on_no_more_than_its_bandwidth_allows(send: float, occupied: float, extra: int) -> None:
    """As above, but never less than a message keeps the link, however many are in flight."""
    in_flight, way = 2 + extra, 1 + occupied + send + 3 + occupied + send + 2
    schedules = (build("1f1b", 2, m, 1, (extra,)) for m in (30, 150))
    few, many = (simulate(schedule, send=send, occupied=occupied) for schedule in schedules)
    assert (many.makespan - few.makespan) / 120 == pytest.approx(max(3, occupied, way / in_flight))


@pytest.mark.parametrize("num_microbatches", [6, 20, 60])
def test_with_enough_in_flight_only_the_ends_of_a_step_wait(num_microbatches: int) -> None:
    """The last rank computes without a pause: the first message there, all microbatches, and the last one back."""
    m, send, occupied = num_microbatches, 2.5, 0.5
    timeline = simulate(build("1f1b", 2, m, 1, (2,)), send=send, occupied=occupied)
    assert timeline.makespan == pytest.approx(1 + occupied + send + 3 * m + occupied + send + 2)
    assert timeline.idle_inside[1] == pytest.approx(0)
    without = simulate(build("1f1b", 2, m), send=send, occupied=occupied)
    assert without.makespan > timeline.makespan + 1


def test_each_link_has_a_time_of_its_own() -> None:
    """One microbatch through three ranks, of which two are in one node."""
    slow = {0: 10.0, 1: 10.0}  # stages 0 and 1: their sends over the first link, there and back
    timeline = simulate(
        build("1f1b", 3, 1),
        send=lambda message: slow[message.stage] if _first_link(message) else 0.25,
        occupied=lambda message: 2.0 if _first_link(message) else 0.5,
    )
    assert timeline.makespan == 3 * (1 + 2) + 2 * (10 + 2) + 2 * (0.25 + 0.5)


def _first_link(message: Action) -> bool:
    return min(message.stage, message.stage + (1 if message.kind is Kind.SEND_F else -1)) == 0


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("num_chunks", [2, 3])
def test_interleaved_bubble_also_without_a_multiple_of_the_ranks(num_ranks: int, num_chunks: int) -> None:
    p, v = num_ranks, num_chunks
    for m in range(p, 3 * p + 1):
        timeline = simulate(build("interleaved_1f1b", p, m, v))
        assert timeline.bubble_over_ideal == pytest.approx((p - 1) / (v * m)), m
        if m % p == 0:  # Megatron's formula for the memory of the first rank
            assert timeline.peak_in_flight[0] == pytest.approx(min(m, p * (1 + (p - 1) / (p * v))))
        assert max(timeline.peak_in_flight) <= m


def test_idle_inside_the_span_of_a_rank() -> None:
    assert simulate(build("1f1b", 4, 8)).idle_inside == (9, 6, 3, 0)
    assert simulate(build("interleaved_1f1b", 4, 8, 2)).idle_inside == (4.5, 3, 1.5, 0)


def test_spans_follow_each_other_and_their_inputs() -> None:
    schedule = build("interleaved_1f1b", 3, 7, 2)
    timeline = simulate(schedule, send=0.25)
    ends = {span.action: span.end for spans in timeline.computing for span in spans}
    for actions, spans in zip(schedule.actions, timeline.spans, strict=True):
        assert tuple(span.action for span in spans) == actions
        assert all(first.end <= second.start for first, second in itertools.pairwise(spans))
    for span in (span for spans in timeline.computing for span in spans):
        assert span.end - span.start == (0.5 if span.action.kind is Kind.F else 1)
        for needed in schedule.needs(span.action):
            is_far = schedule.rank_of(needed.stage) != schedule.rank_of(span.action.stage)
            assert span.start >= ends[needed] + (0.25 if is_far else 0)


def test_forwards_only() -> None:
    timeline = simulate(build_forward(Placement.in_turns(3), num_microbatches=4))
    assert timeline.makespan == 4 + 3 - 1
    assert timeline.peak_in_flight == (0, 0, 0)


def test_one_message_each_way() -> None:
    timeline = simulate(build("1f1b", num_ranks=2, num_microbatches=1), forward=1, backward=2, send=10)
    assert timeline.makespan == 1 + 10 + 1 + 2 + 10 + 2


def test_early_receives_hide_messages() -> None:
    early = build("1f1b", 4, 8)
    late = add_communication(compute_schedule("1f1b", 4, 8))
    assert simulate(early, send=0.5).makespan < simulate(late, send=0.5).makespan


def test_duration_of_each_action() -> None:
    # Stage 1 is twice as heavy. After its first input it computes without a pause, and stage 0 ends last.
    timeline = simulate(
        build("1f1b", num_ranks=2, num_microbatches=4),
        duration=lambda action: (1 + action.stage) * (1 if action.kind is Kind.F else 2),
    )
    assert timeline.busy == (4 * 3, 4 * 6)
    assert timeline.makespan == 1 + 4 * 6 + 2
    assert timeline.bubble_over_ideal == pytest.approx(3 / 24)
    assert timeline.bubble == pytest.approx(1 - 36 / (2 * 27))


def test_deadlock_names_each_rank() -> None:
    schedule = build("1f1b", num_ranks=2, num_microbatches=2)
    lost = tuple(action for action in schedule.actions[1] if action != Action(1, Kind.SEND_B, 0))
    with pytest.raises(ValueError, match="'1f1b' deadlocks: rank 0 waits at 0B0"):
        simulate(replace(schedule, actions=(schedule.actions[0], lost)))


# --- Pictures -------------------------------------------------------------------------------------------------------


def lines(picture: str) -> list[str]:
    return [line[4:] for line in picture.splitlines()[1:-1]]


def test_picture_of_1f1b() -> None:
    expected = """
    1f1b: 4 ranks, 8 microbatches, bubble 27.3% of the step
    rank 0 0>1>2>3>............0<<<4>1<<<5>2<<<6>3<<<7>4<<<..5<<<..6<<<..7<<<
    rank 1 ..0>1>2>........0<<<3>1<<<4>2<<<5>3<<<6>4<<<7>5<<<..6<<<..7<<<....
    rank 2 ....0>1>....0<<<2>1<<<3>2<<<4>3<<<5>4<<<6>5<<<7>6<<<..7<<<........
    rank 3 ......0>0<<<1>1<<<2>2<<<3>3<<<4>4<<<5>5<<<6>6<<<7>7<<<............
    3> forward of microbatch 3   3< its backward   . idle
    """
    assert simulate(build("1f1b", 4, 8)).to_text().splitlines() == lines(expected)


def test_picture_of_gpipe() -> None:
    expected = """
    gpipe: 3 ranks, 4 microbatches, bubble 33.3% of the step
    rank 0 0>1>2>3>............0<<<1<<<2<<<3<<<
    rank 1 ..0>1>2>3>......0<<<1<<<2<<<3<<<....
    rank 2 ....0>1>2>3>0<<<1<<<2<<<3<<<........
    3> forward of microbatch 3   3< its backward   . idle
    """
    assert simulate(build("gpipe", 3, 4)).to_text().splitlines() == lines(expected)


def test_picture_of_interleaved_1f1b() -> None:
    expected = """
    interleaved_1f1b: 2 ranks, 2 chunks, 4 microbatches, bubble 11.1% of the step
    rank 0 0a1a0b1b2a..0BBB3a1BBB2b0AAA3b1AAA..2BBB..3BBB2AAA3AAA
    rank 1 ..0a1a0b0BBB1b1BBB2a0AAA3a1AAA2b2BBB3b3BBB2AAA3AAA....
    3a 3b forwards of microbatch 3 through the rank's chunks   3A 3B its backwards   . idle
    """
    assert simulate(build("interleaved_1f1b", 2, 4, 2)).to_text().splitlines() == lines(expected)


def test_picture_of_fewer_microbatches_than_stages() -> None:
    expected = """
    1f1b: 3 ranks, 1 microbatches, bubble 66.7% of the step
    rank 0 0>............0<<<
    rank 1 ..0>......0<<<....
    rank 2 ....0>0<<<........
    3> forward of microbatch 3   3< its backward   . idle
    """
    assert simulate(build("1f1b", 3, 1)).to_text().splitlines() == lines(expected)


def test_picture_that_continues_below() -> None:
    expected = """
    interleaved_1f1b: 2 ranks, 2 chunks, 4 microbatches, bubble 11.1% of the step
    rank 0 0a1a0b1b2a..0BBB3a1BBB2b0AAA
    rank 1 ..0a1a0b0BBB1b1BBB2a0AAA3a1A
    from 7
    rank 0 3b1AAA..2BBB..3BBB2AAA3AAA
    rank 1 AA2b2BBB3b3BBB2AAA3AAA....
    3a 3b forwards of microbatch 3 through the rank's chunks   3A 3B its backwards   . idle
    """
    assert simulate(build("interleaved_1f1b", 2, 4, 2)).to_text(36).splitlines() == lines(expected)


def test_picture_that_is_too_long_has_no_numbers_and_says_so() -> None:
    expected = """
    1f1b: 2 ranks, 8 microbatches, bubble 11.1% of the step
    rank 0 >.<<<><<<><<
    rank 1 ><<>><<>><<.
    > forward   < backward   . idle   (too long to show numbers)
    """
    timeline = simulate(build("1f1b", 2, 8))
    assert timeline.to_text(20).splitlines() == lines(expected)
    assert "3> forward of microbatch 3" in timeline.to_text(21)


LAYOUTS = [("1f1b", 4, 16), ("interleaved_1f1b", 4, 8, 2), ("interleaved_1f1b", 8, 24, 3), ("gpipe", 12, 3)]


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 200, 2000])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_keep_to_the_width_and_have_every_number_or_none(layout: tuple[str, int, int], width: int) -> None:
    timeline = simulate(build(*layout))
    parts = re.split(r"\nfrom .*\n", "\n".join(timeline.to_text(width).splitlines()[1:-1]))
    panels = [part.splitlines() for part in parts]
    for panel in panels:
        assert len({len(row) for row in panel}) == 1
        assert len(panel[0]) <= width
    for rank, spans in enumerate(timeline.computing):
        row = "".join(panel[rank][len(f"rank {rank} ".ljust(6 + len(str(layout[1] - 1)))) :] for panel in panels)
        assert re.findall(r"\d+", row) in ([], [str(span.action.microbatch) for span in spans])


def test_picture_of_uneven_durations() -> None:
    schedule = build("1f1b", 2, 2)
    rows = simulate(schedule, duration=lambda action: 0.7 + action.stage).to_text(60).splitlines()[1:-1]
    assert [re.findall(r"\d[<>]", row) for row in rows] == [["0>", "1>", "0<", "1<"], ["0>", "0<", "1>", "1<"]]
    assert len(rows[0]) == len(rows[1]) <= 60


def cells_of(timeline: Timeline) -> dict[float, list[tuple[float, float, str]]]:
    """From the SVG, by height: where each cell begins and ends, and which action it is."""
    name = "{http://www.w3.org/2000/svg}"
    rows: dict[float, list[tuple[float, float, str]]] = {}
    for rect in ET.fromstring(timeline.to_svg()).iter(f"{name}rect"):
        title = rect.find(f"{name}title")
        if title is not None and title.text is not None:
            x, width = float(rect.attrib["x"]), float(rect.attrib["width"])
            rows.setdefault(float(rect.attrib["y"]), []).append((x, x + width, title.text.split(":")[0]))
    return rows


@pytest.mark.parametrize("layout", [("1f1b", 4, 8), ("interleaved_1f1b", 8, 24, 3)])
def test_svg_shows_every_computation_in_its_row(layout: tuple[str, int, int]) -> None:
    timeline = simulate(build(*layout))
    rows = cells_of(timeline)
    assert len(rows) == layout[1]
    for (_, cells), spans in zip(sorted(rows.items()), timeline.computing, strict=True):
        assert [text for _, _, text in cells] == [str(span.action) for span in spans]
        assert all(first[1] <= second[0] + 0.02 for first, second in itertools.pairwise(cells))


def test_svg_tells_name_figures_and_legend() -> None:
    svg = simulate(build("interleaved_1f1b", 4, 8, 2)).to_svg()
    texts = re.findall(r">([^<>\n]+)</text>", svg)
    for text in ["interleaved_1f1b", "rank 3", "5.5 in flight", "idle", "forward (chunks 0 to 1)"]:
        assert text in texts
    assert any("bubble 15.8% of the step" in text for text in texts)
    assert "backward" not in simulate(build_forward(Placement.in_turns(2), 2)).to_svg()


def test_svg_has_a_colour_for_each_chunk_and_direction() -> None:
    svg = simulate(build("interleaved_1f1b", 2, 4, 3)).to_svg()
    colours = re.findall(r'fill="(#\w+)" class="cell"', svg)
    assert len(set(colours)) == 6


def luminance(colour: str) -> float:
    """The relative luminance of WCAG 2, of which contrast is made."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_svg_can_be_read_on_a_light_and_on_a_dark_page() -> None:
    svg = simulate(build("1f1b", 2, 4)).to_svg()
    light, dark = re.findall(r"<style>(.*?)@media \(prefers-color-scheme: dark\)(.*?)</style>", svg, re.DOTALL)[0]
    themes = [dict(re.findall(r"\.(\w+) \{ \w+: (#\w+)", part)) for part in (light, dark)]
    assert luminance(themes[0]["page"]) > 0.9
    assert luminance(themes[1]["page"]) < 0.1
    for theme in themes:
        assert set(theme) == set(re.findall(r'class="(\w+)"', svg))
        for ink in ("ink", "faint"):
            low, high = sorted([luminance(theme["page"]), luminance(theme[ink])])
            assert (high + 0.05) / (low + 0.05) > 4.5  # what WCAG asks of text
