# SPDX-License-Identifier: Apache-2.0
"""Which writes to post next: granularity, urgency, fairness, and the credit of bytes in flight. Pure and deterministic."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Granularity = Literal["auto", "layer", "chunk", "request"]
TokenCounts = npt.NDArray[np.int64]
"""Tokens per layer. Shape ``[num_layers]``."""


@dataclass(frozen=True, slots=True)
class SchedulingPolicy:
    """Limits and thresholds.

    Args:
        granularity: ``layer`` posts whatever is final, ``chunk`` waits until all layers are equally far, ``request`` until the
            whole prompt is final; ``auto`` posts as soon as ``min_write_bytes`` are final, and at the end of each chunk.
        min_write_bytes: See ``auto``: below this a write's fixed cost outweighs its earlier start.
        max_write_bytes: Longer ranges are cut, so that one post never keeps the submitter for long.
        max_inflight_bytes_per_peer: Credit per consumer; one write is always allowed.
        max_inflight_bytes: Credit in all.
    """

    granularity: Granularity = "auto"
    min_write_bytes: int = 1 << 20
    max_write_bytes: int = 8 << 20
    max_inflight_bytes_per_peer: int = 64 << 20
    max_inflight_bytes: int = 256 << 20


class WriteRange(NamedTuple):
    """A rectangle of a stream to post: layers ``[layer_lo, layer_hi)``, tokens ``[token_lo, token_hi)``."""

    layer_lo: int
    layer_hi: int
    token_lo: int
    token_hi: int
    num_bytes: int


def final_tokens(token_hi: int, num_tokens: int, block_tokens: int) -> int:
    """How many tokens may be pushed when ``token_hi`` are computed: whole blocks only, but for the prompt's last one."""
    if token_hi >= num_tokens:
        return num_tokens
    return token_hi // block_tokens * block_tokens


def next_range(
    policy: SchedulingPolicy,
    posted: TokenCounts,
    final: TokenCounts,
    num_tokens: int,
    block_tokens: int,
    block_bytes_per_layer: npt.NDArray[np.int64],
) -> WriteRange | None:
    """The next rectangle of one stream that is worth posting.

    Picks the first layer that has something to push and takes following layers along while they are exactly as far; cuts the
    result to ``max_write_bytes``, by layers first, then by blocks.

    Args:
        posted: Tokens posted so far, per layer.
        final: Tokens that may be pushed, per layer; at least ``posted``.
        num_tokens: Tokens of the whole prompt.
        block_tokens: Tokens per block.
        block_bytes_per_layer: Bytes of one block of each layer; 0 for layers that the consumer doesn't want.

    Returns:
        A non-empty range, or None when nothing should be posted now.
    """
    pending = np.flatnonzero(posted < final)
    if len(pending) == 0:
        return None
    far = final[block_bytes_per_layer > 0]
    if policy.granularity == "request":
        if int(far.min()) < num_tokens:
            return None
    elif policy.granularity == "chunk":
        if int(far.min()) != int(far.max()):
            return None
    elif policy.granularity == "auto" and int(far.min()) != int(far.max()):
        ahead = -(-(final - posted) // block_tokens) * block_bytes_per_layer
        if int(ahead.sum()) < policy.min_write_bytes:
            return None
    lo = int(pending[0])
    same = (posted == posted[lo]) & (final == final[lo])
    stops = np.flatnonzero(~same[lo:])
    hi = lo + int(stops[0]) if len(stops) else len(posted)
    token_lo, token_hi = int(posted[lo]), int(final[lo])
    num_blocks = -(-(token_hi - token_lo) // block_tokens)
    sizes = np.cumsum(block_bytes_per_layer[lo:hi]) * num_blocks
    if int(sizes[-1]) > policy.max_write_bytes:
        fitting = int(np.searchsorted(sizes, policy.max_write_bytes, side="right"))
        if fitting:
            hi = lo + fitting
            num_bytes = int(sizes[fitting - 1])
        else:
            hi = lo + 1
            per_block = int(block_bytes_per_layer[lo])
            num_blocks = max(1, policy.max_write_bytes // per_block)
            token_hi = min(token_hi, token_lo + num_blocks * block_tokens)
            num_bytes = num_blocks * per_block
    else:
        num_bytes = int(sizes[-1])
    return WriteRange(lo, hi, token_lo, token_hi, num_bytes)


class Schedulable(Protocol):
    """What the queue needs to know of a stream."""

    @property
    def awaited(self) -> bool:
        """The whole prompt is final: the consumer waits for nothing but these bytes."""

    @property
    def remaining_bytes(self) -> int:
        """Bytes not posted yet."""

    @property
    def waiting_since(self) -> float:
        """Since when it has had something to post without posting."""


AGING_S = 0.25
"""After this long without a post a stream goes first, oldest first: nobody starves."""


def by_urgency(streams: Iterable[Schedulable], now: float) -> list[int]:
    """Positions of streams in the order in which they may post: starved ones, then awaited tails, then the shortest."""
    keyed = []
    for position, stream in enumerate(streams):
        starved = now - stream.waiting_since > AGING_S
        keyed.append(
            (0, stream.waiting_since, 0, position)
            if starved
            else (1 if stream.awaited else 2, float(stream.remaining_bytes), 0, position)
        )
    return [key[3] for key in sorted(keyed)]


class Credit:
    """Bytes in flight per peer and in all."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self.total = 0
        self._per_peer: dict[object, int] = {}

    def allows(self, peer: object, num_bytes: int) -> bool:
        """Whether a write of this size may be posted. The first one to an idle peer always may, as the first of all."""
        used = self._per_peer.get(peer, 0)
        return (used == 0 or used + num_bytes <= self._policy.max_inflight_bytes_per_peer) and (
            self.total == 0 or self.total + num_bytes <= self._policy.max_inflight_bytes
        )

    def take(self, peer: object, num_bytes: int) -> None:
        """A write is posted."""
        self.total += num_bytes
        self._per_peer[peer] = self._per_peer.get(peer, 0) + num_bytes

    def give(self, peer: object, num_bytes: int) -> None:
        """A write has ended."""
        self.total -= num_bytes
        left = self._per_peer.get(peer, 0) - num_bytes
        if left > 0:
            self._per_peer[peer] = left
        else:
            self._per_peer.pop(peer, None)
