# SPDX-License-Identifier: Apache-2.0
"""Shows how a run goes on, and writes what it found as a table and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, Self

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvpush.demo.connectors import Connector
from kvpush.demo.runner import ConnectorResult, RunResult
from kvpush.demo.stats import Summary, sha256_of_tokens, summarize
from kvpush.demo.supervisor import Server

__all__ = ["ConsoleObserver", "as_json", "as_table", "remarks", "summary_of_times"]

#: From here on the reader is told that the host was busy with something else.
_BUSY_PERCENT: Final = 20.0


class ConsoleObserver:
    """Shows progress: live on a terminal, line by line elsewhere. A context manager.

    Args:
        console: where to.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓[/green]"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._servers: dict[str, TaskID] = {}
        self._phase: TaskID | None = None

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self._finish_phase()
        self._progress.stop()

    def starting(self, servers: Sequence[Server]) -> None:
        """See `Observer`."""
        self._finish_phase()
        self._say(f"starting {', '.join(server.name for server in servers)}")
        for server in servers:
            cores = server.spec.cpus
            where = f" on core {','.join(map(str, cores))}" if cores is not None else ""
            self._servers[server.name] = self._progress.add_task(f"{server.name}{where}", total=1)

    def ready(self, server: Server) -> None:
        """See `Observer`."""
        self._progress.update(self._servers[server.name], completed=1)
        self._say(f"{server.name} is up after {server.ready_after_s or 0:.0f} s")

    def phase(self, text: str, steps: int = 0) -> None:
        """See `Observer`."""
        self._finish_phase()
        self._say(text)
        self._phase = self._progress.add_task(text, total=steps or None)

    def step(self) -> None:
        """See `Observer`."""
        if self._phase is not None:
            self._progress.advance(self._phase)

    def _finish_phase(self) -> None:
        if self._phase is not None:
            task = self._progress.tasks[self._progress.task_ids.index(self._phase)]
            total = task.total or 1
            self._progress.update(self._phase, total=total, completed=total)
            self._phase = None

    def _say(self, text: str) -> None:
        if not self._console.is_terminal:
            self._console.print(text, highlight=False)


def summary_of_times(result: ConnectorResult) -> tuple[Summary, Summary]:
    """TTFT and TPOT of the requests that succeeded.

    Args:
        result: of one connector.

    Returns:
        Both in milliseconds.
    """
    good = [one for one in result.results if one.ok]
    ttft = summarize([1000 * one.ttft_s for one in good])
    return ttft, summarize([1000 * one.tpot_s for one in good if not math.isnan(one.tpot_s)])


def as_table(found: RunResult) -> Table:
    """The table for people.

    Args:
        found: what the run saw.

    Returns:
        One row a connector.
    """
    config = found.config
    rate = f"{config.qps:g} requests/s" if config.qps else "one at a time"
    table = Table(
        title=f"{config.requests} requests, {config.prompt_tokens} + {config.output_tokens} tokens, {rate}",
        caption=f"Times in ms. Compared: {config.equality}.",
        caption_justify="left",
        # Fits 80 columns.
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("connector", no_wrap=True)
    for name in ("TTFT\nmean", "\np50", "\np99", "TPOT\nmean", "\np50", "\np99", "idle\nCPU %", "\nerrors"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("outputs\nequal", no_wrap=True)
    for connector, result in found.connectors.items():
        ttft, tpot = summary_of_times(result)
        idle = "+".join(f"{value:.1f}" for value in result.idle_cpu_percent.values())
        errors = f"[red]{result.errors}[/red]" if result.errors else "0"
        equal = "[green]yes[/green]" if found.equals_reference(connector) else "[red]no[/red]"
        table.add_row(
            connector.value,
            *(_figure(value, 0) for value in (ttft.mean, ttft.p50, ttft.p99)),
            *(_figure(value, 1) for value in (tpot.mean, tpot.p50, tpot.p99)),
            idle or "-",
            errors,
            "reference" if connector is Connector.NONE else equal,
        )
    return table


def remarks(found: RunResult) -> list[str]:
    """What a reader of the table must know besides.

    Args:
        found: what the run saw.

    Returns:
        Lines of text: a busy host, failed requests, and requests whose KV did not come from prefill although all went well.
    """
    lines = []
    other = (found.other_cpu_percent or 0.0) + (found.steal_percent or 0.0)
    if other > _BUSY_PERCENT:
        lines.append(f"others took {other:.0f} % of a core from this host meanwhile: times are longer than they need be")
    for connector, result in found.connectors.items():
        name = connector.value
        lines += [f"{name}, request {one.index}: {one.error}" for one in result.results if one.error is not None]
        if result.decode_only:
            lines.append(f"{name}: {result.decode_only} requests were given to decode alone, because prefill had failed")
        expected = found.config.prompt_tokens * sum(one.ok for one in result.results)
        if result.kv_tokens_received is not None and result.kv_tokens_received < expected:
            lines.append(
                f"{name}: KV of {result.kv_tokens_received} of {expected} prompt tokens came from prefill; "
                "decode computed the others itself"
            )
    return lines


def _figure(value: float, digits: int) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def as_json(found: RunResult) -> dict[str, Any]:
    """The report for programs.

    Args:
        found: what the run saw.

    Returns:
        What `--json` writes; described in `docs/demo.md`.
    """
    config = found.config
    return {
        "connectors": {connector.value: _connector_json(found, connector) for connector in found.connectors},
        "outputs_equal": found.outputs_equal,
        "ok": found.ok,
        "equality": config.equality,
        "config": {
            "requests": config.requests,
            "rounds": config.rounds,
            "prompt_tokens": config.prompt_tokens,
            "output_tokens": config.output_tokens,
            "qps": config.qps,
            "seed": config.seed,
            "dtype": config.dtype,
            "model": config.model.name if config.model is not None else "tiny",
            "eager": config.eager,
            "vllm_args": list(config.vllm_args),
            "idle_seconds": config.idle_s,
        },
        "calibration": [
            {"round": number, "core": one.core, "matmul_gflops": one.matmul_gflops, "memcpy_gb_s": one.memcpy_gb_s}
            for number, round_ in enumerate(found.calibrations)
            for one in round_
        ],
        "interference": {"other_cpu_percent": found.other_cpu_percent, "steal_percent": found.steal_percent},
        "host": found.host,
    }


def _connector_json(found: RunResult, connector: Connector) -> dict[str, Any]:
    result = found.connectors[connector]
    ttft, tpot = summary_of_times(result)
    return {
        "requests": len(result.results),
        "errors": result.errors,
        "ttft_ms": ttft.as_dict(),
        "tpot_ms": tpot.as_dict(),
        "prefill_ms": result.prefill_ms,
        "outputs_sha256": sha256_of_tokens(one.token_ids for one in result.results),
        "outputs_equal": found.equals_reference(connector),
        "idle_cpu_percent": dict(result.idle_cpu_percent),
        "kv_tokens_received": result.kv_tokens_received,
        "decode_only": result.decode_only,
        "per_request": [
            {
                "index": one.index,
                "sha256": sha256_of_tokens([one.token_ids]),
                "ttft_ms": _number(1000 * one.ttft_s),
                "tpot_ms": _number(1000 * one.tpot_s),
                "e2e_ms": _number(1000 * one.e2e_s),
                "error": one.error,
            }
            for one in result.results
        ],
    }


def _number(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 3)
