# SPDX-License-Identifier: Apache-2.0
"""Which faults there are, in which order a seed deals them, and what is noted of each."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

__all__ = ["Card", "Fault", "FaultLog", "Kind", "deal"]


class Kind(StrEnum):
    """A kind of fault."""

    KILL_PREFILL = "kill-prefill"
    KILL_DECODE = "kill-decode"
    FREEZE_PREFILL = "freeze-prefill"
    FREEZE_DECODE = "freeze-decode"
    LINK_DOWN = "link-down"
    LINK_HOLE = "link-hole"
    """Up, and everything that enters is gone: unlike a link that is down, nobody's kernel knows."""
    LINK_LOSS = "link-loss"
    LINK_SQUEEZE = "link-squeeze"
    CONTROL_HOLD = "control-hold"
    CONTROL_CUT = "control-cut"
    CONTROL_DELAY = "control-delay"
    ROLLING_RESTART = "rolling-restart"

    @property
    def needs_link(self) -> bool:
        """Whether it is a fault of the link between two namespaces."""
        return self.value.startswith("link-")


#: How often each kind is in the deck. A restart takes the better part of a minute, so kills are rare.
_DECK: Final[Mapping[Kind, int]] = {
    Kind.KILL_PREFILL: 2,
    Kind.KILL_DECODE: 1,
    Kind.FREEZE_PREFILL: 4,
    Kind.FREEZE_DECODE: 4,
    Kind.LINK_DOWN: 3,
    Kind.LINK_HOLE: 3,
    Kind.LINK_LOSS: 2,
    Kind.LINK_SQUEEZE: 2,
    Kind.CONTROL_HOLD: 3,
    Kind.CONTROL_CUT: 2,
    Kind.CONTROL_DELAY: 2,
    Kind.ROLLING_RESTART: 1,
}

#: Seconds that a fault lasts, shortest and longest. Long ones outlive a lease, or a peer's patience.
_LASTS: Final[Mapping[Kind, tuple[float, float]]] = {
    Kind.FREEZE_PREFILL: (0.2, 10.0),
    Kind.FREEZE_DECODE: (0.2, 10.0),
    Kind.LINK_DOWN: (0.2, 15.0),
    Kind.LINK_HOLE: (0.2, 30.0),
    Kind.LINK_LOSS: (2.0, 8.0),
    Kind.LINK_SQUEEZE: (2.0, 8.0),
    Kind.CONTROL_HOLD: (0.2, 15.0),
    Kind.CONTROL_CUT: (0.1, 3.0),
    Kind.CONTROL_DELAY: (2.0, 8.0),
}
_PAUSE_S: Final = (0.3, 8.0)


@dataclass(frozen=True, slots=True)
class Card:
    """A fault that is to happen.

    Args:
        kind: what.
        pause_s: after the fault before.
        lasts_s: until it is healed; 0 for those that end when the instance is up again.
        draw: 0 <= x < 1, for whatever else is to be chosen: the target, how much.
    """

    kind: Kind
    pause_s: float
    lasts_s: float
    draw: float

    def choose(self, options: Sequence[Any], salt: int = 0) -> Any:
        """Choose one of several, always the same one.

        Args:
            options: at least one.
            salt: tells several choices of one card apart.

        Returns:
            One of them.
        """
        return random.Random(f"{self.draw}/{salt}").choice(options)


def deal(kinds: Collection[Kind], *, seed: str) -> Iterator[Card]:
    """Deal faults without end: a shuffled deck, then another one. The first is the kill of a prefill instance, if that is among
    them, as its restart takes longest.

    Args:
        kinds: those that are possible here.
        seed: the same seed and kinds give the same cards.

    Yields:
        The cards; none if there are no kinds.
    """
    rng = random.Random(f"chaos/faults/{seed}")
    deck = [kind for kind in _DECK if kind in kinds for _ in range(_DECK[kind])]
    first = True
    while deck:
        rng.shuffle(deck)
        if first and Kind.KILL_PREFILL in deck:
            deck.remove(Kind.KILL_PREFILL)
            deck.insert(0, Kind.KILL_PREFILL)
        first = False
        for kind in deck:
            shortest, longest = _LASTS.get(kind, (0.0, 0.0))
            # Mostly short ones, as these leave most in the balance.
            lasts = shortest + (longest - shortest) * rng.random() ** 2
            yield Card(kind, rng.uniform(*_PAUSE_S), lasts, rng.random())


@dataclass(slots=True)
class Fault:
    """A fault that has happened.

    Args:
        kind: what.
        target: instance, link or control channel.
        at_s: when, in seconds of the storm.
        clock: the same by this host's clock, as logs have it.
        detail: how.
        healed_at_s: when it was over; None while it isn't.
    """

    kind: str
    target: str
    at_s: float
    clock: str
    detail: dict[str, Any] = field(default_factory=dict)
    healed_at_s: float | None = None

    def as_json(self) -> dict[str, Any]:
        """For the report."""
        healed = None if self.healed_at_s is None else round(self.healed_at_s, 2)
        head = {"kind": self.kind, "target": self.target, "at_s": round(self.at_s, 2), "healed_at_s": healed}
        return {**head, "clock": self.clock, **self.detail}


class FaultLog:
    """Everything that was done to the cluster.

    Args:
        now: seconds of the storm.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.entries: list[Fault] = []

    def add(self, kind: str, target: str, **detail: Any) -> Fault:
        """Note that a fault begins.

        Args:
            kind: what.
            target: whom it hits.
            detail: how.

        Returns:
            The entry; say `heal` when it is over.
        """
        fault = Fault(kind, target, self._now(), clock(), detail)
        self.entries.append(fault)
        return fault

    def heal(self, fault: Fault) -> None:
        """Note that a fault is over."""
        fault.healed_at_s = self._now()

    def counts(self) -> dict[str, int]:
        """How many of each kind."""
        found: dict[str, int] = {}
        for fault in self.entries:
            found[fault.kind] = found.get(fault.kind, 0) + 1
        return dict(sorted(found.items()))

    def any_since(self, since_s: float, kind: Kind) -> bool:
        """Whether a fault of a kind was there at some moment since then.

        Args:
            since_s: in seconds of the storm.
            kind: what.
        """
        return any(fault.kind == kind and (fault.healed_at_s is None or fault.healed_at_s >= since_s) for fault in self.entries)

    def around(self, since_s: float, until_s: float, *, margin_s: float = 15.0) -> list[dict[str, Any]]:
        """Faults that were there at some moment of a span, or shortly before.

        Args:
            since_s: start of the span, in seconds of the storm.
            until_s: its end.
            margin_s: how long before the span still counts.

        Returns:
            For a report, in order.
        """
        return [
            fault.as_json()
            for fault in self.entries
            if fault.at_s <= until_s and (fault.healed_at_s is None or fault.healed_at_s >= since_s - margin_s)
        ]


def clock() -> str:
    """This host's time of day, as logs have it."""
    return datetime.now().astimezone().strftime("%H:%M:%S.%f")[:-3]
