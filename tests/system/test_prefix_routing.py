"""Tests that a prompt goes to the replica that has cached the beginning of the prompt."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.settings import demo_model_folder
from tests.system.replica_kills import TokenStream
from tests.system.service import Service, service

pytestmark = pytest.mark.system

PROMPT = [(7 * place) % 1000 + 10 for place in range(300)]
WITHIN_S = 240.0


def running_seqs(running: Service) -> int:
    return sum(replica["running"] for replica in running.status()["models"][0]["replicas"])


def cached_tokens(running: Service) -> int:
    answer = running.complete(prompt=PROMPT, max_tokens=1)
    assert answer.status_code == 200, answer.text
    found: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def test_a_repeated_prompt_always_finds_its_cached_prefix_on_two_replicas(tmp_path: Path) -> None:
    """The prompt is also computed by the second replica while the first one is busy. Afterwards, both
    replicas have the same number of free slots."""
    config = tmp_path / "appliance.toml"
    config.write_text(
        f'[models.demo]\nfolder = "{demo_model_folder()}"\nreplicas = 2\nkv_blocks = 200\nthreads = 1\n'
    )
    with service("--config", str(config)) as running:
        stream = TokenStream(running, "demo", "import ", 500)
        running.wait_until(lambda: running_seqs(running) == 1, WITHIN_S, "the stream")
        assert cached_tokens(running) == 0
        stream.end()
        running.wait_until(lambda: running_seqs(running) == 0, WITHIN_S, "both replicas to be idle")
        assert [cached_tokens(running) >= 256 for _ in range(4)] == [True] * 4
