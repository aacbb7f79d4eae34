# SPDX-License-Identifier: Apache-2.0
"""Discovery, validation and selection of backends.

Built-in and third-party backends take the same road: an entry point in the group ``kvpush.backends``, loaded by itself, so
that a broken one is reported by name and never takes the others down.
"""

from __future__ import annotations

import difflib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from typing import NamedTuple, TypeVar

import pluggy

from kvpush.backends import hookspecs
from kvpush.backends.base import BACKEND_API_VERSION, BackendInfo, BackendPlugin, Capability, Probe
from kvpush.errors import BackendError, BackendIncompatible, BackendNotFound

__all__ = ["BackendManager", "Discovered", "Selection"]

logger = logging.getLogger(__name__)

_OWN_DISTRIBUTION = "kvpush"
_DEADLINE_S = 60.0
"""For one plugin's import, hook or probe. A probe may import a framework, on a machine where every rank does the same."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Discovered:
    """One entry point of the group, usable or not.

    Args:
        name: The backend's name; the entry point's where the plugin could not be loaded.
        distribution: Name of the distribution that ships it; empty where it isn't known.
        plugin: The light plugin object; None when it could not be loaded or breaks its contract.
        probe: What :meth:`BackendPlugin.probe` said; None when it has not been asked or could not answer.
        error: Why the plugin can't be used at all, whatever the host; None when nothing is wrong with it.
        entry_point: Its name in the group and where it points, for a process that needs this plugin and no other.
    """

    name: str
    distribution: str
    plugin: BackendPlugin | None = None
    probe: Probe | None = None
    error: str | None = None
    entry_point: tuple[str, str] = ("", "")

    @property
    def ok(self) -> bool:
        """It was loaded, was probed, and can run here."""
        return self.error is None and self.probe is not None and self.probe.ok

    @property
    def in_process(self) -> bool:
        """It connects only sides that live in one process."""
        return self.plugin is not None and Capability.IN_PROCESS in self.plugin.info.capabilities

    @property
    def refusal(self) -> str:
        """Why it can't be used here, in one line; empty when it can or hasn't been probed."""
        if self.error is not None:
            return self.error
        if self.probe is not None and not self.probe.ok:
            return "; ".join(self.probe.reasons)
        return ""


class Selection(NamedTuple):
    """The chosen backend, and why it was chosen."""

    plugin: BackendPlugin
    reason: str


class BackendManager:
    """Finds, checks and chooses backends.

    **Owner** any one thread; loading and probing may block for seconds (a probe may import a framework). Nothing is loaded
    before the first question. Each plugin is loaded once and probed once per manager.

    A plugin's code runs on a thread of its own. One that has not come back by the deadline is given up: its thread is left
    behind, and the plugin reported as broken.

    Args:
        entry_points: Where to look; by default the entry points of the group ``kvpush.backends`` of what is installed.
        deadline_s: How long a plugin's import, hook and probe may take, each.
    """

    def __init__(self, entry_points: Iterable[metadata.EntryPoint] | None = None, *, deadline_s: float = _DEADLINE_S) -> None:
        self._entry_points = entry_points
        self._deadline_s = deadline_s
        self._pluggy = pluggy.PluginManager(hookspecs.PROJECT)
        self._pluggy.add_hookspecs(hookspecs)
        self._found: list[Discovered] | None = None

    def discover(self, *, probe: bool = False) -> tuple[Discovered, ...]:
        """Load every backend, kvpush's own first, then by distribution and name.

        Args:
            probe: Also ask each one whether it can run here.

        Returns:
            One entry per entry point, the broken ones included. Never raises for a plugin's fault.
        """
        found = self._load_all()
        if probe:
            for idx in range(len(found)):
                self._probe(idx)
        return tuple(found)

    def get(self, name: str) -> BackendPlugin:
        """The plugin of that name, without asking whether it can run here.

        Raises:
            BackendNotFound: there is none; a close name is suggested.
            BackendIncompatible: there is one, but it could not be loaded or breaks its contract.
        """
        found = self._load_all()
        plugin = found[self._find(name)].plugin
        assert plugin is not None, "_find returns usable ones only"
        return plugin

    def select(self, name: str | None = None, device_type: str | None = None) -> Selection:
        """Choose the backend to run with.

        A name decides alone. Otherwise, of those that serve the device type (of all, where none is given) and can run here,
        the one with the highest priority; equal priorities go by name. Backends that connect only one process with itself
        are never chosen unless named.

        Args:
            name: What the user asked for.
            device_type: The engine's device, as torch names it, such as ``cuda`` or ``cuda:0``.

        Raises:
            BackendNotFound: nothing of that name, or nothing that can run here; says what was considered and why each was
                refused.
            BackendIncompatible: the named one could not be loaded or breaks its contract.
        """
        return self._select_named(name) if name is not None else self._select_best(device_type)

    def log_broken(self) -> None:
        """Warn of every plugin that was found broken so far, by name, with the reason. Loads and probes nothing."""
        for entry in self._found or ():
            if entry.error is not None:
                logger.warning(
                    "kvpush: backend plugin %r of %s can't be used: %s",
                    entry.name,
                    _shipped_by(entry.distribution),
                    entry.error,
                )

    def preferred_layout(self, name: str | None = None, device_type: str | None = None) -> str | None:
        """What the backend that :meth:`select` would choose prefers; None where none can be chosen. Probes nothing unless the
        named backend, or one that serves the device type, states a preference.

        Args:
            name: As for :meth:`select`.
            device_type: As for :meth:`select`.
        """
        wanted = _device_kind(device_type)
        infos = [entry.plugin.info for entry in self._load_all() if entry.plugin is not None]
        eligible = [info for info in infos if (info.name == name if name is not None else _serves(info, wanted))]
        if not any(info.preferred_layout for info in eligible):
            return None
        try:
            return self.select(name, device_type).plugin.info.preferred_layout
        except BackendError:
            return None  # Said in full when the backend is needed.

    def _select_named(self, name: str) -> Selection:
        entry = self._probe(self._find(name))
        if entry.plugin is None or entry.error is not None:
            raise BackendIncompatible(f"backend {name!r} can't be used: {entry.error}")
        if not entry.ok:
            raise BackendNotFound(f"backend {name!r} can't run here: {entry.refusal}")
        return Selection(entry.plugin, f"{name!r} was asked for by name")

    def _select_best(self, device_type: str | None) -> Selection:
        wanted = _device_kind(device_type)
        found = self._load_all()
        refused: list[str] = []
        order = sorted(range(len(found)), key=lambda idx: (-_priority(found[idx]), found[idx].name))
        for idx in order:
            entry = found[idx]
            if entry.plugin is None:
                refused.append(f"{entry.name} ({entry.error})")
                continue
            info = entry.plugin.info
            if not _serves(info, wanted):
                refused.append(f"{entry.name} (serves {', '.join(info.device_types)})")
                continue
            if entry.in_process:
                refused.append(f"{entry.name} (works inside one process only: never chosen unless named)")
                continue
            entry = self._probe(idx)
            if not entry.ok:
                refused.append(f"{entry.name} ({_brief(entry)})")
                continue
            assert entry.plugin is not None, "probing keeps the plugin"
            why = f"serves device type {wanted!r}" if wanted is not None else "no device type was given"
            return Selection(entry.plugin, f"{why}; the highest priority ({info.priority}) of those that can run here")
        target = f"for device type {wanted!r}" if wanted is not None else "that can run here"
        considered = "; ".join(refused) if refused else f"nothing is registered in the group {hookspecs.ENTRY_POINT_GROUP!r}"
        raise BackendNotFound(f"no backend {target}: {considered}")

    def _find(self, name: str) -> int:
        """Index of a usable entry of that name."""
        found = self._load_all()
        broken = None
        for idx, entry in enumerate(found):
            if entry.name == name:
                if entry.plugin is not None:
                    return idx
                broken = broken or entry
        if broken is not None:
            raise BackendIncompatible(f"backend {name!r} of {_shipped_by(broken.distribution)} can't be used: {broken.error}")
        names = sorted({entry.name for entry in found})
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        raise BackendNotFound(f"no backend is called {name!r}{hint} Known: {', '.join(names) or 'none'}")

    def _load_all(self) -> list[Discovered]:
        if self._found is None:
            points = self._entry_points
            if points is None:
                points = metadata.entry_points(group=hookspecs.ENTRY_POINT_GROUP)
            self._found = []
            taken: dict[str, str] = {}
            for point in sorted(points, key=_order):
                entry = self._load(point)
                if entry.plugin is not None:
                    if entry.name in taken:
                        self._pluggy.unregister(name=_plugin_name(point))
                        error = f"the name {entry.name!r} is already taken by {_shipped_by(taken[entry.name])}"
                        entry = replace(entry, plugin=None, error=error)
                    else:
                        taken[entry.name] = entry.distribution
                self._found.append(entry)
        return self._found

    def _load(self, point: metadata.EntryPoint) -> Discovered:
        """Load one entry point through pluggy and check what it gives. Never raises."""
        blank = Discovered(point.name, _distribution(point), entry_point=(point.name, point.value))
        unique = _plugin_name(point)
        try:
            module = self._timed("importing it", point.load)
            if self._pluggy.is_registered(module):
                return replace(blank, error=f"{point.value} is registered under two names")
            self._pluggy.register(module, unique)
            plugin = self._call_hook(unique, module)
            info = _checked(plugin)
        except _Refused as error:
            reason = str(error)
        except BaseException as error:
            if not _is_its_own(error):
                raise
            reason = f"could not be loaded from {point.value}: {_describe(error)}"
        else:
            return replace(blank, name=info.name, plugin=plugin)
        if self._pluggy.has_plugin(unique):
            self._pluggy.unregister(name=unique)
        return replace(blank, error=reason)

    def _call_hook(self, unique: str, module: object) -> BackendPlugin:
        callers = {caller.name for caller in self._pluggy.get_hookcallers(module) or ()}
        unknown = sorted(callers - {_HOOK})
        if unknown:
            raise _Refused(f"implements unknown hooks: {', '.join(unknown)}; the only one is {_HOOK}")
        if _HOOK not in callers:
            raise _Refused(f"has no {_HOOK}() marked with @kvpush.backends.hookimpl")
        others = [plugin for plugin in self._pluggy.get_plugins() if plugin is not module]
        caller: Callable[[], list[BackendPlugin]] = self._pluggy.subset_hook_caller(_HOOK, others)
        try:
            results = self._timed(f"{_HOOK}()", caller)
        except _Refused:
            raise
        except Exception as error:
            raise _Refused(f"{_HOOK}() raised {_describe(error)}") from error
        if len(results) != 1:
            raise _Refused(f"{_HOOK}() returned None instead of a BackendPlugin")
        return results[0]

    def _probe(self, idx: int) -> Discovered:
        """Probe one entry, once. Never raises."""
        found = self._load_all()
        entry = found[idx]
        if entry.plugin is not None and entry.probe is None and entry.error is None:
            try:
                answer = self._timed("probe()", entry.plugin.probe)
                fault = _probe_fault(answer)
            except _Refused as error:
                fault = str(error)
            except BaseException as error:
                if not _is_its_own(error):
                    raise
                fault = f"probe() raised {_describe(error)}"
            entry = replace(entry, error=fault) if fault else replace(entry, probe=answer)
            found[idx] = entry
        return entry

    def _timed(self, what: str, call: Callable[[], _T]) -> _T:
        """Call a plugin on a thread of its own, which is left behind when it is not back by the deadline.

        Raises:
            _Refused: it wasn't back.
        """
        results: list[_T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(call())
            except BaseException as error:  # noqa: BLE001 - raised again, by whoever waits
                errors.append(error)

        thread = threading.Thread(target=run, name=f"kvpush-plugin-{what}", daemon=True)
        thread.start()
        thread.join(self._deadline_s)
        if results:
            return results[0]
        if errors:
            raise errors[0]
        raise _Refused(f"hangs: {what} was not over after {self._deadline_s:g} s")

    def __iter__(self) -> Iterator[Discovered]:
        return iter(self.discover())


_HOOK = "kvpush_backend"


class _Refused(Exception):
    """A plugin breaks its contract; the message says how."""


def _is_its_own(error: BaseException) -> bool:
    """Whether an error is a fault of the plugin whose code ran, and not somebody's wish to end this process."""
    return isinstance(error, (Exception, SystemExit))


def _order(point: metadata.EntryPoint) -> tuple[bool, str, str]:
    distribution = _distribution(point)
    return (distribution != _OWN_DISTRIBUTION, distribution, point.name)


def _distribution(point: metadata.EntryPoint) -> str:
    return point.dist.name if point.dist is not None else ""


def _plugin_name(point: metadata.EntryPoint) -> str:
    return f"{_distribution(point)}:{point.name}={point.value}"


def _shipped_by(distribution: str) -> str:
    return f"distribution {distribution!r}" if distribution else "an unnamed distribution"


def _priority(entry: Discovered) -> int:
    return entry.plugin.info.priority if entry.plugin is not None else 0


def _device_kind(device_type: str | None) -> str | None:
    """``cuda`` of ``cuda:0``."""
    return None if device_type is None else device_type.partition(":")[0].lower()


def _serves(info: BackendInfo, wanted: str | None) -> bool:
    return wanted is None or wanted in info.device_types


def _brief(entry: Discovered) -> str:
    """The first reason, and how many more there are."""
    if entry.error is not None or entry.probe is None or len(entry.probe.reasons) < 2:
        return entry.refusal
    return f"{entry.probe.reasons[0]}; {len(entry.probe.reasons) - 1} more reasons in `kvpush backends`"


def _describe(error: BaseException) -> str:
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # noqa: BLE001 - a plugin's class
        lines = []
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _checked(plugin: object) -> BackendInfo:
    """The card of a plugin object that keeps its contract.

    Raises:
        _Refused: it doesn't; says how.
    """
    if isinstance(plugin, type) or not isinstance(plugin, BackendPlugin):
        missing = [name for name in ("info", "probe", "create") if not hasattr(plugin, name)]
        detail = f"lacks {', '.join(missing)}" if missing else "is a class, not an object of it"
        raise _Refused(f"{_HOOK}() returned {_short(plugin)}, which is no BackendPlugin: it {detail}")
    info = plugin.info
    version = getattr(info, "api_version", None)
    if version != BACKEND_API_VERSION:
        raise _Refused(f"was written for backend API version {version}; this kvpush has version {BACKEND_API_VERSION}")
    if not isinstance(info, BackendInfo):
        raise _Refused(f"its info is {_short(info)}, not a BackendInfo")
    if not isinstance(info.name, str) or not info.name or info.name != info.name.strip().lower():
        raise _Refused(f"its info.name is {info.name!r}; a name is lower case and not empty")
    if isinstance(info.priority, bool) or not isinstance(info.priority, int):
        raise _Refused(f"its info.priority is {info.priority!r}, not a whole number")
    if not isinstance(info.summary, str):
        raise _Refused(f"its info.summary is {info.summary!r}, not a text")
    if info.preferred_layout is not None and not isinstance(info.preferred_layout, str):
        raise _Refused(f"its info.preferred_layout is {info.preferred_layout!r}, not a text or None")
    for field in ("device_types", "transports"):
        value = getattr(info, field)
        if not isinstance(value, tuple) or not value or not all(isinstance(item, str) and item for item in value):
            raise _Refused(f"its info.{field} is {value!r}, not a tuple of at least one name")
    if not isinstance(info.capabilities, frozenset) or not all(isinstance(item, Capability) for item in info.capabilities):
        raise _Refused(f"its info.capabilities is {info.capabilities!r}, not a frozenset of Capability")
    return info


def _probe_fault(answer: object) -> str:
    """What is wrong with an answer of ``probe()``; empty when nothing is."""
    if not isinstance(answer, Probe):
        return f"probe() returned {_short(answer)}, not a Probe"
    reasons: object = answer.reasons
    if not isinstance(reasons, tuple) or not all(isinstance(reason, str) for reason in reasons):
        return f"probe() returned reasons {_short(reasons)}, not a tuple of texts"
    if answer.ok and answer.reasons:
        return "probe() said ok and gave reasons why not"
    if not answer.ok and not answer.reasons:
        return "probe() said that it can't run and gave no reason"
    return ""


def _short(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - a plugin's class
        text = f"an object of class {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."
