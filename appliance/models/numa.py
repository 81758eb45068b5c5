"""Reads this machine's NUMA topology from sysfs: each GPU's node, and each node's CPUs."""

from __future__ import annotations

import os
from pathlib import Path

_PCI = Path("/sys/bus/pci/devices")
_NODES = Path("/sys/devices/system/node")


def node_of_bus(bus: str, root: Path = _PCI) -> int:
    """Return a PCI device's NUMA node, or -1 if unknown. `bus` is an address in NVML's format, such as
    "00000000:1b:00.0"."""
    domain, _, rest = bus.lower().partition(":")
    try:
        return int((root / f"{domain[-4:]}:{rest}" / "numa_node").read_text())
    except (OSError, ValueError):
        return -1


def cpus_near(nodes: set[int], root: Path = _NODES) -> tuple[int, ...]:
    """Return the CPUs of these NUMA nodes that this process may use. The set is empty if a node is unknown,
    if the machine has only one node, or if this process may use none of those CPUs."""
    if -1 in nodes or len(list(root.glob("node[0-9]*"))) < 2:
        return ()
    near: set[int] = set()
    for node in nodes:
        try:
            near |= parse_cpus((root / f"node{node}" / "cpulist").read_text())
        except (OSError, ValueError):
            return ()
    return tuple(sorted(near & os.sched_getaffinity(0)))


def parse_cpus(text: str) -> set[int]:
    """Parse a CPU list such as "0-3,8". Raises ValueError if the list is not valid."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    return cpus
