# SPDX-License-Identifier: Apache-2.0
"""The `kvpush chaos` command."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from kvpush.bench.link import check_requirements as check_link_requirements
from kvpush.chaos.cluster import Network
from kvpush.chaos.faults import Kind
from kvpush.chaos.report import as_json, as_table, remarks
from kvpush.chaos.results import ChaosConfig, Topology
from kvpush.chaos.storm import run
from kvpush.demo.command import command
from kvpush.demo.connectors import Connector
from kvpush.demo.runner import check_requirements
from kvpush.errors import ConfigError

__all__ = ["chaos_command"]


class Net(StrEnum):
    """Values of --network."""

    AUTO = "auto"
    LOOPBACK = "loopback"
    NAMESPACES = "namespaces"


class Verify(StrEnum):
    """Values of --verify."""

    OFF = "off"
    SAMPLE = "sample"
    ALL = "all"


class Shape(StrEnum):
    """Values of --topology."""

    ONE = "1p1d"
    TWO = "2p1d"


def chaos_command(
    seed: Annotated[int, typer.Option(min=0, help="Seed of prompts, load and faults.")] = 0,
    minutes: Annotated[float, typer.Option(help="Minutes of load and faults, over all topologies.")] = 6.0,
    json_path: Annotated[Path | None, typer.Option("--json", metavar="PATH", help="Also write the report as JSON.")] = None,
    topology: Annotated[
        list[Shape] | None,
        typer.Option(help="Prefill and decode instances. Repeat for more.", show_default="1p1d, 2p1d"),
    ] = None,
    network: Annotated[
        Net,
        typer.Option(
            help="What lies between prefill and decode: the loopback, or two network namespaces whose link can be cut (root). "
            "auto: the loopback for 1p1d, namespaces for 2p1d where they can be made."
        ),
    ] = Net.AUTO,
    fault: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND", help="Deal only this kind; 'none' deals none. Repeat for more.", show_default="all"),
    ] = None,
    verify: Annotated[Verify, typer.Option(help="Have kvpush compare digests of what was sent and what arrived.")] = Verify.ALL,
    workers: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 8,
    prompts: Annotated[int, typer.Option(min=8, help="Different prompts.")] = 48,
    leaving_percent: Annotated[float, typer.Option(min=0, max=100, help="Clients that leave at a random moment.")] = 30.0,
    deadline: Annotated[float, typer.Option(min=1, help="Seconds by which a request must have ended.")] = 120.0,
    start_timeout: Annotated[float, typer.Option(help="Seconds that servers may take to start.")] = 300.0,
    work_dir: Annotated[
        Path | None,
        typer.Option(help="Folder for model and logs, kept afterwards; by default a temporary one, kept only on failure."),
    ] = None,
) -> None:
    """Serve a tiny model disaggregated, and kill, freeze and cut off its instances under load.

    Every answer is compared with a single instance's. Leaves with 0 only when no answer was wrong, no request hung or was lost
    that a recompute could save, no engine died by itself, and every block, descriptor and thread came back; with 1 otherwise,
    with 2 when an option is wrong or something is not installed.
    """
    with command("chaos", work_dir=work_dir, json_path=json_path) as frame:
        check_requirements([Connector.KVPUSH])
        config = ChaosConfig(
            topologies=_topologies(frame.console, topology or list(Shape), network),
            seed=seed,
            minutes=minutes,
            kinds=_kinds(fault),
            verify=verify.value,
            workers=workers,
            prompts=prompts,
            leaving=leaving_percent / 100,
            deadline_s=deadline,
            start_timeout_s=start_timeout,
            work_dir=frame.folder,
        )
        found = frame.run(lambda observer: run(config, observer))
        frame.show(found.ok, [as_table(found)], remarks(found), as_json(found))


def _topologies(console: Console, shapes: list[Shape], network: Net) -> tuple[Topology, ...]:
    made = []
    for shape in dict.fromkeys(shapes):
        prefills = 1 if shape is Shape.ONE else 2
        between = Network.LOOPBACK
        if network is Net.NAMESPACES:
            check_link_requirements("--network namespaces")
            between = Network.NAMESPACES
        elif network is Net.AUTO and shape is Shape.TWO:
            try:
                check_link_requirements("a link that can be cut")
                between = Network.NAMESPACES
            except ConfigError as error:
                console.print(
                    f"[yellow]![/yellow] {shape} stays on the loopback, and no link is cut: {escape(error.message)}",
                    highlight=False,
                    soft_wrap=True,
                )
        made.append(Topology(prefills, between))
    return tuple(made)


def _kinds(names: list[str] | None) -> tuple[Kind, ...]:
    if not names:
        return tuple(Kind)
    if names == ["none"]:
        return ()
    try:
        return tuple(Kind(name) for name in dict.fromkeys(names))
    except ValueError as error:
        raise ConfigError(f"{error}; there are {', '.join(Kind)}, or none alone") from None
