"""Tests of the GPU, limit and tenant values in snapshots. A fake driver replaces NVML, because the test
machine may have no GPU."""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.admin import snapshots
from appliance.admin.snapshots import TenantChoice, with_replicas
from appliance.monitoring import machine_reader
from appliance.monitoring.burn_rates import BurnRates
from appliance.monitoring.ended import MAX_KEPT, EndedRequests
from appliance.monitoring.gpu_reader import GpuReader
from appliance.monitoring.host import HostReader, ServiceProcess
from appliance.monitoring.machine_reader import MachineStats
from appliance.protocol import LimitUsage, ModelStatus, ReplicaStatus
from appliance.protocol.status import Status
from appliance.snapshot import Gpu, GpuProcess, Host, MigInstance
from store.requests import RequestRow


class FakeDriver:
    """The NVML functions that the reader uses, for two GPUs. The second GPU reports neither Xid errors nor
    links."""

    class NVMLError(Exception):
        value = 3

    class Unknown(NVMLError):
        value = 999

    class OffBus(NVMLError):
        value = 15

    NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_GPU_IS_LOST = 3, 15
    NVML_ERROR_LIBRARY_NOT_FOUND = NVML_ERROR_DRIVER_NOT_LOADED = 99
    NVML_SUCCESS, NVML_VOLATILE_ECC = 0, 0
    NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 0, 1
    NVML_TEMPERATURE_GPU = NVML_CLOCK_SM = NVML_CLOCK_MEM = 0
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 138, 139
    nvmlEventTypeXidCriticalError = 8

    def __init__(self) -> None:
        self.xids: deque[tuple[int, int]] = deque()
        self.sent_kib, self.received_kib = 1000, 500
        self.registered: list[int] = []
        self.now = 100.0

    def __getattr__(self, name: str) -> Any:
        def unsupported(*arguments: object) -> None:
            raise self.NVMLError(name)

        return unsupported

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:
        return number

    def nvmlDeviceGetIndex(self, handle: int) -> int:
        return handle

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return "NVIDIA H200"

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        if handle == 1:
            raise self.Unknown
        return 250_000

    def nvmlEventSetCreate(self) -> object:
        return object()

    def nvmlDeviceRegisterEvents(self, handle: int, kinds: int, events: object) -> None:
        if handle == 1:
            raise self.NVMLError
        self.registered.append(handle)

    def nvmlEventSetWait_v2(self, events: object, timeout_ms: int) -> object:
        assert timeout_ms == 0, "the reader must not wait"
        if not self.xids:
            raise self.NVMLError("timeout")
        device, xid = self.xids.popleft()
        return SimpleNamespace(device=device, eventType=8, eventData=xid)

    def nvmlDeviceGetFieldValues(self, handle: int, fields: list[tuple[int, int]]) -> list[object]:
        assert [field for field, _ in fields] == [138, 139]
        status = 0 if handle == 0 else 3
        return [
            SimpleNamespace(nvmlReturn=status, value=SimpleNamespace(ullVal=count))
            for count in (self.sent_kib, self.received_kib)
        ]


_LINKS = ("nvlink_tx_bytes_per_s", "nvlink_rx_bytes_per_s")
_NOT_FROM_NVML = (
    *("number", "name", "error", "unsupported", "replicas", "weight_bytes", "kv_bytes"),
    "mig_instances",
)
"""Fields whose values do not come from optional NVML functions."""


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


def reader_of(driver: FakeDriver) -> GpuReader:
    reader = GpuReader(lambda: driver.now)
    reader._nvml = driver
    return reader


def test_the_newest_xid_error_is_kept_and_a_gpu_without_reports_has_none(driver: FakeDriver) -> None:
    reader = reader_of(driver)
    assert [gpu.last_xid for gpu in reader.read()] == [0, None]
    driver.xids.extend([(0, 31), (0, 79)])
    assert [gpu.last_xid for gpu in reader.read()] == [79, None]
    assert [gpu.last_xid for gpu in reader.read()] == [79, None]
    assert driver.registered == [0]


def test_link_rates_are_differences_per_second_and_unknown_at_first_or_after_a_reset(
    driver: FakeDriver,
) -> None:
    reader = reader_of(driver)
    first = reader.read()
    assert {(gpu.nvlink_tx_bytes_per_s, gpu.nvlink_rx_bytes_per_s) for gpu in first} == {(None, None)}
    driver.sent_kib, driver.now = 3000, 102.0
    gpu, other = reader.read()
    assert gpu.nvlink_tx_bytes_per_s == pytest.approx(2000 * 1024 / 2)
    assert gpu.nvlink_rx_bytes_per_s == 0
    assert other.nvlink_tx_bytes_per_s is None
    driver.sent_kib, driver.now = 10, 104.0
    assert reader.read()[0].nvlink_tx_bytes_per_s is None


def test_values_that_a_gpu_does_not_support_differ_from_values_that_cannot_be_read(
    driver: FakeDriver,
) -> None:
    """The fake driver supports only the values that its functions return. The second GPU supports the power
    draw, but reading this value fails."""
    first, second = reader_of(driver).read()
    fields = set(Gpu.__struct_fields__) - set(_NOT_FROM_NVML)
    unsupported = {name for name in fields if getattr(first, name) in (None, "")}
    assert set(first.unsupported) == unsupported - set(_LINKS)
    assert first.power_w == 250.0 and first.last_xid == 0
    assert second.power_w is None
    assert set(second.unsupported) == unsupported | {"last_xid"}


@pytest.mark.parametrize("function", ["nvmlDeviceGetHandleByIndex", "nvmlDeviceGetMemoryInfo"])
@pytest.mark.parametrize("fails_at_start", [True, False])
def test_a_lost_gpu_is_reported_and_leaves_the_others_visible(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, function: str, fails_at_start: bool
) -> None:
    reader, normal = reader_of(driver), getattr(driver, function)

    def fail(number: int) -> Any:
        if number == 1:
            raise driver.OffBus("GPU is lost")
        return normal(number)

    if not fails_at_start:
        assert [gpu.error for gpu in reader.read()] == ["", ""]
    monkeypatch.setattr(driver, function, fail, raising=False)
    first, second = reader.read()
    assert (first.name, first.error, first.power_w) == ("NVIDIA H200", "", 250.0)
    assert (second.number, second.error, second.power_w) == (1, "GPU is lost", None)
    assert reader.error == ""
    monkeypatch.setattr(driver, function, normal)
    assert [gpu.error for gpu in reader.read()] == ["", ""]


def test_a_driver_that_fails_for_all_gpus_is_read_again_later(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = reader_of(driver)

    def fail(number: int) -> int:
        raise driver.Unknown("Unknown Error")

    with monkeypatch.context() as patched:
        patched.setattr(driver, "nvmlDeviceGetHandleByIndex", fail)
        assert (reader.read(), reader.error) == ([], "Unknown Error")
    assert reader.read() == []
    driver.now += 60.0
    assert (len(reader.read()), reader.error) == (2, "")


def test_an_unexpected_error_of_the_gpus_is_logged_and_the_host_stays_visible(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(reader: GpuReader, number: int) -> Gpu:
        raise ValueError("the name is not text")

    driver = FakeDriver()
    monkeypatch.setattr(GpuReader, "_gpu", fail)
    monkeypatch.setattr(machine_reader, "GpuReader", lambda: reader_of(driver))
    [stats] = machine_stats(monkeypatch, 1)
    assert stats.host.memory_bytes and stats.gpu_error == "the name is not text"
    assert [record.message for record in caplog.records] == ["failed to read the GPUs"]


def test_a_failed_read_of_the_host_is_logged_once_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read, results = HostReader.read, [True, False, False, True]

    def sometimes(reader: HostReader, processes: list[ServiceProcess]) -> Host:
        if not results.pop(0):
            raise ValueError("/proc/meminfo has another format")
        return read(reader, processes)

    monkeypatch.setattr(HostReader, "read", sometimes)
    monkeypatch.setattr(machine_reader, "GpuReader", lambda: reader_of(FakeDriver()))
    found = machine_stats(monkeypatch, 4)
    assert [stats.host.memory_bytes is not None for stats in found] == [True, False, False, True]
    assert [record.message for record in caplog.records] == ["failed to read the machine's load"]


def machine_stats(monkeypatch: pytest.MonkeyPatch, reads: int) -> list[MachineStats]:
    """Return the results of consecutive reads."""
    monkeypatch.setattr(machine_reader, "_EVERY_S", -1.0)

    async def read() -> list[MachineStats]:
        found = []
        with ThreadPoolExecutor(1) as threads:
            reader = machine_reader.MachineReader(threads)
            for _ in range(reads + 1):
                found.append(reader.stats("/", []))
                assert reader._reading is not None
                await asyncio.wait([reader._reading])
        return found[1:]

    return asyncio.run(read())


def usage(used: int) -> list[LimitUsage]:
    return [LimitUsage(limit="tokens_per_minute", capacity=1000, used=used, held=0, resets_in_s=1.0)]


def test_the_time_until_a_limit_is_exhausted_follows_from_its_growth() -> None:
    rates = BurnRates()
    for second in range(0, 21, 2):
        rates.record(float(second), {"a": usage(100 + 10 * second), "b": usage(500)})
    assert rates.exhausted_in_s(20.0, "a", usage(300)) == pytest.approx(70.0)
    assert rates.exhausted_in_s(20.0, "b", usage(500)) is None
    assert rates.exhausted_in_s(20.0, "b", usage(1000)) == 0.0


def test_a_short_observation_predicts_nothing() -> None:
    rates = BurnRates()
    rates.record(0.0, {"a": usage(0)})
    assert rates.exhausted_in_s(3.0, "a", usage(300)) is None


def test_the_set_of_tenants_in_snapshots_changes_rarely_if_there_are_too_many() -> None:
    now = [0.0]
    names, choice = [f"tenant-{number:03}" for number in range(300)], TenantChoice(lambda: now[0])
    first = choice.choose(names, {"tenant-299"})
    assert len(first) == snapshots.MAX_TENANTS and first[-1] == "tenant-299"
    assert choice.choose(names, {"tenant-298"}) == first
    now[0] = 60.0
    later = choice.choose(names, {"tenant-298"})
    assert "tenant-298" in later and len(set(later) - set(first)) == 1
    assert later == sorted(later)


def test_with_many_requests_the_latencies_cover_a_shorter_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [1000.0]
    monkeypatch.setattr("appliance.monitoring.ended.time.monotonic", lambda: now[0])
    rows: Any = SimpleNamespace(end=lambda row: True)
    ended = EndedRequests(rows, lambda name: True)

    def end(count: int, ttft_ms: float) -> None:
        for _ in range(count):
            ended.end(RequestRow(request_id="r", created_at=0.0, endpoint="/x", ttft_ms=ttft_ms))

    end(1, 500.0)
    now[0] += 10
    end(MAX_KEPT - 2, 20.0)
    assert (ended.latency().ttft.window_s, ended.latency().ttft.count) == (60.0, MAX_KEPT - 1)
    now[0] += 5
    end(2, 20.0)
    latest = ended.latency().ttft
    assert (latest.window_s, latest.count, latest.p99_ms) == (5.0, MAX_KEPT, 20.0)


def status_with_a_replica() -> Status:
    replica = ReplicaStatus(
        name="m-1", state="ready", pids=[10, 11], devices=["cuda:2", "cuda:3"], weight_bytes=10, kv_bytes=14
    )
    model = ModelStatus(name="m", folder="", version="", created=0, state="ready", replicas=[replica])
    return SimpleNamespace(models=[model])  # type: ignore[return-value]


@pytest.mark.parametrize("processes", [None, [], [GpuProcess(pid=1, memory_bytes=9)]])
def test_a_gpu_whose_processes_are_not_known_has_the_replicas_of_its_number(
    processes: list[GpuProcess] | None,
) -> None:
    gpus = [Gpu(number=number, name="", processes=processes) for number in range(3)]
    _, free, used = with_replicas(gpus, status_with_a_replica())
    assert (free.replicas, free.weight_bytes, free.kv_bytes) == ([], 0, 0)
    assert (used.replicas, used.weight_bytes, used.kv_bytes) == (["m-1"], 5, 7)


def test_the_processes_of_a_gpu_name_its_replicas_and_foreign_processes_have_no_owner() -> None:
    gpu = Gpu(number=0, name="", processes=[GpuProcess(pid=11), GpuProcess(pid=99)])
    [found] = with_replicas([gpu], status_with_a_replica())
    assert [one.replica for one in found.processes or []] == ["m-1", ""]
    assert (found.replicas, found.weight_bytes) == (["m-1"], 5)


class SplitDriver(FakeDriver):
    """The first GPU is split into two MIG instances, of which one does not report its memory."""

    NVML_DEVICE_MIG_ENABLE = 1

    def nvmlDeviceGetMigMode(self, handle: int) -> tuple[int, int]:
        if handle == 1:
            raise self.NVMLError
        return 1, 1

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: int) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: int, index: int) -> str:
        if index not in (0, 4):
            raise self.NVMLError
        return f"MIG-{index}"

    def nvmlDeviceGetName(self, handle: Any) -> bytes:
        return "NVIDIA H200 MIG 3g.71gb" if isinstance(handle, str) else "NVIDIA H200"

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> object:
        if handle == "MIG-4":
            raise self.Unknown
        return SimpleNamespace(total=70, used=7)


def test_a_split_gpu_has_its_mig_instances_and_the_replicas_of_their_numbers() -> None:
    split, whole = reader_of(SplitDriver()).read()
    name = "NVIDIA H200 MIG 3g.71gb"
    assert split.mig_instances == [
        MigInstance(name=name, memory_bytes=70, used_bytes=7),
        MigInstance(name=name),
    ]
    assert "utilization_percent" in split.unsupported and whole.mig_instances is None
    # The instances have the numbers 0 and 1, and the other GPU has the number 2.
    first, second = with_replicas([split, whole], status_with_a_replica())
    assert (first.replicas, second.replicas) == ([], ["m-1"])
