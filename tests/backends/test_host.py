# SPDX-License-Identifier: Apache-2.0
"""kvpush._host: AMX permission and small questions to the system."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvpush import _host
from kvpush._host import AmxState


def test_flags(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu amx_tile amx_bf16\n\nprocessor\t: 1\nflags\t\t: other\n")
    assert _host.cpu_flags(cpuinfo) == {"fpu", "amx_tile", "amx_bf16"}
    cpuinfo.write_text("processor\t: 0\n")
    assert _host.cpu_flags(cpuinfo) == frozenset()
    assert _host.cpu_flags(tmp_path / "missing") == frozenset()


def test_this_host_answers_and_asking_twice_is_harmless() -> None:
    first = _host.request_amx_permission()
    assert first == _host.request_amx_permission()
    assert str(first)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A kernel whose answer a test sets: ``result`` and ``errno``; ``calls`` has what it was asked."""
    state = SimpleNamespace(result=0, errno=0, calls=[])

    def syscall(*args: ctypes.c_long) -> int:
        state.calls.append(tuple(arg.value for arg in args))
        ctypes.set_errno(state.errno)
        return int(state.result)

    monkeypatch.setattr(ctypes, "CDLL", lambda *_args, **_kwargs: SimpleNamespace(syscall=syscall_object(syscall)))
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(_host, "cpu_flags", lambda: frozenset({"amx_tile"}))
    return state


def syscall_object(function: object) -> object:
    """A function that takes attributes, as ctypes' do."""

    class Syscall:
        restype = None

        def __call__(self, *args: object) -> object:
            return function(*args)  # type: ignore[operator]

    return Syscall()


def test_granted(kernel: SimpleNamespace) -> None:
    status = _host.request_amx_permission()
    assert status.state is AmxState.GRANTED
    assert status.safe
    assert kernel.calls == [(158, 0x1023, 18)]


def test_refused(kernel: SimpleNamespace) -> None:
    kernel.result, kernel.errno = -1, 22
    status = _host.request_amx_permission()
    assert (status.state, status.errno, status.safe) == (AmxState.REFUSED, 22, False)
    assert "EINVAL" in str(status)


def test_no_amx_or_another_machine(kernel: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_host, "cpu_flags", lambda: frozenset({"avx512f"}))
    assert _host.request_amx_permission().state is AmxState.NO_AMX
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert _host.request_amx_permission().state is AmxState.NOT_X86_64
    assert kernel.calls == []


def test_distributions_and_libraries() -> None:
    assert _host.distribution_version("pluggy")
    assert _host.distribution_version("kvpush-no-such-distribution") is None
    assert "libkvpush_no_such.so" in _host.shared_library_loads("libkvpush_no_such.so")
    assert _host.shared_library_loads("libc.so.6") == ""
