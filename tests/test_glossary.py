"""Tests that names use the standard terms of the field: the identifiers, settings, options, headings,
metrics, JSON fields and database columns contain none of the words that were replaced."""

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

HEADINGS = {"ALL LEFT AGAIN": "RESETS IN", "CALLED": "NAME", "LIMIT OF": "SCOPE"}
"""Column headings, each with its replacement."""

SCOPED = {
    "appliance/admin/": {"Decisions": "action handlers", "Operations": "action handlers"},
    "appliance/front/": {"Call": "RequestContext", "Job": "GenerationTask"},
    "appliance/settings/": {"weights": "quantization"},
    "docs/": {"weights": "quantization"},
    "engine/model/": {"Piece": "WeightShard", "Place": "ParameterFactory"},
    "engine/scheduling/": {"pause": "next_allocation", "watch": "next_check"},
    "kernels/": {"Stream": "residual"},
}
"""Names that must not be used as a whole in one folder, with or without leading underscores."""

BOUND = re.compile(r"_*(MOST|LEAST|LONGEST)(_[A-Z0-9_]+)?")
"""Matches the names of constants that begin with MAX or MIN instead."""

SENTENCES = {"edits", "gone", "lives", "lost", "meanwhile", "such", "what", "who", "whose", "why"}
"""Words that names of tests and headings of pages may contain, because they are sentences."""

ALLOWED = {
    "*what_if*": "what-if analysis is the field's term for the simulated effect of a change",
    "*WhatIf*": "what-if analysis",
    "_WHAT_IF": "what-if analysis",
    "NVML_ERROR_GPU_IS_LOST": "a constant of NVML",
    "NoSuchProcess": "an exception of psutil",
    "connection_lost": "a method of asyncio.Protocol",
    "max_rows": "rows of tables on screen and of matrices",
    "MAX_ROWS": "rows of tables and of matrices",
    "_MAX_ROWS": "rows of tables on screen",
}
"""Patterns of names that contain a replaced word, each with the reason."""

ALLOWED_IN = {
    ("kernels/tune/graphs.py", "Stream"): "torch.cuda.Stream",
    ("store/schemas.py", "what"): "a column in a released migration; a later migration renames it",
}
"""Names that contain a replaced word, each with its file and the reason."""


_NAMING = (
    *(ast.Name, ast.arg, ast.keyword, ast.Attribute, ast.alias, ast.FunctionDef, ast.AsyncFunctionDef),
    *(ast.ClassDef, ast.ExceptHandler, ast.MatchAs, ast.MatchStar, ast.MatchMapping),
    *(ast.Constant, ast.Dict, ast.Subscript),
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
    """Yield the names in a module: the parts of its path, its identifiers, strings that name JSON fields,
    metrics, settings, options and column headings, and the words of SQL statements. In tests, all other
    strings are data and are skipped."""
    file = str(path)
    yield from (Name(part, file) for part in path.with_suffix("").parts)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, _NAMING)]
    keys = {id(key) for node in nodes if isinstance(node, ast.Dict) for key in node.keys}
    keys |= {id(node.slice) for node in nodes if isinstance(node, ast.Subscript)}
    for node in nodes:
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                yield Name(name, file, node.lineno, is_value=True)
            case ast.Name(id=name) | ast.Attribute(attr=name):
                yield Name(name, file, node.lineno)
            case ast.alias(name=name, asname=other):
                yield from (Name(each, file, node.lineno) for each in (name, other) if each)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield Name(name, file, node.lineno)
            case (
                ast.ExceptHandler(name=str(name))
                | ast.MatchAs(name=str(name))
                | ast.MatchStar(name=str(name))
                | ast.MatchMapping(rest=str(name))
            ):
                yield Name(name, file, node.lineno, is_value=True)
            case ast.Constant(value=str(text)) if id(node) in keys or path.parts[0] != "tests":
                sql = re.match(r"\s*(CREATE|ALTER|SELECT|INSERT|UPDATE|DELETE)\s", text)
                name = r"(--)?[A-Za-z_][\w-]*(\.[\w-]+)*|[A-Z][A-Z ]*"
                found = re.findall(r"\w+", text) if sql else [text] if re.fullmatch(name, text) else []
                yield from (Name(each, file, node.lineno, is_value=True) for each in found)


def names_in_text(path: Path, text: str) -> Iterator[Name]:
    """Yield the names in a TOML file or a Markdown page: TOML keys, headings, and identifiers in headings."""
    tables = [text] if path.suffix == ".toml" else re.findall(r"(?ms)^```toml\n(.*?)^```", text)
    for table in tables:
        for key in re.findall(r"(?m)^\[+([^\]]+)\]|(?:^|[{,]) *([\w.-]+) *=", table):
            yield Name("".join(key), str(path), is_value=True)
    if path.suffix == ".md":
        for heading in re.findall(r"(?m)^#+ (.+)", re.sub(r"(?ms)^```.*?^```", "", text)):
            yield from (Name(each, str(path)) for each in (heading, *re.findall(r"`([\w.-]+)`", heading)))


def problem(name: Name) -> str | None:
    """Return the name's place and its replacement, or None if the name is correct."""
    if (name.file, name.text) in ALLOWED_IN:
        return None
    plain = name.text.replace("-", "_")
    scoped = (uses.get(plain.strip("_")) for scope, uses in SCOPED.items() if name.file.startswith(scope))
    use = next(filter(None, scoped), None) or replacement(plain, is_value=name.is_value)
    return f"{name.file}:{name.line}: {name.text}: use {use}" if use else None


@cache
def replacement(name: str, *, is_value: bool) -> str | None:
    """Return what to use instead of the name, or None if the name is correct."""
    if any(fnmatchcase(name, pattern) for pattern in ALLOWED):
        return None
    replaced = words(name) & WORDS.keys()
    if name.startswith("test_") or (" " in name and not name.isupper()):
        replaced -= SENTENCES
    if replaced:
        return "; ".join(f"{WORDS[word]} instead of {word}" for word in sorted(replaced))
    if BOUND.fullmatch(name):
        return "MAX or MIN"
    plain = name.strip("_").lower().replace(" ", "_")
    return HEADINGS.get(name) or NAMES.get(plain) or (VALUES.get(plain) if is_value else None)


@pytest.fixture(scope="module")
def names() -> list[Name]:
    pages = [ROOT / "pyproject.toml", ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [
        name
        for paths, read in ((sources(), names_in), (pages, names_in_text))
        for path in paths
        for name in read(path.relative_to(ROOT), path.read_text(encoding="utf-8"))
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
        'Column("SAID BY")',
        'Column("ALL LEFT AGAIN")',
        'Column("LIMIT OF")',
        'Metric("counter", "appliance_lost_rows_total")',
        '{"turned-away": 1}',
        'add_argument("--why")',
        '"CREATE TABLE a (b TEXT, why TEXT)"',
        "import gone",
        "match x:\n    case [*gone]: pass",
        "match x:\n    case {**gone}: pass",
        "MOST_ROWS = 1",
        "class A:\n    finish: str",
        "from x import y as twin",
        "def test_the_box_starts(): ...",
    ],
)
def test_a_replaced_word_is_found(source: str) -> None:
    path = Path("appliance/example.py")
    assert [text for name in names_in(path, source) if (text := problem(name))]


@pytest.mark.parametrize(
    ("folder", "name"),
    [("appliance/admin", "Decisions"), ("appliance/admin", "Operations"), ("kernels", "Stream")],
)
def test_a_word_that_is_replaced_in_one_folder_is_found_there_only(folder: str, name: str) -> None:
    assert problem(Name(name, f"{folder}/example.py"))
    assert not problem(Name(name, "appliance/example.py"))


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("docs/example.md", "## Fleet of models\n"),
        ("docs/example.md", "### The field `said_by`\n"),
        ("docs/example.md", '```toml\n[models.chat]\nweights = "fp8"\n```\n'),
        ("docs/example.md", "```toml\nmodels = { a = 1, kv_dtype = 2 }\n```\n"),
        ("example.toml", "[tool.house]\n"),
    ],
)
def test_a_replaced_word_is_found_in_headings_and_settings(file: str, text: str) -> None:
    assert [found for name in names_in_text(Path(file), text) if (found := problem(name))]


def test_names_of_tests_may_be_sentences_and_methods_may_be_verbs() -> None:
    source = "def test_a_model_says_why_it_was_lost(): ...\nclass A:\n    def finish(self): ...\n"
    path = Path("tests/example.py")
    assert [text for name in names_in(path, source) if (text := problem(name))] == []


def test_every_exception_is_needed(names: list[Name]) -> None:
    assert ALLOWED_IN.keys() <= {(name.file, name.text) for name in names}
    texts = {name.text.replace("-", "_") for name in names}
    assert [pattern for pattern in ALLOWED if not any(fnmatchcase(text, pattern) for text in texts)] == []
