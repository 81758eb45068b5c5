"""Tests that a real service's metrics always agree with the request log and reflect the current state."""

from __future__ import annotations

import re
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from appliance.monitoring.metrics.families import Families
from appliance.monitoring.metrics.tenants import OTHERS
from tests.ports import free_port
from tests.system.service import Service, service
from tests.system.test_deaths import Stream, stream_until

pytestmark = pytest.mark.system

SHORT = {"model": "demo", "prompt": "import ", "max_tokens": 4, "temperature": 0}
OUTCOME = """CASE WHEN status < 400 THEN iif(error IS NULL, 'ok', 'failed')
    WHEN status = 499 THEN 'cancelled' WHEN status IN (429, 503) THEN 'refused'
    WHEN status < 500 THEN 'rejected' ELSE 'failed' END"""

Values = dict[tuple[str, ...], float]


class Server:
    """A service that also serves metrics on TCP."""

    def __init__(self, running: Service, port: int, metrics_port: int) -> None:
        self.running = running
        self.port = port
        self.metrics_url = f"http://127.0.0.1:{metrics_port}/metrics"

    def text(self) -> str:
        answer = httpx.get(self.metrics_url, timeout=600, verify=False)
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        return answer.text

    def values(self, name: str, text: str | None = None) -> Values:
        """Return the metric's values in `text`. If `text` is None, scrape the metrics again."""
        return {
            tuple(sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text or self.text())
            for sample in family.samples
            if sample.name == name
        }

    def wait_for(self, name: str, good: Callable[[Values], Any]) -> None:
        self.running.wait_until(lambda: good(self.values(name)), 60, name)

    def logged(self, *columns: str) -> Values:
        """Return sums over the closed rows. The last column is summed, and all other columns group the
        rows."""
        *by, total = columns
        names = ", ".join(by)
        query = f"SELECT {names}, {total} FROM requests WHERE finished_at IS NOT NULL GROUP BY {names}"
        path = self.running.state_dir / "history.db"
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            return {tuple(row[:-1]): row[-1] for row in database.execute(query)}

    def ask(self, key: str, **changes: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}", **changes.pop("headers", {})}
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        return httpx.post(url, json={**SHORT, **changes}, headers=headers, timeout=600, verify=False)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port, metrics_port = free_port(), free_port()
    config = tmp_path_factory.mktemp("metrics") / "appliance.toml"
    config.write_text(f'[metrics]\nlisten = "127.0.0.1:{metrics_port}"\n')
    with service("--config", str(config), "--listen", f"127.0.0.1:{port}", "--fronts", "2") as running:
        yield Server(running, port, metrics_port)


def above_0(values: Values) -> Values:
    return {by: value for by, value in values.items() if value}


def test_the_counters_agree_with_the_request_log_after_every_kind_of_outcome(server: Server) -> None:
    running = server.running
    running.command("tenants", "create", "acme", "--requests-per-minute", "3", "--tokens-per-day", "1000")
    key = running.command("keys", "create", "--name", "k", "--tenant", "acme")["key"]
    with_key = {"headers": {"Idempotency-Key": "once"}}
    statuses = [server.ask(key, **with_key).status_code for _ in range(2)]
    statuses += [server.ask(key, **changes).status_code for changes in ({"model": "no"}, {"max_tokens": "x"})]
    statuses += [server.ask(key).status_code for _ in range(8)]
    assert {200, 400, 404, 429} <= set(statuses)
    streams = [Stream(running, max_tokens=100) for _ in range(2)]
    for stream in streams:
        assert stream.begun.wait(120)
    running.kill_front(running.status()["fronts"][0]["pid"])
    leaves = {**SHORT, "max_tokens": 1900, "stream": True, "ignore_eos": True}
    with running.http() as http, http.stream("POST", "/v1/completions", json=leaves) as leaving:
        assert leaving.status_code == 200
    for stream in streams:
        stream.join(180)
    # A row is opened before its request is answered, so no row is missing after the first wait.
    server.wait_for("appliance_store_waiting_rows", lambda waiting: waiting["history",] == 0)
    running.wait_until(lambda: not running.rows(state="open"), 60, "the end of all requests")

    model = f"iif(version IS NULL, '{OTHERS}', model)"
    requests = server.logged(model, "class", OUTCOME, "count(*)")
    assert {outcome for *_, outcome in requests} >= {"ok", "cancelled", "rejected", "refused"}
    assert server.values("appliance_requests_total") == requests
    assert server.values("appliance_tenant_requests_total") == server.logged("tenant", OUTCOME, "count(*)")
    assert server.values("appliance_retries_total") == above_0(server.logged(model, "retry", "count(retry)"))
    for name in ("prompt", "generated", "billed"):
        tokens = f"sum({name}_tokens)"
        assert server.values(f"appliance_{name}_tokens_total") == server.logged(model, "class", tokens)
        assert server.values(f"appliance_tenant_{name}_tokens_total") == server.logged("tenant", tokens)
    for name in ("cached", "tenant_cached"):
        by = ("tenant",) if name.startswith("tenant") else (model, "class")
        assert server.values(f"appliance_{name}_prompt_tokens_total") == server.logged(
            *by, "sum(cached_tokens)"
        )
    timed = server.logged(model, "class", "sum(ttft_ms IS NOT NULL AND retry IS NULL)")
    assert server.values("appliance_time_to_first_token_seconds_count") == above_0(timed)

    assert server.values("appliance_front_restarts_total") == {("front-0",): 1, ("front-1",): 0}
    assert server.values("appliance_problems_total")[()] >= 1
    assert server.values("appliance_tenant_limit")["acme", "tokens_per_day"] == 1000
    used = server.logged("tenant", "sum(quota_tokens)")["acme",]
    left = server.values("appliance_tenant_limit_left")["acme", "tokens_per_day"]
    # A daily limit of 1,000 tokens is refilled at 0.7 tokens per minute.
    assert 1000 - used <= left <= 1005 - used < 1000
    # The engine updates its own count at each step. It must equal the sum in the log.
    generated = sum(server.logged("tenant", "sum(generated_tokens)").values())
    server.wait_for("appliance_engine_generated_tokens_total", lambda shown: sum(shown.values()) == generated)

    running.command("keys", "revoke", "--yes", running.command("keys", "list")[0]["id"])
    running.command("tenants", "delete", "--yes", "acme")
    server.wait_for("appliance_tenant_requests_total", lambda shown: not any(t == "acme" for t, _ in shown))
    assert 'tenant="acme"' not in server.text()


def test_gauges_follow_the_load_and_have_the_names_that_gateways_expect(server: Server) -> None:
    server.wait_for("vllm:num_requests_running", lambda running: running == {("demo",): 0})
    stop = threading.Event()
    clients = [threading.Thread(target=stream_until, args=(stop, server.running)) for _ in range(3)]
    for client in clients:
        client.start()

    def three_run() -> bool:
        # All values must come from one scrape, because requests may finish before the next scrape.
        values = partial(server.values, text=server.text())
        return (
            values("vllm:num_requests_running") == {("demo",): 3}
            and values("vllm:num_requests_waiting") == {("demo",): 0}
            and 0 < values("vllm:kv_cache_usage_perc")["demo",] < 1
            and values("appliance_tenant_running_requests")["local",] == 3
        )

    try:
        server.running.wait_until(three_run, 120, "a scrape while three requests run")
    finally:
        stop.set()
    blocks = server.running.replica()["blocks_total"]
    assert server.values("vllm:cache_config_info") == {("demo", "64", str(blocks)): 1}
    assert ("demo", "0", "", "") in server.values("vllm:lora_requests_info")
    for client in clients:
        client.join(180)
    server.wait_for("vllm:kv_cache_usage_perc", lambda usage: usage == {("demo",): 0})
    steps = server.values("appliance_step_seconds_count")
    assert steps["demo", "demo-0", "decode"] > steps["demo", "demo-0", "mixed"] > 0
    # On a busy machine, the replica may have been silent for a while.
    server.wait_for("appliance_replica_state", lambda found: found == {("demo", "demo-0", "ready"): 1})


def test_every_metric_of_the_service_is_in_the_catalogue_on_both_sockets(server: Server) -> None:
    catalogue = {family.name: family.kind for family in Families()}
    for text in (server.running.metrics(), server.text()):
        assert dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE)) == catalogue
        shown = {family.name for family in text_string_to_metric_families(text)}
        assert shown == {name.removesuffix("_total") for name in catalogue}
