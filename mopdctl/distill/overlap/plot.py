"""The report of `mopdctl overlap` as a picture: overlap and advantage against prefix length, a line per teacher.

Plain SVG, readable on a light and on a dark page.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

WIDTH, PANEL_HEIGHT = 720, 230
_LEFT, _RIGHT, _TOP, _GAP, _LEGEND_LINE = 76, 24, 88, 78, 20
_COLOURS = ("#3b82c4", "#e08a1e", "#2f9e73", "#c95fa5", "#8f7ae5", "#b8860b", "#d1495b", "#5f9ea0")
"""Of middle lightness, for both kinds of page."""
_DASHES = ("none", "7 4", "2 3", "9 3 2 3")
"""More teachers than colours begin again with another dash."""
_STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #24292f; }
  .title { font-size: 16px; font-weight: 600; }
  .axis { stroke: #57606a; } .grid { stroke: #d0d7de; } .zero { stroke: #57606a; stroke-dasharray: 3 3; }
  .muted { fill: #57606a; } .page { fill: #ffffff; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; } .axis, .zero { stroke: #9198a1; } .grid { stroke: #30363d; }
    .muted { fill: #9198a1; } .page { fill: #0d1117; }
  }
"""


@dataclass(frozen=True, slots=True)
class _Point:
    begin: int
    """First prefix length of the bin."""
    mean: float
    stderr: float


@dataclass(frozen=True, slots=True)
class _Panel:
    title: str
    top: float
    bins: Sequence[int]
    """First prefix lengths, in order: a place on the axis each."""
    low: float
    high: float
    step: float
    """Between lines of the grid; `low` and `high` lie on it."""

    def x(self, begin: int) -> float:
        """Where a bin stands; a single one in the middle."""
        place = self.bins.index(begin) / (len(self.bins) - 1) if len(self.bins) > 1 else 0.5
        return _LEFT + 12 + place * (WIDTH - _LEFT - _RIGHT - 24)

    def y(self, value: float) -> float:
        """Where a value stands, inside the panel."""
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return self.top + PANEL_HEIGHT * (1 - share)


def to_svg(document: dict[str, Any]) -> str:
    """The picture of a report, as SVG text. Every word from the report is escaped."""
    teachers: dict[str, dict[str, Any]] = document["teachers"]
    overlap = {alias: _points(one, "top_k_overlap", 100) for alias, one in teachers.items()}
    advantage = {alias: _points(one, "advantage_nats", 1) for alias, one in teachers.items()}
    bins = sorted({point.begin for points in overlap.values() for point in points})
    low, high, step = _range(advantage)
    second = _TOP + PANEL_HEIGHT + _GAP
    panels = (
        _Panel(f"top-{document['settings']['top_k']} overlap with the teacher, %", _TOP, bins, 0, 100, 20),
        _Panel("advantage, log p(teacher) - log p(student), nats", second, bins, low, high, step),
    )
    legend = second + PANEL_HEIGHT + _GAP
    height = legend + _LEGEND_LINE * len(teachers) + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" '
        f'height="{height:g}" role="img">',
        f"<title>{_text('Support overlap of ' + document['student']['model'])}</title>",
        f"<style>{_STYLE}</style>",
        f'<rect class="page" width="{WIDTH}" height="{height:g}"/>',
        f'<text class="title" x="{_LEFT}" y="26">{_text("Support overlap of " + document["student"]["model"])}</text>',
        f'<text class="muted" x="{_LEFT}" y="46">bars are two standard errors over prompts, to either side</text>',
    ]
    for panel, series in zip(panels, (overlap, advantage), strict=True):
        parts += _axes(panel)
        for number, points in enumerate(series.values()):
            parts += _line(panel, points, number, len(series))
    for number, (alias, one) in enumerate(teachers.items()):
        y = legend + _LEGEND_LINE * number
        parts.append(f'<line x1="{_LEFT}" x2="{_LEFT + 26}" y1="{y - 4:g}" y2="{y - 4:g}" {_stroke(number)}/>')
        words = f"{alias}: {one['advice']['choice']}"
        parts.append(f'<text x="{_LEFT + 34}" y="{y:g}">{_text(words)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _points(teacher: dict[str, Any], name: str, scale: float) -> list[_Point]:
    return [
        _Point(one["begin"], scale * one[name]["mean"], scale * (one[name]["stderr"] or 0.0))
        for one in teacher["by_prefix"]
    ]


def _range(series: dict[str, list[_Point]]) -> tuple[float, float, float]:
    """Bounds around all bars and 0, and the step of the grid that they lie on."""
    ends = [0.0, *(p.mean + side * 2 * p.stderr for points in series.values() for p in points for side in (-1, 1))]
    step = _step(max(ends) - min(ends))
    low, high = math.floor(min(ends) / step) * step, math.ceil(max(ends) / step) * step
    return (low, high, step) if high > low else (-step, step, step)


def _step(span: float) -> float:
    """A round step (1, 2 or 5 times a power of ten) that cuts a span into four to eight."""
    if span <= 0:
        return 1.0
    size = 10.0 ** math.floor(math.log10(span / 4))
    return size * next(f for f in (1, 2, 5, 10) if span / (size * f) <= 8)


def _axes(panel: _Panel) -> Iterator[str]:
    left, right, bottom = _LEFT, WIDTH - _RIGHT, panel.top + PANEL_HEIGHT
    yield f'<text x="{left}" y="{panel.top - 10:g}">{_text(panel.title)}</text>'
    for number in range(round((panel.high - panel.low) / panel.step) + 1):
        value = panel.low + number * panel.step
        y = panel.y(value)
        yield f'<line class="grid" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        shown = f"{round(value, 9) + 0.0:g}"  # -0 is shown as 0
        yield f'<text class="muted" x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{shown}</text>'
    if panel.low < 0 < panel.high:
        yield f'<line class="zero" x1="{left}" x2="{right}" y1="{panel.y(0):.1f}" y2="{panel.y(0):.1f}"/>'
    yield f'<path class="axis" fill="none" d="M{left} {panel.top:g}V{bottom:g}H{right}"/>'
    for begin in panel.bins:
        shown = f"{begin}" if begin < 2 else f"{begin}-{2 * begin - 1}"
        yield (
            f'<text class="muted" x="{panel.x(begin):.1f}" y="{bottom + 18:g}" text-anchor="middle">{shown}</text>'
            if len(panel.bins) <= 10 or panel.bins.index(begin) % 2 == 0
            else ""
        )
    yield f'<text class="muted" x="{right}" y="{bottom + 36:g}" text-anchor="end">prefix length, tokens</text>'


def _line(panel: _Panel, points: Sequence[_Point], number: int, count: int) -> Iterator[str]:
    """A teacher's line with its error bars; teachers stand a little beside each other so that all bars are seen."""
    aside = (number - (count - 1) / 2) * min(5.0, 24 / count)
    places = [(panel.x(point.begin) + aside, panel.y(point.mean), point) for point in points]
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y, _ in places)
    yield f'<path fill="none" {_stroke(number)} d="M{path}"/>'
    colour = _COLOURS[number % len(_COLOURS)]
    for x, y, point in places:
        low, high = panel.y(point.mean - 2 * point.stderr), panel.y(point.mean + 2 * point.stderr)
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}" stroke="{colour}"/>'
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'


def _stroke(number: int) -> str:
    dash = _DASHES[number // len(_COLOURS) % len(_DASHES)]
    return f'stroke="{_COLOURS[number % len(_COLOURS)]}" stroke-width="2" stroke-dasharray="{dash}"'


def _text(words: str) -> str:
    """Words as XML text; what XML cannot hold or a reader cannot see becomes a question mark."""
    return escape("".join(c if c.isprintable() else "?" for c in words), {'"': "&quot;"})
