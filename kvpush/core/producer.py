# SPDX-License-Identifier: Apache-2.0
"""The producer's machine: joins block registrations with sources and pushes what becomes final. No clock, thread or I/O.

A **source** is a request of our engine whose KV consumers want. A **stream** is one consumer's registration of destination
blocks in one epoch; a source may feed several (parallel samples of one prompt). Sources and streams meet in the
:class:`~kvpush.core.rendezvous.Rendezvous`, in either order.
"""

from __future__ import annotations

import enum
import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvpush.core import wire
from kvpush.core.coverage import covered_volume, merge_rects
from kvpush.core.effects import AddPeer, CloseSession, Effect, PostWrite, RemovePeer, Report, Send, StartDigest
from kvpush.core.events import (
    DigestFailed,
    DigestReady,
    MessageReceived,
    PeerAdded,
    PeerRefused,
    ProducerEvent,
    SessionLost,
    SourceAborted,
    SourceAnnounced,
    SourceBroken,
    SourceFinished,
    SourcePreempted,
    SourceProgressed,
    SourceReleased,
    WriteCompleted,
    WriteErrored,
)
from kvpush.core.ids import AgentName, BlockTable, DigestId, EngineId, Epoch, Rect, RequestId, SessionId, WriteId
from kvpush.core.layout import CacheLayout, blocks_for_tokens, common_block_tokens
from kvpush.core.lease import Deadlines, HeldLease
from kvpush.core.machine import Story, Table, Transition, step
from kvpush.core.plan import PairPlan
from kvpush.core.rendezvous import Rendezvous
from kvpush.core.scheduling import (
    Credit,
    LinkEstimate,
    PostQueue,
    SchedulingPolicy,
    TokenCounts,
    WriteRange,
    final_tokens,
    next_range,
)
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
class ProducerConfig:
    """Times in seconds; see ``kvpush.settings.Settings`` for what each means to a user."""

    engine_id: EngineId
    agent_name: AgentName
    transport: str
    compat: dict[str, str] = field(default_factory=dict)
    endpoints: tuple[wire.Endpoint, ...] = ()
    lease_guard_s: float = 0.5
    heartbeat_s: float = 0.5
    idle_heartbeat_s: float = 3.0
    peer_timeout_s: float = 2.0
    announce_timeout_s: float = 60.0
    source_timeout_s: float = 120.0
    spare_timeout_s: float = 5.0
    write_timeout_s: float = 30.0
    max_streams_per_session: int = 65536
    retry_window_s: float = 1.0
    """The transport's: how long after a lease a posted write may still land."""
    digest_scheme: str = ""
    """How our backend computes digests; empty: it can't."""
    policy: SchedulingPolicy = field(default_factory=SchedulingPolicy)
    first_seq: Callable[[], int] = lambda: 0
    """Draws where a session's heartbeats begin to count, below 2**52. At random where replayed messages are to be worthless."""


class StreamState(enum.Enum):
    """States of one stream."""

    AWAITING_BLOCKS = enum.auto()
    """Registered by the consumer; no source has been announced yet."""
    STREAMING = enum.auto()
    """Joined; ranges are posted as they become final."""
    DRAINING = enum.auto()
    """Everything is posted; some of it is in flight."""
    DIGESTING = enum.auto()
    """Every write is complete; the digest that the consumer has asked for is computed."""
    CANCELLING = enum.auto()
    """Nothing more is posted; waits until nothing is in flight."""
    DONE = enum.auto()
    """Committed."""
    ABORTED = enum.auto()
    """Fenced on the consumer's wish, or its session is gone."""
    FAILED = enum.auto()
    """Failed on our side; the consumer has been told."""


_S = StreamState
TERMINAL = (_S.DONE, _S.ABORTED, _S.FAILED)

TABLE: Table = {
    (_S.AWAITING_BLOCKS, "Joined"): Transition("_on_joined", (_S.STREAMING, _S.DONE)),
    (_S.AWAITING_BLOCKS, "GivenUp"): Transition("_on_given_up", (_S.ABORTED, _S.FAILED)),
    (_S.AWAITING_BLOCKS, "DeadlinePassed"): Transition("_on_stream_deadline", (_S.FAILED,)),
    (_S.STREAMING, "SourceGrew"): Transition("_on_source_grew", (_S.STREAMING,)),
    (_S.STREAMING, "SourceRestarted"): Transition("_on_source_restarted", (_S.STREAMING,)),
    (_S.STREAMING, "AllPosted"): Transition("_on_all_posted", (_S.DRAINING,)),
    (_S.STREAMING, "WriteEnded"): Transition("_on_write_ended", (_S.STREAMING, _S.CANCELLING, _S.FAILED)),
    (_S.STREAMING, "GivenUp"): Transition("_on_given_up", (_S.CANCELLING, _S.ABORTED, _S.FAILED)),
    (_S.STREAMING, "DeadlinePassed"): Transition("_on_stream_deadline", (_S.STREAMING, _S.CANCELLING, _S.FAILED)),
    (_S.DRAINING, "SourceGrew"): Transition("_on_source_grew", (_S.DRAINING,)),
    (_S.DRAINING, "SourceRestarted"): Transition("_on_source_restarted", (_S.STREAMING,)),
    (_S.DRAINING, "WriteEnded"): Transition("_on_write_ended", (_S.DRAINING, _S.DIGESTING, _S.DONE, _S.CANCELLING, _S.FAILED)),
    (_S.DRAINING, "GivenUp"): Transition("_on_given_up", (_S.CANCELLING, _S.ABORTED, _S.FAILED)),
    (_S.DRAINING, "DeadlinePassed"): Transition("_on_stream_deadline", (_S.DRAINING, _S.CANCELLING, _S.FAILED)),
    (_S.DIGESTING, "SourceGrew"): Transition("_ignore", (_S.DIGESTING,)),
    (_S.DIGESTING, "SourceRestarted"): Transition("_on_source_restarted", (_S.STREAMING,)),
    (_S.DIGESTING, "DigestReady"): Transition("_on_digest_ready", (_S.DONE,)),
    (_S.DIGESTING, "DigestFailed"): Transition("_on_digest_failed", (_S.FAILED,)),
    (_S.DIGESTING, "GivenUp"): Transition("_on_given_up", (_S.ABORTED, _S.FAILED)),
    (_S.DIGESTING, "DeadlinePassed"): Transition("_on_stream_deadline", (_S.FAILED,)),
    (_S.CANCELLING, "SourceGrew"): Transition("_ignore", (_S.CANCELLING,)),
    (_S.CANCELLING, "SourceRestarted"): Transition("_ignore", (_S.CANCELLING,)),
    (_S.CANCELLING, "WriteEnded"): Transition("_on_write_ended", (_S.CANCELLING, _S.ABORTED, _S.FAILED)),
    (_S.CANCELLING, "GivenUp"): Transition("_on_given_up", (_S.CANCELLING,)),
    (_S.CANCELLING, "DeadlinePassed"): Transition("_on_stream_deadline", (_S.CANCELLING,)),
}
"""Every state x event that is legal for a stream."""


class _Source:
    """One request of our engine."""

    __slots__ = (
        "blocks",
        "digest",
        "end_error",
        "ended",
        "final",
        "grows",
        "keys",
        "low",
        "num_bytes",
        "num_digests",
        "num_done",
        "num_tokens",
        "num_writes",
        "source_id",
        "story",
        "streams",
        "uneven",
    )

    def __init__(self, event: SourceAnnounced, num_layers: int, num_groups: int) -> None:
        self.source_id = event.source_id
        self.keys = event.keys
        self.digest = event.prompt_digest
        self.num_tokens = event.num_tokens
        self.grows = event.grows
        self.blocks: BlockTable = tuple(np.zeros(0, np.int32) for _ in range(num_groups))
        self.final: TokenCounts = np.zeros(num_layers, np.int64)
        self.low = 0
        """Tokens that are final in every layer."""
        self.uneven = False
        """Some layers are further than others."""
        self.streams: dict[_Stream, None] = {}
        self.num_writes = 0
        self.num_digests = 0
        """Digests that read its blocks."""
        self.num_done = 0
        self.num_bytes = 0
        self.ended = False
        self.end_error: KvPushError | None = None
        self.story = Story()


class _Stream:
    """One consumer's registration, one epoch."""

    __slots__ = (
        "blocks",
        "coverage",
        "digest",
        "digest_id",
        "epoch",
        "inflight",
        "keys",
        "last_words",
        "num_tokens",
        "posted",
        "progress",
        "remaining_bytes",
        "request_id",
        "restarting",
        "said_streaming",
        "session",
        "source",
        "state",
        "story",
        "token_lo",
        "verify",
        "waiting_since",
    )

    def __init__(self, session: _Session, message: wire.RegisterBlocks, blocks: BlockTable) -> None:
        self.session = session
        self.request_id = RequestId(message.request_id)
        self.epoch = Epoch(message.epoch)
        self.keys = message.keys
        self.digest = message.prompt_digest
        self.num_tokens = message.num_tokens
        self.token_lo = message.token_lo
        self.verify = message.verify
        self.digest_id: DigestId | None = None
        """The digest that is waited for; an older one has no effect."""
        self.blocks = blocks
        self.state = _S.AWAITING_BLOCKS
        self.source: _Source | None = None
        self.posted: TokenCounts = np.zeros(0, np.int64)
        self.coverage: list[Rect] = []
        self.inflight: dict[WriteId, tuple[PostWrite, WriteRange]] = {}
        self.progress = 0
        self.restarting = False
        self.said_streaming = False
        self.last_words: wire.Failed | wire.Fenced | None = None
        self.remaining_bytes = 0
        self.waiting_since = 0.0
        self.story = Story()

    @property
    def awaited(self) -> bool:
        return self.source is not None and self.source.low >= self.num_tokens


class _Session:
    """One consumer endpoint that has said hello."""

    __slots__ = (
        "active",
        "agent_name",
        "answered_seq",
        "beat_at",
        "block_bytes",
        "busy_until",
        "covers",
        "cut",
        "engine_id",
        "hello",
        "last_heard",
        "lease",
        "link",
        "lost",
        "plan",
        "ready",
        "session_id",
        "stalled",
        "streams",
        "target_tokens",
        "unit_tokens",
        "wants_all",
    )

    def __init__(self, hello: wire.Hello, plan: PairPlan, config: ProducerConfig, now: float) -> None:
        self.session_id = SessionId(hello.session)
        self.engine_id = EngineId(hello.engine_id)
        self.agent_name = AgentName(hello.agent_name)
        self.hello = hello
        self.plan = plan
        self.target_tokens = common_block_tokens(hello.layout)
        """Tokens per block of the consumer's."""
        self.unit_tokens = plan.unit_tokens
        self.block_bytes = np.array([plan.bytes_per_block(idx, idx + 1) for idx in range(plan.num_layers)], np.int64)
        """Per layer, of ``unit_tokens``: of a block, or where the sizes differ of a part that fits in both."""
        self.wants_all = bool((self.block_bytes > 0).all())
        self.covers = plan.coverage(0, plan.num_layers, 0, 1)
        self.lease = HeldLease(hello.lease_s, config.lease_guard_s, config.first_seq())
        self.link = LinkEstimate(config.policy)
        self.answered_seq = 0
        self.last_heard = now
        self.beat_at = now
        """When the next heartbeat is due."""
        self.busy_until = now
        """Heartbeats go at the busy pace until then, though there may be no stream."""
        self.ready = False
        self.lost = False
        self.cut = False
        """Its connection has been closed under its writes; it counts for its agent no longer."""
        self.active = False
        """The consumer has been told that writes may land."""
        self.stalled = False
        self.streams: dict[RequestId, _Stream] = {}


@dataclass(slots=True)
class ProducerCounters:
    """Monotonic counts, for metrics and tests."""

    stale_messages: int = 0
    refused_hellos: int = 0
    refused_registrations: int = 0
    sessions_lost: int = 0
    connections_cut: int = 0
    streams_done: int = 0
    streams_failed: int = 0
    streams_aborted: int = 0
    sources_expired: int = 0
    restarts: int = 0
    writes: int = 0
    bytes_written: int = 0
    lease_stalls: int = 0


_TOMBSTONES = 4096
_MAX_SESSIONS = 8192
_MAX_PER_AGENT = 16
_MAX_WATCHERS = 64
_WATCHED_S = 30.0
"""How long after a watch its session is kept at the busy pace: consumers ask again more often than that."""
_MANY_BUSY = 16
"""With more consumers being written to at once, one of them always has something to say."""
_QUIET_S = 0.005
"""How long nothing is in flight before the consumer is told: writes of one chunk follow one another more closely."""


class ProducerMachine:
    """``handle`` events in time order; do what the effects say; ``on_deadline`` when ``next_deadline`` has come.

    Args:
        config: Names and times.
        layout: Our cache.

    Raises:
        LayoutError: our own layout is impossible.
    """

    def __init__(self, config: ProducerConfig, layout: CacheLayout) -> None:
        layout.check()
        self.config = config
        self.layout = layout
        self.counters = ProducerCounters()
        self._block_tokens = common_block_tokens(layout)
        self._num_layers = len(layout.layers)
        self._sources: dict[RequestId, _Source] = {}
        self._sessions: dict[SessionId, _Session] = {}
        self._agents: dict[AgentName, dict[_Session, None]] = {}
        """The sessions over each consumer's connection."""
        self._writing: Deadlines[_Session] = Deadlines()
        """Sessions with writes in flight over a connection that is not cut, and when their leases were last known to end."""
        self._rendezvous: Rendezvous[_Source, _Stream] = Rendezvous()
        self._writes: dict[WriteId, _Stream] = {}
        self._write_ids = itertools.count(1)
        self._digests: dict[DigestId, tuple[_Stream, _Source]] = {}
        self._digest_ids = itertools.count(1)
        self._credit = Credit(config.policy)
        self.worthwhile_bytes = config.policy.min_write_bytes if config.policy.granularity == "auto" else 0
        """How much should have become final before it is worth waking up for, by what was last seen of a link."""
        self._postable: PostQueue[_Stream] = PostQueue()
        self._blocked: _Stream | None = None
        self._deadlines: Deadlines[tuple[str, object]] = Deadlines()
        self._epitaphs: OrderedDict[tuple[SessionId, RequestId], tuple[Epoch, wire.Message]] = OrderedDict()
        self._spare: OrderedDict[tuple[str, bytes], None] = OrderedDict()
        self._watchers: dict[tuple[str, bytes], dict[tuple[SessionId, RequestId], None]] = {}
        self._effects: list[Effect] = []
        self._shut: str | None = None

    # --- the machine's interface ---------------------------------------------------------------------------------------

    def handle(self, event: ProducerEvent, now: float) -> list[Effect]:
        """Take one event.

        Raises:
            LocalProtocolError: our own side sent what the state doesn't allow; nothing was changed.
            InternalError: a bug in this machine.
        """
        self._effects = []
        if isinstance(event, MessageReceived):
            self._on_message(event, now)
        else:
            _EVENT_HANDLERS[type(event)](self, event, now)
        self._pump(now)
        return self._effects

    def next_deadline(self) -> float | None:
        """When :meth:`on_deadline` wants to be called; None: not before the next event."""
        due, cut = self._deadlines.next(), self._writing.next()
        return due if cut is None else cut if due is None else min(due, cut)

    def cut_overdue(self, now: float) -> list[Effect]:
        """Close every connection whose lease has ended under its writes. To be called before the transport is driven again, so
        that a process that was stopped for long sends nothing of what it had posted before."""
        self._effects = []
        for session in self._writing.due(now):
            if not self._writing.take(session, now):
                continue
            if session.lease.valid(now):
                self._writing.set(session, session.lease.ends_at)
            else:
                self._cut(session, "the lease has ended with writes in flight", now)
        return self._effects

    def on_deadline(self, now: float) -> list[Effect]:
        """Do what is due."""
        self._effects = self.cut_overdue(now)
        for key in self._deadlines.due(now):
            if not self._deadlines.take(key, now):
                continue
            kind, subject = key
            if kind == "heartbeat":
                assert isinstance(subject, _Session)
                self._on_heartbeat_due(subject, now)
            elif kind == "quiet":
                assert isinstance(subject, _Session)
                self._on_quiet_due(subject)
            elif kind == "source":
                assert isinstance(subject, _Source)
                self._on_source_deadline(subject, now)
            else:
                assert isinstance(subject, _Stream)
                self._step(subject, "DeadlinePassed", now)
        self._pump(now)
        return self._effects

    def shutdown(self, now: float, reason: str = "shutting down") -> list[Effect]:
        """Stop posting for good and say goodbye. What is in flight goes on; ask :attr:`num_in_flight`.

        A goodbye is a fence for everything, so it is said to each consumer only when nothing for it is in flight, and its
        session ends with it: a registration that comes later can't start anything.
        """
        self._effects = []
        self._shut = reason
        for session in list(self._sessions.values()):
            for stream in list(session.streams.values()):
                self._give_up(stream, reason, now)
        for session in list(self._sessions.values()):
            self._say_goodbye_if_quiet(session)
        for source in list(self._sources.values()):
            if source.ended and source.source_id in self._sources:
                self._end_source(source, TransferCancelled(reason, story=source.story.lines()), now)
        return self._effects

    def _say_goodbye_if_quiet(self, session: _Session) -> None:
        if self._shut is None or session.lost or session.streams:
            return
        if session.ready:
            self._effects.append(Send(wire.Goodbye(session.session_id, reason=self._shut)))
        self._end_session(session)
        self._forget_if_quiet(session)

    @property
    def num_in_flight(self) -> int:
        """Writes posted and not ended."""
        return len(self._writes)

    @property
    def agents(self) -> tuple[AgentName, ...]:
        """Consumers that the transport knows."""
        return tuple(self._agents)

    def may_post(self, write_id: WriteId) -> bool:
        """Whether a write that was asked for is still to be posted: not if its stream has been given up meanwhile (I2)."""
        stream = self._writes.get(write_id)
        return stream is not None and stream.state in (_S.STREAMING, _S.DRAINING)

    def may_post_now(self, write_id: WriteId, now: float) -> bool | None:
        """The same for a part of a write that is posted later than it was asked for: None while the lease doesn't allow it."""
        stream = self._writes.get(write_id)
        if stream is None or not self.may_post(write_id):
            return False
        return True if stream.session.lease.valid(now) else None

    @property
    def poll_s(self) -> float:
        """How long to leave the transport alone while writes are in flight, seconds; 0: not known."""
        if not 0 < len(self._writing) <= _MANY_BUSY:
            return 0.0
        return min(session.link.poll_s for session in self._writing)

    @property
    def num_sources(self) -> int:
        """Sources not yet released."""
        return len(self._sources)

    @property
    def num_streams(self) -> int:
        """Streams not yet ended."""
        return sum(len(session.streams) for session in self._sessions.values())

    def knows(self, source_id: RequestId) -> bool:
        """Whether a source is announced and not yet released."""
        return source_id in self._sources

    def story(self, source_id: RequestId) -> tuple[str, ...]:
        """The story of a source and its streams."""
        source = self._sources.get(source_id)
        if source is None:
            return ()
        lines = list(source.story.lines())
        for stream in source.streams:
            lines += [f"[{stream.request_id} epoch {stream.epoch}] {line}" for line in stream.story.lines()]
        return tuple(lines)

    def check(self) -> None:
        """Verify the invariants that can be seen from here (I2, I5, and bookkeeping).

        Raises:
            InternalError: one is broken.
        """
        for write_id, stream in self._writes.items():
            if write_id not in stream.inflight:
                raise InternalError(f"write {write_id} is not known to its stream", story=stream.story.lines())
            if stream.state in TERMINAL:
                raise InternalError(f"write {write_id} in flight in state {stream.state.name}", story=stream.story.lines())
        if sum(len(s.inflight) for session in self._sessions.values() for s in session.streams.values()) != len(self._writes):
            raise InternalError("writes in flight and streams disagree")
        for session in self._sessions.values():
            if (session in self._writing) != (not session.cut and not session.link.idle):
                raise InternalError(f"session {session.session_id}: writes in flight and leases to watch disagree")
            if not session.lost and ("heartbeat", session) not in self._deadlines:
                raise InternalError(f"session {session.session_id} has no deadline")
            for stream in session.streams.values():
                if stream.state in TERMINAL:
                    raise InternalError("an ended stream is still listed", story=stream.story.lines())
                if ("stream", stream) not in self._deadlines:
                    raise InternalError(f"stream in {stream.state.name} has no deadline", story=stream.story.lines())
        for source in self._sources.values():
            waits = not source.streams and not source.num_digests
            if source.ended and waits and ("source", source) not in self._deadlines:
                raise InternalError(f"finished source {source.source_id} has no deadline", story=source.story.lines())
            if sum(len(stream.inflight) for stream in source.streams) != source.num_writes:
                raise InternalError(f"source {source.source_id} miscounts its writes", story=source.story.lines())
            if sum(read is source for _, read in self._digests.values()) != source.num_digests:
                raise InternalError(f"source {source.source_id} miscounts its digests", story=source.story.lines())

    # --- our engine ----------------------------------------------------------------------------------------------------

    def _source(self, source_id: RequestId, what: str) -> _Source:
        source = self._sources.get(source_id)
        if source is None:
            raise LocalProtocolError(f"{what} for source {source_id!r}, which was never announced or has been released")
        if source.ended:
            raise LocalProtocolError(f"{what} for source {source_id!r}, which has ended", story=source.story.lines())
        return source

    def _on_announced(self, event: SourceAnnounced, now: float) -> None:
        if event.source_id in self._sources:
            raise LocalProtocolError(f"source {event.source_id!r} was announced twice")
        if not event.keys or event.num_tokens <= 0:
            raise LocalProtocolError(f"source {event.source_id!r} needs at least one key and one token")
        source = _Source(event, self._num_layers, self.layout.num_groups)
        self._sources[event.source_id] = source
        source.story.add(now, _S.AWAITING_BLOCKS, f"announced, {event.num_tokens} tokens")
        for stream in self._rendezvous.add_source(source, event.keys):
            if stream.digest != source.digest or stream.num_tokens != source.num_tokens:
                self._give_up(stream, "the prompt differs from the one that was computed under this id", now)
            else:
                self._join(stream, source, now)

    def _on_progressed(self, event: SourceProgressed, now: float) -> None:
        source = self._source(event.source_id, "progress")
        if not 0 <= event.layer_lo < event.layer_hi <= self._num_layers:
            raise LocalProtocolError(f"layers [{event.layer_lo}, {event.layer_hi}) of {self._num_layers}")
        blocks = source.blocks
        if event.new_blocks is not None:
            if len(event.new_blocks) != self.layout.num_groups:
                raise LocalProtocolError(f"{len(event.new_blocks)} block tables for {self.layout.num_groups} groups")
            blocks = tuple(
                np.concatenate((old, np.asarray(new, np.int32))) for old, new in zip(blocks, event.new_blocks, strict=True)
            )
        started = len(source.blocks[0]) == 0
        token_hi = min(event.token_hi, source.num_tokens)
        if any(len(ids) < blocks_for_tokens(token_hi, self._block_tokens) for ids in blocks):
            raise LocalProtocolError(f"source {event.source_id!r}: {token_hi} tokens don't fit its block table")
        source.blocks = blocks
        if started and self._watchers:
            self._tell_watchers(source)
        layers = slice(event.layer_lo, event.layer_hi)
        final = source.final[layers]
        np.maximum(final, final_tokens(token_hi, source.num_tokens, self._block_tokens), out=final)
        source.low = int(source.final.min())
        source.uneven = source.low != int(source.final.max())
        for stream in source.streams:
            self._step(stream, "SourceGrew", now)

    def _on_preempted(self, event: SourcePreempted, now: float) -> None:
        source = self._source(event.source_id, "preemption")
        source.blocks = tuple(np.zeros(0, np.int32) for _ in source.blocks)
        source.final[:] = 0
        source.low, source.uneven = 0, False
        source.story.add(now, _S.STREAMING, "preempted")
        self.counters.restarts += 1
        for stream in list(source.streams):
            self._step(stream, "SourceRestarted", now)

    def _on_finished(self, event: SourceFinished, now: float) -> None:
        source = self._source(event.source_id, "finish")
        source.ended = True
        if source.low < source.num_tokens:
            reason = f"the producer finished with {source.low} of {source.num_tokens} tokens computed"
            self._end_source(source, TransferCancelled(reason, story=source.story.lines()), now)
            return
        source.story.add(now, _S.STREAMING, "finished")
        if self._shut is not None:
            self._end_source(source, TransferCancelled(self._shut, story=source.story.lines()), now)
            return
        self._maybe_release(source, now)

    def _on_aborted(self, event: SourceAborted, now: float) -> None:
        source = self._source(event.source_id, "abort")
        source.ended = True
        self._end_source(source, TransferCancelled(f"the producer gave up: {event.reason}"), now)

    def _on_broken(self, event: SourceBroken, now: float) -> None:
        source = self._sources.get(event.source_id)
        if source is not None and not source.ended:
            self._end_source(source, TransferCancelled(event.reason, story=source.story.lines()), now)

    def _end_source(self, source: _Source, error: KvPushError, now: float) -> None:
        """No stream of it can be completed any more."""
        source.end_error = error
        source.story.add(now, _S.CANCELLING, error.message)
        self._rendezvous.remove_source(source, source.keys, error.message)
        if self._watchers:
            self._tell_watchers(source)
        for stream in list(source.streams):
            self._give_up(stream, error.message, now)
        self._maybe_release(source, now)

    def _on_source_deadline(self, source: _Source, now: float) -> None:
        self.counters.sources_expired += 1
        self._end_source(
            source,
            LeaseExpired(
                f"no consumer came for the blocks within {self._unclaimed_timeout(source):g} s", story=source.story.lines()
            ),
            now,
        )

    def _maybe_release(self, source: _Source, now: float) -> None:
        """Report a source once its engine is done with it, nobody reads its blocks, and nobody will. Idempotent."""
        if not source.ended or source.streams or source.num_writes or source.num_digests:
            return
        if source.source_id not in self._sources:
            return
        if not source.num_done and source.end_error is None:
            if ("source", source) not in self._deadlines:
                self._deadlines.set(("source", source), now + self._unclaimed_timeout(source))
            return
        self._deadlines.discard(("source", source))
        self._rendezvous.remove_source(source, source.keys, "its blocks have been released already")
        del self._sources[source.source_id]
        error = None if source.num_done else source.end_error
        self._effects.append(Report(SourceReleased(source.source_id, source.num_done, source.num_bytes, error)))

    def _unclaimed_timeout(self, source: _Source) -> float:
        spare = any((key, digest) in self._spare for key in source.keys for digest in (source.digest, b""))
        return min(self.config.spare_timeout_s, self.config.source_timeout_s) if spare else self.config.source_timeout_s

    def _mark_spare(self, keys: tuple[str, ...], digest: bytes, now: float) -> None:
        """A source with these keys has been served, or declined before it was announced. Another one of the same prompt
        (parallel samples, a repeated leg) is not likely to be claimed: it isn't kept for the whole timeout."""
        for key in keys:
            self._spare[key, digest] = None
            self._spare.move_to_end((key, digest))
            if len(self._spare) > _TOMBSTONES:
                self._spare.popitem(last=False)
        for source in self._rendezvous.sources(keys):
            due = self._deadlines.get(("source", source))
            if digest in (b"", source.digest) and due is not None:
                self._deadlines.set(("source", source), min(due, now + self._unclaimed_timeout(source)))

    # --- the consumers -------------------------------------------------------------------------------------------------

    def _on_message(self, event: MessageReceived, now: float) -> None:
        message = event.message
        if isinstance(message, wire.Hello):
            self._on_hello(message, now)
            return
        session = self._sessions.get(event.session)
        if session is None or not session.ready:
            self.counters.stale_messages += 1
            if not isinstance(message, wire.Goodbye):
                refusal = wire.Refused(event.session, reason="unknown session: say hello first", unknown=True)
                self._effects.append(Send(refusal))
            return
        session.last_heard = now
        if isinstance(message, wire.HeartbeatAck):
            self._on_answer(session, message.seq)
        elif isinstance(message, wire.RegisterBlocks):
            if message.seq and not self._on_answer(session, message.seq):
                # No heartbeat of this session has that number: this is a recording from another one. (0: none seen, no lease.)
                self.counters.refused_registrations += 1
                return
            self._on_register(session, message, now)
        elif isinstance(message, wire.Inquiry):
            self._on_inquiry(session, message)
        elif isinstance(message, wire.Unpacked):
            pass  # The submitter's: it has ended a part of a write, or is too late.
        elif isinstance(message, wire.Cancel):
            self._on_cancel(session, message, now)
        elif isinstance(message, wire.Decline):
            self._on_decline(message, now)
        elif isinstance(message, wire.Watch):
            self._on_watch(session, message, now)
        elif isinstance(message, wire.Goodbye):
            self._drop_session(session, message.reason or "the consumer said goodbye", now, tell=False)
        else:
            self._drop_session(session, f"unexpected {type(message).__name__} from a consumer", now)

    def _on_hello(self, hello: wire.Hello, now: float) -> None:
        known = self._sessions.get(SessionId(hello.session))
        if self._shut is not None:
            self._effects.append(Send(wire.Refused(hello.session, reason=self._shut)))
            return
        if known is not None:
            if known.ready and known.hello == hello:
                self._welcome(known, now)
            return
        try:
            if len(self._sessions) >= _MAX_SESSIONS or len(self._agents.get(AgentName(hello.agent_name), ())) >= _MAX_PER_AGENT:
                raise TransferRejected("there are too many sessions already")
            self._check_compatible(hello)
            plan = PairPlan(self.layout, hello.layout)
            session = _Session(hello, plan, self.config, now)
            if hello.digest and not plan.alike:
                raise LayoutError(
                    "the consumer verifies what arrives, and blocks of the two caches are not alike (other heads, "
                    "another size, or another order inside a block): set verify=off on the consumer, or choose the same block "
                    "size, KV-cache layout and tensor-parallel size on both"
                )
        except KvPushError as error:
            self.counters.refused_hellos += 1
            self._effects.append(Send(wire.Refused(hello.session, reason=error.message[:4000])))
            self._effects.append(CloseSession(SessionId(hello.session)))
            return
        self._sessions[session.session_id] = session
        self._agents.setdefault(session.agent_name, {})[session] = None
        self._deadlines.set(("heartbeat", session), now + self.config.peer_timeout_s)
        self._effects.append(AddPeer(session.session_id, session.agent_name, hello.agent_metadata))

    def _check_compatible(self, hello: wire.Hello) -> None:
        if hello.transport != self.config.transport:
            raise LayoutError(
                f"the consumer moves data by {hello.transport!r}, this producer by {self.config.transport!r}: "
                "choose the same backend on both"
            )
        if hello.lease_s <= self.config.lease_guard_s + self.config.heartbeat_s:
            raise LayoutError(
                f"the consumer grants leases of {hello.lease_s:g} s, too short for this producer's guard and heartbeat"
            )
        if hello.digest and hello.digest != self.config.digest_scheme:
            raise LayoutError(
                f"the consumer verifies by {hello.digest!r}, this producer's backend "
                + (f"by {self.config.digest_scheme!r}" if self.config.digest_scheme else "can't compute digests")
                + ": set verify=off on the consumer, or choose the same backend on both"
            )
        names = sorted(set(hello.compat) | set(self.config.compat))
        differing = [
            f"{name}: producer {self.config.compat.get(name)!r}, consumer {hello.compat.get(name)!r}"
            for name in names
            if self.config.compat.get(name) != hello.compat.get(name)
        ]
        if differing:
            raise LayoutError("the two instances don't fit together: " + "; ".join(differing))

    def _on_peer_added(self, event: PeerAdded, now: float) -> None:
        session = self._sessions.get(event.session)
        if session is not None and not session.ready:
            session.ready = True
            self._welcome(session, now)

    def _on_peer_refused(self, event: PeerRefused, now: float) -> None:
        session = self._sessions.pop(event.session, None)
        if session is None:
            return
        self._leave_agent(session)
        self.counters.refused_hellos += 1
        self._deadlines.discard(("heartbeat", session))
        self._effects.append(Send(wire.Refused(event.session, reason=event.reason[:4000])))
        self._effects.append(CloseSession(event.session))

    def _welcome(self, session: _Session, now: float) -> None:
        seq = session.lease.heartbeat(now)
        session.beat_at = now + self.config.heartbeat_s
        self._schedule_heartbeat(session)
        self._effects.append(
            Send(
                wire.Welcome(
                    session.session_id,
                    engine_id=self.config.engine_id,
                    agent_name=self.config.agent_name,
                    endpoints=self.config.endpoints,
                    covers=tuple(session.covers),
                    seq=seq,
                    heartbeat_s=self.config.heartbeat_s,
                    idle_heartbeat_s=self.config.idle_heartbeat_s,
                    retry_window_s=self.config.retry_window_s,
                )
            )
        )

    def _on_answer(self, session: _Session, seq: int) -> bool:
        """Take an echoed heartbeat; False if none of this session has that number."""
        if not session.lease.answered(seq):
            return False
        session.answered_seq = max(session.answered_seq, seq)
        self._schedule_heartbeat(session)
        if session.stalled:
            session.stalled = False
            self._postable.release(session)
        return True

    def _on_heartbeat_due(self, session: _Session, now: float) -> None:
        if not session.ready:
            self._drop_session(session, "the transport did not answer", now)
            return
        if now >= self._lost_at(session):
            self._drop_session(session, f"no answer to a heartbeat for {self.config.peer_timeout_s:g} s", now)
        elif now >= session.beat_at:
            self._heartbeat(session, now)
        else:
            self._schedule_heartbeat(session)

    def _lost_at(self, session: _Session) -> float:
        """When a session counts as lost: it has been silent for ``peer_timeout_s``, and a heartbeat was sent early enough in
        that time."""
        oldest = session.lease.oldest_unanswered(session.answered_seq)
        if oldest is None:
            return float("inf")
        timeout_s = self.config.peer_timeout_s
        return max(session.last_heard + timeout_s, oldest + timeout_s - self.config.heartbeat_s)

    def _schedule_heartbeat(self, session: _Session) -> None:
        """The next heartbeat, or the end of waiting for an answer, whichever is first."""
        self._deadlines.set(("heartbeat", session), min(session.beat_at, self._lost_at(session)))

    def _on_quiet_due(self, session: _Session) -> None:
        if session.active and session.ready and session.link.idle:
            session.active = False
            self._effects.append(Send(wire.Quiet(session.session_id)))

    def _heartbeat(self, session: _Session, now: float) -> None:
        # An older one without an answer: look again soon. The one that is sent now can't have been answered yet.
        unanswered = session.lease.oldest_unanswered(session.answered_seq) is not None
        self._effects.append(Send(wire.Heartbeat(session.session_id, seq=session.lease.heartbeat(now))))
        busy = session.streams or unanswered or now < session.busy_until
        session.beat_at = now + (self.config.heartbeat_s if busy else self.config.idle_heartbeat_s)
        self._schedule_heartbeat(session)

    def _hurry_heartbeat(self, session: _Session, now: float) -> None:
        """The session is busy now: the consumer relies on the shorter interval."""
        if session.beat_at > now + self.config.heartbeat_s:
            session.beat_at = now + self.config.heartbeat_s
            self._schedule_heartbeat(session)

    def _on_session_lost(self, event: SessionLost, now: float) -> None:
        session = self._sessions.get(event.session)
        if session is not None:
            self._drop_session(session, event.reason, now, tell=False)

    def _drop_session(self, session: _Session, reason: str, now: float, *, tell: bool = True) -> None:
        """The consumer is gone, or given up: its streams end without a word, its blocks are safe by the lease.

        Args:
            tell: It may still hear us.
        """
        self.counters.sessions_lost += 1
        ready = session.ready
        self._end_session(session)
        for stream in list(session.streams.values()):
            self._give_up(stream, reason, now, silent=True)
        if ready and tell:
            self._effects.append(Send(wire.Goodbye(session.session_id, reason=reason[:4000], fenced=False)))
        self._effects.append(CloseSession(session.session_id))
        self._forget_if_quiet(session)

    def _end_session(self, session: _Session) -> None:
        session.ready = False
        session.lost = True
        self._deadlines.discard(("quiet", session))
        self._deadlines.discard(("heartbeat", session))

    def _cut(self, session: _Session, reason: str, now: float) -> None:
        """Close the connection that a session's writes go through, because what is in flight can't be waited for: only then
        does the retry window begin at whose end the consumer may use its blocks again."""
        self.counters.connections_cut += 1
        sharing = list(self._agents.pop(session.agent_name, ()))
        for other in sharing:
            other.cut = True
            self._writing.discard(other)
            if not other.lost:
                self._drop_session(other, reason, now)
        self._effects.append(RemovePeer(session.session_id, session.agent_name, cut=True))

    def _forget_if_quiet(self, session: _Session) -> None:
        """A lost session is kept while writes of it are in flight: they still read source blocks."""
        if not session.lost or session.streams:
            return
        if self._sessions.pop(session.session_id, None) is None:
            return
        self._writing.discard(session)
        if self._leave_agent(session):
            self._effects.append(RemovePeer(session.session_id, session.agent_name))

    def _leave_agent(self, session: _Session) -> bool:
        """A session is forgotten. Whether it was the last one over its agent's connection."""
        sharing = self._agents.get(session.agent_name)
        if session.cut or sharing is None:
            return False
        sharing.pop(session, None)
        if sharing:
            return False
        del self._agents[session.agent_name]
        return True

    def _on_register(self, session: _Session, message: wire.RegisterBlocks, now: float) -> None:
        request_id, epoch = RequestId(message.request_id), Epoch(message.epoch)
        epitaph = self._epitaphs.get((session.session_id, request_id))
        if epitaph is not None and epitaph[0] >= epoch:
            if epitaph[0] == epoch:
                self._effects.append(Send(epitaph[1]))
            else:
                self.counters.stale_messages += 1
            return
        old = session.streams.get(request_id)
        if self._shut is not None and old is None:
            words = self._failed(session, request_id, epoch, self._shut)
            self._bury(session.session_id, request_id, epoch, words)
            self._effects.append(Send(words))
            return
        if old is not None:
            if old.epoch == epoch:
                self._answer_again(old)
            elif old.epoch > epoch:
                self.counters.stale_messages += 1
            else:
                words = self._failed(session, request_id, epoch, f"epoch {old.epoch} of this request has not been fenced yet")
                self._bury(session.session_id, request_id, epoch, words)
                self._effects.append(Send(words))
            return
        try:
            blocks = self._check_registration(session, message)
        except RemoteProtocolError as error:
            self.counters.refused_registrations += 1
            words = self._failed(session, request_id, epoch, error.message)
            self._bury(session.session_id, request_id, epoch, words)
            self._effects.append(Send(words))
            return
        stream = _Stream(session, message, blocks)
        session.streams[request_id] = stream
        stream.story.add(now, stream.state, "registered")
        self._deadlines.set(("stream", stream), now + self.config.announce_timeout_s)
        self._hurry_heartbeat(session, now)
        source, fate = self._rendezvous.find_source(
            stream.keys,
            lambda candidate: candidate.digest == stream.digest and candidate.num_tokens == stream.num_tokens,
            idle=lambda candidate: not candidate.streams,
        )
        if source is not None:
            self._effects.append(Send(self._registered(stream, waiting=False)))
            self._join(stream, source, now)
        elif fate is not None:
            self._give_up(stream, fate, now)
        else:
            self._rendezvous.add_waiter(stream, stream.keys)
            self._effects.append(Send(self._registered(stream, waiting=True)))

    def _check_registration(self, session: _Session, message: wire.RegisterBlocks) -> BlockTable:
        if len(session.streams) >= self.config.max_streams_per_session:
            raise RemoteProtocolError("too many registrations at once")
        size = session.target_tokens
        if message.num_tokens == 0 or message.token_lo >= message.num_tokens or message.token_lo % size:
            raise RemoteProtocolError(f"tokens [{message.token_lo}, {message.num_tokens}) don't start at a block of {size}")
        if message.verify and not session.hello.digest:
            raise RemoteProtocolError("a digest is asked for, and the handshake has named no kind")
        blocks = wire.unpack_blocks(message.blocks)
        layout = session.plan.dst
        if len(blocks) != layout.num_groups:
            raise RemoteProtocolError(f"{len(blocks)} block tables for {layout.num_groups} groups")
        expected = blocks_for_tokens(message.num_tokens, size) - message.token_lo // size
        for group, ids in enumerate(blocks):
            limit = min(layer.num_blocks for layer in layout.layers if layer.group == group)
            if len(ids) != expected:
                raise RemoteProtocolError(f"group {group}: {len(ids)} blocks for {expected}")
            if len(ids) and int(ids.max()) >= limit:
                raise RemoteProtocolError(f"group {group}: block {int(ids.max())} is outside the consumer's pool of {limit}")
            if len(np.unique(ids)) != len(ids):
                raise RemoteProtocolError(f"group {group}: a block is named twice")
        return blocks

    def _answer_again(self, stream: _Stream) -> None:
        if stream.state is _S.AWAITING_BLOCKS:
            self._effects.append(Send(self._registered(stream, waiting=True)))
        elif stream.state is _S.CANCELLING and isinstance(stream.last_words, wire.Failed):
            self._effects.append(Send(self._failing(stream, stream.last_words.reason)))
        elif stream.said_streaming and stream.session.active and stream.state is not _S.CANCELLING:
            self._effects.append(Send(self._streaming(stream)))
        else:
            self._effects.append(Send(self._registered(stream, waiting=False)))

    def _on_inquiry(self, session: _Session, message: wire.Inquiry) -> None:
        standings = []
        for request_id, epoch in ((RequestId(ref.request_id), Epoch(ref.epoch)) for ref in message.streams):
            stream = session.streams.get(request_id)
            known = self._epitaphs.get((session.session_id, request_id))
            if stream is not None and stream.epoch == epoch:
                if stream.state is _S.CANCELLING:
                    self._answer_again(stream)
                    continue
                waiting = stream.state is _S.AWAITING_BLOCKS
                if stream.source is not None and not len(stream.source.blocks[0]):
                    # Queued, for the first time or again: with every answer as good as progress.
                    stream.progress += 1
                standings.append(wire.StreamStanding(request_id, epoch, waiting, stream.progress))
            elif known is not None and known[0] >= epoch:
                if known[0] == epoch:
                    self._effects.append(Send(known[1]))
            elif stream is None or stream.epoch < epoch:
                words = wire.Fenced(session.session_id, request_id=request_id, epoch=epoch)
                self._bury(session.session_id, request_id, epoch, words)
                self._effects.append(Send(words))
        if standings:
            self._effects.append(Send(wire.Standing(session.session_id, streams=tuple(standings))))

    def _on_cancel(self, session: _Session, message: wire.Cancel, now: float) -> None:
        request_id, epoch = RequestId(message.request_id), Epoch(message.epoch)
        stream = session.streams.get(request_id)
        fenced = wire.Fenced(session.session_id, request_id=request_id, epoch=epoch)
        if stream is not None and stream.epoch <= epoch:
            self._give_up(stream, "cancelled by the consumer", now, last_words=fenced)
            return
        if stream is None:
            # Nothing is known of it, so nothing is in flight; a registration that is still under way comes too late.
            self._bury(session.session_id, request_id, epoch, fenced)
        self._effects.append(Send(fenced))

    def _on_decline(self, message: wire.Decline, now: float) -> None:
        source, _ = self._rendezvous.find_source(
            message.keys, lambda candidate: message.prompt_digest in (b"", candidate.digest)
        )
        if source is None:
            self._mark_spare(message.keys, message.prompt_digest, now)
            return
        if source.streams:
            return
        source.story.add(now, _S.AWAITING_BLOCKS, "declined by the consumer")
        if source.ended:
            self._end_source(source, TransferRejected("the consumer declined it"), now)
        else:
            source.end_error = TransferRejected("the consumer declined it")

    def _on_watch(self, session: _Session, message: wire.Watch, now: float) -> None:
        session.busy_until = now + _WATCHED_S
        self._hurry_heartbeat(session, now)
        source, fate = self._rendezvous.find_source(message.keys, lambda candidate: candidate.digest == message.prompt_digest)
        started = fate is not None or (source is not None and len(source.blocks[0]) > 0)
        if not started:
            for key in message.keys:
                watchers = self._watchers.setdefault((key, message.prompt_digest), {})
                watchers[session.session_id, RequestId(message.request_id)] = None
                if len(watchers) > _MAX_WATCHERS:
                    del watchers[next(iter(watchers))]
            while len(self._watchers) > _TOMBSTONES:
                # The consumer asks again at intervals: a forgotten watch is late, not lost.
                self._watchers.pop(next(iter(self._watchers)))
        self._effects.append(Send(wire.Started(session.session_id, request_id=message.request_id, started=started)))

    def _tell_watchers(self, source: _Source) -> None:
        """A source has begun to be computed, or never will be."""
        told: set[tuple[SessionId, RequestId]] = set()
        for key in source.keys:
            told.update(self._watchers.pop((key, source.digest), ()))
        for session_id, request_id in sorted(told):
            session = self._sessions.get(session_id)
            if session is not None and session.ready:
                self._effects.append(Send(wire.Started(session_id, request_id=request_id, started=True)))

    # --- streams -------------------------------------------------------------------------------------------------------

    def _step(self, stream: _Stream, event: str, now: float, *args: object) -> None:
        """Run one row of the table."""
        step(self, TABLE, stream, event, now, *args)

    def _ignore(self, stream: _Stream, now: float) -> None:
        del stream, now

    def _join(self, stream: _Stream, source: _Source, now: float) -> None:
        self._step(stream, "Joined", now, source)

    def _on_joined(self, stream: _Stream, now: float, source: _Source) -> None:
        stream.source = source
        source.streams[stream] = None
        self._rendezvous.remove_waiter(stream, stream.keys)
        self._deadlines.discard(("source", source))
        stream.posted = np.where(stream.session.block_bytes > 0, stream.token_lo, stream.num_tokens).astype(np.int64)
        stream.state = _S.STREAMING
        stream.waiting_since = now
        self._deadlines.set(("stream", stream), now + self.config.write_timeout_s)
        self._on_source_grew(stream, now)
        if not self._wanted(stream):
            # This rank holds nothing that the consumer wants: committed with no coverage.
            self._commit(stream, now)

    @staticmethod
    def _wanted(stream: _Stream) -> bool:
        return bool((stream.session.block_bytes > 0).any())

    def _on_source_grew(self, stream: _Stream, now: float) -> None:
        source = stream.source
        assert source is not None
        stream.progress += 1
        if stream.restarting:
            return
        session = stream.session
        ahead = np.maximum(source.final, stream.posted) - stream.posted
        stream.remaining_bytes = int(((ahead + (session.unit_tokens - 1)) // session.unit_tokens).dot(session.block_bytes))
        if stream.remaining_bytes and stream.state is _S.STREAMING:
            if stream not in self._postable:
                policy = session.link.policy
                small = policy.granularity == "auto" and stream.remaining_bytes < policy.min_write_bytes
                if small and source.uneven and session.wants_all:
                    # What next_range() would say too; said here, at a fraction of the cost, for each layer of a small model.
                    return
                stream.waiting_since = now
            self._postable.put(stream, stream.session)

    def _on_source_restarted(self, stream: _Stream, now: float) -> None:
        self._postable.discard(stream)
        stream.coverage.clear()
        stream.digest_id = None
        stream.state = _S.STREAMING
        if stream.inflight:
            # What is in flight may read blocks that are being overwritten. Its bytes are written again afterwards, and
            # nothing is committed in between, so it is enough to wait for it before anything new is posted.
            stream.restarting = True
        else:
            self._restart(stream, now)

    def _restart(self, stream: _Stream, now: float) -> None:
        stream.restarting = False
        stream.coverage.clear()
        stream.posted = np.where(stream.session.block_bytes > 0, stream.token_lo, stream.num_tokens).astype(np.int64)
        self._on_source_grew(stream, now)

    def _pump(self, now: float) -> None:
        """Post what may be posted, most urgent first. What has no way to go isn't looked at again before that changes."""
        while (stream := self._postable.first(now)) is not None and stream is not self._blocked:
            self._post_from(stream, now)

    def _post_from(self, stream: _Stream, now: float) -> None:
        source, session = stream.source, stream.session
        assert source is not None
        while stream in self._postable:
            piece = next_range(
                session.link.policy, stream.posted, np.maximum(source.final, stream.posted),
                stream.num_tokens, session.unit_tokens, session.block_bytes,
            )  # fmt: skip
            if piece is None:
                self._postable.discard(stream)
                return
            if not session.lease.valid(now):
                self.counters.lease_stalls += 1
                if session.ready and session.lease.oldest_unanswered(session.answered_seq) is None:
                    self._heartbeat(session, now)
                session.stalled = True
                self._postable.put(stream, session)
                self._postable.hold(stream, now)
                return
            limit = session.link.policy.max_inflight_bytes_per_peer
            if not self._credit.allows(session.session_id, piece.num_bytes, limit):
                self._postable.put(stream, session)
                if self._credit.allows_in_all(piece.num_bytes):
                    self._postable.hold(stream, now)
                else:
                    self._blocked = stream
                return
            write = PostWrite(
                WriteId(next(self._write_ids)),
                session.agent_name,
                session.plan,
                piece.layer_lo,
                piece.layer_hi,
                _cut(source.blocks, self._block_tokens, piece, 0),
                _cut(stream.blocks, session.target_tokens, piece, stream.token_lo // session.target_tokens),
                (piece.token_lo, piece.token_hi),
                piece.num_bytes,
                session.session_id,
                stream.request_id,
                stream.epoch,
                (piece.token_lo - stream.token_lo) // session.target_tokens,
                session.hello.staging,
            )
            if not stream.said_streaming or not session.active:
                stream.said_streaming = session.active = True
                self._deadlines.discard(("quiet", session))
                self._effects.append(Send(self._streaming(stream)))
            stream.posted[piece.layer_lo : piece.layer_hi] = piece.token_hi
            stream.inflight[write.write_id] = (write, piece)
            stream.remaining_bytes -= piece.num_bytes
            stream.waiting_since = now
            source.num_writes += 1
            self._writes[write.write_id] = stream
            self._credit.take(session.session_id, piece.num_bytes)
            session.link.posted(piece.num_bytes, now)
            if session not in self._writing:
                self._writing.set(session, session.lease.ends_at)
            self.counters.writes += 1
            self._deadlines.set(("stream", stream), now + self.config.write_timeout_s)
            self._effects.append(write)
            if stream.remaining_bytes <= 0:
                self._postable.discard(stream)
                if int(stream.posted.min()) >= stream.num_tokens:
                    self._step(stream, "AllPosted", now)

    def _on_all_posted(self, stream: _Stream, now: float) -> None:
        del now
        self._postable.discard(stream)
        stream.state = _S.DRAINING

    def _on_write_completed(self, event: WriteCompleted, now: float) -> None:
        self._write_ended(event.write_id, None, now, event.post_s)

    def _on_write_errored(self, event: WriteErrored, now: float) -> None:
        self._write_ended(event.write_id, event.error, now, may_land=event.may_land)

    def _write_ended(
        self, write_id: WriteId, error: str | None, now: float, post_s: float = 0.0, *, may_land: bool = False
    ) -> None:
        stream = self._writes.pop(write_id, None)
        if stream is None:
            raise LocalProtocolError(f"write {write_id} ended twice or was never posted")
        write, _ = stream.inflight[write_id]
        session = stream.session
        session.link.ended(write.num_bytes, now, ok=error is None, post_s=post_s)
        if session.link.idle:
            self._writing.discard(session)
            if not session.lost:
                self._deadlines.set(("quiet", session), now + _QUIET_S)
        if self.config.policy.granularity == "auto":
            self.worthwhile_bytes = session.link.policy.min_write_bytes
        if may_land and not session.cut:
            # No fence, so nothing that could be said of this stream would be true; and the connection is hardly good any more.
            self._cut(session, f"a write failed: {error}", now)
        self._step(stream, "WriteEnded", now, write_id, error)
        if stream.source is not None:
            self._maybe_release(stream.source, now)
        self._say_goodbye_if_quiet(session)
        self._forget_if_quiet(session)

    def _on_write_ended(self, stream: _Stream, now: float, write_id: WriteId, error: str | None) -> None:
        write, piece = stream.inflight.pop(write_id)
        source = stream.source
        assert source is not None
        source.num_writes -= 1
        self._credit.give(stream.session.session_id, write.num_bytes)
        self._blocked = None
        self._postable.release(stream.session)
        self._deadlines.set(("stream", stream), now + self.config.write_timeout_s)
        if error is None:
            source.num_bytes += write.num_bytes
            stream.progress += 1
            self.counters.bytes_written += write.num_bytes
        if stream.state is _S.CANCELLING:
            if not stream.inflight:
                self._finish_giving_up(stream, now)
            return
        if error is not None:
            self._on_given_up(stream, now, f"a write failed: {error}", None, False)
            return
        if stream.restarting:
            if not stream.inflight:
                self._restart(stream, now)
            return
        for rect in stream.session.plan.coverage(piece.layer_lo, piece.layer_hi, piece.token_lo, piece.token_hi):
            merge_rects(stream.coverage, rect)
        if stream.state is _S.DRAINING and not stream.inflight:
            if stream.verify:
                self._start_digest(stream, now)
            else:
                self._commit(stream, now)

    def _start_digest(self, stream: _Stream, now: float) -> None:
        """Digest what was sent. Nothing is in flight, and the source's blocks are held and not written while it is computed; a
        preemption makes it void."""
        source = stream.source
        assert source is not None
        digest_id = DigestId(next(self._digest_ids))
        stream.state, stream.digest_id = _S.DIGESTING, digest_id
        self._digests[digest_id] = (stream, source)
        source.num_digests += 1
        self._deadlines.set(("stream", stream), now + self.config.write_timeout_s)
        first = stream.token_lo // self._block_tokens
        stop = blocks_for_tokens(self._digest_hi(stream), self._block_tokens)
        blocks = tuple(ids[first:stop] for ids in source.blocks)
        self._effects.append(StartDigest(True, digest_id, stream.session.plan.mapped_layers, blocks))

    def _digest_hi(self, stream: _Stream) -> int:
        """Up to which token what was sent can still be read."""
        source = stream.source
        assert source is not None
        return source.num_tokens // self._block_tokens * self._block_tokens if source.grows else source.num_tokens

    def _on_digest_ended(self, event: DigestReady | DigestFailed, now: float) -> None:
        entry = self._digests.pop(event.digest_id, None)
        if entry is None:
            raise LocalProtocolError(f"digest {event.digest_id} ended twice or was never asked for")
        stream, source = entry
        source.num_digests -= 1
        if stream.digest_id == event.digest_id and stream.state is _S.DIGESTING:
            if isinstance(event, DigestReady):
                self._step(stream, "DigestReady", now, event.digests)
            else:
                self._step(stream, "DigestFailed", now, event.error)
        self._maybe_release(source, now)

    def _on_digest_ready(self, stream: _Stream, now: float, digests: tuple[bytes, ...]) -> None:
        self._commit(stream, now, digests, self._digest_hi(stream))

    def _on_digest_failed(self, stream: _Stream, now: float, error: str) -> None:
        self._on_given_up(stream, now, f"the digest of what was sent can't be computed: {error}", None, False)

    def _commit(self, stream: _Stream, now: float, digests: tuple[bytes, ...] = (), digest_hi: int = 0) -> None:
        source = stream.source
        assert source is not None
        # Pieces that completed out of order may not have merged into few rectangles: say the same as shortly as possible.
        plan = stream.session.plan
        whole = plan.coverage(0, plan.num_layers, stream.token_lo, stream.num_tokens)
        if covered_volume(stream.coverage) != covered_volume(whole):
            raise InternalError("committed without having written everything", story=stream.story.lines())
        commit = wire.Commit(
            stream.session.session_id,
            request_id=stream.request_id,
            epoch=stream.epoch,
            coverage=tuple(whole),
            digests=digests,
            digest_hi=digest_hi,
        )
        self.counters.streams_done += 1
        source.num_done += 1
        self._mark_spare(source.keys, source.digest, now)
        self._close_stream(stream, _S.DONE, commit, now)

    def _on_stream_deadline(self, stream: _Stream, now: float) -> None:
        if stream.state is _S.AWAITING_BLOCKS:
            reason = f"no request with this transfer id came to the producer within {self.config.announce_timeout_s:g} s"
            self._on_given_up(stream, now, reason, None, False)
        elif stream.state is _S.DIGESTING:
            reason = f"the digest of what was sent has not ended within {self.config.write_timeout_s:g} s"
            self._on_given_up(stream, now, reason, None, False)
        elif stream.inflight and stream.state is not _S.CANCELLING:
            reason = f"a posted write has not completed within {self.config.write_timeout_s:g} s"
            self._on_given_up(stream, now, reason, None, False)
        else:
            # Either the engine still computes (it will finish or abort the source), or a stuck write is being waited for.
            if stream.state is _S.CANCELLING and not stream.session.cut:
                self._cut(stream.session, "a posted write has not ended, and can't be waited for", now)
            self._deadlines.set(("stream", stream), now + self.config.write_timeout_s)

    def _give_up(
        self, stream: _Stream, reason: str, now: float, *, last_words: wire.Fenced | None = None, silent: bool = False
    ) -> None:
        self._step(stream, "GivenUp", now, reason, last_words, silent)

    def _on_given_up(self, stream: _Stream, now: float, reason: str, last_words: wire.Fenced | None, silent: bool) -> None:
        already = stream.state is _S.CANCELLING
        stream.story.add(now, stream.state, reason)
        self._postable.discard(stream)
        if silent:
            stream.last_words = None
        elif last_words is not None:
            stream.last_words = last_words
        elif not already:
            stream.last_words = self._failed(stream.session, stream.request_id, stream.epoch, reason)
        stream.state = _S.CANCELLING
        if not already:
            self._deadlines.set(("stream", stream), now + self.config.write_timeout_s)
            if not stream.inflight:
                self._finish_giving_up(stream, now)
            elif isinstance(stream.last_words, wire.Failed):
                self._effects.append(Send(self._failing(stream, reason)))

    def _finish_giving_up(self, stream: _Stream, now: float) -> None:
        failed = isinstance(stream.last_words, wire.Failed)
        if failed:
            self.counters.streams_failed += 1
        else:
            self.counters.streams_aborted += 1
        source = stream.source
        if source is not None and source.end_error is None and not source.num_done:
            source.end_error = (
                TransferRejected("the transfer failed", story=stream.story.lines())
                if failed
                else PeerLost("the consumer gave the transfer up or is gone", story=stream.story.lines())
            )
        self._close_stream(stream, _S.FAILED if failed else _S.ABORTED, stream.last_words, now)

    def _close_stream(self, stream: _Stream, state: StreamState, last_words: wire.Message | None, now: float) -> None:
        stream.state = state
        self._postable.discard(stream)
        self._deadlines.discard(("stream", stream))
        self._rendezvous.remove_waiter(stream, stream.keys)
        if stream.session.streams.get(stream.request_id) is stream:
            del stream.session.streams[stream.request_id]
        if last_words is not None:
            self._effects.append(Send(last_words))
            self._bury(stream.session.session_id, stream.request_id, stream.epoch, last_words)
        source = stream.source
        if source is not None:
            source.streams.pop(stream, None)
            self._maybe_release(source, now)

    def _bury(self, session_id: SessionId, request_id: RequestId, epoch: Epoch, words: wire.Message) -> None:
        """Remember how a stream ended, so that a repeated registration or cancel gets the same answer."""
        known = self._epitaphs.get((session_id, request_id))
        if known is not None and known[0] > epoch:
            # A late word about an older epoch must not bring a newer one back to life.
            return
        self._epitaphs[session_id, request_id] = (epoch, words)
        self._epitaphs.move_to_end((session_id, request_id))
        if len(self._epitaphs) > _TOMBSTONES:
            self._epitaphs.popitem(last=False)

    # --- messages ------------------------------------------------------------------------------------------------------

    @staticmethod
    def _registered(stream: _Stream, *, waiting: bool) -> wire.Registered:
        return wire.Registered(stream.session.session_id, request_id=stream.request_id, epoch=stream.epoch, waiting=waiting)

    @staticmethod
    def _streaming(stream: _Stream) -> wire.Streaming:
        poll_s = stream.session.link.target_poll_s
        return wire.Streaming(stream.session.session_id, request_id=stream.request_id, epoch=stream.epoch, poll_s=poll_s)

    @staticmethod
    def _failing(stream: _Stream, reason: str) -> wire.Failing:
        return wire.Failing(stream.session.session_id, request_id=stream.request_id, epoch=stream.epoch, reason=reason[:4000])

    @staticmethod
    def _failed(session: _Session, request_id: RequestId, epoch: Epoch, reason: str) -> wire.Failed:
        return wire.Failed(session.session_id, request_id=request_id, epoch=epoch, reason=reason[:4000])


def _cut(blocks: BlockTable, block_tokens: int, piece: WriteRange, offset: int) -> BlockTable:
    """The part of a block table that holds a range's tokens; the table begins with the block that has the number ``offset``."""
    first, stop = piece.token_lo // block_tokens - offset, blocks_for_tokens(piece.token_hi, block_tokens) - offset
    return tuple(ids[first:stop] for ids in blocks)


_EVENT_HANDLERS: Mapping[type[Any], Callable[[ProducerMachine, Any, float], None]] = {
    SourceAnnounced: ProducerMachine._on_announced,
    SourceProgressed: ProducerMachine._on_progressed,
    SourcePreempted: ProducerMachine._on_preempted,
    SourceFinished: ProducerMachine._on_finished,
    SourceAborted: ProducerMachine._on_aborted,
    SourceBroken: ProducerMachine._on_broken,
    SessionLost: ProducerMachine._on_session_lost,
    PeerAdded: ProducerMachine._on_peer_added,
    PeerRefused: ProducerMachine._on_peer_refused,
    WriteCompleted: ProducerMachine._on_write_completed,
    WriteErrored: ProducerMachine._on_write_errored,
    DigestReady: ProducerMachine._on_digest_ended,
    DigestFailed: ProducerMachine._on_digest_ended,
}
