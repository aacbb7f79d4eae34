# SPDX-License-Identifier: Apache-2.0
"""Outside repairs that vLLM's own NIXL connectors need to run well on a host without a GPU.

The demo puts this folder on the PYTHONPATH of *their* servers only, so that kvpush is compared with the in-tree
connectors at their best. Nothing of kvpush uses it.

1. The kernel's permission for AMX tiles. With bfloat16 the CPU attention uses them; a decode instance whose first
   step is a one-token decode has not asked for the permission and dies of SIGILL.
2. `nixl/base_worker.py` of vLLM (0.32: lines 700-714) moves the engine's main thread to the last core of each NUMA
   node: with several instances on a host all of them to the same one.
3. NIXL's Python API fixes the delay of the progress thread at 0, so an idle instance burns a whole core.
"""

import ctypes
import importlib.abc
import importlib.machinery
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

_PROGRESS_DELAY_US = int(os.environ.get("KVPUSH_DEMO_NIXL_PROGRESS_US", "1000"))


def _ask_for_amx() -> None:
    if platform.machine() == "x86_64":
        # arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA); fails harmlessly where there is no AMX.
        ctypes.CDLL(None).syscall(158, 0x1023, 18)


def _leave_affinity_alone() -> None:
    original = os.sched_setaffinity

    def sched_setaffinity(pid: int, cores: Iterable[int], /) -> None:
        if not sys._getframe(1).f_globals.get("__name__", "").endswith(".nixl.base_worker"):
            original(pid, cores)

    os.sched_setaffinity = sched_setaffinity


def _slow_progress_thread(bindings: Any) -> None:
    original = bindings.nixlAgent

    def nixl_agent(name: str, config: Any) -> Any:
        config.pthrDelay = _PROGRESS_DELAY_US
        return original(name, config)

    bindings.nixlAgent = nixl_agent


class _PatchingLoader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _slow_progress_thread(module)


class _BindingsFinder(importlib.abc.MetaPathFinder):
    """Patches NIXL's binding once something imports it; importing it here would cost every process a second."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        if name != "_bindings" or not package.startswith("nixl"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _PatchingLoader(spec.loader)
        return spec


_ask_for_amx()
_leave_affinity_alone()
sys.meta_path.insert(0, _BindingsFinder())
