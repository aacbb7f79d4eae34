# SPDX-License-Identifier: Apache-2.0
"""Charts as inline SVG: lines and bars over a few named places, an axis that starts at 0 or is logarithmic."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from kvpush.bench.backends.markup import escaped
from kvpush.bench.backends.report import number_text

__all__ = ["COLOURS", "Chart", "Series", "draw", "swatch"]

COLOURS: Final = 8
"""Classes ``c0`` and so on that the page gives a colour each."""
_CORNERS: Final[Mapping[str, Sequence[tuple[float, float]]]] = {
    "square": ((-3.5, -3.5), (3.5, -3.5), (3.5, 3.5), (-3.5, 3.5)),
    "triangle": ((0, -5), (4.6, 3.5), (-4.6, 3.5)),
    "diamond": ((0, -5), (5, 0), (0, 5), (-5, 0)),
    "hourglass": ((-4.5, -4.5), (4.5, -4.5), (-4.5, 4.5), (4.5, 4.5)),
}
_MARKS: Final = ("circle", *_CORNERS)
_WIDTH: Final = 640.0
_HEIGHT: Final = 330.0
_LEFT: Final = 62.0
_RIGHT: Final = 14.0
_TOP: Final = 14.0
_BOTTOM: Final = 52.0
_LOG_FROM: Final = 30.0
"""Values that differ by more than this factor are drawn on a logarithmic axis: on the other the small ones would be nothing."""


class Series(NamedTuple):
    """What belongs together in a chart.

    Args:
        name: In the legend.
        number: Decides colour and mark, the same in all charts of a page.
        values: One for each place; None where there is none.
        limits: What each is compared with, drawn dashed.
    """

    name: str
    number: int
    values: Sequence[float | None]
    limits: Sequence[float | None] = ()


class Chart(NamedTuple):
    """One chart.

    Args:
        title: Above it.
        kind: Lines from place to place, or bars side by side at each.
        x_label: Of the places.
        y_label: With its unit.
        places: Names along the x axis.
        series: What is drawn.
    """

    title: str
    kind: Literal["lines", "bars"]
    x_label: str
    y_label: str
    places: Sequence[str]
    series: Sequence[Series]


class _Axis(NamedTuple):
    low: float
    high: float
    is_log: bool
    ticks: tuple[float, ...]

    def at(self, value: float) -> float:
        """The height of a value, in the drawing's coordinates."""
        if self.is_log:
            share = (math.log10(max(value, self.low)) - math.log10(self.low)) / (math.log10(self.high) - math.log10(self.low))
        else:
            share = value / self.high
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _BOTTOM - _TOP)


def draw(chart: Chart) -> str:
    """The chart as an ``svg`` element; it takes its colours from the page."""
    axis = _axis([value for series in chart.series for value in (*series.values, *series.limits) if value is not None])
    label = escaped(f"{chart.title}: {chart.y_label} by {chart.x_label}")
    parts = [f'<svg viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" role="img" aria-label="{label}">']
    parts += _frame(chart, axis)
    draw_series: Callable[[Chart, _Axis], Iterator[str]] = _lines if chart.kind == "lines" else _bars
    parts += draw_series(chart, axis)
    parts.append("</svg>")
    return "".join(parts)


def swatch(number: int) -> str:
    """The mark of a series for a legend."""
    line = '<line x1="1" y1="7" x2="27" y2="7" class="line" />'
    return f'<svg class="swatch {_class(number)}" viewBox="0 0 28 14" aria-hidden="true">{line}{_mark(number, 14.0, 7.0)}</svg>'


def _class(number: int) -> str:
    return f"c{number % COLOURS}"


def _axis(values: Sequence[float]) -> _Axis:
    above = [value for value in values if value > 0]
    if not above:
        return _Axis(0.0, 1.0, False, (0.0, 1.0))
    if max(above) > _LOG_FROM * min(above):
        # A bar at the bottom would have no height.
        first, last = math.floor(math.log10(min(above) * 0.7)), math.ceil(math.log10(max(above)))
        return _Axis(10.0**first, 10.0**last, True, tuple(10.0**power for power in range(first, last + 1)))
    step = _step(max(above) / 5)
    count = math.ceil(max(above) / step)
    return _Axis(0.0, count * step, False, tuple(idx * step for idx in range(count + 1)))


def _step(least: float) -> float:
    """The least of 1, 2, 5, 10 ... that isn't below it."""
    unit = 10.0 ** math.floor(math.log10(least))
    return next(factor * unit for factor in (1.0, 2.0, 5.0, 10.0) if factor * unit >= least * (1 - 1e-9))


def _frame(chart: Chart, axis: _Axis) -> Iterator[str]:
    right, floor = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    for tick in axis.ticks:
        y = axis.at(tick)
        yield f'<line class="grid" x1="{_LEFT:g}" y1="{y:.1f}" x2="{right:g}" y2="{y:.1f}" />'
        yield f'<text class="tick" x="{_LEFT - 7:g}" y="{y + 4:.1f}" text-anchor="end">{number_text(tick)}</text>'
    for idx, place in enumerate(chart.places):
        x, y = _middle(chart, idx), floor + 18
        yield f'<text class="tick" x="{x:.1f}" y="{y:g}" text-anchor="middle">{escaped(place)}</text>'
    yield f'<text x="{(_LEFT + right) / 2:g}" y="{_HEIGHT - 8:g}" text-anchor="middle">{escaped(chart.x_label)}</text>'
    middle = (_TOP + floor) / 2
    scale = " (log scale)" if axis.is_log else ""
    yield (
        f'<text x="14" y="{middle:g}" text-anchor="middle" transform="rotate(-90 14 {middle:g})">'
        f"{escaped(chart.y_label + scale)}</text>"
    )


def _middle(chart: Chart, place: int) -> float:
    return _LEFT + (place + 0.5) * (_WIDTH - _LEFT - _RIGHT) / len(chart.places)


def _lines(chart: Chart, axis: _Axis) -> Iterator[str]:
    for series in chart.series:
        yield f'<g class="{_class(series.number)}">'
        for values, style in ((series.limits, "limit"), (series.values, "line")):
            points = [(_middle(chart, idx), axis.at(value)) for idx, value in enumerate(values) if value is not None]
            if len(points) > 1:
                yield f'<polyline class="{style}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}" />'
        for idx, value in enumerate(series.values):
            if value is not None:
                told = f"{series.name}, {chart.places[idx]}: {number_text(value)}"
                yield f"<g><title>{escaped(told)}</title>{_mark(series.number, _middle(chart, idx), axis.at(value))}</g>"
        yield "</g>"


def _bars(chart: Chart, axis: _Axis) -> Iterator[str]:
    room = 0.8 * (_WIDTH - _LEFT - _RIGHT) / len(chart.places)
    width = min(room / max(len(chart.series), 1), 70.0)
    floor = _HEIGHT - _BOTTOM
    for number, series in enumerate(chart.series):
        yield f'<g class="{_class(series.number)}">'
        for idx, value in enumerate(series.values):
            if value is None:
                continue
            x = _middle(chart, idx) + (number - len(chart.series) / 2) * width
            y = axis.at(value)
            said = number_text(value)
            told = f"{series.name}, {chart.places[idx]}: {said}"
            yield f"<g><title>{escaped(told)}</title>"
            yield f'<rect class="bar" x="{x + 1:.1f}" y="{y:.1f}" width="{width - 2:.1f}" height="{max(floor - y, 0):.1f}" />'
            yield f'<text class="value" x="{x + width / 2:.1f}" y="{y - 3:.1f}" text-anchor="middle">{said}</text></g>'
            limit = series.limits[idx] if series.limits else None
            if limit is not None:
                y = axis.at(limit)
                yield f'<line class="limit" x1="{x:.1f}" y1="{y:.1f}" x2="{x + width:.1f}" y2="{y:.1f}" />'
        yield "</g>"


def _mark(number: int, x: float, y: float) -> str:
    name = _MARKS[number % len(_MARKS)]
    if name == "circle":
        return f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="4" />'
    corners = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in _CORNERS[name])
    return f'<polygon class="mark" points="{corners}" />'
