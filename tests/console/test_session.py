"""Tests of the operator's session: badges, commands, export and the command line's grammar."""

from __future__ import annotations

import copy
import csv
import io
import json
from types import SimpleNamespace

import msgspec
import pytest
import typer

from appliance.actions.parameters import (
    AddModel,
    CancelRequest,
    DrainService,
    LoadModel,
    SetTenant,
    SuspendTenant,
)
from appliance.cli.app import app
from appliance.events.frames import let_pass
from appliance.events.values import SnapshotValue
from console import units
from console.commands import completions, described, flags, listed, parse_action
from console.context import Compared, Context
from console.keys import KEYS, offered
from console.lines import plain
from console.parameters import CommandError, build
from console.screens.base import View
from console.screens.compare import CompareView, Difference
from console.screens.overview import OverviewView
from console.screens.registry import all_views, alternate_views
from console.session import ConsoleSession
from console.simulated import SimDrain
from tests.console.frames import SIZES, session, source
from tests.snapshots import empty_snapshot


def header(shown: ConsoleSession) -> str:
    return plain(shown.lines(120, 40)[0])


def test_a_service_that_does_not_answer_leaves_the_last_values_marked_as_stale(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr("console.session.time", SimpleNamespace(monotonic=lambda: now[0]))
    shown = session(steps=5)
    assert "STALE" not in header(shown)
    now[0] += 60.0
    reason = "no service is running at /run/appliance/admin.sock: start a service with: appliance serve"
    shown.fail(reason)
    assert "STALE 1m00s" in header(shown)
    for width, height in ((120, 40), (80, 24)):
        lines = [plain(row) for row in shown.lines(width, height)]
        assert reason in " ".join(row.strip() for row in lines)
        assert any(row.startswith("output") for row in lines)


def test_a_restarted_service_is_marked() -> None:
    shown = session(steps=2)
    assert "RESTARTED" not in header(shown)
    fake = shown.source
    again = fake.step()  # type: ignore[attr-defined]
    again.started_at = again.at - 1.0
    shown.accept(again)
    assert "RESTARTED" in header(shown)


def test_charts_continue_after_the_services_clock_was_set_back() -> None:
    shown = session(steps=5)
    later = shown.source.step()  # type: ignore[attr-defined]
    later.at -= 3600.0
    shown.accept(later)
    assert [point.at for point in shown.context.history.points] == [later.at]


def test_a_paused_console_shows_the_same_values_until_it_continues() -> None:
    shown = session(steps=3)
    frozen, before = copy.deepcopy(shown.context.snapshot), copy.deepcopy(shown.context.snapshot)
    assert before is not None and before.requests
    shown.context.snapshot = before
    shown.run("pause")
    # The event stream changes the requests of the previous snapshot in place.
    for one in before.requests:
        let_pass(one, 30.0)
        one.generated_tokens = 99_999
    shown.accept(shown.source.step())  # type: ignore[attr-defined]
    assert shown.context.snapshot == frozen
    assert "PAUSED" in header(shown)
    shown.run("pause")
    assert shown.context.snapshot != frozen


def test_a_drain_is_a_banner_on_every_screen() -> None:
    fake = source()
    shown = ConsoleSession(fake)
    fake.simulation.drains[None] = SimDrain(since=fake.simulation.now)
    shown.accept(fake.step())
    for key in "1234567890":
        shown.run(f"screen {key}")
        banner = plain(shown.lines(80, 24)[2])
        assert banner.startswith(" SERVICE DRAIN")
        assert "grace left" in banner


def test_the_banner_of_an_announced_drain_says_that_requests_are_still_accepted() -> None:
    fake = source()
    shown = ConsoleSession(fake)
    fake.simulation.drains[None] = SimDrain(since=fake.simulation.now)
    snapshot = fake.step()
    snapshot.drains = [msgspec.structs.replace(one, state="announced") for one in snapshot.drains]
    shown.accept(snapshot)
    banner = plain(shown.lines(160, 24)[2])
    assert banner.startswith(" SERVICE DRAIN ANNOUNCED: ")
    assert "new requests are still accepted" in banner and "refused" not in banner


def test_tables_export_as_csv_and_json() -> None:
    shown = session(steps=2)
    shown.run("screen tenants")
    rows = list(csv.DictReader(io.StringIO(shown.export("csv"))))
    objects = json.loads(shown.export("json"))
    assert len(rows) == len(objects) == 8
    assert rows[0]["name"] == objects[0]["name"]
    with pytest.raises(ValueError, match="use csv or json"):
        shown.export("xml")


def exported(shown: ConsoleSession) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(shown.export("csv"))))


@pytest.mark.parametrize("view", [*all_views(), *alternate_views()], ids=lambda view: view.name)
def test_every_screen_exports_its_table(view: View) -> None:
    shown = session(steps=60, interval_s=1.0)
    shown.run(f"screen {view.name}")
    assert exported(shown)


def test_batches_exports_all_stalls() -> None:
    shown = session(steps=60, interval_s=1.0)
    shown.run("screen batches")
    snapshot = shown.context.snapshot
    assert snapshot is not None and snapshot.stalls
    rows = exported(shown)
    assert len(rows) == len(snapshot.stalls)
    assert (rows[0]["request"], float(rows[0]["ms"])) == (snapshot.stalls[-1].request, snapshot.stalls[-1].ms)


def test_the_kv_screen_exports_the_contexts_of_its_replica_or_all_replicas() -> None:
    shown = session(steps=60, interval_s=1.0)
    shown.run("screen kv")
    snapshot = shown.context.snapshot
    assert snapshot is not None
    rows = exported(shown)
    replica = snapshot.kv[0].replica
    assert {row["replica"] for row in rows} == {replica}
    assert {row["request_id"] for row in rows} == {
        one.request_id for one in snapshot.requests if one.replica == replica
    }
    lengths = [int(row["prompt_tokens"]) + int(row["generated_tokens"]) for row in rows]
    assert lengths == sorted(lengths, reverse=True)
    while shown.view.variant != "replicas":
        shown.run("variant")
    assert [row["replica"] for row in exported(shown)] == [one.replica for one in snapshot.kv]


def test_the_overview_exports_the_chosen_panel_or_the_other_values() -> None:
    shown = session(steps=60, interval_s=1.0)
    snapshot = shown.context.snapshot
    assert snapshot is not None
    shown.lines(120, 40)
    metrics = {row["metric"]: row["value"] for row in exported(shown)}
    assert metrics["rates.failed_per_s"] == str(snapshot.rates.failed_per_s)
    assert metrics["latency.ttft.p99_ms"] == str(snapshot.latency.ttft.p99_ms)  # type: ignore[union-attr]
    view = shown.view
    assert isinstance(view, OverviewView)
    view.chosen = "gpus"
    assert [int(row["number"]) for row in exported(shown)] == [gpu.number for gpu in snapshot.gpus]


def test_back_returns_to_the_previous_screen() -> None:
    shown = session(steps=1)
    for command in ("screen 4", "screen 7", "screen back"):
        shown.run(command)
    assert shown.view.name == "requests"
    shown.run("screen forward")
    assert shown.view.name == "tenants"


@pytest.mark.parametrize(
    ("screen", "command", "message"),
    [
        ("kv", "jump", "KV cache has no rows or panels to jump to"),
        ("kv", "sort next", "KV cache has no rows to sort"),
        ("overview", "mark", "Overview has no rows to mark"),
        ("gpus", "variant", "GPUs has only one view"),
        ("compare", "zoom", "Compare has only one panel"),
    ],
)
def test_a_key_without_effect_on_a_screen_shows_a_message(screen: str, command: str, message: str) -> None:
    shown = session(steps=1)
    shown.run(f"screen {screen}")
    shown.run(command)
    assert shown.state.message == message
    assert not shown.context.jumping


def test_every_command_of_the_key_table_is_known() -> None:
    app_commands = {
        "command",
        "palette",
        "redraw",
        "quit",
        "filter",
        "copy",
        "actions",
        "act",
        "verify",
        *("time", "compare", "incident", "live"),
    }
    shown = session(steps=1)
    for key in KEYS:
        if key.command.split()[0] not in app_commands:
            assert shown.run(key.command), key.command


def test_no_key_is_bound_twice() -> None:
    keys = [one for key in KEYS for one in key.keys]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("drain --grace 60s --queue", DrainService(grace_s=60.0, queue=True)),
        ("drain --model demo", DrainService(model="demo")),
        ("requests cancel req-1", CancelRequest(request_id="req-1")),
        ("tenants suspend acme --cancel", SuspendTenant(name="acme", cancel=True)),
        ("models add llama=/srv/llama", AddModel(name="llama", folder="/srv/llama")),
        ("models load llama", LoadModel(model="llama")),
    ],
)
def test_the_command_line_has_the_grammar_of_the_cli(text: str, expected: msgspec.Struct) -> None:
    found = parse_action(text)
    assert found is not None
    assert build(*found) == expected


def test_a_limit_can_be_set_and_removed() -> None:
    found = parse_action(
        "tenants set acme --tokens-per-minute 5000 --requests-per-minute none --highest-class P2"
    )
    assert found is not None
    built = build(*found)
    assert isinstance(built, SetTenant)
    assert (built.tokens_per_minute, built.requests_per_minute) == (5000.0, None)  # type: ignore[attr-defined]
    assert built.highest_class == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "text", ["drain --wrong 1", "drain --grace", "tenants set a b", "requests cancel 'x"]
)
def test_a_wrong_command_is_refused_with_a_reason(text: str) -> None:
    with pytest.raises(CommandError, match=r"option|value|unexpected|quotation"):
        parse_action(text)


def test_completion_offers_screens_actions_and_targets() -> None:
    assert "overview" in completions("ov", {})
    assert "requests cancel" in completions("requests c", {})
    targets = {
        "tenant": {"acme": "", "beta": ""},
        "alert": {"a1": "m is down", "a2": "m is slow"},
        "rule": {"replica-down": ""},
        "silence": {"s1": "disk-* on *"},
        "key": {"key_1": "search"},
    }
    assert "tenants suspend acme" in completions("tenants suspend a", targets)
    assert completions("alerts ack a", targets) == ["alerts ack a1", "alerts ack a2"]
    assert completions("alerts silence r", targets) == ["alerts silence replica-down"]
    assert completions("alerts unsilence s", targets) == ["alerts unsilence s1"]
    assert completions("keys revoke k", targets) == ["keys revoke key_1"]
    found = completions("alerts ack a", targets)
    assert described(found, targets) == ["a1 (m is down)", "a2 (m is slow)"]


def test_possible_completions_are_whole_commands_as_far_as_they_differ() -> None:
    found = completions("k", {})
    assert described(found, {}) == found
    assert {"kv", "keys", "keys create", "keys set"} <= set(found)
    assert all(one.startswith("k") for one in found)
    found = completions("keys ", {})
    assert "create" in described(found, {}) and len(set(described(found, {}))) == len(found)
    found = completions("drain --", {"model": {"m": ""}})
    assert {"--model m", "--model", "--grace"} <= set(described(found, {}))


def test_possible_completions_that_do_not_fit_are_counted() -> None:
    assert listed(["ab", "cd", "ef"], 10) == "ab  cd  ef"
    assert listed(["ab", "cd", "ef"], 9) == "3 possible completions"
    numbered = [f"c{number}" for number in range(30)]
    assert listed(numbered, 23) == "c0  c1  c2  and 27 more"
    assert listed(numbered, 22) == "c0  c1  and 28 more"


def test_the_equivalent_command_of_every_action_exists_in_the_cli() -> None:
    root = typer.main.get_command(app)
    missing = []
    for action in offered():
        command = root
        for word in action.name.split("."):
            command = getattr(command, "commands", {}).get(word, command)
        known = {option for parameter in command.params for option in parameter.opts}
        given = set(flags(action))
        missing += [f"{action.name} {flag}" for flag in sorted(given - known)]
    assert not missing


def test_a_comparison_shows_every_value_of_both_times() -> None:
    shown = session(steps=3)
    instant = shown.shown_instant()
    assert instant is not None
    shown.pin(instant)
    shown.accept(shown.source.step())  # type: ignore[attr-defined]
    shown.run("screen compare")
    shown.run("variant")
    _, rows = shown.view.export(shown.context)
    assert all(isinstance(one, str | int | float | None) for row in rows for one in row)
    assert any(row[0].endswith(".returned_seqs[0]") for row in rows)
    text = "\n".join(plain(row) for row in shown.lines(120, len(rows) + 20))
    assert all(row[0][:30] in text for row in rows)


def test_a_comparison_does_not_confuse_snapshots_that_have_the_same_id_one_after_another() -> None:
    view, context = CompareView(), Context(compared=Compared(empty_snapshot(1.0), 1))
    for at in range(2, 50):
        context.snapshot = None  # Python may then give the next object the same id.
        context.snapshot = empty_snapshot(at)
        assert [row.second for row in view.rows(context) if row.name == "started_at"] == [at - 1]


def test_a_comparison_shows_times_as_dates_and_their_difference_as_a_duration() -> None:
    shown = session(steps=3)
    instant = shown.shown_instant()
    assert instant is not None
    shown.pin(instant)
    later = shown.source.step()  # type: ignore[attr-defined]
    later.started_at = instant.snapshot.started_at + 90.0
    shown.accept(later)
    shown.run("screen compare")
    row = next(one for one in shown.view.rows(shown.context) if one.name == "started_at")  # type: ignore[attr-defined]
    cells = [column.shown(row) for column in CompareView.columns]
    before, after = (units.short_date(one.started_at) for one in (instant.snapshot, later))
    assert cells == ["started_at", before, after, "+1m30s", "--"]
    described = "\n".join(plain(line) for line in CompareView().describe(row, shown.context, 80))
    assert units.date(later.started_at) in described


@pytest.mark.parametrize(
    ("name", "first", "second", "cells"),
    [
        ("latency.ttft.p99_ms", 719.5, 725.79, ["719.5 ms", "725.8 ms", "+6.29 ms", "+0.9%"]),
        ("rates.requests_per_s", 6.1, 6.2, ["6.10/s", "6.20/s", "+0.1000/s", "+1.6%"]),
        ("gpus[0].power_w", 600.0, 540, ["600.0 W", "540 W", "-60.00 W", "-10%"]),
        ("gpus[0].kv_bytes", 2 << 30, 1 << 30, ["2.0G", "1.0G", "-1.0G", "-50%"]),
        ("gpus[0].nvlink_tx_bytes_per_s", 2e9, 3e9, ["1.9G/s", "2.8G/s", "+954M/s", "+50%"]),
        ("kv[a].hit_rate", 0.25, 0.3, ["25.0%", "30.0%", "+5.0 points", "+20%"]),
        ("batches[a].idle_us", 6.5, 6.25, ["6.50 µs", "6.25 µs", "-0.2500 µs", "-3.8%"]),
        ("totals.ended", 311, 403, ["311", "403", "+92", "+30%"]),
        ("queue.oldest_wait_s", None, 1.5, ["--", "1.50 s", "--", "--"]),
    ],
)
def test_a_comparison_shows_values_and_differences_with_units(
    name: str, first: SnapshotValue, second: SnapshotValue, cells: list[str]
) -> None:
    row = Difference(name, first, second)
    assert [column.shown(row) for column in CompareView.columns[1:]] == cells


@pytest.mark.parametrize(("width", "titles"), [(120, 5), (80, 4), (60, 3)])
def test_a_comparison_shows_the_difference_also_in_narrow_terminals(width: int, titles: int) -> None:
    shown = session(steps=3)
    instant = shown.shown_instant()
    assert instant is not None
    shown.pin(instant)
    shown.accept(shown.source.step())  # type: ignore[attr-defined]
    shown.run("screen compare")
    text = [plain(row) for row in shown.lines(width, 24)]
    [heading] = [row.split() for row in text if "METRIC" in row]
    assert heading == ["METRIC", "FIRST", "SECOND", "DIFFERENCE", "CHANGE"][:titles]


@pytest.mark.parametrize("size", [*SIZES, (59, 17)])
def test_a_long_message_is_shown_in_full(size: tuple[int, int]) -> None:
    shown = session(steps=3)
    message = "nothing was recorded at 14:03, because the service was not running then, or it was removed"
    shown.say(message, "warn")
    rows = [plain(row).strip() for row in shown.lines(*size)]
    assert len(rows) == size[1]
    assert " ".join(rows).endswith(message)
    shown.say("short")
    assert plain(shown.lines(*size)[-1]).rstrip() == " short"
