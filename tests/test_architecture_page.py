"""Tests that docs/architecture.md stays short, mentions every package, and describes the path of a real
prompt."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from pathlib import Path

import pytest

from store.telemetry import RESOLUTIONS
from store.telemetry_reader import TelemetryReader
from tests.system.service import Service, service
from tests.test_tree import ROOT, tracked

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
MAX_WORDS = 1300
MAX_FILES = 30
STEP = re.compile(r"^\| (\d+) \| (core|front|replica) \| `([\w/]+\.py)` \| `([\w.]+)` \|", re.MULTILINE)
PACKAGES = ("appliance", "console", "engine", "kernels", "store")


def test_the_page_has_at_most_two_pages_of_text() -> None:
    assert len([word for word in PAGE.split() if re.search(r"\w", word)]) <= MAX_WORDS


def test_the_path_names_at_most_thirty_files_once_each_with_a_function_that_exists() -> None:
    steps = STEP.findall(PAGE)
    assert [int(number) for number, *_ in steps] == list(range(1, len(steps) + 1))
    assert 20 < len({file for _, _, file, _ in steps}) == len(steps) <= MAX_FILES
    for _, _, file, function in steps:
        assert f"def {function.rpartition('.')[2]}(" in (ROOT / file).read_text(encoding="utf-8"), file


def test_every_package_is_mentioned() -> None:
    (table,) = re.findall(r"^## Packages\n(.*?)^## ", PAGE, re.MULTILINE | re.DOTALL)
    mentioned = set(re.findall(r"`([\w/]+?)/?`", table))
    packages = {
        path.parent.relative_to(ROOT) for path in tracked() if path.parts[len(ROOT.parts)] in PACKAGES
    }
    names = {package.parts[1] if len(package.parts) > 1 else package.name for package in packages}
    missing = {name for name in names if name not in mentioned and f"appliance/{name}" not in mentioned}
    assert len(names) > 25
    assert missing - {"appliance"} == set()


@pytest.mark.system
def test_a_prompt_takes_the_path_that_the_page_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    phase = tmp_path / "phase"
    phase.write_bytes(b"\0")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'tests/system/function_trace'}:{ROOT}")
    monkeypatch.setenv("APPLIANCE_TRACE", str(tmp_path))
    with service(kind=Service) as running:
        ask(running, 1)
        enter(phase, 1)
        wait_for_samples(running, 5)
        enter(phase, 2)
        ask(running, 2)
        enter(phase, 0)
    idle, calls = read_traces(tmp_path)

    steps = [(file, function) for _, _, file, function in STEP.findall(PAGE)]
    assert [step for step in steps if step not in calls] == []
    assert sorted(steps, key=lambda step: calls[step]) == steps

    (stated,) = re.findall(r"about (\d+) files that run code for it", PAGE)
    assert len({file for file, _ in calls.keys() - idle}) == pytest.approx(int(stated), rel=0.2)


def enter(phase: Path, number: int) -> None:
    with phase.open("r+b") as opened:
        opened.write(bytes([number]))


def ask(running: Service, number: int) -> None:
    """Send a prompt, and wait until the service has logged its `number` requests so far."""
    with running.client() as client:
        stream = client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "Hello"}], max_tokens=8, stream=True
        )
        assert list(stream)
    running.wait_until(lambda: len(running.rows(state="ended")) == number, 120, "the request's log row")


def wait_for_samples(running: Service, count: int) -> None:
    """Wait until an idle service has recorded `count` samples, one per second. Every periodic task runs and
    is recorded within this time."""
    reader, since = TelemetryReader(running.state_dir / "history.db"), time.time()

    def recorded() -> bool:
        return len(list(reader.samples(since, time.time(), RESOLUTIONS[0]))) >= count

    running.wait_until(recorded, 120, f"{count} samples")


def read_traces(folder: Path) -> tuple[set[tuple[str, str]], dict[tuple[str, str], int]]:
    """Return the functions that ran without a request and, for each function that ran during a request, the
    time of its first call."""
    phases: dict[str, dict[tuple[str, str], int]] = defaultdict(dict)
    for path in folder.glob("*.trace"):
        for line in path.read_text().splitlines():
            phase, moment, file, function = line.split(" ", 3)
            calls = phases[phase]
            calls[file, function] = min(int(moment), calls.get((file, function), int(moment)))
    return set(phases["1"]), phases["2"]
