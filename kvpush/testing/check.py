# SPDX-License-Identifier: Apache-2.0
"""``kvpush backends check NAME``: the contract suite on an installed plugin, and a report of what it keeps.

The suite runs in a process of its own, so that a plugin which crashes, hangs or leaves threads behind costs only the rest of
its own report. Needs pytest; importing this module does not.
"""

from __future__ import annotations

import contextlib
import enum
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from kvpush.backends.base import BackendPlugin
from kvpush.backends.manager import BackendManager, Discovered
from kvpush.errors import BackendNotFound, ConfigError

__all__ = ["NOT_DECLARED", "CheckReport", "Promise", "Subject", "Verdict", "check_backend"]

NOT_DECLARED = "does not declare"
"""In the reason of a skip: what is tested there is optional, and the plugin's card doesn't promise it."""

STALL_S = 180.0
"""A test that takes longer than this hangs. The suite's own waits end after 30 s."""

_AREAS = {"TestBackend": "backend", "TestTransport": "transport", "TestEndpoint": "requests"}
_MAX_TRACE_CHARS = 8000


class Verdict(enum.StrEnum):
    """What became of one promise."""

    HOLDS = "holds"
    FAILS = "fails"
    NOT_PROMISED = "not promised"
    UNCHECKED = "unchecked"


@dataclass(frozen=True, slots=True)
class Promise:
    """One test of the contract suite.

    Args:
        area: ``plugin`` (it loads), ``backend``, ``transport`` or ``requests``.
        text: What is promised.
        verdict: What became of it.
        detail: How it fails, or why it could not be checked; empty where it holds.
        trace: Traceback of a failure; empty otherwise.
    """

    area: str
    text: str
    verdict: Verdict
    detail: str = ""
    trace: str = ""


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What a plugin keeps of its contract, on this host.

    Args:
        backend: Its name.
        distribution: What ships it.
        promises: In the order of the suite.
    """

    backend: str
    distribution: str
    promises: tuple[Promise, ...]

    def num(self, verdict: Verdict) -> int:
        """Promises of which that became."""
        return sum(promise.verdict is verdict for promise in self.promises)

    @property
    def exit_code(self) -> int:
        """0: all hold; 1: some fail; 2: none fails, but some could not be checked here."""
        if self.num(Verdict.FAILS):
            return 1
        return 2 if self.num(Verdict.UNCHECKED) else 0

    @property
    def summary(self) -> str:
        """One line for people."""
        words = {Verdict.HOLDS: "hold", Verdict.FAILS: "fail"}
        counts = [f"{self.num(verdict)} {words.get(verdict, verdict)}" for verdict in Verdict if self.num(verdict)]
        return f"{self.backend}: {', '.join(counts)}"

    def as_json(self) -> dict[str, object]:
        """The report as plain JSON types."""
        return {
            "backend": self.backend,
            "distribution": self.distribution,
            "ok": self.exit_code == 0,
            "exit_code": self.exit_code,
            "counts": {str(verdict): self.num(verdict) for verdict in Verdict},
            "promises": [
                {"area": p.area, "promise": p.text, "verdict": str(p.verdict), "detail": p.detail, "trace": p.trace}
                for p in self.promises
            ],
        }


def check_backend(
    name: str,
    options: Mapping[str, object] | None = None,
    *,
    manager: BackendManager | None = None,
    stall_s: float = STALL_S,
) -> CheckReport:
    """Run the contract suite on an installed plugin. Blocks for seconds; longer, if tests of it run into their deadlines.

    Args:
        name: Its name.
        options: ``backend_options`` to test with.
        manager: Where the plugin is looked for first; the child process always looks at what is installed.
        stall_s: How long one test may take.

    Raises:
        BackendNotFound: there is no plugin of that name, broken or not.
        ConfigError: pytest is not installed.
    """
    manager = manager or BackendManager()
    entry = _entry(name, manager)
    if entry.plugin is None:
        return _report(entry, Promise("plugin", "it loads", Verdict.FAILS, entry.error or "no plugin"))
    if importlib.util.find_spec("pytest") is None:
        raise ConfigError("the contract suite needs pytest, which is not installed: pip install pytest")
    with tempfile.TemporaryDirectory(prefix="kvpush-check-") as folder:
        run = _Run(Path(folder))
        run.start(name, options or {})
        run.watch(stall_s)
        return _report(entry, Promise("plugin", "it loads", Verdict.HOLDS), *run.promises())


def _entry(name: str, manager: BackendManager) -> Discovered:
    found = manager.discover()
    named = [entry for entry in found if entry.name == name]
    if not named:
        manager.get(name)  # says which name is close
        raise BackendNotFound(f"no backend is called {name!r}")
    # Of several with one name the usable one has it; the others are broken, and listed as such.
    return next((entry for entry in named if entry.plugin is not None), named[0])


def _report(entry: Discovered, *promises: Promise) -> CheckReport:
    return CheckReport(entry.name, entry.distribution, promises)


class _Run:
    """The child process, and what it has told so far: one JSON object a line, in a file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._results = folder / "results"
        self._output = folder / "output"
        self._results.touch()
        self._ending = ""
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, name: str, options: Mapping[str, object]) -> None:
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("KVPUSH_", "PYTEST_"))}
        environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        script = "import sys; from kvpush.testing.check import main; sys.exit(main(*sys.argv[1:]))"
        command = [sys.executable, "-c", script, name, json.dumps(options), str(self._results)]
        with open(self._output, "wb") as output:
            self._process = subprocess.Popen(
                command,
                env=environment,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def watch(self, stall_s: float) -> None:
        """Wait for the end, or for a test that takes too long."""
        assert self._process is not None
        size, since = -1, time.monotonic()
        try:
            while True:
                try:
                    status = self._process.wait(0.1)
                except subprocess.TimeoutExpired:
                    now, new_size = time.monotonic(), self._results.stat().st_size
                    if new_size != size:
                        size, since = new_size, now
                    elif now - since > stall_s:
                        self._ending = f"it did not end within {stall_s:g} s"
                        return
                    continue
                if status < 0:
                    self._ending = f"the process died of {signal.Signals(-status).name}"
                elif status > 1:  # 0 and 1 are pytest's: tests ran and passed, or some failed
                    self._ending = f"the process ended with status {status}"
                return
        finally:
            with contextlib.suppress(ProcessLookupError):  # also what the plugin may have started
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def promises(self) -> Iterator[Promise]:
        """What was found. Tests that did not come to an end get how the process ended instead."""
        collected: list[dict[str, Any]] = []
        ended: dict[str, dict[str, Any]] = {}
        running = ""
        with open(self._results, encoding="utf-8") as file:
            for line in file:
                with contextlib.suppress(json.JSONDecodeError):  # cut off by the end of the process
                    message = json.loads(line)
                    collected += message.get("collected", ())
                    running = message.get("started", running)
                    if "ended" in message:
                        ended[message["ended"]] = message
                        running = ""
        for test in collected:
            result = ended.get(test["id"])
            if result is not None:
                yield Promise(test["area"], test["text"], Verdict(result["verdict"]), result["detail"], result["trace"])
            elif test["id"] == running:
                yield Promise(test["area"], test["text"], Verdict.FAILS, self._ending or "it did not end", self._tail())
            else:
                yield Promise(test["area"], test["text"], Verdict.UNCHECKED, f"the suite stopped: {self._ending}")
        if not collected or (self._ending and not running and len(ended) == len(collected)):
            what = "the suite can be run" if not collected else "the process ends in order after the suite"
            yield Promise("plugin", what, Verdict.FAILS, self._ending or "nothing was collected", self._tail())

    def _tail(self) -> str:
        return self._output.read_text(encoding="utf-8", errors="replace")[-_MAX_TRACE_CHARS:]


class Subject:
    """In the child: the plugin under test, registered with pytest; writes down what becomes of each test.

    Args:
        plugin: The plugin.
        options: ``backend_options`` to test with.
        results: Where to write.
    """

    PLUGIN_NAME = "kvpush-check-subject"

    def __init__(self, plugin: BackendPlugin, options: Mapping[str, object], results: TextIO) -> None:
        self.plugin = plugin
        self.options = options
        self._results = results
        self._parts: dict[str, list[Any]] = {}

    def _say(self, **message: object) -> None:
        self._results.write(json.dumps(message) + "\n")
        self._results.flush()

    def pytest_collection_finish(self, session: Any) -> None:
        """pytest's hook."""
        self._say(
            collected=[
                {
                    "id": item.nodeid,
                    "area": _AREAS.get(item.cls.__name__ if item.cls else "", "plugin"),
                    "text": item.name.removeprefix("test_").replace("_", " "),
                }
                for item in session.items
            ]
        )

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """pytest's hook."""
        self._parts[nodeid] = []
        self._say(started=nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """pytest's hook: one of set-up, call and tear-down has ended."""
        self._parts[report.nodeid].append(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """pytest's hook."""
        parts = self._parts.pop(nodeid)
        verdict, detail, trace = Verdict.HOLDS, "", ""
        for part in parts:
            if part.failed:
                crash = getattr(part.longrepr, "reprcrash", None)
                detail = f"{crash.message} ({Path(crash.path).name}:{crash.lineno})" if crash else str(part.longrepr)
                verdict, trace = Verdict.FAILS, part.longreprtext[-_MAX_TRACE_CHARS:]
                break
            if part.skipped:
                detail = str(part.longrepr[2]).removeprefix("Skipped: ")
                verdict = Verdict.NOT_PROMISED if NOT_DECLARED in detail else Verdict.UNCHECKED
        self._say(ended=nodeid, verdict=verdict, detail=detail, trace=trace)


def main(name: str, options: str, results: str) -> int:
    """The child process: run the suite, and write what becomes of it into a file."""
    import pytest

    suite = importlib.util.find_spec("kvpush.testing.installed")
    assert suite is not None
    assert suite.origin is not None
    with open(results, "a", encoding="utf-8") as file:
        subject = Subject(BackendManager().get(name), json.loads(options), file)

        class Register:
            @staticmethod
            def pytest_configure(config: Any) -> None:
                config.pluginmanager.register(subject, Subject.PLUGIN_NAME)

        arguments = ["-q", "-c", os.devnull, "--rootdir", os.getcwd(), "-p", "no:cacheprovider", "-p", "kvpush.testing.plugin"]
        return int(pytest.main([*arguments, suite.origin], plugins=[Register()]))
