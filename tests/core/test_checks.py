"""Tests of the checks that the core runs in separate processes: the audit chain and doctor's findings."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from appliance import calls
from appliance.actions.parameters import CreateTenant
from appliance.admin.checks import CheckError, CheckRunner
from appliance.calls import AdminError
from appliance.client import AdminClient
from appliance.monitoring.check_process import MAX_PROBLEMS, verify_chain
from appliance.settings import Settings
from tests.audit_trail import forge
from tests.core.conftest import Service, running_core
from tests.core.test_read_api import key, raw

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running_core(tmp_path_factory.mktemp("core")) as service:
        for number in range(3):
            service.admin.act(CreateTenant(name=f"t{number}"))
        yield service


def test_a_read_key_verifies_the_chain_of_the_running_service(running: Service) -> None:
    reader = AdminClient(running.run_dir, key=key(running, "read"))
    report = reader.call(calls.verify_audit())
    with closing(sqlite3.connect(running.state_dir / "control.db")) as database:
        seq, digest = database.execute("SELECT seq, hash FROM audit ORDER BY seq DESC LIMIT 1").fetchone()
    assert (report.ok, report.rows, report.broken_seq, report.problems) == (True, seq, None, [])
    assert (report.head.seq, report.head.hash) == (seq, digest)
    assert report.heads >= 1 and report.path == str(running.state_dir / "control.db")
    assert "cannot read the journal" in (report.journal_missing or "")


def test_the_findings_are_those_of_doctor_and_are_reused_for_a_while(running: Service) -> None:
    reader = AdminClient(running.run_dir, key=key(running, "read"))
    found = reader.call(calls.findings())
    assert found.run_dir == str(running.run_dir) and found.state_dir == str(running.state_dir)
    assert {"versions", "directories", "service", "sockets", "databases"} <= {
        one.area for one in found.findings
    }
    assert [one.level for one in found.findings if one.subject == "audit chain"] == ["ok"]
    assert reader.call(calls.findings()).at == found.at


@pytest.mark.parametrize("path", ["/audit/verify", "/findings"])
def test_a_key_without_read_scope_runs_no_check(running: Service, path: str) -> None:
    assert raw(running, path, key(running, "inference")).status_code == 403


def test_a_rewritten_row_is_named_and_a_damaged_database_is_reported(tmp_path: Path) -> None:
    with running_core(tmp_path) as service:
        for number in range(3):
            service.admin.act(CreateTenant(name=f"t{number}"))
        forge(service.state_dir, "UPDATE audit SET actor = 'uid:9' WHERE seq = 3")
        report = service.admin.call(calls.verify_audit())
        assert (report.ok, report.rows, report.broken_seq) == (False, 2, 3)
        assert report.problems[0] == "row 3: rewritten: its hash does not match its content"
        heads = service.state_dir / "audit.heads"
        line = heads.read_text().splitlines()[0]
        heads.write_text(f"{line}\n" + f"{line[:-4]}beef\n" * (MAX_PROBLEMS + 5))
        flooded = verify_chain(service.state_dir).problems
        assert len(flooded) == MAX_PROBLEMS + 1 and flooded[-1].endswith("more problems")
        heads.unlink()
        (service.state_dir / "audit.spool").unlink()
        (service.state_dir / "audit.spool").mkdir()
        with pytest.raises(
            AdminError, match=r"the check failed \(/.*audit.spool.*run appliance audit verify on"
        ):
            service.admin.call(calls.verify_audit())


def checks(module: str, limit_s: float = 60.0) -> CheckRunner:
    settings = Settings(run_dir="/nonexistent", state_dir="/nonexistent")
    return CheckRunner(lambda: settings, f"tests.core.{module}", limit_s)


def test_callers_share_a_run_and_checks_run_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that records the start and the end of each of its runs stands in for the check."""
    monkeypatch.setenv("CHECK_LOG", str(tmp_path / "log"))

    async def ask() -> list[bytes]:
        made = checks("slow_check")
        return list(await asyncio.gather(made.verify(), made.findings(), made.verify(), made.findings()))

    answers = asyncio.run(ask())
    assert answers == [b'"audit"', b'"findings"'] * 2
    assert (tmp_path / "log").read_text().split() == ["begin", "end", "begin", "end"]


def test_a_check_that_takes_too_long_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHECK_SECONDS", "600")
    with pytest.raises(
        CheckError, match=r"took longer than 0.5 s: run appliance doctor on the service's machine"
    ):
        asyncio.run(checks("slow_check", 0.5).findings())


def test_a_service_stops_without_waiting_for_a_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHECK_SECONDS", "600")
    made = checks("slow_check", 600.0)

    async def stopped() -> None:
        asking = asyncio.ensure_future(made.verify())
        while made._process is None:
            await asyncio.sleep(0.02)
        made.close()
        with pytest.raises(CheckError, match="exit code -9"):
            await asking
        with pytest.raises(CheckError, match="the service is stopping"):
            await made.verify()

    asyncio.run(stopped())
