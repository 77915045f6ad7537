"""A timeline as one HTML page: the drawing, and a table of the same bars to read or copy from.

Rules:
* The page is one file, without scripts and external resources. The table is folded under the drawing.
"""

from __future__ import annotations

from ckptmirror.cli._human_text import duration_text
from ckptmirror.cli._timeline_drawing import KIND_NAMES, plain, summary
from ckptmirror.core.journal import utc_text
from ckptmirror.observe.timeline import Timeline
from ckptmirror.observe.timeline_bars import Bar

__all__ = ["page"]

_STYLE = """
:root{color-scheme:light dark}
body{font:14px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;margin:1.5rem}
.drawing{overflow-x:auto}table{border-collapse:collapse;margin-top:.5rem}
th,td{text-align:left;padding:.15rem .7rem .15rem 0;vertical-align:top}td.number{text-align:right}
"""
_HEADS = ("begin (UTC)", "took", "what", "step", "rank", "mirror", "attempt", "outcome", "reason")


def page(timeline: Timeline, heading: str, drawn: str) -> str:
    """Return the page, with the SVG text ``drawn`` in it."""
    notes = [summary(timeline)]
    notes += [f"The wall clock was changed by {jump.by_s:+.1f} s at {utc_text(jump.at_s)}." for jump in timeline.jumps]
    notes += timeline.problems
    if timeline.lost_lines:
        notes.append(f"{timeline.lost_lines} lines of the journal are missing or cannot be read.")
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8"/>',
            '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
            f"<title>{plain(heading)}</title><style>{_STYLE}</style></head><body>",
            f"<h1>{plain(heading)}</h1>",
            *(f"<p>{plain(note)}</p>" for note in notes),
            f'<div class="drawing">{drawn}</div>',
            f"<details><summary>The same as a table ({len(timeline.bars)} lines)</summary><table><thead><tr>",
            "".join(f'<th scope="col">{head}</th>' for head in _HEADS),
            "</tr></thead><tbody>",
            *(_row(bar) for bar in timeline.bars),
            "</tbody></table></details></body></html>",
            "",
        ]
    )


def _row(bar: Bar) -> str:
    took = "" if bar.is_moment else "no end known" if bar.end_s is None else duration_text(bar.end_s - bar.begin_s)
    cells = [utc_text(bar.begin_s), took, KIND_NAMES[bar.kind]]
    cells += ["" if value is None else str(value) for value in (bar.step, bar.rank, bar.mirror, bar.attempt)]
    return "<tr>" + "".join(f"<td>{plain(cell)}</td>" for cell in [*cells, bar.outcome, bar.reason]) + "</tr>"
