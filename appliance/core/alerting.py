"""Connects the running service's alert rules, alert manager, database and receivers."""

from __future__ import annotations

import logging
import socket
import time

from appliance.alert_rules import effective_rules
from appliance.monitoring.alerts.manager import AlertManager
from appliance.monitoring.alerts.receivers import AlertReceivers
from appliance.settings import Settings
from store.alerts import AlertLog, AlertReader
from store.errors import StoreError
from store.writer import Writer

log = logging.getLogger(__name__)


class Alerting:
    """The running service's alerts. All methods must be called on the event loop thread."""

    def __init__(self, settings: Settings, history: Writer) -> None:
        self._history = history
        self._receivers = AlertReceivers(socket.gethostname(), settings.alerts.sinks)
        rules = effective_rules(settings.alerts.rules, settings.alerts.disabled)
        self.manager = AlertManager(rules, AlertLog(history), self._receivers)

    def start(self) -> None:
        """Restore the previous run's alerts and start sending alerts to the receivers."""
        reader = AlertReader(self._history.path)
        try:
            self.manager.restore(reader.open(), reader.silences(time.time()))
        except StoreError as error:
            log.error("the previous run's alerts cannot be read: %s", error)
        self._receivers.start()

    def configure(self, settings: Settings) -> None:
        """Apply changed alert settings."""
        self.manager.set_rules(effective_rules(settings.alerts.rules, settings.alerts.disabled))
        self._receivers.sinks = settings.alerts.sinks

    def stop(self) -> None:
        """Stop sending alerts to the receivers."""
        self._receivers.stop()
