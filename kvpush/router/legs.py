# SPDX-License-Identifier: Apache-2.0
"""The two requests behind one: a prefill leg that is read to its end, a decode leg that is opened to its first byte.

A leg's failure is a value, not an exception: both run as tasks and are judged together.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import aiohttp
from multidict import CIMultiDict

from kvpush.router.call import Call, decode_body, prefill_body
from kvpush.router.config import RouterConfig
from kvpush.router.metrics import RouterMetrics
from kvpush.router.pool import Instance, Pool

logger = logging.getLogger(__name__)

# 4xx that say "not now" rather than "never": another instance may well take the request.
_RETRYABLE_4XX = frozenset({408, 425, 429})
_MAX_PREFILL_ANSWER_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class LegFailure:
    """Why a leg brought nothing.

    Attributes:
        leg: one of ``metrics.LEGS``.
        reason: one of ``metrics.REASONS``.
        status: HTTP status when the instance answered one.
        final: the request itself is at fault; another instance would say the same.
    """

    leg: str
    reason: str
    status: int | None = None
    final: bool = False


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """A prefill leg that succeeded; ``params`` are its answer's ``kv_transfer_params`` in sequential mode."""

    params: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class DecodeAnswer:
    """A decode answer of which the first bytes are here (none, if its body is empty)."""

    response: aiohttp.ClientResponse
    first: bytes

    @property
    def status(self) -> int:
        """HTTP status of the answer."""
        return self.response.status

    @property
    def is_event_stream(self) -> bool:
        """Whether the body is a stream of server-sent events."""
        return self.response.content_type == "text/event-stream"

    async def read(self) -> bytes:
        """Return what has arrived since, waiting for something; empty at the end."""
        return await self.response.content.readany()

    def close(self) -> None:
        """Close the connection, unless the body was read to its end."""
        self.response.close()


def classify(err: BaseException) -> str:
    """Return the reason label of an exception that a leg met."""
    if isinstance(err, aiohttp.ConnectionTimeoutError):
        return "connect_timeout"
    if isinstance(err, aiohttp.ClientConnectorError):
        return "connect"
    if isinstance(err, TimeoutError):
        return "timeout"
    if isinstance(err, aiohttp.ClientConnectionError | aiohttp.ClientPayloadError | OSError):
        return "disconnected"
    return "protocol"


@dataclass(slots=True)
class Connection:
    """What a leg was sent on, as :func:`connection_trace` sees it.

    Attributes:
        reused: another request had been sent on it before.
    """

    reused: bool = False


def connection_trace() -> aiohttp.TraceConfig:
    """Return what a session needs so that a :class:`Connection` given with a request is filled in."""

    async def reused(session: aiohttp.ClientSession, context: SimpleNamespace, params: object) -> None:
        if isinstance(context.trace_request_ctx, Connection):
            context.trace_request_ctx.reused = True

    trace = aiohttp.TraceConfig()
    trace.on_connection_reuseconn.append(reused)
    return trace


class Legs:
    """Sends legs; notes their failures in log, metrics and the pools.

    Args:
        config: of the router.
        session: keeps connections, and has a :func:`connection_trace`.
        fresh: makes a new connection for each request.
        metrics: of the router.
        prefills: prefill instances.
        decodes: decode instances.
    """

    def __init__(
        self,
        config: RouterConfig,
        session: aiohttp.ClientSession,
        fresh: aiohttp.ClientSession,
        metrics: RouterMetrics,
        prefills: Pool,
        decodes: Pool,
    ) -> None:
        self._config = config
        self._session = session
        self._fresh = fresh
        self._metrics = metrics
        self._pools = {"prefill": prefills, "decode": decodes}

    async def prefill(self, call: Call, instance: Instance, transfer_id: str, *, keep: bool) -> PrefillDone | LegFailure:
        """Run a prefill leg to its end, within its deadline.

        Args:
            call: the client's request.
            instance: where to.
            transfer_id: names the transfer on both sides.
            keep: read the answer's ``kv_transfer_params`` (sequential mode) instead of dropping the answer.
        """
        body = prefill_body(call, transfer_id, self._config.mode)
        try:
            async with asyncio.timeout(self._config.prefill_deadline_s):
                async with await self._send(call, instance, body) as response:
                    self._reached("prefill", instance, response.status)
                    if response.status >= 400:
                        return self._status_failure(call, instance, transfer_id, response.status)
                    data = bytearray()
                    async for chunk in response.content.iter_any():
                        if keep:
                            data += chunk
                        if len(data) > _MAX_PREFILL_ANSWER_BYTES:
                            return self._failed(call, instance, transfer_id, LegFailure("prefill", "bad_answer"))
        except (aiohttp.ClientError, OSError, TimeoutError) as err:
            return self._broken(call, instance, transfer_id, "prefill", err)
        if not keep:
            return PrefillDone()
        try:
            params = json.loads(data)["kv_transfer_params"] or None
        except (ValueError, RecursionError, TypeError, KeyError):
            params = None
        if params is not None and not isinstance(params, dict):
            return self._failed(call, instance, transfer_id, LegFailure("prefill", "bad_answer"))
        return PrefillDone(params)

    async def decode(
        self, call: Call, instance: Instance, transfer_id: str, params: dict[str, Any] | None
    ) -> DecodeAnswer | LegFailure:
        """Open a decode leg and wait for its first byte; the caller holds the deadline and closes the answer.

        vLLM sends the header of a stream before it has a token, so a header alone does not bind the router yet.
        """
        response: aiohttp.ClientResponse | None = None
        try:
            response = await self._send(call, instance, decode_body(call, params))
            self._reached("decode", instance, response.status)
            first = await response.content.readany()
        except (aiohttp.ClientError, OSError, TimeoutError) as err:
            if response is not None:
                response.close()
            return self._broken(call, instance, transfer_id, "decode", err)
        except BaseException:
            if response is not None:
                response.close()
            raise
        if response.status >= 400:
            reason = "status_4xx" if response.status < 500 else "status_5xx"
            self._failed(call, instance, transfer_id, LegFailure("decode", reason, response.status))
        return DecodeAnswer(response, first)

    def timed_out(self, call: Call, instance: Instance, transfer_id: str, leg: str) -> None:
        """Note a leg that the request's own deadline ended."""
        self._failed(call, instance, transfer_id, LegFailure(leg, "timeout"))

    async def _send(self, call: Call, instance: Instance, body: bytes) -> aiohttp.ClientResponse:
        """Send a leg and wait for its header. A server closes connections that have been idle for long, by its own clock: one
        that comes back after it stood still closes those on which a request waits unread. So a leg whose connection is an older
        one and closes before a byte is sent once more, on a new one."""
        connection = Connection()
        try:
            return await self._post(self._session, call, instance, body, connection)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as err:
            if not connection.reused or isinstance(err, aiohttp.ClientConnectorError):
                raise
        self._metrics.retries.labels("stale_connection").inc()
        return await self._post(self._fresh, call, instance, body, connection)

    def _post(
        self, session: aiohttp.ClientSession, call: Call, instance: Instance, body: bytes, connection: Connection
    ) -> aiohttp.client._RequestContextManager:
        headers = CIMultiDict(call.headers)
        headers["X-Request-Id"] = call.request_id
        headers["Content-Type"] = "application/json"
        headers["Accept-Encoding"] = "identity"
        # BytesIO: sent in pieces, so that a large prompt does not hold the event loop in one write.
        return session.post(
            f"{instance.url}{call.path}",
            data=io.BytesIO(body),
            headers=headers,
            allow_redirects=False,
            trace_request_ctx=connection,
        )

    def _reached(self, leg: str, instance: Instance, status: int) -> None:
        if status < 500:
            self._pools[leg].mark_up(instance)
        else:
            self._pools[leg].suspect(instance)

    def _status_failure(self, call: Call, instance: Instance, transfer_id: str, status: int) -> LegFailure:
        final = status < 500 and status not in _RETRYABLE_4XX
        reason = "status_4xx" if status < 500 else "status_5xx"
        return self._failed(call, instance, transfer_id, LegFailure("prefill", reason, status, final))

    def _broken(self, call: Call, instance: Instance, transfer_id: str, leg: str, err: BaseException) -> LegFailure:
        reason = classify(err)
        if reason in ("connect", "connect_timeout"):
            self._pools[leg].mark_down(instance)
        elif reason != "timeout":
            self._pools[leg].suspect(instance)
        return self._failed(call, instance, transfer_id, LegFailure(leg, reason))

    def _failed(self, call: Call, instance: Instance, transfer_id: str, failure: LegFailure) -> LegFailure:
        self._metrics.leg_errors.labels(failure.leg, failure.reason).inc()
        # Never the text of an error or of an answer: engines quote the prompt in theirs.
        logger.warning(
            "leg failed leg=%s reason=%s status=%s instance=%s request=%s transfer=%s",
            failure.leg,
            failure.reason,
            failure.status or "-",
            instance.url,
            call.request_id,
            transfer_id,
        )
        return failure
