"""Tests of sleep and wake with real replica processes on the CPU."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from engine.messages import pack_tokens
from engine.rank_messages import MemoryChanged, RankOutbound
from tests.engine.test_replica import Watched, ask, collect, replica

pytestmark = pytest.mark.system

WAIT_S = 60.0


class Sleeper:
    """A replica that the test puts to sleep and wakes."""

    def __init__(self, watched: Watched) -> None:
        self.watched = watched
        self.changes: asyncio.Queue[MemoryChanged] = asyncio.Queue()
        passed_on = watched.group._on_message

        def on_message(rank: int, message: RankOutbound) -> None:
            if isinstance(message, MemoryChanged):
                self.changes.put_nowait(message)
            passed_on(rank, message)

        watched.group._on_message = on_message

    async def change(self, asleep: bool) -> MemoryChanged:
        self.watched.group.change_memory(asleep)
        return await asyncio.wait_for(self.changes.get(), WAIT_S)

    def descriptors_and_threads(self) -> list[int]:
        """Return the numbers of open descriptors and threads of each process."""
        return [
            len(os.listdir(f"/proc/{pid}/{name}"))
            for pid in self.watched.group.pids
            for name in ("fd", "task")
        ]

    def holds_at_most(self, before: list[int]) -> bool:
        """Return whether no process has more open descriptors or more threads than before."""
        return all(now <= then for now, then in zip(self.descriptors_and_threads(), before, strict=True))

    def resident_bytes(self) -> int:
        pages = (Path(f"/proc/{pid}/statm").read_text().split()[1] for pid in self.watched.group.pids)
        return sum(map(int, pages)) * os.sysconf("SC_PAGE_SIZE")


@asynccontextmanager
async def sleeper(folder: Path, **fields: object) -> AsyncIterator[Sleeper]:
    async with replica(folder, **fields) as watched:
        yield Sleeper(watched)


@pytest.mark.parametrize(("ranks", "dtype"), [(1, "auto"), (2, "fp8")])
def test_tokens_are_the_same_before_and_after_rounds_of_sleep_that_leave_nothing_behind(
    tmp_path: Path, ranks: int, dtype: str
) -> None:
    async def scenario() -> None:
        fields = {"tensor_parallel_size": ranks, "quantization": dtype, "kv_cache_dtype": dtype}
        async with sleeper(tmp_path, **fields) as sleeping:
            info = sleeping.watched.info.result()
            expected = "fp8" if dtype == "fp8" else "float32"
            assert (info.weights, info.kv_cache_dtype) == (expected, expected)
            client = sleeping.watched.client("front-0")
            first = await collect(client, ask(client, "r0", prompt=200))
            await sleeping.change(True)
            await sleeping.change(False)
            before = sleeping.descriptors_and_threads()
            for number in range(1, 4):
                slept = await sleeping.change(True)
                assert slept.asleep and not slept.problem and slept.freed_bytes == info.kv_bytes
                assert not (await sleeping.change(False)).asleep
                assert await collect(client, ask(client, f"r{number}", prompt=200)) == first
            # The threads that free host memory may still be running.
            async with asyncio.timeout(WAIT_S):
                while not sleeping.holds_at_most(before):
                    await asyncio.sleep(0.01)

    asyncio.run(scenario())


def test_a_sleeping_replica_has_released_its_kv_cache(tmp_path: Path) -> None:
    async def scenario() -> None:
        # A block needs 64 KiB, so the prompts fill 12 MiB.
        async with sleeper(tmp_path, kv_blocks=256, max_model_len=512) as sleeping:
            client = sleeping.watched.client("front-0")
            for _ in range(2):
                for number in range(24):
                    submit = ask(client, f"r{number}", prompt=500, most=1)
                    prompt = [(7 * place + number) % 500 + 3 for place in range(500)]
                    await collect(client, msgspec.structs.replace(submit, prompt=pack_tokens(prompt)))
                filled = sleeping.resident_bytes()
                assert (await sleeping.change(True)).asleep
                async with asyncio.timeout(WAIT_S):
                    while filled - sleeping.resident_bytes() <= 8 << 20:
                        await asyncio.sleep(0.01)
                await sleeping.change(False)

    asyncio.run(scenario())


def test_a_sleeping_replica_reports_and_can_be_killed_and_stopped(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with sleeper(tmp_path) as sleeping:
            await sleeping.change(True)
            known = len(sleeping.watched.reports)
            async with asyncio.timeout(WAIT_S):
                while len(sleeping.watched.reports) < known + 3:
                    await asyncio.sleep(0.01)
            await sleeping.watched.group.stop()
            assert sleeping.watched.end.result() == "stopped"
        async with sleeper(tmp_path) as sleeping:
            await sleeping.change(True)
            os.kill(sleeping.watched.group.pids[0], signal.SIGKILL)
            assert "SIGKILL" in await asyncio.wait_for(sleeping.watched.end, WAIT_S)

    asyncio.run(scenario())


def test_if_another_rank_dies_while_the_replica_sleeps_the_replica_ends(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with sleeper(tmp_path, tensor_parallel_size=2) as sleeping:
            await sleeping.change(True)
            os.kill(sleeping.watched.group.pids[1], signal.SIGKILL)
            assert (await asyncio.wait_for(sleeping.watched.end, WAIT_S)).startswith("rank 1 ")

    asyncio.run(scenario())
