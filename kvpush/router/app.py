# SPDX-License-Identifier: Apache-2.0
"""The router as an aiohttp application: routes, life cycle, what a request's end is called."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from kvpush.router.call import Call, forwarded_headers, read_call, request_id_of, returned_headers
from kvpush.router.config import RouterConfig
from kvpush.router.dispatch import Dispatcher, Exchange
from kvpush.router.errors import RequestFailed, error_response
from kvpush.router.legs import Legs, connection_trace
from kvpush.router.metrics import RouterMetrics
from kvpush.router.pool import Pool
from kvpush.router.relay import relay
from kvpush.router.tasks import TaskSet

logger = logging.getLogger(__name__)

# Below the 5 s after which vLLM's server closes an idle connection, so that few legs meet one that is just being closed.
_UPSTREAM_KEEPALIVE_S = 2.0
_MODELS_ANSWER_BYTES = 16 * 1024 * 1024


class Router:
    """What one application holds while it runs."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self.metrics = RouterMetrics()
        self.tasks = TaskSet()
        self.requests: set[asyncio.Task[object]] = set()
        self.draining = False
        self.session = self._session(aiohttp.TCPConnector(limit=0, keepalive_timeout=_UPSTREAM_KEEPALIVE_S))
        self.fresh = self._session(aiohttp.TCPConnector(limit=0, force_close=True))
        self.prefills = self._pool("prefill", [target.url for target in config.prefill])
        self.decodes = self._pool("decode", list(config.decode))
        legs = Legs(config, self.session, self.fresh, self.metrics, self.prefills, self.decodes)
        self.dispatcher = Dispatcher(config, legs, self.metrics, self.prefills, self.decodes, self.tasks)

    def _session(self, connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, connect=self.config.connect_timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
            trace_configs=[connection_trace()],
        )

    def _pool(self, role: str, urls: list[str]) -> Pool:
        return Pool(
            role,
            urls,
            metrics=self.metrics,
            tasks=self.tasks,
            session=self.session,
            probe_timeout_s=self.config.probe_timeout_s,
            backoff_s=self.config.probe_backoff_s,
            backoff_max_s=self.config.probe_backoff_max_s,
        )

    async def drain(self) -> None:
        """Let running requests finish within the configured time, then cancel them."""
        self.draining = True
        running = self.requests - {asyncio.current_task()}
        if running:
            logger.info("draining requests=%d", len(running))
            _, late = await asyncio.wait(running, timeout=self.config.shutdown_timeout_s)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=1.0)

    async def aclose(self) -> None:
        """End every task and close every connection to the instances."""
        await self.tasks.aclose()
        await self.session.close()
        await self.fresh.close()


ROUTER: web.AppKey[Router] = web.AppKey("kvpush_router", Router)


def create_app(config: RouterConfig) -> web.Application:
    """Build the application.

    Serve it with a runner that cancels handlers on disconnect (``make_runner`` does); else a client that
    leaves is noticed only when the next chunk is written to it.

    Args:
        config: instances, policies, limits and deadlines.

    Returns:
        The application; its router state is under ``app[ROUTER]`` once it has started.
    """
    app = web.Application(middlewares=[_openai_errors])

    async def life(app: web.Application) -> AsyncIterator[None]:
        router = Router(config)
        app[ROUTER] = router
        yield
        await router.aclose()

    async def drain(app: web.Application) -> None:
        await app[ROUTER].drain()

    app.cleanup_ctx.append(life)
    app.on_shutdown.append(drain)
    app.router.add_post("/v1/completions", _completions)
    app.router.add_post("/v1/chat/completions", _chat_completions)
    app.router.add_get("/v1/models", _models)
    app.router.add_get("/health", _health)
    app.router.add_get("/metrics", _metrics)
    return app


@web.middleware
async def _openai_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Give aiohttp's own errors (404, 405) OpenAI's shape."""
    try:
        return await handler(request)
    except web.HTTPException as err:
        if err.status < 400:
            raise
        return error_response(err.status, err.reason, "invalid_request_error")


async def _completions(request: web.Request) -> web.StreamResponse:
    return await _generate(request, "completions")


async def _chat_completions(request: web.Request) -> web.StreamResponse:
    return await _generate(request, "chat_completions")


async def _generate(request: web.Request, endpoint: str) -> web.StreamResponse:
    """Serve one request, and say once how it ended."""
    router = request.app[ROUTER]
    request_id = request_id_of(request)
    outcome, status = "internal", 500
    call: Call | None = None
    exchange: Exchange | None = None
    task = asyncio.current_task()
    assert task is not None
    router.requests.add(task)
    router.metrics.in_flight.inc()
    loop = asyncio.get_running_loop()
    began = loop.time()
    first_byte_ms = -1.0
    try:
        if router.draining:
            raise RequestFailed(503, "the router is shutting down", kind="server_error", outcome="shutdown", close=True)
        call = await read_call(request, endpoint, request_id, router.config)
        exchange = await router.dispatcher.open(call)
        ttfb = loop.time() - call.arrived_at
        first_byte_ms = ttfb * 1e3
        status = exchange.answer.status
        if status < 400:
            router.metrics.ttfb.labels(endpoint).observe(ttfb)
        response, outcome = await relay(request, call, exchange.answer, router.metrics, router.config.idle_timeout_s)
    except RequestFailed as err:
        outcome, status = err.outcome, err.status
        failed = error_response(err.status, err.message, err.kind, param=err.param, request_id=request_id)
        if err.close:
            failed.force_close()
        return failed
    except asyncio.CancelledError:
        outcome = "shutdown" if router.draining and request.transport is not None else "client_disconnected"
        raise
    else:
        return response
    finally:
        if exchange is not None:
            linger_s = router.config.prefill_linger_s if outcome == "ok" else 0.0
            exchange.attempt.close(prefill_linger_s=linger_s)
        router.requests.discard(task)
        router.metrics.in_flight.dec()
        router.metrics.requests.labels(endpoint, outcome).inc()
        logger.info(
            "request endpoint=%s outcome=%s status=%d request=%s transfer=%s tries=%d first_byte_ms=%.1f total_ms=%.1f",
            endpoint,
            outcome,
            status,
            request_id,
            exchange.attempt.transfer_id if exchange is not None else "-",
            exchange.tries if exchange is not None else 0,
            first_byte_ms,
            (loop.time() - began) * 1e3,
        )


async def _models(request: web.Request) -> web.StreamResponse:
    """Pass the model list of a decode instance on; try each once."""
    router = request.app[ROUTER]
    tried: set[int] = set()
    while (lease := router.decodes.acquire(tried, last_resort=True)) is not None:
        instance = lease.instance
        tried.add(instance.index)
        headers = forwarded_headers(request.headers)
        headers["Accept-Encoding"] = "identity"
        try:
            async with asyncio.timeout(router.config.connect_timeout_s + router.config.probe_timeout_s):
                async with router.session.get(f"{instance.url}/v1/models", headers=headers, allow_redirects=False) as answer:
                    body = await answer.content.read(_MODELS_ANSWER_BYTES)
        except aiohttp.ClientConnectorError:
            router.decodes.mark_down(instance)
        except (aiohttp.ClientError, OSError, TimeoutError):
            pass
        else:
            back = returned_headers(answer.headers)
            back.popall("Content-Length", None)
            return web.Response(status=answer.status, body=body, headers=back)
        finally:
            lease.release()
    return error_response(502, "no decode instance could be reached", "server_error")


async def _health(request: web.Request) -> web.StreamResponse:
    """Probe every instance; healthy means that at least one decode instance answers."""
    router = request.app[ROUTER]
    pools = (router.prefills, router.decodes)
    await asyncio.gather(*(pool.probe(instance) for pool in pools for instance in pool.instances))
    report = {pool.role: [{"url": i.url, "up": i.up, "in_flight": i.in_flight} for i in pool.instances] for pool in pools}
    healthy = not router.draining and any(i.up for i in router.decodes.instances)
    body = {"status": "ok" if healthy else "unavailable", "mode": str(router.config.mode), **report}
    return web.Response(status=200 if healthy else 503, body=json.dumps(body).encode(), content_type="application/json")


async def _metrics(request: web.Request) -> web.StreamResponse:
    return web.Response(body=request.app[ROUTER].metrics.render(), headers={"Content-Type": CONTENT_TYPE_LATEST})
