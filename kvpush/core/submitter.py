# SPDX-License-Identifier: Apache-2.0
"""The one thread that owns the machines, the transport and the channel: inbox -> machine -> transport -> outbox.

The engine thread only ever appends to a deque and takes outcomes out of another one. Everything that costs time (planning
descriptors, posting, polling, talking to peers) happens here. The thread sleeps in ``channel.wait`` until a message, an event
or a deadline; it polls at an interval only while writes are in flight, may be landing, or a device fence or digest is awaited.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
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
    StartDigest,
    StartUnpack,
    StartVisibilityFence,
)
from kvpush.core.events import (
    BlocksSafe,
    DigestFailed,
    DigestReady,
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
    SourceBroken,
    SourceFinished,
    SourcePreempted,
    SourceProgressed,
    SourceReleased,
    SourceStarted,
    StartAwaitCancelled,
    StartAwaited,
    TransferDeclined,
    UnpackEnded,
    VisibilityFailed,
    VisibilityReached,
    WriteCompleted,
    WriteErrored,
)
from kvpush.core.ids import BlockTable, DigestId, Epoch, RequestId, SessionId, UnpackId, WriteId
from kvpush.core.producer import ProducerMachine
from kvpush.core.staged_writes import CopyDone, Mode, StagedWrites, StartCopy
from kvpush.core.staging import StagingArea, Unpacker
from kvpush.core.transport import Channel, Completion, Link, LinkClosed, Transport, WriteStatus
from kvpush.errors import (
    BackendError,
    InternalError,
    KvPushError,
    LocalProtocolError,
    PeerLost,
    RemoteProtocolError,
    SubmitterClosed,
    TransportError,
)

logger = logging.getLogger(__name__)

SourceEvent = SourceAnnounced | SourceProgressed | SourcePreempted | SourceFinished | SourceAborted
_WARM_UP_S = 0.25
"""How long a new connection is driven from both ends; setting one up took 7 to 120 ms over UCX."""
_TRANSPORT_PATIENCE_S = 1.0
"""For so long a transport may fail to be polled before this thread gives up on it."""
_WORKING_PROGRESS_S, _WORKING_PROGRESS = 100e-6, 3.0
"""A call of a transport's ``progress`` that takes so much of this thread's time, and so many times what the cheapest took, has
moved bytes. UCX takes 20 to 60 us for none."""
_RECEIVE_BATCHES = 4
"""At most this many ``channel.receive`` calls a step, so that a flood can't keep writes from being polled."""
_SESSIONS_PER_LINK = 16
"""A consumer of ours opens a link for each session; one that opens session upon session on a link is none of ours."""


DigestPoll = Callable[[], tuple[bytes, ...] | None]


@dataclass(frozen=True, slots=True)
class SubmitterHooks:
    """What the submitter asks of the backend.

    Args:
        fence_done: Whether the device work behind a fence token is final. Never blocks.
        start_visibility_fence: Begins one for the blocks of a receive; returns a poll function, or None: visible already.
        start_digest: Begins to digest blocks of some layers of our cache; returns a poll function that gives one digest per
            layer, or None as long as it runs. Not needed where nobody verifies.
        start_copy: Begins to copy rows within this process; returns a poll function. Needed with staging only.

    What they raise fails the transfers concerned and nothing else. A fence that has raised counts as ended.
    """

    fence_done: Callable[[object], bool] = lambda token: True
    start_visibility_fence: Callable[[BlockTable], Callable[[], bool] | None] = lambda blocks: None
    start_digest: Callable[[tuple[int, ...], BlockTable], DigestPoll] | None = None
    start_copy: StartCopy | None = None


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
    hook_errors: int = 0
    transport_errors: int = 0
    cpu_s: float = 0.0


class _Fence:
    """A device fence, and the sources whose next event waits for it."""

    __slots__ = ("since", "sources", "token")

    def __init__(self, token: object, since: float) -> None:
        self.token = token
        self.since = since
        self.sources: dict[RequestId, None] = {}


class Submitter:
    """Runs a producer, a consumer, or both over one transport and one channel.

    Args:
        transport: With memory registered already.
        channel: Bound already where there is a producer.
        producer: None where this endpoint only receives.
        consumer: None where it only sends.
        hooks: The backend's fences.
        poll_interval_s: Shortest pause between two polls while something is in flight.
        max_poll_interval_s: Polling slows down to this while nothing happens; on slow links, by what the machines know of their
            rate, to more.
        device_timeout_s: How long a device fence of the producer, or a digest, may take.
        staging: Our own slots for what a producer sends packed; None: every write takes its descriptors. Needs ``start_copy``.
        staging_mode: Whether to choose by what is measured.
        clock: Monotonic seconds.
        on_outcome: Called on the submitter thread after an outcome was put out; must not block. For engines that can be woken.
        on_crash: Called as the last thing that the submitter thread does, when it has stopped on an error: everything open has
            been reported, transport and channel are closed.
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
        device_timeout_s: float = 30.0,
        staging: StagingArea | None = None,
        staging_mode: Mode = "auto",
        clock: Callable[[], float] = time.monotonic,
        on_outcome: Callable[[], None] | None = None,
        on_crash: Callable[[], None] | None = None,
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
        self._device_timeout_s = device_timeout_s
        self._on_outcome = on_outcome
        self._on_crash = on_crash
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
        self._fenced: dict[RequestId, deque[tuple[SourceEvent, float]]] = {}
        """Events of sources whose first one waits for the device, with the time of their arrival."""
        self._fences: dict[int, _Fence] = {}
        self._todo: deque[Effect] = deque()
        self._performing = False
        self._failing_since: float | None = None
        self._has_moved_bytes = False
        """The last look at the transport has let bytes of others land: there will be more."""
        self._idle_progress_s = float("inf")
        """What the cheapest one has taken."""
        self._cpu_before_s = 0.0
        self._channel_counts_before: Mapping[str, int] = {}
        self._visibility: dict[tuple[RequestId, Epoch], Callable[[], bool]] = {}
        self._digests: dict[tuple[bool, DigestId], tuple[DigestPoll, int, float]] = {}
        """By machine and number: how to ask, for how many layers, and since when it runs."""
        self._unpacker = Unpacker(consumer.layout) if consumer is not None and consumer.config.staging is not None else None
        self._unpacks: dict[UnpackId, CopyDone] = {}
        self.staged: StagedWrites | None = None
        """Writes that go through slots; None where there is no staging."""
        if staging is not None and producer is not None and self._hooks.start_copy is not None:
            self.staged = StagedWrites(
                producer.layout, staging, transport, self._hooks.start_copy, self._send, producer.may_post_now, staging_mode
            )
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
        self.keepalive: object = None
        """What must not be freed before :attr:`exhausted`: the memory of our slots."""
        self._slots_safe_at = float("-inf")
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
            elif isinstance(event, StartAwaitCancelled):
                self._open_watches.discard(event.request_id)
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
    def exhausted(self) -> bool:
        """After the end: there is nothing to :meth:`drain`, and never will be, and nobody writes to our slots any more."""
        return not self._outbox and not self._unsafe_until and self._clock() >= self._slots_safe_at

    def inherit(self, crashed: Submitter) -> None:
        """Go on counting where another one has stopped. Before :meth:`start`, when the other one's thread has ended."""
        self.counters = crashed.counters
        self._channel_counts_before = crashed.channel_counts()
        self._cpu_before_s = crashed.counters.cpu_s
        if self.producer is not None and crashed.producer is not None:
            self.producer.counters = crashed.producer.counters
        if self.consumer is not None and crashed.consumer is not None:
            self.consumer.counters = crashed.consumer.counters

    def channel_counts(self) -> dict[str, int]:
        """The channel's counts, with those of the channels before it."""
        return {name: count + self._channel_counts_before.get(name, 0) for name, count in self.channel.counts.items()}

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
        if self._error is not None and self._on_crash is not None:
            self._on_crash()

    def step(self) -> None:
        """One turn. Called by the thread; tests without a thread call it themselves."""
        self.counters.steps += 1
        self._woken = False
        if self.producer is not None:
            # Before anything drives the transport: this process may have been stopped for long.
            self._perform(self.producer.cut_overdue(self._clock()))
        happened = len(self._late_losses)
        while self._late_losses:
            self._to_consumer(self._late_losses.popleft())
        happened += self._take_messages()
        happened += self._take_inbox()
        completions = self._drive_transport()
        happened += self._has_moved_bytes
        if completions:
            # What the engine did before these completions were observed comes first: a preemption voids them.
            happened += len(completions) + self._take_inbox()
            for completion in completions:
                self._on_completion(completion)
        happened += self._advance_staging()
        happened += self._poll_visibility()
        happened += self._poll_digests()
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
            self.counters.cpu_s = self._cpu_before_s + time.thread_time()

    def _drive_transport(self) -> list[Completion]:
        """Let writes land and see which have ended. A transport that raises is tried again; one that goes on raising can't be
        trusted with anything, and stops this thread.

        Raises:
            TransportError: it has failed for too long.
        """
        self._has_moved_bytes = False
        try:
            if self._expects_progress():
                took_s = -time.thread_time()
                self.transport.progress()
                took_s += time.thread_time()
                self._idle_progress_s = min(self._idle_progress_s, took_s)
                self._has_moved_bytes = took_s >= max(_WORKING_PROGRESS_S, _WORKING_PROGRESS * self._idle_progress_s)
            completions = self.transport.poll() if self.transport.num_in_flight else []
        except Exception as error:
            now = self._clock()
            self.counters.transport_errors += 1
            if self._failing_since is None:
                self._failing_since = now
                logger.exception("kvpush: the transport can't be polled; trying again")
            if now - self._failing_since >= _TRANSPORT_PATIENCE_S:
                raise TransportError(f"the transport can't be polled: {type(error).__name__}: {error}") from error
            return []
        self._failing_since = None
        return completions

    def _on_completion(self, completion: Completion) -> None:
        token, status, error = completion
        may_land = status is not WriteStatus.DONE and not self.transport.capabilities.failures_are_final
        if self.staged is not None:
            now = self._clock()
            if self.staged.completed(token, status, error, may_land=may_land, now=now):
                return
            self.staged.direct_ended(WriteId(token), now, ok=status is WriteStatus.DONE)
        write_id = WriteId(token)
        post_s = self._post_s.pop(write_id, None)
        if post_s is None:
            self.counters.transport_errors += 1
            logger.error("kvpush: the transport tells the end of write %d, which has ended or was never posted", token)
        elif status is WriteStatus.DONE:
            self._to_producer(WriteCompleted(write_id, post_s))
        else:
            self._to_producer(WriteErrored(write_id, error, may_land))

    def _advance_staging(self) -> int:
        """Move staged writes on, on both sides."""
        count = 0
        for unpack_id, done in list(self._unpacks.items()):
            event = UnpackEnded(unpack_id)
            try:
                if not done():
                    continue
            except Exception as error:
                self.counters.hook_errors += 1
                logger.exception("kvpush: unpacking failed")
                event = UnpackEnded(unpack_id, f"{type(error).__name__}: {error}")
            count += 1
            del self._unpacks[unpack_id]
            self._to_consumer(event)
        if self.staged is not None:
            count += self.staged.advance(self._clock())
            count += self._report_staged()
        return count

    def _report_staged(self) -> int:
        """Tell the machine which staged writes have ended."""
        assert self.staged is not None
        ended = self.staged.take_ended()
        if ended:
            # As with writes that the transport has completed: a preemption that the engine told before voids them.
            self._take_inbox()
        for write_id, error, may_land in ended:
            self._to_producer(WriteCompleted(write_id) if error is None else WriteErrored(write_id, error, may_land))
        return len(ended)

    def _poll_visibility(self) -> int:
        count = 0
        for key, done in list(self._visibility.items()):
            event: VisibilityReached | VisibilityFailed = VisibilityReached(*key)
            try:
                if not done():
                    continue
            except Exception as error:
                self.counters.hook_errors += 1
                logger.exception("kvpush: a visibility fence failed")
                event = VisibilityFailed(*key, f"{type(error).__name__}: {error}")
            count += 1
            del self._visibility[key]
            self._to_consumer(event)
        return count

    def _poll_digests(self) -> int:
        ended: list[tuple[bool, DigestReady | DigestFailed]] = []
        for (for_producer, digest_id), (poll, num_layers, since) in list(self._digests.items()):
            event: DigestReady | DigestFailed
            try:
                digests = poll()
                if digests is not None:
                    if len(digests) != num_layers or not all(1 <= len(digest) <= wire.MAX_DIGEST_BYTES for digest in digests):
                        raise BackendError(f"the backend gave digests {digests!r:.200} for {num_layers} layers")
                    event = DigestReady(digest_id, tuple(bytes(digest) for digest in digests))
                elif self._clock() - since >= self._device_timeout_s:
                    event = DigestFailed(digest_id, f"it has not ended within {self._device_timeout_s:g} s")
                else:
                    continue
            except Exception as error:
                self.counters.hook_errors += 1
                logger.exception("kvpush: a digest failed")
                event = DigestFailed(digest_id, f"{type(error).__name__}: {error}")
            del self._digests[for_producer, digest_id]
            ended.append((for_producer, event))
        if ended:
            # As with writes: a preemption that the engine told before the digest was seen to end makes it void.
            self._take_inbox()
        for for_producer, event in ended:
            if for_producer:
                self._to_producer(event)
            else:
                self._to_consumer(event)
        return len(ended)

    def _timeout(self) -> float | None:
        """How long to sleep: a poll interval while something moves, else until the next deadline."""
        if self._inbox or self._woken or self._late_losses:
            return 0.0
        polling = (
            self.transport.num_in_flight > 0
            or self._awaits_device()
            or (self.transport.capabilities.target_must_poll and self._expects_progress())
        )
        waits = [self._poll_pause()] if polling else []
        now = self._clock()
        for machine in self._machines:
            deadline = machine.next_deadline()
            if deadline is not None:
                waits.append(max(0.0, deadline - now))
        if self.staged is not None and (deadline := self.staged.next_deadline()) is not None:
            waits.append(max(0.0, deadline - now))
        if self._closing:
            waits.append(1e-3)
        return min(waits) if waits else None

    def _awaits_device(self) -> bool:
        """A fence, a digest or a copy runs whose end has to be asked for."""
        copies = self._unpacks or (self.staged is not None and self.staged.awaits_copy)
        return bool(self._fences or self._visibility or self._digests or copies)

    def _poll_pause(self) -> float:
        """How long until the next poll. On a slow link most polls would find nothing, and each costs the engine's cores."""
        if self._awaits_device() or self._clock() < self._warm_until:
            return self._pause_s
        known = []
        if self.transport.num_in_flight and self.producer is not None:
            known.append(self.producer.poll_s)
        if self.consumer is not None and self.consumer.expects_writes:
            known.append(self.consumer.poll_s)
        return max(self._pause_s, min(known, default=0.0))

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
            self.channel.close_link(link, hostile=True)
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
            if len(self._sessions_of.get(link, ())) >= _SESSIONS_PER_LINK:
                self.counters.bad_frames += 1
                self._on_link_closed(link, "too many sessions on one link")
                self.channel.close_link(link, hostile=True)
                return
            self._bind(session, link)
            self._to_producer(event)
        elif bound is None:
            # Unknown here, as after a restart: the answer has to find its way without a session.
            self._bind(session, link)
            self._to_producer(event)
            self._unbind(session)
        else:
            if isinstance(message, wire.Unpacked) and self.staged is not None:
                self.staged.unpacked(message, self._clock())
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
            if not isinstance(event, SourceEvent):
                self._engine_event(event)
            elif event.source_id in self._fenced:
                self._fenced[event.source_id].append((event, self._clock()))
            elif self._is_unfenced(event):
                self._engine_event(event)
            else:
                self._fenced[event.source_id] = deque([(event, self._clock())])
                self._await_fence(event.source_id)
        # In order per source only: one whose device work is not final must not hold up news of another, such as a
        # preemption, which voids writes that are about to complete. Each fence is asked once, however many wait for it.
        asked: set[int] = set()
        while fences := [(key, fence) for key, fence in self._fences.items() if key not in asked]:
            for key, fence in fences:
                asked.add(key)
                broken = self._ask_fence(fence)
                if broken is None:
                    continue
                del self._fences[key]
                for source_id in fence.sources:
                    if broken:
                        self._to_producer(SourceBroken(source_id, broken))
                    count += self._hand_on(source_id, fence)
        return count

    @staticmethod
    def _is_unfenced(event: SourceEvent) -> bool:
        return not isinstance(event, SourceProgressed) or event.fence is None

    def _await_fence(self, source_id: RequestId) -> None:
        """The first event that is held of this source waits for its fence."""
        event, arrived_at = self._fenced[source_id][0]
        assert isinstance(event, SourceProgressed)
        # The token is held by the event for as long as the fence is listed, so its id is nobody else's.
        fence = self._fences.setdefault(id(event.fence), _Fence(event.fence, arrived_at))
        fence.sources[source_id] = None

    def _ask_fence(self, fence: _Fence) -> str | None:
        """None: not final yet; empty: final; else why it never will be."""
        try:
            if self._hooks.fence_done(fence.token):
                return ""
        except Exception as error:
            self.counters.hook_errors += 1
            logger.exception("kvpush: a device fence failed")
            return f"the producer's device fence failed: {type(error).__name__}: {error}"
        if self._clock() - fence.since >= self._device_timeout_s:
            self.counters.hook_errors += 1
            return f"the producer's device did not finish within {self._device_timeout_s:g} s"
        return None

    def _hand_on(self, source_id: RequestId, over: _Fence) -> int:
        """A fence is over: hand on what waits for it, and what follows without one."""
        events = self._fenced[source_id]
        count = 0
        while events:
            event = events[0][0]
            if isinstance(event, SourceProgressed) and event.fence is not None and event.fence is not over.token:
                self._await_fence(source_id)
                return count
            events.popleft()
            count += 1
            self._engine_event(event)
        del self._fenced[source_id]
        return count

    def _engine_event(self, event: EngineEvent) -> None:
        """Hand an event of our engine to its machine; one that is illegal ends its request and harms nothing else."""
        try:
            if isinstance(event, ReceiveRequested | ReceiveAborted | TransferDeclined | StartAwaited | StartAwaitCancelled):
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
        """Do what a machine has asked for, in order. What comes of one effect (a failed post, an answer of the transport) is
        handled at once by the machine; what that leads to is done after everything that was asked for before."""
        self._todo.extend(effects)
        if self._performing:
            return
        self._performing = True
        try:
            while self._todo:
                self._perform_one(self._todo.popleft())
        finally:
            self._performing = False

    def _perform_one(self, effect: Effect) -> None:
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
            self._remove_peer(effect)
        elif isinstance(effect, StartUnpack):
            self._start_unpack(effect)
        elif isinstance(effect, StartVisibilityFence):
            self._start_visibility_fence(effect)
        elif isinstance(effect, StartDigest):
            self._start_digest(effect)

    def _send(self, message: wire.Message) -> None:
        link = self._link_of.get(SessionId(message.session))
        if link is not None and self.channel.send(link, wire.encode(message)):
            self.counters.messages_out += 1
        else:
            self.counters.messages_lost += 1

    def _post(self, write: PostWrite) -> None:
        assert self.producer is not None
        if not self.producer.may_post(write.write_id):
            # An earlier post of the same turn has failed, or the connection was cut.
            self._to_producer(WriteErrored(write.write_id, "not posted: its transfer has been given up"))
            return
        started_at = self._clock()
        try:
            src, dst = write.plan.descriptors(write.layer_lo, write.layer_hi, write.src_blocks, write.dst_blocks, write.tokens)
            if self.staged is not None and self.staged.take(write, len(src), started_at):
                return
            self.transport.post_write(write.write_id, write.agent_name, src, dst)
            self._post_s[write.write_id] = self._clock() - started_at
        except Exception as error:
            reason = error.message if isinstance(error, KvPushError) else f"{type(error).__name__}: {error}"
            if not isinstance(error, KvPushError):
                logger.exception("kvpush: posting a write failed")
            if self.staged is not None:
                self.staged.direct_ended(write.write_id, self._clock(), ok=False)
            self._to_producer(WriteErrored(write.write_id, reason))

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
        if self.staged is not None:
            self.staged.close_session(session, self._clock())
            # Its writes end with it: woken up at once, the machine hears of them when it has done what it is doing.
            self._woken = True
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
            name = self.transport.add_peer(effect.metadata)
            if name != effect.agent_name:
                # It would have its blocks looked for in the memory of whoever really has that name.
                if self.producer is not None and name not in self.producer.agents:
                    self.transport.remove_peer(name)
                raise RemoteProtocolError(f"it calls itself {effect.agent_name!r}, its transport metadata {name!r}")
        except KvPushError as error:
            self._to_producer(PeerRefused(effect.session, error.message))
        except Exception as error:
            logger.exception("kvpush: adding a peer failed")
            self._to_producer(PeerRefused(effect.session, f"{type(error).__name__}: {error}"))
        else:
            self._warm_up()
            self._to_producer(PeerAdded(effect.session))

    def _remove_peer(self, effect: RemovePeer) -> None:
        """Forget a consumer.

        Raises:
            TransportError: the connection had to be closed under writes, and could not be.
        """
        try:
            self.transport.remove_peer(effect.agent_name)
        except Exception as error:
            self.counters.transport_errors += 1
            if effect.cut:
                raise TransportError(f"a connection can't be closed: {type(error).__name__}: {error}") from error
            logger.exception("kvpush: removing a peer failed")

    def _start_visibility_fence(self, effect: StartVisibilityFence) -> None:
        key = (effect.request_id, effect.epoch)
        try:
            done = self._hooks.start_visibility_fence(effect.blocks)
        except Exception as error:
            self.counters.hook_errors += 1
            logger.exception("kvpush: starting a visibility fence failed")
            self._to_consumer(VisibilityFailed(*key, f"{type(error).__name__}: {error}"))
            return
        self._visibility[key] = done if done is not None else lambda: True

    def _start_unpack(self, effect: StartUnpack) -> None:
        """Begin it, and hear of its end on the next turn at the earliest."""
        try:
            if self._unpacker is None or self._hooks.start_copy is None:
                raise BackendError("this endpoint's backend can't unpack")
            rows = self._unpacker.rows(effect.layer_lo, effect.layer_hi, effect.blocks, effect.area, effect.slot)
            self._unpacks[effect.unpack_id] = self._hooks.start_copy(*rows)
        except Exception as error:
            self.counters.hook_errors += 1
            logger.exception("kvpush: unpacking failed")
            self._to_consumer(UnpackEnded(effect.unpack_id, f"{type(error).__name__}: {error}"))
        # It may have ended already: copies on the host do.
        self._woken = True

    def _start_digest(self, effect: StartDigest) -> None:
        """Begin it, and hear of its end on the next turn at the earliest: what the engine tells meanwhile comes first."""
        key = effect.for_producer, effect.digest_id
        try:
            if self._hooks.start_digest is None:
                raise BackendError("this endpoint's backend can't compute digests")
            poll = self._hooks.start_digest(effect.layers, effect.blocks)
        except Exception as error:
            self.counters.hook_errors += 1
            logger.exception("kvpush: starting a digest failed")
            failed = DigestFailed(effect.digest_id, f"{type(error).__name__}: {error}")
            if effect.for_producer:
                self._to_producer(failed)
            else:
                self._to_consumer(failed)
            return
        self._digests[key] = (poll, len(effect.layers), self._clock())
        # It may have ended already: small ones do.
        self._woken = True

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
            try:
                self._on_outcome()
            except Exception:
                self.counters.hook_errors += 1
                logger.exception("kvpush: on_outcome raised")

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
            and not self._digests
            and not self._unpacks
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
        self._todo.clear()
        # Peers needn't wait for silence to tell them. What is in flight stays in flight, so this is no fence.
        for session in list(self._link_of):
            with contextlib.suppress(Exception):
                self._send(wire.Goodbye(session, reason="kvpush has stopped on an internal error", fenced=False))
        lost = PeerLost(f"kvpush has stopped on an internal error: {error.message}", story=error.story)
        self._report_the_rest(lost)

    def _report_the_rest(self, error: KvPushError) -> None:
        """Nothing open stays untold. Destination blocks are safe when the last lease and the retry window are over, and no
        visibility fence runs on them."""
        until = self._clock() + (self.consumer.longest_unsafe_s if self.consumer is not None else 0.0)
        if self._unpacker is not None:
            self._slots_safe_at = until
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
        """After the end, on the engine's thread: nobody else asks the fences any more."""
        now = self._clock()
        for request_id in [key for key, until in self._unsafe_until.items() if until <= now]:
            if not self._fence_outlives(request_id):
                del self._unsafe_until[request_id]
                self._report(BlocksSafe(request_id))

    def _fence_outlives(self, request_id: RequestId) -> bool:
        """Whether a visibility fence that was begun for a request still runs."""
        for key in [key for key in self._visibility if key[0] == request_id]:
            try:
                ended = self._visibility[key]()
            except Exception:
                self.counters.hook_errors += 1
                logger.exception("kvpush: a visibility fence failed")
                ended = True
            if ended:
                del self._visibility[key]
        # Whose blocks a slot is copied into isn't kept here: while one copy runs, all wait.
        for unpack_id, done in list(self._unpacks.items()):
            with contextlib.suppress(Exception):  # whatever it is, it has ended: as while this thread ran
                if not done():
                    continue
            del self._unpacks[unpack_id]
        return bool(self._unpacks) or any(key[0] == request_id for key in self._visibility)

    def _finish(self) -> None:
        if self._error is not None or self.transport.num_in_flight:
            self._in_good_order = False
        with contextlib.ExitStack() as last_steps:
            last_steps.callback(self._say_stopped)
            last_steps.callback(self.transport.close)
            last_steps.callback(self._cut_everything)
            last_steps.callback(self.channel.close)
            last_steps.callback(self._report_the_rest, PeerLost("kvpush was closed before this had ended"))
            if self.consumer is not None and self._error is None:
                self._perform(self.consumer.farewell())

    def _cut_everything(self) -> None:
        """What is still in flight can't be waited for: close the connections, so that it is over when the leases are."""
        if self.producer is None or not self.transport.num_in_flight:
            return
        for agent_name in self.producer.agents:
            try:
                self.transport.remove_peer(agent_name)
            except Exception:
                logger.exception("kvpush: closing the connection to %s failed", agent_name)

    def _say_stopped(self) -> None:
        self._stopped.set()
        with self._outbox_changed:
            self._outbox_changed.notify_all()
