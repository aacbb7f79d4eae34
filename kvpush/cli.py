# SPDX-License-Identifier: Apache-2.0
"""The ``kvpush`` command.

Subcommands with a module of their own are imported when they are run, never for ``--help``, so that the command answers at
once and works without the extras that they need.
"""

from __future__ import annotations

import importlib
import os
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup

from kvpush import __version__
from kvpush._terminal import JsonOption, console, json_object, print_json
from kvpush.errors import KvPushError

__all__ = ["app"]


class _Lazy(NamedTuple):
    """A subcommand that lives elsewhere: where (a function, or a Typer application of more subcommands), and its help."""

    module: str
    function: str
    help: str


_LAZY = {
    "backends": _Lazy("kvpush.backends.cli", "app", "List backend plugins, and check what they promise."),
    "tiny-model": _Lazy(
        "kvpush.tiny_model", "tiny_model_command", "Write a small random-weight Llama with a byte-level tokenizer."
    ),
    "router": _Lazy(
        "kvpush.router.cli", "router_command", "Run the router: an OpenAI-compatible front that drives both legs at once."
    ),
    "demo": _Lazy("kvpush.demo.cli", "demo_command", "Serve a tiny model with vLLM, disaggregated, and compare connectors."),
    "chaos": _Lazy(
        "kvpush.chaos.cli", "chaos_command", "Kill, freeze and cut off real vLLM instances under load, and check every answer."
    ),
    "bench": _Lazy("kvpush.bench.cli", "app", "Measure what a transfer costs on a link, and what each backend can do."),
}

_EXTRAS = {
    "nixl": "nixl",
    "nixl_cu12": "nixl",
    "nixl_cu13": "nixl",
    "vllm": "vllm-cpu",
    "torch": "vllm-cpu",
    "transformers": "vllm-cpu",
    "tokenizers": "vllm-cpu",
    "pytest": "bench",
    "pytest_benchmark": "bench",
}
"""Top-level module that may be missing, and the extra of kvpush that brings it."""


class _Group(TyperGroup):
    """Adds the lazy subcommands, and turns kvpush's own errors and missing extras into one line."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *_LAZY]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A stand-in with the help line only: what ``--help`` and completion need."""
        lazy = _LAZY.get(cmd_name)
        if lazy is None:
            return super().get_command(ctx, cmd_name)
        stub = typer.Typer(add_completion=False)
        stub.command(cmd_name, help=lazy.help)(lambda: None)
        return typer.main.get_command(stub)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None and name in _LAZY:
            command = _load(name, _LAZY[name])
        return name, command, rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KvPushError as error:
            _fail(error.message)
        except ModuleNotFoundError as error:
            extra = _EXTRAS.get((error.name or "").partition(".")[0])
            if extra is None:
                raise
            _fail(f"{error.name} is not installed: pip install 'kvpush[{extra}]'")


def _load(name: str, lazy: _Lazy) -> Any:
    function = getattr(importlib.import_module(lazy.module), lazy.function)
    if isinstance(function, typer.Typer):
        return typer.main.get_command(function)
    single = typer.Typer(add_completion=False)
    single.command(name)(function)
    return typer.main.get_command(single)


def _fail(message: str) -> None:
    """Say what is wrong on stderr, in one line, and leave with 2."""
    typer.secho(f"error: {message}", fg=typer.colors.RED, err=True)
    raise typer.Exit(2)


app = typer.Typer(
    cls=_Group,
    help="Push-based KV-cache transfer for disaggregated LLM serving.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"kvpush {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and leave.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


@app.command()
def doctor(
    as_json: JsonOption = False,
    backend: Annotated[
        str | None, typer.Option(help="Judge by this backend instead of the one that the settings choose.")
    ] = None,
) -> None:
    """Check this host; leave with 1 when the chosen backend can't run."""
    from kvpush.doctor import Status, examine

    report = examine(backend)
    if as_json:
        print_json(report.as_json())
    else:
        from rich.markup import escape
        from rich.table import Table

        colours = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "red"}
        table = Table("check", "", "found", "mend")
        for check in report.checks:
            status = f"[{colours[check.status]}]{check.status}[/{colours[check.status]}]"
            table.add_row(escape(check.name), status, escape(check.detail), escape(check.mend))
        out = console()
        out.print(table)
        out.print(escape(report.verdict), style="bold green" if report.ok else "bold red", highlight=False)
    raise typer.Exit(0 if report.ok else 1)


@app.command()
def config(
    as_json: JsonOption = False,
    extra: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="Read with this kv_connector_extra_config, as an instance started with it would."),
    ] = None,
) -> None:
    """Show every setting, its value here, and where that comes from."""
    from kvpush.settings import CONFIG_VARIABLE, ENV_PREFIX, Settings

    settings = Settings.explain(json_object(extra, "--extra", '{"lease_s": 20}'))
    if as_json:
        print_json({name: sourced._asdict() for name, sourced in settings.items()})
        return
    from rich.markup import escape
    from rich.table import Table

    table = Table("setting", "value", "source", "meaning")
    for name, (value, source, overrides) in settings.items():
        meaning = Settings.model_fields[name].description or ""
        style = "dim" if source == "default" else "bold"
        lost = f" [dim](not: {', '.join(overrides)})[/dim]" if overrides else ""
        table.add_row(escape(name), escape(str(value)), f"[{style}]{source}[/{style}]{lost}", escape(meaning))
    out = console()
    out.print(table)
    file = os.environ.get(CONFIG_VARIABLE)
    out.print("The first that has a value wins:", highlight=False)
    for number, line in enumerate(
        (
            f"environment: {ENV_PREFIX}<SETTING>",
            f"extra config: kv_connector_extra_config, {'as given' if extra is not None else 'none given (--extra)'}",
            f"file: {file or 'none'}, named by {CONFIG_VARIABLE}",
            "default",
        ),
        start=1,
    ):
        out.print(f"  {number}. {escape(line)}", highlight=False, soft_wrap=True)
