"""Tests of doctor's findings in a live console."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from console.live import LiveSource
from console.source import UnsupportedListError
from tests.core.conftest import Service, make_service  # noqa: F401

pytestmark = pytest.mark.system


def test_findings_are_those_of_doctor_and_only_of_this_machine(
    make_service: Callable[..., Service],  # noqa: F811
) -> None:
    service = make_service()
    service.start()
    service.wait_ready()

    async def read() -> None:
        source = LiveSource(service.run_dir)
        with pytest.raises(UnsupportedListError, match="run appliance doctor there"):
            await source.rows("findings")  # the source has not received a snapshot yet
        while not (await source.next()).host.name:
            pass
        rows = await source.rows("findings")
        assert {"versions", "service", "databases"} <= {row.actor for row in rows}
        assert {row.level for row in rows} <= {"ok", "warning", "problem"}
        assert await source.rows("findings") is rows  # findings are reused for one minute
        source._host = "elsewhere"
        with pytest.raises(UnsupportedListError, match="the service runs on elsewhere"):
            await source.rows("findings")
        await source.close()

    asyncio.run(read())
