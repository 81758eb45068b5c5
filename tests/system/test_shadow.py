"""Tests of shadow traffic on a running service."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import write_constant_checkpoint
from tests.system.service import Service, service

pytestmark = pytest.mark.system

TOKENS = {"chat": 100, "same": 100, "other": 200}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("models")
    table = ""
    for name, token in TOKENS.items():
        checkpoint = write_constant_checkpoint(folder / name, token)
        table += f'[models.{name}]\nfolder = "{checkpoint}"\nkv_blocks = 100\nthreads = 1\n'
    (config := folder / "appliance.toml").write_text(table)
    with service("--config", str(config)) as started:
        yield started


def ask(running: Service, stream: bool, **more: Any) -> None:
    body = {"model": "chat", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 6}
    with running.http() as http:
        answer = http.post("/v1/chat/completions", json=body | {"ignore_eos": True, "stream": stream, **more})
    assert answer.status_code == 200, answer.text


def shadow(running: Service) -> dict[str, Any]:
    [found] = running.command("models", "show", "chat")["shadows"]
    return dict(found)


@pytest.mark.parametrize(("target", "agreement"), [("same", 1.0), ("other", 0.0)])
def test_copies_are_compared_and_leave_no_trace_in_log_and_usage(
    running: Service, target: str, agreement: float
) -> None:
    said = running.command("models", "shadow", "chat", "--to", target, "--share", "100%")["message"]
    assert said == f"100.0% of the requests for chat are copied to {target}"
    before, sent, found = running.command("requests", "--limit", "1000"), 0, shadow(running)

    def results() -> dict[str, Any] | None:
        found = shadow(running)
        return found if found["compared"] + found["dropped"] + found["failed"] == sent else None

    # A copy is dropped if it cannot start at once, for example while a busy machine delays its target.
    while found["compared"] < 4 or not found["greedy"]:
        for number in range(8):
            ask(running, stream=number % 2 == 0, temperature=0 if number < 6 else 1)
        sent += 8
        found = running.wait_until(results, 120, "the results of all copies")
        assert found["failed"] == 0, found
    assert found["agreement"] == agreement and found["greedy"] <= sent * 6 // 8
    assert found["original"]["tokens"] == found["copy"]["tokens"] == 6
    assert 0 < found["copy"]["ttft_ms"] <= found["copy"]["e2e_ms"]

    def new_rows() -> int:
        return len(running.command("requests", "--limit", "1000")) - len(before)

    running.wait_until(
        lambda: new_rows() >= sent, 60, "the rows, which are written a moment after the answers"
    )
    rows = running.command("requests", "--limit", "1000")
    assert len(rows) - len(before) == sent and {row["unit"] for row in rows} == {"chat"}
    text = running.metrics()
    labels = f'model="chat",unit="{target}",result="compared"'
    assert f"appliance_shadow_requests_total{{{labels}}} {found['compared']}\n" in text
    assert 'tenant="(shadow)"' not in text
    running.command("models", "shadow", "chat", "--clear")
    assert running.command("models", "show", "chat")["shadows"] == []


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("chat", "--to", "gone"), "there is no model 'gone'"),
        (("chat", "--to", "chat"), "already answers the requests for 'chat'"),
        (("gone", "--to", "same"), "there is no model or alias 'gone'"),
        (("chat", "--to", "same", "--share", "0%"), "--share '0%' is not valid"),
        (("chat",), "--clear"),
        (("chat", "--clear"), "'chat' has no shadow"),
    ],
)
def test_a_shadow_that_cannot_be_set_says_why(running: Service, words: tuple[str, ...], reason: str) -> None:
    done = running.run("models", "shadow", *words, "--json")
    assert done.returncode != 0 and reason in done.stderr, done


def test_shadows_are_audited(running: Service) -> None:
    def results() -> set[str]:
        rows = [row for row in running.command("audit", "list") if row["action"] == "models.shadow"]
        return {row["result"].partition(":")[0] for row in rows}

    # If the disk is slow, an action's result is written after the command has ended.
    running.wait_until(lambda: results() == {"ok", "refused"}, 60, "the results in the audit trail")


def test_a_copy_that_its_target_cannot_take_is_counted_as_failed(running: Service, tmp_path: Path) -> None:
    """If the target's context is too short for the copy, the original request is not affected."""
    checkpoint = write_constant_checkpoint(tmp_path / "short", 100)
    small = ("--set", "max_model_len=8", "--set", "kv_blocks=100", "--set", "threads=1")
    running.command("models", "add", f"short={checkpoint}", *small)
    running.command("models", "load", "short", "--wait")
    running.command("models", "shadow", "chat", "--to", "short", "--share", "100%")
    ask(running, stream=False, temperature=0)
    running.wait_until(lambda: shadow(running)["failed"] == 1, 60, "the copy to be refused")
    running.command("models", "shadow", "chat", "--clear")
