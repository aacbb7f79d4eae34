# SPDX-License-Identifier: Apache-2.0
"""Sends streaming completion requests and times their answers. Works with any OpenAI-compatible vLLM front."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

__all__ = [
    "RequestResult",
    "RequestSpec",
    "arrival_times",
    "make_requests",
    "read_events",
    "request_body",
    "send_at_rate",
    "send_request",
]

#: Token ids of prompts: bytes of printable ASCII, so that prompts can be shown too.
_FIRST_BYTE: Final = 0x20
_LAST_BYTE: Final = 0x7E


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One request.

    Args:
        index: its number within the run.
        prompt: token ids; sent as such, so the count is exact.
        output_tokens: how many tokens to ask for; the end-of-sequence token does not end the answer.
    """

    index: int
    prompt: tuple[int, ...]
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestResult:
    """What became of a request.

    Args:
        index: of the request.
        token_ids: the answer, as far as it came.
        error: why it failed; None if it did not.
        ttft_s: from sending to the first token; NaN if none came.
        tpot_s: mean time between tokens after the first; NaN if there is no second one.
        e2e_s: from sending to the end.
    """

    index: int
    token_ids: tuple[int, ...]
    error: str | None
    ttft_s: float
    tpot_s: float
    e2e_s: float

    @property
    def ok(self) -> bool:
        """True if the whole answer came."""
        return self.error is None


def make_requests(count: int, *, prompt_tokens: int, output_tokens: int, seed: int, first: int = 0) -> list[RequestSpec]:
    """Make requests with random prompts.

    No two prompts share a beginning, so no answer comes from a prefix cache.

    Args:
        count: how many.
        prompt_tokens: length of each prompt, at least 1.
        output_tokens: length of each answer, at least 1.
        seed: the same seed gives the same prompts; request i has the same prompt whatever `count` is.
        first: index of the first one.

    Returns:
        The requests, in order.
    """
    requests = []
    for index in range(first, first + count):
        rng = random.Random(f"{seed}/{index}")
        prompt = tuple(rng.randint(_FIRST_BYTE, _LAST_BYTE) for _ in range(prompt_tokens))
        requests.append(RequestSpec(index, prompt, output_tokens))
    return requests


def request_body(model: str, request: RequestSpec) -> dict[str, Any]:
    """The JSON object of a request.

    Args:
        model: name of the served model.
        request: what to ask.

    Returns:
        A new object.
    """
    return {
        "model": model,
        "prompt": list(request.prompt),
        "max_tokens": request.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }


async def send_request(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    request: RequestSpec,
    *,
    more: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
    on_first_token: Callable[[], None] = lambda: None,
) -> RequestResult:
    """Send a request and read its stream to the end.

    Args:
        session: has a timeout; a request that exceeds it counts as failed.
        url: of the front, without a path.
        model: name of the served model.
        request: what to send.
        more: fields added to the body.
        headers: added to the HTTP request's.
        on_first_token: called once, when the first token has come; must not block.

    Returns:
        The result; failures are in it, not raised.
    """
    body = {**request_body(model, request), **(more or {})}
    tokens: list[int] = []
    error: str | None = None
    first_at = last_at = None
    sent_at = time.perf_counter()
    try:
        async with session.post(f"{url}/v1/completions", json=body, headers=headers) as response:
            if response.status != 200:
                error = f"HTTP {response.status}: {(await response.text())[:500]}"
            else:
                async for event in read_events(response.content):
                    new, error = _read_event(event)
                    if error is not None:
                        break
                    if new:
                        last_at = time.perf_counter()
                        tokens += new
                        if first_at is None:
                            first_at = last_at
                            on_first_token()
    except TimeoutError:
        error = "timed out"
    except (aiohttp.ClientError, OSError, ValueError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    ended_at = time.perf_counter()
    if error is None and len(tokens) != request.output_tokens:
        error = f"{len(tokens)} tokens came instead of {request.output_tokens}"
    nan = float("nan")
    return RequestResult(
        index=request.index,
        token_ids=tuple(tokens),
        error=error,
        ttft_s=first_at - sent_at if first_at is not None else nan,
        tpot_s=(last_at - first_at) / (len(tokens) - 1) if first_at and last_at and len(tokens) > 1 else nan,
        e2e_s=ended_at - sent_at,
    )


async def read_events(stream: aiohttp.StreamReader) -> AsyncIterator[str]:
    """Take a stream of server-sent events apart, however it is cut into pieces.

    Args:
        stream: the body of an answer.

    Yields:
        The `data:` field of each event.
    """
    pending = b""
    async for piece in stream.iter_any():
        *lines, pending = (pending + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip().decode()


def _read_event(event: str) -> tuple[list[int], str | None]:
    """The new token ids of an event, or the error that it reports."""
    if event == "[DONE]":
        return [], None
    content: dict[str, Any] = json.loads(event)
    if "error" in content:
        return [], f"error in the stream: {json.dumps(content['error'])[:500]}"
    tokens: list[int] = []
    for choice in content.get("choices", ()):
        tokens += choice.get("token_ids") or ()
        if choice.get("finish_reason") not in (None, "length", "stop"):
            return tokens, f"finish_reason {choice['finish_reason']!r}"
    return tokens, None


def arrival_times(count: int, *, qps: float, seed: int) -> list[float]:
    """Arrival times of a Poisson process.

    Args:
        count: how many.
        qps: mean rate, in requests a second.
        seed: the same seed gives the same times.

    Returns:
        Seconds from the start, ascending, the first at 0.
    """
    rng = random.Random(f"arrivals/{seed}")
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += rng.expovariate(qps)
    return times


async def send_at_rate(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    requests: Sequence[RequestSpec],
    *,
    qps: float,
    seed: int,
    on_done: Callable[[RequestResult], None] = lambda _: None,
) -> list[RequestResult]:
    """Send requests one at a time, or at random times of a mean rate.

    Args:
        session: has a timeout and no limit of connections below the number of requests.
        url: of the front, without a path.
        model: name of the served model.
        requests: what to send, in order.
        qps: requests a second (Poisson); 0 sends each when the one before has ended.
        seed: of the arrival times.
        on_done: called with each result as it comes.

    Returns:
        The results, in the order of the requests.
    """

    async def one(request: RequestSpec, delay_s: float) -> RequestResult:
        await asyncio.sleep(delay_s)
        result = await send_request(session, url, model, request)
        on_done(result)
        return result

    if qps <= 0:
        return [await one(request, 0.0) for request in requests]
    delays = arrival_times(len(requests), qps=qps, seed=seed)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(request, delay)) for request, delay in zip(requests, delays, strict=True)]
    return [task.result() for task in tasks]
