"""Tests that names use the standard terms of the field: the identifiers, settings, column headings, metrics
and JSON fields of the product and the tests contain none of the words that were replaced."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("appliance", "console", "engine", "kernels", "store", "scripts")

WORDS = {
    "appliers": "reload hooks",
    "books": "request manager",
    "box": "server",
    "closure": "admission pause",
    "dealer": "connection balancer",
    "door": "listener",
    "doorkeeper": "authenticator",
    "doors": "listeners",
    "doubt": "may_be_non_finite",
    "edits": "logits processors",
    "figure": "metric, measurement, value or explanation",
    "figures": "metrics, measurements, values, stats or explanations",
    "fleet": "model manager",
    "gained": "deferred norm",
    "gone": "deleted, disconnected, exited or removed",
    "house": "service",
    "ladder": "load shedder",
    "ledger": "request manager",
    "lives": "incarnations",
    "lost": "disconnected, exited, failed or dropped",
    "meanwhile": "a noun",
    "rehearsal": "warm-up, launch enumeration",
    "room": "space, capacity",
    "rooms": "packages",
    "steering": "action handlers",
    "such": "a noun",
    "switchboard": "controller",
    "taint": "non_finite",
    "tainted": "non_finite",
    "twin": "reference implementation",
    "what": "description",
    "who": "a noun",
    "whoever": "a noun",
    "whose": "a noun",
    "why": "reason",
    "worthless": "revoked",
}
"""Words that no name contains, each with its replacement."""

NAMES = {
    "credit_rows": "credit_seqs",
    "ends": "end_times, end_positions or logits_indices",
    "heads_recorded": "heads_anchored",
    "kv_dtype": "kv_cache_dtype",
    "max_rows": "max_num_seqs",
    "memory_fraction": "gpu_memory_utilization",
    "mixed_tokens": "max_mixed_tokens",
    "said_by": "source",
    "step_tokens": "max_num_batched_tokens",
    "turned_away": "denied",
}
"""Names that must not be used as a whole, with or without leading underscores."""

VALUES = {"finish": "finish_reason"}
"""Names of methods that must not be names of values."""

BOUND = re.compile(r"_*(MOST|LEAST|LONGEST)(_[A-Z0-9_]+)?")
"""Matches the names of constants that begin with MAX or MIN instead."""

SENTENCES = {"edits", "gone", "lives", "lost", "meanwhile", "such", "what", "who", "whose", "why"}
"""Words that names of tests may contain, because these names are sentences."""

ALLOWED = {
    "*what_if*": "what-if analysis is the field's term for the simulated effect of a change",
    "*WhatIf*": "what-if analysis",
    "_WHAT_IF": "what-if analysis",
    "NoSuchProcess": "an exception of psutil",
    "connection_lost": "a method of asyncio.Protocol",
    "max_rows": "rows of tables on screen and of matrices",
    "MAX_ROWS": "rows of tables and of matrices",
    "_MAX_ROWS": "rows of tables on screen",
}
"""Patterns of names that contain a replaced word, each with the reason."""


_NAMING = (
    *(ast.Name, ast.arg, ast.keyword, ast.Attribute, ast.alias, ast.FunctionDef, ast.AsyncFunctionDef),
    *(ast.ClassDef, ast.ExceptHandler, ast.MatchAs, ast.Constant, ast.Dict, ast.Subscript),
)
"""The types of nodes that contain names, or strings that are names."""


class Name(NamedTuple):
    """A name that the source code uses."""

    text: str
    file: str
    line: int = 0
    is_value: bool = False
    """Whether the name is known to be that of a value, not of a function or method."""


def words(name: str) -> set[str]:
    """Split a name at underscores and capitals, and return its words in lower case."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def sources() -> Iterator[Path]:
    """Yield the Python files of the product and the tests."""
    for folder in (*PRODUCT, "tests"):
        for path in sorted((ROOT / folder).rglob("*")):
            is_script = folder == "scripts" and path.is_file() and b"python" in path.read_bytes()[:40]
            if (path.suffix == ".py" or is_script) and path != Path(__file__).resolve():
                yield path


def names_in(path: Path, source: str) -> Iterator[Name]:
    """Yield the names in a module: the parts of its path, its identifiers, and strings that name JSON fields,
    metrics, settings and column headings. In tests, all other strings are data and are skipped."""
    file = str(path)
    yield from (Name(part, file) for part in path.with_suffix("").parts)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, _NAMING)]
    keys = {id(key) for node in nodes if isinstance(node, ast.Dict) for key in node.keys}
    keys |= {id(node.slice) for node in nodes if isinstance(node, ast.Subscript)}
    for node in nodes:
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                yield Name(name, file, node.lineno, is_value=True)
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(asname=str(name)):
                yield Name(name, file, node.lineno)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield Name(name, file, node.lineno)
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
                yield Name(name, file, node.lineno, is_value=True)
            case ast.Constant(value=str(text)) if id(node) in keys or path.parts[0] != "tests":
                if re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*|[A-Z][A-Z ]*", text):
                    yield Name(text, file, node.lineno, is_value=True)


def problem(name: Name) -> str | None:
    """Return the name's place and its replacement, or None if the name is correct."""
    use = replacement(name.text, is_value=name.is_value)
    return f"{name.file}:{name.line}: {name.text}: use {use}" if use else None


@cache
def replacement(name: str, *, is_value: bool) -> str | None:
    """Return what to use instead of the name, or None if the name is correct."""
    if any(fnmatchcase(name, pattern) for pattern in ALLOWED):
        return None
    replaced = words(name) & WORDS.keys()
    if name.startswith("test_"):
        replaced -= SENTENCES
    if replaced:
        return "; ".join(f"{WORDS[word]} instead of {word}" for word in sorted(replaced))
    if BOUND.fullmatch(name):
        return "MAX or MIN"
    plain = name.strip("_").lower()
    return NAMES.get(plain) or (VALUES.get(plain) if is_value else None)


@pytest.fixture(scope="module")
def names() -> list[Name]:
    return [
        name
        for path in sources()
        for name in names_in(path.relative_to(ROOT), path.read_text(encoding="utf-8"))
    ]


def test_names_use_the_terms_of_the_glossary(names: list[Name]) -> None:
    assert len(names) > 100_000
    problems = [text for name in names if (text := problem(name))]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    "source",
    [
        "def house(): ...",
        "class GoneError(Exception): ...",
        "def f(*, why): ...",
        "x.front_lost()",
        "f(what=1)",
        'answer = {"figures": []}',
        'row["said_by"]',
        'Column("WHAT")',
        'Metric("counter", "appliance_lost_rows_total")',
        "MOST_ROWS = 1",
        "class A:\n    finish: str",
        "from x import y as twin",
        "def test_the_box_starts(): ...",
    ],
)
def test_a_replaced_word_is_found(source: str) -> None:
    path = Path("appliance/example.py")
    assert [text for name in names_in(path, source) if (text := problem(name))]


def test_names_of_tests_may_be_sentences_and_methods_may_be_verbs() -> None:
    source = "def test_a_model_says_why_it_was_lost(): ...\nclass A:\n    def finish(self): ...\n"
    path = Path("tests/example.py")
    assert [text for name in names_in(path, source) if (text := problem(name))] == []


def test_every_exception_is_needed(names: list[Name]) -> None:
    texts = {name.text for name in names}
    assert [pattern for pattern in ALLOWED if not any(fnmatchcase(text, pattern) for text in texts)] == []
