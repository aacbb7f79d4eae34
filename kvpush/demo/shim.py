# SPDX-License-Identifier: Apache-2.0
"""Parent process of one server: nothing that the server starts outlives it, whatever happens to the demo.

Run by file path with the standard library only (`python -I -S shim.py CPUS GRACE_S COMMAND...`), so it starts in
milliseconds, sleeps in `poll` and costs no CPU. It ends the server's whole process tree when

* its standard input closes, which the kernel does when the demo ends in any way, `kill -9` included;
* it gets SIGTERM, SIGINT or SIGHUP;
* the server itself ends, perhaps leaving an engine core behind.

First SIGTERM to the server's process group, after the grace period SIGKILL. It is a child subreaper, so
descendants that left the process group are found too. Its exit status is the server's.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _die_with_shim() -> None:
    # The last line of defence: someone killed the shim. Safe here, the shim has a single thread.
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _signal_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        pass


def _own_children() -> list[int]:
    try:
        with open("/proc/thread-self/children", encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]
    except (OSError, ValueError):
        return []


def _kill_and_reap() -> None:
    """Kill every descendant that this subreaper is handed, until none is left."""
    while True:
        for pid in _own_children():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def main(argv: list[str]) -> int:
    """Run one server to its end.

    Args:
        argv: cores to pin to ("0,1", or "" for all), grace period in seconds, then the command.

    Returns:
        The server's exit status, 128 + number if a signal ended it.
    """
    cpus, grace_s, command = argv[0], float(argv[1]), argv[2:]
    if cpus:
        os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    # Handlers, not SIG_IGN: those would be inherited by the server.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=_die_with_shim)
    child_fd = os.pidfd_open(child.pid)
    poller = select.poll()
    for fd in (0, wake_read, child_fd):
        poller.register(fd, select.POLLIN | select.POLLHUP)
    if all(fd != child_fd for fd, _ in poller.poll()):
        _signal_group(child.pid, signal.SIGTERM)
        ended = select.poll()
        ended.register(child_fd, select.POLLIN)
        ended.poll(grace_s * 1000)
    # Before the server is waited for: until then nobody else can be given its group id.
    _signal_group(child.pid, signal.SIGKILL)
    status = child.wait()
    _kill_and_reap()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
