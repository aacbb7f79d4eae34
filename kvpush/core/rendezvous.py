# SPDX-License-Identifier: Apache-2.0
"""Early registration: sources and block registrations find each other by shared keys, whichever comes first.

Keys may repeat (a client may reuse a request id), so a key leads to a *list*; the caller decides by the prompt digest which
one is meant. Pure bookkeeping, bounded memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

S = TypeVar("S", bound=Hashable)
W = TypeVar("W", bound=Hashable)

FATES = 8192
"""How many keys of released sources are remembered."""


class Rendezvous(Generic[S, W]):
    """Sources by key, waiting registrations by key, and what became of sources that are gone."""

    def __init__(self) -> None:
        self._sources: dict[str, dict[S, None]] = {}
        self._waiters: dict[str, dict[W, None]] = {}
        self._fates: OrderedDict[str, str] = OrderedDict()

    def add_source(self, source: S, keys: Iterable[str]) -> list[W]:
        """Make a source findable. Returns the registrations that have been waiting for one of its keys, oldest first."""
        found: dict[W, None] = {}
        for key in keys:
            self._fates.pop(key, None)
            self._sources.setdefault(key, {})[source] = None
            found.update(self._waiters.get(key, {}))
        return list(found)

    def remove_source(self, source: S, keys: Iterable[str], fate: str) -> None:
        """A source can't be joined any more; late registrations are told its fate. Idempotent."""
        for key in keys:
            holders = self._sources.get(key)
            if holders is None or source not in holders:
                continue
            del holders[source]
            if not holders:
                del self._sources[key]
                self._fates[key] = fate
                self._fates.move_to_end(key)
                if len(self._fates) > FATES:
                    self._fates.popitem(last=False)

    def sources(self, keys: Iterable[str]) -> list[S]:
        """Every source that can be found by one of these keys."""
        found: dict[S, None] = {}
        for key in keys:
            found.update(self._sources.get(key, {}))
        return list(found)

    def find_source(
        self, keys: Iterable[str], matches: Callable[[S], bool], *, idle: Callable[[S], bool] | None = None
    ) -> tuple[S | None, str | None]:
        """The source that a registration means.

        Args:
            keys: The registration's keys, best first.
            matches: Whether a candidate has the same prompt.
            idle: Preferred among several candidates: nobody is joined to it yet.

        Returns:
            ``(source, None)``, or ``(None, fate)`` when there is, or was, one that can't serve it, or ``(None, None)`` when
            nothing is known yet.
        """
        fate: str | None = None
        for key in keys:
            holders = self._sources.get(key)
            if holders:
                candidates = [source for source in holders if matches(source)]
                if candidates:
                    preferred = [source for source in candidates if idle is not None and idle(source)]
                    return (preferred or candidates)[0], None
                fate = fate or "the prompt differs from the one that is computed under this id"
            fate = fate or self._fates.get(key)
        return None, fate

    def add_waiter(self, waiter: W, keys: Iterable[str]) -> None:
        """A registration waits for a source with one of these keys."""
        for key in keys:
            self._waiters.setdefault(key, {})[waiter] = None

    def remove_waiter(self, waiter: W, keys: Iterable[str]) -> None:
        """It waits no longer. Idempotent."""
        for key in keys:
            holders = self._waiters.get(key)
            if holders is not None:
                holders.pop(waiter, None)
                if not holders:
                    del self._waiters[key]
