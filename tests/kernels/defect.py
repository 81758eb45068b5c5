"""Defines a defect that is seeded into a kernel to check that the tests detect it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Defect:
    """One wrong line in a kernel or in its launcher."""

    name: str
    file: str
    """File name in `kernels/triton`."""
    right: str
    """Correct source text. It occurs in the file exactly once."""
    wrong: str
    keyword: str
    """pytest's -k expression for the tests that must detect the defect."""
    interpreted: bool = True
    """Whether the interpreter can detect the defect. Triton's interpreter does not fuse a multiplication with
    an addition, and the Gluon interpreter does not support every kernel."""

    @property
    def source(self) -> Path:
        return Path("kernels/triton") / self.file

    @property
    def tests(self) -> Path:
        if "new_tokens" in self.keyword:
            return Path("tests/kernels/test_triton_new_tokens.py")
        if "blocks" in self.keyword:
            return Path("tests/kernels/test_triton_blocks.py")
        stem = _TESTED_BY.get(self.file, Path(self.file).stem)
        return Path("tests/kernels") / f"test_triton_{stem}.py"

    def apply(self, tree: Path) -> None:
        """Seed the defect into a copy of the tree. Raises ValueError unless the source text occurs exactly
        once."""
        path = tree / self.source
        text = path.read_text()
        if text.count(self.right) != 1:
            raise ValueError(f"{self.name}: {self.right!r} occurs {text.count(self.right)} times in {path}")
        path.write_text(text.replace(self.right, self.wrong))


_TESTED_BY = {
    "peer_arena.py": "all_reduce",
    "linear_rows.py": "linear",
    "attention_decode_kernel.py": "attention_decode",
    "linear_stream.py": "linear",
    "sampling_kernels.py": "sampling",
    "sampling_full.py": "sampling",
    "sampling_search.py": "sampling",
    "experts_few_kernels.py": "experts",
    "experts_stream.py": "experts",
    "experts_many.py": "experts",
    "experts_grouped.py": "experts",
}
