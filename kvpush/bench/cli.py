# SPDX-License-Identifier: Apache-2.0
"""The `kvpush bench` commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvpush.bench.arms import parse_arms, parse_rate
from kvpush.bench.backends.cli import backends_command
from kvpush.bench.link import check_requirements as check_link_requirements
from kvpush.bench.link import parse_link
from kvpush.bench.report import as_json, as_table, remarks
from kvpush.bench.serve import BenchConfig, run
from kvpush.demo.command import command
from kvpush.demo.runner import check_requirements
from kvpush.errors import ConfigError
from kvpush.tiny_model import TinyModelSpec, kv_bytes_per_token

__all__ = ["app", "serve_command"]

app = typer.Typer(
    name="bench", help="Measure what a transfer costs, and what backends can do.", no_args_is_help=True, add_completion=False
)


app.command("backends")(backends_command)


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
    with command("bench", work_dir=work_dir, json_path=json_path) as frame:
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
            work_dir=frame.folder,
        )
        if config.link is not None:
            check_link_requirements()
        check_requirements([arm.connector for arm in config.arms])
        per_token = kv_bytes_per_token(config.tiny)
        frame.console.print(
            f"{per_token / 1024:g} KiB of KV a token, {config.cache_bytes / 2**20:.0f} MiB of KV cache an instance",
            highlight=False,
        )
        found = frame.run(lambda observer: run(config, observer))
        frame.show(found.ok, [as_table(found, point) for point in found.points], remarks(found), as_json(found))
