# SPDX-License-Identifier: Apache-2.0
"""cuda and neuron: the probe is truthful about this release and about the host."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from kvpush import _host
from kvpush.backends.cuda import CudaPlugin
from kvpush.backends.neuron import NeuronPlugin
from kvpush.errors import BackendError


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Distributions that seem to be installed; a test fills it."""
    fake: dict[str, str] = {}
    monkeypatch.setattr(_host, "distribution_version", fake.get)
    monkeypatch.setattr(_host, "nixl_has_plugin", lambda plugin: plugin in fake)
    for name in ("CUDA_VISIBLE_DEVICES", "NEURON_RT_MAP_HBM"):
        monkeypatch.delenv(name, raising=False)
    return fake


@pytest.mark.parametrize("plugin", [CudaPlugin(), NeuronPlugin()], ids=["cuda", "neuron"])
def test_body_is_missing_and_the_probe_says_so_first(plugin: CudaPlugin | NeuronPlugin) -> None:
    probe = plugin.probe()
    assert not probe.ok
    assert "carries no body" in probe.reasons[0]
    with pytest.raises(BackendError, match="Accelerators"):
        plugin.create("agent", {})


def test_cuda_on_a_bare_host(installed: dict[str, str], tmp_path: Path) -> None:
    text = "\n".join(CudaPlugin(tmp_path).probe().reasons)
    for part in ("torch is missing", "/dev/nvidia*", "nixl is missing"):
        assert part in text


def test_cuda_on_a_complete_host(installed: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed.update({"torch": "2.13.0", "nixl": "1.5.1", "UCX": "yes"})
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    (tmp_path / "dev/nvidiactl").touch()
    (tmp_path / "sys/module/nvidia_peermem").mkdir(parents=True)
    probe = CudaPlugin(tmp_path).probe()
    assert len(probe.reasons) == 1
    assert probe.details["devices"] == "nvidia0"
    assert probe.details["gpu-direct"] == "nvidia_peermem is loaded"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    installed["torch"] = "2.13.0+cpu"
    del installed["UCX"]
    text = "\n".join(CudaPlugin(tmp_path).probe().reasons)
    for part in ("no CUDA build", "hides every GPU", "no UCX plugin"):
        assert part in text


def test_neuron_on_a_bare_host(installed: dict[str, str], tmp_path: Path) -> None:
    text = "\n".join(NeuronPlugin(tmp_path).probe().reasons)
    for part in ("torch-neuronx is missing", "libnrt.so.1", "/dev/neuron*", "NEURON_RT_MAP_HBM", "nixl is missing", "no EFA"):
        assert part in text


def test_neuron_placeholder_and_complete_host(
    installed: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed.update({"torch-neuronx": "1.0", "nixl": "1.5.1"})
    text = "\n".join(NeuronPlugin(tmp_path).probe().reasons)
    assert "PyPI's empty placeholder" in text
    assert "no LIBFABRIC plugin" in text
    installed.update({"torch-neuronx": "2.13.3", "LIBFABRIC": "yes"})
    for folder in ("dev/neuron0", "sys/class/infiniband/efa_0"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setenv("NEURON_RT_MAP_HBM", "1")
    monkeypatch.setattr(_host, "shared_library_loads", lambda name: "")
    assert len(NeuronPlugin(tmp_path).probe().reasons) == 1


def test_nixl_plugins_are_read_from_file_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_installed(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", none_installed)
    monkeypatch.delenv("NIXL_PLUGIN_DIR", raising=False)
    assert not _host.nixl_has_plugin("UCX")
    (tmp_path / "libplugin_UCX.so").touch()
    monkeypatch.setenv("NIXL_PLUGIN_DIR", str(tmp_path))
    assert _host.nixl_has_plugin("UCX")
