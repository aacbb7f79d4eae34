# SPDX-License-Identifier: Apache-2.0
"""The one thread that owns the machines, the transport and the channel: inbox -> machine -> transport -> outbox.

The engine thread only ever appends to a deque and takes outcomes out of another one. Everything that costs time (planning
descriptors, posting, polling, talking to peers) happens here. The thread sleeps in ``channel.wait`` until a message, an event
or a deadline; it polls at an interval only while writes are in flight, may be landing, or a device fence is awaited.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvpush.core import wire
from kvpush.core.consumer import ConsumerMachine
from kvpush.core.effects import (
    AddPeer,
    CloseSession,
    Effect,
    OpenSession,
    PostWrite,
    RemovePeer,
    Report,
    Send,
    StartVisibilityFence,
)
from kvpush.core.events import (
    BlocksSafe,
    EngineEvent,
    MessageReceived,
    Outcome,
    PeerAdded,
    PeerRefused,
    ReceiveAborted,
    ReceiveEnded,
    ReceiveRequested,
    ReceiveStatus,
    SessionLost,
    SourceAborted,
    SourceAnnounced,
    SourceFinished,
    SourcePreempted,
    SourceProgressed,
    SourceReleased,
    SourceStarted,
    StartAwaited,
    TransferDeclined,
    VisibilityReached,
    WriteCompleted,
    WriteErrored,
)
from kvpush.core.ids import BlockTable, Epoch, RequestId, SessionId, WriteId
from kvpush.core.producer import ProducerMachine
from kvpush.core.transport import Channel, Link, LinkClosed, Transport, WriteStatus
from kvpush.errors import (
    InternalError,
    KvPushError,
    LocalProtocolError,
    PeerLost,
    RemoteProtocolError,
    SubmitterClosed,
)

logger = logging.getLogger(__name__)

SourceEvent = SourceAnnounced | SourceProgressed | SourcePreempted | SourceFinished | SourceAborted
_WARM_UP_S = 0.25
"""How long a new connection is driven from both ends; setting one up took 7 to 120 ms over UCX."""
_RECEIVE_BATCHES = 64
"""At most this many ``channel.receive`` calls a step, so that a flood can't keep writes from being polled."""


@dataclass(frozen=True, slots=True)
class SubmitterHooks:
    """What the submitter asks of the backend.

    Args:
        fence_done: Whether the device work behind a fence token is final. Never blocks.
        start_visibility_fence: Begins one for the blocks of a receive; returns a poll function, or None: visible already.
    """

    fence_done: Callable[[object], bool] = lambda token: True
    start_visibility_fence: Callable[[BlockTable], Callable[[], bool] | None] = lambda blocks: None


@dataclass(slots=True)
class SubmitterCounters:
    """Monotonic counts, for metrics and tests."""

    steps: int = 0
    events: int = 0
    messages_in: int = 0
    messages_out: int = 0
    messages_lost: int = 0
    bad_frames: int = 0
    hijacks: int = 0
    local_errors: int = 0
    cpu_s: float = 0.0


class Submitter:
    """Runs a producer, a consumer, or both over one transport and one channel.

    Args:
        transport: With memory registered already.
        channel: Bound already where there is a producer.
        producer: None where this endpoint only receives.
        consumer: None where it only sends.
        hooks: The backend's fences.
        poll_interval_s: Shortest pause between two polls while something is in flight.
        max_poll_interval_s: Polling slows down to this while nothing happens.
        clock: Monotonic seconds.
        on_outcome: Called on the submitter thread after an outcome was put out; must not block. For engines that can be woken.
    """

    def __init__(
        self,
        *,
        transport: Transport,
        channel: Channel,
        producer: ProducerMachine | None = None,
        consumer: ConsumerMachine | None = None,
        hooks: SubmitterHooks | None = None,
        poll_interval_s: float = 200e-6,
        max_poll_interval_s: float = 1e-3,
        clock: Callable[[], float] = time.monotonic,
        on_outcome: Callable[[], None] | None = None,
    ) -> None:
        self.transport = transport
        self.channel = channel
        self.producer = producer
        self.consumer = consumer
        self.counters = SubmitterCounters()
        self._machines: list[ProducerMachine | ConsumerMachine] = [m for m in (producer, consumer) if m is not None]
        self._hooks = hooks or SubmitterHooks()
        self._poll_interval_s = poll_interval_s
        self._max_poll_interval_s = max_poll_interval_s
        self._pause_s = poll_interval_s
        self._clock = clock
        self._on_outcome = on_outcome
        self._inbox: deque[EngineEvent] = deque()
        self._outbox: deque[Outcome] = deque()
        self._outbox_changed = threading.Condition()
        self._gate = threading.Lock()
        self._woken = False
        self._closing = False
        self._close_deadline = 0.0
        self._said_goodbye = False
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: KvPushError | None = None
        self._fenced: deque[SourceEvent] = deque()
        self._visibility: dict[tuple[RequestId, Epoch], Callable[[], bool]] = {}
        self._link_of: dict[SessionId, Link] = {}
        self._sessions_of: dict[Link, set[SessionId]] = {}
        self._ours: set[SessionId] = set()
        self._warm_until = float("-inf")
        self._post_s: dict[WriteId, float] = {}
        self.worthwhile_bytes = producer.worthwhile_bytes if producer is not None else 0
        """A copy of the producer's, for the engine thread: less than this need not be submitted at once."""
        self._late_losses: deque[SessionLost] = deque()
        self._open_receives: set[RequestId] = set()
        self._open_watches: set[RequestId] = set()
        self._open_sources: set[RequestId] = set()
        self._quarantined: set[RequestId] = set()
        self._unsafe_until: dict[RequestId, float] = {}
        self._in_good_order = True

    # --- any thread ----------------------------------------------------------------------------------------------------

    def submit(self, event: EngineEvent, *, wake: bool = True) -> None:
        """Hand over an event. It will be handled before :meth:`close` returns. **Owner** any thread; never blocks.

        Args:
            wake: Whether to wake the thread now. False leaves it to the next wake-up: for small news in a burst.

        Raises:
            SubmitterClosed: after :meth:`close`, or when the submitter has stopped on an error.
        """
        with self._gate:
            if self._closing or self._error is not None:
                raise SubmitterClosed(
                    self._error.message if self._error else "the submitter is closed",
                    story=self._error.story if self._error else (),
                )
            if isinstance(event, ReceiveRequested):
                self._open_receives.add(event.request_id)
            elif isinstance(event, StartAwaited):
                self._open_watches.add(event.request_id)
            elif isinstance(event, SourceAnnounced):
                self._open_sources.add(event.source_id)
            self._inbox.append(event)
        if wake:
            self.wake()

    def wake(self) -> None:
        """Make the thread look at its inbox. **Owner** any thread; never blocks."""
        if not self._woken:
            self._woken = True
            self.channel.wake()

    def drain(self) -> list[Outcome]:
        """Outcomes since the last call, oldest first. **Owner** the engine thread; never blocks."""
        if self._unsafe_until:
            self._expire_unsafe()
        outcomes: list[Outcome] = []
        while self._outbox:
            outcomes.append(self._outbox.popleft())
        return outcomes

    def wait_outcome(self, timeout_s: float) -> bool:
        """Sleep until there is an outcome to :meth:`drain`, or the time is over. **Owner** the engine thread."""
        with self._outbox_changed:
            return self._outbox_changed.wait_for(lambda: bool(self._outbox), timeout_s)

    @property
    def error(self) -> KvPushError | None:
        """Why the submitter has stopped, if it has."""
        return self._error

    @property
    def num_open(self) -> int:
        """Sources and receives handed over and not yet reported."""
        return len(self._open_receives) + len(self._open_sources)

    def start(self, name: str = "kvpush-submitter") -> None:
        """Start the thread (a daemon). **Owner** the engine thread, once."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = 5.0) -> bool:
        """Handle what was submitted, cancel the rest, say goodbye, and stop. **Owner** the engine thread; blocks for at most
        ``timeout_s``, then leaks rather than frees. Idempotent.

        Returns:
            True when everything has ended in good order.
        """
        with self._gate:
            already, self._closing = self._closing, True
            if not already:
                self._close_deadline = self._clock() + timeout_s * 0.8
        if self._thread is None:
            if not already:
                self._finish()
        else:
            self.channel.wake()
        return self._stopped.wait(timeout_s) and self._in_good_order

    # --- the submitter thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._may_stop():
                self.step()
                timeout_s = self._timeout()
                if timeout_s is None or timeout_s > 0:
                    self.channel.wait(timeout_s)
        except KvPushError as error:
            self._crash(error)
        except Exception as error:  # noqa: BLE001 - the last line of defence: a bug here must not hang the engine
            crash = InternalError(f"the submitter stopped on {type(error).__name__}: {error}")
            crash.__cause__ = error
            self._crash(crash)
        finally:
            self._finish()

    def step(self) -> None:
        """One turn. Called by the thread; tests without a thread call it themselves."""
        self.counters.steps += 1
        self._woken = False
        happened = len(self._late_losses)
        while self._late_losses:
            self._to_consumer(self._late_losses.popleft())
        happened += self._take_messages()
        happened += self._take_inbox()
        if self._expects_progress():
            self.transport.progress()
        if self.transport.num_in_flight:
            completions = self.transport.poll()
            # What the engine did before these completions were observed comes first: a preemption voids them.
            happened += self._take_inbox()
            for token, status, error in completions:
                happened += 1
                write_id = WriteId(token)
                post_s = self._post_s.pop(write_id, 0.0)
                if status is WriteStatus.DONE:
                    self._to_producer(WriteCompleted(write_id, post_s))
                else:
                    self._to_producer(WriteErrored(write_id, error))
        for key, done in list(self._visibility.items()):
            if done():
                happened += 1
                del self._visibility[key]
                self._to_consumer(VisibilityReached(*key))
        now = self._clock()
        for machine in self._machines:
            deadline = machine.next_deadline()
            if deadline is not None and deadline <= now:
                happened += 1
                self._perform(machine.on_deadline(now))
        self._pause_s = self._poll_interval_s if happened else min(self._pause_s * 1.5, self._max_poll_interval_s)
        if self.producer is not None:
            self.worthwhile_bytes = self.producer.worthwhile_bytes
        if self._closing:
            self._close_step(now)
        if self._thread is not None:
            self.counters.cpu_s = time.thread_time()

    def _timeout(self) -> float | None:
        """How long to sleep: a poll interval while something moves, else until the next deadline."""
        if self._inbox or self._woken or self._late_losses:
            return 0.0
        polling = (
            self.transport.num_in_flight > 0
            or bool(self._fenced)
            or bool(self._visibility)
            or (self.transport.capabilities.target_must_poll and self._expects_progress())
        )
        waits = [self._pause_s] if polling else []
        now = self._clock()
        for machine in self._machines:
            deadline = machine.next_deadline()
            if deadline is not None:
                waits.append(max(0.0, deadline - now))
        if self._closing:
            waits.append(1e-3)
        return min(waits) if waits else None

    def _expects_progress(self) -> bool:
        """Writes may be landing, or a connection is being set up: both need the transport to be driven from this side."""
        return (self.consumer is not None and self.consumer.expects_writes) or self._clock() < self._warm_until

    def _warm_up(self) -> None:
        """A peer is new: drive both ends for a moment, so that no request's first write pays for the connection."""
        self._warm_until = self._clock() + _WARM_UP_S

    def _take_messages(self) -> int:
        count = 0
        for _ in range(_RECEIVE_BATCHES):
            batch = self.channel.receive()
            if not batch:
                break
            count += len(batch)
            for item in batch:
                if isinstance(item, LinkClosed):
                    self._on_link_closed(item.link, item.reason)
                else:
                    self._on_frame(item.link, item.data)
        return count

    def _on_frame(self, link: Link, data: bytes) -> None:
        self.counters.messages_in += 1
        try:
            message = wire.decode(data)
        except RemoteProtocolError as error:
            self.counters.bad_frames += 1
            logger.warning("kvpush: a peer sent a frame that was refused: %s", error.message)
            self._on_link_closed(link, error.message)
            self.channel.close_link(link)
            return
        session = SessionId(message.session)
        bound = self._link_of.get(session)
        if bound is not None and bound != link:
            # A session speaks through the link that opened it and no other.
            self.counters.hijacks += 1
            return
        event = MessageReceived(session, message)
        if session in self._ours:
            if isinstance(message, wire.Welcome):
                self._warm_up()
            self._to_consumer(event)
            return
        if self.producer is None or not isinstance(message, wire.ConsumerMessage):
            self.counters.bad_frames += 1
            return
        if bound is None and isinstance(message, wire.Hello):
            self._bind(session, link)
            self._to_producer(event)
        elif bound is None:
            # Unknown here, as after a restart: the answer has to find its way without a session.
            self._bind(session, link)
            self._to_producer(event)
            self._unbind(session)
        else:
            self._to_producer(event)

    def _on_link_closed(self, link: Link, reason: str) -> None:
        for session in list(self._sessions_of.get(link, ())):
            ours = session in self._ours
            self._unbind(session)
            if ours:
                self._to_consumer(SessionLost(session, reason))
            else:
                self._to_producer(SessionLost(session, reason))

    def _take_inbox(self) -> int:
        count = 0
        while self._inbox:
            event = self._inbox.popleft()
            count += 1
            self.counters.events += 1
            if isinstance(event, SourceEvent):
                self._fenced.append(event)
            else:
                self._engine_event(event)
        # In order per source only: one whose device work is not final must not hold up news of another, such as a
        # preemption, which voids writes that are about to complete.
        held: set[RequestId] = set()
        for _ in range(len(self._fenced)):
            source_event = self._fenced.popleft()
            source_id = source_event.source_id
            if source_id in held or not self._is_final(source_event):
                held.add(source_id)
                self._fenced.append(source_event)
                continue
            count += 1
            self._engine_event(source_event)
        return count

    def _is_final(self, event: SourceEvent) -> bool:
        return not isinstance(event, SourceProgressed) or event.fence is None or self._hooks.fence_done(event.fence)

    def _engine_event(self, event: EngineEvent) -> None:
        """Hand an event of our engine to its machine; one that is illegal ends its request and harms nothing else."""
        try:
            if isinstance(event, ReceiveRequested | ReceiveAborted | TransferDeclined | StartAwaited):
                if self.consumer is None:
                    raise LocalProtocolError("this endpoint has no consumer side: check kv_role")
                self._to_consumer(event)
            else:
                if self.producer is None:
                    raise LocalProtocolError("this endpoint has no producer side: check kv_role")
                self._to_producer(event)
        except LocalProtocolError as error:
            self.counters.local_errors += 1
            logger.error("kvpush: %s was refused: %s", type(event).__name__, error.message)
            # What the machine knows it reports itself, and not before nothing touches its blocks any more.
            if isinstance(event, ReceiveRequested):
                if self.consumer is None or not self.consumer.knows(event.request_id):
                    self._report(ReceiveEnded(event.request_id, ReceiveStatus.FAILED, True, error=error))
            elif isinstance(event, StartAwaited):
                if self.consumer is None:
                    self._report(SourceStarted(event.request_id))
            elif isinstance(event, SourceFinished | SourceAborted) and (
                self.producer is None or not self.producer.knows(event.source_id)
            ):
                self._report(SourceReleased(event.source_id, 0, 0, error))

    def _to_producer(self, event: object) -> None:
        if self.producer is not None:
            self._perform(self.producer.handle(event, self._clock()))  # type: ignore[arg-type]

    def _to_consumer(self, event: object) -> None:
        if self.consumer is not None:
            self._perform(self.consumer.handle(event, self._clock()))  # type: ignore[arg-type]

    def _perform(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self._send(effect.message)
            elif isinstance(effect, PostWrite):
                self._post(effect)
            elif isinstance(effect, Report):
                self._report(effect.outcome)
            elif isinstance(effect, OpenSession):
                self._open_session(effect)
            elif isinstance(effect, CloseSession):
                self._close_session(effect.session)
            elif isinstance(effect, AddPeer):
                self._add_peer(effect)
            elif isinstance(effect, RemovePeer):
                self.transport.remove_peer(effect.agent_name)
            elif isinstance(effect, StartVisibilityFence):
                self._start_visibility_fence(effect)

    def _send(self, message: wire.Message) -> None:
        link = self._link_of.get(SessionId(message.session))
        if link is not None and self.channel.send(link, wire.encode(message)):
            self.counters.messages_out += 1
        else:
            self.counters.messages_lost += 1

    def _post(self, write: PostWrite) -> None:
        started_at = self._clock()
        try:
            src, dst = write.plan.descriptors(write.layer_lo, write.layer_hi, write.src_blocks, write.dst_blocks)
            self.transport.post_write(write.write_id, write.agent_name, src, dst)
            self._post_s[write.write_id] = self._clock() - started_at
        except KvPushError as error:
            self._to_producer(WriteErrored(write.write_id, error.message))
        except Exception as error:
            logger.exception("kvpush: posting a write failed")
            self._to_producer(WriteErrored(write.write_id, f"{type(error).__name__}: {error}"))

    def _open_session(self, effect: OpenSession) -> None:
        self._ours.add(effect.session)
        try:
            link = self.channel.connect(effect.address)
        except KvPushError as error:
            self._ours.discard(effect.session)
            # The machine is in the middle of handling something; it hears of this on the next turn.
            self._late_losses.append(SessionLost(effect.session, error.message))
            return
        self._bind(effect.session, link)

    def _close_session(self, session: SessionId) -> None:
        link = self._unbind(session)
        if link is not None and link not in self._sessions_of:
            self.channel.close_link(link)

    def _bind(self, session: SessionId, link: Link) -> None:
        self._link_of[session] = link
        self._sessions_of.setdefault(link, set()).add(session)

    def _unbind(self, session: SessionId) -> Link | None:
        self._ours.discard(session)
        link = self._link_of.pop(session, None)
        if link is not None:
            sessions = self._sessions_of[link]
            sessions.discard(session)
            if not sessions:
                del self._sessions_of[link]
        return link

    def _add_peer(self, effect: AddPeer) -> None:
        try:
            self.transport.add_peer(effect.metadata)
        except KvPushError as error:
            self._to_producer(PeerRefused(effect.session, error.message))
        except Exception as error:
            logger.exception("kvpush: adding a peer failed")
            self._to_producer(PeerRefused(effect.session, f"{type(error).__name__}: {error}"))
        else:
            self._warm_up()
            self._to_producer(PeerAdded(effect.session))

    def _start_visibility_fence(self, effect: StartVisibilityFence) -> None:
        done = self._hooks.start_visibility_fence(effect.blocks)
        key = (effect.request_id, effect.epoch)
        self._visibility[key] = done if done is not None else lambda: True

    def _report(self, outcome: Outcome) -> None:
        if isinstance(outcome, ReceiveEnded):
            self._open_receives.discard(outcome.request_id)
            if not outcome.blocks_safe:
                self._quarantined.add(outcome.request_id)
        elif isinstance(outcome, BlocksSafe):
            self._quarantined.discard(outcome.request_id)
        elif isinstance(outcome, SourceReleased):
            self._open_sources.discard(outcome.source_id)
        elif isinstance(outcome, SourceStarted):
            self._open_watches.discard(outcome.request_id)
        with self._outbox_changed:
            self._outbox.append(outcome)
            self._outbox_changed.notify_all()
        if self._on_outcome is not None:
            self._on_outcome()

    # --- the end -------------------------------------------------------------------------------------------------------

    def _close_step(self, now: float) -> None:
        if not self._said_goodbye:
            self._said_goodbye = True
            if self.producer is not None:
                self._perform(self.producer.shutdown(now))
            if self.consumer is not None:
                self._perform(self.consumer.shutdown(now))

    def _may_stop(self) -> bool:
        if not self._closing or self._inbox or not self._said_goodbye:
            return False
        quiet = (
            not self._fenced
            and (self.producer is None or self.producer.num_in_flight == 0)
            and (self.consumer is None or self.consumer.num_receives == 0)
        )
        return quiet or self._clock() >= self._close_deadline

    def _crash(self, error: KvPushError) -> None:
        """Stop for good: every open request is told, and nothing waits for this thread any more."""
        logger.error("kvpush: the submitter has stopped: %s", error, exc_info=error)
        for line in error.story:
            logger.error("kvpush:   %s", line)
        with self._gate:
            self._error = error
        lost = PeerLost(f"kvpush has stopped on an internal error: {error.message}", story=error.story)
        self._report_the_rest(lost)

    def _report_the_rest(self, error: KvPushError) -> None:
        """Nothing open stays untold. Destination blocks are safe when the last lease and the retry window are over."""
        lease_s = self.consumer.config.lease_s + self.consumer.config.retry_window_s if self.consumer is not None else 0.0
        until = self._clock() + lease_s
        for request_id in list(self._open_receives):
            self._in_good_order = False
            self._report(ReceiveEnded(request_id, ReceiveStatus.FAILED, False, error=error))
        for request_id in list(self._open_watches):
            self._report(SourceStarted(request_id))
        for source_id in list(self._open_sources):
            self._report(SourceReleased(source_id, 0, 0, error))
        for request_id in list(self._quarantined):
            self._in_good_order = False
            self._unsafe_until.setdefault(request_id, until)

    def _expire_unsafe(self) -> None:
        now = self._clock()
        for request_id in [key for key, until in self._unsafe_until.items() if until <= now]:
            del self._unsafe_until[request_id]
            self._report(BlocksSafe(request_id))

    def _finish(self) -> None:
        if self._error is not None or self.transport.num_in_flight:
            self._in_good_order = False
        with contextlib.ExitStack() as last_steps:
            last_steps.callback(self._say_stopped)
            last_steps.callback(self.transport.close)
            last_steps.callback(self.channel.close)
            last_steps.callback(self._report_the_rest, PeerLost("kvpush was closed before this had ended"))
            if self.consumer is not None and self._error is None:
                self._perform(self.consumer.farewell())

    def _say_stopped(self) -> None:
        self._stopped.set()
        with self._outbox_changed:
            self._outbox_changed.notify_all()
