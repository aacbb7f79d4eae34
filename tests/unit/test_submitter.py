# SPDX-License-Identifier: Apache-2.0
"""The submitter turn by turn, without its thread: order, reports, the end."""

from __future__ import annotations

import time
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
    SourceStarted,
    StartAwaitCancelled,
    StartAwaited,
)
from kvpush.core.ids import AgentName, EngineId, PeerAddress, RequestId, UnpackId
from kvpush.core.producer import ProducerConfig, ProducerMachine
from kvpush.core.scheduling import LinkEstimate, SchedulingPolicy
from kvpush.core.submitter import Submitter, SubmitterHooks
from kvpush.core.transport import Completion, Descriptors, Region, TransportCapabilities, WriteStatus
from kvpush.errors import BackendError, InternalError, SubmitterClosed, TransportError

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

    def __init__(
        self,
        *,
        policy: SchedulingPolicy | None = None,
        hooks: SubmitterHooks | None = None,
        consumer_hooks: SubmitterHooks | None = None,
        digest_scheme: str = "",
    ) -> None:
        self.now = 0.0
        network = MemoryNetwork(clock=lambda: self.now)
        self.done_fences: set[object] = set()
        machine = ProducerMachine(
            ProducerConfig(
                EngineId("p"),
                AgentName("p-agent"),
                "toy",
                digest_scheme=digest_scheme,
                policy=policy or SchedulingPolicy(granularity="layer"),
            ),
            layout(),
        )
        self.producer = Submitter(
            transport=HeldTransport("p-agent"),
            channel=network.channel(ADDRESS),
            producer=machine,
            hooks=hooks or SubmitterHooks(fence_done=lambda token: token in self.done_fences),
            clock=lambda: self.now,
        )
        self.consumer = Submitter(
            transport=HeldTransport("c-agent"),
            channel=network.channel(None),
            consumer=ConsumerMachine(
                ConsumerConfig(
                    EngineId("c"),
                    AgentName("c-agent"),
                    "toy",
                    b"m",
                    needs_visibility_fence=consumer_hooks is not None,
                    verify="all" if digest_scheme else "off",
                    digest_scheme=digest_scheme,
                ),
                layout(base=1 << 30),
                lambda: 77,
            ),
            hooks=consumer_hooks,
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

    def pass_time(self, seconds: float) -> None:
        for _ in range(int(seconds / 0.25)):
            self.now += 0.25
            self.turn(2)

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


def test_a_slow_link_is_polled_rarely(pair: Pair) -> None:
    pair.request()
    pair.announce()
    pair.producer.submit(SourceProgressed(RequestId("s"), 0, 3, 4, ids(1)))
    pair.now += 1.0
    pair.turn()
    assert pair.transport.num_in_flight
    assert 0 < (pair.producer._timeout() or 0) <= 1e-3, "nothing is known of the link"
    pair.now += 0.5
    pair.transport.end_all()
    pair.turn()
    pair.producer.submit(SourceProgressed(RequestId("s"), 0, 3, 8, ids(2)))
    pair.turn()
    assert pair.transport.num_in_flight
    assert pair.producer._timeout() == pytest.approx(LinkEstimate.LONGEST_POLL_S)
    pair.transport.end_all()
    pair.producer.submit(SourceFinished(RequestId("s")))
    pair.turn()
    assert [o.status for o in pair.consumer.drain() if isinstance(o, ReceiveEnded)] == [ReceiveStatus.RECEIVED]


def test_the_target_polls_often_while_bytes_land_and_rarely_while_none_do(pair: Pair) -> None:
    """Where the target's polls move the bytes, one that has moved some is followed by another soon."""
    target = pair.consumer.transport
    assert isinstance(target, HeldTransport)
    target.capabilities = TransportCapabilities(in_process_only=True, target_must_poll=True)
    pair.request()
    pair.announce()
    pair.producer.submit(SourceProgressed(RequestId("s"), 0, 3, 4, ids(1)))
    pair.turn()
    pair.now += 1.0
    for _ in range(20):
        pair.consumer.step()
    slow = pair.consumer._timeout()
    assert slow == pytest.approx(1e-3)

    def move() -> None:
        until = time.thread_time() + 1e-3
        while time.thread_time() < until:
            pass

    target.progress = move  # type: ignore[method-assign]
    for _ in range(3):
        pair.consumer.step()
        assert pair.consumer._timeout() == pytest.approx(200e-6)
    del target.progress  # type: ignore[method-assign]
    for _ in range(20):
        pair.consumer.step()
    assert pair.consumer._timeout() == slow


def test_a_digest_is_asked_for_often_however_slow_the_link_is() -> None:
    pair = Pair(digest_scheme="toy", hooks=SubmitterHooks(start_digest=lambda layers, blocks: lambda: None))
    pair.request("verified", "t")
    pair.announce("s", "t")
    pair.progress("s")
    pair.turn()
    pair.now += 0.5
    pair.transport.end_all()
    pair.turn()
    pair.request("under way", "u")
    pair.announce("s2", "u")
    pair.progress("s2", blocks=(3, 4))
    pair.turn()
    assert pair.transport.num_in_flight
    assert 0 < (pair.producer._timeout() or 0) <= 1e-3


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


def test_an_end_that_a_transport_tells_twice_or_makes_up_is_counted_and_has_no_effect(pair: Pair) -> None:
    pair.request()
    pair.announce()
    pair.progress()
    pair.turn()
    (token,) = pair.transport.posted
    pair.transport.end_all()
    pair.transport.ended += [Completion(token, WriteStatus.FAILED, "told again"), Completion(4711, WriteStatus.DONE)]
    pair.producer.submit(SourceFinished(RequestId("s")))
    pair.turn()
    assert [o.status for o in pair.consumer.drain() if isinstance(o, ReceiveEnded)] == [ReceiveStatus.RECEIVED]
    assert [o.error for o in pair.producer.drain() if isinstance(o, SourceReleased)] == [None]
    assert pair.producer.counters.transport_errors == 2


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


@pytest.mark.parametrize("error", [BackendError("planted"), RuntimeError("planted")], ids=lambda error: type(error).__name__)
def test_after_the_end_a_copy_that_fails_costs_the_engine_nothing(error: Exception, pair: Pair) -> None:
    def broken() -> bool:
        raise error

    pair.request()
    pair.turn()
    pair.consumer._unpacks[UnpackId(1)] = broken
    assert pair.consumer.close(0.0) is False
    assert [type(o) for o in pair.consumer.drain()] == [ReceiveEnded]
    pair.now += 11.1
    assert [type(o) for o in pair.consumer.drain()] == [BlocksSafe]
    assert pair.consumer.exhausted


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


def test_a_watch_that_was_called_off_is_not_reported_by_a_crash(pair: Pair) -> None:
    for request_id in ("gone", "stays"):
        pair.consumer.submit(StartAwaited(RequestId(request_id), ADDRESS, ("t",), b"d"))
    pair.turn()
    pair.consumer.submit(StartAwaitCancelled(RequestId("gone")))
    pair.consumer._crash(InternalError("planted"))
    pair.consumer._finish()
    assert pair.consumer.drain() == [SourceStarted(RequestId("stays"))]


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


# --- what plugins and transports do wrong -------------------------------------------------------------------------------


def begin(pair: Pair, name: str, blocks: int) -> None:
    pair.consumer.submit(ReceiveRequested(RequestId(f"r-{name}"), ADDRESS, (name,), b"d", 8, 0, ids(blocks, blocks + 1)))
    pair.producer.submit(SourceAnnounced(RequestId(f"s-{name}"), (name,), b"d", 8))
    pair.turn()


def compute(pair: Pair, name: str, blocks: int, *, fence: object = None) -> None:
    pair.producer.submit(SourceProgressed(RequestId(f"s-{name}"), 0, 3, 8, ids(blocks, blocks + 1), fence))
    pair.turn()


def statuses(pair: Pair) -> dict[str, ReceiveStatus]:
    return {o.request_id: o.status for o in pair.consumer.drain() if isinstance(o, ReceiveEnded)}


def test_a_post_that_fails_in_the_middle_of_a_batch_stops_the_rest_of_it() -> None:
    pair = Pair(policy=SchedulingPolicy(granularity="layer", max_write_bytes=64))
    begin(pair, "a", 1)
    inner, tried = pair.transport.post_write, []

    def post_write(token: int, *rest: Any) -> None:
        tried.append(token)
        if len(tried) == 2:
            raise TransportError("planted")
        inner(token, *rest)

    pair.transport.post_write = post_write  # type: ignore[method-assign]
    compute(pair, "a", 1)
    assert len(tried) == 2, "nothing is posted for a stream that has been given up"
    assert statuses(pair) == {"r-a": ReceiveStatus.FAILED}
    pair.transport.end_all()
    pair.turn()
    assert [o.request_id for o in pair.consumer.drain() if isinstance(o, BlocksSafe)] == ["r-a"]
    begin(pair, "b", 5)
    compute(pair, "b", 5)
    pair.transport.end_all()
    pair.turn()
    assert statuses(pair) == {"r-b": ReceiveStatus.RECEIVED}


def test_a_device_fence_that_raises_fails_its_transfer_only() -> None:
    def fence_done(token: object) -> bool:
        if token == "bad":
            raise RuntimeError("the device has failed")
        return True

    pair = Pair(hooks=SubmitterHooks(fence_done=fence_done))
    for name, blocks in (("a", 1), ("b", 5)):
        begin(pair, name, blocks)
    compute(pair, "a", 1, fence="bad")
    compute(pair, "b", 5, fence="good")
    pair.producer.submit(SourceFinished(RequestId("s-a")))
    pair.producer.submit(SourceFinished(RequestId("s-b")))
    pair.turn()
    pair.transport.end_all()
    pair.turn()
    assert statuses(pair) == {"r-a": ReceiveStatus.FAILED, "r-b": ReceiveStatus.RECEIVED}
    released = {o.source_id: o.error for o in pair.producer.drain() if isinstance(o, SourceReleased)}
    assert "the device has failed" in str(released["s-a"])
    assert released["s-b"] is None


def test_a_device_fence_that_never_ends_has_a_deadline() -> None:
    pair = Pair()
    begin(pair, "a", 1)
    compute(pair, "a", 1, fence="never")
    pair.producer.submit(SourceFinished(RequestId("s-a")))
    pair.pass_time(29.0)
    assert statuses(pair) == {}
    pair.pass_time(2.0)
    assert statuses(pair) == {"r-a": ReceiveStatus.FAILED}
    (released,) = pair.producer.drain()
    assert isinstance(released, SourceReleased)
    assert not pair.transport.posted


def test_each_fence_is_asked_once_a_turn_however_many_wait_for_it() -> None:
    asked: list[object] = []
    pair = Pair(hooks=SubmitterHooks(fence_done=lambda token: asked.append(token) or False))
    token = object()
    for number in range(50):
        pair.producer.submit(SourceAnnounced(RequestId(f"s{number}"), (f"t{number}",), b"d", 8))
        pair.producer.submit(SourceProgressed(RequestId(f"s{number}"), 0, 3, 8, ids(1, 2), token))
    pair.producer.step()
    asked.clear()
    pair.producer.step()
    assert len(asked) <= 2


@pytest.mark.parametrize("when", ["started", "polled"])
def test_a_visibility_fence_that_raises_fails_its_transfer_only(when: str) -> None:
    def start(blocks: Any) -> Any:
        if int(blocks[0][0]) != 1:
            return None
        if when == "started":
            raise RuntimeError("the device has failed")

        def done() -> bool:
            raise RuntimeError("the device has failed")

        return done

    pair = Pair(consumer_hooks=SubmitterHooks(start_visibility_fence=start))
    for name, blocks in (("a", 1), ("b", 5)):
        begin(pair, name, blocks)
        compute(pair, name, blocks)
    pair.transport.end_all()
    pair.turn()
    assert statuses(pair) == {"r-a": ReceiveStatus.FAILED, "r-b": ReceiveStatus.RECEIVED}


def test_blocks_are_not_safe_while_a_visibility_fence_runs() -> None:
    ended = False
    pair = Pair(consumer_hooks=SubmitterHooks(start_visibility_fence=lambda blocks: lambda: ended))
    begin(pair, "a", 1)
    compute(pair, "a", 1)
    pair.transport.end_all()
    pair.turn()
    pair.pass_time(31.0)
    (outcome,) = pair.consumer.drain()
    assert isinstance(outcome, ReceiveEnded)
    assert (outcome.status, outcome.blocks_safe) == (ReceiveStatus.FAILED, False)
    pair.pass_time(100.0)
    assert not pair.consumer.drain()
    ended = True
    pair.turn()
    assert pair.consumer.drain() == [BlocksSafe(RequestId("r-a"))]


def test_an_abort_while_a_visibility_fence_runs_waits_for_it() -> None:
    ended = False
    pair = Pair(consumer_hooks=SubmitterHooks(start_visibility_fence=lambda blocks: lambda: ended))
    begin(pair, "a", 1)
    compute(pair, "a", 1)
    pair.transport.end_all()
    pair.turn()
    pair.consumer.submit(ReceiveAborted(RequestId("r-a")))
    pair.pass_time(5.0)
    assert not pair.consumer.drain()
    ended = True
    pair.turn()
    (outcome,) = pair.consumer.drain()
    assert isinstance(outcome, ReceiveEnded)
    assert (outcome.status, outcome.blocks_safe) == (ReceiveStatus.CANCELLED, True)


@pytest.mark.parametrize("end", ["ends", "raises"])
@pytest.mark.parametrize("how", ["closed", "crashed"])
def test_blocks_are_not_safe_while_a_visibility_fence_outlives_the_submitter(how: str, end: str) -> None:
    asked: list[str] = []

    def done() -> bool:
        if asked == ["raises"]:
            raise RuntimeError("the device has failed")
        return bool(asked)

    pair = Pair(consumer_hooks=SubmitterHooks(start_visibility_fence=lambda blocks: done))
    begin(pair, "a", 1)
    compute(pair, "a", 1)
    pair.transport.end_all()
    pair.turn()
    if how == "closed":
        pair.consumer.close(0.0)
    else:
        pair.consumer._crash(InternalError("planted"))
    (outcome,) = pair.consumer.drain()
    assert isinstance(outcome, ReceiveEnded)
    assert (outcome.status, outcome.blocks_safe) == (ReceiveStatus.FAILED, False)
    pair.now += 1000.0
    assert not pair.consumer.drain(), "the lease is long over, and the device may still write"
    assert not pair.consumer.exhausted
    asked.append(end)
    assert pair.consumer.drain() == [BlocksSafe(RequestId("r-a"))]
    assert pair.consumer.exhausted


@pytest.mark.parametrize("method", ["poll", "remove_peer"])
def test_a_transport_that_raises_for_a_moment_costs_nothing(method: str) -> None:
    pair = Pair()
    begin(pair, "a", 1)
    compute(pair, "a", 1)
    inner = getattr(pair.transport, method)

    def raises(*args: Any) -> Any:
        raise RuntimeError("planted")

    setattr(pair.transport, method, raises)
    pair.transport.end_all()
    pair.turn()
    setattr(pair.transport, method, inner)
    pair.turn()
    assert statuses(pair) == {"r-a": ReceiveStatus.RECEIVED}
    assert pair.producer.counters.transport_errors == (6 if method == "poll" else 0)


def test_a_transport_that_goes_on_raising_stops_the_submitter() -> None:
    pair = Pair()
    begin(pair, "a", 1)
    compute(pair, "a", 1)

    def raises() -> Any:
        raise RuntimeError("planted")

    pair.transport.poll = raises  # type: ignore[method-assign]
    with pytest.raises(TransportError, match="can't be polled"):
        pair.pass_time(2.0)


def test_an_engine_whose_callback_raises_harms_itself_only() -> None:
    pair = Pair()

    def raises() -> None:
        raise RuntimeError("planted")

    pair.consumer._on_outcome = raises
    begin(pair, "a", 1)
    compute(pair, "a", 1)
    pair.transport.end_all()
    pair.turn()
    assert statuses(pair) == {"r-a": ReceiveStatus.RECEIVED}
