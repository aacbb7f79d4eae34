# SPDX-License-Identifier: Apache-2.0
"""A small transfer between two processes of this host, for ``kvpush doctor``: ``python -m kvpush._trial BACKEND OPTIONS``.

Two working halves of the backend, each in a process of its own (in one where it knows no other), with 4 MiB of its memory.
Random bytes are written from one to the other, and compared there. The last line on stdout is the result as JSON: the fields of
:class:`Trial`.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from kvpush.backends._data_path import PROTO_INFO, Asked, Traffic, asked_of_ucx
from kvpush.backends.base import Backend, Capability
from kvpush.backends.manager import BackendManager
from kvpush.core.transport import MemoryKind, Region, WriteStatus
from kvpush.testing.fabric import Device, Memory, Side, device_of, register

NUM_BYTES = 4 << 20
_WAIT_S = 20.0


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of it.

    Args:
        problem: Why there is no result; empty when there is one. The other fields then mean nothing.
        transport: Name of the transport.
        in_process: Both sides were in one process, since the backend knows no other.
        device: The memory is a device's.
        equal: The target has what was written.
        gbytes_per_s: Rate of the second write of 4 MiB, posting included; the first one makes the connection.
        tcp: Bytes that the source's TCP sockets delivered during that.
        rdma: Bytes that RDMA ports sent meanwhile; None when no RDMA device was open.
        asked: What UCX said that it had selected; None when UCX doesn't carry it or didn't say.
    """

    problem: str = ""
    transport: str = ""
    in_process: bool = False
    device: bool = False
    equal: bool = False
    gbytes_per_s: float = 0.0
    tcp: int = 0
    rdma: int | None = None
    asked: Asked | None = None


def run_trial(
    backend: str, options: Mapping[str, object], environment: Mapping[str, str] | None = None, *, timeout_s: float = 60.0
) -> Trial:
    """Run it in processes of its own.

    Args:
        backend: Name of the plugin.
        options: ``backend_options``.
        environment: Added to this process's.
        timeout_s: A trial that takes longer hangs, and is ended.
    """
    with tempfile.TemporaryDirectory(prefix="kvpush-doctor-") as folder:
        log = Path(folder) / "ucx.log"
        environ = {**os.environ, "UCX_PROTO_INFO": PROTO_INFO, "UCX_LOG_FILE": str(log), **(environment or {})}
        # What this process imports, the trial has to find too.
        environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        command = [sys.executable, "-m", "kvpush._trial", backend, json.dumps(dict(options))]
        with subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        ) as child:
            try:
                output, complaints = child.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                child.kill()
                return Trial(f"it was not over after {timeout_s:g} s")
        lines = output.splitlines()
        try:
            fields = json.loads(lines[-1])
            trial = Trial(**{**fields, "asked": None})
        except (IndexError, ValueError, TypeError):
            last = complaints.strip().splitlines()[-1:]
            return Trial(f"it ended with status {child.returncode}" + (f": {last[0][:200]}" if last else ""))
        words = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
        return Trial(**{**asdict(trial), "asked": asked_of_ucx(words)})


def _source(name: str, options: dict[str, object]) -> Trial:
    plugin = BackendManager().get(name)
    device = device_of(plugin)
    if device is None:
        return Trial("it serves no host memory, and its plugin brings none to test with (test_device())")
    in_process = Capability.IN_PROCESS in plugin.info.capabilities
    backend, side = _open(name, options, device, "source")
    other: _Target = _Here(name, options, device) if in_process else _There(name, options)
    try:
        peer = backend.transport.add_peer(other.metadata)
        other.meet(backend.transport.metadata())
        content = np.random.default_rng().integers(0, 256, NUM_BYTES, np.uint8)
        side.memory[0:NUM_BYTES] = content
        address, device_id = other.where
        rows = np.array([[address, NUM_BYTES, device_id]], np.uint64)
        before, seconds = Traffic(), 0.0
        for token in (1, 2):
            before, started = Traffic.now(), time.monotonic()
            backend.transport.post_write(token, peer, side.rows((0, NUM_BYTES)), rows)
            ended: list[Any] = []

            def done(found: list[Any] = ended) -> bool:
                other.step()
                found += backend.transport.poll()
                return bool(found)

            _wait(done, "a write of 4 MiB")
            seconds = time.monotonic() - started
            if ended[0].status is not WriteStatus.DONE:
                return Trial(f"a write failed: {ended[0].error}")
        tcp, rdma = Traffic.now().since(before)
        return Trial(
            transport=backend.transport.name,
            in_process=in_process,
            device=side.region is not None and side.region.kind is MemoryKind.DEVICE,
            equal=other.digest() == hashlib.blake2b(content.tobytes()).hexdigest(),
            gbytes_per_s=round(NUM_BYTES / max(seconds, 1e-9) / 1e9, 3),
            tcp=tcp,
            rdma=rdma,
        )
    finally:
        other.close()
        backend.close()


def _open(name: str, options: dict[str, object], device: Device, role: str) -> tuple[Backend, Side]:
    backend = BackendManager().get(name).create(f"kvpush-doctor-{role}-{os.getpid()}", options)
    memory, region = device.allocate(NUM_BYTES)
    return backend, register(backend.transport, memory, region)


def _digest(backend: Backend, memory: Memory, region: Region) -> str:
    fence = backend.start_visibility_fence([region])
    if fence is not None:
        _wait(fence.done, "the visibility fence")
    return hashlib.blake2b(np.ascontiguousarray(memory[0:NUM_BYTES]).tobytes()).hexdigest()


def _wait(condition: Callable[[], bool], what: str) -> None:
    limit = time.monotonic() + _WAIT_S
    while not condition():
        if time.monotonic() > limit:
            raise TimeoutError(f"{what} was not over after {_WAIT_S:g} s")
        time.sleep(0.0002)


class _Target:
    """The side that is written to."""

    metadata: bytes
    where: tuple[int, int]
    """Address and device id of its memory."""

    def meet(self, metadata: bytes) -> None:
        """Let it know the source."""

    def step(self) -> None:
        """Called while a write is in flight."""

    def digest(self) -> str:
        """Of what it has in its memory now."""
        raise NotImplementedError

    def close(self) -> None: ...


class _Here(_Target):
    """In this process."""

    def __init__(self, name: str, options: dict[str, object], device: Device) -> None:
        self._backend, self._side = _open(name, options, device, "target")
        self.metadata = self._backend.transport.metadata()
        self.where = self._side.address, self._side.region.device_id if self._side.region else 0

    def meet(self, metadata: bytes) -> None:
        self._backend.transport.add_peer(metadata)

    def step(self) -> None:
        self._backend.transport.progress()

    def digest(self) -> str:
        assert self._side.region is not None
        return _digest(self._backend, self._side.memory, self._side.region)

    def close(self) -> None:
        self._backend.close()


class _There(_Target):
    """In a child process, which serves until its stdin ends."""

    def __init__(self, name: str, options: dict[str, object]) -> None:
        environ = {key: value for key, value in os.environ.items() if key not in ("UCX_PROTO_INFO", "UCX_LOG_FILE")}
        command = [sys.executable, "-m", "kvpush._trial", "--target", name, json.dumps(options)]
        self._child = subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        answer = self._ask(None)
        self.metadata, self.where = bytes.fromhex(answer["metadata"]), (answer["address"], answer["device_id"])

    def _ask(self, question: str | None) -> dict[str, Any]:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        if question is not None:
            self._child.stdin.write(question + "\n")
            self._child.stdin.flush()
        answer = self._child.stdout.readline()
        if not answer:
            raise RuntimeError(f"the target ended with status {self._child.wait()}")
        found: dict[str, Any] = json.loads(answer)
        if "problem" in found:
            raise RuntimeError(found["problem"])
        return found

    def meet(self, metadata: bytes) -> None:
        self._ask(metadata.hex())

    def digest(self) -> str:
        return str(self._ask("digest")["digest"])

    def close(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        try:
            self._child.wait(5.0)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()


def _serve(name: str, options: dict[str, object], say: Callable[[dict[str, object]], None]) -> None:
    device = device_of(BackendManager().get(name))
    assert device is not None, "the source has asked that"
    backend, side = _open(name, options, device, "target")
    assert side.region is not None
    say({"metadata": backend.transport.metadata().hex(), "address": side.address, "device_id": side.region.device_id})
    while True:
        backend.transport.progress()
        if not select.select([sys.stdin], [], [], 0.0005)[0]:
            continue
        question = sys.stdin.readline().strip()
        if not question:
            backend.close()
            return
        if question == "digest":
            say({"digest": _digest(backend, side.memory, side.region)})
        else:
            backend.transport.add_peer(bytes.fromhex(question))
            say({})


def main(arguments: list[str]) -> None:
    """Run one side. Whatever else is written to stdout goes to stderr."""
    out: TextIO = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(found: dict[str, object]) -> None:
        out.write(json.dumps(found) + "\n")
        out.flush()

    try:
        if arguments[0] == "--target":
            _serve(arguments[1], json.loads(arguments[2]), say)
        else:
            say(asdict(_source(arguments[0], json.loads(arguments[1]))))
    except Exception as error:  # noqa: BLE001 - whatever a plugin raises is the result
        say({"problem": f"{type(error).__name__}: {error}"})
    out.flush()
    # Threads of a plugin may not let go, so the process doesn't wait for them; what UCX has printed is in a buffer still.
    ctypes.CDLL(None).fflush(None)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
