from __future__ import annotations

import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from store.control import ControlStore
from store.schemas import CONTENTS
from store.writer import Writer

PAGE = Path(__file__).resolve().parents[2] / "docs" / "store.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.fixture
def state(history, request_row):
    history.log.end(request_row(finished_at=1_000_001.0, status=500, error="no", tenant="acme"))
    history.log.open(request_row("req-2"))
    history.writer.flush()
    control = ControlStore(history.path.with_name("control.db"))
    control.start()
    for number in range(3):
        control.create_key(actor="uid:0", name=f"schlüssel {number}", tenant="default").result(60)
    contents = Writer(history.path.with_name("contents.db"), CONTENTS, synchronous="NORMAL")
    contents.start()
    yield history.path.parent
    contents.close()
    control.close()


def test_the_queries_on_the_page_run(state):
    ran = 0
    for block in blocks("sql"):
        name = re.match(r"-- (\S+)\n", block)
        assert name is not None
        with closing(sqlite3.connect(f"file:{state / name[1]}?mode=ro", uri=True)) as connection:
            for statement in filter(None, map(str.strip, block.split(";"))):
                connection.execute(statement).fetchall()
                ran += 1
    assert ran >= 7


def test_the_chain_check_on_the_page_accepts_the_chain_and_finds_a_forgery(state):
    [source] = blocks("python")
    path = state / "control.db"

    def check() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", source, path], capture_output=True, text=True, timeout=600
        )

    assert check().stdout.startswith("3 rows, head ")
    with closing(sqlite3.connect(path, isolation_level=None)) as forger:
        forger.execute("DROP TRIGGER audit_rows_do_not_change")
        forger.execute("UPDATE audit SET actor = 'uid:7' WHERE seq = 2")
    assert check().stderr.strip() == "broken at row 2"


def test_the_page_documents_every_table_column_and_view(state):
    page = PAGE.read_text()
    for name in ("history.db", "control.db", "contents.db"):
        with closing(sqlite3.connect(f"file:{state / name}?mode=ro", uri=True)) as connection:
            objects = connection.execute(
                "SELECT name, type FROM sqlite_master "
                "WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite_%'"
            ).fetchall()
            for table, kind in objects:
                assert f"`{table}`" in page, table
                if kind == "table" and not table.startswith("_"):
                    for row in connection.execute(f"PRAGMA table_xinfo({table})"):
                        assert re.search(rf"^\| [^|]*`{row[1]}`", page, re.MULTILINE), f"{table}.{row[1]}"
