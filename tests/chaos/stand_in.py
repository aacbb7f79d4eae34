# SPDX-License-Identifier: Apache-2.0
"""Stands in for a vLLM instance with kvpush: same protocol, same metrics, an "engine core" of its own, and sins on demand.

stand_in.py HOST PORT ROLE SINS    SINS: JSON object; see below
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import subprocess
import sys
from typing import Any

from aiohttp import web

HOST, PORT, ROLE = sys.argv[1], int(sys.argv[2]), sys.argv[3]
SINS: dict[str, Any] = json.loads(sys.argv[4])
"""By name: of every so many requests (wrong_token, wrong_logprob, silent, error, dies: in decode; dies_prefill: once, in
prefill), of so many prompts (undecided: two tokens are equally likely, and decode takes the other one), or simply on
(leaks_blocks, leaks_fds, spins, restarts, differs: in decode; pushes_nothing; stutters: prefill has pushed before, and gives no
metrics every other time)."""

served = 0
counters = {"sent": 7 if SINS.get("stutters") else 0, "received": 0, "reads": 0}
kept: list[Any] = []


def due(sin: str, number: int) -> bool:
    every = SINS.get(sin, 0)
    return bool(every) and ROLE == "decode" and number % every == 0


def right(prompt: list[int], at: int) -> tuple[int, float, float]:
    digest = hashlib.sha256(repr((prompt, at)).encode()).digest()
    return 0x20 + digest[0] % 90, -digest[1] / 256, -digest[1] / 256 - 1.0


def choices(body: dict[str, Any], number: int) -> list[dict[str, Any]]:
    made = []
    for index in range(body.get("n", 1)):
        tokens, logprobs, best = [], [], []
        for at in range(body["max_tokens"]):
            token, logprob, second = right(body["prompt"], at)
            if due("wrong_token", number) and at == 2:
                token += 1
            if due("wrong_logprob", number) and at == 1:
                logprob -= 0.02
            tokens.append(token)
            logprobs.append(logprob)
            undecided = SINS.get("undecided", 0) and sum(body["prompt"]) % SINS["undecided"] == 0
            if undecided and ROLE == "decode":
                token += 1
            best.append({"a": logprob, "b": logprob if undecided else second})
        made.append(
            {
                "index": index,
                "token_ids": tokens,
                "logprobs": {"token_logprobs": logprobs, "top_logprobs": best},
                "finish_reason": "length",
            }
        )
    return made


async def complete(request: web.Request) -> web.StreamResponse:
    global served
    body = await request.json()
    served += 1
    # Others come in while this one waits.
    number = served
    params = body.get("kv_transfer_params") or {}
    await asyncio.sleep(0.01)
    if params.get("do_remote_decode") and not SINS.get("pushes_nothing"):
        counters["sent"] += 1
    if params.get("do_remote_prefill") and not SINS.get("pushes_nothing"):
        counters["received"] += 1
    if due("dies", number) or (SINS.get("dies_prefill") == number and ROLE == "prefill"):
        print("Traceback (most recent call last):\n  File x\nAssertionError: request is unknown", flush=True)
        os._exit(3)
    if due("error", number):
        return web.json_response({"error": {"message": "no luck"}}, status=500)
    if due("silent", number):
        await asyncio.sleep(3600)
    if SINS.get("leaks_fds") and ROLE == "decode":
        kept.append(open("/dev/null"))  # noqa: ASYNC230, SIM115
    answers = choices(body, number)
    if not body.get("stream"):
        return web.json_response({"choices": answers})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for at in range(body["max_tokens"]):
        for answer in answers:
            piece = {
                "index": answer["index"],
                "token_ids": [answer["token_ids"][at]],
                "logprobs": {"token_logprobs": [answer["logprobs"]["token_logprobs"][at]]},
                "finish_reason": None,
            }
            await response.write(b"data: " + json.dumps({"choices": [piece]}).encode() + b"\n\n")
        await asyncio.sleep(0.001)
    await response.write(b"data: [DONE]\n\n")
    return response


async def health(request: web.Request) -> web.Response:
    return web.Response()


async def metrics(request: web.Request) -> web.Response:
    counters["reads"] += 1
    if SINS.get("stutters") and ROLE == "prefill" and counters["reads"] % 2:
        return web.Response(status=500)
    if SINS.get("mute") and ROLE == "decode" and served > 4:
        return web.Response(status=500)
    usage = 0.25 if SINS.get("leaks_blocks") and ROLE == "decode" and served > 4 else 0.0
    lines = [
        'vllm:num_requests_running{engine="0"} 0.0',
        'vllm:num_requests_waiting{engine="0"} 0.0',
        f'vllm:kv_cache_usage_perc{{engine="0"}} {usage}',
        f'kvpush_sent_requests_total{{engine="0"}} {counters["sent"]}',
        f'kvpush_submitter_restarts_total{{engine="0"}} {SINS.get("restarts", 0) if ROLE == "decode" else 0}',
        f'kvpush_integrity_errors_total{{engine="0"}} {SINS.get("differs", 0) if ROLE == "decode" else 0}',
        f'kvpush_received_requests_total{{engine="0"}} {counters["received"]}',
    ]
    return web.Response(text="\n".join(lines) + "\n")


async def watch_engine(app: web.Application) -> None:
    engine = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(3600)"])  # noqa: ASYNC220

    async def watch() -> None:
        while engine.poll() is None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        os._exit(1)

    async def spin() -> None:
        while True:  # noqa: ASYNC110
            await asyncio.sleep(0)

    kept.append(asyncio.create_task(watch()))
    if SINS.get("spins") and ROLE == "decode":
        kept.append(asyncio.create_task(spin()))


app = web.Application()
app.add_routes([web.post("/v1/completions", complete), web.get("/health", health), web.get("/metrics", metrics)])
app.on_startup.append(watch_engine)
web.run_app(app, host=HOST, port=PORT, print=None)
