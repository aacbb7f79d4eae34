# SPDX-License-Identifier: Apache-2.0
"""What the machines ask the submitter to do. Frozen; imperative."""

from __future__ import annotations

from dataclasses import dataclass

from kvpush.core.events import Outcome
from kvpush.core.ids import AgentName, BlockTable, Epoch, PeerAddress, RequestId, SessionId, WriteId
from kvpush.core.layout import PairPlan
from kvpush.core.wire import Message


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
    """The transport may forget this consumer."""

    session: SessionId
    agent_name: AgentName


@dataclass(frozen=True, slots=True)
class PostWrite:
    """Post one write: the layers ``[layer_lo, layer_hi)`` of some blocks.

    Args:
        plan: The pair of layouts that it is between.
        src_blocks: Per group, block ids here.
        dst_blocks: Per group, block ids at the consumer; same shapes.
        num_bytes: Payload.
    """

    write_id: WriteId
    agent_name: AgentName
    plan: PairPlan
    layer_lo: int
    layer_hi: int
    src_blocks: BlockTable
    dst_blocks: BlockTable
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StartVisibilityFence:
    """Make sure that written bytes are readable by our device; answered by ``VisibilityReached``."""

    request_id: RequestId
    epoch: Epoch
    blocks: BlockTable


@dataclass(frozen=True, slots=True)
class Report:
    """Hand an outcome to the engine."""

    outcome: Outcome


Effect = OpenSession | CloseSession | Send | AddPeer | RemovePeer | PostWrite | StartVisibilityFence | Report
