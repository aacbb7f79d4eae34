# SPDX-License-Identifier: Apache-2.0
"""The ``kvpush router`` command."""

from __future__ import annotations

import asyncio
import logging
from typing import Annotated

import typer

from kvpush.errors import ConfigError
from kvpush.router.config import (
    DEFAULT_MAX_BODY_BYTES,
    Mode,
    OnPrefillFailure,
    RouterConfig,
    parse_prefill,
    parse_url,
)
from kvpush.router.server import serve


def router_command(
    decode: Annotated[
        list[str], typer.Option("--decode", metavar="URL", help="Decode instance. Repeat for more.", show_default=False)
    ],
    prefill: Annotated[
        list[str] | None,
        typer.Option(
            "--prefill",
            metavar="URL[@HOST[:PORT]]",
            help="Prefill instance, and its kvpush control endpoint if that is not the URL's host and the default "
            "port. Repeat for more; without any, the router is a plain reverse proxy.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen at.")] = 8000,
    mode: Annotated[
        Mode, typer.Option(help="Both legs at once, or prefill first and its answer's parameters on to decode.")
    ] = Mode.CONCURRENT,
    on_prefill_failure: Annotated[
        OnPrefillFailure,
        typer.Option(
            help="Prefill failed before decode answered: another prefill and at last decode alone, decode alone, or 502."
        ),
    ] = OnPrefillFailure.RETRY,
    max_tries: Annotated[int, typer.Option(min=1, help="Tries a request, the first included.")] = 4,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Largest request body.")] = DEFAULT_MAX_BODY_BYTES,
    allow_client_kv_params: Annotated[
        bool, typer.Option("--allow-client-kv-params", help="Pass clients' kv_transfer_params to decode (trusted only).")
    ] = False,
    connect_timeout_s: Annotated[float, typer.Option(help="For a connection to an instance.")] = 5.0,
    ttft_timeout_s: Annotated[float, typer.Option(help="From the request to the first byte, tries included.")] = 600.0,
    prefill_timeout_s: Annotated[
        float | None, typer.Option(help="For one prefill leg.", show_default="as --ttft-timeout-s")
    ] = None,
    idle_timeout_s: Annotated[float, typer.Option(help="Between two chunks of an answer.")] = 300.0,
    body_timeout_s: Annotated[float, typer.Option(help="For the client to send its request.")] = 120.0,
    probe_backoff_s: Annotated[float, typer.Option(help="First pause before an unreachable instance is probed.")] = 1.0,
    probe_backoff_max_s: Annotated[float, typer.Option(help="Longest such pause.")] = 30.0,
    shutdown_timeout_s: Annotated[float, typer.Option(help="For running requests once told to stop.")] = 30.0,
    access_log: Annotated[bool, typer.Option("--access-log", help="Log every HTTP request.")] = False,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Serve prefill and decode instances as one OpenAI-compatible endpoint."""
    level = logging.getLevelNamesMapping().get(log_level.upper())
    if level is None:
        raise typer.BadParameter(f"unknown log level {log_level!r}", param_hint="--log-level")
    try:
        config = RouterConfig(
            decode=tuple(parse_url(url) for url in decode),
            prefill=tuple(parse_prefill(target) for target in prefill or ()),
            mode=mode,
            on_prefill_failure=on_prefill_failure,
            max_tries=max_tries,
            max_body_bytes=max_body_bytes,
            allow_client_kv_params=allow_client_kv_params,
            connect_timeout_s=connect_timeout_s,
            ttft_timeout_s=ttft_timeout_s,
            prefill_timeout_s=prefill_timeout_s,
            idle_timeout_s=idle_timeout_s,
            body_timeout_s=body_timeout_s,
            probe_backoff_s=probe_backoff_s,
            probe_backoff_max_s=probe_backoff_max_s,
            shutdown_timeout_s=shutdown_timeout_s,
        )
    except ConfigError as err:
        raise typer.BadParameter(str(err)) from err
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        asyncio.run(serve(config, host, port, access_log=access_log))
    except OSError as err:
        typer.echo(f"kvpush router: can't listen at {host}:{port}: {err.strerror or err}", err=True)
        raise typer.Exit(1) from err
