"""Checks that every seeded defect still matches the source. Running the tests with each defect takes minutes,
so `scripts/seed_defects` does that separately."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernels.defects import DEFECTS, ROOT, Defect
from tests.kernels.test_exercise import script


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: f"{defect.file}: {defect.name}")
def test_each_defect_matches_the_source_exactly_once(defect: Defect, tmp_path: Path) -> None:
    source = (ROOT / defect.source).read_text()
    (tmp_path / defect.source.parent).mkdir(parents=True)
    (tmp_path / defect.source).write_text(source)
    defect.apply(tmp_path)
    seeded = (tmp_path / defect.source).read_text()
    assert seeded != source
    ast.parse(seeded)
    assert (ROOT / defect.tests).exists()


def _kernels() -> Iterator[tuple[str, str, str]]:
    """Yield the file, name and source of every Triton or Gluon function."""
    for path in sorted((ROOT / "kernels" / "triton").glob("*.py")):
        text = path.read_text()
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and any(
                "jit" in ast.unparse(d) for d in node.decorator_list
            ):
                yield path.name, node.name, ast.get_source_segment(text, node) or ""


def test_every_launched_kernel_has_a_defect() -> None:
    texts = [path.read_text() for path in (ROOT / "kernels" / "triton").glob("*.py")]
    launched = {name for text in texts for name in re.findall(r"(\w+)\[\(", text)}
    found = [(file, name, source) for file, name, source in _kernels() if name in launched]
    assert len(found) >= 20
    for file, name, source in found:
        assert any(defect.file == file and defect.right in source for defect in DEFECTS), (file, name)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nosuchword"], "no defect contains nosuchword; known defects:\n  attention_decode_kernel.py: "),
        (["linear", "nosuchword", "norword"], "no defect contains nosuchword, norword; known defects:\n"),
        (["sampling", "tiles:"], "no defect contains all of sampling, tiles:; leave out one word"),
        (["linear_stream.py"], "defects with linear_stream.py need a GPU: run with --gpu"),
    ],
    ids=["unknown", "some unknown", "only on a GPU", "on a GPU alone"],
)
def test_words_that_select_no_defect_are_refused(words: list[str], said: str) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "seed_defects"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550)
    assert done.returncode == 2 and said in done.stderr
    assert "every defect was detected" not in done.stdout


def test_words_select_the_defects_that_contain_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seed_defects = script("seed_defects")
    for words in ([], ["new_tokens.py"], ["sampling", "tie"]):
        monkeypatch.setattr(sys, "argv", ["seed_defects", *words])
        chosen = seed_defects._arguments().chosen
        assert chosen == [d for d in DEFECTS if all(word in f"{d.name} {d.source}" for word in words)]
        assert chosen
