# SPDX-License-Identifier: Apache-2.0
"""Which way bytes go, in plain words: what UCX says, what the kernel counts, and a real transfer of each kind."""

from __future__ import annotations

import logging
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvpush._trial import run_trial
from kvpush.backends import _data_path
from kvpush.backends._data_path import Asked, PathWatch, Traffic, asked_of_ucx, seen_in_words, ucx_in_words
from kvpush.core.transport import WriteStatus
from kvpush.testing.fabric import connect, host_memory, register

MIB = 1 << 20


def table(where: str, title: str, how: str, lanes: str) -> str:
    """As UCX 1.23 prints it."""
    rows = ["+----+", f"| {where} |", f"| {title} |", "+----+", "| Range | Description | Config |", "+----+"]
    rows += [f"| 0..511 | short | {lanes} |", f"| 512..inf | {how:11} | {lanes:14} |", "+----+"]
    return "".join(f"[1796008293.853516] [vm:30767:0]   {row}\n" for row in rows)


PUT = "remote memory write by ucp_put* from host memory to host"
OWN = table("source self cfg#0", PUT, "zero-copy", "self/memory")


def test_the_last_table_for_another_process_counts() -> None:
    log = (
        OWN
        + table("source intra-node cfg#1", PUT, "zero-copy", "52% on tcp/lo and 48% on tcp/eth0")
        + table("source intra-node cfg#2", PUT.replace("put*", "put*(multi)"), "zero-copy", "cma/memory")
        + table("source intra-node cfg#2", "active message by ucp_am_send* from host memory", "zero-copy", "tcp/lo")
        + OWN
        + "[1.0] [vm:1:0] ucp.c:1 UCX  ERROR a | b | c |\n"
    )
    assert asked_of_ucx(log) == Asked("intra-node", "from host memory to host", "zero-copy", "cma/memory")


@pytest.mark.parametrize("log", ["", OWN, "| 0..inf | zero-copy | tcp/lo |\n", "\x00|||\n||\n"])
def test_no_table_for_another_process(log: str) -> None:
    assert asked_of_ucx(log) is None


HOST, GPU = "from host memory to host", "from cuda memory to cuda/GPU0"


@pytest.mark.parametrize(
    ("memory", "how", "lanes", "words"),
    [
        (HOST, "zero-copy", "cma/memory", "shared memory on one host"),
        (HOST, "zero-copy", "52% on tcp/lo and 48% on tcp/eth0", "TCP"),
        (HOST, "zero-copy", "rc_mlx5/mlx5_0:1", "RDMA between host memories"),
        (HOST, "zero-copy", "50% on rc_mlx5/mlx5_0:1 and 50% on rc_mlx5/mlx5_1:1", "RDMA between host memories"),
        (HOST, "short", "sysv/memory", "shared memory on one host"),
        (GPU, "zero-copy", "rc_mlx5/mlx5_0:1", "direct device RDMA"),
        (GPU, "copy-in", "dc_mlx5/mlx5_0:1", "through host memory, over RDMA"),
        (GPU, "zero-copy fragmented, frag host", "rc_mlx5/mlx5_0:1 and cuda_copy/cuda", "through host memory, over RDMA"),
        (GPU, "software emulation", "tcp/eth0", "through host memory, over TCP"),
        (GPU, "zero-copy", "cuda_ipc/cuda", "device to device inside one host"),
        (GPU, "copy-in", "sysv/memory", "through host memory, by shared memory on one host"),
        (HOST, "magic", "warp/drive0", "magic over warp/drive0"),
    ],
)
def test_what_ucx_says_in_plain_words(memory: str, how: str, lanes: str, words: str) -> None:
    assert ucx_in_words(Asked("inter-node", memory, how, lanes)) == words


@pytest.mark.parametrize(
    ("tcp", "rdma", "device", "words"),
    [
        (MIB, None, False, "TCP"),
        (MIB, None, True, "through host memory, over TCP"),
        (4000, None, False, "shared memory on one host"),
        (4000, None, True, "device to device inside one host"),
        (4000, MIB, False, "RDMA between host memories"),
        (4000, MIB, True, "RDMA, straight from the device or through host memory"),
        (4000, 0, False, "RDMA or shared memory on one host"),
    ],
)
def test_what_counters_tell(tcp: int, rdma: int | None, device: bool, words: str) -> None:
    assert seen_in_words(MIB, tcp, rdma, device=device)[0] == words


def test_tcp_sockets_of_this_process_are_counted_and_no_others() -> None:
    unix, other_unix = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server, unix, other_unix:
        before = Traffic.now()
        client = socket.create_connection(server.getsockname())
        served, _ = server.accept()
        with client, served:
            unix.send(b"x" * 1000)
            for _ in range(16):
                client.sendall(b"x" * 65536)
                left = 65536
                while left:
                    left -= len(served.recv(left))
            # The last acknowledgement may be on its way still.
            limit = time.monotonic() + 10
            while Traffic.now().since(before)[0] < 16 * 65536 and time.monotonic() < limit:
                time.sleep(0.01)
            tcp, _ = Traffic.now().since(before)
            assert 16 * 65536 <= tcp < 17 * 65536
            assert client.getblocking()
            assert served.getblocking()


def test_rdma_ports_are_counted(tmp_path: Path) -> None:
    for device, counter, text in (
        ("mlx5_0", "ports/1/counters/port_xmit_data", "1000\n"),
        ("mlx5_1", "ports/1/counters/port_xmit_data", "N/A\n"),
        ("rdmap0", "ports/1/hw_counters/tx_bytes", "500\n"),
    ):
        file = tmp_path / "sys/class/infiniband" / device / counter
        file.parent.mkdir(parents=True)
        file.write_text(text)
    assert _data_path._rdma_bytes(tmp_path) == 4500
    assert Traffic({}, 4500).since(Traffic({}, 4000)) == (0, 500)


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """What the one TCP socket will have delivered, at each reading; nothing is left over at the end."""
    values: list[int] = []
    monkeypatch.setattr(Traffic, "now", classmethod(lambda cls: Traffic({7: values.pop(0)})))
    yield values
    assert values == []


def test_a_peer_is_told_once(readings: list[int]) -> None:
    watch = PathWatch()
    readings += [100, 100 + 3 * MIB]
    watch.posting("a", MIB, alone=True)
    watch.posting("a", 2 * MIB, alone=False)
    assert watch.ended(ok=True, idle=False, device=False) is None
    told = watch.ended(ok=True, idle=True, device=False)
    assert told is not None
    assert told.peer == "a"
    assert told.words == "TCP"
    assert told.seen == "3.0 MiB left through TCP sockets for 3.0 MiB written"
    watch.posting("a", MIB, alone=True)
    assert watch.ended(ok=True, idle=True, device=False) is None
    readings += [0, 0]
    watch.posting("b", MIB, alone=True)
    told = watch.ended(ok=True, idle=True, device=False)
    assert told is not None
    assert told[:2] == ("b", "shared memory on one host")
    watch.forget("a")
    readings += [0, MIB]
    watch.posting("a", MIB, alone=True)
    assert watch.ended(ok=True, idle=True, device=False) is not None


def test_what_tells_nothing_is_not_told(readings: list[int]) -> None:
    watch = PathWatch(max_windows=3)
    watch.posting("a", 1000, alone=True)  # too small: not even a reading
    assert watch.ended(ok=True, idle=True, device=False) is None
    readings += [0, 0]
    watch.posting("a", MIB, alone=True)  # two peers at once
    watch.posting("b", MIB, alone=False)
    assert watch.ended(ok=True, idle=False, device=False) is None
    assert watch.ended(ok=True, idle=True, device=False) is None
    watch.posting("a", MIB, alone=True)  # a failure: nobody knows how much has left
    assert watch.ended(ok=False, idle=True, device=False) is None
    readings += [0]
    watch.posting("a", MIB, alone=True)
    watch.posting("a", MIB, alone=False)
    assert watch.ended(ok=False, idle=False, device=False) is None
    assert watch.ended(ok=True, idle=True, device=False) is None
    watch.posting("a", MIB, alone=True)  # three windows were opened: given up
    assert watch.ended(ok=True, idle=True, device=False) is None


@pytest.mark.nixl
@pytest.mark.parametrize(("tls", "words"), [("tcp,self", "TCP"), ("posix,cma,self", "shared memory on one host")])
def test_a_real_transfer_between_two_processes(monkeypatch: pytest.MonkeyPatch, tls: str, words: str) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    trial = run_trial("cpu", {"ucx_tls": tls})
    assert trial.problem == ""
    assert (trial.transport, trial.equal, trial.in_process, trial.device) == ("nixl-ucx", True, False, False)
    assert trial.asked is not None
    assert ucx_in_words(trial.asked) == words
    assert seen_in_words(4 * MIB, trial.tcp, trial.rdma, device=False)[0] == words


def test_a_trial_inside_one_process() -> None:
    trial = run_trial("loopback", {})
    assert (trial.problem, trial.equal, trial.in_process, trial.asked) == ("", True, True, None)


def test_a_trial_that_can_not_be_made_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no backend is called 'absent'" in run_trial("absent", {}).problem
    assert "ConfigError: " in run_trial("loopback", {"no_such_option": 1}).problem
    assert run_trial("loopback", {}, timeout_s=0.001).problem == "it was not over after 0.001 s"
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert run_trial("loopback", {}).problem == "it ended with status 1"


@pytest.mark.nixl
def test_nixl_logs_the_path_to_each_peer_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpush.backends.kit import NixlTransport

    monkeypatch.delenv("UCX_TLS", raising=False)
    caplog.set_level(logging.INFO, "kvpush.backends._nixl")
    sides = [register(NixlTransport(f"path-{name}", ucx_tls="tcp,self"), host_memory(4 * MIB)) for name in "ab"]
    pair = connect(*sides)
    try:
        for token in range(3):
            pair.source.transport.post_write(token, pair.peer, pair.source.rows((0, MIB)), pair.target.rows((0, MIB)))
            limit = time.monotonic() + 30
            done: list[object] = []
            while not done and time.monotonic() < limit:
                pair.target.transport.progress()
                done += [end.status for end in pair.source.transport.poll()]
            assert done == [WriteStatus.DONE]
    finally:
        pair.close()
    (message,) = [record.getMessage() for record in caplog.records if "data path" in record.getMessage()]
    # Both agents are in this process, each with sockets of its own; only what the source sends is acknowledged to it.
    assert message.startswith("kvpush: data path to path-b: TCP (asked: NIXL says backend UCX; seen: ")
    assert message.endswith(" MiB left through TCP sockets for 1.0 MiB written)")
    np.testing.assert_array_equal(pair.source.memory, pair.target.memory)
