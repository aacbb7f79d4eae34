# SPDX-License-Identifier: Apache-2.0
"""docs/settings.md says what the settings are by themselves: its tables are generated from the model. So is the reference in
docs/backends.md, from docstrings.

``python tests/backends/test_reference_docs.py`` writes what is stale.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from api_reference import reference
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from kvpush.backends.base import Backend, BackendPlugin, Capability
from kvpush.core.transport import Transport
from kvpush.settings import ENV_PREFIX, Settings

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


# --- settings ---------------------------------------------------------------------------------------------------------

GROUPS = {
    "Backend": "backend backend_options",
    "Control channel": (
        "control_host control_port advertise_host auth auth_secret_file auth_secret allowed_producers max_messages_per_s"
    ),
    "Leases and time-outs": (
        "lease_s lease_guard_s heartbeat_s idle_heartbeat_s peer_timeout_s handshake_timeout_s announce_timeout_s "
        "source_timeout_s transfer_timeout_s fence_timeout_s write_timeout_s"
    ),
    "What is written when": (
        "push_granularity max_write_bytes max_inflight_bytes_per_peer max_inflight_bytes staging staging_bytes poll_interval_us"
        " empty_step_wait_ms"
    ),
    "Requests": "max_pinned_share recompute_below_tokens",
    "Checking": "verify verify_sample_share",
}
"""Headings, and the settings below each. A setting that stands nowhere here comes under "More"."""


def settings_tables() -> str:
    fields = Settings.model_fields
    groups = {title: names.split() for title, names in GROUPS.items()}
    listed = [name for names in groups.values() for name in names]
    assert len(set(listed)) == len(listed), "a setting is listed under two headings"
    assert set(listed) <= fields.keys(), f"no such setting: {sorted(set(listed) - fields.keys())}"
    groups["More"] = [name for name in fields if name not in listed]
    lines = []
    for title, names in groups.items():
        if names:
            lines += [f"### {title}", "", "| Setting | Environment | Values | Default | Meaning |", "|---|---|---|---|---|"]
            lines += [_row(name, fields[name]) for name in names]
            lines.append("")
    return "\n".join(lines)


def _row(name: str, field: FieldInfo) -> str:
    default = field.default_factory() if field.default_factory else field.default  # type: ignore[call-arg]
    shown = "not set" if default is None else f"`{default}`"
    if isinstance(default, int) and default and default % 2**20 == 0:
        shown += f" ({default >> 20} MiB)"
    cells = [f"`{name}`", f"`{ENV_PREFIX}{name.upper()}`", _values(field), shown, field.description or ""]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _values(field: FieldInfo) -> str:
    """Type and bounds in words."""
    annotation: Any = field.annotation
    metadata = list(field.metadata)
    if type(None) in get_args(annotation):
        (annotation,) = [arm for arm in get_args(annotation) if arm is not type(None)]
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if hasattr(annotation, "__metadata__"):  # Annotated below a union
        metadata += [part for extra in annotation.__metadata__ for part in getattr(extra, "metadata", [extra])]
        annotation = get_args(annotation)[0]
    names = {str: "text", int: "whole number", float: "number", SecretStr: "text", list[str]: "list", dict[str, Any]: "table"}
    words = [names[annotation]]
    signs: dict[type, Callable[[Any], str]] = {
        Gt: lambda bound: f"above {bound.gt:g}",
        Ge: lambda bound: f"from {bound.ge}",
        Lt: lambda bound: f"below {bound.lt:g}",
        Le: lambda bound: f"up to {bound.le}",
        MinLen: lambda bound: "not empty",
        MaxLen: lambda bound: f"at most {bound.max_length} {'entries' if annotation == list[str] else 'characters'}",
    }
    return ", ".join(words + [signs[type(item)](item) for item in metadata if type(item) in signs])


# --- the documents ----------------------------------------------------------------------------------------------------

GENERATED: dict[str, dict[str, Callable[[], str]]] = {
    "settings.md": {"settings": settings_tables},
    "backends.md": {"reference": lambda: f"\n{reference()}\n"},
}
"""Document, name of the part between its markers, and what makes that part."""


def regenerated(name: str) -> str:
    """A document with its generated parts as they should be."""
    text = (DOCS / name).read_text(encoding="utf-8")
    for part, make in GENERATED[name].items():
        head, begin, rest = text.partition(f"<!-- begin {part} -->\n")
        _, end, tail = rest.partition(f"<!-- end {part} -->")
        assert begin, f"{name} has lost the markers of its part {part}"
        assert end, f"{name} has lost the markers of its part {part}"
        text = f"{head}{begin}{make()}{end}{tail}"
    return text


@pytest.mark.parametrize("name", GENERATED)
def test_the_docs_are_not_stale(name: str) -> None:
    stale = (DOCS / name).read_text(encoding="utf-8") != regenerated(name)
    assert not stale, f"docs/{name} is stale: run python {Path(__file__).relative_to(ROOT)}"


def test_every_setting_is_in_the_docs_with_its_bounds() -> None:
    text = (DOCS / "settings.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| `(\w+)` \| `KVPUSH_(\w+)` \|", text, re.MULTILINE)
    assert sorted(name for name, _ in found) == sorted(Settings.model_fields)
    assert all(variable == name.upper() for name, variable in found)
    assert "| `lease_s` | `KVPUSH_LEASE_S` | number, above 0, up to 86400 | `10.0` |" in text
    assert "| `control_port` | `KVPUSH_CONTROL_PORT` | whole number, from 0, up to 65535 | `14579` |" in text


def test_the_reference_has_every_member_of_the_protocols_with_what_its_docstring_says() -> None:
    text = (DOCS / "backends.md").read_text(encoding="utf-8")
    for protocol in (Backend, BackendPlugin, Transport):
        # As Markdown shows them: one line each, `name(arguments)` or `name: type`.
        part = re.search(rf"^#### protocol `{protocol.__name__}`\n(.*?)(?=^###|\Z)", text, re.DOTALL | re.MULTILINE)
        assert part is not None, protocol
        members = {name for name in vars(protocol) if not name.startswith("_")}
        assert set(re.findall(r"^\* `(\w+)[(:]", part[1], re.MULTILINE)) == members
    for member in Capability:
        assert f"* `{member.name} = {member.value!r}`\n\n  " in text, f"{member} has no docstring"
    # Sections, roles and literal blocks have become Markdown.
    assert "  * `LayoutError`: a view that this backend can't serve; says which and why." in text
    assert not re.search(r":\w+:`|^ *(Args|Raises|Returns):$|::$", text, re.MULTILINE)


if __name__ == "__main__":
    for document in GENERATED:
        content = regenerated(document)
        (DOCS / document).write_text(content, encoding="utf-8")
