# SPDX-License-Identifier: Apache-2.0
"""The codec: the messages that are on the way of a request, and the handshake."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from common import BLOCK_TOKENS, cache_layout

from kvpush.core import wire
from kvpush.core.ids import Rect


def register_blocks(tokens: int) -> wire.RegisterBlocks:
    blocks = np.arange(-(-tokens // BLOCK_TOKENS), dtype=np.int32)
    return wire.RegisterBlocks(
        7,
        request_id="cmpl-0123456789abcdef",
        epoch=3,
        keys=("transfer-0123456789abcdef", "cmpl-0123456789abcdef"),
        prompt_digest=bytes(32),
        num_tokens=tokens,
        token_lo=0,
        blocks=wire.pack_blocks((blocks,)),
        seq=42,
    )


def hello(layers: int) -> wire.Hello:
    return wire.Hello(
        7,
        engine_id="decode",
        agent_name="decode-0",
        agent_metadata=bytes(2048),
        transport="nixl-ucx",
        layout=cache_layout(layers, 4096, contents=("k", "v")),
        compat={"model": "m", "dtype": "bfloat16"},
        lease_s=10.0,
    )


MESSAGES = {
    "message=RegisterBlocks-tokens=500": register_blocks(500),
    "message=RegisterBlocks-tokens=30000": register_blocks(30_000),
    "message=Commit-rects=1": wire.Commit(7, request_id="r", epoch=1, coverage=(Rect(0, 80, 0, 8, 0, 30_000),)),
    "message=Commit-rects=128": wire.Commit(
        7, request_id="r", epoch=1, coverage=tuple(Rect(n, n + 1, 0, 8, 0, 30_000) for n in range(128))
    ),
    "message=Hello-layers=32": hello(32),
    "message=Hello-layers=80": hello(80),
    "message=HeartbeatAck": wire.HeartbeatAck(7, seq=3),
}


@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES.keys())
def bench_encode(benchmark: Any, message: wire.Message) -> None:
    frame = benchmark(wire.encode, message)
    assert wire.decode(frame) == message
    benchmark.extra_info["bytes"] = len(frame)


@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES.keys())
def bench_decode(benchmark: Any, message: wire.Message) -> None:
    frame = wire.encode(message)
    assert benchmark(wire.decode, frame) == message
    benchmark.extra_info["bytes"] = len(frame)


@pytest.mark.parametrize("tokens", [500, 30_000], ids=lambda n: f"tokens={n}")
def bench_unpack_blocks(benchmark: Any, tokens: int) -> None:
    blobs = register_blocks(tokens).blocks
    (table,) = benchmark(wire.unpack_blocks, blobs)
    assert len(table) == -(-tokens // BLOCK_TOKENS)
    benchmark.extra_info["bytes"] = len(blobs[0])
