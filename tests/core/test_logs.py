"""What the log takes."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from appliance import logs


@pytest.fixture
def untouched() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in (None, "store.heads", "asyncio", "httpx")]
    levels, handlers = [logger.level for logger in loggers], loggers[0].handlers[:]
    yield
    loggers[0].handlers[:] = handlers
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.mark.usefixtures("untouched")
def test_heads_of_the_audit_chain_are_in_the_log_at_every_level(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure_logging("error")
    logging.getLogger("store.heads").info("audit head seq=1")
    logging.getLogger("store.trail").info("nothing of this")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].endswith("INFO    heads: audit head seq=1")
