"""Tests of models that are loaded on their first request, in a running service with real engines."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from appliance.client import AdminClient
from tests.system.alternating import MODELS, SETTINGS, Alternating, alternating, checkpoints
from tests.system.service import CALL_TIMEOUT_S, Service, service

pytestmark = pytest.mark.system

WITHIN_S = 240.0
LONG = 2000


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alternating]:
    with alternating(tmp_path_factory.mktemp("world")) as made:
        yield made


def states(running: Service) -> dict[str, str]:
    return {model["name"]: model["state"] for model in running.command("models", "list")}


def in_memory(running: Service) -> list[str]:
    return [model["name"] for model in running.command("models", "ps")]


def test_a_model_is_loaded_at_its_first_request(world: Alternating) -> None:
    running = world.running
    assert states(running) == dict.fromkeys(MODELS, "available") and in_memory(running) == []
    with running.http() as http:
        assert [model["id"] for model in http.get("/v1/models").json()["data"]] == list(MODELS)
        assert http.get("/v1/models/a").json()["id"] == "a"
        assert http.get("/health/ready", params={"model": "a"}).status_code in (200, 401)
        tokens = http.post("/tokenize", json={"model": "b", "prompt": "import "})
    assert tokens.status_code == 200 and in_memory(running) == []
    world.ask("a")
    assert not world.failures
    assert states(running)["a"] == "ready" and in_memory(running) == ["a"]


def test_the_patterns_a_b_a_a_c_and_two_busy_models_need_few_loads(
    world: Alternating,
) -> None:
    """How long a request waits is tested in `tests/models/test_residency.py`, in simulated time."""
    before = world.loads
    world.send_in_order("abaac" * 3, every_s=0.2)
    assert world.loads - before < 8, "the order of arrival needs 12 loads"
    began, before, first = time.monotonic(), world.loads, len(world.answers)
    world.run({"a": 2, "b": 2}, for_s=15.0, swaps=3, pause_s=0.1)
    swaps, took_s = world.loads - before, time.monotonic() - began
    assert not world.failures, world.failures[:5]
    assert swaps >= 3 and swaps <= took_s / 4.0 + 1
    # The load of another model may end after a request's arrival, and one more if its own model was unloaded
    # before the answer began.
    assert 1 <= world.most_loads(first) <= 3


def test_a_long_answer_continues_after_its_model_was_swapped_out(world: Alternating) -> None:
    running = world.running
    running.complete("a")
    loads = world.loads
    answer = threading.Thread(target=world.ask, args=("a", LONG))
    answer.start()
    [rank] = running.wait_until(lambda: stopped_ranks(running, "a"), WITHIN_S, "the answer to begin")
    world.ask("b")
    answer.join(2 * WITHIN_S)
    assert not world.failures, world.failures
    assert world.answers[-1].tokens == LONG and world.loads == loads + 2
    assert not psutil.pid_exists(rank)
    running.wait_until(
        lambda: "requests will continue once" in running.log_path.read_text(), WITHIN_S, "the line of the log"
    )


def stopped_ranks(running: Service, name: str) -> list[int]:
    """Send SIGSTOP to the ranks of a model if it is running a request, so that the request cannot end. Return
    their process ids."""
    with AdminClient(running.run_dir, CALL_TIMEOUT_S) as client:
        replicas = [one for model in client.status().models for one in model.replicas]
    pids = [pid for one in replicas if one.name.startswith(name) and one.running for pid in one.pids]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    return pids


def test_keep_alive_unloads_a_model_and_wrong_values_are_refused(world: Alternating) -> None:
    running = world.running
    assert running.complete("a", keep_alive=0).status_code == 200
    running.wait_until(lambda: states(running)["a"] == "available", WITHIN_S, "the model to be unloaded")
    assert running.complete("a", keep_alive="1h").status_code == 200
    [shown] = running.command("models", "ps")
    assert 3000 < shown["expires_at"] - time.time() <= 3600
    assert running.complete("a", keep_alive=-1).status_code == 200
    assert running.command("models", "ps")[0]["expires_at"] is None
    refused = running.complete("a", keep_alive="soon")
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "keep_alive"


def test_a_pinned_model_is_not_unloaded_for_others(world: Alternating) -> None:
    running = world.running
    assert running.complete("a").status_code == 200
    running.command("models", "pin", "a")
    try:
        refused = running.complete("b")
        assert refused.status_code == 503 and "pinned" in refused.json()["error"]["message"]
        assert float(refused.headers["retry-after"]) > 0
        assert states(running)["b"] == "failed"  # for 30 s
        assert in_memory(running) == ["a"]
    finally:
        running.command("models", "unpin", "a")
    running.wait_until(lambda: running.complete("b").status_code == 200, WITHIN_S, "b to answer again")
    assert in_memory(running) == ["b"]


def test_a_model_that_cannot_be_loaded_gives_a_clear_error_and_affects_no_other_model(
    world: Alternating, tmp_path: Path
) -> None:
    running = world.running
    folder = checkpoints(tmp_path)["c"]
    running.command("models", "add", f"broken={folder}", "--set", "kv_blocks=100")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    refused = running.complete("broken")
    assert refused.status_code == 503 and "model.safetensors" in refused.json()["error"]["message"]
    assert float(refused.headers["retry-after"]) > 0

    def served() -> list[str]:
        with running.http() as http:
            return [model["id"] for model in http.get("/v1/models").json()["data"]]

    # The other front may learn of the failure later than the front that answered.
    running.wait_until(lambda: "broken" not in served(), WITHIN_S, "the fronts to omit the model")
    assert running.complete("a").status_code == 200
    running.command("models", "remove", "broken", "--yes")


def test_groups_and_a_time_to_live_and_optional_models_in_the_settings_work(tmp_path: Path) -> None:
    folders = checkpoints(tmp_path)
    common = "\n".join(f"{name} = {value}" for name, value in SETTINGS.items())
    config = tmp_path / "appliance.toml"
    tables = [
        f'[models.{name}]\nfolder = "{folder}"\nrequired = false\ndevice = "cpu"\n{common}\n'
        + ("idle_unload_s = 3.0\n" if name == "c" else "")
        for name, folder in folders.items()
    ]
    config.write_text(
        "".join(tables)
        + '[groups.rivals]\nmodels = ["a", "b"]\nload = "one"\n[on_demand]\nmin_residence_s = 1.0\n'
    )
    with service("--config", str(config)) as running:

        def is_loaded() -> bool:
            # Requests for the model are accepted before, during and after the load.
            with running.http() as http:
                answer = http.get("/health/ready", params={"model": "a"})
            assert answer.status_code == 200, answer.text
            return states(running)["a"] == "ready"

        running.wait_until(is_loaded, WITHIN_S, "a to be loaded")
        # `c` is listed as available even while model `a` is loading.
        running.wait_until(
            lambda: "c is unloaded: its time to live has expired" in running.log_path.read_text(),
            WITHIN_S,
            "c to be loaded and to expire",
        )
        running.wait_until(
            lambda: states(running) == {"a": "ready", "b": "available", "c": "available"},
            WITHIN_S,
            "only a to stay loaded",
        )
        assert running.complete("b").status_code == 200
        assert states(running) == {"a": "available", "b": "ready", "c": "available"}
        loaded = running.command("models", "load", "a", "--wait")
        assert (loaded["name"], loaded["version"], loaded["state"]) == ("a", 1, "ready")
        assert states(running) == {"a": "ready", "b": "available", "c": "available"}
        assert running.complete("b").status_code == 200
        assert running.complete("c", keep_alive="1h").status_code == 200
        assert states(running)["b"] == states(running)["c"] == "ready"


def test_models_of_a_group_are_loaded_and_unloaded_together(tmp_path: Path) -> None:
    with alternating(tmp_path, 2.5, '[groups.pair]\nmodels = ["a", "b"]\nload = "all"\n') as world:
        world.ask("a")
        world.running.wait_until(lambda: in_memory(world.running) == ["a", "b"], WITHIN_S, "both models")
        assert world.running.complete("c").status_code == 200
        assert in_memory(world.running) == ["c"]
        assert not world.failures
