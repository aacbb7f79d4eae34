# SPDX-License-Identifier: Apache-2.0
"""The consumer's machine: announces destination blocks, counts what has arrived, and knows when its blocks are safe.

One **receive** is one request of our engine. It registers with every rank of its producer that holds a part of what it wants,
over one **session** per rank. No clock, thread or I/O here.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvpush.core import wire
from kvpush.core.effects import CloseSession, Effect, OpenSession, Report, Send, StartVisibilityFence
from kvpush.core.events import (
    BlocksSafe,
    ConsumerEvent,
    MessageReceived,
    ReceiveAborted,
    ReceiveEnded,
    ReceiveRequested,
    ReceiveStatus,
    SessionLost,
    SourceStarted,
    StartAwaited,
    TransferDeclined,
    VisibilityReached,
)
from kvpush.core.ids import AgentName, EngineId, Epoch, PeerAddress, Rect, RequestId, SessionId
from kvpush.core.layout import CacheLayout, blocks_for_tokens, common_block_tokens, covered_volume, merge_rects
from kvpush.core.lease import Deadlines, GrantedLease
from kvpush.core.machine import Story, Table, Transition, step
from kvpush.errors import (
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
        retry_window_s: The transport's: how long after a lease a posted write may still land.
        needs_visibility_fence: The backend's capability.
    """

    engine_id: EngineId
    agent_name: AgentName
    transport: str
    metadata: bytes
    compat: dict[str, str] = field(default_factory=dict)
    retry_window_s: float = 1.0
    needs_visibility_fence: bool = False
    lease_s: float = 10.0
    peer_timeout_s: float = 2.0
    handshake_timeout_s: float = 3.0
    announce_timeout_s: float = 30.0
    transfer_timeout_s: float = 300.0
    fence_timeout_s: float = 0.5
    fence_give_up_s: float = 30.0
    retry_s: float = 1.0


class ReceiveState(enum.Enum):
    """States of one receive."""

    REGISTERED = enum.auto()
    """Announced, or about to be; nothing can have been written yet as far as we have heard."""
    RECEIVING = enum.auto()
    """Writes may land."""
    VERIFYING = enum.auto()
    """All has arrived; the device's visibility fence runs."""
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
TABLE: Table = {
    (_S.REGISTERED, "Registered"): Transition("_on_registered", (_S.REGISTERED,)),
    (_S.REGISTERED, "Streaming"): Transition("_on_streaming", (_S.RECEIVING,)),
    (_S.REGISTERED, "Committed"): Transition("_on_committed", (_S.RECEIVING, _S.VERIFYING, _S.COMPLETE, *_ENDINGS)),
    (_S.REGISTERED, "PartFailed"): Transition("_on_part_failed", _ENDINGS),
    (_S.REGISTERED, "GivenUp"): Transition("_on_given_up", _ENDINGS),
    (_S.REGISTERED, "DeadlinePassed"): Transition("_on_waited_too_long", _ENDINGS),
    (_S.RECEIVING, "Registered"): Transition("_ignore", (_S.RECEIVING,)),
    (_S.RECEIVING, "Streaming"): Transition("_on_streaming", (_S.RECEIVING,)),
    (_S.RECEIVING, "Committed"): Transition("_on_committed", (_S.RECEIVING, _S.VERIFYING, _S.COMPLETE, *_ENDINGS)),
    (_S.RECEIVING, "PartFailed"): Transition("_on_part_failed", _ENDINGS),
    (_S.RECEIVING, "GivenUp"): Transition("_on_given_up", _ENDINGS),
    (_S.RECEIVING, "DeadlinePassed"): Transition("_on_waited_too_long", _ENDINGS),
    (_S.VERIFYING, "VisibilityReached"): Transition("_on_visible", (_S.COMPLETE,)),
    (_S.VERIFYING, "GivenUp"): Transition("_on_given_up", _ENDINGS),
    (_S.VERIFYING, "DeadlinePassed"): Transition("_on_waited_too_long", _ENDINGS),
    (_S.FENCING, "Quiet"): Transition("_on_quiet", (_S.RELEASED, _S.FAILED)),
    (_S.FENCING, "GivenUp"): Transition("_on_given_up_again", (_S.FENCING,)),
    (_S.FENCING, "DeadlinePassed"): Transition("_on_fence_late", (_S.FENCING, _S.QUARANTINED)),
    (_S.QUARANTINED, "Quiet"): Transition("_on_quiet", (_S.FAILED,)),
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


_QUIET = (_PartState.UNSENT, _PartState.COMMITTED, _PartState.FENCED)


class _Part:
    __slots__ = ("safe_at", "session", "state")

    def __init__(self, session: _Session) -> None:
        self.session = session
        self.state = _PartState.UNSENT
        self.safe_at = float("inf")
        """LOST: when the lease and the transport's retry window are over."""


class _Receive:
    __slots__ = (
        "coverage",
        "epoch",
        "error",
        "event",
        "expected",
        "given_up_at",
        "parts",
        "peer",
        "registered_at",
        "reported",
        "state",
        "status",
        "story",
        "waiting_source",
    )

    def __init__(self, event: ReceiveRequested, epoch: Epoch, expected: int, peer: _Peer, now: float) -> None:
        self.event = event
        self.epoch = epoch
        self.expected = expected
        self.peer = peer
        self.state = _S.REGISTERED
        self.parts: dict[SessionId, _Part] = {}
        self.coverage: list[Rect] = []
        self.status = ReceiveStatus.RECEIVED
        self.error: KvPushError | None = None
        self.reported = False
        self.waiting_source = True
        self.registered_at = now
        self.given_up_at = now
        self.story = Story()


class _Session:
    __slots__ = (
        "address",
        "covers",
        "last_heard",
        "lease",
        "peer",
        "primary",
        "ready",
        "receives",
        "seq",
        "session_id",
    )

    def __init__(self, session_id: SessionId, address: PeerAddress, peer: _Peer, lease_s: float, *, primary: bool) -> None:
        self.session_id = session_id
        self.address = address
        self.peer = peer
        self.primary = primary
        self.ready = False
        self.covers: tuple[Rect, ...] = ()
        self.seq = 0
        self.lease = GrantedLease(lease_s)
        self.last_heard = float("-inf")
        self.receives: dict[RequestId, _Receive] = {}


class _Watch:
    """A request without blocks that waits for its prefill to start."""

    __slots__ = ("answered_at", "asked_at", "event", "peer", "since")

    def __init__(self, event: StartAwaited, peer: _Peer, now: float) -> None:
        self.event = event
        self.peer = peer
        self.since = now
        self.asked_at: float | None = None
        self.answered_at = now


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
        self._epoch = 0
        self._deadlines: Deadlines[tuple[str, object]] = Deadlines()
        self._writable: set[_Receive] = set()
        self._active: set[SessionId] = set()
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
        """Whether writes may be landing now, so that a transport whose target must poll is to be polled."""
        return bool(self._writable) and bool(self._active)

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
        for session in self._sessions.values():
            if (session.receives or not session.ready) and ("session", session) not in self._deadlines:
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
        receive = _Receive(event, Epoch(self._epoch), expected, peer, now)
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

    def _on_started(self, session: _Session, message: wire.Started) -> None:
        watch = session.peer.watches.get(RequestId(message.request_id))
        if watch is None:
            self.counters.stale_messages += 1
            return
        watch.asked_at = None
        if message.started:
            self._end_watch(watch)

    def _end_watch(self, watch: _Watch) -> None:
        """Report it: whatever the reason, the engine is to try."""
        request_id = watch.event.request_id
        self._deadlines.discard(("watch", watch))
        watch.peer.watches.pop(request_id, None)
        if self._watches.pop(request_id, None) is not None:
            self._effects.append(Report(SourceStarted(request_id)))

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
        session = _Session(session_id, address, peer, self.config.lease_s, primary=primary)
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
            self._drop_peer(session.peer, PeerLost(f"the producer at {session.address} is shutting down"), now, fenced=session)
        elif not session.ready:
            self.counters.stale_messages += 1
        elif isinstance(message, wire.Heartbeat):
            session.seq = max(session.seq, message.seq)
            self._grant(session, now)
            self._effects.append(Send(wire.HeartbeatAck(session.session_id, seq=session.seq)))
        elif isinstance(message, wire.Quiet):
            self._active.discard(session.session_id)
        elif isinstance(message, wire.Started):
            self._on_started(session, message)
        elif isinstance(message, wire.Registered | wire.Streaming | wire.Commit | wire.Failed | wire.Fenced):
            self._on_part_message(session, message, now)
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
        self._deadlines.discard(("session", session))
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
        elif session.receives:
            silent_for = now - session.last_heard
            if silent_for >= self.config.peer_timeout_s:
                self._drop_peer(
                    session.peer, PeerLost(f"nothing heard from the producer at {session.address} for {silent_for:.1f} s"), now
                )
            else:
                self._deadlines.set(("session", session), session.last_heard + self.config.peer_timeout_s)

    def _on_session_lost(self, event: SessionLost, now: float) -> None:
        session = self._sessions.get(event.session)
        if session is not None:
            self._drop_peer(session.peer, PeerLost(f"connection to {session.address} lost: {event.reason}"), now)

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
                        part.safe_at = session.lease.until + self.config.retry_window_s
                self._recount(receive)
            session.receives.clear()
            self._deadlines.discard(("session", session))
            self._sessions.pop(session.session_id, None)
            self._active.discard(session.session_id)
            if session is not fenced and session.ready:
                self._effects.append(Send(wire.Goodbye(session.session_id, reason="the instance is given up")))
            self._effects.append(CloseSession(session.session_id))
        peer.sessions.clear()
        for watch in list(peer.watches.values()):
            self._end_watch(watch)
        for receive in receives:
            if receive.state in (_S.REGISTERED, _S.RECEIVING):
                self._step(receive, "GivenUp", now, ReceiveStatus.FAILED, error)
            elif receive.state is not _S.VERIFYING:
                self._settle(receive, now)

    # --- receives ------------------------------------------------------------------------------------------------------

    def _step(self, receive: _Receive, event: str, now: float, *args: object) -> None:
        """Run one row of the table, and see whether the transport has to be polled for it."""
        step(self, TABLE, receive, event, now, *args)
        self._recount(receive)

    def _recount(self, receive: _Receive) -> None:
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
                session.last_heard = now
                self._deadlines.set(("session", session), now + self.config.peer_timeout_s)
            session.receives[receive.event.request_id] = receive
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
                )
            )
        )

    def _on_retry_due(self, receive: _Receive, now: float) -> None:
        """Say again what has not been answered: messages may be lost with a link, or at a full queue."""
        if receive.state in (_S.REGISTERED, _S.RECEIVING):
            blocks = wire.pack_blocks(receive.event.blocks)
            for part in receive.parts.values():
                if part.state is _PartState.SENT:
                    self.counters.registrations_repeated += 1
                    self._send_registration(receive, part, blocks, now)
        elif receive.state in (_S.FENCING, _S.QUARANTINED):
            self._send_cancels(receive)
        else:
            return
        self._deadlines.set(("retry", receive), now + self.config.retry_s)

    def _on_part_message(
        self,
        session: _Session,
        message: wire.Registered | wire.Streaming | wire.Commit | wire.Failed | wire.Fenced,
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
            self._active.add(session.session_id)
        if isinstance(message, wire.Registered | wire.Streaming):
            if receive.state in (_S.REGISTERED, _S.RECEIVING):
                name = type(message).__name__
                self._step(receive, name, now, *((message,) if isinstance(message, wire.Registered) else ()))
            return
        part.state = _PartState.COMMITTED if isinstance(message, wire.Commit) else _PartState.FENCED
        self._recount(receive)
        if receive.state in (_S.FENCING, _S.QUARANTINED):
            self._settle(receive, now)
        elif isinstance(message, wire.Commit):
            self._step(receive, "Committed", now, message)
        else:
            reason = message.reason if isinstance(message, wire.Failed) else "the producer fenced it without being asked"
            self._step(receive, "PartFailed", now, reason)

    def _on_registered(self, receive: _Receive, now: float, message: wire.Registered) -> None:
        if receive.waiting_source and not message.waiting:
            receive.waiting_source = False
            self._deadlines.set(("receive", receive), now + self.config.transfer_timeout_s)

    def _on_streaming(self, receive: _Receive, now: float) -> None:
        receive.waiting_source = False
        if receive.state is not _S.RECEIVING:
            receive.state = _S.RECEIVING
            self._deadlines.set(("receive", receive), now + self.config.transfer_timeout_s)

    def _on_committed(self, receive: _Receive, now: float, message: wire.Commit) -> None:
        receive.waiting_source = False
        event = receive.event
        for rect in message.coverage:
            for piece in self._clip(rect, event.token_lo, event.num_tokens):
                merge_rects(receive.coverage, piece)
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
        self._deadlines.set(("receive", receive), now + self.config.transfer_timeout_s)
        if self.config.needs_visibility_fence:
            self._effects.append(StartVisibilityFence(event.request_id, receive.epoch, event.blocks))
        else:
            self._on_visible(receive, now)

    def _on_visibility(self, event: VisibilityReached, now: float) -> None:
        receive = self._receives.get(event.request_id)
        if receive is None or receive.epoch != event.epoch or receive.state is not _S.VERIFYING:
            self.counters.stale_messages += 1
            return
        self._step(receive, "VisibilityReached", now)

    def _on_visible(self, receive: _Receive, now: float) -> None:
        receive.state = _S.COMPLETE
        self._end(receive, now)

    def _on_part_failed(self, receive: _Receive, now: float, reason: str) -> None:
        error = TransferRejected(f"the producer gave the transfer up: {reason}", story=receive.story.lines())
        self._on_given_up(receive, now, ReceiveStatus.FAILED, error)

    def _on_waited_too_long(self, receive: _Receive, now: float) -> None:
        if not receive.parts:
            reason = "the handshake with the producer has not ended"
        elif receive.waiting_source:
            reason = "the producer has not heard of this transfer: was the prefill leg sent, with the same transfer_id?"
        else:
            reason = "the producer knows the transfer but has not completed it"
        waited = now - receive.registered_at
        error = LeaseExpired(f"gave up after {waited:.1f} s: {reason}", story=receive.story.lines())
        self._on_given_up(receive, now, ReceiveStatus.FAILED, error)

    def _on_given_up(self, receive: _Receive, now: float, status: ReceiveStatus, error: KvPushError) -> None:
        """Leave for good: cancel at every rank, and wait until none can write."""
        receive.status, receive.error, receive.given_up_at = status, error, now
        receive.story.add(now, receive.state, error.message)
        receive.state = _S.FENCING
        if self._quiet(receive, now):
            self._on_quiet(receive, now)
            return
        self._send_cancels(receive)
        self._deadlines.set(("retry", receive), now + self.config.retry_s)
        self._watch_lost(receive)
        if all(part.state is not _PartState.SENT for part in receive.parts.values()) and status is ReceiveStatus.FAILED:
            # Nobody is left to acknowledge a fence: the engine needn't wait for the quarantine.
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
        return all(
            part.state in _QUIET or (part.state is _PartState.LOST and part.safe_at <= now) for part in receive.parts.values()
        )

    def _watch_lost(self, receive: _Receive) -> None:
        lost = [part.safe_at for part in receive.parts.values() if part.state is _PartState.LOST]
        if lost:
            self._deadlines.set(("safe", receive), max(lost))

    def _settle(self, receive: _Receive, now: float) -> None:
        """A part of a given-up receive has changed."""
        if self._quiet(receive, now):
            self._step(receive, "Quiet", now)
            return
        self._watch_lost(receive)
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
            if not part.session.receives:
                self._deadlines.discard(("session", part.session))
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
    MessageReceived: ConsumerMachine._on_message,
    SessionLost: ConsumerMachine._on_session_lost,
    VisibilityReached: ConsumerMachine._on_visibility,
}
