# SPDX-License-Identifier: Apache-2.0
"""What an event costs must not grow with the number of transfers or peers alive. Counted, not timed."""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from machines import ADDRESS, BLOCK_BYTES, Consumer, Producer, ids, posted, sent

from kvpush.core import wire
from kvpush.core.events import MessageReceived, SessionLost, WriteCompleted
from kvpush.core.ids import PeerAddress, Rect, SessionId
from kvpush.core.lease import Deadlines
from kvpush.core.plan import PairPlan
from kvpush.core.scheduling import SchedulingPolicy
from kvpush.testing.simulation import toy_layout

FEW, MANY = 8, 400
SLACK = 1.6
"""A heap of fifty times as many entries is a few levels deeper."""


def calls(action: Callable[[], object]) -> int:
    """How many Python functions of the core an action calls, and lines of it that it runs."""
    counts: collections.Counter[str] = collections.Counter()

    def trace(frame: Any, event: str, arg: object) -> Any:
        if "/kvpush/core/" not in frame.f_code.co_filename.replace("\\", "/"):
            return None
        counts[event] += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return counts["call"] + counts["line"]


def producer_with(num_streams: int, num_peers: int, **limits: int) -> Producer:
    """Streams that all have something to post, and credit for the first only."""
    limits = {"max_inflight_bytes": 2 * BLOCK_BYTES, "max_write_bytes": 2 * BLOCK_BYTES} | limits
    producer = Producer(policy=SchedulingPolicy(granularity="layer", **limits))
    checked, producer.machine.check = producer.machine.check, lambda: None  # type: ignore[method-assign]
    for session in range(1, num_peers + 1):
        producer.connect(session, lease_s=60.0)
    for number in range(num_streams):
        producer.register(str(number), session=1 + number % num_peers, keys=(f"t{number}",))
        producer.announce(f"s{number}", keys=(f"t{number}",))
        producer.progress(source=f"s{number}", blocks=ids(1, 2))
    checked()
    assert len(producer.machine._postable) >= num_streams - num_peers
    return producer


def in_flight(producer: Producer) -> list[Any]:
    return list(producer.machine._writes)


EVENTS: dict[str, Callable[[Producer], object]] = {
    "heartbeat answered": lambda producer: producer.machine.handle(
        MessageReceived(SessionId(1), wire.HeartbeatAck(1, seq=producer.seq[1])), producer.now
    ),
    "write completed": lambda producer: producer.machine.handle(WriteCompleted(in_flight(producer)[0]), producer.now),
    "registration": lambda producer: producer.register("new", keys=("new",)),
    "progress": lambda producer: producer.progress(8, source="s3"),
    "next deadline": lambda producer: producer.machine.next_deadline(),
}


@pytest.mark.parametrize("limit", ["in all", "per peer"])
@pytest.mark.parametrize("starved", [False, True], ids=["fresh", "starved"])
@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("num_peers", [1, 4], ids=["one-peer", "four-peers"])
def test_a_producer_out_of_credit_does_not_visit_what_waits(event: str, num_peers: int, starved: bool, limit: str) -> None:
    limits = {"max_inflight_bytes": 1 << 30, "max_inflight_bytes_per_peer": 2 * BLOCK_BYTES} if limit == "per peer" else {}
    costs = []
    for num_streams in (FEW, MANY):
        producer = producer_with(num_streams, num_peers, **limits)
        if starved:
            producer.now += 1.0
        assert in_flight(producer)
        costs.append(calls(lambda producer=producer: EVENTS[event](producer)))
    assert costs[1] <= SLACK * costs[0] + 20, costs


@pytest.mark.parametrize("event", EVENTS)
def test_a_producer_does_not_visit_other_peers(event: str) -> None:
    costs = []
    for num_peers in (FEW, MANY):
        producer = producer_with(num_peers, num_peers)
        costs.append(calls(lambda producer=producer: EVENTS[event](producer)))
    assert costs[1] <= SLACK * costs[0] + 20, costs


def test_a_lost_session_does_not_visit_the_others() -> None:
    costs = []
    for num_peers in (FEW, MANY):
        producer = producer_with(0, num_peers)
        lost = SessionLost(SessionId(2), "gone")
        costs.append(calls(lambda producer=producer, lost=lost: producer.machine.handle(lost, producer.now)))
    assert costs[1] <= costs[0] + 10, costs


def test_a_stalled_peer_does_not_hold_up_the_others() -> None:
    """Without a lease the streams of one peer wait unseen, until it answers again."""
    producer = Producer()
    for session in (1, 2):
        producer.connect(session, lease_s=5.0)
    for session in (1, 2):
        producer.register(str(session), session=session, keys=(f"t{session}",))
        producer.announce(f"s{session}", keys=(f"t{session}",))
    producer.now += 4.8
    for session in (1, 2):
        assert not posted(producer.progress(source=f"s{session}", blocks=ids(1, 2)))
    # Heartbeats were sent at once; only the second peer answers.
    effects = producer.say(wire.HeartbeatAck(2, seq=producer.seq[2]))
    assert {write.agent_name for write in posted(effects)} == {"c-agent-2"}
    effects = producer.say(wire.HeartbeatAck(1, seq=producer.seq[1]))
    assert {write.agent_name for write in posted(effects)} == {"c-agent-1"}
    assert len(producer.machine._postable) == 0


def test_what_is_more_urgent_goes_first_though_a_large_one_was_blocked() -> None:
    """A short prompt that comes later passes a long one that waits for credit."""
    producer = Producer(policy=SchedulingPolicy(granularity="layer", max_inflight_bytes=6 * BLOCK_BYTES))
    producer.connect(lease_s=60.0)
    for name, tokens in (("a", 4), ("long", 120), ("short", 4)):
        producer.register(name, keys=(name,), tokens=tokens, blocks=ids(*range(-(-tokens // 4))))
        producer.announce(name, keys=(name,), tokens=tokens)
    assert len(posted(producer.progress(4, source="a", blocks=ids(1)))) == 1
    assert not posted(producer.progress(120, source="long", blocks=ids(*range(30)))), "90 slabs on top of 3 are too many"
    assert len(posted(producer.progress(4, source="short", blocks=ids(1)))) == 1
    first, second = in_flight(producer)
    assert not posted(producer.complete([producer.machine._writes[first].inflight[first][0]]))
    effects = producer.complete([producer.machine._writes[second].inflight[second][0]])
    assert [write.num_bytes for write in posted(effects)] == [90 * BLOCK_BYTES], "the first of all always may"


@pytest.mark.parametrize("event", ["heartbeat", "request", "commit"])
def test_a_consumer_does_not_visit_other_receives_or_peers(event: str) -> None:
    costs = []
    for count in (FEW, MANY):
        consumer = Consumer()
        consumer.machine.check = lambda: None  # type: ignore[method-assign]
        for number in range(count):
            peer = ADDRESS if number % 2 else PeerAddress(f"prefill-{number}", 5000)
            consumer.request(str(number), keys=(f"t{number}",), peer=peer)
            if number < 2 or not number % 2:
                consumer.welcome(consumer.machine.counters.sessions_opened)
        actions: dict[str, Callable[[], object]] = {
            "heartbeat": lambda consumer=consumer: consumer.say(wire.Heartbeat(1, seq=9)),
            "request": lambda consumer=consumer: consumer.request("new"),
            "commit": lambda consumer=consumer: consumer.part(
                wire.Commit, "0", session=1, epoch=1, coverage=(Rect(0, 3, 0, 2, 0, 8),)
            ),
        }
        costs.append(calls(actions[event]))
    assert costs[1] <= SLACK * costs[0] + 10, costs


def test_registering_with_many_ranks_packs_blocks_once() -> None:
    costs = []
    for ranks in (2, 32):
        consumer = Consumer(layers=32)
        endpoints = tuple(wire.Endpoint(rank, "", 5000 + rank) for rank in range(ranks))
        consumer.request("first")
        for rank in range(ranks):
            covers = (Rect(32 * rank // ranks, 32 * (rank + 1) // ranks, 0, 2, 0, 1),)
            consumer.welcome(rank + 1, covers=covers, endpoints=endpoints)
        effects: list[Any] = []
        costs.append(calls(lambda consumer=consumer, effects=effects: effects.extend(consumer.request("second"))) / ranks)
        registrations = sent(effects, wire.RegisterBlocks)
        assert len(registrations) == ranks
        assert all(message.blocks is registrations[0].blocks for message in registrations)
    assert costs[1] <= costs[0], costs


def test_the_heap_of_deadlines_stays_small() -> None:
    deadlines: Deadlines[int] = Deadlines()
    for round_ in range(50):
        for key in range(100):
            deadlines.set(key, 10.0 + 100 * round_ + key)
    assert len(deadlines._heap) <= 4 * 100 + 1
    assert deadlines.next() == 10.0 + 100 * 49


@pytest.mark.parametrize("outermost", [False, True], ids=["layers-outermost", "blocks-outermost"])
def test_planning_does_not_visit_blocks_or_layers_one_by_one(outermost: bool) -> None:
    costs = []
    for num_layers, num_blocks in ((2, 16), (64, 4096)):
        plan = PairPlan(
            *(
                toy_layout(range(num_layers), base=base, num_blocks=num_blocks, blocks_outermost=outermost)
                for base in (1 << 32, 1 << 44)
            )
        )
        table = (np.arange(num_blocks, dtype=np.int32)[::-1].copy(),)
        costs.append(
            calls(
                lambda plan=plan, table=table, n=num_layers: (plan.descriptors(0, n, table, table), plan.coverage(0, n, 0, 1))
            )
        )
    assert costs[0] == costs[1]
