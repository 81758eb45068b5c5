"""Tests that no process of the service blocks if the reader of its standard error stops reading."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.system.attacks.reading import doctor, no_problem, problem
from tests.system.service import Forked
from tests.system.test_deaths import answer

pytestmark = pytest.mark.system


class Piped(Forked):
    """A service that writes its standard error to a pipe. The test can read the pipe or leave it unread."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.reader, self.writer = os.pipe()
        self.reading = threading.Event()
        self.reading.set()
        self.text = ""

    def start(self) -> Piped:
        words = ["serve", "--run-dir", str(self.run_dir), "--state-dir", str(self.state_dir)]
        self.log_path.touch()
        self.process = self._popen(
            words, stdin=subprocess.DEVNULL, stderr=self.writer, start_new_session=True
        )
        threading.Thread(target=self._read, daemon=True).start()
        self.wait_until(self.ready, 180, "the service to be ready")
        return self

    def _read(self) -> None:
        while chunk := os.read(self.reader, 1 << 16):
            self.text += chunk.decode(errors="replace")
            self.reading.wait()

    def stall(self) -> None:
        """Stop reading, and wait until the pipe is full."""
        self.reading.clear()
        before = self.text.count("filled by the test")
        os.write(self.writer, b"(filled by the test)\n")  # the reader receives this line and then stops
        self.wait_until(lambda: self.text.count("filled by the test") > before, 60, "the reader to stop")
        filler = os.open(f"/proc/self/fd/{self.writer}", os.O_WRONLY | os.O_NONBLOCK)
        try:
            while True:
                os.write(filler, b"\n" * 4096)
        except BlockingIOError:
            pass
        finally:
            os.close(filler)


@pytest.fixture
def running() -> Iterator[Piped]:
    folder = Path(tempfile.mkdtemp(prefix="appl-"))
    service = Piped(folder)
    try:
        yield service.start()
    finally:
        service.reading.set()
        service.process.kill()
        service.process.wait()
        os.close(service.writer)
        shutil.rmtree(folder, ignore_errors=True)


def test_a_stalled_reader_of_the_log_blocks_no_process(running: Piped) -> None:
    running.stall()
    front, rank = running.status()["fronts"][0]["pid"], running.replica()["pids"][0]
    running.key("logged")  # the core logs this action
    psutil.Process(front).kill()  # the core logs the killed front, and the new front logs its start
    psutil.Process(rank).kill()
    running.wait_until(
        lambda: running.replica()["restarts"] == 1 and running.ready(), 120, "the new processes to be ready"
    )
    assert all(answer(running) for _ in range(5))
    problem(running, "log", "standard error has not been read")
    assert any("standard error" in text for text in doctor(running))
    assert "logged" not in running.text
    running.reading.set()
    no_problem(running)
    for line in ("front-0.1 is ready", "keys.create"):
        running.wait_until(lambda line=line: line in running.text, 60, "the lines that waited")
    running.stall()
    assert answer(running)
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(120) == 0, "the service failed to stop in time while its log was not read"
