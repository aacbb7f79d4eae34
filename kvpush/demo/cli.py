# SPDX-License-Identifier: Apache-2.0
"""The `kvpush demo` command."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.markup import escape

from kvpush.demo.connectors import Connector
from kvpush.demo.report import ConsoleObserver, as_json, as_table, remarks
from kvpush.demo.runner import RunConfig, RunResult, check_requirements, run
from kvpush.demo.signals import Stopped, run_until_signal
from kvpush.errors import ConfigError, KvPushError
from kvpush.tiny_model import TinyModelSpec

__all__ = ["demo_command"]

_DEFAULT_CONNECTORS: Final = [Connector.KVPUSH, Connector.NONE]


def demo_command(
    connector: Annotated[
        list[Connector] | None,
        typer.Option(help="May be given several times; kvpush and none if not given.", show_default=False),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests to each connector.")] = 24,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of each prompt.")] = 1000,
    output_tokens: Annotated[int, typer.Option(min=1, help="Length of each answer.")] = 32,
    qps: Annotated[float, typer.Option(min=0, help="Requests a second (Poisson); 0 sends one at a time.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights, prompts and arrival times.")] = 0,
    rounds: Annotated[int, typer.Option(min=1, help="How often connectors take turns.")] = 3,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    model: Annotated[Path | None, typer.Option(help="Folder of a model to serve; a tiny one is written if not given.")] = None,
    layers: Annotated[int, typer.Option(help="Layers of the tiny model.")] = 8,
    hidden: Annotated[int, typer.Option(help="Width of the tiny model.")] = 512,
    heads: Annotated[int, typer.Option(help="Query heads of the tiny model.")] = 8,
    kv_heads: Annotated[int, typer.Option(help="Key/value heads of the tiny model.")] = 4,
    idle_seconds: Annotated[float, typer.Option(min=0, help="Length of the idle window; 0 leaves it out.")] = 5.0,
    eager: Annotated[bool, typer.Option(help="Run eagerly, or compile (a longer start).")] = True,
    vllm_arg: Annotated[
        list[str] | None,
        typer.Option(help="One more argument for every vLLM instance, such as --vllm-arg=--block-size=64.", show_default=False),
    ] = None,
    start_timeout: Annotated[float, typer.Option(help="Seconds that all servers may take to start.")] = 600.0,
    request_timeout: Annotated[float, typer.Option(help="Seconds that one request may take.")] = 120.0,
    work_dir: Annotated[
        Path | None,
        typer.Option(help="Folder for model and logs, kept afterwards; by default a temporary one, kept only on failure."),
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", metavar="PATH", help="Also write the report as JSON.")] = None,
) -> None:
    """Serve a tiny model with vLLM, disaggregated, and compare connectors.

    Leaves with 0 only when every request succeeded and the outputs equal the single instance's; with 1 otherwise, with
    2 when an option is wrong or something is not installed.
    """
    console = Console()
    connectors = tuple(dict.fromkeys(connector or _DEFAULT_CONNECTORS))
    folder = work_dir or Path(tempfile.mkdtemp(prefix="kvpush-demo-"))
    keep = work_dir is not None
    try:
        check_requirements(connectors)
        if model is not None and not (model / "config.json").is_file():
            raise ConfigError(f"{model} is not the folder of a model")
        if json_path is not None and not json_path.resolve().parent.is_dir():
            raise ConfigError(f"{json_path.parent} is not a folder")
        config = RunConfig(
            connectors=connectors,
            requests=requests,
            rounds=rounds,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            qps=qps,
            seed=seed,
            dtype=dtype,
            model=model.resolve() if model is not None else None,
            tiny=TinyModelSpec(layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, seed=seed, dtype=dtype),
            eager=eager,
            vllm_args=tuple(vllm_arg or ()),
            idle_s=idle_seconds,
            start_timeout_s=start_timeout,
            request_timeout_s=request_timeout,
            work_dir=folder,
        )
        folder.mkdir(parents=True, exist_ok=True)
        if Connector.NONE not in connectors:
            console.print("A single instance is run too: outputs are compared with its.", highlight=False)
        with ConsoleObserver(console) as observer:
            found = asyncio.run(run_until_signal(run(config, observer)))
        _show(console, found, json_path)
        keep = keep or not found.ok
        status = 0 if found.ok else 1
    except ConfigError as error:
        console.print(f"[red]error:[/red] {escape(error.message)}", highlight=False)
        status = 2
    except (KvPushError, OSError) as error:
        console.print(f"[red]error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        keep, status = True, 1
    except Stopped as stopped:
        console.print("stopped; everything that was started is gone", highlight=False)
        status = 128 + stopped.number
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    if keep:
        console.print(f"Logs: {folder / 'logs'}", highlight=False, soft_wrap=True)
    raise typer.Exit(status)


def _show(console: Console, found: RunResult, json_path: Path | None) -> None:
    console.print(as_table(found))
    for remark in remarks(found):
        console.print(f"[yellow]![/yellow] {escape(remark)}", highlight=False)
    if json_path is not None:
        content: dict[str, Any] = as_json(found)
        json_path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        console.print(f"Report: {json_path}", highlight=False, soft_wrap=True)
