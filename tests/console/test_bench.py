"""Tests of the console benchmark."""

from __future__ import annotations

from console.bench import _MEASURED, Terminal
from console.lines import plain
from console.session import ConsoleSession
from tests.console.frames import source


def frame(made: ConsoleSession) -> bytes:
    return "\n".join(plain(row) for row in made.lines(120, 40)).encode()


def test_the_time_to_the_first_frame_ends_with_a_measured_value() -> None:
    fake = source()
    made = ConsoleSession(fake)
    # The first frames show the tabs and the reason why there is no data yet.
    assert b"Overview" in frame(made) and not _MEASURED.search(frame(made))
    made.fail("the service does not answer")
    assert not _MEASURED.search(frame(made))
    snapshot = fake.step()
    made.accept(snapshot)
    found = _MEASURED.search(frame(made))
    assert found is not None and f" {snapshot.queue.running} running".encode() in found[0]


def test_the_benchmark_finds_the_measured_value_in_the_output_of_a_console() -> None:
    terminal = Terminal("appliance.cli", "console", "--demo", "--theme", "ansi")
    try:
        terminal.wait_for(_MEASURED)
    finally:
        terminal.close()
