"""Tests of the front process: how it starts, the messages that it sends to the core, and how it exits."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.channel.core_messages import ClientConnection, Configure, StopFront
from appliance.channel.front_messages import FrontToCore, NotTaken
from appliance.channel.front_settings import Limits
from appliance.front.capacity import RESERVED_DESCRIPTORS
from engine.client import Channel, socketpair
from tests.front.harness import Harness
from tests.front.raw import ask, chat, connect, events, head, read_answer, request

OwnFront = Callable[..., Harness]


def begin_stream(front: Harness, sock: socket.socket) -> None:
    sock.sendall(request(chat(stream=True)))
    front.wait_for(lambda: bool(front.replica.running))


def test_a_front_never_loads_torch() -> None:
    code = (
        "import sys, appliance.front.process; "
        "print(sorted({'torch', 'triton', 'transformers', 'numpy', 'kernels'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_a_front_ends_at_once_when_the_core_closes_its_channel(own_front: OwnFront) -> None:
    front = own_front()
    front.endless()
    with connect(front) as sock:
        begin_stream(front, sock)
        front.call(front.channel.close)
        assert front.process.wait(60) == 0
        read_answer(sock)  # The connection is closed without a [DONE] event.


def test_a_front_logs_in_the_cores_format_and_returns_memory_periodically() -> None:
    code = (
        "import engine.client; "
        "engine.client.return_memory_periodically = lambda: print('returns', flush=True); "
        "from appliance.front.__main__ import main; main()"
    )
    ours, theirs = socketpair()
    with ours, theirs:
        front = subprocess.Popen(
            [sys.executable, "-c", code, "--channel", str(theirs.fileno()), "--name", "front-7.1"],
            pass_fds=(theirs.fileno(),),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        channel: Channel[FrontToCore] = Channel(ours, FrontToCore)
        channel.send(Configure(front="front-7.1", models=[], limits=Limits(), ready=True))
        assert front.stderr is not None
        line = front.stderr.readline()
        front.kill()
        returned, _ = front.communicate()
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO    front-7\.1 process: serving 0 models\n", line
    )
    assert returned == "returns\n"


def test_the_kernel_kills_the_front_when_the_core_is_killed(tmp_path: object) -> None:
    # A third process keeps the channel open, so the front does not see its end. Only the parent-death signal
    # can make the front exit.
    code = (
        "import os, socket, subprocess, sys, time\n"
        "a, b = socket.socketpair()\n"
        "keeper = subprocess.Popen(['sleep', '300'], pass_fds=(a.fileno(),))\n"
        "front = subprocess.Popen([sys.executable, '-m', 'appliance.front', '--channel', str(b.fileno())],"
        " pass_fds=(b.fileno(),))\n"
        "a.recv(1)\n"  # The first report shows that the front is running.
        "print(front.pid, keeper.pid, flush=True)\n"
        "time.sleep(300)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        front, keeper = map(int, parent.stdout.readline().split())
        try:
            parent.kill()
            deadline = time.monotonic() + 60
            while alive(front) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert not alive(front)
        finally:
            os.kill(keeper, signal.SIGKILL)


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


def test_a_stopping_front_finishes_its_streams_and_accepts_no_requests(own_front: OwnFront) -> None:
    front = own_front()
    front.replica.hold = True
    with connect(front) as sock, connect(front) as kept, connect(front) as idle:
        kept.sendall(head("GET", "/v1/models"))
        assert read_answer(kept).status == 200
        begin_stream(front, sock)
        front.send(StopFront(60.0))
        assert kept.recv(10) == idle.recv(10) == b""
        with connect(front) as late:
            assert late.recv(10) == b""
        front.replica.hold = False
        answer = read_answer(sock)
    assert events(answer)[-1] == "[DONE]"
    assert front.process.wait(60) == 0
    assert front.settled(1)[0].status == 200


def test_requests_that_exceed_the_grace_period_of_a_stop_end_with_an_error(own_front: OwnFront) -> None:
    front = own_front()
    front.endless()
    with connect(front) as sock, connect(front) as waiting:
        begin_stream(front, sock)
        assert sock.recv(1, socket.MSG_PEEK)
        front.admit = "hold"
        waiting.sendall(request(chat()))
        front.wait_for(lambda: len(front.admits) == 2)
        front.send(StopFront(0.2))
        assert events(read_answer(sock))[-1]["error"]["code"] == "aborted"
        assert read_answer(waiting).status == 503
    assert front.process.wait(60) == 0
    assert sorted(settle.submitted for settle in front.settled(2)) == [False, True]
    assert {settle.status for settle in front.settles} == {503}


def test_a_front_ignores_signals_to_its_process_group(front: Harness) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        front.process.send_signal(number)
    time.sleep(0.1)
    assert ask(front, "POST", "/v1/chat/completions", chat()).status == 200


def test_reports_count_connections_streams_requests_tokens_and_cpu(front: Harness) -> None:
    front.wait_for(lambda: front.report().connections == 0)
    before = front.reports[-1]
    front.replica.hold = True
    with connect(front) as sock:
        begin_stream(front, sock)
        front.call(front.replica.step)
        front.wait_for(lambda: front.reports[-1].streams == 1)
        assert front.reports[-1].connections == 1
        front.replica.hold = False
        read_answer(sock)
    front.wait_for(lambda: front.reports[-1].connections == 0)
    last = front.reports[-1]
    assert (last.streams, last.requests) == (0, before.requests + 1)
    assert last.tokens == before.tokens + front.settled(1)[0].delivered_tokens
    assert last.cpu_seconds > before.cpu_seconds


def descriptors(front: Harness) -> set[int]:
    """Return the descriptors of an idle front, without those that it opens briefly to send a report."""

    def used() -> set[int]:
        return {int(name) for name in os.listdir(f"/proc/{front.process.pid}/fd")}

    before = used()
    front.report()
    return before & used()


def test_a_connection_without_a_free_descriptor_goes_back_to_the_core(own_front: OwnFront) -> None:
    front = own_front()
    pid = front.process.pid
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    for has_request in (False, True):
        sockets = [connect(front) for _ in range(40)]
        front.wait_for(lambda: front.report().connections == 40)
        used = descriptors(front)
        unused = [number for number in range(1000) if number not in used]
        # The connection has two descriptors. With `has_request`, the kernel drops only the second one.
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (unused[has_request], limits[1]))
        ours, theirs = socket.socketpair()
        with ours, theirs, open(os.memfd_create("request"), "rb") as memory:

            def give(number: int) -> None:
                sent = (theirs.fileno(), memory.fileno())[: 1 + has_request]  # noqa: B023
                front.channel.send(ClientConnection("", has_request, number), sent)  # noqa: B023

            front.call(lambda: give(7))
            front.wait_for(lambda: len(front.not_taken) == 1 + has_request)  # noqa: B023
            # The front has closed idle connections, and has lowered its limit.
            assert front.report().max_connections < Limits().max_connections
            front.wait_for(lambda: front.reports[-1].connections <= 40 - RESERVED_DESCRIPTORS)
            front.call(lambda: give(8))
            ours.sendall(head("GET", "/v1/models"))
            assert read_answer(ours).status == 200
        for sock in sockets:
            sock.close()
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        front.wait_for(lambda: front.report().connections == 0)
    assert front.not_taken == [NotTaken(7)] * 2 and front.reports[-1].unreceived_connections == 2
    # Without any free descriptor, the front still reports.
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (0, limits[1]))
    front.wait_for(lambda: front.report().max_connections == 1)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


@pytest.mark.usefixtures("restore_models")
def test_an_unreadable_tokenizer_is_reported_and_read_again_later(
    front: Harness, folder: Path, tmp_path: Path
) -> None:
    away, there = tmp_path / "away", tmp_path / "model"
    shutil.copytree(folder, away)
    front.models = [front.served("m", folder=str(there))]
    front.configure()
    front.wait_for(lambda: "tokenizer.json does not exist" in front.reports[-1].problems.get("m", ""))
    assert ask(front, "POST", "/v1/chat/completions", chat(model="m")).status == 503
    away.rename(there)
    front.wait_for(lambda: front.reports[-1].problems == {})
    assert ask(front, "POST", "/v1/chat/completions", chat(model="m")).status == 200


@pytest.mark.usefixtures("restore_models")
def test_a_front_reports_not_ready_before_it_reads_a_new_model(
    front: Harness, folder: Path, tmp_path: Path
) -> None:
    def ready() -> int:
        return ask(front, "GET", "/health/ready").status

    slow = tmp_path / "slow"
    shutil.copytree(folder, slow)
    # Compiling this template takes about a second.
    (slow / "chat_template.jinja").write_text("{{ messages }}" * 10_000)
    assert ready() == 200
    # If the test's process is not scheduled for a second, it may miss the moments at which the front reads
    # the model.
    for name in ("m1", "m2", "m3", "m4", "m5"):
        front.models = [front.served(name, folder=str(slow))]
        front.configure()
        front.configure(ready=False, reason="the service is draining")
        front.wait_for(lambda: ready() == 503)
        status = ask(front, "GET", f"/v1/models/{name}").status
        front.wait_for(lambda name=name: ask(front, "GET", f"/v1/models/{name}").status == 200)  # type: ignore[misc]
        assert ready() == 503
        front.configure()
        front.wait_for(lambda: ready() == 200)
        if status == 503:
            break
    else:
        raise AssertionError("the front process was ready until it had read the new model")


@pytest.mark.usefixtures("restore_models")
def test_a_request_waits_while_the_front_reads_a_new_model(front: Harness) -> None:
    front.models = [front.served(), front.served("new", version="v2")]
    front.configure()
    answer = ask(front, "POST", "/v1/chat/completions", chat(model="new"))
    assert answer.status == 200


@pytest.mark.usefixtures("restore_models")
def test_served_models_change_without_a_restart(front: Harness) -> None:
    front.models = [front.served("org/new", version="v2", max_model_len=64)]
    front.configure()
    front.wait_for(lambda: ask(front, "GET", "/v1/models/org/new").status == 200)
    assert ask(front, "GET", "/v1/models/demo").status == 404
    assert ask(front, "POST", "/v1/chat/completions", chat(model="org/new")).status == 200
