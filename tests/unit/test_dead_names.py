# SPDX-License-Identifier: Apache-2.0
"""What `core` keeps, something reads: a slot, field, property or method that nothing asks for is left over."""

from __future__ import annotations

import ast
from pathlib import Path

import kvpush

ROOT = Path(kvpush.__file__).parent
OUTSIDE = {"num_open"}
"""For whoever embeds kvpush, and for tests."""


def slots(node: ast.AST) -> list[str]:
    """What an assignment to ``__slots__`` names; nothing for other statements."""
    if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__slots__"]:
        return list(ast.literal_eval(node.value))
    return []


def kept(tree: ast.AST) -> set[str]:
    """Names that the classes of a module give their instances. Counters are for whoever looks, tests among them."""
    names: set[str] = set()
    for cls in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and not node.name.endswith("Counters")):
        for node in cls.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
            elif isinstance(node, ast.FunctionDef):
                names.add(node.name)
            names.update(slots(node))
    return {name for name in names if not name.startswith("__")}


def read(tree: ast.AST) -> set[str]:
    """Names that a module reads of something; by text too, as the tables of states name their handlers."""
    own = {id(node) for listed in ast.walk(tree) if slots(listed) for node in ast.walk(listed)}
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in own:
            found.add(node.value)
    return found


def test_everything_that_core_keeps_is_read_somewhere() -> None:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in ROOT.rglob("*.py")}
    names = set().union(*(read(tree) for tree in trees.values())) | OUTSIDE
    dead = {
        path.name: sorted(left) for path, tree in trees.items() if path.parent.name == "core" and (left := kept(tree) - names)
    }
    assert dead == {}
