# SPDX-License-Identifier: Apache-2.0
"""TCP relays that can be told to delay, hold or cut what passes through them.

Run by file path with the standard library only: `python -I -S relay.py LISTEN_HOST:PORT=TARGET_HOST:PORT ...`. Says "up" on
standard output once all of them listen, then reads commands from standard input, one JSON object a line, and answers each with
the same line. It ends when standard input does, so it doesn't outlive who started it.

A command names a relay by its position, and what is to become of bytes:

    {"route": 0, "mode": "pass"}                     what has been held goes on its way
    {"route": 0, "mode": "pass", "delay_s": 0.2}     every piece arrives so much later, in order
    {"route": 0, "mode": "hold", "way": "to"}        nothing passes; connections stay. way: to, from or both (the target)
    {"route": 0, "mode": "cut"}                      connections are reset, and new ones too, until the next command

Nothing is ever lost from the middle of a connection: TCP wouldn't do that either.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import sys
from collections import deque

_PIECE = 65536
#: Bytes that one direction of a connection holds before the sender feels it.
_HELD = 4 << 20


class Route:
    """One relay: where it listens, where it connects to, and what it does meanwhile."""

    def __init__(self, listen: tuple[str, int], target: tuple[str, int]) -> None:
        self.listen = listen
        self.target = target
        self.cut = False
        self.delay_s = 0.0
        self.held: frozenset[str] = frozenset()
        self.changed = asyncio.Event()
        self.writers: set[asyncio.StreamWriter] = set()

    def command(self, mode: str, *, way: str = "both", delay_s: float = 0.0) -> None:
        """Do as told from now on."""
        self.cut = mode == "cut"
        self.delay_s = delay_s if mode == "pass" else 0.0
        self.held = frozenset({"to", "from"} if way == "both" else {way}) if mode == "hold" else frozenset()
        self.changed.set()
        self.changed = asyncio.Event()
        if self.cut:
            for writer in list(self.writers):
                reset(writer)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Relay one connection to its end."""
        if self.cut:
            reset(writer)
            return
        try:
            target_reader, target_writer = await asyncio.open_connection(*self.target)
        except OSError:
            reset(writer)
            return
        both = {writer, target_writer}
        self.writers |= both
        pumps = [
            asyncio.create_task(self._pump(reader, target_writer, "to")),
            asyncio.create_task(self._pump(target_reader, writer, "from")),
        ]
        try:
            done, _ = await asyncio.wait(pumps, return_when=asyncio.FIRST_EXCEPTION)
            broken = any(task.exception() is not None for task in done)
        finally:
            for task in pumps:
                task.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            self.writers -= both
        for one in both:
            if broken:
                reset(one)
            else:
                one.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str) -> None:
        pieces: deque[tuple[float, bytes]] = deque()
        loop = asyncio.get_running_loop()
        more, less = asyncio.Event(), asyncio.Event()

        async def take() -> None:
            while True:
                piece = await reader.read(_PIECE)
                pieces.append((loop.time() + self.delay_s, piece))
                more.set()
                if not piece:
                    return
                while sum(len(one) for _, one in pieces) > _HELD:
                    less.clear()
                    await less.wait()

        async def give() -> None:
            while True:
                while not pieces:
                    more.clear()
                    await more.wait()
                due, piece = pieces[0]
                if way in self.held:
                    await self.changed.wait()
                    continue
                if (early := due - loop.time()) > 0:
                    await asyncio.sleep(early)
                    continue
                pieces.popleft()
                less.set()
                if not piece:
                    with contextlib.suppress(OSError):
                        writer.write_eof()
                    return
                writer.write(piece)
                await writer.drain()

        taker, giver = asyncio.create_task(take()), asyncio.create_task(give())
        try:
            await asyncio.gather(taker, giver)
        finally:
            for task in (taker, giver):
                task.cancel()
            await asyncio.gather(taker, giver, return_exceptions=True)


def reset(writer: asyncio.StreamWriter) -> None:
    """Break a connection so that the other side is told."""
    sock = writer.get_extra_info("socket")
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def parse_address(text: str) -> tuple[str, int]:
    """Read ``HOST:PORT``."""
    host, _, port = text.rpartition(":")
    return host, int(port)


async def main(arguments: list[str]) -> None:
    """Relay until standard input ends."""
    routes = []
    for argument in arguments:
        listen, _, target = argument.partition("=")
        route = Route(parse_address(listen), parse_address(target))
        routes.append(route)
        await asyncio.start_server(route.serve, *route.listen)
    loop = asyncio.get_running_loop()
    commands = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    print("up", flush=True)
    while line := await commands.readline():
        command = json.loads(line)
        routes[command.pop("route")].command(**command)
        print(line.decode().strip(), flush=True)


if __name__ == "__main__":
    # Leaving by a signal or by the end of input: what is open is of no interest any more.
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(sys.argv[1:]))
