"""Random traffic against a real service while its processes are killed, used by `scripts/soak`.

The clients stream, disconnect during answers, request several samples, and send long or malformed requests,
as real clients do. While they run, fronts and ranks are killed. Afterwards, every request must have been
answered or closed, every row must have been closed exactly once, and all blocks, slots and credits must be
free again.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sqlite3
import sys
import threading
import time
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

from tests.system.attacks.reading import configured
from tests.system.rank_faults import SETTINGS
from tests.system.service import Service


@dataclass
class Tally:
    """Counts of the outcomes of clients' requests."""

    outcomes: dict[str, int] = field(default_factory=dict)
    request_ids: list[str] = field(default_factory=list)
    kills: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, outcome: str, request_id: str | None) -> None:
        with self.lock:
            self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
            if request_id:
                self.request_ids.append(request_id)


def random_request(draw: random.Random) -> dict[str, Any]:
    """Return a body for /v1/completions. One in ten is invalid."""
    body: dict[str, Any] = {
        "model": "demo",
        "prompt": [draw.randrange(7, 5000) for _ in range(draw.choice([1, 10, 63, 64, 65, 200, 900]))],
        "max_tokens": draw.choice([1, 5, 30, 120]),
        "temperature": draw.choice([0, 0.7, 1.2]),
        "n": draw.choice([1, 1, 1, 3]),
        "stream": draw.random() < 0.7,
        "stop": draw.choice([None, "\n", ["the", "def"]]),
        "top_p": draw.choice([1, 0.9]),
        "ignore_eos": draw.random() < 0.5,
    }
    if draw.random() < 0.1:
        body |= draw.choice([{"model": "nothing"}, {"temperature": -1}, {"prompt": [7] * 3000}])
    if draw.random() < 0.2:
        body |= {"frequency_penalty": 0.5, "logprobs": 2}
    return body


def ask(running: Service, draw: random.Random, tally: Tally, key: str = "") -> None:
    """Send one request, with the key if there is one. Read the whole answer, or disconnect before the end of
    the answer. Count the outcome."""
    body = random_request(draw)
    leaves_after = draw.choice([None, None, None, 1, 4]) if body["stream"] else None
    request_id = None
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with (
            running.http() as http,
            http.stream("POST", "/v1/completions", json=body, headers=headers, timeout=600) as answer,
        ):
            request_id = answer.headers.get("x-request-id")
            if answer.status_code != 200:
                answer.read()
                outcome = f"status {answer.status_code}"
            elif not body["stream"]:
                answer.read()
                outcome = "answered"
            else:
                lines = (line for line in answer.iter_lines() if line)
                taken = list(itertools.islice(lines, leaves_after))
                if leaves_after is not None and taken and not taken[-1].endswith("[DONE]"):
                    outcome = "left"
                elif taken and taken[-1].endswith("[DONE]"):
                    outcome = "streamed"
                else:
                    outcome = "error event" if taken and '"error"' in taken[-1] else "cut off"
    except (httpx.ReadError, httpx.RemoteProtocolError, httpx.ConnectError, httpx.WriteError):
        outcome = "connection closed"
    tally.count(outcome, request_id)


def storm(running: Service, seconds: float, seed: int, clients: int = 8, kill_every_s: float = 4.0) -> Tally:
    """Generate traffic and kill processes for `seconds`. Returns when every client has finished."""
    tally = Tally()
    ends_at = time.monotonic() + seconds

    def client(number: int) -> None:
        draw = random.Random(f"{seed}/{number}")
        while time.monotonic() < ends_at:
            ask(running, draw, tally)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    draw = random.Random(seed)
    while time.monotonic() + kill_every_s / 2 < ends_at:
        time.sleep(draw.uniform(0.5, 1.5) * kill_every_s)
        victims = [process for process in running.descendants() if process.is_running()]
        if victims:
            try:
                draw.choice(victims).kill()
                tally.kills += 1
            except psutil.NoSuchProcess:
                pass
    for thread in threads:
        thread.join(240)
        assert not thread.is_alive(), (
            f"a client is still waiting 240 s after the storm; outcomes so far: {tally.outcomes}"
        )
    return tally


def without_row(running: Service, tally: Tally) -> list[str]:
    """Return the ids of the requests that have no closed row in the log after at most a minute. The core may
    learn of a refused request a moment after the client does."""
    deadline = time.monotonic() + 60
    while True:
        with closing(sqlite3.connect(f"file:{running.state_dir}/history.db?mode=ro", uri=True)) as database:
            rows = dict(database.execute("SELECT request_id, state FROM requests"))
        missing = [request_id for request_id in tally.request_ids if rows.get(request_id) != "ended"]
        if time.monotonic() > deadline or not (missing or "open" in rows.values()):
            return missing
        time.sleep(0.1)


def check_service(running: Service, tally: Tally) -> None:
    """Raise AssertionError unless all blocks, slots and credits are free again."""

    def calm() -> Any:
        status = running.status()
        replica = status["models"][0]["replicas"][0]
        return (
            status["state"] == "ready"
            and status["queue"]["waiting"] == status["queue"]["running"] == 0
            and replica["running"] == replica["waiting"] == replica["blocks_used"] == 0
            and replica["credit_seqs"] == replica["max_num_seqs"]
            and replica["credit_tokens"] == replica["max_num_batched_tokens"]
        )

    running.wait_until(calm, 240, f"the service to be idle after the storm: {tally.outcomes}")
    missing = without_row(running, tally)
    with sqlite3.connect(f"file:{running.state_dir}/history.db?mode=ro", uri=True) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        rows = dict(database.execute("select request_id, state from requests"))
        (doubles,) = database.execute("select count(*) from requests where double_ends > 0").fetchone()
        (overbilled,) = database.execute(
            "select count(*) from requests where billed_tokens > generated_tokens"
        ).fetchone()
    assert doubles == 0
    assert overbilled == 0
    assert set(rows.values()) <= {"ended"}
    assert len(set(tally.request_ids)) == len(tally.request_ids)
    assert not missing, f"{len(missing)} requests left no row, e.g. {missing[:3]}"
    assert "cut off" not in tally.outcomes, tally.outcomes
    server_errors = [name for name in tally.outcomes if name.startswith("status 5") and name != "status 503"]
    assert not server_errors, tally.outcomes


def main() -> int:
    """Run storms for --minutes, and print a line for each round."""
    parser = argparse.ArgumentParser(prog="scripts/soak", description=main.__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--round-seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=8)
    arguments = parser.parse_args()
    ends_at = time.monotonic() + 60 * arguments.minutes
    with configured(SETTINGS, "--fronts", "2", "--tensor-parallel-size", "2") as running:
        memory = psutil.Process(running.process.pid)
        for number in itertools.count(arguments.seed):
            if time.monotonic() > ends_at:
                break
            tally = storm(running, arguments.round_seconds, number, arguments.clients)
            check_service(running, tally)
            resident = memory.memory_info().rss / 2**20
            print(
                f"seed {number}: {tally.kills} kills, {tally.outcomes}, core {resident:.0f} MiB", flush=True
            )
    print("all resources were free again after every round")
    return 0


if __name__ == "__main__":
    sys.exit(main())
