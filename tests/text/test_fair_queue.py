"""Tests that tenants share the capacity for processing text, and that limits on one tenant's work do not
affect other tenants."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Generator

import pytest

from appliance.text.fair_queue import BURST_S, MAX_SHARE, TenantQueue, TextMemory, TooMuchWorkError, WorkPool


def test_tenants_take_turns_and_each_ones_items_stay_in_order() -> None:
    queue: TenantQueue[str] = TenantQueue()
    for item in ("a1", "a2", "a3", "b1", "c1", "b2"):
        queue.put(item[0], item)
    assert [queue.take() for _ in range(7)] == ["a1", "b1", "c1", "a2", "b2", "a3", None]


def test_an_item_that_is_put_back_waits_for_the_other_tenants_only() -> None:
    queue: TenantQueue[str] = TenantQueue()
    for item in ("a1", "a2", "b1"):
        queue.put(item[0], item)
    assert queue.take() == "a1"
    queue.put_back("a", "a1")
    assert [queue.take() for _ in range(3)] == ["b1", "a1", "a2"]


def test_the_items_of_a_tenant_that_must_wait_are_left_in_the_queue() -> None:
    queue: TenantQueue[str] = TenantQueue()
    for item in ("a1", "b1", "a2", "c1"):
        queue.put(item[0], item)
    assert [queue.take(lambda tenant: tenant != "a") for _ in range(3)] == ["b1", "c1", None]
    assert list(queue.tenants) == ["a"]
    assert [queue.take() for _ in range(2)] == ["a1", "a2"]


def test_a_tenant_that_has_used_its_share_of_a_thread_pauses() -> None:
    log: list[str] = []

    def hard_steps() -> Generator[None, None, str]:
        while len(log) < 14:
            began = time.thread_time()
            while time.thread_time() - began < 0.1 * BURST_S * MAX_SHARE:
                pass
            log.append("hog")
            yield
        return "hog"

    async def main() -> float:
        pool = WorkPool(max_wait_s=300)
        began = time.monotonic()
        hog = asyncio.ensure_future(pool.run("hog", hard_steps(), is_long=True))
        while not log:
            await asyncio.sleep(0.01)
        assert await pool.run("small", steps([], "small", 3), is_long=True) == "small"
        assert len(log) < 14
        assert await hog == "hog"
        return time.monotonic() - began

    # The first ten steps may run without a pause. Each later step uses up a tenth of BURST_S.
    assert asyncio.run(main()) > 0.1 * BURST_S * 2


def test_a_tenant_is_refused_for_its_own_bytes_only() -> None:
    memory = TextMemory(1_000_000)
    with memory.reserved("hog", 900_000):
        with pytest.raises(TooMuchWorkError, match="'hog'"), memory.reserved("hog", 200_000):
            pass
        # The small tenant may use half of the memory, even if the total then exceeds the limit.
        with memory.reserved("small", 100_000), memory.reserved("small", 300_000):
            with pytest.raises(TooMuchWorkError, match="'small'"), memory.reserved("small", 200_000):
                pass
            with memory.reserved("third", 5_000_000):  # A tenant's first text is always accepted.
                pass
    with memory.reserved("hog", 900_000):
        pass


def steps(log: list[str], name: str, count: int) -> Generator[None, None, str]:
    for _ in range(count):
        log.append(name)
        yield
    return name


def test_steps_of_several_tenants_alternate() -> None:
    log: list[str] = []

    async def main() -> list[str]:
        pool = WorkPool(max_wait_s=60)
        jobs = [pool.run(tenant, steps(log, tenant, 50), is_long=True) for tenant in ("a", "a", "b")]
        return await asyncio.gather(*jobs)

    assert asyncio.run(main()) == ["a", "a", "b"]
    assert "".join(log) == "ab" * 50 + "a" * 50


def test_short_work_does_not_wait_for_long_work() -> None:
    release = threading.Event()

    def stuck() -> Generator[None, None, None]:
        release.wait(60)
        yield

    async def main() -> str:
        pool = WorkPool(max_wait_s=60)
        hog = asyncio.ensure_future(pool.run("hog", stuck(), is_long=True))
        result = await pool.run("small", steps([], "done", 3), is_long=False)
        release.set()
        await hog
        return result

    assert asyncio.run(main()) == "done"


def test_work_that_takes_too_long_is_cancelled_without_affecting_other_work() -> None:
    def failing() -> Generator[None, None, None]:
        yield
        raise ValueError("bad text")

    def endless() -> Generator[None, None, None]:
        while True:
            yield

    async def main() -> str:
        pool = WorkPool(max_wait_s=0.2)
        with pytest.raises(TooMuchWorkError, match=r"could not be tokenized within 0\.2 s"):
            await pool.run("hog", endless(), is_long=True)
        pool._max_wait_s = 60
        with pytest.raises(ValueError, match="bad text"):
            await pool.run("other", failing(), is_long=True)
        return await pool.run("other", steps([], "done", 3), is_long=True)

    assert asyncio.run(main()) == "done"
