"""Tests of how the core stores the texts that fronts send: how many texts may wait to be written, how large
they may be, and when they are removed."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from appliance.channel.front_messages import Keep
from appliance.channel.identity import Identity
from appliance.core import contents
from appliance.core.contents import ContentKeeper
from appliance.core.housekeeping import Housekeeper
from appliance.host.memory_files import new_memory
from appliance.settings import LogSettings
from store import retention
from store.contents import Content, ContentLog, read_contents
from store.errors import StorageFaultError
from store.policies import Policies
from store.schemas import CONTENTS
from store.structs import KeptText
from store.writer import Writer


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[ContentKeeper]:
    writer = Writer(tmp_path / "contents.db", CONTENTS, synchronous="NORMAL")
    writer.start()
    keeper = ContentKeeper(writer, Policies, LogSettings)
    yield keeper
    keeper.close()
    writer.close()


def keep(keeper: ContentKeeper, request_id: str, data: bytes) -> None:
    identity = Identity(tenant="acme", log_policy="full")
    memory = new_memory("texts", data)
    keeper.keep(Keep(request_id=request_id, identity=identity, created_at=1.8e9), memory)
    os.close(memory)


def texts(size: int) -> bytes:
    """Return a message that contains one text and has a total size of `size` bytes."""
    empty = msgspec.msgpack.encode([KeptText("prompt", 0, "0" * 64, 0, "x" * 100_000)])
    text = "x" * (size - len(empty) + 100_000)
    return msgspec.msgpack.encode([KeptText("prompt", 0, "0" * 64, 0, text)])


def memory_files() -> int:
    """Return the number of open descriptors of memory files that hold texts."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # os.listdir also lists its own descriptor.
            found += os.readlink(f"/proc/self/fd/{name}").startswith("/memfd:texts")
    return found


def stored(keeper: ContentKeeper, request_id: str) -> bool:
    keeper.writer.flush()
    return bool(read_contents(keeper.writer.path, request_id))


def test_the_texts_of_a_request_are_dropped_and_counted_while_256_requests_wait(
    keeper: ContentKeeper, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read, may_read = contents.read_memory, threading.Event()

    def delayed(descriptor: int, max_bytes: int) -> bytes:
        may_read.wait()
        return read(descriptor, max_bytes)

    monkeypatch.setattr(contents, "read_memory", delayed)
    for number in range(258):
        keep(keeper, f"req-{number}", texts(100_001))
    held = memory_files()
    may_read.set()
    assert held == 256
    assert keeper.writer.state().dropped_rows == 2
    assert "too many requests are waiting to be stored" in caplog.text
    keeper.close()
    assert stored(keeper, "req-0") and stored(keeper, "req-255")
    assert not stored(keeper, "req-256") and not stored(keeper, "req-257")


def test_texts_are_dropped_and_counted_while_too_many_files_are_open(
    keeper: ContentKeeper, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_descriptor(descriptor: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as scarce:
        scarce.setattr(contents.os, "dup", no_descriptor)
        for number in range(256):
            keep(keeper, f"req-{number}", texts(100_001))
    assert keeper.writer.state().dropped_rows == 256
    assert "Too many open files" in caplog.text
    keep(keeper, "later", texts(100_001))
    keeper.close()
    assert stored(keeper, "later")


def test_texts_of_more_than_64_mib_are_dropped_and_counted(
    keeper: ContentKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("store.contents.MAX_WAITING_BYTES", 128 << 20)
    keep(keeper, "fits", texts(64 << 20))
    keep(keeper, "too long", texts((64 << 20) + 1))
    keeper.close()
    assert stored(keeper, "fits") and not stored(keeper, "too long")
    assert keeper.writer.state().dropped_rows == 1


def test_removed_texts_leave_the_log_even_if_the_disk_failed_after_the_first_batch(
    keeper: ContentKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, writer = LogSettings(contents_days=1.0), keeper.writer
    clock, settings = SimpleNamespace(jump_s=0.0), SimpleNamespace(log=log)
    housekeeper = Housekeeper(
        None,  # type: ignore[arg-type]
        writer,
        ContentKeeper(writer, Policies, lambda: log),
        lambda: settings,  # type: ignore[arg-type, return-value]
        clock,  # type: ignore[arg-type]
    )
    asyncio.run(housekeeper._remove_contents())
    row = Content(
        request_id="r",
        part="prompt",
        number=0,
        tenant="t",
        created_at=1.0,
        sha256="",
        bytes=8,
        text="a secret",
    )
    ContentLog(writer).keep([row])
    remove, batches = retention.remove_contents, [0]

    def fails_once(*arguments: object, **options: object) -> retention.Removed:
        batches[0] += 1
        if batches[0] == 2:
            raise StorageFaultError("the disk is full")
        return remove(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(retention, "remove_contents", fails_once)
    with pytest.raises(StorageFaultError):
        asyncio.run(housekeeper._remove_contents())
    asyncio.run(housekeeper._remove_contents())
    for suffix in ("", "-wal"):
        assert b"a secret" not in Path(f"{writer.path}{suffix}").read_bytes()
