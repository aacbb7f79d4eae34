# SPDX-License-Identifier: Apache-2.0
"""The shaped link of `kvpush bench serve`: what is asked of iproute2, and that nothing of it is left.

The tests at the end make real namespaces and need root and iproute2.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from kvpush.bench import link as link_module
from kvpush.bench.link import (
    DATA_DEVICE,
    Dropper,
    Link,
    LinkFailed,
    LinkSpec,
    check_requirements,
    parse_link,
    places,
    remove_stale,
)
from kvpush.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "spec", "shown"),
    [
        ("1gbit", LinkSpec(10**9), "1gbit"),
        ("250mbit,2ms", LinkSpec(250 * 10**6, 2000), "250mbit,2ms"),
        ("2.5Gbit, 50us", LinkSpec(2_500_000_000, 50), "2.5gbit,50us"),
        ("100kbit,0.1s", LinkSpec(100_000, 100_000), "100kbit,100ms"),
        ("8000bit", LinkSpec(8000), "8kbit"),
        ("1gbit,0ms", LinkSpec(10**9), "1gbit"),
    ],
)
def test_links_are_read_and_shown(text: str, spec: LinkSpec, shown: str) -> None:
    assert parse_link(text) == spec
    assert str(spec) == shown
    assert parse_link(shown) == spec


@pytest.mark.parametrize(
    "text", ["", "fast", "1", "1gb", "-1gbit", "1gbit,", "1gbit,2", "1gbit,-2ms", "1 gbit", "1gbit,1ms,1ms", "10bit"]
)
def test_what_is_no_link_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"rate|delay"):
        parse_link(text)


def test_bucket_and_queue_follow_the_rate() -> None:
    assert LinkSpec(10**10).burst_bytes == 1_250_000
    assert LinkSpec(10**7).burst_bytes == 128 << 10
    # 10 Gbit/s for 10 ms are 12.5 MB.
    assert LinkSpec(10**10, 10_000).delay_packets * 1500 >= 2 * 12_000_000


class Fake:
    """Stands in for iproute2: notes commands, answers some, fails others."""

    def __init__(self, answers: dict[str, object] | None = None, fail_at: str = "\0", said: str = "no") -> None:
        self.commands: list[tuple[str, ...]] = []
        self._answers = answers or {}
        self._fail_at = fail_at
        self._said = said

    def __call__(self, argv: Sequence[str]) -> str:
        self.commands.append(tuple(argv))
        line = " ".join(argv)
        if self._fail_at in line:
            raise LinkFailed(f"{line}: {self._said}")
        return next((json.dumps(answer) for start, answer in self._answers.items() if line.startswith(start)), "")

    def lines(self) -> list[str]:
        return [" ".join(command) for command in self.commands]


@pytest.fixture
def as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "check_requirements", lambda: None)


@pytest.mark.usefixtures("as_root")
def test_commands_without_delay() -> None:
    fake = Fake()
    with Link(LinkSpec(10**9), pid=7, run=fake) as link:
        made = fake.lines()
        assert link.enter_prefix("d") == ("ip", "netns", "exec", "kvp-7-d")
        assert (link.data_address("p"), link.data_address("d")) == ("198.19.0.1", "198.19.0.2")
        addresses = [link.management_address("p"), link.management_address("d")]
        assert len(set(addresses)) == 2
        assert all(address.startswith("198.18.") for address in addresses)
        fake.commands.clear()
    assert made.index("ip netns add kvp-7-p") < made.index("ip netns add kvp-7-d")
    assert "ip link add name kvpdata netns kvp-7-p type veth peer name kvpdata netns kvp-7-d" in made
    assert "ip -n kvp-7-p addr add 198.19.0.1/30 dev kvpdata" in made
    for side in "pd":
        assert f"ip link add name kvp7{side} type veth peer name kvpmgmt netns kvp-7-{side}" in made
        assert f"ip -n kvp-7-{side} link set lo up" in made
        shaping = [line for line in made if line.startswith(f"tc -n kvp-7-{side}")]
        assert shaping == [
            f"tc -n kvp-7-{side} qdisc add dev kvpdata root handle 1: tbf rate 1000000000bit burst 131072 latency 50ms"
        ]
        assert f"ip link del kvp7{side}" in fake.lines()
        assert f"ip netns del kvp-7-{side}" in fake.lines()
    # Only the data device is shaped: HTTP goes over the other one.
    assert not [line for line in made if "qdisc" in line and "kvpmgmt" in line]


@pytest.mark.usefixtures("as_root")
def test_commands_with_delay() -> None:
    fake = Fake()
    with Link(LinkSpec(10**9, 2000), pid=7, run=fake):
        shaping = [line for line in fake.lines() if line.startswith("tc -n kvp-7-p")]
    assert shaping == [
        "tc -n kvp-7-p qdisc add dev kvpdata root handle 1: netem delay 2000us limit 1000",
        "tc -n kvp-7-p qdisc add dev kvpdata parent 1:1 handle 10: tbf rate 1000000000bit burst 131072 latency 50ms",
    ]


@pytest.mark.usefixtures("as_root")
@pytest.mark.parametrize(
    ("fail_at", "said", "message"),
    [
        ("netem", "Error: Specified qdisc kind is unknown.", "this kernel has no netem .* --link 1gbit"),
        ("tbf", "Error: Specified qdisc kind is unknown.", "no tbf"),
        ("type veth", "Error: Unknown device type.", "no veth"),
        ("netns add", "mkdir failed: Operation not permitted", "SYS_ADMIN"),
        ("addr add", "RTNETLINK answers: File exists", "File exists"),
    ],
)
def test_a_failure_removes_what_was_made_and_says_what_is_missing(fail_at: str, said: str, message: str) -> None:
    fake = Fake(fail_at=fail_at, said=said)
    with pytest.raises(LinkFailed, match=message), Link(LinkSpec(10**9, 50), pid=7, run=fake):
        pytest.fail("must not be entered")
    assert [" ".join(command) for command in Link(LinkSpec(1), pid=7).removal_commands()] == fake.lines()[-5:]


@pytest.mark.usefixtures("as_root")
def test_an_interrupt_while_it_is_made_removes_everything() -> None:
    class Interrupting(Fake):
        def __call__(self, argv: Sequence[str]) -> str:
            answer = super().__call__(argv)
            if "tbf" in argv:
                raise KeyboardInterrupt
            return answer

    fake = Interrupting()
    with pytest.raises(KeyboardInterrupt), Link(LinkSpec(10**9), pid=7, run=fake):
        pytest.fail("must not be entered")
    assert "ip netns del kvp-7-p" in fake.lines()


def test_only_what_dead_runs_left_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "_alive", lambda pid: pid == 11)
    fake = Fake(
        {
            "ip -j netns list": [
                {"name": name} for name in ("kvp-10-p", "kvp-11-p", "kvp-12-d", "kvp-x-p", "other", "kvp-10-p2")
            ],
            "ip -j link show": [{"ifname": name} for name in ("lo", "eth0", "kvp10p", "kvp11d", "kvpmgmt", "kvp10px")],
        }
    )
    assert remove_stale(own=12, run=fake) == ["kvp10p", "kvp-10-p", "kvp-12-d"]
    deleted = [line for line in fake.lines() if " del " in line]
    assert deleted == ["ip link del kvp10p", "ip netns del kvp-10-p", "ip netns del kvp-12-d"]


@pytest.mark.usefixtures("as_root")
def test_addresses_of_others_are_avoided() -> None:
    def address(local: str, prefixlen: int) -> dict[str, object]:
        return {"ifname": "x", "addr_info": [{"local": local, "prefixlen": prefixlen}]}

    fake = Fake({"ip -j -4 addr": [address("198.18.0.9", 30), address("10.0.0.1", 8)]})
    with Link(LinkSpec(10**9), pid=1, run=fake) as link:
        assert link.management_address("p") == "198.18.0.18"
        assert link.management_address("d") == "198.18.0.22"
    fake = Fake({"ip -j -4 addr": [address("198.18.0.1", 16)]})
    with pytest.raises(LinkFailed, match="is taken"), Link(LinkSpec(10**9), pid=1, run=fake):
        pytest.fail("must not be entered")


@pytest.mark.usefixtures("as_root")
@pytest.mark.parametrize(
    ("works", "found"), [("netem", Dropper.NETEM), ("nft", Dropper.NFT), ("iptables", Dropper.IPTABLES), ("", None)]
)
def test_what_can_drop_packets_is_found_by_trying(works: str, found: Dropper | None) -> None:
    class Kernel(Fake):
        def __call__(self, argv: Sequence[str]) -> str:
            tool = next((tool for tool in ("netem", "nft", "iptables") if tool in argv), None)
            if tool is not None and tool != works:
                raise LinkFailed(f"no {tool}")
            return super().__call__(argv)

    with Link(LinkSpec(10**9), pid=7, run=Kernel()) as link:
        assert link.find_dropper() is found


@pytest.mark.usefixtures("as_root")
def test_every_prefill_instance_is_on_the_one_side() -> None:
    with Link(LinkSpec(10**9), pid=7, run=Fake()) as link:
        at = places(link, ("prefill", "prefill-2", "decode"))
        assert at["prefill"] == at["prefill-2"]
        assert at["prefill"].prefix == link.enter_prefix("p")
        assert at["decode"].transfer_host == link.data_address("d")


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "tc" else name)
    with pytest.raises(ConfigError, match="needs tc: install iproute2"):
        check_requirements()
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="needs root"):
        check_requirements()


def test_commands_that_fail_or_are_missing() -> None:
    with pytest.raises(LinkFailed, match="no-such-tool is missing: install iproute2"):
        link_module.run_command(("no-such-tool",))
    with pytest.raises(LinkFailed, match="status 3"):
        link_module.run_command((sys.executable, "-c", "raise SystemExit(3)"))
    assert link_module.run_command((sys.executable, "-c", "print(1)")) == "1\n"


# Real namespaces from here on.


def refuse(why: str) -> None:
    # CI has what is needed, and must not pass without these tests; on somebody's desk they can't be asked for.
    (pytest.fail if os.environ.get("CI") else pytest.skip)(why)


def need_root() -> None:
    if os.geteuid() != 0:
        refuse("this test makes network namespaces: run it as root")
    if shutil.which("ip") is None or shutil.which("tc") is None:
        refuse("this test needs ip and tc: apt-get install iproute2")


def left_of(pid: int) -> list[str]:
    """Names of the namespaces and devices that bear a process's number."""
    namespaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True, timeout=20).stdout
    devices = subprocess.run(["ip", "-br", "link"], capture_output=True, text=True, check=True, timeout=20).stdout
    names = [line.split()[0].partition("@")[0] for line in (*namespaces.splitlines(), *devices.splitlines())]
    return [name for name in names if name.startswith((f"kvp-{pid}-", f"kvp{pid}p", f"kvp{pid}d"))]


RECEIVE = """
import socket, sys
server = socket.create_server(("0.0.0.0", 5000))
print("up", flush=True)
for _ in range(2):
    connection, _peer = server.accept()
    total = 0
    while piece := connection.recv(1 << 16):
        total += len(piece)
    connection.sendall(str(total).encode())
    connection.close()
"""

SEND = """
import socket, sys, time
started = time.perf_counter()
connection = socket.create_connection((sys.argv[1], 5000), timeout=20)
connection.sendall(bytes(int(sys.argv[2])))
connection.shutdown(socket.SHUT_WR)
print(connection.recv(100).decode(), time.perf_counter() - started)
"""


@pytest.mark.timeout(60)
def test_bytes_cross_at_the_rate_and_nothing_is_left() -> None:
    need_root()
    size = 1_000_000
    with Link(parse_link("16mbit")) as link:
        assert len(left_of(os.getpid())) == 4
        receiver = subprocess.Popen(
            [*link.enter_prefix("d"), sys.executable, "-I", "-S", "-c", RECEIVE], stdout=subprocess.PIPE, text=True
        )
        try:
            assert receiver.stdout is not None
            assert receiver.stdout.readline() == "up\n"

            def send(prefix: Sequence[str], address: str) -> float:
                command = [*prefix, sys.executable, "-I", "-S", "-c", SEND, address, str(size)]
                done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
                received, seconds = done.stdout.split()
                assert int(received) == size
                return float(seconds)

            shaped = send(link.enter_prefix("p"), link.data_address("d"))
            from_host = send((), link.management_address("d"))
            assert receiver.wait(20) == 0
        finally:
            receiver.kill()
            receiver.wait()
            if receiver.stdout is not None:
                receiver.stdout.close()
    # A megabyte is 0.5 s at 16 Mbit/s, less 128 KiB of bucket.
    assert 0.35 < shaped < 10
    assert from_host < shaped / 2
    assert left_of(os.getpid()) == []


PINGS = """
import socket, sys, time
peer = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
peer.settimeout(float(sys.argv[3]))
answers = 0
for number in range(int(sys.argv[2])):
    try:
        peer.sendto(number.to_bytes(4, "little") + bytes(996), (sys.argv[1], 5001))
        answers += bool(peer.recv(2000))
    except OSError:
        continue
print(answers)
"""

ECHO = """
import socket
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("0.0.0.0", 5001))
print("up", flush=True)
while True:
    data, peer = server.recvfrom(2000)
    try:
        server.sendto(data, peer)
    except OSError:
        continue
"""


@pytest.mark.timeout(90)
def test_the_link_is_cut_squeezed_made_lossy_and_healed() -> None:
    need_root()
    with Link(parse_link("16mbit")) as link:
        echo = subprocess.Popen(
            [*link.enter_prefix("d"), sys.executable, "-I", "-S", "-c", ECHO], stdout=subprocess.PIPE, text=True
        )
        try:
            assert echo.stdout is not None
            assert echo.stdout.readline() == "up\n"

            def answers(count: int, patience_s: float = 0.1) -> int:
                command = (sys.executable, "-I", "-S", "-c", PINGS, link.data_address("d"), str(count), str(patience_s))
                return int(link_module.run_command((*link.enter_prefix("p"), *command)))

            assert answers(5, 5.0) == 5
            link.cut()
            assert answers(5) == 0
            link.join()
            assert answers(5, 5.0) == 5
            link.squeeze(256_000)
            assert answers(5, 5.0) == 5
            show = link_module.run_command(("tc", "-n", link.namespace("p"), "qdisc", "show", "dev", DATA_DEVICE))
            assert "rate 256Kbit" in show
            link.relax()
            show = link_module.run_command(("tc", "-n", link.namespace("p"), "qdisc", "show", "dev", DATA_DEVICE))
            assert "rate 16Mbit" in show
            dropper = link.find_dropper()
            if dropper is None:
                refuse("nothing here can drop packets: apt-get install nftables")
            assert dropper is not None
            link.lose(50, dropper)
            assert 0 < answers(40, 0.05) < 40
            link.lose_no_more(dropper, 50)
            assert answers(5, 5.0) == 5
            link.lose(100, dropper)
            assert answers(5) == 0
            link.lose_no_more(dropper, 100)
            assert answers(5, 5.0) == 5
        finally:
            echo.kill()
            echo.wait()
            if echo.stdout is not None:
                echo.stdout.close()
    assert left_of(os.getpid()) == []


@pytest.mark.timeout(60)
def test_the_next_run_removes_what_a_killed_one_left() -> None:
    need_root()
    code = """
import os, signal
from kvpush.bench.link import Link, parse_link
Link(parse_link("16mbit")).__enter__()
os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.Popen([sys.executable, "-c", code])
    assert killed.wait(40) == -signal.SIGKILL
    assert len(left_of(killed.pid)) == 4
    with Link(parse_link("16mbit")):
        assert left_of(killed.pid) == []
    assert left_of(os.getpid()) == []


@pytest.mark.timeout(90)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_servers_and_link(tmp_path: Path, number: signal.Signals) -> None:
    """With servers that never become healthy, in their namespaces."""
    need_root()
    code = """
import sys
from kvpush.bench import cli, serve
from kvpush.demo import connectors
def command(options, host, port, transfer):
    return (sys.executable, "-I", "-S", "-c", "import time; print('up', flush=True); time.sleep(600)")
connectors._vllm_command = command
cli.check_requirements = lambda _: None
cli.app()
"""
    options = ["--layers", "1", "--hidden", "32", "--heads", "1", "--kv-heads", "1", "--work-dir", str(tmp_path)]
    bench = subprocess.Popen(
        [sys.executable, "-c", code, "serve", "--link", "16mbit", "--connector", "kvpush", *options],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 40
        logs = tmp_path / "logs"
        while sum(path.read_text() == "up\n" for path in logs.glob("*.log")) < 3:
            assert time.monotonic() < deadline
            assert bench.poll() is None
            time.sleep(0.05)
        started = psutil.Process(bench.pid).children(recursive=True)
        inside = subprocess.run(
            ["ip", "netns", "pids", f"kvp-{bench.pid}-d"], capture_output=True, text=True, check=True, timeout=20
        )
        assert set(map(int, inside.stdout.split())) & {process.pid for process in started}
        bench.send_signal(number)
        output, _ = bench.communicate(timeout=40)
    finally:
        bench.kill()
        bench.wait()
    assert bench.returncode == 128 + number
    assert "everything that was made or started is gone" in output
    assert not [process for process in started if os.path.exists(f"/proc/{process.pid}") and process.is_running()]
    assert left_of(bench.pid) == []
