"""Draws the Mermaid diagrams of the pages as SVG, so that the site needs no script and no network.

Rules:
* A page keeps its diagram as text, which a forge draws by itself; the site shows what is drawn here from the same text.
* Only what the pages use is understood: ``sequenceDiagram``, ``stateDiagram-v2``, ``gitGraph``. Any other line is an
  error, so that a picture never silently lacks something.
* Lines and letters have the colour of the text around them: light and dark pages need no second picture.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape

__all__ = ["draw"]

LETTER_PX = 6.9
LINE_PX = 17
FONT = "font-family='sans-serif' font-size='13' paint-order='stroke' stroke-width='4'"
HALO = "stroke:var(--color-background-primary,transparent)"  # letters stay readable where they cross a line
LINE_LETTERS = 28
ARC_PX = 34

_PARTICIPANT = re.compile(r"participant (\w+)(?: as (.+))?")
_MESSAGE = re.compile(r"(\w+)(--?>>)(\w+): (.+)")
_FRAME = re.compile(r"(alt|else|loop|opt) ?(.*)")
_NOTE = re.compile(r"Note over (\w+)(?:,(\w+))?: (.+)")
_EDGE = re.compile(r"(\[\*\]|\w+) --> (\[\*\]|\w+)(?:: (.+))?")
_COMMIT = re.compile(r'commit id: "(.+)"')
_BRANCH = re.compile(r"(branch|checkout) (\S+)")


def draw(text: str) -> str:
    """Return one ``<figure>`` with the diagram that ``text`` describes in Mermaid's words.

    Raises:
        ValueError: A line is not understood.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("%%")]
    drawers: dict[str, Callable[[list[str]], str]] = {
        "sequenceDiagram": _sequence,
        "stateDiagram-v2": _states,
        "gitGraph": _branches,
    }
    if not lines or lines[0] not in drawers:
        raise ValueError(f"this kind of diagram cannot be drawn: {lines[:1]}")
    return f"<figure class='picture'>{drawers[lines[0]](lines[1:])}</figure>"


def _not_understood(line: str) -> ValueError:
    return ValueError(f"this line of a diagram is not understood: {line}")


def _svg(width: float, height: float, parts: list[str], what: str) -> str:
    arrow = (
        "<defs><marker id='tip' viewBox='0 0 8 8' refX='8' refY='4' markerWidth='8' markerHeight='8' orient='auto'>"
        "<path d='M0,0 L8,4 L0,8 z' fill='currentColor'/></marker></defs>"
    )
    size = f"viewBox='0 0 {width:.0f} {height:.0f}' width='{width:.0f}' style='max-width:100%;height:auto'"
    head = f"<svg xmlns='http://www.w3.org/2000/svg' role='img' aria-label='{escape(what, quote=True)}' {size}>"
    return head + arrow + "".join(parts) + "</svg>"


def _text(x: float, y: float, lines: list[str], anchor: str = "middle", more: str = "") -> str:
    spans = "".join(
        f"<tspan x='{x:.0f}' dy='{0 if n == 0 else LINE_PX}'>{escape(t)}</tspan>" for n, t in enumerate(lines)
    )
    place = f"x='{x:.0f}' y='{y:.0f}' text-anchor='{anchor}'"
    return f"<text {place} fill='currentColor' style='{HALO}' {FONT} {more}>{spans}</text>"


def _line(x1: float, y1: float, x2: float, y2: float, style: str = "") -> str:
    place = f"x1='{x1:.0f}' y1='{y1:.0f}' x2='{x2:.0f}' y2='{y2:.0f}'"
    return f"<line {place} stroke='currentColor' {style}/>"


def _box(
    x: float, y: float, width: float, height: float, style: str = "fill='currentColor' fill-opacity='0.08'"
) -> str:
    place = f"x='{x:.0f}' y='{y:.0f}' width='{width:.0f}' height='{height:.0f}' rx='5'"
    return f"<rect {place} stroke='currentColor' {style}/>"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, LINE_LETTERS) or [""]


def _width(lines: list[str]) -> float:
    return max(map(len, lines)) * LETTER_PX


@dataclass
class _Sequence:
    """Columns that are known, and what was drawn so far from the top to ``y``."""

    names: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    x: dict[str, float] = field(default_factory=dict)
    width: float = 0
    y: float = 60
    parts: list[str] = field(default_factory=list)
    frames: list[float] = field(default_factory=list)

    @property
    def inset(self) -> float:
        """How far the innermost frame stands from the edge."""
        return 8 * len(self.frames)

    def lay_out(self, messages: list[re.Match[str]]) -> None:
        """Give each column a place, with room for the longest text between it and the next."""
        gaps = [max(_width([label]) for label in self.labels) + 30] * len(self.names)
        for message in messages:
            if not {message[1], message[3]} <= set(self.names):
                raise _not_understood(message[0])
            first, last = sorted((self.names.index(message[1]), self.names.index(message[3])))
            room = (_width(_wrapped(message[4])) + 34) / max(1, last - first)
            for column in range(first, max(last, first + 1)):
                gaps[column] = max(gaps[column], room)
        at = max(_width([label]) for label in self.labels) / 2 + 20
        for name, gap in zip(self.names, gaps, strict=True):
            self.x[name] = at
            at += gap
        self.width = at

    def message(self, first: str, arrow: str, last: str, text: str) -> None:
        """Draw one arrow with its text above it, or a hook for a message of a column to itself."""
        lines, start, end = _wrapped(text), self.x[first], self.x[last]
        dash = "stroke-dasharray='5 4'" if arrow.startswith("--") else ""
        if first == last:
            self.parts.append(_text(start + 30, self.y + 4, lines, "start"))
            down = self.y + LINE_PX * len(lines) - 8
            path = f"M{start:.0f},{self.y:.0f} h22 V{down:.0f} h-21"
            self.parts.append(f"<path d='{path}' fill='none' stroke='currentColor' {dash} marker-end='url(#tip)'/>")
            self.y = down + 26
            return
        self.parts.append(_text((start + end) / 2, self.y, lines))
        self.y += LINE_PX * (len(lines) - 1) + 7
        self.parts.append(_line(start, self.y, end, self.y, f"{dash} marker-end='url(#tip)'"))
        self.y += 26

    def note(self, first: str, last: str, text: str) -> None:
        """Draw a box over some columns."""
        lines = _wrapped(text)
        self.y += 4
        left, right = self.x[first] - 40, max(self.x[last] + 40, self.x[first] - 20 + _width(lines))
        height = LINE_PX * len(lines) + 8
        self.parts.append(_box(left, self.y - 14, right - left, height))
        self.parts.append(_text((left + right) / 2, self.y + 3, lines))
        self.y += height + 14

    def frame(self, word: str, text: str) -> None:
        """Begin a frame, or another part of the one that is open."""
        top = self.y - 12
        if word == "else":
            self.parts.append(_line(self.inset, top, self.width - self.inset, top, "stroke-dasharray='3 3'"))
        else:
            self.frames.append(top)
        self.parts.append(_text(self.inset + 8, self.y + 4, [f"{word}: {text}"], "start", more="font-style='italic'"))
        self.y += 28

    def end(self) -> None:
        """Close the innermost frame."""
        inset, top = self.inset, self.frames.pop()
        size = (self.width - 2 * inset, self.y - 12 - top)
        self.parts.append(_box(inset, top, *size, "fill='none' stroke-opacity='0.5'"))
        self.y += 14

    def svg(self) -> str:
        """Return the picture with its heads and life lines."""
        heads = []
        for name, label in zip(self.names, self.labels, strict=True):
            width = _width([label]) + 20
            heads.append(_line(self.x[name], 34, self.x[name], self.y, "stroke-opacity='0.35'"))
            heads.append(_box(self.x[name] - width / 2, 8, width, 26))
            heads.append(_text(self.x[name], 25, [label], more="font-weight='bold'"))
        return _svg(self.width, self.y + 6, heads + self.parts, "sequence: " + ", ".join(self.labels))


def _sequence(lines: list[str]) -> str:
    drawn = _Sequence()
    for line in lines:
        if found := _PARTICIPANT.fullmatch(line):
            drawn.names.append(found[1])
            drawn.labels.append(found[2] or found[1])
    drawn.lay_out([found for line in lines if (found := _MESSAGE.fullmatch(line))])
    for line in lines:
        if found := _MESSAGE.fullmatch(line):
            drawn.message(*found.groups())
        elif found := _NOTE.fullmatch(line):
            drawn.note(found[1], found[2] or found[1], found[3])
        elif line == "end" and drawn.frames:
            drawn.end()
        elif found := _FRAME.fullmatch(line):
            drawn.frame(found[1], found[2])
        elif not _PARTICIPANT.fullmatch(line):
            raise _not_understood(line)
    if drawn.frames:
        raise ValueError("a frame of a diagram has no end")
    return drawn.svg()


def _states(lines: list[str]) -> str:
    """States on a line; each change is a numbered arc above it, or below if it goes back, and a line of the legend."""
    edges = []
    for line in lines:
        found = _EDGE.fullmatch(line)
        if not found:
            raise _not_understood(line)
        edges.append((found[1], found[2], found[3] or ""))
    names = [name for name in dict.fromkeys(name for edge in edges for name in edge[:2]) if name != "[*]"]
    ends = {name for edge in edges if "[*]" in edge for name in edge[:2]}
    changes = [edge for edge in edges if "[*]" not in edge]
    places = [(names.index(first), names.index(last)) for first, last, _ in changes]
    above = max([last - first for first, last in places if last > first], default=1) * ARC_PX + 20
    below = max([first - last for first, last in places if last < first], default=0) * ARC_PX + 40
    gap = max(map(len, names)) * LETTER_PX + 50
    parts = [_arc(first, last, number, above, gap) for number, (first, last) in enumerate(places, 1)]
    for number, name in enumerate(names):
        width, x = _width([name]) + 18, 60 + gap * number
        style = "fill='currentColor' fill-opacity='0.08'" + (" stroke-width='2.5'" if name in ends else "")
        parts.append(_box(x - width / 2, above - 14, width, 28, style) + _text(x, above + 5, [name]))
    legend = [f"<li>{escape(first)} → {escape(last)}: {escape(why)}</li>" for first, last, why in changes]
    picture = _svg(120 + gap * (len(names) - 1), above + below, parts, "states: " + ", ".join(names))
    return f"{picture}<ol>{''.join(legend)}</ol>"


def _arc(first: int, last: int, number: int, line_y: float, gap: float) -> str:
    """A change from one state of the line to another, with its number at the top of the arc."""
    forward = last > first
    height = ARC_PX * abs(last - first) * (-1 if forward else 1)
    y, shift = line_y + (-14 if forward else 14), (8 if forward else -8)
    start, end, top = 60 + gap * first + shift, 60 + gap * last - shift, y + height * 1.3
    curve = f"M{start:.0f},{y:.0f} C{start:.0f},{top:.0f} {end:.0f},{top:.0f} {end:.0f},{y:.0f}"
    path = f"<path d='{curve}' fill='none' stroke='currentColor' stroke-opacity='0.7' marker-end='url(#tip)'/>"
    return path + _text((start + end) / 2, y + height * 0.98 + 4, [str(number)], more="font-weight='bold'")


def _branches(lines: list[str]) -> str:
    """One row for each branch, the commits of all from left to right in the order in which they are told."""
    rows, here = {"main": 0}, "main"
    last: dict[str, tuple[float, float]] = {}
    parts: list[str] = []
    forks: dict[str, tuple[float, float]] = {}
    x = 40.0
    for line in lines:
        if found := _BRANCH.fullmatch(line):
            if found[1] == "branch":
                rows[found[2]] = len(rows)
                forks[found[2]] = last[here]
            here = found[2]
        elif found := _COMMIT.fullmatch(line):
            y = 40.0 + 70 * rows[here]
            x += (_width([found[1]]) + 30) / 2 if last else _width([found[1]]) / 2
            before = last.get(here) or forks.get(here)
            if before:
                parts.append(_line(before[0], before[1], x, y, "stroke-width='2'"))
            parts.append(f"<circle cx='{x:.0f}' cy='{y:.0f}' r='6' fill='currentColor'/>")
            parts.append(_text(x, y + (24 if rows[here] else -14), [found[1]]))
            last[here] = (x, y)
            x += (_width([found[1]]) + 30) / 2
        else:
            raise _not_understood(line)
    return _svg(x + 10, 40 + 70 * len(rows), parts, "branches: " + ", ".join(rows))
