"""The catalogue of seeded defects fits the source. `scripts/seed_defects` tries them, in minutes."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.kernels.defects import DEFECTS, ROOT, Defect


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: f"{defect.file}: {defect.name}")
def test_a_defect_fits_the_source_once(defect: Defect, tmp_path: Path) -> None:
    source = (ROOT / defect.source).read_text()
    (tmp_path / defect.source.parent).mkdir(parents=True)
    (tmp_path / defect.source).write_text(source)
    defect.apply(tmp_path)
    seeded = (tmp_path / defect.source).read_text()
    assert seeded != source
    ast.parse(seeded)
    assert (ROOT / defect.tests).exists()


def test_every_file_with_kernels_has_defects() -> None:
    files = (ROOT / "kernels" / "triton").glob("*.py")
    with_kernels = {path.name for path in files if ".jit" in path.read_text()}
    assert with_kernels == {defect.file for defect in DEFECTS}
