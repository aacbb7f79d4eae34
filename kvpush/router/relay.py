# SPDX-License-Identifier: Apache-2.0
"""Passes a decode answer on to the client, chunk by chunk, as it comes."""

from __future__ import annotations

import asyncio
import logging

import aiohttp
from aiohttp import web

from kvpush.router.call import Call, returned_headers
from kvpush.router.errors import error_body
from kvpush.router.legs import DecodeAnswer, classify
from kvpush.router.metrics import RouterMetrics

logger = logging.getLogger(__name__)

_LAST_WORDS_S = 5.0


class ClientGone(Exception):
    """The client closed its connection, or no longer reads from it.

    Args:
        outcome: label of the request in the metrics.
    """

    def __init__(self, outcome: str) -> None:
        super().__init__(outcome)
        self.outcome = outcome


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

    Raises:
        ClientGone: the client left or stalled.
    """
    response = web.StreamResponse(status=answer.status, headers=returned_headers(answer.response.headers))
    response.headers["X-Request-Id"] = call.request_id
    # Asks nginx and its kin not to hold chunks back.
    if answer.is_event_stream:
        response.headers.setdefault("X-Accel-Buffering", "no")
    try:
        await response.prepare(request)
    except ConnectionError:
        raise ClientGone("client_disconnected") from None
    chunk, tail = answer.first, b""
    while chunk:
        await _write(request, response, chunk, idle_timeout_s)
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
            return response, "stream_broken"
    try:
        async with asyncio.timeout(idle_timeout_s):
            await response.write_eof()
    except ConnectionError:
        raise ClientGone("client_disconnected") from None
    except TimeoutError:
        abort(request)
        raise ClientGone("client_stalled") from None
    if answer.status < 400:
        return response, "ok"
    return response, "client_error" if answer.status < 500 else "upstream_error"


async def _write(request: web.Request, response: web.StreamResponse, chunk: bytes, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await response.write(chunk)
    except ConnectionError:
        raise ClientGone("client_disconnected") from None
    except TimeoutError:
        abort(request)
        raise ClientGone("client_stalled") from None


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
        transport.abort()
        return
    # close() lets what was written go out first, abort() would drop it; a client that does not read gets the latter.
    asyncio.get_running_loop().call_later(_LAST_WORDS_S, transport.abort)
    transport.close()


def abort(request: web.Request) -> None:
    """Reset the client's connection."""
    if request.transport is not None:
        request.transport.abort()
