"""Tests of sleep and wake on a running service with real engines. `scripts/soak --sleeps` has more rounds."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import psutil
import pytest

from appliance.actions.parameters import LoadModel, SleepModel, UnloadModel, WakeModel
from appliance.client import AdminClient
from tests.system.attacks.reading import no_problem
from tests.system.model_sleeps import TOKEN, Sleeps
from tests.system.replica_kills import TokenStream
from tests.system.service import CALL_TIMEOUT_S, service

pytestmark = pytest.mark.system

WITHIN_S = 240.0
_POOLED = 8
"""Number of threads and descriptors that a process may gain without a leak. The core has two thread pools, of
six and of two threads, which start threads only when several operations overlap."""


@pytest.fixture(scope="module")
def sleeps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sleeps]:
    folder = tmp_path_factory.mktemp("sleeps")
    config = folder / "appliance.toml"
    config.write_text("fronts = 2\n[models]\n")
    with service("--config", str(config)) as running:
        yield Sleeps(running, folder)


@pytest.fixture(autouse=True)
def awake(sleeps: Sleeps) -> None:
    """Start each test with an awake model."""
    sleeps.act(LoadModel(model="chat", wait=True))


def test_the_commands_put_a_model_to_sleep_and_wake_it(sleeps: Sleeps) -> None:
    running = sleeps.running
    tokens, awake_bytes = sleeps.tokens(), running.command("models", "ps")[0]["memory_bytes"]
    slept = running.command("models", "sleep", "chat", "--wait")
    assert (slept["name"], slept["version"], slept["state"]) == ("chat", 1, "sleeping")
    [shown] = running.command("models", "ps")
    assert shown["state"] == "sleeping" and "released" in shown["detail"]
    assert 0 < shown["memory_bytes"] < awake_bytes
    [model] = running.status()["models"]
    assert model["state"] == "sleeping" and model["replicas"][0]["sleeps"] == 1
    no_problem(running)
    woken = running.command("models", "wake", "chat@1", "--wait")
    assert woken["state"] == "ready"
    assert sleeps.tokens() == tokens == [TOKEN] * 8

    def recorded() -> bool:
        found = {(row["action"], row["result"]) for row in running.command("audit", "list")}
        return {("models.sleep", "ok"), ("models.wake", "ok")} <= found

    # If the disk is slow, an action's result is written after the command has ended.
    running.wait_until(recorded, 60, "the results in the audit trail")


@pytest.mark.parametrize("words", [("sleep", "chat", "--wait"), ("wake", "chat", "--wait"), ("wake", "chat")])
def test_a_version_that_is_not_loaded_can_neither_sleep_nor_wake(
    sleeps: Sleeps, words: tuple[str, ...]
) -> None:
    sleeps.act(UnloadModel(model="chat", wait=True))
    done = sleeps.running.run("models", *words)
    assert done.returncode != 0 and "appliance models load chat@1" in done.stderr


def test_rounds_of_sleep_leave_no_descriptors_or_threads_behind(sleeps: Sleeps) -> None:
    sleeps.rounds(2)
    before = sleeps.usage()
    sleeps.rounds(_POOLED + 1)

    def nothing_left() -> bool:
        after = sleeps.usage()
        return before.keys() == after.keys() and all(
            after[pid].descriptors <= was.descriptors + _POOLED
            and after[pid].threads <= was.threads + _POOLED
            for pid, was in before.items()
        )

    # The service closes clients' connections a moment after the clients have exited.
    sleeps.running.wait_until(nothing_left, 60, f"the resource use of {before}")


def test_running_requests_finish_before_the_model_sleeps(sleeps: Sleeps) -> None:
    stream = TokenStream(sleeps.running, "chat", "import ", 400)
    sleeps.running.wait_until(lambda: stream.token_ids or stream.error, WITHIN_S, "the first token")
    assert sleeps.act(SleepModel(model="chat", wait=True)).state == "sleeping"
    assert stream.end() == [TOKEN] * 400


def test_a_model_whose_process_is_killed_while_it_sleeps_is_loaded_again_when_it_wakes(
    sleeps: Sleeps,
) -> None:
    sleeps.act(SleepModel(model="chat", wait=True))
    rank = sleeps.rank()
    rank.kill()
    sleeps.running.wait_until(
        lambda: "have exited" in detail(sleeps), WITHIN_S, "the service to notice the death"
    )
    assert sleeps.state() == "sleeping"
    assert sleeps.act(WakeModel(model="chat", wait=True)).state == "ready"
    assert sleeps.rank().pid != rank.pid
    assert sleeps.tokens() == [TOKEN] * 8


def detail(sleeps: Sleeps) -> str:
    with AdminClient(sleeps.running.run_dir, CALL_TIMEOUT_S) as client:
        [model] = client.models()
    return model.versions[0].detail


def test_a_model_whose_process_is_killed_while_it_wakes_answers_afterwards(sleeps: Sleeps) -> None:
    sleeps.act(SleepModel(model="chat", wait=True))
    rank = sleeps.rank()
    rank.suspend()  # a stopped rank cannot wake the model before it is killed
    failures: list[Exception] = []

    def wake() -> None:
        try:
            sleeps.act(WakeModel(model="chat", wait=True))
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=wake)
    thread.start()
    sleeps.running.wait_until(
        lambda: sleeps.state() == "loading" or not thread.is_alive(), WITHIN_S, "the model to be waking"
    )
    with contextlib.suppress(psutil.NoSuchProcess):  # the service kills a stopped rank after a while
        rank.kill()
    thread.join(WITHIN_S)
    assert not thread.is_alive() and failures == []
    assert sleeps.state() == "ready" and sleeps.tokens() == [TOKEN] * 8


def test_a_request_wakes_a_sleeping_model(sleeps: Sleeps) -> None:
    sleeps.act(SleepModel(model="chat", wait=True))
    rank = sleeps.rank()
    assert sleeps.state() == "sleeping"
    with sleeps.running.http() as http:
        assert [one["id"] for one in http.get("/v1/models").json()["data"]] == ["chat"]
    assert sleeps.tokens() == [TOKEN] * 8
    assert sleeps.state() == "ready" and sleeps.rank().pid == rank.pid


def test_requests_during_rounds_of_sleep_are_all_answered(sleeps: Sleeps) -> None:
    stop, answered, failures = threading.Event(), list[int](), list[str]()

    def ask() -> None:
        with sleeps.running.http() as http:
            body = {"model": "chat", "prompt": "import ", "max_tokens": 4, "temperature": 0}
            while not stop.is_set():
                answer = http.post("/v1/completions", json=body | {"ignore_eos": True})
                answered.append(answer.status_code)
                if answer.status_code != 200:
                    failures.append(answer.text)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        sleeps.act(SleepModel(model="chat", wait=True))  # a request may already have woken the model
    until = len(answered) + 8
    sleeps.running.wait_until(lambda: len(answered) >= until, WITHIN_S, "answers after the last round")
    stop.set()
    for thread in threads:
        thread.join(WITHIN_S)
        assert not thread.is_alive()
    assert failures == [] and answered.count(200) >= 4

    def all_ended() -> bool:
        return {row["status"] for row in sleeps.running.rows(5000)} <= {200}

    sleeps.running.wait_until(all_ended, WITHIN_S, "every request to be recorded as ended")
