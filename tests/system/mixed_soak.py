"""Mixed traffic together with every attack at a low rate: `scripts/soak --mixed --minutes 30`.

No process is killed. In the second half of the run, the memory, descriptors and threads of each process must
not keep growing. Afterwards, the request log must contain exactly one row for every request that the clients
sent.

Memory that is used for the first time long after the start would look like growth, so two kinds are used
before the traffic starts. A CPU replica's KV cache takes up memory only when a block is first used, and the
allocator prefers blocks that were never used, so all blocks are used once. Python keeps much of the memory
that a front has used for large bodies, so the attackers first send large bodies at full speed.
"""

from __future__ import annotations

import argparse
import json
import random
import sqlite3
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.system.attack_soak import FLOODS, attacked_service, attackers, orders_of, reports
from tests.system.attacks.conftest import Target
from tests.system.attacks.test_templates import hostile_model_flags
from tests.system.single_attacks import SingleAttacks
from tests.system.storm import Tally, ask, check_service, without_row
from tests.system.trends import slope_of
from tests.system.usage import Usage, fill_kv_cache, processes_of, usage_of

CLIENT = "clients"
"""Name of the tenant whose requests are checked against the log."""
ATTACK_PAUSE_S = 3.0
ATTACK_CONNECTIONS = 2
LARGE_BODIES_S = 20.0
"""Time for which the attackers send large bodies at full speed before the traffic starts."""
KV_BLOCKS = 400
"""Number of KV blocks in the short version of this test. With the demo model, they use 250 MiB. A CPU
replica's default is 2 GiB."""
MEASUREMENTS: tuple[tuple[str, float, Callable[[list[float]], float]], ...] = (
    ("rss_mb", 0.1, min),
    ("descriptors", 0.0, statistics.fmean),
    ("threads", 0.0, statistics.fmean),
)
"""For each measurement: the field of `Usage`, the maximum growth per minute, and the function that reduces a
period's values to one level. For memory, the function is the minimum, because the attackers' large bodies
briefly raise memory use at random times."""


@dataclass
class Samples:
    """The resource use of each process at each sample time."""

    times_s: list[float] = field(default_factory=list)
    usage: dict[str, list[Usage]] = field(default_factory=dict)

    def second_half(self, name: str) -> tuple[list[float], list[Usage]]:
        """Return the times and samples of one process in the second half of the run."""
        middle = (self.times_s[0] + self.times_s[-1]) / 2
        kept = [one for one in zip(self.times_s, self.usage[name], strict=True) if one[0] >= middle]
        return [time_s for time_s, _ in kept], [usage for _, usage in kept]


@dataclass
class Trend:
    """The slope of one measurement of one process in the second half of the run."""

    process: str
    measurement: str
    """Field of `Usage`."""
    first: float
    last: float
    per_minute: float
    low: float
    high: float
    fails: bool


def sample(attacked: Target, seconds: float, every_s: float) -> Samples:
    """Sample the service's processes at regular intervals. Raises psutil.Error if a process has exited."""
    processes = processes_of(attacked.running)
    samples, start = Samples(usage={name: [] for name in processes}), time.monotonic()
    while (now := time.monotonic() - start) < seconds:
        samples.times_s.append(now)
        for name, process in processes.items():
            samples.usage[name].append(usage_of(process))
        time.sleep(every_s)
    return samples


def trends_of(samples: Samples) -> list[Trend]:
    """Return the slope of each measurement in the second half of the run, and whether it shows lasting
    growth."""
    trends = []
    for name in samples.usage:
        times_s, usage = samples.second_half(name)
        for measurement, accepted, level in MEASUREMENTS:
            values = [float(getattr(one, measurement)) for one in usage]
            slope = slope_of(times_s, values, level)
            fails = slope.per_minute > accepted and not slope.includes_zero
            trends.append(Trend(name, measurement, values[0], values[-1], *slope, fails))
    return trends


def account(attacked: Target, tally: Tally) -> list[str]:
    """Return the differences between the requests that the clients sent and the rows of their tenant in the
    log."""
    without_row(attacked.running, tally)
    with sqlite3.connect(f"file:{attacked.running.state_dir}/history.db?mode=ro", uri=True) as database:
        logged = Counter(
            row for (row,) in database.execute("SELECT request_id FROM requests WHERE tenant = ?", (CLIENT,))
        )
        (still_open,) = database.execute("SELECT count(*) FROM requests WHERE state = 'open'").fetchone()
    sent = Counter(tally.request_ids)
    without_id = sum(tally.outcomes.values()) - len(tally.request_ids)
    findings = {
        "requests without an id": without_id,
        "lost requests": sum((sent - logged).values()),
        "rows of no request": sum((logged - sent).values()),
        "doubled rows": sum(count - 1 for count in logged.values()),
        "open rows": still_open,
    }
    return [f"{name}: {count}" for name, count in findings.items() if count]


def clients(attacked: Target, count: int, seconds: float, tally: Tally) -> list[threading.Thread]:
    """Start clients that send one request after another until the run ends."""
    attacked.running.tenant(CLIENT)
    key = attacked.running.key(CLIENT, CLIENT)
    ends_at = time.monotonic() + seconds

    def client(number: int) -> None:
        draw = random.Random(f"mixed/{number}")
        while time.monotonic() < ends_at:
            ask(attacked.running, draw, tally, key)
            time.sleep(draw.uniform(0.0, 0.4))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    return threads


def fill_fronts(attacked: Target, key: str, seconds: float) -> None:
    """Let the attackers send large bodies at full speed, so that the fronts use as much memory for bodies as
    they may. Raises RuntimeError if an attacker fails."""
    large = [flood for flood in FLOODS if flood.kind.startswith("huge") and flood.socket != "metrics"]
    with attackers([orders_of(flood, attacked, seconds, key) for flood in large]) as processes:
        reports(processes)


def run(
    attacked: Target, key: str, seconds: float, count: int, every_s: float
) -> tuple[dict[str, Any], Samples]:
    """Run all traffic and return the result and the samples. The result's `failures` field lists the violated
    expectations. `key` belongs to the attackers' tenant, `count` is the number of clients, and `every_s` is
    the sampling interval in seconds."""
    tally = Tally()
    orders = [
        replace(
            orders_of(flood, attacked, seconds, key),
            connections=ATTACK_CONNECTIONS,
            pause_s=ATTACK_PAUSE_S,
        )
        for flood in FLOODS
    ]
    with attackers(orders) as processes:
        threads = clients(attacked, count, seconds, tally)
        single = SingleAttacks(attacked, key, seconds)
        samples = sample(attacked, seconds, every_s)
        for thread in threads:
            thread.join(300)
        failures = single.failures()
        done = reports(processes)
    check_service(attacked.running, tally)
    failures += account(attacked, tally)
    result = {
        "minutes": seconds / 60,
        "requests": sum(tally.outcomes.values()),
        "outcomes": tally.outcomes,
        "attackers": done,
        "single_attacks": single.statuses,
        "samples": {
            "times_s": samples.times_s,
            **{name: [list(asdict(one).values()) for one in usage] for name, usage in samples.usage.items()},
        },
        "failures": failures,
    }
    return result, samples


def main() -> int:
    """Run mixed traffic. The exit code is 1 if resource use grows, or if a request is lost or logged
    twice."""
    parser = argparse.ArgumentParser(prog="scripts/soak --mixed", description=main.__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--sample-seconds", type=float, default=2.0)
    parser.add_argument(
        "--kv-blocks", type=int, help="default: the default size of a CPU replica's KV cache, 2 GiB"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="where to keep the result, with all samples"
    )
    options = parser.parse_args()
    flags = ("--kv-blocks", str(options.kv_blocks)) if options.kv_blocks else ()
    with (
        tempfile.TemporaryDirectory(prefix="soak-model-") as folder,
        attacked_service(*hostile_model_flags(Path(folder) / "model"), *flags) as (attacked, key),
    ):
        blocks = attacked.running.replica()["blocks_total"]
        filled_mb = fill_kv_cache(attacked.running, blocks, random.Random(1))
        print(f"all {blocks} KV blocks have been used once: the replica uses {filled_mb:.0f} MB", flush=True)
        fill_fronts(attacked, key, LARGE_BODIES_S)
        result, samples = run(attacked, key, 60 * options.minutes, options.clients, options.sample_seconds)
    trends = trends_of(samples)
    result["failures"] += [
        f"{one.process}: {one.measurement} grows by {one.per_minute:.3f} a minute"
        for one in trends
        if one.fails
    ]
    result |= {
        "trends": [asdict(one) for one in trends],
        "kv_blocks": blocks,
        "replica_mb_with_all_kv_blocks": filled_mb,
    }
    print(f"{result['requests']} client requests: {result['outcomes']}\nattackers: {result['attackers']}")
    print(f"single attacks: { {name: dict(found) for name, found in result['single_attacks'].items()} }")
    print(f"{'process':18} {'measurement':12} {'first':>8} {'last':>8}  a minute, 95% confidence interval")
    for one in result["trends"]:
        print(
            f"{one['process']:18} {one['measurement']:12} {one['first']:8.1f} {one['last']:8.1f}  "
            f"{one['per_minute']:+.3f} [{one['low']:+.3f}, {one['high']:+.3f}]{' GROWS' * one['fails']}"
        )
    for failure in result["failures"]:
        print(failure)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
