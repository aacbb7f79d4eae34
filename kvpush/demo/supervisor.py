# SPDX-License-Identifier: Apache-2.0
"""Starts servers, waits until they are healthy, and ends them with all that they started."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self, TypeVar

import aiohttp
import psutil  # type: ignore[import-untyped]

from kvpush.errors import KvPushError

__all__ = [
    "PortPicker",
    "Server",
    "ServerFailed",
    "ServerSpec",
    "Supervisor",
    "available_cores",
    "core_shares",
    "process_cpu_seconds",
]

_K = TypeVar("_K")

_SHIM: Final = Path(__file__).with_name("shim.py")
_POLL_S: Final = 0.25
_PROBE_TIMEOUT_S: Final = 2.0
_TAIL_LINES: Final = 20
#: "(EngineCore pid=7) ERROR 11-29 16:36:39 [core.py:1510] " or a part of it.
_PREFIX: Final = re.compile(r"^(\([^()]* pid=\d+\) ?)?((DEBUG|INFO|WARNING|ERROR|CRITICAL) [\d: .-]+\[[^\]]*\] ?)?")


class ServerFailed(KvPushError):
    """A server ended, or did not become healthy in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """What to start.

    Args:
        name: shown to the user, and the log's file name.
        argv: the command.
        env: variables set on top of this process's environment; the value None removes one.
        cpus: cores that every thread of the server may use; all of this process's when None.
        health_url: answers 200 once the server takes requests; None means "healthy once started".
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str | None] = field(default_factory=dict)
    cpus: tuple[int, ...] | None = None
    health_url: str | None = None


class Server:
    """A started server. Made by `Supervisor.start`.

    Owner: one thread; no method blocks.
    """

    def __init__(self, spec: ServerSpec, log_path: Path, shim: subprocess.Popen[bytes]) -> None:
        self.spec = spec
        self.log_path = log_path
        self.started_at = time.monotonic()
        self.ready_after_s: float | None = None
        self._shim = shim

    @property
    def name(self) -> str:
        """Its name, from the spec."""
        return self.spec.name

    @property
    def exit_status(self) -> int | None:
        """None while it runs, then its status (128 + number if a signal ended it)."""
        return self._shim.poll()

    def processes(self) -> list[psutil.Process]:
        """Every process of the server, its shim included; empty once it has ended."""
        try:
            shim = psutil.Process(self._shim.pid)
            return [shim, *shim.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def own_processes(self) -> list[psutil.Process]:
        """What the command started: every process but the shim."""
        return self.processes()[1:]

    def send_signal(self, number: int, *, but_the_first: bool = False) -> None:
        """Send a signal to what the command started, and not to the shim, which goes on watching.

        Args:
            number: of the signal, such as SIGSTOP.
            but_the_first: only to what the command's own process has started in turn.
        """
        for process in self.own_processes()[but_the_first:]:
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                continue

    def cpu_seconds(self) -> float:
        """CPU time that the live threads of all its processes have used, in seconds."""
        return sum(process_cpu_seconds(process.pid) for process in self.processes())

    def log_tail(self, lines: int = _TAIL_LINES) -> str:
        """The last lines of its log."""
        try:
            text = self.log_path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-lines:])

    def failed(self, what: str) -> ServerFailed:
        """An error that says what happened, and shows the first exception and the end of the log.

        Args:
            what: follows the server's name in the message.

        Returns:
            The error, to be raised.
        """
        try:
            cause = first_exception(self.log_path.read_text(encoding="utf-8", errors="replace"))
        except OSError:
            cause = None
        first = f" First exception: {cause}" if cause else ""
        return ServerFailed(f"{self.name} {what}.{first}\nThe end of its log ({self.log_path}):\n{self.log_tail()}")


def first_exception(log: str) -> str | None:
    """The first exception that a log reports with a traceback: vLLM's last one only says that there was another.

    Args:
        log: text of a log; lines may have the prefixes of vLLM's processes and logger.

    Returns:
        Its type and message in one line; None if there is no traceback.
    """
    in_traceback = False
    for line in log.splitlines():
        text = _PREFIX.sub("", line)
        if text.startswith("Traceback (most recent call last):"):
            in_traceback = True
        elif in_traceback and text.strip() and not text[0].isspace():
            return text.strip()
    return None


def process_cpu_seconds(pid: int) -> float:
    """CPU time of the live threads of a process.

    From `schedstat`, in nanoseconds: `cpu_times` counts in ticks of 10 ms, a fifth of a percent of a 5 s window.

    Args:
        pid: of the process.

    Returns:
        Seconds; 0 if there is no such process.
    """
    total_ns = 0
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            total_ns += int((task / "schedstat").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        try:
            times = psutil.Process(pid).cpu_times()
        except psutil.Error:
            return 0.0
        return float(times.user + times.system)
    return total_ns / 1e9


async def core_shares(servers: Mapping[_K, Server], seconds: float) -> dict[_K, float]:
    """Look for a while at how much CPU time servers use.

    Args:
        servers: by whatever names them.
        seconds: how long; above 0.

    Returns:
        By the same, what all processes of a server used of one core.
    """
    loop = asyncio.get_running_loop()
    before = {key: (loop.time(), server.cpu_seconds()) for key, server in servers.items()}
    await asyncio.sleep(seconds)
    shares = {}
    for key, server in servers.items():
        at, used = before[key]
        shares[key] = max(0.0, server.cpu_seconds() - used) / (loop.time() - at)
    return shares


class Supervisor:
    """Owns the servers of one run.

    A context manager: leaving it ends every server. Should this process die without leaving it, each server's
    shim notices and ends the server (see `shim`).

    Args:
        log_dir: folder for the logs, one file a server; made if missing.
        grace_s: how long a server may take to end by itself after SIGTERM.
    """

    def __init__(self, log_dir: Path, *, grace_s: float = 5.0) -> None:
        self._log_dir = log_dir
        self._grace_s = grace_s
        self._servers: list[Server] = []
        self._starts: dict[str, int] = {}
        log_dir.mkdir(parents=True, exist_ok=True)

    @property
    def servers(self) -> tuple[Server, ...]:
        """Every server that was started and not stopped, in order."""
        return tuple(self._servers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def start(self, spec: ServerSpec) -> Server:
        """Start a server; return at once.

        Args:
            spec: what to start.

        Returns:
            The server, not healthy yet.

        Raises:
            OSError: the shim can't be started. A command that can't be run shows as a dead server.
        """
        env = dict(os.environ)
        for name, value in spec.env.items():
            if value is None:
                env.pop(name, None)
            else:
                env[name] = value
        log_path = self._log_path(spec.name)
        cpus = ",".join(map(str, spec.cpus)) if spec.cpus is not None else ""
        log: IO[bytes]
        with log_path.open("wb") as log:
            shim = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_SHIM), cpus, str(self._grace_s), *spec.argv],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )
        server = Server(spec, log_path, shim)
        self._servers.append(server)
        return server

    def _log_path(self, name: str) -> Path:
        """A log of its own for each time that a server is started."""
        stem = name.replace(" ", "-")
        self._starts[stem] = number = self._starts.get(stem, 0) + 1
        return self._log_dir / (f"{stem}.log" if number == 1 else f"{stem}.{number}.log")

    async def wait_ready(
        self,
        servers: Sequence[Server],
        *,
        timeout_s: float,
        on_ready: Callable[[Server], None] = lambda _: None,
    ) -> None:
        """Wait until all of the servers are healthy.

        Args:
            servers: what to wait for.
            timeout_s: for all of them together.
            on_ready: called for each as it becomes healthy; its `ready_after_s` is set by then.

        Raises:
            ServerFailed: any server of this supervisor has ended, or one of these is not healthy in time.
        """
        deadline = time.monotonic() + timeout_s
        waiting = list(servers)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_PROBE_TIMEOUT_S)) as session:
            while waiting:
                self.check_alive()
                # At once: vLLM listens long before it answers, so a probe may well take its whole timeout.
                answers = await asyncio.gather(*(_healthy(session, server.spec.health_url) for server in waiting))
                for server, healthy in zip(list(waiting), answers, strict=True):
                    if healthy:
                        server.ready_after_s = time.monotonic() - server.started_at
                        waiting.remove(server)
                        on_ready(server)
                if waiting:
                    if time.monotonic() >= deadline:
                        raise waiting[0].failed(f"was not healthy within {timeout_s:.0f} s")
                    await asyncio.sleep(_POLL_S)

    def check_alive(self) -> None:
        """Raise if a server has ended by itself.

        Raises:
            ServerFailed: names the server, its status and the end of its log.
        """
        for server in self._servers:
            if (status := server.exit_status) is not None:
                raise server.failed(f"ended with status {status}")

    def kill(self, server: Server) -> None:
        """End a server as a crash would: SIGKILL to all that its command started. It is not this supervisor's any more.

        Blocks for milliseconds.

        Args:
            server: of this supervisor; may have ended already.
        """
        self._forget(server)
        server.send_signal(signal.SIGKILL)
        self._end([server])

    def _forget(self, server: Server) -> None:
        # In one step: `stop` may run in a thread of its own while others are started.
        with suppress(ValueError):
            self._servers.remove(server)

    def stop(self, servers: Sequence[Server] | None = None) -> None:
        """End servers and wait until all their processes are gone. May be called again.

        Blocks for the grace period and about two seconds at most.

        Args:
            servers: which ones; all when None.
        """
        ending = list(self._servers if servers is None else servers)
        for server in ending:
            self._forget(server)
        self._end(ending)

    def _end(self, servers: Sequence[Server]) -> None:
        # Seen now: a process of a shim that someone killed has no parent to be found by afterwards.
        known = [process for server in servers for process in server.processes()]
        for server in servers:
            shim = server._shim
            if shim.stdin is not None:
                shim.stdin.close()
        deadline = time.monotonic() + self._grace_s + 2.0
        for server in servers:
            try:
                server._shim.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                known += server.processes()
        for process in known:
            try:
                # psutil compares the start time too: a pid that was given away is not touched.
                process.kill()
            except psutil.NoSuchProcess:
                pass
        for server in servers:
            server._shim.wait()


async def _healthy(session: aiohttp.ClientSession, url: str | None) -> bool:
    if url is None:
        return True
    try:
        async with session.get(url) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False


class PortPicker:
    """Hands out free TCP ports of the loopback address, each once.

    A port is free when handed out; it isn't held, since the server binds it itself, up to a minute later. So ports are taken
    from outside the range from which the kernel serves outgoing connections: those come and go all the time.
    """

    def __init__(self) -> None:
        self._given: set[int] = set()
        self._choices = _fixed_ports()
        self._random = random.Random()

    def __call__(self) -> int:
        """Pick a port.

        Returns:
            A port number.

        Raises:
            OSError: none is free.
        """
        for _ in range(1000):
            port = self._random.choice(self._choices)
            if port in self._given:
                continue
            with socket.socket() as probe:
                try:
                    probe.bind(("127.0.0.1", port))
                except OSError:
                    continue
            self._given.add(port)
            return port
        raise OSError("no free TCP port on 127.0.0.1")


def _fixed_ports(limits: Path = Path("/proc/sys/net/ipv4/ip_local_port_range")) -> Sequence[int]:
    """Unprivileged ports that the kernel doesn't give to outgoing connections; all of them where nothing is left or known."""
    try:
        low, high = map(int, limits.read_text().split())
    except (OSError, ValueError):
        low, high = 32768, 60999
    below, above = range(10240, low), range(high + 1, 65536)
    largest = max(below, above, key=len)
    return largest if len(largest) >= 256 else range(10240, 65536)


def available_cores() -> tuple[int, ...]:
    """The cores that this process may use, ascending."""
    return tuple(sorted(os.sched_getaffinity(0)))
