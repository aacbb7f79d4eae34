# SPDX-License-Identifier: Apache-2.0
"""What goes into the machines, and what comes out for the engine. Frozen; past tense."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvpush.core.ids import BlockTable, DigestId, Epoch, PeerAddress, RequestId, SessionId, UnpackId, WriteId
from kvpush.core.wire import Message
from kvpush.errors import KvPushError

# --- from the producer's engine ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SourceAnnounced:
    """A request whose KV a consumer will want has been seen; nothing is computed yet.

    Args:
        source_id: The engine's request id.
        keys: What a block registration may name to be joined to it, best first; not empty.
        prompt_digest: Digest of the prompt; a registration's must be equal.
        num_tokens: Tokens of the prompt.
        grows: The engine goes on behind the prompt, into its last block if that is not full: what of it was sent can't be
            told later, and is left out of digests.
    """

    source_id: RequestId
    keys: tuple[str, ...]
    prompt_digest: bytes
    num_tokens: int
    grows: bool = False


@dataclass(frozen=True, slots=True)
class SourceProgressed:
    """The layers ``[layer_lo, layer_hi)`` of a source are final up to ``token_hi``.

    Args:
        new_blocks: Per group, block ids that extend the source's block table; None when it has not grown.
        fence: The backend's device fence; the submitter hands the event on only when it is done.
    """

    source_id: RequestId
    layer_lo: int
    layer_hi: int
    token_hi: int
    new_blocks: BlockTable | None = None
    fence: object | None = None


@dataclass(frozen=True, slots=True)
class SourcePreempted:
    """The engine takes the source's blocks away and will compute it again from its start; its table is empty now."""

    source_id: RequestId


@dataclass(frozen=True, slots=True)
class SourceBroken:
    """The device can't say that what was computed of a source is final: nobody will get it. Its engine may go on with it."""

    source_id: RequestId
    reason: str


@dataclass(frozen=True, slots=True)
class SourceFinished:
    """The engine is done with the request and keeps its blocks until :class:`SourceReleased` is reported."""

    source_id: RequestId


@dataclass(frozen=True, slots=True)
class SourceAborted:
    """The request ended before its KV was complete; the blocks are kept until :class:`SourceReleased` is reported."""

    source_id: RequestId
    reason: str


# --- from the consumer's engine ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReceiveRequested:
    """Block registration: destination blocks have been allocated.

    Args:
        request_id: The engine's request id.
        peer: The producer's control endpoint (its first rank).
        keys: What may join it to a source, best first; not empty.
        prompt_digest: Digest of the prompt.
        num_tokens: Tokens of the prompt.
        token_lo: First token wanted, a multiple of our block size.
        blocks: Per group, block ids from ``token_lo`` to the prompt's end.
    """

    request_id: RequestId
    peer: PeerAddress
    keys: tuple[str, ...]
    prompt_digest: bytes
    num_tokens: int
    token_lo: int
    blocks: BlockTable


@dataclass(frozen=True, slots=True)
class ReceiveAborted:
    """The engine doesn't want the request any more; its blocks are kept until it is reported."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class TransferDeclined:
    """A request that was announced to a producer will never come for its KV: tell the producer, who may release it."""

    peer: PeerAddress
    keys: tuple[str, ...]
    prompt_digest: bytes


@dataclass(frozen=True, slots=True)
class StartAwaited:
    """A request that can't have destination blocks yet wants to know when its prefill has started; answered once by
    :class:`SourceStarted`.

    Args:
        request_id: The engine's request id.
        peer: The producer's control endpoint.
        keys: As in :class:`ReceiveRequested`.
        prompt_digest: Digest of the prompt.
    """

    request_id: RequestId
    peer: PeerAddress
    keys: tuple[str, ...]
    prompt_digest: bytes


@dataclass(frozen=True, slots=True)
class StartAwaitCancelled:
    """Nobody waits for the answer to a :class:`StartAwaited` any more: the request has ended, or has its blocks. None will be
    reported, unless it has been already."""

    request_id: RequestId


# --- from the message plane and the transport --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """A decoded message of a session."""

    session: SessionId
    message: Message


@dataclass(frozen=True, slots=True)
class SessionLost:
    """The link of a session broke."""

    session: SessionId
    reason: str


@dataclass(frozen=True, slots=True)
class PeerAdded:
    """The transport knows the consumer of this session now."""

    session: SessionId


@dataclass(frozen=True, slots=True)
class PeerRefused:
    """The transport can't reach the consumer of this session."""

    session: SessionId
    reason: str


@dataclass(frozen=True, slots=True)
class WriteCompleted:
    """Every byte of a posted write has arrived.

    Args:
        post_s: How long planning and posting it took, seconds; 0 if unknown.
    """

    write_id: WriteId
    post_s: float = 0.0


@dataclass(frozen=True, slots=True)
class WriteErrored:
    """A posted write has ended with an error, or could not be posted.

    Args:
        may_land: Some of its bytes may still be under way, which is no fence for its stream.
    """

    write_id: WriteId
    error: str
    may_land: bool = False


@dataclass(frozen=True, slots=True)
class VisibilityReached:
    """The written bytes of a request can be read by the consumer's device."""

    request_id: RequestId
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class VisibilityFailed:
    """The visibility fence of a request has failed. It has ended: it touches nothing any more."""

    request_id: RequestId
    epoch: Epoch
    error: str


@dataclass(frozen=True, slots=True)
class DigestReady:
    """The digests that were asked for, one per layer. Nothing reads the blocks any more."""

    digest_id: DigestId
    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class DigestFailed:
    """The digests that were asked for can't be had."""

    digest_id: DigestId
    error: str


@dataclass(frozen=True, slots=True)
class UnpackEnded:
    """A staging slot has been copied into its blocks, or can't be. Nothing of it touches them any more."""

    unpack_id: UnpackId
    error: str = ""


EngineEvent = (
    SourceAnnounced
    | SourceProgressed
    | SourcePreempted
    | SourceFinished
    | SourceAborted
    | ReceiveRequested
    | ReceiveAborted
    | TransferDeclined
    | StartAwaited
    | StartAwaitCancelled
)
ProducerEvent = (
    SourceAnnounced
    | SourceProgressed
    | SourcePreempted
    | SourceBroken
    | SourceFinished
    | SourceAborted
    | MessageReceived
    | SessionLost
    | PeerAdded
    | PeerRefused
    | WriteCompleted
    | WriteErrored
    | DigestReady
    | DigestFailed
)
ConsumerEvent = (
    ReceiveRequested
    | ReceiveAborted
    | TransferDeclined
    | StartAwaited
    | StartAwaitCancelled
    | MessageReceived
    | SessionLost
    | VisibilityReached
    | VisibilityFailed
    | UnpackEnded
    | DigestReady
    | DigestFailed
)


# --- outcomes for the engine ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SourceReleased:
    """Terminal report of a source, exactly once after its ``SourceFinished`` or ``SourceAborted``: nothing reads its blocks.

    Args:
        num_streams: Consumers that got all of it.
        num_bytes: Bytes written for it.
        error: Why no consumer got it; None where at least one did.
    """

    source_id: RequestId
    num_streams: int
    num_bytes: int
    error: KvPushError | None = None


class ReceiveStatus(enum.Enum):
    """How a receive ended."""

    RECEIVED = "received"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class ReceiveEnded:
    """Terminal report of a receive, exactly once per ``ReceiveRequested``.

    Args:
        blocks_safe: No write can land in its blocks any more. Where False (only ever with FAILED), the engine must keep the
            blocks out of its allocator until :class:`BlocksSafe` comes.
        error: Why, for FAILED and CANCELLED.
    """

    request_id: RequestId
    status: ReceiveStatus
    blocks_safe: bool
    num_tokens: int = 0
    error: KvPushError | None = None


@dataclass(frozen=True, slots=True)
class BlocksSafe:
    """Follows, once, a :class:`ReceiveEnded` whose blocks were not safe: the quarantine is over."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class SourceStarted:
    """Answers a :class:`StartAwaited`: the prefill has started, or there is no use in waiting for it any longer."""

    request_id: RequestId


Outcome = SourceReleased | ReceiveEnded | BlocksSafe | SourceStarted
