# SPDX-License-Identifier: Apache-2.0
"""What the commands share: JSON in and out, and the console for tables."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpush.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["JsonOption", "console", "json_object", "print_json"]

JsonOption = Annotated[bool, typer.Option("--json", help="Write JSON to standard output instead of a table.")]


def json_object(text: str | None, option: str, example: str) -> dict[str, Any]:
    """The value of an option that takes a JSON object; empty if it was not given.

    Raises:
        ConfigError: it is none; names the option and shows the example.
    """
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{option} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{option} must be a JSON object, such as '{example}'")
    return value


def console() -> Console:
    """Standard output, for tables."""
    from rich.console import Console

    return Console(file=sys.stdout, emoji=False)


def print_json(value: object) -> None:
    """Write plain JSON types to standard output."""
    typer.echo(json.dumps(value, indent=2))
