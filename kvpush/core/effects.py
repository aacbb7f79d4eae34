# SPDX-License-Identifier: Apache-2.0
"""What the machines ask the submitter to do. Frozen; imperative."""

from __future__ import annotations

from dataclasses import dataclass

from kvpush.core.events import Outcome
from kvpush.core.ids import AgentName, BlockTable, DigestId, Epoch, PeerAddress, RequestId, SessionId, UnpackId, WriteId
from kvpush.core.plan import PairPlan
from kvpush.core.staging import StagingArea
from kvpush.core.wire import Message, StagingOffer


@dataclass(frozen=True, slots=True)
class OpenSession:
    """Connect to a producer; messages of the session go there."""

    session: SessionId
    address: PeerAddress


@dataclass(frozen=True, slots=True)
class CloseSession:
    """Drop the link of a session. Nothing more will be sent on it."""

    session: SessionId


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message on its session's link."""

    message: Message


@dataclass(frozen=True, slots=True)
class AddPeer:
    """Make the consumer of a session known to the transport; answered by ``PeerAdded`` or ``PeerRefused``."""

    session: SessionId
    agent_name: AgentName
    metadata: bytes


@dataclass(frozen=True, slots=True)
class RemovePeer:
    """The transport is to forget this consumer.

    Args:
        cut: Writes to it may be in flight: the connection must be closed, so that what has not left yet never will.
    """

    session: SessionId
    agent_name: AgentName
    cut: bool = False


@dataclass(frozen=True, slots=True)
class PostWrite:
    """Post one write: the layers ``[layer_lo, layer_hi)`` of some blocks.

    Args:
        plan: The pair of layouts that it is between.
        src_blocks: Per group, block ids here.
        dst_blocks: Per group, block ids at the consumer; of the same shapes where block sizes are equal.
        tokens: Which tokens ``[lo, hi)`` of the prompt lie in them.
        num_bytes: Payload.
        session: Whose stream it is of, with ``request_id`` and ``epoch``.
        block_lo: Position of the first block in the stream's registration.
        staging: Slots that the consumer has offered to the session.
    """

    write_id: WriteId
    agent_name: AgentName
    plan: PairPlan
    layer_lo: int
    layer_hi: int
    src_blocks: BlockTable
    dst_blocks: BlockTable
    tokens: tuple[int, int]
    num_bytes: int
    session: SessionId
    request_id: RequestId
    epoch: Epoch
    block_lo: int = 0
    staging: StagingOffer | None = None


@dataclass(frozen=True, slots=True)
class StartVisibilityFence:
    """Make sure that written bytes are readable by our device; answered by ``VisibilityReached`` or ``VisibilityFailed``."""

    request_id: RequestId
    epoch: Epoch
    blocks: BlockTable


@dataclass(frozen=True, slots=True)
class StartUnpack:
    """Copy a staging slot into blocks of ours; answered by ``UnpackEnded``, in any case.

    Args:
        area: The session's slots.
        slot: Index among them.
        layer_lo: First layer.
        layer_hi: One past the last.
        blocks: Per group, block ids; frame i goes to the i-th.
    """

    unpack_id: UnpackId
    area: StagingArea
    slot: int
    layer_lo: int
    layer_hi: int
    blocks: BlockTable


@dataclass(frozen=True, slots=True)
class StartDigest:
    """Compute digests of blocks of our cache; answered by ``DigestReady`` or ``DigestFailed``, in any case.

    Args:
        for_producer: Which machine has asked, and is to be answered.
        layers: Indices in our layout.
        blocks: Per group, block ids in token order.
    """

    for_producer: bool
    digest_id: DigestId
    layers: tuple[int, ...]
    blocks: BlockTable


@dataclass(frozen=True, slots=True)
class Report:
    """Hand an outcome to the engine."""

    outcome: Outcome


Effect = (
    OpenSession
    | CloseSession
    | Send
    | AddPeer
    | RemovePeer
    | PostWrite
    | StartUnpack
    | StartVisibilityFence
    | StartDigest
    | Report
)
