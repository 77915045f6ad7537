"""The drawing of a timeline: well-formed, complete, in lanes that do not overlap, with words for who cannot see it."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from ckptmirror.cli._human_text import duration_text
from ckptmirror.cli._timeline_axis import Axis
from ckptmirror.cli._timeline_drawing import draw, summary
from ckptmirror.cli._timeline_page import page
from ckptmirror.core import events
from ckptmirror.core.lifecycle import RecordState
from ckptmirror.observe.timeline import Timeline, build_timeline
from tests.kit.cost import steps_of
from tests.kit.history import KINDS, MIRROR, START_S, WrittenRun, long_run
from tests.kit.saves import save_id_of

pytestmark = pytest.mark.long

HOSTILE = '\' x=" onload="alert(1)" y="</title><script>alert(2)</script>\x1b]0;a\x07\u202e&amp;'

SVG = "{http://www.w3.org/2000/svg}"
SAVES = (1, 5, 500)


@pytest.fixture(scope="module")
def drawings() -> dict[int, tuple[Timeline, ElementTree.Element]]:
    found = {}
    for saves in SAVES:
        timeline = build_timeline(long_run(saves, ranks=3).history())
        found[saves] = (timeline, ElementTree.fromstring(draw(timeline, f"{saves} saves & more")))
    return found


def lanes_of(root: ElementTree.Element) -> list[ElementTree.Element]:
    return [group for group in root.iter(f"{SVG}g") if group.get("class") == "in-lane"]


def bars_of(lane: ElementTree.Element) -> list[ElementTree.Element]:
    return [group for group in lane.iter(f"{SVG}g") if group.get("data-kind")]


def box(shape: ElementTree.Element) -> tuple[float, float, float, float]:
    """Left, right, top, bottom of a rectangle or a polygon."""
    if shape.tag == f"{SVG}rect":
        x, y, wide, high = (float(shape.get(name, "0")) for name in ("x", "y", "width", "height"))
        return x, x + wide, y, y + high
    points = [tuple(map(float, pair.split(","))) for pair in (shape.get("points") or "").split()]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    return min(xs), max(xs), min(ys), max(ys)


def shape_of(group: ElementTree.Element) -> ElementTree.Element:
    return next(child for child in group if child.tag in (f"{SVG}rect", f"{SVG}polygon"))


@pytest.mark.parametrize("saves", SAVES)
def test_every_save_is_in_every_lane_that_it_passed(
    saves: int, drawings: dict[int, tuple[Timeline, ElementTree.Element]]
) -> None:
    _, root = drawings[saves]
    wanted = {save_id_of(number) for number in range(1, saves + 1)}
    held = {lane.get("data-lane"): {bar.get("data-save") for bar in bars_of(lane)} for lane in lanes_of(root)}
    for lane in ("host copy, rank 0", "host copy, rank 2", "write + commit", f"upload, {MIRROR}", "rotation"):
        assert held[lane] == wanted, lane


@pytest.mark.parametrize("saves", SAVES)
def test_lanes_do_not_overlap_and_hold_their_bars(
    saves: int, drawings: dict[int, tuple[Timeline, ElementTree.Element]]
) -> None:
    _, root = drawings[saves]
    width, height = (float(root.get(name, "0")) for name in ("width", "height"))
    last_bottom = 0.0
    for lane in lanes_of(root):
        left, right, top, bottom = box(next(rect for rect in lane if rect.get("class") == "lane"))
        assert top >= last_bottom, lane.get("data-lane")
        assert bottom <= height
        last_bottom = bottom
        for bar in bars_of(lane):
            x0, x1, y0, y1 = box(shape_of(bar))
            assert top - 1 <= y0 < y1 <= bottom + 1, bar.get("data-save")
            assert left - 4 <= x0 < x1 <= min(right + 8, width)


@pytest.mark.parametrize("saves", SAVES)
def test_bars_of_one_lane_do_not_hide_one_another(
    saves: int, drawings: dict[int, tuple[Timeline, ElementTree.Element]]
) -> None:
    _, root = drawings[saves]
    for lane in lanes_of(root):
        rows: dict[float, list[tuple[float, float]]] = {}
        for bar in bars_of(lane):
            shape = shape_of(bar)
            if bar.get("data-kind") != "mirror_commit" and shape.tag == f"{SVG}rect":
                left, right, top, _ = box(shape)
                rows.setdefault(top, []).append((left, right))
        for placed in rows.values():
            ordered = sorted(placed)
            assert all(one[1] <= other[0] for one, other in pairwise(ordered)), lane.attrib


def test_uploads_at_the_same_time_lie_in_rows_of_their_own() -> None:
    run = WrittenRun()
    for number in range(1, 41):
        run.move(save_id_of(number), number, None, RecordState.PENDING)
        run.move(save_id_of(number), number, RecordState.PENDING, RecordState.UPLOADING)
        run.wait(1.0)
    root = ElementTree.fromstring(draw(build_timeline(run.history()), "backlog"))
    (lane,) = lanes_of(root)
    tops = {box(shape_of(bar))[2] for bar in bars_of(lane)}
    assert len(tops) == 40
    assert float(root.get("height", "0")) < 500, "many rows are drawn thin"


def test_every_bar_says_what_it_is_and_the_drawing_says_it_in_a_sentence(
    drawings: dict[int, tuple[Timeline, ElementTree.Element]],
) -> None:
    timeline, root = drawings[5]
    assert root.get("role") == "img"
    ids = (root.get("aria-labelledby") or "").split()
    told = {element.get("id"): element.text or "" for element in root if element.get("id")}
    assert all(told[name] for name in ids)
    assert told[ids[0]] == "5 saves & more"
    assert told[ids[1]] == summary(timeline)
    assert "5 saves" in told[ids[1]]
    assert "2 attempts" in told[ids[1]]
    assert f"4 commits on {MIRROR}" in told[ids[1]]
    assert "1 failed" in told[ids[1]]
    for lane in lanes_of(root):
        for bar in bars_of(lane):
            title = bar.find(f"{SVG}title")
            assert title is not None
            assert title.text
            assert not bar.get("data-step") or f"step {bar.get('data-step')}" in title.text


def test_what_failed_differs_from_what_went_well_and_says_why(
    drawings: dict[int, tuple[Timeline, ElementTree.Element]],
) -> None:
    _, root = drawings[5]
    (failed,) = [
        bar for lane in lanes_of(root) for bar in bars_of(lane) if "failed" in (bar.get("class") or "").split()
    ]
    assert (failed.get("data-kind"), failed.get("data-step")) == ("upload", "200")
    title = failed.find(f"{SVG}title")
    assert title is not None
    assert "403 <forbidden> & more" in (title.text or "")
    legend = next(group for group in root.iter(f"{SVG}g") if group.get("class") == "legend")
    words = {text.text for text in legend.iter(f"{SVG}text")}
    assert {"host copy", "write + commit", "upload", "rotation", "resume", "failed", "refused: kept"} <= words


def test_attempts_are_bands_behind_the_lanes_in_order(
    drawings: dict[int, tuple[Timeline, ElementTree.Element]],
) -> None:
    _, root = drawings[500]
    order = [group.get("class") for group in root.iter(f"{SVG}g") if group.get("class") in ("attempt", "in-lane")]
    assert order[:2] == ["attempt", "attempt"]
    assert "attempt" not in order[2:]
    bands = [box(shape_of(group)) for group in root.iter(f"{SVG}g") if group.get("class") == "attempt"]
    assert bands[0][1] < bands[1][0]


@pytest.mark.parametrize("saves", SAVES)
def test_the_axis_has_ticks_that_do_not_meet_and_begins_with_a_date(
    saves: int, drawings: dict[int, tuple[Timeline, ElementTree.Element]]
) -> None:
    _, root = drawings[saves]
    texts = [text for text in root.iter(f"{SVG}text") if re.fullmatch(r"\d\d:\d\d(:\d\d(\.\d+)?)?", text.text or "")]
    places = [float(text.get("x", "0")) for text in texts]
    assert len(places) >= 3
    assert all(other - one >= 70 for one, other in pairwise(places))
    assert any(re.fullmatch(r"2026-\d\d-\d\d", text.text or "") for text in root.iter(f"{SVG}text"))
    assert any(text.text == "UTC" for text in root.iter(f"{SVG}text"))


@pytest.mark.parametrize("saves", SAVES)
def test_a_file_needs_nothing_from_elsewhere_and_runs_nothing(saves: int) -> None:
    timeline = build_timeline(long_run(saves).history())
    drawn = draw(timeline, "a run")
    for text in (drawn, page(timeline, "a run", drawn)):
        assert "<script" not in text
        assert not re.search(r"\b(href|src|url\(|@import|onload|onclick)", text)
        assert {uri for uri in re.findall(r"https?://[^\s\"<]+", text)} == {"http://www.w3.org/2000/svg"}
        assert "prefers-color-scheme:dark" in text


def test_the_page_holds_the_drawing_and_every_bar_as_a_line_of_a_table() -> None:
    timeline = build_timeline(long_run(5).history())
    text = page(timeline, "a <run>", draw(timeline, "a <run>"))
    root = ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>"))
    assert root.find(f".//{SVG}svg") is not None
    assert len(root.findall(".//tbody/tr")) == len(timeline.bars)
    assert any(cell.text == "403 <forbidden> & more" for cell in root.iter("td"))
    assert root.findtext(".//h1") == "a <run>"


def test_letters_that_xml_does_not_know_do_not_spoil_the_file() -> None:
    run = WrittenRun()
    run.tell(events.StopRequested(reason="\x1b[31m\x00 \ud800 <b> ]]> &"))
    ElementTree.fromstring(draw(build_timeline(run.history()), "bell \x07"))


def test_absurd_times_do_not_spoil_the_file() -> None:
    run = WrittenRun()
    run.tell(events.SaveCommitted(step=1, kinds=(), save_id=save_id_of(1), duration_s=9e11))
    run.wall_off_s = -6e10
    run.wait(1.0).tell(events.SaveCommitted(step=2, kinds=(), save_id=save_id_of(2), duration_s=-5.0))
    run.boot, run.wall_off_s = "other", 2.5e11
    run.wait(1e9).tell(events.StopRequested(reason="", age_s=1e11))
    timeline = build_timeline(run.history())
    drawn = draw(timeline, "absurd")
    ElementTree.fromstring(drawn)
    ElementTree.fromstring(page(timeline, "absurd", drawn).removeprefix("<!DOCTYPE html>"))


def test_a_run_of_a_single_moment_can_be_drawn() -> None:
    run = WrittenRun()
    run.tell(events.StopRequested(reason="SIGTERM"))
    root = ElementTree.fromstring(draw(build_timeline(run.history()), "one"))
    assert [lane.get("data-lane") for lane in lanes_of(root)] == ["stops and faults"]


# -- the axis -----------------------------------------------------------------------------------------------


def test_a_long_pause_is_cut_and_usual_ones_are_not() -> None:
    busy = [(START_S + 60.0 * n, START_S + 60.0 * n + 1) for n in range(20)]
    even = Axis(busy, busy[0][0], busy[-1][1], 0, 1000)
    assert even.cuts == []
    later = [(begin + 36_000, end + 36_000) for begin, end in busy]
    axis = Axis([*busy, *later], busy[0][0], later[-1][1], 0, 1000)
    (cut,) = axis.cuts
    assert cut.end_s - cut.begin_s > 30_000
    assert cut.right - cut.left < 50
    places = [axis.x(begin) for begin, _ in [*busy, *later]]
    assert places == sorted(places)
    assert places[1] - places[0] == pytest.approx(places[21] - places[20])
    assert cut.left <= axis.x((cut.begin_s + cut.end_s) / 2) <= cut.right


@pytest.mark.parametrize("length_s", [0.0, 0.3, 7.0, 3600.0, 86_400.0 * 40, 86_400.0 * 4000])
def test_there_are_some_ticks_and_not_too_many_whatever_the_length(length_s: float) -> None:
    busy = [(START_S + length_s * n / 50, START_S + length_s * n / 50) for n in range(51)]
    axis = Axis(busy, START_S, START_S + length_s, 100, 960)
    ticks = axis.ticks()
    assert 2 <= len(ticks) <= 14
    assert all(100 <= tick.x <= 1060 for tick in ticks)
    assert ticks[0].date


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        (0.34, "340 ms"),
        (4.24, "4.2 s"),
        (200, "3 min 20 s"),
        (3600, "1 h"),
        (22_320, "6 h 12 min"),
        (183_600, "2 d 3 h"),
    ],
)
def test_durations_are_for_people(duration_s: float, text: str) -> None:
    assert duration_text(duration_s) == text


# -- what others wrote into the journal ----------------------------------------------------------------------


def hostile_run() -> WrittenRun:
    run = WrittenRun()
    run.tell(events.AttemptDecided(attempt=1, step=1, place=f"gs://{HOSTILE}", duration_s=1.0), by=HOSTILE)
    run.wait(1.0).tell(events.HostCopied(step=1, kinds=KINDS, duration_s=0.5))
    run.wait(1.0).tell(events.SaveCommitted(step=1, kinds=KINDS, save_id=HOSTILE, duration_s=1.0), by=HOSTILE)
    run.tell(events.MirrorCommitted(mirror=f"gs://{HOSTILE}", step=1, save_id=HOSTILE), by=HOSTILE)
    run.tell(events.MirrorUnreachable(mirror=HOSTILE, reason=HOSTILE))
    run.tell(events.CopyBroken(step=1, save_id=HOSTILE, place=HOSTILE, reason=HOSTILE))
    run.wait(1.0).tell(events.AttemptEnded(attempt=1, status=HOSTILE, pending=1))
    return run


def test_text_of_others_is_only_text_in_the_drawing_and_in_the_page() -> None:
    """An attribute through a save id would run as a script where the page is opened."""
    timeline = build_timeline(hostile_run().history())
    drawn = draw(timeline, HOSTILE)
    ElementTree.fromstring(drawn)
    text = page(timeline, HOSTILE, drawn)
    tags: list[tuple[str, list[tuple[str, str | None]]]] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: tags.append((tag, attrs))  # type: ignore[method-assign]
    parser.feed(text)
    harmless = {"html", "head", "meta", "title", "style", "body", "h1", "p", "div", "details", "summary"}
    harmless |= {"table", "thead", "tbody", "tr", "th", "td", "svg", "desc", "g", "rect", "line", "text", "polygon"}
    assert {tag for tag, _ in tags} <= harmless
    words = {"class", "data-kind", "data-step", "data-lane", "role", "aria-labelledby", "id", "text-anchor"}
    words |= {"lang", "charset", "name", "content", "scope", "xmlns", "transform", "points", "viewbox"}
    numbers = {"x", "y", "x1", "x2", "y1", "y2", "width", "height", "rx"}
    for name, value in (pair for _, attrs in tags for pair in attrs):
        pattern = "[0-9a-f]*" if name == "data-save" else "-?[0-9.]+" if name in numbers else ".*"
        assert name in words | numbers | {"data-save"}
        assert re.fullmatch(pattern, value or "", re.DOTALL)
    assert not set(text) & set("\x1b\x07\u202e")
    assert "&lt;script&gt;alert(2)" in text


def attempts(run: WrittenRun, number: int) -> None:
    run.decide(number, writer=f"w{number}")


def ranks(run: WrittenRun, number: int) -> None:
    run.tell(events.HostCopied(step=1, kinds=KINDS, rank=number, duration_s=0.5))


def mirrors(run: WrittenRun, number: int) -> None:
    run.tell(events.MirrorUnreachable(mirror=f"gs://{number}", reason="silent"))


def copies(run: WrittenRun, number: int) -> None:
    """Every host copy comes before the first commit."""
    run.wait(-1000.0).tell(events.HostCopied(step=number, kinds=KINDS, duration_s=0.5))
    run.wait(1000.0)
    run.tell(events.SaveCommitted(step=number, kinds=KINDS, save_id=save_id_of(number), duration_s=0.0))


def backlog(run: WrittenRun, number: int) -> None:
    run.move(save_id_of(number), number, None, RecordState.PENDING)
    run.move(save_id_of(number), number, RecordState.PENDING, RecordState.UPLOADING)


def clock(run: WrittenRun, number: int) -> None:
    run.wall_off_s = START_S + 5.0 * (-1) ** number
    run.tell(events.StopRequested(reason="x", age_s=0.0))
    run.move(save_id_of(number), number, None, RecordState.PENDING)


@pytest.mark.parametrize("one", [attempts, ranks, mirrors, copies, backlog, clock])
def test_the_time_to_draw_grows_with_the_length_of_the_journal_and_not_with_its_square(
    one: Callable[[WrittenRun, int], None],
) -> None:
    def steps(count: int) -> int:
        run = WrittenRun()
        for number in range(1, count + 1):
            one(run, number)
            run.wait(0.01)
        history = run.history()

        def work() -> None:
            timeline = build_timeline(history)
            page(timeline, "x", draw(timeline, "x"))

        return steps_of(work)

    base = steps(10)
    assert steps(640) - base < 6 * (steps(160) - base)
