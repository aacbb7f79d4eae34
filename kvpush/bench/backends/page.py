# SPDX-License-Identifier: Apache-2.0
"""A report as one HTML file that needs nothing else: charts, and the numbers under each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from kvpush.bench.backends.benches import BENCHES
from kvpush.bench.backends.markup import escaped
from kvpush.bench.backends.plot import Chart, Series, draw, swatch
from kvpush.bench.backends.report import STATUS_TEXT, bytes_text, columns_of, order_text, way_text
from kvpush.bench.backends.results import Report, Result

__all__ = ["as_html"]

_STYLE: Final = """
:root { color-scheme: light dark; --back: #ffffff; --front: #1c2126; --dim: #5b6570; --rule: #d9dee3; --grid: #e8ecef;
  --c0: #0067a5; --c1: #c04e00; --c2: #00805c; --c3: #a8508a; --c4: #8a6500; --c5: #2b7fb8; --c6: #6a3f99; --c7: #5c5c5c; }
@media (prefers-color-scheme: dark) {
  :root { --back: #14181c; --front: #e6e9ec; --dim: #9aa5b0; --rule: #333b43; --grid: #262d34;
    --c0: #5db2ec; --c1: #ff9a57; --c2: #3fcf9f; --c3: #f0a4d4; --c4: #e6c04e; --c5: #9bd6ff; --c6: #c8a2f2; --c7: #b5b5b5; } }
.c0 { --own: var(--c0); } .c1 { --own: var(--c1); } .c2 { --own: var(--c2); } .c3 { --own: var(--c3); }
.c4 { --own: var(--c4); } .c5 { --own: var(--c5); } .c6 { --own: var(--c6); } .c7 { --own: var(--c7); }
body { background: var(--back); color: var(--front); font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 84rem; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } h2 { font-size: 1.2rem; margin: 2.4rem 0 .4rem; }
p.note, figcaption, .host { color: var(--dim); } p.warn { border-left: .25rem solid var(--c1); padding-left: .7rem; }
.charts { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr)); }
figure { margin: 0; max-width: 48rem; } figcaption { font-size: .9rem; }
figure > svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--front); font: 12px system-ui, sans-serif; } svg text.tick, svg text.value { fill: var(--dim); }
svg text.value { font-size: 10px; } .grid { stroke: var(--grid); } .mark { fill: var(--own); }
.line { fill: none; stroke: var(--own); stroke-width: 2; } .bar { fill: var(--own); }
.limit { fill: none; stroke: var(--own); stroke-width: 1.3; stroke-dasharray: 5 4; }
rect.bar + text + .limit, line.limit { stroke: var(--front); }
ul.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.4rem; list-style: none; margin: .6rem 0; padding: 0; }
.swatch { height: 14px; margin-right: .4rem; vertical-align: -2px; width: 28px; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .86rem; margin: .6rem 0; }
th, td { border-bottom: 1px solid var(--rule); padding: .16rem .7rem; text-align: left; vertical-align: top; }
td.number, th.number { font-variant-numeric: tabular-nums; text-align: right; white-space: nowrap; }
summary { cursor: pointer; }
"""


class _Plot(NamedTuple):
    """How a bench is drawn: results whose ``facet`` is equal are one chart."""

    kind: str
    place: Callable[[Result], str]
    x_label: str
    value: Callable[[Result], float | None]
    y_label: str
    facet: Callable[[Result], str] = lambda result: ""


def _size(num_bytes: int | None) -> str:
    return bytes_text(num_bytes) if num_bytes is not None else ""


_PLOTS: Final[Mapping[str, _Plot]] = {
    "write_bandwidth": _Plot(
        "lines", lambda one: _size(one.block_bytes), "block", lambda one: one.gbytes_per_s, "GB/s", order_text
    ),
    "layouts": _Plot("bars", lambda one: one.layout or "", "layout", lambda one: one.gbytes_per_s, "GB/s"),
    "staging": _Plot(
        "bars", lambda one: f"{_size(one.block_bytes)} {one.layout}", "blocks", lambda one: one.gbytes_per_s, "GB/s"
    ),
    "post_cost": _Plot(
        "lines", lambda one: str(one.descriptors), "descriptors in a post", lambda one: one.us_per_descriptor, "us a descriptor"
    ),
    "small_write_latency": _Plot("lines", lambda one: _size(one.num_bytes), "bytes", lambda one: one.us, "us, median"),
    "register_memory": _Plot("bars", lambda one: str(one.regions), "regions", lambda one: one.us, "us"),
    "digest": _Plot("bars", order_text, "blocks", lambda one: one.gbytes_per_s, "GB/s"),
}
_OTHERWISE: Final = _Plot("bars", lambda one: "", "way", lambda one: one.us, "us")


def as_html(report: Report) -> str:
    """The whole page. Nothing in it runs or is loaded, and what plugins say is text."""
    numbers = {way: idx for idx, way in enumerate(dict.fromkeys(result.way for result in report.results))}
    benches = dict.fromkeys(one.bench for one in report.results)
    return "".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8" />\n',
            '<meta name="viewport" content="width=device-width, initial-scale=1" />\n',
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\" />\n",
            f"<title>kvpush: backends compared</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n",
            *_head(report),
            *(part for bench in benches for part in _section(bench, report, numbers)),
            "</body>\n</html>\n",
        ]
    )


def _head(report: Report) -> Iterator[str]:
    host = report.host
    versions = ", ".join(f"{name} {version}" for name, version in host.get("versions", {}).items())
    yield "<h1>kvpush: backends compared</h1>\n"
    yield (
        f'<p class="host">{escaped(str(host.get("cpu")))}, {len(host.get("cores", ()))} cores, {host.get("memory_gib")} GiB, '
        f"Linux {escaped(str(host.get('kernel')))}, Python {escaped(str(host.get('python')))}; {escaped(versions)}; "
        f"load average {host.get('load_1m')} before, {host.get('load_1m_after')} after</p>\n"
    )
    if report.quick:
        yield '<p class="warn">Quick: too few bytes and rounds for figures. This shows only what works.</p>\n'
    yield (
        '<p class="note">Medians. Dashed: a plain copy of as many bytes of the same memory by one thread, taken in turn with '
        "the rounds of the same case. Compare figures of one run only.</p>\n"
    )
    yield '<div class="scroll"><table><thead><tr><th>way</th><th>from</th><th>status</th><th>processes</th>'
    yield "<th>remarks</th></tr></thead><tbody>\n"
    for subject in report.backends:
        remarks = "<br />".join(escaped(text) for text in (*subject.reasons, *(f"without {one}" for one in subject.left_out)))
        yield (
            f"<tr><td>{escaped(way_text(subject.backend, subject.variant))}</td><td>{escaped(subject.distribution)}</td>"
            f"<td>{escaped(STATUS_TEXT[subject.status])}</td><td>{subject.processes or ''}</td><td>{remarks}</td></tr>\n"
        )
    yield "</tbody></table></div>\n"


def _section(bench: str, report: Report, numbers: Mapping[str, int]) -> Iterator[str]:
    results = [result for result in report.results if result.bench == bench]
    yield f"<section>\n<h2>{escaped(BENCHES[bench].title)}</h2>\n"
    yield '<ul class="legend">'
    for way, variant in dict.fromkeys((one.backend, one.variant) for one in results):
        number = numbers[next(one.way for one in results if (one.backend, one.variant) == (way, variant))]
        yield f"<li>{swatch(number)}{escaped(way_text(way, variant))}</li>"
    yield '</ul>\n<div class="charts">\n'
    for chart in _charts(bench, results, numbers):
        yield f"<figure>{draw(chart)}<figcaption>{escaped(chart.title)}</figcaption></figure>\n"
    yield "</div>\n<details><summary>Numbers</summary>"
    yield from _numbers(results)
    yield "</details>\n</section>\n"


def _charts(bench: str, results: Sequence[Result], numbers: Mapping[str, int]) -> Iterator[Chart]:
    plot = _PLOTS.get(bench, _OTHERWISE)
    for facet in dict.fromkeys(plot.facet(one) for one in results):
        shown = [one for one in results if plot.facet(one) == facet]
        places = list(dict.fromkeys(plot.place(one) for one in shown))
        series = []
        for way in dict.fromkeys(one.way for one in shown):
            own = {plot.place(one): one for one in shown if one.way == way}
            values = [plot.value(own[place]) if place in own else None for place in places]
            limits: list[float | None] = []
            if plot.y_label == "GB/s":
                limits = [own[place].memcpy_gbytes_per_s if place in own else None for place in places]
            one = next(iter(own.values()))
            series.append(Series(way_text(one.backend, one.variant), numbers[way], values, limits))
        kind = "lines" if plot.kind == "lines" else "bars"
        yield Chart(facet or BENCHES[bench].title, kind, plot.x_label, plot.y_label, places, series)  # type: ignore[arg-type]


def _numbers(results: Sequence[Result]) -> Iterator[str]:
    columns = columns_of(results)
    yield '<div class="scroll"><table><thead><tr>'
    classes = ['class="number"' if column.is_number else 'class="text"' for column in columns]
    for column, css in zip(columns, classes, strict=True):
        yield f"<th {css}>{escaped(column.heading)}</th>"
    yield "</tr></thead><tbody>\n"
    for result in results:
        cells = (f"<td {css}>{escaped(column.text(result))}</td>" for column, css in zip(columns, classes, strict=True))
        yield f"<tr>{''.join(cells)}</tr>\n"
    yield "</tbody></table></div>"
