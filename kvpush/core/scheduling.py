# SPDX-License-Identifier: Apache-2.0
"""Which writes to post next: granularity, urgency, fairness, and the credit of bytes in flight. Pure and deterministic."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

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


class LinkEstimate:
    """What has been seen of the way to one peer, and what follows for the size of writes and the depth of its queue.

    The rate is bytes completed over busy time, smoothed. The overhead is what planning and posting a write costs the submitter
    at least. From both: a write should be large enough that its overhead is a small part of the time that the link needs for
    it, and the queue just deep enough to keep the link busy, so that what becomes urgent doesn't wait behind much.

    Args:
        base: The configured policy: the limits, and what holds until something was seen.
    """

    WINDOW_S = 0.1
    QUEUE_S = 0.05
    """Bytes in flight are bounded by what the link moves in this time."""
    WRITE_S = 0.02
    """One write is bounded by what the link moves in this time."""
    OVERHEAD_SHARE = 0.1
    """Posting should take at most this share of a write's time on the link."""
    SMALLEST = 128 << 10
    LONGEST_POLL_S = 5e-3
    POLLS_PER_WRITE = 4
    UNPOLLED_BYTES = 256 << 10
    """What the link may move between two polls. Some transports (TCP is one) move bytes in the polls of either end: what lies
    between two of them has to fit the buffers of the way, or the pause bounds the rate, and the rate seen the pause."""
    LARGEST_MINIMUM = 4 << 20

    def __init__(self, base: SchedulingPolicy) -> None:
        self.base = base
        self.policy = base
        self.rate: float | None = None
        self.overhead_s: float | None = None
        self._inflight = 0
        self._busy_since = 0.0
        self._busy_bytes = 0

    @property
    def idle(self) -> bool:
        """Nothing is in flight."""
        return self._inflight == 0

    @property
    def poll_s(self) -> float:
        """How long to leave the transport alone while writes are in flight, seconds: a part of the time that the next one takes
        at the rate seen, and no longer than :attr:`UNPOLLED_BYTES` take. 0: not known."""
        return self._share_of(min(self._inflight, self.policy.max_write_bytes))

    @property
    def target_poll_s(self) -> float:
        """The same for the other end, which doesn't see what is in flight."""
        return self._share_of(self.policy.max_write_bytes)

    def _share_of(self, num_bytes: int) -> float:
        if self.rate is None:
            return 0.0
        return min(self.LONGEST_POLL_S, min(num_bytes / self.POLLS_PER_WRITE, self.UNPOLLED_BYTES) / self.rate)

    def posted(self, num_bytes: int, now: float) -> None:
        """A write is posted."""
        if self._inflight == 0:
            self._busy_since, self._busy_bytes = now, 0
        self._inflight += num_bytes

    def ended(self, num_bytes: int, now: float, *, ok: bool, post_s: float = 0.0) -> None:
        """A write has ended.

        Args:
            post_s: How long planning and posting it took, seconds; 0 if unknown.
        """
        self._inflight -= num_bytes
        if post_s > 0:
            # Some transports copy inside the post: the cheapest post seen lately is nearest to pure overhead.
            known = self.overhead_s
            self.overhead_s = post_s if known is None else min(post_s, known * 1.05)
        if not ok:
            return
        self._busy_bytes += num_bytes
        busy_s = now - self._busy_since
        if busy_s <= 0 or (self._inflight > 0 and busy_s < self.WINDOW_S):
            return
        sample = self._busy_bytes / busy_s
        self._busy_since, self._busy_bytes = now, 0
        self.rate = sample if self.rate is None else 0.7 * self.rate + 0.3 * sample
        self._adapt()

    def _adapt(self) -> None:
        if self.base.granularity != "auto" or self.rate is None:
            return
        base = self.base
        largest = int(min(base.max_write_bytes, max(2 * self.SMALLEST, self.rate * self.WRITE_S)))
        smallest = base.min_write_bytes
        if self.overhead_s is not None:
            smallest = int(self.rate * self.overhead_s / self.OVERHEAD_SHARE)
            smallest = min(max(smallest, self.SMALLEST), self.LARGEST_MINIMUM, largest)
        queue = int(min(base.max_inflight_bytes_per_peer, max(2 * largest, self.rate * self.QUEUE_S)))
        if any(
            abs(new - old) > 0.2 * old
            for new, old in (
                (largest, self.policy.max_write_bytes),
                (smallest, self.policy.min_write_bytes),
                (queue, self.policy.max_inflight_bytes_per_peer),
            )
        ):
            self.policy = replace(base, max_write_bytes=largest, min_write_bytes=smallest, max_inflight_bytes_per_peer=queue)


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
        block_tokens: Tokens per block, or of the parts that blocks of different sizes are copied in.
        block_bytes_per_layer: Bytes of so many tokens of each layer; 0 for layers that the consumer doesn't want.

    Returns:
        A non-empty range, or None when nothing should be posted now.
    """
    pending = (posted < final).nonzero()[0]
    if len(pending) == 0:
        return None
    if policy.granularity != "layer":
        far = final[block_bytes_per_layer > 0]
        low = int(far.min())
        if policy.granularity == "request":
            if low < num_tokens:
                return None
        elif low < num_tokens and low != int(far.max()):
            if policy.granularity == "chunk":
                return None
            ahead = (final - posted + (block_tokens - 1)) // block_tokens
            if int(ahead.dot(block_bytes_per_layer)) < policy.min_write_bytes:
                return None
    lo = int(pending[0])
    stops = ((posted[lo:] != posted[lo]) | (final[lo:] != final[lo])).nonzero()[0]
    hi = lo + int(stops[0]) if len(stops) else len(posted)
    token_lo, token_hi = int(posted[lo]), int(final[lo])
    num_blocks = -(-(token_hi - token_lo) // block_tokens)
    sizes = block_bytes_per_layer[lo:hi].cumsum() * num_blocks
    if int(sizes[-1]) > policy.max_write_bytes:
        fitting = int(sizes.searchsorted(policy.max_write_bytes, side="right"))
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


class Schedulable(Hashable, Protocol):
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


K = TypeVar("K", bound=Hashable)
S = TypeVar("S", bound=Schedulable)
_Rank = tuple[float, float, int]
"""Smallest first; the number at its end makes it unique."""


class _Ranking(Generic[K]):
    """Keys by rank: a heap with lazy deletion."""

    __slots__ = ("_heap", "_ranks")

    def __init__(self) -> None:
        self._ranks: dict[K, _Rank] = {}
        self._heap: list[tuple[_Rank, K]] = []

    def set(self, key: K, rank: _Rank) -> None:
        if self._ranks.get(key) == rank:
            return
        self._ranks[key] = rank
        heapq.heappush(self._heap, (rank, key))
        if len(self._heap) > 64 and len(self._heap) > 4 * len(self._ranks):
            self._heap = [(rank, key) for key, rank in self._ranks.items()]
            heapq.heapify(self._heap)

    def discard(self, key: K) -> None:
        self._ranks.pop(key, None)

    def first(self) -> tuple[_Rank, K] | None:
        heap = self._heap
        while heap:
            if self._ranks.get(heap[0][1]) == heap[0][0]:
                return heap[0]
            heapq.heappop(heap)
        return None


class _Line(Generic[S]):
    """The waiting streams of one peer."""

    __slots__ = ("aged", "held", "urgent")

    def __init__(self) -> None:
        self.urgent: _Ranking[S] = _Ranking()
        self.aged: _Ranking[S] = _Ranking()
        self.held: S | None = None


class PostQueue(Generic[S]):
    """Streams that have something to post. Every call costs O(log n), however many wait.

    Order: starved streams, the longest waiting first; then awaited tails, then the others, of each kind the shortest first.
    Equals go in the order in which they came. A peer to which nothing may be posted is *held*: until it is released, or
    something more urgent comes for it, none of its streams is looked at.
    """

    def __init__(self) -> None:
        self._known: dict[S, tuple[Hashable, int]] = {}
        self._lines: dict[Hashable, _Line[S]] = {}
        self._urgent: _Ranking[Hashable] = _Ranking()
        self._aged: _Ranking[Hashable] = _Ranking()
        self._serials = itertools.count()

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, stream: object) -> bool:
        return stream in self._known

    def put(self, stream: S, peer: Hashable) -> None:
        """Add a stream, or rank it anew after it has changed."""
        known = self._known.get(stream)
        if known is None:
            known = self._known[stream] = (peer, next(self._serials))
        line = self._lines.get(peer)
        if line is None:
            line = self._lines[peer] = _Line()
        serial = known[1]
        line.urgent.set(stream, (0 if stream.awaited else 1, stream.remaining_bytes, serial))
        line.aged.set(stream, (stream.waiting_since, 0, serial))
        self._rank(peer, line)

    def discard(self, stream: S) -> None:
        """A stream has nothing to post, or may not. Idempotent."""
        known = self._known.pop(stream, None)
        if known is None:
            return
        peer = known[0]
        line = self._lines[peer]
        line.urgent.discard(stream)
        line.aged.discard(stream)
        self._rank(peer, line)

    def first(self, now: float) -> S | None:
        """The stream that goes next; None when nobody waits, or only for peers that are held."""
        oldest = self._aged.first()
        if oldest is not None and now - oldest[0][0] > AGING_S:
            entry = self._lines[oldest[1]].aged.first()
        else:
            peer = self._urgent.first()
            entry = self._lines[peer[1]].urgent.first() if peer is not None else None
        return entry[1] if entry is not None else None

    def hold(self, stream: S, now: float) -> None:
        """Nothing may be posted for the first stream of a peer. Where it isn't the first any more, that one has its turn."""
        peer = self._known[stream][0]
        line = self._lines[peer]
        oldest, urgent = line.aged.first(), line.urgent.first()
        first = oldest if oldest is not None and now - oldest[0][0] > AGING_S else urgent
        if first is None or first[1] is not stream:
            return
        line.held = urgent[1] if urgent is not None else None
        self._urgent.discard(peer)
        self._aged.discard(peer)

    def release(self, peer: Hashable) -> None:
        """Something may be posted to a peer again. Idempotent."""
        line = self._lines.get(peer)
        if line is not None and line.held is not None:
            line.held = None
            self._rank(peer, line)

    def _rank(self, peer: Hashable, line: _Line[S]) -> None:
        urgent, oldest = line.urgent.first(), line.aged.first()
        if urgent is None or oldest is None:
            self._urgent.discard(peer)
            self._aged.discard(peer)
            del self._lines[peer]
            return
        if line.held is not None:
            if urgent[1] is line.held:
                return
            line.held = None
        self._urgent.set(peer, urgent[0])
        self._aged.set(peer, oldest[0])


class Credit:
    """Bytes in flight per peer and in all."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self.total = 0
        self._per_peer: dict[object, int] = {}

    def allows(self, peer: object, num_bytes: int, per_peer: int | None = None) -> bool:
        """Whether a write of this size may be posted. The first one to an idle peer always may, as the first of all.

        Args:
            per_peer: This peer's own limit; the policy's if not given.
        """
        used = self._per_peer.get(peer, 0)
        limit = self._policy.max_inflight_bytes_per_peer if per_peer is None else per_peer
        return (used == 0 or used + num_bytes <= limit) and self.allows_in_all(num_bytes)

    def allows_in_all(self, num_bytes: int) -> bool:
        """The second half of :meth:`allows`: False when no peer at all may be written to with this size."""
        return self.total == 0 or self.total + num_bytes <= self._policy.max_inflight_bytes

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
