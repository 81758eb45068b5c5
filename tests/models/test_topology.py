"""Tests that the choice of GPUs depends on the links between them, using the topology tables of real
machines."""

from __future__ import annotations

from itertools import combinations

import msgspec
import pytest

from appliance.cli.status import replica_devices
from appliance.models.placement import GpuPlacement, machine_topology, numbered
from appliance.models.topology import NO_TOPOLOGY, GpuLink, Path, Topology, choose_gpus, describe_links
from appliance.monitoring.machine import gpu_links
from appliance.protocol import ReplicaStatus


def topology(table: str) -> Topology:
    """Return the topology described by a table in the format of `nvidia-smi topo -m`, without its
    headings."""
    paths = {"PIX": Path.SWITCH, "PXB": Path.SWITCH, "PHB": Path.HOST_BRIDGE, "NODE": Path.NUMA_NODE}
    rows = [line.split() for line in table.strip().splitlines()]
    links = {}
    for a, b in combinations(range(len(rows)), 2):
        text = rows[a][b]
        assert text == rows[b][a]
        nvlinks = int(text[2:]) if text.startswith("NV") else 0
        peer_access = not text.endswith("!")
        links[a, b] = GpuLink(nvlinks, paths.get(text.rstrip("!"), Path.SYSTEM), peer_access)
    return Topology([f"GPU-{number}" for number in range(len(rows))], links)


HGX_H200 = topology("\n".join(" ".join("X" if a == b else "NV18" for b in range(8)) for a in range(8)))
"""8 × H200 behind NVSwitches."""

TWO_SOCKETS = topology(
    """
    X    SYS  NODE SYS
    SYS  X    SYS  NODE
    NODE SYS  X    SYS
    SYS  NODE SYS  X
    """
)
"""4 × L40S, with GPUs 0 and 2 on one NUMA node, and GPUs 1 and 3 on the other."""

PAIRS = topology(
    """
    X   SYS SYS NV4
    SYS X   NV4 SYS
    SYS NV4 X   SYS
    NV4 SYS SYS X
    """
)
"""4 × A100 PCIe, with one NVLink bridge between GPUs 0 and 3 and another between GPUs 1 and 2."""

NO_PEERS = topology(
    """
    X    PHB! SYS!
    PHB! X    SYS!
    SYS! SYS! X
    """
)
"""3 GPUs in a virtual machine without peer access."""


@pytest.mark.parametrize(
    ("machine", "count", "replicas", "chosen"),
    [
        (HGX_H200, 1, [0] * 8, [0]),
        (HGX_H200, 4, [0] * 8, [0, 1, 2, 3]),
        (HGX_H200, 4, [1, 1, 1, 1, 0, 0, 0, 0], [4, 5, 6, 7]),
        (HGX_H200, 2, [0, 1, 1, 0, 1, 1, 1, 1], [0, 3]),
        (HGX_H200, 8, [0] * 8, list(range(8))),
        (TWO_SOCKETS, 2, [0] * 4, [0, 2]),
        (TWO_SOCKETS, 2, [1, 0, 0, 0], [1, 3]),
        (TWO_SOCKETS, 4, [0] * 4, [0, 1, 2, 3]),
        (PAIRS, 2, [0] * 4, [0, 3]),
        (PAIRS, 2, [1, 0, 0, 1], [1, 2]),
        (PAIRS, 3, [0] * 4, [0, 1, 2]),
        (NO_PEERS, 2, [0] * 3, [0, 1]),
        (PAIRS, 5, [0] * 4, []),
        (NO_TOPOLOGY, 1, [], []),
    ],
)
def test_gpus_are_chosen_by_use_then_by_links(
    machine: Topology, count: int, replicas: list[int], chosen: list[int]
) -> None:
    assert choose_gpus(machine, count, replicas) == chosen


@pytest.mark.parametrize(
    ("machine", "gpus", "text"),
    [
        (HGX_H200, range(8), "NVLink (18 links)"),
        (HGX_H200, [3], ""),
        (TWO_SOCKETS, [0, 2], "PCIe within one NUMA node"),
        (
            PAIRS,
            range(4),
            "NVLink (4 links) between 2 of 6 pairs; PCIe across NUMA nodes between 4 of 6 pairs",
        ),
        (NO_PEERS, [0, 1], "PCIe through the host bridge, without peer access"),
    ],
)
def test_links_are_described(machine: Topology, gpus: list[int], text: str) -> None:
    assert describe_links(machine, gpus) == text


def test_a_replica_keeps_its_gpus_until_it_ends() -> None:
    placement = GpuPlacement(PAIRS)
    assert placement.take("m-0", "auto", 2) == [0, 3]
    assert placement.take("m-1", "cuda", 2) == [1, 2]
    assert placement.take("m-0", "auto", 2) == [0, 3], "it restarted"
    assert placement.take("cpu-0", "cpu", 2) == []
    assert placement.uuids([1, 2]) == ("GPU-1", "GPU-2")
    placement.release("m-1")
    assert placement.take("m-2", "auto", 1) == [1]
    assert placement.choose(1) == [2], "the only GPU without a replica"


def test_visible_devices_of_the_environment_are_left_to_the_operator() -> None:
    assert machine_topology({"CUDA_VISIBLE_DEVICES": "4,5"}) is NO_TOPOLOGY
    assert GpuPlacement(NO_TOPOLOGY).take("m-0", "cuda", 2) == []


def test_devices_have_the_numbers_of_the_machine() -> None:
    seen = ["cuda:0 NVIDIA H200", "cuda:1 NVIDIA H200"]
    assert numbered(seen, [5, 7]) == ["cuda:5 NVIDIA H200", "cuda:7 NVIDIA H200"]
    assert numbered(seen, []) == seen
    assert numbered(["cpu"], [3]) == ["cpu"]


def test_the_doctor_warns_of_gpus_without_peer_access() -> None:
    (linked,) = gpu_links(HGX_H200)
    assert (linked.level, linked.text) == ("ok", "NVLink (18 links)")
    (apart,) = gpu_links(NO_PEERS)
    assert apart.level == "warning" and "without peer access" in apart.text and "NCCL" in apart.text
    assert list(gpu_links(NO_TOPOLOGY)) == []


def test_the_status_names_links_and_collectives_of_ranks() -> None:
    devices = ["cuda:4 NVIDIA H200", "cuda:5 NVIDIA H200"]
    status = ReplicaStatus(name="m-0", state="ready", devices=devices, dtype="bfloat16")
    status = msgspec.structs.replace(status, links="NVLink (18 links)", collectives="NCCL")
    assert "cuda:5 NVIDIA H200 (NVLink (18 links), NCCL), " in replica_devices(status)
    status = msgspec.structs.replace(status, links="", collectives="")
    assert "cuda:5 NVIDIA H200, " in replica_devices(status)
