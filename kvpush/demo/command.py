# SPDX-License-Identifier: Apache-2.0
"""The frame around a command that runs servers: its folder, its progress, its report, its exit status."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvpush.demo.report import ConsoleObserver
from kvpush.demo.runner import Observer
from kvpush.demo.signals import Stopped, run_until_signal
from kvpush.errors import ConfigError, KvPushError

__all__ = ["Command", "command"]

T = TypeVar("T")


class Command:
    """What a command's own part works with. Made by `command`.

    Args:
        console: where to.
        folder: for the model and the logs; there once `run` is called.
        json_path: where the report goes too; None for nowhere.
    """

    def __init__(self, console: Console, folder: Path, json_path: Path | None) -> None:
        self.console = console
        self.folder = folder
        self.ok = False
        self._json_path = json_path

    def run(self, work: Callable[[Observer], Coroutine[Any, Any, T]]) -> T:
        """Run something until it ends or a signal asks for its end, and show how it goes on.

        Args:
            work: is given what to tell its progress to; cleans up after itself when it is cancelled.

        Returns:
            Its result.

        Raises:
            Stopped: a signal came.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with ConsoleObserver(self.console) as observer:
            return asyncio.run(run_until_signal(work(observer)))

    def show(self, ok: bool, tables: Iterable[Table], remarks: Iterable[str], report: Mapping[str, Any]) -> None:
        """Show what was found, and write the report where one is asked for.

        Args:
            ok: whether all was as it must be: whether the command leaves with 0 or with 1.
            tables: for people.
            remarks: what they must know besides.
            report: for programs.
        """
        self.ok = ok
        for table in tables:
            self.console.print(table)
        for remark in remarks:
            self.console.print(f"[yellow]![/yellow] {escape(remark)}", highlight=False, soft_wrap=True)
        if self._json_path is not None:
            self._json_path.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n", encoding="utf-8")
            self.console.print(f"Report: {self._json_path}", highlight=False, soft_wrap=True)


@contextmanager
def command(
    name: str, *, work_dir: Path | None, json_path: Path | None, gone: str = "everything that was made or started"
) -> Iterator[Command]:
    """Turn what happens in the block into messages and an exit status.

    The folder is kept if it was given, if something was not as it must be, and if something failed; else it is gone afterwards.

    Args:
        name: of the command; begins the name of a temporary folder.
        work_dir: folder to use; None makes a temporary one.
        json_path: where the report goes too; None for nowhere.
        gone: what a run that a signal stops has removed, for the message.

    Yields:
        What the block works with. Without a call of `show` the command leaves with 1.

    Raises:
        typer.Exit: always, with 0 or 1 (see `Command.show`), 2 after a ConfigError, 1 after another error, 128 + n after
            signal n.
    """
    console = Console()
    folder = work_dir or Path(tempfile.mkdtemp(prefix=f"kvpush-{name}-"))
    keep = work_dir is not None
    try:
        if json_path is not None and not json_path.resolve().parent.is_dir():
            raise ConfigError(f"{json_path.parent} is not a folder")
        running = Command(console, folder, json_path)
        yield running
        keep = keep or not running.ok
        status = 0 if running.ok else 1
    except ConfigError as error:
        console.print(f"[red]error:[/red] {escape(error.message)}", highlight=False, soft_wrap=True)
        status = 2
    except (KvPushError, OSError) as error:
        console.print(f"[red]error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        keep, status = True, 1
    except Stopped as stopped:
        console.print(f"stopped; {gone} is gone", highlight=False)
        status = 128 + stopped.number
    except Exception:
        # A bug of ours: what led to it is in the logs.
        keep = True
        raise
    finally:
        if keep:
            console.print(f"Logs: {folder / 'logs'}", highlight=False, soft_wrap=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    raise typer.Exit(status)
