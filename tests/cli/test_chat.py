"""Tests of `appliance chat`, both in scripts and in a real terminal, against an API on a real Unix socket."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.cli.chat_stream import events
from tests.cli.conftest import Run
from tests.cli.servers import ApiService, delta, open_stream, spoken, stream, usage, write_chunk

ROOT = Path(__file__).resolve().parents[2]


# ── server-sent events ──


@given(st.lists(st.text("a:\tß漢🙂\u2028")), st.data())
def test_events_do_not_depend_on_where_chunks_end(texts: list[str], data: st.DataObject) -> None:
    whole = b"".join(f": comment\r\nid: 7\r\ndata: {text}\r\n\r\n".encode() for text in texts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)))))
    chunks = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    assert list(events(chunks)) == texts


def test_lines_of_one_event_belong_together() -> None:
    assert list(events([b"data:one\ndata: two\n\n"])) == ["one\ntwo"]


def test_an_incomplete_event_is_ignored() -> None:
    assert list(events([b"data: whole\n\ndata: half"])) == ["whole"]


# ── one answer ──


def test_a_prompt_is_answered_and_nothing_else_is_printed(cli: Run, api: ApiService, run_dir: Path) -> None:
    outcome = cli("chat", "--run-dir", run_dir, "--system", "Be brief.", "--max-tokens", 9, "Hi")
    assert (outcome.code, outcome.out, outcome.err) == (0, "Hello.\n", "")
    (asked,) = api.asked
    assert asked["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]
    assert (asked["model"], asked["max_tokens"], asked["stream"]) == ("demo", 9, True)


def test_the_prompt_may_be_piped_in(api: ApiService, run_dir: Path) -> None:
    command = [sys.executable, "-m", "appliance.cli", "chat", "--run-dir", str(run_dir)]
    done = subprocess.run(
        command, cwd=ROOT, input=b"Gr\xc3\xbc\xc3\x9fe \xff\n", capture_output=True, timeout=600
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"Hello.\n", b"")
    assert api.asked[0]["messages"][0]["content"].startswith("Grüße ")


def test_a_character_split_across_chunks_arrives_whole(cli: Run, api: ApiService, run_dir: Path) -> None:
    whole = b"".join(spoken("Größe: ", "漢字", " 🙂"))
    api.script = lambda handler: stream(handler, *(bytes([byte]) for byte in whole))
    assert cli("chat", "--run-dir", run_dir, "Hi").out == "Größe: 漢字 🙂\n"


def test_another_model_can_be_selected_by_name(cli: Run, api: ApiService, run_dir: Path) -> None:
    cli("chat", "--run-dir", run_dir, "-m", "other", "Hi")
    assert api.asked[0]["model"] == "other"
    outcome = cli("chat", "--run-dir", run_dir, "-m", "none", "Hi")
    assert outcome.code == 1 and "'none'" in outcome.err and "demo, other" in outcome.err


def test_a_refusal_is_reported_in_one_line(cli: Run, api: ApiService, run_dir: Path) -> None:
    api.script = lambda handler: handler.answer(b'{"error": {"message": "the server is full"}}', 503)
    outcome = cli("chat", "--run-dir", run_dir, "Hi")
    assert (outcome.code, outcome.out, outcome.err) == (1, "", "appliance: the server is full (status 503)\n")


def test_an_error_in_the_stream_ends_the_answer_with_its_message(
    cli: Run, api: ApiService, run_dir: Path
) -> None:
    error = b'data: {"error": {"message": "the operator cancelled it"}}\n\n'
    api.script = lambda handler: stream(handler, delta("Hel"), error)
    outcome = cli("chat", "--run-dir", run_dir, "Hi")
    assert outcome.code == 1 and outcome.out.startswith("Hel")
    assert outcome.err == "appliance: the operator cancelled it\n"


@pytest.mark.parametrize("whole", [True, False], ids=["ends early", "breaks"])
def test_an_answer_that_stops_in_the_middle_is_a_failure(
    cli: Run, api: ApiService, run_dir: Path, whole: bool
) -> None:
    def script(handler: object) -> None:
        open_stream(handler)  # type: ignore[arg-type]
        write_chunk(handler, delta("Hel"))  # type: ignore[arg-type]
        if whole:
            handler.wfile.write(b"0\r\n\r\n")  # type: ignore[attr-defined]
        handler.close_connection = True  # type: ignore[attr-defined]

    api.script = script
    outcome = cli("chat", "--run-dir", run_dir, "Hi")
    assert (
        outcome.code == 1
        and ("incomplete" in outcome.err or "disconnected" in outcome.err)
        and "Traceback" not in outcome.err
    )


def test_an_empty_prompt_is_refused(cli: Run, run_dir: Path) -> None:
    outcome = cli("chat", "--run-dir", run_dir, " ")
    assert outcome.code == 1 and "the prompt is empty" in outcome.err


def test_without_a_service_chat_says_how_to_start_one(cli: Run, run_dir: Path) -> None:
    outcome = cli("chat", "--run-dir", run_dir, "Hi")
    assert outcome.code == 1 and f"appliance serve --run-dir {run_dir}" in outcome.err


# ── in a terminal ──


class Terminal:
    """`appliance chat` behind a pseudo-terminal."""

    def __init__(self, run_dir: Path, *words: str) -> None:
        self.fd, slave = os.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "appliance.cli", "chat", "--run-dir", str(run_dir), *words],
            cwd=ROOT,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
            env={**os.environ, "TERM": "dumb", "COLUMNS": "80"},
        )
        os.close(slave)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def press(self, keys: str, text: str) -> None:
        """Send the keys repeatedly until `text` appears. One attempt may not be enough: a signal that arrives
        just before a read starts does not interrupt the read."""
        for _ in range(10):
            self.type(keys)
            if self.appears(text, 6.0):
                break
        self.wait_for(text)

    def wait_for(self, text: str) -> None:
        """Read until `text` appears. The next call searches only the output after `text`."""
        assert self.appears(text, 60.0), f"{text!r} did not appear; the output is {self.seen!r}"
        self.seen = self.seen.partition(text)[2]

    def appears(self, text: str, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while text not in self.seen:
            if time.monotonic() > deadline:
                return False
            if select.select([self.fd], [], [], 0.1)[0]:
                try:
                    self.seen += os.read(self.fd, 65536).decode("utf-8", "replace")
                except OSError:
                    assert text in self.seen, (
                        f"{text!r} did not appear before the end; the output is {self.seen!r}"
                    )
        return True

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.fd)


@pytest.fixture
def terminal(api: ApiService, run_dir: Path) -> Iterator[Terminal]:
    opened = Terminal(run_dir)
    yield opened
    opened.close()


def test_a_conversation_remembers_until_it_is_reset(terminal: Terminal, api: ApiService) -> None:
    terminal.wait_for("Chatting with demo.")
    terminal.wait_for("> ")
    terminal.type("one\n")
    terminal.wait_for("Hello.")
    terminal.wait_for("1 tokens · ")
    terminal.wait_for("> ")
    terminal.type("two\n")
    terminal.wait_for("TTFT")
    terminal.type("/help\n")
    terminal.wait_for("Ctrl-C   cancel")
    terminal.type("/nonsense\n")
    terminal.wait_for("/nonsense is not a command")
    terminal.type("/reset\n")
    terminal.wait_for("Started a new conversation.")
    terminal.type("three\n")
    terminal.wait_for("TTFT")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.process.wait(60) == 0
    said = [[message["content"] for message in asked["messages"]] for asked in api.asked]
    assert said == [["one"], ["one", "Hello.", "two"], ["three"]]


def stream_until_stopped(api: ApiService) -> threading.Event:
    """Answer requests with a stream that continues until the returned event is set."""
    stop = threading.Event()

    def endless(handler: object) -> None:
        open_stream(handler)  # type: ignore[arg-type]
        while not stop.wait(0.02):
            write_chunk(handler, delta("word "))  # type: ignore[arg-type]

    api.script = endless
    return stop


def test_ctrl_c_cancels_the_answer_and_keeps_the_chat(terminal: Terminal, api: ApiService) -> None:
    stop = stream_until_stopped(api)
    terminal.wait_for("> ")
    terminal.type("go on for ever\n")
    terminal.wait_for("word word")
    terminal.type("\x03")
    terminal.wait_for("cancelled")
    assert api.client_left.wait(60), "the stream was not closed"
    stop.set()
    api.script = lambda handler: stream(handler, *spoken("Still ", "here."))
    terminal.wait_for("> ")
    terminal.type("and now?\n")
    terminal.wait_for("Still here.")
    roles = [message["role"] for message in api.asked[-1]["messages"]]
    assert roles == ["user", "assistant", "user"]
    terminal.wait_for("> ")
    terminal.type("half a line")
    terminal.wait_for("half a line")
    terminal.press("\x03", "> ")
    terminal.type("\x04")
    assert terminal.process.wait(60) == 0


def test_a_failed_answer_is_reported_and_can_be_requested_again(terminal: Terminal, api: ApiService) -> None:
    api.script = lambda handler: handler.answer(b'{"error": {"message": "the server is full"}}', 503)
    terminal.wait_for("> ")
    terminal.type("hello\n")
    terminal.wait_for("no answer: the server is full (status 503)")
    api.script = lambda handler: stream(handler, *spoken("Yes."))
    terminal.wait_for("> ")
    terminal.type("hello\n")
    terminal.wait_for("Yes.")
    assert [message["content"] for message in api.asked[-1]["messages"]] == ["hello"]


def test_an_answer_cannot_control_the_terminal(terminal: Terminal, api: ApiService) -> None:
    api.script = lambda handler: stream(
        handler, delta("a\x1b[2J\x07b\tc\nd"), delta(None, "length"), usage(4), b"data: [DONE]\n\n"
    )
    terminal.wait_for("> ")
    terminal.type("hello\n")
    terminal.wait_for("a[2Jb")
    terminal.wait_for("ended by length")


def test_ctrl_c_ends_a_single_answer_with_exit_code_130(api: ApiService, run_dir: Path) -> None:
    stop = stream_until_stopped(api)
    terminal = Terminal(run_dir, "go on")
    try:
        terminal.wait_for("word")
        terminal.type("\x03")
        assert terminal.process.wait(60) == 130
        assert api.client_left.wait(60)
        assert "Traceback" not in terminal.seen
    finally:
        stop.set()
        terminal.close()
