"""Tests that recordings contain only steps of the chosen kind, and as many steps as requested, unless the
workload has fewer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.bench.workloads import EngineWorkload
from engine.generate import LocalEngine
from engine.messages import ReplicaSpec
from engine.plan import StepPlan
from engine.profile import steps
from engine.profile.steps import Kind, StepShape, record
from engine.scheduling.scheduler import Scheduler
from tests.engine.scheduling.simulated_runner import VOCAB, SimulatedRunner, SimulatedStep
from tests.engine.tiny import TINY

ROWS, BUDGET = 4, 96
ONE = EngineWorkload(1, 24, 16, "output_tok_s")
"""A workload with one mixed step and 15 decode steps."""
FIRST_TOKEN = EngineWorkload(1, 90, 1, "ms")
PROMPTS = EngineWorkload(8, 90, 1, "prompt_tok_s")
"""A workload with eight mixed steps."""
THREE = EngineWorkload(3, 40, 16, "output_tok_s")
"""A workload with two mixed steps. In the second, two sequences decode."""
TURNS = EngineWorkload(2 * ROWS, 20, 6, "output_tok_s")
"""A workload that runs one mixed step and five decode steps, twice."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(TINY))
    sizes = {
        "max_num_seqs": ROWS,
        "max_num_batched_tokens": BUDGET,
        "max_mixed_tokens": BUDGET,
        "kv_blocks": 40,
    }
    spec = ReplicaSpec(
        replica="test-0", model_path=str(folder), load_format="dummy", device="cpu", threads=1, **sizes
    )
    engine = LocalEngine(spec)
    yield engine
    engine.close()


def kinds(shapes: list[StepShape]) -> set[str]:
    return {"mixed" if shape.chunks else "decode" for shape in shapes}


def products(trace: Path) -> int:
    events = json.loads(trace.read_text())["traceEvents"]
    # The processor determines which of these two operations the backend uses.
    return sum(event.get("name") in ("aten::linear", "mkldnn::_linear_pointwise") for event in events)


@pytest.mark.parametrize(
    ("workload", "kind", "asked", "skip", "recorded"),
    [
        pytest.param(ONE, "mixed", 8, None, 1, id="one prompt"),
        pytest.param(FIRST_TOKEN, "mixed", 8, None, 1, id="only a prompt"),
        pytest.param(PROMPTS, "mixed", 8, None, 8, id="all steps that there are"),
        pytest.param(PROMPTS, "mixed", 2, 3, 2, id="in the middle"),
        pytest.param(THREE, "mixed", 20, None, 2, id="until the decodes"),
        pytest.param(ONE, "decode", 8, None, 8, id="decodes"),
        pytest.param(ONE, "decode", 20, None, 12, id="decodes until the end"),
        pytest.param(ONE, "decode", 20, 0, 15, id="every decode"),
        pytest.param(TURNS, "decode", 20, 0, 5, id="decodes until the next prompt"),
        pytest.param(TURNS, "mixed", 20, None, 1, id="prompts and decodes in alternation"),
    ],
)
def test_only_steps_of_the_chosen_kind_are_recorded(
    engine: LocalEngine,
    tmp_path: Path,
    workload: EngineWorkload,
    kind: Kind,
    asked: int,
    skip: int | None,
    recorded: int,
) -> None:
    trace = tmp_path / "out" / "trace.json"
    shapes = record(engine, workload, kind, asked, skip, trace)
    assert len(shapes) == recorded
    assert kinds(shapes) == {kind}
    layers = TINY["num_hidden_layers"]
    assert products(trace) == sum(4 * layers + bool(shape.logit_rows) for shape in shapes)
    assert not engine.scheduler.has_work


def test_decodes_are_recorded_after_the_skipped_ones(engine: LocalEngine, tmp_path: Path) -> None:
    shapes = record(engine, ONE, "decode", 2, None, tmp_path / "trace.json")
    assert shapes == [StepShape([28], [], 1), StepShape([29], [], 1)]
    [first] = record(engine, ONE, "decode", 1, 0, tmp_path / "trace.json")
    assert first == StepShape([25], [], 1)


def test_a_workload_without_such_steps_is_an_error(engine: LocalEngine, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the workload has no decode steps: choose another --kind"):
        record(engine, FIRST_TOKEN, "decode", 8, None, tmp_path / "trace.json")
    with pytest.raises(RuntimeError, match="--skip is 15, but the workload has at most 15 consecutive"):
        record(engine, ONE, "decode", 8, 15, tmp_path / "trace.json")
    assert not (tmp_path / "trace.json").exists()
    assert not engine.scheduler.has_work


# ── on a GPU, where launching runs ahead of the device ───────────────────────────────────────────────


class Told(SimulatedRunner):
    """A runner that records in a list when it launches a step and when it reads the step's results."""

    def __init__(self, events: list[str]) -> None:
        super().__init__(ROWS, 40)
        self.device = SimpleNamespace(type="cuda")
        self._events = events

    def launch(self, plan: StepPlan) -> SimulatedStep:
        self._events.append("mixed" if plan.chunks else "decode")
        return super().launch(plan)


class Recording:
    def __init__(self, events: list[str]) -> None:
        self._events = events

    def start(self) -> None:
        self._events.append("start")

    def stop(self) -> None:
        self._events.append("stop")

    def export_chrome_trace(self, path: str) -> None:
        Path(path).write_text("{}")


@pytest.mark.parametrize(
    ("workload", "kind", "asked", "expected"),
    [
        (ONE, "mixed", 8, "wait start mixed wait stop decode"),
        (FIRST_TOKEN, "mixed", 8, "wait start mixed wait stop"),
        (TURNS, "decode", 2, "mixed decode decode decode wait start decode decode wait stop"),
        (TURNS, "decode", 9, "mixed decode decode decode wait start decode decode wait stop mixed"),
    ],
)
def test_on_a_gpu_only_the_recorded_steps_run_during_the_recording(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    workload: EngineWorkload,
    kind: Kind,
    asked: int,
    expected: str,
) -> None:
    events: list[str] = []
    monkeypatch.setattr(steps, "_synchronize", lambda gpu: events.append("wait"))
    monkeypatch.setattr(steps, "profile", lambda **options: Recording(events))
    limits = {"max_model_len": 200, "vocab_size": VOCAB, "blocks": 40}
    scheduler = Scheduler(max_num_seqs=ROWS, max_num_batched_tokens=BUDGET, **limits)
    info = SimpleNamespace(vocab_size=VOCAB)
    core = SimpleNamespace(plans=None)
    engine: Any = SimpleNamespace(runner=Told(events), core=core, scheduler=scheduler, info=info)
    record(engine, workload, kind, asked, None, tmp_path / "trace.json")
    assert events == expected.split()
