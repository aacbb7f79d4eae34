# SPDX-License-Identifier: Apache-2.0
"""vLLM-shaped stub servers and a router in front of them, on loopback with ephemeral ports."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from kvpush.router import PrefillTarget, RouterConfig, make_runner
from kvpush.router.app import ROUTER, Router

WAIT_S = 30.0


async def within(awaitable: Awaitable[Any]) -> Any:
    """Await something that must happen; a hang fails the test instead of the run."""
    return await asyncio.wait_for(awaitable, WAIT_S)


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until a condition holds."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@dataclass
class Seen:
    """One request an engine saw."""

    path: str
    body: dict[str, Any]
    headers: CIMultiDict[str]


Behaviour = Callable[["Engine", web.Request, Seen], Awaitable[web.StreamResponse]]


@dataclass
class Engine:
    """A stub instance: counts, remembers, and answers as its behaviour says."""

    name: str
    behaviour: Behaviour
    port: int = 0
    healthy: bool = True
    seen: list[Seen] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    release: asyncio.Event = field(default_factory=asyncio.Event)
    runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def params(self) -> list[Any]:
        return [seen.body.get("kv_transfer_params") for seen in self.seen]

    async def start(self) -> None:
        app = web.Application(client_max_size=0)
        app.router.add_post("/{tail:.*}", self._generate)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        self.runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self.runner.addresses[0][1]

    async def stop(self) -> None:
        if self.runner is not None:
            await self.runner.cleanup()
            self.runner = None

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        seen = Seen(request.path, json.loads(await request.read()), CIMultiDict(request.headers))
        self.seen.append(seen)
        self.arrived.set()
        try:
            return await self.behaviour(self, request, seen)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return web.Response(status=200 if self.healthy else 503)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [{"id": self.name}]})


async def answer(engine: Engine, request: web.Request, seen: Seen) -> web.StreamResponse:
    """Answer at once; a prefill leg gets parameters for decode back."""
    params = seen.body.get("kv_transfer_params") or {}
    reply: dict[str, Any] = {"object": "text_completion", "served_by": engine.name, "choices": [{"text": "x"}]}
    if params.get("do_remote_decode"):
        reply["kv_transfer_params"] = {"remote_engine_id": engine.name, "remote_block_ids": [[1, 2]], "tp_size": 1}
    return web.json_response(reply, headers={"X-Engine": engine.name})


async def hang(engine: Engine, request: web.Request, seen: Seen) -> web.StreamResponse:
    """Answer nothing until released, then as usual."""
    await engine.release.wait()
    return await answer(engine, request, seen)


async def drop(engine: Engine, request: web.Request, seen: Seen) -> web.StreamResponse:
    """Reset the connection before any byte."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def status(code: int) -> Behaviour:
    """Answer an error of an engine."""

    async def behave(engine: Engine, request: web.Request, seen: Seen) -> web.StreamResponse:
        return web.json_response({"error": {"message": f"{engine.name} says {code}", "code": code}}, status=code)

    return behave


def events(*chunks: bytes, then: str = "end") -> Behaviour:
    """Stream the first chunk, and each further one when released; then end, drop or hang."""

    async def behave(engine: Engine, request: web.Request, seen: Seen) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for i, chunk in enumerate(chunks):
            if i:
                await engine.release.wait()
                engine.release.clear()
            await response.write(chunk)
        if then == "drop":
            await engine.release.wait()
            assert request.transport is not None
            request.transport.close()
        elif then == "hang":
            await asyncio.Event().wait()
        return response

    return behave


def unused_port() -> int:
    """A port on which nothing listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
    return port


@dataclass
class Cluster:
    """Stubs, the router before them, and a client."""

    prefills: list[Engine]
    decodes: list[Engine]
    runner: web.AppRunner
    client: aiohttp.ClientSession
    url: str
    opened: list[aiohttp.ClientResponse] = field(default_factory=list)

    @property
    def router(self) -> Router:
        return self.runner.app[ROUTER]

    def post(self, path: str = "/v1/completions", **kwargs: Any) -> Any:
        """Post a request; ``json`` defaults to a small prompt."""
        if "json" not in kwargs and "data" not in kwargs:
            kwargs["json"] = {"prompt": "hello", "max_tokens": 8}
        return self.client.post(self.url + path, **kwargs)

    async def open(self, *args: Any, **kwargs: Any) -> aiohttp.ClientResponse:
        """Post a request whose answer is read piece by piece; closed with the cluster."""
        response: aiohttp.ClientResponse = await self.post(*args, **kwargs)
        self.opened.append(response)
        return response

    async def metric(self, name: str, **labels: str) -> float:
        """Read one sample through the registry; 0 if it was never counted."""
        value = self.router.metrics.registry.get_sample_value(f"kvpush_router_{name}", labels)
        return value or 0.0

    async def outcome(self, name: str, endpoint: str = "completions") -> float:
        """Requests that ended so; waits for one, as a client may see its answer end before the router notes it."""
        label = {"endpoint": endpoint, "outcome": name}
        await until(lambda: bool(self.router.metrics.registry.get_sample_value("kvpush_router_requests_total", label)))
        return await self.metric("requests_total", **label)


@asynccontextmanager
async def cluster(
    prefill: list[Behaviour | None] | None = None, decode: list[Behaviour | None] | None = None, **options: Any
) -> AsyncIterator[Cluster]:
    """Run stubs and a router; at the end nothing of it may be left.

    Args:
        prefill: behaviour of each prefill stub; None: nothing listens there.
        decode: the same for decode.
        options: of ``RouterConfig``.
    """
    before = asyncio.all_tasks()
    prefills = [Engine(f"prefill{i}", b or answer) for i, b in enumerate([answer] if prefill is None else prefill)]
    decodes = [Engine(f"decode{i}", b or answer) for i, b in enumerate([answer] if decode is None else decode)]
    wanted = [*([answer] if prefill is None else prefill), *([answer] if decode is None else decode)]
    async with AsyncExitStack() as stack:
        for engine, behaviour in zip([*prefills, *decodes], wanted, strict=True):
            if behaviour is None:
                engine.port = unused_port()
            else:
                await engine.start()
            stack.push_async_callback(engine.stop)
        targets = tuple(PrefillTarget(e.url, "10.1.2.3", 15000 + i) for i, e in enumerate(prefills))
        options.setdefault("probe_backoff_s", 60.0)
        options.setdefault("probe_backoff_max_s", 60.0)
        config = RouterConfig(decode=tuple(e.url for e in decodes), prefill=targets, **options)
        runner = make_runner(config)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        client = await stack.enter_async_context(aiohttp.ClientSession())
        made = Cluster(prefills, decodes, runner, client, f"http://127.0.0.1:{runner.addresses[0][1]}")
        yield made
        for response in made.opened:
            response.close()
        router = made.router
    assert len(router.tasks) == 0
    assert not router.requests
    for pool in (router.prefills, router.decodes):
        assert [i.in_flight for i in pool.instances] == [0] * len(pool)
    # Servers let go of a closed connection's task in one of the next rounds of the loop.
    await until(lambda: not {t for t in asyncio.all_tasks() - before if not t.done()})
