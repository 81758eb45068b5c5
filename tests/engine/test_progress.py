"""Tests of the measured durations of a replica's startup stages."""

from __future__ import annotations

from engine.progress import StageTimes
from engine.rank_messages import Progress


def test_the_time_between_reports_is_assigned_to_stages() -> None:
    times = iter([0.0, 1.0, 3.0, 6.0, 10.0, 15.0, 21.0])
    reports: list[Progress] = []
    stages = StageTimes(reports.append, lambda: next(times))
    sent = [
        Progress("start"),
        Progress("read", 5, 9, "bytes", "a.safetensors"),
        Progress("read", 9, 9, "bytes", "b.safetensors"),
        Progress("build", detail="compiling kernels"),
        Progress("warm up", 1, 1, "graphs", "decode steps"),
        Progress("ready"),
    ]
    for report in sent:
        stages(report)
    assert reports == sent
    assert str(stages) == (
        "start 3.0 s, read 7.0 s, build (compiling kernels) 5.0 s, warm up (decode steps) 6.0 s"
    )
