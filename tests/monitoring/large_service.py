"""Snapshots of a large service, generated from a seed: 8 GPUs, 20 tenants, 4 models with two replicas each,
and 500 unfinished requests; 25 requests end per second."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator

import msgspec
import numpy as np

from appliance.protocol import LimitUsage, ModelStatus, ReplicaStatus
from appliance.protocol.status import CLASS_NAMES, ClassStatus, FrontStatus
from appliance.snapshot import (
    NO_OWNER,
    Batch,
    BlockMap,
    Gpu,
    GpuProcess,
    Host,
    KvCache,
    Latency,
    LatencyPercentiles,
    Process,
    Queue,
    Rates,
    ServiceTotals,
    Snapshot,
    TenantUse,
    UnfinishedRequest,
)

GPUS, TENANTS, MODELS, FRONTS, REQUESTS, ENDED_PER_S = 8, 20, 4, 4, 500, 25
BLOCKS, BLOCK_TOKENS = 16_384, 64


def large_service(at: float, seconds: int) -> Iterator[tuple[Snapshot, dict[str, BlockMap]]]:
    """Yield one snapshot per second, and the KV blocks of each replica. The values vary like those of a busy
    service."""
    state = _State(random.Random(0), at)
    simulated = [_Pool(random.Random(number)) for number in range(GPUS)]
    for second in range(seconds):
        state.advance()
        for number, pool in enumerate(simulated):
            pool.follow([one for one in state.unfinished if one.replica == _replica_of(number)], second)
        maps = {f"replica-{number}": pool.map(second) for number, pool in enumerate(simulated)}
        yield state.snapshot(at + second + state.rng.uniform(0, 0.002)), maps


def _replica_of(number: int) -> str:
    return f"model-{number // 2}-{number % 2}"


class _Pool:
    """The KV blocks of one replica. Blocks that are no longer used stay cached."""

    def __init__(self, rng: random.Random) -> None:
        self._owned: dict[str, list[int]] = {}
        self._tenants: dict[str, str] = {}
        self._used_at = np.full(BLOCKS, -1)
        """When each block was last used; -1 for a block that has never been used."""
        order = list(range(BLOCKS))
        rng.shuffle(order)
        self._free = deque(order)
        """Unused blocks, the least recently used first."""

    def follow(self, requests: list[UnfinishedRequest], now: int) -> None:
        """Take blocks for the tokens of these requests, and release the blocks of all others."""
        for name in self._owned.keys() - {one.request_id for one in requests}:
            blocks = self._owned.pop(name)
            self._free.extend(blocks)
            self._used_at[blocks] = now
        for one in requests:
            owned = self._owned.setdefault(one.request_id, [])
            self._tenants[one.request_id] = one.tenant
            tokens = one.prompt_tokens + (one.generated_tokens or 0)
            owned += [self._free.popleft() for _ in range(-(-tokens // BLOCK_TOKENS) - len(owned))]

    def map(self, now: int) -> BlockMap:
        """Return the state of the blocks."""
        owners = np.full(BLOCKS, NO_OWNER, np.uint16)
        used = self._used_at >= 0
        states = used.astype(np.uint8)
        ages = np.where(used, np.log2(1 + now - self._used_at), 0).astype(np.uint8)
        for number, blocks in enumerate(self._owned.values()):
            owners[blocks], states[blocks], ages[blocks] = number, 2, 0
        return BlockMap(
            states=states.tobytes(),
            owners=owners.tobytes(),
            ages=ages.tobytes(),
            requests=list(self._owned),
            tenants=[self._tenants[name] for name in self._owned],
            request_blocks=[len(one) for one in self._owned.values()],
            preemptions=[0] * len(self._owned),
        )


class _State:
    def __init__(self, rng: random.Random, at: float) -> None:
        self.rng = rng
        self.started_at = at - 1000
        self.tokens = [0] * GPUS
        self.prompts = [0] * GPUS
        self.steps = [0] * GPUS
        self.requests = [0] * TENANTS
        self.billed = [0] * TENANTS
        self.unfinished: list[UnfinishedRequest] = []

    def advance(self) -> None:
        rng = self.rng
        for gpu in range(GPUS):
            self.tokens[gpu] += rng.randint(2500, 3500)
            self.prompts[gpu] += rng.randint(8000, 20000)
            self.steps[gpu] += rng.randint(60, 90)
        for tenant in range(TENANTS):
            self.requests[tenant] += rng.randint(0, 4)
            self.billed[tenant] += rng.randint(0, 900)
        del self.unfinished[: ENDED_PER_S if len(self.unfinished) == REQUESTS else 0]
        for one in self.unfinished:
            one.age_s += 1.0
            one.generated_tokens = (one.generated_tokens or 0) + rng.randint(55, 65)
        self.unfinished += [self._request() for _ in range(REQUESTS - len(self.unfinished))]

    def _request(self) -> UnfinishedRequest:
        rng = self.rng
        number = rng.randrange(GPUS)
        return UnfinishedRequest(
            request_id=f"req-{rng.getrandbits(96):024x}",
            state="running",
            model=f"model-{number // 2}",
            tenant=f"tenant-{rng.randrange(TENANTS)}",
            key_id=f"key_{rng.randrange(60):08x}",
            key_name=f"worker {rng.randrange(60)}",
            peer="10.0.3.7",
            front=f"front-{rng.randrange(FRONTS)}",
            replica=_replica_of(number),
            attempt=0,
            age_s=rng.uniform(0.0, 1.0),
            prompt_tokens=rng.randint(10, 4000),
            max_tokens=1024,
            class_name="P1",
            phase="decode",
            stream=True,
            queue_s=rng.uniform(0.0, 0.1),
            ttft_s=rng.uniform(0.1, 0.4),
            cached_tokens=0,
            generated_tokens=1,
        )

    def snapshot(self, at: float) -> Snapshot:
        rng = self.rng
        replicas = [self._replica(number) for number in range(GPUS)]
        percentiles = LatencyPercentiles(
            window_s=60,
            count=rng.randint(500, 600),
            p50_ms=rng.gauss(80, 5),
            p90_ms=150.0,
            p99_ms=rng.gauss(400, 50),
        )
        return Snapshot(
            at=at,
            started_at=self.started_at,
            uptime_s=at - self.started_at,
            version="0.1.0",
            pid=100,
            state="ready",
            totals=ServiceTotals(
                prompt_tokens=sum(self.prompts),
                generated_tokens=sum(self.tokens),
                cached_tokens=sum(self.prompts) // 3,
                admitted=sum(self.requests),
                ended=sum(self.requests),
                refused=17,
                failed=3,
                billed_tokens=sum(self.billed),
            ),
            rates=Rates(
                window_s=5.0, generated_tokens_per_s=rng.gauss(24000, 500), requests_per_s=rng.gauss(40, 3)
            ),
            latency=Latency(ttft=percentiles, itl=percentiles, queue=percentiles, e2e=percentiles),
            queue=self._queue(),
            batches=[self._batch(replica, number, at) for number, replica in enumerate(replicas)],
            kv=[_kv(replica, number) for number, replica in enumerate(replicas)],
            requests=[msgspec.structs.replace(one) for one in self.unfinished],
            gpus=[self._gpu(number) for number in range(GPUS)],
            models=[self._model(number, replicas) for number in range(MODELS)],
            tenants=[self._tenant(number) for number in range(TENANTS)],
            alerts=[],
            host=self._host(at),
            fronts=[self._front(number, at) for number in range(FRONTS)],
        )

    def _queue(self) -> Queue:
        rng = self.rng
        return Queue(
            waiting=rng.randint(0, 40),
            running=rng.randint(300, 400),
            oldest_wait_s=rng.uniform(0, 0.5),
            waiting_tokens=rng.randint(0, 40000),
            limit=1000,
            classes=[
                ClassStatus(
                    name=name,
                    waiting=rng.randint(0, 10),
                    oldest_wait_s=rng.uniform(0, 0.3),
                    expected_wait_s=rng.uniform(0, 0.3),
                    target_s=float(number),
                )
                for number, name in enumerate(CLASS_NAMES)
            ],
        )

    def _model(self, number: int, replicas: list[ReplicaStatus]) -> ModelStatus:
        rng = self.rng
        return ModelStatus(
            name=f"model-{number}",
            folder=f"/srv/models/model-{number}",
            version="0123456789ab",
            created=1_700_000_000,
            state="ready",
            max_model_len=32768,
            queued=rng.randint(0, 10),
            drain_eta_s=rng.uniform(1, 60),
            replicas=replicas[2 * number : 2 * number + 2],
        )

    def _host(self, at: float) -> Host:
        rng = self.rng
        return Host(
            name="gpu-box",
            cpus=128,
            cpu_percent=rng.uniform(5, 9),
            load_1m=rng.uniform(8, 12),
            memory_bytes=1 << 40,
            memory_used_bytes=rng.randint(1 << 37, 1 << 38),
            disk_bytes=1 << 42,
            disk_free_bytes=(1 << 41) - int(at) * 4096 % (1 << 30),
            processes=[
                Process(
                    name=f"process-{number}",
                    role="replica",
                    pid=1000 + number,
                    state="ready",
                    cpu_percent=rng.uniform(20, 100),
                    memory_bytes=rng.randint(4 << 30, 5 << 30) & ~4095,
                    restarts=0,
                )
                for number in range(1 + FRONTS + GPUS)
            ],
        )

    def _front(self, number: int, at: float) -> FrontStatus:
        rng = self.rng
        return FrontStatus(
            name=f"front-{number}",
            state="ready",
            pid=2000 + number,
            connections=rng.randint(80, 120),
            busy_connections=rng.randint(60, 100),
            max_connections=4096,
            streams=rng.randint(60, 100),
            requests=sum(self.requests) // 4,
            tokens=sum(self.tokens) // 4,
            cpu_seconds=at - self.started_at,
            cpu_us_per_token=rng.gauss(14, 1),
        )

    def _replica(self, number: int) -> ReplicaStatus:
        rng = self.rng
        return ReplicaStatus(
            name=f"model-{number // 2}-{number % 2 + 1}",
            state="ready",
            pids=[1005 + number],
            devices=[f"cuda:{number} NVIDIA H200"],
            backend="cuda",
            dtype="bfloat16",
            weights="bfloat16",
            kv_cache_dtype="fp8",
            parameters=8_030_261_248,
            weight_bytes=16 << 30,
            kv_bytes=100 << 30,
            predicted_bytes=120 << 30,
            used_bytes=121 << 30,
            load_seconds=9.25,
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            step=self.steps[number],
            credit_seqs=rng.randint(0, 100),
            credit_tokens=rng.randint(0, 16384),
            running=rng.randint(30, 60),
            waiting=rng.randint(0, 3),
            blocks_total=16384,
            blocks_used=rng.randint(6000, 9000),
            blocks_cached=rng.randint(4000, 6000),
            prompt_tokens=self.prompts[number],
            cached_tokens=self.prompts[number] // 3,
            computed_tokens=self.prompts[number] * 2 // 3,
            generated_tokens=self.tokens[number],
            decode_steps=rng.randint(1, 8),
            step_ms=rng.gauss(11, 0.5),
            idle_us=rng.gauss(12, 2),
            mixed_steps=rng.randint(0, 3),
            mixed_step_ms=rng.gauss(30, 4),
            last_report_s=rng.uniform(0, 0.1),
        )

    def _batch(self, replica: ReplicaStatus, number: int, at: float) -> Batch:
        rng = self.rng
        return Batch(
            model=f"model-{number // 2}",
            replica=replica.name,
            at=at,
            span_s=1.0 + rng.uniform(-0.001, 0.001),
            step=replica.step,
            steps=rng.randint(60, 90),
            decode_steps=rng.randint(50, 70),
            mixed_steps=rng.randint(5, 20),
            step_ms=replica.step_ms,
            mixed_step_ms=replica.mixed_step_ms,
            idle_us=replica.idle_us,
            mixed_idle_us=rng.gauss(20, 4),
            running=replica.running,
            waiting=replica.waiting,
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            computed_tokens=rng.randint(8000, 20000),
            generated_tokens=rng.randint(2500, 3500),
            preemptions=0,
            busy=rng.uniform(0.9, 1.0),
        )

    def _gpu(self, number: int) -> Gpu:
        rng = self.rng
        return Gpu(
            number=number,
            name="NVIDIA H200",
            uuid=f"GPU-{number}",
            replicas=[f"model-{number // 2}-{number % 2 + 1}"],
            utilization_percent=float(rng.randint(90, 100)),
            memory_bytes=141 << 30,
            used_bytes=121 << 30,
            weight_bytes=16 << 30,
            kv_bytes=100 << 30,
            power_w=round(rng.gauss(600, 20), 3),
            power_limit_w=700.0,
            temperature_c=float(rng.randint(58, 64)),
            sm_clock_mhz=rng.randrange(1700, 1980, 15),
            max_sm_clock_mhz=1980,
            memory_clock_mhz=3201,
            throttle_reasons=[],
            nvlink_tx_bytes_per_s=rng.uniform(0, 1e9),
            nvlink_rx_bytes_per_s=rng.uniform(0, 1e9),
            ecc_corrected=0,
            ecc_uncorrected=0,
            last_xid=0,
            processes=[GpuProcess(pid=1005 + number, memory_bytes=121 << 30, name="python3")],
        )

    def _tenant(self, number: int) -> TenantUse:
        rng = self.rng
        return TenantUse(
            name=f"tenant-{number}",
            weight=1.0,
            highest_class=1,
            keys=3,
            peers=0,
            running=rng.randint(0, 30),
            waiting=rng.randint(0, 3),
            tokens_per_s=rng.gauss(1200, 100),
            service_tokens=self.billed[number] * 1.5,
            share=rng.uniform(0.03, 0.07),
            fair_share=0.05,
            requests=self.requests[number],
            refused=0,
            prompt_tokens=self.requests[number] * 700,
            cached_tokens=self.requests[number] * 200,
            billed_tokens=self.billed[number],
            usage=[
                LimitUsage(
                    limit=limit,
                    capacity=1_000_000,
                    used=rng.randint(0, 500_000),
                    held=rng.randint(0, 50_000),
                    resets_in_s=rng.uniform(0, 60),
                )
                for limit in ("tokens_per_minute", "tokens_per_day")
            ],
            exhausted_in_s=rng.uniform(100, 1000),
        )


def _kv(replica: ReplicaStatus, number: int) -> KvCache:
    return KvCache(
        model=f"model-{number // 2}",
        replica=replica.name,
        blocks_total=replica.blocks_total,
        blocks_used=replica.blocks_used,
        blocks_cached=replica.blocks_cached,
        block_tokens=64,
        kv_bytes=replica.kv_bytes,
        kv_cache_dtype="fp8",
        prompt_tokens=replica.prompt_tokens,
        cached_tokens=replica.cached_tokens,
        hit_rate=replica.cached_tokens / max(1, replica.prompt_tokens),
        hit_window_s=60.0,
        preemptions=0,
    )
