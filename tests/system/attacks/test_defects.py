"""Checks that every seeded defect still matches the source, and that each file of attacks has at least one
defect. `tests.system.attacks.defects` seeds them, which takes minutes."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.system.attacks.defects import DEFECTS, ROOT, Defect


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_each_defect_matches_the_source_exactly_once(defect: Defect) -> None:
    source = (ROOT / defect.source).read_text()
    assert ast.dump(ast.parse(defect.seeded(source))) != ast.dump(ast.parse(source))


def test_every_test_file_has_a_defect() -> None:
    files = {path.stem.removeprefix("test_") for path in Path(__file__).parent.glob("test_*.py")}
    assert files - {"defects"} == {defect.tests for defect in DEFECTS}
