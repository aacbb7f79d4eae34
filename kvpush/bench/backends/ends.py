# SPDX-License-Identifier: Apache-2.0
"""The two ends of what is measured: one in this process, the other in a child process of its own.

``python -m kvpush.bench.backends.ends`` is that child: it makes the target, lets writes land, and does what it is asked to on
its standard input, one line of JSON each. It leaves when its standard input ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from kvpush.backends.base import Backend, BackendPlugin, Capability
from kvpush.backends.hookspecs import ENTRY_POINT_GROUP
from kvpush.backends.manager import BackendManager
from kvpush.bench.backends.slots import Incoming, Outgoing, area_of, expectation
from kvpush.core.ids import AgentName
from kvpush.core.layout import CacheLayout
from kvpush.core.staging import StagingArea
from kvpush.core.transport import Descriptors, WriteStatus
from kvpush.errors import BackendError, KvPushError, TransportError
from kvpush.testing.fabric import Bytes, Device, Side, device_of, register

__all__ = [
    "CREDIT_BYTES",
    "DEADLINE_S",
    "PIECE_BYTES",
    "Ends",
    "Place",
    "TargetProcess",
    "child_environment",
    "load",
    "open_ends",
    "rows",
]

Ids = npt.NDArray[np.int32]
"""Of blocks."""

DEADLINE_S = 30.0
"""For one round of anything."""
PIECE_BYTES = 8 << 20
CREDIT_BYTES = 64 << 20
"""Longest write and most bytes in flight to one peer, as the submitter's defaults have it."""
_CHUNK_BYTES = 16 << 20
_POLLS_PER_LOOK = 32


def load(entry_point: Sequence[str]) -> BackendPlugin:
    """The plugin of one entry point: no other is loaded, so that none can be in the way.

    Raises:
        BackendError: it can't be loaded.
    """
    name, value = entry_point
    (found,) = BackendManager([metadata.EntryPoint(name, value, ENTRY_POINT_GROUP)]).discover()
    if found.plugin is None:
        raise BackendError(f"backend {name!r} can't be used: {found.error}")
    return found.plugin


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Of a child process that finds whatever this process can import."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **environment}


class Place(NamedTuple):
    """Where the other end's memory begins."""

    address: int
    device_id: int


def rows(place: Place, offsets: npt.NDArray[np.int64], length: int) -> Descriptors:
    """Descriptors of equally long ranges.

    Args:
        offsets: From the beginning, shape ``[n]``.
        length: Of each.

    Returns:
        Shape ``[n, 3]``.
    """
    found = np.empty((len(offsets), 3), np.uint64)
    found[:, 0] = offsets + place.address
    found[:, 1] = length
    found[:, 2] = place.device_id
    return found


class Target(Protocol):
    """The end that is written to."""

    in_process: bool

    @property
    def metadata(self) -> bytes: ...

    @property
    def place(self) -> Place: ...

    @property
    def slots(self) -> StagingArea | None:
        """Where blocks may be staged; None where the backend doesn't."""

    def expect(self, layout: Mapping[str, Any], blocks: list[int]) -> None:
        """Slots hold these blocks from now on; see :class:`~kvpush.bench.backends.slots.Incoming`."""

    def unpack(self, slot: int, lo: int, hi: int) -> None:
        """Begin to unpack a slot. Doesn't wait."""

    def unpacked(self) -> list[int]:
        """Slots that were unpacked since the last call. Doesn't wait; nothing else is asked meanwhile."""

    def meet(self, metadata: bytes) -> None:
        """Let it know the source."""

    def step(self) -> None:
        """Called while a write is in flight."""

    def clear(self) -> None:
        """Zero its memory."""

    def digest(self) -> str:
        """Of its memory, after the visibility fence."""

    def renew(self, num_bytes: int) -> None:
        """Close it and begin anew, with so much memory."""

    def close(self) -> None:
        """Idempotent."""


def digest_of(content: Bytes) -> str:
    """As targets compute it."""
    return str(xxhash.xxh3_128_hexdigest(np.ascontiguousarray(content).data))


class TargetHere:
    """In this process.

    Args:
        plugin: The light half.
        options: ``backend_options``.
        device: Where memory comes from.
        num_bytes: How much.
    """

    in_process = True

    def __init__(self, plugin: BackendPlugin, options: Mapping[str, object], device: Device, num_bytes: int) -> None:
        self._plugin, self._options, self._device = plugin, options, device
        self._number = 0
        self._open(num_bytes)

    def _open(self, num_bytes: int) -> None:
        self._number += 1
        self.backend = self._plugin.create(f"kvpush-bench-target-{self._number}-{os.getpid()}", self._options)
        try:
            self.side = register(self.backend.transport, *self._device.allocate(num_bytes))
            self.slots = area_of(self.backend)
        except BaseException:
            self.backend.close()
            raise
        self._incoming = Incoming(self.backend, self.slots) if self.slots is not None else None
        self.metadata = self.backend.transport.metadata()

    @property
    def place(self) -> Place:
        return place_of(self.side)

    @property
    def incoming(self) -> Incoming:
        """Its part of staged writes."""
        if self._incoming is None:
            raise BackendError("the target doesn't stage")
        return self._incoming

    def expect(self, layout: Mapping[str, Any], blocks: list[int]) -> None:
        self.incoming.expect(layout, blocks)

    def unpack(self, slot: int, lo: int, hi: int) -> None:
        self.incoming.unpack(slot, lo, hi)

    def unpacked(self) -> list[int]:
        return self.incoming.ended()

    def meet(self, metadata: bytes) -> None:
        self.backend.transport.add_peer(metadata)

    def step(self) -> None:
        self.backend.transport.progress()

    def clear(self) -> None:
        self.side.memory[0 : self.side.memory.size] = 0

    def digest(self) -> str:
        assert self.side.region is not None
        fence = self.backend.start_visibility_fence([self.side.region])
        if fence is not None:
            wait(fence.done, "the visibility fence")
        state = xxhash.xxh3_128()
        for start in range(0, self.side.memory.size, _CHUNK_BYTES):
            state.update(np.ascontiguousarray(self.side.memory[start : start + _CHUNK_BYTES]).data)
        return str(state.hexdigest())

    def renew(self, num_bytes: int) -> None:
        self.close()
        self._open(num_bytes)

    def close(self) -> None:
        self.backend.close()


class TargetProcess:
    """In a child process.

    Args:
        entry_point: Of the plugin.
        options: ``backend_options``.
        num_bytes: How much memory.
    """

    in_process = False

    def __init__(self, entry_point: Sequence[str], options: Mapping[str, object], num_bytes: int) -> None:
        spec = json.dumps({"entry_point": list(entry_point), "options": dict(options), "num_bytes": num_bytes})
        self._child = subprocess.Popen(
            [sys.executable, "-m", "kvpush.bench.backends.ends", spec],
            env=child_environment({}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self._pending = b""
        try:
            self._take(self._answer())
        except BaseException:
            self.close()
            raise

    def _take(self, found: Mapping[str, Any]) -> None:
        self.metadata = bytes.fromhex(found["metadata"])
        self.place = Place(*found["place"])
        self.slots = StagingArea(*found["slots"]) if found["slots"] is not None else None

    def _ask(self, **question: object) -> dict[str, Any]:
        self._say(question)
        return self._answer()

    def _say(self, question: Mapping[str, object]) -> None:
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # what became of it is said with the answer
            self._child.stdin.write(json.dumps(question).encode() + b"\n")

    def _answer(self) -> dict[str, Any]:
        limit = time.monotonic() + 2 * DEADLINE_S
        while b"\n" not in self._pending:
            if not self._read(max(limit - time.monotonic(), 0.0)):
                raise TimeoutError(f"the target has not answered within {2 * DEADLINE_S:g} s")
        return self._line()

    def _read(self, wait_s: float) -> bool:
        """Whether there was anything to read."""
        assert self._child.stdout is not None
        if not select.select([self._child.stdout], [], [], wait_s)[0]:
            return False
        part = os.read(self._child.stdout.fileno(), 1 << 16)
        if not part:
            raise BackendError(f"the target's process ended with status {self._child.wait(DEADLINE_S)}")
        self._pending += part
        return True

    def _line(self) -> dict[str, Any]:
        line, _, self._pending = self._pending.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        if "problem" in found:
            raise BackendError(f"at the target: {found['problem']}")
        return found

    def expect(self, layout: Mapping[str, Any], blocks: list[int]) -> None:
        self._ask(do="expect", layout=layout, blocks=blocks)

    def unpack(self, slot: int, lo: int, hi: int) -> None:
        self._say({"do": "unpack", "slot": slot, "lo": lo, "hi": hi})

    def unpacked(self) -> list[int]:
        self._read(0.0)
        found: list[int] = []
        while b"\n" in self._pending:
            found += self._line()["slots"]
        return found

    def meet(self, metadata: bytes) -> None:
        self._ask(do="meet", metadata=metadata.hex())

    def step(self) -> None:
        """It polls by itself."""

    def clear(self) -> None:
        self._ask(do="clear")

    def digest(self) -> str:
        return str(self._ask(do="digest")["digest"])

    def renew(self, num_bytes: int) -> None:
        self._take(self._ask(do="renew", num_bytes=num_bytes))

    def close(self) -> None:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.close()
        try:
            self._child.wait(5.0)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._child.stdout.close()


class Ends:
    """Two ends that know each other, with memory of one size.

    Args:
        plugin: The light half of both.
        options: ``backend_options`` of both.
        device: Where the source's memory comes from.
        target: The other end.
        num_bytes: Memory of each.
    """

    def __init__(
        self, plugin: BackendPlugin, options: Mapping[str, object], device: Device, target: Target, num_bytes: int
    ) -> None:
        self.plugin, self.options, self.device, self.target = plugin, options, device, target
        self.num_bytes = num_bytes
        self._token = 0
        self._number = 0
        self._posted: dict[int, int] = {}
        self.content = np.random.default_rng(7).integers(0, 256, num_bytes, np.uint8)
        self._open(num_bytes)
        self.spare, _ = device.allocate(num_bytes)
        """Not registered: what a plain copy of the source's memory goes to."""
        try:
            self.connect()
        except BaseException:
            self.backend.close()
            raise

    def create(self) -> Backend:
        """One more working half like the source's, with no memory yet. Its maker closes it."""
        self._number += 1
        return self.plugin.create(f"kvpush-bench-source-{self._number}-{os.getpid()}", self.options)

    def renew(self, num_bytes: int) -> None:
        """Two new ends with so much memory instead of these, that don't know each other yet."""
        self.backend.close()
        self.target.renew(num_bytes)
        self._open(num_bytes)

    def _open(self, num_bytes: int) -> None:
        self.backend = self.create()
        try:
            self.side = register(self.backend.transport, *self.device.allocate(num_bytes))
            self.slots = area_of(self.backend)
        except BaseException:
            self.backend.close()
            raise
        self.side.memory[0:num_bytes] = self.content[:num_bytes]

    def connect(self) -> None:
        """Let the ends know each other."""
        self.peer = AgentName(self.backend.transport.add_peer(self.target.metadata))
        self.target.meet(self.backend.transport.metadata())

    @property
    def here(self) -> Place:
        """Where the source's memory begins."""
        return place_of(self.side)

    @property
    def there(self) -> Place:
        """Where the target's memory begins."""
        return self.target.place

    def post(self, src: Descriptors, dst: Descriptors) -> None:
        """Post one write."""
        self._token += 1
        self.backend.transport.post_write(self._token, self.peer, src, dst)
        self._posted[self._token] = int(src[:, 1].sum())

    def write(self, pieces: Sequence[tuple[Descriptors, Descriptors]]) -> None:
        """Post some writes, as many at a time as the credit allows, and wait until all have ended well."""
        limit = time.monotonic() + DEADLINE_S
        for src, dst in pieces:
            while self._posted and sum(self._posted.values()) + PIECE_BYTES > CREDIT_BYTES:
                self._poll(limit)
            self.post(src, dst)
        self.settle()

    def staged(self, src: CacheLayout, dst: CacheLayout, of_source: Ids, of_target: Ids) -> Callable[[], None]:
        """Write blocks through slots, wait until all are unpacked: what does it, as often as it is called.

        Args:
            src: The source's cache, of one layer.
            dst: The target's.
            of_source: Block ids there; each goes to the same position in ``of_target``.
            of_target: Likewise.

        Raises:
            BackendError: the backend doesn't stage.
        """
        if self.slots is None or self.target.slots is None:
            raise BackendError(f"{self.plugin.info.name} doesn't stage")
        self.target.expect(**expectation(dst, of_target))
        out = Outgoing(self.backend, self.slots, self.target.slots, src, dst, (of_source,))
        slot_of: dict[int, int] = {}

        def post(slot: int, src_row: Descriptors, dst_row: Descriptors) -> None:
            self.post(src_row, dst_row)
            slot_of[self._token] = slot

        def run() -> None:
            limit = time.monotonic() + DEADLINE_S
            slot_of.clear()
            out.run(
                post,
                lambda: [slot_of.pop(token) for token in self._poll(limit)],
                self.target.unpack,
                self.target.unpacked,
                limit,
            )

        return run

    def settle(self) -> None:
        """Wait until all that was posted has ended well."""
        limit = time.monotonic() + DEADLINE_S
        while self._posted:
            self._poll(limit)

    def _poll(self, limit: float) -> list[int]:
        """Tokens of the writes that have ended."""
        ended = []
        for completion in self.backend.transport.poll():
            del self._posted[completion.token]
            if completion.status is not WriteStatus.DONE:
                raise TransportError(f"a write failed: {completion.error}")
            ended.append(completion.token)
        self.target.step()
        if time.monotonic() > limit:
            raise TimeoutError(f"{len(self._posted)} writes had not ended after {DEADLINE_S:g} s")
        return ended

    def expect(self, content: Bytes) -> None:
        """Compare the target's memory.

        Raises:
            BackendError: it has other bytes.
        """
        if self.target.digest() != digest_of(content):
            raise BackendError("other bytes have arrived than were written")

    def close(self) -> None:
        """Close both. Idempotent."""
        self.backend.close()
        self.target.close()


def place_of(side: Side) -> Place:
    """Where a side's memory begins."""
    return Place(side.address, side.region.device_id if side.region is not None else 0)


def open_ends(entry_point: Sequence[str], options: Mapping[str, object], num_bytes: int) -> Ends:
    """Both ends of one backend: in two processes, or in this one where the backend knows no other.

    Raises:
        KvPushError: they can't be made, or can't reach each other.
    """
    plugin = load(entry_point)
    device = device_of(plugin)
    if device is None:
        raise BackendError(
            f"it serves {', '.join(plugin.info.device_types)} and brings no memory to measure with: give it a test_device()"
        )
    target: Target
    if Capability.IN_PROCESS in plugin.info.capabilities:
        target = TargetHere(plugin, options, device, num_bytes)
    else:
        target = TargetProcess(entry_point, options, num_bytes)
    try:
        return Ends(plugin, options, device, target, num_bytes)
    except BaseException:
        target.close()
        raise


def wait(condition: Callable[[], bool], what: str) -> None:
    """Spin until something is so.

    Raises:
        TimeoutError: it has not become so.
    """
    limit = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > limit:
            raise TimeoutError(f"{what} was not over after {DEADLINE_S:g} s")


def _serve(spec: Mapping[str, Any], say: Callable[[Mapping[str, object]], None]) -> None:
    plugin = load(spec["entry_point"])
    device = device_of(plugin)
    assert device is not None, "the source has asked that"
    target = TargetHere(plugin, spec["options"], device, spec["num_bytes"])

    def card() -> dict[str, object]:
        slots = dataclasses.astuple(target.slots) if target.slots is not None else None
        return {"metadata": target.metadata.hex(), "place": target.place, "slots": slots}

    say(card())
    pending = b""
    """Read, and not answered yet."""
    while True:
        for _ in range(_POLLS_PER_LOOK):
            target.step()
        if target.slots is not None and (ended := target.unpacked()):
            say({"slots": ended})
        if b"\n" not in pending:
            if not select.select([0], [], [], 0.0)[0]:
                os.sched_yield()
                continue
            part = os.read(0, 1 << 16)
            if not part:
                target.close()
                return
            pending += part
            continue
        line, _, pending = pending.partition(b"\n")
        question = json.loads(line)
        answer: dict[str, object] = {}
        try:
            match question["do"]:
                case "unpack":
                    target.unpack(question["slot"], question["lo"], question["hi"])
                    continue
                case "expect":
                    target.expect(question["layout"], question["blocks"])
                case "meet":
                    target.meet(bytes.fromhex(question["metadata"]))
                case "clear":
                    target.clear()
                case "digest":
                    answer = {"digest": target.digest()}
                case "renew":
                    target.renew(question["num_bytes"])
                    answer = card()
        except (KvPushError, TimeoutError) as error:
            answer = {"problem": f"{type(error).__name__}: {error}"}
        say(answer)


def main(spec: Mapping[str, Any]) -> None:
    """Be a target. Whatever else is written to stdout goes to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(found: Mapping[str, object]) -> None:
        out.write(json.dumps(found) + "\n")
        out.flush()

    try:
        _serve(spec, say)
    except Exception as error:  # noqa: BLE001 - whatever a plugin raises is the answer
        say({"problem": f"{type(error).__name__}: {error}"})
    # Threads of a plugin may not let go: the process doesn't wait for them.
    os._exit(0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
