"""Tests of `scripts/sanitize`, `scripts/test_gpu` and `exercise`. The kernels that run under
compute-sanitizer must also run in the interpreter, and the sanitizer's output must be parsed correctly."""

from __future__ import annotations

import importlib.util
import re
import sys
from argparse import Namespace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("triton")
from kernels.triton.linear_table import Product, problem
from tests.kernels import exercise
from tests.kernels.exercise import GROUPS
from tests.kernels.shipped_plans import Shipped, shipped_plans
from tests.share import pytest_collection_modifyitems

ROOT = Path(__file__).resolve().parents[2]


def script(name: str) -> ModuleType:
    loader = SourceFileLoader(f"{name}_script", str(ROOT / "scripts" / name))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = module
    loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def sanitize() -> ModuleType:
    return script("sanitize")


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_of_kernels_runs(group: str) -> None:
    GROUPS[group]()


def test_every_shipped_plan_is_exercised_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = set()

    def product(shipped: Shipped, rows: int, k: int, silu: bool, dtype: torch.dtype) -> Mock:
        assert problem(shipped.plan, rows, Product(shipped.dtype, 160, k)) is None
        launched.add((shipped.dtype, shipped.plan, silu))
        return Mock(inputs={}, run=Mock(return_value=[]))

    for name, value in {"ON_GPU": True, "HOPPER": True, "Product": product, "_finite": lambda: None}.items():
        monkeypatch.setattr(exercise, name, value)
    GROUPS["ship_bf16"]()
    GROUPS["ship_fp8"]()
    assert launched == {(one.dtype, one.plan, silu) for one in shipped_plans() for silu in (False, True)}
    assert len(launched) > 100


def test_the_script_runs_every_group(sanitize: ModuleType) -> None:
    assert set(sanitize.GROUPS) == set(GROUPS)


def test_the_sanitizer_is_found_in_a_toolkit_outside_the_path(
    sanitize: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(sanitize, "PLACES", (f"{tmp_path}/cuda*",))
    assert sanitize.find_tool() is None
    for folder in (tmp_path / "cuda-13.0" / "compute-sanitizer", tmp_path / "home" / "bin"):
        folder.mkdir(parents=True)
        (folder / "compute-sanitizer").touch(0o755)
    assert sanitize.find_tool() == f"{tmp_path}/cuda-13.0/compute-sanitizer/compute-sanitizer"
    monkeypatch.setenv("CUDA_HOME", f"{tmp_path}/home")
    assert sanitize.find_tool() == f"{tmp_path}/home/bin/compute-sanitizer"


def test_a_failing_group_is_reported_and_the_others_are_checked(
    sanitize: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def pretended(under: list[str], group: str, *_: object) -> tuple[int, str]:
        asked.append((bool(under), group))
        return (1, TRACEBACK.format(root=ROOT)) if group == "prefill" else (0, f"ran {group}\n{NO_ERRORS}")

    monkeypatch.setattr(sanitize, "_exercise", pretended)
    monkeypatch.setattr(sanitize, "find_tool", lambda: "compute-sanitizer")
    monkeypatch.setattr(sys, "argv", ["sanitize", "--logs", str(tmp_path), "--tools", "memcheck", "--"])
    sys.argv += ["prefill", "place"]
    assert sanitize.main() == 1
    assert asked == [(False, "prefill"), (False, "place"), (True, "place")]
    said = capsys.readouterr().out
    assert 'exercise.py", line 62, in prefill' in said and "3 of 192 are not finite" in said
    assert "ok    memcheck   place" in said and "1 with findings" in said
    assert (tmp_path / "no-tool-prefill.log").read_text() == TRACEBACK.format(root=ROOT)


def test_a_non_finite_result_is_reported_in_one_line() -> None:
    result = torch.zeros(4, 6, 8)
    result[2, 1, 5:] = float("nan")
    said = r"result 1, torch.float32 \(4, 6, 8\): 3 of 192 are not finite, the first at \(2, 1, 5\)$"
    with pytest.raises(AssertionError, match=said):
        exercise._finite(torch.ones(3), result)


def test_a_hanging_group_is_stopped_and_counts_as_a_failure(
    sanitize: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = tmp_path / "compute-sanitizer"
    hanging.write_text("#!/bin/sh\necho begun\nexec sleep 120\n")
    hanging.chmod(0o755)
    arguments = Namespace(logs=tmp_path, until=0.0)
    outcome = sanitize._check(str(hanging), "memcheck", "place", {"PATH": "/usr/bin:/bin"}, arguments)
    assert outcome.count is None and outcome.last == "timed out" and outcome.seconds < 100
    assert not sanitize.is_clean(outcome)


def test_each_gpu_test_file_runs_in_separate_processes() -> None:
    test_gpu = script("test_gpu")
    commands = test_gpu._commands(Namespace(timeout=400.0, logs=Path("logs")))
    assert set(test_gpu.ALONE) <= set(commands)
    runs = [command for name, command in commands.items() if test_gpu._is_chosen(name, ["tests"])]
    assert len(commands) - len(runs) == 2
    found = {}
    for *_, share, path in runs:
        found.setdefault(ROOT / path, []).append(share)
    assert set((ROOT / "tests" / "gpu").glob("test_*.py")) <= set(found) and len(found) > 10
    for path, shares in found.items():
        n = test_gpu.SHARES.get(path.stem, 1)
        assert shares == [f"--share={k}/{n}" for k in range(1, n + 1)], path
    assert set(test_gpu.SHARES) <= {path.stem for path in found}


def test_a_failed_part_can_be_repeated_by_its_name() -> None:
    test_gpu = script("test_gpu")
    names = ["defects", "sanitize", "test_loading", "test_triton_linear.1", "test_triton_linear.2"]

    def chosen(*parts: str) -> list[str]:
        return [name for name in names if test_gpu._is_chosen(name, list(parts))]

    assert chosen("tests", "sanitize", "defects") == names
    assert chosen("test_triton_linear", "sanitize") == [names[1], *names[3:]]
    assert chosen("test_triton_linear.2") == names[4:]
    assert chosen("test_triton") == []


def test_the_shares_of_a_file_contain_each_test_once() -> None:
    tests = [f"test_{number}" for number in range(8)]
    ran = []
    for number in (1, 2, 3):
        config, items = Mock(), tests.copy()
        config.getoption.return_value = f"{number}/3"
        pytest_collection_modifyitems(config, items)
        ran.append(items)
    assert ran == [tests[0::3], tests[1::3], tests[2::3]]


TRACEBACK = """Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
  File "{root}/tests/kernels/exercise.py", line 170, in main
    GROUPS[name]()
  File "{root}/tests/kernels/exercise.py", line 62, in prefill
    _finite(case.run(out=torch.zeros_like(case.q)))
    ~~~~~~~^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
AssertionError: result 0, torch.bfloat16 (4, 6, 8): 3 of 192 are not finite, the first at (2, 1, 5)
and what else was said
"""
NO_ERRORS = "========= ERROR SUMMARY: 0 errors"
MEMCHECK = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 16 bytes
=========     at decode_kernel+0x1230 in attention_decode_kernel.py:201
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
        (MEMCHECK, 1, {"decode_kernel"}),
        (RACECHECK, 1, {"_dot"}),
        (CLEAN, 0, set()),
        (CLEAN.replace("ran place", "a traceback"), None, set()),
        ("killed", None, set()),
    ],
    ids=["memcheck", "racecheck", "clean", "ended early", "no summary"],
)
def test_the_output_of_the_sanitizer_is_parsed(
    sanitize: ModuleType, text: str, count: int | None, kernels: set[str]
) -> None:
    outcome = sanitize.read_log(text, 1.0)
    assert outcome.count == count and set(outcome.kernels) == kernels
    assert sanitize.is_clean(outcome) == (count == 0)


# This is racecheck's report from an H200. The test inserts the line numbers of the kernel's current source.
DISPATCH = """========= COMPUTE-SANITIZER
========= Error: Race reported between Read access at _prefill_hopper+0xf0 in {define}
=========     and Write access at _prefill_hopper+0x9970 in {define} [49 hazards]
=========     and Write access at _prefill_hopper+0x11dd0 in {call} [37 hazards]
=========
========= Error: Race reported between Read access at _prefill_hopper+0x120 in {define}
=========     and Write access at _prefill_hopper+0x97c0 in {define} [18 hazards]
=========     and Write access at _prefill_hopper+0x11c20 in {call} [5 hazards]
=========
ran prefill_hopper
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)
"""
OTHERS = {
    "a read elsewhere": "Read at _prefill_hopper in {init}, Write at _prefill_hopper in {define}",
    "a write elsewhere": "Read at _prefill_hopper in {define}, Write at _prefill_hopper in {init}",
    "in reverse order": "Write at _prefill_hopper in {store}, Read at _prefill_hopper in {define}",
    "a read of the call": "Read at _prefill_hopper in {call}, Write at _prefill_hopper in {define}",
    "two writes": "Write at _prefill_hopper in {define}, Write at _prefill_hopper in {call}",
    "another kernel": "Read at _prefill in {define}, Write at _prefill in {define}",
    "a line of Triton's": "Read at _prefill_hopper in standard.py:3, Write at _prefill_hopper in {define}",
    "no lines": "Read at _prefill_hopper, Write at _prefill_hopper",
    "alone": "Read at _prefill_hopper in {define}",
    "one access more": (
        "Read at _prefill_hopper in {define}, Write at _prefill_hopper in {define}, "
        "Write at _prefill_hopper in {init}"
    ),
}


def placed(text: str) -> str:
    """Return a racecheck report with line numbers of the kernel's current source."""
    name = "attention_prefill_hopper.py"
    source = (ROOT / "kernels" / "triton" / name).read_text().splitlines()
    lines = {
        "define": "def _prefill_hopper(",
        "call": "    gl.warp_specialize(",
        "init": "    mbarrier.init(q_full, count=1)",
        "store": "        gl.store(place, (acc / total[:, None]).to(dtype), mask=real[:, None])",
    }
    return text.format(**{place: f"{name}:{source.index(line) + 1}" for place, line in lines.items()})


def test_races_in_tritons_own_dispatch_are_suppressed(sanitize: ModuleType) -> None:
    log = placed(DISPATCH)
    outcome = sanitize.read_log(log, 1.0)
    assert outcome.count == 2 and set(outcome.kernels) == {"_prefill_hopper"}
    assert sanitize.is_clean(outcome)
    assert sanitize.is_clean(sanitize.read_log(log.replace("=\n", "= \n"), 1.0))
    outcome = sanitize.read_log(log.replace("2 hazards displayed", "3 hazards displayed"), 1.0)
    assert not sanitize.is_clean(outcome), "one of the lines was not parsed"


def test_races_are_reported_if_the_tool_found_more_than_it_printed(
    sanitize: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sanitize, "MAX_PRINTED", 2)
    assert not sanitize.is_clean(sanitize.read_log(placed(DISPATCH), 1.0))


@pytest.mark.parametrize("other", OTHERS)
def test_any_other_race_in_the_kernel_is_reported(other: str, sanitize: ModuleType) -> None:
    accesses = re.sub(r"at (\w+)", r"access at \1+0xb10", placed(OTHERS[other])).split(", ")
    report = "\n=========     and ".join(accesses)
    report = f"========= Error: Race reported between {report} [3 hazards]\n=========\nran "
    log = placed(DISPATCH).replace("ran ", report).replace(": 2 hazards", ": 3 hazards")
    outcome = sanitize.read_log(log, 1.0)
    assert outcome.count == len(outcome.reports) == 3
    assert not sanitize.is_clean(outcome)
