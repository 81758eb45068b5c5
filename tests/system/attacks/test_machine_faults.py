"""Tests of unusual events that might harm a service. The system clock is changed, 1,000 queued requests are
cancelled at the same time, and a connection is passed to another user. In addition, one tenant tries to find
out whether the prefix cache contains another tenant's prompts."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.system.attacks.reading import configured, doctor, no_problem, problem
from tests.system.attacks.wire import cpu_s
from tests.system.service import Service, service
from tests.system.test_deaths import answer

pytestmark = pytest.mark.system

FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1")


@pytest.fixture(scope="module")
def running() -> Iterator[Service]:
    limits = "[limits]\nheader_timeout_s = 600\nunauthenticated_timeout_s = 600\n"
    with configured(f"[queue]\ntimeout_s = 3600\n{limits}") as started:
        yield started


def key_of(running: Service, tenant: str, **limits: Any) -> str:
    """Create a tenant and return its key."""
    running.tenant(tenant, **limits)
    return running.key("app", tenant)


def ask(http: httpx.Client, key: str, prompt: list[int]) -> httpx.Response:
    """Send a request for one token, and return the answer. If `key` is empty, no key is sent."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": 1}
    return http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"} if key else {})


# ── the clock ──


@contextmanager
def clock_that_can_be_set(monkeypatch: pytest.MonkeyPatch, setting: Path) -> Iterator[Service]:
    """Start a service with a clock that is offset by the content of a file, for example "+1h"."""
    if not FAKETIME.exists():
        pytest.skip("needs libfaketime (Debian: apt-get install libfaketime)")
    setting.write_text("+0")
    with monkeypatch.context() as patched:
        patched.setenv("LD_PRELOAD", str(FAKETIME))
        patched.setenv("FAKETIME_TIMESTAMP_FILE", str(setting))
        # Without a cache, every reading of the clock would also read the file, which would make the service
        # ten times slower.
        patched.setenv("FAKETIME_CACHE_DURATION", "1")
        patched.setenv("FAKETIME_DONT_FAKE_MONOTONIC", "1")
        context = service(kind=Service)
        started = context.__enter__()
    try:
        yield started
    finally:
        context.__exit__(None, None, None)


def test_jumps_of_the_clock_change_no_quota_and_remove_no_row(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    setting = tmp_path / "clock"
    with clock_that_can_be_set(monkeypatch, setting) as running, running.http() as http:
        # The quota permits two requests immediately, and one more after 50 minutes.
        key = key_of(running, "limited", requests_per_minute=0.02, burst_s=6000)
        assert [ask(http, key, [7]).status_code for _ in range(3)] == [200, 200, 429]
        running.wait_until(lambda: len(running.rows(state="ended")) >= 3, 60, "the rows")
        asked = {row["request_id"] for row in running.rows()}
        for jump, hours in (("+1h", "+1.0"), ("-365d", "-8,760.0"), ("+365d", "+8,760.0")):
            setting.write_text(jump)
            problem(running, "clock", f"the system clock was changed by {hours} hours")
            jumped_at = time.monotonic()
            assert ask(http, "", [7]).status_code == 200
            assert ask(http, key, [7]).status_code == 429, "a jump of the clock refilled a quota"
        assert any("the system clock was changed" in text for text in doctor(running))
        time.sleep(max(0.0, jumped_at + 7 - time.monotonic()))  # housekeeping runs every 5 s
        assert asked <= {row["request_id"] for row in running.rows()}, "rows were removed as expired"
        setting.write_text("+0")
        no_problem(running)


# ── 1,000 cancelled requests ──


def test_a_thousand_queued_requests_cancelled_at_once_leave_nothing_behind(running: Service) -> None:
    body = json.dumps(
        {"model": "demo", "prompt": "x", "max_tokens": 2000, "stream": True, "ignore_eos": True}
    ).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}\r\n\r\n"
    clients = []
    for _ in range(1000):
        client = socket.socket(socket.AF_UNIX)
        client.connect(str(running.api_socket))
        client.sendall(head.encode() + body)
        clients.append(client)
    running.wait_until(lambda: running.status()["queue"]["waiting"] > 900, 120, "most requests to be queued")
    for client in clients:
        client.close()
    running.wait_until(
        lambda: running.status()["queue"]["waiting"] == running.status()["queue"]["running"] == 0,
        60,
        "all requests to end",
    )
    assert answer(running)
    running.wait_until(lambda: not running.replica()["blocks_used"], 60, "the blocks to be free")
    no_problem(running)

    def cancelled() -> int:
        return len(running.rows(limit=2000, finish_reason="cancelled"))

    running.wait_until(lambda: cancelled() >= 1000, 60, "their rows")
    assert cancelled() == 1000


# ── a connection passed to another user ──

CONNECTS = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
to_test = socket.socket(fileno=int(sys.argv[1]))
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[2])
socket.send_fds(to_test, [b"x"], [connection.fileno()])
"""


def test_a_connection_keeps_the_rights_of_the_user_who_made_it(running: Service) -> None:
    """The kernel reports the user who opened the connection, not the user who writes to it. Root therefore
    gains no rights by writing to another user's connection. A user who passes a connection to another user
    also passes on its rights, as with every open file."""
    if os.geteuid():
        pytest.skip("needs root to switch to another user")
    running.folder.chmod(0o755)
    running.run_dir.chmod(0o755)
    running.api_socket.chmod(0o666)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-I", "-S", "-c", CONNECTS, str(theirs.fileno()), str(running.api_socket)]
        subprocess.run(command, pass_fds=[theirs.fileno()], check=True, timeout=600)
        _, (descriptor,), _, _ = socket.recv_fds(ours, 1, 1)
    with socket.socket(fileno=descriptor) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        assert connection.recv(1 << 16).split()[1] in (b"401", b"403")


# ── timing of the prefix cache ──


def test_a_tenant_cannot_tell_which_prompts_another_has_in_the_prefix_cache(running: Service) -> None:
    """A response time tells which prompts are cached only if the replica works less for them. The test
    compares CPU times, because other work on the machine delays responses."""
    victim, attacker = key_of(running, "victim"), key_of(running, "attacker")
    draw = random.Random(1)
    hits, guesses, others = [], [], []
    with running.http() as http:
        for _ in range(5):
            secret, different = ([draw.randrange(7, 5000) for _ in range(900)] for _ in range(2))
            assert ask(http, victim, secret).status_code == 200
            hits.append(work(running, http, victim, secret, cached=True))
            guesses.append(work(running, http, attacker, secret, cached=False))
            others.append(work(running, http, attacker, different, cached=False))
    hit, guess, other = map(min, (hits, guesses, others))
    saved = other - hit
    assert saved > 0.3 * other, f"a hit takes {hit:.3f} s of {other:.3f} s, so the measurement shows nothing"
    assert abs(guess - other) < 0.5 * saved, f"guess {guess:.3f} s, other {other:.3f} s, own hit {hit:.3f} s"


def work(running: Service, http: httpx.Client, key: str, prompt: list[int], *, cached: bool) -> float:
    """Return the CPU time in seconds that a request takes in the replica. Check that its prompt was found in
    the caller's part of the cache if, and only if, `cached` is true."""
    pids = running.replica()["pids"]
    began = cpu_s(*pids)
    answered = ask(http, key, prompt)
    used = cpu_s(*pids) - began
    details = answered.json()["usage"].get("prompt_tokens_details") or {}
    assert bool(details.get("cached_tokens")) == cached, answered.text
    return used
