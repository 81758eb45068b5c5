"""Tests of alert receivers: commands and webhooks, with bounded retries and a bounded queue."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from appliance.alert_rules import AlertSink, faults_of_sink
from appliance.monitoring.alerts import receivers
from appliance.monitoring.alerts.receivers import AlertReceivers, DeliveryError, deliver
from appliance.snapshot import Alert
from tests.waiting import wait_until

ALERT = Alert(
    id="a1", rule="hot", severity="warning", state="firing", where="GPU 1", description="GPU 1 has 90 °C"
)
WRITE = "import sys, pathlib; pathlib.Path(sys.argv[1]).open('ab').write(sys.stdin.buffer.read() + b'\\n')"


@pytest.fixture
def started() -> Iterator[list[AlertReceivers]]:
    made: list[AlertReceivers] = []
    yield made
    for one in made:
        one.stop()


def receiver(started: list[AlertReceivers], *sinks: AlertSink) -> AlertReceivers:
    started.append(AlertReceivers("box", sinks, first_delay_s=0.01))
    started[-1].start()
    return started[-1]


def test_a_command_gets_the_alert_as_json(started: list[AlertReceivers], tmp_path: Path) -> None:
    path = tmp_path / "alerts"
    sink = AlertSink(command=[sys.executable, "-c", WRITE, str(path)], timeout_s=60)
    receiver(started, sink).send("raised", ALERT)
    wait_until(lambda: path.exists() and path.read_text().endswith("\n"))
    sent = json.loads(path.read_text())
    assert (sent["event"], sent["host"], sent["alert"]["description"]) == ("raised", "box", "GPU 1 has 90 °C")


def test_receivers_get_only_alerts_of_their_severity(started: list[AlertReceivers], tmp_path: Path) -> None:
    path = tmp_path / "alerts"
    sink = AlertSink(command=[sys.executable, "-c", WRITE, str(path)], severity="critical", timeout_s=60)
    one = receiver(started, sink)
    one.send("raised", ALERT)
    one.send(
        "raised",
        msgspec.structs.replace(ALERT, severity="critical"),
    )
    wait_until(lambda: path.exists() and path.read_text().endswith("\n"))
    assert len(path.read_text().splitlines()) == 1


def test_a_failing_receiver_is_tried_a_bounded_number_of_times(
    started: list[AlertReceivers], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tries"
    script = f"{WRITE}; sys.exit('no')"
    sink = AlertSink(command=[sys.executable, "-c", script, str(path)], attempts=3, timeout_s=60)
    receiver(started, sink).send("raised", ALERT)
    wait_until(lambda: "attempt 3 of 3" in caplog.text)
    assert len(path.read_text().splitlines()) == 3
    assert "exited with code 1: no" in caplog.text


def test_a_receiver_that_does_not_answer_ends_after_its_time_limit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        sink = AlertSink(webhook=f"http://127.0.0.1:{server.getsockname()[1]}/x", timeout_s=0.2)
        with pytest.raises(DeliveryError, match="timed out"):
            deliver(sink, b"{}")
    with pytest.raises(DeliveryError, match=r"did not exit within 0\.2 s"):
        deliver(AlertSink(command=["sleep", "60"], timeout_s=0.2), b"{}")
    with pytest.raises(DeliveryError, match="could not be started"):
        deliver(AlertSink(command=["/nonexistent/program"]), b"{}")


def test_sending_never_blocks_and_drops_what_does_not_fit(started: list[AlertReceivers]) -> None:
    sink = AlertSink(command=["sleep", "600"], timeout_s=600)
    one = receiver(started, sink)
    # If the calls waited for the command, the test would time out.
    for _ in range(receivers.MAX_WAITING + 20):
        one.send("raised", ALERT)
    assert one.dropped >= 19


@pytest.mark.parametrize(
    ("sink", "description"),
    [
        (AlertSink(), "neither a command nor a webhook"),
        (AlertSink(command=["x"], webhook="http://127.0.0.1/"), "both a command and a webhook"),
        (AlertSink(webhook="ftp://127.0.0.1/"), "is not a URL"),
        (AlertSink(webhook="http://:80/"), "is not a URL"),
    ],
)
def test_an_invalid_receiver_is_refused(sink: AlertSink, description: str) -> None:
    [fault] = faults_of_sink(sink)
    assert description in fault.description
