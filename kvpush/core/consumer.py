# SPDX-License-Identifier: Apache-2.0
"""The consumer's machine: announces destination blocks, counts what has arrived, and knows when its blocks are safe.

One **receive** is one request of our engine. It registers with every rank of its producer that holds a part of what it wants,
over one **session** per rank. No clock, thread or I/O here.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kvpush.core import wire
from kvpush.core.coverage import covered_volume, merge_rects
from kvpush.core.digest import in_sample
from kvpush.core.effects import CloseSession, Effect, OpenSession, Report, Send, StartDigest, StartUnpack, StartVisibilityFence
from kvpush.core.events import (
    BlocksSafe,
    ConsumerEvent,
    DigestFailed,
    DigestReady,
    MessageReceived,
    ReceiveAborted,
    ReceiveEnded,
    ReceiveRequested,
    ReceiveStatus,
    SessionLost,
    SourceStarted,
    StartAwaitCancelled,
    StartAwaited,
    TransferDeclined,
    UnpackEnded,
    VisibilityFailed,
    VisibilityReached,
)
from kvpush.core.ids import AgentName, DigestId, EngineId, Epoch, PeerAddress, Rect, RequestId, SessionId, UnpackId
from kvpush.core.layout import CacheLayout, blocks_for_tokens, common_block_tokens
from kvpush.core.lease import Deadlines, GrantedLease
from kvpush.core.machine import Story, Table, Transition, step
from kvpush.core.staging import Frames, Shares, StagingArea
from kvpush.errors import (
    IntegrityError,
    InternalError,
    KvPushError,
    LayoutError,
    LeaseExpired,
    LocalProtocolError,
    PeerLost,
    RemoteProtocolError,
    TransferCancelled,
    TransferRejected,
)


@dataclass(frozen=True, slots=True)
class ConsumerConfig:
    """Times in seconds; see ``kvpush.settings.Settings`` for what each means to a user.

    Args:
        metadata: What the producer's transport needs to write our memory.
        retry_window_s: The transport's: how long after a lease a posted write may still land. A producer may say that its own
            takes longer.
        needs_visibility_fence: The backend's capability.
        digest_scheme: How our backend computes digests; needed unless ``verify`` is ``off``.
        staging: Memory that producers may put packed blocks into; None: every write goes to its blocks.
        slots_per_session: Of it; the sessions that come when all is taken do without.
    """

    engine_id: EngineId
    agent_name: AgentName
    transport: str
    metadata: bytes
    compat: dict[str, str] = field(default_factory=dict)
    retry_window_s: float = 1.0
    needs_visibility_fence: bool = False
    verify: Literal["off", "sample", "all"] = "off"
    verify_sample_share: float = 0.05
    digest_scheme: str = ""
    staging: StagingArea | None = None
    slots_per_session: int = 4
    lease_s: float = 10.0
    peer_timeout_s: float = 2.0
    handshake_timeout_s: float = 3.0
    announce_timeout_s: float = 30.0
    transfer_timeout_s: float = 300.0
    fence_timeout_s: float = 0.5
    fence_give_up_s: float = 30.0
    visibility_timeout_s: float = 30.0
    digest_timeout_s: float = 30.0
    retry_s: float = 1.0
    inquiry_s: float = 5.0
    watch_again_s: float = 15.0


class ReceiveState(enum.Enum):
    """States of one receive."""

    REGISTERED = enum.auto()
    """Announced, or about to be; nothing can have been written yet as far as we have heard."""
    RECEIVING = enum.auto()
    """Writes may land."""
    VERIFYING = enum.auto()
    """All has arrived; the device's visibility fence runs."""
    DIGESTING = enum.auto()
    """It can be read; its digest is computed, and compared with what was sent."""
    FENCING = enum.auto()
    """Given up; waits until no producer rank can write any more."""
    QUARANTINED = enum.auto()
    """Reported as failed while its blocks are not safe yet."""
    COMPLETE = enum.auto()
    RELEASED = enum.auto()
    """Cancelled by our engine, blocks safe."""
    FAILED = enum.auto()
    """Failed, blocks safe."""


_S = ReceiveState
TERMINAL = (_S.COMPLETE, _S.RELEASED, _S.FAILED)

_ENDINGS = (_S.FENCING, _S.RELEASED, _S.FAILED, _S.QUARANTINED)
_COMMITTED = (_S.RECEIVING, _S.VERIFYING, _S.DIGESTING, _S.COMPLETE, *_ENDINGS)
TABLE: Table = {
    (_S.REGISTERED, "Registered"): Transition("_on_registered", (_S.REGISTERED,)),
    (_S.REGISTERED, "PartFailing"): Transition("_on_part_failing", (_S.QUARANTINED,)),
    (_S.REGISTERED, "Streaming"): Transition("_on_streaming", (_S.RECEIVING,)),
    (_S.REGISTERED, "Committed"): Transition("_on_committed", _COMMITTED),
    (_S.REGISTERED, "PartFailed"): Transition("_on_part_failed", _ENDINGS),
    (_S.REGISTERED, "GivenUp"): Transition("_on_given_up", _ENDINGS),
    (_S.REGISTERED, "DeadlinePassed"): Transition("_on_waited_too_long", _ENDINGS),
    (_S.RECEIVING, "Registered"): Transition("_on_standing", (_S.RECEIVING,)),
    (_S.RECEIVING, "PartFailing"): Transition("_on_part_failing", (_S.QUARANTINED,)),
    (_S.RECEIVING, "Streaming"): Transition("_on_streaming", (_S.RECEIVING,)),
    (_S.RECEIVING, "Committed"): Transition("_on_committed", _COMMITTED),
    (_S.RECEIVING, "PartFailed"): Transition("_on_part_failed", _ENDINGS),
    (_S.RECEIVING, "GivenUp"): Transition("_on_given_up", _ENDINGS),
    (_S.RECEIVING, "DeadlinePassed"): Transition("_on_waited_too_long", _ENDINGS),
    (_S.VERIFYING, "VisibilityReached"): Transition("_on_visible", (_S.DIGESTING, _S.COMPLETE)),
    (_S.VERIFYING, "VisibilityFailed"): Transition("_on_visibility_lost", (_S.FAILED,)),
    (_S.VERIFYING, "GivenUp"): Transition("_on_given_up", _ENDINGS),
    (_S.VERIFYING, "DeadlinePassed"): Transition("_on_waited_too_long", _ENDINGS),
    (_S.DIGESTING, "DigestReady"): Transition("_on_digest_ready", (_S.COMPLETE, _S.FAILED)),
    (_S.DIGESTING, "DigestFailed"): Transition("_on_digest_failed", (_S.FAILED,)),
    (_S.DIGESTING, "GivenUp"): Transition("_on_given_up", (_S.RELEASED, _S.FAILED)),
    (_S.DIGESTING, "DeadlinePassed"): Transition("_on_waited_too_long", (_S.FAILED,)),
    (_S.FENCING, "Quiet"): Transition("_on_quiet", (_S.RELEASED, _S.FAILED)),
    (_S.FENCING, "PartFailing"): Transition("_on_fence_far", (_S.FENCING, _S.QUARANTINED)),
    (_S.FENCING, "GivenUp"): Transition("_on_given_up_again", (_S.FENCING,)),
    (_S.FENCING, "DeadlinePassed"): Transition("_on_fence_late", (_S.FENCING, _S.QUARANTINED)),
    (_S.QUARANTINED, "Quiet"): Transition("_on_quiet", (_S.FAILED,)),
    (_S.QUARANTINED, "PartFailing"): Transition("_ignore", (_S.QUARANTINED,)),
    (_S.QUARANTINED, "GivenUp"): Transition("_ignore", (_S.QUARANTINED,)),
    (_S.QUARANTINED, "DeadlinePassed"): Transition("_on_fence_late", (_S.QUARANTINED,)),
}
"""Every state x event that is legal for a receive."""


class _PartState(enum.Enum):
    """One producer rank's share of one receive, as far as our blocks' safety goes."""

    UNSENT = enum.auto()
    SENT = enum.auto()
    COMMITTED = enum.auto()
    FENCED = enum.auto()
    LOST = enum.auto()


_LONGEST_POLL_S = 0.01
"""However slow a producer says the link is: its last bytes wait for us as long."""
_QUIET = (_PartState.UNSENT, _PartState.COMMITTED, _PartState.FENCED)


class _Part:
    __slots__ = ("answered", "progress", "safe_at", "session", "state")

    def __init__(self, session: _Session) -> None:
        self.session = session
        self.state = _PartState.UNSENT
        self.answered = False
        """The producer has the registration: it need not be repeated."""
        self.progress = 0
        self.safe_at = float("inf")
        """LOST: when the lease and the transport's retry window are over."""


class _Receive:
    __slots__ = (
        "coverage",
        "digest_hi",
        "digest_id",
        "digests",
        "epoch",
        "error",
        "event",
        "expected",
        "fence_running",
        "given_up_at",
        "parts",
        "peer",
        "registered_at",
        "reported",
        "state",
        "status",
        "story",
        "unpacking",
        "verify",
        "waiting_source",
    )

    def __init__(self, event: ReceiveRequested, epoch: Epoch, expected: int, peer: _Peer, now: float, *, verify: bool) -> None:
        self.event = event
        self.epoch = epoch
        self.expected = expected
        self.peer = peer
        self.state = _S.REGISTERED
        self.parts: dict[SessionId, _Part] = {}
        self.coverage: list[Rect] = []
        self.verify = verify
        self.digests: list[tuple[PeerAddress, int, bytes]] = []
        """What the ranks say that they have sent: who, layer, digest."""
        self.digest_hi = 0
        """Up to which token."""
        self.digest_id: DigestId | None = None
        self.status = ReceiveStatus.RECEIVED
        self.error: KvPushError | None = None
        self.reported = False
        self.fence_running = False
        """A visibility fence has been started and has not ended: it may copy, so the blocks are not safe."""
        self.unpacking = 0
        """Slots that are being copied into the blocks: they are not safe either."""
        self.waiting_source = True
        self.registered_at = now
        self.given_up_at = now
        self.story = Story()


class _Session:
    __slots__ = (
        "address",
        "busy_since",
        "covers",
        "last_heard",
        "lease",
        "peer",
        "primary",
        "ready",
        "receives",
        "retry_window_s",
        "seq",
        "session_id",
        "share",
        "silence_s",
        "slots",
    )

    def __init__(
        self, session_id: SessionId, address: PeerAddress, peer: _Peer, config: ConsumerConfig, *, primary: bool
    ) -> None:
        self.session_id = session_id
        self.address = address
        self.peer = peer
        self.primary = primary
        self.ready = False
        self.covers: tuple[Rect, ...] = ()
        self.seq = 0
        self.lease = GrantedLease(config.lease_s)
        self.retry_window_s = config.retry_window_s
        self.last_heard = float("-inf")
        self.busy_since = float("-inf")
        """Since when the producer is to beat at its busy pace."""
        self.silence_s = float("inf")
        """Longest silence while nothing runs."""
        self.share: tuple[int, StagingArea] | None = None
        """Of the staging area, for this session's producer to write to."""
        self.slots: dict[int, _Slot] = {}
        """What was last unpacked from each slot."""
        self.receives: dict[RequestId, _Receive] = {}


@dataclass(slots=True)
class _Slot:
    """The last use of a staging slot.

    Args:
        tag: The producer's number for it.
        answer: None while it is being unpacked.
    """

    tag: int
    answer: wire.Unpacked | None = None


class _Watch:
    """A request without blocks that waits for its prefill to start."""

    __slots__ = ("asked_at", "event", "peer", "since")

    def __init__(self, event: StartAwaited, peer: _Peer, now: float) -> None:
        self.event = event
        self.peer = peer
        self.since = now
        self.asked_at: float | None = None


class _Peer:
    """One producer instance: the endpoint that we were told, and the sessions to all of its ranks."""

    __slots__ = (
        "address",
        "copies",
        "declines",
        "endpoints",
        "engine_id",
        "needed",
        "ready",
        "receives",
        "sessions",
        "watches",
    )

    def __init__(self, address: PeerAddress) -> None:
        self.address = address
        self.engine_id: EngineId | None = None
        self.endpoints: tuple[wire.Endpoint, ...] = ()
        self.sessions: dict[SessionId, _Session] = {}
        self.ready = False
        self.needed: list[_Session] = []
        """Once ready: the sessions that together fill our cache."""
        self.copies: list[_Session] = []
        """Once ready: those that hold nothing but copies of what the needed ones send."""
        self.receives: dict[RequestId, _Receive] = {}
        self.watches: dict[RequestId, _Watch] = {}
        self.declines: list[TransferDeclined] = []


@dataclass(slots=True)
class ConsumerCounters:
    """Monotonic counts, for metrics and tests."""

    stale_messages: int = 0
    sessions_opened: int = 0
    sessions_lost: int = 0
    received: int = 0
    failed: int = 0
    cancelled: int = 0
    quarantined: int = 0
    tokens_received: int = 0
    registrations_repeated: int = 0
    verified: int = 0
    integrity_errors: int = 0
    unpacked: int = 0


class ConsumerMachine:
    """``handle`` events in time order; do what the effects say; ``on_deadline`` when ``next_deadline`` has come.

    Args:
        config: Names and times.
        layout: Our cache.
        new_session: Draws a fresh random number of 1 to 2**63 - 1.

    Raises:
        LayoutError: our own layout is impossible.
    """

    def __init__(self, config: ConsumerConfig, layout: CacheLayout, new_session: Callable[[], int]) -> None:
        layout.check()
        self.config = config
        self.layout = layout
        self.counters = ConsumerCounters()
        self._new_session = new_session
        self._block_tokens = common_block_tokens(layout)
        self._wanted = [
            Rect(idx, idx + 1, layer.head_lo, layer.head_lo + layer.num_heads, 0, 1) for idx, layer in enumerate(layout.layers)
        ]
        self._per_token = sum(rect.volume for rect in self._wanted)
        merged: list[Rect] = []
        for rect in self._wanted:
            merge_rects(merged, rect)
        self._wanted = merged
        self._peers: dict[PeerAddress, _Peer] = {}
        self._sessions: dict[SessionId, _Session] = {}
        self._receives: dict[RequestId, _Receive] = {}
        self._watches: dict[RequestId, _Watch] = {}
        self.longest_unsafe_s = config.lease_s + config.retry_window_s
        """How long after the end of everything a producer that we have known may still write."""
        self._epoch = 0
        self._digests: dict[DigestId, _Receive] = {}
        self._digest_ids = itertools.count(1)
        self._shares = Shares(config.staging, config.slots_per_session) if config.staging is not None else None
        self._frames = Frames(layout)
        self._unpacks: dict[UnpackId, tuple[_Session, _Receive, int, int]] = {}
        """What is being copied, for which receive, from which slot and under which tag."""
        self._unpack_ids = itertools.count(1)
        self._deadlines: Deadlines[tuple[str, object]] = Deadlines()
        self._writable: set[_Receive] = set()
        self._lost: set[_Receive] = set()
        """Receives that a producer which is gone may have written to."""
        self._active: dict[SessionId, float] = {}
        """Sessions whose writes may be landing, and how long each lets us leave the transport alone, seconds."""
        self._effects: list[Effect] = []

    # --- the machine's interface ---------------------------------------------------------------------------------------

    def handle(self, event: ConsumerEvent, now: float) -> list[Effect]:
        """Take one event.

        Raises:
            LocalProtocolError: our own side sent what the state doesn't allow; nothing was changed.
            InternalError: a bug in this machine.
        """
        self._effects = []
        _EVENT_HANDLERS[type(event)](self, event, now)
        return self._effects

    def next_deadline(self) -> float | None:
        """When :meth:`on_deadline` wants to be called; None: not before the next event."""
        return self._deadlines.next()

    def on_deadline(self, now: float) -> list[Effect]:
        """Do what is due."""
        self._effects = []
        for key in self._deadlines.due(now):
            if not self._deadlines.take(key, now):
                continue
            kind, subject = key
            if kind == "session":
                assert isinstance(subject, _Session)
                self._on_session_deadline(subject, now)
            elif kind == "retry":
                assert isinstance(subject, _Receive)
                self._on_retry_due(subject, now)
            elif kind == "watch":
                assert isinstance(subject, _Watch)
                self._on_watch_due(subject, now)
            elif kind == "inquiry":
                assert isinstance(subject, _Session)
                self._inquire(subject, now)
            elif kind == "safe":
                assert isinstance(subject, _Receive)
                self._settle(subject, now)
            else:
                assert isinstance(subject, _Receive)
                if self._fence_is_overdue(subject, now):
                    self._deadlines.set(("receive", subject), now + self.config.fence_give_up_s)
                    reason = f"the producer at {subject.peer.address} does not fence a cancelled transfer"
                    self._drop_peer(subject.peer, PeerLost(reason, story=subject.story.lines()), now)
                else:
                    self._step(subject, "DeadlinePassed", now)
        return self._effects

    def shutdown(self, now: float, reason: str = "shutting down") -> list[Effect]:
        """Cancel every receive. Goodbye is said by :meth:`farewell` once :attr:`num_receives` is 0, or time is up."""
        self._effects = []
        for receive in list(self._receives.values()):
            self._step(receive, "GivenUp", now, ReceiveStatus.CANCELLED, TransferCancelled(reason))
        return self._effects

    def farewell(self, reason: str = "shutting down") -> list[Effect]:
        """Close every session in good order."""
        self._effects = []
        for session in list(self._sessions.values()):
            self._effects.append(Send(wire.Goodbye(session.session_id, reason=reason)))
            self._effects.append(CloseSession(session.session_id))
        return self._effects

    @property
    def expects_writes(self) -> bool:
        """Whether writes may be landing now, so that a transport whose target must poll is to be polled. What a lost producer
        has sent has to land before the blocks are given away."""
        return bool(self._lost) or (bool(self._writable) and bool(self._active))

    @property
    def poll_s(self) -> float:
        """How long to leave the transport alone while writes may be landing, seconds; 0: not known."""
        return 0.0 if self._lost else min(self._active.values(), default=0.0)

    @property
    def num_receives(self) -> int:
        """Receives whose blocks are still in our hands."""
        return len(self._receives)

    def knows(self, request_id: RequestId) -> bool:
        """Whether the blocks of a receive are still in our hands."""
        return request_id in self._receives

    def story(self, request_id: RequestId) -> tuple[str, ...]:
        """The story of a receive."""
        receive = self._receives.get(request_id)
        return receive.story.lines() if receive else ()

    def check(self) -> None:
        """Verify the invariants that can be seen from here (I5, I6, and bookkeeping).

        Raises:
            InternalError: one is broken.
        """
        for receive in self._receives.values():
            if receive.state in TERMINAL:
                raise InternalError("an ended receive is still listed", story=receive.story.lines())
            if receive.reported != (receive.state is _S.QUARANTINED):
                raise InternalError(f"reported={receive.reported} in {receive.state.name}", story=receive.story.lines())
            if ("receive", receive) not in self._deadlines:
                raise InternalError(f"receive in {receive.state.name} has no deadline", story=receive.story.lines())
            if self._may_be_written(receive) != (receive in self._writable):
                raise InternalError("a receive that may be written is not polled for", story=receive.story.lines())
            if receive.unpacking != sum(of is receive for _, of, _, _ in self._unpacks.values()):
                raise InternalError("a receive miscounts what is being unpacked for it", story=receive.story.lines())
        for _, receive, _, _ in self._unpacks.values():
            if receive.state in TERMINAL:
                raise InternalError("an ended receive is still being unpacked", story=receive.story.lines())
        for session in self._sessions.values():
            if ("session", session) not in self._deadlines:
                raise InternalError(f"session {session.session_id} has no deadline")

    # --- our engine ----------------------------------------------------------------------------------------------------

    def _on_requested(self, event: ReceiveRequested, now: float) -> None:
        if event.request_id in self._receives:
            raise LocalProtocolError(f"request {event.request_id!r} is already being received")
        if not event.keys:
            raise LocalProtocolError(f"request {event.request_id!r} needs at least one key")
        if not 0 <= event.token_lo < event.num_tokens or event.token_lo % self._block_tokens:
            raise LocalProtocolError(
                f"request {event.request_id!r}: tokens [{event.token_lo}, {event.num_tokens}) don't start at a block of "
                f"{self._block_tokens}"
            )
        expected_blocks = blocks_for_tokens(event.num_tokens, self._block_tokens) - event.token_lo // self._block_tokens
        if len(event.blocks) != self.layout.num_groups or any(len(ids) != expected_blocks for ids in event.blocks):
            raise LocalProtocolError(f"request {event.request_id!r}: {expected_blocks} blocks per group are needed")
        self._epoch += 1
        peer = self._peer(event.peer, now)
        expected = self._per_token * (event.num_tokens - event.token_lo)
        verify = self.config.verify == "all" or (
            self.config.verify == "sample" and in_sample(event.keys[0], self.config.verify_sample_share)
        )
        receive = _Receive(event, Epoch(self._epoch), expected, peer, now, verify=verify)
        self._receives[event.request_id] = receive
        peer.receives[event.request_id] = receive
        receive.story.add(now, receive.state, f"requested from {event.peer}, tokens [{event.token_lo}, {event.num_tokens})")
        self._deadlines.set(("receive", receive), now + self.config.announce_timeout_s)
        if peer.ready:
            self._register(receive, now)

    def _on_aborted(self, event: ReceiveAborted, now: float) -> None:
        receive = self._receives.get(event.request_id)
        if receive is None:
            # It has ended, and the engine has not taken the outcome yet: no fault of anybody's.
            return
        self._step(receive, "GivenUp", now, ReceiveStatus.CANCELLED, TransferCancelled("aborted by our engine"))

    def _peer(self, address: PeerAddress, now: float) -> _Peer:
        """The producer at an address; a handshake begins if it isn't known."""
        peer = self._peers.get(address)
        if peer is None:
            peer = _Peer(address)
            self._peers[address] = peer
            self._open(peer, address, now, primary=True)
        return peer

    def _on_start_awaited(self, event: StartAwaited, now: float) -> None:
        if event.request_id in self._watches:
            raise LocalProtocolError(f"request {event.request_id!r} is being watched already")
        peer = self._peer(event.peer, now)
        watch = _Watch(event, peer, now)
        self._watches[event.request_id] = peer.watches[event.request_id] = watch
        self._deadlines.set(("watch", watch), now + self.config.handshake_timeout_s + self.config.retry_s)
        if peer.ready:
            self._ask(watch, now)

    def _ask(self, watch: _Watch, now: float) -> None:
        """Ask, and go on asking: the answer is the sign of life that keeps the watch up."""
        session = watch.peer.needed[0]
        self._keep_busy(session, now)
        event = watch.event
        watch.asked_at = now if watch.asked_at is None else watch.asked_at
        self._effects.append(
            Send(
                wire.Watch(session.session_id, request_id=event.request_id, keys=event.keys, prompt_digest=event.prompt_digest)
            )
        )
        self._deadlines.set(("watch", watch), now + self.config.retry_s)

    def _on_watch_due(self, watch: _Watch, now: float) -> None:
        silent_since = watch.asked_at
        if silent_since is not None and now - silent_since >= self.config.peer_timeout_s:
            self._drop_peer(watch.peer, PeerLost(f"no answer from the producer at {watch.peer.address}"), now)
        elif now - watch.since >= self.config.transfer_timeout_s or not watch.peer.ready:
            self._end_watch(watch)
        else:
            self._ask(watch, now)

    def _on_started(self, session: _Session, message: wire.Started, now: float) -> None:
        watch = session.peer.watches.get(RequestId(message.request_id))
        if watch is None:
            self.counters.stale_messages += 1
            return
        watch.asked_at = None
        if message.started:
            self._end_watch(watch)
        else:
            # Heartbeats say that the producer lives; this is for news that got lost, and for watches that it had to forget.
            self._deadlines.set(("watch", watch), now + self.config.watch_again_s)

    def _on_start_await_cancelled(self, event: StartAwaitCancelled, now: float) -> None:
        watch = self._watches.get(event.request_id)
        if watch is not None:  # Else it has been answered, and the engine has not taken the outcome yet.
            self._forget_watch(watch)

    def _end_watch(self, watch: _Watch) -> None:
        """Report it: whatever the reason, the engine is to try."""
        self._forget_watch(watch)
        self._effects.append(Report(SourceStarted(watch.event.request_id)))

    def _forget_watch(self, watch: _Watch) -> None:
        request_id = watch.event.request_id
        self._deadlines.discard(("watch", watch))
        del watch.peer.watches[request_id]
        del self._watches[request_id]

    def _on_declined(self, event: TransferDeclined, now: float) -> None:
        peer = self._peer(event.peer, now)
        if peer.ready:
            self._send_decline(peer, event)
        elif len(peer.declines) < 4096:
            peer.declines.append(event)

    def _send_decline(self, peer: _Peer, event: TransferDeclined) -> None:
        for session in peer.sessions.values():
            self._effects.append(Send(wire.Decline(session.session_id, keys=event.keys, prompt_digest=event.prompt_digest)))

    # --- sessions ------------------------------------------------------------------------------------------------------

    def _open(self, peer: _Peer, address: PeerAddress, now: float, *, primary: bool) -> None:
        session_id = SessionId(self._new_session())
        session = _Session(session_id, address, peer, self.config, primary=primary)
        if self._shares is not None:
            session.share = self._shares.take(now)
        area = session.share[1] if session.share is not None else None
        self._sessions[session_id] = session
        peer.sessions[session_id] = session
        self.counters.sessions_opened += 1
        self._deadlines.set(("session", session), now + self.config.handshake_timeout_s)
        self._effects.append(OpenSession(session_id, address))
        self._effects.append(
            Send(
                wire.Hello(
                    session_id,
                    engine_id=self.config.engine_id,
                    agent_name=self.config.agent_name,
                    agent_metadata=self.config.metadata,
                    transport=self.config.transport,
                    layout=self.layout,
                    compat=self.config.compat,
                    lease_s=self.config.lease_s,
                    digest=self.config.digest_scheme if self.config.verify != "off" else "",
                    staging=None
                    if area is None
                    else wire.StagingOffer(area.address, area.device_id, area.slot_bytes, area.num_slots),
                )
            )
        )

    def _on_message(self, event: MessageReceived, now: float) -> None:
        session = self._sessions.get(event.session)
        message = event.message
        if session is None:
            self.counters.stale_messages += 1
            return
        session.last_heard = now
        if isinstance(message, wire.Welcome):
            self._on_welcome(session, message, now)
        elif isinstance(message, wire.Refused):
            error: KvPushError
            if message.unknown:
                error = PeerLost(f"the producer at {session.address} doesn't know us any more: it has been restarted")
            else:
                error = TransferRejected(f"the producer at {session.address} refused the handshake: {message.reason}")
            self._drop_peer(session.peer, error, now)
        elif isinstance(message, wire.Goodbye):
            error = PeerLost(f"the producer at {session.address} has ended the session: {message.reason or 'no reason given'}")
            self._drop_peer(session.peer, error, now, fenced=session if message.fenced else None)
        elif not session.ready:
            self.counters.stale_messages += 1
        elif isinstance(message, wire.Heartbeat):
            session.seq = max(session.seq, message.seq)
            self._grant(session, now)
            self._effects.append(Send(wire.HeartbeatAck(session.session_id, seq=session.seq)))
        elif isinstance(message, wire.Quiet):
            self._active.pop(session.session_id, None)
        elif isinstance(message, wire.Started):
            self._on_started(session, message, now)
        elif isinstance(message, wire.Registered | wire.Streaming | wire.Commit | wire.Failing | wire.Failed | wire.Fenced):
            self._on_part_message(session, message, now)
        elif isinstance(message, wire.Standing):
            for standing in message.streams:
                self._on_part_message(session, standing, now)
        elif isinstance(message, wire.Staged):
            self._on_staged(session, message, now)
        else:
            self._drop_peer(
                session.peer, PeerLost(f"unexpected {type(message).__name__} from the producer at {session.address}"), now
            )

    def _grant(self, session: _Session, now: float) -> None:
        session.lease.grant(now)

    def _on_welcome(self, session: _Session, message: wire.Welcome, now: float) -> None:
        session.seq = max(session.seq, message.seq)
        if session.ready:
            return
        session.ready = True
        session.covers = message.covers
        session.silence_s = message.idle_heartbeat_s + self.config.peer_timeout_s
        session.retry_window_s = max(session.retry_window_s, message.retry_window_s)
        self.longest_unsafe_s = max(self.longest_unsafe_s, self.config.lease_s + session.retry_window_s)
        self._watch_session(session)
        peer = session.peer
        if session.primary:
            peer.engine_id = EngineId(message.engine_id)
            peer.endpoints = message.endpoints
            known = {s.address for s in peer.sessions.values()}
            for endpoint in message.endpoints:
                address = PeerAddress(endpoint.host or session.address.host, endpoint.port)
                if address not in known:
                    known.add(address)
                    self._open(peer, address, now, primary=False)
        elif message.engine_id != peer.engine_id:
            self._drop_peer(
                peer, LayoutError(f"{session.address} belongs to another instance than {peer.address}: check the ports"), now
            )
            return
        if all(s.ready for s in peer.sessions.values()):
            self._on_peer_ready(peer, now)

    def _on_peer_ready(self, peer: _Peer, now: float) -> None:
        offered = [piece for s in peer.sessions.values() for rect in s.covers for piece in self._clip(rect)]
        if covered_volume(offered) < self._per_token:
            self._drop_peer(
                peer,
                LayoutError(
                    f"the producer at {peer.address} can't fill this cache: its {len(peer.sessions)} rank(s) cover "
                    f"{covered_volume(offered)} of {self._per_token} (layer, head) pairs. Do both serve the same model?"
                ),
                now,
            )
            return
        peer.ready = True
        self._choose_ranks(peer)
        for decline in peer.declines:
            self._send_decline(peer, decline)
        peer.declines.clear()
        for watch in peer.watches.values():
            self._ask(watch, now)
        for receive in list(peer.receives.values()):
            if receive.state is _S.REGISTERED:
                self._register(receive, now)

    def _choose_ranks(self, peer: _Peer) -> None:
        """Which ranks are needed: in their order, each that adds something to the ones before it."""
        covered: list[Rect] = []
        volume = 0
        for session in peer.sessions.values():
            for rect in session.covers:
                for piece in self._clip(rect):
                    merge_rects(covered, piece)
            grown = covered_volume(covered)
            if grown > volume:
                peer.needed.append(session)
            elif session.covers:
                peer.copies.append(session)
            volume = grown

    def _clip(self, rect: Rect, token_lo: int = 0, token_hi: int = 1) -> list[Rect]:
        """A peer's rectangle cut to what is wanted here, so that a wild one costs nothing and counts for nothing."""
        pieces = []
        for wanted in self._wanted:
            piece = Rect(
                max(rect.layer_lo, wanted.layer_lo),
                min(rect.layer_hi, wanted.layer_hi),
                max(rect.head_lo, wanted.head_lo),
                min(rect.head_hi, wanted.head_hi),
                max(rect.token_lo, token_lo),
                min(rect.token_hi, token_hi),
            )
            if piece.volume:
                pieces.append(piece)
        return pieces

    def _on_session_deadline(self, session: _Session, now: float) -> None:
        if not session.ready:
            error = PeerLost(
                f"no answer from the producer at {session.address} within {self.config.handshake_timeout_s:g} s: is it "
                "running, and does remote_port name its kvpush control port?"
            )
            self._drop_peer(session.peer, error, now)
        elif now >= self._silent_until(session):
            reason = f"nothing heard from the producer at {session.address} for {now - session.last_heard:.1f} s"
            self._drop_peer(session.peer, PeerLost(reason), now)
        else:
            self._watch_session(session)

    def _silent_until(self, session: _Session) -> float:
        """When a session counts as lost unless something is heard."""
        until = session.last_heard + session.silence_s
        if session.receives or (session.peer.watches and session in session.peer.needed[:1]):
            until = min(until, max(session.last_heard, session.busy_since) + self.config.peer_timeout_s)
        return until

    def _watch_session(self, session: _Session) -> None:
        self._deadlines.set(("session", session), self._silent_until(session))

    def _keep_busy(self, session: _Session, now: float) -> None:
        """Something is registered or watched: the producer beats at its busy pace from now on."""
        if not session.receives and len(session.peer.watches) <= 1:
            session.busy_since = now
        due = self._silent_until(session)
        if (self._deadlines.get(("session", session)) or 0.0) > due:
            self._deadlines.set(("session", session), due)

    def _on_session_lost(self, event: SessionLost, now: float) -> None:
        session = self._sessions.get(event.session)
        if session is not None:
            what = "connection lost" if session.ready else "no connection"
            self._drop_peer(session.peer, PeerLost(f"{what} to the producer at {session.address}: {event.reason}"), now)

    def _drop_peer(self, peer: _Peer, error: KvPushError, now: float, *, fenced: _Session | None = None) -> None:
        """One rank is gone, so the instance can't complete anything: all sessions end, all receives of it fail.

        Args:
            fenced: The session whose producer rank said itself that nothing is in flight.
        """
        self.counters.sessions_lost += len(peer.sessions)
        if self._peers.get(peer.address) is peer:
            del self._peers[peer.address]
        sessions, receives = list(peer.sessions.values()), list(peer.receives.values())
        for session in sessions:
            for receive in session.receives.values():
                part = receive.parts[session.session_id]
                if part.state is _PartState.SENT:
                    if session is fenced:
                        part.state = _PartState.FENCED
                    else:
                        part.state = _PartState.LOST
                        part.safe_at = session.lease.until + session.retry_window_s
                self._recount(receive)
            session.receives.clear()
            if self._shares is not None and session.share is not None:
                # Nothing is written before a session is ready, and nothing of one that is fenced any more.
                written = session.ready and session is not fenced
                self._shares.give(session.share[0], session.lease.until + session.retry_window_s if written else now)
            self._deadlines.discard(("session", session))
            self._deadlines.discard(("inquiry", session))
            self._sessions.pop(session.session_id, None)
            self._active.pop(session.session_id, None)
            if session is not fenced and session.ready:
                self._effects.append(Send(wire.Goodbye(session.session_id, reason="the instance is given up")))
            self._effects.append(CloseSession(session.session_id))
        peer.sessions.clear()
        for watch in list(peer.watches.values()):
            self._end_watch(watch)
        for receive in receives:
            if receive.state in (_S.REGISTERED, _S.RECEIVING):
                self._step(receive, "GivenUp", now, ReceiveStatus.FAILED, error)
            elif receive.state not in (_S.VERIFYING, _S.DIGESTING):
                self._settle(receive, now)

    # --- receives ------------------------------------------------------------------------------------------------------

    def _step(self, receive: _Receive, event: str, now: float, *args: object) -> None:
        """Run one row of the table, and see whether the transport has to be polled for it."""
        step(self, TABLE, receive, event, now, *args)
        self._recount(receive)

    def _recount(self, receive: _Receive) -> None:
        if any(part.state is _PartState.LOST for part in receive.parts.values()) and receive.state not in TERMINAL:
            self._lost.add(receive)
        if self._may_be_written(receive):
            self._writable.add(receive)
        else:
            self._writable.discard(receive)

    @staticmethod
    def _may_be_written(receive: _Receive) -> bool:
        return receive.state is _S.RECEIVING or (
            receive.state in (_S.FENCING, _S.QUARANTINED)
            and any(part.state is _PartState.SENT for part in receive.parts.values())
        )

    def _ignore(self, receive: _Receive, now: float, *args: object) -> None:
        del receive, now, args

    def _register(self, receive: _Receive, now: float) -> None:
        """Send the registration to every rank that holds a part."""
        blocks = wire.pack_blocks(receive.event.blocks)
        for session in receive.peer.copies:
            # It needn't keep them for us.
            self._effects.append(
                Send(wire.Decline(session.session_id, keys=receive.event.keys, prompt_digest=receive.event.prompt_digest))
            )
        for session in receive.peer.needed:
            part = _Part(session)
            receive.parts[session.session_id] = part
            if not session.receives:
                session.busy_since = now
            session.receives[receive.event.request_id] = receive
            self._keep_busy(session, now)
            self._send_registration(receive, part, blocks, now)
        self._deadlines.set(("retry", receive), now + self.config.retry_s)

    def _send_registration(self, receive: _Receive, part: _Part, blocks: tuple[bytes, ...], now: float) -> None:
        event = receive.event
        part.state = _PartState.SENT
        self._grant(part.session, now)
        self._effects.append(
            Send(
                wire.RegisterBlocks(
                    part.session.session_id,
                    request_id=event.request_id,
                    epoch=receive.epoch,
                    keys=event.keys,
                    prompt_digest=event.prompt_digest,
                    num_tokens=event.num_tokens,
                    token_lo=event.token_lo,
                    blocks=blocks,
                    seq=part.session.seq,
                    verify=receive.verify,
                )
            )
        )

    def _on_retry_due(self, receive: _Receive, now: float) -> None:
        """Say again what has not been answered: messages may be lost with a link, or at a full queue."""
        if receive.state in (_S.REGISTERED, _S.RECEIVING):
            unanswered = [part for part in receive.parts.values() if part.state is _PartState.SENT and not part.answered]
            if not unanswered:
                return
            blocks = wire.pack_blocks(receive.event.blocks)
            for part in unanswered:
                self.counters.registrations_repeated += 1
                self._send_registration(receive, part, blocks, now)
        elif receive.state in (_S.FENCING, _S.QUARANTINED):
            self._send_cancels(receive)
        else:
            return
        self._deadlines.set(("retry", receive), now + self.config.retry_s)

    def _inquire(self, session: _Session, now: float) -> None:
        """Ask how everything stands that has been answered once: a last word may have got lost, and deadlines are renewed by
        what the producer says."""
        streams = [
            wire.StreamRef(receive.event.request_id, receive.epoch)
            for receive in session.receives.values()
            if receive.state in (_S.REGISTERED, _S.RECEIVING)
            and (part := receive.parts[session.session_id]).state is _PartState.SENT
            and part.answered
        ]
        for start in range(0, len(streams), wire.MAX_STREAMS):
            piece = tuple(streams[start : start + wire.MAX_STREAMS])
            self._effects.append(Send(wire.Inquiry(session.session_id, streams=piece)))
        if streams:
            self._deadlines.set(("inquiry", session), now + self.config.inquiry_s)

    def _on_part_message(
        self,
        session: _Session,
        message: wire.Registered
        | wire.StreamStanding
        | wire.Streaming
        | wire.Commit
        | wire.Failing
        | wire.Failed
        | wire.Fenced,
        now: float,
    ) -> None:
        receive = session.receives.get(RequestId(message.request_id))
        if receive is None or receive.epoch != message.epoch:
            self.counters.stale_messages += 1
            return
        part = receive.parts[session.session_id]
        if part.state is not _PartState.SENT:
            self.counters.stale_messages += 1
            return
        if isinstance(message, wire.Streaming):
            self._active[session.session_id] = min(message.poll_s, _LONGEST_POLL_S)
        if isinstance(message, wire.Registered | wire.StreamStanding | wire.Streaming):
            part.answered = True
            if ("inquiry", session) not in self._deadlines:
                self._deadlines.set(("inquiry", session), now + self.config.inquiry_s)
            if receive.state not in (_S.REGISTERED, _S.RECEIVING):
                return
            if isinstance(message, wire.Streaming):
                self._step(receive, "Streaming", now)
            else:
                self._step(receive, "Registered", now, part, message)
            return
        if isinstance(message, wire.Failing):
            self._step(receive, "PartFailing", now, message.reason)
            return
        part.state = _PartState.COMMITTED if isinstance(message, wire.Commit) else _PartState.FENCED
        self._recount(receive)
        if receive.state in (_S.FENCING, _S.QUARANTINED):
            self._settle(receive, now)
        elif isinstance(message, wire.Commit):
            self._step(receive, "Committed", now, part, message)
        else:
            reason = message.reason if isinstance(message, wire.Failed) else "the producer fenced it without being asked"
            self._step(receive, "PartFailed", now, reason)

    def _on_registered(
        self, receive: _Receive, now: float, part: _Part, message: wire.Registered | wire.StreamStanding
    ) -> None:
        if not message.waiting:
            # Queued at a producer that lives, for however long: no failure.
            receive.waiting_source = False
            self._deadlines.set(("receive", receive), now + self.config.transfer_timeout_s)

    def _on_standing(self, receive: _Receive, now: float, part: _Part, message: wire.Registered | wire.StreamStanding) -> None:
        if isinstance(message, wire.StreamStanding) and message.progress > part.progress:
            part.progress = message.progress
            self._deadlines.set(("receive", receive), now + self.config.transfer_timeout_s)

    def _on_streaming(self, receive: _Receive, now: float) -> None:
        receive.waiting_source = False
        receive.state = _S.RECEIVING
        self._deadlines.set(("receive", receive), now + self.config.transfer_timeout_s)

    def _on_staged(self, session: _Session, message: wire.Staged, now: float) -> None:
        """Blocks lie packed in a slot. What is copied where is decided here: the producer names positions in the registration,
        and nothing is copied for a receive that has ended or been given up."""
        if session.share is None or message.slot >= session.share[1].num_slots:
            reason = f"the producer at {session.address} has used a staging slot that it was not offered"
            self._drop_peer(session.peer, PeerLost(reason), now)
            return
        area = session.share[1]
        slot = session.slots.get(message.slot)
        if slot is not None and message.tag <= slot.tag:
            # Said again, or old: it is unpacked once only.
            if message.tag == slot.tag and slot.answer is not None:
                self._effects.append(Send(slot.answer))
            else:
                self.counters.stale_messages += 1
            return
        if slot is not None and slot.answer is None:
            reason = f"the producer at {session.address} has used a staging slot again that is still being unpacked"
            self._drop_peer(session.peer, PeerLost(reason), now)
            return
        session.slots[message.slot] = slot = _Slot(message.tag)
        receive = session.receives.get(RequestId(message.request_id))
        part = receive.parts[session.session_id] if receive is not None else None
        if (
            receive is None
            or part is None
            or receive.epoch != message.epoch
            or part.state is not _PartState.SENT
            or receive.state not in (_S.REGISTERED, _S.RECEIVING)
        ):
            self.counters.stale_messages += 1
            self._answer_staged(session, slot, "")
            return
        layers, blocks = (message.layer_lo, message.layer_hi), (message.block_lo, message.block_hi)
        num_blocks = len(receive.event.blocks[0])
        if not (
            layers[0] < layers[1] <= len(self.layout.layers)
            and blocks[0] < blocks[1] <= num_blocks
            and self._frames.frame_bytes(*layers) * (blocks[1] - blocks[0]) <= area.slot_bytes
        ):
            error = RemoteProtocolError(
                f"the producer at {session.address} has staged layers {layers} of blocks {blocks}: of {num_blocks} blocks, in "
                f"a slot of {area.slot_bytes} bytes, that can't be",
                story=receive.story.lines(),
            )
            self._answer_staged(session, slot, error.message)
            self._step(receive, "GivenUp", now, ReceiveStatus.FAILED, error)
            return
        unpack_id = UnpackId(next(self._unpack_ids))
        self._unpacks[unpack_id] = session, receive, message.slot, message.tag
        receive.unpacking += 1
        table = tuple(ids[blocks[0] : blocks[1]] for ids in receive.event.blocks)
        self._effects.append(StartUnpack(unpack_id, area, message.slot, *layers, table))

    def _answer_staged(self, session: _Session, slot: _Slot, error: str) -> None:
        slot.answer = wire.Unpacked(session.session_id, tag=slot.tag, error=error[:4000])
        self._effects.append(Send(slot.answer))

    def _on_unpack_ended(self, event: UnpackEnded, now: float) -> None:
        entry = self._unpacks.pop(event.unpack_id, None)
        if entry is None:
            raise LocalProtocolError(f"unpacking {event.unpack_id} ended twice or was never asked for")
        session, receive, index, tag = entry
        receive.unpacking -= 1
        if not event.error:
            self.counters.unpacked += 1
        slot = session.slots[index]
        if session.session_id in self._sessions and slot.tag == tag:
            self._answer_staged(session, slot, event.error)
        if receive.state in (_S.FENCING, _S.QUARANTINED):
            self._settle(receive, now)
        elif event.error:
            error = TransferCancelled(f"what has arrived can't be unpacked: {event.error}", story=receive.story.lines())
            self._step(receive, "GivenUp", now, ReceiveStatus.FAILED, error)

    def _on_committed(self, receive: _Receive, now: float, part: _Part, message: wire.Commit) -> None:
        receive.waiting_source = False
        event = receive.event
        pieces = [piece for rect in message.coverage for piece in self._clip(rect, event.token_lo, event.num_tokens)]
        if receive.verify and not self._note_digests(receive, part, message, pieces):
            error = RemoteProtocolError(
                f"the producer at {part.session.address} has committed without the digests that were asked for: "
                f"{len(message.digests)} up to token {message.digest_hi} of {event.num_tokens}"
            )
            self._on_given_up(receive, now, ReceiveStatus.FAILED, error)
            return
        for piece in pieces:
            merge_rects(receive.coverage, piece)
        if any(of is receive and session is part.session for session, of, _, _ in self._unpacks.values()):
            error = RemoteProtocolError("a rank has committed what is still being unpacked", story=receive.story.lines())
            self._on_given_up(receive, now, ReceiveStatus.FAILED, error)
            return
        if len(receive.coverage) > wire.MAX_RECTS:
            error = RemoteProtocolError("the committed coverage is in too many pieces")
            self._on_given_up(receive, now, ReceiveStatus.FAILED, error)
            return
        if any(part.state is not _PartState.COMMITTED for part in receive.parts.values()):
            receive.state = _S.RECEIVING
            self._deadlines.set(("receive", receive), now + self.config.transfer_timeout_s)
            return
        volume = covered_volume(receive.coverage)
        if volume != receive.expected:
            error = RemoteProtocolError(
                f"every rank has committed, but {volume} of {receive.expected} (layer, head, token) entries are covered",
                story=receive.story.lines(),
            )
            self._on_given_up(receive, now, ReceiveStatus.FAILED, error)
            return
        receive.state = _S.VERIFYING
        self._deadlines.set(("receive", receive), now + self.config.visibility_timeout_s)
        if self.config.needs_visibility_fence:
            receive.fence_running = True
            self._effects.append(StartVisibilityFence(event.request_id, receive.epoch, event.blocks))
        else:
            self._on_visible(receive, now)

    def _on_visibility(self, event: VisibilityReached | VisibilityFailed, now: float) -> None:
        receive = self._receives.get(event.request_id)
        if receive is None or receive.epoch != event.epoch or not receive.fence_running:
            self.counters.stale_messages += 1
            return
        receive.fence_running = False
        if receive.state is not _S.VERIFYING:
            self._settle(receive, now)
        elif isinstance(event, VisibilityReached):
            self._step(receive, "VisibilityReached", now)
        else:
            self._step(receive, "VisibilityFailed", now, event.error)

    def _on_visibility_lost(self, receive: _Receive, now: float, reason: str) -> None:
        error = TransferCancelled(
            f"the device could not be made to see what has arrived: {reason}", story=receive.story.lines()
        )
        self._on_given_up(receive, now, ReceiveStatus.FAILED, error)

    def _on_visible(self, receive: _Receive, now: float) -> None:
        if receive.verify:
            self._start_digest(receive, now)
            return
        receive.state = _S.COMPLETE
        self._end(receive, now)

    def _note_digests(self, receive: _Receive, part: _Part, message: wire.Commit, pieces: list[Rect]) -> bool:
        """Keep what a rank says that it has sent. Whether it is all that has to be said.

        Args:
            pieces: What the commit covers of what is wanted.
        """
        event = receive.event
        full = event.num_tokens // self._block_tokens * self._block_tokens
        if message.coverage and message.digest_hi not in (event.num_tokens, full):
            return False
        layers = sorted({layer for piece in pieces for layer in range(piece.layer_lo, piece.layer_hi)})
        if len(layers) != len(message.digests):
            return False
        if layers and receive.digests and message.digest_hi != receive.digest_hi:
            return False
        if layers:
            receive.digest_hi = message.digest_hi
        address = part.session.address
        receive.digests += [(address, layer, digest) for layer, digest in zip(layers, message.digests, strict=True)]
        return True

    def _start_digest(self, receive: _Receive, now: float) -> None:
        """Digest what has arrived. Every rank has committed, so nothing writes; whoever gives up meanwhile may have the blocks,
        as this only reads them and its result is void then."""
        digest_id = DigestId(next(self._digest_ids))
        receive.state, receive.digest_id = _S.DIGESTING, digest_id
        self._digests[digest_id] = receive
        self._deadlines.set(("receive", receive), now + self.config.digest_timeout_s)
        count = blocks_for_tokens(receive.digest_hi, self._block_tokens) - receive.event.token_lo // self._block_tokens
        blocks = tuple(ids[:count] for ids in receive.event.blocks)
        self._effects.append(StartDigest(False, digest_id, self._digested_layers(receive), blocks))

    @staticmethod
    def _digested_layers(receive: _Receive) -> tuple[int, ...]:
        return tuple(sorted({layer for _, layer, _ in receive.digests}))

    def _on_digest_ended(self, event: DigestReady | DigestFailed, now: float) -> None:
        receive = self._digests.pop(event.digest_id, None)
        if receive is None:
            raise LocalProtocolError(f"digest {event.digest_id} ended twice or was never asked for")
        if receive.state is not _S.DIGESTING:
            return
        if isinstance(event, DigestReady):
            self._step(receive, "DigestReady", now, event.digests)
        else:
            self._step(receive, "DigestFailed", now, event.error)

    def _on_digest_ready(self, receive: _Receive, now: float, digests: tuple[bytes, ...]) -> None:
        have = dict(zip(self._digested_layers(receive), digests, strict=True))
        wrong = [(layer, address) for address, layer, digest in receive.digests if have[layer] != digest]
        if not wrong:
            self.counters.verified += 1
            receive.state = _S.COMPLETE
            self._end(receive, now)
            return
        self.counters.integrity_errors += 1
        layer, address = min(wrong)
        blocks = ", ".join(str(len(ids)) for ids in receive.event.blocks)
        error = IntegrityError(
            f"what has arrived is not what the producer at {address} has sent: {len(wrong)} of {len(receive.digests)} layers "
            f"differ, the first is {self.layout.layers[layer].name}; {blocks} blocks, written in epoch {receive.epoch}",
            story=receive.story.lines(),
        )
        self._on_given_up(receive, now, ReceiveStatus.FAILED, error)

    def _on_digest_failed(self, receive: _Receive, now: float, reason: str) -> None:
        error = TransferCancelled(f"the digest of what has arrived can't be computed: {reason}", story=receive.story.lines())
        self._on_given_up(receive, now, ReceiveStatus.FAILED, error)

    def _on_part_failed(self, receive: _Receive, now: float, reason: str) -> None:
        error = TransferRejected(f"the producer gave the transfer up: {reason}", story=receive.story.lines())
        self._on_given_up(receive, now, ReceiveStatus.FAILED, error)

    def _on_part_failing(self, receive: _Receive, now: float, reason: str) -> None:
        """The producer gives up while writes are in flight: our engine needn't wait for their end."""
        error = TransferRejected(f"the producer gave the transfer up: {reason}", story=receive.story.lines())
        self._on_given_up(receive, now, ReceiveStatus.FAILED, error, fence_far=True)

    def _on_fence_far(self, receive: _Receive, now: float, reason: str) -> None:
        del reason
        if receive.status is ReceiveStatus.FAILED:
            self._quarantine(receive, now)

    def _on_waited_too_long(self, receive: _Receive, now: float) -> None:
        if receive.state is _S.DIGESTING:
            reason = "the digest of what has arrived does not end"
        elif receive.fence_running:
            reason = "the device does not make visible what has arrived"
        elif not receive.parts:
            reason = "the handshake with the producer has not ended"
        elif receive.waiting_source:
            reason = "the producer has not heard of this transfer: was the prefill leg sent, with the same transfer_id?"
        else:
            reason = "the producer knows the transfer but has not completed it"
        waited = now - receive.registered_at
        error = LeaseExpired(f"gave up after {waited:.1f} s: {reason}", story=receive.story.lines())
        self._on_given_up(receive, now, ReceiveStatus.FAILED, error)

    def _on_given_up(
        self, receive: _Receive, now: float, status: ReceiveStatus, error: KvPushError, *, fence_far: bool = False
    ) -> None:
        """Leave for good: cancel at every rank, and wait until none can write.

        Args:
            fence_far: A rank has said that its fence will take a while.
        """
        receive.status, receive.error, receive.given_up_at = status, error, now
        receive.story.add(now, receive.state, error.message)
        receive.state = _S.FENCING
        if self._quiet(receive, now):
            self._on_quiet(receive, now)
            return
        self._send_cancels(receive)
        self._deadlines.set(("retry", receive), now + self.config.retry_s)
        self._watch_lost(receive, now)
        nobody_left = all(part.state is not _PartState.SENT for part in receive.parts.values())
        if status is ReceiveStatus.FAILED and (fence_far or nobody_left):
            # No fence will be acknowledged, or not soon: the engine needn't wait for the quarantine.
            self._quarantine(receive, now)
        else:
            self._deadlines.set(("receive", receive), now + self.config.fence_timeout_s)

    def _on_given_up_again(self, receive: _Receive, now: float, status: ReceiveStatus, error: KvPushError) -> None:
        del now, error
        if status is ReceiveStatus.CANCELLED:
            receive.status = status

    def _on_fence_late(self, receive: _Receive, now: float) -> None:
        """No fence in time: let the engine go on without these blocks."""
        self._deadlines.set(("receive", receive), now + self.config.fence_give_up_s)
        if receive.state is _S.FENCING and receive.status is ReceiveStatus.FAILED:
            self._quarantine(receive, now)

    def _fence_is_overdue(self, receive: _Receive, now: float) -> bool:
        """The peer lives but has not fenced for so long that it must not be granted leases any longer."""
        return (
            receive.state in (_S.FENCING, _S.QUARANTINED)
            and now - receive.given_up_at >= self.config.fence_give_up_s
            and any(part.state is _PartState.SENT for part in receive.parts.values())
        )

    def _quarantine(self, receive: _Receive, now: float) -> None:
        receive.state = _S.QUARANTINED
        receive.reported = True
        self.counters.quarantined += 1
        self.counters.failed += 1
        self._deadlines.set(("receive", receive), now + self.config.fence_give_up_s)
        self._effects.append(
            Report(ReceiveEnded(receive.event.request_id, ReceiveStatus.FAILED, False, error=self._told(receive)))
        )

    def _send_cancels(self, receive: _Receive) -> None:
        for part in receive.parts.values():
            if part.state is _PartState.SENT:
                cancel = wire.Cancel(part.session.session_id, request_id=receive.event.request_id, epoch=receive.epoch)
                self._effects.append(Send(cancel))

    def _quiet(self, receive: _Receive, now: float) -> bool:
        return (
            not receive.fence_running
            and not receive.unpacking
            and all(
                part.state in _QUIET or (part.state is _PartState.LOST and part.safe_at <= now)
                for part in receive.parts.values()
            )
        )

    def _watch_lost(self, receive: _Receive, now: float) -> None:
        lost = [part.safe_at for part in receive.parts.values() if part.state is _PartState.LOST and part.safe_at > now]
        if lost:
            self._deadlines.set(("safe", receive), max(lost))

    def _settle(self, receive: _Receive, now: float) -> None:
        """A part of a given-up receive has changed."""
        if self._quiet(receive, now):
            self._step(receive, "Quiet", now)
            return
        self._watch_lost(receive, now)
        if receive.state is _S.FENCING and not any(part.state is _PartState.SENT for part in receive.parts.values()):
            self._deadlines.set(("receive", receive), now)

    def _on_quiet(self, receive: _Receive, now: float) -> None:
        receive.state = _S.RELEASED if receive.status is ReceiveStatus.CANCELLED and not receive.reported else _S.FAILED
        self._end(receive, now)

    def _told(self, receive: _Receive) -> KvPushError | None:
        if receive.error is not None and not receive.error.story:
            receive.error.story = receive.story.lines()
        return receive.error

    def _end(self, receive: _Receive, now: float) -> None:
        """The blocks are the engine's again."""
        request_id = receive.event.request_id
        del self._receives[request_id]
        receive.peer.receives.pop(request_id, None)
        for part in receive.parts.values():
            part.session.receives.pop(request_id, None)
        self._lost.discard(receive)
        for kind in ("receive", "retry", "safe"):
            self._deadlines.discard((kind, receive))
        receive.story.add(now, receive.state, "ended")
        if receive.reported:
            self._effects.append(Report(BlocksSafe(request_id)))
            return
        receive.reported = True
        if receive.state is _S.COMPLETE:
            tokens = receive.event.num_tokens - receive.event.token_lo
            self.counters.received += 1
            self.counters.tokens_received += tokens
            outcome = ReceiveEnded(request_id, ReceiveStatus.RECEIVED, True, num_tokens=tokens)
        else:
            if receive.status is ReceiveStatus.CANCELLED:
                self.counters.cancelled += 1
            else:
                self.counters.failed += 1
            outcome = ReceiveEnded(request_id, receive.status, True, error=self._told(receive))
        self._effects.append(Report(outcome))


_EVENT_HANDLERS: Mapping[type[Any], Callable[[ConsumerMachine, Any, float], None]] = {
    ReceiveRequested: ConsumerMachine._on_requested,
    ReceiveAborted: ConsumerMachine._on_aborted,
    TransferDeclined: ConsumerMachine._on_declined,
    StartAwaited: ConsumerMachine._on_start_awaited,
    StartAwaitCancelled: ConsumerMachine._on_start_await_cancelled,
    MessageReceived: ConsumerMachine._on_message,
    SessionLost: ConsumerMachine._on_session_lost,
    VisibilityReached: ConsumerMachine._on_visibility,
    VisibilityFailed: ConsumerMachine._on_visibility,
    UnpackEnded: ConsumerMachine._on_unpack_ended,
    DigestReady: ConsumerMachine._on_digest_ended,
    DigestFailed: ConsumerMachine._on_digest_ended,
}
