"""Tests that the names of public classes and of aliases for literals and unions are unique across the
modules of the product and the scripts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

TYPE_NAME = re.compile(
    r"^ *class ([A-Za-z]\w*)\b.*:$"
    r"|^([A-Z]\w*[a-z]\w*) = (?:Literal\[|\(?\s*[\w.]+(?:\[.*\])?\s+\|\s)",
    re.MULTILINE,
)
"""Matches the name of a public class, or of a module's alias for a `Literal` or a union."""
ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("appliance", "console", "engine", "kernels", "scripts", "store")


def sources(package: str) -> Iterator[str]:
    """Yield the source texts of a package's modules and of its Python programs without a suffix."""
    for path in sorted((ROOT / package).rglob("*")):
        if path.suffix == ".py":
            yield path.read_text()
        elif path.is_file() and not path.suffix:
            text = path.read_text()
            if text.partition("\n")[0].startswith("#!/usr/bin/env python"):
                yield text


def public_type_names(package: str) -> list[str]:
    return [found[1] or found[2] for text in sources(package) for found in TYPE_NAME.finditer(text)]


def test_public_type_names_are_unique() -> None:
    counts = Counter(name for package in PACKAGES for name in public_type_names(package))
    assert len(counts) > 300
    assert [name for name, count in counts.items() if count > 1] == []
