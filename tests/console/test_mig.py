"""Tests of GPUs that are lost or split into MIG instances, rendered as lines without a terminal."""

from __future__ import annotations

import msgspec
import pytest

from appliance.snapshot import Gpu, MigInstance
from console.lines import plain
from console.session import ConsoleSession
from tests.console.frames import SIZES, session


def split(*instances: MigInstance) -> ConsoleSession:
    """Return a session in which the first GPU is split."""
    made = session()
    snapshot = made.context.snapshot
    assert snapshot is not None
    first, *others = snapshot.gpus
    first = msgspec.structs.replace(
        first,
        utilization_percent=None,
        unsupported=["utilization_percent"],
        mig_instances=list(instances),
    )
    made.accept(msgspec.structs.replace(snapshot, gpus=[first, *others]))
    return made


def with_failed_gpu() -> ConsoleSession:
    """Return a session in which the first GPU is lost."""
    made = session()
    snapshot = made.context.snapshot
    assert snapshot is not None
    gpus = [Gpu(number=0, name="", error="GPU is lost"), *snapshot.gpus[1:]]
    made.accept(msgspec.structs.replace(snapshot, gpus=gpus))
    return made


@pytest.mark.parametrize("size", [*SIZES, (59, 17)])
def test_the_row_of_a_lost_gpu_says_so(size: tuple[int, int]) -> None:
    made = with_failed_gpu()
    for screen in ("gpus", "overview"):
        made.run(f"screen {screen}")
        assert any(" ERR " in plain(row) for row in made.lines(*size)), screen


def test_the_details_of_a_lost_gpu_give_the_reason() -> None:
    made = with_failed_gpu()
    made.run("screen gpus")
    made.lines(120, 40)
    made.run("open")
    text = " ".join("\n".join(plain(row) for row in made.lines(120, 40)).split())
    assert "name GPU is lost" in text and "kernel time ERR" in text


@pytest.mark.parametrize("size", [*SIZES, (59, 17)])
def test_the_row_of_a_split_gpu_says_so(size: tuple[int, int]) -> None:
    made = split(MigInstance(name="NVIDIA H200 MIG 3g.71gb", memory_bytes=70 << 30, used_bytes=7 << 30))
    for screen in ("gpus", "overview"):
        made.run(f"screen {screen}")
        rows = [plain(row) for row in made.lines(*size)]
        assert any(" MIG " in row for row in rows), screen
        assert not any("n/a" in row.split("─")[0] and " MIG " in row for row in rows if "NVLINK" in row)


def test_the_details_of_a_split_gpu_list_its_instances() -> None:
    made = split(
        MigInstance(name="NVIDIA H200 MIG 3g.71gb", memory_bytes=70 << 30, used_bytes=7 << 30),
        MigInstance(name="NVIDIA H200 MIG 1g.18gb"),
    )
    made.run("screen gpus")
    made.lines(120, 40)
    made.run("open")
    text = " ".join("\n".join(plain(row) for row in made.lines(120, 40)).split())
    assert "NVIDIA H200 MIG 3g.71gb: 7.0G of 70.0G used · NVIDIA H200 MIG 1g.18gb: -- of -- used" in text
    assert "kernel time MIG" in text
    unsplit = split()
    unsplit.run("screen gpus")
    unsplit.lines(120, 40)
    unsplit.run("open")
    assert any("none: create instances" in plain(row) for row in unsplit.lines(120, 40))
