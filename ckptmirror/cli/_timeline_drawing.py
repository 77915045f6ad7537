"""Draws a timeline as SVG: lanes of bars over an axis of UTC, attempts behind them, a legend below.

Rules:
* The text of one file is everything: no script, no font, no picture from elsewhere.
* It looks right in a light and in a dark viewer: colours follow what the viewer prefers, and the page has a colour of
  its own where a viewer does not say. What failed or has no end has another outline too, not only another colour.
* Every bar has a ``<title>`` with step, rank, mirror, times, outcome and reason; the drawing has a title and a
  description for whoever hears it instead of seeing it.
* An attribute holds only words of this program, numbers, the hex digits of a save id, and what :func:`plain` returns.
"""

from __future__ import annotations

import re
from collections import Counter
from xml.sax.saxutils import escape

from ckptmirror.cli._human_text import duration_text
from ckptmirror.cli._timeline_axis import Axis
from ckptmirror.cli._timeline_lanes import Lane, Placed, lanes_of
from ckptmirror.core.journal import utc_text
from ckptmirror.core.printable import printable_line, printable_text
from ckptmirror.observe.timeline import Timeline
from ckptmirror.observe.timeline_bars import Bar

__all__ = ["KIND_NAMES", "bar_text", "draw", "plain", "summary"]

KIND_NAMES = {
    "attempt": "attempt",
    "resume": "resume",
    "stage": "stage",
    "host_copy": "host copy",
    "emergency": "emergency snapshot",
    "commit": "write + commit",
    "upload": "upload",
    "mirror_commit": "commit on the mirror",
    "unreachable": "mirror does not answer",
    "rotation": "rotation",
    "stop": "stop asked for",
    "fence": "fenced by a newer attempt",
    "broken_copy": "broken copy",
    "gone": "save removed by somebody",
    "quarantine": "quarantine of a save",
}
_LEGEND = ("host_copy", "commit", "upload", "mirror_commit", "rotation", "resume", "stage", "emergency", "stop")
_STATES = (("failed", "failed"), ("refused", "refused: kept"), ("unfinished", "no end known"))
_LABELS = 214.0
_TOP = 66.0
_LANE_GAP = 9.0
_RIGHT = 24.0
_WIDTHS = (960.0, 4000.0)
_WIDTH_PER_SAVE = 4.4
_STEP_DIGIT = 7.0
_SAVE_ID = re.compile("[0-9a-f]*")

_STYLE = """
text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;fill:#1f2328}
.small{font-size:11px;fill:#57606a}.head{font-size:15px;font-weight:600}
.page{fill:#ffffff}.lane{fill:#6e7781;fill-opacity:.07}.grid{stroke:#6e7781;stroke-opacity:.28}
.band{fill:#6e7781;fill-opacity:.09}.band.odd{fill-opacity:.17}.edge{stroke:#57606a;stroke-dasharray:2 3}
.cut{fill:#6e7781;fill-opacity:.22}
.host_copy{fill:#0a6fd6}.commit{fill:#0f8a6a}.upload{fill:#7a5cd0}.mirror_commit{fill:#4b2fa3}.rotation{fill:#8a6d3b}
.resume{fill:#1b98a8}.stage{fill:#4f7d1f}.emergency{fill:#b8860b}.stop,.fence,.quarantine{fill:#57606a}
.failed,.broken_copy,.gone,.unreachable{fill:#d1242f;stroke:#7d0d15;stroke-width:1.4}
.refused{fill:#ffffff;stroke:#bf5b00;stroke-width:1.6}
.unfinished{fill-opacity:.3;stroke:#57606a;stroke-dasharray:3 2}
@media (prefers-color-scheme:dark){
text{fill:#e6edf3}.small{fill:#9aa4af}.page{fill:#0d1117}.edge{stroke:#9aa4af}
.host_copy{fill:#4aa3ff}.commit{fill:#2fc79a}.upload{fill:#a48bff}.mirror_commit{fill:#d6c9ff}.rotation{fill:#c9a666}
.resume{fill:#3cc8da}.stage{fill:#8fc04f}.emergency{fill:#e3b341}.stop,.fence,.quarantine{fill:#9aa4af}
.failed,.broken_copy,.gone,.unreachable{fill:#ff5c63;stroke:#ffc1c4}
.refused{fill:#0d1117;stroke:#f0883e}
.unfinished{stroke:#9aa4af}}
"""


def plain(text: str) -> str:
    """Return any text so that it is only text, in an element or in an attribute between quotes."""
    return escape(printable_text(text), {'"': "&quot;", "'": "&#39;"})


def summary(timeline: Timeline) -> str:
    """Return the timeline in one or two sentences, for those who do not see it."""
    saves = {bar.save_id for bar in timeline.of_kind("commit", "emergency") if bar.outcome == "done"}
    lines = [
        f"{_counted(len(saves), 'save')} from {utc_text(timeline.begin_s)} to {utc_text(timeline.end_s)}",
        _counted(len(timeline.of_kind("attempt")), "attempt"),
    ]
    for url, number in Counter(bar.mirror for bar in timeline.of_kind("mirror_commit")).items():
        lines.append(f"{_counted(number, 'commit')} on {url}")
    deleted = [bar for bar in timeline.of_kind("rotation") if bar.outcome == "done"]
    lines.append(f"{_counted(len(deleted), 'local save')} deleted by rotation")
    failed = [bar for bar in timeline.bars if bar.outcome == "failed" and bar.kind != "attempt"]
    unfinished = [bar for bar in timeline.bars if bar.outcome == "unfinished" and bar.kind != "attempt"]
    text = ", ".join(lines) + f". {len(failed)} failed, {len(unfinished)} without a known end."
    if timeline.jumps:
        text += f" The wall clock was set {_counted(len(timeline.jumps), 'time')}; times are laid on one line."
    return printable_line(text)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def bar_text(bar: Bar) -> str:
    """Return all that is known of a bar in one line."""
    who = [f"attempt {bar.attempt}" if bar.kind == "attempt" else KIND_NAMES[bar.kind]]
    who += [f"step {bar.step}"] if bar.step is not None else []
    who += [f"rank {bar.rank}"] if bar.rank is not None else []
    who += [f"on {bar.mirror}"] if bar.mirror else []
    end = "no end known" if bar.end_s is None else duration_text(bar.end_s - bar.begin_s)
    text = f"{', '.join(who)}: {bar.outcome}, {utc_text(bar.begin_s)}"
    text += "" if bar.is_moment else f", {end}"
    text += f", {bar.tries} uploads begun" if bar.tries else ""
    text += f", by {bar.by}" if bar.by not in ("", "trainer") else ""
    text += f", save {bar.save_id[:8]}" if bar.save_id else ""
    return printable_line(text + (f": {bar.reason}" if bar.reason else ""))


def draw(timeline: Timeline, heading: str) -> str:
    """Return the SVG document's root element, as text."""
    steps = {(bar.step, bar.save_id) for bar in timeline.of_kind("commit", "emergency", "host_copy", "upload")}
    width = min(max(_WIDTHS[0], _WIDTH_PER_SAVE * len(steps)), _WIDTHS[1])
    busy = [(bar.begin_s, bar.until_s) for bar in timeline.bars if bar.kind != "attempt"]
    axis = Axis(busy, timeline.begin_s, timeline.end_s, _LABELS, width)
    lanes = lanes_of(timeline.bars, axis.x)
    bottom = _TOP + sum(lane.height + _LANE_GAP for lane in lanes)
    parts = [*_bands(timeline, axis, bottom), *_axis_lines(axis, bottom), *_step_labels(timeline, axis)]
    top = _TOP
    for lane in lanes:
        parts += _drawn_lane(lane, top, axis)
        top += lane.height + _LANE_GAP
    legend, height = _legend(timeline, bottom + 44, axis.right)
    full_width, full_height = axis.right + _RIGHT, height + 12
    size = f'width="{full_width:.0f}" height="{full_height:.0f}" viewBox="0 0 {full_width:.0f} {full_height:.0f}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="tl-title tl-text">',
            f'<title id="tl-title">{plain(heading)}</title>',
            f'<desc id="tl-text">{plain(summary(timeline))}</desc>',
            f"<style>{_STYLE}</style>",
            f'<rect class="page" width="{full_width:.0f}" height="{full_height:.0f}"/>',
            f'<text class="head" x="12" y="22">{plain(heading)}</text>',
            *parts,
            *legend,
            "</svg>",
            "",
        ]
    )


def _bands(timeline: Timeline, axis: Axis, bottom: float) -> list[str]:
    parts = []
    for number, bar in enumerate(timeline.of_kind("attempt")):
        name = f"attempt {bar.attempt}" + (", no end known" if bar.end_s is None else "")
        left, right = axis.x(bar.begin_s), axis.x(bar.until_s)
        wide = max(right - left, 1.0)
        parts.append(
            f'<g class="attempt"><title>{plain(bar_text(bar))}</title>'
            f'<rect class="band{" odd" if number % 2 else ""}" x="{left:.1f}" y="34" width="{wide:.1f}" '
            f'height="{bottom - 34:.1f}"/>'
            f'<line class="edge" x1="{left:.1f}" x2="{left:.1f}" y1="34" y2="{bottom:.1f}"/>'
            + (f'<text class="small" x="{left + 3:.1f}" y="45">{name}</text>' if wide > 6.2 * len(name) else "")
            + "</g>"
        )
    return parts


def _axis_lines(axis: Axis, bottom: float) -> list[str]:
    parts = []
    for cut in axis.cuts:
        text = f"{duration_text(cut.end_s - cut.begin_s)} in which nothing happened, not drawn to scale"
        parts.append(
            f'<g><title>{plain(text)}</title><rect class="cut" x="{cut.left:.1f}" y="34" '
            f'width="{cut.right - cut.left:.1f}" height="{bottom - 34:.1f}"/>'
            f'<text class="small" text-anchor="middle" '
            f'transform="translate({(cut.left + cut.right) / 2 + 4:.1f} {(bottom + 34) / 2:.1f}) rotate(-90)">'
            f"{plain(duration_text(cut.end_s - cut.begin_s))}</text></g>"
        )
    for tick in axis.ticks():
        parts.append(
            f'<line class="grid" x1="{tick.x:.1f}" x2="{tick.x:.1f}" y1="{_TOP - 6:.1f}" y2="{bottom + 4:.1f}"/>'
            f'<text class="small" text-anchor="middle" x="{tick.x:.1f}" y="{bottom + 16:.1f}">{tick.text}</text>'
        )
        if tick.date:
            parts.append(
                f'<text class="small" text-anchor="middle" x="{tick.x:.1f}" y="{bottom + 30:.1f}">{tick.date}</text>'
            )
    parts.append(f'<text class="small" text-anchor="end" x="{_LABELS - 46:.1f}" y="{bottom + 16:.1f}">UTC</text>')
    return parts


def _step_labels(timeline: Timeline, axis: Axis) -> list[str]:
    parts = [f'<text class="small" text-anchor="end" x="{_LABELS - 12:.1f}" y="{_TOP - 7:.1f}">step</text>']
    free = axis.left
    for bar in timeline.of_kind("host_copy", "commit", "emergency"):
        x, wide = axis.x(bar.begin_s), _STEP_DIGIT * len(str(bar.step))
        if x >= free and x + wide <= axis.right:
            parts.append(f'<text class="small" x="{x:.1f}" y="{_TOP - 7:.1f}">{bar.step}</text>')
            free = x + wide + 2 * _STEP_DIGIT
    return parts


def _drawn_lane(lane: Lane, top: float, axis: Axis) -> list[str]:
    wide = axis.right - axis.left
    return [
        f'<g class="in-lane" data-lane="{plain(lane.title)}">',
        f'<rect class="lane" x="{axis.left:.1f}" y="{top:.1f}" width="{wide:.1f}" height="{lane.height:.1f}"/>',
        f'<text text-anchor="end" x="{_LABELS - 12:.1f}" y="{top + min(lane.height, 14) - 3:.1f}">'
        f"<title>{plain(lane.title)}</title>{plain(lane.name)}</text>",
        *(_drawn_bar(placed, top + placed.row * lane.row_height, lane.row_height) for placed in lane.placed),
        "</g>",
    ]


def _drawn_bar(placed: Placed, top: float, row_height: float) -> str:
    bar = placed.bar
    classes = bar.kind if bar.outcome == "done" else f"{bar.kind} {bar.outcome}"
    high = max(row_height - 2, 2)
    save_id = bar.save_id if _SAVE_ID.fullmatch(bar.save_id) else ""
    data = f'data-kind="{bar.kind}" data-step="{"" if bar.step is None else bar.step}" data-save="{save_id}"'
    if bar.kind == "mirror_commit":
        shape = _stroke(placed.left, top, row_height)
    elif bar.is_moment:
        shape = _diamond((placed.left + placed.right) / 2, top + 1 + high / 2, min(high, 10) / 2)
    else:
        wide = placed.right - placed.left
        shape = f'<rect x="{placed.left:.2f}" y="{top + 1:.2f}" width="{wide:.2f}" height="{high:.2f}" rx="1.5"/>'
    return f'<g class="{classes}" {data}><title>{plain(bar_text(bar))}</title>{shape}</g>'


def _diamond(x: float, y: float, half: float) -> str:
    points = ((x, y - half), (x + half, y), (x, y + half), (x - half, y))
    return '<polygon points="' + " ".join(f"{px:.2f},{py:.2f}" for px, py in points) + '"/>'


def _stroke(x: float, top: float, height: float) -> str:
    return f'<rect x="{x - 1:.2f}" y="{top - 0.5:.2f}" width="2.5" height="{height - 1:.2f}"/>'


def _legend(timeline: Timeline, top: float, right: float) -> tuple[list[str], float]:
    """Return the legend of what is in the drawing, and where it ends."""
    kinds = {bar.kind for bar in timeline.bars}
    states = {bar.outcome for bar in timeline.bars if bar.kind != "attempt"}
    entries: list[tuple[str, str]] = [(kind, KIND_NAMES[kind]) for kind in _LEGEND if kind in kinds]
    entries += [(f"upload {state}", name) for state, name in _STATES if state in states]
    parts, x, y = ['<g class="legend">'], 12.0, top
    for classes, name in entries:
        wide = 40 + 6.4 * len(name)
        if x + wide > right and x > 12:
            x, y = 12.0, y + 20
        mark = f'<rect x="{x:.1f}" y="{y - 5:.1f}" width="14" height="10" rx="1.5"/>'
        mark = {"mirror_commit": _stroke(x + 7, y - 7, 14), "stop": _diamond(x + 7, y, 5)}.get(classes, mark)
        parts.append(f'<g class="{classes}">{mark}</g><text x="{x + 20:.1f}" y="{y + 4:.1f}">{plain(name)}</text>')
        x += wide
    return [*parts, "</g>"], y + 10
