# SPDX-License-Identifier: Apache-2.0
"""What the two legs carry, and how the answer comes back."""

from __future__ import annotations

import asyncio
import logging
import re

import aiohttp
import pytest
from router_stubs import answer, cluster, events, hang, status, until, within

from kvpush.router import Mode


async def test_both_legs_are_sent_at_once_with_their_parameters():
    async with cluster(prefill=[hang], decode=[hang]) as c:
        body = {
            "model": "m",
            "prompt": "hello",
            "max_tokens": 50,
            "min_tokens": 5,
            "n": 2,
            "stream_options": {"include_usage": True},
            "stream": True,
            "seed": 12345678901234567890,
        }
        request = asyncio.create_task(c.post(json=body, headers={"X-Request-Id": "my-id.1"}))
        # Neither answers before it is released: both arriving proves that neither waits for the other.
        await within(c.prefills[0].arrived.wait())
        await within(c.decodes[0].arrived.wait())
        prefill, decode = c.prefills[0].seen[0], c.decodes[0].seen[0]
        transfer_id = prefill.body["kv_transfer_params"]["transfer_id"]
        assert re.fullmatch(r"[0-9a-f]{32}", transfer_id)
        assert prefill.path == decode.path == "/v1/completions"
        assert prefill.body == {
            "model": "m",
            "prompt": "hello",
            "max_tokens": 1,
            "n": 2,
            "stream": False,
            "seed": 12345678901234567890,
            "kv_transfer_params": {
                "do_remote_decode": True,
                "do_remote_prefill": False,
                "transfer_id": transfer_id,
            },
        }
        assert decode.body == {
            **body,
            "kv_transfer_params": {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "transfer_id": transfer_id,
                "remote_host": "10.1.2.3",
                "remote_port": 15000,
            },
        }
        assert prefill.headers["X-Request-Id"] == decode.headers["X-Request-Id"] == "my-id.1"
        c.prefills[0].release.set()
        c.decodes[0].release.set()
        async with await within(request) as response:
            assert response.status == 200
            assert (await response.json())["served_by"] == "decode0"
            assert response.headers["X-Engine"] == "decode0"
            assert response.headers["X-Request-Id"] == "my-id.1"
        assert await c.outcome("ok") == 1


@pytest.mark.parametrize(
    ("path", "given", "expected"),
    [
        ("/v1/chat/completions", {"max_tokens": 9}, {"max_tokens": 1, "max_completion_tokens": 1}),
        ("/v1/chat/completions", {"max_completion_tokens": 9}, {"max_tokens": 1, "max_completion_tokens": 1}),
        ("/v1/completions", {"max_completion_tokens": 9}, {"max_tokens": 1, "max_completion_tokens": 1}),
        ("/v1/completions", {}, {"max_tokens": 1}),
    ],
)
async def test_prefill_makes_one_token(path, given, expected):
    async with cluster() as c:
        async with c.post(path, json={"messages": [], **given}) as response:
            assert response.status == 200
        await until(lambda: bool(c.prefills[0].seen))
        body = c.prefills[0].seen[0].body
        assert {k: v for k, v in body.items() if k.startswith("max_")} == expected
        assert c.prefills[0].seen[0].path == path


async def test_a_batch_of_prompts_is_one_transfer_id():
    async with cluster() as c:
        async with c.post(json={"prompt": [[1, 2], [3, 4]]}) as response:
            assert response.status == 200
        await until(lambda: bool(c.prefills[0].seen))
        assert c.prefills[0].seen[0].body["prompt"] == c.decodes[0].seen[0].body["prompt"] == [[1, 2], [3, 4]]
        assert c.prefills[0].params[0]["transfer_id"] == c.decodes[0].params[0]["transfer_id"]


@pytest.mark.parametrize("given", ["with space", "x" * 129, "a/b", "é"])
async def test_an_odd_request_id_is_replaced(given):
    async with cluster() as c:
        async with c.post(headers={"X-Request-Id": given}) as response:
            made = response.headers["X-Request-Id"]
        assert re.fullmatch(r"[0-9a-f]{32}", made)
        assert c.decodes[0].seen[0].headers["X-Request-Id"] == made


async def test_every_request_has_its_own_ids():
    async with cluster() as c:
        for _ in range(3):
            async with c.post() as response:
                assert response.status == 200
        assert len({p["transfer_id"] for p in c.decodes[0].params}) == 3
        assert len({s.headers["X-Request-Id"] for s in c.decodes[0].seen}) == 3


async def test_headers_go_on_but_not_those_of_the_hop():
    async with cluster() as c:
        headers = {"Authorization": "Bearer k", "traceparent": "00-1", "Connection": "X-Mine", "X-Mine": "1", "TE": "t"}
        async with c.post(headers=headers) as response:
            assert response.status == 200
        await until(lambda: bool(c.prefills[0].seen))
        for seen in (c.prefills[0].seen[0], c.decodes[0].seen[0]):
            assert seen.headers["Authorization"] == "Bearer k"
            assert seen.headers["traceparent"] == "00-1"
            assert seen.headers["Accept-Encoding"] == "identity"
            assert "X-Mine" not in seen.headers
            assert "TE" not in seen.headers


async def test_chunks_pass_through_one_by_one():
    chunks = (b"data: one\n\n", b"data: two", b"\n\ndata: [DONE]\n\n")
    async with cluster(decode=[events(*chunks)]) as c:
        response = await within(c.open(json={"prompt": "x", "stream": True}))
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        for i, chunk in enumerate(chunks):
            if i:
                # The stub writes this chunk only now: the ones before it have reached the client already.
                c.decodes[0].release.set()
            assert await within(response.content.readany()) == chunk
        assert await within(response.content.readany()) == b""
        assert await c.outcome("ok") == 1
        assert await c.metric("time_to_first_byte_seconds_count", endpoint="completions") == 1


async def test_prefill_may_answer_after_the_first_byte():
    async with cluster(prefill=[hang], decode=[events(b"data: one\n\n", b"data: two\n\n")]) as c:
        response = await within(c.open(json={"prompt": "x", "stream": True}))
        assert await within(response.content.readany()) == b"data: one\n\n"
        c.prefills[0].release.set()
        await until(lambda: c.router.prefills.instances[0].in_flight == 0)
        c.decodes[0].release.set()
        assert await within(response.content.read()) == b"data: two\n\n"


async def test_a_prefill_leg_that_outlives_the_answer_is_let_finish_for_a_while():
    async with cluster(prefill=[hang]) as c:
        async with c.post() as response:
            assert await response.json()
        assert await c.outcome("ok") == 1
        assert c.router.prefills.instances[0].in_flight == 1
        c.prefills[0].release.set()
        await until(lambda: c.router.prefills.instances[0].in_flight == 0)
        assert not c.prefills[0].cancelled.is_set()


async def test_a_prefill_leg_that_outlives_the_answer_too_long_is_closed():
    async with cluster(prefill=[hang], prefill_linger_s=0.01) as c:
        async with c.post() as response:
            assert await response.json()
        await within(c.prefills[0].cancelled.wait())


async def test_no_prefill_instances_is_a_plain_proxy():
    async with cluster(prefill=[]) as c:
        raw = b'{"prompt":  "hello", "temperature": 1.10}'
        async with c.post(data=raw) as response:
            assert (await response.json())["served_by"] == "decode0"
        assert c.decodes[0].seen[0].body == {"prompt": "hello", "temperature": 1.1}
        assert await c.metric("decode_only_total") == 0


async def test_sequential_passes_the_parameters_on_unchanged():
    async with cluster(prefill=[hang], mode=Mode.SEQUENTIAL) as c:
        request = asyncio.create_task(c.post())
        await within(c.prefills[0].arrived.wait())
        assert not c.decodes[0].seen
        c.prefills[0].release.set()
        async with await within(request) as response:
            assert (await response.json())["served_by"] == "decode0"
        params = c.prefills[0].params[0]
        assert params == {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
            "transfer_id": params["transfer_id"],
        }
        assert c.decodes[0].params == [{"remote_engine_id": "prefill0", "remote_block_ids": [[1, 2]], "tp_size": 1}]


async def test_sequential_without_parameters_is_decode_alone():
    async def plain(engine, request, seen):
        return aiohttp.web.json_response({"choices": []})

    async with cluster(prefill=[plain], mode=Mode.SEQUENTIAL) as c:
        async with c.post() as response:
            assert response.status == 200
        assert c.decodes[0].params == [None]
        assert await c.metric("decode_only_total") == 1


async def test_sequential_bad_request_gets_the_words_of_decode():
    async with cluster(prefill=[status(400)], decode=[status(400)], mode=Mode.SEQUENTIAL) as c, c.post() as response:
        assert response.status == 400
        assert (await response.json())["error"]["message"] == "decode0 says 400"


async def test_load_is_spread():
    async with cluster(prefill=[answer, answer], decode=[hang, hang]) as c:
        requests = [asyncio.create_task(c.post()) for _ in range(4)]
        await until(lambda: sum(len(d.seen) for d in c.decodes) == 4)
        assert [len(d.seen) for d in c.decodes] == [2, 2]
        assert [i.in_flight for i in c.router.decodes.instances] == [2, 2]
        ports = {p["remote_port"] for d in c.decodes for p in d.params}
        assert ports == {15000, 15001}
        # The one with fewer legs open comes first.
        c.decodes[1].release.set()
        await until(lambda: c.router.decodes.instances[1].in_flight == 0)
        async with c.post() as response:
            assert (await response.json())["served_by"] == "decode1"
        c.decodes[0].release.set()
        for request in requests:
            (await within(request)).close()


async def test_logs_never_hold_the_prompt(caplog):
    caplog.set_level(logging.DEBUG)
    async with cluster(prefill=[status(500), None], decode=[status(400)]) as c:
        async with c.post(json={"prompt": "SECRET-PROMPT"}) as response:
            assert response.status == 400
        async with c.post(data=b'{"prompt": "SECRET-PROMPT') as response:
            assert "SECRET" not in await response.text()
    own = [r.getMessage() for r in caplog.records]
    assert any("leg failed" in line for line in own)
    assert not [line for line in own if "SECRET" in line]
