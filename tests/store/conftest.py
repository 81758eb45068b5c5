from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from store.control import ControlStore
from store.requests import RequestLog, RequestReader, RequestRow
from store.schemas import HISTORY
from store.writer import Writer
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]


class History:
    """An open request log in its own folder, with its writer and reader."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "history.db"
        self.writer = Writer(self.path, HISTORY, synchronous="NORMAL")
        self.writer.start()
        self.log = RequestLog(self.writer)
        self.reader = RequestReader(self.path)

    def close(self) -> None:
        self.writer.close()


@pytest.fixture
def control(tmp_path: Path) -> Iterator[ControlStore]:
    store = ControlStore(tmp_path / "control.db")
    store.start()
    yield store
    store.close()


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    opened = History(tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def open_history() -> Iterator[Callable[..., History]]:
    opened: list[History] = []

    def make(folder: Path) -> History:
        opened.append(History(folder))
        return opened[-1]

    yield make
    for one in opened:
        one.writer.close(timeout_s=0.1)


@pytest.fixture
def request_row() -> Callable[..., RequestRow]:
    def make(request_id: str = "req-1", **fields: object) -> RequestRow:
        known: dict[str, object] = {"created_at": 1_000_000.0, "endpoint": "/v1/completions", **fields}
        return RequestRow(request_id=request_id, **known)  # type: ignore[arg-type]

    return make


@pytest.fixture
def eventually() -> Callable[..., None]:
    return wait_until


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """Yield a folder that other users can access, unlike the folders that pytest creates."""
    folder = Path(tempfile.mkdtemp(prefix="store-"))
    folder.chmod(0o755)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


@pytest.fixture
def run_unprivileged() -> Callable[..., str]:
    """Return a function that runs Python source code as a user who cannot write root's files. The function
    returns the output."""

    def run(source: str, *arguments: object) -> str:
        # Import everything first, because the other user may not be able to read the interpreter's files.
        prelude = "import os, sqlite3, sys; from pathlib import Path; import store.database, store.requests\n"
        if os.geteuid() == 0:
            prelude += "os.setgroups([]); os.setegid(65534); os.seteuid(65534)\n"
        done = subprocess.run(
            [sys.executable, "-c", prelude + source, *map(str, arguments)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 1 MiB and yield its folder."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", mounted], capture_output=True
    ).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield mounted
    finally:
        subprocess.run(["umount", "--lazy", mounted], check=True)
