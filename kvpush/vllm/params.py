# SPDX-License-Identifier: Apache-2.0
"""``kv_transfer_params``: what routers send with a request. Parsed strictly, never trusted."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpush.channels._address import check_address
from kvpush.core.ids import PeerAddress
from kvpush.errors import KvPushError, RemoteProtocolError

MAX_ID_CHARS = 500


@dataclass(frozen=True, slots=True)
class PrefillLeg:
    """This instance computes the prompt and keeps its KV for somebody.

    Args:
        transfer_id: The router's id of the pair; None where both legs only share their request id.
    """

    transfer_id: str | None


@dataclass(frozen=True, slots=True)
class DecodeLeg:
    """The prompt's KV comes from a producer.

    Args:
        peer: The producer's control endpoint.
        transfer_id: As in :class:`PrefillLeg`.
        remote_request_id: The producer's own id of the request, from routers that run prefill first.
    """

    peer: PeerAddress
    transfer_id: str | None
    remote_request_id: str | None


def parse_params(params: Any) -> PrefillLeg | DecodeLeg | None:
    """What a request's params ask for; None for a plain request. Unknown fields are accepted: other connectors have them.

    Raises:
        RemoteProtocolError: says which field is wrong; the text holds at most a short piece of its value.
    """
    if params is None:
        return None
    if not isinstance(params, Mapping):
        raise RemoteProtocolError(f"kv_transfer_params is {type(params).__name__}, not an object")
    decode_remotely = _flag(params, "do_remote_decode")
    prefill_remotely = _flag(params, "do_remote_prefill")
    if decode_remotely and prefill_remotely:
        raise RemoteProtocolError("kv_transfer_params asks for do_remote_decode and do_remote_prefill at once")
    if not decode_remotely and not prefill_remotely:
        return None
    transfer_id = _id(params, "transfer_id")
    if decode_remotely:
        return PrefillLeg(transfer_id)
    host, port = params.get("remote_host"), params.get("remote_port")
    if not isinstance(host, str) or not host:
        raise RemoteProtocolError(f"kv_transfer_params.remote_host is {_shown(host)}, not a host name")
    if isinstance(port, str) and port.isascii() and port.isdigit() and len(port) <= 5:
        port = int(port)
    if isinstance(port, bool) or not isinstance(port, int):
        raise RemoteProtocolError(f"kv_transfer_params.remote_port is {_shown(port)}, not a number")
    peer = PeerAddress(host, port)
    try:
        check_address(peer)
    except KvPushError as error:
        raise RemoteProtocolError(f"kv_transfer_params: {error.message[:300]}") from error
    return DecodeLeg(peer, transfer_id, _id(params, "remote_request_id"))


def _flag(params: Mapping[str, Any], name: str) -> bool:
    value = params.get(name)
    if value is not None and not isinstance(value, bool):
        raise RemoteProtocolError(f"kv_transfer_params.{name} is {_shown(value)}, not true or false")
    return bool(value)


def _id(params: Mapping[str, Any], name: str) -> str | None:
    value = params.get(name)
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise RemoteProtocolError(f"kv_transfer_params.{name} is {_shown(value)}, not a string")
    if len(value) > MAX_ID_CHARS:
        raise RemoteProtocolError(f"kv_transfer_params.{name} has {len(value)} characters; at most {MAX_ID_CHARS} are accepted")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RemoteProtocolError(f"kv_transfer_params.{name} is no valid text") from error
    return value


def _shown(value: object) -> str:
    text = repr(value) if isinstance(value, str | int | float | bool | None) else type(value).__name__
    return text if len(text) <= 60 else f"{text[:57]}..."


def source_keys(leg: PrefillLeg, request_id: str, shared_id: str) -> tuple[str, ...]:
    """What a producer's request can be found by.

    Args:
        request_id: The engine's id.
        shared_id: The part of it that both legs of an HTTP request have in common.
    """
    # Without an id from the router, our own request id serves: it goes out with the response's params.
    name = leg.transfer_id or request_id
    return _unique(f"t:{name}{_index(shared_id)}", f"r:{request_id}", f"r:{_without_sample(shared_id)}")


def receive_keys(leg: DecodeLeg, shared_id: str) -> tuple[str, ...]:
    """What a consumer's request looks for, best first."""
    if leg.transfer_id:
        return (f"t:{leg.transfer_id}{_index(shared_id)}",)
    shared = f"r:{_without_sample(shared_id)}"
    if leg.remote_request_id:
        return _unique(f"r:{leg.remote_request_id}", shared)
    return (shared,)


_SAMPLE = re.compile(r"^\d+_(?=(cmpl|chatcmpl)-)")
_COMPLETION = re.compile(r"^cmpl-.*-(\d+)$", re.DOTALL)


def _without_sample(shared_id: str) -> str:
    """vLLM puts ``0_``, ``1_``... before the ids of the samples of one prompt (n above 1): all are served by any of them."""
    return _SAMPLE.sub("", shared_id)


def _index(shared_id: str) -> str:
    """Which prompt of a batch it is: one HTTP request, and so one transfer id, may hold several (``cmpl-...-<index>``)."""
    found = _COMPLETION.match(_without_sample(shared_id))
    return f"/{found[1]}" if found and found[1] != "0" else ""


def _unique(*keys: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(keys))
