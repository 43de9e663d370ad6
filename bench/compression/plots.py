"""Small charts as SVG, drawn by hand so that the report needs nothing but itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 360
LEFT, RIGHT, TOP, BOTTOM = 62, 18, 16, 46
COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df", "#0a7f8f", "#bf3989", "#57606a")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """low, high: an interval along y."""

    x: float
    y: float
    label: str = ""
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    name: str
    points: Sequence[Point]
    is_line: bool = False
    colour: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    title: str
    is_log: bool = False
    low: float | None = None
    high: float | None = None
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Scale:
    """Data to pixels along one axis."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool

    def __call__(self, value: float) -> float:
        low, high, value = (math.log10(each) if self.is_log else each for each in (self.low, self.high, value))
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        if self.is_log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            marks = [base * 10.0**power for power in range(first, last + 1) for base in (1, 2, 5)]
            inside = [mark for mark in marks if self.low <= mark <= self.high]
            return inside if len(inside) <= 8 else [mark for mark in inside if f"{mark:e}".startswith("1")]
        step = 10 ** math.floor(math.log10((self.high - self.low) / 4))
        step *= next(factor for factor in (1, 2, 2.5, 5, 10) if (self.high - self.low) / (step * factor) <= 6)
        first = math.ceil(self.low / step - 1e-9)
        return [step * i for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


def chart(series: Sequence[Series], x: Axis, y: Axis) -> str:
    """One SVG with axes, grid, points with their intervals, and a legend where there are several series."""
    drawn = [one for one in series if one.points]
    if not drawn:
        return "<p>Not measured.</p>"
    points = [point for one in drawn for point in one.points]
    ends = [value for point in points for value in (point.low, point.high) if value is not None]
    across = _scale(x, [point.x for point in points], LEFT, WIDTH - RIGHT)
    up = _scale(y, [point.y for point in points] + ends, HEIGHT - BOTTOM, TOP)
    parts = [*_frame(across, up, x, y)]
    taken: list[tuple[float, float, float]] = []
    for i, one in enumerate(drawn):
        parts += _series(one, one.colour or COLOURS[i % len(COLOURS)], across, up, taken)
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'
    keys = [_key(one.name, one.colour or COLOURS[i % len(COLOURS)]) for i, one in enumerate(drawn)]
    return f'<div class="chart">{svg}<div class="keys">{"".join(keys) if len(drawn) > 1 else ""}</div></div>'


def _scale(axis: Axis, values: list[float], start: float, end: float) -> Scale:
    low = min(values) if axis.low is None else axis.low
    high = max(values) if axis.high is None else axis.high
    if axis.is_log:
        low, high = low / 1.4, high * 1.4
    elif axis.low is None or axis.high is None:
        pad = 0.07 * (high - low or abs(high) or 1.0)
        low, high = (low - pad if axis.low is None else low), (high + pad if axis.high is None else high)
    return Scale(low, high, start, end, axis.is_log)


def _frame(across: Scale, up: Scale, x: Axis, y: Axis) -> list[str]:
    parts = []
    for mark in across.ticks():
        at = across(mark)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(_text(at, HEIGHT - BOTTOM + 16, _number(mark) + x.unit, "middle"))
    for mark in up.ticks():
        at = up(mark)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(_text(LEFT - 7, at + 4, _number(mark) + y.unit, "end"))
    middle = (HEIGHT - BOTTOM + TOP) / 2
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, x.title, "middle", "title"))
    turned = f'<g transform="translate(13 {middle}) rotate(-90)">{_text(0, 0, y.title, "middle", "title")}</g>'
    return [*parts, turned]


def _series(one: Series, colour: str, across: Scale, up: Scale, taken: list[tuple[float, float, float]]) -> list[str]:
    parts = []
    places = [(across(point.x), up(point.y), point) for point in one.points]
    if one.is_line:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places)
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path}"/>')
    for x, y, point in places:
        tip = f"<title>{escape(point.label or one.name)}: {_number(point.x)}, {_number(point.y)}</title>"
        if point.low is not None and point.high is not None:
            low, high = up(point.low), up(point.high)
            parts.append(
                f'<line class="whisker" stroke="{colour}" x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}"/>'
            )
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{colour}">{tip}</circle>')
        if point.label:
            parts.append(_label(x, y, point.label, taken))
    return parts


def _label(x: float, y: float, label: str, taken: list[tuple[float, float, float]]) -> str:
    """Beside its point, where no earlier label stands."""
    size = 6.4 * len(label)
    is_left = x + size + 10 > WIDTH - RIGHT
    left = x - 9 - size if is_left else x + 9
    shifts: tuple[int, ...] = (4, -10, 18, -23, 31, -36, 44)

    def is_free(at: float) -> bool:
        return all(abs(at - other) > 11 or left > end or left + size < begin for begin, end, other in taken)

    at = next((y + shift for shift in shifts if is_free(y + shift) and TOP < y + shift < HEIGHT - BOTTOM), y + 4)
    taken.append((left, left + size, at))
    return _text(x - 9 if is_left else x + 9, at, label, "end" if is_left else "start", "label")


def _text(x: float, y: float, text: str, anchor: str, kind: str = "tick") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _key(name: str, colour: str) -> str:
    return f'<span><i style="background:{colour}"></i>{escape(name)}</span>'


def _number(value: float) -> str:
    if value and abs(value) < 0.001:
        return f"{value:.0e}"
    return f"{value:,.4g}"
