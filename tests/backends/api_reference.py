# SPDX-License-Identifier: Apache-2.0
"""Markdown from the docstrings of what a plugin author writes against: hook specs, protocols, and the types that they name.

Reads the source, so that what stands below an attribute counts too, and nothing has to be imported.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]

MODULES: dict[str, tuple[str, ...]] = {
    "kvpush.backends.hookspecs": ("kvpush_backend",),
    "kvpush.backends.base": (),
    "kvpush.core.transport": (
        "Descriptors",
        "MemoryKind",
        "Region",
        "TransportCapabilities",
        "WriteStatus",
        "Completion",
        "Transport",
    ),
}
"""Modules, and the names to take from each; all public ones that have a docstring where none is given."""

_SECTIONS = ("Args", "Returns", "Raises")


def reference() -> str:
    parts = []
    for module, names in MODULES.items():
        tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
        found = dict(_documented(tree.body))
        wanted = names or [name for name in found if not name.startswith("_")]
        assert set(wanted) <= found.keys(), f"{module} has no documented {sorted(set(wanted) - found.keys())}"
        parts.append(f"### `{module}`\n")
        parts += [_entry(name, *found[name]) for name in wanted]
    return "\n".join(parts)


def _documented(body: list[ast.stmt]) -> Iterable[tuple[str, tuple[ast.stmt, str]]]:
    """Names that are defined here, in order, each with its docstring: that of a definition, or the text below an assignment."""
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            yield node.name, (node, ast.get_docstring(node) or "")
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else None
            # An enum's members say what they are by their value.
            if isinstance(target, ast.Name) and (isinstance(text, str) or isinstance(node, ast.Assign)):
                yield target.id, (node, inspect.cleandoc(text) if isinstance(text, str) else "")


def _entry(name: str, node: ast.stmt, text: str) -> str:
    if isinstance(node, ast.Assign):
        value = "" if len(ast.unparse(node.value)) > 40 else f" = {ast.unparse(node.value)}"
        return f"#### `{name}{value}`\n\n{_markdown(text)}\n"
    if isinstance(node, ast.FunctionDef):
        return f"#### `{_signature(node)}`\n\n{_markdown(text)}\n"
    assert isinstance(node, ast.ClassDef), f"{name} is neither class, function nor constant"
    bases = {ast.unparse(base) for base in node.bases}
    kind = "protocol" if "Protocol" in bases else "enum" if bases & {"enum.Enum", "enum.StrEnum"} else "class"
    lines = [f"#### {kind} `{name}`\n", _markdown(text)]
    fields = [
        f"{field.target.id}: {ast.unparse(field.annotation)}" + (f" = {ast.unparse(field.value)}" if field.value else "")
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    ]
    if fields:
        # A default that is itself a call says nothing to a reader.
        shown = ", ".join(re.sub(r" = (dataclasses\.)?field\(.*\)$", " = ...", field) for field in fields)
        lines.insert(1, f"`{name}({shown})`\n")
    members = []
    for member, (what, about) in _documented(node.body):
        if member.startswith("_"):
            continue
        if isinstance(what, ast.FunctionDef):
            shown = _signature(what)
        elif isinstance(what, ast.Assign) and isinstance(what.value, ast.Constant):
            shown = f"{member} = {what.value.value!r}"
        else:
            continue
        members.append(f"* `{shown}`" + ("\n" + _indented(_markdown(about)) if about else ""))
    return "\n".join([*lines, "", *members, ""] if members else [*lines, ""])


def _signature(node: ast.FunctionDef) -> str:
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    if any(isinstance(decorator, ast.Name) and decorator.id == "property" for decorator in node.decorator_list):
        return f"{node.name}{returns.replace(' -> ', ': ')}"
    node.args.args = [argument for argument in node.args.args if argument.arg != "self"]
    return f"{node.name}({ast.unparse(node.args)}){returns}"


def _markdown(text: str) -> str:
    """Google style and reStructuredText's roles, as Markdown."""
    text = re.sub(r":\w+:`~?\.?([^`]+)`", lambda found: f"`{found[1].removeprefix('kvpush.backends.base.')}`", text)
    text = text.replace("``", "`")
    out: list[str] = []
    section = fenced = False
    for line in text.splitlines():
        if fenced and line and not line.startswith("    "):
            while not out[-1]:
                out.pop()
            out += ["```", ""]
            fenced = False
        if line.rstrip(":") in _SECTIONS and line.endswith(":"):
            out += [f"*{line.rstrip(':')}*", ""]
            section = True
        elif section and re.match(r" {4}\S", line):
            name, colon, rest = line.strip().partition(": ")
            is_name = bool(colon) and re.fullmatch(r"[*\w, ]+", name) is not None
            out.append(f"* `{name}`: {rest}" if is_name else f"* {line.strip()}" if not out[-1] else f"  {line.strip()}")
        elif section and line.startswith(" "):
            out.append(f"  {line.strip()}")
        else:
            section = section and not line
            out.append(line)
        if out[-1].endswith("::"):
            out[-1] = out[-1][:-1]
            out += ["", "```python"]
            fenced = True
    if fenced:
        out.append("```")
    return re.sub(r"```python\n\n+", "```python\n", "\n".join(out)).strip()


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" if line else "" for line in ["", *text.splitlines()])
