"""Tests of all screens, rendered as lines without a terminal."""

from __future__ import annotations

import re

import msgspec
import pytest

from appliance.actions import action_named
from appliance.pages import AuditAction, ChainReport, LogLine
from appliance.protocol import AuditHead, Key, Silence
from appliance.snapshot import Alert, Gpu, Rates, Snapshot
from console.context import Context
from console.fake import FIXED_TIME
from console.lines import cells, plain, width_of
from console.list_rows import audit_row
from console.screens import panels
from console.screens.base import View
from console.screens.batches import BatchesView
from console.screens.keys import KeysView
from console.screens.models import ModelsView
from console.screens.overview import OverviewView
from console.screens.requests import RequestsView
from console.screens.rows import AuditView, LogsView
from console.screens.table import TableView
from console.session import ConsoleSession
from console.source import MAX_ROWS, ListName, ListRow
from tests.console.frames import SIZES, VIEW_NAMES, VIEWS, context, session, source, unknown


@pytest.fixture(scope="module")
def shown() -> ConsoleSession:
    return session()


@pytest.mark.parametrize(
    "size", [(160, 50), (120, 40), (80, 24), (60, 18), (59, 17), (40, 10), (20, 5), (3, 2)]
)
@pytest.mark.parametrize("name", VIEW_NAMES)
def test_a_frame_fills_the_terminal_exactly(shown: ConsoleSession, name: str, size: tuple[int, int]) -> None:
    width, height = size
    shown.run(f"screen {name}")
    lines = shown.lines(width, height)
    assert len(lines) == height
    assert {sum(cells(one.text) for one in row) for row in lines} == {width}
    assert all(one.text.isprintable() for row in lines for one in row)
    assert not any("None" in plain(row) or "nan" in plain(row).split() for row in lines)


@pytest.mark.parametrize("name", VIEW_NAMES)
def test_every_variant_and_detail_of_a_screen_can_be_shown(shown: ConsoleSession, name: str) -> None:
    shown.run(f"screen {name}")
    for _ in range(max(1, len(shown.view.variants))):
        for command in ("move down", "move right", "open", "back", "help", "move down", "help"):
            shown.run(command)
            assert len(shown.lines(100, 30)) == 30
        shown.run("variant")


@pytest.mark.parametrize("view", VIEWS, ids=VIEW_NAMES)
def test_a_screen_of_a_service_that_has_measured_nothing_shows_no_zeros(view: View) -> None:
    lines = [plain(row) for row in view.render(context(unknown()), 120, 40)]
    assert lines
    measured = [row for row in lines if row.startswith(("TTFT", "ITL", "output ", "prompt ", "cpu "))]
    assert all("--" in row and "0" not in row for row in measured), measured


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("name", VIEW_NAMES)
def test_the_footer_always_shows_how_to_get_help_quit_and_type_a_command(
    name: str, size: tuple[int, int], write: bool
) -> None:
    made = session(write=write)
    made.run(f"screen {name}")
    for _ in range(max(1, len(made.view.variants))):
        footer = plain(made.lines(*size)[-1])
        assert "? help" in footer and "q quit" in footer and ": command" in footer
        assert ("a actions" in footer) is write
        if made.view.variants:
            made.run("variant")


def test_the_cursor_stays_on_its_request_when_the_order_changes(shown: ConsoleSession) -> None:
    shown.run("screen requests")
    view = shown.view
    assert isinstance(view, RequestsView)
    shown.lines(120, 40)
    shown.run("move down")
    chosen = view.cursor
    view.next_sort(1)
    shown.lines(120, 40)
    assert view.cursor == chosen
    assert view.selected(shown.context) == [chosen]


def test_a_replica_whose_steps_fill_the_second_is_100_percent_busy() -> None:
    """The steps that end in a second can have taken longer than the second. The shares of these steps add up
    to almost 1."""
    view, shown = BatchesView(), Context(snapshot=source(interval_s=0.5).step())
    assert shown.snapshot is not None
    full = {"mixed_steps": 1, "mixed_step_ms": 14.3, "decode_steps": 43, "step_ms": 11.3, "span_s": 0.5}
    shown.snapshot.batches = [msgspec.structs.replace(shown.snapshot.batches[0], **full)]
    shown.history.add(shown.snapshot)
    assert plain(view.render(shown, 120, 40)[1]).endswith("busy 100% ─")


@pytest.mark.parametrize("width", [120, 80])
def test_the_cursor_on_batches_stays_on_its_stall_while_data_arrives(width: int) -> None:
    fake, view, shown = source(interval_s=0.5), BatchesView(), Context()

    def advance(seconds: int) -> list[str]:
        for _ in range(2 * seconds):
            shown.snapshot = fake.step()
            shown.history.add(shown.snapshot)
        return [plain(row) for row in view.render(shown, width, 40)]

    advance(30)
    second = next(
        int(stall.at)
        for stall in reversed(shown.snapshot.stalls if shown.snapshot else ())
        if stall.replica == next(iter(shown.history.batches)) and stall.request
    )
    view.sideways(second - int(next(iter(shown.history.batches.values()))[-1].at))
    view.render(shown, width, 40)
    request, distance = view.request(shown), view.cursor
    for seconds in range(1, 6):
        rows = advance(1)
        assert (view.request(shown), view.cursor) == (request, distance + seconds)
        assert any(request in row for row in rows)
    # When another replica is selected, the cursor stays at the same second until it reaches the edge of the
    # chart.
    view.move(1)
    view.render(shown, width, 40)
    assert view.cursor == distance + 5
    advance(width)
    assert view.cursor == width - 7
    # At the newest column, the cursor follows the data again.
    view.sideways(width)
    advance(3)
    assert view.cursor == 0


def test_a_filter_hides_rows_and_an_invalid_filter_says_why(shown: ConsoleSession) -> None:
    shown.run("screen requests")
    view = shown.view
    assert isinstance(view, RequestsView)
    shown.run("filter tenant:mobile")
    shown.lines(120, 40)
    rows = view.ordered(shown.context)
    assert 0 < len(rows) < len(view.rows(shown.context))
    assert {row.tenant for row in rows} == {"mobile"}
    view.filter = "size>3"
    assert any("unknown column 'size'" in plain(row) for row in shown.lines(120, 40))
    shown.run("back")
    assert view.filter == ""


_VALUE = re.compile(r"[0-9][0-9.,]*[0-9a-zA-Zµ°%]*|(\d{4}-)?(\d\d-\d\d )?\d\d:\d\d:\d\d")
"""Matches a number with its unit, and a time."""


@pytest.mark.parametrize("name", VIEW_NAMES)
def test_a_filter_takes_the_value_that_a_cell_shows(shown: ConsoleSession, name: str) -> None:
    shown.run(f"screen {name}")
    view = shown.view
    if not isinstance(view, TableView):
        return
    for column in view.columns:
        cells = [column.shown(row).strip() for row in view.rows(shown.context)]
        for cell in {cell for cell in cells if _VALUE.fullmatch(cell)}:
            if isinstance(next(column.value(row) for row in view.rows(shown.context)), int | float):
                view.filter = f"{column.names[0]}>{cell}"
                view.ordered(shown.context)
                assert not view.error, view.error
    view.filter = ""


def test_marked_rows_are_the_targets_of_actions(shown: ConsoleSession) -> None:
    shown.run("screen requests")
    view = shown.view
    assert isinstance(view, RequestsView)
    shown.lines(120, 40)
    shown.run("mark")
    shown.run("mark")
    assert len(view.selected(shown.context)) == 2
    assert len(shown.copied().splitlines()) == 3
    shown.run("back")
    assert not view.marks


def test_the_queue_distinguishes_no_wait_from_an_unknown_wait(shown: ConsoleSession) -> None:
    snapshot = shown.context.snapshot
    assert snapshot is not None
    one = snapshot.queue.classes[0]
    for expected, text in ((0.0, "0.0s"), (None, "--"), (12.0, "12s")):
        known = msgspec.structs.replace(one, expected_wait_s=expected)
        changed = msgspec.structs.replace(
            snapshot, queue=msgspec.structs.replace(snapshot.queue, classes=[known])
        )
        rows = [plain(row) for row in panels.queue(shown.context, changed, 60)]
        assert [row.split()[3] for row in rows if row.startswith("P0")] == [text]


def test_a_small_terminal_gets_one_line_per_fact(shown: ConsoleSession) -> None:
    shown.run("screen overview")
    lines = [plain(row) for row in shown.lines(50, 16)]
    assert any(row.startswith("output tokens/s") for row in lines)
    assert any(row.startswith("TTFT") for row in lines)


def test_a_table_in_a_small_terminal_has_a_cursor_a_filter_and_details() -> None:
    made = session()
    made.run("screen requests")
    for _ in range(20):
        made.lines(50, 16)
        made.run("move down")
    view = made.view
    assert isinstance(view, RequestsView)
    rows = [plain(row) for row in made.lines(50, 16)]
    chosen = view.ordered(made.context)[20]
    [at] = [row for row in rows if row.startswith("▸")]
    assert at.startswith(f"▸{chosen.request_id}  D decode {chosen.class_name} {chosen.tenant} age ")
    made.run("filter tenant:nobody")
    assert [plain(row) for row in made.lines(50, 16)][2:4] == [
        "requests  no rows match the filter",
        "/tenant:nobody  (esc to clear)",
    ]
    made.run("back")
    made.lines(50, 16)
    made.run("open")
    assert view.detail == chosen.request_id
    assert any(plain(row).startswith("tenant ") for row in made.lines(50, 16))


@pytest.mark.parametrize("size", [(59, 17), (40, 12), (24, 8)])
@pytest.mark.parametrize("name", VIEW_NAMES)
def test_a_small_terminal_shows_the_title_of_the_screen(
    shown: ConsoleSession, name: str, size: tuple[int, int]
) -> None:
    shown.run(f"screen {name}")
    tabs = shown.lines(*size)[1]
    assert [one.text for one in tabs if one.role == "tab"] == [f"{shown.view.key} {shown.view.short}"]


def test_a_model_in_a_small_terminal_names_its_state_once() -> None:
    facts = {name: value for name, value, _ in ModelsView().facts(session().context)}
    assert facts["llama-3.3-70b"].startswith("ready replicas 1/1 queued ")


def overview_facts(snapshot: Snapshot) -> dict[str, str]:
    return {name: value for name, value, _ in OverviewView().facts(context(snapshot))}


def test_a_small_terminal_shows_the_window_of_percentiles(shown: ConsoleSession) -> None:
    snapshot = shown.context.snapshot
    assert snapshot is not None and snapshot.latency.ttft is not None
    ttft = msgspec.structs.replace(snapshot.latency.ttft, p50_ms=40.0, p99_ms=1200.0, window_s=60.0)
    latency = msgspec.structs.replace(snapshot.latency, ttft=ttft, itl=None)
    facts = overview_facts(msgspec.structs.replace(snapshot, latency=latency))
    assert facts["TTFT"] == "p50 40.0ms  p99 1.20s (1m00s)"
    assert facts["ITL"] == "p50 --  p99 --"


@pytest.mark.parametrize(
    ("rates", "failed", "refused"),
    [
        (Rates(requests_per_s=8.0, failed_per_s=0.2, refused_per_s=2.5), "0.2/s (2.5%)", "2.5/s"),
        (Rates(requests_per_s=8.0, failed_per_s=0.0, refused_per_s=0.0), "0/s (0.0%)", "0/s"),
        (Rates(requests_per_s=2000.0, failed_per_s=0.1, refused_per_s=0.0), "0.1/s (<0.1%)", "0/s"),
        (Rates(requests_per_s=0.0, failed_per_s=0.0, refused_per_s=0.0), "0/s (--)", "0/s"),
        (Rates(), "--/s (--)", "--/s"),
    ],
)
def test_the_overview_shows_the_rate_and_the_share_of_errors(
    shown: ConsoleSession, rates: Rates, failed: str, refused: str
) -> None:
    snapshot = shown.context.snapshot
    assert snapshot is not None
    changed = msgspec.structs.replace(snapshot, rates=rates)
    assert overview_facts(changed)["errors"] == f"failed {failed}  refused {refused}"
    for width, height in SIZES:
        rows = [plain(row) for row in OverviewView().render(context(changed), width, height)]
        [row] = [row for row in rows if row.startswith("errors")]
        assert row.startswith(
            f"errors  failed {failed if width > 100 else failed.split()[0]}  refused {refused}"
        )


EXPIRING = Key(id="key_1", name="k", tenant="t", prefix="sk", created_at=0.0, expires_at=FIXED_TIME)


def test_actions_apply_to_the_selected_keys_or_mappings(shown: ConsoleSession) -> None:
    view = KeysView()
    view.render(shown.context, 120, 40)
    [key, *_] = [row for row in view.ordered(shown.context) if isinstance(row.caller, Key)]
    view.marks = {key.id, "uid:1004"}
    view.render(shown.context, 120, 40)
    assert view.targets(action_named("keys.revoke"), shown.context) == [key.id]
    assert view.targets(action_named("peers.unmap"), shown.context) == ["uid:1004"]
    assert not view.accepts(action_named("models.load"))
    assert key.state == "valid" and key._replace(caller=EXPIRING).state == "expired"


def test_every_column_is_filtered_and_sorted_by_its_heading() -> None:
    made = session()
    checked = 0
    for name in VIEW_NAMES:
        made.run(f"screen {name}")
        view = made.view
        if not isinstance(view, TableView):
            continue
        for _ in view.variants or ("",):
            for column in view.columns:
                heading = column.names[0]
                assert not [one.name for one in view.columns if heading in one.names and one is not column]
                made.run(f"filter {heading}:a")
                view.ordered(made.context)
                assert not view.error
                made.run(f"sort {heading.upper()}")
                assert view.sorted_by == column.name
                checked += 1
            made.run("filter none")
            view.next_variant()
    assert checked > 90


@pytest.mark.parametrize(
    ("name", "kind", "computed"),
    [
        ("alerts", Alert, {"age_s"}),
        ("silences", Silence, set()),
        ("keys", Key, {"state"}),
        ("gpus", Gpu, {"nvlink", "ecc"}),
        ("audit", AuditAction, {"target"}),
        ("logs", LogLine, set()),
    ],
)
def test_a_column_has_the_name_of_the_field_that_it_shows(
    name: str, kind: type[msgspec.Struct], computed: set[str]
) -> None:
    view = next(view for view in VIEWS if view.name == name)
    assert isinstance(view, TableView)
    assert {column.name for column in view.columns} - set(kind.__struct_fields__) == computed


@pytest.mark.parametrize("name", ["audit", "finished", "logs"])
def test_a_list_that_is_cut_off_says_so(name: str) -> None:
    made = session()
    made.run(f"screen {name}")
    view = made.view
    assert isinstance(view, TableView)
    row = view.rows(made.context)[0]
    replaced = {"finished": "request_id"}.get(name, "id")
    for count, counted in ((MAX_ROWS - 1, " 499"), (MAX_ROWS, ", newest 500")):
        rows = [msgspec.structs.replace(row, **{replaced: str(number)}) for number in range(count)]
        made.context.rows[name] = rows  # type: ignore[index]
        assert plain(view.render(made.context, 120, 40)[0]).startswith(f"─ {view.title}{counted} ")
    made.run("filter none-of-them")
    assert plain(view.render(made.context, 120, 40)[0]).startswith(f"─ {view.title} 0 of the newest 500 ")


@pytest.mark.parametrize("size", [*SIZES, (60, 10)])
@pytest.mark.parametrize(
    ("name", "listed", "contents"),
    [
        ("audit", "audit", "audit"),
        ("models", "models", "versions"),
        ("keys", "callers", "keys and local users"),
    ],
)
def test_a_list_that_could_not_be_read_again_is_marked(
    name: str, listed: ListName, contents: str, size: tuple[int, int]
) -> None:
    made = session()
    made._received = None  # The frame does not show the age of the snapshot.
    made.run(f"screen {name}")
    rows = made.context.rows[listed]

    def text() -> str:
        return "\n".join(plain(row) for row in made.lines(*size))

    before = text()
    for command in ("move first", "open"):
        made.run(command)
        made.take_rows(listed, [], "timed out")
        assert f"! {contents} not updated: timed out" in text()
        assert made.context.rows[listed] is rows
        made.take_rows(listed, rows)
        assert "not updated" not in text()
    made.run("back")
    assert text() == before


def test_another_variant_of_the_logs_begins_at_its_first_row() -> None:
    made = session()
    made.run("screen logs")
    assert isinstance(made.view, LogsView)
    for _ in made.view.variants:
        made.lines(80, 24)
        made.run("move first")
        made.run("move down")
        made.run("variant")
        made.lines(80, 24)
        first = made.view.ordered(made.context)[0]
        assert made.view.cursor == first.id and made.view.scroll == 0


def test_the_cursor_reaches_every_action_that_waits_in_the_spool() -> None:
    made = session()
    known = made.context.rows_of("audit", ListRow)
    spooled = [
        audit_row(
            AuditAction(
                seq=None,
                result_seq=None,
                at=f"2026-11-27T09:00:0{second}+00:00",
                ended_at=None,
                actor="uid:0",
                host=None,
                action="tenants.set",
                params={"name": "acme"},
                result=None,
                before=None,
                after=None,
                note=None,
            )
        )
        for second in (2, 1)
    ]
    made.context.rows["audit"] = [*spooled, *known]
    made.run("screen audit")
    made.lines(120, 40)
    made.run("move first")
    reached = []
    for _ in range(4):
        made.lines(120, 40)
        assert isinstance(made.view, AuditView)
        reached.append(made.view.cursor)
        made.run("move down")
    assert reached == [*(row.id for row in spooled), *(row.id for row in known[:2])]


def test_the_details_of_an_action_show_its_whole_change() -> None:
    made = session()
    made.run("screen audit")
    row = msgspec.structs.replace(made.context.rows_of("audit", ListRow)[0], detail={"after": "x" * 300})
    lines = AuditView().describe(row, made.context, 80)
    assert all(width_of(one) <= 80 for one in lines)
    assert sum(plain(one).count("x" * 64) for one in lines) == 4 and plain(lines[-1]).endswith("x" * 44)


def test_the_audit_heading_distinguishes_actions_from_rows_of_the_chain() -> None:
    made = session()
    made.run("screen audit")
    assert made.context.snapshot is not None
    actions, rows = len(made.context.rows["audit"]), made.context.snapshot.audit_rows
    heading = next(text for row in made.lines(120, 40) if (text := plain(row)).startswith("─ Audit"))
    assert heading.startswith(f"─ Audit {actions} ") and f" chain: {rows} rows, " in heading


def test_the_audit_screen_names_the_first_wrong_row_and_limits_further_problems() -> None:
    made = session()
    made.run("screen audit")
    before = len(made.lines(120, 40))
    problems = ["row 7: rewritten: its hash does not match its content", *(f"head {n}" for n in range(6))]
    made.context.chain = ChainReport(
        at=FIXED_TIME,
        path="/state/control.db",
        ok=False,
        rows=6,
        head=AuditHead(seq=6, hash="0" * 64),
        broken_seq=7,
        problems=problems,
        notes=["2 entries are waiting"],
        heads=3,
        journal_heads=0,
        journal_missing=None,
        confirmed_seq=6,
        spooled=2,
    )
    lines = [plain(row).strip() for row in made.lines(120, 40)]
    assert len(lines) == before
    at = next(number for number, text in enumerate(lines) if "BROKEN" in text)
    assert lines[at].startswith("chain BROKEN at row 7, found at ")
    assert lines[at].endswith(": rewritten: its hash does not match its content")
    assert lines[at + 1 : at + 6] == [
        *("head 0", "head 1", "head 2", "and 3 more problems", "2 entries are waiting")
    ]
    assert made.view.facts(made.context)[0][:2] == ("chain", lines[at])
