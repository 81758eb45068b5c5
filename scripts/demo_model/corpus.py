"""Builds the training text: CPython's standard library, pydoc's language reference, and docstrings of C
functions.

Some modules and their tests are held out for measuring perplexity.
"""

import json
import platform
import random
import sysconfig
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from demo_model.docstrings import Purpose, builtin_reference, collect_purposes

# These modules and their tests are excluded from the training text and from the questions.
HELD_OUT_FILES = (
    "sched.py", "graphlib.py", "cmd.py", "netrc.py", "filecmp.py", "tabnanny.py", "zipapp.py",
    "modulefinder.py", "chunk.py", "nntplib.py", "xdrlib.py", "symtable.py", "mailcap.py",
    "tomllib/__init__.py", "tomllib/_parser.py", "tomllib/_re.py", "tomllib/_types.py", "sndhdr.py",
    "pyclbr.py", "colorsys.py",
)  # fmt: skip

# The questions in questions.jsonl are drawn from modules that most Python programmers know.
QUESTION_MODULES = (
    "builtins", "textwrap", "os", "os.path", "shutil", "json", "re", "math", "random", "itertools",
    "functools", "collections", "datetime", "pathlib", "statistics", "string", "glob", "fnmatch", "heapq",
    "bisect", "copy", "pickle", "csv", "io", "hashlib", "hmac", "secrets", "base64", "urllib.parse",
    "subprocess", "threading", "queue", "logging", "tempfile", "time", "calendar", "contextlib", "inspect",
    "typing", "dataclasses", "enum", "difflib", "socket", "struct", "zlib", "gzip", "zipfile", "tarfile",
    "argparse", "configparser", "html", "operator", "decimal", "fractions", "asyncio", "traceback",
    "warnings", "weakref", "types", "uuid", "ipaddress", "getpass", "platform", "shlex", "locale", "codecs",
    "unicodedata", "sqlite3", "sys", "signal", "ast", "importlib.util", "concurrent.futures", "email.utils",
    "http.client", "unittest", "pprint", "mimetypes", "binascii", "keyword", "tokenize", "linecache",
    "stat", "array", "numbers", "ssl", "select", "smtplib",
)  # fmt: skip
QUESTION_COUNT = 200
# Ask about these names first. The remaining questions are drawn at random.
FIRST_QUESTIONS = (
    "textwrap.dedent", "len", "sorted", "enumerate", "zip", "isinstance", "str.split", "str.join",
    "str.strip", "list.append", "list.sort", "dict.get", "dict.items", "os.path.join", "os.makedirs",
    "os.getcwd", "json.dumps", "json.loads", "math.sqrt", "math.floor", "functools.partial",
    "functools.reduce", "itertools.chain", "random.shuffle", "random.choice", "shutil.copy",
    "shutil.rmtree", "re.sub", "re.search", "subprocess.run", "time.sleep", "asyncio.sleep",
    "asyncio.gather", "collections.deque", "pathlib.Path.exists", "pathlib.Path.read_text",
)  # fmt: skip

_SKIPPED_PARTS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data", "data"}
)
_MAX_FILE_BYTES = 300_000
LIBRARY_WEIGHT = 3
TESTS_WEIGHT = 1


@dataclass(frozen=True)
class CorpusDocument:
    """A file of training text. Doubling its `weight` doubles how often its text is drawn."""

    title: str
    text: str
    weight: int


def build_corpus(folder: Path, seed: int) -> None:
    """Write text.jsonl, purposes.jsonl, questions.jsonl, heldout.txt and manifest.json into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    held_out_modules = frozenset(name.removesuffix(".py").split("/")[0] for name in HELD_OUT_FILES)
    purposes = collect_purposes(held_out_modules)
    questions = choose_questions(purposes, seed)
    documents = [*_sources(held_out_modules), *_topics()]
    documents += [CorpusDocument(title, text, LIBRARY_WEIGHT) for title, text in builtin_reference(purposes)]
    heldout = "\n".join(f"# Lib/{name}\n{(_library() / name).read_text('utf-8')}" for name in HELD_OUT_FILES)

    _write_lines(folder / "text.jsonl", [asdict(document) for document in documents])
    _write_lines(folder / "purposes.jsonl", [asdict(purpose) for purpose in purposes])
    _write_lines(folder / "questions.jsonl", questions)
    (folder / "heldout.txt").write_text(heldout, "utf-8")
    manifest = {
        "python": platform.python_version(),
        "seed": seed,
        "documents": len(documents),
        "text_bytes": sum(len(document.text.encode()) for document in documents),
        "heldout_bytes": len(heldout.encode()),
        "purposes": len(purposes),
        "questions": len(questions),
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")
    print(json.dumps(manifest), flush=True)


def load_documents(folder: Path) -> list[CorpusDocument]:
    return [CorpusDocument(**row) for row in _read_lines(folder / "text.jsonl")]


def load_purposes(folder: Path) -> list[Purpose]:
    return [Purpose(**row) for row in _read_lines(folder / "purposes.jsonl")]


def load_questions(path: Path) -> list[dict[str, str]]:
    """Return the rows of a questions file, each with the fields "id", "question" and "expected"."""
    return list(_read_lines(path))


def choose_questions(purposes: list[Purpose], seed: int) -> list[dict[str, str]]:
    """Return `QUESTION_COUNT` questions, taken in rotation from the well-known modules. No two questions have
    the same expected sentence."""
    shuffled = random.Random(seed)
    by_module: dict[str, list[Purpose]] = defaultdict(list)
    for purpose in purposes:
        if purpose.module in QUESTION_MODULES and purpose.kind != "module" and _is_one_sentence(purpose):
            by_module[purpose.module].append(purpose)
    for candidates in by_module.values():
        shuffled.shuffle(candidates)
        candidates.sort(
            key=lambda p: p.kind == "method"
        )  # functions and classes first, because pop(0) takes from the front
    by_name = {purpose.name: purpose for purpose in purposes}
    chosen: list[Purpose] = []
    sentences: set[str] = set()
    for name in FIRST_QUESTIONS:
        if name in by_name and by_name[name].sentence not in sentences:
            chosen.append(by_name[name])
            sentences.add(by_name[name].sentence)
    while len(chosen) < QUESTION_COUNT and any(by_module.values()):
        for module in QUESTION_MODULES:
            while by_module[module]:
                candidate = by_module[module].pop(0)
                if candidate.sentence not in sentences:
                    sentences.add(candidate.sentence)
                    chosen.append(candidate)
                    break
    return [
        {"id": f"q{index:03d}", "question": _question(p), "expected": p.sentence}
        for index, p in enumerate(chosen[:QUESTION_COUNT], start=1)
    ]


def _is_one_sentence(purpose: Purpose) -> bool:
    return purpose.sentence.endswith(".") and ". " not in purpose.sentence


def _question(purpose: Purpose) -> str:
    return f"What is {purpose.name} for?" if purpose.kind == "class" else f"What does {purpose.name} do?"


def _library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _sources(held_out_modules: frozenset[str]) -> Iterator[CorpusDocument]:
    root = _library()
    skipped_tests = {f"test_{module}" for module in held_out_modules}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        parts = relative.with_suffix("").parts
        if _SKIPPED_PARTS.intersection(parts) or parts[0].startswith(("_sysconfigdata", "config-")):
            continue
        if relative.as_posix() in HELD_OUT_FILES or skipped_tests.intersection(parts):
            continue
        is_test = bool({"test", "tests"}.intersection(parts))
        content = path.read_bytes()
        if not 200 <= len(content) <= _MAX_FILE_BYTES or sum(byte < 128 for byte in content) < 0.98 * len(
            content
        ):
            continue
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            continue
        yield CorpusDocument(f"Lib/{relative.as_posix()}", text, TESTS_WEIGHT if is_test else LIBRARY_WEIGHT)


def _topics() -> Iterator[CorpusDocument]:
    """Yield the chapters of the language reference shown by `help()`."""
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    for name in sorted(topics):
        yield CorpusDocument(f"Language reference: {name}", topics[name], LIBRARY_WEIGHT)


def _write_lines(path: Path, rows: list[dict[str, object]] | list[dict[str, str]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)
