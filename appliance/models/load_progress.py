"""Computes a load's rate and remaining time from the replica's progress reports."""

from __future__ import annotations

from appliance.protocol import LoadStatus
from appliance.quantities import of_bytes, percent
from engine.rank_messages import Progress

_LOG_EVERY_S = 10.0
_MIN_RATE_S = 0.5
"""How long a loading stage must run before its rate is reported."""


class LoadProgress:
    """The progress of a starting replica. Times are in seconds on a monotonic clock."""

    def __init__(self, now: float) -> None:
        self._latest = Progress("start")
        self._stage_began = self._logged_at = now

    def report(self, progress: Progress, now: float) -> str:
        """Record a replica's progress report. Return a log line if the replica has begun a new stage,
        otherwise an empty string."""
        former, self._latest = self._latest, progress
        if progress.stage == former.stage:
            return ""
        seconds = now - self._stage_began
        self._stage_began = self._logged_at = now
        amount = f" of {_amount(former.total, former.unit)}" if former.total else ""
        return f"{self._begun()}; {former.stage}{amount} took {seconds:.1f} s"

    def due(self, now: float) -> str:
        """Return a log line about the load's progress if none has been logged for 10 seconds, otherwise an
        empty string."""
        if now - self._logged_at < _LOG_EVERY_S:
            return ""
        self._logged_at = now
        return load_text(self.status(now))

    def status(self, now: float) -> LoadStatus:
        """Return the replica's progress for operators."""
        latest, elapsed = self._latest, now - self._stage_began
        rate = latest.done / elapsed if elapsed >= _MIN_RATE_S else 0.0
        return LoadStatus(
            stage=latest.stage,
            detail=latest.detail,
            done=latest.done,
            total=latest.total,
            unit=latest.unit,
            elapsed_s=elapsed,
            rate_per_s=rate,
            left_s=(latest.total - latest.done) / rate if rate and latest.total else None,
        )

    def _begun(self) -> str:
        latest = self._latest
        amount = f" {_amount(latest.total, latest.unit)}" if latest.total else ""
        return f"{latest.stage}{amount}{f' ({latest.detail})' if latest.detail else ''}"


def load_text(status: LoadStatus) -> str:
    """Return a load's progress in one line, such as "read 43% of 15.0 GiB, 2.1 GiB/s, 4 s left"."""
    parts: list[str] = [status.stage]
    if status.total:
        parts[0] += f" {percent(status.done / status.total)} of {_amount(status.total, status.unit)}"
    else:
        parts[0] += f" {status.detail}" if status.detail else ""
        parts.append(f"for {status.elapsed_s:.0f} s")
    if status.unit == "bytes" and status.rate_per_s:
        parts.append(f"{of_bytes(status.rate_per_s)}/s")
    if status.left_s is not None:
        parts.append(f"{status.left_s:.0f} s left")
    return ", ".join(parts)


def _amount(count: int, unit: str) -> str:
    return of_bytes(count) if unit == "bytes" else f"{count:,} {unit}"
