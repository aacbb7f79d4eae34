# SPDX-License-Identifier: Apache-2.0
"""The submitter turn by turn, without its thread: order, reports, the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from machines import ids, layout

from kvpush.channels.memory import MemoryNetwork
from kvpush.core import wire
from kvpush.core.consumer import ConsumerConfig, ConsumerMachine
from kvpush.core.events import (
    BlocksSafe,
    ReceiveAborted,
    ReceiveEnded,
    ReceiveRequested,
    ReceiveStatus,
    SourceAborted,
    SourceAnnounced,
    SourceFinished,
    SourcePreempted,
    SourceProgressed,
    SourceReleased,
)
from kvpush.core.ids import AgentName, EngineId, PeerAddress, RequestId
from kvpush.core.producer import ProducerConfig, ProducerMachine
from kvpush.core.scheduling import SchedulingPolicy
from kvpush.core.submitter import Submitter, SubmitterHooks
from kvpush.core.transport import Completion, Descriptors, Region, TransportCapabilities, WriteStatus
from kvpush.errors import InternalError, SubmitterClosed, TransportError

ADDRESS = PeerAddress("prefill", 5000)


class HeldTransport:
    """Writes end when the test says so."""

    name = "toy"
    capabilities = TransportCapabilities(in_process_only=True)

    def __init__(self, agent_name: str) -> None:
        self.agent_name = AgentName(agent_name)
        self.posted: dict[int, AgentName] = {}
        self.ended: list[Completion] = []
        self.refuse = False
        self.closed = False
        self.polls = 0

    def register_memory(self, regions: Sequence[Region]) -> None:
        raise NotImplementedError

    def metadata(self) -> bytes:
        return b"m"

    def add_peer(self, metadata: bytes) -> AgentName:
        return AgentName("c-agent")

    def remove_peer(self, peer: AgentName) -> None:
        pass

    def post_write(self, token: int, peer: AgentName, src: Descriptors, dst: Descriptors) -> None:
        if self.refuse:
            raise TransportError("refused")
        self.posted[token] = peer

    def end_all(self) -> None:
        self.ended += [Completion(token, WriteStatus.DONE) for token in self.posted]
        self.posted.clear()

    def poll(self) -> list[Completion]:
        self.polls += 1
        ended, self.ended = self.ended, []
        return ended

    def progress(self) -> None:
        pass

    @property
    def num_in_flight(self) -> int:
        return len(self.posted) + len(self.ended)

    def close(self) -> None:
        self.closed = True


class Pair:
    """Two submitters in one process, stepped by hand on one fake clock."""

    def __init__(self, **hooks: Any) -> None:
        self.now = 0.0
        network = MemoryNetwork(clock=lambda: self.now)
        self.done_fences: set[object] = set()
        machine = ProducerMachine(
            ProducerConfig(EngineId("p"), AgentName("p-agent"), "toy", policy=SchedulingPolicy(granularity="layer")), layout()
        )
        self.producer = Submitter(
            transport=HeldTransport("p-agent"),
            channel=network.channel(ADDRESS),
            producer=machine,
            hooks=SubmitterHooks(fence_done=lambda token: token in self.done_fences),
            clock=lambda: self.now,
        )
        self.consumer = Submitter(
            transport=HeldTransport("c-agent"),
            channel=network.channel(None),
            consumer=ConsumerMachine(
                ConsumerConfig(EngineId("c"), AgentName("c-agent"), "toy", b"m"), layout(base=1 << 30), lambda: 77
            ),
            clock=lambda: self.now,
        )

    @property
    def transport(self) -> HeldTransport:
        assert isinstance(self.producer.transport, HeldTransport)
        return self.producer.transport

    def turn(self, times: int = 6) -> None:
        for _ in range(times):
            self.producer.step()
            self.consumer.step()

    def request(self, request_id: str = "r", key: str = "t") -> None:
        self.consumer.submit(ReceiveRequested(RequestId(request_id), ADDRESS, (key,), b"d", 8, 0, ids(10, 11)))

    def announce(self, source_id: str = "s", key: str = "t") -> None:
        self.producer.submit(SourceAnnounced(RequestId(source_id), (key,), b"d", 8))

    def progress(self, source_id: str = "s", *, fence: object | None = None, blocks: tuple[int, int] = (1, 2)) -> None:
        self.producer.submit(SourceProgressed(RequestId(source_id), 0, 3, 8, ids(*blocks), fence))


@pytest.fixture
def pair() -> Pair:
    return Pair()


def test_happy_path(pair: Pair) -> None:
    pair.request()
    pair.announce()
    pair.progress()
    pair.turn()
    pair.transport.end_all()
    pair.producer.submit(SourceFinished(RequestId("s")))
    pair.turn()
    assert [o.status for o in pair.consumer.drain() if isinstance(o, ReceiveEnded)] == [ReceiveStatus.RECEIVED]
    assert [type(o) for o in pair.producer.drain()] == [SourceReleased]
    assert pair.producer.num_open == pair.consumer.num_open == 0


def test_a_preemption_is_not_held_up_by_the_fence_of_another_source(pair: Pair) -> None:
    pair.request()
    pair.announce()
    pair.progress()
    pair.turn()
    assert pair.transport.posted
    pair.announce("other", key="u")
    pair.progress("other", fence="not yet", blocks=(3, 4))
    pair.producer.submit(SourcePreempted(RequestId("s")))
    # The writes end, having read blocks that were taken away meanwhile.
    pair.transport.end_all()
    pair.turn()
    assert not pair.consumer.drain(), "a preempted source has been committed"
    pair.done_fences.add("not yet")
    pair.progress(blocks=(5, 6))
    pair.turn()
    pair.transport.end_all()
    pair.turn()
    assert [o.status for o in pair.consumer.drain() if isinstance(o, ReceiveEnded)] == [ReceiveStatus.RECEIVED]


def test_events_of_one_source_keep_their_order_behind_its_fence(pair: Pair) -> None:
    pair.request()
    pair.announce()
    pair.progress(fence="not yet")
    pair.producer.submit(SourceFinished(RequestId("s")))
    pair.turn()
    assert not pair.transport.posted
    assert not pair.producer.drain()
    pair.done_fences.add("not yet")
    pair.turn()
    pair.transport.end_all()
    pair.turn()
    released = pair.producer.drain()
    assert [(o.num_streams, o.error) for o in released if isinstance(o, SourceReleased)] == [(1, None)]


def test_an_illegal_end_of_a_source_that_is_being_read_does_not_release_it(pair: Pair) -> None:
    pair.request()
    pair.announce()
    pair.progress()
    pair.producer.submit(SourceFinished(RequestId("s")))
    pair.turn()
    pair.producer.submit(SourceAborted(RequestId("s"), "too late"))
    pair.turn()
    assert not pair.producer.drain(), "its blocks are still read by writes in flight"
    pair.transport.end_all()
    pair.turn()
    assert [type(o) for o in pair.producer.drain()] == [SourceReleased]


def test_a_receive_that_is_requested_twice_is_reported_once(pair: Pair) -> None:
    pair.request()
    pair.turn()
    pair.request()
    pair.announce()
    pair.progress()
    pair.turn()
    pair.transport.end_all()
    pair.turn()
    assert [o.status for o in pair.consumer.drain() if isinstance(o, ReceiveEnded)] == [ReceiveStatus.RECEIVED]
    assert pair.consumer.counters.local_errors == 1


def test_a_refused_post_fails_the_transfer_on_both_sides(pair: Pair) -> None:
    pair.transport.refuse = True
    pair.request()
    pair.announce()
    pair.progress()
    pair.producer.submit(SourceFinished(RequestId("s")))
    pair.turn()
    ended = [o for o in pair.consumer.drain() if isinstance(o, ReceiveEnded)]
    assert [(o.status, o.blocks_safe) for o in ended] == [(ReceiveStatus.FAILED, True)]
    released = [o for o in pair.producer.drain() if isinstance(o, SourceReleased)]
    assert [o.num_streams for o in released] == [0]
    assert released[0].error is not None


def test_events_that_wait_for_a_fence_are_not_dropped_by_close(pair: Pair) -> None:
    pair.announce()
    pair.progress(fence="not yet")
    pair.producer.submit(SourceFinished(RequestId("s")))
    pair.turn()
    pair.producer._closing = True
    pair.producer._close_deadline = 10.0
    pair.turn()
    assert not pair.producer._may_stop()
    pair.done_fences.add("not yet")
    pair.turn()
    assert pair.producer._may_stop()
    assert [type(o) for o in pair.producer.drain()] == [SourceReleased]


def test_everything_open_is_reported_when_close_runs_out_of_time(pair: Pair) -> None:
    pair.request()
    pair.announce()
    pair.progress()
    pair.turn()
    assert pair.consumer.close(0.0) is False
    ended = [o for o in pair.consumer.drain() if isinstance(o, ReceiveEnded)]
    assert [(o.status, o.blocks_safe) for o in ended] == [(ReceiveStatus.FAILED, False)]
    pair.now += 11.1
    assert [type(o) for o in pair.consumer.drain()] == [BlocksSafe]
    assert pair.producer.close(0.0) is False
    assert [type(o) for o in pair.producer.drain()] == [SourceReleased]
    assert pair.transport.closed
    with pytest.raises(SubmitterClosed):
        pair.announce("more")


def test_a_crash_reports_what_is_open_and_what_is_quarantined(pair: Pair) -> None:
    pair.request("quarantined")
    pair.announce()
    pair.progress()
    pair.turn()
    # The producer falls silent: the request is given up, its blocks are not safe yet.
    for _ in range(5):
        pair.now += 1.0
        pair.consumer.step()
    ended = [o for o in pair.consumer.drain() if isinstance(o, ReceiveEnded)]
    assert [(o.request_id, o.blocks_safe) for o in ended] == [("quarantined", False)]
    pair.request("open")
    pair.consumer._crash(InternalError("planted"))
    pair.consumer._finish()
    ended = [o for o in pair.consumer.drain() if isinstance(o, ReceiveEnded)]
    assert [(o.request_id, o.blocks_safe) for o in ended] == [("open", False)]
    pair.now += 11.1
    assert sorted(o.request_id for o in pair.consumer.drain() if isinstance(o, BlocksSafe)) == ["open", "quarantined"]


def test_a_transport_that_can_not_be_closed_does_not_keep_close_waiting(pair: Pair) -> None:
    def broken() -> None:
        raise TransportError("planted")

    pair.transport.close = broken  # type: ignore[method-assign]
    with pytest.raises(TransportError, match="planted"):
        pair.producer.close(0.0)
    assert pair.producer._stopped.is_set()


def test_aborts_of_unknown_receives_are_no_fault(pair: Pair) -> None:
    pair.consumer.submit(ReceiveAborted(RequestId("never seen")))
    pair.turn()
    assert not pair.consumer.drain()
    assert pair.consumer.counters.local_errors == 0


@pytest.mark.parametrize("frame", [b"", b"KVP", b"\x00" * 64, wire.encode(wire.Goodbye(5))[:-1]])
def test_bad_frames_cost_their_link_and_nothing_else(pair: Pair, frame: bytes) -> None:
    channel = pair.consumer.channel
    link = channel.connect(ADDRESS)
    channel.send(link, frame)
    pair.turn()
    assert pair.producer.counters.bad_frames == 1
    test_happy_path(pair)
