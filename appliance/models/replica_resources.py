"""One replica's GPUs, and the CPU and memory limits of its processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from appliance.models.cgroups import ReplicaCgroups, ReplicaLimits
from appliance.models.placement import GpuPlacement, numbered
from appliance.rundir import new_rendezvous
from engine.messages import ReplicaSpec


class ReplicaResources:
    """Assigns GPUs to one replica and limits the CPU time and memory of its processes. All methods must be
    called on the event loop thread."""

    def __init__(self, replica: str, placement: GpuPlacement, cgroups: ReplicaCgroups, run_dir: Path) -> None:
        """`replica` is the replica's name."""
        self.gpus: list[int] = []
        """The replica's GPU numbers, in rank order. Empty if the replica runs on the CPU, or if the service
        did not choose its GPUs."""
        self.without_limits = ""
        """Why the CPU and memory limits in the settings have no effect."""
        self._replica = replica
        self._placement = placement
        self._cgroups = cgroups
        self._run_dir = run_dir
        self._memory_kills = 0

    @property
    def links(self) -> str:
        """A description of the links between the GPUs."""
        return self._placement.links(self.gpus)

    def assign(self, spec: ReplicaSpec) -> ReplicaSpec:
        """Choose GPUs for the replica if it needs them and has none yet. Return `spec` with the GPUs, the
        CPUs near the GPUs and, if there is more than one rank, the path of a new rendezvous file. Raises
        OSError if that file's folder cannot be created."""
        self.gpus = self._placement.take(self._replica, spec.device, spec.tensor_parallel_size)
        spec = msgspec.structs.replace(
            spec, gpus=self._placement.uuids(self.gpus), cpus=self._placement.cpus(self.gpus)
        )
        if spec.tensor_parallel_size > 1:
            spec = msgspec.structs.replace(spec, rendezvous=new_rendezvous(self._run_dir))
        return spec

    def numbered(self, devices: Sequence[str]) -> list[str]:
        """Return the device names of the replica's ranks, using the machine's GPU numbers."""
        return numbered(devices, self.gpus)

    def limit(self, pids: list[int], limits: ReplicaLimits) -> str:
        """Apply CPU and memory limits to the replica's processes. If this is impossible, return the reason,
        unless it is the same as at the previous start."""
        self._memory_kills = self._cgroups.memory_kills(self._replica)
        former, self.without_limits = self.without_limits, self._cgroups.limit(self._replica, pids, limits)
        return "" if self.without_limits == former else self.without_limits

    def reached_memory_limit(self) -> bool:
        """True if the kernel has killed any of the replica's processes because of the memory limit since the
        last call to `limit`."""
        return self._cgroups.memory_kills(self._replica) > self._memory_kills

    def release_gpus(self) -> None:
        """Release the replica's GPUs, so that other replicas can use them."""
        self._placement.release(self._replica)

    def release(self) -> None:
        """Release the GPUs and control group of a replica whose processes have exited."""
        self.release_gpus()
        self._cgroups.remove(self._replica)
