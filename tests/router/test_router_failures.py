# SPDX-License-Identifier: Apache-2.0
"""Every way a leg can fail, and what the client gets for it."""

from __future__ import annotations

import asyncio
import contextlib
import json

import aiohttp
import pytest
from router_stubs import answer, cluster, drop, events, hang, status, until, within

from kvpush.router import Mode, OnPrefillFailure


async def test_prefill_4xx_gets_decodes_own_answer():
    async with cluster(prefill=[status(400)], decode=[hang]) as c:
        c.decodes[0].behaviour = status(422)
        async with c.post() as response:
            assert response.status == 422
            assert (await response.json())["error"]["message"] == "decode0 says 422"
        assert await c.outcome("client_error") == 1
        assert len(c.decodes[0].seen) == 1


async def test_prefill_4xx_that_decode_accepts_does_not_leave_it_waiting():
    async with cluster(prefill=[status(404)], decode=[hang], client_error_grace_s=0.01) as c:
        request = asyncio.create_task(c.post())
        await within(c.decodes[0].cancelled.wait())
        await until(lambda: len(c.decodes[0].seen) == 2)
        c.decodes[0].release.set()
        async with await within(request) as response:
            assert response.status == 200
        assert c.decodes[0].params[1] is None
        assert len(c.prefills[0].seen) == 1


async def test_prefill_4xx_in_sequential_mode_leaves_the_answer_to_decode():
    async with cluster(prefill=[status(404), answer], mode=Mode.SEQUENTIAL) as c:
        async with c.post() as response:
            assert response.status == 200
        assert c.decodes[0].params == [None]
        assert not c.prefills[1].seen
        assert await c.metric("decode_only_total") == 1
    async with cluster(prefill=[status(400)], decode=[status(400)], mode=Mode.SEQUENTIAL) as c, c.post() as response:
        assert response.status == 400
        assert (await response.json())["error"]["message"] == "decode0 says 400"


@pytest.mark.parametrize("failure", [status(500), status(503), status(429), drop, None])
async def test_prefill_failure_in_sequential_mode_is_retried_on_another(failure):
    async with cluster(prefill=[failure, answer], mode=Mode.SEQUENTIAL) as c:
        async with c.post() as response:
            assert response.status == 200
        (params,) = c.decodes[0].params
        assert params["remote_engine_id"] == "prefill1"
        assert await c.metric("retries_total", reason="prefill_failed") == 1
        assert await c.metric("decode_only_total") == 0


@pytest.mark.parametrize("failure", [status(500), status(503), status(429), drop])
async def test_prefill_failure_cancels_decode_and_retries_on_another(failure):
    async with cluster(prefill=[failure, hang], decode=[hang]) as c:
        request = asyncio.create_task(c.post())
        await within(c.decodes[0].cancelled.wait())
        await within(c.prefills[1].arrived.wait())
        await until(lambda: len(c.decodes[0].seen) == 2)
        first, second = c.decodes[0].params
        assert first["transfer_id"] != second["transfer_id"]
        assert (first["remote_port"], second["remote_port"]) == (15000, 15001)
        assert c.prefills[1].params[0]["transfer_id"] == second["transfer_id"]
        c.prefills[1].release.set()
        c.decodes[0].release.set()
        async with await within(request) as response:
            assert response.status == 200
        assert await c.outcome("ok") == 1
        assert await c.metric("retries_total", reason="prefill_failed") == 1
        assert await c.metric("decode_only_total") == 0


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("failure", [status(500), drop, None])
async def test_without_another_prefill_decode_alone_answers(failure, mode):
    async def waits_for_kv(engine, request, seen):
        return await (hang if seen.body.get("kv_transfer_params") else answer)(engine, request, seen)

    async with cluster(prefill=[failure], decode=[waits_for_kv], mode=mode) as c:
        async with c.post() as response:
            assert response.status == 200
        assert c.decodes[0].params[-1] is None
        assert await c.metric("decode_only_total") == 1
        assert await c.metric("retries_total", reason="prefill_failed") == 1


async def test_a_dead_prefill_is_left_out_at_once_the_next_time():
    async with cluster(prefill=[None], decode=[answer]) as c:
        for _ in range(2):
            async with c.post() as response:
                assert response.status == 200
        assert await c.metric("leg_errors_total", leg="prefill", reason="connect") == 1
        assert c.decodes[0].params[-1] is None
        assert await c.metric("instance_up", role="prefill", instance=c.prefills[0].url) == 0


@pytest.mark.parametrize("mode", list(Mode))
async def test_a_slow_prefill_is_given_up(mode):
    async def waits_for_kv(engine, request, seen):
        return await (hang if seen.body.get("kv_transfer_params") else answer)(engine, request, seen)

    async with cluster(prefill=[hang], decode=[waits_for_kv], prefill_timeout_s=0.05, mode=mode) as c:
        async with c.post() as response:
            assert response.status == 200
        await within(c.prefills[0].cancelled.wait())
        assert c.decodes[0].params[-1] is None
        assert await c.metric("leg_errors_total", leg="prefill", reason="timeout") == 1


async def test_policy_decode_only_does_not_try_another_prefill():
    policy = OnPrefillFailure.DECODE_ONLY
    async with cluster(prefill=[status(500), answer], decode=[hang], on_prefill_failure=policy) as c:
        request = asyncio.create_task(c.post())
        await until(lambda: len(c.decodes[0].seen) == 2)
        c.decodes[0].release.set()
        async with await within(request) as response:
            assert response.status == 200
        assert c.decodes[0].params[1] is None
        assert not c.prefills[1].seen


@pytest.mark.parametrize("mode", list(Mode))
async def test_policy_error_is_a_502(mode):
    policy = OnPrefillFailure.ERROR
    async with cluster(prefill=[status(500), answer], decode=[hang], on_prefill_failure=policy, mode=mode) as c:
        async with c.post() as response:
            assert response.status == 502
            error = (await response.json())["error"]
        assert error == {"message": "the prefill of the request failed", "type": "server_error", "param": None, "code": 502}
        assert await c.outcome("prefill_failed") == 1


async def test_the_last_try_is_decode_alone():
    failing = [status(500)] * 5
    async with cluster(prefill=failing, decode=[hang], max_tries=3) as c:
        request = asyncio.create_task(c.post())
        await until(lambda: len(c.decodes[0].seen) == 3)
        c.decodes[0].release.set()
        async with await within(request) as response:
            assert response.status == 200
        assert [p is None for p in c.decodes[0].params] == [False, False, True]


@pytest.mark.parametrize(("failure", "reason"), [(status(500), "status_5xx"), (drop, "disconnected")])
async def test_prefill_failing_after_the_first_byte_changes_nothing(failure, reason):
    async def fails_late(engine, request, seen):
        await engine.release.wait()
        return await failure(engine, request, seen)

    async with cluster(prefill=[fails_late], decode=[events(b"data: 1\n\n", b"data: 2\n\n")]) as c:
        response = await within(c.open())
        assert await within(response.content.readany()) == b"data: 1\n\n"
        c.prefills[0].release.set()
        await until(lambda: c.router.prefills.instances[0].in_flight == 0)
        c.decodes[0].release.set()
        assert await within(response.content.read()) == b"data: 2\n\n"
        assert await c.outcome("ok") == 1
        assert await c.metric("leg_errors_total", leg="prefill", reason=reason) == 1


@pytest.mark.parametrize(("code", "outcome"), [(400, "client_error"), (404, "client_error"), (500, "upstream_error")])
async def test_decode_errors_pass_with_their_body_and_end_the_prefill(code, outcome):
    async with cluster(prefill=[hang], decode=[status(code)]) as c:
        async with c.post() as response:
            assert response.status == code
            assert response.content_type == "application/json"
            assert (await response.json())["error"] == {"message": f"decode0 says {code}", "code": code}
        assert await c.outcome(outcome) == 1
        assert len(c.decodes[0].seen) == 1
        await until(lambda: c.router.prefills.instances[0].in_flight == 0)


async def test_decode_5xx_of_a_failed_prefill_is_a_prefill_failure():
    async def fails_without_kv(engine, request, seen):
        if not seen.body.get("kv_transfer_params"):
            return await answer(engine, request, seen)
        return await status(500)(engine, request, seen)

    # However the two failures fall, the client gets an answer or decode's own error, never a hang.
    async with cluster(prefill=[status(500)], decode=[fails_without_kv]) as c, c.post() as response:
        assert response.status in (200, 500)


@pytest.mark.parametrize("failure", [drop, None])
@pytest.mark.parametrize("mode", list(Mode))
async def test_decode_dead_before_its_first_byte_is_retried_elsewhere(failure, mode):
    async with cluster(decode=[failure, answer], mode=mode) as c:
        async with c.post() as response:
            assert (await response.json())["served_by"] == "decode1"
        await until(lambda: len(c.prefills[0].seen) >= (1 if mode is Mode.CONCURRENT else 2))
        if mode is Mode.CONCURRENT:
            sent = c.prefills[0].params[-1]["transfer_id"]
            assert c.decodes[1].params[0]["transfer_id"] == sent
            if c.decodes[0].seen:
                assert c.decodes[0].params[0]["transfer_id"] != sent
        assert await c.metric("retries_total", reason="decode_failed") == 1


async def test_decode_dead_after_its_header_is_retried_elsewhere():
    async def header_only(engine, request, seen):
        response = aiohttp.web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"")
        request.transport.close()
        return response

    async with cluster(decode=[header_only, answer]) as c, c.post() as response:
        assert (await response.json())["served_by"] == "decode1"


@pytest.mark.parametrize("failures", [[drop], [None], [drop, None]])
async def test_no_decode_left_is_a_502(failures):
    async with cluster(prefill=[hang], decode=failures) as c:
        async with c.post() as response:
            assert response.status == 502
            assert response.headers["X-Request-Id"]
            assert (await response.json())["error"] == {
                "message": "no decode instance could be reached",
                "type": "server_error",
                "param": None,
                "code": 502,
            }
        assert await c.outcome("no_decode") == 1
        await until(lambda: c.router.prefills.instances[0].in_flight == 0)


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_an_idle_connection_that_the_server_closes_costs_no_request(leg, mode):
    """As of an instance that stood still for longer than it keeps idle connections: it comes back, closes them, and has not
    read the requests that were sent on them meanwhile. It is the only one, and well."""

    def closing(request):
        # On the second request of a connection.
        return request.protocol in known or known.add(request.protocol)

    known = set()

    async def stale(engine, request, seen):
        return await (drop if closing(request) else answer)(engine, request, seen)

    async with cluster(
        prefill=[stale if leg == "prefill" else answer],
        decode=[stale if leg == "decode" else answer],
        mode=mode,
        on_prefill_failure=OnPrefillFailure.ERROR,
    ) as c:
        for number in range(6):
            async with c.post() as response:
                assert response.status == 200, await response.text()
                assert (await response.json())["served_by"] == "decode0"
            await until(lambda number=number: not c.router.prefills.instances[0].in_flight)
        assert await c.metric("retries_total", reason="stale_connection") >= 3
        assert await c.metric("retries_total", reason="decode_failed") == 0


async def test_everything_dead_is_a_502():
    async with cluster(prefill=[None], decode=[None]) as c:
        for _ in range(2):
            async with c.post() as response:
                assert response.status == 502


async def test_decode_dead_midstream_is_not_a_full_answer():
    async with cluster(decode=[events(b"data: 1\n\n", b"data: 2", then="drop")]) as c:
        response = await within(c.open(json={"prompt": "x", "stream": True}))
        assert await within(response.content.readany()) == b"data: 1\n\n"
        c.decodes[0].release.set()
        await until(lambda: not c.decodes[0].release.is_set())
        c.decodes[0].release.set()
        got = await within(response.content.readuntil(b"}}\n\n"))
        with pytest.raises(aiohttp.ClientPayloadError):
            await within(response.content.read())
        head, _, event = got.partition(b"\n\n")
        assert head == b"data: 2"
        assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == 502
        assert await c.outcome("stream_broken") == 1


async def test_decode_silent_midstream_is_cut():
    async with cluster(decode=[events(b"data: 1\n\n", then="hang")], idle_timeout_s=0.1) as c:
        response = await within(c.open(json={"prompt": "x", "stream": True}))
        with pytest.raises(aiohttp.ClientPayloadError):
            await within(response.content.read())
        await within(c.decodes[0].cancelled.wait())
        assert await c.outcome("stream_broken") == 1
        assert await c.metric("leg_errors_total", leg="decode", reason="timeout") == 1


async def test_an_answer_cut_short_of_its_length_is_cut_for_the_client_too():
    async def short(engine, request, seen):
        response = aiohttp.web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "100"})
        await response.prepare(request)
        await response.write(b'{"choices":')
        request.transport.close()
        return response

    async with cluster(decode=[short]) as c:
        response = await within(c.open())
        assert response.headers["Content-Length"] == "100"
        with pytest.raises(aiohttp.ClientPayloadError):
            await within(response.content.read())
        assert await c.outcome("stream_broken") == 1


@pytest.mark.parametrize("mode", list(Mode))
async def test_both_slow_is_a_504(mode):
    async with cluster(prefill=[hang], decode=[hang], ttft_timeout_s=0.1, prefill_timeout_s=60.0, mode=mode) as c:
        async with c.post() as response:
            assert response.status == 504
            assert (await response.json())["error"]["type"] == "timeout_error"
        await within(c.prefills[0].cancelled.wait())
        if mode is Mode.CONCURRENT:
            await within(c.decodes[0].cancelled.wait())
        assert await c.outcome("timeout") == 1
        assert await c.metric("leg_errors_total", leg="prefill", reason="timeout") == 1


async def test_slow_decode_alone_is_a_504():
    async with cluster(prefill=[], decode=[hang], ttft_timeout_s=0.1) as c:
        async with c.post() as response:
            assert response.status == 504
        await within(c.decodes[0].cancelled.wait())
        assert await c.metric("leg_errors_total", leg="decode", reason="timeout") == 1


async def test_client_leaving_before_the_first_byte_ends_both_legs():
    async with cluster(prefill=[hang], decode=[hang]) as c:
        request = asyncio.create_task(c.post())
        await within(c.prefills[0].arrived.wait())
        await within(c.decodes[0].arrived.wait())
        request.cancel()
        await within(c.prefills[0].cancelled.wait())
        await within(c.decodes[0].cancelled.wait())
        assert await c.outcome("client_disconnected") == 1


async def test_client_leaving_midstream_ends_both_legs():
    async with cluster(prefill=[hang], decode=[events(b"data: 1\n\n", then="hang")]) as c:
        response = await within(c.open(json={"prompt": "x", "stream": True}))
        assert await within(response.content.readany()) == b"data: 1\n\n"
        response.close()
        await within(c.prefills[0].cancelled.wait())
        await within(c.decodes[0].cancelled.wait())
        assert await c.outcome("client_disconnected") == 1


async def test_client_leaving_in_sequential_mode_ends_the_prefill():
    async with cluster(prefill=[hang], mode=Mode.SEQUENTIAL) as c:
        request = asyncio.create_task(c.post())
        await within(c.prefills[0].arrived.wait())
        request.cancel()
        await within(c.prefills[0].cancelled.wait())
        assert await c.outcome("client_disconnected") == 1
        assert not c.decodes[0].seen


async def test_a_client_that_does_not_read_is_cut():
    async def flood(engine, request, seen):
        response = aiohttp.web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while True:
            await response.write(b"x" * 262144)

    async with cluster(decode=[flood], idle_timeout_s=0.2) as c:
        host, port = c.runner.addresses[0][:2]
        reader, writer = await asyncio.open_connection(host, port, limit=1024)
        body = b'{"prompt": "x"}'
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        assert await c.outcome("client_stalled") == 1
        await within(c.decodes[0].cancelled.wait())
        writer.close()
        with contextlib.suppress(ConnectionError):
            await within(reader.read())
            await writer.wait_closed()


async def test_http_1_0_has_no_end_but_a_reset():
    async with cluster(decode=[events(b"data: 1\n\n", b"data: 2\n\n", then="drop")]) as c:
        reader, writer = await asyncio.open_connection(*c.runner.addresses[0][:2])
        body = b'{"prompt": "x"}'
        writer.write(b"POST /v1/completions HTTP/1.0\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        assert await within(reader.readuntil(b"data: 1\n\n"))
        c.decodes[0].release.set()
        assert await within(reader.readuntil(b"data: 2\n\n"))
        c.decodes[0].release.set()
        with pytest.raises(ConnectionResetError):
            await within(reader.read())
        writer.close()


async def test_client_leaving_before_its_body_is_complete():
    async with cluster() as c:
        _, writer = await asyncio.open_connection(*c.runner.addresses[0][:2])
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        await until(lambda: bool(c.router.requests))
        writer.close()
        await writer.wait_closed()
        assert await c.outcome("client_disconnected") == 1
        assert not c.prefills[0].seen


@pytest.mark.parametrize("failure", [status(500), drop])
async def test_an_engine_dead_behind_a_live_server_is_left_out(failure):
    async with cluster(prefill=[], decode=[failure, answer]) as c:
        c.decodes[0].healthy = False
        async with c.post() as response:
            assert response.status in (200, 500)
        await until(lambda: not c.router.decodes.instances[0].up)
        for _ in range(3):
            async with c.post() as response:
                assert (await response.json())["served_by"] == "decode1"
        assert len(c.decodes[0].seen) == 1


async def test_rolling_restarts_of_prefill_instances_lose_no_request():
    """Each is gone for a while in turn, in the middle of its legs, and back on its port: every request is answered."""

    async def waits_for_kv(engine, request, seen):
        return await (hang if seen.body.get("kv_transfer_params") else answer)(engine, request, seen)

    async with cluster(prefill=[hang, hang], decode=[waits_for_kv], probe_backoff_s=0.01, probe_backoff_max_s=0.01) as c:
        statuses = []

        async def client():
            async with c.post() as response:
                statuses.append(response.status)

        for engine in c.prefills:
            engine.arrived.clear()
            requests = [asyncio.create_task(client()) for _ in range(4)]
            await within(engine.arrived.wait())
            # Killed with its legs open.
            await engine.stop()
            for _ in range(2):
                requests.append(asyncio.create_task(client()))
            await until(lambda engine=engine: not c.router.prefills.instances[c.prefills.index(engine)].up)
            await engine.start()
            await until(lambda engine=engine: c.router.prefills.instances[c.prefills.index(engine)].up)
            # What was waiting for the other one may go on.
            for one in (*c.prefills, *c.decodes):
                one.release.set()
            await within(asyncio.gather(*requests))
            for one in (*c.prefills, *c.decodes):
                one.release.clear()
        assert statuses == [200] * 12


async def test_one_failed_request_does_not_put_a_healthy_engine_out():
    async with cluster(prefill=[], decode=[status(500)]) as c:
        async with c.post() as response:
            assert response.status == 500
        await until(lambda: len(c.router.tasks) == 0)
        assert c.router.decodes.instances[0].up


async def test_failures_are_no_errors_of_the_server(caplog):
    async with cluster(decode=[events(b"data: 1\n\n", then="drop")]) as c:
        response = await within(c.open())
        await within(response.content.readany())
        c.decodes[0].release.set()
        with pytest.raises(aiohttp.ClientPayloadError):
            await within(response.content.read())
    assert not [r for r in caplog.records if r.levelname == "ERROR"]
