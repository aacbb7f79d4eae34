# SPDX-License-Identifier: Apache-2.0
"""Servers start, are waited for, and leave nothing behind, whatever ends the demo."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from kvpush.demo.supervisor import (
    PortPicker,
    ServerFailed,
    ServerSpec,
    Supervisor,
    _fixed_ports,
    available_cores,
    first_exception,
)

# Writes its own pid and that of a child which ignores SIGTERM and leaves the process group.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"],
                         start_new_session=True)
with open(sys.argv[1] + ".new", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(600)
"""

HTTP = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
print("listening", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def eventually(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def python(code: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code, *arguments)


def read_pids(path: Path) -> list[int]:
    eventually(path.exists)
    return [int(pid) for pid in path.read_text().split()]


async def test_ready_once_healthy_and_gone_after_the_block(tmp_path: Path) -> None:
    port = PortPicker()()
    seen: list[str] = []
    with Supervisor(tmp_path) as supervisor:
        spec = ServerSpec(name="one two", argv=python(HTTP, str(port)), health_url=f"http://127.0.0.1:{port}/health")
        server = supervisor.start(spec)
        await supervisor.wait_ready([server], timeout_s=60, on_ready=lambda it: seen.append(it.name))
        assert seen == ["one two"]
        assert server.ready_after_s is not None
        assert server.exit_status is None
        assert server.log_path.name == "one-two.log"
        assert "listening" in server.log_tail()
        assert server.cpu_seconds() > 0
        pids = [process.pid for process in server.processes()]
        assert len(pids) == 2
    assert all(gone(pid) for pid in pids)
    assert server.exit_status is not None
    assert server.processes() == []
    assert supervisor.servers == ()


async def test_dead_server_is_noticed_with_the_end_of_its_log(tmp_path: Path) -> None:
    code = "import sys; print('x' * 10); print('no such device', file=sys.stderr); sys.exit(3)"
    with Supervisor(tmp_path) as supervisor:
        healthy = supervisor.start(ServerSpec(name="healthy", argv=python("import time; time.sleep(600)")))
        dead = supervisor.start(ServerSpec(name="dead", argv=python(code), health_url="http://127.0.0.1:9/health"))
        with pytest.raises(ServerFailed, match=r"(?s)dead ended with status 3\..*no such device"):
            await supervisor.wait_ready([healthy, dead], timeout_s=60)


async def test_command_that_cannot_be_run_is_a_dead_server(tmp_path: Path) -> None:
    with Supervisor(tmp_path) as supervisor:
        server = supervisor.start(ServerSpec(name="none", argv=("/no/such/program",), health_url="http://127.0.0.1:9/"))
        with pytest.raises(ServerFailed, match="No such file"):
            await supervisor.wait_ready([server], timeout_s=60)


async def test_unhealthy_server_ends_the_wait_at_the_deadline(tmp_path: Path) -> None:
    with Supervisor(tmp_path) as supervisor:
        argv = python("import time; time.sleep(600)")
        server = supervisor.start(ServerSpec(name="slow", argv=argv, health_url=f"http://127.0.0.1:{PortPicker()()}/"))
        with pytest.raises(ServerFailed, match="slow was not healthy within 0 s"):
            await supervisor.wait_ready([server], timeout_s=0.3)


def test_environment_and_cores_reach_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPUSH_TEST_REMOVED", "there")
    core = available_cores()[-1]
    code = "import os; print(os.environ['KVPUSH_TEST_SET'], 'KVPUSH_TEST_REMOVED' in os.environ, os.sched_getaffinity(0))"
    with Supervisor(tmp_path) as supervisor:
        env = {"KVPUSH_TEST_SET": "yes", "KVPUSH_TEST_REMOVED": None}
        server = supervisor.start(ServerSpec(name="env", argv=python(code), env=env, cpus=(core,)))
        eventually(lambda: server.exit_status is not None)
        assert server.exit_status == 0
        assert server.log_tail() == f"yes False {{{core}}}"


def test_stubborn_processes_are_killed_after_the_grace_period(tmp_path: Path) -> None:
    with Supervisor(tmp_path / "logs", grace_s=0.2) as supervisor:
        supervisor.start(ServerSpec(name="stubborn", argv=python(STUBBORN, str(tmp_path / "pids"))))
        pids = read_pids(tmp_path / "pids")
    assert all(gone(pid) for pid in pids)


def test_what_a_dead_server_left_behind_is_killed(tmp_path: Path) -> None:
    with Supervisor(tmp_path / "logs") as supervisor:
        server = supervisor.start(ServerSpec(name="stubborn", argv=python(STUBBORN, str(tmp_path / "pids"))))
        main, child = read_pids(tmp_path / "pids")
        os.kill(main, signal.SIGKILL)
        eventually(lambda: server.exit_status is not None)
        assert server.exit_status == 128 + signal.SIGKILL
        assert gone(child)


def test_a_killed_shim_takes_its_server_along(tmp_path: Path) -> None:
    with Supervisor(tmp_path / "logs", grace_s=0.2) as supervisor:
        server = supervisor.start(ServerSpec(name="stubborn", argv=python(STUBBORN, str(tmp_path / "pids"))))
        main, child = read_pids(tmp_path / "pids")
        os.kill(server.processes()[0].pid, signal.SIGKILL)
        eventually(lambda: gone(main))
        os.kill(child, signal.SIGKILL)


def test_stop_may_be_called_again(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path)
    supervisor.start(ServerSpec(name="sleeper", argv=python("import time; time.sleep(600)")))
    supervisor.stop()
    supervisor.stop()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_the_process_that_started_it(tmp_path: Path, number: signal.Signals) -> None:
    code = f"""
import sys, time
from pathlib import Path
from kvpush.demo.supervisor import ServerSpec, Supervisor
supervisor = Supervisor(Path({str(tmp_path / "logs")!r}), grace_s=0.2)
supervisor.start(ServerSpec(name="stubborn", argv=(sys.executable, "-c", {STUBBORN!r}, {str(tmp_path / "pids")!r})))
time.sleep(600)
"""
    demo = subprocess.Popen(python(code))
    try:
        pids = read_pids(tmp_path / "pids")
        demo.send_signal(number)
        demo.wait(30)
        eventually(lambda: all(gone(pid) for pid in pids))
    finally:
        demo.kill()
        demo.wait()


def test_ports_are_given_once() -> None:
    pick = PortPicker()
    ports = [pick() for _ in range(50)]
    assert len(set(ports)) == 50
    assert all(1024 <= port <= 65535 for port in ports)


def test_the_first_exception_of_a_log_is_found() -> None:
    prefix = "(EngineCore pid=15465) ERROR 11-29 16:36:39 [core.py:1510] "
    log = (
        "(APIServer pid=1) WARNING 11-29 16:36:19 [a.py:2] OSError: is not it\n"
        f"{prefix}Traceback (most recent call last):\n"
        f'{prefix}  File "core.py", line 1, in run\n'
        f"{prefix}    ^^^^\n"
        f"{prefix}kvpush.errors.BackendNotFound: no backend for device type 'cpu'\n"
        "(APIServer pid=1) Traceback (most recent call last):\n"
        "(APIServer pid=1) RuntimeError: see root cause above\n"
    )
    assert first_exception(log) == "kvpush.errors.BackendNotFound: no backend for device type 'cpu'"
    assert first_exception("Traceback (most recent call last):\n  File\n\nValueError: x\n") == "ValueError: x"
    assert first_exception("ValueError: x\n") is None


def test_ports_are_not_those_of_outgoing_connections(tmp_path: Path) -> None:
    limits = tmp_path / "range"
    limits.write_text("32768\t60999\n")
    assert _fixed_ports(limits) == range(10240, 32768)
    limits.write_text("1024\t40000\n")
    assert _fixed_ports(limits) == range(40001, 65536)
    limits.write_text("1024\t65535\n")
    assert len(_fixed_ports(limits)) > 50_000
    assert _fixed_ports(tmp_path / "missing") == range(10240, 32768)
    pick = PortPicker()
    ports = [pick() for _ in range(50)]
    assert len(set(ports)) == 50


async def test_a_kill_takes_everything_with_it_and_a_new_start_has_a_log_of_its_own(tmp_path: Path) -> None:
    with Supervisor(tmp_path / "logs") as supervisor:
        first = supervisor.start(ServerSpec(name="a b", argv=python(STUBBORN, str(tmp_path / "pids"))))
        pids = read_pids(tmp_path / "pids")
        supervisor.kill(first)
        assert all(gone(pid) for pid in pids)
        assert first.exit_status == 128 + signal.SIGKILL
        supervisor.check_alive()
        second = supervisor.start(ServerSpec(name="a b", argv=python("print('again')")))
        assert (first.log_path.name, second.log_path.name) == ("a-b.log", "a-b.2.log")
        supervisor.stop([second])
        assert supervisor.servers == ()


async def test_a_frozen_server_ends_too(tmp_path: Path) -> None:
    with Supervisor(tmp_path / "logs", grace_s=0.2) as supervisor:
        server = supervisor.start(ServerSpec(name="x", argv=python(STUBBORN, str(tmp_path / "pids"))))
        pids = read_pids(tmp_path / "pids")
        server.send_signal(signal.SIGSTOP)
        eventually(lambda: all(psutil.Process(pid).status() == psutil.STATUS_STOPPED for pid in pids))
    assert all(gone(pid) for pid in pids)
