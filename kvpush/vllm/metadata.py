# SPDX-License-Identifier: Apache-2.0
"""What travels inside one engine: scheduler to worker with each step, and back. Pickled by vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvpush.core.events import ReceiveRequested, SourceAborted, SourceAnnounced, StartAwaited, TransferDeclined
from kvpush.vllm.compat import KVConnectorHandshakeMetadata, KVConnectorMetadata, KVConnectorWorkerMetadata


@dataclass(frozen=True, slots=True)
class Progress:
    """One source in one step: after its forward, ``token_hi`` tokens are computed.

    Args:
        new_blocks: Per group, block ids that were added to its table in this step; None for none.
        num_tokens: How many of them are new in this step, cached ones of the first step included.
    """

    source_id: str
    token_hi: int
    new_blocks: tuple[list[int], ...] | None
    num_tokens: int = 0


@dataclass
class KVPushMetadata(KVConnectorMetadata):
    """One step.

    Args:
        computes: Whether the step runs a forward at all.
        waiting: Whether requests of ours wait for outcomes.
    """

    preempted: list[str] = field(default_factory=list)
    announced: list[SourceAnnounced] = field(default_factory=list)
    progress: list[Progress] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    aborted: list[SourceAborted] = field(default_factory=list)
    receives: list[ReceiveRequested] = field(default_factory=list)
    receive_aborts: list[str] = field(default_factory=list)
    declined: list[TransferDeclined] = field(default_factory=list)
    watches: list[StartAwaited] = field(default_factory=list)
    unwatched: list[str] = field(default_factory=list)
    computes: bool = False
    waiting: bool = False


@dataclass
class KVPushWorkerMetadata(KVConnectorWorkerMetadata):
    """What the scheduler has to know besides finished ids, worker to scheduler.

    Args:
        unsafe: Requests reported as failed whose blocks may still be written, with the number of ranks that say so.
        safe: Requests whose quarantine is over, likewise.
        started: Requests whose prefill has started.
    """

    unsafe: dict[str, int] = field(default_factory=dict)
    safe: dict[str, int] = field(default_factory=dict)
    started: set[str] = field(default_factory=set)

    def aggregate(self, other: KVPushWorkerMetadata) -> KVPushWorkerMetadata:
        """Add up what several ranks say of one step."""
        return KVPushWorkerMetadata(
            _added(self.unsafe, other.unsafe), _added(self.safe, other.safe), self.started | other.started
        )


def _added(first: dict[str, int], second: dict[str, int]) -> dict[str, int]:
    total = dict(first)
    for key, count in second.items():
        total[key] = total.get(key, 0) + count
    return total


@dataclass
class KVPushHandshakeMetadata(KVConnectorHandshakeMetadata):
    """Where a rank's control endpoint listens, worker to scheduler, once at start-up."""

    rank: int
    host: str
    port: int
