"""Tests of clients with many connections, or with many requests on one connection. The service limits such a
client, and other clients keep their connections."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

import httpx
import psutil
import pytest

import tests.system.service
from appliance.actions.parameters import ReloadConfig
from tests.system.attack_soak import attackers, reports
from tests.system.attackers import Orders
from tests.system.attacks.conftest import Target, limited, target
from tests.system.attacks.wire import (
    MEGABYTE,
    Memory,
    chat,
    connect,
    cpu_s,
    exchange,
    flood,
    idle,
    is_closed,
    post,
    read_all,
    serving_pids,
    wait_for,
)

pytestmark = pytest.mark.system
GET = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
MAX_GROWTH = 60 * MEGABYTE
"""Maximum growth of a process's memory, in bytes. Without limits on connections, each of these floods made a
process grow by more than 150 MB."""

FEW = "max_connections = 40\nmax_unauthenticated_connections = 10\n"
MAX_ANSWER_CPU_S = 1.0
"""Maximum CPU time, in seconds, that the core and the fronts use until they have answered another client
during a flood: the median, because the client may be stopped during a request. Unlike a duration, it does not
depend on other work of the machine."""


@contextmanager
def another_client(attacked: Target) -> Iterator[list[float]]:
    """Send requests on the Unix socket repeatedly. Yield a list to which the CPU time, in seconds, that the
    core and the fronts used until each answer is appended."""
    used: list[float] = []
    ended, pids = threading.Event(), serving_pids(attacked.running)

    def ask() -> None:
        with attacked.running.http() as client:
            while not ended.is_set():
                began = cpu_s(*pids)
                assert client.post("/tokenize", json={"model": "demo", "prompt": "hi"}).status_code == 200
                used.append(cpu_s(*pids) - began)
                time.sleep(0.01)

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        try:
            yield used
        finally:
            ended.set()
        asking.result()


@pytest.mark.parametrize(
    "request_bytes",
    [
        GET,
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n1\r\n}\r\n0\r\n\r\n",
        b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
def test_requests_without_a_key_get_one_answer_and_their_connection_closes(
    attacked: Target, request_bytes: bytes
) -> None:
    memory = Memory(attacked.running)
    data = request_bytes * (4 * MEGABYTE // len(request_bytes))
    with another_client(attacked) as used:
        answers = flood(attacked.tcp, data, connections=60, seconds=30)
        growth = memory.growth()
    assert {answer.count(b"HTTP/1.1 ") for answer in answers} <= {0, 1}
    assert any(answers)
    assert growth < MAX_GROWTH
    assert median(used) < MAX_ANSWER_CPU_S


def test_requests_of_a_local_user_wait_in_the_kernel(attacked: Target) -> None:
    memory = Memory(attacked.running)
    with another_client(attacked) as used:
        flood(attacked.unix, GET * (4 * MEGABYTE // len(GET)), connections=30, seconds=2)
        growth = memory.growth()
    assert growth < MAX_GROWTH
    assert median(used) < MAX_ANSWER_CPU_S


def test_many_requests_on_one_connection_are_answered_in_their_order(attacked: Target) -> None:
    last = b"GET /v1/nothing HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with connect(attacked.unix) as sock:
        sender = threading.Thread(target=sock.sendall, args=(GET * 500 + last,))
        sender.start()
        answer = read_all(sock)
        sender.join()
    assert answer.count(b"HTTP/1.1 200 OK") == 500
    assert answer.rindex(b"HTTP/1.1 404") > answer.rindex(b"HTTP/1.1 200")


def test_floods_on_the_sockets_of_operators_and_metrics_do_not_grow_the_core(attacked: Target) -> None:
    memory = Memory(attacked.running)
    flood(attacked.metrics, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 100_000, connections=20, seconds=2)
    flood(attacked.admin, b"GET /status HTTP/1.1\r\nHost: x\r\n\r\n" * 100_000, connections=20, seconds=2)
    assert memory.growth() < MAX_GROWTH
    wait_for(lambda: attacked.running.status()["state"] == "ready", "the service to be ready")


def test_repeated_requests_for_the_admin_apis_description_cost_the_core_little(attacked: Target) -> None:
    core = attacked.running.process.pid

    def used_s(path: str, requests: int) -> float:
        request = f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
        before = cpu_s(core)
        for _ in range(requests):
            assert exchange(attacked.admin, request).startswith(b"HTTP/1.1 200 ")
        return cpu_s(core) - before

    # Building the document takes as long as 30 requests for the status. The measured CPU time includes other
    # work of the core, so only the best measurement counts.
    assert any(used_s("/openapi.json", 50) < used_s("/status", 200) for _ in range(5))


def test_idle_connections_lock_nobody_out_of_metrics_or_administration(attacked: Target) -> None:
    with idle(attacked.metrics, 60) as first, idle(attacked.admin, 100):
        host, port = attacked.metrics
        wait_for(
            lambda: "appliance_ready 1" in httpx.get(f"http://{host}:{port}/metrics", timeout=600).text,
            "the metrics of a ready service",
        )
        wait_for(lambda: attacked.running.status()["state"] == "ready", "the service to be ready")
        wait_for(lambda: is_closed(first[0]), "the oldest idle connection to be closed")


def test_without_a_key_the_readiness_of_a_model_reveals_nothing(attacked: Target) -> None:
    def asked(name: str, *headers: str) -> bytes:
        lines = [f"GET /health/ready?model={name} HTTP/1.1", "Host: x", "Connection: close", *headers]
        answer = exchange(attacked.tcp, "\r\n".join(lines).encode() + b"\r\n\r\n")
        status, _, rest = answer.partition(b"\r\n")
        return status + rest.partition(b"\r\n\r\n")[2]

    assert asked("demo") == asked("unknown") and asked("demo").startswith(b"HTTP/1.1 401 ")
    wait_for(
        lambda: asked("demo", attacked.authorization).startswith(b"HTTP/1.1 200 "), "the model to be ready"
    )
    assert asked("unknown", attacked.authorization).startswith(b"HTTP/1.1 404 ")


def test_requests_with_wrong_keys_write_one_log_line_and_are_reported(attacked: Target) -> None:
    def logged(text: str) -> list[str]:
        lines = attacked.running.log_path.read_text().splitlines()
        return [line for line in lines if "were denied" in line and text in line]

    def denied() -> int:
        return sum(front["unauthenticated"] for front in attacked.running.status()["fronts"])

    sockets = {" 127.0.0.1:": (attacked.tcp, "/"), "admin.sock": (attacked.admin, "/status")}
    started, before, lines = time.monotonic(), denied(), {text: len(logged(text)) for text in sockets}
    for address, path in sockets.values():
        for number in range(200):
            request = f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ak-{number}\r\n\r\n"
            assert exchange(address, request.encode()).startswith(b"HTTP/1.1 401 ")
    wait_for(lambda: denied() >= before + 200, "the report")
    for text in sockets:
        wait_for(lambda text=text: len(logged(text)) > lines[text], "the log line")  # type: ignore[misc]
        # The front and the core each write at most one line every 5 s.
        assert len(logged(text)) - lines[text] <= 2 + (time.monotonic() - started) / 5
    for told in ("had no valid key", "requests on admin.sock were denied: at least 100"):
        attacked.wait_for_problem(told)


@pytest.mark.parametrize("kind", ["tcp", "admin"])
def test_thousands_of_requests_with_bad_keys_do_not_affect_other_clients(attacked: Target, kind: str) -> None:
    """Sends as many requests per second as the machine can handle, which is 1,000 or more if two cores are
    free."""
    memory, pids = Memory(attacked.running), serving_pids(attacked.running)
    path = "/status" if kind == "admin" else "/v1/models"
    orders = Orders("bad_keys", getattr(attacked, kind), 3.0, 10, path, min_requests=100)
    used_by_status: list[float] = []
    with another_client(attacked) as used, attackers([orders] * 2, os.setsid) as processes:
        while any(process.poll() is None for process in processes):
            began = cpu_s(*pids)
            attacked.running.status()
            used_by_status.append(cpu_s(*pids) - began)
        done = reports(processes)
    print(f"{median(used):.2f} s and {median(used_by_status):.2f} s of CPU time for other clients, {done}")
    assert done["requests"] >= 200 and done["statuses"].keys() <= {"401", "503"}, done
    assert max(median(used), median(used_by_status)) < MAX_ANSWER_CPU_S
    assert memory.growth() < MAX_GROWTH
    wait_for(lambda: attacked.running.status()["state"] == "ready", "the service to be ready")


@pytest.fixture(scope="module")
def small(attacked: Target) -> Iterator[Target]:
    """Limit the service to a few connections."""
    with limited(attacked, FEW + "unauthenticated_timeout_s = 5") as made:
        yield made


@pytest.fixture
def patient(small: Target) -> Iterator[Target]:
    """Permit connections without a key to send nothing for longer than any test takes."""
    with limited(small, FEW + "header_timeout_s = 600\nunauthenticated_timeout_s = 600") as made:
        yield made


def test_connections_without_a_key_are_closed_by_their_time_limit(small: Target) -> None:
    with idle(small.tcp, 10) as strangers:
        wait_for(lambda: all(map(is_closed, strangers)), "the connections to be closed")


def test_connections_without_a_key_take_no_place_of_others(patient: Target) -> None:
    with idle(patient.tcp, 90):
        for _ in range(30):
            assert patient.answers_local_users()
        ask = post("/v1/chat/completions", chat(), patient.authorization, "Connection: close")
        assert exchange(patient.tcp, ask).startswith(b"HTTP/1.1 200 OK")
    wait_for(
        lambda: patient.running.status()["fronts"][0]["evicted_connections"] >= 80, "the report of the front"
    )
    patient.wait_for_problem("max_unauthenticated_connections")


def test_a_connect_flood_from_one_address_closes_no_connection_of_another(patient: Target) -> None:
    """Simulates a client with a long round-trip time, which sends its request one second after connecting."""
    flood = Orders("idle_connections", patient.tcp, 600.0, 100, source="127.0.0.2")
    ask = post("/v1/chat/completions", chat(), patient.authorization, "Connection: close")
    with attackers([flood], os.setsid):
        before = patient.running.status()["fronts"][0]["evicted_connections"]
        wait_for(
            lambda: patient.running.status()["fronts"][0]["evicted_connections"] > before + 100, "the flood"
        )
        with connect(patient.tcp) as sock:
            time.sleep(1.0)
            sock.sendall(ask)
            assert read_all(sock).startswith(b"HTTP/1.1 200 OK")
    patient.wait_for_problem("max_unauthenticated_connections")


def test_a_full_front_refuses_with_503_and_says_so(small: Target) -> None:
    # The responses do not fit the kernel's buffers, so the connections stay busy.
    body = chat(max_tokens=1900, ignore_eos=True, stream=True)
    streams = [connect(small.unix) for _ in range(40)]
    try:
        # One tenant may have 35 of the 40 connections.
        for sock in streams[:35]:
            sock.sendall(post("/v1/chat/completions", body))
        for sock in streams[35:]:
            sock.sendall(post("/v1/chat/completions", body, small.authorization))
        front = small.running.wait_until(
            lambda: next(
                (one for one in small.running.status()["fronts"] if one["busy_connections"] == 40), None
            ),
            60,
            "a full front",
        )
        assert front["detail"] == "full: all 40 connections are in use, and new connections are refused"
        refused = exchange(small.unix, GET)
        assert refused.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1" in refused
        small.wait_for_problem("connections are refused")
    finally:
        for sock in streams:
            sock.close()
    wait_for(small.answers_local_users, "connections to be accepted again")


@pytest.fixture
def two_fronts(small: Target) -> Iterator[Target]:
    """Change the service's settings to two fronts with 8 connections each."""
    path = Path(small.running.flags[1])
    before = path.read_text()

    def use(settings: str, fronts: int) -> None:
        path.write_text(settings)
        small.running.act(ReloadConfig())
        wait_for(
            lambda: [one["state"] for one in small.running.status()["fronts"]] == ["ready"] * fronts,
            "the fronts",
        )

    use(before.replace("fronts = 1", "fronts = 2").replace("max_connections = 40", "max_connections = 8"), 2)
    yield small
    use(before, 1)


def test_a_local_user_gets_in_while_any_front_has_a_free_place(two_fronts: Target) -> None:
    """One tenant may have at most 7 of a front's 8 connections."""
    made = two_fronts
    with ExitStack() as stack:

        def busy() -> list[int]:
            return sorted(front["busy_connections"] for front in made.running.status()["fronts"])

        def fill(count: int, *headers: str) -> list[socket.socket]:
            request = post(
                "/v1/chat/completions", chat(max_tokens=1900, ignore_eos=True, stream=True), *headers
            )
            sockets = [stack.enter_context(connect(made.unix)) for _ in range(count)]
            for sock in sockets:
                sock.sendall(request)
            return sockets

        # New connections are assigned to the fronts in turn.
        streams = [*fill(14), *fill(2, made.authorization)]
        wait_for(lambda: busy() == [8, 8], "two full fronts")
        for _ in range(4):
            refused = exchange(made.unix, GET)
            assert refused.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1" in refused
        for sock in streams[::2]:
            sock.close()
        wait_for(lambda: busy() == [0, 8], "one full front")
        for _ in range(20):
            assert made.answers_local_users()


def test_a_front_with_few_descriptors_left_holds_fewer_connections(small: Target) -> None:
    pid = small.running.status()["fronts"][0]["pid"]
    log_before = len(small.running.log_path.read_text())
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    used = psutil.Process(pid).num_fds()
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 45, limits[1]))
    try:
        front = small.running.wait_until(
            lambda: next(
                (one for one in small.running.status()["fronts"] if one["max_connections"] < 40), None
            ),
            60,
            "the front to notice",
        )
        assert "raise the open file limit" in front["detail"]
        assert any("raise the open file limit" in finding for finding in small.doctor())
        with idle(small.unix, 100), idle(small.tcp, 100):
            for _ in range(20):
                assert small.answers_local_users()
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    log = small.running.log_path.read_text()[log_before:]
    assert "Traceback" not in log
    assert log.count("\n") < 100, log


def test_a_service_with_256_descriptors_says_what_it_can_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited = tmp_path / "appliance"
    limited.write_text(f'#!/bin/sh\nulimit -n 256\nexec {tests.system.service.APPLIANCE} "$@"\n')
    limited.chmod(0o755)
    monkeypatch.setattr(tests.system.service, "APPLIANCE", str(limited))
    with target(tmp_path) as made:
        front = made.running.wait_until(
            lambda: (one := made.running.status()["fronts"][0])["max_connections"] and one,
            60,
            "the front's first report",
        )
        assert 100 < front["max_connections"] < 256
        assert "fewer than limits.max_connections = 4,096" in front["detail"]
        assert any("fewer than limits.max_connections = 4,096" in finding for finding in made.doctor())
        with idle(made.unix, 300), idle(made.tcp, 300):
            for _ in range(20):
                assert made.answers_local_users()
        log = made.running.log_path.read_text()
        assert "Traceback" not in log
