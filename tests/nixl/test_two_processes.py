# SPDX-License-Identifier: Apache-2.0
"""NIXL between two processes: bytes compared by digest, and a peer that is killed while it is written to."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import numpy as np
import pytest

from kvpush.backends._nixl import NixlTransport
from kvpush.core.ids import AgentName
from kvpush.core.transport import Completion, Descriptors, Region, WriteStatus
from kvpush.errors import TransportError

pytestmark = pytest.mark.nixl
pytest.importorskip("nixl")

DEADLINE_S = 60.0
TLS = ["", "tcp,self", "sm,self", "posix,self"]
IDS = ["chosen-by-ucx", "tcp", "sm", "posix"]


def serve(connection: Connection, tls: str, num_bytes: int) -> None:
    """The target: registers memory, lets writes land, answers questions about its bytes. Ends with its parent."""
    transport = NixlTransport(f"target-{os.getpid()}", ucx_tls=tls or None)
    memory = np.zeros(num_bytes, np.uint8)
    transport.register_memory([Region(memory.ctypes.data, num_bytes, keepalive=memory)])
    connection.send((transport.metadata(), memory.ctypes.data))
    polls = True
    while True:
        if connection.poll(0.0005):
            try:
                question = connection.recv()
            except EOFError:
                return
            if question == "digest":
                connection.send(hashlib.sha256(memory.tobytes()).hexdigest())
            elif question == "stop polling":
                polls = False
                connection.send("stopped")
            else:
                transport.close()
                connection.send("closed")
                return
        if polls:
            transport.progress()


@dataclass
class Target:
    process: BaseProcess
    connection: Connection
    address: int
    peer: AgentName
    source: NixlTransport
    memory: np.ndarray[tuple[int], np.dtype[np.uint8]]

    def ask(self, question: str) -> str:
        self.connection.send(question)
        assert self.connection.poll(DEADLINE_S), f"the target did not answer {question!r}"
        answer = self.connection.recv()
        assert isinstance(answer, str)
        return answer

    def rows(self, base: int, spans: list[tuple[int, int]]) -> Descriptors:
        return np.array([(base + offset, length, 0) for offset, length in spans], np.uint64)

    def post(self, token: int, src: list[tuple[int, int]], dst: list[tuple[int, int]]) -> None:
        rows = self.rows(self.memory.ctypes.data, src), self.rows(self.address, dst)
        self.source.post_write(token, self.peer, *rows)

    def drain(self, num: int) -> list[Completion]:
        done: list[Completion] = []
        wait_for(lambda: done.extend(self.source.poll()) or len(done) >= num, f"{num} completions")
        return done


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S} s: {what}"
        time.sleep(0.0002)


@contextmanager
def target(tls: str, num_bytes: int) -> Iterator[Target]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, tls, num_bytes), daemon=True)
    process.start()
    theirs.close()
    source = NixlTransport(f"source-{os.getpid()}-{time.monotonic_ns()}", ucx_tls=tls or None)
    try:
        memory = np.random.default_rng(num_bytes).integers(0, 256, num_bytes, np.uint8)
        source.register_memory([Region(memory.ctypes.data, num_bytes, keepalive=memory)])
        assert ours.poll(DEADLINE_S), "the target did not start"
        metadata, address = ours.recv()
        peer = source.add_peer(metadata)
        yield Target(process, ours, address, peer, source, memory)
    finally:
        source.close()
        ours.close()
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join(DEADLINE_S)
        process.close()


@pytest.fixture(autouse=True)
def no_user_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UCX_TLS", "UCX_NET_DEVICES"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("tls", TLS, ids=IDS)
def test_bytes_arrive(tls: str) -> None:
    """One write of everything, then the target's digest is the source's."""
    size = 2 << 20
    with target(tls, size) as there:
        there.post(1, [(0, size)], [(0, size)])
        assert there.drain(1) == [Completion(1, WriteStatus.DONE, "")]
        assert there.ask("digest") == hashlib.sha256(there.memory.tobytes()).hexdigest()
        assert there.ask("close") == "closed"


@pytest.mark.parametrize("tls", TLS, ids=IDS)
def test_a_fragmented_write_puts_every_block_in_its_place(tls: str) -> None:
    """1,024 blocks in random order on both sides, in several writes at once; one block in eight is left alone."""
    block, num = 4096, 1024
    rng = np.random.default_rng(5)
    from_ids, to_ids = rng.permutation(num)[: num * 7 // 8], rng.permutation(num)[: num * 7 // 8]
    expected = np.zeros((num, block), np.uint8)
    with target(tls, block * num) as there:
        expected[to_ids] = there.memory.reshape(num, block)[from_ids]
        pieces = 7
        for token, (src, dst) in enumerate(zip(np.split(from_ids, pieces), np.split(to_ids, pieces), strict=True)):
            there.post(token, [(i * block, block) for i in src.tolist()], [(i * block, block) for i in dst.tolist()])
        done = there.drain(pieces)
        assert sorted(done) == [Completion(token, WriteStatus.DONE, "") for token in range(pieces)]
        assert there.ask("digest") == hashlib.sha256(expected.tobytes()).hexdigest()
        assert there.ask("close") == "closed"


@pytest.mark.parametrize("tls", TLS, ids=IDS)
def test_a_peer_killed_while_it_is_written_to(tls: str) -> None:
    """Every write ends exactly once: by itself where the transport detects the loss, else when the peer is removed."""
    size = 16 << 20
    with target(tls, size) as there:
        there.post(0, [(0, 4096)], [(0, 4096)])
        there.drain(1)
        assert there.ask("stop polling") == "stopped"
        for token in range(1, 5):
            there.post(token, [((token - 1) * size // 4, size // 4)], [((token - 1) * size // 4, size // 4)])
        assert there.process.pid is not None
        os.kill(there.process.pid, signal.SIGKILL)
        there.process.join(DEADLINE_S)
        if there.source.capabilities.detects_peer_loss:
            done = there.drain(4)
            late: list[Completion] = []

            def post_to_the_dead() -> bool:
                """Raises, or ends as FAILED; the first may still be taken for DONE by a kernel that hasn't noticed."""
                try:
                    there.post(99, [(0, 4096)], [(0, 4096)])
                except TransportError:
                    return True
                late[:] = there.drain(1)
                return late[0].status is WriteStatus.FAILED

            wait_for(post_to_the_dead, "a write to a dead peer fails")
            there.source.remove_peer(there.peer)
        else:
            done = there.source.poll()
            there.source.remove_peer(there.peer)
            done += there.drain(4 - len(done)) if len(done) < 4 else []
        assert sorted(completion.token for completion in done) == [1, 2, 3, 4]
        assert all(completion.error for completion in done if completion.status is WriteStatus.FAILED)
        assert there.source.num_in_flight == 0
        assert there.source.poll() == []


def test_a_source_killed_while_it_writes_leaves_the_target_working() -> None:
    """A consumer outlives a producer that dies mid-write, and takes writes from another one."""
    size = 4 << 20
    context = multiprocessing.get_context("spawn")
    here = NixlTransport(f"survivor-{os.getpid()}", ucx_tls="tcp,self")
    memory = np.zeros(size, np.uint8)
    here.register_memory([Region(memory.ctypes.data, size, keepalive=memory)])

    def writer() -> tuple[BaseProcess, Connection]:
        ours, theirs = context.Pipe()
        process = context.Process(target=write_for_ever, args=(theirs, here.metadata(), memory.ctypes.data, size), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    try:
        for _ in range(2):
            process, connection = writer()
            memory[:] = 0

            def landed() -> bool:
                here.progress()
                return bool(memory[-1]) and connection.poll(0)  # noqa: B023

            wait_for(landed, "bytes of the writer")
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            process.join(DEADLINE_S)
            process.close()
            connection.close()
            for _ in range(100):
                here.progress()
        assert (memory == 5).all()
    finally:
        here.close()


def write_for_ever(connection: Connection, metadata: bytes, address: int, size: int) -> None:
    transport = NixlTransport(f"writer-{os.getpid()}", ucx_tls="tcp,self")
    memory = np.full(size, 5, np.uint8)
    transport.register_memory([Region(memory.ctypes.data, size, keepalive=memory)])
    peer = transport.add_peer(metadata)
    src, dst = np.array([[memory.ctypes.data, size, 0]], np.uint64), np.array([[address, size, 0]], np.uint64)
    token = 0
    while True:
        transport.post_write(token, peer, src, dst)
        while not transport.poll():
            time.sleep(0.0005)
        if token == 0:
            connection.send("written once")
        token += 1


def test_the_module_imports_without_nixl() -> None:
    """Backends are discovered in processes that never use nixl."""
    import subprocess

    code = "import sys, kvpush.backends.cpu; assert not any(m.split('.')[0].startswith('nixl') for m in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=DEADLINE_S)
