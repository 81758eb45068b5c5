"""Tests of the Alerts and Silences screens, rendered as lines without a terminal."""

from __future__ import annotations

import re
from typing import Any, get_args

import msgspec
import pytest

from appliance.actions import action_named
from appliance.protocol import Silence
from appliance.snapshot import Alert, AlertState, Snapshot
from console import units
from console.context import Context
from console.explanations import EXPLANATIONS
from console.fake import FIXED_TIME
from console.lines import Line, plain
from console.screens import panels
from console.screens.alerts import AlertsView, ListedAlert
from console.screens.silences import SilencesView
from console.session import ConsoleSession
from tests.console.frames import SIZES, context, session, unknown
from tests.core.conftest import ROOT


@pytest.fixture(scope="module")
def shown() -> ConsoleSession:
    return session()


def _alert(**values: Any) -> Alert:
    plain_alert = Alert(
        id="a",
        rule="kv-cache-full",
        severity="warning",
        state="firing",
        where="llama-1",
        description="the KV cache of llama-1 is 97% full",
    )
    return msgspec.structs.replace(plain_alert, **values)


@pytest.mark.parametrize(
    ("value", "threshold", "unit", "text"),
    [
        (0.97, 0.95, "%", "97% when raised (threshold 95%)"),
        (88_980.0, 81_000.0, "tokens", "88,980 tokens when raised (threshold 81,000 tokens)"),
        (700.0, 900.0, "s", "12 min when raised (threshold 15 min)"),
        (90.4, 88.0, "°C", "90.4 °C when raised (threshold 88 °C)"),
        (None, 0.95, "%", "-- when raised (threshold 95%)"),
        (None, None, "", None),
    ],
)
def test_the_value_of_an_alert_has_the_form_of_its_text(
    value: float | None, threshold: float | None, unit: str, text: str | None
) -> None:
    alert = _alert(value=value, threshold=threshold, unit=unit)
    rows = [
        plain(row) for row in AlertsView().describe(ListedAlert(alert, FIXED_TIME), context(unknown()), 70)
    ]
    assert [row.partition("value")[2].strip() for row in rows if row.startswith("value")] == (
        [] if text is None else [text]
    )


def _alerts() -> Snapshot:
    alerts = [
        _alert(id="a1", rule="disk-full", severity="warning", state="resolved"),
        _alert(id="a2", rule="load-shedding", severity="info"),
        _alert(id="a3", rule="replica-down", severity="critical"),
        _alert(id="a4", rule="replica-down", severity="critical", state="resolved"),
    ]
    return msgspec.structs.replace(unknown(), alerts=alerts)


def test_alerts_that_have_ended_are_below_all_others() -> None:
    view = AlertsView()
    assert [row.id for row in view.ordered(context(_alerts()))] == ["a3", "a2", "a4", "a1"]
    assert [row[0] for row in view.export(context(_alerts()))[1]][:2] == ["critical", "info"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("severity:critical", ["a3", "a4"]),
        ("critical", ["a3", "a4"]),
        ("!SEVERITY:critical state:firing", ["a2"]),
        ("rule:replica !state:resolved", ["a3"]),
    ],
)
def test_alerts_are_filtered_by_their_severity(text: str, found: list[str]) -> None:
    view = AlertsView()
    view.filter = text
    assert [row.id for row in view.ordered(context(_alerts()))] == found
    assert not view.error


def test_the_help_explains_exactly_the_states_that_an_alert_can_have() -> None:
    page = (ROOT / "docs" / "alerts.md").read_text().partition("## States")[2].partition("##")[0]
    documented = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    explained = re.findall(r"\w+(?= or \w+:|:)", EXPLANATIONS["alert_state"].text)
    assert documented == set(explained) == set(get_args(AlertState))
    assert set(get_args(AlertState)) <= set(panels.STATE_ROLES)


def test_an_action_concerns_the_selected_alerts_or_their_rules() -> None:
    view, shown = AlertsView(), context(_alerts())
    view.render(shown, 80, 24)
    assert view.targets(action_named("alerts.ack"), shown) == ["a3"]
    view.marks = {"a3", "a4", "a1"}
    assert view.targets(action_named("alerts.ack"), shown) == ["a3", "a4", "a1"]
    assert view.targets(action_named("alerts.silence"), shown) == ["replica-down", "disk-full"]
    assert not view.accepts(action_named("alerts.unsilence"))


def test_the_alerts_screen_counts_the_silences_and_leads_to_them(shown: ConsoleSession) -> None:
    shown.run("screen alerts")
    assert "1 active silence (v to show)" in plain(shown.lines(120, 40)[2])
    shown.run("variant")
    rows = [plain(row) for row in shown.lines(120, 40)]
    view = shown.view
    assert isinstance(view, SilencesView)
    [silence] = view.rows(shown.context)
    [row] = [row for row in rows if row.startswith("▸")]
    for part in (silence.rule, silence.subject, units.date(silence.until), silence.created_by):
        assert part in row
    assert view.targets(action_named("alerts.unsilence"), shown.context) == [silence.id]
    shown.run("variant")
    assert shown.view.name == "alerts"


def test_a_silence_names_the_active_alerts_that_it_matches(shown: ConsoleSession) -> None:
    silence = Silence(id="s", rule="replica-*", subject="llama-*", until=FIXED_TIME + 90, created_by="ops")
    rows = [plain(row) for row in SilencesView().describe(silence, context(_alerts()), 100)]
    # The alert a4 has ended.
    assert [row.split("silenced alerts")[1].strip() for row in rows if "silenced alerts" in row] == [
        "the KV cache of llama-1 is 97% full"
    ]
    assert any("ends in           1m30s" in row for row in rows)


@pytest.mark.parametrize("size", SIZES)
def test_the_text_of_an_alert_fits_and_names_its_subject_once(size: tuple[int, int]) -> None:
    description = "tenant research has used 90% of its daily token limit"
    snapshot = msgspec.structs.replace(
        unknown(), alerts=[_alert(where="tenant research", description=description)]
    )
    rows = [plain(row) for row in AlertsView().render(context(snapshot), *size)]
    # In a narrow terminal, the age leaves less space in the list, and the details show the whole text.
    assert any(description in row for row in (rows[:3] if size[0] > 100 else rows))
    assert any(description[:40] in row for row in rows[:3])
    assert "…" not in rows[1], "a column that is narrower than usual is not marked as cut off"
    panel = plain(panels.alert_line(snapshot.alerts[0], 120))
    assert panel == f"! {description} (firing)"
    other = msgspec.structs.replace(snapshot.alerts[0], description="its limit is nearly reached")
    assert plain(panels.alert_line(other, 120)) == "! tenant research: its limit is nearly reached (firing)"
    without = msgspec.structs.replace(other, where="")
    assert plain(panels.alert_line(without, 120)) == "! its limit is nearly reached (firing)"


@pytest.mark.parametrize("size", [*SIZES, (59, 17)])
def test_the_list_shows_how_long_an_alert_has_held_and_how_long_an_ended_one_did(
    size: tuple[int, int],
) -> None:
    at = unknown().at
    alerts = [
        _alert(id="a1", since=at - 2 * 86400 - 3 * 3600),
        _alert(id="a2", since=at - 7230, ended_at=at - 7200, state="resolved"),
        _alert(id="a3", since=None, severity="info"),
    ]
    made = session()
    made.accept(msgspec.structs.replace(unknown(), alerts=alerts))
    made.run("screen alerts")
    rows = [plain(row) for row in made.lines(*size)]
    [firing] = [row for row in rows if "warning" in row and "firing" in row]
    [ended] = [row for row in rows if "resolved" in row]
    assert " 2d03h " in firing and " 30s " in ended
    assert any("info" in row and " -- " in row for row in rows)
    view = AlertsView()
    assert units.date(at - 2 * 86400 - 3 * 3600) + ", for 2d03h" in _text(view.describe(*_described(made, 0)))
    assert ", lasted 30s" in _text(view.describe(*_described(made, 1)))


def test_alerts_are_sorted_and_filtered_by_their_age() -> None:
    at = unknown().at
    alerts = [_alert(id=f"a{age}", since=at - age) for age in (60, 7200, 300)]
    view, shown = AlertsView(), context(msgspec.structs.replace(unknown(), alerts=alerts))
    view.sort("age_s")
    assert [row.id for row in view.ordered(shown)] == ["a7200", "a300", "a60"]
    view.filter = "age>2m"
    assert [row.id for row in view.ordered(shown)] == ["a7200", "a300"]
    view.filter = "age=5m00s"
    assert [row.id for row in view.ordered(shown)] == ["a300"]


def _described(made: ConsoleSession, number: int) -> tuple[ListedAlert, Context, int]:
    return AlertsView().rows(made.context)[number], made.context, 100


def _text(lines: list[Line]) -> str:
    return "\n".join(plain(row) for row in lines)
