"""Tests of the data that a live console requests from the service: the doctor's findings, the audit chain and
the silences."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from appliance.actions.parameters import CreateTenant, SilenceAlerts, UnsilenceAlerts
from console.live import LiveSource
from tests.audit_trail import forge
from tests.core.conftest import Service, running_core

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    settings = (
        '[alerts]\ndisabled = ["gpu-hot"]\n'
        '[[alerts.rules]]\nname = "quiet"\nmetric = "queue.running"\nbelow = 0\n'
        '[[alerts.rules]]\nname = "disk-full"\nmetric = "host.disk_free_bytes"\nbelow = 1e9'
    )
    with running_core(tmp_path_factory.mktemp("core"), settings) as service:
        yield service


def test_the_silences_of_a_service_are_listed_until_they_are_ended(service: Service) -> None:
    async def steps() -> None:
        source = LiveSource(service.run_dir, write=True)
        silence = await source.act(SilenceAlerts(rule="disk-*", reason="repair"))
        assert await source.rows("silences") == [silence]
        await source.act(UnsilenceAlerts(id=silence.id))  # type: ignore[attr-defined]
        assert await source.rows("silences") == []
        await source.close()

    asyncio.run(steps())


def test_the_alert_rules_in_effect_come_from_the_service(service: Service) -> None:
    async def steps() -> None:
        source = LiveSource(service.run_dir)
        names = [one.subject for one in await source.rows("rules")]  # type: ignore[union-attr]
        assert {"quiet", "disk-full", "replica-down"} < set(names)
        assert "gpu-hot" not in names and names.count("disk-full") == 1
        await source.close()

    asyncio.run(steps())


def test_findings_and_the_state_of_the_audit_chain_come_from_the_service(service: Service) -> None:
    service.admin.act(CreateTenant(name="acme"))

    async def read() -> None:
        source = LiveSource(service.run_dir)
        rows = await source.rows("findings")
        assert {"versions", "service", "databases"} <= {row.actor for row in rows}  # type: ignore[union-attr]
        assert {row.level for row in rows} <= {"ok", "warning", "problem"}  # type: ignore[union-attr]
        assert await source.rows("findings") is rows  # findings are reused for one minute
        report = await source.verify()
        assert report.ok and report.rows > 1
        forge(service.state_dir, "UPDATE audit SET actor = 'uid:9' WHERE seq = 2")
        report = await source.verify()
        assert not report.ok and report.broken_seq == 2
        await source.close()

    asyncio.run(read())
