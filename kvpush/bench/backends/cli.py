# SPDX-License-Identifier: Apache-2.0
"""``kvpush bench backends``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from kvpush._terminal import console, json_object
from kvpush.bench.backends.benches import BENCHES
from kvpush.bench.backends.page import as_html
from kvpush.bench.backends.report import as_json, as_tables, remarks
from kvpush.bench.backends.runner import STALL_S, Told, run
from kvpush.bench.backends.ways import find_ways
from kvpush.errors import ConfigError

__all__ = ["backends_command"]


def backends_command(
    backend: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Measure this backend. Repeat for more.", show_default="all that can run here"),
    ] = None,
    bench: Annotated[
        list[str] | None,
        typer.Option(metavar="BENCH", help=f"One of {', '.join(BENCHES)}. Repeat for more.", show_default="all"),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only see that all works, in seconds: the figures mean nothing.")
    ] = False,
    options: Annotated[
        str | None, typer.Option(metavar="JSON", help="backend_options of the one backend that is named; none if not given.")
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", metavar="PATH", help="Also write the results as JSON.")] = None,
    html_path: Annotated[
        Path | None, typer.Option("--html", metavar="PATH", help="Also draw the comparison, in one HTML file.")
    ] = None,
    stall_seconds: Annotated[
        float, typer.Option(min=1.0, help="A backend that gets no further for so long is given up.")
    ] = STALL_S,
) -> None:
    """Measure every backend that can run here, each of its ways beside a plain copy of the same bytes.

    Leaves with 0 only if all that can run here was measured and had written the right bytes; with 1 otherwise, with 2 when
    an option is wrong.
    """
    unknown = [name for name in bench or () if name not in BENCHES]
    if unknown:
        raise ConfigError(f"no bench is called {unknown[0]!r}. Known: {', '.join(BENCHES)}")
    if options is not None and len(backend or ()) != 1:
        raise ConfigError("--options belongs to one backend: name it with --backend")
    for path in (json_path, html_path):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"there is no folder for {path}")
    out = console()
    ways, others = find_ways(backend or (), json_object(options, "--options", '{"ucx_net_devices": "eth0"}'))
    with _telling(out) as told:
        report = run(ways, others, quick=quick, benches=bench or (), stall_s=stall_seconds, told=told)
    for title, table in as_tables(report):
        out.print(title, style="bold", highlight=False)
        out.print(table)
    for remark in remarks(report):
        out.print(f"[yellow]![/yellow] {escape(remark)}", highlight=False, soft_wrap=True)
    if json_path is not None:
        json_path.write_bytes(as_json(report))
        out.print(f"Results: {json_path}", highlight=False, soft_wrap=True)
    if html_path is not None:
        html_path.write_text(as_html(report), encoding="utf-8")
        out.print(f"Plots: {html_path}", highlight=False, soft_wrap=True)
    raise typer.Exit(0 if report.ok else 1)


@contextlib.contextmanager
def _telling(out: Console) -> Iterator[Told]:
    """Where progress goes: a line that changes on a terminal, else a line for each way."""
    seen: set[str] = set()
    if out.is_terminal:
        with out.status("") as status:
            yield lambda way, what: status.update(f"{escape(way)}: {escape(what)}")
        return

    def told(way: str, what: str) -> None:
        if way not in seen:
            seen.add(way)
            out.print(f"Measuring {escape(way)}", highlight=False)

    yield told
