"""Tests of the metrics address: it is not set by default, it must be a loopback address unless
`metrics.public` is true, and a reload can change it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from appliance.actions.parameters import CreateTenant, DeleteTenant, ReloadConfig
from appliance.client import AdminError
from appliance.settings import Flags, SettingsError, load_settings
from tests.core.conftest import Service, read_answer, running_core
from tests.ports import free_port
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running_core(tmp_path_factory.mktemp("core")) as service:
        yield service


def scrape(port: int) -> str:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=600).text
    except httpx.TransportError:
        return ""


def listen_on(service: Service, address: str) -> None:
    before = service.config.read_text().partition("[metrics]")[0]
    service.config.write_text(before + (f'[metrics]\nlisten = "{address}"\n' if address else ""))
    service.admin.act(ReloadConfig())


def addresses(service: Service) -> list[str]:
    return [sock.address for sock in service.admin.status().sockets if sock.name == "metrics"]


@pytest.mark.system
def test_a_reload_opens_moves_and_closes_the_address_and_one_in_use_changes_nothing(
    running: Service,
) -> None:
    service, (first, second, taken) = running, [free_port() for _ in range(3)]
    assert addresses(service) == []
    listen_on(service, f"127.0.0.1:{first}")
    wait_until(lambda: "appliance_ready 1" in scrape(first))
    assert addresses(service) == [f"127.0.0.1:{first}"]
    with socket.socket() as other:
        other.bind(("127.0.0.1", taken))
        other.listen()
        with pytest.raises(AdminError, match=f"cannot listen on metrics.listen = 127.0.0.1:{taken} "):
            listen_on(service, f"127.0.0.1:{taken}")
    assert "appliance_ready 1" in scrape(first)
    listen_on(service, f"127.0.0.1:{second}")
    wait_until(lambda: "appliance_ready 1" in scrape(second))
    wait_until(lambda: not scrape(first))
    listen_on(service, "")
    wait_until(lambda: not scrape(second))
    assert addresses(service) == []


@pytest.mark.system
def test_a_deleted_tenant_leaves_the_metrics_and_its_last_requests_count_for_the_others(
    running: Service,
) -> None:
    service, port = running, free_port()
    listen_on(service, f"127.0.0.1:{port}")
    service.admin.act(CreateTenant(name="t"))  # the tenant of the fake front's requests
    read_answer(service.connect("m 3"))
    wait_until(lambda: 'appliance_tenant_requests_total{tenant="t",outcome="ok"} 1' in scrape(port))
    service.admin.act(DeleteTenant(name="t"))
    wait_until(lambda: 'tenant="t"' not in scrape(port))
    read_answer(service.connect("m 3"))
    wait_until(lambda: 'appliance_tenant_requests_total{tenant="_other",outcome="ok"} 1' in scrape(port))
    assert 'tenant="t"' not in scrape(port)
    listen_on(service, "")


@pytest.mark.parametrize("address", ["0.0.0.0:9464", "[::]:9464", "192.0.2.1:9464"])
def test_addresses_other_than_loopback_need_the_public_setting(tmp_path: Path, address: str) -> None:
    path = tmp_path / "appliance.toml"
    path.write_text(f'[metrics]\nlisten = "{address}"\n')
    with pytest.raises(SettingsError) as refused:
        load_settings(Flags(config=str(path)), {})
    for words in ("appliance.toml:2", "metrics.listen", address, "127.0.0.1:9464", "metrics.public = true"):
        assert words in str(refused.value)
    path.write_text(f'[metrics]\nlisten = "{address}"\npublic = true\n')
    assert load_settings(Flags(config=str(path)), {}).metrics.address() is not None


@pytest.mark.parametrize("address", ["127.0.0.1:9464", "127.8.8.8:1", "[::1]:9464", "localhost:9464"])
def test_loopback_addresses_are_accepted(tmp_path: Path, address: str) -> None:
    path = tmp_path / "appliance.toml"
    path.write_text(f'[metrics]\nlisten = "{address}"\n')
    assert load_settings(Flags(config=str(path)), {}).metrics.listen == address


def test_without_the_setting_there_is_no_listener() -> None:
    assert load_settings(Flags(), {}).metrics.address() is None
