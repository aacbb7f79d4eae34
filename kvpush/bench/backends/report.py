# SPDX-License-Identifier: Apache-2.0
"""A report as tables for people, and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

import msgspec
from rich import box
from rich.markup import escape
from rich.table import Table

from kvpush.bench.backends.benches import BENCHES
from kvpush.bench.backends.results import Report, Result

__all__ = [
    "COLUMNS",
    "STATUS_TEXT",
    "Column",
    "as_json",
    "as_tables",
    "bytes_text",
    "columns_of",
    "number_text",
    "order_text",
    "remarks",
    "way_text",
]


class Column(NamedTuple):
    """A column of a table of results."""

    heading: str
    text: Callable[[Result], str]
    is_number: bool = True


def bytes_text(num_bytes: int) -> str:
    """Such as ``64 KiB``."""
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes >= 1 << shift and num_bytes % (1 << shift) == 0:
            return f"{num_bytes >> shift} {unit}"
    return f"{num_bytes} B"


STATUS_TEXT: Final = {
    "measured": "was measured",
    "failed": "was measured in part",
    "given up": "was given up",
    "cannot run": "can't run here",
    "broken": "is broken",
}
_VARIANTS: Final = {"sm": "shared memory", "tcp": "TCP", "rdma": "RDMA"}


def way_text(backend: str, variant: str) -> str:
    """A way in words."""
    return f"{backend}, {_VARIANTS.get(variant, variant)}" if variant else backend


def order_text(result: Result) -> str:
    """How the blocks of a case lie, and are written."""
    if result.fragmented is None:
        return ""
    if result.fragmented:
        return "random"
    return "one run" if result.coalesced else "in order"


def number_text(value: float | None) -> str:
    """To three digits, never with an exponent where it is large; empty for None."""
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


COLUMNS: Final = (
    Column("way", lambda result: result.way, is_number=False),
    Column("layout", lambda result: result.layout or "", is_number=False),
    Column("bytes", lambda result: bytes_text(result.num_bytes) if result.num_bytes is not None else ""),
    Column("block", lambda result: bytes_text(result.block_bytes) if result.block_bytes is not None else ""),
    Column("order", order_text, is_number=False),
    Column("rows", lambda result: str(result.descriptors) if result.descriptors is not None else ""),
    Column("regions", lambda result: str(result.regions) if result.regions is not None else ""),
    Column("us", lambda result: number_text(result.us)),
    Column("p99 us", lambda result: number_text(result.us_p99)),
    Column("us/row", lambda result: number_text(result.us_per_descriptor)),
    Column("GB/s", lambda result: number_text(result.gbytes_per_s)),
    Column("copy", lambda result: number_text(result.memcpy_gbytes_per_s)),
    Column("ratio", lambda result: f"{result.ratio:.2f}" if result.ratio is not None else ""),
)
"""``rows``: descriptors. ``copy``: GB/s of a plain copy."""


def columns_of(results: Iterable[Result]) -> list[Column]:
    """The columns in which some of the results have something."""
    shown = list(results)
    return [column for column in COLUMNS if any(column.text(result) for result in shown)]


def as_tables(report: Report) -> Iterator[tuple[str, Table]]:
    """A title and a table for each bench."""
    for bench in dict.fromkeys(result.bench for result in report.results):
        results = [result for result in report.results if result.bench == bench]
        columns = columns_of(results)
        title = BENCHES[bench].title
        sizes = {result.num_bytes for result in results}
        if len(sizes) == 1 and (size := sizes.pop()) is not None:
            columns = [column for column in columns if column.heading != "bytes"]
            title = f"{title}; {bytes_text(size)} a round"
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for column in columns:
            table.add_column(column.heading, justify="right" if column.is_number else "left", no_wrap=True)
        for result in results:
            table.add_row(*(escape(column.text(result)) for column in columns))
        yield title, table


def remarks(report: Report) -> list[str]:
    """What a reader of the figures must know besides, a line each."""
    lines = []
    if report.quick:
        lines.append("Quick: too few bytes and rounds for figures; it shows only what works.")
    for subject in report.backends:
        name = way_text(subject.backend, subject.variant)
        if subject.status != "measured":
            shown, more = subject.reasons, 0
            if subject.status == "cannot run":
                shown, more = shown[:1], len(shown) - 1
            rest = f"; {more} more reasons in `kvpush backends`" if more > 0 else ""
            lines.append(f"{name} {STATUS_TEXT[subject.status]}: {'; '.join(shown) or 'no reason given'}{rest}")
        elif subject.processes == 1:
            lines.append(f"{name}: both ends share one process and thread, as this backend knows no other way.")
        lines += [f"{name}: without {text}" for text in subject.left_out]
    return lines


def as_json(report: Report) -> bytes:
    """What ``--json`` writes."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"
