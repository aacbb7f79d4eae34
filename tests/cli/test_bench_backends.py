# SPDX-License-Identifier: Apache-2.0
"""kvpush bench backends: everything that can run is measured, what can't is named, and nobody stops the others."""

from __future__ import annotations

import json
import os
import textwrap
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner, Result

from kvpush import cli
from kvpush.backends.cpu import CpuPlugin
from kvpush.backends.manager import Discovered
from kvpush.bench.backends import ways
from kvpush.bench.backends.benches import BENCHES
from kvpush.bench.backends.case import QUICK
from kvpush.bench.backends.page import as_html
from kvpush.bench.backends.plot import Chart, Series, draw
from kvpush.bench.backends.results import Report, Subject
from kvpush.bench.backends.results import Result as Measured


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("KVPUSH_", "UCX_"))]:
        monkeypatch.delenv(name)


def bench(tmp_path: Path, *arguments: str) -> tuple[Result, dict[str, Any]]:
    path = tmp_path / "results.json"
    result = CliRunner().invoke(cli.app, ["bench", "backends", "--quick", "--json", str(path), *arguments])
    assert not isinstance(result.exception, Exception), result.exception
    return result, json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def subjects(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {f"{one['backend']} {one['variant']}".strip(): one for one in report["backends"]}


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Install a plugin that is loopback with some methods replaced, as a distribution of its own."""

    def add(name: str, body: str) -> None:
        site = tmp_path / f"site-{name}"
        info = site / f"kvpush_{name}-0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kvpush-{name}\nVersion: 0\n", encoding="utf-8")
        (info / "entry_points.txt").write_text(f"[kvpush.backends]\n{name} = plugin_{name}\n", encoding="utf-8")
        head = f"""
            import dataclasses, os, time
            from kvpush.backends import hookimpl
            from kvpush.backends.base import Capability
            from kvpush.backends.loopback import LoopbackPlugin

            class Plugin(LoopbackPlugin):
                @property
                def info(self):
                    return dataclasses.replace(super().info, name={name!r})
        """
        tail = """
            @hookimpl
            def kvpush_backend():
                return Plugin()
        """
        text = textwrap.dedent(head) + textwrap.indent(textwrap.dedent(body), "    ") + textwrap.dedent(tail)
        (site / f"plugin_{name}.py").write_text(text, encoding="utf-8")
        monkeypatch.syspath_prepend(str(site))

    return add


def test_the_documented_form(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result, report = bench(tmp_path, "--backend", "loopback", "--html", str(page))
    assert result.exit_code == 0, result.output
    ElementTree.fromstring(page.read_text(encoding="utf-8"))
    assert set(report) == {"host", "quick", "backends", "results"}
    assert report["quick"] is True
    assert {"cpu", "cores", "memory_gib", "kernel", "versions", "load_1m", "load_1m_after"} <= set(report["host"])
    assert subjects(report) == {
        "loopback": {
            "backend": "loopback",
            "variant": "",
            "distribution": "kvpush",
            "status": "measured",
            "reasons": [],
            "processes": 1,
            "left_out": subjects(report)["loopback"]["left_out"],
        }
    }
    assert {one["bench"] for one in report["results"]} == set(BENCHES)
    assert {(one["backend"], one["transport"]) for one in report["results"]} == {("loopback", "loopback")}
    written = [one for one in report["results"] if one["bench"] == "write_bandwidth"]
    orders = {(one["block_bytes"], one["fragmented"], one["coalesced"]): one for one in written}
    assert set(orders) == {(size, *rest) for size in (4096, 65536) for rest in ((False, True), (False, False), (True, False))}
    assert orders[4096, False, True]["descriptors"] == 1
    assert orders[4096, True, False]["descriptors"] == written[0]["num_bytes"] // 4096
    layouts = {one["layout"]: one for one in report["results"] if one["bench"] == "layouts"}
    assert layouts["scatter"]["descriptors"] == 128 * layouts["direct"]["descriptors"]
    assert all(one["us"] > 0 and one["rounds"] > 0 for one in report["results"])
    for one in written:
        assert one["gbytes_per_s"] == pytest.approx(one["num_bytes"] / one["us"] / 1e3, rel=1e-2)
        assert one["ratio"] == pytest.approx(one["gbytes_per_s"] / one["memcpy_gbytes_per_s"], rel=1e-2)


@pytest.mark.nixl
def test_both_ways_of_nixl_in_two_processes(tmp_path: Path) -> None:
    result, report = bench(tmp_path, "--backend", "cpu", "--bench", "write_bandwidth", "--bench", "staging")
    assert result.exit_code == 0, result.output
    staged = {(one["variant"], one["block_bytes"], one["layout"]) for one in report["results"] if one["bench"] == "staging"}
    cases = ((4096, "direct"), (4096, "staged"), (65536, "scatter"), (65536, "staged"))
    assert staged == {(variant, *case) for variant in ("sm", "tcp") for case in cases}
    assert {name: (one["status"], one["processes"]) for name, one in subjects(report).items()} == {
        "cpu sm": ("measured", 2),
        "cpu tcp": ("measured", 2),
    }
    assert {(one["variant"], one["transport"]) for one in report["results"]} == {("sm", "nixl-ucx"), ("tcp", "nixl-ucx")}


def test_a_way_that_the_environment_has_chosen_is_the_only_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ways, "_RDMA", tmp_path / "none")
    found = Discovered("cpu", "kvpush", CpuPlugin())
    assert {way.name: way.environment for way in ways.ways_of(found, {})} == {
        "cpu-sm": {"UCX_TLS": "sm,self"},
        "cpu-tcp": {"UCX_TLS": "tcp,self"},
    }
    monkeypatch.setattr(ways, "_RDMA", tmp_path)
    assert "cpu-rdma" in {way.name for way in ways.ways_of(found, {})}
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    assert {way.name: way.environment for way in ways.ways_of(found, {})} == {"cpu-UCX_TLS=tcp,self": {}}


def test_further_transports_are_ways_of_their_own(tmp_path: Path, install: Any) -> None:
    install(
        "several",
        """
        @property
        def info(self):
            return dataclasses.replace(super().info, name="several", transports=("loopback", "fast", "absent"))

        def create(self, name, options):
            from kvpush.errors import BackendError
            if options.get("transport") == "absent":
                raise BackendError("no such hardware")
            backend = super().create(name, {})
            if options:
                type(backend.transport).name = options["transport"]
            return backend
        """,
    )
    result, report = bench(tmp_path, "--backend", "several", "--bench", "small_write_latency", "--bench", "digest")
    assert result.exit_code == 0, result.output
    found = {name: (one["status"], one["reasons"]) for name, one in subjects(report).items()}
    assert found == {
        "several": ("measured", []),
        "several fast": ("measured", []),
        "several absent": ("cannot run", ["no such hardware"]),
    }
    measured = {(one["bench"], one.get("variant", ""), one["transport"]) for one in report["results"]}
    assert measured == {
        (name, *way) for name in ("small_write_latency", "digest") for way in (("", "loopback"), ("fast", "fast"))
    }


def test_what_a_backend_lacks_is_left_out_with_the_reason(tmp_path: Path, install: Any) -> None:
    install(
        "plain",
        """
        @property
        def info(self):
            return dataclasses.replace(super().info, name="plain", capabilities=frozenset({Capability.IN_PROCESS}))

        def test_device(self):
            from kvpush.testing.fabric import Device
            class Gadget(Device):
                def copy(self, target, source):
                    return False
            return Gadget()
        """,
    )
    result, report = bench(tmp_path, "--backend", "plain", "--bench", "digest", "--bench", "layouts", "--bench", "staging")
    assert result.exit_code == 0, result.output
    assert subjects(report)["plain"]["left_out"] == ["digest: it declares no digests", "staging: it declares no staging"]
    assert {one["layout"] for one in report["results"]} == {"direct", "scatter"}
    # Its device says of no copy, so there is a rate and nothing to compare it with.
    assert all(one["gbytes_per_s"] > 0 and "ratio" not in one for one in report["results"])


class Page(HTMLParser):
    """What a browser would load or run, and the text that it would show."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_needs_nothing_else_and_what_plugins_say_is_text(tmp_path: Path) -> None:
    hostile = '</title><script>alert(1)</script>\x1b[31m\x00 "><img src=http://example.org/x onerror=alert(2)>'
    numbers = {"us": 1234567.0, "gbytes_per_s": 3.0, "memcpy_gbytes_per_s": 6.0, "ratio": 0.5}
    results = tuple(
        Measured(bench=name, backend=hostile, transport=hostile, variant=variant, **numbers, **axes)
        for name, one in BENCHES.items()
        for variant in ("", hostile)
        for axes in one.axes(QUICK)
    )
    subjects = (Subject(hostile, hostile, hostile, "failed", (hostile,), 2, (hostile,)),)
    text = as_html(Report({"cpu": hostile, "cores": [0], "versions": {"x": hostile}}, True, subjects, results))
    ElementTree.fromstring(text)  # every element is closed, and no character may not be there
    page = Page(text)
    assert not page.tags & {"script", "link", "img", "iframe", "object", "embed", "base", "a", "image", "use", "form"}
    assert not {name for name in page.attributes if name.startswith("on")} | page.attributes & {"src", "href", "xlink:href"}
    assert "url(" not in text
    assert "@import" not in text
    assert "http" not in text.replace("http-equiv", "").replace("src=http://example.org", "")
    assert text.count("<svg viewBox") == len(BENCHES) + 2, "one chart for each bench, three for the orders of blocks"
    for one in BENCHES.values():
        assert one.title in page.text
    assert "GB/s" in page.text
    assert "1234567" in page.text
    assert "alert(1)" in page.text


@pytest.mark.parametrize("values", [(), (0.0, 0.0), (1.0, 1.0), (0.1, 1e6), (None, 3.0)])
@pytest.mark.parametrize("kind", ["lines", "bars"])
def test_a_chart_stays_inside_its_frame(kind: Literal["lines", "bars"], values: tuple[float | None, ...]) -> None:
    places = [f"place {idx}" for idx in range(len(values) or 1)]
    drawn = draw(Chart("title", kind, "x", "y", places, [Series("one", 9, values, values), Series("two", 1, values)]))
    svg = ElementTree.fromstring(drawn)
    _, _, width, height = (float(word) for word in svg.attrib["viewBox"].split())
    for element in svg.iter():
        for name, limit in (("x", width), ("y", height), ("x1", width), ("x2", width), ("y1", height), ("y2", height)):
            assert 0 <= float(element.get(name, 0)) <= limit, (element.tag, element.attrib)
        assert float(element.get("height", 0)) >= 0
        for point in element.get("points", "").split():
            assert all(0 <= float(at) <= limit for at, limit in zip(point.split(","), (width, height), strict=True))
    assert len(list(svg.iter("title"))) == 2 * sum(value is not None for value in values)


def test_nobody_stops_the_others(tmp_path: Path, install: Any) -> None:
    install("fine", "pass")
    install("hanging", "def create(self, *given):\n    time.sleep(3600)")
    install("dying", "def create(self, *given):\n    os._exit(7)")
    install("raising", "def create(self, *given):\n    raise OSError('no luck')")
    install("unimportable", "import a_module_that_nobody_has")
    names = ("fine", "hanging", "dying", "raising", "unimportable")
    chosen = [word for name in names for word in ("--backend", name)]
    result, report = bench(tmp_path, "--stall-seconds", "5", "--bench", "write_bandwidth", *chosen)
    assert result.exit_code == 1
    found = {name: (one["status"], " ".join(one["reasons"])) for name, one in subjects(report).items()}
    assert set(found) == set(names)
    assert found["fine"] == ("measured", "")
    assert found["hanging"] == ("given up", "hangs: write_bandwidth: opening both ends was not over after 5 s")
    assert found["dying"][0] == "given up"
    assert "ended with status 7" in found["dying"][1]
    assert found["raising"] == ("given up", "write_bandwidth: OSError: no luck")
    assert found["unimportable"][0] == "broken"
    assert "No module named 'a_module_that_nobody_has'" in found["unimportable"][1]
    assert {one["backend"] for one in report["results"]} == {"fine"}
    told = " ".join(result.output.split())
    assert "hanging was given up: hangs" in told
    assert "unimportable is broken: could not be loaded" in told


def test_wrong_bytes_are_no_result(tmp_path: Path, install: Any) -> None:
    install(
        "wrong",
        """
        def create(self, name, options):
            backend = super().create(name, options)
            post = backend.transport.post_write
            def last_byte_is_lost(token, peer, src, dst):
                src, dst = src.copy(), dst.copy()
                src[-1, 1] -= 1
                dst[-1, 1] -= 1
                post(token, peer, src, dst)
            backend.transport.post_write = last_byte_is_lost
            return backend
        """,
    )
    result, report = bench(tmp_path, "--backend", "wrong", "--bench", "write_bandwidth")
    assert result.exit_code == 1
    assert report["results"] == []
    assert "other bytes have arrived than were written" in subjects(report)["wrong"]["reasons"][0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--backend", "lopback"), "did you mean 'loopback'?"),
        (("--bench", "speed"), "no bench is called 'speed'. Known: write_bandwidth"),
        (("--options", "{}"), "--options belongs to one backend"),
        (("--json", "/no/such/folder/results.json"), "there is no folder for"),
    ],
)
def test_wrong_options_are_told(arguments: tuple[str, ...], words: str) -> None:
    result = CliRunner().invoke(cli.app, ["bench", "backends", *arguments])
    assert result.exit_code == 2
    assert words in result.output
