"""Tests of alerts in the real core, with fake fronts and replicas."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest

from appliance.actions.parameters import AcknowledgeAlert, SilenceAlerts, UnsilenceAlerts
from appliance.calls import ALERTS, SILENCES, AdminError
from appliance.snapshot import Alert, Snapshot
from store.alerts import AlertReader
from store.telemetry import RESOLUTIONS
from store.telemetry_reader import TelemetryReader
from tests.core.conftest import Service
from tests.waiting import wait_until

pytestmark = pytest.mark.system
Make = Callable[..., Service]


class Webhook:
    """A receiver of alerts on a loopback port."""

    def __init__(self) -> None:
        self.received: list[dict[str, Any]] = []
        received = self.received

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                received.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                self.send_response(204)
                self.end_headers()

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/alerts"


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    opened = Webhook()
    yield opened
    opened.server.shutdown()
    opened.server.server_close()


def kill_replica(service: Service) -> None:
    """Kill the replica, and prevent the restarted replica from becoming ready."""
    (service.folder / "m" / "fake.json").write_text('{"hang": true}')
    [pid] = service.admin.status().models[0].replicas[0].pids
    os.kill(pid, signal.SIGKILL)


def wait_until_sampled(service: Service) -> None:
    """Wait until the samples that alert rules evaluate contain the ready replica."""
    reader = TelemetryReader(service.state_dir / "history.db")

    def sampled() -> bool:
        recorded = reader.samples(0, time.time(), RESOLUTIONS[0])
        trees = [msgspec.convert(one.sample.tree(), Snapshot) for one in recorded]
        return any(replica.state == "ready" for one in trees[-1:] for replica in one.models[0].replicas)

    wait_until(sampled, description="a sample with the ready replica")


def alerts(service: Service, state: str) -> list[Alert]:
    return [alert for alert in service.admin.call(ALERTS) if alert.state == state]


def test_a_killed_replica_raises_one_alert_until_it_is_ready_again(
    make_service: Make, webhook: Webhook
) -> None:
    service = make_service(f'[[alerts.sinks]]\nwebhook = "{webhook.url}"\ntimeout_s = 60').start_and_wait()
    wait_until_sampled(service)
    kill_replica(service)
    wait_until(lambda: bool(alerts(service, "firing")))
    [alert] = alerts(service, "firing")
    assert (alert.rule, alert.where, alert.severity) == ("replica-down", "m-0", "critical")
    assert "was killed by SIGKILL" in alert.cause and "appliance status" in alert.remedy
    acknowledged = service.admin.act(AcknowledgeAlert(id=alert.id))
    assert isinstance(acknowledged, Alert) and acknowledged.state == "acknowledged"
    with pytest.raises(AdminError, match="already been acknowledged by uid:"):
        service.admin.act(AcknowledgeAlert(id=alert.id))
    with pytest.raises(AdminError, match="no active alert has id 'x'"):
        service.admin.act(AcknowledgeAlert(id="x"))
    (service.folder / "m" / "fake.json").unlink()
    wait_until(lambda: bool(alerts(service, "resolved")))
    assert [one.id for one in service.admin.call(ALERTS)] == [alert.id]
    wait_until(lambda: len(webhook.received) == 2)
    assert [(one["event"], one["alert"]["id"]) for one in webhook.received] == [
        ("raised", alert.id),
        ("ended", alert.id),
    ]
    # The service writes the log in a separate thread.
    wait_until(lambda: f"alert {alert.id} raised: replica-down" in service.log.read_text())
    actions = [row.action for row in service.audit()]
    assert actions.count("alerts.ack") >= 2
    assert service.stop() == 0
    [row] = AlertReader(service.state_dir / "history.db").between(0.0, time.time(), 10)
    assert row.id == alert.id and row.ended_at is not None and row.acknowledged_by.startswith("uid:")


def test_silences_and_lasting_alerts_survive_a_restart(make_service: Make, webhook: Webhook) -> None:
    service = make_service(f'[[alerts.sinks]]\nwebhook = "{webhook.url}"\ntimeout_s = 60').start_and_wait()
    wait_until_sampled(service)
    with pytest.raises(AdminError, match="no rule matches 'replca-lost': use one of"):
        service.admin.act(SilenceAlerts(rule="replca-lost"))
    service.admin.act(SilenceAlerts(rule="replica-*", for_s=3600.0, reason="maintenance"))
    kill_replica(service)
    wait_until(lambda: bool(alerts(service, "silenced")))
    [alert] = alerts(service, "silenced")
    assert service.process is not None
    wait_until(lambda: len(AlertReader(service.state_dir / "history.db").open()) == 1)
    service.process.kill()
    service.process.wait()
    service.start()
    wait_until(lambda: service.state() != "down")
    wait_until(lambda: [one.id for one in alerts(service, "silenced")] == [alert.id])
    [silence] = service.admin.call(SILENCES)
    assert (silence.rule, silence.subject, silence.reason) == ("replica-*", "*", "maintenance")
    service.admin.act(UnsilenceAlerts(id=silence.id))
    with pytest.raises(AdminError, match="no silence has id"):
        service.admin.act(UnsilenceAlerts(id=silence.id))
    assert [one.id for one in alerts(service, "firing")] == [alert.id]
    assert webhook.received == []
