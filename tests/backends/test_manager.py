# SPDX-License-Identifier: Apache-2.0
"""Discovery, validation and selection of backends."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib import metadata
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from kvpush.backends import hookimpl
from kvpush.backends.base import BACKEND_API_VERSION, Backend, BackendInfo, Capability, Probe
from kvpush.backends.hookspecs import ENTRY_POINT_GROUP
from kvpush.backends.manager import BackendManager, Discovered
from kvpush.endpoint import Endpoint
from kvpush.errors import BackendError, BackendIncompatible, BackendNotFound
from kvpush.settings import Settings
from kvpush.testing.fabric import Device

INFO = BackendInfo("good", BACKEND_API_VERSION, ("gadget",), ("toy",))


class FakePlugin:
    """A plugin whose answers a test chooses."""

    def __init__(self, info: BackendInfo = INFO, probe: Callable[[], object] = lambda: Probe(True)) -> None:
        self.info = info
        self._probe = probe
        self.probed = 0

    def probe(self) -> Probe:
        self.probed += 1
        return self._probe()  # type: ignore[return-value]

    def create(self, agent_name: str, options: Mapping[str, object]) -> Backend:
        raise BackendError("not made for that")


class Shelf:
    """Modules on sys.modules and entry points for them."""

    def __init__(self) -> None:
        self.points: list[EntryPoint] = []

    def module(self, name: str, factory: Callable[[], object] | None, hook: str = "kvpush_backend") -> None:
        module = types.ModuleType(f"kvpush_fake_{name.replace('-', '_')}")
        if factory is not None:
            setattr(module, hook, hookimpl(factory))
        sys.modules[module.__name__] = module
        self.point(name, module.__name__)

    def plugin(self, plugin: object, name: str | None = None) -> None:
        self.module(name or plugin.info.name, lambda: plugin)  # type: ignore[attr-defined]

    def point(self, name: str, value: str) -> None:
        self.points.append(EntryPoint(name, value, ENTRY_POINT_GROUP))

    def manager(self) -> BackendManager:
        return BackendManager(self.points)


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    yield Shelf()
    for name in [name for name in sys.modules if name.startswith("kvpush_fake_")]:
        del sys.modules[name]


def by_name(found: tuple[Discovered, ...]) -> dict[str, Discovered]:
    return {entry.name: entry for entry in found}


def boom() -> object:
    raise RuntimeError("boom\nsecond line")


def leave() -> object:
    raise SystemExit("gone")


def test_built_ins_take_the_entry_point_road() -> None:
    found = by_name(BackendManager().discover())
    assert {"cuda", "neuron"} <= found.keys()
    assert all(found[name].distribution == "kvpush" for name in ("cuda", "neuron"))
    assert all(found[name].plugin is not None for name in ("cuda", "neuron"))


BROKEN = {
    "returns-none": (lambda: None, "returned None"),
    "raises": (boom, "kvpush_backend() raised RuntimeError: boom"),
    "returns-text": (lambda: "garbage", "returned 'garbage', which is no BackendPlugin: it lacks info, probe, create"),
    "returns-class": (lambda: FakePlugin, "which is no BackendPlugin"),
    "exits": (leave, "SystemExit: gone"),
    "old": (lambda: FakePlugin(replace(INFO, api_version=0)), "backend API version 0; this kvpush has version 1"),
    "bad-name": (lambda: FakePlugin(replace(INFO, name="Good ")), "info.name is 'Good '"),
    "bad-devices": (lambda: FakePlugin(replace(INFO, device_types="cuda")), "info.device_types is 'cuda'"),  # type: ignore[arg-type]
    "no-devices": (lambda: FakePlugin(replace(INFO, device_types=())), "info.device_types is ()"),
    "bad-priority": (lambda: FakePlugin(replace(INFO, priority="high")), "info.priority is 'high'"),  # type: ignore[arg-type]
    "bad-flags": (lambda: FakePlugin(replace(INFO, capabilities=frozenset({"x"}))), "info.capabilities"),  # type: ignore[arg-type]
    "bad-layout": (lambda: FakePlugin(replace(INFO, preferred_layout=["BLHNC"])), "info.preferred_layout is ['BLHNC']"),  # type: ignore[arg-type]
    "bad-summary": (lambda: FakePlugin(replace(INFO, summary=None)), "info.summary is None"),  # type: ignore[arg-type]
    "bad-info": (lambda: FakePlugin(types.SimpleNamespace(api_version=1)), "not a BackendInfo"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_broken_plugin_is_reported_by_name_and_others_stay(shelf: Shelf, name: str) -> None:
    factory, reason = BROKEN[name]
    shelf.module(name, factory)
    shelf.plugin(FakePlugin())
    manager = shelf.manager()
    found = by_name(manager.discover(probe=True))
    assert found.keys() == {"good", name}
    assert found["good"].ok
    assert found[name].plugin is None
    assert reason in (found[name].error or "")
    assert "\n" not in found[name].refusal
    assert manager.select(device_type="gadget").plugin is found["good"].plugin
    with pytest.raises(BackendIncompatible, match=name):
        manager.select(name)


def test_import_error_and_missing_attribute(shelf: Shelf) -> None:
    shelf.point("missing", "kvpush_no_such_module")
    shelf.point("attr", "kvpush.errors:Nothing")
    shelf.plugin(FakePlugin())
    found = by_name(shelf.manager().discover(probe=True))
    assert found["missing"].error is not None
    assert "ModuleNotFoundError: No module named 'kvpush_no_such_module'" in found["missing"].error
    assert "AttributeError" in (found["attr"].error or "")
    assert found["good"].ok


def test_module_without_the_hook(shelf: Shelf) -> None:
    shelf.module("hookless", None)
    shelf.module("misspelt", lambda: FakePlugin(), hook="kvpush_backends")
    found = by_name(shelf.manager().discover())
    assert "has no kvpush_backend()" in (found["hookless"].error or "")
    assert "unknown hooks: kvpush_backends" in (found["misspelt"].error or "")


def test_one_module_under_two_names(shelf: Shelf) -> None:
    shelf.plugin(FakePlugin())
    shelf.point("other", "kvpush_fake_good")
    found = by_name(shelf.manager().discover())
    assert found["good"].plugin is not None
    assert "registered under two names" in (found["other"].error or "")


def test_duplicate_name_first_one_wins(shelf: Shelf) -> None:
    first, second = FakePlugin(), FakePlugin()
    shelf.plugin(first, "a")
    shelf.plugin(second, "b")
    manager = shelf.manager()
    one, two = manager.discover(probe=True)
    assert one.plugin is first
    assert one.error is None
    assert two.plugin is None
    assert "the name 'good' is already taken" in (two.error or "")
    assert manager.select("good").plugin is first
    assert second.probed == 0


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (boom, "probe() raised RuntimeError: boom"),
        (lambda: True, "probe() returned True, not a Probe"),
        (lambda: Probe(False), "gave no reason"),
        (lambda: Probe(True, ("but",)), "said ok and gave reasons"),
        (lambda: Probe(False, "text"), "not a tuple of texts"),  # type: ignore[arg-type]
    ],
)
def test_broken_probe(shelf: Shelf, answer: Callable[[], object], reason: str) -> None:
    shelf.plugin(FakePlugin(replace(INFO, name="bad", priority=9), answer))
    shelf.plugin(FakePlugin())
    manager = shelf.manager()
    assert manager.select(device_type="gadget").plugin.info.name == "good"
    assert reason in (by_name(manager.discover())["bad"].error or "")
    with pytest.raises(BackendIncompatible, match="bad"):
        manager.select("bad")


def test_one_that_hangs_is_given_up_by_name_and_others_stay(shelf: Shelf) -> None:
    never = threading.Event()
    shelf.plugin(FakePlugin(replace(INFO, name="slow-probe", priority=9), lambda: never.wait()))
    shelf.module("slow-hook", lambda: never.wait())
    shelf.plugin(FakePlugin())
    # Long enough for the good one on any machine; the two that hang cost as much each.
    manager = BackendManager(shelf.points, deadline_s=1.0)
    try:
        assert manager.select(device_type="gadget").plugin.info.name == "good"
        found = by_name(manager.discover(probe=True))
    finally:
        never.set()
    assert found["slow-probe"].error == "hangs: probe() was not over after 1 s"
    assert found["slow-hook"].error == "hangs: kvpush_backend() was not over after 1 s"
    assert found["good"].ok
    with pytest.raises(BackendIncompatible, match="'slow-probe' can't be used: hangs"):
        manager.select("slow-probe")


def test_an_import_that_hangs(shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "kvpush_fake_slow_import"
    (tmp_path / f"{module}.py").write_text("import threading\nthreading.Event().wait()\n")
    monkeypatch.syspath_prepend(tmp_path)
    shelf.point("slow-import", module)
    shelf.plugin(FakePlugin())
    found = by_name(BackendManager(shelf.points, deadline_s=0.5).discover())
    assert found["slow-import"].error == "hangs: importing it was not over after 0.5 s"
    assert found["good"].plugin is not None


class Mute(Exception):
    """Can't even be printed."""

    def __str__(self) -> str:
        raise RuntimeError

    __repr__ = __str__


def test_faults_that_cannot_be_printed(shelf: Shelf) -> None:
    def mute() -> object:
        raise Mute

    shelf.module("mute-hook", mute)
    shelf.module("mute-answer", lambda: Mute())
    shelf.plugin(FakePlugin(replace(INFO, name="mute-probe"), mute))
    shelf.plugin(FakePlugin())
    found = by_name(shelf.manager().discover(probe=True))
    assert found["mute-hook"].error == "kvpush_backend() raised Mute"
    assert "returned an object of class Mute, which is no BackendPlugin" in (found["mute-answer"].error or "")
    assert found["mute-probe"].error == "probe() raised Mute"
    assert found["good"].ok


def test_the_log_names_the_broken_ones_and_no_others(shelf: Shelf, caplog: pytest.LogCaptureFixture) -> None:
    shelf.module("broken-hook", boom)
    shelf.plugin(FakePlugin(replace(INFO, name="broken-probe", priority=9), boom))
    shelf.plugin(FakePlugin(replace(INFO, name="unable", priority=8), lambda: Probe(False, ("no such device",))))
    shelf.plugin(FakePlugin())
    manager = shelf.manager()
    assert manager.select(device_type="gadget").plugin.info.name == "good"
    manager.log_broken()
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert sorted(record.getMessage().partition(" of ")[0] for record in caplog.records) == [
        "kvpush: backend plugin 'broken-hook'",
        "kvpush: backend plugin 'broken-probe'",
    ]
    assert "probe() raised RuntimeError: boom" in caplog.text


def test_an_endpoint_logs_the_broken_ones(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        *metadata.entry_points(group=ENTRY_POINT_GROUP),
        EntryPoint("unimportable", "kvpush_no_such_module", ENTRY_POINT_GROUP),
    ]
    monkeypatch.setattr(metadata, "entry_points", lambda *, group: points)
    view, _ = Device().view()
    settings = Settings.model_construct(backend="loopback", control_port=0)
    endpoint = Endpoint.open([view], settings=settings)
    assert endpoint.close()
    assert "backend plugin 'unimportable' of an unnamed distribution can't be used" in caplog.text
    caplog.clear()
    with pytest.raises(BackendNotFound, match="no backend is called 'absent'"):
        Endpoint.open([view], settings=Settings.model_construct(backend="absent", control_port=0))
    assert "unimportable" in caplog.text


class Creator(FakePlugin):
    """Its create() does what a test chooses."""

    def __init__(self, create: Callable[[], object]) -> None:
        super().__init__()
        self._create = create

    def create(self, agent_name: str, options: Mapping[str, object]) -> Backend:
        return self._create()  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("create", "reason"),
    [
        (boom, "backend good: create() raised RuntimeError: boom"),
        (lambda: None, "backend good: create() returned None, which is no Backend: it lacks close, describe"),
    ],
)
def test_a_working_half_that_is_none_is_refused_by_name(create: Callable[[], object], reason: str) -> None:
    view, _ = Device().view()
    with pytest.raises(BackendError) as caught:
        Endpoint.open([view], settings=Settings.model_construct(control_port=0), plugin=Creator(create))
    assert reason in caught.value.message


def test_priority_device_type_and_probe_decide(shelf: Shelf) -> None:
    shelf.plugin(FakePlugin(replace(INFO, name="low", priority=1)))
    shelf.plugin(FakePlugin(replace(INFO, name="high", priority=5)))
    shelf.plugin(FakePlugin(replace(INFO, name="sick", priority=7), lambda: Probe(False, ("no gadget here",))))
    shelf.plugin(FakePlugin(replace(INFO, name="elsewhere", device_types=("widget",), priority=3)))
    shelf.plugin(FakePlugin(replace(INFO, name="inside", capabilities=frozenset({Capability.IN_PROCESS}), priority=99)))
    manager = shelf.manager()
    selection = manager.select(device_type="gadget:1")
    assert selection.plugin.info.name == "high"
    assert "gadget" in selection.reason
    assert manager.select(device_type="widget").plugin.info.name == "elsewhere"
    assert manager.select().plugin.info.name == "high"
    assert manager.select("inside").plugin.info.name == "inside"
    assert manager.select("low").reason == "'low' was asked for by name"
    with pytest.raises(BackendNotFound, match="'sick' can't run here: no gadget here"):
        manager.select("sick")


def test_not_found_names_what_was_considered(shelf: Shelf) -> None:
    shelf.plugin(FakePlugin(replace(INFO, name="sick"), lambda: Probe(False, ("no gadget here",))))
    shelf.plugin(FakePlugin(replace(INFO, name="elsewhere", device_types=("widget",))))
    shelf.plugin(FakePlugin(replace(INFO, name="inside", capabilities=frozenset({Capability.IN_PROCESS}))))
    shelf.module("broken", boom)
    with pytest.raises(BackendNotFound) as caught:
        shelf.manager().select(device_type="gadget")
    for part in ("sick (no gadget here)", "elsewhere (serves widget)", "inside (works inside one process", "broken (", "boom"):
        assert part in caught.value.message


def test_close_name_is_suggested(shelf: Shelf) -> None:
    shelf.plugin(FakePlugin())
    manager = shelf.manager()
    with pytest.raises(BackendNotFound, match=r"no backend is called 'god'; did you mean 'good'\? Known: good"):
        manager.select("god")
    with pytest.raises(BackendNotFound, match="Known: good"):
        manager.get("unlike")
    with pytest.raises(BackendNotFound, match="nothing is registered"):
        BackendManager(()).select()


def test_probed_once_and_only_when_asked(shelf: Shelf) -> None:
    plugin = FakePlugin()
    shelf.plugin(plugin)
    manager = shelf.manager()
    assert manager.get("good") is plugin
    assert manager.discover()[0].probe is None
    assert plugin.probed == 0
    manager.select("good")
    manager.select()
    manager.discover(probe=True)
    assert plugin.probed == 1


@pytest.mark.nixl
def test_cpu_backend_is_chosen_for_an_engine_on_cpus() -> None:
    selection = BackendManager().select(device_type="cpu")
    assert selection.plugin.info.name == "cpu"
    assert "'cpu'" in selection.reason


# --- layouts --------------------------------------------------------------------------------------------------------------


def test_the_preferred_layout_is_that_of_the_one_that_would_be_chosen(shelf: Shelf) -> None:
    shelf.plugin(FakePlugin(replace(INFO, name="low", priority=1, preferred_layout="LBNHC")))
    shelf.plugin(FakePlugin(replace(INFO, name="high", priority=2, preferred_layout="BLHNC")))
    shelf.plugin(FakePlugin(replace(INFO, name="best", priority=3, preferred_layout="X"), lambda: Probe(False, ("broken",))))
    shelf.plugin(FakePlugin(replace(INFO, name="other", device_types=("widget",))))
    manager = shelf.manager()
    assert manager.preferred_layout(None, "gadget") == "BLHNC"
    assert manager.preferred_layout("low", "gadget") == "LBNHC"
    assert manager.preferred_layout(None, "widget") is None
    assert manager.preferred_layout("best") is None
    assert manager.preferred_layout("nobody") is None


def test_nothing_is_probed_where_no_backend_states_a_preference(shelf: Shelf) -> None:
    plugin = FakePlugin()
    shelf.plugin(plugin)
    assert shelf.manager().preferred_layout(None, "gadget") is None
    assert plugin.probed == 0


@pytest.mark.parametrize(("name", "device_type"), [(None, "gadget:0"), ("good", None), ("good", "widget")])
def test_nothing_is_probed_where_only_other_backends_state_a_preference(
    shelf: Shelf, name: str | None, device_type: str | None
) -> None:
    plugin = FakePlugin()
    other = FakePlugin(replace(INFO, name="other", device_types=("widget",), preferred_layout="BLHNC"))
    shelf.plugin(plugin)
    shelf.plugin(other)
    assert shelf.manager().preferred_layout(name, device_type) is None
    assert plugin.probed + other.probed == 0


def test_the_cpu_backend_leaves_the_layout_to_the_engine() -> None:
    assert BackendManager().preferred_layout(None, "cpu") is None
