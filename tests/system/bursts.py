"""Bursts of requests that exceed a quota, against a real service while its fronts and ranks are killed:
`python -m tests.system.bursts --rounds 1000`.

In each round, many clients concurrently send requests of random sizes, which together exceed the quota of a
newly created tenant or key. Some clients disconnect, some retry immediately after a refusal, and occasionally
a front or a rank is killed during the burst. Afterwards, the clients' results, the request log, the quotas
and the engine's token counts must agree, and no quota may have been exceeded.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import shutil
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from appliance.actions.parameters import CreateKey, CreateTenant, DeleteTenant, RevokeKey
from appliance.client import AdminClient
from appliance.protocol import LimitUsage, NewKey, ReplicaStatus
from tests.system.burst_client import Got, ask
from tests.system.service import CALL_TIMEOUT_S, Service, service

WIDTH = 64
"""Number of concurrent clients."""
CALM_S = 120.0
"""Time limit, in seconds, for the answers of a burst, and for the service to be idle afterwards."""
DEMO = Path(__file__).parents[2] / "appliance" / "demo_model"
TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


@dataclass
class Round:
    """One burst, and the service's records of it."""

    number: int
    scope: str
    """The kind of object that has the quota: "tenant" or "key"."""
    limit: str
    """Name of the limit to which the quota applies."""
    capacity: float
    per_s: float
    """Number of tokens or requests per second by which the quota recovers."""
    tenant: str
    key_id: str = ""
    secret: str = ""
    killed: str = ""
    """Kind of process that was killed: "front", "rank", or "" for none."""
    seconds: float = 0.0
    got: list[Got] = field(default_factory=list)
    usage: list[LimitUsage] = field(default_factory=list)
    """Usage of the quota after all requests have finished."""


@dataclass
class Findings:
    """Counts of errors, which must all be zero, and other counts."""

    overshoot_tokens: int = 0
    """Number of tokens beyond a quota's limit that were charged, or that clients received."""
    overshoot_requests: int = 0
    leaked: int = 0
    """Number of tokens or requests that are still reserved, or counted as used, although no request accounts
    for them."""
    request_log_is_not_engine: int = 0
    """Number of generated tokens in the request log, minus the number counted by the engine."""
    billed_is_not_delivered: int = 0
    """Sum over all requests of the difference between billed and delivered tokens."""
    missing_rows: int = 0
    open_rows: int = 0
    double_ends: int = 0
    wrong_charges: int = 0
    """Number of requests for which the charge differs from prompt tokens plus billed tokens."""
    examples: list[str] = field(default_factory=list)

    def note(self, kind: str, amount: int, example: str) -> None:
        """Add `amount` to the count of errors of this kind, and keep an example."""
        setattr(self, kind, getattr(self, kind) + amount)
        if len(self.examples) < 20:
            self.examples.append(f"{kind}: {example}")


def draw_round(number: int, draw: random.Random) -> Round:
    """Draw the random quota of a burst."""
    scope = draw.choice(["tenant", "key"])
    tenant = f"burst-{number}"
    kind = draw.choice(
        ["tokens_per_day"] * 7 + ["tokens_per_minute", "requests_per_minute", "requests_per_minute"]
    )
    if kind == "tokens_per_day":
        capacity = float(draw.randrange(100, 1500))
        return Round(number, scope, kind, capacity, capacity / 86_400, tenant)
    if kind == "tokens_per_minute":
        return Round(number, scope, kind, float(draw.randrange(100, 1500)), 5.0, tenant)
    capacity = float(draw.randrange(2, 48))
    return Round(number, scope, kind, capacity, capacity / 60, tenant)


def quota_of(this: Round) -> dict[str, float]:
    """Return the limits that define the quota."""
    if this.limit == "tokens_per_minute":
        return {"tokens_per_minute": this.per_s * 60, "burst_s": this.capacity / this.per_s}
    return {this.limit: this.capacity}


# ── the service ──


class Bursts:
    """Runs rounds against one service."""

    def __init__(self, running: Service, seed: int, front_every: int = 12, rank_every: int = 50) -> None:
        """Prepare the rounds. On average, a front is killed once every `front_every` rounds and a rank once
        every `rank_every` rounds."""
        self.running = running
        self.seed = seed
        self.front_every = front_every
        self.rank_every = rank_every
        self.admin = AdminClient(running.run_dir, CALL_TIMEOUT_S)
        self.rounds: list[Round] = []
        self.engine: list[tuple[list[int], int]] = []
        """One entry for each series of rounds during which no rank died. It contains the numbers of the
        rounds, and the number of tokens that the engine generated in these rounds."""
        self._victim: int | None = None
        """Process id of the last process that was killed."""
        self._since: list[int] = []
        self._counted = 0

    def run(self, number: int) -> Round:
        """Run one burst. Returns after all of its requests have finished."""
        draw = random.Random(f"{self.seed}/{number}")
        this = draw_round(number, draw)
        if number % self.rank_every == self.rank_every - 1:
            this.killed = "rank"
        elif number % self.front_every == self.front_every - 1:
            this.killed = "front"
        if this.killed == "rank":
            self.count_engine()
        self._open(this)
        began = time.monotonic()
        asyncio.run(self._burst(this, draw))
        self._calm(this)
        if this.scope == "tenant":
            this.usage = next(one.usage for one in self.admin.tenants() if one.name == this.tenant)
        else:
            every = self.admin.keys()
            this.usage = next(one.usage for one in every if one.id == this.key_id)
        this.seconds = time.monotonic() - began  # the quota kept recovering until its usage was read
        self.admin.act(RevokeKey(id=this.key_id))
        self.admin.act(DeleteTenant(name=this.tenant))
        self.rounds.append(this)
        if this.killed == "rank":
            self._counted = self._replica().generated_tokens
        else:
            self._since.append(number)
        return this

    def count_engine(self) -> None:
        """Record the number of tokens that the engine has generated since the last death of a rank."""
        total = self._replica().generated_tokens
        self.engine.append((self._since, total - self._counted))
        self._since, self._counted = [], total

    def _open(self, this: Round) -> None:
        quota = quota_of(this)
        own = quota if this.scope == "tenant" else {}
        self.admin.act(CreateTenant(name=this.tenant, default_max_tokens=48, **own))
        own = quota if this.scope == "key" else {}
        made = self.admin.act(CreateKey(name=this.tenant, tenant=this.tenant, **own))
        assert isinstance(made, NewKey)
        this.key_id, this.secret = made.id, made.key

    async def _burst(self, this: Round, draw: random.Random) -> None:
        start, path = asyncio.Event(), str(self.running.api_socket)
        clients = [
            asyncio.create_task(ask(path, this.secret, random.Random(draw.random()), start, this.got))
            for _ in range(WIDTH)
        ]
        await asyncio.sleep(0.02)  # give the clients time to connect
        start.set()
        if this.killed:
            await asyncio.sleep(draw.uniform(0.0, 0.25))
            self._kill(this.killed, draw)
        done, waiting = await asyncio.wait(clients, timeout=CALM_S)
        assert not waiting, (
            f"{len(waiting)} clients of round {this.number} are still waiting after {CALM_S:g} s"
        )
        for client in done:
            client.result()

    def _kill(self, whom: str, draw: random.Random) -> None:
        status = self.admin.status()
        pids = self._replica().pids if whom == "rank" else [front.pid for front in status.fronts if front.pid]
        if pids:
            self._victim = draw.choice(pids)
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(self._victim).kill()

    def _replica(self) -> ReplicaStatus:
        return self.admin.status().models[0].replicas[0]

    def _calm(self, this: Round) -> None:
        def calm() -> bool:
            if self.admin.in_flight():
                return False
            status = self.admin.status()
            replica = status.models[0].replicas[0]
            if self._victim in (*replica.pids, *(front.pid for front in status.fronts)):
                return False  # the service has not noticed the death yet
            fronts = all(front.state == "ready" for front in status.fronts)
            full = replica.credit_seqs == replica.max_num_seqs and replica.blocks_used == 0
            return fronts and replica.state == "ready" and full

        self.running.wait_until(calm, CALM_S, f"the service to be idle after round {this.number}")

    def findings(self) -> Findings:
        """Compare all counts. Call this only after the last round."""
        self.count_engine()
        found = Findings()
        self.running.wait_until(self._all_written, 60, "every row to be on the disk")
        self.running.wait_until(lambda: not self._open_rows(), 60, "every row to end")
        rows = self.rows()
        for this in self.rounds:
            # Some clients never received the id of their request, because the front process serving them was
            # killed.
            check_round(this, [row for row in rows.values() if row["tenant"] == this.tenant], found)
            check_rows(this, rows, found)
        by_round = {this.number: this for this in self.rounds}
        for numbers, generated in self.engine:
            tenants = {by_round[number].tenant for number in numbers}
            logged = sum(row["generated_tokens"] for row in rows.values() if row["tenant"] in tenants)
            if logged != generated:
                words = (
                    f"rounds {numbers[:1]} to {numbers[-1:]}: {logged} in the log, {generated} by the engine"
                )
                found.note("request_log_is_not_engine", abs(logged - generated), words)
        return found

    def rows(self) -> dict[str, dict[str, Any]]:
        """Return all rows of the request log, keyed by request id."""
        with contextlib.closing(self._database()) as database:
            database.row_factory = sqlite3.Row
            found = map(dict, database.execute("SELECT * FROM requests"))
            return {row["request_id"]: row for row in found}

    def _all_written(self) -> bool:
        """Return whether the databases contain every row. Rows are written a moment after a request's end."""
        return not any(database.lag_rows for database in self.admin.status().databases)

    def _open_rows(self) -> int:
        with contextlib.closing(self._database()) as database:
            return int(database.execute("SELECT count(*) FROM requests WHERE state = 'open'").fetchone()[0])

    def _database(self) -> sqlite3.Connection:
        return sqlite3.connect(f"file:{self.running.state_dir}/history.db?mode=ro", uri=True)


# ── invariants ──


def check_round(this: Round, rows: list[dict[str, Any]], found: Findings) -> None:
    """Check that the quota was not exceeded and that it reports its usage correctly."""
    had = this.capacity + this.per_s * this.seconds
    charged = sum(row["quota_tokens"] for row in rows)
    ran = sum(row["quota_tokens"] > 0 for row in rows)
    received = sum(got.prompt_tokens + got.tokens for got in this.got if got.tokens)
    name = f"round {this.number}: {this.limit} {this.capacity:g} of the {this.scope}"
    if this.limit == "requests_per_minute":
        used, kind = ran, "overshoot_requests"
    else:
        used, kind = charged, "overshoot_tokens"
        if received > had:
            found.note(
                kind, int(received - had) or 1, f"{name}: {received} tokens received, {had:.1f} allowed"
            )
    if used > had:
        found.note(kind, int(used - had) or 1, f"{name}: {used} charged, {had:.1f} allowed")
    for usage in this.usage:
        if usage.held:
            found.note("leaked", abs(usage.held), f"{name}: {usage.held} of {usage.limit} are still reserved")
        if usage.limit == this.limit:
            left_by_time = this.per_s * this.seconds + 1
            if not used - left_by_time <= usage.used <= used + 1:
                words = f"{name}: {usage.used} used according to the quota, {used} according to the log"
                found.note("leaked", abs(usage.used - used), words)


def check_rows(this: Round, rows: dict[str, dict[str, Any]], found: Findings) -> None:
    """Check that each request has one row, and that the row agrees with the client's result."""
    for got in this.got:
        if not got.request_id:
            continue
        row = rows.get(got.request_id)
        name = f"round {this.number}: {got.request_id}"
        if row is None:
            found.note("missing_rows", 1, name)
            continue
        billed, generated, charged = row["billed_tokens"], row["generated_tokens"], row["quota_tokens"]
        if row["finished_at"] is None:
            found.note("open_rows", 1, name)
        if row["double_ends"]:
            found.note("double_ends", row["double_ends"], name)
        died = row["error"] == "the front process died"
        if got.whole and not died and billed != got.tokens:
            # A client that disconnects after the last byte may be logged as disconnected.
            found.note(
                "billed_is_not_delivered",
                abs(billed - got.tokens),
                f"{name}: {billed} billed, {got.tokens} delivered",
            )
        elif billed < got.tokens and not died:
            found.note(
                "billed_is_not_delivered",
                got.tokens - billed,
                f"{name}: {billed} billed, {got.tokens} delivered",
            )
        if billed > generated:
            found.note(
                "billed_is_not_delivered",
                billed - generated,
                f"{name}: {billed} billed, {generated} generated",
            )
        if died:
            right = charged >= (row["prompt_tokens"] + got.tokens if got.tokens else 0)
        else:
            right = charged in (row["prompt_tokens"] + billed, 0 if not billed else -1)
        if not right:
            found.note(
                "wrong_charges",
                1,
                f"{name}: {charged} charged, {row['prompt_tokens']} prompt + {billed} billed",
            )


@contextlib.contextmanager
def tiny_service() -> Iterator[Service]:
    """Start a service with a tiny random model."""
    with tempfile.TemporaryDirectory(prefix="tiny-") as folder:
        config = json.loads((DEMO / "config.json").read_text())
        (Path(folder) / "config.json").write_text(json.dumps({**config, **TINY}))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(DEMO / name, folder)
        flags = ["--model", f"tiny={folder}", "--load-format", "dummy", "--device", "cpu"]
        with service(*flags, "--fronts", "2") as running:
            yield running


def summary(bursts: Bursts, found: Findings, seconds: float) -> dict[str, Any]:
    """Return the statistics of a run, which are stored in its report."""
    rows = bursts.rows().values()
    got = [one for this in bursts.rounds for one in this.got]
    outcomes = Counter(
        "left" if one.left else one.refusal or ("answered" if one.whole else "cut off") for one in got
    )
    return {
        "description": f"{WIDTH}-way bursts that exceed a quota, against real processes with the CPU engine",
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        "seed": bursts.seed,
        "rounds": len(bursts.rounds),
        "seconds": round(seconds, 1),
        "requests": len(got),
        "outcomes": dict(outcomes.most_common()),
        "rounds_by_limit": dict(Counter(f"{this.limit} of a {this.scope}" for this in bursts.rounds)),
        "killed": dict(Counter(this.killed for this in bursts.rounds if this.killed)),
        "resubmitted_requests": sum(row["resubmissions"] > 0 for row in rows),
        "tokens": {
            "charged": sum(row["quota_tokens"] for row in rows),
            "billed": sum(row["billed_tokens"] for row in rows),
            "generated_by_the_log": sum(row["generated_tokens"] for row in rows),
            "generated_by_the_engine_between_deaths_of_ranks": sum(
                generated for _, generated in bursts.engine
            ),
        },
        "found": dict(vars(found)),
    }


def main() -> int:
    """Run bursts one after another and print the number of each kind of error. All of them must be zero."""
    parser = argparse.ArgumentParser(prog="python -m tests.system.bursts", description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where to keep the result")
    arguments = parser.parse_args()
    with tiny_service() as running:
        bursts, began = Bursts(running, arguments.seed), time.monotonic()
        for number in range(arguments.rounds):
            this = bursts.run(number)
            if number % 50 == 49:
                words = f"{time.monotonic() - began:.0f} s, the last round {this.seconds:.2f} s"
                print(f"{number + 1} rounds in {words}", flush=True)
        found = bursts.findings()
        result = summary(bursts, found, time.monotonic() - began)
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n")
    return 1 if found.examples else 0


if __name__ == "__main__":
    sys.exit(main())
