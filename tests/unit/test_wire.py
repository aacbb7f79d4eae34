# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import msgspec
import numpy as np
import pytest
from machines import ids, layout

from kvpush.core import wire
from kvpush.core.ids import Rect
from kvpush.errors import RemoteProtocolError

MESSAGES: list[wire.Message] = [
    wire.Hello(
        1,
        engine_id="e",
        agent_name="a",
        agent_metadata=b"\x00\xff",
        transport="toy",
        layout=layout(),
        compat={"model": "m"},
        lease_s=10.0,
    ),
    wire.Welcome(
        2**63 - 1,
        engine_id="e",
        agent_name="a",
        endpoints=(wire.Endpoint(0, "", 1), wire.Endpoint(1, "h", 65535)),
        covers=(Rect(0, 3, 0, 2, 0, 1),),
        seq=1,
        heartbeat_s=0.5,
        idle_heartbeat_s=3.0,
        retry_window_s=1.0,
    ),
    wire.Refused(1, reason="no", unknown=True),
    wire.Heartbeat(1, seq=2**53),
    wire.HeartbeatAck(1, seq=0),
    wire.RegisterBlocks(
        1, request_id="r", epoch=0, keys=("a", "b"), prompt_digest=b"d" * 64, num_tokens=8, token_lo=4, blocks=(b"1234",), seq=3
    ),
    wire.Registered(1, request_id="ü", epoch=1, waiting=True),
    wire.Streaming(1, request_id="r", epoch=1),
    wire.Quiet(1),
    wire.Staged(1, request_id="r", epoch=1, tag=2**53, slot=65535, layer_lo=0, layer_hi=65535, block_lo=0, block_hi=2**31 - 1),
    wire.Unpacked(1, tag=3, error="x"),
    wire.Commit(1, request_id="r", epoch=1, coverage=(Rect(0, 1, 2, 3, 4, 5),) * wire.MAX_RECTS),
    wire.Inquiry(1, streams=(wire.StreamRef("r" * 512, 1),) * wire.MAX_STREAMS),
    wire.Standing(1, streams=(wire.StreamStanding("r", 1, True, 2**53),)),
    wire.Failing(1, request_id="r", epoch=1, reason="x"),
    wire.Failed(1, request_id="r", epoch=1, reason=""),
    wire.Cancel(1, request_id="r", epoch=1),
    wire.Fenced(1, request_id="r", epoch=2**31 - 1),
    wire.Decline(1, keys=("k",), prompt_digest=b""),
    wire.Watch(1, request_id="r", keys=("k",), prompt_digest=b"d"),
    wire.Started(1, request_id="r", started=False),
    wire.Goodbye(1, reason="x", fenced=False),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_round_trip(message: wire.Message) -> None:
    frame = wire.encode(message)
    assert wire.decode(frame) == message
    assert frame[:4] == b"KVP\x01"


def test_every_message_is_tested_here() -> None:
    assert {type(message) for message in MESSAGES} == set(wire.Message.__args__)
    assert set(wire.ConsumerMessage.__args__) | set(wire.ProducerMessage.__args__) == set(wire.Message.__args__)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_any_truncation_and_any_flipped_byte_decodes_or_is_refused(message: wire.Message) -> None:
    frame = wire.encode(message)
    for end in range(len(frame)):
        with pytest.raises(RemoteProtocolError):
            wire.decode(frame[:end])
    for at in range(0, len(frame), max(1, len(frame) // 60)):
        for flip in (0x01, 0x80, 0xFF):
            try:
                wire.decode(frame[:at] + bytes([frame[at] ^ flip]) + frame[at + 1 :])
            except RemoteProtocolError:
                pass


def test_another_version_is_named() -> None:
    with pytest.raises(RemoteProtocolError, match="protocol 2, this side 1"):
        wire.decode(b"KVP\x02" + wire.encode(MESSAGES[0])[4:])
    with pytest.raises(RemoteProtocolError, match="protocol None"):
        wire.decode(b"KVP")


def test_too_long() -> None:
    with pytest.raises(RemoteProtocolError, match="at most"):
        wire.decode(bytes(wire.MAX_FRAME_BYTES + 1))


def test_deep_nesting() -> None:
    with pytest.raises(RemoteProtocolError):
        wire.decode(b"KVP\x01" + b"\x91" * 100_000)


@pytest.mark.parametrize(
    "changes",
    [
        {"session": 0},
        {"session": 2**63},
        {"session": -1},
        {"session": "1"},
        {"epoch": -1},
        {"request_id": ""},
        {"request_id": "x" * 513},
        {"keys": []},
        {"keys": ["k"] * 9},
        {"blocks": []},
        {"num_tokens": 2**31},
        {"prompt_digest": b"x" * 65},
        {"type": "Nonsense"},
    ],
)
def test_fields_out_of_bounds_are_refused(changes: dict[str, object]) -> None:
    fields = msgspec.msgpack.decode(wire.encode(MESSAGES[5])[4:])
    assert wire.decode(b"KVP\x01" + msgspec.msgpack.encode(fields)) == MESSAGES[5]
    with pytest.raises(RemoteProtocolError):
        wire.decode(b"KVP\x01" + msgspec.msgpack.encode(fields | changes))


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0, 1e9])
def test_durations_are_sane(seconds: float) -> None:
    fields = msgspec.msgpack.decode(wire.encode(MESSAGES[0])[4:])
    with pytest.raises(RemoteProtocolError):
        wire.decode(b"KVP\x01" + msgspec.msgpack.encode(fields | {"lease_s": seconds}))


def test_unknown_fields_are_ignored() -> None:
    fields = msgspec.msgpack.decode(wire.encode(MESSAGES[-1])[4:])
    assert wire.decode(b"KVP\x01" + msgspec.msgpack.encode(fields | {"later": 1})) == MESSAGES[-1]


def test_block_ids() -> None:
    table = (np.array([0, 2**31 - 1], np.int32), np.zeros(0, np.int32))
    blobs = wire.pack_blocks(table)
    assert blobs == (b"\x00\x00\x00\x00\xff\xff\xff\x7f", b"")
    for want, have in zip(table, wire.unpack_blocks(blobs), strict=True):
        assert (want == have).all()
        assert have.dtype == np.int32
        assert have.flags.writeable
    assert wire.pack_blocks((np.array([1, 9, 2], np.int32)[::2],)) == wire.pack_blocks(ids(1, 2))


@pytest.mark.parametrize("blob", [b"123", b"\xff\xff\xff\xff"])
def test_wrong_block_ids(blob: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        wire.unpack_blocks((blob,))
