"""Tests that the names of public classes are unique across the product's modules."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("appliance", "console", "engine", "kernels", "store")


def public_class_names(package: str) -> list[str]:
    trees = [ast.parse(path.read_text()) for path in sorted((ROOT / package).rglob("*.py"))]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    return [node.name for node in nodes if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]


def test_public_class_names_are_unique() -> None:
    counts = Counter(name for package in PACKAGES for name in public_class_names(package))
    assert len(counts) > 300
    assert [name for name, count in counts.items() if count > 1] == []
