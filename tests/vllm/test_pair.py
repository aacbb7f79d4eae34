# SPDX-License-Identifier: Apache-2.0
"""A prefill and a decode instance against a single one: the answers are equal, and the KV has really been pushed."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import aiohttp
import pytest
from vllm_cluster import SERVED_MODEL, Cluster, answer, complete, grown, metrics, prompt, settled

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

BLOCK = 32
CHUNK = 256


async def pushed(cluster: Cluster) -> dict[str, float]:
    return await metrics(cluster.instance_url("decode"))


@pytest.mark.parametrize(
    "length",
    [
        pytest.param(5, id="short"),
        pytest.param(BLOCK, id="one-block"),
        pytest.param(BLOCK + 1, id="one-block-and-a-token"),
        pytest.param(4 * BLOCK - 1, id="blocks-less-a-token"),
        pytest.param(4 * BLOCK, id="exactly-blocks"),
        pytest.param(CHUNK, id="one-chunk"),
        pytest.param(CHUNK + 7, id="two-chunks"),
        pytest.param(5 * CHUNK + 33, id="six-chunks"),
    ],
)
async def test_answers_are_those_of_a_single_instance(cluster: Cluster, single_url: str, length: int) -> None:
    tokens = prompt(length, seed=1)
    before = await pushed(cluster)
    expected = await answer(single_url, tokens)
    assert await answer(cluster.url, tokens) == expected
    after = await grown(cluster.instance_url("decode"), "kvpush_received_tokens_total", before, length)
    assert after.get("kvpush_failed_receives_total", 0) == before.get("kvpush_failed_receives_total", 0)


async def test_prefix_hit_on_decode_asks_for_the_rest_only(cluster: Cluster, single_url: str) -> None:
    first = prompt(3 * BLOCK, seed=2)
    longer = first + prompt(2 * BLOCK + 5, seed=3)
    await answer(cluster.url, first)
    before = await settled(cluster.instance_url("decode"))
    await asyncio.sleep(0.5)
    before = await pushed(cluster)
    assert await answer(cluster.url, longer) == await answer(single_url, longer)
    after = await grown(cluster.instance_url("decode"), "kvpush_received_requests_total", before, 1)
    got = after["kvpush_received_tokens_total"] - before["kvpush_received_tokens_total"]
    assert 0 < got < len(longer)
    assert (len(longer) - got) % BLOCK == 0


async def test_the_same_prompt_again_and_again(cluster: Cluster, single_url: str) -> None:
    tokens = prompt(2 * BLOCK, seed=4)
    expected = await answer(single_url, tokens)
    for _ in range(3):
        assert await answer(cluster.url, tokens) == expected


async def test_fifty_at_once(cluster: Cluster, single_url: str) -> None:
    prompts = [prompt(20 + 13 * i, seed=100 + i) for i in range(50)]
    expected = [await answer(single_url, tokens, output_tokens=4) for tokens in prompts]
    before = await pushed(cluster)
    answers = await asyncio.gather(*(answer(cluster.url, tokens, output_tokens=4) for tokens in prompts))
    assert list(answers) == expected
    await settled(cluster.instance_url("decode"))
    await grown(cluster.instance_url("decode"), "kvpush_received_requests_total", before, 50)
    await settled(cluster.instance_url("prefill"))


async def test_streaming_chat(cluster: Cluster, single_url: str) -> None:
    body = {
        "model": SERVED_MODEL,
        "messages": [{"role": "user", "content": "Tell me about blocks. " * 8}],
        "max_tokens": 6,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }

    async def stream(url: str) -> bytes:
        content = b""
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session,
            session.post(f"{url}/v1/chat/completions", json=body) as response,
        ):
            assert response.status == 200
            async for line in response.content:
                if b'"content"' in line:
                    content += line.split(b'"content":', 1)[1].split(b'"', 2)[1]
        return content

    expected = await stream(single_url)
    assert expected
    assert await stream(cluster.url) == expected


async def test_several_samples_of_one_prompt(cluster: Cluster, single_url: str) -> None:
    tokens = prompt(3 * BLOCK + 3, seed=5)
    before = await pushed(cluster)
    # Greedy in effect; vLLM refuses n above 1 for temperature 0.
    status, content = await complete(cluster.url, tokens, n=3, temperature=1.0, top_k=1)
    assert status == 200, content
    expected = await answer(single_url, tokens)
    await grown(cluster.instance_url("decode"), "kvpush_received_requests_total", before, 3)
    assert [choice["token_ids"] for choice in content["choices"]] == [expected] * 3


async def test_a_batch_of_prompts_in_one_request(cluster: Cluster, single_url: str) -> None:
    prompts = [prompt(40 + 9 * i, seed=200 + i) for i in range(4)]
    before = await pushed(cluster)
    status, content = await complete(cluster.url, prompts)  # type: ignore[arg-type]
    assert status == 200, content
    await grown(cluster.instance_url("decode"), "kvpush_received_requests_total", before, 4)
    expected = [await answer(single_url, tokens) for tokens in prompts]
    assert [choice["token_ids"] for choice in content["choices"]] == expected


# --- routers written for other connectors -----------------------------------------------------------------------------


async def test_sequential_router_passes_the_params_on(cluster: Cluster, single_url: str) -> None:
    tokens = prompt(4 * BLOCK + 9, seed=6)
    before = await pushed(cluster)
    prefill_params = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    status, content = await complete(
        cluster.instance_url("prefill"), tokens, output_tokens=1, kv_transfer_params=prefill_params
    )
    assert status == 200, content
    params = content["kv_transfer_params"]
    assert params["do_remote_prefill"] is True
    got = await answer(cluster.instance_url("decode"), tokens, kv_transfer_params=params)
    assert got == await answer(single_url, tokens)
    await grown(cluster.instance_url("decode"), "kvpush_received_tokens_total", before, len(tokens))


async def test_legs_joined_by_a_shared_request_id(cluster: Cluster, single_url: str) -> None:
    tokens = prompt(2 * BLOCK + 9, seed=7)
    host, port = cluster.control
    before = await pushed(cluster)
    headers = {"X-Request-Id": uuid.uuid4().hex}
    decode_params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_host": host,
        "remote_port": port,
        "remote_engine_id": "whatever",
        "tp_size": 1,
    }

    async def leg(url: str, output_tokens: int, params: dict[str, Any]) -> Any:
        body = {
            "model": SERVED_MODEL, "prompt": tokens, "max_tokens": output_tokens, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True, "kv_transfer_params": params,
        }  # fmt: skip
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session,
            session.post(f"{url}/v1/completions", json=body, headers=headers) as response,
        ):
            return await response.json()

    _, decoded = await asyncio.gather(
        leg(cluster.instance_url("prefill"), 1, {"do_remote_decode": True}),
        leg(cluster.instance_url("decode"), 8, decode_params),
    )
    assert decoded["choices"][0]["token_ids"] == await answer(single_url, tokens)
    await grown(cluster.instance_url("decode"), "kvpush_received_tokens_total", before, len(tokens))


async def test_decode_first_waits_for_prefill(cluster: Cluster, single_url: str) -> None:
    tokens = prompt(2 * BLOCK + 1, seed=8)
    host, port = cluster.control
    transfer_id = uuid.uuid4().hex
    decode = asyncio.create_task(
        complete(
            cluster.instance_url("decode"),
            tokens,
            kv_transfer_params={
                "do_remote_prefill": True, "remote_host": host, "remote_port": port, "transfer_id": transfer_id,
            },
        )
    )  # fmt: skip
    await asyncio.sleep(1.0)
    assert not decode.done()
    params = {"do_remote_decode": True, "transfer_id": transfer_id}
    status, _ = await complete(cluster.instance_url("prefill"), tokens, output_tokens=1, kv_transfer_params=params)
    assert status == 200
    status, content = await decode
    assert status == 200, content
    assert content["choices"][0]["token_ids"] == await answer(single_url, tokens)


async def test_another_prompt_under_the_same_transfer_id_is_computed_locally(cluster: Cluster, single_url: str) -> None:
    theirs, ours = prompt(3 * BLOCK, seed=9), prompt(3 * BLOCK, seed=10)
    host, port = cluster.control
    transfer_id = uuid.uuid4().hex
    before = await pushed(cluster)
    params = {"do_remote_decode": True, "transfer_id": transfer_id}
    await complete(cluster.instance_url("prefill"), theirs, output_tokens=1, kv_transfer_params=params)
    got = await answer(
        cluster.instance_url("decode"),
        ours,
        kv_transfer_params={
            "do_remote_prefill": True, "remote_host": host, "remote_port": port, "transfer_id": transfer_id,
        },
    )  # fmt: skip
    assert got == await answer(single_url, ours)
    await grown(cluster.instance_url("decode"), "kvpush_failed_receives_total", before, 1)
    # The right prompt still finds it.
    got = await answer(
        cluster.instance_url("decode"),
        theirs,
        kv_transfer_params={
            "do_remote_prefill": True, "remote_host": host, "remote_port": port, "transfer_id": transfer_id,
        },
    )  # fmt: skip
    assert got == await answer(single_url, theirs)
    await settled(cluster.instance_url("prefill"))


# --- bad input and people who leave --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        pytest.param({"do_remote_prefill": True}, id="no-host"),
        pytest.param({"do_remote_prefill": True, "remote_host": "127.0.0.1"}, id="no-port"),
        pytest.param({"do_remote_prefill": True, "remote_host": 5, "remote_port": 5}, id="host-is-a-number"),
        pytest.param({"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": -1}, id="port-minus-one"),
        pytest.param({"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 10**9}, id="port-too-high"),
        pytest.param({"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": "x"}, id="port-is-text"),
        pytest.param({"do_remote_prefill": True, "remote_host": "a b;c", "remote_port": 80}, id="host-is-nonsense"),
        pytest.param({"do_remote_prefill": "yes", "remote_host": "127.0.0.1", "remote_port": 80}, id="flag-is-text"),
        pytest.param({"do_remote_prefill": True, "do_remote_decode": True}, id="both"),
        pytest.param(
            {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 80, "transfer_id": "x" * 10_000_000},
            id="ten-megabytes",
        ),
        pytest.param(
            {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 80, "transfer_id": {"a": [1]}},
            id="id-is-an-object",
        ),
        pytest.param(
            {"do_remote_prefill": True, "remote_host": "no-such-host.invalid", "remote_port": 80, "transfer_id": "t"},
            id="unknown-host",
        ),
        pytest.param(
            {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 9, "transfer_id": "t"}, id="nobody-listens"
        ),
        pytest.param({"do_remote_decode": True, "transfer_id": ["t"]}, id="prefill-id-is-a-list"),
    ],
)
async def test_malformed_params_harm_nobody(cluster: Cluster, single_url: str, params: dict[str, Any]) -> None:
    tokens = prompt(BLOCK + 3, seed=11)
    role = "prefill" if params.get("do_remote_decode") and not params.get("do_remote_prefill") else "decode"
    expected = await answer(single_url, tokens)
    status, content = await complete(cluster.instance_url(role), tokens, kv_transfer_params=params)
    assert status in (200, 400, 413, 422), content
    if status == 200:
        assert content["choices"][0]["token_ids"] == expected
    again = prompt(BLOCK + 5, seed=12)
    assert await answer(cluster.url, again) == await answer(single_url, again)


async def read(request: Any) -> bytes:
    async with request as response:
        content: bytes = await response.read()
        return content


async def test_a_client_that_leaves(cluster: Cluster, single_url: str) -> None:
    tokens = prompt(6 * CHUNK, seed=13)
    body = {"model": SERVED_MODEL, "prompt": tokens, "max_tokens": 400, "ignore_eos": True, "stream": True}
    for patience_s in (0.02, 0.2, 1.0):
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
            request = session.post(f"{cluster.url}/v1/completions", json=body, timeout=aiohttp.ClientTimeout(total=patience_s))
            with pytest.raises(TimeoutError):
                await read(request)
    await settled(cluster.instance_url("decode"))
    await settled(cluster.instance_url("prefill"))
    again = prompt(2 * BLOCK, seed=14)
    assert await answer(cluster.url, again) == await answer(single_url, again)


async def test_an_abandoned_prefill_is_given_back(cluster: Cluster) -> None:
    """A decode leg that ends before it gets blocks, or is refused, lets the producer have its blocks back."""
    tokens = prompt(3 * BLOCK, seed=15)
    host, port = cluster.control
    transfer_id = uuid.uuid4().hex
    params = {"do_remote_decode": True, "transfer_id": transfer_id}
    status, _ = await complete(cluster.instance_url("prefill"), tokens, output_tokens=1, kv_transfer_params=params)
    assert status == 200
    decode_params = {
        "do_remote_prefill": True, "remote_host": host, "remote_port": port, "transfer_id": transfer_id,
    }  # fmt: skip
    status, _ = await complete(cluster.instance_url("decode"), tokens, kv_transfer_params=decode_params, prompt_logprobs=1)
    assert status == 200
    await settled(cluster.instance_url("prefill"), timeout_s=30)
