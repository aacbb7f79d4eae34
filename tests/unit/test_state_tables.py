# SPDX-License-Identifier: Apache-2.0
"""Every state x event of both machines, and the diagrams made of the tables.

The diagrams in ``docs/state-machines.md`` are written by ``python tests/unit/test_state_tables.py``.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from machines import Consumer, Producer, ids, posted, reports, sent

from kvpush.core import consumer as consumer_module
from kvpush.core import producer as producer_module
from kvpush.core import wire
from kvpush.core.consumer import ReceiveState
from kvpush.core.effects import Effect, StartDigest, StartVisibilityFence
from kvpush.core.events import (
    BlocksSafe,
    DigestFailed,
    DigestReady,
    ReceiveAborted,
    ReceiveEnded,
    SessionLost,
    SourceAborted,
    SourceFinished,
    SourcePreempted,
    SourceReleased,
    VisibilityFailed,
    VisibilityReached,
    WriteErrored,
)
from kvpush.core.ids import DigestId, Epoch, Rect, RequestId, SessionId
from kvpush.core.machine import Table, mermaid
from kvpush.core.producer import StreamState
from kvpush.errors import InternalError, LocalProtocolError

DOC = Path(__file__).parents[2] / "docs" / "state-machines.md"
WHOLE = (Rect(0, 3, 0, 2, 0, 8),)
DIGESTS = (b"0", b"1", b"2")


# --- the diagrams -----------------------------------------------------------------------------------------------------


def diagrams() -> dict[str, str]:
    return {
        "producer": mermaid(producer_module.TABLE, [StreamState.AWAITING_BLOCKS], producer_module.TERMINAL),
        "consumer": mermaid(consumer_module.TABLE, [ReceiveState.REGISTERED], consumer_module.TERMINAL),
    }


def with_diagrams(text: str) -> str:
    for name, diagram in diagrams().items():
        head, begin, rest = text.partition(f"<!-- begin {name} -->\n")
        _, end, tail = rest.partition(f"<!-- end {name} -->")
        assert begin, f"{DOC.name} has lost the markers of the {name} diagram"
        assert end, f"{DOC.name} has lost the markers of the {name} diagram"
        text = f"{head}{begin}```mermaid\n{diagram}\n```\n{end}{tail}"
    return text


def test_the_diagrams_in_the_docs_are_those_of_the_tables() -> None:
    text = DOC.read_text()
    assert text == with_diagrams(text), f"stale: run python {Path(__file__).relative_to(DOC.parents[1])}"


@pytest.mark.parametrize("name", ["producer", "consumer"])
def test_every_state_is_explained_in_the_docs(name: str) -> None:
    states: type[enum.Enum] = {"producer": StreamState, "consumer": ReceiveState}[name]
    text = DOC.read_text()
    for state in states:
        assert f"`{state.name}`" in text


@pytest.mark.parametrize(
    ("table", "states", "terminal", "owner"),
    [
        (producer_module.TABLE, StreamState, producer_module.TERMINAL, producer_module.ProducerMachine),
        (consumer_module.TABLE, ReceiveState, consumer_module.TERMINAL, consumer_module.ConsumerMachine),
    ],
    ids=["producer", "consumer"],
)
def test_tables_are_sound(table: Table, states: type[enum.Enum], terminal: tuple[enum.Enum, ...], owner: type) -> None:
    for (state, event), transition in table.items():
        assert state not in terminal, f"{event} in the terminal state {state.name}"
        assert hasattr(owner, transition.handler)
        assert transition.targets
    for state in states:
        if state not in terminal:
            assert (state, "DeadlinePassed") in table, f"{state.name} can't time out"
            assert (state, "GivenUp") in table, f"{state.name} can't be given up"
    reached = {target for transition in table.values() for target in transition.targets}
    assert reached | {next(iter(states))} == set(states)


# --- the producer's streams ---------------------------------------------------------------------------------------------


def _joined(producer: Producer) -> list[Effect]:
    producer.connect()
    producer.announce()
    return producer.register()


def streaming(producer: Producer) -> list[Effect]:
    _joined(producer)
    return producer.progress(4, blocks=ids(1, 2))


def draining(producer: Producer) -> list[Effect]:
    _joined(producer)
    return producer.progress(8, blocks=ids(1, 2))


def digesting(producer: Producer) -> list[Effect]:
    producer.connect(digest="toy-digest")
    producer.announce()
    producer.register(verify=True)
    ended = producer.complete(posted(producer.progress(8, blocks=ids(1, 2))))
    assert [effect.digest_id for effect in ended if isinstance(effect, StartDigest)] == [1]
    return []


def cancelling(producer: Producer) -> list[Effect]:
    writes = streaming(producer)
    producer.say(wire.Cancel(1, request_id="r", epoch=1))
    return writes


def done(producer: Producer) -> list[Effect]:
    producer.complete(posted(draining(producer)))
    return []


def aborted(producer: Producer) -> list[Effect]:
    _joined(producer)
    producer.say(wire.Cancel(1, request_id="r", epoch=1))
    return []


def failed(producer: Producer) -> list[Effect]:
    _joined(producer)
    producer.do(SourceAborted(RequestId("s"), "x"))
    return []


def awaiting(producer: Producer) -> list[Effect]:
    producer.connect()
    return producer.register()


STREAMS: dict[StreamState, Callable[[Producer], list[Effect]]] = {
    StreamState.AWAITING_BLOCKS: awaiting,
    StreamState.STREAMING: streaming,
    StreamState.DRAINING: draining,
    StreamState.DIGESTING: digesting,
    StreamState.CANCELLING: cancelling,
    StreamState.DONE: done,
    StreamState.ABORTED: aborted,
    StreamState.FAILED: failed,
}
PRODUCER_INPUTS: dict[str, Callable[[Producer, list[Effect]], Any]] = {
    "announced": lambda p, w: p.announce("another"),
    "announced again": lambda p, w: p.announce(),
    "progressed": lambda p, w: p.progress(8, blocks=None),
    "progressed with blocks": lambda p, w: p.progress(8, blocks=ids(3, 4)),
    "preempted": lambda p, w: p.do(SourcePreempted(RequestId("s"))),
    "finished": lambda p, w: p.do(SourceFinished(RequestId("s"))),
    "aborted": lambda p, w: p.do(SourceAborted(RequestId("s"), "client gone")),
    "registered again": lambda p, w: p.register(),
    "registered for the next epoch": lambda p, w: p.register(epoch=2),
    "registered for an older epoch": lambda p, w: p.register(epoch=0),
    "registered out of the pool": lambda p, w: p.register("wild", blocks=ids(10, 999)),
    "registered with too few blocks": lambda p, w: p.register("short", blocks=ids(10)),
    "registered with a block twice": lambda p, w: p.register("twice", blocks=ids(10, 10)),
    "registered off the block": lambda p, w: p.register("off", token_lo=3, blocks=ids(10, 11)),
    "inquired": lambda p, w: p.say(wire.Inquiry(1, streams=(wire.StreamRef("r", 1), wire.StreamRef("nobody", 1)))),
    "inquired of another epoch": lambda p, w: p.say(wire.Inquiry(1, streams=(wire.StreamRef("r", 0), wire.StreamRef("r", 2)))),
    "cancelled": lambda p, w: p.say(wire.Cancel(1, request_id="r", epoch=1)),
    "older epoch cancelled": lambda p, w: p.say(wire.Cancel(1, request_id="r", epoch=0)),
    "unknown cancelled": lambda p, w: p.say(wire.Cancel(1, request_id="nobody", epoch=1)),
    "declined": lambda p, w: p.say(wire.Decline(1, keys=("t",), prompt_digest=b"d")),
    "acknowledged": lambda p, w: p.say(wire.HeartbeatAck(1, seq=1)),
    "acknowledged what was never sent": lambda p, w: p.say(wire.HeartbeatAck(1, seq=10**9)),
    "hello again": lambda p, w: p.say(p.hello()),
    "another hello": lambda p, w: p.connect(2),
    "goodbye": lambda p, w: p.say(wire.Goodbye(1)),
    "a producer's message": lambda p, w: p.say(wire.Heartbeat(1, seq=1)),
    "message of an unknown session": lambda p, w: p.say(wire.Cancel(99, request_id="r", epoch=1)),
    "link lost": lambda p, w: p.do(SessionLost(SessionId(1), "gone")),
    "unknown link lost": lambda p, w: p.do(SessionLost(SessionId(99), "gone")),
    "writes completed": lambda p, w: p.complete(posted(w)),
    "writes failed": lambda p, w: [p.do(WriteErrored(write.write_id, "x")) for write in posted(w)],
    "writes failed, and may land": lambda p, w: [p.do(WriteErrored(write.write_id, "x", may_land=True)) for write in posted(w)],
    "digest ready": lambda p, w: p.do(DigestReady(DigestId(1), (b"x",) * 3)),
    "digest failed": lambda p, w: p.do(DigestFailed(DigestId(1), "x")),
    "registered for a digest": lambda p, w: p.register("other", verify=True),
    "a short wait": lambda p, w: p.wait(0.6),
    "a long wait": lambda p, w: p.wait(1000.0),
    "shut down": lambda p, w: p.shutdown(),
}


@pytest.mark.parametrize("state", list(StreamState), ids=lambda state: state.name)
@pytest.mark.parametrize("what", list(PRODUCER_INPUTS))
def test_producer_takes_anything_in_any_state(state: StreamState, what: str) -> None:
    producer = Producer()
    writes = STREAMS[state](producer)
    session = producer.machine._sessions[SessionId(1)]
    stream = session.streams.get(RequestId("r"))
    assert (stream.state if stream else state) is state
    before = producer.machine.num_streams, producer.machine.num_in_flight, producer.machine.num_sources
    released: list[SourceReleased] = []

    def collect(effects: Any) -> None:
        for effect in effects:
            if isinstance(effect, list):
                collect(effect)
            else:
                released.extend(reports([effect]))  # type: ignore[arg-type]

    try:
        collect(PRODUCER_INPUTS[what](producer, writes))
    except LocalProtocolError:
        assert before == (producer.machine.num_streams, producer.machine.num_in_flight, producer.machine.num_sources)
    producer.machine.check()
    # Whatever happened: when all writes and digests end and time passes, nothing is left and nothing was reported twice.
    for digest_id in list(producer.machine._digests):
        collect(producer.do(DigestReady(digest_id, (b"x",) * 3)))
    for write_id in list(producer.machine._writes):
        collect(producer.do(WriteErrored(write_id, "the end")))
    for name in list(producer.machine._sources):
        try:
            collect(producer.do(SourceAborted(name, "the end")))
        except LocalProtocolError:
            pass
    for _ in range(4):
        collect(producer.wait(500.0))
    assert (producer.machine.num_streams, producer.machine.num_in_flight, producer.machine.num_sources) == (0, 0, 0)
    assert len({outcome.source_id for outcome in released}) == len(released)


# --- the consumer's receives --------------------------------------------------------------------------------------------


def registered(consumer: Consumer) -> None:
    consumer.request()
    consumer.welcome()


def receiving(consumer: Consumer) -> None:
    registered(consumer)
    consumer.part(wire.Streaming)


def verifying(consumer: Consumer) -> None:
    registered(consumer)
    committed = consumer.part(wire.Commit, coverage=WHOLE, digests=DIGESTS, digest_hi=8)
    assert [e for e in committed if isinstance(e, StartVisibilityFence)]


def receive_digesting(consumer: Consumer) -> None:
    verifying(consumer)
    visible = consumer.do(VisibilityReached(RequestId("r"), Epoch(1)))
    assert [e.digest_id for e in visible if isinstance(e, StartDigest)] == [1]


def fencing(consumer: Consumer) -> None:
    receiving(consumer)
    consumer.do(ReceiveAborted(RequestId("r")))


def quarantined(consumer: Consumer) -> None:
    receiving(consumer)
    ended = reports(consumer.do(SessionLost(SessionId(1), "gone")))
    assert [(o.blocks_safe) for o in ended if isinstance(o, ReceiveEnded)] == [False]


def complete(consumer: Consumer) -> None:
    receive_digesting(consumer)
    consumer.do(DigestReady(DigestId(1), DIGESTS))


def released(consumer: Consumer) -> None:
    fencing(consumer)
    consumer.part(wire.Fenced)


def receive_failed(consumer: Consumer) -> None:
    receiving(consumer)
    consumer.part(wire.Failed, reason="x")


RECEIVES: dict[ReceiveState, Callable[[Consumer], None]] = {
    ReceiveState.REGISTERED: registered,
    ReceiveState.RECEIVING: receiving,
    ReceiveState.VERIFYING: verifying,
    ReceiveState.DIGESTING: receive_digesting,
    ReceiveState.FENCING: fencing,
    ReceiveState.QUARANTINED: quarantined,
    ReceiveState.COMPLETE: complete,
    ReceiveState.RELEASED: released,
    ReceiveState.FAILED: receive_failed,
}
CONSUMER_INPUTS: dict[str, Callable[[Consumer], Any]] = {
    "requested again": lambda c: c.request(),
    "another requested": lambda c: c.request("another"),
    "requested off the block": lambda c: c.request("off", token_lo=3),
    "requested with too few blocks": lambda c: c.request("short", blocks=ids(1)),
    "aborted": lambda c: c.do(ReceiveAborted(RequestId("r"))),
    "unknown aborted": lambda c: c.do(ReceiveAborted(RequestId("nobody"))),
    "welcomed again": lambda c: c.welcome(),
    "refused": lambda c: c.say(wire.Refused(1, reason="no")),
    "unknown to the peer": lambda c: c.say(wire.Refused(1, reason="no", unknown=True)),
    "heartbeat": lambda c: c.say(wire.Heartbeat(1, seq=2)),
    "registered": lambda c: c.part(wire.Registered, waiting=False),
    "registered, waiting": lambda c: c.part(wire.Registered, waiting=True),
    "streaming": lambda c: c.part(wire.Streaming),
    "committed": lambda c: c.part(wire.Commit, coverage=WHOLE),
    "committed with digests": lambda c: c.part(wire.Commit, coverage=WHOLE, digests=DIGESTS, digest_hi=8),
    "committed with odd digests": lambda c: c.part(wire.Commit, coverage=WHOLE, digests=DIGESTS[:2], digest_hi=8),
    "committed in part": lambda c: c.part(wire.Commit, coverage=(Rect(0, 2, 0, 2, 0, 8),)),
    "committed nonsense": lambda c: c.part(wire.Commit, coverage=(Rect(-5, 2**60, 7, 3, -(2**60), 2**62),) * 128),
    "failing": lambda c: c.part(wire.Failing, reason="x"),
    "failed": lambda c: c.part(wire.Failed, reason="x"),
    "fenced": lambda c: c.part(wire.Fenced),
    **{
        f"stale {kind.__name__}": lambda c, kind=kind, fields=fields: c.part(kind, epoch=0, **fields)
        for kind, fields in (
            (wire.Registered, {"waiting": False}),
            (wire.Streaming, {}),
            (wire.Commit, {"coverage": WHOLE}),
            (wire.Failing, {"reason": "x"}),
            (wire.Failed, {"reason": "x"}),
            (wire.Fenced, {}),
        )
    },
    "standing": lambda c: c.say(wire.Standing(1, streams=(wire.StreamStanding("r", 1, False, 3),))),
    "stale standing": lambda c: c.say(wire.Standing(1, streams=(wire.StreamStanding("r", 0, False, 3),))),
    "goodbye": lambda c: c.say(wire.Goodbye(1)),
    "goodbye without a fence": lambda c: c.say(wire.Goodbye(1, fenced=False)),
    "a consumer's message": lambda c: c.say(wire.HeartbeatAck(1, seq=1)),
    "message of an unknown session": lambda c: c.part(wire.Fenced, session=99),
    "link lost": lambda c: c.do(SessionLost(SessionId(1), "gone")),
    "visible": lambda c: c.do(VisibilityReached(RequestId("r"), Epoch(1))),
    "not visible": lambda c: c.do(VisibilityFailed(RequestId("r"), Epoch(1), "the device has failed")),
    "stale visible": lambda c: c.do(VisibilityReached(RequestId("r"), Epoch(0))),
    "digest ready": lambda c: c.do(DigestReady(DigestId(1), DIGESTS)),
    "digest differs": lambda c: c.do(DigestReady(DigestId(1), (b"0", b"X", b"2"))),
    "digest failed": lambda c: c.do(DigestFailed(DigestId(1), "x")),
    "a short wait": lambda c: c.wait(0.6),
    "a long wait": lambda c: c.wait(1000.0),
    "shut down": lambda c: c.machine.shutdown(c.now),
}


@pytest.mark.parametrize("state", list(ReceiveState), ids=lambda state: state.name)
@pytest.mark.parametrize("what", list(CONSUMER_INPUTS))
def test_consumer_takes_anything_in_any_state(state: ReceiveState, what: str) -> None:
    consumer = Consumer(needs_visibility_fence=True, verify="all", digest_scheme="toy-digest")
    outcomes: list[Any] = []
    inner = consumer.machine.handle

    def handle(event: Any, now: float) -> list[Effect]:
        effects = inner(event, now)
        outcomes.extend(reports(effects))
        return effects

    consumer.machine.handle = handle  # type: ignore[method-assign]
    RECEIVES[state](consumer)
    receive = consumer.machine._receives.get(RequestId("r"))
    assert (receive.state if receive else state) is state
    stale = consumer.machine.counters.stale_messages
    told = len(outcomes)
    try:
        outcome_effects = CONSUMER_INPUTS[what](consumer)
        if what in ("a short wait", "a long wait", "shut down"):
            outcomes.extend(reports(outcome_effects))
    except LocalProtocolError:
        assert (receive.state if receive else state) is state
    consumer.machine.check()
    if what.startswith("stale"):
        assert consumer.machine.counters.stale_messages == stale + 1
        assert len(outcomes) == told
        assert receive is None or receive.state is state
    for name in list(consumer.machine._receives):
        consumer.do(ReceiveAborted(name))
    for _ in range(6):
        outcomes.extend(reports(consumer.wait(500.0)))
    # A visibility fence that still runs may copy: nothing is safe before its end.
    assert all(receive.fence_running for receive in consumer.machine._receives.values())
    for name, receive in list(consumer.machine._receives.items()):
        consumer.do(VisibilityFailed(name, receive.epoch, "the end"))
    assert consumer.machine.num_receives == 0
    assert not consumer.machine.expects_writes
    ended = [o.request_id for o in outcomes if isinstance(o, ReceiveEnded)]
    again = what == "requested again" and receive is None
    assert len(set(ended)) == len(ended) - again, "an id may be requested again once it has ended"
    unsafe = sorted(o.request_id for o in outcomes if isinstance(o, ReceiveEnded) and not o.blocks_safe)
    assert unsafe == sorted(o.request_id for o in outcomes if isinstance(o, BlocksSafe))


def test_what_no_table_allows_is_an_internal_error_and_changes_nothing() -> None:
    producer = Producer()
    awaiting(producer)
    stream = producer.machine._sessions[SessionId(1)].streams[RequestId("r")]
    names = {event for _, event in producer_module.TABLE}
    for state, event in itertools.product(StreamState, sorted(names)):
        if (state, event) not in producer_module.TABLE:
            stream.state = state
            with pytest.raises(InternalError, match=f"{event} in state {state.name}"):
                producer.machine._step(stream, event, 0.0)
            assert stream.state is state
    consumer = Consumer()
    registered(consumer)
    receive = consumer.machine._receives[RequestId("r")]
    names = {event for _, event in consumer_module.TABLE}
    for receive_state, event in itertools.product(ReceiveState, sorted(names)):
        if (receive_state, event) not in consumer_module.TABLE:
            receive.state = receive_state
            with pytest.raises(InternalError, match=f"{event} in state {receive_state.name}"):
                consumer.machine._step(receive, event, 0.0)
            assert receive.state is receive_state


def test_a_handler_that_leaves_the_table_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def wild(self: object, stream: Any, now: float) -> None:
        stream.state = StreamState.DONE

    producer = Producer()
    streaming(producer)
    monkeypatch.setattr(producer_module.ProducerMachine, "_on_source_grew", wild)
    with pytest.raises(InternalError, match="which the table doesn't allow") as caught:
        producer.machine.handle(progressed(), producer.now)
    assert caught.value.story


def progressed() -> Any:
    from kvpush.core.events import SourceProgressed

    return SourceProgressed(RequestId("s"), 0, 3, 8)


def test_stories_tell_what_happened() -> None:
    producer = Producer()
    draining(producer)
    story = "\n".join(producer.machine.story(RequestId("s")))
    assert "announced, 8 tokens" in story
    assert "AllPosted" in story
    assert producer.machine.story(RequestId("nobody")) == ()
    consumer = Consumer()
    receiving(consumer)
    assert "Streaming" in "\n".join(consumer.machine.story(RequestId("r")))
    assert sent(consumer.do(ReceiveAborted(RequestId("r"))), wire.Cancel)


if __name__ == "__main__":
    DOC.write_text(with_diagrams(DOC.read_text()))
