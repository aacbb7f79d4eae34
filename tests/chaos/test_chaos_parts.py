# SPDX-License-Identifier: Apache-2.0
"""The parts of a storm: what is asked, how answers are judged, which faults a seed deals, relays, sums over lives."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import aiohttp
import psutil
import pytest
from aiohttp import web

from kvpush.chaos import storm
from kvpush.chaos.asking import Ask, Ending, Reply, ask, body_of, fetch_reference
from kvpush.chaos.cluster import Cluster, Instance, Network, RelayFailed, Relays
from kvpush.chaos.faults import Card, FaultLog, Kind, deal
from kvpush.chaos.leaks import Totals, footprint
from kvpush.chaos.oracle import Answer, Oracle, Prompt, Reference, make_prompts
from kvpush.demo.connectors import InstanceOptions
from kvpush.demo.runner import Observer
from kvpush.demo.supervisor import PortPicker, ServerSpec
from kvpush.errors import MeasurementFailed

RIGHT = Answer((65, 66, 67, 68), (-0.5, -0.25, -1.0, -2.0))
PROMPT = Prompt("p", (1, 2, 3))


def oracle() -> Oracle:
    return Oracle({"p": Reference(RIGHT, 0.5)}, tolerance=0.01)


async def test_too_few_answers_that_rounding_can_not_change_are_no_wrong_option() -> None:
    with pytest.raises(MeasurementFailed, match="of 0 prompts only 0"):
        await storm._references("http://127.0.0.1:9", [], 1, cast(Observer, None))


# --- the oracle ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "logprobs", "asked", "whole", "says"),
    [
        pytest.param(RIGHT.tokens, RIGHT.logprobs, 4, True, None, id="right"),
        pytest.param(RIGHT.tokens[:2], RIGHT.logprobs[:2], 2, True, None, id="right-and-shorter"),
        pytest.param(RIGHT.tokens[:2], RIGHT.logprobs[:2], 4, False, None, id="right-so-far"),
        pytest.param((), (), 4, False, None, id="nothing-yet"),
        pytest.param(RIGHT.tokens, (-0.505, *RIGHT.logprobs[1:]), 4, True, None, id="within-tolerance"),
        pytest.param((65, 66, 0, 68), RIGHT.logprobs, 4, True, "token 2 is 0 instead of 67", id="token"),
        pytest.param((65, 0), RIGHT.logprobs[:2], 4, False, "token 1 is 0 instead of 66", id="token-of-a-part"),
        pytest.param(RIGHT.tokens, (-0.5, -0.27, -1.0, -2.0), 4, True, "log-probability of token 1", id="log-probability"),
        pytest.param(RIGHT.tokens, (float("nan"), *RIGHT.logprobs[1:]), 4, True, "log-probability of token 0", id="nan"),
        pytest.param(RIGHT.tokens[:3], RIGHT.logprobs[:3], 4, True, "3 tokens instead of 4", id="short"),
        pytest.param((), (), 4, True, "0 tokens instead of 4", id="empty"),
        pytest.param(RIGHT.tokens, RIGHT.logprobs, 2, True, "more than the 2 tokens", id="long"),
        pytest.param(RIGHT.tokens, RIGHT.logprobs[:3], 4, True, "4 tokens with 3 log-probabilities", id="no-logprob"),
    ],
)
def test_answers_are_judged(
    tokens: tuple[int, ...], logprobs: tuple[float, ...], asked: int, whole: bool, says: str | None
) -> None:
    judge = oracle()
    difference = judge.judge("p", Answer(tokens, logprobs), asked=asked, whole=whole)
    if says is None:
        assert difference is None
    else:
        assert difference is not None
        assert says in difference.what
        assert difference.expected == RIGHT.tokens[:asked]
        assert judge.max_deviation == 0.0
    assert judge.judged == 1


def test_the_largest_deviation_of_right_answers_is_kept() -> None:
    judge = oracle()
    judge.judge("p", Answer(RIGHT.tokens, (-0.508, -0.25, -1.0, -2.0)), asked=4, whole=True)
    judge.judge("p", Answer(RIGHT.tokens, RIGHT.logprobs), asked=4, whole=True)
    assert judge.max_deviation == pytest.approx(0.008)


def test_prompts_repeat_from_the_seed_and_share_beginnings() -> None:
    prompts = make_prompts(60, seed=5, longest=800)
    assert prompts == make_prompts(60, seed=5, longest=800)
    assert prompts != make_prompts(60, seed=6, longest=800)
    assert len({prompt.tokens for prompt in prompts}) == len({prompt.prompt_id for prompt in prompts}) == 60
    lengths = [len(prompt.tokens) for prompt in prompts]
    assert min(lengths) < 32
    assert 400 < max(lengths) <= 800
    shared = sum(a.tokens[:32] == b.tokens[:32] for a, b in itertools.combinations(prompts, 2))
    assert shared > 30
    assert sum("own" in prompt.prompt_id for prompt in prompts) > 2


# --- asking --------------------------------------------------------------------------------------------------------------

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def server(handler: Handler) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    app = web.Application()
    app.router.add_post("/v1/completions", handler)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with aiohttp.ClientSession() as session:
            yield session, f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def choice(index: int, tokens: list[int], end: str | None = None) -> dict[str, object]:
    logprobs = {"token_logprobs": [-0.5] * len(tokens), "top_logprobs": [{"a": -0.5, "b": -0.75, "c": -3.0}] * len(tokens)}
    return {"index": index, "token_ids": tokens, "logprobs": logprobs, "finish_reason": end}


def stream(*events: str, cut: bool = False) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            await response.write(b"data: " + event.encode() + b"\n\n")
        if cut:
            assert request.transport is not None
            request.transport.abort()
        return response

    return handle


def event(*choices: dict[str, object]) -> str:
    return json.dumps({"choices": choices})


async def reply_of(handler: Handler, **changes: object) -> Reply:
    async with server(handler) as (session, url):
        return await ask(session, url, Ask(request_id="r", prompt=PROMPT, output_tokens=2, **changes))  # type: ignore[arg-type]


async def test_samples_of_a_stream_are_told_apart() -> None:
    reply = await reply_of(
        stream(event(choice(1, [70])), event(choice(0, [65]), choice(1, [71], "length")), event(choice(0, [66])), "[DONE]"),
        stream=True,
        samples=2,
    )
    assert reply.ending is Ending.OK
    assert [answer.tokens for answer in reply.answers] == [(65, 66), (70, 71)]
    assert [len(answer.logprobs) for answer in reply.answers] == [2, 2]


@pytest.mark.parametrize(
    ("handler", "error"),
    [
        pytest.param(stream(event(choice(0, [65]))), "stream ended early", id="no-done"),
        pytest.param(stream(event(choice(0, [65])), cut=True), "broken connection", id="cut"),
        pytest.param(stream(event(choice(0, [65])), '{"error": {"code": 502}}', cut=True), "error event", id="event"),
        pytest.param(stream(event(choice(0, [65], "abort")), "[DONE]"), "finish_reason abort", id="finish-reason"),
        pytest.param(stream(event(choice(0, [65])), "junk"), "broken connection", id="junk"),
    ],
)
async def test_a_broken_stream_is_an_error_and_what_came_is_kept(handler: Handler, error: str) -> None:
    reply = await reply_of(handler, stream=True)
    assert (reply.ending, reply.error) == (Ending.ERROR, error)
    assert reply.answers[0].tokens == (65,)


async def test_statuses_and_refusals_are_errors() -> None:
    async def refuse(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": "x"}, status=503)

    reply = await reply_of(refuse)
    assert (reply.ending, reply.error) == (Ending.ERROR, "HTTP 503")
    async with aiohttp.ClientSession() as session:
        nobody = f"http://127.0.0.1:{PortPicker()()}"
        reply = await ask(session, nobody, Ask(request_id="r", prompt=PROMPT, output_tokens=2))
    assert (reply.ending, reply.error) == (Ending.ERROR, "broken connection")


@pytest.mark.parametrize(
    ("times", "ending"),
    [({"leave_after_s": 0.05}, Ending.LEFT), ({"deadline_s": 0.05}, Ending.HUNG)],
)
async def test_leaving_is_not_hanging(times: dict[str, float], ending: Ending) -> None:
    gone = asyncio.Event()

    async def hang(request: web.Request) -> web.StreamResponse:
        try:
            await asyncio.Event().wait()
        finally:
            gone.set()
        raise AssertionError

    async with server(hang) as (session, url):
        reply = await ask(session, url, Ask(request_id="r", prompt=PROMPT, output_tokens=2, **times))
        await asyncio.wait_for(gone.wait(), 20)
    assert reply.ending is ending


async def test_a_reference_has_its_smallest_margin() -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        assert (await request.json())["logprobs"] == 2
        return web.json_response({"choices": [choice(0, [65, 66], "length")]})

    async with server(handle) as (session, url):
        found = await fetch_reference(session, url, PROMPT, 2)
        assert found == Reference(Answer((65, 66), (-0.5, -0.5)), 0.25)
        with pytest.raises(ValueError, match="2 tokens instead of 3"):
            await fetch_reference(session, url, PROMPT, 3)


def test_several_samples_are_greedy_too() -> None:
    one = body_of(Ask(request_id="r", prompt=PROMPT, output_tokens=2))
    several = body_of(Ask(request_id="r", prompt=PROMPT, output_tokens=2, samples=3))
    assert (one["temperature"], "n" in one) == (0, False)
    assert (several["n"], several["top_k"]) == (3, 1)


# --- faults --------------------------------------------------------------------------------------------------------------


def dealt(kinds: list[Kind], seed: str, count: int = 100) -> list[Card]:
    return list(itertools.islice(deal(kinds, seed=seed), count))


def test_a_seed_deals_the_same_faults_again() -> None:
    assert dealt(list(Kind), "1/0") == dealt(list(Kind), "1/0")
    assert dealt(list(Kind), "1/0") != dealt(list(Kind), "1/1")


def test_a_deck_has_every_kind_and_begins_with_the_longest() -> None:
    cards = dealt(list(Kind), "7", 29)
    assert cards[0].kind is Kind.KILL_PREFILL
    assert {card.kind for card in cards} == set(Kind)
    assert all(0.2 <= card.lasts_s <= 10 for card in dealt([Kind.FREEZE_PREFILL], "x"))
    assert all(0 < card.pause_s <= 8 for card in cards)


def test_only_what_is_possible_is_dealt() -> None:
    assert {card.kind for card in dealt([Kind.LINK_DOWN, Kind.CONTROL_CUT], "1")} == {Kind.LINK_DOWN, Kind.CONTROL_CUT}
    assert dealt([], "1") == []


def test_faults_around_a_moment() -> None:
    now = 0.0
    log = FaultLog(lambda: now)
    first = log.add("a", "x")
    now = 1.0
    log.heal(first)
    now = 100.0
    log.add("b", "y", lasts_s=3)
    now = 200.0
    log.add("c", "z")
    assert [fault["kind"] for fault in log.around(110.0, 120.0)] == ["b"]
    assert [fault["kind"] for fault in log.around(10.0, 20.0)] == ["a"]
    assert log.counts() == {"a": 1, "b": 1, "c": 1}
    assert log.around(110.0, 120.0)[0]["lasts_s"] == 3


# --- relays --------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def relayed() -> AsyncIterator[tuple[Relays, int]]:
    """An echo server, and a relay before it."""

    tasks: set[asyncio.Task[None]] = set()

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(1000):
                writer.write(piece)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    served = await asyncio.start_server(echo, "127.0.0.1", 0)
    port = served.sockets[0].getsockname()[1]
    with Relays([(f"127.0.0.2:{port}", f"127.0.0.1:{port}")]) as relays:
        yield relays, port
    # The relay has gone, and with it every connection.
    await asyncio.wait_for(asyncio.gather(*tasks), 20)
    served.close()


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection through the relay, gone afterwards."""
    reader, writer = await asyncio.open_connection("127.0.0.2", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> bytes:
    writer.write(data)
    return await asyncio.wait_for(reader.readexactly(len(data)), 20)


async def test_a_relay_passes_holds_and_passes_on() -> None:
    async with relayed() as (relays, port), connected(port) as (reader, writer):
        assert await exchange(reader, writer, b"one") == b"one"
        for way in ("to", "from", "both"):
            relays.command(0, "hold", way=way)
            writer.write(b"two")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(reader.readexactly(1), 0.2)
            relays.command(0, "pass")
            assert await asyncio.wait_for(reader.readexactly(3), 20) == b"two"
        relays.command(0, "pass", delay_s=0.2)
        loop = asyncio.get_running_loop()
        began = loop.time()
        assert await exchange(reader, writer, b"slow") == b"slow"
        # Later than without, twice: how much later is the machine's affair.
        assert loop.time() - began >= 0.4
        big = os.urandom(3_000_000)
        relays.command(0, "pass")
        writer.write(big)
        assert await asyncio.wait_for(reader.readexactly(len(big)), 20) == big


async def test_a_relay_cuts_old_and_new_connections() -> None:
    async with relayed() as (relays, port):
        async with connected(port) as (reader, writer):
            assert await exchange(reader, writer, b"one") == b"one"
            relays.command(0, "cut")
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await asyncio.wait_for(reader.readexactly(1), 20)
        # A new one may be made, and then is reset, or be reset while it is made.
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            async with connected(port) as (again, other):
                await exchange(again, other, b"two")
        relays.command(0, "pass")
        async with connected(port) as (last, third):
            assert await exchange(last, third, b"three") == b"three"


async def test_a_relay_passes_an_end_on_and_ends_with_its_owner() -> None:
    async with relayed() as (relays, port):
        async with connected(port) as (reader, writer):
            writer.write(b"last words")
            writer.write_eof()
            assert await asyncio.wait_for(reader.read(), 20) == b"last words"
        assert relays._process is not None
        process = psutil.Process(relays._process.pid)
        process.kill()
        process.wait(20)
        with pytest.raises(RelayFailed):
            relays.command(0, "pass")


async def test_a_signal_to_all_of_a_terminal_spares_the_relays() -> None:
    """Whoever is stopped still has to tell them to pass on."""
    async with relayed() as (relays, _):
        assert relays._process is not None
        assert os.getpgid(relays._process.pid) != os.getpgid(0)


def test_a_relay_that_can_not_listen_is_an_error() -> None:
    with pytest.raises(RelayFailed), Relays([("192.0.2.1:9", "127.0.0.1:9")]):
        pytest.fail("must not be entered")


# --- killing -------------------------------------------------------------------------------------------------------------


def test_an_engine_whose_children_end_with_it_is_killed_all_the_same(tmp_path: Path) -> None:
    spec = ServerSpec(name="x", argv=(sys.executable, "-c", "import time; time.sleep(60)"))
    options = InstanceOptions(model=tmp_path)
    cluster = Cluster(
        "x", prefills=1, network=Network.LOOPBACK, options=options, cores=(0,), pick_port=PortPicker(), log_dir=tmp_path
    )
    killed = []

    class Gone(psutil.Process):
        def send_signal(self, sig: int) -> None:
            killed.append(sig)
            raise psutil.NoSuchProcess(self.pid)

        def kill(self) -> None:
            self.send_signal(signal.SIGKILL)

    with cluster.supervisor as supervisor:
        instance = Instance("decode", spec, "http://x")
        server = cluster.start(instance)
        server.own_processes = lambda: [psutil.Process(), Gone(), Gone()]  # type: ignore[method-assign]
        cluster.kill(instance, engine_only=True)
        assert killed == [signal.SIGKILL] * 2
        del server.own_processes
        supervisor.stop()


# --- counting ------------------------------------------------------------------------------------------------------------


def test_counters_go_on_from_life_to_life() -> None:
    totals = Totals()
    totals.seen({"kvpush_failed_receives_total": 3.0, "vllm:other_total": 9.0, "kvpush_failed_receives_created": 1e9})
    totals.seen({})
    totals.died()
    totals.seen({"kvpush_failed_receives_total": 1.0})
    totals.seen({"kvpush_failed_receives_total": 2.0})
    assert totals.get("kvpush_failed_receives_total") == 5.0
    assert totals.as_dict() == {"kvpush_failed_receives": 5.0}


def test_a_footprint_sees_descriptors_and_threads() -> None:
    itself = [psutil.Process()]
    first = footprint(itself)
    reading, writing = os.pipe()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        more = first.grown_to(footprint(itself))
    finally:
        stop.set()
        thread.join()
        os.close(reading)
        os.close(writing)
    assert more["fds"]["pipe:[#]"] == 2
    assert sum(more["threads"].values()) == 1


# --- watching ------------------------------------------------------------------------------------------------------------


async def test_all_that_died_is_noted_before_anything_is_started_again() -> None:
    """Starting one takes a while. Until then another one must not be taken for one that is up, or be noted once it is again."""
    dead, done = ["a", "b"], []

    class Harm:
        async def revive(self, instance: str) -> None:
            done.append(f"revived {instance}")
            if instance == "b":
                raise KeyError("the end of the test")

    watched = object.__new__(storm._Storm)
    watched._harm = Harm()  # type: ignore[assignment]
    watched._found_dead = lambda: dead  # type: ignore[assignment, method-assign, return-value]
    watched._note_death = lambda instance: done.append(f"noted {instance}")  # type: ignore[method-assign]
    with pytest.raises(KeyError):
        await watched._watch_over()
    assert done == ["noted a", "noted b", "revived a", "revived b"]
