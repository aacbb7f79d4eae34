# SPDX-License-Identifier: Apache-2.0
"""Runs the router until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger

from kvpush.router.app import create_app
from kvpush.router.config import RouterConfig

logger = logging.getLogger(__name__)

_WANTED_FILES = 65536
_BACKLOG = 1024
# The application drains its requests itself before aiohttp's runner waits.
_RUNNER_SHUTDOWN_S = 2.0


class _AccessLogger(AbstractAccessLogger):
    """One line a request: method, path, status, time; no query, no body."""

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        self.logger.info(
            "access method=%s path=%s status=%d ms=%.1f", request.method, request.path, response.status, time * 1e3
        )


def make_runner(config: RouterConfig, *, access_log: bool = False) -> web.AppRunner:
    """Return a runner that cancels a request's handler when its client disconnects.

    Args:
        config: what to serve.
        access_log: log a line for every HTTP request, probes of ``/health`` included.
    """
    return web.AppRunner(
        create_app(config),
        handler_cancellation=True,
        access_log_class=_AccessLogger,
        access_log=logger if access_log else None,
        shutdown_timeout=_RUNNER_SHUTDOWN_S,
    )


async def serve(config: RouterConfig, host: str, port: int, *, access_log: bool = False) -> None:
    """Serve until SIGINT or SIGTERM, then drain and stop; a second signal stops at once.

    Args:
        config: what to serve.
        host: address to listen at.
        port: port to listen at.
        access_log: log a line for every HTTP request.

    Raises:
        OSError: the address can't be bound.
    """
    _raise_file_limit()
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    hurry = asyncio.Event()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, on_signal)
    runner = make_runner(config, access_log=access_log)
    try:
        await runner.setup()
        await web.TCPSite(runner, host, port, backlog=_BACKLOG).start()
        logger.info(
            "listening host=%s port=%d prefill=%d decode=%d mode=%s",
            host,
            port,
            len(config.prefill),
            len(config.decode),
            config.mode,
        )
        await stop.wait()
    finally:
        cleanup = asyncio.create_task(runner.cleanup())
        impatience = asyncio.create_task(hurry.wait())
        await asyncio.wait((cleanup, impatience), return_when=asyncio.FIRST_COMPLETED)
        impatience.cancel()
        if not cleanup.done():
            logger.warning("stopped before running requests ended")
            cleanup.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await cleanup
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(signum)


def _raise_file_limit() -> None:
    """Ask for as many open files as the system grants: a request in flight holds up to three sockets."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED_FILES if hard == resource.RLIM_INFINITY else min(_WANTED_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
