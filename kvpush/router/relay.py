# SPDX-License-Identifier: Apache-2.0
"""Passes a decode answer on to the client, chunk by chunk, as it comes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from collections.abc import Awaitable

import aiohttp
from aiohttp import web

from kvpush.router.call import Call, returned_headers
from kvpush.router.errors import error_body
from kvpush.router.legs import DecodeAnswer, classify
from kvpush.router.metrics import RouterMetrics

logger = logging.getLogger(__name__)

_LAST_WORDS_S = 5.0


class _ClientGone(Exception):
    """The client closed its connection, or no longer reads from it; the argument is the outcome."""


async def relay(
    request: web.Request, call: Call, answer: DecodeAnswer, metrics: RouterMetrics, idle_timeout_s: float
) -> tuple[web.StreamResponse, str]:
    """Send an open answer to the client.

    A decode instance that dies or falls silent midway must not look like one that finished: the client's
    connection is closed without the end of its body, after an error event if it is a stream of events.

    Args:
        request: the client's request.
        call: the same, read and checked.
        answer: what decode has begun to say; the caller closes it.
        metrics: where a failed decode leg is counted.
        idle_timeout_s: longest wait for the next chunk, and for the client to take one.

    Returns:
        The response and the outcome of the request.
    """
    response = web.StreamResponse(status=answer.status, headers=returned_headers(answer.response.headers))
    response.headers["X-Request-Id"] = call.request_id
    # Asks nginx and its kin not to hold chunks back.
    if answer.is_event_stream:
        response.headers.setdefault("X-Accel-Buffering", "no")
    try:
        outcome = await _relay(request, response, call, answer, metrics, idle_timeout_s)
    except _ClientGone as err:
        outcome = str(err)
    return response, outcome


async def _relay(
    request: web.Request,
    response: web.StreamResponse,
    call: Call,
    answer: DecodeAnswer,
    metrics: RouterMetrics,
    idle_timeout_s: float,
) -> str:
    await _to_client(request, response.prepare(request), idle_timeout_s)
    chunk, tail = answer.first, b""
    while chunk:
        await _to_client(request, response.write(chunk), idle_timeout_s)
        tail = (tail + chunk)[-2:]
        try:
            async with asyncio.timeout(idle_timeout_s):
                chunk = await answer.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as err:
            reason = classify(err)
            metrics.leg_errors.labels("decode", reason).inc()
            logger.warning("stream broken reason=%s request=%s", reason, call.request_id)
            answer.close()
            await _break_off(request, response, events=answer.is_event_stream, at_boundary=tail == b"\n\n")
            return "stream_broken"
    await _to_client(request, response.write_eof(), idle_timeout_s)
    if answer.status < 400:
        return "ok"
    return "client_error" if answer.status < 500 else "upstream_error"


async def _to_client(request: web.Request, sending: Awaitable[object], timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await sending
    except ConnectionError:
        raise _ClientGone("client_disconnected") from None
    except TimeoutError:
        if request.transport is not None:
            _reset(request.transport)
        raise _ClientGone("client_stalled") from None


async def _break_off(request: web.Request, response: web.StreamResponse, *, events: bool, at_boundary: bool) -> None:
    """Close the client's connection so that its body is known to be incomplete."""
    # Without chunks or a length (HTTP/1.0) an orderly close is what ends a full answer: only a reset tells.
    framed = response.chunked or response.content_length is not None or request.version >= (1, 1)
    if events:
        body = error_body(502, "the decode instance failed while it was answering", "server_error")
        event = (b"" if at_boundary else b"\n\n") + b"data: " + body + b"\n\n"
        try:
            async with asyncio.timeout(_LAST_WORDS_S):
                await response.write(event)
        except (ConnectionError, TimeoutError):
            framed = False
    transport = request.transport
    if transport is None:
        return
    if not framed:
        _reset(transport)
        return
    # close() lets what was written go out first, abort() would drop it; a client that does not read gets the latter.
    asyncio.get_running_loop().call_later(_LAST_WORDS_S, transport.abort)
    transport.close()


def _reset(transport: asyncio.Transport) -> None:
    """Close a connection with a TCP reset: to its peer an error, never an end."""
    sock = transport.get_extra_info("socket")
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
