# SPDX-License-Identifier: Apache-2.0
"""Messages between a consumer and a producer, and their bounded codec.

A frame is ``b"KVP"``, one byte of protocol version, then MessagePack. :func:`decode` accepts any bytes and either returns a
message or raises :class:`~kvpush.errors.RemoteProtocolError`; it never does anything else.

Directions: C = consumer to producer, P = producer to consumer. Durations travel in seconds, never absolute times.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from kvpush.core.ids import BlockTable, Rect
from kvpush.core.layout import CacheLayout
from kvpush.errors import RemoteProtocolError

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 8 * 1024 * 1024
MAX_STREAMS = 512
"""Streams in one inquiry."""
MAX_RECTS = 128
"""Rectangles in one commit; producers merge theirs, and the cost of counting them grows with the cube."""
MAX_DIGEST_BYTES = 64
_MAGIC = b"KVP" + bytes([PROTOCOL_VERSION])

_Session = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
_Epoch = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_Seq = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Id = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
_Key = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
_Reason = Annotated[str, msgspec.Meta(max_length=4096)]
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=86400.0)]
_Small = Annotated[int, msgspec.Meta(ge=0, le=65535)]
_Digest = Annotated[bytes, msgspec.Meta(max_length=64)]
_Blob = Annotated[bytes, msgspec.Meta(max_length=4 * 1024 * 1024)]
_OneDigest = Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_DIGEST_BYTES)]
_Digests = Annotated[tuple[_OneDigest, ...], msgspec.Meta(max_length=4096)]
_Rects = Annotated[tuple[Rect, ...], msgspec.Meta(max_length=MAX_RECTS)]
"""Coverage; the receiver checks the bounds."""
_Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class Endpoint(msgspec.Struct, frozen=True, array_like=True):
    """Where one rank of a producer listens. An empty host stands for the host that the consumer has dialled."""

    rank: Annotated[int, msgspec.Meta(ge=0, le=65535)]
    host: Annotated[str, msgspec.Meta(max_length=255)]
    port: _Port


class StreamRef(msgspec.Struct, frozen=True, array_like=True):
    """Names a stream of a session."""

    request_id: _Id
    epoch: _Epoch


class StreamStanding(msgspec.Struct, frozen=True, array_like=True):
    """How a stream stands.

    Args:
        waiting: No source has been announced for it yet.
        progress: Grows whenever something of it is done, and while its source is queued at a producer that lives.
    """

    request_id: _Id
    epoch: _Epoch
    waiting: bool
    progress: _Seq


class StagingOffer(msgspec.Struct, frozen=True, array_like=True):
    """Slots of the consumer's memory that a session's producer may write to, side by side (:mod:`kvpush.core.staging`)."""

    address: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    device_id: Annotated[int, msgspec.Meta(ge=0, le=2**20)]
    slot_bytes: Annotated[int, msgspec.Meta(ge=1, le=2**32)]
    num_slots: Annotated[int, msgspec.Meta(ge=1, le=4096)]


class _Message(msgspec.Struct, frozen=True, tag=True):
    session: _Session


class Hello(_Message, frozen=True):
    """C. First message on a link: who I am, how my cache lies, how to write it.

    Args:
        compat: What must be equal on both sides (model, dtype, cache settings...), name to text.
        digest: How the digests that registrations may ask for are computed; empty: none will be asked for.
        staging: Where scattered blocks may be put in one piece, to be unpacked here.
    """

    engine_id: _Id
    agent_name: _Id
    agent_metadata: _Blob
    transport: _Id
    layout: CacheLayout
    compat: Annotated[dict[str, Annotated[str, msgspec.Meta(max_length=1024)]], msgspec.Meta(max_length=512)]
    lease_s: _Seconds
    digest: Annotated[str, msgspec.Meta(max_length=64)] = ""
    staging: StagingOffer | None = None


class Welcome(_Message, frozen=True):
    """P. The handshake is done; counts as heartbeat ``seq``.

    Args:
        endpoints: Where all ranks of this producer listen, this one too.
        covers: Which layers and heads of the consumer this rank fills, as rectangles over tokens [0, 1).
        heartbeat_s: Interval of heartbeats while transfers run.
        idle_heartbeat_s: Interval of heartbeats while none does: a producer that is silent for longer is gone.
        retry_window_s: How long after a lease what the producer's transport has taken may still land.
    """

    engine_id: _Id
    agent_name: _Id
    endpoints: Annotated[tuple[Endpoint, ...], msgspec.Meta(max_length=4096)]
    covers: _Rects
    seq: _Seq
    heartbeat_s: _Seconds
    idle_heartbeat_s: _Seconds
    retry_window_s: _Seconds


class Refused(_Message, frozen=True):
    """P. No session: the layouts or settings don't fit, or the session is unknown here (``unknown``), as after a restart."""

    reason: _Reason
    unknown: bool = False


class Heartbeat(_Message, frozen=True):
    """P. I am alive; a consumer's answer renews my right to post, counted from when I sent this."""

    seq: _Seq


class HeartbeatAck(_Message, frozen=True):
    """C. Grants the lease that starts at the sending of heartbeat ``seq``."""

    seq: _Seq


class RegisterBlocks(_Message, frozen=True):
    """C. Block registration: write the KV of this request here. May be repeated; the same epoch has no second effect.

    Args:
        request_id: The consumer's own id of the request; with ``epoch`` it names the stream.
        keys: What may join it to a source, best first (transfer id, request ids).
        prompt_digest: Digest of the prompt's tokens; the source's must be equal.
        num_tokens: Tokens of the whole prompt.
        token_lo: First token wanted; a multiple of the consumer's block size (the rest is cached on this side).
        blocks: Per group, little-endian int32 block ids for the blocks from ``token_lo`` to the prompt's end.
        seq: The newest heartbeat seen: renews the lease as an ack does.
        verify: The commit is to carry digests of what was sent.
    """

    request_id: _Id
    epoch: _Epoch
    keys: Annotated[tuple[_Key, ...], msgspec.Meta(min_length=1, max_length=8)]
    prompt_digest: _Digest
    num_tokens: _Tokens
    token_lo: _Tokens
    blocks: Annotated[tuple[_Blob, ...], msgspec.Meta(min_length=1, max_length=64)]
    seq: _Seq
    verify: bool = False


class Registered(_Message, frozen=True):
    """P. The registration is known; ``waiting``: no source has been announced for it yet."""

    request_id: _Id
    epoch: _Epoch
    waiting: bool


class Inquiry(_Message, frozen=True):
    """C. How do these registrations stand? What has ended is answered by its last word, what is unknown by a fence, the rest by
    one :class:`Standing`. Registrations are long: they are repeated only until they have been answered."""

    streams: Annotated[tuple[StreamRef, ...], msgspec.Meta(max_length=MAX_STREAMS)]


class Standing(_Message, frozen=True):
    """P. Answer to an inquiry."""

    streams: Annotated[tuple[StreamStanding, ...], msgspec.Meta(max_length=MAX_STREAMS)]


class Streaming(_Message, frozen=True):
    """P. From now on writes may land: the target polls its transport until the session is quiet, or its last stream has ended.
    Said again when writes are posted after a :class:`Quiet`.

    Args:
        poll_s: How long the target may leave its transport alone, by the rate seen so far, seconds; 0: not known.
    """

    request_id: _Id
    epoch: _Epoch
    poll_s: _Seconds = 0.0


class Quiet(_Message, frozen=True):
    """P. Nothing of this session is in flight, and :class:`Streaming` will be said before anything is posted again: a target
    that has to poll for its transport needn't."""


class Staged(_Message, frozen=True):
    """P. Some blocks of this stream lie packed in a slot: unpack them. Said again until it is answered; the same tag has no
    second effect.

    Args:
        tag: Grows with each use of a slot in a session.
        slot: Index among the slots that were offered.
        layer_lo: First layer, by the consumer's indices.
        layer_hi: One past the last.
        block_lo: Position of the first block in the registration's table; the same for every group.
        block_hi: One past the last.
    """

    request_id: _Id
    epoch: _Epoch
    tag: _Seq
    slot: _Small
    layer_lo: _Small
    layer_hi: _Small
    block_lo: _Tokens
    block_hi: _Tokens


class Unpacked(_Message, frozen=True):
    """C. The slot of this tag is free. ``error``: it could not be unpacked, and its stream won't be received."""

    tag: _Seq
    error: _Reason = ""


class Commit(_Message, frozen=True):
    """P. Every write of this rank for this stream is complete, and this is what they covered.

    Args:
        digests: Where the registration has asked for them: one per covered layer, in the consumer's order of layers, over the
            blocks that hold the tokens from the first one wanted up to ``digest_hi``.
    """

    request_id: _Id
    epoch: _Epoch
    coverage: _Rects
    digests: _Digests = ()
    digest_hi: _Tokens = 0


class Failing(_Message, frozen=True):
    """P. This stream will not be completed, and is not fenced yet: some of it is still in flight. :class:`Failed` follows, or
    the session ends."""

    request_id: _Id
    epoch: _Epoch
    reason: _Reason


class Failed(_Message, frozen=True):
    """P. This stream will not be completed. Nothing of it is in flight any more and nothing will be posted: it is fenced."""

    request_id: _Id
    epoch: _Epoch
    reason: _Reason


class Cancel(_Message, frozen=True):
    """C. Post nothing more for this stream and tell me when nothing is in flight."""

    request_id: _Id
    epoch: _Epoch


class Fenced(_Message, frozen=True):
    """P. Nothing of this epoch or an older one is in flight, and nothing will be posted."""

    request_id: _Id
    epoch: _Epoch


class Decline(_Message, frozen=True):
    """C. Nobody will come for the source with these keys: it may be released. An empty digest stands for any prompt: for
    requests that were refused before theirs was known."""

    keys: Annotated[tuple[_Key, ...], msgspec.Meta(min_length=1, max_length=8)]
    prompt_digest: _Digest


class Watch(_Message, frozen=True):
    """C. Tell me when you begin to compute the source with these keys; I have no blocks for it yet. May be repeated."""

    request_id: _Id
    keys: Annotated[tuple[_Key, ...], msgspec.Meta(min_length=1, max_length=8)]
    prompt_digest: _Digest


class Started(_Message, frozen=True):
    """P. Answer to a watch, and news of it later: whether a registration would be served now, or refused at once."""

    request_id: _Id
    started: bool


class Goodbye(_Message, frozen=True):
    """Both. The session ends.

    Args:
        fenced: From P: nothing of this session is in flight. Where False, leases and the retry window decide.
    """

    reason: _Reason = ""
    fenced: bool = True


ConsumerMessage = Hello | HeartbeatAck | RegisterBlocks | Inquiry | Unpacked | Cancel | Decline | Watch | Goodbye
ProducerMessage = (
    Welcome
    | Refused
    | Heartbeat
    | Registered
    | Standing
    | Streaming
    | Quiet
    | Staged
    | Commit
    | Failing
    | Failed
    | Fenced
    | Started
    | Goodbye
)
Message = ConsumerMessage | ProducerMessage

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """A message as one frame."""
    return _MAGIC + _encoder.encode(message)


def decode(frame: bytes) -> Message:
    """A frame as a message.

    Raises:
        RemoteProtocolError: too long, another protocol or version, not MessagePack, unknown or malformed message.
    """
    if len(frame) > MAX_FRAME_BYTES:
        raise RemoteProtocolError(f"frame of {len(frame)} bytes; at most {MAX_FRAME_BYTES} are accepted")
    if frame[:3] != _MAGIC[:3]:
        raise RemoteProtocolError("not a kvpush frame")
    if frame[:4] != _MAGIC:
        version = frame[3] if len(frame) > 3 else None
        raise RemoteProtocolError(
            f"the peer speaks kvpush protocol {version}, this side {PROTOCOL_VERSION}: run the same kvpush release on both"
        )
    try:
        return _decoder.decode(memoryview(frame)[4:])
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        raise RemoteProtocolError(f"malformed message: {error}") from error


def pack_blocks(table: BlockTable) -> tuple[bytes, ...]:
    """Block ids as wire bytes, one item per group."""
    return tuple(np.ascontiguousarray(ids, "<i4").tobytes() for ids in table)


def unpack_blocks(blobs: tuple[bytes, ...]) -> BlockTable:
    """The reverse of :func:`pack_blocks`.

    Raises:
        RemoteProtocolError: a length that is no multiple of 4, or a negative id.
    """
    table = []
    for blob in blobs:
        if len(blob) % 4:
            raise RemoteProtocolError(f"block ids of {len(blob)} bytes; a multiple of 4 is expected")
        ids = np.frombuffer(blob, "<i4").astype(np.int32)
        if len(ids) and int(ids.min()) < 0:
            raise RemoteProtocolError("negative block id")
        table.append(ids)
    return tuple(table)
