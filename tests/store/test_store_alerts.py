"""Tests of alerts and silences in `history.db`."""

from __future__ import annotations

import msgspec
import pytest

from store import alerts
from store.alerts import AlertLog, AlertReader, AlertRow
from store.structs import Silence


@pytest.fixture
def log(history):
    return AlertLog(history.writer)


@pytest.fixture
def reader(history):
    return AlertReader(history.path)


def alert(number: int = 1, **fields: object) -> AlertRow:
    known = {
        "rule": "hot",
        "severity": "warning",
        "subject": "GPU 1",
        "description": "",
        "cause": "",
        "remedy": "",
    }
    return AlertRow(id=f"a{number}", since=float(number), raised_at=float(number), **{**known, **fields})


def test_an_alert_is_read_back_in_its_latest_state(history, log, reader):
    log.save(alert(value=90.5))
    ended = alert(value=90.5, ended_at=9.0, acknowledged_by="uid:0", acknowledged_at=5.0)
    log.save(ended)
    history.writer.flush()
    assert reader.between(0.0, 10.0, 10) == [ended] and reader.open() == []


def test_alerts_of_a_past_time_are_found(history, log, reader):
    log.save(alert(1, ended_at=5.0))
    log.save(alert(3))
    history.writer.flush()
    assert [one.id for one in reader.between(4.0, 4.0, 10)] == ["a3", "a1"]
    assert [one.id for one in reader.between(2.0, 2.0, 10)] == ["a1"]
    assert [one.id for one in reader.between(6.0, 6.0, 10)] == ["a3"]


def test_silences_end_and_are_removed(history, log, reader):
    silence = Silence(id="s1", rule="*", subject="*", until=10.0)
    log.save_silence(silence)
    log.save_silence(msgspec.structs.replace(silence, id="s2", until=20.0))
    history.writer.flush()
    assert [one.id for one in reader.silences(5.0)] == ["s1", "s2"]
    log.remove_silence("s1")
    history.writer.flush()
    assert [one.id for one in reader.silences(5.0)] == ["s2"]
    assert history.writer.call(lambda connection: alerts.remove_alerts(connection, 30.0)).result(60) == 1


def test_only_the_newest_ended_alerts_are_kept(history, log, reader, monkeypatch):
    monkeypatch.setattr(alerts, "MAX_ALERTS", 5)
    for number in range(9):
        log.save(alert(number, ended_at=None if number == 0 else 100.0))
    history.writer.flush()
    history.writer.call(lambda connection: alerts.remove_alerts(connection, 0.0)).result(60)
    assert [one.id for one in reader.between(0.0, 9.0, 20)] == ["a8", "a7", "a6", "a5", "a4", "a0"]
