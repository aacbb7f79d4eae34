# SPDX-License-Identifier: Apache-2.0
"""Helpers of the tests with real vLLM instances."""

from __future__ import annotations

import asyncio
import io
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from kvpush.demo.connectors import SERVED_MODEL, Deployment, InstanceOptions
from kvpush.demo.supervisor import Server, Supervisor

START_TIMEOUT_S = 300
REQUEST_TIMEOUT_S = 120


@dataclass
class Cluster:
    """A prefill and a decode instance with kvpush between them, and a router."""

    supervisor: Supervisor
    deployment: Deployment
    servers: dict[str, Server]

    @property
    def url(self) -> str:
        return self.deployment.url

    def instance_url(self, role: str) -> str:
        url = self.deployment.instances[role].health_url
        assert url is not None
        return url.removesuffix("/health")

    @property
    def control(self) -> tuple[str, int]:
        """The prefill instance's control endpoint, as the router was told."""
        prefill = self.deployment.router.argv[self.deployment.router.argv.index("--prefill") + 1]
        host, port = prefill.rsplit("@", 1)[1].rsplit(":", 1)
        return host, int(port)


def options(model: Path, *extra: str, env: Mapping[str, str | None] | None = None, **changes: Any) -> InstanceOptions:
    """Small caches, chunks of 256 tokens, blocks of 32; short prompts are pushed like others."""
    args = ("--block-size", "32", "--max-num-batched-tokens", "256", "--max-num-seqs", "64", *extra)
    return InstanceOptions(
        model=model,
        dtype="float32",
        max_model_len=4096,
        kv_cache_bytes=64 << 20,
        extra_args=args,
        env={"KVPUSH_RECOMPUTE_BELOW_TOKENS": "0", **(env or {})},
        **changes,
    )


def start(supervisor: Supervisor, *deployments: Deployment) -> list[dict[str, Server]]:
    """Start the servers of some deployments and wait for them: instances first, for a router that finds its instances down
    leaves them alone for a while."""
    started = [{role: supervisor.start(spec) for role, spec in one.instances.items()} for one in deployments]
    asyncio.run(supervisor.wait_ready(supervisor.servers, timeout_s=START_TIMEOUT_S))
    for servers, one in zip(started, deployments, strict=True):
        servers["router"] = supervisor.start(one.router)
    asyncio.run(supervisor.wait_ready(supervisor.servers, timeout_s=START_TIMEOUT_S))
    return started


def prompt(length: int, seed: int) -> list[int]:
    """Token ids of the byte-level tokenizer, different from the first one on for each seed."""
    rng = random.Random(f"{seed}/{length}")
    return [rng.randint(40, 200) for _ in range(length)]


async def complete(url: str, tokens: list[int], *, output_tokens: int = 8, **fields: Any) -> tuple[int, Any]:
    """One request, not streamed. Returns the status and the parsed answer."""
    body = {
        "model": SERVED_MODEL,
        "prompt": tokens,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)) as session,
        session.post(
            f"{url}/v1/completions", data=io.BytesIO(json.dumps(body).encode()), headers={"Content-Type": "application/json"}
        ) as response,
    ):
        return response.status, await response.json(content_type=None)


async def answer(url: str, tokens: list[int], **fields: Any) -> list[int]:
    """The token ids of a good answer."""
    status, content = await complete(url, tokens, **fields)
    assert status == 200, content
    ids = content["choices"][0]["token_ids"]
    assert isinstance(ids, list)
    return ids


async def metrics(url: str) -> dict[str, float]:
    """kvpush's counters of an instance, by name; and vLLM's gauges of requests."""
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session,
        session.get(f"{url}/metrics") as response,
    ):
        text = await response.text()
    found: dict[str, float] = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        name = name.split("{")[0]
        if name.startswith(("kvpush_", "vllm:num_requests_", "vllm:kv_cache_usage")) and not name.endswith("_created"):
            found[name] = found.get(name, 0.0) + float(value)
    return found


async def settled(url: str, *, timeout_s: float = 60) -> dict[str, float]:
    """The counters once the instance holds no request and no block any more."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        found = await metrics(url)
        busy = {
            name: value
            for name, value in found.items()
            if name.startswith(("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage")) and value
        }
        if not busy:
            return found
        assert asyncio.get_running_loop().time() < deadline, f"still busy: {busy}"
        await asyncio.sleep(0.2)


async def grown(url: str, name: str, before: dict[str, float], by: float, *, timeout_s: float = 20) -> dict[str, float]:
    """Wait until a counter has grown by exactly so much (vLLM's front end counts a moment after it has answered)."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        found = await metrics(url)
        grown_by = found.get(name, 0.0) - before.get(name, 0.0)
        if grown_by == by:
            return found
        assert grown_by < by, f"{name} has grown by {grown_by}, more than {by}"
        assert asyncio.get_running_loop().time() < deadline, f"{name} has grown by {grown_by}, not by {by}: {found}"
        await asyncio.sleep(0.1)
