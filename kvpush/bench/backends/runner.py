# SPDX-License-Identifier: Apache-2.0
"""Runs the measuring processes one after another, and gives up those that hang."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO

import msgspec

from kvpush.bench.backends.ends import child_environment
from kvpush.bench.backends.results import Report, Result, Subject
from kvpush.bench.backends.source import Event, Spec
from kvpush.bench.backends.ways import Way
from kvpush.demo.runner import describe_host
from kvpush.demo.supervisor import available_cores

__all__ = ["STALL_S", "run"]

STALL_S = 90.0
"""One case with all of its rounds, or the opening of both ends, which may import a framework."""
_KILL_S = 10.0

Told = Callable[[str, str], None]
"""Called with the way and what it does now."""


def run(
    ways: Iterable[Way],
    others: Iterable[Subject] = (),
    *,
    quick: bool = False,
    benches: Sequence[str] = (),
    stall_s: float = STALL_S,
    told: Told = lambda way, what: None,
) -> Report:
    """Measure ways, one at a time. Blocks for a minute or so each.

    Args:
        ways: What to measure.
        others: What can't be, for the report.
        quick: Only see that all works.
        benches: Names of those to run; all if there is none.
        stall_s: A process that says nothing for so long is given up.
        told: Is told how it goes on.

    Returns:
        What was found. A way that hangs, dies or raises is named in it, and leaves the others alone.
    """
    host = describe_host(available_cores())
    subjects: list[Subject] = []
    results: list[Result] = []
    for way in ways:
        subject, found = _measure(way, quick, tuple(benches), stall_s, told)
        subjects.append(subject)
        results += found
    host["load_1m_after"] = round(os.getloadavg()[0], 2)
    return Report(host, quick, (*subjects, *others), tuple(results))


def _measure(way: Way, quick: bool, benches: tuple[str, ...], stall_s: float, told: Told) -> tuple[Subject, list[Result]]:
    spec = Spec(way.entry_point, way.subject.variant, dict(way.options), quick, benches, way.chosen)
    results: list[Result] = []
    problems: list[str] = []
    left_out: list[str] = []
    processes, over, doing, refusal = 0, False, "starting", ""
    with tempfile.TemporaryFile() as complaints, _child(spec, way.environment, complaints) as child:
        try:
            for event in _events(child, stall_s):
                processes = event.processes or processes
                over |= event.over
                if event.begins:
                    doing = event.begins
                    told(way.name, doing)
                if event.result is not None:
                    results.append(event.result)
                if event.problem and event.left_out and not event.bench:
                    refusal = event.problem
                elif event.problem:
                    what = f"{event.bench}: {event.problem}" if event.bench else event.problem
                    (left_out if event.left_out else problems).append(what)
            if not over:
                problems.append(f"its process ended with status {_end(child)} at {doing}{_last_words(complaints)}")
        except TimeoutError:
            problems.append(f"hangs: {doing} was not over after {stall_s:g} s")
        except msgspec.DecodeError as error:
            over = False
            problems.append(f"its process said something else than events at {doing}: {error}")
    if refusal:
        return msgspec.structs.replace(way.subject, status="cannot run", reasons=(refusal,)), []
    # All left out is nothing to measure, and no fault.
    status = "measured" if not problems else "failed" if over and results else "given up"
    return msgspec.structs.replace(
        way.subject, status=status, reasons=tuple(problems), processes=processes, left_out=tuple(left_out)
    ), results


@contextlib.contextmanager
def _child(spec: Spec, environment: Mapping[str, str], complaints: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """The measuring process. It and what it has started are gone when this ends."""
    child = subprocess.Popen(
        [sys.executable, "-m", "kvpush.bench.backends.source", msgspec.json.encode(spec).decode()],
        env=child_environment(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=complaints,
        start_new_session=True,
    )
    try:
        yield child
    finally:
        _end(child)
        assert child.stdout is not None
        child.stdout.close()


def _end(child: subprocess.Popen[bytes]) -> int | None:
    """Kill it with all that it has started, and wait for it.

    Returns:
        Its status, that of its own end where it had ended before; None when the kernel doesn't let it go.
    """
    if child.returncode is None:
        # Not waited for yet, so the number is still its group's.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_KILL_S)
    return child.returncode


def _events(child: subprocess.Popen[bytes], stall_s: float) -> Iterator[Event]:
    """What it says, until its stdout ends.

    Raises:
        TimeoutError: it was silent for too long.
    """
    assert child.stdout is not None
    pending = b""
    limit = time.monotonic() + stall_s
    while True:
        if not select.select([child.stdout], [], [], max(limit - time.monotonic(), 0.0))[0]:
            raise TimeoutError
        part = os.read(child.stdout.fileno(), 1 << 16)
        if not part:
            return
        *lines, pending = (pending + part).split(b"\n")
        for line in lines:
            limit = time.monotonic() + stall_s
            yield msgspec.json.decode(line, type=Event)


def _last_words(complaints: IO[bytes]) -> str:
    complaints.seek(0)
    lines = complaints.read().decode(errors="replace").strip().splitlines()
    return f": {lines[-1][:300]}" if lines else ""
