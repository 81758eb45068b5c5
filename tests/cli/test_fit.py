"""Tests of `models fit`, which predicts how much memory a model needs before it is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from appliance.models.fit import MachineMemory
from appliance.models.gpus import DetectedGpu
from appliance.settings import demo_model_folder
from tests.cli.conftest import Run

GIB = 1 << 30


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine without GPUs on which 2 GiB of 8 GiB of memory are available."""
    found = MachineMemory(gpus=[], available_bytes=2 * GIB, total_bytes=8 * GIB)
    monkeypatch.setattr("appliance.cli.fit.read_memory", lambda: found)


def fit(cli: Run, *words: object) -> tuple[int, dict[str, Any]]:
    outcome = cli("models", "fit", demo_model_folder(), "--json", *words)
    return outcome.code, json.loads(outcome.out)


def test_the_required_memory_and_the_number_of_sequences_are_reported(cli: Run) -> None:
    code, report = fit(cli, "--set", "kv_blocks=100", "--set", "max_num_seqs=8")
    assert code == 0 and report["fits"] and report["reason"] == ""
    assert report["needed_bytes"] == report["weight_bytes"] + report["workspace_bytes"] + report["kv_bytes"]
    assert report["kv_bytes"] == 100 * report["block_bytes"] and report["kv_tokens"] == 6400
    # A sequence of 1,024 tokens takes 16 of the 100 blocks; a sequence of 2,048 tokens takes 32.
    assert report["sequences"] == [{"tokens": 1024, "sequences": 6}, {"tokens": 2048, "sequences": 3}]
    assert report["usable_bytes"] == int(2 * GIB * 0.95) and report["device"] == "cpu"


def test_the_text_shows_the_same_as_the_json(cli: Run) -> None:
    outcome = cli("models", "fit", demo_model_folder(), "--set", "kv_blocks=100")
    assert outcome.code == 0
    for fact in ("weights", "41.3 MiB", "100 blocks, 6,400 tokens", "of 2.0 GiB that are available now"):
        assert fact in outcome.out
    assert "2,048" in outcome.out and "the model fits" in outcome.out


def test_a_model_that_does_not_fit_now_is_refused_with_the_required_memory(cli: Run) -> None:
    code, report = fit(cli, "--set", "kv_blocks=5000")
    assert code == 1 and not report["fits"] and report["sequences"] == []
    assert report["needed_bytes"] > report["usable_bytes"]
    assert "5,000 KV blocks 3.1 GiB; 1.9 GiB usable of 2.0 GiB" in report["reason"] and report["remedy"]
    text = cli("models", "fit", demo_model_folder(), "--set", "kv_blocks=5000").out
    assert "the model does not fit" in text and "lower kv_blocks" in text


def test_memory_that_other_processes_use_on_the_gpus_is_subtracted(
    cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [
        DetectedGpu(number, "H200", 100 * GIB, used * GIB, "9.0") for number, used in enumerate((90, 10, 50))
    ]
    found = MachineMemory(gpus=gpus, available_bytes=GIB, total_bytes=GIB)
    monkeypatch.setattr("appliance.cli.fit.read_memory", lambda: found)
    code, report = fit(cli, "--set", "tensor_parallel_size=2")
    assert code == 0 and [gpu["number"] for gpu in report["gpus"]] == [1, 2]
    assert report["used_bytes"] == 50 * GIB and report["usable_bytes"] == 45 * GIB
    assert report["dtype"] == "bfloat16" and report["kv_tokens"] > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("/no/such",), "the folder '/no/such' does not exist: use a folder with config.json"),
        ((demo_model_folder(), "--set", "kv_block=3"), "did you mean 'kv_blocks'"),
        ((demo_model_folder(), "--set", "kv_blocks=0"), "kv_blocks = 0 is not valid"),
        ((demo_model_folder(), "--set", "tensor_parallel_size=3"), "does not divide"),
    ],
)
def test_a_folder_or_setting_that_cannot_be_used_is_named(
    cli: Run, words: tuple[Path | str, ...], said: str
) -> None:
    outcome = cli("models", "fit", *words)
    assert outcome.code == 1 and said in outcome.err
