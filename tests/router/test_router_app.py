# SPDX-License-Identifier: Apache-2.0
"""Limits, health, metrics, life cycle and options of the router."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys

import aiohttp
import pytest
import typer
from router_stubs import Engine, answer, cluster, drop, events, hang, until, unused_port, within
from typer.testing import CliRunner

from kvpush.errors import ConfigError
from kvpush.router import DEFAULT_CONTROL_PORT, PrefillTarget, RouterConfig, parse_prefill, parse_url
from kvpush.router.cli import router_command


@pytest.mark.parametrize(
    "raw", [b"", b"{", b'"text"', b"[1]", b'{"a": NaN}', b"\xff", b"[" * 100_000, b'{"a": ' + b"1" * 5000 + b"}"]
)
async def test_what_is_not_a_json_object_is_a_400(raw):
    async with cluster() as c:
        async with c.post(data=raw) as response:
            assert response.status == 400
            error = (await response.json())["error"]
            assert error["type"] == "invalid_request_error"
            assert error["code"] == 400
        assert await c.outcome("bad_request") == 1
        assert not c.prefills[0].seen
        assert not c.decodes[0].seen


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_limit_is_a_413(chunked):
    async def pieces():
        for _ in range(20):
            yield b" " * 100

    async with cluster(max_body_bytes=1000) as c:
        async with c.post(data=pieces() if chunked else b" " * 1001) as response:
            assert response.status == 413
            assert (await response.json())["error"]["code"] == 413
        exact = b'{"prompt": "x"}'.ljust(1000)
        async with c.post(data=exact) as response:
            assert response.status == 200
        assert len(c.decodes[0].seen) == 1


async def test_a_large_prompt_passes():
    async with cluster() as c:
        prompt = list(range(400_000))
        async with c.post(data=io.BytesIO(json.dumps({"prompt": prompt}).encode())) as response:
            assert response.status == 200
        assert c.decodes[0].seen[0].body["prompt"] == prompt


async def test_a_body_that_does_not_come_is_a_408():
    async with cluster(body_timeout_s=0.05) as c:
        reader, writer = await asyncio.open_connection(*c.runner.addresses[0][:2])
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert b" 408 " in await within(reader.readline())
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("name", ["kv_transfer_params", "ec_transfer_params"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("prefill", [[], [answer]])
async def test_a_client_does_not_steer_remote_memory(name, nested, prefill):
    extra = {name: {"do_remote_prefill": True, "remote_host": "evil"}}
    if nested:
        extra = {"vllm_xargs": extra}
    async with cluster(prefill=prefill) as c:
        async with c.post(json={"prompt": "x", **extra}) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == name
        assert not c.decodes[0].seen


async def test_a_trusted_client_may_steer_itself():
    async with cluster(allow_client_kv_params=True) as c:
        mine = {"do_remote_prefill": True, "transfer_id": "t", "remote_host": "h", "remote_port": 1}
        async with c.post(json={"prompt": "x", "kv_transfer_params": mine}) as response:
            assert response.status == 200
        assert c.decodes[0].params == [mine]
        assert not c.prefills[0].seen


async def test_unknown_paths_and_methods_have_openai_errors():
    async with cluster() as c:
        async with c.client.get(c.url + "/v1/nothing") as response:
            assert (response.status, (await response.json())["error"]["code"]) == (404, 404)
        async with c.client.get(c.url + "/v1/completions") as response:
            assert (response.status, (await response.json())["error"]["code"]) == (405, 405)


async def test_models_come_from_a_decode_that_answers():
    async with cluster(decode=[None, answer]) as c:
        for _ in range(3):
            async with c.client.get(c.url + "/v1/models") as response:
                assert (await response.json())["data"] == [{"id": "decode1"}]


async def test_models_without_decode_is_a_502():
    async with cluster(decode=[None]) as c, c.client.get(c.url + "/v1/models") as response:
        assert response.status == 502


@pytest.mark.parametrize(
    ("prefill", "decode", "code", "states"),
    [
        ([answer], [answer], 200, ([True], [True])),
        ([None], [answer, None], 200, ([False], [True, False])),
        ([answer], [None], 503, ([True], [False])),
        ([], [answer], 200, ([], [True])),
    ],
)
async def test_health(prefill, decode, code, states):
    async with cluster(prefill=prefill, decode=decode) as c, c.client.get(c.url + "/health") as response:
        assert response.status == code
        body = await response.json()
        assert ([i["up"] for i in body["prefill"]], [i["up"] for i in body["decode"]]) == states
        assert body["status"] == ("ok" if code == 200 else "unavailable")


async def test_health_is_false_while_the_engine_is():
    async with cluster() as c:
        c.decodes[0].healthy = False
        async with c.client.get(c.url + "/health") as response:
            assert response.status == 503
        c.decodes[0].healthy = True
        async with c.client.get(c.url + "/health") as response:
            assert response.status == 200


async def test_an_instance_comes_back_after_its_backoff():
    async with cluster(prefill=[], decode=[None, answer], probe_backoff_s=0.01, probe_backoff_max_s=0.02) as c:
        for _ in range(2):
            async with c.post() as response:
                assert (await response.json())["served_by"] == "decode1"
        assert not c.router.decodes.instances[0].up
        late = Engine("late", answer, port=c.decodes[0].port)
        await late.start()
        await until(lambda: c.router.decodes.instances[0].up)
        served = set()
        for _ in range(2):
            async with c.post() as response:
                served.add((await response.json())["served_by"])
        assert served == {"late", "decode1"}
        await late.stop()


async def test_the_last_instance_is_tried_although_it_is_down():
    async with cluster(prefill=[], decode=[None]) as c:
        async with c.post() as response:
            assert response.status == 502
        back = Engine("back", answer, port=c.decodes[0].port)
        await back.start()
        async with c.post() as response:
            assert (await response.json())["served_by"] == "back"
        assert c.router.decodes.instances[0].up
        await back.stop()


async def test_metrics_have_no_label_of_a_client():
    async with cluster(decode=[drop]) as c:
        async with c.post(json={"model": "my-own-model", "prompt": "x"}, headers={"X-Request-Id": "rid-1"}) as response:
            assert response.status == 502
        async with c.client.get(c.url + "/metrics") as response:
            assert response.status == 200
            assert response.content_type == "text/plain"
            text = await response.text()
    assert 'kvpush_router_requests_total{endpoint="completions",outcome="no_decode"} 1.0' in text
    assert 'kvpush_router_leg_errors_total{leg="decode",reason="disconnected"} 1.0' in text
    assert "kvpush_router_in_flight 0.0" in text
    assert "kvpush_router_time_to_first_byte_seconds_bucket" in text
    assert "rid-1" not in text
    assert "my-own-model" not in text


async def test_shutdown_lets_a_stream_finish():
    async with cluster(decode=[events(b"data: 1\n\n", b"data: 2\n\n")]) as c:
        response = await within(c.open())
        assert await within(response.content.readany()) == b"data: 1\n\n"
        cleanup = asyncio.create_task(c.runner.cleanup())
        await until(lambda: c.router.draining)
        c.decodes[0].release.set()
        assert await within(response.content.read()) == b"data: 2\n\n"
        await within(cleanup)


async def test_no_new_requests_while_draining():
    async with cluster() as c:
        c.router.draining = True
        async with c.post() as response:
            assert response.status == 503
            assert response.headers["Connection"] == "close"
        async with c.client.get(c.url + "/health") as response:
            assert response.status == 503


async def test_shutdown_ends_what_does_not_finish():
    async with cluster(prefill=[hang], decode=[events(b"data: 1\n\n", then="hang")], shutdown_timeout_s=0.05) as c:
        response = await within(c.open())
        assert await within(response.content.readany()) == b"data: 1\n\n"
        await within(c.runner.cleanup())
        with pytest.raises(aiohttp.ClientPayloadError):
            await within(response.content.read())
        await within(c.decodes[0].cancelled.wait())
        await within(c.prefills[0].cancelled.wait())
        assert await c.outcome("shutdown") == 1


async def test_the_command_serves_and_stops_on_sigterm():
    engine = Engine("decode0", answer)
    await engine.start()
    port = unused_port()
    command = [sys.executable, "-m", "kvpush.router", "--decode", engine.url, "--port", str(port)]
    process = await asyncio.create_subprocess_exec(
        *command, stderr=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    )
    assert process.stderr is not None
    while b"listening" not in (line := await within(process.stderr.readline())):
        assert line
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "x"}) as response,
    ):
        assert (await response.json())["served_by"] == "decode0"
    process.send_signal(signal.SIGTERM)
    await within(process.communicate())
    assert process.returncode == 0
    await engine.stop()


def test_the_command_refuses_what_can_not_work():
    app = typer.Typer()
    app.command()(router_command)
    runner = CliRunner()
    for arguments in (
        [],
        ["--decode", "ftp://x"],
        ["--decode", "http://x", "--prefill", "http://y@:0"],
        ["--decode", "http://x", "--log-level", "loud"],
    ):
        assert runner.invoke(app, arguments).exit_code == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://h:8100", PrefillTarget("http://h:8100", "h", DEFAULT_CONTROL_PORT)),
        ("http://h:8100/", PrefillTarget("http://h:8100", "h", DEFAULT_CONTROL_PORT)),
        ("http://h:8100@c:9", PrefillTarget("http://h:8100", "c", 9)),
        ("http://h:8100@c", PrefillTarget("http://h:8100", "c", DEFAULT_CONTROL_PORT)),
        ("http://h:8100@:9", PrefillTarget("http://h:8100", "h", 9)),
        ("http://[::1]:8100@[fe80::1]:9", PrefillTarget("http://[::1]:8100", "fe80::1", 9)),
        ("https://h/base", PrefillTarget("https://h/base", "h", DEFAULT_CONTROL_PORT)),
    ],
)
def test_prefill_targets(text, expected):
    assert parse_prefill(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "h:8100",
        "http://",
        "http://h:x",
        "http://u:p@h:1@c:1",
        "http://h@",
        "http://h@c:0",
        "http://h@c/x",
        "http://h?q",
        "http://h@c:99999",
    ],
)
def test_bad_prefill_targets(text):
    with pytest.raises(ConfigError):
        parse_prefill(text)


def test_bad_configs():
    one = parse_prefill("http://h:1")
    for options in (
        {"decode": ()},
        {"decode": ("http://a", "http://a")},
        {"decode": ("http://a",), "prefill": (one, one)},
        {"decode": ("http://a",), "prefill": (one, parse_prefill("http://h:2"))},
        {"decode": ("http://a",), "max_tries": 0},
        {"decode": ("http://a",), "ttft_timeout_s": 0},
        {"decode": ("http://a",), "prefill_timeout_s": -1},
    ):
        with pytest.raises(ConfigError):
            RouterConfig(**options)
    assert parse_url("http://a:1/") == "http://a:1"
