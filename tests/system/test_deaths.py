"""Tests that kill each kind of process (with SIGKILL) during requests. No request may hang, no data may be
lost, and nothing may be left behind."""

from __future__ import annotations

import math
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.system.attacks.reading import past_problem
from tests.system.service import Service, service
from tests.system.traffic import ended

pytestmark = pytest.mark.system

LONG = {
    "model": "demo",
    "prompt": "import ",
    "temperature": 0,
    "max_tokens": 400,
    "stream": True,
    "extra_body": {"ignore_eos": True},
}


class Stream(threading.Thread):
    """A client that reads one stream until it ends, successfully or not, or until `stop` is set."""

    def __init__(self, running: Service, stop: threading.Event | None = None, **options: Any) -> None:
        super().__init__(daemon=True)
        self.running, self.stop = running, stop
        self.options = {**LONG, **options}
        self.text = ""
        self.token_ids: list[int] = []
        """The tokens of the stream, if `return_token_ids` is set."""
        self.gaps: list[float] = []
        """Difference between the two highest log probabilities at each token, if `logprobs` is at least 2."""
        self.finish_reason = ""
        self.error: Exception | None = None
        self.begun = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            with self.running.client(timeout=180) as client:
                for chunk in client.completions.create(**self.options):
                    for choice in chunk.choices:
                        self.text += choice.text
                        self.token_ids += (choice.model_extra or {}).get("token_ids") or ()
                        self.gaps += [
                            gap_of(top) for top in (choice.logprobs and choice.logprobs.top_logprobs) or ()
                        ]
                        self.finish_reason = choice.finish_reason or self.finish_reason
                    if len(self.text) > 40:
                        self.begun.set()
                    if self.stop is not None and self.stop.is_set():
                        return
        except Exception as error:
            self.error = error
        finally:
            self.begun.set()


def stream_until(stop: threading.Event, running: Service) -> None:
    """Read one stream after another, and disconnect from the last one."""
    while not stop.is_set():
        Stream(running, stop).join(120)


def gap_of(top: dict[str, float] | None) -> float:
    """Return the difference between the two highest log probabilities, or infinity if fewer than two are
    given."""
    highest = sorted((top or {}).values(), reverse=True)
    return highest[0] - highest[1] if len(highest) > 1 else math.inf


def runs(pid: int) -> bool:
    """Return whether the process is still running. A zombie that init has not reaped yet does not count as
    running."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_exited(pids: list[int], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while left := [pid for pid in pids if runs(pid)]:
        assert time.monotonic() < deadline, f"processes {left} are still running after {timeout_s} s"
        time.sleep(0.01)


def opened(running: Service) -> int:
    """Return the number of open rows in the request log."""
    with closing(sqlite3.connect(f"file:{running.state_dir}/history.db?mode=ro", uri=True)) as database:
        return int(database.execute("SELECT count(*) FROM requests WHERE state = 'open'").fetchone()[0])


def answer(running: Service) -> str:
    with running.client(timeout=180) as client:
        return (
            client.completions.create(model="demo", prompt="import ", temperature=0, max_tokens=8)
            .choices[0]
            .text
        )


STREAMS_OF_CORE = 20
"""Number of streams that run when the core is killed."""
TOKENS = 100
"""Number of tokens per stream."""


@pytest.fixture
def two_fronts(tmp_path: Path) -> Iterator[Service]:
    """Start a service that does not kill a suspended rank."""
    config = tmp_path / "appliance.toml"
    config.write_text("fronts = 2\nhang_timeout_s = 600\n")
    with service("--config", str(config)) as running:
        # A service is ready as soon as one front is.
        running.wait_until(lambda: both_ready(running), 60, "both fronts")
        yield running


def both_ready(running: Service) -> bool:
    return [front["state"] for front in running.status()["fronts"]] == ["ready", "ready"]


@contextmanager
def unfinished_streams(running: Service, count: int, tokens: int = TOKENS) -> Iterator[list[Stream]]:
    """Yield streams that have begun. They cannot end during the block, because the rank is suspended."""
    rank = psutil.Process(running.replica()["pids"][0])
    while True:
        streams = [Stream(running, max_tokens=tokens) for _ in range(count)]
        for stream in streams:
            assert stream.begun.wait(120)
        rank.suspend()
        if running.status()["queue"]["running"] == count:
            break
        # On a busy machine, a stream may have ended before the last one had begun.
        rank.resume()
        for stream in streams:
            stream.join(180)
    yield streams
    with suppress(psutil.NoSuchProcess):
        rank.resume()


def test_a_killed_rank_ends_its_group_and_the_streams_continue() -> None:
    tokens = 50
    with service("--tensor-parallel-size", "2") as running:
        undisturbed = Stream(running, max_tokens=tokens)
        undisturbed.join(180)
        assert undisturbed.finish_reason == "length", undisturbed.error
        for deaths, victim in enumerate((1, 0), start=1):
            pids = running.replica()["pids"]
            assert len(pids) == 2
            with unfinished_streams(running, 3, tokens) as streams:
                psutil.Process(pids[victim]).kill()
            wait_exited(pids, 60.0)
            past_problem(running, "demo-0", f"(pid {pids[victim]}) was killed by SIGKILL")
            for stream in streams:
                stream.join(180)
                assert not stream.is_alive()
                assert stream.error is None
                assert stream.text == undisturbed.text
            assert running.replica()["pids"] != pids
            assert answer(running)
            # The processes are two ranks and a front. An orphaned or duplicate process would increase the
            # count.
            running.wait_until(lambda: len(running.descendants()) == 3, 60, "no process but the new ones")
            everybody = running.descendants()
            rows = running.wait_until(
                lambda deaths=deaths: resubmitted_rows(running, 3 * deaths),
                60,
                "the rows of the resubmitted requests",
            )
            assert {row["billed_tokens"] for row in rows} == {tokens}
            # The only rendezvous directory left is that of the new ranks.
            assert len(list(running.run_dir.glob("ranks-*"))) == 1
        running.stop()
        wait_exited([process.pid for process in everybody], 60.0)
        assert [path.name for path in running.run_dir.iterdir()] == ["service.lock"]


def resubmitted_rows(running: Service, count: int) -> list[dict[str, Any]]:
    """Return the rows of requests that were resubmitted once, or an empty list if there are fewer than
    `count`."""
    rows = [row for row in running.rows() if row["resubmissions"]]
    assert len(rows) <= count and all(row["resubmissions"] == 1 for row in rows)
    return rows if len(rows) == count else []


def test_a_killed_front_closes_its_connections_and_no_others(two_fronts: Service) -> None:
    running, fronts = two_fronts, two_fronts.status()["fronts"]
    with unfinished_streams(running, 6) as streams:
        psutil.Process(fronts[0]["pid"]).suspend()
        accepted = running.status()["sockets"][0]["accepted"]
        # The front accepts some of these connections, but reads none of their data.
        unread = [Stream(running, max_tokens=5) for _ in range(6)]
        running.wait_until(
            lambda: running.status()["sockets"][0]["accepted"] >= accepted + 6, 60, "the connections"
        )
        psutil.Process(fronts[0]["pid"]).kill()
        wait_exited([fronts[0]["pid"]], 60.0)
    for stream in unread:
        stream.join(180)
        assert stream.finish_reason == "length", stream.error
    for stream in streams:
        stream.join(180)
        assert not stream.is_alive()
    assert sum(stream.error is not None for stream in streams) == 3
    assert sum(stream.finish_reason == "length" for stream in streams) == 3
    running.wait_until(lambda: both_ready(running), 60, "a new front")
    assert answer(running)
    assert answer(running)
    running.wait_until(
        lambda: running.replica()["running"] == running.replica()["blocks_used"] == 0,
        60,
        "an idle replica without blocks in use",
    )
    running.wait_until(lambda: len(ended(running)) >= 14, 60, "the rows of all requests")
    rows = running.rows(finish_reason="cancelled")
    assert len(rows) == 3
    assert all(row["error"] for row in rows)
    running.wait_until(lambda: len(running.descendants()) == 3, 60, "two fronts and a rank")


def test_a_killed_core_ends_all_processes_and_the_rows_survive(two_fronts: Service) -> None:
    running = two_fronts
    for _ in range(3):
        answer(running)
    running.wait_until(lambda: len(ended(running)) == 3, 60, "their rows")
    finished = ended(running)
    with unfinished_streams(running, STREAMS_OF_CORE) as streams:
        running.wait_until(lambda: opened(running) == STREAMS_OF_CORE, 60, "their rows to be on the disk")
        children = [process.pid for process in running.descendants()]
        assert len(children) == 3
        running.process.kill()
        running.process.wait()
    wait_exited(children, 60.0)
    for stream in streams:
        stream.join(180)
        assert not stream.is_alive()

    running.start()
    with sqlite3.connect(f"file:{running.state_dir}/history.db?mode=ro", uri=True) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    rows = {row["request_id"]: row for row in running.rows()}
    assert finished <= set(rows)
    interrupted = [row for row in rows.values() if row["finish_reason"] == "interrupted"]
    assert len(interrupted) == STREAMS_OF_CORE
    assert all(row["error"] for row in interrupted)
    assert answer(running)
