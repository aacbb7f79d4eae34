# SPDX-License-Identifier: Apache-2.0
"""What both machines share: transition tables as data, bounded stories, and the protocol that the submitter drives."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kvpush.errors import InternalError

STORY_LENGTH = 48
"""Lines of a transfer's story that are kept."""


@dataclass(frozen=True, slots=True)
class Transition:
    """One row of a transition table.

    Args:
        handler: Name of the method that handles it.
        targets: States that it may lead to. A machine that ends elsewhere has a bug.
    """

    handler: str
    targets: tuple[enum.Enum, ...]


Table = Mapping[tuple[enum.Enum, str], Transition]
"""``(state, event name) -> transition``. What isn't in it is illegal in that state."""


class Story:
    """A bounded log of one transfer: time, state, event. Formatted only when somebody asks."""

    __slots__ = ("_lines",)

    def __init__(self) -> None:
        self._lines: deque[tuple[float, str, str]] = deque(maxlen=STORY_LENGTH)

    def add(self, now: float, state: enum.Enum, what: str) -> None:
        """Append a line."""
        self._lines.append((now, state.name, what))

    def lines(self) -> tuple[str, ...]:
        """The story, oldest first, times in seconds since its first kept line."""
        if not self._lines:
            return ()
        start = self._lines[0][0]
        return tuple(f"+{when - start:.4f}s {state}: {what}" for when, state, what in self._lines)


def mermaid(table: Table, initial: Iterable[enum.Enum], terminal: Iterable[enum.Enum]) -> str:
    """A table as a Mermaid state diagram, for the docs."""
    lines = ["stateDiagram-v2"]
    lines += [f"    [*] --> {state.name}" for state in initial]
    edges: dict[tuple[str, str], list[str]] = {}
    for (state, event), transition in table.items():
        for target in transition.targets:
            if target is not state:
                edges.setdefault((state.name, target.name), []).append(event)
    lines += [f"    {a} --> {b}: {', '.join(events)}" for (a, b), events in edges.items()]
    lines += [f"    {state.name} --> [*]" for state in terminal]
    return "\n".join(lines)


class HasState(Protocol):
    """What a table is about: a stream, a receive."""

    state: Any
    story: Story


def step(machine: object, table: Table, subject: HasState, event: str, now: float, *args: object) -> None:
    """Run one row of a table and hold it to its targets.

    Args:
        machine: Has the handlers; each is called with the subject, the time and ``args``, and sets the subject's state.
        subject: Whose state it is.
        event: Name of the event.

    Raises:
        InternalError: the event is illegal in this state, or led where the table doesn't allow.
    """
    before = subject.state
    transition = table.get((before, event))
    if transition is None:
        raise InternalError(f"{event} in state {before.name}", story=subject.story.lines())
    getattr(machine, transition.handler)(subject, now, *args)
    if subject.state not in transition.targets:
        raise InternalError(
            f"{event} led from {before.name} to {subject.state.name}, which the table doesn't allow",
            story=subject.story.lines(),
        )
    if subject.state is not before:
        subject.story.add(now, subject.state, event)
