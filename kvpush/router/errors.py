# SPDX-License-Identifier: Apache-2.0
"""Errors the router answers itself, in OpenAI's shape."""

from __future__ import annotations

import json

from aiohttp import web


class RequestFailed(Exception):
    """A request that ends with an answer of the router's own.

    Args:
        status: HTTP status of the answer.
        message: for the client; never holds prompt text.
        kind: ``type`` of OpenAI's error object.
        outcome: label of the request in the metrics, see ``metrics.OUTCOMES``.
        param: name of the body field at fault.
        close: close the client's connection, for instance because its body was not read to the end.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str,
        outcome: str,
        param: str | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.outcome = outcome
        self.param = param
        self.close = close


def bad_request(message: str, *, status: int = 400, param: str | None = None, close: bool = False) -> RequestFailed:
    """Return the error of a request the router refuses."""
    return RequestFailed(status, message, kind="invalid_request_error", outcome="bad_request", param=param, close=close)


def error_body(status: int, message: str, kind: str, param: str | None = None) -> bytes:
    """Return OpenAI's error object as JSON bytes."""
    return json.dumps({"error": {"message": message, "type": kind, "param": param, "code": status}}).encode()


def error_response(
    status: int, message: str, kind: str, *, param: str | None = None, request_id: str | None = None
) -> web.Response:
    """Return OpenAI's error object as an answer."""
    headers = {"X-Request-Id": request_id} if request_id else None
    return web.Response(
        status=status,
        body=error_body(status, message, kind, param),
        content_type="application/json",
        headers=headers,
    )
