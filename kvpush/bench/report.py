# SPDX-License-Identifier: Apache-2.0
"""What a bench found, as a table, remarks and JSON."""

from __future__ import annotations

import math
from typing import Any, Final

from rich import box
from rich.table import Table

from kvpush.bench.arms import Arm
from kvpush.bench.serve import ArmResult, BenchResult, Point
from kvpush.bench.steps import STEP_SERIES, engine_steps
from kvpush.demo.connectors import Connector
from kvpush.demo.stats import Summary, sha256_of_tokens, summarize
from kvpush.tiny_model import kv_bytes_per_token

__all__ = ["as_json", "as_table", "figures", "ratios", "remarks"]

_BUSY_PERCENT: Final = 20.0
_SUBMITTER_CPU: Final = "kvpush_submitter_cpu_seconds_total"


def figures(point: Point, arm: Arm) -> dict[str, Summary]:
    """Times of an arm's good requests.

    Args:
        point: where.
        arm: which.

    Returns:
        Milliseconds by name: `ttft_ms`, `tpot_ms`, `prefill_ms`, `gap_ms`, `exposed_transfer_ms` and
        `decode_connector_cpu_ms_per_request`. NaN where there is nothing to measure.
    """
    step = point.decode_step_ms
    good = point.arms[arm].good
    values = {
        "ttft_ms": [1000 * one.result.ttft_s for one in good],
        "tpot_ms": [1000 * one.result.tpot_s for one in good],
        "prefill_ms": [1000 * one.prefill_s for one in good],
        "gap_ms": [1000 * one.gap_s for one in good],
        "exposed_transfer_ms": [1000 * one.gap_s - step for one in good],
        "decode_connector_cpu_ms_per_request": [1000 * one.connector_cpu_s for one in good],
    }
    return {name: summarize([value for value in list_ if not math.isnan(value)]) for name, list_ in values.items()}


def ratios(point: Point) -> dict[str, dict[str, dict[str, float | None]]]:
    """Each arm of kvpush in proportion to each disaggregated arm of others.

    Args:
        point: where.

    Returns:
        By kvpush's arm, other arm and figure: kvpush's mean divided by the other's, below 1 where kvpush is faster. None where
        the other's is not above 0, or unknown.
    """
    found: dict[str, dict[str, dict[str, float | None]]] = {}
    others = [arm for arm in point.arms if arm.connector not in (Connector.KVPUSH, Connector.NONE)]
    for arm in point.arms:
        if arm.connector is not Connector.KVPUSH or not others:
            continue
        own = figures(point, arm)
        found[str(arm)] = {}
        for other in others:
            theirs = figures(point, other)
            found[str(arm)][str(other)] = {
                name.removesuffix("_ms"): _ratio(own[name].mean, theirs[name].mean)
                for name in ("ttft_ms", "tpot_ms", "prefill_ms", "gap_ms", "exposed_transfer_ms")
            }
    return found


def _ratio(own: float, other: float) -> float | None:
    if math.isnan(own) or math.isnan(other) or other <= 0:
        return None
    return round(own / other, 3)


def as_table(found: BenchResult, point: Point) -> Table:
    """The table of a point, for people.

    Args:
        found: what the run saw.
        point: one of its points.

    Returns:
        One row an arm.
    """
    config = found.config
    how = f"{point.qps:.3g} requests/s" if point.qps else "one at a time"
    where = f"link {config.link}" if config.link is not None else "loopback"
    kvpush = next((arm for arm in point.arms if arm.connector is Connector.KVPUSH), None)
    proportions = ratios(point).get(str(kvpush), {})
    table = Table(
        title=f"{where}: {config.requests} requests, {point.prompt_tokens} + {config.output_tokens} tokens, {how}",
        caption=(
            f"Mean times in ms; decode step {_figure(point.decode_step_ms, 1)} ms. Compared: {point.equality}."
            + (f" Ratios: {kvpush} divided by the row." if proportions else "")
        ),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("connector", no_wrap=True)
    # Fits 80 columns.
    names = ("TTFT", "TPOT", "pre-\nfill", "ex-\nposed", "dec.\nCPU", "TTFT\nratio", "exp.\nratio")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("outputs", no_wrap=True)
    for arm, result in point.arms.items():
        own = figures(point, arm)
        ratio = proportions.get(str(arm), {})
        table.add_row(
            str(arm),
            _figure(own["ttft_ms"].mean, 0),
            _figure(own["tpot_ms"].mean, 1),
            *(_figure(own[name].mean, 0) for name in ("prefill_ms", "exposed_transfer_ms")),
            _figure(_per_request_ms(result.engine_cpu_s, result), 0),
            *(_times(ratio.get(name)) for name in ("ttft", "exposed_transfer")),
            _verdict(point, arm),
        )
    return table


def _verdict(point: Point, arm: Arm) -> str:
    if errors := point.arms[arm].errors:
        return f"[red]{errors} bad[/red]"
    if arm.connector is Connector.NONE:
        return ""
    return "[green]equal[/green]" if point.equals_reference(arm) else "[red]differ[/red]"


def _per_request_ms(seconds: float, result: ArmResult) -> float:
    return 1000 * seconds / len(result.measured) if result.measured else math.nan


def _figure(value: float, digits: int) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def remarks(found: BenchResult) -> list[str]:
    """What a reader of the tables must know besides.

    Args:
        found: what the run saw.

    Returns:
        Lines of text.
    """
    lines = []
    for point in found.points:
        where = f"{point.prompt_tokens} tokens, {point.rate}"
        other = (point.other_cpu_percent or 0.0) + (point.steal_percent or 0.0)
        if other > _BUSY_PERCENT:
            lines.append(f"{where}: others took {other:.0f} % of a core from this host meanwhile; don't rely on these figures")
        for arm, result in point.arms.items():
            lines += [
                f"{where}, {arm}, request {one.result.index}: {one.result.error}"
                for one in result.measured
                if not one.result.ok
            ]
            received, expected = _received(result), point.prompt_tokens * len(result.good)
            if received is not None and received < expected:
                lines.append(
                    f"{where}, {arm}: KV of {received} of {expected} prompt tokens came from prefill; "
                    "decode computed the others itself"
                )
    return lines


def _over_single_ms(point: Point, arm: Arm) -> float:
    """How much longer the first token takes than on the single instance, on average."""
    single = next(figures(point, other)["ttft_ms"].mean for other in point.arms if other.connector is Connector.NONE)
    return math.nan if arm.connector is Connector.NONE else figures(point, arm)["ttft_ms"].mean - single


def _received(result: ArmResult) -> int | None:
    value = result.counters.get("decode", {}).get("vllm:external_prefix_cache_hits_total")
    return None if value is None else round(value)


def as_json(found: BenchResult) -> dict[str, Any]:
    """The report for programs.

    Args:
        found: what the run saw.

    Returns:
        What `--json` writes; described in `docs/bench.md`.
    """
    config = found.config
    points = [_point_json(found, point) for point in found.points]
    first = {key: value for key, value in points[0].items() if key not in ("prompt_tokens", "qps", "link")} if points else {}
    return {
        **first,
        "points": points,
        "ok": found.ok,
        "outputs_equal": bool(points) and all(point.outputs_equal for point in found.points),
        "config": {
            "connectors": [str(arm) for arm in config.arms],
            "link": str(config.link) if config.link is not None else None,
            "prompt_tokens": list(config.prompt_tokens),
            "qps": [str(rate) for rate in config.rates],
            "output_tokens": config.output_tokens,
            "requests": config.requests,
            "rounds": config.rounds,
            "seed": config.seed,
            "dtype": config.tiny.dtype,
            "layers": config.tiny.layers,
            "hidden": config.tiny.hidden,
            "heads": config.tiny.heads,
            "kv_heads": config.tiny.kv_heads,
            "head_dim": config.tiny.head_size,
            "kv_bytes_per_token": kv_bytes_per_token(config.tiny),
            "kv_cache_bytes": config.cache_bytes,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "warm_up": config.warm_up,
            "eager": config.eager,
            "vllm_args": list(config.vllm_args),
            "idle_seconds": config.idle_s,
        },
        "host": found.host,
    }


def _point_json(found: BenchResult, point: Point) -> dict[str, Any]:
    link = found.config.link
    return {
        "prompt_tokens": point.prompt_tokens,
        "rate": str(point.rate),
        "qps": round(point.qps, 4),
        "link": str(link) if link is not None else None,
        "connectors": {str(arm): _arm_json(found, point, arm) for arm in point.arms},
        "ratios": ratios(point),
        "decode_step_ms": _number(point.decode_step_ms),
        "outputs_equal": point.outputs_equal,
        "ok": point.ok,
        "equality": point.equality,
        "calibration": [
            {"round": number, "core": one.core, "matmul_gflops": one.matmul_gflops, "memcpy_gb_s": one.memcpy_gb_s}
            for number, round_ in enumerate(point.calibrations)
            for one in round_
        ],
        "interference": {"other_cpu_percent": point.other_cpu_percent, "steal_percent": point.steal_percent},
    }


def _arm_json(found: BenchResult, point: Point, arm: Arm) -> dict[str, Any]:
    result = point.arms[arm]
    results = [one.result for one in result.measured]
    return {
        "requests": len(results),
        "errors": result.errors,
        **{name: summary.as_dict() for name, summary in figures(point, arm).items()},
        "ttft_over_single_ms": _number(_over_single_ms(point, arm)),
        "decode_engine_cpu_s": _number(result.engine_cpu_s),
        "decode_engine_cpu_ms_per_request": _number(_per_request_ms(result.engine_cpu_s, result)),
        "decode_instance_cpu_s": _number(result.instance_cpu_s),
        "engine_step_us": (
            {role: engine_steps(counters) for role, counters in result.counters.items()}
            if arm.connector is Connector.KVPUSH
            else None
        ),
        "submitter": _submitter_json(result) if arm.connector is Connector.KVPUSH else None,
        "capacity_qps": _number(result.capacity_qps) if result.capacity_qps is not None else None,
        "wall_s": _number(result.wall_s),
        "outputs_sha256": sha256_of_tokens(one.token_ids for one in results),
        "outputs_equal": point.equals_reference(arm),
        "idle_cpu_percent": dict(found.idle_cpu_percent.get(arm.connector, {})),
        "kv_tokens_received": _received(result),
        "kvpush_counters": {
            role: {
                name: round(value, 3)
                for name, value in counters.items()
                if name.startswith("kvpush_") and not name.startswith(STEP_SERIES) and value
            }
            for role, counters in result.counters.items()
            if arm.connector is Connector.KVPUSH
        },
        "per_request": [
            {
                "index": one.result.index,
                "sha256": sha256_of_tokens([one.result.token_ids]),
                "ttft_ms": _number(1000 * one.result.ttft_s),
                "tpot_ms": _number(1000 * one.result.tpot_s),
                "e2e_ms": _number(1000 * one.result.e2e_s),
                "prefill_ms": _number(1000 * one.prefill_s),
                "gap_ms": _number(1000 * one.gap_s),
                "decode_connector_cpu_ms": _number(1000 * one.connector_cpu_s),
                "error": one.result.error,
            }
            for one in result.measured
        ],
    }


def _submitter_json(result: ArmResult) -> dict[str, float | None]:
    """CPU time of kvpush's own threads, by its counters."""
    used = {role: counters.get(_SUBMITTER_CPU, math.nan) for role, counters in result.counters.items()}
    prefill, decode = used.get("prefill", math.nan), used.get("decode", math.nan)
    computing = math.fsum(one.prefill_s for one in result.good)
    return {
        "prefill_cpu_ms_per_request": _number(_per_request_ms(prefill, result)),
        "decode_cpu_ms_per_request": _number(_per_request_ms(decode, result)),
        # Of a core, while prefill legs ran; under load legs overlap, so it is an underestimate there.
        "prefill_cpu_percent": _number(100 * prefill / computing if computing > 0 else math.nan),
    }


def _number(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 3)
