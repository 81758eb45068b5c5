"""Tests of load progress: stages, rate and remaining time, and their display."""

from __future__ import annotations

import os
import pty
import time

from appliance.cli.status_line import load_line, loads_shown
from appliance.models.load_progress import LoadProgress, load_text
from appliance.protocol import LoadStatus, ReplicaStatus
from engine.rank_messages import Progress

GIB = 1 << 30


def test_the_rate_and_the_time_left_come_from_the_current_stage() -> None:
    load = LoadProgress(100.0)
    assert load_text(load.status(103.0)) == "start, for 3 s"
    load.report(Progress("read", 0, 15 * GIB, "bytes", "model-1.safetensors"), 104.0)
    assert load_text(load.status(104.1)) == "read 0% of 15.0 GiB"
    load.report(Progress("read", 6 * GIB, 15 * GIB, "bytes", "model-2.safetensors"), 107.0)
    status = load.status(107.0)
    assert (status.rate_per_s, status.left_s, status.detail) == (2 * GIB, 4.5, "model-2.safetensors")
    assert load_text(status) == "read 40% of 15.0 GiB, 2.0 GiB/s, 4 s left"
    load.report(Progress("convert", 0, 32, "layers"), 110.0)
    load.report(Progress("convert", 8, 32, "layers"), 112.0)
    assert load_text(load.status(112.0)) == "convert 25% of 32 layers, 6 s left"
    load.report(Progress("build", detail="compiling kernels"), 120.0)
    assert load_text(load.status(125.0)) == "build compiling kernels, for 5 s"


def test_the_log_gets_a_line_at_each_stage_and_every_ten_seconds() -> None:
    load = LoadProgress(0.0)
    assert load.report(Progress("start"), 1.0) == ""
    began = load.report(Progress("read", 0, GIB, "bytes", "a.safetensors"), 2.0)
    assert began == "read 1.0 GiB (a.safetensors); start took 2.0 s"
    assert load.report(Progress("read", GIB // 2, GIB, "bytes", "b.safetensors"), 7.0) == ""
    assert load.due(11.9) == ""
    assert load.due(12.0).startswith("read 50% of 1.0 GiB")
    assert load.due(12.1) == ""
    began = load.report(Progress("convert", 0, 2, "layers"), 21.0)
    assert began == "convert 2 layers; read of 1.0 GiB took 19.0 s"
    assert load.due(30.0) == "" and load.due(31.0) != ""


def test_a_line_has_a_bar_where_the_amount_of_work_is_known() -> None:
    known = LoadStatus(stage="read", done=1, total=4, unit="bytes")
    assert load_line("chat-0", "read 25%", known) == "chat-0 [####............] read 25%"
    unknown = LoadStatus(stage="build", detail="compiling kernels")
    assert load_line("chat-0", "build", unknown) == "chat-0 build"


def test_a_command_that_waits_draws_the_progress_and_removes_it() -> None:
    read = LoadStatus(stage="read", done=1, total=2, unit="bytes")
    loading = ReplicaStatus(name="chat-0", state="loading", detail="read 50%", load=read)
    ours, theirs = pty.openpty()
    shown = b""
    with os.fdopen(theirs, "w") as terminal:
        with loads_shown(lambda: [loading], terminal):
            while b"read 50%" not in shown:
                shown += os.read(ours, 4096)
        while not shown.endswith(b"\r\x1b[K"):
            shown += os.read(ours, 4096)
    os.close(ours)
    assert b"chat-0 [########........] read 50%" in shown


def test_a_service_that_does_not_answer_ends_the_display_and_not_the_command() -> None:
    def fail() -> list[ReplicaStatus]:
        raise OSError("no service")

    with loads_shown(fail):
        time.sleep(0.01)
