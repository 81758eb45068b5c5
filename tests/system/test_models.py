"""Tests of the commands for models on a running service with real engines."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import write_constant_checkpoint
from tests.cli.conftest import on_a_terminal
from tests.system.model_swaps import Swaps
from tests.system.service import APPLIANCE, Service, service
from tests.system.test_demo import Terminal
from tests.system.test_load_ends import EveryNewRank

pytestmark = pytest.mark.system

TOKENS = (100, 200)
STREAMS = 6
"""Number of streams during swaps. The long version of that test, `tests.system.model_swaps`, runs 32."""
SMALL = ("--set", "kv_blocks=100", "--set", "threads=1", "--set", "max_num_seqs=64")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return [write_constant_checkpoint(folder / f"chat-{token}", token) for token in TOKENS]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    config = tmp_path_factory.mktemp("settings") / "appliance.toml"
    config.write_text("fronts = 2\n[models]\n")
    with service("--config", str(config)) as started:
        yield started


def models(running: Service, *words: str) -> Any:
    return running.command("models", *words)


def refused(running: Service, *words: str) -> str:
    done = running.run("models", *words, "--json")
    assert done.returncode != 0, done.stdout
    return done.stderr


def states(running: Service, name: str) -> dict[int, str]:
    [model] = [one for one in models(running, "list") if one["name"] == name]
    return {version["version"]: version["state"] for version in model["versions"]}


def ask(running: Service, model: str, **fields: Any) -> tuple[int, Any]:
    answer = running.complete(model, return_token_ids=True, **fields)
    return answer.status_code, answer.json()


def answered(running: Service, model: str) -> Any:
    """Return an answer, or None if the request was refused."""
    status, answer = ask(running, model)
    return answer if status == 200 else None


def tokens_of(running: Service, model: str, **fields: Any) -> list[int]:
    """Return the tokens of an answer."""
    status, answer = ask(running, model, **fields)
    assert status == 200, answer
    return list(answer["choices"][0]["token_ids"])


def served(running: Service) -> list[str]:
    with running.http() as http:
        return [model["id"] for model in http.get("/v1/models").json()["data"]]


def test_a_model_is_added_and_loaded_and_answers_without_a_restart(
    running: Service, folders: list[Path]
) -> None:
    assert models(running, "list") == [] and served(running) == []
    added = models(running, "add", f"chat={folders[0]}", *SMALL)
    assert added == {"name": "chat", "version": 1}
    assert states(running, "chat") == {1: "available"} and served(running) == ["chat"]
    models(running, "load", "chat", "--wait")
    assert states(running, "chat") == {1: "ready"} and served(running) == ["chat"]
    status, answer = ask(running, "chat")
    assert status == 200, answer
    assert answer["model"] == "chat" and answer["choices"][0]["token_ids"] == [TOKENS[0]] * 4
    [loaded] = models(running, "ps")
    assert (loaded["name"], loaded["version"], loaded["state"]) == ("chat", 1, "ready")
    assert loaded["memory_bytes"] > 0


def test_on_a_terminal_a_load_shows_its_stages_and_a_removal_asks_for_the_name(
    folders: list[Path], tmp_path: Path
) -> None:
    config = tmp_path / "appliance.toml"
    config.write_text("[models]\n")
    stopped: list[int] = []

    def stop(pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        stopped.append(pid)

    # A forked rank could be ready before it is stopped. Without the stop, a short load could end before the
    # command shows a stage.
    with service("--config", str(config), kind=Service) as running:
        run_dir = str(running.run_dir)
        models(running, "add", f"seen={folders[0]}", *SMALL)
        with EveryNewRank(running, stop):
            terminal = Terminal([APPLIANCE, "models", "load", "seen", "--wait", "--run-dir", run_dir])
            terminal.expect("\rseen@1-0 ")
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        terminal.expect("seen version 1 is ready")
        assert terminal.exit_code() == 0
        models(running, "unload", "seen", "--wait", "--yes")
        shown = on_a_terminal("models", "remove", "seen", "--run-dir", run_dir, typed="seen\n")
    assert "Remove model seen? Type the name to confirm: " in shown
    assert "seen removed; its files are kept" in shown


def test_fit_predicts_the_memory_of_a_registered_version(running: Service, folders: list[Path]) -> None:
    for target in ("chat", "chat@1"):
        predicted = models(running, "fit", target)
        assert (predicted["folder"], predicted["kv_blocks"]) == (str(folders[0]), 100)
    assert models(running, "fit", "chat", "--set", "kv_blocks=50")["kv_blocks"] == 50


def test_the_manifest_has_the_hash_of_every_file(running: Service, folders: list[Path]) -> None:
    [version] = models(running, "show", "chat")["versions"]
    assert {file["name"]: file["sha256"] for file in version["files"]} == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folders[0].iterdir()
    }
    assert version["settings"] == {"kv_blocks": 100, "threads": 1, "max_num_seqs": 64}


def test_a_second_checkpoint_becomes_version_2_and_changes_nothing(
    running: Service, folders: list[Path]
) -> None:
    assert models(running, "add", f"chat={folders[1]}", *SMALL) == {"name": "chat", "version": 2}
    assert states(running, "chat") == {1: "ready", 2: "available"}
    assert ask(running, "chat")[1]["choices"][0]["token_ids"] == [TOKENS[0]] * 4


def test_a_checkpoint_that_cannot_be_served_is_refused_at_add(
    running: Service, folders: list[Path], tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(folders[0], broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert "model.safetensors" in refused(running, "add", str(broken), *SMALL)
    assert [one["name"] for one in models(running, "list")] == ["chat"]


def test_a_failed_load_affects_no_other_model_and_says_why(
    running: Service, folders: list[Path], tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(folders[0], broken)
    assert models(running, "add", str(broken), *SMALL) == {"name": "broken", "version": 1}
    weights = broken / "model.safetensors"
    complete = weights.read_bytes()
    weights.write_bytes(complete[:-1000])
    assert "model.safetensors has" in refused(running, "load", "broken", "--wait")

    def has_failed() -> bool:
        [model] = [one for one in models(running, "list") if one["name"] == "broken"]
        return model["state"] == "failed" and "model.safetensors" in model["versions"][0]["detail"]

    # While the service retries the load, the state is different. The fronts may learn of the failure later.
    running.wait_until(has_failed, 120, "the failure in the list")
    running.wait_until(lambda: served(running) == ["chat"], 120, "the fronts to omit the model")
    assert states(running, "chat")[1] == "ready"
    with running.http() as http:
        assert http.get("/health/ready").status_code == 200
    weights.write_bytes(complete)  # the service retries the load by itself
    running.wait_until(lambda: states(running, "broken") == {1: "ready"}, 120, "the repaired model")
    assert ask(running, "broken")[0] == 200
    models(running, "unload", "broken", "--wait", "--yes")
    models(running, "remove", "broken", "--yes")
    assert [one["name"] for one in models(running, "list")] == ["chat"]


def test_a_version_has_its_own_sampling_defaults_and_chat_template(
    running: Service, folders: list[Path], tmp_path: Path
) -> None:
    template = tmp_path / "other.jinja"
    template.write_text("{{ 'A' if messages[0].content == 'Hello' else 'B' }}")
    own = ("--set", "sampling.repetition_penalty=100", "--set", f"chat_template={template}")
    models(running, "add", f"own={folders[0]}", *SMALL, *own)
    models(running, "load", "own", "--wait")
    assert models(running, "show", "own")["versions"][0]["settings"]["sampling"] == {
        "repetition_penalty": 100
    }
    sampled: dict[str, Any] = {"max_tokens": 40, "temperature": 1, "seed": 1}
    drawn = tokens_of(running, "own", **sampled)
    chosen = tokens_of(running, "own", **sampled, repetition_penalty=1)
    with running.http() as http:
        chat = {"model": "own", "messages": [{"role": "user", "content": "Hello"}]}
        tokens = http.post("/tokenize", json=chat | {"return_token_strs": True}).json()["token_strs"]
    # Without a penalty, the checkpoint generates only its own token.
    assert chosen == [TOKENS[0]] * 40 and drawn.count(TOKENS[0]) < 20
    assert tokens == ["A"]
    models(running, "unload", "own", "--wait", "--yes")
    models(running, "remove", "own", "--yes")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("add", "x=/nowhere"), "/nowhere"),
        (("add", "x=FOLDER", "--set", "sampling.temperature=3"), "sampling.temperature = 3 is not valid"),
        (("add", "x=FOLDER", "--set", "sampling.top_n=3"), "sampling.top_n is not a setting"),
        (("add", "x=FOLDER", "--set", "chat_template=/nowhere.jinja"), "/nowhere.jinja"),
        (("add", "x=FOLDER", "--set", "chat_template=BROKEN"), "is not valid Jinja2"),
        (("add", "x@1=/tmp"), "not a valid model name"),
        (("add", "chat=/tmp", "--set", "max_num_seq=3"), "did you mean 'max_num_seqs'"),
        (("load", "chat@9", "--wait"), "no version 9; available versions: 1, 2"),
        (("load", "chat@two"), "'chat@two': 'two' is not a number: available versions: 1, 2"),
        (("load", "other"), "the registry has no model 'other'"),
        (("fit", "other"), "'other' is neither a folder nor a model in the registry"),
        (("default", "chat"), "write NAME@VERSION"),
        (("rollback", "chat"), "no other default version"),
        (("remove", "chat", "--yes"), "unload it first"),
    ],
)
def test_a_command_that_cannot_be_performed_says_why(
    running: Service, folders: list[Path], tmp_path: Path, words: tuple[str, ...], reason: str
) -> None:
    (broken := tmp_path / "broken.jinja").write_text("{% for %}")
    replaced = {"FOLDER": str(folders[0]), "BROKEN": str(broken)}
    for name, value in replaced.items():
        words = tuple(word.replace(name, value) for word in words)
    assert reason in refused(running, *words)


def test_every_command_is_audited(running: Service) -> None:
    actions = running.command("audit", "list")
    found = {(row["action"], row["result"].partition(":")[0]) for row in actions}
    assert {("models.add", "ok"), ("models.load", "ok"), ("models.load", "refused")} <= found


def test_a_split_sends_each_user_to_one_version_and_the_log_names_it(running: Service) -> None:
    assert "load chat@2 --wait" in refused(running, "split", "chat", "1=50", "2=50")
    models(running, "load", "chat@2", "--wait")
    said = models(running, "split", "chat", "1=75", "2=25")["message"]
    assert said == "requests for chat are split: 75.0% to chat@1, 25.0% to chat@2"
    [model] = models(running, "list")
    assert model["split"] == {"chat@1": 75, "chat@2": 25}
    assert [one["shares"] for one in model["versions"]] == [{"chat": 0.75}, {"chat": 0.25}]
    users = [f"user-{number}" for number in range(40)]
    first, again = ([token_for(running, user) for user in users] for _ in range(2))
    assert first == again and set(first) == set(TOKENS) and first.count(TOKENS[0]) > 20
    # Rows are written a moment after the answer.
    running.wait_until(
        lambda: sum(row["user"] in users for row in running.rows(state="ended")) == 80, 60, "the rows"
    )
    units = {row["user"]: row["unit"] for row in running.command("requests", "--limit", "80")}
    assert units == {
        user: f"chat@{1 + TOKENS.index(token)}" for user, token in zip(users, first, strict=True)
    }
    counted = f'{{model="chat",unit="chat@2",outcome="ok"}} {2 * first.count(TOKENS[1])}\n'
    assert f"appliance_arm_requests_total{counted}" in running.metrics()
    assert "models split chat --clear" in refused(running, "rollback", "chat")
    models(running, "split", "chat", "--clear")
    assert {token_for(running, user) for user in users} == {TOKENS[0]}
    models(running, "split", "chat", "2=1")
    models(running, "default", "chat@1")
    assert models(running, "list")[0]["split"] == {}
    assert {token_for(running, user) for user in users[:5]} == {TOKENS[0]}
    models(running, "unload", "chat@2", "--wait", "--yes")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("chat", "1=50", "9=50"), "no version 9; available versions: 1, 2"),
        (("chat", "1=50", "gone=50"), "there is no model 'gone'"),
        (("chat", "1=1", "chat@1=2"), "'chat@1' twice"),
        (("chat", "1=0"), "'1=0' is not valid: write VERSION=WEIGHT"),
        (("chat", "1"), "'1' is not valid: write VERSION=WEIGHT"),
        (("chat",), "--clear"),
        (("chat", "--clear"), "'chat' has no split"),
        (("chat", *(f"model-{number}=1" for number in range(17))), "16"),
        (("gone", "1=1"), "there is no model or alias 'gone'"),
    ],
)
def test_a_split_that_cannot_be_set_says_why(running: Service, words: tuple[str, ...], reason: str) -> None:
    assert reason in refused(running, "split", *words)


def token_for(running: Service, user: str) -> int:
    """Return the token that the version for this user generates."""
    [token] = tokens_of(running, "chat", max_tokens=1, user=user)
    return token


def test_an_unloaded_model_leaves_the_memory_and_a_loaded_one_survives_a_restart(
    running: Service, folders: list[Path]
) -> None:
    models(running, "unload", "chat", "--wait", "--yes")
    assert states(running, "chat") == {1: "available", 2: "available"}
    assert models(running, "ps") == [] and ask(running, "other")[0] == 404
    models(running, "load", "chat@2", "--wait")
    models(running, "alias", "assistant", "chat@2")
    running.stop()
    running.start()
    wanted = {1: "available", 2: "ready"}
    running.wait_until(lambda: states(running, "chat") == wanted, 120, "the version to be loaded again")
    # The fronts may learn of the version later.
    running.wait_until(lambda: served(running) == ["chat", "assistant"], 120, "the routes in the fronts")
    answer = running.wait_until(lambda: answered(running, "assistant"), 120, "an answer")
    assert answer["model"] == "assistant"
    assert answer["choices"][0]["token_ids"] == [TOKENS[1]] * 4


def test_a_model_in_the_settings_is_shown_and_can_be_changed_only_there(
    folders: list[Path], tmp_path: Path
) -> None:
    config = tmp_path / "appliance.toml"
    config.write_text(f'[models.chat]\nfolder = "{folders[0]}"\nkv_blocks = 100\nthreads = 1\n')
    with service("--config", str(config)) as running:
        [model] = models(running, "list")
        assert model["source"] == f"declared in {config}:2" and states(running, "chat") == {1: "ready"}
        for words in (
            ("add", f"chat={folders[1]}"),
            ("load", "chat"),
            ("unload", "chat", "--yes"),
            ("default", "chat@1"),
            ("rollback", "chat"),
            ("remove", "chat", "--yes"),
            ("alias", "chat", "chat"),
            ("split", "chat", "1=1"),
        ):
            assert f"declared in {config}:2" in refused(running, *words), words
        models(running, "alias", "assistant", "chat")
        assert served(running) == ["chat", "assistant"]
        assert ask(running, "assistant")[1]["choices"][0]["token_ids"] == [TOKENS[0]] * 4


def test_a_reload_changes_sampling_and_template_without_another_replica(
    folders: list[Path], tmp_path: Path
) -> None:
    config, template = tmp_path / "appliance.toml", tmp_path / "other.jinja"
    template.write_text("A")
    declared = f'[models.chat]\nfolder = "{folders[0]}"\nkv_blocks = 100\nthreads = 1\n'
    config.write_text(declared)

    def tokens() -> list[str]:
        body = {"model": "chat", "messages": [{"role": "user", "content": "Hello"}]}
        with running.http() as http:
            answer = http.post("/tokenize", json=body | {"return_token_strs": True})
        return list(answer.json()["token_strs"])

    def drawn() -> list[int]:
        return tokens_of(running, "chat", max_tokens=40, temperature=1, seed=1)

    with service("--config", str(config)) as running:
        pids, own = running.replica()["pids"], tokens()
        assert own != ["A"] and drawn() == [TOKENS[0]] * 40
        changed = (
            f'{declared}chat_template = "other.jinja"\n[models.chat.sampling]\nrepetition_penalty = 100\n'
        )
        config.write_text(changed)
        running.command("config", "reload")
        running.wait_until(lambda: tokens() == ["A"], 60, "the template to be used")
        assert drawn().count(TOKENS[0]) < 20
        config.write_text(changed.replace("other.jinja", "gone.jinja"))
        done = running.run("config", "reload")
        assert done.returncode != 0 and "gone.jinja" in done.stderr, done
        config.write_text(declared)
        running.command("config", "reload")
        running.wait_until(lambda: tokens() == own, 60, "the folder's template to be used")
        assert drawn() == [TOKENS[0]] * 40 and running.replica()["pids"] == pids


def test_swaps_rollbacks_and_changes_of_aliases_and_splits_fail_no_stream(tmp_path: Path) -> None:
    config = tmp_path / "appliance.toml"
    config.write_text("fronts = 2\n[models]\n")
    with service("--config", str(config)) as running:
        swaps = Swaps(running, tmp_path, STREAMS)
        assert swaps.swap_and_roll_back(rounds=2) >= 4 * STREAMS
        assert swaps.change_alias(rounds=1) >= 2 * STREAMS
        assert swaps.change_split(rounds=1) >= 4 * STREAMS


def test_the_lines_of_each_front_are_in_the_logs_of_the_service(running: Service) -> None:
    for name in ("front-0", "front-1"):
        lines = running.command("logs", "--process", name)
        assert any("serving" in line["message"] for line in lines)
        assert {line["process"] for line in lines} == {name}
    core = running.command("logs", "--process", "core", "--text", "is ready")
    assert {"front-0 is ready", "front-1 is ready"} <= {line["message"] for line in core}
