# SPDX-License-Identifier: Apache-2.0
"""What storms saw, as a table for people and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

from rich import box
from rich.table import Table

from kvpush.chaos.results import MUST_BE_ZERO, ChaosResult, Failure, StormResult

__all__ = ["as_json", "as_table", "remarks"]

_MAX_SHOWN: Final = 10


def as_json(found: ChaosResult) -> dict[str, Any]:
    """The report.

    Args:
        found: what the run saw.

    Returns:
        Names and values; see docs/chaos.md.
    """
    storms = found.storms
    sums = {name: sum(getattr(storm, name) for storm in storms) for name, _ in MUST_BE_ZERO}
    head = ("wrong", "hung", "engine_deaths", "leaked_blocks")
    return {
        "requests": sum(storm.requests for storm in storms),
        **{name: sums[name] for name in head},
        "recomputed": sum(storm.recomputed for storm in storms),
        "faults": _added(storm.faults for storm in storms),
        "passed": found.ok,
        "ok": sum(storm.ok for storm in storms),
        "left": sum(storm.left for storm in storms),
        "errors": _added(storm.errors for storm in storms),
        "excused_errors": _added(storm.excused for storm in storms),
        "received": sum(storm.received for storm in storms),
        **{name: value for name, value in sums.items() if name not in head},
        "answers_judged": found.oracle.judged,
        "tokens_judged": found.oracle.judged_tokens,
        "max_logprob_deviation": round(found.oracle.max_deviation, 7),
        "logprob_tolerance": found.oracle.tolerance,
        "seed": found.config.seed,
        "minutes": found.config.minutes,
        "failures": [failure.as_json() for storm in storms for failure in storm.failures],
        "storms": [_storm_json(storm) for storm in storms],
        "host": found.host,
    }


def _added(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return dict(sorted(total.items()))


def _storm_json(storm: StormResult) -> dict[str, Any]:
    return {
        "topology": str(storm.topology),
        "network": storm.topology.network.value,
        "requests": storm.requests,
        "ok": storm.ok,
        "left": storm.left,
        "errors": dict(storm.errors),
        "excused_errors": dict(storm.excused),
        **{name: getattr(storm, name) for name, _ in MUST_BE_ZERO},
        "received": storm.received,
        "recomputed": storm.recomputed,
        "restarts": storm.restarts,
        "faults": storm.faults,
        "not_possible": storm.not_possible,
        "idle_cpu_percent": storm.idle_cpu_percent,
        "footprints": storm.footprints,
        "kvpush": storm.kvpush,
        "router": storm.router,
        "instances": storm.instances,
        "fault_log": storm.fault_log,
    }


def as_table(found: ChaosResult) -> Table:
    """The table for people.

    Args:
        found: what the run saw.

    Returns:
        One column a storm.
    """
    table = Table(title=f"storms of seed {found.config.seed}", box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("")
    for storm in found.storms:
        table.add_column(f"{storm.topology}, {storm.topology.network.value}", justify="right")

    def row(name: str, values: Iterable[object]) -> None:
        table.add_row(name, *(str(value) for value in values))

    storms = found.storms
    row("requests", (storm.requests for storm in storms))
    row("  right answers", (storm.ok for storm in storms))
    row("  clients that left", (storm.left for storm in storms))
    row("  errors while decode was down", (sum(storm.excused.values()) for storm in storms))
    row("KV pushed to decode", (storm.received for storm in storms))
    row("recomputed", (storm.recomputed for storm in storms))
    for kind in sorted({kind for storm in storms for kind in storm.faults}):
        row(f"[dim]{kind}[/dim]", (storm.faults.get(kind, 0) for storm in storms))
    row("must be 0: other errors", (_judged(sum(storm.errors.values())) for storm in storms))
    for name, text in MUST_BE_ZERO:
        row(f"must be 0: {text}", (_judged(getattr(storm, name)) for storm in storms))
    return table


def _judged(value: int) -> str:
    return f"[bold red]{value}[/bold red]" if value else "[green]0[/green]"


def remarks(found: ChaosResult) -> list[str]:
    """What a reader should know besides: what failed, what was not done, what proves nothing.

    Args:
        found: what the run saw.

    Returns:
        Lines.
    """
    lines: list[str] = []
    for storm in found.storms:
        lines += [f"{storm.topology}: not done: {what}" for what in storm.not_possible]
        if not storm.ok:
            lines.append(f"{storm.topology}: no request was answered, so nothing is proved")
        elif not storm.received:
            lines.append(f"{storm.topology}: no KV was pushed, so nothing is proved")
        lines += [_line(storm, failure) for failure in storm.failures[:_MAX_SHOWN]]
        if len(storm.failures) > _MAX_SHOWN:
            lines.append(f"{storm.topology}: {len(storm.failures) - _MAX_SHOWN} more failures, see the JSON report")
    return lines


def _line(storm: StormResult, failure: Failure) -> str:
    request = failure.detail.get("request_id")
    of = f" of {request}" if request else ""
    causes = ", ".join(f"{fault['kind']} of {fault['target']} at {fault['at_s']:.1f} s" for fault in failure.faults[-4:])
    around = f"; faults around: {causes}" if causes else ""
    return f"{storm.topology}, {failure.at_s:.1f} s ({failure.clock}): {failure.kind}{of}: {failure.what}{around}"
