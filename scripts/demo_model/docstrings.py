"""Collects the names in Python's standard library with their documented purposes. A name's purpose is the
first sentence of its own docstring, never of an inherited one. C functions' docstrings begin with the
signature, which is skipped.
"""

import importlib
import inspect
import io
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from types import ModuleType
from typing import Any

MIN_SENTENCE_CHARS = 14
MAX_SENTENCE_CHARS = 150
MAX_ANSWER_CHARS = 230
MAX_NAME_CHARS = 56
# A sentence shared by more names than this is too general to describe any of them.
MAX_NAMES_PER_SENTENCE = 12

SUBMODULES = (
    "collections.abc", "concurrent.futures", "email.message", "email.parser", "email.policy", "email.utils",
    "email.header", "email.generator", "email.headerregistry", "html.parser", "http.client",
    "http.cookiejar", "http.cookies", "http.server", "importlib.abc", "importlib.machinery",
    "importlib.metadata", "importlib.resources", "importlib.util", "json.decoder", "json.encoder",
    "logging.config", "logging.handlers", "multiprocessing.connection", "multiprocessing.managers",
    "multiprocessing.pool", "multiprocessing.queues", "multiprocessing.shared_memory",
    "multiprocessing.synchronize", "os.path", "unittest.mock", "urllib.error", "urllib.parse",
    "urllib.request", "urllib.response", "urllib.robotparser", "wsgiref.headers", "wsgiref.simple_server",
    "wsgiref.util", "wsgiref.validate", "xml.dom.minidom", "xml.dom.pulldom", "xml.etree.ElementTree",
    "xml.sax.handler", "xml.sax.saxutils", "xml.sax.xmlreader", "xmlrpc.client", "xmlrpc.server",
    "asyncio.events", "asyncio.streams", "curses.ascii", "curses.panel", "curses.textpad", "dbm.dumb",
    "ctypes.util",
)  # fmt: skip

# Skip modules that have side effects when they are imported, need a display or another platform, or are
# aliases of a listed module.
SKIPPED = frozenset(
    (
        "antigravity", "this", "idlelib", "lib2to3", "turtledemo", "turtle", "test", "tkinter", "nt",
        "winreg", "winsound", "msvcrt", "msilib", "_winapi", "posix", "posixpath", "ntpath", "genericpath",
        "nturl2path", "sre_compile", "sre_constants", "sre_parse", "pydoc_data", "ensurepip", "venv",
        "distutils",
    )
)  # fmt: skip

_SIGNATURE = re.compile(r"^[\w.]+\(.*\)?(\s*->.*)?[:.]?$|^[\w.]+\s*->\s*\S.*$|^--$")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`'\"(*])")
_ABBREVIATION = re.compile(r"(?:\b(?:e\.g|i\.e|etc|vs|cf|resp|Dr|Mr|incl|No|no)\.|\b[A-Z]\.)$")


@dataclass(frozen=True)
class Purpose:
    """A name and its documented purpose. `kind` is function, method, class or module."""

    name: str
    kind: str
    module: str
    sentence: str
    more: str

    @property
    def answer(self) -> str:
        return f"{self.sentence} {self.more}" if self.more else self.sentence


def split_sentences(paragraph: str) -> list[str]:
    """Return the sentences of one paragraph in order. Abbreviations such as "e.g." do not end a sentence."""
    sentences: list[str] = []
    for piece in _SENTENCE_END.split(paragraph):
        if sentences and _ABBREVIATION.search(sentences[-1]):
            sentences[-1] = f"{sentences[-1]} {piece}"
        else:
            sentences.append(piece)
    return sentences


def first_paragraph(doc: str) -> str:
    """Return a docstring's first paragraph of prose as one line, without signature lines. May be empty."""
    lines = inspect.cleandoc(doc).splitlines()
    while lines and (not lines[0].strip() or _SIGNATURE.match(lines[0].strip())):
        lines.pop(0)
    taken: list[str] = []
    for line in lines:
        if not line.strip() or (taken and re.match(r"^\s*([-*+]|\d+[.)])\s", line)):
            break
        taken.append(line.strip())
    return re.sub(r"\s+", " ", " ".join(taken)).strip()


def purpose_of_doc(doc: str | None) -> tuple[str, str] | None:
    """Return the first and second sentence of a docstring; the second is "" if there is only one. Returns
    None if there is no usable first sentence."""
    if not doc:
        return None
    sentences = split_sentences(first_paragraph(doc))
    if not sentences:
        return None
    first = sentences[0]
    if not _is_clean(first):
        return None
    more = sentences[1] if len(sentences) > 1 else ""
    if not more.endswith(".") or not _is_clean(more) or len(first) + 1 + len(more) > MAX_ANSWER_CHARS:
        more = ""
    if more and not first.endswith((".", "!", "?")):
        more = ""
    return first, more


def _is_clean(sentence: str) -> bool:
    return (
        MIN_SENTENCE_CHARS <= len(sentence) <= MAX_SENTENCE_CHARS
        and sentence.isascii()
        and sentence.isprintable()
        and len(sentence.split()) >= 3
        and re.match(r"[A-Z`'\"]", sentence) is not None
        and not re.search(
            r">>>|::|--> |\bXXX\b|<\||\bself\b.*help\(|^Alias|^Same as|^See |^Helper for", sentence
        )
        and not sentence.endswith((":", ",", ";", "-", "("))
        and sentence.count("(") == sentence.count(")")
    )


def collect_purposes(excluded_modules: frozenset[str]) -> list[Purpose]:
    """Return every public name with a usable first sentence, sorted by name. Omits duplicates, and names that
    share their sentence with too many others."""
    found: dict[str, Purpose] = {}
    for module_name in _module_names():
        if module_name.split(".")[0] in excluded_modules:
            continue
        module = _import(module_name)
        if module is None:
            continue
        for purpose in _of_module(module_name, module):
            found.setdefault(purpose.name, purpose)
    uses = Counter(purpose.sentence for purpose in found.values())
    return sorted(
        (p for p in found.values() if uses[p.sentence] <= MAX_NAMES_PER_SENTENCE), key=lambda p: p.name
    )


def builtin_reference(purposes: list[Purpose]) -> Iterator[tuple[str, str]]:
    """Yield (title, text) pairs for docstrings in C code, which no Python source file contains."""
    for module_name in sorted({purpose.module for purpose in purposes}):
        module = _import(module_name)
        if module is None:
            continue
        entries = []
        for name, _, target in _objects(module_name, module):
            doc = getattr(target, "__doc__", None)
            if isinstance(doc, str) and doc.isascii() and _is_c_object(target):
                entries.append(f"{name}\n" + "\n".join(f"    {line}".rstrip() for line in doc.splitlines()))
        if entries:
            yield f"Reference: {module_name}", "\n\n".join(entries) + "\n"


def _is_c_object(target: Any) -> bool:
    if inspect.isclass(target):
        # Py_TPFLAGS_HEAPTYPE: a class statement created the type
        return not target.__flags__ & (1 << 9)
    return (
        inspect.isbuiltin(target) or inspect.ismethoddescriptor(target) or inspect.isgetsetdescriptor(target)
    )


def _module_names() -> list[str]:
    top = [name for name in sys.stdlib_module_names if not name.startswith("_") and name not in SKIPPED]
    return sorted([*top, *SUBMODULES, "builtins"])


def _import(name: str) -> ModuleType | None:
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except ImportError:
            return None


def _of_module(module_name: str, module: ModuleType) -> Iterator[Purpose]:
    for name, kind, target in _objects(module_name, module):
        doc = getattr(target, "__doc__", None)
        purpose = purpose_of_doc(doc if isinstance(doc, str) else None)
        if purpose is not None and len(name) <= MAX_NAME_CHARS:
            yield Purpose(name, kind, module_name, *purpose)


def _objects(module_name: str, module: ModuleType) -> Iterator[tuple[str, str, Any]]:
    prefix = "" if module_name == "builtins" else f"{module_name}."
    yield module_name, "module", module
    for name in _public_names(module_name, module):
        try:
            target = getattr(module, name)
        except AttributeError:
            continue
        if inspect.isclass(target):
            yield f"{prefix}{name}", "class", target
            for member in sorted(vars(target)):
                if member.startswith("_"):
                    continue
                attribute = inspect.getattr_static(target, member)
                if isinstance(attribute, staticmethod | classmethod):
                    attribute = attribute.__func__
                if inspect.isroutine(attribute) or isinstance(attribute, property):
                    yield f"{prefix}{name}.{member}", "method", attribute
        elif inspect.isroutine(target):
            yield f"{prefix}{name}", "function", target


def _public_names(module_name: str, module: ModuleType) -> list[str]:
    declared = getattr(module, "__all__", None)
    if declared is not None:
        return sorted(set(declared))
    own = {module_name, f"_{module_name}", None, "builtins" if module_name == "builtins" else module_name}
    return sorted(
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and getattr(value, "__module__", None) in own
        and not inspect.ismodule(value)
    )
