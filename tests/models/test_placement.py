"""Tests of how GPUs are chosen by their free memory, of MIG instances, and of the CPUs near each GPU."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from appliance.models.gpus import find_gpus
from appliance.models.numa import cpus_near, node_of_bus, parse_cpus
from appliance.models.placement import GpuPlacement
from appliance.models.topology import Topology, choose_gpus, describe_links, read_topology
from tests.models.test_topology import HGX_H200, PAIRS

GIB = 1 << 30
IDLE = 140 * GIB


def test_gpus_that_other_processes_use_are_left_out() -> None:
    free = [20 * GIB, IDLE, IDLE, 40 * GIB, IDLE, IDLE, IDLE, IDLE]
    assert choose_gpus(HGX_H200, 1, [0] * 8, free) == [1]
    assert choose_gpus(HGX_H200, 2, [0] * 8, free) == [1, 2]
    assert choose_gpus(HGX_H200, 1, [0] * 8) == [0]


def test_small_differences_of_free_memory_do_not_matter() -> None:
    free = [IDLE - 2 * GIB, IDLE, IDLE, IDLE, IDLE, IDLE, IDLE, IDLE]
    assert choose_gpus(HGX_H200, 1, [0] * 8, free) == [0]
    assert choose_gpus(HGX_H200, 1, [1, 0, 0, 0, 0, 0, 0, 0], free) == [1]


def test_a_fast_link_counts_only_among_gpus_with_enough_memory() -> None:
    assert choose_gpus(PAIRS, 2, [0] * 4, [IDLE] * 4) == [0, 3]
    assert choose_gpus(PAIRS, 2, [0] * 4, [10 * GIB, IDLE, IDLE, IDLE]) == [1, 2]
    assert choose_gpus(PAIRS, 2, [0] * 4, [10 * GIB, 10 * GIB, IDLE, IDLE]) == [2, 3]


def test_the_free_memory_is_read_when_gpus_are_chosen() -> None:
    free = [IDLE] * 8
    placement = GpuPlacement(HGX_H200, lambda: free)
    assert placement.take("a-0", "cuda", 1) == [0]
    free[1] = 3 * GIB
    assert placement.take("b-0", "cuda", 1) == [2]
    free[0] = 3 * GIB
    assert placement.take("a-0", "cuda", 1) == [0]  # a restarted replica keeps its GPU


class FakeNvml:
    """Two GPUs. The first is split into two MIG instances."""

    NVML_DEVICE_MIG_ENABLE = 1
    NVML_NVLINK_MAX_LINKS = 0
    NVML_P2P_STATUS_OK = 0

    class NVMLError(Exception):
        value = 0

    def __init__(self) -> None:
        self.instances = {0: {0: "MIG-a", 3: "MIG-b"}}

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 13000

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.1"

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetMigMode(self, gpu: int) -> tuple[int, int]:
        return int(gpu in self.instances), 0

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: int) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: int, index: int) -> str:
        if index not in self.instances[gpu]:
            raise self.NVMLError
        return self.instances[gpu][index]

    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        return handle if isinstance(handle, str) else f"GPU-{handle}"

    def nvmlDeviceGetName(self, handle: Any) -> str:
        return "NVIDIA H200 MIG 3g.71gb" if isinstance(handle, str) else "NVIDIA H200"

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any:
        return SimpleNamespace(total=(70 if isinstance(handle, str) else 140) * GIB, used=GIB)

    def nvmlDeviceGetCudaComputeCapability(self, gpu: int) -> tuple[int, int]:
        return 9, 0

    def nvmlDeviceGetPciInfo(self, gpu: int) -> Any:
        return SimpleNamespace(busId=f"00000000:{gpu:02X}:00.0")


def test_mig_instances_replace_their_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())  # type: ignore[arg-type]
    topology = read_topology()
    assert topology.uuids == ["MIG-a", "MIG-b", "GPU-1"] and topology.instances == {0, 1}
    found = find_gpus().gpus
    assert [(gpu.number, gpu.memory_bytes // GIB) for gpu in found] == [(0, 70), (1, 70), (2, 140)]
    assert found[0].name == "NVIDIA H200 MIG 3g.71gb" and found[0].compute_capability == "9.0"
    placement = GpuPlacement(topology, lambda: [69 * GIB, 69 * GIB, 69 * GIB])
    assert [placement.take(name, "cuda", 1) for name in "abc"] == [[0], [1], [2]]
    assert placement.uuids([1]) == ("MIG-b",)
    assert placement.choose(2) == []  # a replica's ranks need whole GPUs
    assert describe_links(topology, [0, 1, 2]) == ""


class TwoWholeGpus(FakeNvml):
    """Two GPUs that can access each other's memory, with the constants of the installed nvidia-ml-py."""

    def __init__(self) -> None:
        self.instances = {}

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("NVML_"):
            raise AttributeError(name)
        return getattr(pynvml, name)

    def nvmlDeviceGetTopologyCommonAncestor(self, a: int, b: int) -> int:
        return int(pynvml.NVML_TOPOLOGY_SYSTEM)

    def nvmlDeviceGetP2PStatus(self, a: int, b: int, index: int) -> int:
        # NVML is a C library: ctypes refuses an index that is not an integer.
        denied = ctypes.c_int(index).value not in (0, 1)
        return int(pynvml.NVML_P2P_STATUS_NOT_SUPPORTED if denied else pynvml.NVML_P2P_STATUS_OK)


def test_peer_access_needs_reading_and_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", TwoWholeGpus())  # type: ignore[arg-type]
    [link] = read_topology().links.values()
    assert link.peer_access and link.nvlinks == 0


def test_the_node_of_a_gpu_is_read_from_its_pci_address(tmp_path: Path) -> None:
    (tmp_path / "0000:1b:00.0").mkdir()
    (tmp_path / "0000:1b:00.0" / "numa_node").write_text("1\n")
    assert node_of_bus("00000000:1B:00.0", tmp_path) == 1
    assert node_of_bus("00000000:1c:00.0", tmp_path) == -1


def test_cpus_near_a_gpu_are_known_only_with_several_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(1, 16)))
    for node, cpus in enumerate(("0-3,8", "4-7")):
        assert cpus_near({0}, tmp_path) == ()
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cpus + "\n")
    assert cpus_near({0}, tmp_path) == (1, 2, 3, 8)
    assert cpus_near({0, 1}, tmp_path) == (1, 2, 3, 4, 5, 6, 7, 8)
    assert cpus_near({-1}, tmp_path) == () and cpus_near({5}, tmp_path) == ()
    assert parse_cpus("") == set() and parse_cpus("2") == {2}


def test_a_placement_without_known_nodes_binds_to_no_cpus() -> None:
    assert GpuPlacement(HGX_H200, lambda: [IDLE] * 8).cpus([0]) == ()
    assert GpuPlacement(Topology([], {})).cpus([]) == ()
