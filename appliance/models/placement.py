"""Assigns GPUs to replicas."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from appliance.models.gpus import find_gpus
from appliance.models.numa import cpus_near
from appliance.models.topology import NO_TOPOLOGY, Topology, choose_gpus, describe_links, read_topology


class GpuPlacement:
    """Assigns GPUs to replicas. A replica keeps its GPUs across restarts until it is stopped."""

    def __init__(self, topology: Topology, free_bytes: Callable[[], Sequence[int]] | None = None) -> None:
        """If `topology` is empty, no GPUs are assigned, and every replica uses the first visible GPUs.
        `free_bytes` returns each GPU's free memory, by default from NVML."""
        self._topology = topology
        self._free_bytes = free_bytes or _free_bytes
        self._of: dict[str, list[int]] = {}

    def take(self, replica: str, device: str, count: int) -> list[int]:
        """Return the numbers of the replica's GPUs, choosing them if necessary. Empty if no GPUs are
        assigned."""
        if device == "cpu":
            return []
        if replica not in self._of:
            self._of[replica] = self.choose(count)
        return self._of[replica]

    def choose(self, count: int) -> list[int]:
        """Return the numbers of the GPUs that a new replica would get, or an empty list if no GPUs are
        assigned. May be called from any thread."""
        used = [gpu for gpus in list(self._of.values()) for gpu in gpus]
        replicas = [used.count(gpu) for gpu in range(len(self._topology.uuids))]
        if not replicas:
            return []
        return choose_gpus(self._topology, count, replicas, self._free_bytes())

    def release(self, replica: str) -> None:
        """Release a stopped replica's GPUs."""
        self._of.pop(replica, None)

    def cpus(self, gpus: Sequence[int]) -> tuple[int, ...]:
        """Return the CPUs in these GPUs' NUMA nodes. Empty if there is only one node, or if the nodes are
        unknown."""
        nodes = self._topology.nodes
        return cpus_near({nodes[gpu] for gpu in gpus}) if gpus and nodes else ()

    def uuids(self, gpus: Sequence[int]) -> tuple[str, ...]:
        """Return the UUIDs of these GPUs."""
        return tuple(self._topology.uuids[gpu] for gpu in gpus)

    def links(self, gpus: Sequence[int]) -> str:
        """Return a description of the links between these GPUs."""
        return describe_links(self._topology, gpus)


def machine_topology(environment: Mapping[str, str] = os.environ) -> Topology:
    """Return the GPUs that the service may choose from; empty if CUDA_VISIBLE_DEVICES is set, since that
    already selects GPUs."""
    return NO_TOPOLOGY if "CUDA_VISIBLE_DEVICES" in environment else read_topology()


def numbered(devices: Sequence[str], gpus: Sequence[int]) -> list[str]:
    """Return the device names of a replica's ranks, using the machine's GPU numbers. Each rank numbers only
    the GPUs it can see, starting at 0. For example, if `gpus` begins with 5, the first rank's "cuda:0 NVIDIA
    H200" is returned as "cuda:5 NVIDIA H200".
    """
    if len(devices) != len(gpus) or not all(device.startswith("cuda:") for device in devices):
        return list(devices)
    return [f"cuda:{gpu} {device.partition(' ')[2]}" for device, gpu in zip(devices, gpus, strict=True)]


def _free_bytes() -> list[int]:
    return [gpu.memory_bytes - gpu.used_bytes for gpu in find_gpus().gpus]
