"""Tests of the real core with its sockets, databases and processes. Only HTTP and the engine are faked."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from appliance.client import AdminError
from appliance.front_pool.front import _MAX_UNTAKEN
from appliance.monitoring.doctor import examine
from appliance.protocol import ModelStatus, ReplicaStatus
from appliance.protocol.status import Status
from appliance.rundir import last_holder
from appliance.settings import SettingsError, demo_model_folder
from store.evidence import verify_audit
from tests.core.conftest import ROOT, Service, alive, read_answer
from tests.ports import free_port
from tests.waiting import wait_until

pytestmark = pytest.mark.system
Make = Callable[..., Service]


def test_connections_go_to_the_fronts_in_turn_and_each_request_has_one_row(make_service: Make) -> None:
    port = free_port()
    service = make_service(f'fronts = 2\nlisten = "127.0.0.1:{port}"').start_and_wait()
    answers = [read_answer(service.connect("m 3")) for _ in range(4)]
    answers += [read_answer(service.connect("m 3", ("127.0.0.1", port))) for _ in range(2)]
    assert [answer[:3] for answer in answers] == [["1", "2", "3"]] * 6
    assert [answer[3] for answer in answers] == ["front-0 length", "front-1 length"] * 3
    wait_until(lambda: [row.state for row in service.rows()] == ["ended"] * 6)
    for row in service.rows():
        assert (row.status, row.generated_tokens, row.billed_tokens, row.double_ends) == (200, 3, 3, 0)
        assert (row.replica, row.devices, row.model) == ("m-0", "fake", "m")
    status = service.admin.status()
    (replica,) = status.models[0].replicas
    assert (replica.credit_seqs, replica.credit_tokens) == (64, 4096)
    assert {sock.name: sock.accepted for sock in status.sockets} == {"api": 4, "tcp": 2, "admin": 0}
    assert status.queue.ended == 6


def test_connections_made_before_a_front_is_ready_wait_in_the_backlog(make_service: Make) -> None:
    service = make_service()
    service.start()
    taken: list[socket.socket] = []

    def listens() -> bool:
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            taken.append(service.connect("m 2"))
        return bool(taken)

    wait_until(listens)
    assert read_answer(taken[0])[-1] == "front-0 length"


@pytest.mark.parametrize("fronts", [1, 2])
def test_connections_that_a_killed_front_has_not_read_are_answered_by_another(
    make_service: Make, fronts: int
) -> None:
    service = make_service(f"fronts = {fronts}\nhang_timeout_s = 600")
    service.start()
    pid = service.wait_ready().fronts[0].pid or 0
    os.kill(pid, signal.SIGSTOP)
    clients = [service.connect("m 2") for _ in range(8)]
    wait_until(lambda: service.admin.status().sockets[0].accepted >= len(clients))
    os.kill(pid, signal.SIGKILL)
    assert {read_answer(client)[-1].split()[-1] for client in clients} == {"length"}


@pytest.mark.parametrize("fronts", [1, 2])
def test_connections_that_a_front_cannot_receive_are_answered_by_another_or_wait(
    make_service: Make, fronts: int
) -> None:
    service = make_service(f"fronts = {fronts}")
    service.start()
    pid = service.wait_ready().fronts[0].pid or 0
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (0, limits[1]))
    clients = [service.connect("m 2") for _ in range(8)]
    if fronts == 1:
        # After each of the front's reports, the core tries again to hand over the connections.
        wait_until(lambda: service.admin.status().sockets[0].state == "waiting")
        time.sleep(0.5)
        assert not select.select(clients, [], [], 0)[0]
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    answers = {read_answer(client)[-1] for client in clients}
    assert answers == {f"front-{fronts - 1} length"}


def test_connections_that_a_stopped_front_does_not_take_wait_in_the_backlog(make_service: Make) -> None:
    service = make_service("fronts = 1\nhang_timeout_s = 600")
    service.start()
    pid = service.wait_ready().fronts[0].pid or 0
    os.kill(pid, signal.SIGSTOP)
    clients = [service.connect("m 2") for _ in range(_MAX_UNTAKEN + 20)]
    wait_until(lambda: service.admin.status().sockets[0].state == "waiting")
    assert service.admin.status().sockets[0].accepted == _MAX_UNTAKEN
    os.kill(pid, signal.SIGCONT)
    assert {read_answer(client)[-1] for client in clients} == {"front-0 length"}


def test_a_replica_that_hangs_is_killed_and_restarted(make_service: Make) -> None:
    service = make_service("hang_timeout_s = 600")
    service.start()
    pid = service.wait_ready().models[0].replicas[0].pids[0]
    stream = service.connect("m 50")
    os.kill(pid, signal.SIGSTOP)
    service.set_timeout("hang_timeout_s", 8)
    assert read_answer(stream)[-1] == "front-0 length"
    assert not alive(pid)
    (replica,) = service.admin.status().models[0].replicas
    assert "did not report" in replica.last_error


def test_a_core_that_was_stopped_itself_kills_nothing(make_service: Make) -> None:
    service = make_service("hang_timeout_s = 8\nfronts = 1")
    service.start()
    before = service.wait_ready()
    assert service.process is not None
    service.process.send_signal(signal.SIGSTOP)
    time.sleep(10)
    service.process.send_signal(signal.SIGCONT)
    assert read_answer(service.connect("m 3"))[-1] == "front-0 length"
    after = service.admin.status()
    assert [one.pid for one in after.fronts] == [one.pid for one in before.fronts]
    assert after.models[0].replicas[0].pids == before.models[0].replicas[0].pids
    # The service writes the log in a separate thread.
    wait_until(lambda: re.search(r"the core did not run for \d\d", service.log.read_text()) is not None)


def begin_long_step(service: Service, announced_s: float) -> None:
    """Make the next step of the replica last until the file `step.running` is deleted, and wait until the
    replica has announced it."""
    folder = service.folder / "m"
    (folder / "step.new").write_text(json.dumps({"announced_s": announced_s}))
    (folder / "step.new").rename(folder / "step.json")
    wait_until((folder / "step.running").exists, description="the long step")


def test_an_announced_step_counts_neither_as_silence_nor_as_a_hang(
    make_service: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SILENT_AFTER_S", "3")
    service = make_service("hang_timeout_s = 600")
    service.start()
    before = service.wait_ready().models[0].replicas[0]
    begin_long_step(service, 600)
    service.set_timeout("hang_timeout_s", 4)
    seen: list[ReplicaStatus] = []

    def lasts() -> bool:
        seen.extend(service.admin.status().models[0].replicas)
        return (seen[-1].last_report_s or 0) > 6

    wait_until(lasts)
    assert {(one.state, tuple(one.pids)) for one in seen} == {("ready", tuple(before.pids))}
    service.set_timeout("hang_timeout_s", 600)
    stream = service.connect("m 5")
    (service.folder / "m" / "step.running").unlink()
    assert read_answer(stream)[-1] == "front-0 length"


def test_a_step_that_takes_far_longer_than_announced_counts_as_a_hang(
    make_service: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SILENT_AFTER_S", "3")
    service = make_service("hang_timeout_s = 600")
    service.start()
    before = service.wait_ready().models[0].replicas[0]
    begin_long_step(service, 1)
    # The replica counts as silent after 4 s, and is killed after 10 s once the shorter time limit applies.
    wait_until(lambda: "m-0 is silent" in service.admin.status().reason)
    service.set_timeout("hang_timeout_s", 2)
    wait_until(lambda: service.admin.status().models[0].replicas[0].restarts > 0)
    assert service.wait_ready().models[0].replicas[0].pids != before.pids


def test_a_front_that_hangs_gets_no_connections_until_it_reports_again(
    make_service: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SILENT_AFTER_S", "3")
    service = make_service("fronts = 2\nhang_timeout_s = 600")
    service.start()
    pid = service.wait_ready().fronts[0].pid or 0
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: service.admin.status().fronts[0].state == "silent")
    status = service.admin.status()
    (problem,) = (one for one in status.current_problems if one.where == "front-0")
    assert "gets no new connections" in problem.description
    assert "it will be killed and restarted" in problem.remedy
    found = examine(Path(status.run_dir), Path(status.state_dir), SettingsError()).findings
    assert any("gets no new connections" in one.text for one in found if one.level == "problem")
    answers = [read_answer(service.connect("m 2"))[-1] for _ in range(4)]
    assert answers == ["front-1 length"] * 4
    os.kill(pid, signal.SIGCONT)
    wait_until(lambda: read_answer(service.connect("m 2"))[-1] == "front-0 length")


def test_a_front_that_hangs_during_its_start_is_killed_and_restarted(make_service: Make) -> None:
    # Loading a replica may take longer than 2 s too.
    service = make_service("load_timeout_s = 2\n[restarts]\nmax_deaths = 1000")
    (service.folder / "m" / "hang").touch()
    service.start()
    wait_until(lambda: service.state() != "down" and service.admin.status().fronts[0].restarts > 0)
    last_error = service.admin.status().fronts[0].last_error
    assert "was not ready within 2 s of its start" in last_error
    (service.folder / "m" / "hang").unlink()
    service.set_timeout("load_timeout_s", 600)
    service.wait_ready()


def test_a_bad_checkpoint_fails_its_model_and_no_other(make_service: Make) -> None:
    service = make_service(models=("good", "bad"))
    reason = "model-2.safetensors is truncated"
    (service.folder / "bad" / "fake.json").write_text(json.dumps({"fatal": ["checkpoint", reason]}))
    service.start()
    wait_until(lambda: service.state() == "degraded")
    seen: list[Status] = []

    def starts_again() -> bool:
        seen.append(service.admin.status())
        good, bad = seen[-1].models
        return good.state == "ready" and bad.replicas[0].detail.startswith("restarts in ")

    wait_until(starts_again)
    assert (seen[-1].models[1].state, seen[-1].models[1].detail) == ("failed", reason)
    assert "bad-0 is failed" in seen[-1].reason
    assert read_answer(service.connect("good 2"))[-1] == "front-0 length"
    assert read_answer(service.connect("bad 2")) == [
        f"front-0 refused 503 model 'bad' cannot be served: {reason}"
    ]


def test_a_model_that_a_front_cannot_serve_is_listed_as_a_problem(make_service: Make) -> None:
    service = make_service("fronts = 2", models=("good", "m")).start_and_wait()
    (service.folder / "m" / "untold").touch()
    wait_until(lambda: service.state() == "degraded")
    wait_until(lambda: len(service.admin.status().problems) == 2)
    status = service.admin.status()
    reason = "front-0, front-1: tokenizer.json is missing"
    assert (status.models[1].state, status.models[1].detail) == ("failed", reason)
    assert status.models[0].state == "ready"
    assert status.reason == f"model 'm' is unavailable ({reason})"
    assert {problem.where for problem in status.problems} == {"front-0", "front-1"}
    assert status.problems[0].description == "model 'm' cannot be used: tokenizer.json is missing"
    assert status.fronts[0].problems == {"m": "tokenizer.json is missing"}
    assert status.fronts[0].dropped_texts == 3
    transport = httpx.HTTPTransport(uds=str(service.run_dir / "admin.sock"))
    with httpx.Client(transport=transport, timeout=600) as metrics:
        said = metrics.get("http://server/metrics").text
    assert 'appliance_front_dropped_texts_total{front="front-0"} 3' in said
    # The service writes the log in a separate thread.
    wait_until(lambda: "not ready: model 'm' is unavailable" in service.log.read_text())
    (service.folder / "m" / "untold").unlink()
    service.wait_ready()
    assert service.admin.status().reason == ""


def test_a_model_whose_files_return_is_served_again_and_rows_name_the_new_version(
    make_service: Make,
) -> None:
    service = make_service()
    service.start()
    before = service.wait_ready().models[0]
    (service.folder / "m" / "fake.json").write_text(json.dumps({"fatal": ["checkpoint", "no such file"]}))
    os.kill(before.replicas[0].pids[0], signal.SIGKILL)
    wait_until(lambda: service.admin.status().models[0].state == "failed")
    assert "refused 503" in read_answer(service.connect("m 2"))[-1]
    (service.folder / "m" / "config.json").write_text('{"vocab_size": 11}')
    (service.folder / "m" / "fake.json").unlink()
    after = service.wait_ready().models[0]
    assert after.detail == "" and after.version != before.version
    assert read_answer(service.connect("m 2"))[-1] == "front-0 length"
    wait_until(lambda: [row.state for row in service.rows()] == ["ended"] * 2)
    assert {row.status: row.version for row in service.rows()} == {503: before.version, 200: after.version}


def test_a_model_without_enough_memory_at_two_starts_fails_until_there_is_memory(make_service: Make) -> None:
    service = make_service("[restarts]\nmax_deaths = 1000")
    (service.folder / "m" / "fake.json").write_text(json.dumps({"fatal": ["memory", "3 blocks"]}))
    service.start()
    wait_until(lambda: service.state() != "down")
    seen: list[ModelStatus] = []

    def failed() -> bool:
        seen.extend(service.admin.status().models)
        return seen[-1].state == "failed"

    wait_until(failed)
    assert seen[-1].replicas[0].restarts >= 2
    assert all(one.state != "failed" for one in seen if one.replicas[0].restarts < 2)
    assert "3 blocks" in read_answer(service.connect("m 2"))[-1]
    (service.folder / "m" / "fake.json").unlink()
    service.wait_ready()


def test_a_replica_that_ends_while_it_loads_is_restarted(make_service: Make) -> None:
    service = make_service("load_timeout_s = 600\n[restarts]\nmax_deaths = 1000")
    (service.folder / "m" / "fake.json").write_text(json.dumps({"hang": True}))
    service.start()
    wait_until(lambda: service.state() != "down")
    seen: list[ReplicaStatus] = []

    def loads() -> bool:
        seen.extend(service.admin.status().models[0].replicas)
        return seen[-1].load is not None

    wait_until(loads)
    replica = seen[-1]
    assert replica.load is not None and (replica.load.stage, replica.load.unit) == ("read", "bytes")
    assert replica.fraction == 0.5 and replica.detail.startswith("read 50% of 2.0 MiB")
    service.set_timeout("load_timeout_s", 2)
    wait_until(lambda: service.state() == "degraded")
    (service.folder / "m" / "fake.json").unlink()
    service.set_timeout("load_timeout_s", 600)
    service.wait_ready()
    # The service writes the log in a separate thread.
    wait_until(lambda: "m-0: read 2.0 MiB (model.safetensors); start took" in service.log.read_text())
    (replica,) = service.admin.status().models[0].replicas
    assert "no progress" in replica.last_error and "load_timeout_s" in replica.last_error


def test_a_stop_does_not_wait_for_loading_replicas(make_service: Make) -> None:
    service = make_service("drain_notice_s = 0\ndrain_grace_s = 600")
    (service.folder / "m" / "fake.json").write_text(json.dumps({"hang": True}))
    service.start()
    wait_until(lambda: service.state() == "starting" and service.admin.status().models[0].detail != "")
    assert service.stop() == 0


def test_a_replica_that_always_exits_immediately_is_restarted_with_growing_delays(make_service: Make) -> None:
    service = make_service("[restarts]\nmax_deaths = 1000")
    (service.folder / "m" / "fake.json").write_text(json.dumps({"exit": 3}))
    service.start()
    wait_until(lambda: service.state() == "degraded")
    wait_until(lambda: service.admin.status().models[0].replicas[0].restarts >= 3)
    status = service.admin.status()
    assert (
        status.problems[0].where == "m-0" and "exited with code 3" in status.models[0].replicas[0].last_error
    )
    waiting = service.connect("m 2")
    (service.folder / "m" / "fake.json").unlink()
    assert read_answer(waiting)[-1] == "front-0 length"


def test_a_run_directory_has_one_service_and_the_message_names_it(make_service: Make) -> None:
    service = make_service().start_and_wait()
    second = subprocess.run(
        [
            *(sys.executable, "-m", "appliance.cli", "serve"),
            *("--config", str(service.config), "--model", str(demo_model_folder())),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert service.process is not None
    assert second.returncode == 1
    assert f"process {service.process.pid}" in second.stderr and "--run-dir" in second.stderr
    holder = last_holder(service.run_dir)
    assert holder is not None and holder.state_dir == str(service.state_dir)
    assert read_answer(service.connect("m 2"))[-1] == "front-0 length"


def test_operator_actions_are_audited_with_the_peers_uid(make_service: Make) -> None:
    service = make_service().start_and_wait()
    made = service.admin.create_key("laptop")
    assert made.key.startswith("ak-")
    service.admin.revoke_key(made.id)
    (key,) = service.admin.keys()
    assert (key.id, key.revoked_at is not None) == (made.id, True)
    with pytest.raises(AdminError, match="key_0"):
        service.admin.revoke_key("key_0")
    stream = service.connect("m 100000")
    wait_until(lambda: [request.state for request in service.admin.in_flight()] == ["running"])
    (running,) = service.admin.in_flight()
    service.admin.cancel_request(running.request_id)
    assert read_answer(stream)[-1] == "front-0 aborted an operator cancelled the request"
    # This front never ends its submission, so the core makes the engine end the submission.
    wait_until(lambda: service.admin.in_flight() == [])
    database = service.state_dir / "control.db"
    audit = service.audit()
    actions = ("keys.create", "keys.revoke", "keys.revoke", "requests.cancel")
    assert [(row.actor, row.action, row.phase) for row in audit] == [
        (f"uid:{os.getuid()}", action, phase) for action in actions for phase in ("intent", "result")
    ]
    for intent, result in zip(audit[::2], audit[1::2], strict=True):
        assert (intent.act, intent.result) == (result.act, "")
    assert [row.result.partition(":")[0] for row in audit[1::2]] == ["ok", "ok", "refused", "ok"]
    assert (audit[7].before, audit[7].after) == (
        '{"state":"running","tenant":"t"}',
        '{"state":"ending"}',
    )
    assert made.key not in "".join(row.params for row in audit)
    assert verify_audit(database).ok
