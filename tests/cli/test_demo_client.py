# SPDX-License-Identifier: Apache-2.0
"""The client's reading of streams, against a server that cuts them in unkind places."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from kvpush.demo.client import RequestSpec, arrival_times, make_requests, send_at_rate, send_request

REQUEST = RequestSpec(0, (65, 66, 67), 3)


def chunk(tokens: list[int], finish_reason: str | None = None) -> bytes:
    event = {"choices": [{"index": 0, "text": "x", "token_ids": tokens, "finish_reason": finish_reason}]}
    return b"data: " + json.dumps(event).encode() + b"\n\n"


class Front:
    """A server that answers with the given pieces, and notes what it was asked."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.status = 200
        self.cut = False
        self.bodies: list[dict[str, Any]] = []
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        if self.status != 200:
            return web.Response(status=self.status, text="out of blocks")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in self.pieces:
            await response.write(piece)
            await asyncio.sleep(0.001)
        if self.cut and request.transport is not None:
            request.transport.abort()
        return response


@pytest.fixture
async def front() -> AsyncIterator[Front]:
    front = Front()
    app = web.Application()
    app.router.add_post("/v1/completions", front.handle)
    async with TestServer(app) as server:
        front.url = str(server.make_url("")).rstrip("/")
        yield front


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
        yield session


async def test_reads_tokens_and_times(front: Front, session: aiohttp.ClientSession) -> None:
    front.pieces = [chunk([1]), chunk([2]), chunk([3], "length"), b"data: [DONE]\n\n"]
    result = await send_request(session, front.url, "m", REQUEST)
    assert result.ok
    assert result.token_ids == (1, 2, 3)
    assert 0 < result.ttft_s <= result.e2e_s
    assert result.tpot_s > 0
    assert front.bodies == [
        {
            "model": "m",
            "prompt": [65, 66, 67],
            "max_tokens": 3,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
    ]


async def test_any_cut_of_the_stream_reads_the_same(front: Front, session: aiohttp.ClientSession) -> None:
    stream = b": a comment\n\n" + chunk([]) + chunk([1, 2]) + chunk([3], "length") + b"data: [DONE]\n\n"
    for size in (1, 7, 100_000):
        front.pieces = [stream[start : start + size] for start in range(0, len(stream), size)]
        result = await send_request(session, front.url, "m", REQUEST)
        assert result.ok, result.error
        assert result.token_ids == (1, 2, 3)


async def test_a_chunk_larger_than_aiohttps_line_limit(front: Front, session: aiohttp.ClientSession) -> None:
    event = {"choices": [{"prompt_token_ids": [66] * 200_000, "token_ids": [1, 2, 3], "finish_reason": "length"}]}
    front.pieces = [b"data: " + json.dumps(event).encode() + b"\n\n"]
    result = await send_request(session, front.url, "m", REQUEST)
    assert result.ok, result.error


async def test_one_token_has_no_time_between_tokens(front: Front, session: aiohttp.ClientSession) -> None:
    front.pieces = [chunk([1], "length")]
    result = await send_request(session, front.url, "m", RequestSpec(0, (65,), 1))
    assert result.ok
    assert math.isnan(result.tpot_s)


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        ([chunk([1]), chunk([2])], "2 tokens came instead of 3"),
        ([b'data: {"error": {"message": "engine died"}}\n\n'], "engine died"),
        ([chunk([1]), chunk([2], "abort")], "'abort'"),
        ([b"data: {not json}\n\n"], "JSONDecodeError"),
        ([], "0 tokens came instead of 3"),
    ],
)
async def test_failures_are_results(front: Front, session: aiohttp.ClientSession, pieces: list[bytes], error: str) -> None:
    front.pieces = pieces
    result = await send_request(session, front.url, "m", REQUEST)
    assert not result.ok
    assert error in (result.error or "")


async def test_http_errors_and_lost_connections_are_results(front: Front, session: aiohttp.ClientSession) -> None:
    front.status = 503
    assert (await send_request(session, front.url, "m", REQUEST)).error == "HTTP 503: out of blocks"
    front.status, front.cut, front.pieces = 200, True, [chunk([1])]
    assert not (await send_request(session, front.url, "m", REQUEST)).ok
    result = await send_request(session, "http://127.0.0.1:9", "m", REQUEST)
    assert not result.ok
    assert math.isnan(result.ttft_s)


def test_prompts_are_exact_seeded_and_unlike() -> None:
    requests = make_requests(20, prompt_tokens=50, output_tokens=4, seed=5)
    assert [request.index for request in requests] == list(range(20))
    assert all(len(request.prompt) == 50 and request.output_tokens == 4 for request in requests)
    assert all(0x20 <= token <= 0x7E for request in requests for token in request.prompt)
    assert len({request.prompt[:16] for request in requests}) == 20
    assert make_requests(5, prompt_tokens=50, output_tokens=4, seed=5, first=10) == requests[10:15]
    assert make_requests(20, prompt_tokens=50, output_tokens=4, seed=6) != requests


def test_arrivals_have_the_asked_rate() -> None:
    times = arrival_times(4000, qps=8, seed=1)
    assert times == sorted(times) == arrival_times(4000, qps=8, seed=1)
    assert times[0] == 0
    assert times[-1] == pytest.approx(4000 / 8, rel=0.1)


@pytest.mark.parametrize("qps", [0.0, 500.0])
async def test_results_come_in_the_order_of_requests(front: Front, session: aiohttp.ClientSession, qps: float) -> None:
    front.pieces = [chunk([1, 2], "length")]
    requests = make_requests(12, prompt_tokens=4, output_tokens=2, seed=0)
    seen: list[int] = []
    results = await send_at_rate(
        session, front.url, "m", requests, qps=qps, seed=0, on_done=lambda result: seen.append(result.index)
    )
    assert [result.index for result in results] == list(range(12))
    assert sorted(seen) == list(range(12))
    assert all(result.ok for result in results)
