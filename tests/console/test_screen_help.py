"""Tests that the help of each screen explains everything that the screen shows."""

from __future__ import annotations

import re
from itertools import pairwise

import msgspec
import pytest

from appliance.history.pages import PastSnapshot
from appliance.pages import AuditAction
from appliance.protocol import DrainStatus, ScalingStatus
from appliance.protocol.registry import RegisteredModel, ShadowStatus
from appliance.snapshot import Snapshot
from console.explanations import EXPLANATIONS, FRAME
from console.fake import FIXED_TIME
from console.help import help_lines
from console.history import History
from console.keys import KEYS
from console.lines import plain
from console.list_rows import audit_row
from console.recordings import PastTimeline
from console.screens.base import View
from console.screens.requests import RequestsView
from console.screens.table import TableView
from console.session import ConsoleSession
from console.source import ListRow
from console.timeline import PastState
from tests.console.frames import SIZES, VIEW_NAMES, VIEWS, session


@pytest.mark.parametrize("view", VIEWS, ids=VIEW_NAMES)
def test_the_help_explains_every_value_of_a_screen(view: View) -> None:
    assert view.help_text
    commands = {key.command for key in KEYS}
    assert set(re.findall(r"\{(.*?)\}", view.help_text)) <= commands
    assert view.explanations
    assert not [name for name in view.explanations if name not in EXPLANATIONS]


def _with_every_value() -> ConsoleSession:
    """Return a session that also has the values that are usually absent."""
    made = session(195, interval_s=1.0)
    snapshot = made.context.snapshot
    assert snapshot is not None
    scaling = ScalingStatus(
        replicas=1, min_replicas=1, max_replicas=2, demand=0.5, expected=0.5, reason="", refusal=""
    )
    shadow = ShadowStatus(name="m", target="m@2", share=0.1)
    made.context.snapshot = msgspec.structs.replace(
        snapshot,
        requests=[msgspec.structs.replace(one, deadline_left_s=5.0) for one in snapshot.requests],
        tenants=[msgspec.structs.replace(one, exhausted_in_s=60.0) for one in snapshot.tenants],
        alerts=[
            msgspec.structs.replace(one, ended_at=FIXED_TIME, silenced_until=FIXED_TIME)
            for one in snapshot.alerts
        ],
        models=[msgspec.structs.replace(one, scaling=scaling) for one in snapshot.models],
    )
    made.context.rows["models"] = [
        msgspec.structs.replace(one, split={"m@1": 1.0}, shadows=[shadow])
        for one in made.context.rows_of("models", RegisteredModel)
    ]
    action = AuditAction(
        **dict.fromkeys(AuditAction.__struct_fields__, "2026-09-21T14:16:35+00:00")  # type: ignore[arg-type]
    )
    made.context.rows["audit"] = [
        msgspec.structs.replace(one, detail=dict.fromkeys([*audit_row(action).detail, *one.detail], "x"))
        for one in made.context.rows_of("audit", ListRow)
    ]
    return made


def shown_labels(made: ConsoleSession, view: View) -> set[str]:
    """Return the names of all values that a screen shows, in all variants, panels and details."""
    found: set[str] = set()

    def collect() -> None:
        for size in ((200, 90), (120, 40), (80, 24)):
            for row in view.render(made.context, *size):
                found.update(one.text.strip(" :") for one in row if one.role == "label")
        if isinstance(view, TableView):
            found.update(column.title for column in view.columns)

    for _ in range(max(1, len(view.variants))):
        collect()
        view.open()
        collect()
        view.back()
        view.next_variant()
    return {part.casefold() for one in found for part in one.split(", ") if part}


@pytest.mark.parametrize("name", VIEW_NAMES)
def test_the_help_explains_every_name_that_a_screen_shows(name: str) -> None:
    made = _with_every_value()
    made.run(f"screen {name}")
    view = made.view
    explained = {
        part.casefold()
        for explanation in view.explanations
        for part in EXPLANATIONS[explanation].title.split(", ")
    }
    labels = shown_labels(made, view)
    assert labels, "the test no longer finds the names of values"
    assert sorted(labels - explained) == [], "add these to the explanations of the screen"


@pytest.mark.parametrize("size", SIZES)
def test_the_help_shows_the_whole_name_of_a_value(size: tuple[int, int]) -> None:
    rows = [plain(row) for row in help_lines(RequestsView(), size[0], KEYS)]
    begin = next(number for number, row in enumerate(rows) if row.startswith("PROMPT, prompt"))
    assert rows[begin + 1].startswith("tokens  ")
    assert not any("…" in row for row in rows)


def test_every_explanation_has_a_text_and_a_source() -> None:
    assert not [
        name
        for name, explanation in EXPLANATIONS.items()
        if not explanation.text.endswith(".") or not explanation.source
    ]


_NUMBER = re.compile(r"[<+-]?[0-9][0-9,.]*(?P<suffix>%|ms|s|µs|W|°)?(?![\w-])")
"""Matches a number with its unit at the beginning of a text, but not times of day, dates or ids."""
_UNITS = {"W": "watts", "°": "°C"}
"""Maps units as shown beside numbers to the words for these units in explanations."""
_AVERAGED = re.compile(r"\b(mean|average|percentiles?|median|rates?|per second|share)\b", re.IGNORECASE)


def shown_numbers(made: ConsoleSession, view: View) -> dict[str, set[str]]:
    """Return the numbers that a screen shows, keyed by the heading of their column or by the name beside
    them."""
    found: dict[str, set[str]] = {}

    def collect() -> None:
        for size in ((200, 90), (120, 40), (80, 24)):
            for row in view.render(made.context, *size):
                for name, value in pairwise(row):
                    if name.role == "label" and _NUMBER.match(value.text.strip()):
                        found.setdefault(name.text.strip(" :").casefold(), set()).add(value.text.strip())
        if isinstance(view, TableView):
            for column in view.columns:
                for row in view.rows(made.context):
                    value, text = column.value(row), column.shown(row).strip()
                    if isinstance(value, int | float) and _NUMBER.match(text):
                        found.setdefault(column.title.casefold(), set()).add(text)

    for _ in range(max(1, len(view.variants))):
        collect()
        view.open()
        collect()
        view.back()
        view.next_variant()
    return found


def _states(explained: str, suffix: str | None) -> bool:
    """Return whether the unit of an explanation contains the unit that is shown beside a number."""
    words = re.findall(r"[^\s,]+", explained)
    return bool(words) and (suffix is None or _UNITS.get(suffix, suffix) in words or explained == "as shown")


@pytest.mark.parametrize("name", VIEW_NAMES)
def test_the_help_states_the_unit_of_every_number_on_a_screen(name: str) -> None:
    made = _with_every_value()
    made.run(f"screen {name}")
    explained: dict[str, list[str]] = {}
    for one in made.view.explanations:
        for title in EXPLANATIONS[one].title.split(", "):
            explained.setdefault(title.casefold(), []).append(EXPLANATIONS[one].unit)
    wrong = []
    for title, numbers in shown_numbers(made, made.view).items():
        for part in title.split(", "):
            for number in numbers:
                matched = _NUMBER.match(number)
                assert matched is not None
                if not any(_states(unit, matched["suffix"]) for unit in explained[part]):
                    wrong.append((part, number, explained[part]))
    assert sorted(wrong) == []


def test_the_help_states_the_window_of_every_rate_percentile_and_average() -> None:
    averaged = {
        name: one
        for name, one in EXPLANATIONS.items()
        if "/s" in one.unit or "%" in one.unit or (one.unit and _AVERAGED.search(f"{one.title} {one.text}"))
    }
    assert len(averaged) > 25
    assert not [name for name, one in averaged.items() if not one.window]


def test_the_help_explains_the_values_around_the_screen() -> None:
    made = session(132, interval_s=1.0)
    snapshot = made.context.snapshot
    assert snapshot is not None
    drain = DrainStatus(
        model=None,
        state="draining",
        grace_s=60.0,
        grace_left_s=30.0,
        queue=True,
        started_at=FIXED_TIME,
        elapsed_s=30.0,
        running=1,
        queued=1,
        held=1,
        tokens_left=9,
    )
    drains = [drain, msgspec.structs.replace(drain, state="drained")]
    made.accept(msgspec.structs.replace(snapshot, drains=drains))
    made.show_past(
        PastState(_instant(snapshot), PastTimeline(FIXED_TIME, FIXED_TIME + 60, [], [])), History()
    )
    past = [plain(row) for row in made.lines(200, 40)[:4]]
    made.leave_past()
    around = "\n".join([*past, *(plain(row) for row in made.lines(200, 40)[:4])])
    titles = {part for one in FRAME.values() for part in one.title.split(", ")}
    for name in ("up", "HISTORY", "output peak", "running", "queued", "held", "ETA", "grace left", "took"):
        assert name in around and name in titles, name
    text = "\n".join(plain(row) for row in help_lines(made.view, 120, KEYS))
    assert all(one.text[:40] in text for one in FRAME.values())


def _instant(snapshot: Snapshot) -> PastSnapshot:
    return PastSnapshot(
        at=snapshot.at,
        resolution_s=1,
        previous=None,
        next=None,
        first=snapshot.at,
        last=snapshot.at,
        details=True,
        snapshot=snapshot,
    )
