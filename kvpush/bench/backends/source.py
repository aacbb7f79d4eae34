# SPDX-License-Identifier: Apache-2.0
"""The process that measures one way of one backend: ``python -m kvpush.bench.backends.source SPEC``.

It says what it does on stdout, a line of JSON each, as it goes: an :class:`Event`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

import msgspec

from kvpush.bench.backends.benches import BENCHES
from kvpush.bench.backends.case import FULL, QUICK, LeftOut, blank, measure
from kvpush.bench.backends.ends import load, open_ends
from kvpush.bench.backends.results import Result
from kvpush.errors import KvPushError

__all__ = ["Event", "Spec"]


class Spec(msgspec.Struct, frozen=True):
    """What to measure.

    Args:
        entry_point: Of the plugin.
        variant: For the results.
        options: ``backend_options``.
        quick: Only to see that it works.
        benches: Names of the benches.
        may_be_missing: The backend may refuse the options: then it can't be measured, which is no fault.
    """

    entry_point: tuple[str, str]
    variant: str
    options: dict[str, object]
    quick: bool
    benches: tuple[str, ...]
    may_be_missing: bool = False


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of what it says.

    Args:
        begins: A case begins, by its title.
        processes: The ends are open, in so many processes.
        result: A case has ended.
        problem: A bench has failed; nothing can be measured at all when no bench is named.
        bench: Of the problem.
        left_out: It doesn't apply, for the reason in ``problem``: the bench, or all of it when none is named.
        over: All is measured.
    """

    begins: str = ""
    processes: int = 0
    result: Result | None = None
    problem: str = ""
    bench: str = ""
    left_out: bool = False
    over: bool = False


def _run(spec: Spec, say: Callable[[Event], None]) -> None:
    effort = QUICK if spec.quick else FULL
    if spec.may_be_missing:
        say(Event(begins="making the backend"))
        try:
            load(spec.entry_point).create(f"kvpush-bench-{os.getpid()}", spec.options).close()
        except KvPushError as refusal:
            say(Event(problem=refusal.message, left_out=True, over=True))
            return
    for name in spec.benches or tuple(BENCHES):
        say(Event(begins=f"{name}: opening both ends"))
        try:
            # A fresh pair for each bench: what one leaves behind is not the next one's.
            ends = open_ends(spec.entry_point, spec.options, effort.num_bytes)
            try:
                say(Event(processes=1 if ends.target.in_process else 2))
                for axes in BENCHES[name].axes(effort):
                    say(Event(begins=" ".join([name, *(f"{axis}={value}" for axis, value in axes.items())])))
                    result = msgspec.structs.replace(blank(ends, name, spec.variant), **axes)
                    say(Event(result=measure(BENCHES[name].make(ends, result, effort))))
            finally:
                ends.close()
        except LeftOut as reason:
            say(Event(problem=str(reason), bench=name, left_out=True))
        except Exception as error:  # noqa: BLE001 - whatever a plugin raises is the result
            say(Event(problem=f"{type(error).__name__}: {error}", bench=name))
    say(Event(over=True))


def main(arguments: Sequence[str]) -> None:
    """Measure. Whatever else is written to stdout goes to stderr."""
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)

    def say(event: Event) -> None:
        out.write(msgspec.json.encode(event) + b"\n")

    try:
        _run(msgspec.json.decode(arguments[0], type=Spec), say)
    except Exception as error:  # noqa: BLE001 - likewise
        say(Event(problem=f"{type(error).__name__}: {error}"))
    # Threads of a plugin may not let go: the process doesn't wait for them.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
