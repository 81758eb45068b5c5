"""Tests of `appliance requests` with real databases."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from appliance.cli.output import Layout, cells, printable, shorten
from appliance.cli.request_sources import FileLog, named
from appliance.cli.requests import _COLUMNS, _MIN_CELLS, _cells, unseen
from appliance.pages import RequestLogQuery
from appliance.protocol import Contents
from appliance.rundir import RunDirLock
from store.requests import RequestReader
from store.structs import KeptText
from tests.cli.conftest import History, Run, a_row
from tests.cli.servers import AdminService

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def filled(history: History, tmp_path: Path) -> Path:
    """Return a state directory with a request log that is open for writing. The log contains four finished
    requests and one open request."""
    log, now = history.log, time.time()
    log.end(a_row("req-old", created_at=now - 7200, finished_at=now - 7199, tenant="acme"))
    log.end(
        a_row("req-bad", created_at=now - 60, status=503, finish_reason="error", error="the server is full")
    )
    log.end(a_row("req-other", created_at=now - 50, model="other"))
    log.end(a_row("req-last", created_at=now - 40))
    log.open(a_row("req-open", created_at=now - 30, finished_at=None, status=None, finish_reason=None))
    history.flush()
    return tmp_path


def ids(out: str) -> list[str]:
    return [row["request_id"] for row in json.loads(out)]


def test_rows_are_printed_as_a_json_list_with_the_newest_last(cli: Run, filled: Path) -> None:
    out = cli("requests", "--state-dir", filled, "--json").out
    assert ids(out) == ["req-old", "req-bad", "req-other", "req-last", "req-open"]
    row = json.loads(out)[3]
    assert (row["status"], row["finish_reason"], row["class"], row["state"]) == (200, "stop", "P1", "ended")


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        (("--limit", 2), ["req-last", "req-open"]),
        (("--tenant", "acme"), ["req-old"]),
        (("--model", "other"), ["req-other"]),
        (("--status", 503), ["req-bad"]),
        (("--status", "open"), ["req-open"]),
        (("--status", "ended", "--limit", 1), ["req-last"]),
        (("--failed",), ["req-bad"]),
        (("--since", "1h", "--tenant", "acme"), []),
        (("--since", "3h", "--tenant", "acme"), ["req-old"]),
        (("--id", "req-other"), ["req-other"]),
    ],
)
def test_filters_narrow_the_list(cli: Run, filled: Path, flags: tuple[object, ...], found: list[str]) -> None:
    assert ids(cli("requests", "--state-dir", filled, "--json", *flags).out) == found


def test_without_the_json_option_the_command_prints_a_table(cli: Run, filled: Path) -> None:
    lines = cli("requests", "--state-dir", filled).out.splitlines()
    assert lines[0].split()[:2] == ["TIME", "REQUEST"]
    assert "503" in lines[2] and lines[2].endswith("the server is full")
    assert " open " in lines[5]


def test_one_request_is_shown_with_every_field(cli: Run, filled: Path) -> None:
    out = cli("requests", "--state-dir", filled, "--id", "req-bad").out
    fields = dict(line.split(maxsplit=1) for line in out.splitlines() if " " in line)
    assert fields["error"] == "the server is full" and fields["prompt_tokens"] == "12"


def test_an_unknown_id_is_an_error_with_a_remedy(cli: Run, filled: Path) -> None:
    outcome = cli("requests", "--state-dir", filled, "--id", "req-none")
    assert outcome.code == 1 and "'req-none'" in outcome.err and "appliance requests" in outcome.err


@pytest.mark.parametrize(("flag", "value"), [("--since", "yesterdayish"), ("--status", "fine")])
def test_an_invalid_value_is_named_with_its_option(cli: Run, filled: Path, flag: str, value: str) -> None:
    outcome = cli("requests", "--state-dir", filled, flag, value)
    assert outcome.code == 2
    assert flag in outcome.err and repr(value) in outcome.err and "Traceback" not in outcome.err


def test_the_log_is_found_through_the_run_directory_after_the_service_has_stopped(
    cli: Run, databases: Path, run_dir: Path
) -> None:
    RunDirLock(run_dir, databases).release()
    assert ids(cli("requests", "--run-dir", run_dir, "--json").out) == ["req-1"]


def test_if_no_service_has_ever_run_the_missing_log_is_named(cli: Run, tmp_path: Path) -> None:
    outcome = cli("requests", "--state-dir", tmp_path / "none")
    assert outcome.code == 1 and str(tmp_path / "none" / "history.db") in outcome.err


def test_a_log_without_rows_is_not_an_error(cli: Run, history: History, tmp_path: Path) -> None:
    assert cli("requests", "--state-dir", tmp_path, "--json").out == "[]\n"
    outcome = cli("requests", "--state-dir", tmp_path)
    assert (outcome.code, outcome.out) == (0, "") and "No matching requests" in outcome.err


def test_a_file_that_is_not_a_database_is_reported_in_one_line(cli: Run, tmp_path: Path) -> None:
    (tmp_path / "history.db").write_text("not a database, " * 100)
    outcome = cli("requests", "--state-dir", tmp_path)
    assert outcome.code == 1 and "history.db" in outcome.err and len(outcome.err.splitlines()) == 1


def test_follow_prints_requests_as_they_end_and_each_once(history: History, tmp_path: Path) -> None:
    log = history.log
    log.end(a_row("req-before"))
    log.open(a_row("req-long", finished_at=None, status=None))
    history.flush()
    follower = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "appliance.cli",
            "requests",
            "--follow",
            "--json",
            "--state-dir",
            str(tmp_path),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert follower.stdout is not None and follower.stderr is not None
    try:
        seen = [json.loads(follower.stdout.readline()) for _ in range(2)]
        log.open(a_row("req-open", finished_at=None, status=None))
        log.end(a_row("req-long"))
        log.end(a_row("req-after", status=500, error="it broke"))
        seen += [json.loads(follower.stdout.readline()) for _ in range(2)]
    finally:
        os.kill(follower.pid, 2)
    assert [(row["request_id"], row["state"]) for row in seen] == [
        ("req-before", "ended"),
        ("req-long", "open"),
        ("req-long", "ended"),
        ("req-after", "ended"),
    ]
    assert follower.wait(60) == 130
    assert follower.stdout.read() == "" and follower.stderr.read() == ""


def test_a_request_that_ends_between_two_polls_is_shown_once(history: History, tmp_path: Path) -> None:
    history.log.end(a_row("req-both"))
    history.log.end(a_row("req-new"))
    history.flush()
    log = FileLog(tmp_path / "history.db")
    (both,) = log.newest(RequestLogQuery(request_id="req-both"), 1).rows
    # The list already shows req-both as finished, but the log position from which the command follows
    # precedes the end of that request.
    changes = log.follow(RequestLogQuery(), 0)
    assert next(unseen(changes, {"req-both": both})).request_id == "req-new"


def test_follow_with_a_filter_shows_only_what_matches(history: History, tmp_path: Path) -> None:
    log = history.log
    follower = subprocess.Popen(
        [
            *(sys.executable, "-m", "appliance.cli", "requests", "-f", "--failed", "--model", "other"),
            *("--state-dir", str(tmp_path)),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert follower.stdout is not None
    try:
        assert follower.stdout.readline().startswith("TIME")
        log.end(a_row("req-fine", model="other"))
        log.end(a_row("req-elsewhere", status=500))
        log.end(a_row("req-wanted", model="other", status=500, error="the disk burns"))
        line = follower.stdout.readline()
        assert "req-wanted" in line and "other" in line and line.endswith("the disk burns\n")
    finally:
        os.kill(follower.pid, 2)
        follower.wait(60)


@pytest.mark.parametrize("width", [80, 120])
def test_a_log_that_is_followed_from_its_first_row_fits_the_terminal(
    history: History, tmp_path: Path, width: int
) -> None:
    error = "the replica died " * 9
    history.log.end(a_row("req-" + "8" * 24, model="a-model-with-a-long-name", ttft_ms=12.5, error=error))
    history.flush()
    (row,) = RequestReader(tmp_path / "history.db").changes(0)
    layout = Layout(_COLUMNS, [_MIN_CELLS], width)
    line = layout.line(_cells(named(row)))
    assert cells(line) <= width
    # Numbers and their column headings are right-aligned.
    assert line[: layout.heading().index(" OUT") + 4].endswith(" 17")


@pytest.mark.parametrize("width", [40, 80, 120, 240])
def test_a_table_never_exceeds_the_terminal_and_keeps_the_important_columns(width: int) -> None:
    row = [printable("模型" * 20 if column.flexible else "12345") for column in _COLUMNS]
    layout = Layout(_COLUMNS, [row], width)
    if width >= 80:
        assert cells(layout.line(row)) <= width
    assert "REQUEST"[:6] in layout.heading() and "STATUS" in layout.heading()


@pytest.mark.parametrize(
    ("text", "width", "short"),
    [
        ("abcdef", 6, "abcdef"),
        ("abcdefg", 6, "abcde…"),
        ("/long/path", 6, "…/path"),
        ("模型模型", 5, "模型…"),
    ],
)
def test_text_that_is_cut_is_marked(text: str, width: int, short: str) -> None:
    assert shorten(text, width) == short
    assert cells(shorten(text, width)) <= width


def test_a_conversation_is_shown_as_messages_without_control_characters(
    cli: Run, admin: AdminService, run_dir: Path
) -> None:
    conversation = '[{"role":"system","content":"Be\\nbrief"},{"role":"user","content":"\\u001b[2J hi"}]'
    texts = [
        KeptText(part="prompt", number=0, sha256="ab" * 32, bytes=1234, text=conversation, redactions=1),
        KeptText(part="answer", number=0, sha256="cd" * 32, bytes=5, text="Hello", truncated=True),
    ]
    admin.contents = Contents(request_id="req-1", tenant="acme", created_at=1.79e9, goes_at=None, texts=texts)
    code, out, _ = cli("requests", "show", "req-1", "--run-dir", run_dir)
    assert code == 0 and admin.actions == [("requests.show", {"request_id": "req-1"})]
    lines = out.splitlines()
    assert lines[0].startswith("req-1 of tenant acme, ") and lines[0].endswith("; kept forever")
    assert f"prompt 0: 1,234 bytes, sha256 {'ab' * 32}; 1 secret removed" in lines
    assert "[system] Be" in lines and "brief" in lines and "[user]  [2J hi" in lines
    assert f"answer 0: 5 bytes, sha256 {'cd' * 32}; truncated" in lines and lines[-1] == "Hello"
    assert (
        json.loads(cli("requests", "show", "req-1", "--run-dir", run_dir, "--json").out)["texts"][1]["bytes"]
        == 5
    )
