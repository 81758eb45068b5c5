"""What runs under compute-sanitizer on a GPU runs in the interpreter; what the tool says is understood."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("triton")
from tests.kernels.exercise import GROUPS

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/sanitize"


@pytest.fixture(scope="module")
def sanitize() -> ModuleType:
    loader = SourceFileLoader("sanitize_script", str(SCRIPT))
    spec = importlib.util.spec_from_loader("sanitize_script", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["sanitize_script"] = module
    loader.exec_module(module)
    return module


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_of_kernels_runs(group: str) -> None:
    GROUPS[group]()


def test_the_script_runs_every_group(sanitize: ModuleType) -> None:
    assert set(sanitize.GROUPS) == set(GROUPS)


MEMCHECK = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 16 bytes
=========     at _decode_kernel+0x1230 in attention_decode.py:201
=========     by thread (32,0,0) in block (5,0,0)
ran decode
========= ERROR SUMMARY: 1 error
"""
RACECHECK = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at _dot+0x9f0 in linear_rows.py:240
=========     and Read access at _dot+0xb10 in linear_rows.py:240 [128 hazards]
=========
ran multiply
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
CLEAN = """========= COMPUTE-SANITIZER
ran place
========= ERROR SUMMARY: 0 errors
"""


@pytest.mark.parametrize(
    ("text", "count", "kernels"),
    [
        (MEMCHECK, 1, {"_decode_kernel"}),
        (RACECHECK, 1, {"_dot"}),
        (CLEAN, 0, set()),
        (CLEAN.replace("ran place", "a traceback"), None, set()),
        ("killed", None, set()),
    ],
    ids=["memcheck", "racecheck", "clean", "ended early", "no summary"],
)
def test_what_the_tool_says_is_understood(
    sanitize: ModuleType, text: str, count: int | None, kernels: set[str]
) -> None:
    outcome = sanitize.read_log(text, 1.0)
    assert outcome.count == count and set(outcome.kernels) == kernels
    assert sanitize.is_clean("memcheck", outcome) == (count == 0)
