# SPDX-License-Identifier: Apache-2.0
"""Small questions to the operating system that have no home in a library: AMX permission, distributions, device files."""

from __future__ import annotations

import ctypes
import enum
import errno
import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

__all__ = [
    "AmxState",
    "AmxStatus",
    "cpu_flags",
    "distribution_version",
    "nixl_has_plugin",
    "nixl_version",
    "request_amx_permission",
    "shared_library_loads",
]

# Source: Linux, arch/x86/include/uapi/asm/prctl.h and arch/x86/include/asm/fpu/types.h.
_SYS_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18


class AmxState(enum.StrEnum):
    """How asking the kernel for AMX's tile registers ended."""

    NOT_X86_64 = "not-x86_64"
    NO_AMX = "no-amx"
    GRANTED = "granted"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class AmxStatus:
    """Whether this process may use AMX.

    Args:
        state: How it ended.
        errno: The kernel's error number when refused; 0 otherwise.
    """

    state: AmxState
    errno: int = 0

    @property
    def safe(self) -> bool:
        """No kernel that this CPU's flags select can die of SIGILL: AMX is granted, or not there at all."""
        return self.state is not AmxState.REFUSED

    def __str__(self) -> str:
        match self.state:
            case AmxState.NOT_X86_64:
                return "not an x86-64 Linux"
            case AmxState.NO_AMX:
                return "this CPU has no AMX"
            case AmxState.GRANTED:
                return "AMX is there and this process may use it"
            case AmxState.REFUSED:
                name = errno.errorcode.get(self.errno, str(self.errno))
                return f"AMX is there but the kernel refuses its use ({name}: {os.strerror(self.errno)})"


def request_amx_permission() -> AmxStatus:
    """Ask the kernel to let this process use AMX's tile registers.

    Without it the first AMX instruction is a SIGILL. The permission holds for the whole process and its children by fork,
    and asking twice does no harm. **Owner** any thread; call it before other threads start. Doesn't block.

    Returns:
        How it ended. Never raises.
    """
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        return AmxStatus(AmxState.NOT_X86_64)
    if "amx_tile" not in cpu_flags():
        return AmxStatus(AmxState.NO_AMX)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    ctypes.set_errno(0)
    result = libc.syscall(
        ctypes.c_long(_SYS_ARCH_PRCTL), ctypes.c_long(_ARCH_REQ_XCOMP_PERM), ctypes.c_long(_XFEATURE_XTILEDATA)
    )
    if result == 0:
        return AmxStatus(AmxState.GRANTED)
    return AmxStatus(AmxState.REFUSED, ctypes.get_errno())


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Feature flags of the first CPU; empty where the system doesn't tell."""
    try:
        with cpuinfo.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                key, _, value = line.partition(":")
                if key.strip() in ("flags", "Features"):
                    return frozenset(value.split())
    except OSError:
        pass
    return frozenset()


def distribution_version(name: str) -> str | None:
    """Version of an installed distribution, without importing it; None when it isn't there."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def shared_library_loads(name: str) -> str:
    """Try to load a shared library.

    Returns:
        The loader's complaint; empty when it was loaded.
    """
    try:
        ctypes.CDLL(name)
    except OSError as error:
        return str(error)
    return ""


_NIXL_DISTRIBUTIONS = ("nixl", "nixl-cu13", "nixl-cu12")


def nixl_version() -> str | None:
    """Version of the installed nixl, without importing it; None when there is none."""
    return next((version for name in _NIXL_DISTRIBUTIONS if (version := distribution_version(name))), None)


def nixl_has_plugin(plugin: str) -> bool:
    """Whether an installed nixl ships a plugin, such as ``UCX``, or one lies in ``NIXL_PLUGIN_DIR``.

    Looks at file names only: the plugin may still fail to load.
    """
    wanted = f"libplugin_{plugin}.so"
    extra = os.environ.get("NIXL_PLUGIN_DIR")
    if extra and (Path(extra) / wanted).exists():
        return True
    for name in _NIXL_DISTRIBUTIONS:
        try:
            files = metadata.files(name)
        except metadata.PackageNotFoundError:
            continue
        if any(file.name == wanted for file in files or ()):
            return True
    return False
