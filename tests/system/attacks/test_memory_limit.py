"""Tests of a control group with a memory limit, where the kernel kills a process of the service."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tests.system.service
from engine.memory_kills import count_memory_kills
from tests.system.attacks.reading import no_problem
from tests.system.service import Service, service
from tests.system.test_deaths import answer

pytestmark = pytest.mark.system

V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
TAKES_MEMORY = """
import pathlib, sys, time
counters, taken = pathlib.Path(sys.argv[1]), []
before = counters.read_text()
while counters.read_text() == before and len(taken) < 300:
    taken.append(bytearray(b"x") * (2 << 20))
    time.sleep(0.05)
pathlib.Path(sys.argv[2]).write_text(sys.argv[3])
"""
"""A program that allocates memory until the control group's counters show that a process was killed, and then
lifts the limit."""


class Group:
    """A control group (cgroup v1 or v2)."""

    def __init__(self) -> None:
        v1 = V1.exists()
        self.folder = (V1 if v1 else V2) / f"appliance-test-{os.getpid()}"
        self.folder.mkdir()
        self.limit = self.folder / ("memory.limit_in_bytes" if v1 else "memory.max")
        self.usage = self.folder / ("memory.usage_in_bytes" if v1 else "memory.current")
        self.counters = self.folder / ("memory.oom_control" if v1 else "memory.events")
        self.unlimited = "-1" if v1 else "max"
        if not (self.limit.exists() and "oom_kill " in self.counters.read_text()):
            self.folder.rmdir()
            raise OSError(f"{self.folder.parent} offers no memory limits")

    def kill(self, pid: int, spared: list[int]) -> None:
        """Make the kernel kill this process by allocating memory in another process. The processes in
        `spared` leave the group, so the kernel cannot choose them."""
        for one in spared:
            (self.folder.parent / "cgroup.procs").write_text(str(one))
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
        enter = f"echo $$ >{self.folder}/cgroup.procs; echo 900 >/proc/self/oom_score_adj; exec "
        words = [
            sys.executable,
            "-I",
            "-c",
            TAKES_MEMORY,
            str(self.counters),
            str(self.limit),
            self.unlimited,
        ]
        # If memory runs out again before the killed process has ended, the kernel kills the process that
        # allocates memory.
        self.limit.write_text(str(int(self.usage.read_text()) + (20 << 20)))
        try:
            subprocess.run(["sh", "-c", enter + '"$@"', "sh", *words], check=False, timeout=120)
        finally:
            self.limit.write_text(self.unlimited)


@pytest.fixture
def group() -> Iterator[Group]:
    try:
        made = Group()
        made.limit.write_text(made.unlimited)
    except OSError as error:
        pytest.skip(f"needs a control group with a memory limit that this user can set: {error}")
    yield made
    made.folder.rmdir()


@pytest.fixture
def limited(group: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """Start a service in the control group."""
    command = tmp_path / "appliance"
    enter = f"echo $$ >{group.folder}/cgroup.procs"
    command.write_text(f'#!/bin/sh\n{enter}\nexec {tests.system.service.APPLIANCE} "$@"\n')
    command.chmod(0o755)
    with monkeypatch.context() as patched:
        patched.setattr(tests.system.service, "APPLIANCE", str(command))
        with service() as running:
            patched.undo()
            yield running


def test_a_rank_and_a_front_that_are_killed_for_memory_are_replaced_and_the_cause_is_said(
    limited: Service, group: Group
) -> None:
    with limited.client() as client:
        stream = client.completions.create(
            model="demo", prompt="x", max_tokens=300, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        group.kill(limited.replica()["pids"][0], spared=[limited.status()["fronts"][0]["pid"]])
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
    said = limited.wait_until(lambda: limited.replica()["last_error"], 60, "the reason")
    assert "was killed by SIGKILL; since it started, the kernel has killed" in said
    no_problem(limited)
    front = limited.status()["fronts"][0]
    (group.folder / "cgroup.procs").write_text(str(front["pid"]))
    group.kill(front["pid"], spared=limited.replica()["pids"])
    limited.wait_until(lambda: limited.status()["fronts"][0]["restarts"] > 0, 60, "the front's end")
    assert "since it started, the kernel has killed" in limited.status()["fronts"][0]["last_error"]
    no_problem(limited)
    assert answer(limited)
    assert limited.log_path.read_text().count("for lack of memory (oom_kill)") >= 2


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
