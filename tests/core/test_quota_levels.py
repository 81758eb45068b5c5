"""Tests that quota levels are saved and loaded."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.core.quota_levels import LevelKeeper
from appliance.traffic.quotas import Quotas, Reservation
from store.policies import Policies, Quota, TenantRecord
from store.quotas import QuotaLog
from store.schemas import HISTORY
from store.writer import Writer

ACME = Policies([TenantRecord(name="acme", created_at=0.0, quota=Quota(tokens_per_day=1000.0))])


@pytest.fixture
def history(tmp_path: Path) -> Iterator[Writer]:
    writer = Writer(tmp_path / "history.db", HISTORY, synchronous="NORMAL")
    writer.start()
    yield writer
    writer.close()


def fresh(policies: Policies = ACME) -> Quotas:
    quotas = Quotas(time.monotonic)
    quotas.set_policies(policies)
    return quotas


def spend(quotas: Quotas, tokens: int) -> None:
    held = quotas.reserve("acme", "", prompt_tokens=tokens, max_tokens=0)
    assert isinstance(held, Reservation)
    quotas.settle(held, tokens)
    quotas.close(held)


def used(quotas: Quotas) -> list[int]:
    return [usage.used for usage in quotas.usage("tenant", "acme")]


def test_levels_survive_a_restart(history: Writer) -> None:
    quotas = fresh()
    keeper = LevelKeeper(quotas, QuotaLog(history))
    spend(quotas, 300)
    keeper.close()
    assert history.flush()
    again = fresh()
    LevelKeeper(again, QuotaLog(history)).restore(history.path)
    assert used(again) == [300]


def test_the_level_of_a_removed_limit_is_forgotten(history: Writer) -> None:
    quotas = fresh()
    keeper = LevelKeeper(quotas, QuotaLog(history))
    spend(quotas, 300)
    keeper.save()
    quotas.set_policies(Policies([TenantRecord(name="acme", created_at=0.0)]))
    keeper.save()
    assert history.flush()
    again = fresh()
    LevelKeeper(again, QuotaLog(history)).restore(history.path)
    assert used(again) == [0]


def test_levels_dropped_by_a_full_writer_are_saved_with_the_next_snapshot(
    history: Writer, tmp_path: Path
) -> None:
    full = Writer(tmp_path / "other.db", HISTORY, synchronous="NORMAL")
    full.close()  # a closed writer drops everything
    quotas = fresh()
    spend(quotas, 300)
    LevelKeeper(quotas, QuotaLog(full)).save()
    LevelKeeper(quotas, QuotaLog(history)).save()
    assert history.flush()
    again = fresh()
    LevelKeeper(again, QuotaLog(history)).restore(history.path)
    assert used(again) == [300]


def test_the_service_starts_even_if_the_levels_are_unreadable(
    tmp_path: Path, history: Writer, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "torn.db").write_bytes(b"no database" * 1000)
    quotas = fresh()
    LevelKeeper(quotas, QuotaLog(history)).restore(tmp_path / "torn.db")
    assert used(quotas) == [0] and "all quotas start unused" in caplog.text
