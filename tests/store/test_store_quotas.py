from __future__ import annotations

import pytest

from store.quotas import QuotaLevels, QuotaLog, QuotaState, Used, read_quotas


@pytest.fixture
def quota_log(history):
    return QuotaLog(history.writer)


def tenant(name="acme", at=1_000_000.0, **left):
    return QuotaLevels(scope="tenant", name=name, at=at, remaining=left)


def read(history) -> QuotaState:
    assert history.writer.flush()
    return read_quotas(history.path)


def test_without_a_stored_snapshot_there_is_no_usage(history, request_row):
    history.log.open(request_row(tenant="acme", quota_tokens=9))
    assert read(history) == QuotaState([], [])


def test_the_latest_levels_are_found_and_deleted_ones_are_not(history, quota_log):
    quota_log.save([tenant(tokens_per_minute=5.5), tenant("other", requests_per_minute=2.0)])
    quota_log.save(
        [tenant(at=1_000_002.0, tokens_per_minute=-3.25, tokens_per_day=7.0)], [("tenant", "other")]
    )
    assert read(history).levels == [tenant(at=1_000_002.0, tokens_per_minute=-3.25, tokens_per_day=7.0)]


def test_only_usage_after_the_snapshot_is_listed(history, request_row, quota_log):
    history.log.end(request_row("before", tenant="acme", quota_tokens=100, finished_at=1_000_001.0))
    history.log.open(request_row("runs on", tenant="acme", key_id="key_1", quota_tokens=50))
    history.log.open(request_row("ends after", tenant="acme", quota_tokens=70))
    quota_log.save([tenant(tokens_per_minute=5.0)])
    history.log.end(request_row("ends after", tenant="acme", quota_tokens=20, finished_at=1_000_002.0))
    history.log.open(request_row("begins after", tenant="acme", quota_tokens=8, created_at=999_999.0))
    history.log.end(request_row("never ran", tenant="acme", quota_tokens=0, finished_at=1_000_003.0))
    assert read(history).used == [
        Used("acme", "", 999_999.0, 8),
        Used("acme", "key_1", 1_000_000.0, 50),
        Used("acme", "", 1_000_000.0, 20),
    ]


def test_rows_closed_at_startup_count_as_usage_until_the_next_snapshot(history, request_row, quota_log):
    history.log.open(request_row(tenant="acme", quota_tokens=50))
    quota_log.save([tenant(tokens_per_minute=5.0)])
    for _ in range(2):
        history.log.seal_open_rows("it ended").result(60)
        assert [used.tokens for used in read(history).used] == [50]
    quota_log.save([tenant(tokens_per_minute=-45.0)])
    assert read(history).used == []


def test_levels_that_did_not_change_stay_valid(history, request_row, quota_log):
    quota_log.save([tenant("quiet", tokens_per_minute=1.0), tenant(tokens_per_minute=9.0)])
    history.log.end(request_row(tenant="acme", quota_tokens=3, finished_at=1_000_001.0))
    quota_log.save([tenant(tokens_per_minute=6.0)])
    found = read(history)
    assert {levels.name: levels.remaining["tokens_per_minute"] for levels in found.levels} == {
        "quiet": 1.0,
        "acme": 6.0,
    }
    assert found.used == []
