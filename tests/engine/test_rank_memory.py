"""Tests of the memory that a sleeping replica releases, on a simulated GPU and on the CPU."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from engine import device_arena, memory, rank_memory
from engine.cuda_driver import CudaDriver, DriverError, _Access, _Properties
from engine.device_arena import ALIGNMENT, DeviceArena
from engine.generate import LocalEngine
from engine.messages import ReplicaSpec, SamplingParams
from engine.rank_memory import HOST_RESERVE_BYTES, CpuMemory, GpuMemory, SleepError, TorchMemory
from engine.rank_messages import MemoryChanged
from engine.sleeping import RankSleep
from tests.engine.fake_driver import GRANULARITY, FakeDriver
from tests.engine.tiny import TINY

CPU = torch.device("cpu")


def test_tensors_have_aligned_addresses_and_share_pieces() -> None:
    driver = FakeDriver()
    arena = DeviceArena(driver, 1 << 20)
    (base,) = driver.ranges
    tensors = [arena.empty((3, 5), torch.float32), arena.empty((7,), torch.bfloat16)]
    offsets = [tensor.data_ptr() - driver.ranges[base].data_ptr() for tensor in tensors]
    assert offsets == [0, ALIGNMENT]
    assert [tuple(tensor.shape) for tensor in tensors] == [(3, 5), (7,)]
    assert driver.mapped_bytes == GRANULARITY
    arena.empty((GRANULARITY,), torch.uint8)
    assert arena.mapped_bytes == driver.mapped_bytes == arena.size_bytes == 2 * GRANULARITY


def test_memory_returns_at_the_same_addresses_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_arena, "PIECE_BYTES", 4 * GRANULARITY)
    driver = FakeDriver()
    arena = DeviceArena(driver, 1 << 20)
    tensors = [arena.empty((8500,), torch.uint8).fill_(number) for number in range(5)]
    addresses = [tensor.data_ptr() for tensor in tensors]
    copies = [piece.clone() for piece in arena.pieces()]
    assert [len(copy) // GRANULARITY for copy in copies] == [4, 4, 3]
    assert arena.release() == 11 * GRANULARITY
    assert driver.mapped_bytes == arena.mapped_bytes == 0 and arena.size_bytes == 11 * GRANULARITY
    for piece, copy in zip(arena.restore(), copies, strict=True):
        piece.copy_(copy)
    assert [tensor.data_ptr() for tensor in tensors] == addresses
    assert [tensor.unique().tolist() for tensor in tensors] == [[number] for number in range(5)]


def test_an_arena_that_is_no_longer_used_returns_its_memory_and_addresses() -> None:
    driver = FakeDriver()
    arena = DeviceArena(driver, 1 << 20)
    arena.empty((9000,), torch.uint8)
    del arena
    gc.collect()
    assert (driver.mapped, driver.ranges) == ({}, {})


def test_addresses_that_are_used_up_are_reported_as_lack_of_memory() -> None:
    arena = DeviceArena(FakeDriver(), 2 * GRANULARITY)
    with pytest.raises(torch.OutOfMemoryError, match="exceed"):
        arena.empty((3 * GRANULARITY,), torch.uint8)


# ── a rank on a GPU ──


class Machine:
    """A simulated GPU and the host's memory."""

    def __init__(self, driver: FakeDriver) -> None:
        self.driver = driver
        self.available_bytes = 1 << 40
        self.locked: set[int] = set()
        self.lock_error: Exception | None = None

    def lock(self, host: torch.Tensor) -> None:
        if self.lock_error is not None:
            raise self.lock_error
        assert host.data_ptr() not in self.locked
        self.locked.add(host.data_ptr())

    def unlock(self, host: torch.Tensor) -> None:
        self.locked.remove(host.data_ptr())


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine(FakeDriver())
    monkeypatch.setattr(device_arena, "PIECE_BYTES", 4 * GRANULARITY)
    monkeypatch.setattr(rank_memory, "lock_pages", made.lock)
    monkeypatch.setattr(rank_memory, "unlock_pages", made.unlock)
    monkeypatch.setattr(memory, "available_host_bytes", lambda: made.available_bytes)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    free = lambda: (1 if made.driver.mapped else 3) << 30  # noqa: E731
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free(), 80 << 30))
    yield made
    for thread in threading.enumerate():
        if thread.name == "engine-free-host":
            thread.join(60)


def add_up(numbers: Sequence[int]) -> list[int]:
    """Return the sums of the numbers over a group of one rank, which are the numbers themselves."""
    return list(numbers)


class Rank:
    """A rank with two weights and a KV cache."""

    def __init__(self, driver: FakeDriver) -> None:
        self.memory = GpuMemory(driver, CPU, 1 << 20)
        self.weights = [
            self.memory.empty_weights((3, 9000), torch.float32).uniform_(),
            self.memory.empty_weights((17,), torch.bfloat16).fill_(2.0),
        ]
        self.kv = self.memory.zeroed_kv((20_000,), torch.bfloat16)
        self.values = [weight.clone() for weight in self.weights]
        self.sleep = RankSleep(self.memory, 1, add_up)

    def sound(self) -> bool:
        return all(map(torch.equal, self.weights, self.values))


def test_a_rank_sleeps_and_wakes_with_its_weights_and_an_empty_cache(machine: Machine) -> None:
    rank = Rank(machine.driver)
    held = rank.memory.held_bytes
    rank.kv.fill_(1.0)
    slept = rank.sleep.change(True)
    assert slept.asleep and not slept.problem and slept.freed_bytes == held == 37 * GRANULARITY
    assert slept.host_bytes == rank.memory.host_bytes == 27 * GRANULARITY
    assert machine.driver.mapped_bytes == rank.memory.held_bytes == 0
    woken = rank.sleep.change(False)
    assert not woken.asleep and not woken.problem and woken.host_bytes == 0
    assert rank.memory.held_bytes == held
    assert rank.sound()
    assert not rank.kv.any()


def test_fifty_rounds_leave_nothing_behind(machine: Machine) -> None:
    rank = Rank(machine.driver)
    held = rank.memory.held_bytes
    for _ in range(50):
        assert rank.sleep.change(True).asleep
        assert len(machine.locked) == 7
        assert not rank.sleep.change(False).asleep
    rank.memory.check(1)  # waits until the host memory has been freed
    assert machine.locked == set()
    assert machine.driver.mapped_bytes == held
    assert rank.sound()


def test_a_rank_stays_awake_if_the_weights_of_all_ranks_do_not_fit_into_host_memory(machine: Machine) -> None:
    rank = Rank(machine.driver)
    held = rank.memory.held_bytes
    rank.sleep = RankSleep(rank.memory, 2, add_up)
    machine.available_bytes = HOST_RESERVE_BYTES + 2 * 27 * GRANULARITY - 1
    refused = rank.sleep.change(True)
    assert not refused.asleep
    assert "the weights need 0.0 GiB of host memory, but only 0.0 GiB are available" in refused.problem
    assert rank.memory.held_bytes == held and rank.sound() and machine.locked == set()
    machine.available_bytes += 1
    assert rank.sleep.change(True).asleep


@pytest.mark.parametrize("error", [OSError(12, "Cannot allocate memory"), torch.AcceleratorError("no pages")])
def test_a_rank_stays_awake_if_host_memory_cannot_be_locked(machine: Machine, error: Exception) -> None:
    rank = Rank(machine.driver)
    machine.lock_error = error
    refused = rank.sleep.change(True)
    assert not refused.asleep and "could not be copied to host memory" in refused.problem
    assert rank.memory.host_bytes == 0 and rank.sound()
    machine.lock_error = None
    assert rank.sleep.change(True).asleep


@pytest.mark.parametrize("short", [1, 12, 30])
def test_a_rank_stays_asleep_if_device_memory_is_missing_and_can_wake_later(
    machine: Machine, short: int
) -> None:
    rank = Rank(machine.driver)
    assert rank.sleep.change(True).asleep
    machine.driver.limit_bytes = (37 - short) * GRANULARITY
    refused = rank.sleep.change(False)
    assert refused.asleep and "but only 3.0 GiB are free on cpu" in refused.problem
    assert machine.driver.mapped_bytes == 0 and rank.memory.host_bytes == 27 * GRANULARITY
    machine.driver.limit_bytes = 37 * GRANULARITY
    assert not rank.sleep.change(False).asleep
    assert rank.sound() and not rank.kv.any()


# ── a growing KV cache ──


def test_a_growing_cache_keeps_its_addresses_and_its_content(machine: Machine) -> None:
    """A block takes 3,072 bytes in one tensor and 96 bytes in the other. Pages have 4,096 bytes."""
    grown = GpuMemory(machine.driver, CPU, 1 << 20)
    tensors = [
        grown.growing_kv((50, 3, 256), torch.float32),
        grown.growing_kv((50, 3, 8), torch.float32),
    ]
    addresses = [tensor.data_ptr() for tensor in tensors]
    assert grown.held_bytes == 2 * GRANULARITY
    for tensor in tensors:
        assert not tensor[0].any()
        tensor[0] = 1.0
    grown.grow_kv(9)
    assert grown.held_bytes == machine.driver.mapped_bytes == (7 + 1) * GRANULARITY
    for tensor, address in zip(tensors, addresses, strict=True):
        assert tensor.data_ptr() == address
        assert tensor[0].eq(1.0).all() and not tensor[1:9].any()
    assert grown.release() == 8 * GRANULARITY
    grown.restore()
    assert not any(tensor[:9].any() for tensor in tensors)


@pytest.mark.parametrize("pages", range(-2, 40))
def test_a_cache_grows_to_as_many_blocks_as_the_given_memory_holds(machine: Machine, pages: int) -> None:
    nbytes = pages * GRANULARITY + 17
    grown = GpuMemory(machine.driver, CPU, 1 << 20)
    grown.growing_kv((60, 3, 256), torch.float32)
    grown.growing_kv((60, 3, 8), torch.float32)
    blocks = grown.blocks_within(nbytes)
    before = grown.held_bytes
    grown.grow_kv(blocks)
    assert pages < 0 or grown.held_bytes - before <= nbytes
    if pages >= 0:
        grown.grow_kv(blocks + 1)
        assert grown.held_bytes - before > nbytes


# ── several ranks ──


class Scripted:
    """A simulation of a rank's memory, whose operations fail as the test configures."""

    held_bytes = 0
    host_bytes = 5

    def __init__(self, failing: str = "") -> None:
        self._failing = failing
        self.calls: list[str] = []

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self._failing:
            raise SleepError(f"{name} failed")

    def empty_weights(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        raise AssertionError

    zeroed_kv = growing_kv = empty_weights
    can_grow = False

    def grow_kv(self, blocks: int) -> None:
        raise AssertionError

    def blocks_within(self, nbytes: int) -> int:
        raise AssertionError

    def check(self, ranks: int) -> None:
        self._call("check")

    def save(self) -> None:
        self._call("save")

    def forget(self) -> None:
        self._call("forget")

    def release(self) -> int:
        self._call("release")
        return 7

    def restore(self) -> None:
        self._call("restore")


def together(*memories: Scripted, asleep: bool = True) -> tuple[list[MemoryChanged], list[RankSleep]]:
    """Put the ranks that have these memories to sleep at the same time, each on a thread."""
    count = len(memories)
    barrier, given = threading.Barrier(count), [[0]] * count
    results: dict[int, MemoryChanged] = {}

    def totals_of(rank: int) -> Callable[[Sequence[int]], list[int]]:
        def totals(numbers: Sequence[int]) -> list[int]:
            given[rank] = list(numbers)
            barrier.wait(60)
            sums = [sum(each) for each in zip(*given, strict=True)]
            barrier.wait(60)
            return sums

        return totals

    ranks = [RankSleep(memory, count, totals_of(rank)) for rank, memory in enumerate(memories)]
    for rank in ranks:
        rank.asleep = not asleep

    def change(number: int) -> None:
        results[number] = ranks[number].change(asleep)

    threads = [threading.Thread(target=change, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [results[number] for number in range(count)], ranks


def test_all_ranks_sleep_and_the_sizes_are_sums() -> None:
    results, _ = together(Scripted(), Scripted())
    assert all(result.asleep and result.freed_bytes == 14 and result.host_bytes == 10 for result in results)


@pytest.mark.parametrize("failing", ["check", "save"])
def test_if_one_rank_cannot_sleep_no_rank_releases_memory(failing: str) -> None:
    memories = Scripted(), Scripted(failing)
    results, _ = together(*memories)
    assert [result.asleep for result in results] == [False, False]
    assert "1 of 2 ranks failed" in results[0].problem and results[1].problem == f"{failing} failed"
    assert not any("release" in each.calls for each in memories)
    assert all(("forget" in each.calls) == (failing == "save") for each in memories)


def test_if_one_rank_cannot_wake_all_ranks_stay_asleep() -> None:
    memories = Scripted(), Scripted("restore")
    results, _ = together(*memories, asleep=False)
    assert [result.asleep for result in results] == [True, True]
    assert all(each.calls == ["restore", "release"] for each in memories)


# ── other devices ──


def test_the_structures_of_the_driver_have_the_sizes_of_its_headers() -> None:
    assert ctypes.sizeof(_Properties) == 32 and ctypes.sizeof(_Access) == 12
    assert (_Properties.location.offset, _Properties.flags.offset) == (8, 24)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_a_driver_is_reported() -> None:
    with pytest.raises(DriverError, match="the CUDA driver cannot be used: libcuda"):
        CudaDriver(torch.device("cuda", 0))


def test_a_runner_and_its_memory_are_freed_without_the_garbage_collector(tmp_path: Path) -> None:
    """On a GPU, freeing memory fails while CUDA graphs are being captured. The garbage collector could run at
    that time, so it must have nothing to free."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    spec = ReplicaSpec(
        replica="r-0", model_path=str(tmp_path), load_format="dummy", device="cpu", kv_blocks=8, threads=1
    )
    gc.disable()
    try:
        made = LocalEngine(spec)
        held = weakref.ref(made.runner.memory)
        made.generate([[3, 4, 5]], SamplingParams(max_tokens=2))
        made.change_memory(True)
        made.change_memory(False)
        made.close()
        del made
        assert held() is None
    finally:
        gc.enable()


def test_a_gpu_without_virtual_memory_management_refuses_to_sleep_with_the_reason() -> None:
    fixed = TorchMemory(CPU, "the driver is too old")
    sleep = RankSleep(fixed, 1, add_up)
    assert fixed.empty_weights((2, 3), torch.float32).shape == (2, 3)
    assert not fixed.zeroed_kv((4,), torch.float32).any()
    refused = sleep.change(True)
    assert not refused.asleep and refused.problem.endswith("cannot be released: the driver is too old")


def test_a_cpu_releases_its_kv_cache_and_keeps_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = CpuMemory(CPU, 1)
    weights = on_cpu.empty_weights((5,), torch.float32).fill_(3.0)
    kv = on_cpu.zeroed_kv((1 << 20,), torch.float32)
    address, before = kv.data_ptr(), memory.resident_bytes()
    kv.fill_(1.0)
    filled = memory.resident_bytes()
    assert filled - before > 3 << 20
    sleep = RankSleep(on_cpu, 1, add_up)
    slept = sleep.change(True)
    assert slept.asleep and slept.freed_bytes == 4 << 20 and slept.host_bytes == 0
    assert filled - memory.resident_bytes() > 3 << 20
    monkeypatch.setattr(memory, "available_host_bytes", lambda: (4 << 20) - 1)
    refused = sleep.change(False)
    assert refused.asleep and "the KV cache needs 0.0 GiB of host memory" in refused.problem
    monkeypatch.setattr(memory, "available_host_bytes", lambda: 4 << 20)
    assert not sleep.change(False).asleep
    assert kv.data_ptr() == address and not kv.any()
    assert weights.eq(3.0).all()


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    yield
    gc.collect()
