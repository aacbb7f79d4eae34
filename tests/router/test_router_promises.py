# SPDX-License-Identifier: Apache-2.0
"""The table of failures in docs/router.md, line by line: a right answer or a clear error, streaming or not, in both modes; and
the other leg is ended, so that no instance goes on with a request that nobody waits for."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from router_stubs import Behaviour, Cluster, Engine, Seen, cluster, drop, hang, status, within

from kvpush.router import Mode, OnPrefillFailure

ANSWER = {"choices": [{"text": "right"}]}
EVENTS = (b"data: " + json.dumps(ANSWER).encode() + b"\n\n", b"data: [DONE]\n\n")
TABLE = Path(__file__).parents[2] / "docs" / "router.md"
PATIENT = {"prefill_linger_s": 600.0}
"""A leg that is not ended at once is ended too late for these tests."""
MODES, STREAMS = list(Mode), [False, True]


async def answers(engine: Engine, request: web.Request, seen: Seen) -> web.StreamResponse:
    """The whole right answer, as a stream of events if asked so; a prefill leg in sequential mode gets its parameters."""
    params = seen.body.get("kv_transfer_params") or {}
    if params.get("do_remote_decode"):
        return web.json_response({**ANSWER, "kv_transfer_params": {"remote_engine_id": engine.name}})
    if not seen.body.get("stream"):
        return web.json_response(ANSWER)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in EVENTS:
        await response.write(event)
    return response


async def needs_kv(engine: Engine, request: web.Request, seen: Seen) -> web.StreamResponse:
    """Decode whose prefill never sends: waits for KV where it was promised some."""
    return await (hang if seen.body.get("kv_transfer_params") else answers)(engine, request, seen)


async def resets_midway(engine: Engine, request: web.Request, seen: Seen) -> web.StreamResponse:
    """A header, the beginning of a body, then a reset."""
    response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"choices":')
    assert request.transport is not None
    request.transport.abort()
    return response


async def dies_midstream(engine: Engine, request: web.Request, seen: Seen) -> web.StreamResponse:
    """Decode that dies once the client has the beginning of its answer."""
    stream = bool(seen.body.get("stream"))
    headers = {"Content-Type": "text/event-stream"} if stream else {"Content-Type": "application/json", "Content-Length": "99"}
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    await response.write(EVENTS[0] if stream else b'{"choices":')
    await engine.release.wait()
    assert request.transport is not None
    request.transport.close()
    return response


def once_released(how: Behaviour | None) -> Behaviour | None:
    """Fails like this when the leg that is to be ended has come: only then can be seen that it is."""
    if how is None:
        return None

    async def behave(engine: Engine, request: web.Request, seen: Seen) -> web.StreamResponse:
        await engine.release.wait()
        return await how(engine, request, seen)

    return behave


@dataclass
class Promise:
    """A line of the table, or one way to get there.

    Args:
        line: How the line begins.
        prefill: Behaviours of the prefill instances.
        decode: Of the decode instances.
        code: What the client gets; with 200 it is the right answer.
        error: The error's message, where the router makes it; else it is an instance's own.
        ended: Instances whose leg is aborted.
        modes: Where this can happen.
        options: Of the router.
    """

    name: str
    line: str
    prefill: list[Behaviour | None]
    decode: list[Behaviour | None]
    code: int
    error: str = ""
    ended: tuple[str, ...] = ()
    modes: list[Mode] = field(default_factory=lambda: MODES)
    options: dict[str, Any] = field(default_factory=dict)


PREFILL_FAILS = "prefill can't be reached, drops, answers 5xx"
PREFILL_4XX = "prefill answers another 4xx"
DECODE_ANSWERS = "decode answers 4xx or 5xx"
DECODE_GONE = "decode can't be reached, or drops"
DECODE_BREAKS = "decode drops, or is silent"
NO_BYTE = "no first byte"
NO_PREFILL = "the prefill of the request failed"
NO_DECODE = "no decode instance could be reached"
ERROR = {"on_prefill_failure": OnPrefillFailure.ERROR}
FAILURES = {
    "500": once_released(status(500)),
    "503": once_released(status(503)),
    "429": once_released(status(429)),
    "refused": None,
    "reset": once_released(drop),
    "reset_midway": once_released(resets_midway),
}
CONCURRENT = [Mode.CONCURRENT]

PROMISES = [
    *(
        Promise(f"prefill_{name}", PREFILL_FAILS, [failure], [needs_kv], 200, ended=() if failure is None else ("decode0",))
        for name, failure in FAILURES.items()
    ),
    *(
        Promise(
            f"prefill_{name}_policy_error",
            PREFILL_FAILS,
            [failure],
            [needs_kv],
            502,
            NO_PREFILL,
            () if failure is None else ("decode0",),
            options=ERROR,
        )
        for name, failure in FAILURES.items()
    ),
    Promise("prefill_slow", PREFILL_FAILS, [hang], [needs_kv], 200, ended=("prefill0",), options={"prefill_timeout_s": 0.1}),
    Promise(
        "prefill_400_decode_waits",
        PREFILL_4XX,
        [once_released(status(400))],
        [needs_kv],
        200,
        ended=("decode0",),
        options={"client_error_grace_s": 0.01},
    ),
    Promise("prefill_400_decode_refuses_too", PREFILL_4XX, [status(400)], [status(422)], 422),
    Promise(
        "prefill_400_policy_error",
        PREFILL_4XX,
        [once_released(status(400))],
        [needs_kv],
        502,
        NO_PREFILL,
        ("decode0",),
        CONCURRENT,
        options={**ERROR, "client_error_grace_s": 0.01},
    ),
    *(
        Promise(f"decode_{code}", DECODE_ANSWERS, [hang], [once_released(status(code))], code, "", ("prefill0",), CONCURRENT)
        for code in (400, 404, 422, 500, 503)
    ),
    Promise("decode_refused", DECODE_GONE, [hang], [None], 502, NO_DECODE, modes=CONCURRENT),
    Promise("decode_refused_after_prefill", DECODE_GONE, [answers], [None], 502, NO_DECODE, modes=[Mode.SEQUENTIAL]),
    Promise("decode_reset", DECODE_GONE, [hang], [once_released(drop)], 502, NO_DECODE, ("prefill0",), CONCURRENT),
    Promise("decode_reset_after_prefill", DECODE_GONE, [answers], [drop], 502, NO_DECODE, modes=[Mode.SEQUENTIAL]),
    Promise("decode_reset_another_is_there", DECODE_GONE, [answers], [drop, answers], 200),
    Promise("everything_dead", DECODE_GONE, [None], [None], 502, NO_DECODE),
    Promise(
        "both_slow",
        NO_BYTE,
        [hang],
        [hang],
        504,
        "no answer within the time allowed",
        ("prefill0", "decode0"),
        CONCURRENT,
        {"ttft_timeout_s": 1.0},
    ),
    Promise(
        "prefill_slow_for_too_long",
        NO_BYTE,
        [hang],
        [answers],
        504,
        "no answer within the time allowed",
        ("prefill0",),
        [Mode.SEQUENTIAL],
        {"ttft_timeout_s": 1.0, "prefill_timeout_s": 60.0},
    ),
    Promise(
        "decode_slow_after_prefill",
        NO_BYTE,
        [answers],
        [hang],
        504,
        "no answer within the time allowed",
        ("decode0",),
        MODES,
        {"ttft_timeout_s": 1.0},
    ),
]
CASES = [(promise, mode) for promise in PROMISES for mode in promise.modes]


def engines(c: Cluster) -> dict[str, Engine]:
    return {engine.name: engine for engine in (*c.prefills, *c.decodes)}


async def post(c: Cluster, stream: bool) -> aiohttp.ClientResponse:
    return await c.open(json={"prompt": "x", "max_tokens": 8, "stream": stream})


def leg_ended(promise: Promise, mode: Mode) -> list[str]:
    """In sequential mode decode is asked after prefill has failed, and for no KV."""
    return [name for name in promise.ended if mode is Mode.CONCURRENT or promise.prefill == [answers] or name != "decode0"]


@pytest.mark.parametrize("stream", STREAMS, ids=["whole", "stream"])
@pytest.mark.parametrize(("promise", "mode"), CASES, ids=[f"{promise.name}-{mode}" for promise, mode in CASES])
async def test_before_the_first_byte(promise: Promise, mode: Mode, stream: bool) -> None:
    async with cluster(prefill=promise.prefill, decode=promise.decode, mode=mode, **PATIENT, **promise.options) as c:
        request = asyncio.create_task(post(c, stream))
        ended = [engines(c)[name] for name in leg_ended(promise, mode)]
        for engine in ended:
            await within(engine.arrived.wait())
        for engine in (*c.prefills, *c.decodes):
            if engine.behaviour not in (hang, needs_kv):
                engine.release.set()
        response = await within(request)
        body = await within(response.read())
        assert response.status == promise.code
        if promise.code == 200:
            assert body == b"".join(EVENTS) if stream else json.loads(body) == ANSWER
        else:
            error = json.loads(body)["error"]
            assert error["code"] == promise.code
            assert promise.error in error["message"]
            assert response.content_type == "application/json"
        for engine in ended:
            await within(engine.cancelled.wait())


async def what_comes(response: aiohttp.ClientResponse) -> bytes:
    """Of an answer that breaks off.

    Raises:
        AssertionError: it came to a regular end.
    """
    got = b""
    try:
        while chunk := await within(response.content.readany()):
            got += chunk
    except aiohttp.ClientPayloadError:
        return got
    raise AssertionError(f"taken for a full answer: {got!r}")


@pytest.mark.parametrize("stream", STREAMS, ids=["whole", "stream"])
async def test_decode_that_dies_in_the_middle_ends_the_prefill_and_is_no_full_answer(stream: bool) -> None:
    async with cluster(prefill=[hang], decode=[dies_midstream], **PATIENT) as c:
        response = await within(post(c, stream))
        assert response.status == 200
        await within(c.prefills[0].arrived.wait())
        c.decodes[0].release.set()
        got = await what_comes(response)
        if stream:
            events = [json.loads(line.removeprefix(b"data: ")) for line in got.split(b"\n\n") if line]
            assert events[0] == ANSWER
            assert events[1]["error"]["code"] == 502
            assert b"[DONE]" not in got
        await within(c.prefills[0].cancelled.wait())
        assert await c.outcome("stream_broken") == 1


@pytest.mark.parametrize("stream", STREAMS, ids=["whole", "stream"])
async def test_decode_that_falls_silent_in_the_middle_ends_both(stream: bool) -> None:
    async with cluster(prefill=[hang], decode=[dies_midstream], idle_timeout_s=0.3, **PATIENT) as c:
        response = await within(post(c, stream))
        await within(c.prefills[0].arrived.wait())
        with pytest.raises(aiohttp.ClientPayloadError):
            await within(response.read())
        await within(c.prefills[0].cancelled.wait())
        await within(c.decodes[0].cancelled.wait())


ELSEWHERE = {
    "request too large": "test_a_body_over_the_limit_is_a_413",
    "prefill fails in any way": "test_prefill_failing_after_the_first_byte_changes_nothing",
    "no prefill instance is up": "test_a_dead_prefill_is_left_out_at_once_the_next_time",
    "client leaves": "test_client_leaving_midstream_ends_both_legs",
    "client does not read": "test_a_client_that_does_not_read_is_cut",
    "router is told to stop": "test_shutdown_ends_what_does_not_finish",
}
"""Lines of the table whose tests are in other files here."""


def test_every_line_of_the_table_has_a_test() -> None:
    text = TABLE.read_text(encoding="utf-8").partition("## Failures")[2].partition("\n## ")[0]
    lines = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")][1:]
    known = [*{promise.line for promise in PROMISES}, DECODE_BREAKS, *ELSEWHERE]
    for line in lines:
        assert [begin for begin in known if line.startswith(begin)], f"nothing tests: {line}"
    for begin in known:
        assert [line for line in lines if line.startswith(begin)], f"the table does not promise: {begin}"
    sources = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    assert [name for name in ELSEWHERE.values() if f"def {name}(" not in sources] == []
