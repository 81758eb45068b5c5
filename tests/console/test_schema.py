"""Compares the data from the three sources: a running service, recorded history, and the demo. Each source
delivers all fields of the snapshot, and every value on screen can be traced to a named counter or field."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from appliance.actions.parameters import CreateTenant, DrainService, SuspendTenant
from appliance.monitoring.metrics.families import Families
from appliance.pages import AuditAction, ChainReport, LogLine, NamedRequest, UsageRow
from appliance.protocol import Configuration, Key, PeerMapping, Silence
from appliance.protocol.registry import RegisteredModel
from appliance.protocol.status import Status
from appliance.snapshot import Alert, Batch, Gpu, KvCache, Snapshot, Stall, TenantUse, UnfinishedRequest
from console.explanations import EXPLANATIONS
from console.fake import FIXED_TIME, FakeSource
from console.live import LiveSource
from console.replay import ReplaySource
from console.stored_recording import file_recording
from store.telemetry_reader import TelemetryReader
from tests.console.recorded import record
from tests.core.conftest import read_answer, running_core, wait_until

_ONLY_IN_SOME_STATES = (
    *("alerts[].acknowledged_by", "alerts[].ended_at", "alerts[].silenced_until"),
    *("current_problems[]", "problems[]", "reason", "queue.overload", "gpu_error", "drains[].model"),
    *("fronts[].detail", "fronts[].last_error", "fronts[].problems", "host.processes[].state"),
    *(
        "models[].fallback",
        "models[].detail",
        "models[].scaling",
        "models[].replicas[].detail",
        "models[].replicas[].fraction",
    ),
    *(
        "models[].replicas[].last_error",
        "models[].replicas[].load.",
        "models[].replicas[].degraded",
        "models[].replicas[].remedy",
    ),
    *("models[].replicas[].prefix_cache_hit_rate", "requests[].deadline_left_s", "requests[].peer"),
    *("tenants[].exhausted_in_s", "drains[].eta_s", "gpus[].mig_instances", "gpus[].error"),
)
"""Fields that have a value only in service states that the demo does not simulate."""
_MACHINE = (
    "gpus[]",
    "host.",
    "fronts[].cpu_us_per_token",
    "requests[].key_",
    "models[].replicas[].links",
    "models[].replicas[].collectives",
)
"""Fields that depend on where the test runs: the machine may have no GPU or one GPU, and a local user has no
key."""


def schema(kind: type[msgspec.Struct], prefix: str = "") -> Iterator[str]:
    """Yield the paths of all fields of a struct, such as `gpus[].power_w`."""
    for field in msgspec.structs.fields(kind):
        yield from _leaves(msgspec.inspect.type_info(field.type), f"{prefix}{field.encode_name}")


def _leaves(kind: Any, path: str) -> Iterator[str]:
    inspect = msgspec.inspect
    if isinstance(kind, inspect.Metadata):
        yield from _leaves(kind.type, path)
    elif isinstance(kind, inspect.UnionType):
        for one in kind.types:
            if not isinstance(one, inspect.NoneType):
                yield from _leaves(one, path)
    elif isinstance(kind, inspect.StructType):
        yield from schema(kind.cls, f"{path}.")
    elif isinstance(kind, inspect.ListType) and isinstance(kind.item_type, inspect.StructType):
        yield from schema(kind.item_type.cls, f"{path}[].")
    else:
        yield path


def delivered(snapshots: Iterable[Snapshot]) -> set[str]:
    """Return the paths of the fields that have a value in at least one of the snapshots."""
    found: set[str] = set()

    def walk(value: Any, path: str) -> None:
        if isinstance(value, dict):
            for name, item in value.items():
                walk(item, f"{path}.{name}" if path else name)
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            for item in value:
                walk(item, f"{path}[]")
        elif value is not None and value != "" and value != []:
            found.add(path)

    for one in snapshots:
        walk(msgspec.to_builtins(one), "")
    return found


def without(paths: set[str], prefixes: tuple[str, ...]) -> set[str]:
    return {path for path in paths if not path.startswith(prefixes)}


def demo_seconds() -> list[Snapshot]:
    fake = FakeSource(requests=60, blocks=1024, gpus=4, tenants=8, interval_s=1.0, now=FIXED_TIME)
    seconds = [fake.step() for _ in range(60)]
    asyncio.run(fake.act(SuspendTenant(name="mobile")))
    asyncio.run(fake.act(DrainService()))
    return [msgspec.msgpack.decode(msgspec.msgpack.encode(one), type=Snapshot) for one in seconds] + [
        msgspec.msgpack.decode(msgspec.msgpack.encode(fake.step()), type=Snapshot) for _ in range(5)
    ]


async def replayed(path: Path, first: float) -> list[Snapshot]:
    """Return all snapshots of a recording from time `first` on."""
    source = ReplaySource(file_recording(path), first + 0.0005)
    found = [await source.next()]
    while source.instant is not None and source.instant.next is not None:
        found.append(await source.step(1))
    await source.close()
    return found


def test_the_demo_delivers_every_value_of_the_snapshot() -> None:
    missing = set(schema(Snapshot)) - delivered(demo_seconds())
    assert not without(missing, _ONLY_IN_SOME_STATES), "deliver these in console/fake.py, or name them above"


def test_the_values_of_the_demo_agree_with_each_other() -> None:
    fake = FakeSource(requests=60, blocks=2048, gpus=4, tenants=8, interval_s=1.0, now=FIXED_TIME)
    for _ in range(90):
        newest = fake.step()
        for one in newest.requests:
            assert one.ttft_s is None or (one.queue_s is not None and one.queue_s < one.ttft_s <= one.age_s)
    ttft, queue = newest.latency.ttft, newest.latency.queue
    assert ttft is not None and queue is not None
    assert (queue.p50_ms or 0.0) < (ttft.p50_ms or 0.0) and (queue.p99_ms or 0.0) < (ttft.p99_ms or 0.0)
    rate = (newest.totals.generated_tokens or 0) / newest.uptime_s
    assert 0.3 < rate / (newest.rates.generated_tokens_per_s or 1.0) < 3
    replicas = {one.name: one for model in newest.models for one in model.replicas}
    for gpu in newest.gpus:
        replica = replicas[gpu.replicas[0]]
        ranks = len(replica.devices)
        assert gpu.weight_bytes == replica.weight_bytes // ranks and gpu.kv_bytes == replica.kv_bytes // ranks
        [process] = gpu.processes or []
        assert replica.used_bytes // ranks == process.memory_bytes
    for tenant in newest.tenants:
        for limit in tenant.usage:
            assert limit.used > 0 or not tenant.running


def test_the_recorded_past_delivers_every_value_that_was_recorded(tmp_path: Path) -> None:
    seconds = demo_seconds()
    past = asyncio.run(replayed(record(tmp_path / "history.db", seconds), seconds[0].at))
    assert len(past) == len(seconds)
    assert delivered(past) == delivered(seconds)


_OF_THE_CORE = ("rates.", "totals.", "queue.", "requests[].", "tenants[].")
"""Prefixes of the fields that a core with simulated replicas delivers. `tests/system/test_time_travel.py`
uses real replicas."""


def undelivered(snapshots: list[Snapshot], areas: tuple[str, ...]) -> set[str]:
    """Return the fields that a service under load should deliver but does not."""
    missing = {path for path in schema(Snapshot) if path.startswith(areas)} - delivered(snapshots)
    return without(missing, (*_ONLY_IN_SOME_STATES, *_MACHINE))


@pytest.mark.system
def test_a_service_delivers_every_value_and_its_past_delivers_the_same(tmp_path: Path) -> None:
    with running_core(tmp_path) as service:
        # The fake front process submits its requests for tenant "t".
        service.admin.act(CreateTenant(name="t", tokens_per_minute=1_000_000))
        service.admin.act(CreateTenant(name="other"))
        service.admin.act(SuspendTenant(name="other"))
        read_answer(service.connect("m 3"))
        asked = service.connect("m 100000")

        async def live() -> list[Snapshot]:
            source = LiveSource(service.run_dir, interval_s=1.0)
            source.reads_blocks = True
            found: list[Snapshot] = []
            while len(found) < 3 or (undelivered(found, _OF_THE_CORE) and len(found) < 60):
                one = await source.next()
                found.append(msgspec.msgpack.decode(msgspec.msgpack.encode(one), type=Snapshot))
            await source.close()
            return found

        wait_until(lambda: any(one.generated_tokens for one in service.admin.in_flight()))
        seen = asyncio.run(live())
        asked.close()
        # The service writes its history in a separate thread.
        reader = TelemetryReader(service.state_dir / "history.db")
        wait_until(
            lambda: (reader.span() or (0.0, 0.0))[1] > seen[-1].at,
            description="the record of the received snapshots",
        )
    # These fields depend neither on the load nor on the machine.
    plain = ("started_at", "uptime_s", "version", "pid", "state", "run_dir", "audit_rows", "queue.limit")
    assert delivered(seen) >= set(plain)
    extra = delivered(seen) - set(schema(Snapshot))
    assert not extra
    assert not undelivered(seen, _OF_THE_CORE)
    past = asyncio.run(replayed(service.state_dir / "history.db", seen[0].at))
    times = {one.at for one in past} & {one.at for one in seen}
    assert len(times) >= 2
    live_part, past_part = ([one for one in part if one.at in times] for part in (seen, past))
    assert delivered(past_part) == delivered(live_part)


_ANSWERS: dict[str, type[msgspec.Struct]] = {
    "alerts": Alert,
    "audit": AuditAction,
    "audit/verify": ChainReport,
    "batches": Batch,
    "config": Configuration,
    "events": Snapshot,
    "gpus": Gpu,
    "keys": Key,
    "kv": KvCache,
    "logs": LogLine,
    "peers": PeerMapping,
    "registry": RegisteredModel,
    "request-log": NamedRequest,
    "requests": UnfinishedRequest,
    "silences": Silence,
    "stalls": Stall,
    "status": Status,
    "tenants": TenantUse,
    "usage": UsageRow,
}
"""The structs in the answers of the admin API, and in the snapshots of its event stream."""
_OUTSIDE = re.compile(
    r"NVML [a-zA-Z_.]+( throughput)?|/proc/loadavg|kernel log|GET /telemetry|appliance doctor"
)


def _structs(kind: Any) -> list[type[msgspec.Struct]]:
    """Return the structs that a field of this type contains."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return [kind]
    return [one for part in get_args(kind) for one in _structs(part)]


def _has(struct: type[msgspec.Struct], path: str) -> bool:
    """Return whether a struct has a field with this path, such as `models.replicas.kv_bytes`."""
    name, _, rest = path.partition(".")
    kinds = {field.name: field.type for field in msgspec.structs.fields(struct)}
    return name in kinds and (not rest or any(_has(one, rest) for one in _structs(kinds[name])))


def test_every_value_on_screen_traces_to_a_named_counter_or_field() -> None:
    metrics = {family.name for family in Families()}
    for name, explanation in EXPLANATIONS.items():
        for part in explanation.source.split(";"):
            areas, colon, fields = part.strip().partition(": ")
            if not colon or areas.startswith("GET"):
                for one in areas.split(", "):
                    assert one in metrics or _OUTSIDE.match(one) or one in _ANSWERS, f"{name}: {one}"
                continue
            for area, field in product(areas.split(", "), fields.split(", ")):
                assert area in _ANSWERS and _has(_ANSWERS[area], field), f"{name}: {area}: {field}"


@pytest.mark.parametrize(
    "source", ["appliance_no_such_metric", "requests: no_such_field", "status: rates.refused_per_s"]
)
def test_an_unknown_source_of_a_value_would_be_detected(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.setitem(EXPLANATIONS, "waiting", EXPLANATIONS["waiting"]._replace(source=source))
    with pytest.raises(AssertionError, match=re.escape(source)):
        test_every_value_on_screen_traces_to_a_named_counter_or_field()
