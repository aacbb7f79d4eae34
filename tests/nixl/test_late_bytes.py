# SPDX-License-Identifier: Apache-2.0
"""What a writer that is gone has sent: when it can still land, and when it can't any more."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from kvpush.backends._nixl import NixlTransport
from kvpush.bench.link import DATA_DEVICE, Link, parse_link, run_command
from kvpush.core.transport import Region

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(120)]
pytest.importorskip("nixl")

SIZE = 1 << 20

# argv: the target's metadata, its address, the retry window. Writes once, waits for a line, writes again without an end, and
# does as the next line says.
WRITER = """
import sys, time
import numpy as np
from kvpush.backends._nixl import NixlTransport
from kvpush.core.transport import Region
size = 1 << 20
transport = NixlTransport("writer", ucx_tls="tcp,self", retry_window_s=float(sys.argv[3]))
memory = np.full(size, 5, np.uint8)
transport.register_memory([Region(memory.ctypes.data, size, keepalive=memory)])
peer = transport.add_peer(bytes.fromhex(sys.argv[1]))
def post(token):
    rows = [np.array([[address, size, 0]], np.uint64) for address in (memory.ctypes.data, int(sys.argv[2]))]
    transport.post_write(token, peer, *rows)
post(1)
while not transport.poll():
    time.sleep(0.001)
print("written", flush=True)
sys.stdin.readline()
post(2)
until = time.monotonic() + 0.3
while time.monotonic() < until:
    assert not transport.poll()
    time.sleep(0.001)
print("posted", flush=True)
if sys.stdin.readline() == "remove\\n":
    transport.remove_peer(peer)
    print("removed", flush=True)
    sys.stdin.readline()
while not (done := transport.poll()):
    time.sleep(0.001)
print(done[0].status.name, flush=True)
sys.stdin.readline()
"""

# Polls from the start, says when something has landed, and how much at the end.
TARGET = """
import sys, threading, time
import numpy as np
from kvpush.backends._nixl import NixlTransport
from kvpush.core.transport import Region
transport = NixlTransport("target", ucx_tls="tcp,self")
memory = np.zeros(1 << 20, np.uint8)
transport.register_memory([Region(memory.ctypes.data, memory.nbytes, keepalive=memory)])
print("ready", transport.metadata().hex(), memory.ctypes.data, flush=True)
commands = []
def read():
    for line in sys.stdin:
        commands.append(line.strip())
    commands.append("end")
threading.Thread(target=read, daemon=True).start()
while True:
    transport.progress()
    time.sleep(0.001)
    if commands:
        command = commands.pop(0)
        if command == "end":
            break
        if command == "clear":
            memory[:] = 0
        print("landed", int((memory != 0).sum()), flush=True)
"""


class Program:
    """A Python program that is talked to by lines."""

    def __init__(self, code: str, *arguments: str, prefix: tuple[str, ...] = (), **env: str) -> None:
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-c", code, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, **env},
        )

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")

    def hear(self, *first: str) -> list[str]:
        """The next line that begins with one of these words; nixl prints lines of its own."""
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            if line.split()[:1] and line.split()[0] in first:
                return line.split()
        raise AssertionError(f"it ended before it said {first}")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                continue


@contextmanager
def ended(*programs: Program) -> Iterator[None]:
    try:
        yield
    finally:
        for program in programs:
            program.end()


@pytest.mark.parametrize("way", ["killed", "removed"])
def test_one_poll_takes_in_what_a_writer_left_and_nothing_comes_after(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes it enough for a consumer to poll before it gives blocks away."""
    monkeypatch.delenv("UCX_TLS", raising=False)
    here = NixlTransport(f"target-{os.getpid()}", ucx_tls="tcp,self")
    memory = np.zeros(SIZE, np.uint8)
    here.register_memory([Region(memory.ctypes.data, SIZE, keepalive=memory)])
    writer = Program(WRITER, here.metadata().hex(), str(memory.ctypes.data), "10")
    with ended(writer):
        deadline = time.monotonic() + 60
        while not memory.all():
            here.progress()
            assert time.monotonic() < deadline
        for _ in range(100):
            here.progress()
        writer.hear("written")
        memory[:] = 0
        # From here on nobody polls.
        writer.say("write")
        writer.hear("posted")
        if way == "killed":
            writer.end()
        else:
            writer.say("remove")
            writer.hear("removed")
        # A moment for the kernel, which has all of it already.
        time.sleep(0.5)
        assert not memory.any(), "it landed without a poll"
        here.progress()
        landed = int((memory != 0).sum())
        assert landed > 0, "nothing was under way: this test proves nothing"
        memory[:] = 0
        for _ in range(500):
            here.progress()
            time.sleep(0.001)
        assert not memory.any()
    here.close()


def wait_for_addresses(link: Link) -> None:
    """UCX makes no agent while its device has an IPv6 address that is still being checked for duplicates."""
    deadline = time.monotonic() + 20
    for side in ("p", "d"):
        namespace = link.namespace(side)  # type: ignore[arg-type]
        while run_command(("ip", "-n", namespace, "-6", "addr", "show", "dev", DATA_DEVICE, "tentative")).strip():
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.parametrize("way", ["waits", "remove"])
def test_what_tcp_could_not_deliver_within_the_retry_window_never_lands(way: str) -> None:
    refuse = pytest.fail if os.environ.get("CI") else pytest.skip
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        refuse("this test makes network namespaces: it needs root and iproute2")
    window_s = 2.0
    env = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": DATA_DEVICE}
    with Link(parse_link("100mbit")) as link:
        dropper = link.find_dropper()
        if dropper is None:
            refuse("nothing here can drop packets: apt-get install nftables")
        wait_for_addresses(link)
        target = Program(TARGET, prefix=link.enter_prefix("d"), **env)
        with ended(target):
            _, metadata, address = target.hear("ready")
            writer = Program(WRITER, metadata, address, str(window_s), prefix=link.enter_prefix("p"), **env)
            with ended(writer):
                writer.hear("written")
                target.say("clear")
                assert target.hear("landed") == ["landed", "0"]
                assert dropper is not None
                link.lose(100, dropper)
                writer.say("write")
                writer.hear("posted")
                writer.say(way)
                if way == "waits":
                    assert writer.hear("DONE", "FAILED") == ["FAILED"]
                # Over the pause between two retries during which the window ends: the next one comes after 3.2 or 6.4 s.
                time.sleep(2 * window_s)
                link.lose_no_more(dropper, 100)
                time.sleep(2 * window_s + 1)
                target.say("look")
                assert target.hear("landed") == ["landed", "0"]
