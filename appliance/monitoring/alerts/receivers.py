"""Passes alerts to commands and webhooks, in a separate thread with a bounded queue, so that an unresponsive
receiver never delays the service."""

from __future__ import annotations

import contextlib
import logging
import queue
import subprocess
import threading
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from appliance.alert_rules import SEVERITIES, AlertSink
from appliance.snapshot import Alert, AlertEvent

log = logging.getLogger(__name__)

MAX_WAITING = 200
"""Maximum number of waiting deliveries. If there are more, the newest are dropped and counted."""
_FIRST_DELAY_S = 1.0


class Notification(msgspec.Struct, kw_only=True):
    """The data about an alert, as sent to receivers in JSON."""

    event: AlertEvent
    host: str
    alert: Alert


class DeliveryError(Exception):
    """Raised if a receiver did not accept an alert."""


class _Delivery(NamedTuple):
    sink: AlertSink
    body: bytes
    alert_id: str


class AlertReceivers:
    """Delivers alerts between `start` and `stop`. `send` may be called from any thread."""

    def __init__(
        self, host: str, sinks: Sequence[AlertSink] = (), first_delay_s: float = _FIRST_DELAY_S
    ) -> None:
        self.sinks = sinks
        self.dropped = 0
        """Number of deliveries dropped because too many were waiting."""
        self._host = host
        self._first_delay_s = first_delay_s
        self._queue: queue.Queue[_Delivery | None] = queue.Queue(MAX_WAITING)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="alert receivers", daemon=True)

    def start(self) -> None:
        """Start the thread that delivers alerts."""
        self._thread.start()

    def stop(self) -> None:
        """Stop delivering alerts. Waiting deliveries are dropped."""
        self._stopped.set()
        # If the queue is full, the thread stops after the current delivery.
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)

    def send(self, event: AlertEvent, alert: Alert) -> None:
        """Pass an alert to all receivers that accept its severity. Never blocks."""
        urgency = SEVERITIES.index(alert.severity)
        wanted = [sink for sink in self.sinks if urgency >= SEVERITIES.index(sink.severity)]
        if not wanted:
            return
        body = msgspec.json.encode(Notification(event=event, host=self._host, alert=alert))
        for sink in wanted:
            try:
                self._queue.put_nowait(_Delivery(sink, body, alert.id))
            except queue.Full:
                self.dropped += 1
                log.error(
                    "alert %s was not passed to %s, because %d deliveries are waiting",
                    alert.id,
                    name_of(sink),
                    MAX_WAITING,
                )

    def _run(self) -> None:
        while not self._stopped.is_set():
            delivery = self._queue.get()
            if delivery is None:
                return
            try:
                self._deliver(delivery)
            except Exception:
                log.exception("alert %s could not be passed to %s", delivery.alert_id, name_of(delivery.sink))

    def _deliver(self, delivery: _Delivery) -> None:
        sink, delay_s = delivery.sink, self._first_delay_s
        for attempt in range(1, sink.attempts + 1):
            try:
                deliver(sink, delivery.body)
                return
            except DeliveryError as error:
                log.warning(
                    "alert %s: attempt %d of %d to reach %s failed: %s",
                    delivery.alert_id,
                    attempt,
                    sink.attempts,
                    name_of(sink),
                    error,
                )
            if attempt == sink.attempts or self._stopped.wait(delay_s):
                return
            delay_s *= 2


def deliver(sink: AlertSink, body: bytes) -> None:
    """Pass an alert to a receiver. Blocks no longer than the receiver's time limit. Raises DeliveryError if
    the receiver does not accept the alert."""
    if sink.command:
        _run_command(sink, body)
    if sink.webhook:
        _post(sink, body)


def name_of(sink: AlertSink) -> str:
    """Return the receiver's name for messages, without the parts of its URL that may contain secrets."""
    if sink.command:
        return f"command {sink.command[0]}"
    parts = urlsplit(sink.webhook)
    return f"webhook {parts.scheme}://{parts.hostname or ''}"


def _run_command(sink: AlertSink, body: bytes) -> None:
    try:
        done = subprocess.run(
            sink.command,
            input=body,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=sink.timeout_s,
        )
    except subprocess.TimeoutExpired:
        raise DeliveryError(f"the command did not exit within {sink.timeout_s:g} s") from None
    except OSError as error:
        raise DeliveryError(f"the command could not be started: {error}") from error
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip()[-200:]
        raise DeliveryError(f"the command exited with code {done.returncode}: {said}")


def _post(sink: AlertSink, body: bytes) -> None:
    import http.client

    parts = urlsplit(sink.webhook)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=sink.timeout_s)
    try:
        path = parts.path or "/"
        headers = {"content-type": "application/json"}
        connection.request("POST", f"{path}?{parts.query}" if parts.query else path, body, headers)
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        raise DeliveryError(str(error) or type(error).__name__) from error
    finally:
        connection.close()
    if status >= 300:
        raise DeliveryError(f"the receiver answered with status {status}")
