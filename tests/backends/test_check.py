# SPDX-License-Identifier: Apache-2.0
"""``kvpush backends check``: a good plugin passes, and each kind of broken one is found out and named."""

from __future__ import annotations

import importlib.util
import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvpush import cli
from kvpush.errors import BackendNotFound, ConfigError
from kvpush.testing.check import CheckReport, Promise, Verdict, check_backend

PLUGIN = '''
import ctypes, os, time
from dataclasses import replace
import numpy as np
from kvpush.backends import hookimpl
from kvpush.backends._host_layout import HostBackend
from kvpush.backends.base import Capability, Probe
from kvpush.backends.loopback import LoopbackFabric, LoopbackPlugin
from kvpush.errors import ConfigError

class Transport:
    """The loopback's, behind a wrapper that a test changes."""
    def __init__(self, inner):
        self.inner = inner
    def __getattr__(self, name):
        return getattr(self.inner, name)

class Backend(HostBackend):
    pass

class Plugin:
    info = replace(LoopbackPlugin().info, name="subject")
    def __init__(self):
        self.fabric = LoopbackFabric()
    def probe(self):
        return Probe(True)
    def create(self, agent_name, options):
        if options:
            raise ConfigError(f"no such options: {sorted(options)}")
        return Backend(self.info, Transport(self.fabric.transport(agent_name)))

{change}

@hookimpl
def kvpush_backend():
    return Plugin()
'''

LATE = '''
from kvpush.core.transport import Region
from kvpush.testing.fabric import Device

class Late:
    """Memory that the device sees through a cache: what a transport has written shows after a fence."""
    all = []
    def __init__(self, size):
        self.bus, self.seen = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
        self.size = size
        self.all.append(self)
    def __getitem__(self, part):
        return self.seen[part].copy()
    def __setitem__(self, part, value):
        self.seen[part] = self.bus[part] = value
    def refresh(self, region):
        lo = max(0, region.address - self.bus.ctypes.data)
        hi = min(self.size, region.address + region.length - self.bus.ctypes.data)
        if lo < hi:
            self.seen[lo:hi] = self.bus[lo:hi]

class LateDevice(Device):
    def allocate(self, num_bytes):
        memory = Late(num_bytes)
        return memory, Region(memory.bus.ctypes.data, num_bytes, keepalive=memory)

class Fence:
    def __init__(self, regions):
        self.regions, self.polls = regions, 0
    def done(self):
        self.polls += 1
        if self.polls == 3:
            for memory in Late.all:
                for region in self.regions:
                    memory.refresh(region)
        return self.polls >= 3

Plugin.test_device = lambda self: LateDevice()
# Digests would see the bytes that the device doesn't see yet.
Plugin.info = replace(Plugin.info, capabilities=frozenset({Capability.IN_PROCESS}))
'''

FENCED = f"""{LATE}
Plugin.info = replace(Plugin.info, capabilities=Plugin.info.capabilities | {{Capability.VISIBILITY_FENCE}})
Backend.start_visibility_fence = lambda self, regions: Fence(list(regions))
"""

SHIFTED = """
def post_write(self, token, peer, src, dst):
    src = src.copy()
    src[1:, 0] = src[:-1, 0]
    self.inner.post_write(token, peer, src, dst)
Transport.post_write = post_write
"""

DEAF_DIGEST = """
Backend.start_digest = lambda self, layers, blocks: type("Done", (), {"poll": lambda self: (b"constant",) * len(layers)})()
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a distribution that ships the plugin ``subject``, with a change to it."""

    def make(change: str = "", module: str | None = None) -> None:
        info = tmp_path / "subject_dist-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: subject-dist\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[kvpush.backends]\nsubject = kvpush_check_subject\n")
        text = PLUGIN.replace("{change}", textwrap.dedent(change)) if module is None else module
        (tmp_path / "kvpush_check_subject.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(__import__("sys").modules, "kvpush_check_subject", raising=False)

    return make


def of(report: CheckReport, verdict: Verdict) -> dict[str, Promise]:
    return {promise.text: promise for promise in report.promises if promise.verdict is verdict}


def test_a_good_plugin_passes(installed: Callable[[str], None]) -> None:
    installed("")
    report = check_backend("subject")
    assert (report.exit_code, report.distribution) == (0, "subject-dist"), report
    assert report.num(Verdict.HOLDS) == len(report.promises) > 35
    assert {promise.area for promise in report.promises} == {"plugin", "backend", "transport", "requests"}
    assert "subject: " in report.summary


LATE_START = """
from kvpush.errors import BackendError
from kvpush.testing.fabric import Device
started = []
class Starting(Device):
    def __init__(self):
        started.append(self)
inner = Plugin.create
def create(self, agent_name, options):
    if not options and not started:
        raise BackendError("the device has not been started")
    return inner(self, agent_name, options)
Plugin.create = create
Plugin.test_device = lambda self: Starting()
"""


def test_a_device_starts_before_working_halves_are_made(installed: Callable[[str], None]) -> None:
    installed(LATE_START)
    report = check_backend("subject")
    assert report.exit_code == 0, of(report, Verdict.FAILS)


def test_bytes_in_the_wrong_place(installed: Callable[[str], None]) -> None:
    installed(SHIFTED)
    report = check_backend("subject")
    assert report.exit_code == 1
    fails = of(report, Verdict.FAILS)
    assert {"shuffled blocks", "many descriptors of many lengths", "one request after the other"} <= fails.keys()
    assert "one descriptor" in of(report, Verdict.HOLDS)
    assert "contract.py" in fails["shuffled blocks"].detail
    assert "assert_array_equal" in fails["shuffled blocks"].trace


def test_a_visibility_fence_that_is_kept(installed: Callable[[str], None]) -> None:
    installed(FENCED)
    report = check_backend("subject")
    assert report.exit_code == 0, of(report, Verdict.FAILS)
    assert set(of(report, Verdict.NOT_PROMISED)) == {
        "digests follow the content and nothing else",
        "a closed backend reads nothing more",
        "rows go into slots and out again",
        "packed blocks arrive whole",
    }


def test_a_visibility_fence_that_is_missing(installed: Callable[[str], None]) -> None:
    installed(LATE)
    fails = of(check_backend("subject"), Verdict.FAILS)
    assert {"one descriptor", "both directions", "a request that waits for its prefill arrives whole"} <= fails.keys()


def test_a_visibility_fence_that_is_not_declared(installed: Callable[[str], None]) -> None:
    installed(LATE + "Backend.start_visibility_fence = lambda self, regions: Fence(list(regions))\n")
    fails = of(check_backend("subject"), Verdict.FAILS)
    # The core asks for no fence that isn't declared, so that whole requests are wrong; single writes are fenced by the suite.
    assert {"fences end", "one request after the other"} <= fails.keys()
    assert "one descriptor" not in fails


def test_a_digest_that_sees_nothing(installed: Callable[[str], None]) -> None:
    installed(DEAF_DIGEST)
    assert "digests follow the content and nothing else" in of(check_backend("subject"), Verdict.FAILS)


def test_a_crash_is_named_and_the_rest_unchecked(installed: Callable[[str], None]) -> None:
    installed("Transport.add_peer = lambda self, metadata: os.abort()")
    report = check_backend("subject")
    assert report.exit_code == 1
    (crashed,) = of(report, Verdict.FAILS).values()
    assert crashed.detail == "the process died of SIGABRT"
    unchecked = of(report, Verdict.UNCHECKED)
    assert unchecked["one request after the other"].detail == "the suite stopped: the process died of SIGABRT"
    assert "the card is complete" in of(report, Verdict.HOLDS)


def test_a_hang_is_named(installed: Callable[[str], None]) -> None:
    installed("Backend.device_fence = lambda self: time.sleep(3600)")
    report = check_backend("subject", stall_s=3.0)
    fails = of(report, Verdict.FAILS)
    assert fails.keys() == {"fences end"}
    assert fails["fences end"].detail == "it did not end within 3 s"
    assert of(report, Verdict.UNCHECKED)["one descriptor"].detail == "the suite stopped: it did not end within 3 s"


def test_a_host_where_it_cannot_run(installed: Callable[[str], None]) -> None:
    installed('Plugin.probe = lambda self: Probe(False, ("no gadget here: buy one",))')
    report = check_backend("subject")
    assert report.exit_code == 2
    assert set(of(report, Verdict.HOLDS)) == {"it loads", "the card is complete", "probing is honest and repeatable"}
    assert {promise.detail for promise in of(report, Verdict.UNCHECKED).values()} == {"can't run here: no gadget here: buy one"}


def test_other_memory_and_none_to_test_with(installed: Callable[[str], None]) -> None:
    installed('Plugin.info = replace(Plugin.info, device_types=("gadget",))')
    report = check_backend("subject")
    assert report.exit_code == 2
    unchecked = of(report, Verdict.UNCHECKED)
    assert unchecked["one descriptor"].detail.endswith(
        "serves gadget and brings no memory to test with: give the plugin a test_device()"
    )
    assert "the working half matches the card" in of(report, Verdict.HOLDS)


def test_a_plugin_that_does_not_load(installed: Callable[..., None]) -> None:
    installed(module="import a_module_that_nobody_has")
    report = check_backend("subject")
    assert (report.exit_code, len(report.promises)) == (1, 1)
    assert "No module named 'a_module_that_nobody_has'" in report.promises[0].detail


def test_options_reach_the_plugin(installed: Callable[[str], None]) -> None:
    installed("")
    report = check_backend("subject", {"speed": 1})
    fails = of(report, Verdict.FAILS)
    assert "no such options: ['speed']" in fails["one descriptor"].detail


def test_an_unknown_name() -> None:
    with pytest.raises(BackendNotFound, match="did you mean 'loopback'"):
        check_backend("lopback")


def test_without_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pytest" else real(name))
    with pytest.raises(ConfigError, match="the contract suite needs pytest, which is not installed: pip install pytest"):
        check_backend("loopback")


def test_the_command(installed: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    installed(SHIFTED)
    result = CliRunner().invoke(cli.app, ["backends", "check", "subject"])
    assert result.exit_code == 1
    assert "fails  transport: shuffled blocks" in result.stdout
    assert "holds  transport: one descriptor" in result.stdout
    answer: dict[str, Any] = json.loads(CliRunner().invoke(cli.app, ["backends", "check", "subject", "--json"]).stdout)
    assert (answer["ok"], answer["exit_code"], answer["backend"]) == (False, 1, "subject")
    verdicts = {item["promise"]: item["verdict"] for item in answer["promises"]}
    assert verdicts["shuffled blocks"] == "fails"
    assert sum(answer["counts"].values()) == len(verdicts)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "no-such-backend"], "error: no backend is called 'no-such-backend'"),
        (["check", "loopback", "--options", "{"], "error: --options is no JSON"),
        (["check", "loopback", "--options", "[]"], "error: --options must be a JSON object"),
        (["--json", "check", "loopback"], "error: --json goes after the subcommand: kvpush backends check --json"),
    ],
)
def test_wrong_use(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(cli.app, ["backends", *arguments])
    assert result.exit_code == 2
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1
