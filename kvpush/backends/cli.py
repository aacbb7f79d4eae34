# SPDX-License-Identifier: Apache-2.0
"""The ``kvpush backends`` commands."""

from __future__ import annotations

import itertools
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from kvpush._terminal import JsonOption, console, json_object, print_json
from kvpush.backends.manager import BackendManager, Discovered
from kvpush.errors import BackendError, ConfigError
from kvpush.settings import Settings
from kvpush.testing.check import Promise, Verdict, check_backend

__all__ = ["app"]

app = typer.Typer(name="backends", help="List backend plugins, and check what they promise.", add_completion=False)


@app.callback(invoke_without_command=True)
def _backends(context: typer.Context, as_json: JsonOption = False) -> None:
    """List backend plugins (the default), and check what they promise."""
    if context.invoked_subcommand is None:
        list_command(as_json)
    elif as_json:
        raise ConfigError(f"--json goes after the subcommand: kvpush backends {context.invoked_subcommand} --json")


@app.command("list")
def list_command(as_json: JsonOption = False) -> None:
    """Show every plugin that is installed, what can run here and why not, and which one is chosen for which device."""
    manager = BackendManager()
    found = manager.discover(probe=True)
    try:
        setting, complaint = Settings.load().backend, ""
    except ConfigError as error:
        # What is installed can be listed all the same.
        setting, complaint = None, f"the settings are wrong: {error.message}"
    chosen, reason = _choice(manager, setting, None)
    devices = {device: None for entry in found if entry.plugin for device in entry.plugin.info.device_types}
    by_device = {device: _choice(manager, setting, device) for device in sorted(devices)}
    if as_json:
        print_json(
            {
                "backends": [_entry_json(entry) for entry in found],
                "setting": setting,
                "selected": chosen,
                "reason": reason,
                "by_device_type": {device: {"name": name, "reason": why} for device, (name, why) in by_device.items()},
            }
        )
        return
    table = Table("backend", "runs here", "devices", "transports", "capabilities", "from", "what")
    for entry in found:
        info = entry.plugin.info if entry.plugin else None
        table.add_row(
            f"[bold]{escape(entry.name)}[/bold]",
            "[green]yes[/green]" if entry.ok else "[red]no[/red]",
            escape(", ".join(info.device_types)) if info else "",
            escape(", ".join(info.transports)) if info else "",
            escape(", ".join(sorted(info.capabilities))) if info else "",
            escape(entry.distribution),
            escape(info.summary) if info else "[red]broken[/red]",
        )
    out = console()
    out.print(table)
    for entry in found:
        reasons = [entry.error] if entry.error else list(entry.probe.reasons) if entry.probe else []
        if reasons:
            what = "is broken" if entry.error else "can't run here"
            out.print(f"[bold]{escape(entry.name)}[/bold] {what}:")
            for line in reasons:
                out.print(f"  - {escape(line)}", highlight=False, soft_wrap=True)
    if complaint:
        out.print(f"[red]{escape(complaint)}[/red]", highlight=False)
    if setting is not None:
        out.print(f"The setting [bold]backend={escape(setting)}[/bold] decides:", highlight=False)
    out.print("Chosen for an engine on")
    for device, (name, why) in by_device.items():
        out.print(_chosen(device, name, why), highlight=False, soft_wrap=True)
    out.print(_chosen("one that says nothing of its device", chosen, reason), highlight=False, soft_wrap=True)


@app.command("check")
def check_command(
    name: Annotated[str, typer.Argument(help="Name of the backend, as `kvpush backends` lists it.")],
    options: Annotated[
        str | None, typer.Option(metavar="JSON", help="backend_options to test with; none if not given.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run the contract suite on an installed plugin, and report which promises hold, which fail and how.

    Needs pytest. Leaves with 0 when all hold, 1 when some fail, 2 when none fails but some could not be checked here.
    """
    report = check_backend(name, json_object(options, "--options", '{"ucx_tls": "tcp,self"}'))
    if as_json:
        print_json(report.as_json())
        raise typer.Exit(report.exit_code)
    colours = {Verdict.HOLDS: "green", Verdict.FAILS: "red", Verdict.NOT_PROMISED: "dim", Verdict.UNCHECKED: "yellow"}
    out = console()
    # What could not be checked for one and the same reason is told once.
    for _, group in itertools.groupby(enumerate(report.promises), key=_told_together):
        promises = [promise for _, promise in group]
        first = promises[0]
        text = first.text if len(promises) == 1 else f"{len(promises)} promises"
        style = colours[first.verdict]
        out.print(f"[{style}]{first.verdict:>12}[/{style}]  {first.area}: {escape(text)}", highlight=False)
        for line in first.detail.splitlines():
            out.print(f"{'':12}  {escape(line)}", highlight=False, soft_wrap=True)
    out.print(escape(report.summary), style="bold", highlight=False)
    if report.num(Verdict.FAILS):
        out.print("Tracebacks: --json", highlight=False)
    raise typer.Exit(report.exit_code)


def _told_together(numbered: tuple[int, Promise]) -> tuple[object, ...]:
    idx, promise = numbered
    return (promise.area, promise.detail) if promise.verdict is Verdict.UNCHECKED else (idx,)


def _chosen(device: str, name: str | None, why: str) -> str:
    # Why none: that is told plugin by plugin already.
    return f"  {escape(device)}: " + (f"[bold]{escape(name)}[/bold] ({escape(why)})" if name else "[bold]none[/bold]")


def _choice(manager: BackendManager, setting: str | None, device_type: str | None) -> tuple[str | None, str]:
    try:
        plugin, reason = manager.select(setting, device_type)
    except BackendError as error:
        return None, error.message
    return plugin.info.name, reason


def _entry_json(entry: Discovered) -> dict[str, object]:
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
