# SPDX-License-Identifier: Apache-2.0
"""Time in ``core``: a heap of deadlines with lazy deletion, and the two halves of a lease.

All times are seconds of one process's monotonic clock, given by the caller.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Deadlines(Generic[K]):
    """At most one deadline per key; the earliest is found in O(log n). Expiry doesn't depend on insertion order."""

    def __init__(self) -> None:
        self._when: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._when)

    def __iter__(self) -> Iterator[K]:
        return iter(self._when)

    def __contains__(self, key: K) -> bool:
        return key in self._when

    def set(self, key: K, when: float) -> None:
        """Set or move a key's deadline."""
        if self._when.get(key) == when:
            return
        self._when[key] = when
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, key))
        if len(self._heap) > 64 and len(self._heap) > 4 * len(self._when):
            self._heap = [(t, n, k) for t, n, k in self._heap if self._when.get(k) == t]
            heapq.heapify(self._heap)

    def discard(self, key: K) -> None:
        """Forget a key's deadline, if it has one."""
        self._when.pop(key, None)

    def get(self, key: K) -> float | None:
        """A key's deadline."""
        return self._when.get(key)

    def next(self) -> float | None:
        """The earliest deadline; None when there is none."""
        self._drop_stale()
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> list[K]:
        """Every key whose deadline is not after ``now``, earliest first. They stay: :meth:`take` each one.

        What is done for one key may settle another one, so they are taken one by one.
        """
        found: list[tuple[float, int, K]] = []
        while True:
            self._drop_stale()
            if not self._heap or self._heap[0][0] > now:
                break
            found.append(heapq.heappop(self._heap))
        due: dict[K, None] = {}
        for entry in found:
            due[entry[2]] = None
            heapq.heappush(self._heap, entry)
        return list(due)

    def take(self, key: K, now: float) -> bool:
        """Remove a key if its deadline is still set and not after ``now``. Says whether it did."""
        when = self._when.get(key)
        if when is None or when > now:
            return False
        del self._when[key]
        return True

    def _drop_stale(self) -> None:
        while self._heap and self._when.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)


class HeldLease:
    """The producer's half: the right to post into one consumer's memory.

    Counted from when the heartbeat was *sent* that the consumer answered, so that delays only make it end earlier
    (Gray and Cheriton, "Leases", SOSP 1989).

    Args:
        lease_s: Duration that the consumer grants with each answer.
        guard_s: Posting stops this long before the end.
        first_seq: The number before the first heartbeat's. One that can't be guessed makes answers that were recorded in an
            earlier conversation worthless.
    """

    def __init__(self, lease_s: float, guard_s: float, first_seq: int = 0) -> None:
        self.lease_s = lease_s
        self.guard_s = guard_s
        self.until = float("-inf")
        self.seq = self._first_seq = first_seq
        self._sent: deque[tuple[int, float]] = deque()

    def heartbeat(self, now: float) -> int:
        """A heartbeat is sent now. Returns its number."""
        self.seq += 1
        self._sent.append((self.seq, now))
        if len(self._sent) > 256:
            self._sent.popleft()
        return self.seq

    def answered(self, seq: int) -> bool:
        """The consumer has echoed heartbeat ``seq``. False when that number was never sent or is too old to count."""
        if not self._first_seq < seq <= self.seq:
            return False
        sent_at: float | None = None
        while self._sent and self._sent[0][0] <= seq:
            number, when = self._sent[0]
            if number == seq:
                sent_at = when
            self._sent.popleft()
        if sent_at is None:
            return True
        self._sent.appendleft((seq, sent_at))
        self.until = max(self.until, sent_at + self.lease_s)
        return True

    def oldest_unanswered(self, answered_seq: int) -> float | None:
        """When the oldest heartbeat after ``answered_seq`` was sent."""
        for number, when in self._sent:
            if number > answered_seq:
                return when
        return None

    @property
    def ends_at(self) -> float:
        """When the right to post ends. What is in flight then is to be cut off: the guard is for the time that posting and
        cutting take, and for clocks that don't run equally fast."""
        return self.until - self.guard_s

    def valid(self, now: float) -> bool:
        """Whether a write may be posted now."""
        return now < self.ends_at


class GrantedLease:
    """The consumer's half: until when the producer may believe that it may post, counted from our newest answer."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self.until = float("-inf")

    def grant(self, now: float) -> None:
        """An answer to a heartbeat is sent now."""
        self.until = max(self.until, now + self.lease_s)
