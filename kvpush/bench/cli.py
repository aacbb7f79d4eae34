# SPDX-License-Identifier: Apache-2.0
"""The `kvpush bench` commands."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from kvpush.bench.arms import parse_arms, parse_rate
from kvpush.bench.link import check_requirements as check_link_requirements
from kvpush.bench.link import parse_link
from kvpush.bench.report import as_json, as_table, remarks
from kvpush.bench.serve import BenchConfig, BenchResult, run
from kvpush.demo.report import ConsoleObserver
from kvpush.demo.runner import check_requirements
from kvpush.demo.signals import Stopped, run_until_signal
from kvpush.errors import ConfigError, KvPushError
from kvpush.tiny_model import TinyModelSpec, kv_bytes_per_token

__all__ = ["app", "serve_command"]

app = typer.Typer(name="bench", help="Measure what a transfer costs.", no_args_is_help=True, add_completion=False)


@app.callback()
def _group() -> None:
    """Keeps `serve` a subcommand: Typer makes the only command of an application the application."""


@app.command("serve")
def serve_command(
    link: Annotated[
        str | None,
        typer.Option(
            metavar="RATE[,DELAY]",
            help="Two network namespaces joined by a link of this rate, such as 1gbit or 250mbit,2ms (each way). Needs root.",
        ),
    ] = None,
    loopback: Annotated[bool, typer.Option("--loopback", help="All on the loopback: the default.")] = False,
    connector: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:MODE]",
            help="kvpush, nixl-push, nixl-pull or none, and how legs are sent: concurrent or sequential. Repeat for more.",
            show_default="kvpush, nixl-push, nixl-push:concurrent, nixl-pull, none",
        ),
    ] = None,
    prompt_tokens: Annotated[
        list[int] | None, typer.Option(min=1, help="Length of prompts. Repeat for more points.", show_default="2000")
    ] = None,
    qps: Annotated[
        list[str] | None,
        typer.Option(
            help="Requests a second (Poisson), 0 for one at a time, or 70% of what the slowest can do. Repeat for more points.",
            show_default="0",
        ),
    ] = None,
    output_tokens: Annotated[int, typer.Option(min=1, help="Length of each answer.")] = 32,
    requests: Annotated[int, typer.Option(min=1, help="Requests to each connector at each point.")] = 12,
    rounds: Annotated[int, typer.Option(min=1, help="How often connectors take turns.")] = 3,
    warm_up: Annotated[int, typer.Option(min=1, help="Requests to each connector that are not counted.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights, prompts and arrival times.")] = 0,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 8,
    hidden: Annotated[int, typer.Option(help="Width of the model.")] = 512,
    heads: Annotated[int, typer.Option(help="Query heads of the model.")] = 8,
    kv_heads: Annotated[int, typer.Option(help="Key/value heads of the model.")] = 8,
    head_dim: Annotated[int | None, typer.Option(help="Size of a head.", show_default="hidden / heads")] = None,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a chunk of prefill.")] = 512,
    kv_cache_mib: Annotated[
        int | None,
        typer.Option(min=1, help="KV cache of each instance.", show_default="3 of the longest requests, 8 under load"),
    ] = None,
    eager: Annotated[bool, typer.Option(help="Run eagerly, or compile (a longer start).")] = True,
    vllm_arg: Annotated[
        list[str] | None, typer.Option(help="One more argument for every vLLM instance.", show_default=False)
    ] = None,
    idle_seconds: Annotated[float, typer.Option(min=0, help="Length of the idle window; 0 leaves it out.")] = 5.0,
    start_timeout: Annotated[float, typer.Option(help="Seconds that all servers may take to start.")] = 600.0,
    request_timeout: Annotated[float, typer.Option(help="Seconds that one request may take.")] = 300.0,
    work_dir: Annotated[
        Path | None,
        typer.Option(help="Folder for model and logs, kept afterwards; by default a temporary one, kept only on failure."),
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", metavar="PATH", help="Also write the report as JSON.")] = None,
) -> None:
    """Serve a tiny model disaggregated, and time what KV transfer adds to a request.

    Leaves with 0 only when every request succeeded and kvpush's outputs equal the single instance's; with 1 otherwise,
    with 2 when an option is wrong or something is not installed.
    """
    console = Console()
    folder = work_dir or Path(tempfile.mkdtemp(prefix="kvpush-bench-"))
    keep = work_dir is not None
    try:
        if link is not None and loopback:
            raise ConfigError("--link and --loopback exclude each other")
        config = BenchConfig(
            arms=parse_arms(connector or ()),
            link=parse_link(link) if link is not None else None,
            prompt_tokens=tuple(prompt_tokens or (2000,)),
            rates=tuple(parse_rate(text) for text in qps or ("0",)),
            output_tokens=output_tokens,
            requests=requests,
            rounds=rounds,
            seed=seed,
            tiny=TinyModelSpec(
                layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim, seed=seed, dtype=dtype
            ),
            max_num_batched_tokens=max_num_batched_tokens,
            kv_cache_bytes=kv_cache_mib << 20 if kv_cache_mib is not None else None,
            eager=eager,
            vllm_args=tuple(vllm_arg or ()),
            warm_up=warm_up,
            idle_s=idle_seconds,
            start_timeout_s=start_timeout,
            request_timeout_s=request_timeout,
            work_dir=folder,
        )
        if config.link is not None:
            check_link_requirements()
        check_requirements([arm.connector for arm in config.arms])
        if json_path is not None and not json_path.resolve().parent.is_dir():
            raise ConfigError(f"{json_path.parent} is not a folder")
        folder.mkdir(parents=True, exist_ok=True)
        per_token = kv_bytes_per_token(config.tiny)
        console.print(
            f"{per_token / 1024:g} KiB of KV a token, {config.cache_bytes / 2**20:.0f} MiB of KV cache an instance",
            highlight=False,
        )
        with ConsoleObserver(console) as observer:
            found = asyncio.run(run_until_signal(run(config, observer)))
        _show(console, found, json_path)
        keep = keep or not found.ok
        status = 0 if found.ok else 1
    except ConfigError as error:
        console.print(f"[red]error:[/red] {escape(error.message)}", highlight=False, soft_wrap=True)
        status = 2
    except (KvPushError, OSError) as error:
        console.print(f"[red]error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        keep, status = True, 1
    except Stopped as stopped:
        console.print("stopped; everything that was made or started is gone", highlight=False)
        status = 128 + stopped.number
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    if keep:
        console.print(f"Logs: {folder / 'logs'}", highlight=False, soft_wrap=True)
    raise typer.Exit(status)


def _show(console: Console, found: BenchResult, json_path: Path | None) -> None:
    for point in found.points:
        console.print(as_table(found, point))
    for remark in remarks(found):
        console.print(f"[yellow]![/yellow] {escape(remark)}", highlight=False)
    if json_path is not None:
        json_path.write_text(json.dumps(as_json(found), indent=2, allow_nan=False) + "\n", encoding="utf-8")
        console.print(f"Report: {json_path}", highlight=False, soft_wrap=True)
