# SPDX-License-Identifier: Apache-2.0
"""The instances of a storm, what lies between them, and everything that can be done to them."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from kvpush.bench.link import Dropper, Link, LinkSpec, parse_link, places
from kvpush.demo.connectors import Connector, InstanceOptions, Place, plan, roles, with_transfer_config
from kvpush.demo.supervisor import Server, ServerFailed, ServerSpec, Supervisor
from kvpush.errors import KvPushError

__all__ = ["Cluster", "Condition", "Instance", "Network", "RelayFailed", "Relays"]

_RELAY: Final = Path(__file__).with_name("relay.py")
_RELAY_TIMEOUT_S: Final = 20.0
#: Slow enough for transfers to be under way when something happens to them: 4 KiB of KV a token, so 0.3 s for 1,000 tokens.
LINK: Final[LinkSpec] = parse_link("100mbit")
#: The relay of the control channels listens here when everything is on the loopback.
_RELAY_HOST: Final = "127.0.0.2"
_LOOPBACK: Final = "127.0.0.1"


class Network(Enum):
    """What lies between prefill and decode."""

    LOOPBACK = "loopback"
    """The same host: KV goes through shared memory, control channels through relays."""
    NAMESPACES = "namespaces"
    """Two namespaces: KV goes over TCP on a link that can be cut, control channels over the same, and through relays."""


class RelayFailed(KvPushError):
    """The relays of the control channels don't work."""


class Relays(AbstractContextManager["Relays"]):
    """The process that relays control channels. A context manager; the process ends with this one, whatever happens.

    Owner: one thread. Commands block until they are done, which takes a millisecond.

    Args:
        routes: where each relay listens and connects to, as "HOST:PORT".
        prefix: put before the command, to run it in a namespace.
    """

    def __init__(self, routes: Sequence[tuple[str, str]], *, prefix: Sequence[str] = ()) -> None:
        self._argv = [*prefix, sys.executable, "-I", "-S", str(_RELAY), *(f"{listen}={target}" for listen, target in routes)]
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            # Ctrl-C is for who started it: what is healed on the way out still needs the relays.
            start_new_session=True,
        )
        if self._line() != "up":
            self._close()
            raise RelayFailed("the relays of the control channels did not start")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._close()

    def command(self, route: int, mode: str, **how: object) -> None:
        """Tell a relay what to do; see `relay`.

        Args:
            route: its position.
            mode: "pass", "hold" or "cut".
            how: more of the command.

        Raises:
            RelayFailed: it doesn't listen any more.
        """
        assert self._process is not None
        assert self._process.stdin is not None
        line = json.dumps({"route": route, "mode": mode, **how})
        try:
            self._process.stdin.write(line + "\n")
            answer = self._line()
        except OSError as error:
            raise RelayFailed(f"the relays of the control channels are gone: {error}") from error
        if answer != line:
            raise RelayFailed("the relays of the control channels are gone")

    def _line(self) -> str:
        assert self._process is not None
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def _close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            # A command that a dead process never took.
            with suppress(OSError):
                process.stdin.close()
        try:
            process.wait(2.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_RELAY_TIMEOUT_S)
        if process.stdout is not None:
            process.stdout.close()


class Condition(Enum):
    """What an instance is in."""

    UP = auto()
    FROZEN = auto()
    DOWN = auto()


@dataclass(slots=True)
class Instance:
    """One instance through all its lives.

    Args:
        role: "prefill", "prefill-2" or "decode".
        spec: how it is started, each time.
        url: of its HTTP server.
        pinned: its engine id is the same in every life.
    """

    role: str
    spec: ServerSpec
    url: str
    pinned: bool = False
    server: Server | None = None
    condition: Condition = Condition.DOWN
    logs: list[Path] = field(default_factory=list)
    outages: list[tuple[float, float | None]] = field(default_factory=list)
    """When it was down, in seconds of the storm; the end of the last one is None while it is."""

    @property
    def is_decode(self) -> bool:
        """Whether it decodes."""
        return self.role == "decode"


class Cluster:
    """Prefill instances, a decode instance, the router, and what lies between them. A context manager: leaving it ends all.

    Owner: the event loop's thread. Methods that block do so for milliseconds, but for leaving it (seconds).

    Args:
        name: of the topology; names servers and logs.
        prefills: number of prefill instances.
        network: what lies between.
        options: of the instances.
        cores: to use.
        pick_port: gives a free port.
        log_dir: folder for logs.
        pinned: roles whose engine id is the same in every life.
    """

    def __init__(
        self,
        name: str,
        *,
        prefills: int,
        network: Network,
        options: InstanceOptions,
        cores: Sequence[int],
        pick_port: Callable[[], int],
        log_dir: Path,
        pinned: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.network = network
        self.link: Link | None = None
        self.dropper: Dropper | None = None
        self.relays: Relays | None = None
        self.instances: dict[str, Instance] = {}
        self.router: Server | None = None
        self._prefills = prefills
        self._options = options
        self._cores = cores
        self._pick_port = pick_port
        self._pinned = pinned
        self._stack = ExitStack()
        self.supervisor = Supervisor(log_dir)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            if self.network is Network.NAMESPACES:
                self.link = stack.enter_context(Link(LINK))
                self.dropper = self.link.find_dropper()
            self._plan()
            prefix = self.link.enter_prefix("p") if self.link is not None else ()
            self.relays = stack.enter_context(Relays(self._routes, prefix=prefix))
            # Last in, first out: servers end before what they talk over.
            stack.enter_context(self.supervisor)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def _plan(self) -> None:
        names = roles(Connector.KVPUSH, self._prefills)
        at: Mapping[str, Place] = {role: Place(transfer_host=_RELAY_HOST) for role in names}
        if self.link is not None:
            at = places(self.link, names)
        # What prefill binds to is reached through the relay only.
        at = {role: place if role == "decode" else replace(place, control_host=_LOOPBACK) for role, place in at.items()}
        made = plan(
            Connector.KVPUSH,
            self._options,
            cores=self._cores,
            pick_port=self._pick_port,
            places=at,
            prefills=self._prefills,
        )
        self.url = made.url
        self._router_spec = replace(made.router, name=f"{self.name} router")
        self._routes = []
        for role, spec in made.instances.items():
            pinned = role in self._pinned
            if pinned:
                spec = with_transfer_config(spec, engine_id=f"pinned-{self.name}-{role}")
            self.instances[role] = Instance(role, replace(spec, name=f"{self.name} {role}"), made.urls[role], pinned)
            if role != "decode":
                host, port = made.controls[role]
                self._routes.append((f"{host}:{port}", f"{_LOOPBACK}:{port}"))

    @property
    def prefills(self) -> list[Instance]:
        """The prefill instances; the relay of the first is route 0."""
        return [one for one in self.instances.values() if not one.is_decode]

    @property
    def decodes(self) -> list[Instance]:
        """The decode instances."""
        return [one for one in self.instances.values() if one.is_decode]

    def start(self, instance: Instance) -> Server:
        """Start an instance, or start it again on the same addresses; return at once.

        Args:
            instance: one that is down.

        Returns:
            Its server, not healthy yet.
        """
        instance.server = self.supervisor.start(instance.spec)
        instance.logs.append(instance.server.log_path)
        return instance.server

    def start_router(self) -> Server:
        """Start the router: once the instances are up, as it would leave them out for a while otherwise."""
        self.router = self.supervisor.start(self._router_spec)
        return self.router

    async def wait_up(self, instance: Instance, *, timeout_s: float) -> None:
        """Wait until a started instance takes requests.

        Args:
            instance: that was started.
            timeout_s: how long.

        Raises:
            ServerFailed: it has ended, or is not up in time.
        """
        server = instance.server
        assert server is not None
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            try:
                await self.supervisor.wait_ready([server], timeout_s=max(0.0, deadline - loop.time()))
            except ServerFailed:
                # Perhaps another one has ended, which is not this method's business.
                if server.exit_status is None and loop.time() < deadline:
                    await asyncio.sleep(0.25)
                    continue
                raise
            instance.condition = Condition.UP
            return

    def kill(self, instance: Instance, *, engine_only: bool = False) -> None:
        """SIGKILL an instance.

        Args:
            instance: one that runs.
            engine_only: only what the HTTP server has started, so that the server finds itself without an engine and ends;
                see `bury`.
        """
        assert instance.server is not None
        instance.condition = Condition.DOWN
        if engine_only:
            instance.server.send_signal(signal.SIGKILL, but_the_first=True)
        else:
            self.supervisor.kill(instance.server)

    async def bury(self, instance: Instance, *, timeout_s: float) -> bool:
        """Wait until the HTTP server of a killed engine has ended, and end it if it doesn't.

        Args:
            instance: that was killed.
            timeout_s: how long it may take.

        Returns:
            Whether it ended by itself.
        """
        server = instance.server
        assert server is not None
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while server.exit_status is None and loop.time() < deadline:  # noqa: ASYNC110 - a process says nothing
            await asyncio.sleep(0.1)
        ended = server.exit_status is not None
        self.supervisor.kill(server)
        return ended

    def freeze(self, instance: Instance) -> None:
        """SIGSTOP an instance."""
        assert instance.server is not None
        instance.condition = Condition.FROZEN
        instance.server.send_signal(signal.SIGSTOP)

    def thaw(self, instance: Instance) -> None:
        """SIGCONT an instance."""
        assert instance.server is not None
        instance.server.send_signal(signal.SIGCONT)
        if instance.condition is Condition.FROZEN:
            instance.condition = Condition.UP
