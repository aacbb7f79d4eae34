# SPDX-License-Identifier: Apache-2.0
"""The template of a backend is installed as a separate package, then found, checked, chosen and used, beside broken ones; and a
copy that was renamed as its README says."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "backend-template"

PASSED = r"\b(3[4-9]|[4-9]\d) passed, \d+ skipped in"

_PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "{name}"
version = "0"
[project.entry-points."kvpush.backends"]
{point} = "{module}"
[tool.hatch.build.targets.wheel]
only-include = ["{module}.py"]
"""

_PLUGIN = """
from kvpush.backends import hookimpl
from kvpush.backends.base import BackendInfo, Probe
class Plugin:
    info = BackendInfo({name!r}, {version}, ("cpu",), ("toy",))
    def probe(self): return Probe(True)
    def create(self, agent_name, options): raise NotImplementedError
@hookimpl
def kvpush_backend():
    {body}
"""

# distribution: entry point, module text, part of the reason it must be refused with
BROKEN = {
    "broken-import": ("unimportable", "import a_module_that_nobody_has", "No module named 'a_module_that_nobody_has'"),
    "broken-version": (
        "outdated",
        _PLUGIN.format(name="outdated", version=99, body="return Plugin()"),
        "written for backend API version 99; this kvpush has version 1",
    ),
    # Sorts after the example, which keeps the name.
    "twin-broken": (
        "example-cma",
        _PLUGIN.format(name="example-cma", version=1, body="return Plugin()"),
        "the name 'example-cma' is already taken by distribution 'kvpush-example-cma'",
    ),
    "broken-hook": ("raising", _PLUGIN.format(name="raising", version=1, body="raise OSError('no luck')"), "OSError: no luck"),
}


def install(source: Path, target: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--no-build-isolation", "--target", str(target), str(source)], check=True)


def run(target: Path, *arguments: str) -> str:
    """Run Python with the installed packages on its path."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVPUSH_")}
    environment["PYTHONPATH"] = str(target)
    done = subprocess.run([sys.executable, *arguments], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the example: building and testing it leaves nothing in the checkout."""
    copy = tmp_path_factory.mktemp("source") / "package"
    shutil.copytree(EXAMPLE, copy, ignore=shutil.ignore_patterns("__pycache__", ".*", "build", "dist"))
    return copy


@pytest.fixture(scope="module")
def site(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example installed by pip."""
    target = tmp_path_factory.mktemp("site")
    install(source, target)
    return target


def test_its_own_tests_run_the_contract_suite(source: Path, site: Path) -> None:
    # The configuration of this run is none of the example's.
    output = run(site, "-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider", "--rootdir", str(source), str(source / "tests"))
    # It computes no digests, and says so.
    assert re.search(PASSED, output), output
    assert "example-cma does not declare digest" in output


def test_what_is_installed_keeps_every_promise(site: Path) -> None:
    report = json.loads(run(site, "-m", "kvpush", "backends", "check", "example-cma", "--json"))
    assert report["backend"] == "example-cma"
    verdicts = [promise["verdict"] for promise in report["promises"]]
    assert {*verdicts} == {"holds", "not promised"}, report
    assert verdicts.count("holds") >= 34


def test_a_copy_renamed_as_its_readme_says_is_a_backend_of_its_own(source: Path, tmp_path: Path) -> None:
    commands = re.search(r"^```bash\n(.*?)^```$", (source / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert commands is not None
    examples = tmp_path / "examples"
    shutil.copytree(EXAMPLE, examples / "backend-template", ignore=shutil.ignore_patterns("__pycache__", ".*_cache"))
    subprocess.run(["bash", "-euc", commands[1]], cwd=tmp_path, check=True, stderr=subprocess.DEVNULL)
    copy = tmp_path / "my-backend"
    # The README names the old names in its command.
    files = [path for path in copy.rglob("*") if path.is_file() and path.name != "README.md"]
    assert len(files) >= 7
    assert [path for path in files if re.search(r"example.cma|Cma", path.read_text(encoding="utf-8"))] == []
    assert "kvpush backends check gizmo" in (copy / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    target = tmp_path / "site"
    install(copy, target)
    answer = json.loads(run(target, "-m", "kvpush", "backends", "--json"))
    entry = {entry["name"]: entry for entry in answer["backends"]}["gizmo"]
    assert (entry["distribution"], entry["ok"], entry["error"]) == ("kvpush-gizmo", True, None)
    assert re.search(PASSED, run(target, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(copy)))


def test_found_by_the_command(site: Path) -> None:
    answer = json.loads(run(site, "-m", "kvpush", "backends", "--json"))
    entry = {entry["name"]: entry for entry in answer["backends"]}["example-cma"]
    assert entry["distribution"] == "kvpush-example-cma"
    assert entry["ok"] is True
    assert entry["error"] is None


_USE = """
import os, subprocess, sys
import numpy as np
from kvpush.backends.base import CacheView
from kvpush.backends.manager import BackendManager
from kvpush.core.transport import Region, WriteStatus
from kvpush.errors import ConfigError, TransportError

def cache(fill):
    array = np.full((8, 2, 4, 16), fill, np.uint8)
    region = Region(array.ctypes.data, array.nbytes, keepalive=array)
    return array, region, CacheView("layer.0", 0, array.ctypes.data, array.shape, array.strides, 1, "uint8", "cpu", 0,
                                    8, 4, 0, 2, "BHNC", region)

plugin, reason = BackendManager().select("example-cma", "cpu")
sides = {}
for name, fill in (("producer", 0), ("consumer", 255)):
    backend = plugin.create(name, {})
    array, region, view = cache(fill)
    layout = backend.describe([view])
    backend.transport.register_memory([region])
    sides[name] = backend, array, layout
backend, source, layout = sides["producer"]
other, target, other_layout = sides["consumer"]
source[:] = np.random.default_rng(0).integers(0, 255, source.shape, np.uint8)
peer = backend.transport.add_peer(other.transport.metadata())
assert peer == "consumer" == backend.transport.add_peer(other.transport.metadata())
plane, other_plane = layout.layers[0].planes[0], other_layout.layers[0].planes[0]
rows = lambda plane, blocks: np.array([[plane.base + b * plane.block_stride, plane.block_bytes, 0] for b in blocks], np.uint64)
backend.transport.post_write(7, peer, rows(plane, [1, 2, 5]), rows(other_plane, [0, 3, 4]))
(completion,) = backend.transport.poll()
assert completion.token == 7 and completion.status is WriteStatus.DONE, completion
assert (target[[0, 3, 4]] == source[[1, 2, 5]]).all() and (target[[1, 2, 5, 6, 7]] == 255).all()
for bad in (lambda: backend.transport.post_write(8, peer, rows(plane, [0]), rows(other_plane, [8])),
            lambda: backend.transport.post_write(8, "nobody", rows(plane, [0]), rows(other_plane, [0])),
            lambda: backend.transport.add_peer(b"nonsense")):
    try: bad()
    except TransportError: pass
    else: raise AssertionError("not refused")
try: plugin.create("x", {"speed": 11})
except ConfigError: pass
else: raise AssertionError("unknown option not refused")
backend.transport.remove_peer(peer); backend.close(); other.close(); backend.close()
print(reason)
"""


def test_chosen_and_used(site: Path) -> None:
    assert run(site, "-W", "error", "-c", _USE) == "'example-cma' was asked for by name\n"


_TARGET = """
import sys
import numpy as np
from kvpush.backends.manager import BackendManager
from kvpush.core.transport import Region
array = np.zeros(4096, np.uint8)
transport = BackendManager().select("example-cma").plugin.create("target", {}).transport
transport.register_memory([Region(array.ctypes.data, array.nbytes)])
print(transport.metadata().hex(), array.ctypes.data, flush=True)
sys.stdin.readline()
print(int(array.sum()), flush=True)
"""

_BETWEEN = """
import subprocess, sys
import numpy as np
from kvpush.backends.manager import BackendManager
from kvpush.core.transport import Region, WriteStatus
from kvpush.errors import TransportError
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
metadata, address = child.stdout.readline().split()
array = np.ones(4096, np.uint8)
transport = BackendManager().select("example-cma").plugin.create("source", {}).transport
transport.register_memory([Region(array.ctypes.data, array.nbytes)])
peer = transport.add_peer(bytes.fromhex(metadata))
src = np.array([[array.ctypes.data, 2048, 0]], np.uint64)
dst = np.array([[int(address) + 1024, 2048, 0]], np.uint64)
transport.post_write(1, peer, src, dst)
(first,) = transport.poll()
assert first.status is WriteStatus.DONE, first
print(child.communicate("go\\n")[0].strip())
transport.post_write(2, peer, src, dst)
(second,) = transport.poll()
assert second.status is WriteStatus.FAILED and "has ended" in second.error, second
transport.remove_peer(peer)
try: transport.add_peer(bytes.fromhex(metadata))
except TransportError: pass
else: raise AssertionError("a dead peer was accepted")
"""


def test_two_processes(site: Path) -> None:
    assert run(site, "-W", "error", "-c", _BETWEEN, _TARGET) == "2048\n"


def test_broken_neighbours_are_reported_by_name(site: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    target.mkdir()
    for path in site.iterdir():
        (target / path.name).symlink_to(path)
    for name, (point, text, _) in BROKEN.items():
        source = tmp_path / name
        source.mkdir()
        module = name.replace("-", "_")
        (source / "pyproject.toml").write_text(_PYPROJECT.format(name=name, point=point, module=module))
        (source / f"{module}.py").write_text(text)
        install(source, target)
    answer: dict[str, Any] = json.loads(run(target, "-m", "kvpush", "backends", "--json"))
    by_distribution = {entry["distribution"]: entry for entry in answer["backends"] if entry["distribution"] != "kvpush"}
    assert by_distribution.keys() == {*BROKEN, "kvpush-example-cma"}
    for name, (point, _, reason) in BROKEN.items():
        entry = by_distribution[name]
        assert entry["name"] == point
        assert reason in entry["error"]
        assert entry["ok"] is False
    own = {entry["name"] for entry in answer["backends"] if entry["distribution"] == "kvpush"}
    assert {"cpu", "cuda", "loopback", "neuron"} <= own
    assert by_distribution["kvpush-example-cma"]["ok"] is True
