# SPDX-License-Identifier: Apache-2.0
"""cuda and neuron: the probe is truthful about the host. For their bodies see test_cuda.py and test_neuron.py."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from kvpush import _host
from kvpush.backends import _nixl
from kvpush.backends.cuda import CudaPlugin
from kvpush.backends.neuron import NeuronPlugin


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Distributions that seem to be installed; a test fills it."""
    fake: dict[str, str] = {}
    monkeypatch.setattr(_host, "distribution_version", fake.get)
    monkeypatch.setattr(_host, "nixl_has_plugin", lambda plugin: plugin in fake)
    for name in (
        "CUDA_VISIBLE_DEVICES",
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
        "UCX_TLS",
        "NEURON_RT_MAP_HBM",
        "FI_EFA_ENABLE_SHM_TRANSFER",
        "FI_PROVIDER",
    ):
        monkeypatch.delenv(name, raising=False)
    return fake


def test_cuda_on_a_bare_host(installed: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_host, "shared_library_loads", lambda name: f"{name}: cannot open shared object file")
    probe = CudaPlugin(tmp_path).probe()
    assert not probe.ok
    text = "\n".join(probe.reasons)
    for part in ("torch is missing", "/dev/nvidia*", "nixl is missing", "libcuda.so.1 doesn't load"):
        assert part in text
    assert probe.details["gpu-direct"] == "no NVIDIA kernel module"


@pytest.fixture
def gpu_host(installed: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host that has everything that the cuda backend needs."""
    installed.update({"torch": "2.13.0", "nixl": "1.5.1", "UCX": "yes", "LIBFABRIC": "yes"})
    monkeypatch.setattr(_host, "shared_library_loads", lambda name: "")
    monkeypatch.setattr(_nixl, "import_problem", lambda: "")
    write(tmp_path / "dev/nvidia0", "")
    write(tmp_path / "dev/nvidiactl", "")
    write(tmp_path / "proc/driver/nvidia/gpus/0000:17:00.0/information", "Model: \t\t NVIDIA H200\nIRQ:   \t\t 1\n")
    write(tmp_path / "proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82\n")
    write(tmp_path / "proc/sys/kernel/osrelease", "6.8.0-71-generic\n")
    write(tmp_path / "sys/module/nvidia/version", "580.82\n")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def network_card(root: Path, name: str, vendor: str) -> None:
    write(root / "sys/class/infiniband" / name / "device/vendor", f"{vendor}\n")


def test_cuda_on_a_complete_host(gpu_host: Path) -> None:
    probe = CudaPlugin(gpu_host).probe()
    assert probe.ok, probe.reasons
    assert probe.details["devices"] == "nvidia0"
    assert probe.details["models"] == "NVIDIA H200"
    assert probe.details["transport"] == "nixl-ucx (no EFA device here)"
    assert probe.details["expandable segments"] == "off"
    assert "CUDA IPC inside a host, through host memory" in probe.details["gpu-direct"]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("CUDA_VISIBLE_DEVICES", "", "hides every GPU"),
        ("CUDA_VISIBLE_DEVICES", "-1", "hides every GPU"),
        ("UCX_TLS", "tcp,self", "without cuda_copy"),
        ("UCX_TLS", "rc,cuda_ipc", "without cuda_copy"),
        ("UCX_TLS", "^cuda", "leaves cuda_copy out"),
        ("UCX_TLS", "^sm,cuda_copy", "leaves cuda_copy out"),
    ],
)
def test_cuda_names_what_the_environment_spoils(
    gpu_host: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: str
) -> None:
    monkeypatch.setenv(name, value)
    (reason,) = CudaPlugin(gpu_host).probe().reasons
    assert name in reason
    assert words in reason


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CUDA_VISIBLE_DEVICES", "2,3"),
        ("CUDA_VISIBLE_DEVICES", "MIG-6d1a4e7b-8f51-5c2c-a1b0-0d6d0a9f3c55"),
        ("UCX_TLS", ""),
        ("UCX_TLS", "all"),
        ("UCX_TLS", "rc,cuda"),
        ("UCX_TLS", "cuda_copy,cuda_ipc,sm,tcp"),
        ("UCX_TLS", "^sm,cuda_ipc"),
    ],
)
def test_cuda_takes_what_works(gpu_host: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    probe = CudaPlugin(gpu_host).probe()
    assert probe.ok, probe.reasons
    assert probe.details[name] == value


def test_cuda_names_packages_of_another_build(
    gpu_host: Path, installed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed["torch"] = "2.13.0+cpu"
    del installed["UCX"]
    monkeypatch.setattr(_nixl, "import_problem", lambda: "ImportError: detected CUDA 12 but nixl-cu12 is not installed")
    text = "\n".join(CudaPlugin(gpu_host).probe().reasons)
    for part in ("no CUDA build", "no UCX plugin", "nixl-cu12 is not installed"):
        assert part in text


def test_cuda_says_how_a_network_card_reaches_the_gpu(gpu_host: Path) -> None:
    def seen() -> str:
        return CudaPlugin(gpu_host).probe().details["gpu-direct"]

    network_card(gpu_host, "mlx5_0", "0x15b3")
    assert seen().startswith("dma-buf (open kernel module 580.82, Linux 6.8.0-71-generic)")
    write(gpu_host / "proc/sys/kernel/osrelease", "5.4.0-1\n")
    assert "modprobe nvidia_peermem" in seen()
    write(gpu_host / "proc/sys/kernel/osrelease", "6.8.0\n")
    write(gpu_host / "proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.1\n")
    assert "modprobe nvidia_peermem" in seen()
    (gpu_host / "sys/module/nvidia_peermem").mkdir()
    assert seen() == "nvidia_peermem is loaded, RDMA devices mlx5_0"


def test_cuda_takes_libfabric_on_efa_where_it_can(
    gpu_host: Path, installed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    network_card(gpu_host, "rdmap16s27", "0x1d0f")
    monkeypatch.setenv("UCX_TLS", "tcp")  # nothing that LIBFABRIC cares about
    probe = CudaPlugin(gpu_host).probe()
    assert probe.ok, probe.reasons
    assert probe.details["transport"] == "nixl-libfabric (rdmap16s27 is EFA)"
    monkeypatch.delenv("UCX_TLS")
    monkeypatch.setattr(_host, "shared_library_loads", lambda name: "" if "cuda" in name else "no such file")
    del installed["LIBFABRIC"]
    text = CudaPlugin(gpu_host).probe().details["transport"]
    assert text.startswith("nixl-ucx (rdmap16s27 is EFA, where UCX is slow")
    for part in ("libfabric.so.1", "libhwloc.so.15", "LIBFABRIC plugin", "/opt/amazon/efa/lib"):
        assert part in text


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_cuda_shows_that_expandable_segments_were_asked_for(gpu_host: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """No reason against the host: the cache may lie elsewhere, which is looked at when it is there."""
    monkeypatch.setenv(name, "max_split_size_mb:512,expandable_segments:True")
    probe = CudaPlugin(gpu_host).probe()
    assert probe.ok
    assert "the cache is refused if it lies in one" in probe.details["expandable segments"]


def test_neuron_on_a_bare_host(installed: dict[str, str], tmp_path: Path) -> None:
    text = "\n".join(NeuronPlugin(tmp_path).probe().reasons)
    for part in (
        "torch-neuronx is missing",
        "libnrt.so.1",
        "/dev/neuron*",
        "NEURON_RT_MAP_HBM",
        "FI_EFA_ENABLE_SHM_TRANSFER",
        "nixl is missing",
        "no EFA",
    ):
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
    monkeypatch.setenv("FI_EFA_ENABLE_SHM_TRANSFER", "0")
    monkeypatch.setattr(_host, "shared_library_loads", lambda name: "")
    probe = NeuronPlugin(tmp_path).probe()
    assert probe.ok
    assert not probe.reasons
    assert (probe.details["devices"], probe.details["efa"], probe.details["libfabric.so.1"]) == ("neuron0", "efa_0", "loads")


def test_neuron_names_the_libraries_that_nixls_plugin_leaves_to_the_host(
    installed: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NIXL itself would say no more than "unsupported backend"."""
    installed.update({"nixl": "1.5.1", "LIBFABRIC": "yes"})
    monkeypatch.setattr(_host, "shared_library_loads", lambda name: f"{name}: cannot open shared object file")
    probe = NeuronPlugin(tmp_path).probe()
    for library, mend in (
        ("libfabric.so.1", "/opt/amazon/efa/lib"),
        ("libhwloc.so.15", "install hwloc"),
        ("libcuda.so.1", "stub"),
        ("libnrt.so.1", "/opt/aws/neuron/lib"),
    ):
        assert [reason for reason in probe.reasons if library in reason and mend in reason], library
        assert "cannot open" in probe.details[library]


def test_neuron_runtime_that_cannot_export_memory(installed: dict[str, str], tmp_path: Path) -> None:
    libraries = tmp_path / "opt/aws/neuron/lib"
    libraries.mkdir(parents=True)
    for version, bad in (("2.32.31.0", True), ("2.33.1.0", False)):
        (libraries / f"libnrt.so.{version}").touch()
        (libraries / "libnrt.so.1").unlink(missing_ok=True)
        (libraries / "libnrt.so.1").symlink_to(f"libnrt.so.{version}")
        probe = NeuronPlugin(tmp_path).probe()
        assert probe.details["runtime"] == version
        assert any("nrt_get_dmabuf_fd" in reason for reason in probe.reasons) == bad


def test_nixl_plugins_are_read_from_file_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_installed(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", none_installed)
    monkeypatch.delenv("NIXL_PLUGIN_DIR", raising=False)
    assert not _host.nixl_has_plugin("UCX")
    (tmp_path / "libplugin_UCX.so").touch()
    monkeypatch.setenv("NIXL_PLUGIN_DIR", str(tmp_path))
    assert _host.nixl_has_plugin("UCX")
