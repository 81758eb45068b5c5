"""Tests of the replicas' control groups, in a folder that replaces the cgroup file system."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from appliance.models.cgroups import ReplicaCgroups, ReplicaLimits, limits_of
from appliance.settings import ModelSettings

UNIT = "system.slice/appliance.service"
LIMITS = ReplicaLimits(cpus=1.5, memory_bytes=4_000_000_000)


class Tree:
    """A cgroup v2 file system with the service's cgroup."""

    def __init__(self, folder: Path, controllers: str = "cpu memory pids") -> None:
        self.root, self.own = folder / "cgroup", folder / "own"
        self.base = self.root / UNIT
        self.base.mkdir(parents=True)
        (self.base / "cgroup.controllers").write_text(controllers)
        (self.base / "cgroup.procs").write_text("")
        self.own.write_text(f"1:name=systemd:/x\n0::/{UNIT}\n")
        self.groups = ReplicaCgroups(lambda: [7, 8], self.root, self.own)

    def text(self, name: str) -> str:
        return (self.base / name).read_text()


def test_the_processes_of_a_replica_get_its_limits(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    assert tree.groups.limit("org/chat@1-0", [41, 42], LIMITS) == ""
    assert tree.text("cgroup.subtree_control") == "+cpu +memory"
    assert tree.text("replica-org_chat_1-0/cpu.max") == "150000 100000"
    assert tree.text("replica-org_chat_1-0/memory.max") == "4000000000"
    assert tree.text("replica-org_chat_1-0/memory.oom.group") == "1"
    assert tree.text("replica-org_chat_1-0/cgroup.procs") == "42"  # each process is moved by a separate write
    assert (tree.base / "service").is_dir()


def test_a_limit_that_is_not_set_is_removed(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.groups.limit("m-0", [41], LIMITS)
    tree.groups.limit("m-0", [41], LIMITS._replace(cpus=None))
    assert tree.text("replica-m-0/cpu.max") == "max 100000"
    assert tree.text("replica-m-0/memory.max") == "4000000000"


def test_without_limits_no_group_is_created(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    assert tree.groups.limit("m-0", [41], ReplicaLimits()) == ""
    assert sorted(path.name for path in tree.base.iterdir()) == ["cgroup.controllers", "cgroup.procs"]


def test_a_service_without_delegation_says_why_there_are_no_limits(tmp_path: Path) -> None:
    tree = Tree(tmp_path, controllers="pids")
    reason = tree.groups.limit("m-0", [41], LIMITS)
    assert reason.startswith("cpu_limit and memory_limit_gb have no effect: ")
    assert "does not have the controllers cpu and memory" in reason
    shared = Tree(tmp_path / "shared")
    (shared.base / "cgroup.procs").write_text("1\n2\n")
    shared_reason = shared.groups.limit("m-0", [41], LIMITS)
    assert "contains processes that do not belong to the service (1, 2)" in shared_reason
    version_1 = Tree(tmp_path / "v1")
    version_1.own.write_text("4:memory:/a\n")
    assert "no cgroup v2" in version_1.groups.limit("m-0", [41], LIMITS)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_cgroup_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.base.chmod(0o555)
    assert "service: Permission denied" in tree.groups.limit("m-0", [41], LIMITS)


def test_kills_because_of_the_memory_limit_are_counted(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    assert tree.groups.memory_kills("m-0") == 0
    tree.groups.limit("m-0", [41], LIMITS)
    assert tree.groups.memory_kills("m-0") == 0
    (tree.base / "replica-m-0/memory.events").write_text("low 0\noom 2\noom_kill 3\n")
    assert tree.groups.memory_kills("m-0") == 3


def test_the_settings_give_the_limits_and_the_number_of_threads() -> None:
    model = ModelSettings(folder="/m", cpu_limit=4.5, memory_limit_gb=2.5, tensor_parallel_size=2)
    assert limits_of(model) == ReplicaLimits(4.5, 2_500_000_000)
    assert model.spec("m-0").threads == 2
    assert ModelSettings(folder="/m", cpu_limit=0.5).spec("m-0").threads == 1
    assert ModelSettings(folder="/m", cpu_limit=4, threads=3).spec("m-0").threads == 3
    assert limits_of(ModelSettings(folder="/m")) == ReplicaLimits()
