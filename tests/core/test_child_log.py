"""Tests, with real processes, of the log lines that the core keeps from fronts and replicas."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator

import pytest

from appliance.core.log_lines import MAX_LINES, LogLines, is_of
from appliance.pages import LogLine, LogQuery
from engine import child_log
from engine.child_log import ChildLog
from engine.logs import MAX_MESSAGE_CHARS


@pytest.fixture
def lines() -> Iterator[LogLines]:
    kept = LogLines()
    kept.attach()
    yield kept
    kept.close()


def of(lines: LogLines, process: str) -> list[LogLine]:
    return lines.page(LogQuery(process=process, limit=1000)).lines


def ran(script: str) -> str:
    """Run a script as a child process whose log lines are copied, and return its standard error."""

    async def run() -> str:
        log = ChildLog("front-3.1")
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script)],
            pass_fds=(log.descriptor,),
            env={**os.environ, **log.environment},
            stderr=subprocess.PIPE,
        )
        log.listen()
        _, written = await asyncio.to_thread(process.communicate)
        log.finish()
        return written.decode()

    return asyncio.run(run())


SETUP = """
import logging, os, subprocess, sys
from appliance.host.logs import configure_logging
configure_logging("info", "front-3.1")
log = logging.getLogger("appliance.front.gate")
"""


def test_the_lines_of_a_child_are_kept_with_its_name_and_standard_error_is_unchanged(lines: LogLines) -> None:
    written = ran(
        SETUP
        + textwrap.dedent("""
        log.warning("over the limit: %d\\nsecond row", 7)
        log.debug("not at this level")
        try:
            raise ValueError("wrong value")
        except ValueError:
            log.exception("it failed")
        """)
    )
    first, second = of(lines, "front-3.1")
    assert (first.process, first.level, first.area) == ("front-3.1", "warning", "gate")
    assert first.message == "over the limit: 7\nsecond row"
    assert second.level == "error" and second.message.endswith("ValueError: wrong value")
    assert "WARNING front-3.1 gate: over the limit: 7\nsecond row\n" in written
    assert '"at"' not in written


def test_the_lines_before_a_crash_are_kept(lines: LogLines) -> None:
    ran(SETUP + "for number in range(500): log.info('line %d', number)\nraise SystemExit('unhandled')")
    assert [line.message for line in of(lines, "front-3.1")] == [f"line {number}" for number in range(500)]


def test_a_process_of_the_child_does_not_get_the_pipe(lines: LogLines) -> None:
    ran(
        SETUP
        + textwrap.dedent("""
        code = "import os; print(os.listdir('/proc/self/fd'), 'APPLIANCE_LOG_DESCRIPTOR' in os.environ)"
        answer = subprocess.run([sys.executable, "-c", code], capture_output=True, close_fds=False, text=True)
        log.info("child: %s", answer.stdout.strip())
        """)
    )
    assert of(lines, "front-3.1")[0].message == "child: ['0', '1', '2', '3'] False"


def test_a_core_that_does_not_read_delays_neither_the_child_nor_its_standard_error(lines: LogLines) -> None:
    async def run() -> tuple[int, bytes]:
        log = ChildLog("front-0")
        script = SETUP + "for number in range(3000): log.info('line %d of a child', number)\nprint('done')"
        process = subprocess.Popen(
            [sys.executable, "-c", script],
            pass_fds=(log.descriptor,),
            env={**os.environ, **log.environment},
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        # Nothing reads the pipe. It holds 64 KiB, which is less than a thousand records.
        output, written = await asyncio.to_thread(process.communicate)
        assert output == b"done\n"
        assert written.count(b"\n") == 3000
        log.finish()
        return process.returncode, written

    code, _ = asyncio.run(run())
    assert code == 0
    assert 100 < len(of(lines, "front-0")) < 3000


def test_a_flood_is_read_in_portions_and_a_line_without_end_is_dropped(
    lines: LogLines, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks: list[int] = []
    read = os.read

    def counted(descriptor: int, size: int) -> bytes:
        chunks.append(size)
        return read(descriptor, size)

    monkeypatch.setattr(child_log.os, "read", counted)

    async def run() -> None:
        log = ChildLog("front-0")
        writer = os.dup(log.descriptor)
        os.set_blocking(writer, True)
        log.listen()
        record = b'{"at":1.0,"level":20,"area":"gate","message":"after the flood"}\n'
        hostile = [
            b'{"at":-1,"level":20,"area":"","message":""}\n',
            b'{"at":1e300,"level":20,"area":"gate","message":"from the future"}\n',
            b"\xff\xfe\n",
            b'{"at":1.0,"level":20,"area":"x","message":"' + b"y" * 5000 + b'"}\n',
        ]
        data = b"x" * (20 * child_log.READ_BYTES) + b"\n" + b"".join(hostile) + record

        def write() -> None:
            with open(writer, "wb") as file:
                file.write(data)

        thread = threading.Thread(target=write)
        thread.start()
        began = asyncio.get_running_loop().time()
        while not lines.page(LogQuery(text="after the flood")).lines:
            await asyncio.sleep(0.02)
        assert asyncio.get_running_loop().time() - began >= 0.5
        assert len(log._unread) <= child_log.READ_BYTES
        thread.join()
        log.close()

    asyncio.run(run())
    assert set(chunks) == {child_log.READ_BYTES}
    future, last = sorted(of(lines, "front-0"), key=lambda line: line.message, reverse=True)
    assert (future.message, last.message) == ("from the future", "after the flood")
    assert future.at < 4e9


def test_the_newest_lines_of_all_processes_are_kept_and_long_ones_are_cut(lines: LogLines) -> None:
    log = logging.getLogger("appliance.core.test")
    log.warning("z" * (MAX_MESSAGE_CHARS + 5))
    assert lines.page(LogQuery()).lines[-1].message == "z" * MAX_MESSAGE_CHARS + "… (5 characters omitted)"
    for number in range(MAX_LINES + 10):
        log.warning("line %d", number)
    page = lines.page(LogQuery(limit=1000))
    assert page.number - page.first == MAX_LINES - 1
    assert page.lines[-1].message == f"line {MAX_LINES + 9}" and page.lines[-1].process == "core"


@pytest.mark.parametrize(
    ("process", "wanted", "expected"),
    [
        ("front-1", "front-1", True),
        ("front-1.2", "front-1", True),
        ("front-10", "front-1", False),
        ("llama-0 rank 3", "llama-0", True),
        ("llama-0 rank 3", "llama-0 rank 3", True),
        ("llama-0 rank 3", "llama-0 rank 2", False),
        ("core", "front-1", False),
    ],
)
def test_a_name_selects_its_process_with_ranks_and_restarts(
    process: str, wanted: str, expected: bool
) -> None:
    assert is_of(process, wanted) is expected


def test_a_page_is_in_the_order_of_time_even_if_a_childs_line_arrives_late(lines: LogLines) -> None:
    for at, text in ((2.0, "core's line"), (1.0, "earlier line of a front"), (3.0, "last line")):
        record = logging.LogRecord("x", logging.WARNING, "", 0, text, None, None)
        record.created = at
        lines.emit(record)
    texts = [line.message for line in lines.page(LogQuery()).lines]
    assert texts == ["earlier line of a front", "core's line", "last line"]
    assert lines.page(LogQuery(until=1.5)).lines[0].message == "earlier line of a front"
    assert [line.number for line in lines.page(LogQuery(after=1)).lines] == [2, 3]
