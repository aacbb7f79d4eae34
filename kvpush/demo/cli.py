# SPDX-License-Identifier: Apache-2.0
"""The `kvpush demo` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from kvpush.demo.command import command
from kvpush.demo.connectors import Connector
from kvpush.demo.report import as_json, as_table, remarks
from kvpush.demo.runner import RunConfig, check_requirements, run
from kvpush.errors import ConfigError
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
    connectors = tuple(dict.fromkeys(connector or _DEFAULT_CONNECTORS))
    with command("demo", work_dir=work_dir, json_path=json_path, gone="everything that was started") as frame:
        check_requirements(connectors)
        if model is not None and not (model / "config.json").is_file():
            raise ConfigError(f"{model} is not the folder of a model")
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
            work_dir=frame.folder,
        )
        if Connector.NONE not in connectors:
            frame.console.print("A single instance is run too: outputs are compared with its.", highlight=False)
        found = frame.run(lambda observer: run(config, observer))
        frame.show(found.ok, [as_table(found)], remarks(found), as_json(found))
