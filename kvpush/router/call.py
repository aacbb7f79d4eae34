# SPDX-License-Identifier: Apache-2.0
"""One client request: reading it, checking it, and the bodies of its two legs."""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from aiohttp import web
from multidict import CIMultiDict

from kvpush.router.config import Mode, PrefillTarget, RouterConfig
from kvpush.router.errors import RequestFailed, bad_request

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")
_KV_PARAMS = "kv_transfer_params"
# Fields that make an engine read or write memory of another one.
_STEERING = (_KV_PARAMS, "ec_transfer_params")
_HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
# Made anew for each leg. Content-Encoding: the body that goes on has been decoded. Accept-Encoding: chunks pass
# through as they are, and compression would hold them back.
_NOT_SENT_ON = frozenset(
    {"host", "content-length", "content-type", "content-encoding", "accept-encoding", "expect", "x-request-id"}
)
_NOT_SENT_BACK = frozenset({"date", "server", "x-request-id"})


@dataclass(frozen=True, slots=True)
class Call:
    """One client request, read and checked.

    Attributes:
        endpoint: label of the metrics, one of ``metrics.ENDPOINTS``.
        path: path at the instances.
        body: the client's JSON object.
        raw: the bytes it came in.
        headers: the client's headers that go on to the instances.
        request_id: ``X-Request-Id`` of every leg.
        arrived_at: event-loop time at which the whole body was here.
        steered: the client brought its own ``kv_transfer_params`` and may.
    """

    endpoint: str
    path: str
    body: Mapping[str, Any]
    raw: bytes
    headers: CIMultiDict[str]
    request_id: str
    arrived_at: float
    steered: bool


def request_id_of(request: web.Request) -> str:
    """Return the client's own request id if it is a sane one, else a new one."""
    given = request.headers.get("X-Request-Id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def forwarded_headers(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """Return the client's headers that go on to an instance."""
    return _filtered(headers, _NOT_SENT_ON)


def returned_headers(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """Return the headers of an instance that go back to the client."""
    return _filtered(headers, _NOT_SENT_BACK)


def _filtered(headers: Mapping[str, str], dropped: Iterable[str]) -> CIMultiDict[str]:
    drop = {*_HOP_BY_HOP, *dropped}
    for name, value in headers.items():
        if name.lower() == "connection":
            drop.update(token.strip().lower() for token in value.split(","))
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in drop)


async def read_call(request: web.Request, endpoint: str, request_id: str, config: RouterConfig) -> Call:
    """Read and check a request.

    Raises:
        RequestFailed: too large, too slow, not a JSON object, or one that steers remote memory itself.
    """
    raw = await _read_body(request, config)
    body = _parse(raw)
    # vLLM merges vllm_xargs into the same dict that carries kv_transfer_params.
    xargs = body.get("vllm_xargs")
    places = (body, xargs) if isinstance(xargs, dict) else (body,)
    steering = [name for name in _STEERING for place in places if place.get(name) is not None]
    if steering and not config.allow_client_kv_params:
        raise bad_request(f"{steering[0]} can't be set by a client of this server", param=steering[0])
    return Call(
        endpoint=endpoint,
        path=request.path,
        body=body,
        raw=raw,
        headers=forwarded_headers(request.headers),
        request_id=request_id,
        arrived_at=asyncio.get_running_loop().time(),
        steered=_KV_PARAMS in steering,
    )


async def _read_body(request: web.Request, config: RouterConfig) -> bytes:
    limit = config.max_body_bytes
    too_large = bad_request(f"the request body is larger than {limit} bytes", status=413, close=True)
    if request.content_length is not None and request.content_length > limit:
        raise too_large
    data = bytearray()
    try:
        async with asyncio.timeout(config.body_timeout_s):
            async for chunk in request.content.iter_any():
                data += chunk
                if len(data) > limit:
                    raise too_large
    except TimeoutError:
        raise bad_request("the request body did not arrive in time", status=408, close=True) from None
    except ConnectionError:
        raise RequestFailed(
            400, "the client left", kind="invalid_request_error", outcome="client_disconnected", close=True
        ) from None
    except (web.RequestPayloadError, ValueError) as err:
        raise bad_request("the request body can't be decoded", close=True) from err
    return bytes(data)


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw, parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        # The parser's own message quotes the body.
        raise bad_request("the request body is not valid JSON") from None
    if not isinstance(body, dict):
        raise bad_request("the request body must be a JSON object")
    return body


def prefill_body(call: Call, transfer_id: str, mode: Mode) -> bytes:
    """Return the body of the prefill leg: the client's, cut to one token and told to keep its KV for decode."""
    body = {k: v for k, v in call.body.items() if k not in ("min_tokens", "stream_options")}
    body["max_tokens"] = 1
    if call.endpoint == "chat_completions" or "max_completion_tokens" in body:
        body["max_completion_tokens"] = 1
    body["stream"] = False
    params: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
    if mode is Mode.SEQUENTIAL:
        # What vLLM's in-tree connectors look up in the parameters of a prefill request.
        params |= {"remote_engine_id": None, "remote_block_ids": None, "remote_host": None, "remote_port": None}
    params["transfer_id"] = transfer_id
    body[_KV_PARAMS] = params
    return json.dumps(body, separators=(",", ":")).encode()


def decode_params(transfer_id: str, prefill: PrefillTarget) -> dict[str, Any]:
    """Return the ``kv_transfer_params`` of a decode leg that runs beside its prefill leg."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": transfer_id,
        "remote_host": prefill.control_host,
        "remote_port": prefill.control_port,
    }


def decode_body(call: Call, params: Mapping[str, Any] | None) -> bytes:
    """Return the body of a decode leg: the client's bytes, or its object with ``kv_transfer_params``."""
    if params is None:
        return call.raw
    return json.dumps({**call.body, _KV_PARAMS: params}, separators=(",", ":")).encode()
