# SPDX-License-Identifier: Apache-2.0
"""Sends one request of a storm and reads what comes back, whatever that is."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import aiohttp

from kvpush.chaos.oracle import Answer, Prompt, Reference
from kvpush.demo.client import read_events
from kvpush.demo.connectors import SERVED_MODEL

__all__ = ["Ask", "Ending", "Reply", "ask", "fetch_reference"]

_GOOD_ENDS = (None, "length", "stop")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request.

    Args:
        request_id: unique; the servers' logs have it.
        prompt: what is asked.
        output_tokens: how much is asked for.
        samples: `n`; every sample has the same answer, as only the best token is ever drawn.
        stream: whether the answer comes in pieces.
        leave_after_s: the client is gone after so long, answer or not; None for one that stays.
        deadline_s: by then it must have ended.
    """

    request_id: str
    prompt: Prompt
    output_tokens: int
    samples: int = 1
    stream: bool = False
    leave_after_s: float | None = None
    deadline_s: float = 120.0


class Ending(StrEnum):
    """How a request ended."""

    OK = "ok"
    LEFT = "left"
    """The client went away, as it meant to."""
    ERROR = "error"
    HUNG = "hung"
    """Nothing that ends it has come by its deadline."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What came.

    Args:
        ending: how it ended.
        answers: by sample, as far as they came.
        error: its kind, such as "HTTP 502"; None unless the ending is ERROR.
        detail: more about it.
    """

    ending: Ending
    answers: tuple[Answer, ...] = ()
    error: str | None = None
    detail: str = ""


def body_of(request: Ask) -> dict[str, Any]:
    """The JSON object of a request.

    Args:
        request: what to ask.

    Returns:
        A new object.
    """
    body: dict[str, Any] = {
        "model": SERVED_MODEL,
        "prompt": list(request.prompt.tokens),
        "max_tokens": request.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
        "stream": request.stream,
    }
    if request.samples > 1:
        # vLLM refuses several samples at temperature 0; the best one of one is greedy too.
        body |= {"n": request.samples, "temperature": 1.0, "top_k": 1}
    return body


class _Partial:
    """Answers that are still growing."""

    def __init__(self, samples: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(samples)]
        self.logprobs: list[list[float]] = [[] for _ in range(samples)]
        self.error: tuple[str, str] | None = None

    def add(self, content: Mapping[str, Any]) -> None:
        """Take a whole answer, or one event of a stream."""
        if "error" in content:
            self.error = ("error event", json.dumps(content["error"])[:500])
            return
        for choice in content.get("choices", ()):
            at = choice["index"]
            self.tokens[at] += choice.get("token_ids") or ()
            self.logprobs[at] += (choice.get("logprobs") or {}).get("token_logprobs") or ()
            if choice.get("finish_reason") not in _GOOD_ENDS:
                self.error = (f"finish_reason {choice['finish_reason']}", "")

    def answers(self) -> tuple[Answer, ...]:
        return tuple(
            Answer(tuple(tokens), tuple(logprobs)) for tokens, logprobs in zip(self.tokens, self.logprobs, strict=True)
        )


async def ask(session: aiohttp.ClientSession, url: str, request: Ask) -> Reply:
    """Send a request and read its answer until it ends, the client leaves, or the deadline passes.

    Args:
        session: without a timeout of its own.
        url: of the front, without a path.
        request: what to ask.

    Returns:
        What came; nothing is raised but cancellation.
    """
    partial = _Partial(request.samples)
    leaves = request.leave_after_s if request.leave_after_s is not None else math.inf
    try:
        async with asyncio.timeout(min(leaves, request.deadline_s)):
            return await _exchange(session, url, request, partial)
    except TimeoutError:
        return Reply(Ending.LEFT if leaves < request.deadline_s else Ending.HUNG, partial.answers())


async def _exchange(session: aiohttp.ClientSession, url: str, request: Ask, partial: _Partial) -> Reply:
    headers = {"X-Request-Id": request.request_id}
    try:
        async with session.post(f"{url}/v1/completions", json=body_of(request), headers=headers) as response:
            if response.status != 200:
                return Reply(Ending.ERROR, (), f"HTTP {response.status}", (await response.text())[:500])
            if request.stream:
                finished = False
                async for event in read_events(response.content):
                    if event == "[DONE]":
                        finished = True
                    else:
                        partial.add(json.loads(event))
                if not finished and partial.error is None:
                    partial.error = ("stream ended early", "")
            else:
                partial.add(await response.json())
    except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as failure:
        # What had come before must be right all the same.
        kind = partial.error or ("broken connection", f"{type(failure).__name__}: {failure}")
        return Reply(Ending.ERROR, partial.answers(), *kind)
    if partial.error is not None:
        return Reply(Ending.ERROR, partial.answers(), *partial.error)
    return Reply(Ending.OK, partial.answers())


async def fetch_reference(session: aiohttp.ClientSession, url: str, prompt: Prompt, output_tokens: int) -> Reference:
    """Ask the single instance for a right answer.

    Args:
        session: has a timeout.
        url: of the instance.
        prompt: what to ask.
        output_tokens: how long an answer.

    Returns:
        The answer and its smallest margin.

    Raises:
        ValueError: the answer is none.
        aiohttp.ClientError: likewise.
    """
    request = Ask(request_id=f"reference-{prompt.prompt_id}", prompt=prompt, output_tokens=output_tokens)
    body = {**body_of(request), "logprobs": 2}
    async with session.post(f"{url}/v1/completions", json=body) as response:
        content = await response.json()
    if "choices" not in content:
        raise ValueError(f"no reference for {prompt.prompt_id}: {json.dumps(content)[:500]}")
    choice = content["choices"][0]
    logprobs = choice["logprobs"]
    margins = []
    for best in logprobs["top_logprobs"]:
        first, second, *_ = [*sorted(best.values(), reverse=True), -math.inf, -math.inf]
        margins.append(first - second)
    answer = Answer(tuple(choice["token_ids"]), tuple(logprobs["token_logprobs"]))
    if len(answer.tokens) != output_tokens or len(answer.logprobs) != output_tokens:
        raise ValueError(f"no reference for {prompt.prompt_id}: {len(answer.tokens)} tokens instead of {output_tokens}")
    return Reference(answer, min(margins))
