"""Chooses GPUs for replicas according to the links between this machine's GPUs, which are read from NVML.
NVML creates no CUDA context. The choice is a pure function of plain data.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

from appliance.models.gpus import devices, nvml_session
from appliance.models.numa import node_of_bus

P2P_READ, P2P_WRITE, P2P_NVLINK = range(3)
"""Values of `nvmlGpuP2PCapsIndex_t` in nvml.h. nvidia-ml-py 13.615 defines the first as the tuple `(0,)`."""


class Path(enum.IntEnum):
    """PCIe paths between two GPUs, from fastest to slowest, as in `nvidia-smi topo`."""

    BOARD = 0
    SWITCH = 1
    HOST_BRIDGE = 2
    NUMA_NODE = 3
    SYSTEM = 4


_PATH_TEXT = {
    Path.BOARD: "PCIe on one board",
    Path.SWITCH: "PCIe through switches",
    Path.HOST_BRIDGE: "PCIe through the host bridge",
    Path.NUMA_NODE: "PCIe within one NUMA node",
    Path.SYSTEM: "PCIe across NUMA nodes",
}


class GpuLink(NamedTuple):
    """The link between two GPUs."""

    nvlinks: int
    """Number of NVLinks between the GPUs, direct or through NVSwitch."""
    path: Path
    peer_access: bool
    """Whether the GPUs can read and write each other's memory."""

    @property
    def text(self) -> str:
        """Description of the link, such as "NVLink (18 links)" or "PCIe across NUMA nodes, without peer
        access"."""
        name = f"NVLink ({self.nvlinks} links)" if self.nvlinks else _PATH_TEXT[self.path]
        return name if self.peer_access else f"{name}, without peer access"

    @property
    def _cost(self) -> int:
        """Cost for comparing links: 0 for NVLink, higher for slower links."""
        cost = 0 if self.nvlinks else 1 + self.path
        return cost if self.peer_access else cost + 1 + Path.SYSTEM


class Topology(NamedTuple):
    """A machine's GPUs, in the order of their numbers. A GPU that is split into MIG instances is replaced by
    its instances."""

    uuids: list[str]
    links: dict[tuple[int, int], GpuLink]
    """Links, keyed by the numbers of the two GPUs, lower number first. MIG instances have no links."""
    nodes: tuple[int, ...] = ()
    """NUMA node of each GPU, or -1 if unknown. Empty if no node is known."""
    instances: frozenset[int] = frozenset()
    """GPU numbers of the MIG instances. MIG instances can run only single-rank replicas, because a process
    can use only one MIG instance."""

    def between(self, gpus: Sequence[int]) -> list[GpuLink]:
        """Return the links between these GPUs, one for each linked pair."""
        return [self.links[pair] for pair in combinations(sorted(gpus), 2) if pair in self.links]


NO_TOPOLOGY = Topology([], {})
_SIMILAR_FREE = 0.9
"""Two GPUs are treated as having equal free memory if the smaller amount is at least this fraction of the
larger one, because the free memory of idle GPUs varies slightly."""


def choose_gpus(
    topology: Topology, count: int, replicas: Sequence[int], free: Sequence[int] = ()
) -> list[int]:
    """Return the numbers of `count` GPUs for one replica, in ascending order. Empty if the machine has fewer
    GPUs.

    `replicas` holds the number of replicas per GPU, and `free` the free memory per GPU in bytes (empty if
    unknown). GPUs with less than 90% of the best available GPUs' free memory are excluded. Of the remaining
    GPUs, those with the fewest replicas are chosen. Ties are broken, in this order, by the cost of the
    slowest link, the total cost of the links, the number of NVLinks, and the GPU numbers.
    """
    numbers = range(len(topology.uuids))
    usable = [gpu for gpu in numbers if count == 1 or gpu not in topology.instances]
    groups: list[tuple[int, ...]] = list(combinations(usable, count)) if count > 0 else []
    if len(free) == len(numbers):
        # The GPU with the least free memory determines every rank's KV cache size.
        most = max((min(free[gpu] for gpu in group) for group in groups), default=0)
        groups = [group for group in groups if min(free[gpu] for gpu in group) >= _SIMILAR_FREE * most]

    def key(group: tuple[int, ...]) -> tuple[int, ...]:
        links = topology.between(group)
        costs = [link._cost for link in links]
        nvlinks = sum(link.nvlinks for link in links)
        return (sum(replicas[gpu] for gpu in group), max(costs, default=0), sum(costs), -nvlinks, *group)

    if not groups:
        return []
    best = min(groups, key=key)
    return list(best)


def describe_links(topology: Topology, gpus: Sequence[int]) -> str:
    """Describe the links between these GPUs. If the links differ, include the number of GPU pairs for each
    kind of link. Empty for a single GPU."""
    texts = [link.text for link in sorted(topology.between(gpus), key=lambda link: link._cost)]
    kinds = list(dict.fromkeys(texts))
    if len(kinds) <= 1:
        return "".join(kinds)
    return "; ".join(f"{text} between {texts.count(text)} of {len(texts)} pairs" for text in kinds)


def read_topology() -> Topology:
    """Return this machine's topology, or `NO_TOPOLOGY` if it has no GPU or if NVML cannot determine the
    links."""
    import pynvml

    try:
        with nvml_session():
            return _read()
    except pynvml.NVMLError:
        return NO_TOPOLOGY


def _read() -> Topology:
    import pynvml

    found = list(devices())
    whole = {number: device.handle for number, device in enumerate(found) if not device.is_instance}
    remotes = {number: _remotes(handle) for number, handle in whole.items()}
    buses = [pynvml.nvmlDeviceGetPciInfo(device.gpu).busId.lower() for device in found]
    links = {}
    for a, b in combinations(whole, 2):
        nvlinks = remotes[a].count(buses[b])
        if not nvlinks and _p2p(whole[a], whole[b], P2P_NVLINK):
            # All links of both GPUs lead to NVSwitches.
            nvlinks = min(len(remotes[a]), len(remotes[b]))
        peer_access = all(_p2p(whole[a], whole[b], index) for index in (P2P_READ, P2P_WRITE))
        links[a, b] = GpuLink(nvlinks, _path(whole[a], whole[b]), peer_access)
    return Topology(
        [pynvml.nvmlDeviceGetUUID(device.handle) for device in found],
        links,
        tuple(node_of_bus(bus) for bus in buses),
        frozenset(range(len(found))) - whole.keys(),
    )


def _remotes(handle: object) -> list[str]:
    """Return the PCI addresses at the other ends of a GPU's active NVLinks. Unknown addresses are empty
    strings."""
    import pynvml

    remotes = []
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        with contextlib.suppress(pynvml.NVMLError):  # The GPU has no link with this number.
            if pynvml.nvmlDeviceGetNvLinkState(handle, link):
                remotes.append("")
                remotes[-1] = pynvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId.lower()
    return remotes


def _path(a: object, b: object) -> Path:
    import pynvml

    paths = {
        pynvml.NVML_TOPOLOGY_INTERNAL: Path.BOARD,
        pynvml.NVML_TOPOLOGY_SINGLE: Path.SWITCH,
        pynvml.NVML_TOPOLOGY_MULTIPLE: Path.SWITCH,
        pynvml.NVML_TOPOLOGY_HOSTBRIDGE: Path.HOST_BRIDGE,
        pynvml.NVML_TOPOLOGY_NODE: Path.NUMA_NODE,
    }
    return paths.get(pynvml.nvmlDeviceGetTopologyCommonAncestor(a, b), Path.SYSTEM)


def _p2p(a: object, b: object, index: int) -> bool:
    import pynvml

    try:
        return bool(pynvml.nvmlDeviceGetP2PStatus(a, b, index) == pynvml.NVML_P2P_STATUS_OK)
    except pynvml.NVMLError:
        return False
