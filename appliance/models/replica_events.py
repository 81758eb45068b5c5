"""Replica events. `appliance.models.replica_connections` handles them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from engine.rank_messages import Report

if TYPE_CHECKING:
    from appliance.models.replica import Replica


class ReplicaEvents(Protocol):
    """Receives a replica's events."""

    def replica_starting(self, replica: Replica) -> None:
        """Called before the replica's processes read the model's folder."""

    def replica_ready(self, replica: Replica) -> None:
        """Called when the replica has begun to accept submissions. `replica.account` is a new account."""

    def replica_reported(self, replica: Replica, report: Report) -> None:
        """Called for each of the replica's reports. A report contains the heartbeat, credits and finished
        submissions."""

    def replica_silence_changed(self, replica: Replica) -> None:
        """Called when a ready replica fails to report in time, and when it resumes reporting."""

    def replica_exited(self, replica: Replica) -> None:
        """Called when a ready replica has exited. `replica.account` is no longer valid."""

    def replica_changed(self, replica: Replica) -> None:
        """Called when a replica has exited and will be restarted. If `replica.failure` is set, an operator
        must fix the cause before a start can succeed."""

    def replica_problem(self, replica: Replica, description: str) -> None:
        """Called to report a problem to the operator."""
