"""The requests, replicas and tenants of the simulated service (`console.simulation`)."""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from dataclasses import dataclass, field

from appliance.snapshot import NO_OWNER, Stall

FREE, CACHED, USED, SHARED = range(4)
BLOCK_TOKENS = 64
"""Tokens per KV block in the simulated models."""
GPU_MEMORY_BYTES = 141 << 30
_KV_TOKEN_BYTES = 160 * 1024
"""KV cache bytes per token: 80 layers, 8 KV heads of 128 values each, keys and values, in FP8."""
KEY_NAMES = ("web", "worker", "mobile")
"""Names of each tenant's keys."""


def key_id(name: str) -> str:
    """Return the id of the key with this name."""
    return f"key_{zlib.crc32(name.encode()) & 0xFFFF:04x}"


@dataclass(kw_only=True, eq=False)
class SimRequest:
    """An unfinished request."""

    id: str
    tenant: str
    key: int
    number: int
    """Service class."""
    model: str
    arrived: float
    prompt: int
    cached: int
    output: int
    """Number of output tokens after which the request ends."""
    max_tokens: int
    replica: str = ""
    waited: bool = False
    """Whether the request had to wait because no replica could start it when it arrived."""
    started: float | None = None
    first_token: float | None = None
    computed: int = 0
    generated: float = 0.0
    blocks: list[int] = field(default_factory=list)
    preemptions: int = 0
    ended_at: float | None = None
    finish_reason: str = ""
    held: bool = False
    """Whether the request arrived during a drain and is waiting for it to end."""

    @property
    def key_name(self) -> str:
        """The name of the request's key."""
        return f"{self.tenant}-{KEY_NAMES[self.key]}"

    @property
    def key_id(self) -> str:
        """The id of the request's key."""
        return key_id(self.key_name)


@dataclass(kw_only=True)
class SimReplica:
    """A replica with its pool of KV blocks."""

    name: str
    model: str
    gpus: list[int]
    blocks: int
    max_num_seqs: int
    budget: int
    weight_bytes: int
    decode_ms: float
    """Duration of a decode step with a single sequence."""
    running: list[SimRequest] = field(default_factory=list)
    step: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    evictions: int = 0
    slice: dict[str, float] = field(default_factory=dict)
    """Step statistics for the newest time slice, keyed by name."""
    stalls: list[Stall] = field(default_factory=list)
    """The newest stalls, oldest first."""
    states: bytearray = field(default_factory=bytearray)
    freed_at: list[float] = field(default_factory=list)
    free: deque[int] = field(default_factory=deque)
    cached: dict[int, None] = field(default_factory=dict)
    """Cached blocks, least recently used first."""

    def __post_init__(self) -> None:
        self.states = bytearray(self.blocks)
        self.freed_at = [-1.0] * self.blocks
        self.free = deque(range(self.blocks))

    @property
    def kv_bytes(self) -> int:
        """KV cache size in bytes, across all the replica's GPUs."""
        space = (GPU_MEMORY_BYTES - (6 << 30)) * len(self.gpus) - self.weight_bytes
        return min(self.blocks * BLOCK_TOKENS * _KV_TOKEN_BYTES, space)

    @property
    def load_seconds(self) -> float:
        """Time taken to load the weights."""
        return 41.2 if len(self.gpus) > 1 else 7.9

    @property
    def used_bytes(self) -> int:
        """Memory used by the replica, across all its GPUs."""
        return self.weight_bytes + self.kv_bytes + (3 << 30) * len(self.gpus)

    @property
    def used(self) -> int:
        """Number of blocks in use."""
        return self.blocks - len(self.free) - len(self.cached)

    def take(self, request: SimRequest, count: int) -> bool:
        """Give a request `count` more blocks. Return False if the pool has too few free blocks."""
        if len(self.free) + len(self.cached) < count:
            return False
        for _ in range(count):
            if self.free:
                block = self.free.popleft()
            else:
                block = next(iter(self.cached))
                del self.cached[block]
                self.evictions += 1
            self.states[block] = USED
            request.blocks.append(block)
        return True

    def give_back(self, request: SimRequest, now: float, keep: int) -> None:
        """Return a request's blocks to the pool, keeping the first `keep` blocks cached."""
        for index, block in enumerate(request.blocks):
            self.freed_at[block] = now
            if index < keep:
                self.states[block] = CACHED
                self.cached[block] = None
            else:
                self.states[block] = FREE
                self.free.append(block)
        request.blocks = []

    def owners(self, index: dict[str, int]) -> bytes:
        """Return each block's owner, in the format of `appliance.snapshot.BlockMap`."""
        found = array("H", [NO_OWNER]) * self.blocks
        for request in self.running:
            number = index[request.id]
            for block in request.blocks:
                found[block] = number
        return found.tobytes()

    def ages(self, now: float) -> bytes:
        """Return each block's age, in the format of `appliance.snapshot.BlockMap`."""
        found = bytearray(self.blocks)
        for block in self.cached:
            found[block] = int(1 + now - self.freed_at[block]).bit_length() - 1
        return bytes(found)


@dataclass
class SimLimit:
    """A tenant's token allowance, which refills continuously."""

    name: str
    capacity: float
    period_s: float
    """Time needed to refill the allowance completely."""
    level: float = 0.0
    """Tokens that were used and have not been refilled yet."""


@dataclass(kw_only=True)
class SimTenant:
    """A tenant and its counters."""

    name: str
    weight: float
    highest_class: int
    limits: list[SimLimit]
    concurrent: int | None
    suspended_at: float | None = None
    running: int = 0
    waiting: int = 0
    requests: int = 0
    refused: int = 0
    prompt: int = 0
    cached: int = 0
    billed: int = 0
    service: float = 0.0
    recent: deque[tuple[float, float]] = field(default_factory=deque)
    """(end time, weighted tokens) for each request that ended in the last minute."""


@dataclass(kw_only=True)
class SimDrain:
    """A drain of a model, or of the whole service."""

    since: float
    grace_s: float = 120.0
    hold: bool = False
    """Whether new requests wait until the drain ends; otherwise they are refused."""
    completed_at: float | None = None
    """When the drain's last request ended; None until then."""
    cancelled: int = 0
    """Number of requests cancelled because they were still running when the grace period ended."""


@dataclass(kw_only=True)
class Ended:
    """A request that has ended, kept for computing percentiles."""

    at: float
    ttft_ms: float
    itl_ms: float
    queue_ms: float
    e2e_ms: float


WINDOW_S = 60.0
STARTUP_S = 65.0
"""Time between the start of the service and the start of the simulation."""
