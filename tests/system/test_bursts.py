"""Tests of `tests.system.bursts` with a few rounds; `scripts/soak` runs a thousand."""

from __future__ import annotations

from typing import Any

import pytest

from appliance.protocol import LimitUsage
from tests.system.burst_client import Got
from tests.system.bursts import Bursts, Findings, Round, check_round, check_rows, tiny_service


@pytest.mark.system
def test_no_burst_exceeds_a_quota_when_clients_disconnect_or_processes_die() -> None:
    with tiny_service() as running:
        bursts = Bursts(running, seed=7, front_every=3, rank_every=5)
        for number in range(5):
            bursts.run(number)
        found = bursts.findings()
        assert found == Findings(), found.examples
        outcomes = [(got.status, got.refusal, got.left) for this in bursts.rounds for got in this.got]
        assert {this.killed for this in bursts.rounds} == {"", "front", "rank"}
        assert (429, "rate_limit_exceeded", False) in outcomes and (200, "", False) in outcomes
        assert any(left for _, _, left in outcomes)
        assert sum(len(numbers) for numbers, _ in bursts.engine) == 4
        assert sum(generated for _, generated in bursts.engine) > 0


def a_round(**changes: Any) -> tuple[Round, dict[str, dict[str, Any]]]:
    """Return a burst with two requests, their rows, and a quota of 20 tokens of which 16 are used."""
    usage = LimitUsage(limit="tokens_per_day", capacity=20, used=16, held=0, resets_in_s=1.0)
    got = [Got(5, name, 200, whole=True, tokens=3) for name in ("a", "b")]
    this = Round(0, "key", "tokens_per_day", 20.0, 0.0, "burst-0", seconds=1.0, got=got, usage=[usage])
    row = {
        "finished_at": 1.0,
        "double_ends": 0,
        "error": None,
        "prompt_tokens": 5,
        "billed_tokens": 3,
        "generated_tokens": 3,
        "quota_tokens": 8,
    }
    return this, {"a": row | changes, "b": row}


def found_in(this: Round, rows: dict[str, dict[str, Any]]) -> set[str]:
    found = Findings()
    check_round(this, list(rows.values()), found)
    check_rows(this, rows, found)
    return {name for name, value in vars(found).items() if value and name != "examples"}


def test_a_correct_round_has_no_findings() -> None:
    assert found_in(*a_round()) == set()


@pytest.mark.parametrize(
    ("changes", "errors"),
    [
        ({"quota_tokens": 13}, {"overshoot_tokens", "leaked", "wrong_charges"}),
        ({"quota_tokens": 9}, {"wrong_charges"}),
        ({"billed_tokens": 2, "quota_tokens": 7}, {"billed_is_not_delivered"}),
        ({"generated_tokens": 2}, {"billed_is_not_delivered"}),
        ({"finished_at": None}, {"open_rows"}),
        ({"double_ends": 1}, {"double_ends"}),
        ({"error": "the front process died", "quota_tokens": 7}, {"wrong_charges"}),
    ],
)
def test_an_error_in_a_row_is_found(changes: dict[str, Any], errors: set[str]) -> None:
    assert found_in(*a_round(**changes)) == errors


def test_tokens_received_beyond_the_quota_are_found() -> None:
    this, rows = a_round()
    this.got += [Got(5, tokens=3)]
    assert found_in(this, rows) == {"overshoot_tokens"}


def test_leaked_reservations_and_missing_rows_are_found() -> None:
    this, rows = a_round()
    this.usage[0].held = 2
    del rows["b"]
    assert found_in(this, rows) == {"leaked", "missing_rows"}
