"""Tests of a service in a control group with a memory limit, where the kernel kills one of the service's
processes. `tests/system/test_systemd.py` tests that systemd starts the core again afterwards."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import tests.system.service
from engine.memory_kills import count_memory_kills
from tests.system.attacks.reading import doctor, no_problem
from tests.system.memory_limit import Group, memory_limit
from tests.system.service import Service, service
from tests.system.test_deaths import answer

pytestmark = pytest.mark.system


@pytest.fixture
def group() -> Iterator[Group]:
    with memory_limit() as made:
        yield made


@pytest.fixture
def limited(group: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """Start a service in the control group."""
    command = tmp_path / "appliance"
    enter = f"echo $$ >{group.folder}/cgroup.procs"
    command.write_text(f'#!/bin/sh\n{enter}\nexec {tests.system.service.APPLIANCE} "$@"\n')
    command.chmod(0o755)
    with monkeypatch.context() as patched:
        patched.setattr(tests.system.service, "APPLIANCE", str(command))
        with service(kind=Service) as running:
            patched.undo()
            yield running


def test_processes_killed_for_lack_of_memory_are_replaced_and_the_cause_is_reported(
    limited: Service, group: Group
) -> None:
    with limited.client() as client:
        stream = client.completions.create(
            model="demo", prompt="x", max_tokens=300, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        (rank,) = limited.replica()["pids"]
        group.kill(rank, spared=[limited.status()["fronts"][0]["pid"]])
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
    said = limited.wait_until(lambda: limited.replica()["last_error"], 60, "the reason")
    assert "was killed by SIGKILL; since it started, the kernel has killed" in said
    no_problem(limited)
    front = limited.status()["fronts"][0]
    group.add(front["pid"])
    group.kill(front["pid"], spared=limited.replica()["pids"])
    said = limited.wait_until(lambda: limited.status()["fronts"][0]["last_error"], 60, "the front's end")
    assert "since it started, the kernel has killed" in said
    no_problem(limited)
    assert answer(limited)
    found = doctor(limited, "warning")
    for pid in (rank, front["pid"]):
        assert any(f"pid {pid}" in text and "the kernel has killed" in text for text in found), found
    assert limited.log_path.read_text().count("for lack of memory (oom_kill)") >= 2
    core = limited.process.pid
    group.kill(core, spared=[*limited.replica()["pids"], limited.status()["fronts"][0]["pid"]])
    assert limited.process.wait(60) == -signal.SIGKILL
    limited.start()
    told = f"the previous run (process {core}) was killed or crashed, possibly because it ran out of memory"
    assert any(told in one["description"] for one in limited.status()["problems"])
    assert any(told in text for text in doctor(limited, "warning"))
    assert answer(limited)


@pytest.mark.parametrize(
    ("own_groups", "file"),
    [
        ("4:memory:/a/b\n0::/\n", "memory/a/b/memory.oom_control"),
        ("0::/system.slice/appliance.service\n", "system.slice/appliance.service/memory.events"),
    ],
)
def test_the_counter_is_read_in_both_versions_of_control_groups(
    tmp_path: Path, own_groups: str, file: str
) -> None:
    (tmp_path / "own").write_text(own_groups)
    assert count_memory_kills(tmp_path / "own", tmp_path) == 0
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text("low 0\noom 5\noom_kill 3\n")
    assert count_memory_kills(tmp_path / "own", tmp_path) == 3
