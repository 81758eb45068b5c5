"""Tests of the screens that show the host, its GPUs and replica processes."""

from __future__ import annotations

import re

import msgspec
import pytest

from appliance.history.pages import TelemetryColumns
from appliance.snapshot import Gpu, GpuProcess, Host
from console.history import History
from console.lines import plain
from console.screens import panels
from console.screens.gpus import GpusView
from console.screens.models import ModelRow, ModelsView
from tests.console.frames import context, session, unknown


def test_the_values_of_a_busy_host_fit_beside_the_other_panels() -> None:
    host = Host(
        name="h",
        cpu_percent=100.0,
        load_1m=20.4,
        memory_bytes=100,
        memory_used_bytes=24,
        disk_free_bytes=70 << 30,
    )
    snapshot = msgspec.structs.replace(unknown(), host=host)
    lines = panels.processes(context(snapshot), snapshot, 38, 8)
    assert plain(lines[1]) == "cpu 100% load 20.4 mem 24% free 70.0G"


@pytest.mark.parametrize(
    ("used", "text"),
    [
        (0, "-- used"),
        (1 << 31, "2.0G used, as predicted"),
        (3 << 30, "3.0G used, 50.0% more than predicted"),
        (1 << 30, "1.0G used, 50.0% less than predicted"),
    ],
)
def test_the_used_memory_of_a_replica_is_compared_with_the_prediction(used: int, text: str) -> None:
    made = session()
    snapshot = made.context.snapshot
    assert snapshot is not None
    model = snapshot.models[0]
    replica = msgspec.structs.replace(model.replicas[0], used_bytes=used, predicted_bytes=1 << 31)
    row = ModelRow(msgspec.structs.replace(model, replicas=[replica]))
    lines = [plain(one) for one in ModelsView().describe(row, made.context, 200)]
    assert re.search(rf"memory +{re.escape(text)}( |$)", "\n".join(lines), re.MULTILINE)


def test_the_recorded_use_of_a_gpu_is_not_shown_for_a_gpu_without_this_value() -> None:
    """A GPU that is split into MIG instances has no utilisation, so its history does not contain any."""
    made = session()
    snapshot = made.context.snapshot
    assert snapshot is not None
    split = msgspec.structs.replace(
        snapshot.gpus[0], utilization_percent=None, unsupported=["utilization_percent"]
    )
    made.context.snapshot = msgspec.structs.replace(snapshot, gpus=[split, snapshot.gpus[1]])
    made.context.history = History()
    metrics = {"at": [1000.0, 1001.0], "gpus[1].utilization_percent": [90.0, 100.0]}
    made.context.history.add_columns(
        TelemetryColumns(resolution_s=1, at=[1000.0, 1001.0], metrics=metrics)  # type: ignore[arg-type]
    )
    assert [point.gpus for point in made.context.history.points] == [{1: 90.0}, {1: 100.0}]
    made.run("glyphs block")
    made.run("screen gpus")
    lines = [plain(row) for row in made.lines(120, 40)]
    first, second = lines[next(at for at, text in enumerate(lines) if "Kernel time" in text) + 1 :][:2]
    assert "█" in second and "█" not in first


def test_a_process_is_foreign_only_if_the_processes_of_the_replica_are_known() -> None:
    made = session()
    snapshot = made.context.snapshot
    assert snapshot is not None
    gpu = msgspec.structs.replace(
        snapshot.gpus[0], replicas=["demo-0"], processes=[GpuProcess(pid=4711, name="python")]
    )
    view = GpusView()
    for replicas, text in ((["demo-0"], "replica unknown"), ([], "not part of the service")):
        row = msgspec.structs.replace(gpu, replicas=replicas)
        assert text in plain(view.describe(row, made.context, 100)[-1])


def test_a_value_that_a_gpu_does_not_support_differs_from_an_unknown_value() -> None:
    made = session()
    snapshot = made.context.snapshot
    assert snapshot is not None
    without = [name for name in Gpu.__struct_fields__ if name.endswith(("_w", "_c", "_mhz", "_s", "_xid"))]
    gpu = msgspec.structs.replace(snapshot.gpus[0], **dict.fromkeys(without), throttle_reasons=None)
    other = msgspec.structs.replace(gpu, number=1, unsupported=[*without, "throttle_reasons"])
    made.context.snapshot = msgspec.structs.replace(snapshot, gpus=[gpu, other])
    made.run("screen gpus")
    rows = [plain(row).split() for row in made.lines(120, 40)]
    first, second, *_ = (row for row in rows if gpu.replicas[0] in row)
    assert first.count("--") == second.count("n/a") == 6 and "n/a" not in first and "--" not in second
    for number, text in ((0, "--"), (1, "n/a")):
        made.run("move first")
        if number:
            made.run("move down")
        made.run("open")
        shown = " ".join(plain(row) for row in made.lines(120, 40))
        assert f"{text} of at most {text}" in shown
        made.run("back")
    overview = [plain(row) for row in panels.gpus(made.context, made.context.snapshot, 50)]
    assert " -- " in overview[1] and "n/a" not in overview[1]
    assert overview[2].count("n/a") == 2
