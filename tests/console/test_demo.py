"""Tests that the data of `appliance console --demo` is plausible: alerts, log and recording agree with the
simulated service."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from appliance.actions.parameters import DrainService, ResumeService, SuspendTenant
from appliance.admin.callers import Caller
from appliance.alert_rules import BUILT_IN
from appliance.protocol import Silence
from appliance.snapshot import Alert, Snapshot
from console.fake import FIXED_TIME, FakeSource
from console.lines import plain
from console.session import ConsoleSession
from console.source import ListRow

_RULES = {rule.name: rule for rule in BUILT_IN}


def demo() -> FakeSource:
    return FakeSource(requests=60, blocks=2048, gpus=4, tenants=8, interval_s=1.0, now=FIXED_TIME)


@pytest.fixture(scope="module")
def minutes() -> tuple[list[Snapshot], list[ListRow]]:
    """Return the snapshots of six minutes, which contain two incidents, and the log at their end."""
    fake = demo()
    snapshots = [fake.step() for _ in range(360)]
    return snapshots, [row for row in asyncio.run(fake.rows("logs")) if isinstance(row, ListRow)]


def test_alerts_begin_and_end_as_the_rules_of_the_product_say(
    minutes: tuple[list[Snapshot], list[ListRow]],
) -> None:
    seen: dict[str, list[tuple[float, Alert]]] = {}
    for one in minutes[0]:
        for alert in one.alerts:
            seen.setdefault(alert.id, []).append((one.at, alert))
    assert {alerts[0][1].rule for alerts in seen.values()} == {
        *("tenant-daily-quota", "gpu-slowed-down", "gpu-hot")
    }
    for alerts in seen.values():
        (raised_at, first), (_, last) = alerts[0], alerts[-1]
        rule = _RULES[first.rule]
        assert first.since is not None and raised_at - first.since >= rule.for_s
        assert {(one.since, one.description, one.value) for _, one in alerts} == {
            (first.since, first.description, first.value)
        }
        if first.rule == "tenant-daily-quota":
            assert f"appliance tenants set {first.where.removeprefix('tenant ')} --" in first.remedy
        states = [one.state for _, one in alerts]
        assert states == sorted(states), "an alert that has ended does not fire again"
        if last.ended_at is not None and first.rule == "gpu-hot":
            cool = next(
                one.at
                for one in minutes[0]
                if one.at > raised_at and (one.gpus[-1].temperature_c or 0.0) < (rule.clear or 0.0)
            )
            assert last.ended_at == pytest.approx(cool + rule.clear_for_s, abs=1.5)


def test_an_alert_hides_the_alerts_that_it_explains(minutes: tuple[list[Snapshot], list[ListRow]]) -> None:
    active = [[one for one in snapshot.alerts if one.state == "firing"] for snapshot in minutes[0]]
    with_cause = [alerts for alerts in active if any(one.rule == "gpu-hot" for one in alerts)]
    assert with_cause
    for alerts in with_cause:
        assert not any(one.rule == "gpu-slowed-down" for one in alerts)
        assert all(one.suppressed == 1 for one in alerts if one.rule == "gpu-hot")


def test_the_log_describes_the_simulated_service(minutes: tuple[list[Snapshot], list[ListRow]]) -> None:
    snapshots, rows = minutes
    assert [row.at for row in rows] == sorted((row.at for row in rows), key=lambda at: -(at or 0.0))
    texts = [row.text for row in rows]
    raised = {alert.id: alert for one in snapshots for alert in one.alerts}
    logged = [row for row in rows if " raised: " in row.text]
    assert {row.text.split()[1] for row in logged} == set(raised)
    for row in logged:
        alert = raised[row.text.split()[1]]
        assert row.level == "warning" and alert.description in row.text and alert.cause in row.text
    for model in snapshots[-1].models:
        for replica in model.replicas:
            [text] = [text for text in texts if text.startswith(f"{replica.name} was ready")]
            assert f"{replica.load_seconds:.1f} s" in text and f"{replica.blocks_total} KV blocks" in text
            assert ", ".join(replica.devices) in text
    assert all(snapshots[0].started_at <= (row.at or 0.0) <= snapshots[-1].at for row in rows)


def test_the_hit_rates_cover_the_last_minute(minutes: tuple[list[Snapshot], list[ListRow]]) -> None:
    before, after = minutes[0][200], minutes[0][260]
    for first, last in zip(before.kv, after.kv, strict=True):
        assert first.prompt_tokens is not None and last.prompt_tokens is not None
        prompt, cached = last.prompt_tokens - first.prompt_tokens, last.cached_tokens - first.cached_tokens
        assert last.hit_window_s == 60.0 and last.hit_rate == pytest.approx(cached / prompt, abs=0.001)


def test_an_action_is_in_the_log() -> None:
    fake = demo()
    asyncio.run(fake.act(SuspendTenant(name="mobile")))
    newest = asyncio.run(fake.rows("logs"))[0]
    assert isinstance(newest, ListRow)
    assert newest.text == "tenants.suspend by uid:1000: ok"


def test_the_recording_begins_before_the_start_of_the_console() -> None:
    fake = FakeSource(requests=60, blocks=512, gpus=2, tenants=4)
    first = asyncio.run(fake.next())
    for earlier in (115.0, 60.0, 1.0):
        past = asyncio.run(fake.recording().instant(first.at - earlier))
        assert past.at == pytest.approx(first.at - earlier, abs=1.1)
        assert past.snapshot.requests and past.snapshot.models and past.snapshot.tenants
    assert past.first <= first.at - 115.0


def test_the_clock_of_the_demo_catches_up_after_a_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [FIXED_TIME]

    async def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr("console.fake.time", SimpleNamespace(time=lambda: now[0]))
    monkeypatch.setattr("console.fake.asyncio", SimpleNamespace(sleep=sleep, to_thread=asyncio.to_thread))
    fake = FakeSource(requests=20, blocks=512, gpus=2, tenants=4, interval_s=0.1)

    async def offsets() -> list[float]:
        await fake.next()
        now[0] += 0.6  # The terminal is slow to draw.
        return [(await fake.next()).at - now[0] for _ in range(10)]

    first, *_, last = asyncio.run(offsets())
    assert first < -0.3 and last == pytest.approx(0.0, abs=0.001)


def test_another_operator_of_the_demo_drains_a_model_for_a_while(
    minutes: tuple[list[Snapshot], list[ListRow]],
) -> None:
    snapshots, _ = minutes
    drained = [one for one in snapshots if one.drains]
    assert len(drained) == pytest.approx(42, abs=2)
    # The demo opens with two minutes of recorded history. The drain begins soon afterwards.
    assert 120 < drained[0].at - snapshots[0].at < 135
    model = drained[0].drains[0].model
    for one in drained:
        [drain] = one.drains
        left = [row for row in one.requests if row.model == model]
        assert drain.running + drain.queued == len(left) and (drain.state == "drained") is (not left)
        [shown] = [row for row in one.models if row.name == model]
        assert shown.state == drain.state and {replica.state for replica in shown.replicas} == {"ready"}
    states = [one.drains[0].state for one in drained]
    assert states == sorted(states, reverse=True) or states == sorted(
        states, key=["draining", "drained"].index
    )
    assert {"draining", "drained"} == set(states)
    completed = [one.drains[0].elapsed_s for one in drained if one.drains[0].state == "drained"]
    assert len(set(completed)) == 1, "the duration of a completed drain does not grow"
    # After the drain, the model serves requests again. The other models have never stopped.
    assert [row for row in snapshots[-1].requests if row.model == model]
    assert all(any(row.model != model for row in one.requests) for one in snapshots)


def test_the_demo_keeps_the_grace_period_of_a_drain_and_holds_requests() -> None:
    fake = demo()
    asyncio.run(fake.act(DrainService(grace_s=3.0, queue=True)))
    snapshots = [fake.step() for _ in range(6)]
    assert snapshots[1].state == "draining" and snapshots[-1].state == "drained"
    [drain] = snapshots[-1].drains
    assert drain.state == "drained" and drain.ended > 0 and drain.grace_left_s == 0
    assert drain.held == snapshots[-1].queue.waiting > 0
    made = ConsoleSession(fake)
    made.accept(snapshots[-1])
    text = "\n".join(plain(row) for row in made.lines(120, 40))
    assert f"{drain.held} of 2,048 waiting, {drain.held} held · 0 running" in text
    assert fake.simulation.counts["refused"] == 0
    asyncio.run(fake.act(ResumeService()))
    after = fake.step()
    assert after.state == "ready" and not after.drains and after.queue.running >= drain.held > 0


def test_operators_are_named_as_in_the_audit_chain_of_a_service() -> None:
    fake = demo()
    rows = [row for row in asyncio.run(fake.rows("audit")) if isinstance(row, ListRow)]
    silences = [row for row in asyncio.run(fake.rows("silences")) if isinstance(row, Silence)]
    assert rows and silences
    for actor in (*(one.actor for one in rows), *(one.created_by for one in silences)):
        uid, _, key = actor.removeprefix("uid:").partition(" key:")
        assert actor == Caller(int(uid), frozenset(), "", key).actor.name
